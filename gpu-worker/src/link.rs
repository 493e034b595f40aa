//! One end of a pair of rings, as the executor uses it: submissions, completions, the arena and the
//! doorbells, all of one netd generation. A new netd brings a new link, and everything of the old
//! one is dropped with it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use shared::control::LinkInit;
use shared::ids::{Generation, WorkerId};
use shared::shm::arena::ArenaMap;
use shared::shm::doorbell::Doorbell;
use shared::shm::pair::{PairError, RingHandle, RingIdentity, RingPair};
use shared::shm::ring::{Consumer, Producer};
use shared::shm::segment::{MemfdSegment, SegmentError};

/// An open link.
#[derive(Debug)]
pub struct NetdLink {
    /// This worker: its group, rank and world size.
    pub worker: WorkerId,
    /// Generation of netd at the other end.
    pub netd_generation: Generation,
    /// Generation of this worker.
    pub worker_generation: Generation,
    /// Jobs come from here.
    pub submissions: Consumer<RingHandle>,
    /// Answers go here.
    pub completions: Producer<RingHandle>,
    /// Rung when jobs are pushed, and by the control thread.
    pub submission_bell: Doorbell,
    /// Rung when answers are pushed.
    pub completion_bell: Doorbell,
    /// Where bodies and tensors lie.
    pub arena: Arc<ArenaMap>,
}

/// Descriptors that come with a link: arena, rings, submission doorbell, completion doorbell.
pub const LINK_DESCRIPTORS: usize = 4;

/// Why a link could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The rings are not the ones that were meant.
    #[error("cannot open the rings")]
    Rings(#[from] PairError),
    /// The arena cannot be mapped.
    #[error("cannot map the arena")]
    Arena(#[from] SegmentError),
    /// A doorbell is none.
    #[error("cannot open a doorbell")]
    Doorbell(#[from] std::io::Error),
    /// The message came with another number of descriptors, or for another worker.
    #[error("link of worker generation {got} for generation {want} with {descriptors} descriptors")]
    Mismatch {
        /// Generation in the message.
        got: Generation,
        /// Generation of this process.
        want: Generation,
        /// Descriptors that came.
        descriptors: usize,
    },
}

impl NetdLink {
    /// Opens what `init` and its descriptors name.
    ///
    /// # Errors
    /// [`LinkError`]; nothing stays open.
    pub fn open(
        init: &LinkInit,
        worker: WorkerId,
        generation: Generation,
        descriptors: Vec<OwnedFd>,
    ) -> Result<NetdLink, LinkError> {
        let count = descriptors.len();
        let mismatch = || LinkError::Mismatch {
            got: init.worker_generation,
            want: generation,
            descriptors: count,
        };
        let [arena, rings, submission, completion] =
            <[OwnedFd; LINK_DESCRIPTORS]>::try_from(descriptors).map_err(|_| mismatch())?;
        let arena_bytes = usize::try_from(init.arena_bytes).map_err(|_| mismatch())?;
        if init.worker_generation != generation {
            return Err(mismatch());
        }
        let identity = RingIdentity {
            worker,
            worker_generation: generation,
            netd_generation: init.netd_generation,
        };
        let (submissions, completions) = RingPair::open(rings, &identity)?.worker_end();
        let arena = ArenaMap::map(&MemfdSegment::from_fd("sepal-arena", arena, arena_bytes)?)?;
        let arena = Arc::new(arena);
        Ok(NetdLink {
            worker,
            netd_generation: init.netd_generation,
            worker_generation: generation,
            submissions,
            completions,
            submission_bell: Doorbell::from_fd(submission)?,
            completion_bell: Doorbell::from_fd(completion)?,
            arena,
        })
    }
}

/// What a rank of a group that follows rank 0 has of a link: it gets no jobs from netd.
#[derive(Debug)]
pub struct ArenaLink {
    /// Generation of the netd whose arena it is.
    pub netd_generation: Generation,
    /// Where tensors lie. They are read alone.
    pub arena: Arc<ArenaMap>,
}

/// Descriptors that come with the link of such a rank: the arena.
pub const ARENA_LINK_DESCRIPTORS: usize = 1;

impl ArenaLink {
    /// Opens what `init` and its descriptor name.
    ///
    /// # Errors
    /// [`LinkError`]; nothing stays open.
    pub fn open(
        init: &LinkInit,
        generation: Generation,
        descriptors: Vec<OwnedFd>,
    ) -> Result<ArenaLink, LinkError> {
        let count = descriptors.len();
        let mismatch = || LinkError::Mismatch {
            got: init.worker_generation,
            want: generation,
            descriptors: count,
        };
        let [arena] =
            <[OwnedFd; ARENA_LINK_DESCRIPTORS]>::try_from(descriptors).map_err(|_| mismatch())?;
        let arena_bytes = usize::try_from(init.arena_bytes).map_err(|_| mismatch())?;
        if init.worker_generation != generation {
            return Err(mismatch());
        }
        let arena = ArenaMap::map(&MemfdSegment::from_fd("sepal-arena", arena, arena_bytes)?)?;
        Ok(ArenaLink { netd_generation: init.netd_generation, arena: Arc::new(arena) })
    }
}
