//! Byte layouts of board and rings, the same in every process of one build. All fields are
//! native-endian `u64` atomics; a zeroed segment is a valid, empty one. A change here or in the
//! layout of [`group`](super::group) raises [`LAYOUT_VERSION`].
//!
//! # Rings: one segment per (worker, its generation, netd's generation)
//!
//! ```text
//!      0  +------------------------------+
//!         | RingHeader             128 B |  magic, version, identity; written once by the supervisor, magic last
//!    128  +------------------------------+
//!         | submission ring      16768 B |  netd produces, worker consumes
//!  16896  +------------------------------+
//!         | completion ring      16768 B |  worker produces, netd consumes
//!  33664  +------------------------------+
//!
//! One ring (RingShared):
//!      0  | tail            (own 128 B) |  entries ever pushed      written by the producer
//!    128  | head            (own 128 B) |  entries ever popped      written by the consumer
//!    256  | sleeping        (own 128 B) |  1 = ring the doorbell    set by the consumer, taken back by either
//!    384  | 256 entries of 64 B        |  entry i lives at i % 256 written by the producer
//! ```
//!
//! The fields that two sides write stand 128 bytes apart: a cache line is 64 bytes on x86-64, which
//! fetches them in pairs, and 128 on some aarch64.
//!
//! | `tail - head` | state | producer may | consumer may |
//! | --- | --- | --- | --- |
//! | 0 | empty | push | arm and sleep |
//! | 1..=255 | in use | push | pop |
//! | 256 | full | nothing: keep the entry, try after a pop | pop |
//! | anything else | corrupt | nothing: the ring is given up | nothing: the ring is given up |
//!
//! | `sleeping` | means | left by |
//! | --- | --- | --- |
//! | 0 | the consumer runs, or was already rung | `arm` -> 1 |
//! | 1 | the consumer sleeps or is about to | producer's `must_wake` -> 0 and one ring of the doorbell; `disarm` -> 0 |
//!
//! # Board: one segment per instance
//!
//! ```text
//!      0  | BoardHeader            128 B |  supervisor only
//!    128  | SupervisorPart         256 B |  supervisor only: restarts by role and reason
//!    384  | 32 child slots of 512 B      |
//!         |   +0    SeatPart       128 B |  supervisor only: who sits here
//!         |   +128  ReportPart     128 B |  the child only: what it does (the supervisor zeroes it between two children)
//!         |   +256  WorkPart       256 B |  the child only, if it is a worker: what it computed
//!  16768  | Sequenced            65664 B |  netd only (emptied between two of them): its figures
//!         |   +0    sequence, len  128 B |
//!         |   +128  words        65536 B |  `crate::figures::Figures` as JSON
//!  82432  |
//! ```

#![cfg_attr(loom, allow(dead_code, reason = "models use the rings alone"))]

use super::sync::{AtomicU64, UseClaim};
use crate::figures::server::BATCH_BUCKETS;
use crate::job::WorkKind;

/// Version of everything in this file, and of the layout of groups.
pub const LAYOUT_VERSION: u64 = 7;

/// First word of a ring segment: `SEPALRNG`, big-endian.
pub const RING_MAGIC: u64 = u64::from_be_bytes(*b"SEPALRNG");

/// First word of a board: `SEPALBRD`, big-endian.
pub const BOARD_MAGIC: u64 = u64::from_be_bytes(*b"SEPALBRD");

/// Entries of one ring. 256 jobs in flight are more than a worker computes in the longest allowed
/// wait of a client; under loom 2, the smallest ring that can be empty, in use and full.
pub const RING_ENTRIES: usize = if cfg!(loom) { 2 } else { 256 };

/// 64-bit words of a ring entry: one cache line.
pub const ENTRY_WORDS: usize = 8;

/// Child slots of a board: netd, prepare, and 15 workers each beside its successor.
pub const BOARD_SLOTS: usize = 32;

/// Bytes of a text on the board (instance name, PeerID in base58: at most 52).
pub const TEXT_BYTES: usize = 64;

/// Roles of children whose restarts are counted apart ([`crate::control::Role`]).
pub const ROLES: usize = 3;

