//! Bytes of a group's segment, the same in every process of one build. Words are native-endian
//! `u64` atomics; a zeroed segment with a header is a valid group in which nothing was exchanged.
//! A change here raises [`LAYOUT_VERSION`](crate::shm::layout::LAYOUT_VERSION).
//!
//! ```text
//!      0  +--------------------------------+
//!         | GroupHeader              128 B |  magic, version, shape; written once by the supervisor, magic last
//!    128  | aborted        (own      128 B)|  0, or 1 for good              written by the supervisor
//!    256  | log tail       (own      128 B)|  words ever published          written by rank 0
//!    384  | 16 ranks of              384 B |
//!         |   +0    Published        128 B |  epoch, operations of the last two epochs  written by the rank
//!         |   +128  Sleep            128 B |  set by the rank, flags taken back by others
//!         |   +256  log cursor       128 B |  words the rank is done with   written by the rank
//!   6528  | unused                         |
//!   8192  +--------------------------------+
//!         | exchange buffers               |  of rank 0: even epochs, odd epochs; of rank 1: ...
//!         | world x 2 x exchange_values    |  each begins at a page; written by its rank
//!         +--------------------------------+
//!         | exchange memory of devices     |  of rank 0, of rank 1, ...: flags, then two buffers; see device
//!         | world x device_bytes           |  used where devices do not reach each other's memory
//!         +--------------------------------+
//!         | plan log             log_bytes |  word i lives at i % words     written by rank 0
//!         +--------------------------------+
//! ```
//!
//! `epoch` counts the exchanges of a rank: E says that its contribution to exchange E is in its
//! buffer of E's parity, and that it is done reading exchange E - 1.
//!
//! | another rank's `epoch`, while this rank is in exchange E | state |
//! | --- | --- |
//! | E - 1 | it still writes its contribution, or reads exchange E - 1: wait |
//! | E | its contribution can be read |
//! | E + 1 | so it can; the rank finished E and went on to the other buffer |
//! | anything else | corrupt |
//!
//! | word of `Sleep` | value | left by |
//! | --- | --- | --- |
//! | exchange, log | 0 = awake; r + 1 = asleep, or about to be, until rank r publishes | the rank, or whoever rings it -> 0 |
//! | waits_for | 0 = none; r + 1 = it waits for rank r, asleep or between two sleeps | the rank or its device |
//! | misled | 0; r + 1 = its device found that rank r runs another operation | the device of the rank |

use serde::{Deserialize, Serialize};

use crate::control::GroupInit;
use crate::ids::{Generation, GroupId, Rank, WorkerId, WorldSize};
use crate::shm::layout::WordLine;
use crate::shm::sync::{AtomicU64, Ordering, UseClaim};

/// First word of a group's segment: `SEPALGRP`, big-endian.
#[cfg(not(loom))]
pub(super) const GROUP_MAGIC: u64 = u64::from_be_bytes(*b"SEPALGRP");

/// Most ranks of a group: a server has at most 15 devices. Under loom 3, the fewest among which a
/// rank can be woken by one that it does not wait for.
pub const MAX_RANKS: usize = if cfg!(loom) { 3 } else { 16 };

/// Most values of one exchange buffer: 16 MiB, more than a cache holds.
pub const MAX_EXCHANGE_VALUES: usize = 1 << 22;

/// Most bytes of a plan log: sixteen of the longest job bodies.
pub const MAX_LOG_BYTES: usize = 1 << 26;

/// Exchange buffers of one rank: one per parity of the epoch.
pub(super) const PARITIES: usize = 2;

/// Bytes of a word of the log.
pub(super) const WORD_BYTES: usize = size_of::<u64>();

/// Buffers begin at a multiple of this, so that no two ranks write one page.
const PAGE_BYTES: usize = 4096;

/// Bytes before the exchange buffers.
pub(super) const CONTROL_BYTES: usize = 8192;

/// Bytes of the flags at the start of the exchange memory of a device: a word for each of 16 ranks
/// and 64 CTAs.
pub const DEVICE_FLAG_BYTES: usize = 16 * 64 * 8;

