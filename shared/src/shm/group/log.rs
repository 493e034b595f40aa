//! The plan log: records of bytes that rank 0 publishes and every other rank reads in the same
//! order. What a record means belongs to the workers.
//!
//! ```text
//!   done by follower          published, not yet done by it                free
//!   ...............|  length | bytes ....... | length | bytes .....   |  ..........
//!                  ^ log cursor of the follower                       ^ log tail
//! ```
//!
//! A record is a word with its length in bytes, and the bytes in as many words as they need. Tail
//! and cursors count words and never wrap; word i lies at i % words. The tail moves by whole
//! records, after their words were written. A follower copies a record out, then checks nothing but
//! the copy; its cursor moves when it says that it is done with what the record asked for. So the
//! cursors tell rank 0 two things: where it may write, and which records every follower has
//! executed.
//!
//! | of a follower: tail - cursor | state |
//! | --- | --- |
//! | 0 | it is done with everything |
//! | 1 to all words | rank 0 may publish what fits in the rest |
//! | more | corrupt |

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::GroupError;
use super::layout::{LogWord, WORD_BYTES, rank_id};
use super::map::GroupMap;
use super::wait::{SleepPurpose, WaitPolicy, Waiter};
#[cfg(not(loom))]
use crate::shm::doorbell::Doorbell;
use crate::shm::ring::Armed;
use crate::shm::sync::Ordering;

/// Rank 0, which publishes.
const LEADER: usize = 0;

/// The end of a record in the log: later records have larger positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlanPosition(u64);

/// Publishes records. Rank 0 has one, and no other rank.
#[derive(Debug)]
pub struct PlanWriter {
    waiter: Waiter,
    /// Words published. The copy in the segment is written, never read back.
    tail: u64,
}

impl PlanWriter {
    /// The writer of a fresh log.
    ///
    /// # Errors
    /// When this process is not rank 0, or is out of descriptors.
    pub fn new(map: &Arc<GroupMap>, policy: WaitPolicy) -> io::Result<PlanWriter> {
        check_side(map.rank() == LEADER, "rank 0 alone publishes plans")?;
        Ok(PlanWriter { waiter: Waiter::new(map, SleepPurpose::Log, policy)?, tail: 0 })
    }

    /// Appends `record`, once the slowest follower has left enough of the log free, and wakes the
    /// followers. The position is for [`is_done`](Self::is_done).
    ///
    /// # Errors
    /// [`GroupError::TooLong`] for a record that the log cannot hold, which leaves everything as it
    /// was; [`GroupError::Aborted`] once the supervisor ended the group; the other variants when a
    /// follower or a doorbell is at fault.
    pub fn publish(&mut self, record: &[u8]) -> Result<PlanPosition, GroupError> {
        let log = self.waiter.map().log();
        let needed = 1 + record.len().div_ceil(WORD_BYTES);
        if needed > log.len() {
            let limit_bytes = (log.len() - 1) * WORD_BYTES;
            return Err(GroupError::TooLong { bytes: record.len(), limit_bytes });
        }
        self.waiter.check_abort()?;
        self.waiter.peers().try_for_each(|follower| {
            self.waiter.wait_for(follower, || {
                Ok(self.pending(follower)? + needed as u64 <= log.len() as u64)
            })
        })?;
        let values =
            std::iter::once(record.len() as u64).chain(record.chunks(WORD_BYTES).map(word_of));
        for (word, value) in words_from(log, self.tail).zip(values) {
            word.claim.write();
            word.value.store(value, Ordering::Relaxed);
        }
        self.tail = self.tail.wrapping_add(needed as u64);
        // SYNC POINT group.log_tail: publishes the words stored above to the load in
        // PlanReader::available().
        self.waiter.map().control().log_tail.value.store(self.tail, Ordering::Release);
        self.waiter.wake_peers()?;
        Ok(PlanPosition(self.tail))
    }

    /// Whether every follower is done with the records up to `position`.
    ///
    /// # Errors
    /// [`GroupError::Corrupt`] when a follower's cursor is impossible.
    pub fn is_done(&self, position: PlanPosition) -> Result<bool, GroupError> {
        let mut followers = self.waiter.peers();
        followers.try_fold(true, |done, follower| Ok(done && self.has_done(follower, position)?))
    }

    /// Waits until every follower is done with the records up to `position`.
    ///
    /// # Errors
    /// As [`publish`](Self::publish), except for [`GroupError::TooLong`].
    pub fn wait_done(&self, position: PlanPosition) -> Result<(), GroupError> {
        self.waiter.check_abort()?;
        self.waiter.peers().try_for_each(|follower| {
            self.waiter.wait_for(follower, || self.has_done(follower, position))
        })
    }

    /// Spins for a moment until every follower is done with the records up to `position`; else has
    /// the first that is not ring this rank. After [`Armed::Sleep`] the caller sleeps on a doorbell
    /// that [`join`](Self::join) was told of, then calls [`disarm`](Self::disarm).
    ///
    /// # Errors
    /// As [`wait_done`](Self::wait_done).
    pub fn arm(&self, position: PlanPosition) -> Result<Armed, GroupError> {
        self.waiter.check_abort()?;
        for follower in self.waiter.peers() {
            if self.waiter.arm(follower, || self.has_done(follower, position))? == Armed::Sleep {
                return Ok(Armed::Sleep);
            }
        }
        Ok(Armed::Ready)
    }

    /// Takes back [`arm`](Self::arm): this rank is awake.
    pub fn disarm(&self) {
        self.waiter.disarm();
    }

