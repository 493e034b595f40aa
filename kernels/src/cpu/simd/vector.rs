//! Vectors of f32 of one instruction set: what the f32 register tiles of [`super::gemm`] are
//! written in. AVX2 has 8 lanes; AVX-512 and the plain code for any target have 16.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use half::f16;

use super::lanes::{LANES, mul_add, tree_sum};

/// A vector of 32-bit lanes whose sums are f32. Loads and stores need no alignment.
///
/// # Safety
/// Every unsafe method asks that the machine has the vector's instruction set, and that the bytes
/// that a pointer names exist.
pub(super) trait Lanes: Copy + Send + Sync + 'static {
    /// Lanes of a vector.
    const LANES: usize;
    /// Zero in every lane.
    const ZERO: Self;

    /// The same 32 bits in every lane.
    unsafe fn splat(value: f32) -> Self;
    /// Loads the lanes.
    unsafe fn load(p: *const u8) -> Self;
    /// Stores the lanes.
    unsafe fn store(self, p: *mut u8);
    /// Adds the products of two vectors to a sum, rounded once where the instruction set has fused
    /// products.
    unsafe fn mul_add(self, b: Self, sum: Self) -> Self;
    /// Sums lane by lane.
    unsafe fn add(self, other: Self) -> Self;
}

/// A vector of f32 numbers, which loads other types too.
///
/// # Safety
/// As [`Lanes`].
pub(super) trait Vector: Lanes {
    /// Registers that a vector takes.
    const PARTS: usize = 1;

    /// Loads bfloat16 numbers, widened.
    unsafe fn load_bf16(p: *const u8) -> Self;
    /// Loads float16 numbers, widened.
    unsafe fn load_f16(p: *const u8) -> Self;
    /// Loads signed bytes as numbers.
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        allow(dead_code, reason = "for vectors with instructions of their own")
    )]
    unsafe fn load_i8(p: *const u8) -> Self;
    /// Sums the lanes of vectors `first`, `first + stride`, ... (`O` of them), each as a balanced
    /// tree: halves, quarters, eighths, pairs.
    unsafe fn totals<const O: usize>(sums: &[Self], first: usize, stride: usize) -> [f32; O];
}

