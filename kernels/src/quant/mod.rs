//! Formats of quantized matrices: how they lie in memory, how they are made from numbers, and what
//! they mean.
//!
//! A quantized matrix is stored as one range of bytes: codes first, then scales, each part beginning
//! at a multiple of [`PART_ALIGNMENT`], to which the end is padded too. The codes and scales are
//! those of bitsandbytes (0.41.1, which Petals pins), byte for byte; only their place side by side is
//! ours. CUDA devices have NF4 matrices of whole groups in an order of their own
//! (`kernels/cuda/nf4.cuh`).
//!
//! # Discrepancies
//! - Petals converts weights to float16 before it quantizes them. We quantize the numbers as they
//!   are: a bfloat16 weight beyond the range of float16 stays finite.
//! - Petals quantizes the router of a mixture of experts like every other matrix. Which matrices
//!   are quantized is decided by who prepares weights, not here.

pub mod int8;
pub mod nf4;
pub mod slice;

use shared::config::QuantType;
use shared::dtype::DType;

pub use slice::{held_bytes, slice_bytes};

/// Each part of a quantized matrix begins at a multiple of this.
pub const PART_ALIGNMENT: usize = 64;

/// Bytes of a matrix `[outputs, inputs]` as stored; `None` when that is no size.
pub fn stored_bytes(
    quant: QuantType,
    dtype: DType,
    outputs: usize,
    inputs: usize,
) -> Option<usize> {
    match quant {
        QuantType::None => outputs.checked_mul(inputs)?.checked_mul(dtype.size_bytes()),
        QuantType::Int8 => int8::stored_bytes(outputs, inputs),
        QuantType::Nf4 => nf4::stored_bytes(outputs, inputs),
    }
}

/// f32 number `index` of little-endian `bytes`, 0 past the end.
#[inline(always)]
pub(crate) fn f32_at(bytes: &[u8], index: usize) -> f32 {
    match bytes.get(index * 4..index * 4 + 4) {
        Some(b) => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        None => 0.0,
    }
}

/// Appends zeros up to the next part.
pub(crate) fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(PART_ALIGNMENT), 0);
}

#[cfg(test)]
mod tests;
