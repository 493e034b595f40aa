//! Room in the cache folder: what was downloaded and what was prepared, the least recently used of
//! which goes when `--max_disk_space` or the disk is full. Access times are set here, since many
//! file systems do not keep them.
//!
//! Processes take turns through a lock file while they count and delete; they do not hold it while
//! they download. A file that somebody holds a shared lock on is in use and stays: workers hold one
//! on each file that they map, downloads on theirs.
//!
//! # Discrepancies
//! Petals locks out all servers of the host during a download, and deletes files that others serve
//! from.

use std::fs::{File, FileTimes, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tracing::{info, warn};

use crate::error::PrepareError;
use crate::progress::{PrepareProgress, Watch};
use crate::temp_files::is_being_written;

/// Left free on the disk (petals `utils/disk_cache.py`, `DEFAULT_MARGIN` of 1 GiB).
const MARGIN_BYTES: u64 = 1 << 30;
/// Time between two tries to get the lock.
const LOCK_PERIOD: Duration = Duration::from_millis(100);
/// Config and index of the largest models are smaller.
const SMALL_BYTES: u64 = 1 << 20;
/// Deeper folders are none of ours.
const MAX_DEPTH: usize = 6;

/// The cache folder as a place with a limit.
#[derive(Clone, Debug)]
pub struct DiskCache {
    folder: PathBuf,
    max_bytes: Option<u64>,
}

/// A file that may be deleted.
pub struct CachedFile {
    pub path: PathBuf,
    pub bytes: u64,
    /// When it was used last.
    pub used: SystemTime,
}

impl DiskCache {
    /// The cache in `folder`, which may take `max_bytes`.
    pub fn new(folder: &Path, max_bytes: Option<u64>) -> DiskCache {
        DiskCache { folder: folder.to_owned(), max_bytes }
    }

    /// All files of models in the folder.
    pub fn files(&self) -> Vec<CachedFile> {
        let mut files = Vec::new();
        collect(&self.folder, 0, &mut files);
        files
    }

    /// The lock of the folder, held until the file is dropped.
    ///
    /// # Errors
    /// [`PrepareError::Write`], and what `watch` returns while waiting.
    pub fn lock(&self, watch: &mut Watch<'_>) -> Result<File, PrepareError> {
        let path = self.folder.join("sepal.lock");
        let failed = |error| PrepareError::write(&path, error);
        std::fs::create_dir_all(&self.folder).map_err(failed)?;
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
        wait_for_lock(&file, &path, watch)?;
        Ok(file)
    }

    /// Deletes what was used least recently until `needed_bytes` fit.
    ///
    /// # Errors
    /// [`PrepareError::NoRoom`] with the figures when they do not fit even then.
    pub fn make_room(&self, needed_bytes: u64, watch: &mut Watch<'_>) -> Result<(), PrepareError> {
        let _lock = self.lock(watch)?;
        let free = free_bytes(&self.folder).saturating_sub(MARGIN_BYTES);
        let mut kept = self.files();
        let cached: u64 = kept.iter().map(|file| file.bytes).sum();
        let mut available = match self.max_bytes {
            Some(max) => free.min(max.saturating_sub(cached)),
            None => free,
        };
        kept.sort_by_key(|file| file.used);
        let refused = |available_bytes| PrepareError::NoRoom {
            needed_bytes,
            available_bytes,
            max_bytes: self.max_bytes,
            folder: self.folder.clone(),
        };
        // Nothing goes for what could not be had even then.
        let candidates =
            kept.iter().filter(|file| available < needed_bytes && evictable(file).is_some());
        let could_be = candidates.fold(available, |sum, file| sum.saturating_add(file.bytes));
        if could_be < needed_bytes {
            return Err(refused(could_be));
        }
        let mut removed = 0;
        for file in &kept {
            if available >= needed_bytes {
                break;
            }
            // The lock is held until the file is gone: whoever maps it meanwhile sees that.
            if let Some(_lock) = evictable(file)
                && remove(&file.path)
            {
                available = available.saturating_add(file.bytes);
                removed += 1;
            }
        }
        if removed > 0 {
            info!(removed, available, "evicted files from the cache");
        }
        if available >= needed_bytes {
            return Ok(());
        }
        Err(refused(available))
    }
}

/// Locks `file` at `path` as soon as no other process holds a lock on it.
///
/// # Errors
/// [`PrepareError::Write`] when the file cannot be locked, and what `watch` returns while waiting.
pub fn wait_for_lock(file: &File, path: &Path, watch: &mut Watch<'_>) -> Result<(), PrepareError> {
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(PrepareError::write(path, error)),
            Err(TryLockError::WouldBlock) => {
                watch(PrepareProgress::Alive)?;
                std::thread::sleep(LOCK_PERIOD);
            }
        }
    }
}

/// Marks a file as used now, without a change of its time of modification.
pub fn touch(path: &Path) {
    let times = FileTimes::new().set_accessed(SystemTime::now());
    if let Err(error) = File::open(path).and_then(|file| file.set_times(times)) {
        warn!(path = %path.display(), %error, "cannot set the access time of a cached file");
    }
}

/// The files of the hub's cache, our block files and the prepared blocks.
fn collect(folder: &Path, depth: usize, kept: &mut Vec<CachedFile>) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(stat) = std::fs::symlink_metadata(&path) else {
            continue;
        };
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let ours = depth > 0 || name.starts_with("models--") || name == "prepared";
        if stat.is_dir() && ours && depth < MAX_DEPTH {
            collect(&path, depth + 1, kept);
        } else if stat.is_file()
            && depth > 0
            && !name.ends_with(".lock")
            && !path.components().any(|part| part.as_os_str() == "refs")
        {
            let used =
                stat.accessed().or_else(|_| stat.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
            kept.push(CachedFile { path, bytes: stat.len(), used });
        }
    }
}

