//! INT8 with one scale per row (LLM.int8() of bitsandbytes, without outlier columns: activations
//! stay as they are).
//!
//! ```text
//! codes   i8  [outputs, inputs]   round(127 w / absmax of the row)
//! absmax  f32 [outputs]           largest magnitude of the row ("SCB")
//! weight  = code * absmax / 127
//! ```
//!
//! # Discrepancies
//! bitsandbytes rounds activations to INT8 too, and treats columns with large ones apart, so that a
//! result depends on what else is in the batch. Here activations keep the block dtype, and a row's
//! result is its own.

use std::ops::Range;

use super::{PART_ALIGNMENT, f32_at, pad};

/// Bytes of a matrix as stored; `None` when that is no size.
pub fn stored_bytes(outputs: usize, inputs: usize) -> Option<usize> {
    let codes = outputs.checked_mul(inputs)?.checked_next_multiple_of(PART_ALIGNMENT)?;
    let scales = outputs.checked_mul(4)?.checked_next_multiple_of(PART_ALIGNMENT)?;
    codes.checked_add(scales)
}

/// The parts of a stored matrix.
#[derive(Clone, Copy, Debug)]
pub struct Int8Parts<'a> {
    /// `[outputs, inputs]`, signed.
    pub codes: &'a [u8],
    /// f32 `[outputs]`, little-endian.
    pub absmax: &'a [u8],
}

impl<'a> Int8Parts<'a> {
    /// The parts of `bytes`; `None` when their number is not that of the shape.
    pub fn new(outputs: usize, inputs: usize, bytes: &'a [u8]) -> Option<Int8Parts<'a>> {
        if stored_bytes(outputs, inputs)? != bytes.len() {
            return None;
        }
        let codes = outputs * inputs;
        Some(Int8Parts {
            codes: bytes.get(..codes)?,
            absmax: bytes.get(codes.next_multiple_of(PART_ALIGNMENT)..)?.get(..4 * outputs)?,
        })
    }

    /// Some rows where they lie; `None` when they are not all there.
    pub(crate) fn rows(&self, range: Range<usize>, inputs: usize) -> Option<Int8Parts<'a>> {
        Some(Int8Parts {
            codes: self.codes.get(range.start * inputs..range.end.checked_mul(inputs)?)?,
            absmax: self.absmax.get(range.start * 4..range.end.checked_mul(4)?)?,
        })
    }

    /// What a code of row `output` is multiplied with.
    #[inline(always)]
    pub fn scale(&self, output: usize) -> f32 {
        f32_at(self.absmax, output) * (1.0 / 127.0)
    }
}

/// Quantizes a matrix of rows of `inputs` numbers.
///
/// *Source*: bitsandbytes `int8_vectorwise_quant` (kernel `kInt8VectorQuant`): round half to even
/// of `w * (127 / absmax)`.
pub fn encode(weights: &[f32], inputs: usize) -> Vec<u8> {
    let rows = weights.chunks_exact(inputs.max(1));
    let mut bytes = Vec::with_capacity(weights.len() + 4 * rows.len() + PART_ALIGNMENT);
    let mut scales = Vec::with_capacity(4 * rows.len());
    for row in rows {
        let absmax = row.iter().fold(0.0f32, |m, w| m.max(w.abs()));
        let scale = if absmax > 0.0 { 127.0 / absmax } else { 0.0 };
        // At most 127 in magnitude but for rounding, which the conversion saturates.
        bytes.extend(
            row.iter().map(|w| (w * scale).round_ties_even().clamp(-127.0, 127.0) as i8 as u8),
        );
        scales.extend(absmax.to_le_bytes());
    }
    pad(&mut bytes);
    bytes.extend(scales);
    pad(&mut bytes);
    bytes
}

/// Decodes weights of row `output`: `out.len()` of them from weight `start` of the matrix on.
#[inline(always)]
pub(crate) fn decode(parts: &Int8Parts<'_>, output: usize, start: usize, out: &mut [f32]) {
    let scale = parts.scale(output);
    let codes = &parts.codes[start..start + out.len()];
    for (out, code) in out.iter_mut().zip(codes) {
        *out = f32::from(*code as i8) * scale;
    }
}
