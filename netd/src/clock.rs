//! The clock of tests that use sockets or threads, on a runtime with one thread. Where all is in one process,
//! `start_paused` does more.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

/// For so long a clock stands still at most: a guard against tests that hang.
const GUARD: Duration = Duration::from_secs(300);

/// Lets so much time pass at once.
pub(crate) async fn skip(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

/// No time passes until the value is dropped, however long things take.
#[must_use]
pub(crate) fn stop() -> Stopped {
    tokio::time::pause();
    // While a thread works for the runtime, a paused clock does not jump to the next timer.
    let (end, ended) = sync_channel(0);
    drop(tokio::task::spawn_blocking(move || ended.recv_timeout(GUARD)));
    Stopped { _end: end }
}

/// A clock that stands still.
#[derive(Debug)]
pub(crate) struct Stopped {
    _end: SyncSender<()>,
}

impl Drop for Stopped {
    fn drop(&mut self) {
        tokio::time::resume();
    }
}
