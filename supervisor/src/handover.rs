//! How one executable of the supervisor hands a run over to the next, in the same process
//! (`sepal upgrade`).
//!
//! ```text
//! old    children hold their messages back (`shared::bootstrap::ToChild::Hold`)
//!        state -> memfd; descriptors of segments, sockets and children lose close-on-exec
//!        execv(NEW, [.., "handover", "--resume=FD", "--", ARGS of sepal serve])
//! new    state <- memfd; maps segments, takes descriptors, tells each child where its next channel is
//! ```
//! The process keeps its id, so children stay its children, and locks and sockets stay with it. The new
//! executable was asked before whether it can read such a state (`sepal handover --describe`).

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use shared::block::Span;
use shared::build::Build;
use shared::config::ServeConfig;
use shared::exit::ExitReason;
use shared::ids::{Generation, GroupId};
use shared::model::ModelFacts;

use crate::inherited_fds::{Fd, Handed};
use crate::segments::HandedSegments;
use crate::spawn;
use crate::tree::{ChildId, ExitStatus, Tree, Up};
use crate::weights::HandedWeights;

/// Longest state in bytes; that of a large run has some hundred kilobytes.
const MAX_STATE_BYTES: u64 = 64 << 20;

/// A child process that goes on.
#[derive(Debug, Serialize, Deserialize)]
pub struct HandedChild {
    pub id: ChildId,
    pub generation: Generation,
    /// Its slot on the board.
    pub slot: u32,
    pub pid: i32,
    pub pidfd: Fd,
    /// The socket for descriptors.
    pub descriptors: Fd,
    /// Tag of the last bundle that was sent to it.
    pub last_tag: u64,
}

/// What had happened and was not told to the tree yet.
#[derive(Debug, Serialize, Deserialize)]
pub enum PendingEvent {
    Said(ChildId, Generation, Up),
    /// A child's process was reaped.
    Ended(ChildId, Generation, ExitStatus),
    /// A child closed its control channel.
    Closed(ChildId, Generation),
}

/// A run on its way from one executable to the next.
#[derive(Debug, Serialize, Deserialize)]
pub struct Handover {
    /// The build before.
    pub build: Build,
    /// Arguments of the process, `sepal serve ...`.
    pub arguments: Vec<OsString>,
    /// The settings in force.
    pub config: ServeConfig,
    /// Name of the instance.
    pub instance: String,
    /// The file whose lock says that the instance runs.
    pub lock: Fd,
    /// The listening socket of `sepal status`.
    pub status: Fd,
    /// The listening socket of `--metrics`.
    pub metrics: Option<Fd>,
    /// The listening socket of `--web`.
    pub page: Option<Fd>,
    /// Processes of the page that end their texts and then themselves.
    pub leaving_pages: Vec<i32>,
    pub tree: Tree,
    pub children: Vec<HandedChild>,
    /// What the tree has yet to hear.
    pub pending: Vec<PendingEvent>,
    pub segments: HandedSegments,
    /// The files of the weights.
    pub weights: Vec<HandedWeights>,
    pub facts: Option<ModelFacts>,
    /// The blocks that clients were told of.
    pub span: Option<Span>,
    /// Where clients reach the server.
    pub addrs: Vec<String>,
    /// Whether a service manager was told READY.
    pub was_ready: bool,
    /// How long open sessions may keep netd from being replaced.
    pub patience: Duration,
    /// Whether the instance was paused for the upgrade.
    pub resumes: bool,
}

/// Why a state cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    #[error("cannot read the state of the build before")]
    File(#[from] io::Error),
    #[error("the state of the build before has {0} bytes: expected at most {MAX_STATE_BYTES}")]
    TooLong(u64),
    #[error("the state of the build before means nothing to this one")]
    Content(#[from] postcard::Error),
    /// A group of it.
    #[error(
        "in the state of the build before, the workers of group {0} are not one for each of its devices"
    )]
    Incomplete(GroupId),
}

impl Handover {
    /// Writes the state into a new memfd.
    ///
    /// # Errors
    /// When the system refuses it.
    pub fn write(&self) -> io::Result<File> {
        let bytes = postcard::to_allocvec(self).map_err(io::Error::other)?;
        let mut file = File::from(memfd_create("sepal-handover", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(&bytes)?;
        file.rewind()?;
        Ok(file)
    }

    /// Reads a state.
    pub fn read(from: impl Read) -> Result<Handover, HandoverError> {
        let mut bytes = Vec::new();
        from.take(MAX_STATE_BYTES + 1).read_to_end(&mut bytes)?;
        let long = bytes.len() as u64;
        if long > MAX_STATE_BYTES {
            return Err(HandoverError::TooLong(long));
        }
        let state: Handover = postcard::from_bytes(&bytes)?;
        match state.tree.incomplete_group() {
            Some(group) => Err(HandoverError::Incomplete(group)),
            None => Ok(state),
        }
    }
}

/// What `sepal handover` is asked to do. Only a supervisor asks.
#[derive(Debug, PartialEq, Eq)]
pub enum HandoverOptions {
    /// Say which build this is, and whether it can read the state on standard input.
    Describe,
    /// Go on with the run whose state is behind this descriptor.
    Resume(RawFd),
}

/// A build and whether it can take a run over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    pub build: Build,
    /// Whether it reads the state that it was shown.
    pub reads_state: bool,
}

/// Prints the [`Description`] of this build as a line of JSON.
pub fn describe() -> ExitReason {
    let build = Build::this();
    // Of another format, the same bytes may mean something else.
    let read = Handover::read(io::stdin().lock());
    let reads_state = read.is_ok_and(|state| state.build.format == build.format);
    match serde_json::to_string(&Description { build, reads_state }) {
        Ok(line) => {
            println!("{line}");
            ExitReason::Clean
        }
        Err(_) => ExitReason::Failed,
    }
}

/// Takes the state behind an inherited descriptor.
pub fn take(fd: RawFd) -> Result<Handover, HandoverError> {
    Handover::read(File::from(Fd::inherited(fd).take()?))
}

/// Becomes the executable at `path`, which goes on with `state`. Returns only if that fails; then nothing
/// has changed.
pub fn become_next(path: &Path, state: &Handover, mut handed: Handed) -> io::Error {
    let becoming = || {
        let file = handed.put(OwnedFd::from(state.write()?));
        let mut arguments = state.arguments.clone();
        let title = if arguments.is_empty() { "sepal".into() } else { arguments.remove(0) };
        let resume = format!("--resume={}", file.number()).into();
        let first = [title, "handover".into(), resume, "--".into()];
        handed.keep_open()?;
        spawn::execute(path, first.into_iter().chain(arguments))
    };
    match { becoming }() {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

/// Becomes the executable at `path` with these arguments, as a start of its own.
pub fn start_anew(path: &Path, arguments: Vec<OsString>) -> io::Error {
    match spawn::execute(path, arguments.into_iter()) {
        Ok(never) => match never {},
        Err(error) => error,
    }
}
