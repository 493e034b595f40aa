//! The socket on which the supervisor tells `sepal status` what runs: whoever connects gets one
//! [`InstanceReport`] as JSON and the end of the stream. The socket lies in the instance's folder,
//! which is closed to other users.
//!
//! An answer is smaller than the socket's buffer, so the supervisor never waits for a reader.

mod command;

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use tracing::{debug, warn};

use crate::report::InstanceReport;

pub use command::run;

/// Connections that are answered before the supervisor does something else.
const CONNECTIONS_AT_ONCE: usize = 16;

/// How long an answer may take; the supervisor answers at once unless it is stopped.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest answer that is read; a report has about 700 bytes for each child.
const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// The supervisor's end.
#[derive(Debug)]
pub struct StatusSocket {
    listener: UnixListener,
    /// Whether the last connection could not be taken, for lack of descriptors perhaps.
    is_paused: bool,
}

impl StatusSocket {
    /// Listens at `path`.
    ///
    /// # Errors
    /// When the socket cannot be made there.
    pub fn bind(path: &Path) -> io::Result<StatusSocket> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(StatusSocket { listener, is_paused: false })
    }

    /// The descriptor to wait on; `None` until the next [`resume`](Self::resume) after a failure.
    pub fn waits_on(&self) -> Option<BorrowedFd<'_>> {
        (!self.is_paused).then(|| self.listener.as_fd())
    }

    /// Waits for connections again after a failure.
    pub fn resume(&mut self) {
        self.is_paused = false;
    }

    /// Answers those that have connected; the rest is answered in the next round.
    pub fn answer(&mut self, report: impl Fn() -> InstanceReport) {
        for _ in 0..CONNECTIONS_AT_ONCE {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if let Err(error) = send(&stream, &report()) {
                        debug!(%error, "cannot send the status");
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    warn!(%error, "cannot accept a status request");
                    self.is_paused = true;
                    return;
                }
            }
        }
    }
}

fn send(mut stream: &UnixStream, report: &InstanceReport) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.write_all(&serde_json::to_vec(report)?)
}

/// Asks the supervisor that listens at `path`.
///
/// # Errors
/// When nobody listens there, or no report comes in time.
pub fn ask(path: &Path) -> io::Result<InstanceReport> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let mut bytes = Vec::new();
    stream.take(MAX_ANSWER_BYTES).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> InstanceReport {
        InstanceReport {
            instance: "x".into(),
            supervisor_pid: 7,
            started_unix_s: 8,
            children: Vec::new(),
        }
    }

    #[test]
    fn whoever_connects_gets_the_report() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("status");
        assert_eq!(ask(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        let mut socket = StatusSocket::bind(&path).unwrap();
        socket.answer(|| panic!("nobody asks"));
        let asking: Vec<_> = (0..20)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || ask(&path))
            })
            .collect();
        while !asking.iter().all(|thread| thread.is_finished()) {
            socket.answer(report);
        }
        for thread in asking {
            assert_eq!(thread.join().unwrap().unwrap(), report());
        }
    }

    #[test]
    fn who_goes_away_or_never_reads_delays_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("status");
        let mut socket = StatusSocket::bind(&path).unwrap();
        let silent = UnixStream::connect(&path).unwrap();
        drop(UnixStream::connect(&path).unwrap());
        let asking = std::thread::spawn(move || ask(&path));
        while !asking.is_finished() {
            socket.answer(report);
        }
        assert_eq!(asking.join().unwrap().unwrap(), report());
        drop(silent);
    }
}
