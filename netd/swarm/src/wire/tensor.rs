//! Tensors of the wire against ours: checks of shape, element type and buffer; decoding into a slot
//! of block dtype; building replies. Layouts follow `hivemind/compression/*.py` and Petals' 16-bit
//! form of bfloat16.
//!
//! [`WireTensor::parse`] checks the header once and costs nothing but the header;
//! [`WireTensor::write_to`] is the hot path: where wire and block dtype agree it is one pass of
//! copy and finite check per cache-sized piece, both vectorisable.
//!
//! # Discrepancies
//! Python accepts 8-bit codebooks of any length; here they have 256 entries, as every writer makes
//! them. A tensor whose buffer does not hold exactly what its shape says is an error here; Python
//! fails later and less clearly.

use super::messages::{Compression, Tensor};
use bytes::Bytes;
use half::{bf16, f16};
use shared::dtype::DType;
use thiserror::Error;

mod dtype;
mod floats;
mod payload;

pub use dtype::WireDtype;
use floats::*;
use payload::*;

/// Bounds on a tensor's shape, given by the caller, who knows what the RPC may carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShapeLimits {
    /// Dimensions.
    pub max_rank: usize,
    /// Elements; also the bound of every single dimension, so that an empty tensor cannot claim a
    /// batch of billions.
    pub max_elements: usize,
}

/// Why a message is not a usable tensor.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TensorError {
    /// The dtype's name is unknown.
    #[error("tensor has unknown dtype `{0}`")]
    UnknownDtype(String),
    /// The compression is unknown, or not defined for this dtype.
    #[error("tensor has compression {compression}, which is not defined for {dtype}")]
    BadCompression {
        /// Number in the message.
        compression: i32,
        /// Name of the dtype.
        dtype: &'static str,
    },
    /// The compression is not defined for this shape.
    #[error("tensor of shape {shape:?} cannot have compression {compression}")]
    BadShape {
        shape: Vec<usize>,
        /// Number of the compression in messages.
        compression: i32,
    },
    /// A bound of [`ShapeLimits`] is exceeded.
    #[error(
        "tensor of shape {shape:?} exceeds the limits of {max_rank} dimensions and {max_elements} elements"
    )]
    TooLarge {
        /// The first dimensions.
        shape: Vec<u32>,
        /// The bound on dimensions.
        max_rank: usize,
        /// The bound on elements.
        max_elements: usize,
    },
    /// The buffer does not hold what shape, dtype and compression say.
    #[error("tensor of shape {shape:?} and type {dtype} has a buffer of {actual} bytes")]
    BadBuffer {
        shape: Vec<usize>,
        /// Name of the dtype.
        dtype: &'static str,
        /// Bytes found.
        actual: usize,
    },
    /// The tensor has another dtype than the RPC needs.
    #[error("tensor must be {expected}, got {actual}")]
    WrongDtype { expected: &'static str, actual: &'static str },
    /// The destination does not fit the tensor.
    #[error("tensor needs {needed} bytes, its destination has {actual}")]
    WrongDestination {
        /// Bytes that the elements take there.
        needed: usize,
        /// Bytes that are there.
        actual: usize,
    },
    /// An element is infinite or NaN, or becomes so in the block dtype.
    #[error("element {index} of the tensor is not finite in {dtype}")]
    NotFinite {
        /// Row-major index of the first such element.
        index: usize,
        /// Name of the block dtype.
        dtype: &'static str,
    },
}

/// A tensor of the wire whose header and buffer length are checked; elements are not yet read.
#[derive(Clone, Debug)]
pub struct WireTensor {
    shape: Vec<usize>,
    dtype: WireDtype,
    element_count: usize,
    requires_grad: bool,
    payload: Payload,
}

/// Bytes that a compression may make of no elements: Python's clients compress dummies as well, and
/// `MEANSTD_16BIT` writes one mean and one deviation for them, an 8-bit compression its codebook.
const MAX_EMPTY_BYTES: usize = 2048;
/// Elements converted at once: small enough for the first-level cache, large enough to be
/// vectorised.
const PIECE_ELEMENTS: usize = 2048;

