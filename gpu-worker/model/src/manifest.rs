//! The manifest: what prepare found and checked, for the workers to map. One JSON file, written
//! under a temporary name and renamed, so that it is either whole or absent.
//!
//! A tensor is a range of a file, in the block dtype, row-major, or a quantized matrix. The file is
//! the checkpoint itself where that holds the tensor in the block dtype already, else a prepared
//! file in the cache folder. Each file is named with its length and time of modification: a worker
//! maps nothing that changed since it was checked.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shared::block::{BlockIndex, Span};
use shared::config::QuantType;
use shared::dtype::DType;
use shared::files::write_atomically;
use shared::model::ModelFacts;

/// Raised with every change of this file's types.
pub const MANIFEST_VERSION: u32 = 3;

/// Longest accepted manifest: 4,096 blocks of some ten tensors need a quarter of it.
const MAX_MANIFEST_BYTES: u64 = 64 << 20;

/// Everything a worker must know to map its weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`MANIFEST_VERSION`] of the writer.
    pub version: u32,
    pub model: ModelFacts,
    /// Its config.json, from which the form of the blocks is read.
    pub config: serde_json::Value,
    pub files: Vec<FileEntry>,
    /// The blocks, by index in the model.
    pub blocks: BTreeMap<u32, BTreeMap<String, TensorEntry>>,
    /// The adapters, in the order of [`ModelFacts::adapters`].
    pub adapters: Vec<AdapterBlocks>,
}

/// Parts of an adapter by block, and by the name of the matrix within the block (without
/// `.weight`).
pub type AdapterBlocks = BTreeMap<u32, BTreeMap<String, AdapterEntry>>;

/// What an adapter adds to one matrix: `scale B A`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdapterEntry {
    /// `[rank, inputs]`.
    pub a: TensorEntry,
    /// `[outputs, rank]`.
    pub b: TensorEntry,
    /// Multiplies what it gives.
    pub scale: f32,
}

/// A file as it was when it was checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Absolute path.
    pub path: PathBuf,
    /// Length in bytes.
    pub len: u64,
    /// Time of modification, seconds since 1970.
    pub mtime_s: i64,
    pub mtime_ns: i64,
}

/// Where one tensor of a block lies. Its name is the one within the block, for example
/// `mlp.up_proj.weight`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Index of the file.
    pub file: u32,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Type of the elements; of the arithmetic when they are quantized.
    pub dtype: DType,
    /// How the elements are stored; see `kernels::quant` for the formats.
    pub quant: QuantType,
    /// Shape, slowest dimension first.
    pub shape: Vec<u64>,
}

/// Why a manifest cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The file cannot be read or written.
    #[error("cannot {action} manifest {path:?}")]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The file is not a manifest of this build.
    #[error("manifest {path:?} cannot be used: {reason}")]
    Bad { path: PathBuf, reason: String },
}

impl FileEntry {
    /// The entry of `path` as the file is now.
    ///
    /// # Errors
    /// When it cannot be looked at.
    pub fn of(path: &Path, file: &File) -> io::Result<FileEntry> {
        let stat = file.metadata()?;
        Ok(FileEntry {
            path: path.to_owned(),
            len: stat.len(),
            mtime_s: stat.mtime(),
            mtime_ns: stat.mtime_nsec(),
        })
    }
}

impl Manifest {
    /// Writes the manifest to `path`, whole or not at all.
    ///
    /// # Errors
    /// [`ManifestError::Io`].
    pub fn write(&self, path: &Path) -> Result<(), ManifestError> {
        let failed = |source| ManifestError::Io { action: "write", path: path.to_owned(), source };
        let json = serde_json::to_vec(self).map_err(|e| failed(e.into()))?;
        write_atomically(path, |file| file.write_all(&json)).map_err(failed)
    }

    /// Reads the manifest at `path`.
    ///
    /// # Errors
    /// [`ManifestError::Io`] when it cannot be read, [`ManifestError::Bad`] when it is no manifest
    /// of this version.
    pub fn read(path: &Path) -> Result<Manifest, ManifestError> {
        let failed = |source| ManifestError::Io { action: "read", path: path.to_owned(), source };
        Manifest::read_open(&shared::files::open_regular(path).map_err(failed)?, path)
    }

    /// Reads the manifest in `file`, which was opened at `path`. Processes that share the descriptor may
    /// read at once: the position of the file stays as it is.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_open(file: &File, path: &Path) -> Result<Manifest, ManifestError> {
        let failed = |source| ManifestError::Io { action: "read", path: path.to_owned(), source };
        let bad = |reason: String| ManifestError::Bad { path: path.to_owned(), reason };
        let bytes = file.metadata().map_err(failed)?.len();
        if bytes > MAX_MANIFEST_BYTES {
            return Err(bad(format!("it is longer than {MAX_MANIFEST_BYTES} bytes")));
        }
        let mut json = vec![0; usize::try_from(bytes).unwrap_or(0)];
        file.read_exact_at(&mut json, 0).map_err(failed)?;
        let manifest: Manifest = serde_json::from_slice(&json).map_err(|e| bad(e.to_string()))?;
        if manifest.version != MANIFEST_VERSION {
            return Err(bad(format!(
                "it has version {}, this build reads {MANIFEST_VERSION}",
                manifest.version
            )));
        }
        Ok(manifest)
    }

    /// The tensors of one block.
    pub fn block(&self, index: BlockIndex) -> Option<&BTreeMap<String, TensorEntry>> {
        self.blocks.get(&index.0)
    }

    /// The first block of `span` that is not described.
    pub fn missing_block(&self, span: Span) -> Option<BlockIndex> {
        span.blocks().find(|b| !self.blocks.contains_key(&b.0))
    }
}
