//! The socket on which an operator asks the supervisor: one [`InstanceRequest`] as a line of JSON, answered
//! with one [`InstanceAnswer`] as JSON and the end of the stream. The socket lies in the instance's folder,
//! which is closed to other users.
//!
//! An answer is smaller than the socket's buffer, and a request is read as it comes, so the
//! supervisor never waits for the other side.

mod request;

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use crate::report::InstanceReport;

pub use request::{InstanceAnswer, InstanceRequest, MAX_PATIENCE};

/// Connections that are accepted before the supervisor does something else.
const CONNECTIONS_AT_ONCE: usize = 16;

/// Connections whose request is not complete. The oldest goes when another comes.
const MAX_WAITING: usize = 16;

/// How long an answer may take; the supervisor answers at once unless it is stopped. A request may
/// take as long.
const PATIENCE: Duration = Duration::from_secs(5);

/// Longest request.
const MAX_REQUEST_BYTES: usize = 1 << 10;

/// Longest answer that is read; a report has about 700 bytes for each child.
const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// The supervisor's end.
#[derive(Debug)]
pub struct StatusSocket {
    listener: UnixListener,
    /// Whether the last connection could not be taken, for lack of descriptors perhaps.
    is_paused: bool,
    waiting: Vec<StatusConnection>,
}

/// A connection whose request is not complete.
#[derive(Debug)]
struct StatusConnection {
    stream: UnixStream,
    request: Vec<u8>,
    since: Instant,
}

impl StatusSocket {
    /// Listens at `path`.
    ///
    /// # Errors
    /// When the socket cannot be made there.
    pub fn bind(path: &Path) -> io::Result<StatusSocket> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(StatusSocket { listener, is_paused: false, waiting: Vec::new() })
    }

    /// The socket that the executable before listened on.
    ///
    /// # Errors
    /// When it is no socket.
    pub fn adopt(listener: OwnedFd) -> io::Result<StatusSocket> {
        let listener = UnixListener::from(listener);
        listener.set_nonblocking(true)?;
        Ok(StatusSocket { listener, is_paused: false, waiting: Vec::new() })
    }

    /// Another descriptor of the listening socket.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        Ok(self.listener.try_clone()?.into())
    }

    /// The descriptors to wait on. After a failure to accept, connections wait until the next
    /// [`resume`](Self::resume).
    pub fn waits_on(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let listener = (!self.is_paused).then(|| self.listener.as_fd());
        listener.into_iter().chain(self.waiting.iter().map(|caller| caller.stream.as_fd()))
    }

    /// Waits for connections again after a failure, and drops callers that send nothing.
    pub fn resume(&mut self) {
        self.is_paused = false;
        self.waiting.retain(|caller| caller.since.elapsed() < PATIENCE);
    }

    /// Answers those whose request is complete. Those that have not connected yet are accepted in
    /// the next round.
    pub fn answer(&mut self, mut answer: impl FnMut(InstanceRequest) -> InstanceAnswer) {
        self.accept();
        self.waiting.retain_mut(|caller| match caller.read() {
            Ok(None) => true,
            Ok(Some(line)) => {
                let answer = match InstanceRequest::parse(&line) {
                    Ok(request) => answer(request),
                    Err(error) => InstanceAnswer::Refused { error },
                };
                if let Err(error) = send(&caller.stream, &answer) {
                    debug!(%error, "cannot answer a status request");
                }
                false
            }
            Err(error) => {
                debug!(%error, "cannot read a status request");
                false
            }
        });
    }

    fn accept(&mut self) {
        for _ in 0..CONNECTIONS_AT_ONCE {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    warn!(%error, "cannot accept a status request");
                    self.is_paused = true;
                    return;
                }
            };
            if let Err(error) = stream.set_nonblocking(true) {
                debug!(%error, "cannot set up a status connection");
                continue;
            }
            if self.waiting.len() == MAX_WAITING {
                self.waiting.remove(0);
            }
            self.waiting.push(StatusConnection {
                stream,
                request: Vec::new(),
                since: Instant::now(),
            });
        }
    }
}

impl StatusConnection {
    /// The line of its request, once it is complete.
    fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut buffer = [0; MAX_REQUEST_BYTES];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.request.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if let Some(end) = self.request.iter().position(|&byte| byte == b'\n') {
                self.request.truncate(end);
                return Ok(Some(std::mem::take(&mut self.request)));
            }
            if self.request.len() > MAX_REQUEST_BYTES {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
    }
}

fn send(mut stream: &UnixStream, answer: &InstanceAnswer) -> io::Result<()> {
    stream.write_all(&serde_json::to_vec(answer)?)
}

