//! Requests that were not served as asked, counted by kind. The board shows the counts (`sepal
//! status`).

use std::sync::{Mutex, PoisonError};

use shared::shm::board::Trouble;
use shared::shm::layout::TROUBLES;

/// The counts of one run.
#[derive(Debug, Default)]
pub struct Troubles {
    counts: Mutex<[u64; TROUBLES]>,
}

impl Troubles {
    /// Counts one.
    pub fn count(&self, trouble: Trouble) {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)[trouble as usize] += 1;
    }

    /// All counts, in the order of [`Trouble::ALL`].
    pub fn counts(&self) -> [u64; TROUBLES] {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The count of one kind.
    pub fn of(&self, trouble: Trouble) -> u64 {
        self.counts()[trouble as usize]
    }
}
