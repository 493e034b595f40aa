//! The page of `--web`: `sepal gateway` as a process of its own, over this server's own address. It is no
//! part of the tree: whatever becomes of it, the server serves.
//!
//! ```text
//!   online --> started --ended--> pause (1 s, twice as long each time, at most a minute) --> started
//!                 |
//!                 +--upgrade--> leaving: takes no new callers, ends its texts --ended, or LEAVE_TIMEOUT--> gone
//! ```
//! The process of the next executable listens beside one that leaves: both have the same socket.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use shared::config::{LogConfig, PrepareConfig};
use shared::exit::ExitReason;
use shared::sandbox::SandboxMode;
use tracing::{info, warn};

use crate::listener::ListeningSocket;
use crate::spawn::{TITLE, environment, pass_secret, pidfd_open};

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// How long a process that leaves may take; a gateway gives its texts 20 s.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(25);

/// What the page is started with.
pub struct Shown<'a> {
    /// The model, and how the Hub is asked for it.
    pub prepare: &'a PrepareConfig,
    /// Prefix of its module uids.
    pub prefix: &'a str,
    /// Blocks of the model.
    pub num_blocks: u32,
    /// Where this server is reached from this machine.
    pub peers: &'a [String],
    pub log: &'a LogConfig,
    /// Whether it is confined.
    pub sandbox: SandboxMode,
}

/// The process that serves the page, where one was asked for.
#[derive(Debug)]
pub struct Web {
    socket: ListeningSocket,
    child: Option<Child>,
    /// Readable once `child` has ended.
    end: Option<OwnedFd>,
    /// Processes that end their texts, and how long they may.
    leaving: Vec<(Pid, Instant)>,
    started: Instant,
    /// Before the next start.
    pause: Duration,
    next_start: Instant,
}

impl Web {
    /// No process yet, but for those of the executable before that are `leaving`.
    pub fn new(socket: ListeningSocket, leaving: Vec<i32>, now: Instant) -> Web {
        let until = now + LEAVE_TIMEOUT;
        let leaving = leaving.into_iter().map(|pid| (Pid::from_raw(pid), until)).collect();
        let (pause, next_start) = (FIRST_PAUSE, now);
        Web { socket, child: None, end: None, leaving, started: now, pause, next_start }
    }

    /// Where the page is served.
    pub fn socket(&self) -> &ListeningSocket {
        &self.socket
    }

