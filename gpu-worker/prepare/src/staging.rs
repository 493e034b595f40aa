//! A folder under construction: it is filled beside its place, under a name of its own, and renamed
//! when it is whole.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::disk_cache::free_bytes;
use crate::error::PrepareError;

/// Left free on the disk.
const MARGIN_BYTES: u64 = 64 << 20;

/// File of a folder that outlives its process, by which the next one knows it again.
pub const MARKER: &str = ".sepal-convert";

/// The folder under construction.
#[derive(Debug)]
pub struct Staging {
    out: PathBuf,
    folder: PathBuf,
    /// Whether it is removed when it goes out of scope.
    is_removed: bool,
    /// Held by whoever fills a folder that outlives its process.
    _lock: Option<File>,
}

impl Staging {
    /// Begins the folder `out`, which will take `bytes`; nothing is left of it unless it is
    /// [finished](Staging::finish).
    ///
    /// # Errors
    /// [`PrepareError::BadFile`] when there is something already, [`PrepareError::NoSpace`] when the
    /// disk is too full, [`PrepareError::Write`] when it cannot be made.
    pub fn begin(out: &Path, bytes: u64) -> Result<Staging, PrepareError> {
        let out = std::path::absolute(out).map_err(|e| PrepareError::write(out, e))?;
        refuse_filled(&out)?;
        let parent = out.parent().unwrap_or(Path::new("/"));
        std::fs::create_dir_all(parent).map_err(|e| PrepareError::write(parent, e))?;
        check_space(parent, bytes)?;
        let name = out.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let folder = parent.join(format!(".{name}.{}.partial", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).map_err(|e| PrepareError::write(&folder, e))?;
        Ok(Staging { out, folder, is_removed: true, _lock: None })
    }

    /// Begins the folder `out`, or goes on with what an earlier process left of it beside its place.
    /// What is not finished stays for the next one.
    ///
    /// # Errors
    /// As [`Staging::begin`]; [`PrepareError::BadFile`] also while another process fills it, and when
    /// files lie there that no process of Sepal left.
    pub fn resume(out: &Path) -> Result<Staging, PrepareError> {
        let out = std::path::absolute(out).map_err(|e| PrepareError::write(out, e))?;
        refuse_filled(&out)?;
        let name = out.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let folder = out.with_file_name(format!("{name}.partial"));
        let failed = |e| PrepareError::write(&folder, e);
        std::fs::create_dir_all(&folder).map_err(failed)?;
        // Of the folder itself: a lock file would have to go before the end.
        let lock = File::open(&folder).map_err(failed)?;
        if lock.try_lock().is_err() {
            let reason = "is being written by another process; wait for it, or give another --out";
            return Err(PrepareError::bad_file(&folder, reason));
        }
        mark(&folder)?;
        Ok(Staging { out, folder, is_removed: false, _lock: Some(lock) })
    }

    /// The folder to fill.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Copies a file, following links, under its own name.
    ///
    /// # Errors
    /// [`PrepareError::Write`].
    pub fn copy(&self, file: &Path) -> Result<(), PrepareError> {
        let to = self.folder.join(file.file_name().unwrap_or_default());
        let copied = std::fs::copy(file, &to).and_then(|_| File::open(&to)?.sync_all());
        copied.map_err(|e| PrepareError::write(&to, e))
    }

    /// Moves the folder to its place.
    ///
    /// # Errors
    /// [`PrepareError::Write`].
    pub fn finish(mut self) -> Result<(), PrepareError> {
        // Takes the place of an empty folder too.
        std::fs::rename(&self.folder, &self.out).map_err(|e| PrepareError::write(&self.out, e))?;
        self.is_removed = false;
        // Last: without it, no process would take up what is left of this one.
        let _ = std::fs::remove_file(self.out.join(MARKER));
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.is_removed {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

/// Marks an empty folder as ours, and refuses one with files unless it is marked.
fn mark(folder: &Path) -> Result<(), PrepareError> {
    let marker = folder.join(MARKER);
    if marker.is_file() {
        return Ok(());
    }
    let mut entries = std::fs::read_dir(folder).map_err(|e| PrepareError::read(folder, e))?;
    if entries.next().is_some() {
        let reason =
            "holds files that sepal convert did not write; move it away, or give another --out";
        return Err(PrepareError::bad_file(folder, reason));
    }
    let text = "sepal convert fills this folder; the same command goes on with it\n";
    std::fs::write(&marker, text).map_err(|e| PrepareError::write(&marker, e))
}

fn refuse_filled(out: &Path) -> Result<(), PrepareError> {
    let is_empty = match std::fs::read_dir(out) {
        Ok(mut entries) => entries.next().is_none(),
        Err(_) => !out.exists(),
    };
    match is_empty {
        true => Ok(()),
        false => {
            let reason = "exists and is not empty; give --out a folder that does not exist yet";
            Err(PrepareError::bad_file(out, reason))
        }
    }
}

/// Refuses what does not fit on the disk of `folder`.
///
/// # Errors
/// [`PrepareError::NoSpace`] with the figures.
pub fn check_space(folder: &Path, bytes: u64) -> Result<(), PrepareError> {
    let free_bytes = free_bytes(folder).saturating_sub(MARGIN_BYTES);
    match bytes <= free_bytes {
        true => Ok(()),
        false => Err(PrepareError::NoSpace {
            needed_bytes: bytes,
            free_bytes,
            folder: folder.to_owned(),
        }),
    }
}
