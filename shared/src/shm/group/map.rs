//! The segment of a group: made by the supervisor, mapped by every rank from a descriptor.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::GroupError;
use super::layout::{Control, GROUP_MAGIC, GroupShape, LogWord, ShapeError, rank_id};
use crate::ids::Rank;
use crate::shm::layout::LAYOUT_VERSION;
use crate::shm::segment::{SegmentError, SmallSegment};
use crate::shm::sync::Ordering;

pub(super) use crate::shm::doorbell::{Doorbell, MAX_SPIN};

/// Why the memory of a group could not be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum GroupMapError {
    /// The segment could not be made or mapped.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// No group has this shape.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The segment holds something else, or the group of another build.
    #[error(
        "the segment holds no group of layout version {LAYOUT_VERSION}: magic {magic:#018x}, \
         version {version}"
    )]
    NoGroup {
        /// Magic found.
        magic: u64,
        /// Layout version found.
        version: u64,
    },
    /// The segment belongs to another group, to another generation, or has another shape.
    #[error("the segment holds the group {found:?} instead of {expected:?}")]
    Stale {
        /// What was asked for.
        expected: GroupShape,
        /// Group, generation, ranks, values per exchange and bytes of log that were found.
        found: [u64; 5],
    },
    /// The rank or the number of doorbells does not fit the group.
    #[error("rank {rank} with {doorbells} doorbells does not fit a group of {world}")]
    BadRank {
        rank: Rank,
        /// Doorbells that came.
        doorbells: usize,
        /// Ranks of the group.
        world: usize,
    },
    /// A doorbell could not be made, or its descriptor is something else.
    #[error("make or open a doorbell of a group")]
    Doorbell(#[source] io::Error),
}

/// The group as the supervisor holds it: it outlives every rank, and ends all of them at once.
#[derive(Debug)]
pub struct GroupOwner {
    memory: GroupMemory,
    bells: Vec<Doorbell>,
}

impl GroupOwner {
    /// Makes the segment and the doorbells of a group. `name` is what `/proc/PID/maps` shows.
    ///
    /// # Errors
    /// [`GroupMapError::Shape`] for a shape that no group has; [`GroupMapError::Segment`] and
    /// [`GroupMapError::Doorbell`] when the system refuses.
    pub fn create(name: &str, shape: &GroupShape) -> Result<GroupOwner, GroupMapError> {
        shape.check()?;
        let segment = SmallSegment::create(name, shape.segment_bytes())?;
        let memory = GroupMemory { segment, shape: *shape };
        let bells: io::Result<Vec<Doorbell>> =
            (0..shape.world()).map(|_| Doorbell::new()).collect();
        let group = GroupOwner { memory, bells: bells.map_err(GroupMapError::Doorbell)? };
        group.memory.write_header();
        Ok(group)
    }

    /// The group that this process made with `shape` before it became another executable.
    ///
    /// # Errors
    /// [`GroupMapError`] when the segment or a doorbell is not what was made.
    pub fn adopt(
        name: &str,
        shape: &GroupShape,
        segment: OwnedFd,
        bells: Vec<OwnedFd>,
    ) -> Result<GroupOwner, GroupMapError> {
        shape.check()?;
        let segment = SmallSegment::adopt(name, segment, shape.segment_bytes())?;
        let bells: io::Result<Vec<Doorbell>> = bells.into_iter().map(Doorbell::from_fd).collect();
        let memory = GroupMemory { segment, shape: *shape };
        Ok(GroupOwner { memory, bells: bells.map_err(GroupMapError::Doorbell)? })
    }

    /// Another descriptor of the segment, for a rank.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        self.memory.segment.try_clone()
    }

    /// Other descriptors of all doorbells in the order of ranks, for a rank.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn doorbells(&self) -> io::Result<Vec<OwnedFd>> {
        self.bells.iter().map(Doorbell::try_clone).collect()
    }

    /// Ends the group: every wait in it, now and later, fails with
    /// [`GroupError::Aborted`](super::GroupError::Aborted).
    ///
    /// # Errors
    /// When a doorbell is broken. Its rank sees the abort after its interval.
    pub fn abort(&self) -> io::Result<()> {
        self.memory.control().abort();
        // All are rung, also when one bell is broken.
        self.bells.iter().map(Doorbell::ring).fold(Ok(()), io::Result::and)
    }

    /// For whom each rank waits, in the order of ranks. A rank for which others wait, and which
    /// waits for no one itself, holds the group up.
    pub fn waits(&self) -> Vec<Option<Rank>> {
        let world = self.memory.shape.world();
        let waits_for = |word: u64| {
            let rank = usize::try_from(word).ok()?.checked_sub(1)?;
            (rank < world).then(|| rank_id(rank))
        };
        let ranks = self.memory.control().ranks.iter().take(world);
        ranks.map(|rank| waits_for(rank.sleep.waits_for.load(Ordering::Relaxed))).collect()
    }
}