/// What a group is, as the supervisor says it. Everything else in a segment is bounded by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupShape {
    pub group: GroupId,
    /// How often it was started.
    pub generation: Generation,
    /// Its ranks, 2 to [`MAX_RANKS`].
    pub world_size: WorldSize,
    /// Values of an exchange buffer, 1 to [`MAX_EXCHANGE_VALUES`]. Longer messages cross in pieces.
    pub exchange_values: usize,
    /// Bytes of the plan log, a multiple of 8, 16 to [`MAX_LOG_BYTES`]. A record and 8 bytes for
    /// its length must fit.
    pub log_bytes: usize,
}

/// A shape that no group has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid shape of a group: {world_size} ranks (expected 2 to {MAX_RANKS}), {exchange_values} \
     values per exchange (expected 1 to {MAX_EXCHANGE_VALUES}), {log_bytes} bytes of plan log \
     (expected a multiple of 8 from 16 to {MAX_LOG_BYTES})"
)]
pub struct ShapeError {
    /// Ranks asked for.
    pub world_size: WorldSize,
    /// Values per exchange asked for.
    pub exchange_values: usize,
    /// Bytes of plan log asked for.
    pub log_bytes: usize,
}

impl GroupShape {
    /// The shape of a generation of the group of `worker`, which is told of it in `init`.
    pub fn of(init: &GroupInit, worker: WorkerId, generation: Generation) -> GroupShape {
        GroupShape {
            group: worker.group,
            generation,
            world_size: worker.world_size,
            exchange_values: init.exchange_values,
            log_bytes: init.log_bytes,
        }
    }

    /// Checks every bound.
    ///
    /// # Errors
    /// [`ShapeError`] when one does not hold.
    pub fn check(&self) -> Result<(), ShapeError> {
        let log_is_sound = (2 * WORD_BYTES..=MAX_LOG_BYTES).contains(&self.log_bytes)
            && self.log_bytes.is_multiple_of(WORD_BYTES);
        if (2..=MAX_RANKS).contains(&self.world())
            && (1..=MAX_EXCHANGE_VALUES).contains(&self.exchange_values)
            && log_is_sound
        {
            return Ok(());
        }
        let GroupShape { world_size, exchange_values, log_bytes, .. } = *self;
        Err(ShapeError { world_size, exchange_values, log_bytes })
    }

    /// Bytes of the segment of a group with this shape, which [`check`](Self::check) accepts.
    pub fn segment_bytes(&self) -> usize {
        (self.log_offset() + self.log_bytes).next_multiple_of(PAGE_BYTES)
    }

    /// Number of ranks, as a count.
    pub fn world(&self) -> usize {
        self.world_size.0.into()
    }

    /// Bytes of one exchange buffer.
    pub(super) fn exchange_bytes(&self) -> usize {
        self.exchange_values * size_of::<f32>()
    }

    /// Where the buffer of `rank` for epochs of one parity begins.
    #[cfg_attr(loom, allow(dead_code, reason = "models have no segment"))]
    pub(super) fn buffer_offset(&self, rank: usize, parity: usize) -> usize {
        let buffer_bytes = self.exchange_bytes().next_multiple_of(PAGE_BYTES);
        CONTROL_BYTES + (rank * PARITIES + parity) * buffer_bytes
    }

    /// Bytes of the memory through which the device of one rank exchanges: flags, and two buffers.
    pub fn device_bytes(&self) -> usize {
        let buffer_bytes = self.exchange_bytes().next_multiple_of(PAGE_BYTES);
        DEVICE_FLAG_BYTES + PARITIES * buffer_bytes
    }

    /// Where the exchange memory of the device of `rank` begins.
    pub(super) fn device_offset(&self, rank: usize) -> usize {
        self.buffer_offset(self.world(), 0) + rank * self.device_bytes()
    }

    /// Where the plan log begins.
    pub(super) fn log_offset(&self) -> usize {
        self.device_offset(self.world())
    }

