//! The tensors of one block as they lie in the checkpoint, checked against what the block needs.

use std::fs::File;
use std::path::Path;

use kernels::quant;
use model::TensorSpec;
use model::header::TensorInfo;
use model::manifest::FileEntry;
use shared::config::QuantType;
use shared::dtype::DType;

use crate::checkpoint::CheckpointFile;
use crate::error::PrepareError;

/// A tensor that a block needs.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Name within the block.
    pub name: String,
    /// Name in the checkpoint.
    pub full_name: String,
    /// Shape, slowest dimension first.
    pub shape: Vec<u64>,
}

impl From<TensorSpec> for Wanted {
    fn from(spec: TensorSpec) -> Wanted {
        let shape = spec.shape.iter().map(|&side| side as u64).collect();
        Wanted { name: spec.name, full_name: spec.full_name, shape }
    }
}

/// One tensor of a block in a checkpoint file.
#[derive(Debug)]
pub struct SourceTensor<'a> {
    /// Name within the block.
    pub name: &'a str,
    /// Name in the checkpoint.
    pub full_name: &'a str,
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
    /// How it is to be stored.
    pub quant: QuantType,
}

/// Type and number of elements of the tensor `full_name` that a header describes, which must have
/// `shape`; `shown` is the file, for messages.
///
/// # Errors
/// [`PrepareError::BadTensor`] as [`SourceTensor::new`].
pub fn checked(
    info: &TensorInfo,
    shape: &[u64],
    full_name: &str,
    shown: &Path,
) -> Result<(DType, u64), PrepareError> {
    let bad = |reason: String| PrepareError::bad_tensor(shown, full_name, reason);
    let dtype = info.block_dtype().ok_or_else(|| {
        let shown: String = info.dtype.chars().take(20).collect();
        bad(format!("has type {shown:?}; only F32, BF16 and F16 are supported"))
    })?;
    if info.shape != shape {
        return Err(bad(format!("has shape {:?}, config.json asks for {shape:?}", info.shape)));
    }
    let elements = info.block_elements(dtype).ok_or_else(|| {
        bad(format!(
            "has {} bytes, which do not fit its shape {:?} of {}",
            info.bytes(),
            info.shape,
            info.dtype
        ))
    })?;
    Ok((dtype, elements))
}

/// Bytes of a tensor of this shape as stored, in `dtype` or quantized; `None` when that is no size.
pub fn stored_bytes(quant: QuantType, dtype: DType, shape: &[u64]) -> Option<u64> {
    let side = |side: &u64| usize::try_from(*side).ok();
    let bytes = match shape {
        [outputs, inputs] => quant::stored_bytes(quant, dtype, side(outputs)?, side(inputs)?),
        _ => {
            let elements = shape.iter().try_fold(1u64, |n, side| n.checked_mul(*side))?;
            quant::stored_bytes(QuantType::None, dtype, 1, side(&elements)?)
        }
    };
    u64::try_from(bytes?).ok()
}

impl<'a> SourceTensor<'a> {
    /// The tensor `full_name`, which must have `shape`.
    ///
    /// # Errors
    /// [`PrepareError::BadTensor`] when its type is not floating point, or its shape or size is
    /// another.
    pub fn new(
        name: &'a str,
        full_name: &'a str,
        shape: &[u64],
        file: &'a CheckpointFile,
        info: &'a TensorInfo,
    ) -> Result<SourceTensor<'a>, PrepareError> {
        let (dtype, elements) = checked(info, shape, full_name, &file.shown)?;
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
            quant: QuantType::None,
        })
    }

    /// The same tensor, to be stored as `quant`.
    pub fn stored_as(self, quant: QuantType) -> SourceTensor<'a> {
        SourceTensor { quant, ..self }
    }

    /// Bytes as stored, in `dtype` or quantized; `None` when that is no size.
    pub fn stored_bytes(&self, dtype: DType) -> Option<u64> {
        stored_bytes(self.quant, dtype, self.shape)
    }

    /// Whether it can be served from where it lies: not to be quantized, same type, aligned to its
    /// elements.
    pub fn usable_as(&self, dtype: DType) -> bool {
        self.quant == QuantType::None
            && self.dtype == dtype
            && self.offset.is_multiple_of(dtype.size_bytes() as u64)
    }
}
