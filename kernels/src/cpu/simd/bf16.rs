//! Vectors of bfloat16 in AVX-512: rounding, and products of pairs.

use std::arch::x86_64::*;

use crate::ops::convert::bf16_bits;

/// Adds to each f32 lane of `sum` the products of two neighbours of `a` and `b`.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn dot_pairs(a: __m512i, b: __m512i, sum: __m512) -> __m512 {
    // SAFETY: both are 512 bits in which every pattern is valid.
    let a = unsafe { std::mem::transmute::<__m512i, __m512bh>(a) };
    // SAFETY: as above.
    let b = unsafe { std::mem::transmute::<__m512i, __m512bh>(b) };
    _mm512_dpbf16_ps(sum, a, b)
}

/// Rounds up to 32 numbers to bfloat16, zeros after them: [`bf16_bits`] of each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn round32(x: &[f32]) -> __m512i {
    let lower = _mm512_cvtepi32_epi16(round16(x));
    let upper = _mm512_cvtepi32_epi16(round16(x.get(16..).unwrap_or(&[])));
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(lower), upper)
}

/// Rounds up to 16 numbers, in the lower halves of 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn round16(x: &[f32]) -> __m512i {
    let mask = if x.len() >= 16 { u16::MAX } else { (1 << x.len()) - 1 };
    // SAFETY: only the lanes of the mask are read, which are in the slice.
    let value = unsafe { _mm512_maskz_loadu_ps(mask, x.as_ptr()) };
    let bits = _mm512_castps_si512(value);
    let upper = _mm512_srli_epi32::<16>(bits);
    let even = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    let half = _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff));
    let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
    _mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40))
}

/// Rounds a row to bfloat16, each value times its scale if there are scales; zeros after it.
///
/// # Safety
/// The machine has AVX-512 F, BW, VL and BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn round_row(row: &[f32], scales: Option<&[f32]>, bytes: &mut [u8]) {
    let (own, rest) = bytes.split_at_mut(2 * row.len());
    let values = own.as_chunks_mut::<2>().0.iter_mut().zip(row);
    match scales {
        None => values.for_each(|(to, x)| *to = bf16_bits(*x).to_le_bytes()),
        Some(scales) => {
            values.zip(scales).for_each(|((to, x), scale)| *to = bf16_bits(x * scale).to_le_bytes())
        }
    }
    rest.fill(0);
}