/// The mapped memory of a group, as one of its ranks holds it.
#[derive(Debug)]
pub struct GroupMap {
    memory: GroupMemory,
    bells: Vec<Doorbell>,
    rank: usize,
}

impl GroupMap {
    /// Maps the segment that the supervisor made with `shape`. `doorbells` are those of all ranks,
    /// in their order.
    ///
    /// # Errors
    /// [`GroupMapError::Shape`] and [`GroupMapError::BadRank`] when the arguments fit no group;
    /// [`GroupMapError::Segment`], [`GroupMapError::NoGroup`], [`GroupMapError::Stale`] and
    /// [`GroupMapError::Doorbell`] when the descriptors are not those of this group.
    pub fn open(
        segment: OwnedFd,
        doorbells: Vec<OwnedFd>,
        shape: &GroupShape,
        rank: Rank,
    ) -> Result<Arc<GroupMap>, GroupMapError> {
        shape.check()?;
        let (world, index) = (shape.world(), usize::from(rank.0));
        if index >= world || doorbells.len() != world {
            return Err(GroupMapError::BadRank { rank, doorbells: doorbells.len(), world });
        }
        let segment = SmallSegment::open("sepal-group", segment, shape.segment_bytes())?;
        let memory = GroupMemory { segment, shape: *shape };
        memory.check_header()?;
        let bells: io::Result<Vec<Doorbell>> =
            doorbells.into_iter().map(Doorbell::from_fd).collect();
        let bells = bells.map_err(GroupMapError::Doorbell)?;
        Ok(Arc::new(GroupMap { memory, bells, rank: index }))
    }

    /// Rings the doorbell of `rank`, so that a [`PlanReader`](super::PlanReader) that waits there
    /// comes back. Any thread may.
    ///
    /// # Errors
    /// When the doorbell is broken, or there is no such rank.
    pub fn ring(&self, rank: Rank) -> io::Result<()> {
        let none = || io::Error::new(io::ErrorKind::InvalidInput, format!("no rank {rank}"));
        self.bells.get(usize::from(rank.0)).ok_or_else(none)?.ring()
    }

    /// Fails once the supervisor ended the group, for waits outside of exchanges and the log. Any
    /// thread may ask.
    ///
    /// # Errors
    /// [`GroupError::Aborted`].
    pub fn check_abort(&self) -> Result<(), GroupError> {
        // Nothing is published with the word.
        match self.control().aborted.value.load(Ordering::Relaxed) {
            0 => Ok(()),
            _ => Err(GroupError::Aborted),
        }
    }

    /// Shows the supervisor for whom this rank waits outside of exchanges and the log; `None`: for
    /// no rank any more.
    pub fn show_wait(&self, on: Option<Rank>) {
        let word = on.map_or(0, |rank| u64::from(rank.0) + 1);
        self.control().ranks[self.rank].sleep.waits_for.store(word, Ordering::Relaxed);
    }

    /// Whether this rank, or its device, waits for another rank.
    pub fn is_waiting(&self) -> bool {
        self.control().ranks[self.rank].sleep.waits_for.load(Ordering::Relaxed) != 0
    }

    /// What the group is.
    pub fn shape(&self) -> &GroupShape {
        &self.memory.shape
    }

    /// The rank of this process.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// The doorbell of this process, to wait for it. Each wakes by itself.
    pub(super) fn own_bell(&self) -> io::Result<Doorbell> {
        Doorbell::from_fd(self.bells[self.rank].try_clone()?)
    }