/// Reasons of restarts that are counted apart ([`super::board::RestartReason`]).
pub const RESTART_REASONS: usize = 8;

/// Kinds of work that workers count apart.
pub const WORK_KINDS: usize = WorkKind::ALL.len();

/// Bytes of netd's figures; those of 128 sessions and 256 blocks take 40 KiB. Under loom two words, which
/// may be of two versions.
pub const FIGURES_BYTES: usize = if cfg!(loom) { 16 } else { 64 << 10 };

/// One word alone on its cache lines.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct WordLine {
    pub(super) value: AtomicU64,
}

/// The place of one entry.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct EntryCell {
    pub(super) words: [AtomicU64; ENTRY_WORDS],
    /// No bytes, but in loom's models.
    pub(super) claim: UseClaim,
}

/// One ring, as it lies in a segment.
#[repr(C)]
#[derive(Debug)]
pub struct RingShared {
    pub(super) tail: WordLine,
    pub(super) head: WordLine,
    pub(super) sleeping: WordLine,
    pub(super) entries: [EntryCell; RING_ENTRIES],
}

impl RingShared {
    /// An empty ring outside any segment, for models and tests.
    #[cfg(any(loom, test))]
    pub(super) fn new() -> RingShared {
        let line = || WordLine { value: AtomicU64::new(0) };
        let cell = |_| EntryCell {
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            claim: UseClaim::default(),
        };
        RingShared {
            tail: line(),
            head: line(),
            sleeping: line(),
            entries: std::array::from_fn(cell),
        }
    }
}

/// Head of a ring segment.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct RingHeader {
    pub(super) magic: AtomicU64,
    pub(super) version: AtomicU64,
    pub(super) group: AtomicU64,
    pub(super) rank: AtomicU64,
    pub(super) world_size: AtomicU64,
    pub(super) worker_generation: AtomicU64,
    pub(super) netd_generation: AtomicU64,
    _reserved: [AtomicU64; 9],
}

/// A whole ring segment.
#[repr(C)]
#[derive(Debug)]
pub struct RingPairLayout {
    pub(super) header: RingHeader,
    pub(super) submission: RingShared,
    pub(super) completion: RingShared,
}

/// A text of at most [`TEXT_BYTES`] bytes, written once; the length is stored last.
#[repr(C)]
#[derive(Debug)]
pub struct Text {
    pub(super) len: AtomicU64,
    pub(super) words: [AtomicU64; TEXT_BYTES / 8],
}

/// Head of a board.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct BoardHeader {
    pub(super) magic: AtomicU64,
    pub(super) version: AtomicU64,
    pub(super) supervisor_pid: AtomicU64,
    pub(super) started_unix_s: AtomicU64,
    pub(super) instance: Text,
    _reserved: [AtomicU64; 3],
}

/// What the supervisor counts. Written by the supervisor.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct SupervisorPart {
    /// By role, then by reason.
    pub(super) restarts: [[AtomicU64; RESTART_REASONS]; ROLES],
    /// When a person last asked how the swarm looks, CLOCK_MONOTONIC.
    pub(super) viewed_ns: AtomicU64,
    _reserved: [AtomicU64; 7],
}

/// Who sits in a child slot. Written by the supervisor.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct SeatPart {
    pub(super) generation: AtomicU64,
    pub(super) role: AtomicU64,
    pub(super) pid: AtomicU64,
    pub(super) state: AtomicU64,
    pub(super) group: AtomicU64,
    pub(super) rank: AtomicU64,
    pub(super) world_size: AtomicU64,
    pub(super) span_start: AtomicU64,
    pub(super) span_end: AtomicU64,
    _reserved: [AtomicU64; 7],
}

/// What the child in a slot does. Written by that child.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct ReportPart {
    pub(super) phase: AtomicU64,
    pub(super) progress: AtomicU64,
    pub(super) phase_started_ns: AtomicU64,
    pub(super) phase_limit_ms: AtomicU64,
    pub(super) net_port: AtomicU64,
    pub(super) peer_id: Text,
    _reserved: [AtomicU64; 2],
}

