//! The first things a child process does, and the pieces of that which the supervisor shares.
//!
//! A child is started as `sepal ROLE --bootstrap FD`, where `FD` is its end of a `SOCK_SEQPACKET`
//! pair. In order it
//!
//! 1. reads its [`Birth`] from the first packet of that socket and compares build and role;
//! 2. asks to be killed with the parent (`PR_SET_PDEATHSIG`), then looks whether the parent still
//!    is the one that wrote the birth, since it may have died in between;
//! 3. ignores SIGINT, SIGTERM and SIGHUP: only a `Drain` message or the closed control channel ends
//!    a child;
//! 4. offers itself to the OOM killer before the supervisor, workers before netd;
//! 5. starts logging, and makes every panic abort the process;
//! 6. enters its [`sandbox`], while it has one thread;
//! 7. connects to the one-shot `ipc-channel` server named in the birth and hands over the far ends
//!    of two channels.
//!
//! After that a closed control channel ([`ipc_channel::IpcError::Disconnected`]) means that the
//! parent is gone: the child ends with [`ExitReason::ParentGone`].
//!
//! ```no_run
//! # use shared::bootstrap::Bootstrap;
//! # use shared::control::{FromWorker, Role, ToWorker};
//! # use std::time::Duration;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ends = Bootstrap::from_fd(3, Role::Worker)?.connect::<ToWorker, FromWorker>()?;
//! if let ToWorker::Init(init) = ends.receiver.recv()? {
//!     let kv = ends.descriptors.recv(init.fds, 1, Duration::from_secs(5))?;
//! }
//! # Ok(())
//! # }
//! ```
#![allow(unsafe_code, reason = "adopts an inherited descriptor and sets signal dispositions")]

mod control;
mod descriptors;
mod logging;
mod peers;

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::linux::fs::MetadataExt;
use std::time::Duration;

use ipc_channel::ipc::{IpcReceiver, IpcSender};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use nix::unistd::getppid;
use serde::{Deserialize, Serialize};
use tracing::info;

use crate::control::{Birth, Role};
use crate::exit::ExitReason;
use crate::sandbox::{self, SandboxError};

pub use control::{Attach, Closed, ControlReceiver, ControlSender, FromChild, ToChild};
pub use descriptors::{
    DescriptorError, DescriptorSocket, MAX_BUNDLE, Packet, recv_packet, send_packet,
};
pub use logging::{LogError, LogIdentity, abort_on_panic, init_logging};
pub use peers::{MAX_PEER_BYTES, PeerError, PeerMessage, PeerSocket};

/// How long a child waits for its birth; the parent writes it before the child is started.
const BIRTH_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a child could not begin.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// The role was started by hand, not by a supervisor.
    #[error("descriptor {0} is no bootstrap socket; `sepal serve` starts this role, not a user")]
    NoSocket(RawFd),
    /// The birth did not come or cannot be read.
    #[error("cannot read the first message of the supervisor")]
    Birth(#[source] io::Error),
    /// Parent and child are different builds or disagree about the role.
    #[error("this process is {ours}, but the supervisor started {theirs}; restart sepal")]
    Mismatch {
        /// Build and role of this process.
        ours: String,
        /// Build and role that the supervisor wrote.
        theirs: String,
    },
    /// The parent died before this process was tied to it.
    #[error("the process that started this one (pid {0}) is gone")]
    ParentGone(u32),
    /// A call of the operating system failed.
    #[error("{0}")]
    Os(&'static str, #[source] io::Error),
    /// The log filter is wrong.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The kernel cannot confine this process, and it was to be.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The control channel could not be made.
    #[error("cannot connect to the control channel {name:?}")]
    Connect {
        /// Name of the one-shot server.
        name: String,
        #[source]
        source: io::Error,
    },
}

impl BootstrapError {
    /// The reason with which the process should exit.
    pub fn exit_reason(&self) -> ExitReason {
        match self {
            BootstrapError::NoSocket(_) | BootstrapError::Log(_) | BootstrapError::Sandbox(_) => {
                ExitReason::BadConfig
            }
            BootstrapError::Mismatch { .. } => ExitReason::ProtocolMismatch,
            BootstrapError::ParentGone(_) | BootstrapError::Connect { .. } => {
                ExitReason::ParentGone
            }
            BootstrapError::Birth(_) | BootstrapError::Os(..) => ExitReason::Failed,
        }
    }
}

/// A child that knows who it is, is tied to its parent, logs, and has not connected yet.
#[derive(Debug)]
pub struct Bootstrap {
    birth: Birth,
    descriptors: DescriptorSocket,
}

/// A child's ends of its channels.
#[derive(Debug)]
pub struct ControlEnds<Down, Up> {
    /// Messages from the supervisor, in order. Disconnected = the supervisor is gone.
    pub receiver: ControlReceiver<Down, Up>,
    /// Messages to the supervisor. May block when the supervisor does not read; never send from a
    /// reactor thread.
    pub sender: ControlSender<Up>,
    /// Descriptors that belong to messages.
    pub descriptors: DescriptorSocket,
    /// Who this process is.
    pub birth: Birth,
}

/// What a child sends through the one-shot server: the far ends of its two channels.
#[derive(Debug, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Exchange<Down, Up> {
    /// Where the supervisor writes.
    pub down: IpcSender<ToChild<Down>>,
    /// Where the supervisor reads.
    pub up: IpcReceiver<FromChild<Up>>,
}