impl WireTensor {
    /// Checks the header of a message against `limits` and its own buffer. Shares the buffer.
    ///
    /// # Errors
    /// Any [`TensorError`] but those of [`Self::write_to`].
    pub fn parse(message: &Tensor, limits: ShapeLimits) -> Result<Self, TensorError> {
        let dtype = WireDtype::parse(&message.dtype)
            .ok_or_else(|| TensorError::UnknownDtype(message.dtype.chars().take(32).collect()))?;
        let (shape, element_count) = checked_shape(&message.size, limits)?;
        let unsupported = || TensorError::BadCompression {
            compression: message.compression,
            dtype: dtype.name(),
        };
        let compression = Compression::try_from(message.compression).map_err(|_| unsupported())?;
        if !supports(dtype, compression) {
            return Err(unsupported());
        }
        let row = shape.last().copied().unwrap_or(1);
        let payload = split_payload(&message.buffer, dtype, compression, element_count, row)
            .ok_or_else(|| TensorError::BadBuffer {
                shape: shape.clone(),
                dtype: dtype.name(),
                actual: message.buffer.len(),
            })?;
        Ok(Self { shape, dtype, element_count, requires_grad: message.requires_grad, payload })
    }

    /// Shape; empty for a scalar.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Dtype that the message names.
    #[must_use]
    pub fn dtype(&self) -> WireDtype {
        self.dtype
    }

    /// Product of the shape.
    #[must_use]
    pub fn element_count(&self) -> usize {
        self.element_count
    }

    /// Whether the tensor stands for "absent": Petals' clients send tensors without elements in
    /// place of missing prompts and hypo ids (`is_dummy` in `petals/utils/misc.py`).
    #[must_use]
    pub fn is_dummy(&self) -> bool {
        self.element_count == 0
    }

    /// The flag of the message.
    #[must_use]
    pub fn requires_grad(&self) -> bool {
        self.requires_grad
    }

    /// The elements in the block dtype nearest to their own ([`WireDtype::block_dtype`]),
    /// little-endian, row-major.
    ///
    /// # Errors
    /// As [`WireTensor::write_to`].
    pub fn to_block(&self) -> Result<(DType, Vec<u8>), TensorError> {
        let dtype = self.dtype.block_dtype();
        let mut bytes = vec![0; self.element_count() * dtype.size_bytes()];
        self.write_to(dtype, &mut bytes)?;
        Ok((dtype, bytes))
    }

    /// Writes all elements to `destination` in block dtype, little-endian, row-major.
    ///
    /// # Errors
    /// [`TensorError::WrongDtype`] unless this is a float tensor; [`TensorError::WrongDestination`]
    /// unless `destination` has exactly the bytes; [`TensorError::NotFinite`] at the first
    /// element that is not finite in the block dtype (`destination` then holds garbage).
    pub fn write_to(&self, dtype: DType, destination: &mut [u8]) -> Result<(), TensorError> {
        if !self.dtype.is_float() {
            return Err(TensorError::WrongDtype {
                expected: "a float tensor",
                actual: self.dtype.name(),
            });
        }
        let needed = self.element_count * dtype.size_bytes();
        if destination.len() != needed {
            return Err(TensorError::WrongDestination { needed, actual: destination.len() });
        }
        self.write_pieces(dtype, |offset, piece| {
            let target = offset..offset + piece.len();
            match destination.get_mut(target) {
                Some(target) => target.copy_from_slice(piece),
                None => {
                    return Err(TensorError::WrongDestination { needed, actual: offset });
                }
            }
            Ok(())
        })
    }

