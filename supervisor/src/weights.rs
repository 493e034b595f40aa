//! The files of the weights that are served, open. They are opened by their paths once, when the first
//! worker of a prepared span starts; every worker gets descriptors of them, at each restart the same
//! ones. A model folder may therefore be moved or deleted while it is served.
//!
//! A manifest that prepare has written anew takes the place of the one that is open. The files stay
//! locked ([`shared::hold`]) until the tree has no worker of the span any more.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use model::manifest::{Manifest, ManifestError};
use model::weight_files::{FilesOfBlocks, WeightFileError, WeightFiles};
use serde::{Deserialize, Serialize};
use shared::block::Span;

use crate::handed::{Fd, Handed};

/// Why the weights of a span could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The manifest that prepare wrote.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A file that it names.
    #[error(transparent)]
    File(#[from] WeightFileError),
}

impl WeightsError {
    /// Whether another attempt may succeed.
    pub fn is_passing(&self) -> bool {
        matches!(self, WeightsError::File(failure) if failure.is_passing())
    }
}

/// The open files of one prepared span.
#[derive(Debug)]
pub struct OpenWeights {
    whole: Span,
    manifest: File,
    of_blocks: FilesOfBlocks,
    files: WeightFiles,
}

impl OpenWeights {
    fn open(whole: Span, path: &Path) -> Result<OpenWeights, WeightsError> {
        let failed = |source| ManifestError::Io { action: "open", path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let manifest = Manifest::read_open(&file, path)?;
        let files = WeightFiles::open(&manifest, whole)?;
        Ok(OpenWeights { whole, manifest: file, of_blocks: FilesOfBlocks::of(&manifest), files })
    }

    /// Indexes in the manifest of the files that hold `span`, and the descriptors for its worker: the
    /// manifest, then these files.
    pub fn of_span(&self, span: Span) -> (Vec<u32>, Vec<BorrowedFd<'_>>) {
        let files = self.files.descriptors(&self.of_blocks.of_span(span));
        let (indexes, files): (Vec<u32>, Vec<_>) = files.into_iter().unzip();
        (indexes, std::iter::once(self.manifest.as_fd()).chain(files).collect())
    }

    /// Whether the manifest at `path` is another one by now.
    fn is_replaced(&self, path: &Path) -> bool {
        let Ok(ours) = self.manifest.metadata() else { return true };
        // One that is gone takes no place: what is open is all there is.
        let now = path.metadata();
        now.is_ok_and(|now| (now.dev(), now.ino()) != (ours.dev(), ours.ino()))
    }
}

/// The open files of all spans that have workers; two while the instance moves.
#[derive(Debug, Default)]
pub struct Weights(Vec<OpenWeights>);

impl Weights {
    /// The files of the span `whole`, opened if they are not or if the manifest at `path` is new.
    ///
    /// # Errors
    /// [`WeightsError`], which names the file.
    pub fn of(&mut self, whole: Span, path: &Path) -> Result<&OpenWeights, WeightsError> {
        let index = self.0.iter().position(|open| open.whole == whole);
        let index = match index {
            Some(index) if !self.0.get(index).is_some_and(|open| open.is_replaced(path)) => index,
            other => {
                let opened = OpenWeights::open(whole, path)?;
                if let Some(index) = other {
                    self.0.swap_remove(index);
                }
                self.0.push(opened);
                self.0.len() - 1
            }
        };
        let gone = || ManifestError::Bad { path: path.to_owned(), reason: "not open".to_owned() };
        Ok(self.0.get(index).ok_or_else(gone)?)
    }

    /// Closes the files of all spans but `used`.
    pub fn keep(&mut self, used: &[Span]) {
        self.0.retain(|open| used.contains(&open.whole));
    }
}

/// The open files of a span, by descriptors that survive the change of the executable.
#[derive(Debug, Serialize, Deserialize)]
pub struct HandedWeights {
    whole: Span,
    manifest: Fd,
    files: Vec<(u32, Fd)>,
}

impl Weights {
    /// Duplicates every descriptor for the next executable.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn hand_over(&self, handed: &mut Handed) -> io::Result<Vec<HandedWeights>> {
        let mut one = |open: &OpenWeights| {
            let mut put = |file: &File| Ok::<_, io::Error>(handed.put(file.try_clone()?.into()));
            let manifest = put(&open.manifest)?;
            let files = open.files.iter().map(|(index, file)| Ok((index, put(file)?)));
            let files = files.collect::<io::Result<_>>()?;
            Ok(HandedWeights { whole: open.whole, manifest, files })
        };
        self.0.iter().map(&mut one).collect()
    }

