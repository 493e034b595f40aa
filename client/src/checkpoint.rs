//! Single tensors of a checkpoint folder: those that a client computes with itself.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kernels::WeightView;
use kernels::quant::{int8, nf4};
use model::checkpoint::{CHECKPOINTS, header_of};
use model::header::HeaderError;
use serde::Deserialize;
use shared::dtype::{DType, QuantType};

/// Why the local part of a model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LocalModelError {
    /// A file is missing or unreadable.
    #[error(
        "cannot read {path}; give a model folder in Hugging Face layout, with the weights of the model"
    )]
    Read { path: PathBuf, source: std::io::Error },
    /// A JSON file does not parse.
    #[error("cannot parse {path}")]
    Parse { path: PathBuf, source: serde_json::Error },
    /// A checkpoint file has no header that can be used.
    #[error("{path} {source}")]
    Header {
        path: PathBuf,
        /// Why; continues the sentence.
        source: HeaderError,
    },
    /// The content makes no sense.
    #[error("{path}: {reason}")]
    Content {
        path: PathBuf,
        /// What is wrong, and the value.
        reason: String,
    },
}

/// A matrix of the checkpoint, row-major.
pub(crate) struct CheckpointMatrix {
    /// Type of the elements.
    pub dtype: DType,
    pub rows: usize,
    pub columns: usize,
    /// How the elements are stored.
    pub quant: QuantType,
    pub bytes: Vec<u8>,
}

impl CheckpointMatrix {
    /// The same numbers in `dtype`, rounded to nearest even.
    pub fn cast(self, dtype: Option<DType>) -> CheckpointMatrix {
        let is_other = |dtype: &DType| *dtype != self.dtype && self.quant == QuantType::None;
        let Some(dtype) = dtype.filter(is_other) else {
            return self;
        };
        let mut bytes = vec![0; self.rows * self.columns * dtype.size_bytes()];
        let rows = self.bytes.chunks(self.columns * self.dtype.size_bytes());
        let mut values = vec![0.0; self.columns];
        for (row, out) in rows.zip(bytes.chunks_mut(self.columns * dtype.size_bytes())) {
            kernels::ops::convert::to_f32(self.dtype, row, &mut values);
            kernels::ops::convert::from_f32(dtype, &values, out);
        }
        CheckpointMatrix { dtype, bytes, ..self }
    }

    /// The same numbers rounded to `quant`; `None` if that is no other form.
    pub fn quantize(&self, quant: QuantType) -> Option<CheckpointMatrix> {
        let values = || kernels::ops::convert::to_vec(self.dtype, &self.bytes);
        let bytes = match (self.quant, quant) {
            (QuantType::None, QuantType::Int8) => int8::encode(&values(), self.columns),
            (QuantType::None, QuantType::Nf4) => nf4::encode(&values()),
            _ => return None,
        };
        Some(CheckpointMatrix { quant, bytes, ..*self })
    }

    /// To be computed with.
    pub fn view(&self) -> Result<WeightView<'_>, String> {
        let CheckpointMatrix { dtype, rows, columns, quant, ref bytes } = *self;
        WeightView::quantized(quant, dtype, rows, columns, bytes).map_err(|error| error.to_string())
    }
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, LocalModelError> {
    std::fs::read(path).map_err(|source| LocalModelError::Read { path: path.to_owned(), source })
}

/// Reads a file of at most `most` bytes.
pub(crate) fn read_at_most(path: &Path, most: u64) -> Result<Vec<u8>, LocalModelError> {
    let failed = |source| LocalModelError::Read { path: path.to_owned(), source };
    let length = std::fs::metadata(path).map_err(failed)?.len();
    if length > most {
        let reason = format!("has {length} bytes, at most {most} are read");
        return Err(LocalModelError::Content { path: path.to_owned(), reason });
    }
    read(path)
}

pub(crate) fn parse<'a, T: Deserialize<'a>>(
    path: &Path,
    bytes: &'a [u8],
) -> Result<T, LocalModelError> {
    serde_json::from_slice(bytes)
        .map_err(|source| LocalModelError::Parse { path: path.to_owned(), source })
}