/// Asks the supervisor that listens at `path` for its report; for the state of the instance alone
/// if `brief`. Asks a second time when the supervisor replaces its executable meanwhile, which closes
/// connections.
///
/// # Errors
/// When nobody listens there, or no report comes in time.
pub fn ask(path: &Path, brief: bool) -> io::Result<InstanceReport> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    let request = InstanceRequest::Report { brief };
    let answer = match order(path, &request) {
        Err(error) if [BrokenPipe, ConnectionReset, UnexpectedEof].contains(&error.kind()) => {
            order(path, &request)
        }
        answer => answer,
    };
    match answer? {
        InstanceAnswer::Report(report) => Ok(*report),
        InstanceAnswer::Accepted => Err(io::ErrorKind::InvalidData.into()),
        InstanceAnswer::Refused { error } => Err(io::Error::other(error)),
    }
}

/// Sends a request to the supervisor that listens at `path`.
///
/// # Errors
/// When nobody listens there, or no answer comes in time.
pub fn order(path: &Path, request: &InstanceRequest) -> io::Result<InstanceAnswer> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
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
            ..InstanceReport::default()
        }
    }

    #[test]
    fn who_is_cut_off_once_asks_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("status");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| ask(&path, true));
            drop(listener.accept().unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            // Bytes that nobody read would cut this one off too.
            io::BufRead::read_line(&mut io::BufReader::new(&stream), &mut String::new()).unwrap();
            let answer = InstanceAnswer::Report(Box::new(report()));
            stream.write_all(&serde_json::to_vec(&answer).unwrap()).unwrap();
            drop(stream);
            assert_eq!(asking.join().unwrap().unwrap().supervisor_pid, 7);
        });
    }

    fn reporting(_: InstanceRequest) -> InstanceAnswer {
        InstanceAnswer::Report(Box::new(report()))
    }

    fn socket() -> (tempfile::TempDir, std::path::PathBuf, StatusSocket) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("status");
        assert_eq!(ask(&path, false).unwrap_err().kind(), io::ErrorKind::NotFound);
        let socket = StatusSocket::bind(&path).unwrap();
        (dir, path, socket)
    }

    #[test]
    fn whoever_asks_gets_the_report() {
        let (_dir, path, mut socket) = socket();
        socket.answer(|_| panic!("nobody asks"));
        let asking: Vec<_> = (0..12)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || ask(&path, false))
            })
            .collect();
        while !asking.iter().all(|thread| thread.is_finished()) {
            socket.answer(reporting);
        }
        for thread in asking {
            assert_eq!(thread.join().unwrap().unwrap(), report());
        }
    }

    #[test]
    fn who_goes_away_never_reads_or_never_asks_delays_nobody() {
        let (_dir, path, mut socket) = socket();
        let silent: Vec<_> = (0..40).map(|_| UnixStream::connect(&path).unwrap()).collect();
        drop(UnixStream::connect(&path).unwrap());
        let asking = std::thread::spawn(move || ask(&path, false));
        while !asking.is_finished() {
            socket.answer(reporting);
        }
        assert_eq!(asking.join().unwrap().unwrap(), report());
        assert!(socket.waiting.len() <= MAX_WAITING);
        drop(silent);
        socket.answer(|_| panic!("nobody asked"));
        assert_eq!(socket.waits_on().count(), 1, "connections that closed are forgotten");
    }

    /// What is answered to these bytes.
    fn answered(bytes: &[u8]) -> Vec<u8> {
        let (_dir, path, mut socket) = socket();
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(bytes).unwrap();
        for _ in 0..4 {
            socket.answer(|request| {
                assert_eq!(request, InstanceRequest::Resume);
                InstanceAnswer::Accepted
            });
        }
        drop(socket);
        let mut answer = Vec::new();
        // A caller that is dropped with unread bytes sees its connection reset.
        let _ = stream.read_to_end(&mut answer);
        answer
    }

    #[test]
    fn a_request_is_a_short_line_of_json() {
        assert_eq!(answered(b"{\"request\":\"resume\"}\n"), br#""accepted""#);
        for wrong in [&b"resume\n"[..], b"{\"request\":\"dance\"}\n", b"\n", b"[[[[\n", b"\xff\n"] {
            let answer = String::from_utf8(answered(wrong)).unwrap();
            assert!(answer.starts_with(r#"{"refused":{"error":"invalid request"#), "{answer}");
        }
        for incomplete in [&b""[..], b"{\"request\":\"resume\"}", &[b'x'; 5000]] {
            assert_eq!(answered(incomplete), b"");
        }
    }
}
