//! How far the preparation of a span is: what each step of the work reports, and what the
//! supervisor is told of it.

use std::time::{Duration, Instant};

use shared::control::{self, PrepareStage};

use crate::error::PrepareError;

/// Receives what got done; an error ends the work.
pub type Watch<'a> = dyn FnMut(PrepareProgress) -> Result<(), PrepareError> + 'a;

/// Shortest time between two messages about the same block and stage.
const MESSAGE_PERIOD: Duration = Duration::from_millis(200);

/// What got done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrepareProgress {
    /// The work goes on, without anything to count.
    Alive,
    Block {
        /// Its number within the span, from 1.
        block: u32,
        /// Blocks of the span.
        blocks: u32,
    },
    /// More of the present block is downloaded.
    Download {
        /// Bytes of the block that are there.
        done: u64,
        /// Bytes of the block.
        total: u64,
    },
    /// One tensor was checked or converted.
    Tensor {
        /// Its bytes in the checkpoint.
        bytes: u64,
    },
}

/// Adds up what got done over the blocks of a span.
#[derive(Debug)]
pub struct Tracker {
    block: u32,
    blocks: u32,
    stage: PrepareStage,
    /// Bytes downloaded of earlier blocks, of the present block, and all bytes of the present one.
    downloaded: (u64, u64, u64),
    /// Bytes converted of earlier blocks and of the present block.
    converted: (u64, u64),
    last: Option<(Instant, u32, PrepareStage)>,
}

impl Default for Tracker {
    fn default() -> Tracker {
        Tracker {
            block: 0,
            blocks: 0,
            stage: PrepareStage::Converting,
            downloaded: (0, 0, 0),
            converted: (0, 0),
            last: None,
        }
    }
}

impl Tracker {
    /// Takes in what got done; returns what to tell the supervisor, if it is time to.
    pub fn record(&mut self, progress: PrepareProgress, now: Instant) -> Option<control::Progress> {
        match progress {
            PrepareProgress::Alive => return None,
            PrepareProgress::Block { block, blocks } => {
                (self.block, self.blocks) = (block, blocks);
                self.downloaded = (self.downloaded.0.saturating_add(self.downloaded.1), 0, 0);
                self.converted = (self.converted.0.saturating_add(self.converted.1), 0);
            }
            PrepareProgress::Download { done, total } => {
                self.stage = PrepareStage::Downloading;
                (self.downloaded.1, self.downloaded.2) = (done, total);
            }
            PrepareProgress::Tensor { bytes } => {
                self.stage = PrepareStage::Converting;
                self.converted.1 = self.converted.1.saturating_add(bytes);
            }
        }
        let is_due = self.last.is_none_or(|(at, block, stage)| {
            (block, stage) != (self.block, self.stage) || now >= at + MESSAGE_PERIOD
        });
        is_due.then(|| {
            self.last = Some((now, self.block, self.stage));
            self.message()
        })
    }

    fn message(&self) -> control::Progress {
        let left = u64::from(self.blocks.saturating_sub(self.block));
        let (bytes_done, bytes_total) = match self.stage {
            PrepareStage::Downloading => {
                let (before, done, of_block) = self.downloaded;
                (before + done, before.saturating_add(of_block.saturating_mul(left + 1)))
            }
            PrepareStage::Converting => {
                // The first block tells the size of the others once it is done.
                let (before, done) = self.converted;
                let earlier = u64::from(self.block.saturating_sub(1)).max(1);
                (before + done, before.saturating_add((before / earlier).saturating_mul(left + 1)))
            }
        };
        control::Progress {
            stage: self.stage,
            block: self.block,
            blocks: self.blocks,
            bytes_done,
            bytes_total: bytes_total.max(if bytes_total > 0 { bytes_done } else { 0 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downloads_are_estimated_from_the_present_block() {
        let (mut tracker, now) = (Tracker::default(), Instant::now());
        tracker.record(PrepareProgress::Block { block: 1, blocks: 4 }, now);
        let told = tracker.record(PrepareProgress::Download { done: 50, total: 100 }, now).unwrap();
        assert_eq!((told.stage, told.bytes_done), (PrepareStage::Downloading, 50));
        assert_eq!(told.bytes_total, 400);
        tracker.record(PrepareProgress::Download { done: 100, total: 100 }, now);
        tracker.record(PrepareProgress::Block { block: 2, blocks: 4 }, now);
        let later = now + MESSAGE_PERIOD;
        let told =
            tracker.record(PrepareProgress::Download { done: 10, total: 100 }, later).unwrap();
        assert_eq!((told.block, told.bytes_done, told.bytes_total), (2, 110, 400));
    }

    #[test]
    fn conversion_is_estimated_once_a_block_is_done() {
        let (mut tracker, now) = (Tracker::default(), Instant::now());
        let told = tracker.record(PrepareProgress::Block { block: 1, blocks: 2 }, now).unwrap();
        assert_eq!((told.block, told.bytes_total), (1, 0));
        tracker.record(PrepareProgress::Tensor { bytes: 30 }, now);
        let told = tracker.record(PrepareProgress::Block { block: 2, blocks: 2 }, now).unwrap();
        assert_eq!((told.bytes_done, told.bytes_total), (30, 60));
    }

    #[test]
    fn messages_about_one_block_are_rare() {
        let (mut tracker, now) = (Tracker::default(), Instant::now());
        assert!(tracker.record(PrepareProgress::Block { block: 1, blocks: 1 }, now).is_some());
        assert!(tracker.record(PrepareProgress::Tensor { bytes: 1 }, now).is_none());
        assert!(tracker.record(PrepareProgress::Alive, now + MESSAGE_PERIOD).is_none());
        assert!(
            tracker.record(PrepareProgress::Tensor { bytes: 1 }, now + MESSAGE_PERIOD).is_some()
        );
    }

    #[test]
    fn absurd_sizes_do_not_overflow() {
        let (mut tracker, now) = (Tracker::default(), Instant::now());
        tracker.record(PrepareProgress::Block { block: 1, blocks: u32::MAX }, now);
        let told =
            tracker.record(PrepareProgress::Download { done: u64::MAX, total: u64::MAX }, now);
        assert_eq!(told.unwrap().bytes_total, u64::MAX);
    }
}