/// The checkpoint files of a folder, of safetensors or of PyTorch: one, or those of an index.
pub(crate) struct Checkpoint {
    folder: PathBuf,
    /// Name of the index, whether it is there or not.
    index_name: &'static str,
    /// Name of the file that is there without one.
    single: &'static str,
    /// File of each tensor; empty when there is a single file.
    index: HashMap<String, String>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl Checkpoint {
    /// Reads the index, if there is one.
    pub fn open(folder: &Path) -> Result<Checkpoint, LocalModelError> {
        let here = |name: &str| folder.join(name).is_file();
        let found = CHECKPOINTS.into_iter().find(|(index, single)| here(index) || here(single));
        let (index_name, single) = found.unwrap_or(CHECKPOINTS[0]);
        let path = folder.join(index_name);
        let index = match path.exists() {
            true => parse::<Index>(&path, &read(&path)?)?.weight_map,
            false => HashMap::new(),
        };
        Ok(Checkpoint { folder: folder.to_owned(), index_name, single, index })
    }

    /// The file with a tensor. Where the checkpoint is not there whole, `prepare` may have left the tensors of a
    /// client in a file of their own.
    fn file_of(&self, tensor: &str) -> Result<PathBuf, LocalModelError> {
        let (path, own) = (self.whole_file_of(tensor)?, self.folder.join("client.safetensors"));
        Ok(if !path.exists() && own.exists() { own } else { path })
    }

    fn whole_file_of(&self, tensor: &str) -> Result<PathBuf, LocalModelError> {
        if self.index.is_empty() {
            return Ok(self.folder.join(self.single));
        }
        let path = self.folder.join(self.index_name);
        match self.index.get(tensor) {
            Some(name) if !name.contains('/') => Ok(self.folder.join(name)),
            Some(name) => Err(LocalModelError::Content {
                path,
                reason: format!("names the file {name:?} outside the folder"),
            }),
            None => Err(LocalModelError::Content {
                path,
                reason: format!("does not name the tensor {tensor}"),
            }),
        }
    }

    /// The matrix under the first of `names` that is there.
    pub fn matrix(
        &self,
        names: &[&str],
        [rows, columns]: [usize; 2],
    ) -> Result<CheckpointMatrix, LocalModelError> {
        let (dtype, bytes) = self.tensor(names, &[rows, columns])?;
        Ok(CheckpointMatrix { dtype, rows, columns, quant: QuantType::None, bytes })
    }

    /// The tensor of a block; a vector is a matrix of one row. Files of the part of a model without its head
    /// leave out the first word of its name (`h.0` for `transformer.h.0`), as `prepare` knows.
    pub fn block_tensor(
        &self,
        name: &str,
        shape: &[usize],
    ) -> Result<CheckpointMatrix, LocalModelError> {
        const PARTS: [&str; 2] = ["transformer.", "model."];
        let bare = PARTS.iter().find_map(|part| name.strip_prefix(part)).unwrap_or(name);
        let others = PARTS.map(|part| format!("{part}{bare}"));
        let (dtype, bytes) = self.tensor(&[name, bare, &others[0], &others[1]], shape)?;
        let columns = shape.last().copied().unwrap_or_default();
        let rows = shape.iter().rev().skip(1).product();
        Ok(CheckpointMatrix { dtype, rows, columns, quant: QuantType::None, bytes })
    }

    /// The vector under the first of `names` that is there, as f32.
    pub fn vector(&self, names: &[&str], len: usize) -> Result<Vec<f32>, LocalModelError> {
        let (dtype, bytes) = self.tensor(names, &[len])?;
        let mut out = vec![0.0; len];
        kernels::ops::convert::to_f32(dtype, &bytes, &mut out);
        Ok(out)
    }

    fn tensor(&self, names: &[&str], shape: &[usize]) -> Result<(DType, Vec<u8>), LocalModelError> {
        let listed = names.iter().find(|name| self.index.contains_key(**name));
        let path = self.file_of(listed.or(names.first()).copied().unwrap_or_default())?;
        let bad = |reason: String| LocalModelError::Content { path: path.clone(), reason };
        let io = |source| LocalModelError::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(io)?;
        let file_bytes = file.metadata().map_err(io)?.len();
        let header = header_of(&path, &file, file_bytes)
            .map_err(|source| LocalModelError::Header { path: path.clone(), source })?;
        let found = names.iter().find_map(|name| Some((name, header.tensors.get(*name)?)));
        let (name, info) =
            found.ok_or_else(|| bad(format!("has no tensor {}", names.join(" or "))))?;
        let dtype = info.block_dtype().ok_or_else(|| {
            bad(format!(
                "tensor {name} is of type {:.20}; float32, bfloat16 or float16 is needed",
                info.dtype
            ))
        })?;
        let has_shape = info.shape.iter().copied().eq(shape.iter().map(|&side| side as u64));
        if !has_shape || info.block_elements(dtype).is_none() {
            return Err(bad(format!(
                "tensor {name} has shape {:?} in {} bytes instead of {shape:?}",
                info.shape,
                info.bytes()
            )));
        }
        // The header lies within the file, and so does the tensor; its length is that of its shape.
        let mut bytes = vec![0; info.bytes() as usize];
        file.read_exact_at(&mut bytes, header.data_start + info.data_offsets.0).map_err(io)?;
        Ok((dtype, bytes))
    }
}
