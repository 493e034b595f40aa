//! The segment between netd and one worker: a submission ring, a completion ring, and whose they
//! are. The supervisor makes one for each pair of a netd generation and a worker generation, keeps
//! it while both live, and drops it after; each side maps it from a descriptor and takes its two
//! ends.

use std::io;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::layout::{LAYOUT_VERSION, RING_MAGIC, RingPairLayout, RingShared};
use super::ring::{Consumer, Producer};
use super::segment::{SegmentError, SmallSegment};
use super::sync::Ordering;
use serde::{Deserialize, Serialize};

use crate::ids::{Generation, GroupId, Rank, WorkerId, WorldSize};

/// Bytes of a ring segment.
pub const RING_PAIR_BYTES: usize = size_of::<RingPairLayout>();

/// Whose rings these are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingIdentity {
    /// The worker at one end.
    pub worker: WorkerId,
    pub worker_generation: Generation,
    /// The generation of netd at the other end.
    pub netd_generation: Generation,
}

/// Why a pair of rings could not be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// The segment could not be made or mapped.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The segment holds something else, or rings of another build.
    #[error(
        "the segment holds no rings of layout version {LAYOUT_VERSION}: magic {magic:#018x}, \
         version {version}"
    )]
    NoRings {
        /// Magic found.
        magic: u64,
        /// Layout version found.
        version: u64,
    },
    /// The rings belong to another worker or to other generations.
    #[error("the segment holds the rings of {found:?} instead of {expected:?}")]
    Stale {
        /// Whose rings were asked for.
        expected: RingIdentity,
        /// Whose rings these are.
        found: Box<RingIdentity>,
    },
}

/// A mapped pair of rings.
#[derive(Debug)]
pub struct RingPair {
    segment: SmallSegment,
}

/// netd's ends: it submits jobs and takes completions.
pub type NetdEnd = (Producer<RingHandle>, Consumer<RingHandle>);

/// The worker's ends: it takes jobs and posts completions.
pub type WorkerEnd = (Consumer<RingHandle>, Producer<RingHandle>);

impl RingPair {
    /// Makes an empty pair. Supervisor only. `name` is what `/proc/PID/maps` shows.
    ///
    /// # Errors
    /// [`PairError::Segment`] when the system refuses.
    pub fn create(name: &str, identity: &RingIdentity) -> Result<RingPair, PairError> {
        let pair = RingPair { segment: SmallSegment::create(name, RING_PAIR_BYTES)? };
        let header = &pair.layout().header;
        for (word, value) in [
            (&header.version, LAYOUT_VERSION),
            (&header.group, identity.worker.group.0.into()),
            (&header.rank, identity.worker.rank.0.into()),
            (&header.world_size, identity.worker.world_size.0.into()),
            (&header.worker_generation, identity.worker_generation.0.into()),
            (&header.netd_generation, identity.netd_generation.0.into()),
        ] {
            word.store(value, Ordering::Relaxed);
        }
        // SYNC POINT pair.magic: publishes the header to the load in open().
        header.magic.store(RING_MAGIC, Ordering::Release);
        Ok(pair)
    }

    /// Maps the pair that the supervisor made, which must be the one of `expected`.
    ///
    /// # Errors
    /// [`PairError::Segment`] when it cannot be mapped, [`PairError::NoRings`] or
    /// [`PairError::Stale`] when it is not what was meant.
    pub fn open(fd: OwnedFd, expected: &RingIdentity) -> Result<RingPair, PairError> {
        RingPair::checked(SmallSegment::open("sepal-rings", fd, RING_PAIR_BYTES)?, expected)
    }

    /// Maps the pair that this process made before it became another executable.
    ///
    /// # Errors
    /// As [`RingPair::open`].
    pub fn adopt(name: &str, fd: OwnedFd, expected: &RingIdentity) -> Result<RingPair, PairError> {
        RingPair::checked(SmallSegment::adopt(name, fd, RING_PAIR_BYTES)?, expected)
    }

    fn checked(segment: SmallSegment, expected: &RingIdentity) -> Result<RingPair, PairError> {
        let pair = RingPair { segment };
        let header = &pair.layout().header;
        // SYNC POINT pair.magic: after this load the header is visible; pairs with the store in
        // create().
        let magic = header.magic.load(Ordering::Acquire);
        let version = header.version.load(Ordering::Relaxed);
        if (magic, version) != (RING_MAGIC, LAYOUT_VERSION) {
            return Err(PairError::NoRings { magic, version });
        }
        let found = pair.identity();
        if found != *expected {
            return Err(PairError::Stale { expected: *expected, found: Box::new(found) });
        }
        Ok(pair)
    }

    /// Another descriptor of the segment, for the process at one end. Supervisor only.
    ///
    /// # Errors
    /// When the process is out of descriptors, or did not make the pair.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        self.segment.try_clone()
    }

    /// The two ends of netd. Call once in netd's process and in no other.
    pub fn netd_end(self) -> NetdEnd {
        let (submission, completion) = self.handles();
        (Producer::new(submission), Consumer::new(completion))
    }

    /// The two ends of the worker. Call once in the worker's process and in no other.
    pub fn worker_end(self) -> WorkerEnd {
        let (submission, completion) = self.handles();
        (Consumer::new(submission), Producer::new(completion))
    }

    fn handles(self) -> (RingHandle, RingHandle) {
        let pair = Arc::new(self);
        (
            RingHandle { pair: Arc::clone(&pair), direction: Direction::Submission },
            RingHandle { pair, direction: Direction::Completion },
        )
    }

    /// What the header says; numbers that do not fit their type are as wrong as any others and come
    /// out as the largest.
    fn identity(&self) -> RingIdentity {
        let header = &self.layout().header;
        let half = |value: u64| u16::try_from(value).unwrap_or(u16::MAX);
        let word = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        RingIdentity {
            worker: WorkerId {
                group: GroupId(half(header.group.load(Ordering::Relaxed))),
                rank: Rank(half(header.rank.load(Ordering::Relaxed))),
                world_size: WorldSize(half(header.world_size.load(Ordering::Relaxed))),
            },
            worker_generation: Generation(word(header.worker_generation.load(Ordering::Relaxed))),
            netd_generation: Generation(word(header.netd_generation.load(Ordering::Relaxed))),
        }
    }

    fn layout(&self) -> &RingPairLayout {
        // SAFETY: the segment has RING_PAIR_BYTES mapped, page-aligned bytes while `self` lives;
        // the layout is made of atomics alone, for which every content is valid and stores of other
        // processes are no data race.
        unsafe { self.segment.base().cast::<RingPairLayout>().as_ref() }
    }
}

/// One ring of a mapped pair; keeps the mapping.
#[derive(Debug)]
pub struct RingHandle {
    pair: Arc<RingPair>,
    direction: Direction,
}

#[derive(Clone, Copy, Debug)]
enum Direction {
    Submission,
    Completion,
}

impl Deref for RingHandle {
    type Target = RingShared;

    fn deref(&self) -> &RingShared {
        let layout = self.pair.layout();
        match self.direction {
            Direction::Submission => &layout.submission,
            Direction::Completion => &layout.completion,
        }
    }
}

#[cfg(test)]
mod tests;