    /// Where the page is served, while its process runs.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.socket.addr().filter(|_| self.child.is_some())
    }

    /// Whether the process is to be started.
    pub fn is_due(&self, now: Instant) -> bool {
        self.socket.is_wanted() && self.child.is_none() && now >= self.next_start
    }

    /// When the process is to be started again, where that is later than `now`.
    pub fn deadline(&self, now: Instant) -> Option<Instant> {
        let is_waiting = self.socket.is_wanted() && self.child.is_none() && self.next_start > now;
        is_waiting.then_some(self.next_start)
    }

    /// Becomes readable when the process has ended.
    pub fn waits_on(&self) -> Option<BorrowedFd<'_>> {
        self.end.as_ref().map(AsFd::as_fd)
    }

    /// Starts the process.
    pub fn start(&mut self, shown: &Shown<'_>, now: Instant) {
        let spawned = match self.socket.for_child() {
            Ok(Some(socket)) => spawn(socket, shown),
            // It has said why.
            Ok(None) => return self.wait(now),
            Err(error) => Err(error),
        };
        match spawned {
            Ok(child) => {
                let pid = child.id();
                info!(pid, "the page of the swarm starts");
                // Without it the end is seen in the next round.
                self.end = pidfd_open(Pid::from_raw(pid.cast_signed())).ok();
                (self.child, self.started) = (Some(child), now);
            }
            Err(error) => self.failed(&error.to_string(), now),
        }
    }

    /// Has the process take no new callers and end once its texts have; another may be started at once.
    pub fn retire(&mut self, now: Instant) {
        if let Some(child) = self.take() {
            let pid = Pid::from_raw(child.id().cast_signed());
            // It has ended already if this fails.
            let _ = kill(pid, Signal::SIGTERM);
            self.leaving.push((pid, now + LEAVE_TIMEOUT));
        }
        self.next_start = now;
    }

    /// The processes that end their texts.
    pub fn leaving(&self) -> Vec<i32> {
        self.leaving.iter().map(|(pid, _)| pid.as_raw()).collect()
    }

    /// Notes which processes have ended.
    pub fn look(&mut self, now: Instant) {
        self.leaving.retain(|(pid, until)| {
            if now >= *until {
                let _ = kill(*pid, Signal::SIGKILL);
            }
            matches!(waitpid(*pid, Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::StillAlive))
        });
        let ended = match self.child.as_mut().map(Child::try_wait) {
            Some(Ok(Some(status))) => reason(status),
            Some(Err(error)) => error.to_string(),
            Some(Ok(None)) | None => return,
        };
        self.take();
        if now >= self.started + LONGEST_PAUSE {
            self.pause = FIRST_PAUSE;
        }
        self.failed(&ended, now);
    }

    /// Ends all processes; one may be started again at once.
    pub fn stop(&mut self, now: Instant) {
        for (pid, _) in self.leaving.drain(..) {
            let _ = kill(pid, Signal::SIGKILL);
            let _ = waitpid(pid, None);
        }
        if let Some(mut child) = self.take() {
            // It has ended already if this fails.
            let _ = child.kill();
            let _ = child.wait();
        }
        self.next_start = now;
    }

    fn take(&mut self) -> Option<Child> {
        self.end = None;
        self.child.take()
    }

    fn failed(&mut self, why: &str, now: Instant) {
        let again_in_s = self.pause.as_secs();
        warn!(why, again_in_s, "the page of the swarm ended, the server goes on");
        self.wait(now);
    }

    fn wait(&mut self, now: Instant) {
        self.next_start = now + self.pause;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        self.stop(Instant::now());
    }
}

/// Starts `sepal gateway` over the server at `shown.peers`, which finds the socket in place of its standard
/// input, and the Hub's token in a pipe.
fn spawn(socket: OwnedFd, shown: &Shown<'_>) -> io::Result<Child> {
    let mut command = command(socket, shown);
    let token = shown.prepare.hub.token.as_ref();
    let token = token.map(|token| pass_secret(token.reveal())).transpose()?;
    if let Some(token) = &token {
        command.args(["--token_fd", &token.as_raw_fd().to_string()]);
    }
    command.spawn()
}

fn command(socket: OwnedFd, shown: &Shown<'_>) -> Command {
    let Shown { prepare, prefix, num_blocks, peers, log, sandbox } = shown;
    let last = prepare.model.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let name = if last.is_empty() { "model".to_owned() } else { last.replace('=', "_") };
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0(format!("{TITLE}gateway"))
        .env_clear()
        .envs(environment())
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .args(["gateway", &format!("{name}={}", prepare.model)])
        .args(["--dht_prefix", &format!("{name}={prefix}")])
        .args(["--of_server", &std::process::id().to_string()])
        .args(["--num_blocks", &num_blocks.to_string()])
        .args(["--sandbox", sandbox.name()])
        .args(["--log", &log.filter, "--log_format", log.format.name()])
        .arg("--cache_dir")
        .arg(&prepare.cache_dir)
        .arg("--initial_peers")
        .args(*peers);
    let hub = &prepare.hub;
    if let Some(revision) = &hub.revision {
        command.args(["--revision", revision]);
    }
    if hub.offline {
        command.arg("--offline");
    }
    if hub.is_plain_http_allowed {
        command.arg("--allow_plain_http");
    }
    if let Some(endpoint) = &hub.endpoint {
        command.env("HF_ENDPOINT", endpoint);
    }
    command
}

fn reason(status: ExitStatus) -> String {
    match status.code().and_then(ExitReason::from_code) {
        Some(reason) => reason.to_string(),
        None => status.to_string(),
    }
}
