//! The checkpoint files of a model folder: one safetensors file or an index with several. Files are opened when a tensor in
//! them is asked for, so that a server of a few blocks looks only at the shards that hold them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::error::PrepareError;
use super::header::{Header, TensorInfo};
use crate::weights::manifest::FileEntry;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const PICKLED: [&str; 2] = ["pytorch_model.bin.index.json", "pytorch_model.bin"];

/// Longest accepted index; that of a model with 126 blocks has a tenth of a megabyte.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// The checkpoint of a model.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    index: Option<BTreeMap<String, String>>,
    open: BTreeMap<String, CheckpointFile>,
}

/// One opened file.
#[derive(Debug)]
pub struct CheckpointFile {
    /// The file.
    pub file: File,
    /// Its name in the model folder, for messages; the Hub's cache has links there.
    pub shown: PathBuf,
    /// Its real path and state.
    pub entry: FileEntry,
    /// Its header.
    pub header: Header,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Looks for checkpoint files in `folder`, in the order of Petals (petals `server/from_pretrained.py`), index first.
    ///
    /// # Errors
    /// [`PrepareError::BadFile`] when there is none, when only pickled files are there, or when the index is malformed.
    pub fn find(folder: &Path) -> Result<Checkpoint, PrepareError> {
        let here = |name: &str| folder.join(name).is_file();
        let index = match here(INDEX) {
            true => Some(read_index(&folder.join(INDEX))?),
            false if here(SINGLE) => None,
            false => return Err(no_weights(folder)),
        };
        Ok(Checkpoint {
            folder: folder.to_owned(),
            index,
            open: BTreeMap::new(),
        })
    }

    /// Opens the file that holds `tensor`, unless it is open.
    ///
    /// # Errors
    /// [`PrepareError::BadTensor`] when no file holds it, else as [`Header::read`].
    pub fn open(&mut self, tensor: &str) -> Result<(), PrepareError> {
        let name = self.file_of(tensor)?.to_owned();
        if !self.open.contains_key(&name) {
            let file = open(&self.folder.join(&name))?;
            self.open.insert(name, file);
        }
        self.tensor(tensor).map(|_| ())
    }

    /// The opened file that holds `tensor`, and what its header says of it.
    ///
    /// # Errors
    /// [`PrepareError::BadTensor`] when it is not there.
    pub fn tensor(&self, tensor: &str) -> Result<(&CheckpointFile, &TensorInfo), PrepareError> {
        let name = self.file_of(tensor)?;
        let missing = |path: &Path| {
            PrepareError::bad_tensor(path, tensor, "is missing; the checkpoint is incomplete")
        };
        let file = self
            .open
            .get(name)
            .ok_or_else(|| missing(&self.folder.join(name)))?;
        let info = file
            .header
            .tensors
            .get(tensor)
            .ok_or_else(|| missing(&file.shown))?;
        Ok((file, info))
    }

    fn file_of(&self, tensor: &str) -> Result<&str, PrepareError> {
        let Some(index) = &self.index else {
            return Ok(SINGLE);
        };
        let path = self.folder.join(INDEX);
        let file = index.get(tensor).ok_or_else(|| {
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

fn open(path: &Path) -> Result<CheckpointFile, PrepareError> {
    let missing = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => {
            PrepareError::bad_file(path, "is missing; the checkpoint is incomplete")
        }
        _ => PrepareError::read(path, e),
    };
    let real = path.canonicalize().map_err(missing)?;
    let file = File::open(&real).map_err(|e| PrepareError::read(path, e))?;
    let entry = FileEntry::of(&real, &file).map_err(|e| PrepareError::read(path, e))?;
    let header = Header::read(&file, path, entry.len)?;
    Ok(CheckpointFile {
        file,
        shown: path.to_owned(),
        entry,
        header,
    })
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
/// [`PrepareError::BadFile`] when it is missing or longer than `limit`, [`PrepareError::Read`] when it cannot be read.
pub(super) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, PrepareError> {
    let file = File::open(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => PrepareError::bad_file(
            path,
            "is missing; give a model folder in Hugging Face layout",
        ),
        _ => PrepareError::read(path, e),
    })?;
    let mut bytes = Vec::new();
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| PrepareError::read(path, e))?;
    if bytes.len() as u64 > limit {
        return Err(PrepareError::bad_file(
            path,
            format!("is longer than {limit} bytes"),
        ));
    }
    Ok(bytes)
}

fn no_weights(folder: &Path) -> PrepareError {
    if let Some(name) = PICKLED.iter().find(|name| folder.join(name).is_file()) {
        let reason =
            "is a pickled checkpoint, which is not supported yet; convert it to safetensors";
        return PrepareError::bad_file(&folder.join(name), reason);
    }
    PrepareError::bad_file(
        folder,
        format!("holds neither {SINGLE} nor {INDEX}; give a folder with the model's weights"),
    )
}
