//! The files that hold the weights of a span, open. The supervisor opens them once and passes their
//! descriptors to workers, whose restarts need no path: a folder that was renamed or deleted stays
//! readable while it is open here. Each file is checked against its entry of the manifest and locked
//! ([`crate::file_lock::hold`]), so that no other instance deletes it to make room.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use shared::block::Span;

use crate::manifest::{FileEntry, Manifest};

/// Most files that hold the weights of one span: a block has one file, and models have at most 4,096
/// blocks.
pub const MAX_WEIGHT_FILES: usize = 4096;

/// Why files of weights cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WeightFileError {
    /// A file is gone or cannot be used.
    #[error("cannot {action} weights file {path:?}")]
    File {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file is not the one that was checked.
    #[error("weights file {0:?} changed since it was checked; start again")]
    Changed(PathBuf),
    /// The span has more files than are held open.
    #[error("the weights of {span} lie in {count} files, expected at most {MAX_WEIGHT_FILES}")]
    TooMany { span: Span, count: usize },
}

impl WeightFileError {
    /// Whether another attempt may succeed: a disk that failed once may answer the next time, while a
    /// file that is gone, changed or no file at all stays so.
    pub fn is_passing(&self) -> bool {
        use io::ErrorKind::{InvalidInput, NotFound};
        let stays = |kind| matches!(kind, NotFound | InvalidInput);
        matches!(self, WeightFileError::File { source, .. } if !stays(source.kind()))
    }
}

/// Indexes in [`Manifest::files`] of the files that hold the weights of each block, its adapters
/// included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilesOfBlocks(BTreeMap<u32, BTreeSet<u32>>);

impl FilesOfBlocks {
    /// What `manifest` says of all its blocks.
    pub fn of(manifest: &Manifest) -> FilesOfBlocks {
        let mut blocks: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for (&block, tensors) in &manifest.blocks {
            blocks.entry(block).or_default().extend(tensors.values().map(|tensor| tensor.file));
        }
        for (&block, parts) in manifest.adapters.iter().flatten() {
            let files = parts.values().flat_map(|part| [part.a.file, part.b.file]);
            blocks.entry(block).or_default().extend(files);
        }
        FilesOfBlocks(blocks)
    }

    /// The files of `span`.
    pub fn of_span(&self, span: Span) -> BTreeSet<u32> {
        span.blocks().filter_map(|block| self.0.get(&block.0)).flatten().copied().collect()
    }
}

/// Open files by their index in [`Manifest::files`].
#[derive(Debug, Default)]
pub struct WeightFiles(BTreeMap<u32, File>);

impl WeightFiles {
    /// Opens, checks and locks the files of `span` by their paths. An index without a file is left
    /// out: mapping refuses the tensor that names it.
    ///
    /// # Errors
    /// [`WeightFileError`], which names the file.
    pub fn open(manifest: &Manifest, span: Span) -> Result<WeightFiles, WeightFileError> {
        let indexes = FilesOfBlocks::of(manifest).of_span(span);
        if indexes.len() > MAX_WEIGHT_FILES {
            return Err(WeightFileError::TooMany { span, count: indexes.len() });
        }
        let named = |index| Some((index, manifest.files.get(index as usize)?));
        let files = indexes.into_iter().filter_map(named);
        let opened = files.map(|(index, entry)| Ok((index, open(entry)?)));
        Ok(WeightFiles(opened.collect::<Result<_, _>>()?))
    }

    /// Files that another process opened, each with its index.
    pub fn received(files: impl IntoIterator<Item = (u32, OwnedFd)>) -> WeightFiles {
        WeightFiles(files.into_iter().map(|(index, fd)| (index, File::from(fd))).collect())
    }

    /// Takes the file of an index.
    pub fn take(&mut self, index: u32) -> Option<File> {
        self.0.remove(&index)
    }

    /// The descriptor of each of the files in `indexes` that is open here.
    pub fn descriptors(&self, indexes: &BTreeSet<u32>) -> Vec<(u32, BorrowedFd<'_>)> {
        let wanted = self.0.iter().filter(|(index, _)| indexes.contains(index));
        wanted.map(|(&index, file)| (index, file.as_fd())).collect()
    }

    /// All files with their indexes.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &File)> {
        self.0.iter().map(|(&index, file)| (index, file))
    }
}

/// Checks that an open file is the one that `entry` describes.
///
/// # Errors
/// [`WeightFileError::Changed`] when it is another, [`WeightFileError::File`] when it cannot be looked
/// at.
pub fn check(file: &File, entry: &FileEntry) -> Result<(), WeightFileError> {
    match FileEntry::of(&entry.path, file) {
        Ok(now) if now == *entry => Ok(()),
        Ok(_) => Err(WeightFileError::Changed(entry.path.clone())),
        Err(source) => Err(failed("look at", entry)(source)),
    }
}

fn open(entry: &FileEntry) -> Result<File, WeightFileError> {
    let file = shared::files::open_regular(&entry.path).map_err(failed("open", entry))?;
    check(&file, entry)?;
    crate::file_lock::hold(&file, &entry.path).map_err(failed("lock", entry))?;
    Ok(file)
}

fn failed(action: &'static str, entry: &FileEntry) -> impl Fn(io::Error) -> WeightFileError {
    let path = entry.path.clone();
    move |source| WeightFileError::File { action, path: path.clone(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_in_place_of_a_file_is_refused_without_waiting_for_its_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("block");
        std::fs::write(&path, "weights").unwrap();
        let entry = FileEntry::of(&path, &File::open(&path).unwrap()).unwrap();
        assert!(open(&entry).is_ok());
        std::fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = open(&entry).unwrap_err();
        let WeightFileError::File { action: "open", source, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(source.to_string(), "it is not a regular file");
        assert!(!error.is_passing());
        let folder = FileEntry { path: folder.path().to_owned(), ..entry };
        assert!(!open(&folder).unwrap_err().is_passing());
    }
}
