//! Requests that were not served as asked, counted by kind. The board shows the counts (`sepal
//! status`).

use std::sync::atomic::{AtomicU64, Ordering};

use shared::shm::board::Trouble;
use shared::shm::layout::TROUBLES;

/// The counts of one run.
#[derive(Debug, Default)]
pub struct ErrorCounts {
    counts: [AtomicU64; TROUBLES],
}

impl ErrorCounts {
    /// Counts one.
    pub fn count(&self, trouble: Trouble) {
        if let Some(count) = self.counts.get(trouble as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// All counts, in the order of [`Trouble::ALL`].
    pub fn counts(&self) -> [u64; TROUBLES] {
        self.counts.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// The count of one kind.
    pub fn of(&self, trouble: Trouble) -> u64 {
        self.counts()[trouble as usize]
    }
}
