//! The key of a run without `--identity_path`: it goes with the run, unless an executable of another
//! format starts anew in the same process. Then it waits as `PID.identity` beside the folder of the
//! instance, whose name may be another one next time.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use tracing::warn;

use super::Instance;

const SUFFIX: &str = ".identity";

impl Instance {
    /// Where netd makes its key if nobody has named a file: in a folder of its own, the one of the
    /// instance that netd may write to.
    pub fn key(&self) -> PathBuf {
        self.folder().join("netd/identity")
    }

    /// Keeps the key, if there is one, for the run that this process starts next.
    pub fn leave_key(&self) {
        // netd can write where it is: no link is followed, and the next netd checks what is in it.
        moved(&self.key(), &left_in(&self.dir, std::process::id()));
    }

    /// Takes the key that this process has left, if it has.
    pub(super) fn take_key(&self) {
        let left = left_in(&self.dir, std::process::id());
        let key = self.key();
        if !is_file(&left) {
            return;
        }
        match key.parent().map(|folder| fs::DirBuilder::new().mode(0o700).create(folder)) {
            Some(Err(error)) => warn!(%error, "cannot keep the PeerID of the run before"),
            _ => moved(&left, &key),
        }
    }
}

/// Removes the keys of processes that are gone. The caller holds the lock of `dir`.
pub(super) fn remove_orphans(dir: &Path) {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    for path in files.map(|entry| entry.path()) {
        let name = path.file_name().and_then(|name| name.to_str());
        let pid = name.and_then(|name| name.strip_suffix(SUFFIX)?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
            && let Err(error) = fs::remove_file(&path)
        {
            warn!(%error, path = %path.display(), "cannot remove the key of a dead run");
        }
    }
}

fn moved(from: &Path, to: &Path) {
    let result = match is_file(from) {
        true => fs::rename(from, to),
        false => return,
    };
    if let Err(error) = result
        && error.kind() != io::ErrorKind::NotFound
    {
        warn!(%error, "the next run gets another PeerID; --identity_path FILE keeps it in any case");
    }
}

fn is_file(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| meta.is_file())
}

fn left_in(dir: &Path, pid: u32) -> PathBuf {
    dir.join(format!("{pid}{SUFFIX}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_key(dir: &Path, name: &str) -> Instance {
        let instance = Instance::claim(dir, Some(name)).unwrap();
        fs::create_dir(instance.folder().join("netd")).unwrap();
        fs::write(instance.key(), "a key").unwrap();
        instance
    }

    #[test]
    fn a_key_that_was_left_is_taken_once_by_the_next_instance_whatever_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let first = with_key(dir.path(), "a");
        first.leave_key();
        drop(first);
        let second = Instance::claim(dir.path(), Some("b")).unwrap();
        assert_eq!(fs::read_to_string(second.key()).unwrap(), "a key");
        drop(second);
        let third = Instance::claim(dir.path(), Some("b")).unwrap();
        assert!(!third.key().exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3, "lock, lock of b, folder of b");
    }

    #[test]
    fn links_are_no_keys_and_keys_of_the_dead_go() {
        let dir = tempfile::tempdir().unwrap();
        let first = Instance::claim(dir.path(), Some("a")).unwrap();
        fs::create_dir(first.folder().join("netd")).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", first.key()).unwrap();
        first.leave_key();
        let left = left_in(&first.dir, std::process::id());
        assert!(left.symlink_metadata().is_err());
        // No process has a larger number (man 5 proc, pid_max).
        let dead = left_in(&first.dir, 4_194_305);
        fs::write(&dead, "a key").unwrap();
        fs::write(&left, "ours").unwrap();
        drop(first);
        let next = Instance::claim(dir.path(), Some("a")).unwrap();
        assert!(!dead.exists() && !left.exists());
        assert_eq!(fs::read_to_string(next.key()).unwrap(), "ours");
    }
}
