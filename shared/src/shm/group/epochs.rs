//! The one protocol below sums and broadcasts: an exchange, in which each rank may write its own
//! buffer, publishes, and may read the buffers of others.
//!
//! ```text
//!   begin      wait until every rank published exchange E - 1; from now on this is exchange E
//!   write      into the own buffer of E's parity
//!   publish    epoch <- E; ring who sleeps for it
//!   wait_for   rank p's epoch is E (or E + 1)
//!   read       from p's buffer of E's parity
//! ```
//!
//! # Why two buffers are enough, with no barrier
//!
//! In exchange E a rank writes the buffer that it wrote in E - 2. Whoever read it then did so before
//! it published E - 1, and `begin` has waited for that. So a rank is at most one exchange ahead of
//! any other, and never overwrites what the slowest still reads.
//!
//! An exchange names its operation, which must be equal on all ranks. Ranks that follow different
//! plans get an error in the place of wrong sums.

use std::io;
use std::sync::Arc;

use super::GroupError;
use super::layout::{PARITIES, rank_id};
use super::map::GroupMap;
use super::wait::{SleepPurpose, WaitPolicy, Waiter};
use crate::shm::sync::Ordering;

/// The exchanges of one rank.
#[derive(Debug)]
pub(super) struct Epochs {
    waiter: Waiter,
    /// Exchanges begun. The copy in the segment is written, never read back.
    epoch: u64,
    /// What the current exchange is.
    operation: u64,
}

impl Epochs {
    pub(super) fn new(map: &Arc<GroupMap>, policy: WaitPolicy) -> io::Result<Epochs> {
        let waiter = Waiter::new(map, SleepPurpose::Exchange, policy)?;
        Ok(Epochs { waiter, epoch: 0, operation: 0 })
    }

    /// The rank that exchanges.
    pub(super) fn rank(&self) -> usize {
        self.waiter.rank()
    }

    /// All ranks but this one.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        self.waiter.peers()
    }

    /// Begins the next exchange, once the own buffer may be written.
    pub(super) fn begin(&mut self, operation: u64) -> Result<(), GroupError> {
        self.waiter.check_abort()?;
        self.peers().try_for_each(|peer| self.arrival_of(peer))?;
        self.epoch = self.epoch.wrapping_add(1);
        self.operation = operation;
        Ok(())
    }

    /// Writes `bytes` at `offset` of the own buffer.
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        self.waiter.map().write(self.parity(), offset, bytes);
    }

    /// Shows the own buffer to the others. Nothing is written to it after.
    pub(super) fn publish(&self) -> Result<(), GroupError> {
        let published = &self.waiter.map().control().ranks[self.rank()].published;
        // Only now, beside the epoch, so that ranks that poll the line lose it once.
        published.operations[self.parity()].store(self.operation, Ordering::Relaxed);
        // SYNC POINT group.epoch: publishes the buffer and the operation of this exchange, and says
        // that the buffers of the one before were read; pairs with the load in has_arrived().
        published.epoch.store(self.epoch, Ordering::Release);
        self.waiter.wake_peers()
    }

    /// Waits until the buffer of `peer` can be read.
    pub(super) fn wait_for(&self, peer: usize) -> Result<(), GroupError> {
        self.arrival_of(peer)?;
        let published = &self.waiter.map().control().ranks[peer].published;
        let theirs = published.operations[self.parity()].load(Ordering::Relaxed);
        if theirs == self.operation {
            return Ok(());
        }
        let (rank, epoch, ours) = (rank_id(peer), self.epoch, self.operation);
        Err(GroupError::Mismatch { rank, epoch, theirs, ours })
    }

    /// Fills `bytes` from `offset` of the buffer of `peer`, for which was waited in this exchange.
    pub(super) fn read(&self, peer: usize, offset: usize, bytes: &mut [u8]) {
        self.waiter.map().read(peer, self.parity(), offset, bytes);
    }

    fn arrival_of(&self, peer: usize) -> Result<(), GroupError> {
        self.waiter.wait_for(peer, || self.has_arrived(peer))
    }

    /// Whether `peer` published the current exchange.
    fn has_arrived(&self, peer: usize) -> Result<bool, GroupError> {
        let published = &self.waiter.map().control().ranks[peer].published;
        // SYNC POINT group.epoch: after this load the peer's buffer and operation of the epoch are
        // visible, and it is done reading this rank's buffer of the epoch before; pairs with the
        // store in publish().
        let theirs = published.epoch.load(Ordering::Acquire);
        match theirs.wrapping_sub(self.epoch) {
            0 | 1 => Ok(true),
            u64::MAX => Ok(false),
            _ => {
                let (rank, ours) = (rank_id(peer), self.epoch);
                Err(GroupError::Corrupt { what: "epoch", rank, theirs, ours })
            }
        }
    }

    fn parity(&self) -> usize {
        (self.epoch % PARITIES as u64) as usize
    }
}
