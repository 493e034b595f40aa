//! How often children show that they live, how often the supervisor looks, and how long a child may
//! make no progress.
//!
//! A heartbeat is one store into the child's own slot of the board by the thread that does its work:
//! the executor of a worker, the main task of netd's reactor, the thread of prepare. Work counts as
//! a heartbeat. A worker beats without work only if no job waits in its ring. The interval is a
//! quarter of `--hang_timeout`, so an idle child wakes up every 7.5 s by default.

use std::time::Duration;

use shared::shm::board::ChildSnapshot;

/// The shortest time after which a child counts as hung: a busy machine delays threads for this
/// long.
const SHORTEST: Duration = Duration::from_millis(200);

/// The longest time between two readings of the board, which also shows what children do.
const LONGEST_PACE: Duration = Duration::from_secs(5);

/// The times of one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Liveness {
    /// Longest time without progress of a child that has started.
    hang_timeout: Duration,
    /// Longest time between two heartbeats of a child.
    pub(super) heartbeat: Duration,
    /// Time between two readings of the board.
    pub(super) pace: Duration,
}

impl Liveness {
    pub(super) fn of(hang_timeout: Duration) -> Liveness {
        let hang_timeout = hang_timeout.max(SHORTEST);
        let pace = (hang_timeout / 8).min(LONGEST_PACE);
        Liveness { hang_timeout, heartbeat: hang_timeout / 4, pace }
    }

    /// How long the progress counter of `child` may stand still; `None` if only `--start_timeout`
    /// limits it.
    pub(super) fn limit(&self, child: &ChildSnapshot) -> Option<Duration> {
        // Every phase has a start; before the first one the child has not opened the board.
        let has_begun = child.phase_started_ns > 0;
        match child.phase.is_start() {
            _ if !has_begun => None,
            false => Some(self.hang_timeout),
            true if child.phase_limit.is_zero() => None,
            true => Some(child.phase_limit.max(self.hang_timeout)),
        }
    }
}
