//! A file of the cache that is in use: a shared lock on it keeps other instances from deleting it to
//! make room (`prepare::disk_cache`), so that the next worker finds it again. The lock lives as
//! long as the open file.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use tracing::debug;

/// A file is locked exclusively to delete it or to see whether it is in use, which takes no time.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
const PERIOD: Duration = Duration::from_millis(10);

/// Marks `file` at `path` as in use while it is open.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] if it was deleted meanwhile. Where files cannot be locked (some
/// network file systems) it is used all the same.
pub fn hold(file: &File, path: &Path) -> io::Result<()> {
    hold_after(file, path, || {
        std::thread::sleep(PERIOD);
    })
}

/// The same, with this between two looks at the lock.
fn hold_after(file: &File, path: &Path, mut pause: impl FnMut()) -> io::Result<()> {
    let mut looks = LONGEST_WAIT.as_millis() / PERIOD.as_millis();
    loop {
        match file.try_lock_shared() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if looks > 0 => {
                looks -= 1;
                pause();
            }
            Err(error) => {
                debug!(path = %path.display(), %error, "cannot lock a file of a model");
                break;
            }
        }
    }
    match file.metadata()?.nlink() {
        0 => Err(io::ErrorKind::NotFound.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_at_whether_a_file_is_in_use_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("block");
        std::fs::write(&path, "weights").unwrap();
        let [ours, looking, evicting] = std::array::from_fn(|_| File::open(&path).unwrap());
        looking.try_lock().unwrap();
        let (mut looking, mut waits) = (Some(looking), 0);
        hold_after(&ours, &path, || {
            waits += 1;
            // At the third look.
            if waits == 2 {
                unlock(looking.take().unwrap());
            }
        })
        .unwrap();
        assert_eq!(waits, 2);
        assert!(evicting.try_lock().is_err(), "it is in use");
        unlock(ours);
        evicting.try_lock().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(hold(&evicting, &path).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_file_whose_lock_never_comes_is_used_all_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("block");
        std::fs::write(&path, "weights").unwrap();
        let [ours, looking] = std::array::from_fn(|_| File::open(&path).unwrap());
        looking.try_lock().unwrap();
        let mut waits = 0;
        hold_after(&ours, &path, || waits += 1).unwrap();
        assert_eq!(waits * PERIOD, LONGEST_WAIT);
    }

    /// Closing the file is not enough: a process that another test has just forked holds a copy of the descriptor
    /// until it executes.
    fn unlock(file: File) {
        file.unlock().unwrap();
    }

    #[test]
    fn a_file_that_was_deleted_while_its_lock_was_waited_for_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("block");
        std::fs::write(&path, "weights").unwrap();
        let [ours, evicting, later] = std::array::from_fn(|_| File::open(&path).unwrap());
        hold(&ours, &path).unwrap();
        assert!(evicting.try_lock().is_err(), "it is in use");
        unlock(ours);
        evicting.try_lock().unwrap();
        let mut evicting = Some(evicting);
        let outcome = hold_after(&later, &path, || {
            std::fs::remove_file(&path).unwrap();
            unlock(evicting.take().unwrap());
        });
        assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
