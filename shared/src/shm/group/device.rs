//! What the kernels of a CUDA device use of a group's segment. They exchange by themselves, in the
//! place of a [`Member`](super::Member): `kernels/cuda/exchange.cu` has their protocol. The host
//! registers these bytes with its device and tells it where the words lie.
//!
//! | bytes | device | host |
//! | --- | --- | --- |
//! | aborted | reads it while it waits | the supervisor sets it |
//! | waits_for of the rank | a rank plus 1 while it waits long for that rank, then 0 | the supervisor reads it |
//! | misled of the rank | a rank plus 1 when that rank runs another operation | reads it when the device is done |
//! | exchange memory | flags and partial sums, where devices do not reach each other's memory | never touches it |

use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;

use super::layout::{CONTROL_BYTES, Control, RankShared, Sleep, rank_id};
use super::{GroupError, GroupMap};
use crate::ids::Rank;
use crate::shm::sync::Ordering;

/// The part of a group's segment that the device of one rank uses; the segment stays mapped as long
/// as this lives.
#[derive(Clone, Debug)]
pub struct DeviceArea {
    map: Arc<GroupMap>,
}

impl DeviceArea {
    /// What the device of the rank of `map` uses.
    pub fn new(map: Arc<GroupMap>) -> DeviceArea {
        DeviceArea { map }
    }

    /// The group.
    pub fn map(&self) -> &Arc<GroupMap> {
        &self.map
    }

    /// The rank, as an index.
    pub fn rank(&self) -> usize {
        self.map.rank()
    }

    /// Address and length of the words. No Rust reference into them is ever made but to atomics.
    pub fn words(&self) -> (NonNull<u8>, usize) {
        (self.map.at(0, CONTROL_BYTES), CONTROL_BYTES)
    }

    /// Where in the words lie: aborted, and of this rank waits_for and misled.
    pub fn word_offsets(&self) -> [usize; 3] {
        let rank = offset_of!(Control, ranks) + self.rank() * size_of::<RankShared>();
        let sleep = rank + offset_of!(RankShared, sleep);
        let own = [offset_of!(Sleep, waits_for), offset_of!(Sleep, misled)];
        let [waits_for, misled] = own.map(|word| sleep + word);
        [offset_of!(Control, aborted), waits_for, misled]
    }

    /// Address and length of the exchange memory of all ranks, one after the other. No Rust
    /// reference into it is ever made.
    pub fn exchange_memory(&self) -> (NonNull<u8>, usize) {
        let shape = self.map.shape();
        let bytes = shape.world() * shape.device_bytes();
        (self.map.at(shape.device_offset(0), bytes), bytes)
    }

    /// Fails once the group was aborted, or the device has found that another rank follows another
    /// plan.
    ///
    /// # Errors
    /// [`GroupError::Aborted`] or [`GroupError::Misled`].
    pub fn check(&self) -> Result<(), GroupError> {
        let control = self.map.control();
        // Nothing is published with these words; the device is done when the host looks.
        match control.ranks[self.rank()].sleep.misled.load(Ordering::Relaxed) {
            0 => {}
            word => return Err(GroupError::Misled { rank: rank_of(word) }),
        }
        match control.aborted.value.load(Ordering::Relaxed) {
            0 => Ok(()),
            _ => Err(GroupError::Aborted),
        }
    }
}

/// The rank in a word of `Sleep` that is not 0.
fn rank_of(word: u64) -> Rank {
    rank_id(usize::try_from(word.wrapping_sub(1)).unwrap_or(usize::MAX))
}
