//! Pairs of bfloat16 as items of an outer product: what AVX-512 multiplies with `vdpbf16ps`.
//!
//! A lane of weights, and what is broadcast of the inputs, is a pair; a lane of sums is f32. Each lane has
//! the chain of products that it has in [`gemm::pairs`](crate::cpu::simd::gemm::pairs).

use std::arch::x86_64::*;

use super::{InputRows, MOST_LANES, transpose512};
use crate::cpu::simd::bf16::{dot_pairs, round32};
use crate::cpu::simd::vector::Lanes;

/// Sixteen pairs, or sixteen sums.
#[derive(Clone, Copy)]
pub(in crate::cpu::simd) struct Pairs512(__m512);

impl Lanes for Pairs512 {
    const LANES: usize = <__m512 as Lanes>::LANES;
    const ZERO: Self = Pairs512(<__m512 as Lanes>::ZERO);

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn splat(pair: f32) -> Self {
        Pairs512(_mm512_set1_ps(pair))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(p: *const u8) -> Self {
        // SAFETY: an unaligned load of bytes that the caller says exist.
        Pairs512(unsafe { _mm512_loadu_ps(p.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(self, p: *mut u8) {
        // SAFETY: an unaligned store to bytes that the caller says exist.
        unsafe { _mm512_storeu_ps(p.cast(), self.0) };
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn mul_add(self, b: Self, sum: Self) -> Self {
        let (a, b) = (_mm512_castps_si512(self.0), _mm512_castps_si512(b.0));
        Pairs512(dot_pairs(a, b, sum.0))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(self, other: Self) -> Self {
        Pairs512(_mm512_add_ps(self.0, other.0))
    }
}

/// Rows to columns of 16 vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn transpose_pairs(square: &mut [Pairs512; MOST_LANES]) {
    let mut vectors = square.map(|vector| vector.0);
    transpose512(&mut vectors);
    *square = vectors.map(Pairs512);
}

/// Rounds up to 64 inputs to pairs of bfloat16, zeros after them, in the order of the rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn rounded_pairs(of: &InputRows<'_>, x: &[f32], items: &mut [f32; 64]) {
    let mut halves = [round32(x), round32(x.get(32..).unwrap_or(&[]))];
    if let Some(order) = &of.order {
        let [first, second] = halves;
        for (half, order) in halves.iter_mut().zip(order.as_chunks::<32>().0) {
            // SAFETY: 32 bytes.
            let positions = unsafe { _mm256_loadu_si256(order.as_ptr().cast()) };
            *half = _mm512_permutex2var_epi16(first, _mm512_cvtepu8_epi16(positions), second);
        }
    }
    for (half, items) in halves.into_iter().zip(items.as_chunks_mut::<16>().0) {
        // SAFETY: sixteen pairs.
        unsafe { _mm512_storeu_si512(items.as_mut_ptr().cast(), half) };
    }
}
