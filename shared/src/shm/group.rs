//! The memory that the ranks of a group share: sums and decisions that cross between them while
//! they compute a unit, and the log of plans that rank 0 writes.
//!
//! ```text
//!   supervisor   Group        makes the segment and a doorbell per rank; aborts; sees who waits for whom
//!   every rank   GroupMap     the mapped segment; made once per process, shared by the others
//!                Member       all_reduce and broadcast, on the thread that computes
//!                DeviceArea   what the kernels of a CUDA device use in the place of a Member
//!   rank 0       PlanWriter   publishes records of bytes
//!   other ranks  PlanReader   read every record, in order
//! ```
//!
//! The words and buffers in the segment are drawn in `layout`, the protocols are described in
//! `epochs` and `log`.
//!
//! # Who is believed
//!
//! Only the supervisor. A rank checks what another wrote against bounds that came from the
//! supervisor ([`GroupShape`]); the header of the segment is compared with them once and never read
//! again. A rank can give others wrong sums and wrong plans, and can have them wait until the
//! supervisor ends the group, but cannot lead them outside the segment. Sums cross as raw copies of
//! numbers, of which every bit pattern is valid.
//!
//! # A group lives and dies together
//!
//! Nothing here is repaired. After any [`GroupError`] the process ends; the supervisor aborts the
//! group, so that no rank waits for a dead one, and starts a new group over a new segment.
//!
//! Under `--cfg loom` the same code runs over `loom_map` in the place of the mapped segment.

use std::io;

use crate::ids::Rank;

mod bytes;
#[cfg(not(loom))]
mod device;
mod epochs;
mod layout;
mod log;
#[cfg(not(loom))]
mod map;
mod member;
mod wait;

#[cfg(loom)]
mod loom_map;
#[cfg(loom)]
use loom_map as map;

#[cfg(not(loom))]
pub use device::DeviceArea;
pub use layout::{
    DEVICE_FLAG_BYTES, GroupShape, MAX_EXCHANGE_VALUES, MAX_LOG_BYTES, MAX_RANKS, ShapeError,
};
pub use log::{PlanPosition, PlanReader, PlanWriter};
pub use map::GroupMap;
#[cfg(not(loom))]
pub use map::{GroupMapError, GroupOwner};
pub use member::GroupMember;
pub use wait::WaitPolicy;

/// Why an exchange or the plan log failed. The group is of no more use to this process.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The supervisor ended the group: another rank died or hangs.
    #[error("the group was aborted")]
    Aborted,
    /// A rank published a number that no honest history can reach.
    #[error(
        "segment of the group is corrupt: {what} of rank {rank} is {theirs} while ours is {ours}"
    )]
    Corrupt {
        what: &'static str,
        rank: Rank,
        theirs: u64,
        /// The number of this rank that bounds it.
        ours: u64,
    },
    /// Two ranks execute different operations: they do not follow the same plan.
    #[error(
        "rank {rank} runs operation {theirs:#x} of epoch {epoch} while this rank runs {ours:#x}"
    )]
    Mismatch {
        /// The other rank.
        rank: Rank,
        /// The epoch of the exchange.
        epoch: u64,
        theirs: u64,
        /// The operation of this rank.
        ours: u64,
    },
    /// The device of this rank met one that executes a different operation.
    #[error("rank {rank} runs another operation than the device of this rank")]
    Misled {
        /// The other rank.
        rank: Rank,
    },
    /// A record is longer than the plan log.
    #[error("record of {bytes} bytes exceeds the {limit_bytes} bytes of the plan log")]
    TooLong {
        /// Length of the record.
        bytes: usize,
        /// Longest record.
        limit_bytes: usize,
    },
    /// A doorbell is broken.
    #[error("use a doorbell of the group")]
    Doorbell(#[from] io::Error),
}

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;