impl Bootstrap {
    /// Steps 1 to 6 of the module's list, for a process that was started as `role` with
    /// `--bootstrap fd`.
    ///
    /// # Errors
    /// [`BootstrapError`]; the caller prints it and exits with [`BootstrapError::exit_reason`].
    pub fn from_fd(fd: RawFd, role: Role) -> Result<Bootstrap, BootstrapError> {
        let descriptors = DescriptorSocket::from(adopt(fd)?);
        let birth = descriptors.recv_birth(BIRTH_TIMEOUT).map_err(BootstrapError::Birth)?;
        compare("build", &build_id(), &birth.build)?;
        compare("role", role.name(), birth.role.name())?;
        die_with_parent(birth.parent_pid)?;
        show_role(role);
        ignore_terminal_signals()?;
        offer_to_oom_killer(role);
        abort_on_panic();
        let identity = LogIdentity {
            role: role.name(),
            worker: birth.worker,
            generation: Some(birth.generation),
        };
        init_logging(&birth.log, identity)?;
        let confined = sandbox::enter(role.into(), &birth.confinement)?;
        // A process that changes its user is not killed with its parent any more.
        die_with_parent(birth.parent_pid)?;
        let rank = birth.worker.map(tracing::field::display);
        info!(
            role = role.name(),
            rank,
            generation = birth.generation.0,
            pid = std::process::id(),
            user = nix::unistd::geteuid().as_raw(),
            %confined,
            "started"
        );
        Ok(Bootstrap { birth, descriptors })
    }

    /// What the supervisor told this process at its start.
    pub fn birth(&self) -> &Birth {
        &self.birth
    }

    /// Step 7: makes the two control channels and hands their far ends to the supervisor.
    ///
    /// # Errors
    /// [`BootstrapError::Connect`] when the supervisor does not listen any more.
    pub fn connect<Down, Up>(self) -> Result<ControlEnds<Down, Up>, BootstrapError>
    where
        Down: Serialize + for<'de> Deserialize<'de>,
        Up: Serialize + for<'de> Deserialize<'de>,
    {
        let Bootstrap { birth, descriptors } = self;
        let failed = |source| BootstrapError::Connect { name: birth.server.clone(), source };
        let (receiver, sender) =
            control::open(birth.server.clone(), &descriptors).map_err(failed)?;
        Ok(ControlEnds { receiver, sender, descriptors, birth })
    }
}

/// Name of the build: version, and the identity of the executable file, so that two files never
/// talk as one. Parent and child run `/proc/self/exe`, which stays the same file even when its path
/// was replaced.
pub fn build_id() -> String {
    let version = env!("CARGO_PKG_VERSION");
    match std::fs::metadata("/proc/self/exe") {
        Ok(file) => {
            format!("{version}+{:x}.{:x}.{:x}", file.st_dev(), file.st_ino(), file.st_mtime())
        }
        Err(_) => version.to_owned(),
    }
}