    /// Address of `len` bytes at `offset` of the segment.
    ///
    /// # Panics
    /// When they exceed it.
    pub(super) fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        self.memory.at(offset, len)
    }

    /// The words before the exchange buffers.
    pub(super) fn control(&self) -> &Control {
        self.memory.control()
    }

    /// The words of the plan log.
    pub(super) fn log(&self) -> &[LogWord] {
        let shape = self.shape();
        let start = self.memory.at(shape.log_offset(), shape.log_bytes).cast::<LogWord>();
        // SAFETY: the words lie inside the mapping, at a multiple of a page, while `self` lives;
        // they are atomics, for which every content is valid and stores of other processes are no
        // data race.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), shape.log_words()) }
    }

    /// Copies `bytes` to `offset` of the own exchange buffer for epochs of `parity`.
    ///
    /// # Panics
    /// When they exceed the buffer.
    pub(super) fn write(&self, parity: usize, offset: usize, bytes: &[u8]) {
        let target = self.buffer(self.rank, parity, offset, bytes.len());
        // SAFETY: the target was bounded, and does not overlap `bytes`, since no reference into a
        // buffer exists. Ranks that keep to the protocol do not touch it meanwhile.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target.as_ptr(), bytes.len()) };
    }

    /// Fills `bytes` from `offset` of the exchange buffer of `rank` for epochs of `parity`.
    ///
    /// # Panics
    /// When they exceed the buffer.
    pub(super) fn read(&self, rank: usize, parity: usize, offset: usize, bytes: &mut [u8]) {
        let source = self.buffer(rank, parity, offset, bytes.len());
        // SAFETY: the source was bounded; no overlap, as in write(). A rank that breaks the
        // protocol can tear what is read, and any bytes are valid.
        unsafe { ptr::copy_nonoverlapping(source.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
    }

    fn buffer(&self, rank: usize, parity: usize, offset: usize, len: usize) -> NonNull<u8> {
        let shape = self.shape();
        let inside = offset.checked_add(len).is_some_and(|end| end <= shape.exchange_bytes());
        assert!(inside, "{len} bytes at {offset} lie outside of an exchange buffer");
        self.memory.at(shape.buffer_offset(rank, parity) + offset, len)
    }
}

/// A mapped segment that has the size of a checked shape.
#[derive(Debug)]
struct GroupMemory {
    segment: SmallSegment,
    shape: GroupShape,
}

impl GroupMemory {
    fn control(&self) -> &Control {
        // SAFETY: every shape has the bytes of `Control` first, page-aligned and mapped while
        // `self` lives; it is made of atomics alone, for which every content is valid and stores of
        // other processes are no data race.
        unsafe { self.segment.base().cast::<Control>().as_ref() }
    }

    /// Address of `len` bytes at `offset`.
    fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.shape.segment_bytes());
        assert!(inside, "{len} bytes at {offset} lie outside of the segment of a group");
        // SAFETY: the mapping has the bytes of the shape, so that the address is inside it or one
        // past it.
        unsafe { self.segment.base().add(offset) }
    }

    fn write_header(&self) {
        let header = &self.control().header;
        let words = [
            &header.group,
            &header.generation,
            &header.world_size,
            &header.exchange_values,
            &header.log_bytes,
        ];
        for (word, value) in words.into_iter().zip(header_words(&self.shape)) {
            word.store(value, Ordering::Relaxed);
        }
        header.version.store(LAYOUT_VERSION, Ordering::Relaxed);
        // SYNC POINT group.magic: publishes the header to the load in check_header().
        header.magic.store(GROUP_MAGIC, Ordering::Release);
    }

    fn check_header(&self) -> Result<(), GroupMapError> {
        let header = &self.control().header;
        // SYNC POINT group.magic: after this load the header is visible; pairs with the store in
        // write_header().
        let magic = header.magic.load(Ordering::Acquire);
        let version = header.version.load(Ordering::Relaxed);
        if (magic, version) != (GROUP_MAGIC, LAYOUT_VERSION) {
            return Err(GroupMapError::NoGroup { magic, version });
        }
        let found = [
            &header.group,
            &header.generation,
            &header.world_size,
            &header.exchange_values,
            &header.log_bytes,
        ]
        .map(|word| word.load(Ordering::Relaxed));
        if found != header_words(&self.shape) {
            return Err(GroupMapError::Stale { expected: self.shape, found });
        }
        Ok(())
    }
}

/// Group, generation, ranks, values per exchange and bytes of log.
fn header_words(shape: &GroupShape) -> [u64; 5] {
    [
        shape.group.0.into(),
        shape.generation.0.into(),
        shape.world_size.0.into(),
        shape.exchange_values as u64,
        shape.log_bytes as u64,
    ]
}
