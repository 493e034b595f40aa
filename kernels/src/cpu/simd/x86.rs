//! Tiles of the matrix product in AVX-512, and one in AVX2 for NF4 whose rows are no whole groups.
//!
//! One step of a tile loads a vector of each weight row and each input row and adds their products to `O * R`
//! accumulators: 24 of 32 registers at 4 × 6 with AVX-512. Loads need no alignment. The last, partial step goes through
//! zero-padded copies, so that nothing past the end of a mapped file is read.

use std::arch::x86_64::*;

use shared::dtype::DType;

use super::linear::Kernel;

/// f32 weights.
pub(super) struct Avx512F32;
/// bfloat16 weights widened to f32.
pub(super) struct Avx512Bf16;
/// float16 weights widened to f32.
pub(super) struct Avx512F16;
/// f32 weights.
pub(super) struct Avx2F32;

/// Bytes of one cache line, and the most that one step loads from a row.
const LINE: usize = 64;
/// How far ahead of a single row the weights are asked for.
const AHEAD: usize = 1024;

macro_rules! kernel {
    (
        $kernel:ty, $features:literal, weights $weight_bytes:literal, inputs $input:expr, step $step:literal,
        $zero:ident, $load_weight:ident, $load_input:ident, $multiply_add:ident, $sum:ident
    ) => {
        impl Kernel for $kernel {
            const INPUT: DType = $input;
            const WEIGHT_BYTES: usize = $weight_bytes;

            unsafe fn tile<const O: usize, const R: usize>(
                weight: &[u8],
                x: &[u8],
                inputs: usize,
            ) -> [[f32; O]; R] {
                #[target_feature(enable = $features)]
                unsafe fn tile<const O: usize, const R: usize>(
                    weight: &[u8],
                    x: &[u8],
                    inputs: usize,
                ) -> [[f32; O]; R] {
                    const X: usize = $input.size_bytes();
                    const W: usize = $weight_bytes;
                    debug_assert!(weight.len() == O * inputs * W && x.len() == R * inputs * X);
                    let mut sums = [[$zero(); R]; O];
                    let whole = inputs / $step * $step;
                    let mut at = 0;
                    while at < whole {
                        // Not through closures: they would not be inlined into functions without the instruction set.
                        // SAFETY: `at + step <= inputs`, inside the first of the R rows of `x`.
                        let mut xs = [unsafe { $load_input(x.as_ptr().wrapping_add(at * X)) }; R];
                        for r in 1..R {
                            // SAFETY: as above, inside row r.
                            xs[r] = unsafe {
                                $load_input(x.as_ptr().wrapping_add((r * inputs + at) * X))
                            };
                        }
                        for o in 0..O {
                            let p = weight.as_ptr().wrapping_add((o * inputs + at) * W);
                            if R == 1 {
                                _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(AHEAD).cast());
                            }
                            // SAFETY: `at + step <= inputs`, inside row o of the O rows of `weight`.
                            let w = unsafe { $load_weight(p) };
                            for r in 0..R {
                                sums[o][r] = $multiply_add(w, xs[r], sums[o][r]);
                            }
                        }
                        at += $step;
                    }
                    if at < inputs {
                        let left = inputs - at;
                        let padded = pad(&x[at * X..][..left * X]);
                        // SAFETY: one step is at most LINE bytes.
                        let mut xs = [unsafe { $load_input(padded.as_ptr()) }; R];
                        for r in 1..R {
                            let padded = pad(&x[(r * inputs + at) * X..][..left * X]);
                            // SAFETY: as above.
                            xs[r] = unsafe { $load_input(padded.as_ptr()) };
                        }
                        for o in 0..O {
                            let padded = pad(&weight[(o * inputs + at) * W..][..left * W]);
                            // SAFETY: as above.
                            let w = unsafe { $load_weight(padded.as_ptr()) };
                            for r in 0..R {
                                sums[o][r] = $multiply_add(w, xs[r], sums[o][r]);
                            }
                        }
                    }
                    let mut out = [[0.0; O]; R];
                    for o in 0..O {
                        for r in 0..R {
                            out[r][o] = $sum(sums[o][r]);
                        }
                    }
                    out
                }
                // SAFETY: the caller has detected the instruction set and passes whole rows.
                unsafe { tile::<O, R>(weight, x, inputs) }
            }
        }
    };
}

kernel!(Avx512F32, "avx512f", weights 4, inputs DType::F32, step 16,
    _mm512_setzero_ps, load512f, load512f, _mm512_fmadd_ps, sum512);
kernel!(Avx512Bf16, "avx512f", weights 2, inputs DType::F32, step 16,
    _mm512_setzero_ps, load512_bf16, load512f, _mm512_fmadd_ps, sum512);
kernel!(Avx512F16, "avx512f", weights 2, inputs DType::F32, step 16,
    _mm512_setzero_ps, load512_f16, load512f, _mm512_fmadd_ps, sum512);
kernel!(Avx2F32, "avx2,fma", weights 4, inputs DType::F32, step 8,
    _mm256_setzero_ps, load256f, load256f, _mm256_fmadd_ps, sum256);

/// The last elements of a row, followed by zeros.
#[inline(always)]
fn pad(bytes: &[u8]) -> [u8; LINE] {
    let mut padded = [0; LINE];
    padded[..bytes.len()].copy_from_slice(bytes);
    padded
}

macro_rules! load {
    ($(#[doc = $doc:literal] $name:ident, $features:literal, $bytes:literal -> $vector:ty, |$p:ident| $load:expr, $widen:expr;)*) => {$(
        #[doc = $doc]
        ///
        /// # Safety
        #[doc = concat!($bytes, " bytes at the pointer are readable.")]
        #[inline]
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $name($p: *const u8) -> $vector {
            // SAFETY: an unaligned load of bytes that the caller says are readable.
            let loaded = unsafe { $load };
            $widen(loaded)
        }
    )*};
}
load! {
    /// 16 f32.
    load512f, "avx512f", "64" -> __m512, |p| _mm512_loadu_ps(p.cast()), std::convert::identity;
    /// 16 bfloat16 as f32.
    load512_bf16, "avx512f", "32" -> __m512, |p| _mm256_loadu_si256(p.cast()), widen512;
    /// 16 float16 as f32.
    load512_f16, "avx512f", "32" -> __m512, |p| _mm256_loadu_si256(p.cast()), _mm512_cvtph_ps;
    /// 8 f32.
    load256f, "avx2", "32" -> __m256, |p| _mm256_loadu_ps(p.cast()), std::convert::identity;
    /// 8 bfloat16 as f32.
    load256_bf16, "avx2", "16" -> __m256, |p| _mm_loadu_si128(p.cast()), widen256;
    /// 8 float16 as f32.
    load256_f16, "avx2,f16c", "16" -> __m256, |p| _mm_loadu_si128(p.cast()), _mm256_cvtph_ps;
}

#[inline]
#[target_feature(enable = "avx512f")]
fn widen512(v: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(v)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn widen256(v: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(v)))
}

/// Sum of sixteen lanes: halves, quarters, eighths, pairs.
#[inline]
#[target_feature(enable = "avx512f")]
fn sum512(v: __m512) -> f32 {
    let high = _mm512_castpd_ps(_mm512_castpd256_pd512(_mm512_extractf64x4_pd::<1>(
        _mm512_castps_pd(v),
    )));
    sum256(_mm256_add_ps(
        _mm512_castps512_ps256(v),
        _mm512_castps512_ps256(high),
    ))
}

#[inline]
#[target_feature(enable = "avx")]
pub(super) fn sum256(v: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}