/// Jobs of one kind that a worker has answered.
#[repr(C)]
#[derive(Debug)]
pub struct WorkWords {
    pub(super) jobs: AtomicU64,
    /// Tokens of all their rows.
    pub(super) tokens: AtomicU64,
    pub(super) queue_ns: AtomicU64,
    pub(super) compute_ns: AtomicU64,
}

/// What a worker computed, and how its device is. Written by the worker: the words of the device by
/// one thread, all others by the executor.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct WorkPart {
    pub(super) kinds: [WorkWords; WORK_KINDS],
    /// Decode units by their rows; a unit counts once, in the first bucket that holds it.
    pub(super) batches: [AtomicU64; BATCH_BUCKETS],
    pub(super) batch_rows: AtomicU64,
    /// Zero in `memory_total` = memory unknown.
    pub(super) memory_used: AtomicU64,
    pub(super) memory_total: AtomicU64,
    /// Zero = unknown.
    pub(super) kelvin: AtomicU64,
    pub(super) milliwatts: AtomicU64,
    _reserved: [AtomicU64; 3],
}

/// Bytes that one process replaces now and then, and that others read whole ([`super::seqlock`]).
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Sequenced {
    /// Even: the bytes are whole. Odd: they are being replaced.
    pub(super) sequence: AtomicU64,
    pub(super) len: AtomicU64,
    _reserved: [AtomicU64; 14],
    pub(super) words: [AtomicU64; FIGURES_BYTES / 8],
}

impl Sequenced {
    /// No bytes, outside any segment, for models and tests.
    #[cfg(any(loom, test))]
    pub(super) fn new() -> Sequenced {
        Sequenced {
            sequence: AtomicU64::new(0),
            len: AtomicU64::new(0),
            _reserved: std::array::from_fn(|_| AtomicU64::new(0)),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

/// One child slot.
#[repr(C)]
#[derive(Debug)]
pub struct ChildSlot {
    pub(super) seat: SeatPart,
    pub(super) report: ReportPart,
    pub(super) work: WorkPart,
}

/// A whole board.
#[repr(C)]
#[derive(Debug)]
pub struct BoardLayout {
    pub(super) header: BoardHeader,
    pub(super) supervisor: SupervisorPart,
    pub(super) children: [ChildSlot; BOARD_SLOTS],
    pub(super) figures: Sequenced,
}

#[cfg(not(loom))]
mod pinned {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    const _: () = assert!(size_of::<WordLine>() == 128);
    const _: () = assert!(size_of::<EntryCell>() == 64);
    const _: () = assert!(offset_of!(RingShared, head) == 128);
    const _: () = assert!(offset_of!(RingShared, sleeping) == 256);
    const _: () = assert!(offset_of!(RingShared, entries) == 384);
    const _: () = assert!(size_of::<RingShared>() == 16768);
    const _: () = assert!(size_of::<RingHeader>() == 128);
    const _: () = assert!(offset_of!(RingPairLayout, submission) == 128);
    const _: () = assert!(offset_of!(RingPairLayout, completion) == 16896);
    const _: () = assert!(size_of::<RingPairLayout>() == 33664);
    const _: () = assert!(size_of::<BoardHeader>() == 128);
    const _: () = assert!(size_of::<SeatPart>() == 128);
    const _: () = assert!(size_of::<ReportPart>() == 128);
    const _: () = assert!(size_of::<SupervisorPart>() == 256);
    const _: () = assert!(size_of::<WorkPart>() == 256);
    const _: () = assert!(size_of::<Sequenced>() == 65664);
    const _: () = assert!(offset_of!(BoardLayout, children) == 384);
    const _: () = assert!(offset_of!(BoardLayout, figures) == 16768);
    const _: () = assert!(size_of::<BoardLayout>() == 82432);
    // A mapping starts at a page, so that no alignment in it may exceed the smallest page.
    const _: () =
        assert!(align_of::<RingPairLayout>() <= 4096 && align_of::<BoardLayout>() <= 4096);
    const _: () = assert!(RING_ENTRIES.is_power_of_two());
}