    /// The files that the executable before handed over. `path` tells where the manifest of a span was
    /// opened.
    ///
    /// # Errors
    /// When a descriptor is missing or a manifest cannot be read.
    pub fn adopt(
        handed: Vec<HandedWeights>,
        path: impl Fn(Span) -> std::path::PathBuf,
    ) -> io::Result<Weights> {
        let one = |HandedWeights { whole, mut manifest, files }: HandedWeights| {
            let take = |(index, mut fd): (u32, Fd)| Ok::<_, io::Error>((index, fd.take()?));
            let files = files.into_iter().map(take).collect::<io::Result<Vec<(u32, OwnedFd)>>>()?;
            let file = File::from(manifest.take()?);
            let read = Manifest::read_open(&file, &path(whole)).map_err(io::Error::other)?;
            let (of_blocks, files) = (FilesOfBlocks::of(&read), WeightFiles::received(files));
            Ok(OpenWeights { whole, manifest: file, of_blocks, files })
        };
        Ok(Weights(handed.into_iter().map(one).collect::<io::Result<_>>()?))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn span(start: u32, end: u32) -> Span {
        Span::new(start, end).unwrap()
    }

    /// Prepared blocks 0 and 1, each in a file of its own, and where their manifest is.
    fn prepared(folder: &Path) -> std::path::PathBuf {
        let entry = |index: u32| {
            let path = folder.join(format!("block-{index}"));
            std::fs::write(&path, [index as u8; 64]).unwrap();
            let file = File::open(&path).unwrap();
            model::manifest::FileEntry::of(&path, &file).unwrap()
        };
        let tensor = |file| {
            let tensor = model::manifest::TensorEntry {
                file,
                offset: 0,
                len: 64,
                dtype: shared::dtype::DType::F32,
                quant: shared::config::QuantType::None,
                shape: vec![16],
            };
            [("norm.weight".to_owned(), tensor)].into()
        };
        let manifest = Manifest {
            version: model::manifest::MANIFEST_VERSION,
            model: crate::sizing::tests::llama_70b(),
            config: serde_json::Value::Null,
            files: vec![entry(0), entry(1)],
            blocks: [(0, tensor(0)), (1, tensor(1))].into(),
            adapters: Vec::new(),
        };
        let path = folder.join("manifest.json");
        manifest.write(&path).unwrap();
        path
    }

    fn first_byte(file: BorrowedFd<'_>) -> u8 {
        let file = File::from(file.try_clone_to_owned().unwrap());
        let mut byte = [0];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, 0).unwrap();
        byte[0]
    }

    #[test]
    fn files_that_are_open_outlive_their_folder_and_stay_locked() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("model");
        std::fs::create_dir(&folder).unwrap();
        let path = prepared(&folder);
        let mut weights = Weights::default();
        weights.of(span(0, 2), &path).unwrap();
        let other = File::open(folder.join("block-1")).unwrap();
        assert!(other.try_lock().is_err(), "another instance may not delete it");

        std::fs::remove_dir_all(&folder).unwrap();
        let open = weights.of(span(0, 2), &path).unwrap();
        let (indexes, descriptors) = open.of_span(span(1, 2));
        assert_eq!((indexes, descriptors.len()), (vec![1], 2), "the manifest and one file");
        assert_eq!(first_byte(descriptors[1]), 1);

        weights.keep(&[span(3, 4)]);
        assert!(other.try_lock().is_ok(), "nothing of the span is served any more");
        let error = weights.of(span(0, 2), &path).unwrap_err();
        assert!(error.to_string().contains("manifest.json") && !error.is_passing(), "{error}");
    }

    #[test]
    fn a_manifest_that_was_written_anew_takes_the_place_of_the_open_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = prepared(folder.path());
        let mut weights = Weights::default();
        let number = |open: &OpenWeights| open.manifest.metadata().unwrap().ino();
        let first = number(weights.of(span(0, 2), &path).unwrap());
        assert_eq!(number(weights.of(span(0, 2), &path).unwrap()), first);
        prepared(folder.path());
        assert_ne!(number(weights.of(span(0, 2), &path).unwrap()), first);
        assert_eq!(weights.0.len(), 1);
    }

    #[test]
    fn the_next_executable_finds_every_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = prepared(folder.path());
        let mut weights = Weights::default();
        weights.of(span(0, 2), &path).unwrap();
        let mut handed = Handed::default();
        let state = weights.hand_over(&mut handed).unwrap();
        let state = serde_json::to_string(&state).unwrap();
        handed.keep_open().unwrap();
        // The next executable owns the numbers.
        std::mem::forget(handed);
        drop(weights);
        std::fs::remove_file(folder.path().join("block-1")).unwrap();
        let state: Vec<HandedWeights> = serde_json::from_str(&state).unwrap();
        let weights = Weights::adopt(state, |_| path.clone()).unwrap();
        let (indexes, descriptors) = weights.0[0].of_span(span(0, 2));
        assert_eq!(indexes, [0, 1]);
        assert!(descriptors.iter().all(|fd| fd.as_raw_fd() > 2));
        assert_eq!(descriptors[1..].iter().map(|fd| first_byte(*fd)).collect::<Vec<_>>(), [0, 1]);
    }
}
