//! A file of the cache that is in use: a shared lock on it keeps other instances from deleting it to
//! make room (`prepare::disk_cache`), so that the next worker finds it again. The lock lives as
//! long as the open file.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

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
    let end = Instant::now() + LONGEST_WAIT;
    loop {
        match file.try_lock_shared() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if Instant::now() < end => std::thread::sleep(PERIOD),
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
        let holds = std::thread::spawn({
            let path = path.clone();
            move || hold(&ours, &path).map(|()| ours)
        });
        std::thread::sleep(5 * PERIOD);
        drop(looking);
        let ours = holds.join().unwrap().unwrap();
        assert!(evicting.try_lock().is_err(), "it is in use");
        drop(ours);
        // A process that another test has just forked holds a copy of the descriptor until it executes.
        evicting.lock().unwrap();
        std::fs::remove_file(&path).unwrap();
        let late = evicting.try_clone().unwrap();
        drop(evicting);
        assert_eq!(hold(&late, &path).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_file_that_was_deleted_while_its_lock_was_waited_for_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("block");
        std::fs::write(&path, "weights").unwrap();
        let [ours, evicting, later] = std::array::from_fn(|_| File::open(&path).unwrap());
        hold(&ours, &path).unwrap();
        assert!(evicting.try_lock().is_err(), "it is in use");
        drop(ours);
        evicting.lock().unwrap();
        let waits = std::thread::spawn({
            let path = path.clone();
            move || hold(&later, &path).unwrap_err().kind()
        });
        std::fs::remove_file(&path).unwrap();
        drop(evicting);
        assert_eq!(waits.join().unwrap(), io::ErrorKind::NotFound);
    }
}