    /// Fails once the supervisor ended the group.
    ///
    /// # Errors
    /// [`GroupError::Aborted`].
    pub fn check_abort(&self) -> Result<(), GroupError> {
        self.waiter.check_abort()
    }

    /// Has waits for `bell` end when this rank is rung: by a follower after [`arm`](Self::arm), or
    /// for an abort.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    #[cfg(not(loom))]
    pub fn join(&self, bell: &Doorbell) -> io::Result<()> {
        bell.join(self.waiter.bell())
    }

    fn has_done(&self, follower: usize, position: PlanPosition) -> Result<bool, GroupError> {
        Ok(self.pending(follower)? <= self.tail.wrapping_sub(position.0))
    }

    /// Words with which `follower` is not done.
    fn pending(&self, follower: usize) -> Result<u64, GroupError> {
        let cursor = &self.waiter.map().control().ranks[follower].log_cursor;
        // SYNC POINT group.log_cursor: after this load the follower is done reading the words
        // before the cursor, so that they may be overwritten; pairs with the store in
        // PlanReader::done().
        let theirs = cursor.value.load(Ordering::Acquire);
        let pending = self.tail.wrapping_sub(theirs);
        if pending <= self.waiter.map().log().len() as u64 {
            return Ok(pending);
        }
        let rank = rank_id(follower);
        Err(GroupError::Corrupt { what: "log cursor", rank, theirs, ours: self.tail })
    }
}

/// Reads the records of rank 0. Every other rank has one.
#[derive(Debug)]
pub struct PlanReader {
    waiter: Waiter,
    /// Words read.
    read: u64,
    /// Words of which rank 0 was told that they are done with.
    done: u64,
}

impl PlanReader {
    /// The reader of a fresh log.
    ///
    /// # Errors
    /// When this process is rank 0, or is out of descriptors.
    pub fn new(map: &Arc<GroupMap>, policy: WaitPolicy) -> io::Result<PlanReader> {
        check_side(map.rank() != LEADER, "rank 0 follows no plans")?;
        Ok(PlanReader { waiter: Waiter::new(map, SleepPurpose::Log, policy)?, read: 0, done: 0 })
    }

    /// Copies the next record into `record`, which is emptied first. Waits for it at most for
    /// `timeout`, or until somebody rings this rank's doorbell for another reason; there is no
    /// record then. A follower that waits here is idle: it shows as waiting for no one.
    ///
    /// # Errors
    /// [`GroupError::Aborted`] once the supervisor ended the group, [`GroupError::Corrupt`] when
    /// rank 0 published nonsense, [`GroupError::Doorbell`] when the doorbell is broken.
    pub fn next(
        &mut self,
        record: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<Option<PlanPosition>, GroupError> {
        record.clear();
        self.waiter.check_abort()?;
        if !self.waiter.wait_idle(LEADER, timeout, || Ok(self.available()? > 0))? {
            return Ok(None);
        }
        let mut words = words_from(self.waiter.map().log(), self.read).map(|word| {
            word.claim.read();
            word.value.load(Ordering::Relaxed)
        });
        let (bytes, available) = (words.next().unwrap_or(u64::MAX), self.available()?);
        let needed = bytes.div_ceil(WORD_BYTES as u64);
        if needed >= available {
            let (what, rank) = ("record length", rank_id(LEADER));
            return Err(GroupError::Corrupt { what, rank, theirs: bytes, ours: available });
        }
        record.extend(words.take(needed as usize).flat_map(u64::to_le_bytes));
        record.truncate(bytes as usize);
        self.read = self.read.wrapping_add(1 + needed);
        Ok(Some(PlanPosition(self.read)))
    }

    /// Tells rank 0 that this rank is done with the records up to `position`. Their part of the log
    /// can be written again.
    ///
    /// # Errors
    /// [`GroupError::Doorbell`] when the doorbell of rank 0 is broken.
    pub fn done(&mut self, position: PlanPosition) -> Result<(), GroupError> {
        self.done = position.0.min(self.read).max(self.done);
        let cursor = &self.waiter.map().control().ranks[self.waiter.rank()].log_cursor;
        // SYNC POINT group.log_cursor: the words before it were read before this store; pairs with
        // the load in PlanWriter::pending().
        cursor.value.store(self.done, Ordering::Release);
        self.waiter.wake_peers()
    }

    /// Words published and not read.
    fn available(&self) -> Result<u64, GroupError> {
        // SYNC POINT group.log_tail: after this load the words before the tail are visible; pairs
        // with the store in PlanWriter::publish().
        let theirs = self.waiter.map().control().log_tail.value.load(Ordering::Acquire);
        let available = theirs.wrapping_sub(self.read);
        let in_use = theirs.wrapping_sub(self.done);
        if in_use <= self.waiter.map().log().len() as u64 && available <= in_use {
            return Ok(available);
        }
        let rank = rank_id(LEADER);
        Err(GroupError::Corrupt { what: "log tail", rank, theirs, ours: self.read })
    }
}

fn check_side(is_right: bool, rule: &'static str) -> io::Result<()> {
    if is_right { Ok(()) } else { Err(io::Error::new(io::ErrorKind::InvalidInput, rule)) }
}

/// The words of the log in order, from word `index` on.
fn words_from(log: &[LogWord], index: u64) -> impl Iterator<Item = &LogWord> {
    let (before, after) = log.split_at((index % log.len() as u64) as usize);
    after.iter().chain(before)
}

/// Up to eight bytes as a word.
fn word_of(bytes: &[u8]) -> u64 {
    let mut word = [0; WORD_BYTES];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}