    /// Hands all elements in block dtype, little-endian, row-major, to `write` in pieces that
    /// follow each other: the offset of the piece in bytes, and the piece. Needs no memory of
    /// the tensor's size; a piece is at most 8 KiB and is checked before it is handed over.
    ///
    /// # Errors
    /// [`TensorError::WrongDtype`] unless this is a float tensor; [`TensorError::NotFinite`] at the
    /// first element that is not finite in the block dtype (the pieces before were written);
    /// what `write` returns.
    pub fn write_pieces<E: From<TensorError>>(
        &self,
        dtype: DType,
        write: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if !self.dtype.is_float() {
            return Err(E::from(TensorError::WrongDtype {
                expected: "a float tensor",
                actual: self.dtype.name(),
            }));
        }
        match self.raw_of(dtype) {
            Some(source) => hand_over_finite(source, dtype, write),
            None => self.convert(dtype, write),
        }
    }

    /// All elements as f32, finite or not; float64 is rounded.
    ///
    /// # Errors
    /// [`TensorError::WrongDtype`] unless this is a float tensor.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>, TensorError> {
        if !self.dtype.is_float() {
            return Err(TensorError::WrongDtype {
                expected: "a float tensor",
                actual: self.dtype.name(),
            });
        }
        let mut values = vec![0.0; self.element_count];
        for (piece, out) in values.chunks_mut(PIECE_ELEMENTS).enumerate() {
            self.read_f32(piece * PIECE_ELEMENTS, out);
        }
        Ok(values)
    }

    /// All elements of an int64 tensor.
    ///
    /// # Errors
    /// [`TensorError::WrongDtype`] unless this is an int64 tensor.
    pub fn to_i64_vec(&self) -> Result<Vec<i64>, TensorError> {
        match &self.payload {
            Payload::Raw(raw) if self.dtype == WireDtype::I64 => {
                Ok(raw.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
            }
            _ => Err(TensorError::WrongDtype { expected: "int64", actual: self.dtype.name() }),
        }
    }

    /// The raw buffer, if it already is in `dtype`.
    fn raw_of(&self, dtype: DType) -> Option<&[u8]> {
        match &self.payload {
            Payload::Raw(raw) if self.dtype == dtype.into() => Some(raw),
            Payload::Half(raw) if dtype == DType::F16 => Some(raw),
            _ => None,
        }
    }

    fn convert<E: From<TensorError>>(
        &self,
        dtype: DType,
        mut write: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut piece = [0f32; PIECE_ELEMENTS];
        let mut narrowed = [0u8; PIECE_ELEMENTS * size_of::<f32>()];
        for start in (0..self.element_count).step_by(PIECE_ELEMENTS) {
            let count = PIECE_ELEMENTS.min(self.element_count - start);
            let (values, out) = (&mut piece[..count], &mut narrowed[..count * dtype.size_bytes()]);
            self.read_f32(start, values);
            let finite =
                values.iter().fold(true, |ok, v| ok & v.is_finite()) & narrow(values, dtype, out);
            if !finite {
                return Err(not_finite(start + first_not_finite(values, dtype), dtype).into());
            }
            write(start * dtype.size_bytes(), out)?;
        }
        Ok(())
    }

    /// Decodes elements `start..start + out.len()`; the caller keeps the range inside the tensor,
    /// elsewhere zeros stay.
    fn read_f32(&self, start: usize, out: &mut [f32]) {
        let end = start + out.len();
        match &self.payload {
            Payload::Raw(raw) => match self.dtype {
                WireDtype::F32 => read(raw, start, out, f32::from_le_bytes),
                WireDtype::F16 => read(raw, start, out, |b| f16::from_le_bytes(b).to_f32()),
                WireDtype::Bf16 => read(raw, start, out, |b| bf16::from_le_bytes(b).to_f32()),
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "rounding to f32 is the conversion"
                )]
                WireDtype::F64 => read(raw, start, out, |b| f64::from_le_bytes(b) as f32),
                _ => {}
            },
            Payload::WideBf16(raw) => {
                read(raw, start, out, |b| bf16::from_f32(f32::from_le_bytes(b)).to_f32())
            }
            Payload::Half(raw) => {
                read(raw, start, out, |b| self.round(f16::from_le_bytes(b).to_f32()))
            }
            Payload::MeanStd { values, means, stds, row } => {
                read(values, start, out, |b| f16::from_le_bytes(b).to_f32());
                for (value, element) in out.iter_mut().zip(start..) {
                    let line = element / (*row).max(1);
                    let (mean, std) = (means.get(line).copied(), stds.get(line).copied());
                    // Python multiplies and adds in place, so float16 is rounded twice.
                    *value =
                        self.round(self.round(*value * std.unwrap_or(0.0)) + mean.unwrap_or(0.0));
                }
            }
            Payload::Coded { indexes, codebook, scales } => {
                let indexes = indexes.get(start..end).unwrap_or_default();
                for ((value, index), element) in out.iter_mut().zip(indexes).zip(start..) {
                    let scale = scales
                        .as_ref()
                        .map_or(Some(1.0), |s| s.get(element / BLOCKWISE_ELEMENTS).copied());
                    *value = self.round(codebook[usize::from(*index)] * scale.unwrap_or(0.0));
                }
            }
        }
    }

    /// Python decodes compressed tensors to the dtype they had; so does this, before the value
    /// moves on to block dtype.
    fn round(&self, value: f32) -> f32 {
        match self.dtype {
            WireDtype::F16 => f16::from_f32(value).to_f32(),
            WireDtype::Bf16 => bf16::from_f32(value).to_f32(),
            _ => value,
        }
    }
}

