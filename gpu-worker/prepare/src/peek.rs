//! Files of the cache that are only looked at, without a change of their last use.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;

/// Opens a file to look at it: reads do not set its access time, which is its last use.
///
/// # Errors
/// As [`File::open`]. Of a file of another user, reads may set the access time.
pub fn open_quietly(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_NOATIME.bits();
    match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        // Only the owner of a file may leave its access time alone.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => File::open(path),
        opened => opened,
    }
}
