//! Sums and decisions that cross between the ranks of a group, over [`epochs`](super::epochs).
//!
//! # Sums
//!
//! Every rank gets ((r0 + r1) + r2) + ..., in float32, so that the bits depend on the values alone.
//! (The payload of a NaN is not among them.) There are two ways to the same bits:
//!
//! - one shot: a rank writes its values, waits for all, and adds them up. A value is read world - 1
//!   times by each rank.
//! - two shots: a rank adds up one segment of the values, then collects the other segments. A value
//!   is read twice at most, for one more wait.
//!
//! With two ranks both read as much, so that the second wait buys nothing. The choice depends on the
//! length and the world size alone, never on load.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::GroupError;
use super::bytes;
use super::epochs::Epochs;
use super::map::GroupMap;
use super::wait::WaitPolicy;

/// Fewest values for two shots: with 64 KiB, the reads that it saves among three ranks take longer
/// than a wait with spinning (estimated). Tests get both ways from short messages.
const TWO_SHOT_VALUES: usize = if cfg!(any(test, loom)) { 48 } else { 16 * 1024 };

/// Values that are added up at once: two of these arrays stay in the L1 cache.
const CHUNK_VALUES: usize = 1024;

/// Segments of two shots begin at a multiple of this: a cache line that one rank writes.
const LINE_VALUES: usize = 16;

/// What an exchange is, in the upper half of the word that ranks compare; its length is the lower.
#[derive(Clone, Copy)]
#[repr(u64)]
enum GroupOperation {
    SumAtOnce = 1,
    SumSegment = 2,
    CollectSegments = 3,
    Broadcast = 4,
}

impl GroupOperation {
    fn word(self, len: usize) -> u64 {
        (self as u64) << 32 | len as u64
    }
}

/// A rank of a group, on the thread that computes. All ranks call the same methods with the same
/// lengths in the same order.
#[derive(Debug)]
pub struct GroupMember {
    epochs: Epochs,
    world: usize,
    exchange_values: usize,
    /// The sum of the ranks before this one, and what was read of a rank.
    scratch: Box<[[f32; CHUNK_VALUES]; 2]>,
}

impl GroupMember {
    /// The rank of this process in the group of `map`. A process has one `Member`; a second one
    /// would take part in the same exchanges, which ends the group.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new(map: &Arc<GroupMap>, policy: WaitPolicy) -> io::Result<GroupMember> {
        let shape = map.shape();
        let (world, exchange_values) = (shape.world(), shape.exchange_values);
        let scratch = Box::new([[0.0; CHUNK_VALUES]; 2]);
        Ok(GroupMember { epochs: Epochs::new(map, policy)?, world, exchange_values, scratch })
    }

    /// Replaces `values` by their sum over all ranks, added in the order of ranks: the same bits on
    /// every rank. Values that exceed the exchange buffers cross in pieces.
    ///
    /// # Errors
    /// [`GroupError::Aborted`] once the supervisor ended the group, the other variants when a rank
    /// or a doorbell is at fault. `values` are of no use then.
    pub fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), GroupError> {
        values.chunks_mut(self.exchange_values).try_for_each(|piece| {
            if self.world > 2 && piece.len() >= TWO_SHOT_VALUES {
                self.sum_in_two_shots(piece)
            } else {
                self.sum_in_one_shot(piece)
            }
        })
    }

    /// Replaces `values` by those of rank 0.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn broadcast_values(&mut self, values: &mut [f32]) -> Result<(), GroupError> {
        self.broadcast(bytes::of_mut(values))
    }

    /// Replaces `bytes` by those of rank 0, which may go on before the others have them.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn broadcast(&mut self, bytes: &mut [u8]) -> Result<(), GroupError> {
        let is_source = self.epochs.rank() == 0;
        bytes.chunks_mut(self.exchange_values * size_of::<f32>()).try_for_each(|piece| {
            self.epochs.begin(GroupOperation::Broadcast.word(piece.len()))?;
            if is_source {
                self.epochs.write(0, piece);
                return self.epochs.publish();
            }
            self.epochs.publish()?;
            self.epochs.wait_for(0)?;
            self.epochs.read(0, 0, piece);
            Ok(())
        })
    }

    fn sum_in_one_shot(&mut self, piece: &mut [f32]) -> Result<(), GroupError> {
        self.epochs.begin(GroupOperation::SumAtOnce.word(piece.len()))?;
        self.epochs.write(0, bytes::of(piece));
        self.epochs.publish()?;
        self.epochs.peers().try_for_each(|peer| self.epochs.wait_for(peer))?;
        self.sum(0, piece);
        Ok(())
    }

    fn sum_in_two_shots(&mut self, piece: &mut [f32]) -> Result<(), GroupError> {
        let len = piece.len();
        let own = self.segment(self.epochs.rank(), len);
        self.epochs.begin(GroupOperation::SumSegment.word(len))?;
        for segment in self.epochs.peers().map(|peer| self.segment(peer, len)) {
            self.epochs.write(offset_of(segment.start), bytes::of(&piece[segment]));
        }
        self.epochs.publish()?;
        self.epochs.peers().try_for_each(|peer| self.epochs.wait_for(peer))?;
        self.sum(own.start, &mut piece[own.clone()]);

        self.epochs.begin(GroupOperation::CollectSegments.word(len))?;
        self.epochs.write(offset_of(own.start), bytes::of(&piece[own]));
        self.epochs.publish()?;
        self.epochs.peers().try_for_each(|peer| {
            let segment = self.segment(peer, len);
            self.epochs.wait_for(peer)?;
            self.epochs.read(peer, offset_of(segment.start), bytes::of_mut(&mut piece[segment]));
            Ok(())
        })
    }

    /// The values of a message of `len` that `rank` adds up; empty for the last ranks of a short
    /// one.
    fn segment(&self, rank: usize, len: usize) -> Range<usize> {
        let values = len.div_ceil(self.world).next_multiple_of(LINE_VALUES);
        (rank * values).min(len)..((rank + 1) * values).min(len)
    }

    /// Adds to `own` what the other ranks have from value `start` of their buffers on.
    fn sum(&mut self, start: usize, own: &mut [f32]) {
        let rank = self.epochs.rank();
        let [before, theirs] = &mut *self.scratch;
        for (index, own) in own.chunks_mut(CHUNK_VALUES).enumerate() {
            let offset = offset_of(start + index * CHUNK_VALUES);
            let (before, theirs) = (&mut before[..own.len()], &mut theirs[..own.len()]);
            if rank > 0 {
                self.epochs.read(0, offset, bytes::of_mut(before));
                for peer in 1..rank {
                    self.epochs.read(peer, offset, bytes::of_mut(theirs));
                    add(before, theirs);
                }
                add(before, own);
                own.copy_from_slice(before);
            }
            for peer in rank + 1..self.world {
                self.epochs.read(peer, offset, bytes::of_mut(theirs));
                add(own, theirs);
            }
        }
    }
}

/// Adds `terms` to `sums`, on the right.
fn add(sums: &mut [f32], terms: &[f32]) {
    for (sum, term) in sums.iter_mut().zip(terms) {
        *sum += term;
    }
}

/// Where value `index` lies in a buffer, in bytes.
fn offset_of(index: usize) -> usize {
    index * size_of::<f32>()
}
