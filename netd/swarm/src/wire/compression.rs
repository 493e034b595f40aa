//! Writing tensors in the compressions of hivemind, byte for byte as
//! `hivemind/compression/{floating,quantization}.py` do. Pure. [`super::tensor::WireTensor`] reads
//! them back.
//!
//! ```text
//!   NONE            raw elements
//!   FLOAT16         f16 x N
//!   MEANSTD_16BIT   f16 x N | f32 means x rows | f32 deviations x rows
//!   UNIFORM_8BIT    i64 256 | f32 codebook x 256 | u8 index x N
//!   QUANTILE_8BIT   as UNIFORM_8BIT, borders at quantiles
//!   BLOCKWISE_8BIT  i64 blocks | i64 256 | f32 scales x blocks | f32 code x 256 | u8 index x N
//! ```
//!
//! # Discrepancies
//! Petals' servers compress replies in place, and then `UNIFORM_8BIT` loses the mean of the tensor;
//! here it is kept. Sums are added in the order of PyTorch on one thread with vectors of 8 floats;
//! PyTorch on several threads or with other vectors differs in the last bits of means and
//! deviations.

mod blockwise_8bit;
mod buckets;
mod sums;

use super::messages::{Compression, Tensor};
use super::tensor::{ShapeLimits, TensorError, WireDtype, WireTensor, raw_tensor, supports};
use bytes::Bytes;
use half::f16;

/// A tensor for the wire: `bytes` are the raw elements of `dtype`, little-endian, row-major, of
/// `shape`.
///
/// # Errors
/// [`TensorError::BadBuffer`] unless `bytes` has exactly the elements of `shape`;
/// [`TensorError::BadCompression`] where Python refuses the dtype: numbers that are not floats, and
/// bfloat16 as `FLOAT16` or `MEANSTD_16BIT`; [`TensorError::BadShape`] where it refuses the shape:
/// an 8-bit compression of nothing, `MEANSTD_16BIT` of a scalar or of empty rows.
pub fn encode(
    shape: &[usize],
    dtype: WireDtype,
    bytes: Bytes,
    compression: Compression,
) -> Result<Tensor, TensorError> {
    let raw = raw_tensor(shape, dtype, bytes)?;
    if compression == Compression::None {
        return Ok(raw);
    }
    if !supports(dtype, compression) {
        return Err(TensorError::BadCompression {
            compression: compression.into(),
            dtype: dtype.name(),
        });
    }
    let limits = ShapeLimits { max_rank: shape.len(), max_elements: usize::MAX };
    let values = WireTensor::parse(&raw, limits)?.to_f32_vec()?;
    let buffer = match (compression, shape.last()) {
        (Compression::Float16, _) => float16(values.iter().copied()).collect(),
        (Compression::MeanStd16Bit, Some(&row)) if row > 0 => mean_std(&values, row),
        (Compression::Uniform8Bit, _) if !values.is_empty() => buckets::uniform(&values, dtype),
        (Compression::Quantile8Bit, _) if !values.is_empty() => buckets::quantile(&values),
        (Compression::Blockwise8Bit, _) if !values.is_empty() => blockwise_8bit::encode(&values),
        _ => {
            return Err(TensorError::BadShape {
                shape: shape.to_vec(),
                compression: compression.into(),
            });
        }
    };
    Ok(Tensor { buffer: Bytes::from(buffer), compression: compression.into(), ..raw })
}

/// f16 elements; what does not fit becomes the largest that does.
fn float16(values: impl Iterator<Item = f32>) -> impl Iterator<Item = u8> {
    let (least, most) = (f16::MIN.to_f32(), f16::MAX.to_f32());
    values.flat_map(move |value| f16::from_f32(value.clamp(least, most)).to_le_bytes())
}

/// Rows of `row` elements, each less its mean and divided by its deviation.
fn mean_std(values: &[f32], row: usize) -> Vec<u8> {
    let rows = values.len() / row;
    let mut buffer = Vec::with_capacity(2 * values.len() + 8 * rows);
    let (mut means, mut deviations) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
    let mut centred = vec![0.0; row];
    for line in values.chunks_exact(row) {
        let mean = sums::sum(line) / row as f32;
        centred.iter_mut().zip(line).for_each(|(c, v)| *c = v - mean);
        let deviation = sums::norm(&centred) / (row as f64).sqrt() as f32;
        // NaN stays NaN, as with PyTorch's clamp.
        let deviation = if deviation < f32::EPSILON { f32::EPSILON } else { deviation };
        buffer.extend(float16(centred.iter().map(|c| c / deviation)));
        means.push(mean);
        deviations.push(deviation);
    }
    buffer.extend(floats(&means));
    buffer.extend(floats(&deviations));
    buffer
}

/// Little-endian bytes of `values`.
fn floats(values: &[f32]) -> impl Iterator<Item = u8> {
    values.iter().flat_map(|value| value.to_le_bytes())
}

#[cfg(test)]
mod tests;
