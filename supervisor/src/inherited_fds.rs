//! Descriptors on their way from one executable of the supervisor to the next, in the same process.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde::{Deserialize, Serialize};

use crate::spawn;

/// A descriptor that stays open while the executable changes, by its number.
#[derive(Debug, Serialize, Deserialize)]
pub struct Fd(RawFd);

impl Fd {
    /// The descriptor of this number, which this process was left by the executable before.
    pub fn inherited(number: RawFd) -> Fd {
        Fd(number)
    }

    pub fn number(&self) -> RawFd {
        self.0
    }

    /// Takes it over, in the next executable, once. It is close-on-exec from then on.
    ///
    /// # Errors
    /// When there is no such descriptor, or it was taken.
    pub fn take(&mut self) -> io::Result<OwnedFd> {
        spawn::adopt(std::mem::replace(&mut self.0, -1))
    }
}

/// Descriptors on their way to the next executable; closed if it does not come.
#[derive(Debug, Default)]
pub struct Handed(Vec<OwnedFd>);

impl Handed {
    /// Adds a descriptor of its own.
    pub fn put(&mut self, fd: OwnedFd) -> Fd {
        let number = fd.as_raw_fd();
        self.0.push(fd);
        Fd(number)
    }

    /// Has them stay open while the executable changes.
    ///
    /// # Errors
    /// When the system refuses it.
    pub fn keep_open(&self) -> io::Result<()> {
        for fd in &self.0 {
            fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()))?;
        }
        Ok(())
    }
}