    /// Words of the plan log.
    pub(super) fn log_words(&self) -> usize {
        self.log_bytes / WORD_BYTES
    }
}

/// Rank number `rank` of a group, for messages.
pub(super) fn rank_id(rank: usize) -> Rank {
    Rank(u16::try_from(rank).unwrap_or(u16::MAX))
}

/// Head of a segment. Nothing but the supervisor's word decides what a rank accesses.
#[cfg(not(loom))]
#[repr(C, align(128))]
#[derive(Debug)]
pub struct GroupHeader {
    pub(super) magic: AtomicU64,
    pub(super) version: AtomicU64,
    pub(super) group: AtomicU64,
    pub(super) generation: AtomicU64,
    pub(super) world_size: AtomicU64,
    pub(super) exchange_values: AtomicU64,
    pub(super) log_bytes: AtomicU64,
    _reserved: [AtomicU64; 9],
}

/// What a rank tells all others about its exchanges. One cache line holds it.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Published {
    pub(super) epoch: AtomicU64,
    /// What the exchange is, for even and odd epochs: equal on all ranks that follow one plan.
    pub(super) operations: [AtomicU64; PARITIES],
}

/// For what a rank sleeps or waits, and who misled it: 0, or a rank plus 1.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Sleep {
    pub(super) exchange: AtomicU64,
    pub(super) log: AtomicU64,
    pub(super) waits_for: AtomicU64,
    pub(super) misled: AtomicU64,
}

/// The words of one rank.
#[repr(C)]
#[derive(Debug)]
pub struct RankShared {
    pub(super) published: Published,
    pub(super) sleep: Sleep,
    pub(super) log_cursor: WordLine,
}

/// Everything before the exchange buffers.
#[repr(C)]
#[derive(Debug)]
pub struct Control {
    #[cfg(not(loom))]
    pub(super) header: GroupHeader,
    pub(super) aborted: WordLine,
    pub(super) log_tail: WordLine,
    pub(super) ranks: [RankShared; MAX_RANKS],
}

impl Control {
    /// Has every wait that looks from now on end. The caller rings all doorbells after.
    pub(super) fn abort(&self) {
        // Publishes nothing but itself.
        self.aborted.value.store(1, Ordering::Relaxed);
    }
}

/// A word of the plan log.
#[repr(C)]
#[derive(Debug)]
pub struct LogWord {
    pub(super) value: AtomicU64,
    /// No bytes, but in loom's models.
    pub(super) claim: UseClaim,
}

#[cfg(loom)]
impl Control {
    /// The control words of a fresh group outside any segment, for models.
    pub(super) fn new() -> Control {
        let word = || AtomicU64::new(0);
        let line = || WordLine { value: word() };
        let rank = |_| RankShared {
            published: Published { epoch: word(), operations: [word(), word()] },
            sleep: Sleep { exchange: word(), log: word(), waits_for: word(), misled: word() },
            log_cursor: line(),
        };
        let ranks = std::array::from_fn(rank);
        Control { aborted: line(), log_tail: line(), ranks }
    }
}

#[cfg(not(loom))]
mod pinned {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    const _: () = assert!(size_of::<GroupHeader>() == 128);
    const _: () = assert!(size_of::<RankShared>() == 384);
    const _: () = assert!(size_of::<LogWord>() == WORD_BYTES);
    const _: () = assert!(offset_of!(Control, aborted) == 128);
    const _: () = assert!(offset_of!(Control, log_tail) == 256);
    const _: () = assert!(offset_of!(Control, ranks) == 384);
    const _: () = assert!(size_of::<Control>() == 6528);
    const _: () = assert!(size_of::<Control>() <= CONTROL_BYTES);
    const _: () = assert!(CONTROL_BYTES.is_multiple_of(PAGE_BYTES));
    const _: () = assert!(DEVICE_FLAG_BYTES.is_multiple_of(PAGE_BYTES));
    // A mapping starts at a page, so that no alignment in it may exceed the smallest page.
    const _: () = assert!(align_of::<Control>() <= PAGE_BYTES);
}