/// Implements [`Lanes`] and [`Vector`] over one set of intrinsics; `$half` holds as many 16-bit numbers.
#[cfg(target_arch = "x86_64")]
macro_rules! vector {
    (
        $vector:ty, $lanes:literal, $features:literal, $splat:ident, $load:ident, $store:ident,
        $fmadd:ident, $add:ident, $totals:ident,
        halves $load_half:ident, $from_f16:ident, $from_u16:ident,
        bytes $load_bytes:ident, $from_i8:ident, integers $shift:ident, $as_floats:ident, $to_floats:ident
    ) => {
        impl Lanes for $vector {
            const LANES: usize = $lanes;
            const ZERO: Self =
                // SAFETY: as many f32 zeros.
                unsafe { std::mem::transmute::<[f32; $lanes], $vector>([0.0; $lanes]) };

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn splat(value: f32) -> Self {
                $splat(value)
            }

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load(p: *const u8) -> Self {
                // SAFETY: an unaligned load of bytes that the caller says exist.
                unsafe { $load(p.cast()) }
            }

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn store(self, p: *mut u8) {
                // SAFETY: an unaligned store to bytes that the caller says exist.
                unsafe { $store(p.cast(), self) };
            }

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn mul_add(self, b: Self, sum: Self) -> Self {
                $fmadd(self, b, sum)
            }

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn add(self, other: Self) -> Self {
                $add(self, other)
            }
        }

        impl Vector for $vector {
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load_bf16(p: *const u8) -> Self {
                // SAFETY: an unaligned load of bytes that the caller says exist.
                let words = unsafe { $load_half(p.cast()) };
                $as_floats($shift::<16>($from_u16(words)))
            }

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load_f16(p: *const u8) -> Self {
                // SAFETY: an unaligned load of bytes that the caller says exist.
                $from_f16(unsafe { $load_half(p.cast()) })
            }

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load_i8(p: *const u8) -> Self {
                // SAFETY: an unaligned load of bytes that the caller says exist.
                $to_floats($from_i8(unsafe { $load_bytes(p.cast()) }))
            }

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn totals<const O: usize>(
                sums: &[Self],
                first: usize,
                stride: usize,
            ) -> [f32; O] {
                $totals(sums, first, stride)
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
vector!(__m256, 8, "avx2,fma,f16c", _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps,
    _mm256_fmadd_ps, _mm256_add_ps, totals256,
    halves _mm_loadu_si128, _mm256_cvtph_ps, _mm256_cvtepu16_epi32,
    bytes _mm_loadl_epi64, _mm256_cvtepi8_epi32,
    integers _mm256_slli_epi32, _mm256_castsi256_ps, _mm256_cvtepi32_ps);
#[cfg(target_arch = "x86_64")]
vector!(__m512, 16, "avx512f,avx512dq", _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps,
    _mm512_fmadd_ps, _mm512_add_ps, totals512,
    halves _mm256_loadu_si256, _mm512_cvtph_ps, _mm512_cvtepu16_epi32,
    bytes _mm_loadu_si128, _mm512_cvtepi8_epi32,
    integers _mm512_slli_epi32, _mm512_castsi512_ps, _mm512_cvtepi32_ps);

/// Sums the lanes of vectors `first`, `first + stride`, ... (`O` of them): halves, quarters,
/// eighths, pairs.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn totals512<const O: usize>(sums: &[__m512], first: usize, stride: usize) -> [f32; O] {
    let mut out = [0.0; O];
    let at = |o: usize| sums[first + o * stride];
    if O.is_multiple_of(4) {
        for (group, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let of = |i: usize| at(4 * group + i);
            let four = totals4([of(0), of(1), of(2), of(3)]);
            // SAFETY: four f32.
            unsafe { _mm_storeu_ps(out.as_mut_ptr(), four) };
        }
    } else {
        for (o, out) in out.iter_mut().enumerate() {
            let none = _mm512_setzero_ps();
            *out = _mm_cvtss_f32(totals4([at(o), none, none, none]));
        }
    }
    out
}

/// Sums the lanes of four vectors, each in the order of [`totals512`].
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn totals4([a, b, c, d]: [__m512; 4]) -> __m128 {
    let halves = |a: __m512, b: __m512| {
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b))
    };
    let (ab, cd) = (halves(a, b), halves(c, d));
    // The quarters of each vector in a 128-bit lane of its own.
    let quarters =
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
    let two = _mm512_add_ps(quarters, _mm512_permute_ps::<0b01_00_11_10>(quarters));
    let one = _mm512_add_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two));
    let firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, one))
}

/// Sums the lanes of vectors `first`, `first + stride`, ... (`O` of them).
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx")]
fn totals256<const O: usize>(sums: &[__m256], first: usize, stride: usize) -> [f32; O] {
    let mut out = [0.0; O];
    for (o, out) in out.iter_mut().enumerate() {
        *out = sum256(sums[first + o * stride]);
    }
    out
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx")]
fn sum256(v: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

/// Sixteen lanes in plain code, for any target.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; LANES]);

/// Whether the target has fused products everywhere.
const FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

impl Plain {
    /// Reads sixteen numbers of `BYTES` bytes each.
    ///
    /// # Safety
    /// The bytes at `p` exist.
    #[inline(always)]
    unsafe fn read<const BYTES: usize>(p: *const u8, widen: impl Fn([u8; BYTES]) -> f32) -> Plain {
        // SAFETY: bytes that the caller says exist; an array of bytes needs no alignment.
        Plain(unsafe { p.cast::<[[u8; BYTES]; LANES]>().read() }.map(widen))
    }
}

impl Lanes for Plain {
    const LANES: usize = LANES;
    const ZERO: Self = Plain([0.0; LANES]);

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Plain([value; LANES])
    }

    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        // SAFETY: as the caller says.
        unsafe { Plain::read(p, f32::from_ne_bytes) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        // SAFETY: bytes that the caller says exist.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) };
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, sum: Self) -> Self {
        Plain(std::array::from_fn(|i| mul_add::<FMA>(self.0[i], b.0[i], sum.0[i])))
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Plain(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
}

impl Vector for Plain {
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: as the caller says.
        unsafe { Plain::read(p, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        // SAFETY: as the caller says.
        unsafe { Plain::read(p, |b| f16::from_le_bytes(b).to_f32()) }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        // SAFETY: as the caller says.
        unsafe { Plain::read(p, |[b]| f32::from(b as i8)) }
    }

    #[inline(always)]
    unsafe fn totals<const O: usize>(sums: &[Self], first: usize, stride: usize) -> [f32; O] {
        std::array::from_fn(|o| tree_sum(sums[first + o * stride].0))
    }
}
