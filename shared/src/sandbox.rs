//! What each process of a server may do, and how the kernel holds it to that: Landlock for files,
//! seccomp for system calls, a user of its own and few rights where the supervisor is the superuser. A child enters its sandbox as the last step of its
//! [`bootstrap`](crate::bootstrap), before it reads a byte of a peer or of a model and before it has a
//! second thread, so that nothing of it is outside.
//!
//! [`table`] is the one place that says what is allowed. The supervisor is not confined: it starts the
//! others, and executables that take its place.

mod calls;
mod files;
mod rights;
pub mod table;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr};

use crate::role::Role;

/// Whether children are confined (`--sandbox`).
#[derive(EnumString, IntoStaticStr)]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = expected_modes)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxMode {
    Off,
    /// As far as the kernel can.
    #[default]
    On,
    /// Wholly; a child that cannot be does not start.
    Require,
}

impl SandboxMode {
    /// What it is called in settings.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

fn expected_modes(_: &str) -> String {
    "expected off, on or require".to_owned()
}

/// Whom [`table`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxSubject {
    Netd,
    Worker,
    /// The reader of checkpoints.
    Prepare,
    /// The page of `--web`, which is no role: it takes callers of its own and no orders.
    Page,
}

impl From<Role> for SandboxSubject {
    fn from(role: Role) -> SandboxSubject {
        match role {
            Role::Netd => SandboxSubject::Netd,
            Role::Worker => SandboxSubject::Worker,
            Role::Prepare => SandboxSubject::Prepare,
        }
    }
}

/// What one child may touch beyond what [`table`] gives it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// Whether to confine it.
    pub mode: SandboxMode,
    /// Files and folders that it may read.
    pub readable: Vec<PathBuf>,
    /// Files and folders that it may change, too.
    pub writable: Vec<PathBuf>,
    /// Whether it opens the driver of a GPU, which reads and maps what it likes and talks to daemons.
    pub has_driver: bool,
}

/// Why a child is not confined as it was to be.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The kernel cannot restrict files.
    #[error(
        "this kernel cannot restrict files (Landlock {0}): Linux 5.13 or newer with Landlock can; give --sandbox on to go on without"
    )]
    Files(String),
    /// The kernel cannot filter system calls.
    #[error(
        "this kernel cannot filter system calls (seccomp {0}); give --sandbox on to go on without"
    )]
    Calls(String),
    /// The rights of the superuser stay.
    #[error("{0}; start sepal as another user, or give --sandbox off")]
    Rights(String),
}

/// What the kernel of this machine can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Support {
    /// Whether it restricts files.
    pub files: bool,
    /// Whether it filters system calls.
    pub calls: bool,
}

impl Support {
    /// Asks the kernel; nothing changes.
    pub fn of_this_kernel() -> Support {
        Support { files: files::is_supported(), calls: calls::is_supported() }
    }

    /// What is missing, if anything is.
    ///
    /// # Errors
    /// The first thing that is.
    pub fn check(self) -> Result<(), SandboxError> {
        match self {
            Support { files: false, .. } => Err(SandboxError::Files("is missing".to_owned())),
            Support { calls: false, .. } => Err(SandboxError::Calls("is missing".to_owned())),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Support {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.files, self.calls) {
            (true, true) => "files and system calls",
            (true, false) => "files alone",
            (false, true) => "system calls alone",
            (false, false) => "nothing",
        })
    }
}

/// Confines this process as `who`, for good. It must have one thread. Returns what it is held to.
///
/// # Errors
/// [`SandboxError`] if the mode asks for more than the kernel can.
pub fn enter(who: SandboxSubject, confinement: &Confinement) -> Result<Support, SandboxError> {
    if confinement.mode == SandboxMode::Off {
        return Ok(Support { files: false, calls: false });
    }
    // No privilege by exec, no dump of memory, no look into it by others.
    let _ = nix::sys::prctl::set_no_new_privs();
    let _ = nix::sys::prctl::set_dumpable(false);
    let required = |held: Result<(), SandboxError>| match (held, confinement.mode) {
        (Err(error), SandboxMode::Require) => Err(error),
        (held, _) => Ok(held.is_ok()),
    };
    rights::give_up(who, confinement).map_err(SandboxError::Rights)?;
    let files = required(files::restrict(who, confinement).map_err(SandboxError::Files))?;
    let calls = required(calls::filter(who, confinement).map_err(SandboxError::Calls))?;
    Ok(Support { files, calls })
}
