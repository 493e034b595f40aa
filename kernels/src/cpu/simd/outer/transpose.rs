//! Squares of vectors, rows to columns.

use std::arch::x86_64::*;

use super::MOST_LANES;

/// Rows to columns of 16 vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(in crate::cpu::simd) fn transpose512(v: &mut [__m512; MOST_LANES]) {
    let mut quads = [_mm512_setzero_ps(); MOST_LANES];
    for g in 0..4 {
        let [a, b, c, d] = [v[4 * g], v[4 * g + 1], v[4 * g + 2], v[4 * g + 3]];
        let (low, high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let (low2, high2) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let pairs = [(low, low2), (high, high2)];
        for (half, (a, b)) in pairs.into_iter().enumerate() {
            let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
            quads[4 * g + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            quads[4 * g + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    for c in 0..4 {
        let [a, b, d, e] = [quads[c], quads[4 + c], quads[8 + c], quads[12 + c]];
        let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
        let (even2, odd2) =
            (_mm512_shuffle_f32x4::<0x88>(d, e), _mm512_shuffle_f32x4::<0xdd>(d, e));
        v[c] = _mm512_shuffle_f32x4::<0x88>(even, even2);
        v[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd, odd2);
        v[8 + c] = _mm512_shuffle_f32x4::<0xdd>(even, even2);
        v[12 + c] = _mm512_shuffle_f32x4::<0xdd>(odd, odd2);
    }
}

/// Rows to columns of the first 8 vectors.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn transpose256(v: &mut [__m256; MOST_LANES]) {
    let mut quads = [_mm256_setzero_ps(); 8];
    for g in 0..2 {
        let [a, b, c, d] = [v[4 * g], v[4 * g + 1], v[4 * g + 2], v[4 * g + 3]];
        let (low, high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (low2, high2) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let pairs = [(low, low2), (high, high2)];
        for (half, (a, b)) in pairs.into_iter().enumerate() {
            let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
            quads[4 * g + 2 * half] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
            quads[4 * g + 2 * half + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        }
    }
    for c in 0..4 {
        v[c] = _mm256_permute2f128_ps::<0x20>(quads[c], quads[4 + c]);
        v[4 + c] = _mm256_permute2f128_ps::<0x31>(quads[c], quads[4 + c]);
    }
}
