//! Files that other processes read: they are whole or absent.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::warn;

/// A longer file of entries is not ours.
const MAX_ENTRIES_BYTES: u64 = 1 << 20;

/// Time between two looks at a lock that another process holds.
const LOCK_PERIOD: Duration = Duration::from_millis(50);

/// Opens a regular file for reading, and nothing else: opening a pipe waits for its writer.
///
/// # Errors
/// As [`File::open`]; [`io::ErrorKind::InvalidInput`] if `path` leads to something that is no regular
/// file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let flags = nix::fcntl::OFlag::O_NONBLOCK.bits();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")),
    }
}

/// Entries by name in a JSON file of the cache folder, which all servers of a machine share. The
/// file is replaced as a whole, by whoever holds the lock beside it.
#[derive(Clone, Debug)]
pub struct EntryFile {
    path: PathBuf,
    lock: PathBuf,
}

impl EntryFile {
    /// The file `sepal_NAME_vVERSION.json` in `folder`. Another version is another file.
    pub fn new(folder: &Path, name: &str, version: u32) -> EntryFile {
        EntryFile {
            path: folder.join(format!("sepal_{name}_v{version}.json")),
            lock: folder.join(format!("sepal_{name}.lock")),
        }
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The lock file, for messages.
    pub fn lock_path(&self) -> &Path {
        &self.lock
    }

    /// All entries; none if the file is missing, too long or damaged.
    pub fn read<V: DeserializeOwned>(&self) -> BTreeMap<String, V> {
        let read = || -> io::Result<_> {
            let mut text = Vec::new();
            File::open(&self.path)?.take(MAX_ENTRIES_BYTES).read_to_end(&mut text)?;
            Ok(serde_json::from_slice(&text)?)
        };
        read().unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                warn!(%error, file = %self.path.display(), "cannot read cached entries, starting without them");
            }
            BTreeMap::new()
        })
    }

    /// Replaces all entries. The caller holds the lock.
    ///
    /// # Errors
    /// When the file cannot be written; the old one stays then.
    pub fn write<V: Serialize>(&self, entries: &BTreeMap<String, V>) -> io::Result<()> {
        let json = serde_json::to_vec_pretty(entries)?;
        write_atomically(&self.path, |file| file.write_all(&json))
    }

    /// The lock, held until the file is dropped; `None` when another process holds it for longer
    /// than `longest_wait`.
    ///
    /// # Errors
    /// When the lock file cannot be made or locked.
    pub fn lock(&self, longest_wait: Duration) -> io::Result<Option<File>> {
        std::fs::create_dir_all(self.lock.parent().unwrap_or(Path::new(".")))?;
        let file = OpenOptions::new().create(true).append(true).open(&self.lock)?;
        let deadline = Instant::now() + longest_wait;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::Error(error)) => return Err(error),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return Ok(None),
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PERIOD),
            }
        }
    }
}

/// Writes a file under a temporary name beside `path`, syncs it and renames it. A process that dies
/// in between leaves the old file, if any, and the temporary one, which the next write of the same
/// file by any process with this id replaces.
///
/// # Errors
/// Whatever fails first; the temporary file is removed then.
pub fn write_atomically(
    path: &Path,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let written = File::create(&temporary).and_then(|mut file| {
        fill(&mut file)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
        return written;
    }
    // The rename is durable once the folder is synced; some file systems refuse that, and then the
    // file is merely new.
    if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
        let _ = File::open(folder).and_then(|f| f.sync_all());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_back_and_a_damaged_file_holds_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = EntryFile::new(folder.path(), "test", 1);
        assert!(file.read::<u32>().is_empty());
        let entries = BTreeMap::from([("one".to_owned(), 1u32)]);
        file.write(&entries).unwrap();
        assert_eq!(file.read::<u32>(), entries);
        for damaged in ["", "{", "[1]", "{\"one\": \"two\"}"] {
            std::fs::write(file.path(), damaged).unwrap();
            assert!(file.read::<u32>().is_empty(), "{damaged}");
        }
        file.write(&entries).unwrap();
        assert_eq!(file.read::<u32>(), entries);
    }

    #[test]
    fn one_process_at_a_time_holds_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let file = EntryFile::new(folder.path(), "test", 1);
        let held = file.lock(Duration::ZERO).unwrap();
        assert!(held.is_some() && file.lock(Duration::ZERO).unwrap().is_none());
        drop(held);
        // A process that another test has just forked holds a copy of the descriptor until it executes.
        assert!(file.lock(Duration::from_secs(60)).unwrap().is_some());
    }
}
