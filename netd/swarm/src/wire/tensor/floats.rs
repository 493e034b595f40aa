//! Values on their way into a block: rounded to its type, and finite.

use super::*;

/// Hands over elements that are already in block dtype, piece by piece, each after its check.
pub(super) fn hand_over_finite<E: From<TensorError>>(
    source: &[u8],
    dtype: DType,
    mut write: impl FnMut(usize, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    for (number, piece) in source.chunks(PIECE_ELEMENTS * dtype.size_bytes()).enumerate() {
        let start = number * PIECE_ELEMENTS;
        if let Some(index) = first_bad_element(piece, dtype) {
            return Err(not_finite(start + index, dtype).into());
        }
        write(start * dtype.size_bytes(), piece)?;
    }
    Ok(())
}

pub(super) fn not_finite(index: usize, dtype: DType) -> TensorError {
    TensorError::NotFinite { index, dtype: dtype.name() }
}

/// Finds an element whose exponent is all ones. One branch-free pass decides; only a piece that
/// fails is searched.
pub(super) fn first_bad_element(bytes: &[u8], dtype: DType) -> Option<usize> {
    let bad32 = |b: &[u8; 4]| u32::from_le_bytes(*b) & 0x7f80_0000 == 0x7f80_0000;
    let bad16 = |b: &[u8; 2], exponent: u16| u16::from_le_bytes(*b) & exponent == exponent;
    let exponent16 = if dtype == DType::F16 { 0x7c00 } else { 0x7f80 };
    if dtype == DType::F32 {
        let elements = bytes.as_chunks().0;
        let any = elements.iter().fold(false, |any, b| any | bad32(b));
        any.then(|| elements.iter().position(bad32)).flatten()
    } else {
        let elements = bytes.as_chunks().0;
        let any = elements.iter().fold(false, |any, b| any | bad16(b, exponent16));
        any.then(|| elements.iter().position(|b| bad16(b, exponent16))).flatten()
    }
}

/// Writes `values` in `dtype`; false if rounding made one infinite.
pub(super) fn narrow(values: &[f32], dtype: DType, out: &mut [u8]) -> bool {
    match dtype {
        DType::F32 => {
            out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(b, v)| *b = v.to_le_bytes())
        }
        DType::Bf16 => {
            out.as_chunks_mut()
                .0
                .iter_mut()
                .zip(values)
                .for_each(|(b, v)| *b = bf16::from_f32(*v).to_le_bytes());
        }
        DType::F16 => {
            out.as_chunks_mut()
                .0
                .iter_mut()
                .zip(values)
                .for_each(|(b, v)| *b = f16::from_f32(*v).to_le_bytes());
        }
    }
    first_bad_element(out, dtype).is_none()
}

pub(super) fn first_not_finite(values: &[f32], dtype: DType) -> usize {
    let bad = |v: &f32| match dtype {
        DType::F32 => !v.is_finite(),
        DType::Bf16 => !bf16::from_f32(*v).is_finite(),
        DType::F16 => !f16::from_f32(*v).is_finite(),
    };
    values.iter().position(bad).unwrap_or(0)
}
