//! Temporary files of [`write_atomically`](shared::files::write_atomically): a process writes to them,
//! or was killed while it did.

use std::path::Path;
use std::time::Duration;

/// Age of a temporary file that nobody writes any more; one block is written in minutes at most.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);

/// Whether the file at `path` is a temporary one.
pub fn is_temporary(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(".tmp"))
}

/// Whether the file at `path` is a temporary one that a process may still write to.
pub fn is_being_written(path: &Path) -> bool {
    let age = std::fs::metadata(path).and_then(|stat| stat.modified()).map(|at| at.elapsed());
    is_temporary(path) && !age.is_ok_and(|age| age.is_ok_and(|age| age > ABANDONED))
}

/// Removes temporary files that killed processes left in `folder`: those that were not written to
/// for a day. Nothing depends on its success.
pub fn remove_abandoned(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()).filter(|path| is_temporary(path)) {
        if !is_being_written(&path) {
            let _ = std::fs::remove_file(path);
        }
    }
}
