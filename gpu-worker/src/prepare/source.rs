//! The tensors of one block as they lie in the checkpoint, checked against what the block needs.

use std::fs::File;
use std::path::Path;

use shared::dtype::DType;

use super::checkpoint::CheckpointFile;
use super::error::PrepareError;
use super::header::TensorInfo;
use crate::weights::manifest::FileEntry;

/// One tensor of a block in a checkpoint file.
#[derive(Debug)]
pub struct SourceTensor<'a> {
    /// Name within the block.
    pub name: &'a str,
    /// Name in the checkpoint.
    pub full_name: &'a str,
    /// The file.
    pub source: &'a File,
    /// Its name in the model folder, for messages.
    pub shown: &'a Path,
    /// Its real path and state.
    pub file: &'a FileEntry,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Stored type.
    pub dtype: DType,
    /// Shape, slowest dimension first.
    pub shape: &'a [u64],
    /// Number of elements.
    pub elements: u64,
}

impl<'a> SourceTensor<'a> {
    /// The tensor `full_name`, which must have `shape`.
    ///
    /// # Errors
    /// [`PrepareError::BadTensor`] when its type is not floating point, or its shape or size is another.
    pub fn new(
        name: &'a str,
        full_name: &'a str,
        shape: &[u64],
        (file, info): (&'a CheckpointFile, &'a TensorInfo),
    ) -> Result<SourceTensor<'a>, PrepareError> {
        let bad = |reason: String| PrepareError::bad_tensor(&file.shown, full_name, reason);
        let dtype = info.block_dtype().ok_or_else(|| {
            let shown: String = info.dtype.chars().take(20).collect();
            bad(format!(
                "has type {shown:?}; only F32, BF16 and F16 are supported"
            ))
        })?;
        if info.shape != shape {
            return Err(bad(format!(
                "has shape {:?}, config.json asks for {shape:?}",
                info.shape
            )));
        }
        let elements = info
            .elements()
            .filter(|n| n.checked_mul(dtype.size_bytes() as u64) == Some(info.bytes()));
        let elements = elements.ok_or_else(|| {
            bad(format!(
                "has {} bytes, which do not fit its shape {:?} of {}",
                info.bytes(),
                info.shape,
                info.dtype
            ))
        })?;
        Ok(SourceTensor {
            name,
            full_name,
            source: &file.file,
            shown: &file.shown,
            file: &file.entry,
            offset: file.header.data_start + info.data_offsets.0,
            len: info.bytes(),
            dtype,
            shape: &info.shape,
            elements,
        })
    }

    /// Whether it can be served from where it lies: same type, aligned to its elements.
    pub fn usable_as(&self, dtype: DType) -> bool {
        self.dtype == dtype && self.offset.is_multiple_of(dtype.size_bytes() as u64)
    }
}
