//! Requests that were not served as asked, counted by kind. `sepal status` shows the
//! counts.

use std::sync::atomic::{AtomicU64, Ordering};

use shared::figures::Trouble;

/// The counts of one run.
#[derive(Debug, Default)]
pub struct ErrorCounts {
    counts: [AtomicU64; Trouble::ALL.len()],
}

impl ErrorCounts {
    /// Counts one.
    pub fn count(&self, trouble: Trouble) {
        if let Some(count) = self.counts.get(trouble as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// All counts, in the order of [`Trouble::ALL`].
    pub fn counts(&self) -> [u64; Trouble::ALL.len()] {
        self.counts.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// The count of one kind.
    pub fn of(&self, trouble: Trouble) -> u64 {
        self.counts()[trouble as usize]
    }
}