/// The file with a lock of ours, unless somebody else holds one. Small files of the Hub stay:
/// without config and index nothing serves offline. Files that are being written stay too.
fn evictable(file: &CachedFile) -> Option<File> {
    let worth_it = !is_small(&file.path, file.bytes) && !is_being_written(&file.path);
    let open = File::open(&file.path).ok().filter(|_| worth_it)?;
    open.try_lock().ok().map(|()| open)
}

/// Whether it is a file of the Hub such as config or index, without which nothing serves offline.
pub fn is_small(path: &Path, bytes: u64) -> bool {
    path.parent().is_some_and(|parent| parent.ends_with("blobs")) && bytes < SMALL_BYTES
}

/// Whether somebody holds a lock on a file; one that cannot be opened is nobody's.
pub fn is_in_use(path: &Path) -> bool {
    let locked = File::open(path).map(|file| file.try_lock());
    matches!(locked, Ok(Err(TryLockError::WouldBlock)))
}

/// Deletes a file, unless somebody holds a lock on it; whether it is gone.
pub fn delete(path: &Path) -> bool {
    let Ok(file) = File::open(path) else {
        return false;
    };
    // The lock is held until the file is gone: whoever maps it meanwhile sees that.
    file.try_lock().is_ok() && remove(path)
}

/// Removes folders of models in which nothing is left.
pub fn remove_empty_folders(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_ours = name.starts_with("models--") || name == "prepared";
        if is_ours && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(&entry.path(), 0);
        }
    }
}

fn remove_empty(folder: &Path, depth: usize) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if depth < MAX_DEPTH && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(&entry.path(), depth + 1);
        }
    }
    // Refused while something is in it.
    let _ = std::fs::remove_dir(folder);
}

/// Deletes a file, and the links of snapshots that pointed to it.
fn remove(path: &Path) -> bool {
    if let Err(error) = std::fs::remove_file(path) {
        warn!(path = %path.display(), %error, "cannot delete a cached file");
        return false;
    }
    let blobs =
        path.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "blobs"));
    if let Some(model) = blobs.and_then(Path::parent) {
        remove_dangling(&model.join("snapshots"), 0);
    }
    true
}

fn remove_dangling(folder: &Path, depth: usize) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && depth < MAX_DEPTH => remove_dangling(&path, depth + 1),
            Ok(kind) if kind.is_symlink() && !path.exists() => drop(std::fs::remove_file(&path)),
            _ => {}
        }
    }
}

/// Bytes that are free on the disk of a folder.
pub fn free_bytes(folder: &Path) -> u64 {
    nix::sys::statvfs::statvfs(folder).map_or(u64::MAX, |disk| {
        let (blocks, size): (u64, u64) = (disk.blocks_available(), disk.fragment_size());
        blocks.saturating_mul(size)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, name: &str, bytes: usize, age_s: u64) -> PathBuf {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, vec![1; bytes]).unwrap();
        let times = FileTimes::new().set_accessed(SystemTime::now() - Duration::from_secs(age_s));
        File::open(&path).unwrap().set_times(times).unwrap();
        path
    }

    #[test]
    fn the_least_recently_used_goes_first_but_not_what_is_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name, age| write(folder.path(), name, 1 << 20, age);
        let oldest = at("models--a--b/sepal/c/block-0.safetensors", 500);
        let in_use = at("models--a--b/sepal/c/block-1.safetensors", 400);
        let blob = at("models--a--b/blobs/abc", 300);
        let young = at("prepared/m-x/block-2.safetensors", 10);
        let foreign = at("other/file", 900);
        let link = folder.path().join("models--a--b/snapshots/c/model.safetensors");
        std::fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink("../../blobs/abc", &link).unwrap();
        let held = File::open(&in_use).unwrap();
        held.lock_shared().unwrap();
        let cache = DiskCache::new(folder.path(), Some(4 << 20));
        cache.make_room(0, &mut |_| Ok(())).unwrap();
        assert!(oldest.exists(), "nothing goes without need");
        cache.make_room(3 << 19, &mut |_| Ok(())).unwrap();
        assert!(
            !oldest.exists()
                && in_use.exists()
                && !blob.exists()
                && young.exists()
                && foreign.exists()
        );
        assert!(!link.is_symlink(), "a link to nothing stays behind");
        let left = cache.files().len();
        let refused = cache.make_room(4_000_000, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(
            refused.contains("4000000") && refused.contains("--max_disk_space 4194304"),
            "{refused}"
        );
        assert_eq!(cache.files().len(), left, "nothing goes for what does not fit anyway");
    }

    #[test]
    fn a_lock_is_waited_for_until_its_holder_drops_it_or_the_watch_ends() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::new(folder.path(), None);
        let mut held = Some(cache.lock(&mut |_| Ok(())).unwrap());
        let stopped = cache.lock(&mut |_| Err(PrepareError::Stopped)).unwrap_err();
        assert!(matches!(stopped, PrepareError::Stopped));
        let mut waits = 0;
        let lock = cache.lock(&mut |_| {
            waits += 1;
            drop(held.take_if(|_| waits == 2));
            Ok(())
        });
        // More if a process that another test is starting has a copy of the descriptor for a moment.
        assert!(lock.is_ok() && waits >= 2);
    }

    #[test]
    fn a_touched_file_keeps_its_time_of_modification() {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "prepared/x", 10, 1000);
        let before = std::fs::metadata(&path).unwrap();
        touch(&path);
        let after = std::fs::metadata(&path).unwrap();
        assert_eq!(after.modified().unwrap(), before.modified().unwrap());
        assert!(after.accessed().unwrap() > before.accessed().unwrap());
    }
}