/// A reply tensor of raw elements (compression `NONE`); bfloat16 goes in its 2-byte form.
///
/// # Errors
/// [`TensorError::BadBuffer`] unless `buffer` has exactly the bytes of `shape`, or a dimension
/// exceeds `u32`.
pub fn raw_tensor(shape: &[usize], dtype: WireDtype, buffer: Bytes) -> Result<Tensor, TensorError> {
    let bad = || TensorError::BadBuffer {
        shape: shape.to_vec(),
        dtype: dtype.name(),
        actual: buffer.len(),
    };
    let size = shape
        .iter()
        .map(|&n| u32::try_from(n))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| bad())?;
    let bytes = shape
        .iter()
        .try_fold(dtype.size_bytes(), |product, n| product.checked_mul(*n))
        .ok_or_else(bad)?;
    if bytes != buffer.len() {
        return Err(bad());
    }
    Ok(Tensor { buffer, size, dtype: dtype.name().to_owned(), ..Tensor::default() })
}

/// The tensor that stands for "absent": shape `[0]`.
#[must_use]
pub fn dummy_tensor(dtype: WireDtype) -> Tensor {
    Tensor { size: vec![0], dtype: dtype.name().to_owned(), ..Tensor::default() }
}

fn checked_shape(size: &[u32], limits: ShapeLimits) -> Result<(Vec<usize>, usize), TensorError> {
    let too_large = || TensorError::TooLarge {
        shape: size.iter().copied().take(8).collect(),
        max_rank: limits.max_rank,
        max_elements: limits.max_elements,
    };
    if size.len() > limits.max_rank {
        return Err(too_large());
    }
    let shape: Vec<usize> = size.iter().map(|&n| n as usize).collect();
    if shape.iter().any(|&n| n > limits.max_elements) {
        return Err(too_large());
    }
    if shape.contains(&0) {
        return Ok((shape, 0));
    }
    let count = shape.iter().try_fold(1usize, |product, n| product.checked_mul(*n));
    match count {
        Some(count) if count <= limits.max_elements => Ok((shape, count)),
        _ => Err(too_large()),
    }
}

/// Whether Python defines the compression for the dtype.
pub fn supports(dtype: WireDtype, compression: Compression) -> bool {
    match compression {
        Compression::None => true,
        Compression::Float16 | Compression::MeanStd16Bit => {
            dtype.is_float() && dtype != WireDtype::Bf16
        }
        Compression::Uniform8Bit | Compression::Quantile8Bit | Compression::Blockwise8Bit => {
            dtype.is_float()
        }
    }
}

#[cfg(test)]
mod tests;
