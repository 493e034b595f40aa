//! The checkpoint files of a model folder: one file, of safetensors or of PyTorch, or an index with
//! several. Files are opened when a tensor in them is asked for, so that a server of a few blocks
//! looks only at the shards that hold them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use model::checkpoint::{CHECKPOINTS, header_of};
use model::header::{Header, TensorInfo};
use model::manifest::FileEntry;
use serde::Deserialize;

use crate::error::PrepareError;
use model::file_lock::hold;

/// Longest accepted index; that of a model with 126 blocks has a tenth of a megabyte.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// The checkpoint of a model.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    files: Files,
    open: BTreeMap<String, CheckpointFile>,
    /// Tensors that lie in another file than the index says, under the name by which that file is
    /// open.
    adopted: BTreeMap<String, String>,
}

/// Which file holds which tensor.
#[derive(Debug)]
enum Files {
    Single(&'static str),
    Index { name: &'static str, of_tensors: BTreeMap<String, String> },
}

/// One opened file.
#[derive(Debug)]
pub struct CheckpointFile {
    pub file: File,
    /// Its name in the model folder, for messages; the Hub's cache has links there.
    pub shown: PathBuf,
    /// Its real path and state.
    pub entry: FileEntry,
    pub header: Header,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Looks for checkpoint files in `folder`, safetensors before PyTorch's, an index before a
    /// single file.
    ///
    /// # Errors
    /// [`PrepareError::BadFile`] when there is none, or when the index is malformed.
    pub fn find(folder: &Path) -> Result<Checkpoint, PrepareError> {
        let here = |name: &str| folder.join(name).is_file();
        let found = CHECKPOINTS.iter().find_map(|&(index, single)| match here(index) {
            true => Some(
                read_index(&folder.join(index))
                    .map(|of_tensors| Files::Index { name: index, of_tensors }),
            ),
            false => here(single).then_some(Ok(Files::Single(single))),
        });
        Ok(Checkpoint {
            folder: folder.to_owned(),
            files: found.unwrap_or_else(|| Err(no_weights(folder)))?,
            open: BTreeMap::new(),
            adopted: BTreeMap::new(),
        })
    }

    /// A checkpoint of one file, which need not be there.
    pub(crate) fn single(folder: &Path, file: &'static str) -> Checkpoint {
        Checkpoint {
            folder: folder.to_owned(),
            files: Files::Single(file),
            open: BTreeMap::new(),
            adopted: BTreeMap::new(),
        }
    }

    /// A checkpoint without a tensor, of a folder that holds converted blocks.
    pub(crate) fn empty(folder: &Path) -> Checkpoint {
        Checkpoint {
            folder: folder.to_owned(),
            files: Files::Index { name: "sepal.json", of_tensors: BTreeMap::new() },
            open: BTreeMap::new(),
            adopted: BTreeMap::new(),
        }
    }

    /// Takes `tensors` from the file at `path` from now on.
    ///
    /// # Errors
    /// As [`Header::read`].
    pub(crate) fn adopt(&mut self, path: &Path, tensors: &[String]) -> Result<(), PrepareError> {
        let name = path.to_string_lossy().into_owned();
        if !self.open.contains_key(&name) {
            self.open.insert(name.clone(), open(path)?);
        }
        let adopted = tensors.iter().map(|tensor| (tensor.clone(), name.clone()));
        self.adopted.extend(adopted);
        Ok(())
    }

    fn place_of(&self, tensor: &str) -> Result<&str, PrepareError> {
        match self.adopted.get(tensor) {
            Some(name) => Ok(name),
            None => self.file_of(tensor),
        }
    }

    /// The name under which `tensor` is here: that, or with another word or none before it. Files
    /// of a model with its head name the part of the model (`transformer.h.0`,
    /// `model.layers.0`), those of the part alone do not (`h.0`, as published for BLOOM).
    ///
    /// # Errors
    /// When the only file cannot be opened.
    pub fn name_of(&mut self, tensor: &str) -> Result<String, PrepareError> {
        const PARTS: [&str; 2] = ["transformer.", "model."];
        let bare = PARTS.iter().find_map(|part| tensor.strip_prefix(part));
        let bare = bare.unwrap_or(tensor);
        let with = |part: &str| format!("{part}{bare}");
        let names = [tensor.to_owned(), bare.to_owned(), with(PARTS[0]), with(PARTS[1])];
        // From the Hub comes a file for each block instead.
        if let Files::Single(name) = self.files
            && self.folder.join(name).is_file()
        {
            self.open_file(name)?;
        }
        let has = |name: &String| match &self.files {
            Files::Single(file) => {
                let file = self.open.get(*file);
                file.is_some_and(|file| file.header.tensors.contains_key(name))
            }
            Files::Index { of_tensors, .. } => of_tensors.contains_key(name),
        };
        // What is under no name is missing under the first.
        Ok(names.into_iter().find(has).unwrap_or_else(|| tensor.to_owned()))
    }

    /// Opens the file that holds `tensor`, unless it is open.
    ///
    /// # Errors
    /// [`PrepareError::BadTensor`] when no file holds it, else as [`Header::read`].
    pub fn open(&mut self, tensor: &str) -> Result<(), PrepareError> {
        let name = self.place_of(tensor)?.to_owned();
        self.open_file(&name)?;
        self.tensor(tensor).map(|_| ())
    }

    fn open_file(&mut self, name: &str) -> Result<(), PrepareError> {
        if !self.open.contains_key(name) {
            let file = open(&self.folder.join(name))?;
            self.open.insert(name.to_owned(), file);
        }
        Ok(())
    }

    /// The opened file that holds `tensor`, and what its header says of it.
    ///
    /// # Errors
    /// [`PrepareError::BadTensor`] when it is not there.
    pub fn tensor(&self, tensor: &str) -> Result<(&CheckpointFile, &TensorInfo), PrepareError> {
        let name = self.place_of(tensor)?;
        let missing = |path: &Path| {
            PrepareError::bad_tensor(path, tensor, "is missing; the checkpoint is incomplete")
        };
        let file = self.open.get(name).ok_or_else(|| missing(&self.folder.join(name)))?;
        let info = file.header.tensors.get(tensor).ok_or_else(|| missing(&file.shown))?;
        Ok((file, info))
    }

    /// Name of the file that holds `tensor` by the index.
    pub(crate) fn file_of(&self, tensor: &str) -> Result<&str, PrepareError> {
        let (name, of_tensors) = match &self.files {
            Files::Single(name) => return Ok(name),
            Files::Index { name, of_tensors } => (name, of_tensors),
        };
        let path = self.folder.join(name);
        let file = of_tensors.get(tensor).ok_or_else(|| {
            PrepareError::bad_tensor(
                &path,
                tensor,
                "is not listed; the checkpoint is incomplete or of another model",
            )
        })?;
        let plain =
            !file.is_empty() && !file.contains(['/', '\\', '\0']) && file != "." && file != "..";
        if plain {
            Ok(file)
        } else {
            let shown: String = file.chars().take(200).collect();
            Err(PrepareError::bad_tensor(
                &path,
                tensor,
                format!("lies in {shown:?}, which is no file of this folder"),
            ))
        }
    }
}

/// Opens a checkpoint file; its name tells the format.
pub(crate) fn open(path: &Path) -> Result<CheckpointFile, PrepareError> {
    let missing = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => {
            PrepareError::bad_file(path, "is missing; the checkpoint is incomplete")
        }
        _ => PrepareError::read(path, e),
    };
    let real = path.canonicalize().map_err(missing)?;
    let file = File::open(&real).map_err(|e| PrepareError::read(path, e))?;
    // Keeps the file from being deleted for room.
    hold(&file, &real).map_err(|e| PrepareError::read(path, e))?;
    let entry = FileEntry::of(&real, &file).map_err(|e| PrepareError::read(path, e))?;
    let header = header_of(path, &file, entry.len);
    let header = header.map_err(|error| PrepareError::header(path, error))?;
    Ok(CheckpointFile { file, shown: path.to_owned(), entry, header })
}

fn read_index(path: &Path) -> Result<BTreeMap<String, String>, PrepareError> {
    let json = read_bounded(path, MAX_INDEX_BYTES)?;
    let index: Index = serde_json::from_slice(&json).map_err(|e| {
        PrepareError::bad_file(path, format!("is no index of checkpoint files: {e}"))
    })?;
    Ok(index.weight_map)
}

/// The whole of a small file.
///
/// # Errors
/// [`PrepareError::BadFile`] when it is missing or longer than `limit`, [`PrepareError::Read`] when
/// it cannot be read.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, PrepareError> {
    let file = File::open(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            PrepareError::bad_file(path, "is missing; give a model folder in Hugging Face layout")
        }
        _ => PrepareError::read(path, e),
    })?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|e| PrepareError::read(path, e))?;
    if bytes.len() as u64 > limit {
        return Err(PrepareError::bad_file(path, format!("is longer than {limit} bytes")));
    }
    Ok(bytes)
}

fn no_weights(folder: &Path) -> PrepareError {
    let [(index, single), (pickled_index, pickled)] = CHECKPOINTS;
    PrepareError::bad_file(
        folder,
        format!(
            "holds neither {single}, {index}, {pickled} nor {pickled_index}; give a folder with the model's weights"
        ),
    )
}