/// Takes the inherited descriptor, which must be a socket, and keeps it from being inherited
/// further.
fn adopt(fd: RawFd) -> Result<OwnedFd, BootstrapError> {
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
    let is_socket = fd > 2 && link.is_ok_and(|link| link.to_string_lossy().starts_with("socket:"));
    if !is_socket {
        return Err(BootstrapError::NoSocket(fd));
    }
    // SAFETY: the descriptor is open (it has a link in /proc/self/fd), was passed to this process
    // for this purpose by the flag --bootstrap, and from_fd runs before anything else in the
    // process opens descriptors.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).map_err(|e| {
        BootstrapError::Os("keep the bootstrap socket from being inherited", e.into())
    })?;
    Ok(fd)
}

fn compare(what: &str, ours: &str, theirs: &str) -> Result<(), BootstrapError> {
    if ours == theirs {
        return Ok(());
    }
    Err(BootstrapError::Mismatch {
        ours: format!("{what} {ours}"),
        theirs: format!("{what} {theirs}"),
    })
}

/// Has this process killed when the thread that started it ends, which is one of process
/// `parent_pid`.
///
/// # Errors
/// [`BootstrapError::ParentGone`] when it has ended already, [`BootstrapError::Os`] when the system
/// refuses.
pub fn die_with_parent(parent_pid: u32) -> Result<(), BootstrapError> {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)
        .map_err(|e| BootstrapError::Os("ask to be killed with the parent", e.into()))?;
    if u32::try_from(getppid().as_raw()) == Ok(parent_pid) {
        Ok(())
    } else {
        Err(BootstrapError::ParentGone(parent_pid))
    }
}

/// Lets SIGTERM reach this process, whose parent blocks it and handed that down.
///
/// # Errors
/// [`BootstrapError::Os`] when the system refuses.
pub fn hear_sigterm() -> Result<(), BootstrapError> {
    let mut mask = SigSet::empty();
    mask.add(Signal::SIGTERM);
    mask.thread_unblock().map_err(|e| BootstrapError::Os("take SIGTERM", e.into()))
}

/// The name in `top` and in core dumps, which would be `exe` after the path that was executed.
fn show_role(role: Role) {
    let name = match role {
        Role::Netd => c"sepal-netd",
        Role::Worker => c"sepal-worker",
        Role::Prepare => c"sepal-prepare",
    };
    let _ = nix::sys::prctl::set_name(name);
}

fn ignore_terminal_signals() -> Result<(), BootstrapError> {
    for which in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: ignoring installs no handler, so no code runs in signal context; nothing else
        // sets dispositions.
        unsafe { signal(which, SigHandler::SigIgn) }
            .map_err(|e| BootstrapError::Os("ignore SIGINT, SIGTERM and SIGHUP", e.into()))?;
    }
    Ok(())
}

/// Workers hold the memory and lose nothing but time; netd holds the connections. Some containers
/// forbid the write: then the kernel's own choice stands.
fn offer_to_oom_killer(role: Role) {
    let score = match role {
        Role::Worker => "800",
        Role::Prepare => "600",
        Role::Netd => "300",
    };
    let _ = std::fs::write("/proc/self/oom_score_adj", score);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_started_by_hand_says_how_it_is_started() {
        for fd in [-1, 0, 2, 900] {
            let error = Bootstrap::from_fd(fd, Role::Netd).unwrap_err();
            assert!(error.to_string().contains("sepal serve"), "{error}");
            assert_eq!(error.exit_reason(), ExitReason::BadConfig);
        }
    }

    #[test]
    fn another_build_or_role_is_a_protocol_mismatch() {
        let error = compare("build", "0.1.0", "0.2.0").unwrap_err();
        assert_eq!(error.exit_reason(), ExitReason::ProtocolMismatch);
        assert!(error.to_string().contains("0.2.0"));
    }
}
