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
//!    128  | 32 child slots of 384 B      |
//!         |   +0    SeatPart       128 B |  supervisor only: who sits here
//!         |   +128  ReportPart     256 B |  the child only: what it does (the supervisor zeroes it between two children)
//!  12416  |
//! ```

#![cfg_attr(loom, allow(dead_code, reason = "models use the rings alone"))]

use super::sync::{AtomicU64, Claim};

/// Version of everything in this file, and of the layout of groups.
pub const LAYOUT_VERSION: u64 = 5;

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

/// Kinds of trouble with requests that are counted apart ([`super::board::Trouble`]).
pub const TROUBLES: usize = 10;

/// One word alone on its cache lines.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Line {
    pub(super) value: AtomicU64,
}

/// The place of one entry.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct EntryCell {
    pub(super) words: [AtomicU64; ENTRY_WORDS],
    /// No bytes, but in loom's models.
    pub(super) claim: Claim,
}

/// One ring, as it lies in a segment.
#[repr(C)]
#[derive(Debug)]
pub struct RingShared {
    pub(super) tail: Line,
    pub(super) head: Line,
    pub(super) sleeping: Line,
    pub(super) entries: [EntryCell; RING_ENTRIES],
}

impl RingShared {
    /// An empty ring outside any segment, for models and tests.
    #[cfg(any(loom, test))]
    pub(super) fn new() -> RingShared {
        let line = || Line { value: AtomicU64::new(0) };
        let cell = |_| EntryCell {
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            claim: Claim::default(),
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
    pub(super) jobs_done: AtomicU64,
    pub(super) queue_ns: AtomicU64,
    pub(super) compute_ns: AtomicU64,
    pub(super) sessions_open: AtomicU64,
    pub(super) kv_tokens_free: AtomicU64,
    pub(super) net_port: AtomicU64,
    pub(super) peer_id: Text,
    pub(super) troubles: [AtomicU64; TROUBLES],
    _reserved: [AtomicU64; 3],
}

/// One child slot.
#[repr(C)]
#[derive(Debug)]
pub struct ChildSlot {
    pub(super) seat: SeatPart,
    pub(super) report: ReportPart,
}

/// A whole board.
#[repr(C)]
#[derive(Debug)]
pub struct BoardLayout {
    pub(super) header: BoardHeader,
    pub(super) children: [ChildSlot; BOARD_SLOTS],
}

#[cfg(not(loom))]
mod pinned {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    const _: () = assert!(size_of::<Line>() == 128);
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
    const _: () = assert!(size_of::<ReportPart>() == 256);
    const _: () = assert!(size_of::<BoardLayout>() == 12416);
    // A mapping starts at a page, so that no alignment in it may exceed the smallest page.
    const _: () =
        assert!(align_of::<RingPairLayout>() <= 4096 && align_of::<BoardLayout>() <= 4096);
    const _: () = assert!(RING_ENTRIES.is_power_of_two());
}
