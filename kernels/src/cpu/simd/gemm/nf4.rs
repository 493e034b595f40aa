//! NF4 matrices as f32 products read them, a group of 64 weights at a time: for several rows decoded into lines
//! that stay in the first-level cache, for one multiplied from registers.
//!
//! Floor: a GEMV reads 4.1 bits per weight, but decoding is the bound.

use std::arch::x86_64::*;
use std::ops::Range;

use shared::dtype::DType;

use super::arithmetic::{IN_ORDER, MatrixSource};
use super::float::{Float, Groups, WideGroups};
use crate::cpu::simd::line::{CacheLine, floats};
use crate::cpu::simd::vector::Lanes;
use crate::ops::convert;
use crate::quant::nf4;

/// NF4 whose rows are whole groups of 64: a group is decoded by a table of its sixteen weights in two
/// registers.
#[derive(Clone, Copy)]
pub(in crate::cpu::simd) struct Nf4<'a> {
    pub(in crate::cpu::simd) parts: nf4::Nf4Parts<'a>,
    pub(in crate::cpu::simd) inputs: usize,
    /// To which weights are rounded.
    pub(in crate::cpu::simd) dtype: DType,
}

/// [`Nf4`] of bfloat16: tables of bytes or words, of which many codes are looked up at a time. What
/// unpacks them leaves the order to the inputs.
#[derive(Clone, Copy)]
pub(super) struct Nf4Bf16<'a> {
    pub(super) parts: nf4::Nf4Parts<'a>,
    pub(super) inputs: usize,
}

/// [`Nf4`] in AVX-512: a table of its sixteen weights in one register.
#[derive(Clone, Copy)]
pub(super) struct WideNf4<'a> {
    pub(super) parts: nf4::Nf4Parts<'a>,
    pub(super) inputs: usize,
    /// To which weights are rounded.
    pub(super) dtype: DType,
}

/// Implements [`Source`] for single rows by groups, and for several rows by vectors that are always decoded first, by
/// groups too: `$decode` gives the vectors of one.
macro_rules! by_groups {
    ($source:ident, $groups:ty, [$vector:ty; $count:literal], order $order:expr, $features:literal, $decode:ident) => {
        impl MatrixSource<$groups> for $source<'_> {
            const ORDER: [u8; 64] = $order;
            const SHARED_FROM: usize = usize::MAX;

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load(self, output: usize, at: usize) -> [$vector; $count] {
                // SAFETY: as the caller says.
                unsafe { self.$decode(output, at) }
            }

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load_tail(
                self,
                _output: usize,
                _at: usize,
                _left: usize,
            ) -> [$vector; $count] {
                // Rows are whole groups: the dispatch takes no others.
                [<$vector>::ZERO; $count]
            }

            fn row(self, output: usize) -> *const u8 {
                self.parts.codes.as_ptr().wrapping_add(output * self.inputs / 2)
            }

            fn scale(self, _output: usize) -> f32 {
                1.0
            }
        }

        impl MatrixSource<Float<$vector>> for $source<'_> {
            const ORDER: [u8; 64] = $order;
            const SHARED_FROM: usize = 1;

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load(self, _output: usize, _at: usize) -> [$vector; 1] {
                [<$vector>::ZERO]
            }

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load_tail(self, _output: usize, _at: usize, _left: usize) -> [$vector; 1] {
                [<$vector>::ZERO]
            }

            #[target_feature(enable = $features)]
            unsafe fn decode(self, output: usize, range: Range<usize>, to: &mut [CacheLine]) {
                let groups = floats(to).chunks_exact_mut(nf4::GROUP);
                for (start, to) in range.step_by(nf4::GROUP).zip(groups) {
                    // SAFETY: the group exists, as its weights do.
                    let weights = unsafe { self.$decode(output, start) };
                    let to = to.chunks_exact_mut(<$vector>::LANES);
                    for (weights, to) in weights.into_iter().zip(to) {
                        // SAFETY: a vector of numbers.
                        unsafe { weights.store(to.as_mut_ptr().cast()) };
                    }
                }
            }

            fn row(self, output: usize) -> *const u8 {
                MatrixSource::<$groups>::row(self, output)
            }

            fn scale(self, _output: usize) -> f32 {
                1.0
            }
        }
    };
}

by_groups!(Nf4, Groups, [__m256; 8], order IN_ORDER, "avx2,fma,f16c", group);
by_groups!(Nf4Bf16, Groups, [__m256; 8], order BYTES_ORDER, "avx2,fma,f16c", group);
by_groups!(WideNf4, WideGroups, [__m512; 4], order NIBBLES_ORDER,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", group);

impl Nf4<'_> {
    /// Decodes weights `range` of row `output`, whole groups, in their order.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C; the weights exist.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in crate::cpu::simd) unsafe fn widen(
        self,
        output: usize,
        range: Range<usize>,
        to: &mut [CacheLine],
    ) {
        // SAFETY: as the caller says.
        unsafe { MatrixSource::<Float<__m256>>::decode(self, output, range, to) };
    }

    /// The group of row `output` that begins at input `at`.
    ///
    /// # Safety
    /// As [`Nf4::widen`].
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn group(self, output: usize, at: usize) -> [__m256; 8] {
        // Places of the eight codes of four bytes; the upper half of a byte comes first.
        let shifts = _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24);
        // SAFETY: the group of 64 exists, as its weights do.
        let scale = unsafe { self.parts.scale_unchecked(output, at / nf4::GROUP) };
        let mut table = nf4::LEVELS;
        convert::with_rounding!(self.dtype, round => for level in table.iter_mut() {
            *level = round(*level * scale);
        });
        // SAFETY: the first eight of sixteen f32.
        let lower = unsafe { _mm256_loadu_ps(table.as_ptr()) };
        // SAFETY: the last eight.
        let upper = unsafe { _mm256_loadu_ps(table.as_ptr().wrapping_add(8)) };
        let codes = self.parts.codes.as_ptr().wrapping_add((output * self.inputs + at) / 2);
        let mut weights = [_mm256_setzero_ps(); 8];
        for (four, weights) in weights.iter_mut().enumerate() {
            // SAFETY: the group has 32 bytes of codes.
            let bytes = unsafe { codes.wrapping_add(4 * four).cast::<i32>().read_unaligned() };
            let codes = _mm256_srlv_epi32(_mm256_set1_epi32(bytes), shifts);
            let low = _mm256_permutevar8x32_ps(lower, codes);
            let high = _mm256_permutevar8x32_ps(upper, codes);
            // The fourth bit of a code is where the choice looks: the sign.
            let is_high = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
            *weights = _mm256_blendv_ps(low, high, is_high);
        }
        weights
    }
}

/// Even weights, then odd ones; of each 32 bytes of codes two times four, 16 apart.
const BYTES_ORDER: [u8; 64] = {
    let mut order = [0; 64];
    let mut position = 0;
    while position < 64 {
        let (odd, vector, lane) = (position / 32, position / 8 % 4, position % 8);
        let byte = 4 * vector + lane % 4 + 16 * (lane / 4);
        order[position] = (2 * byte + odd) as u8;
        position += 1;
    }
    order
};

impl Nf4Bf16<'_> {
    /// As [`Nf4::group`], in [`BYTES_ORDER`].
    ///
    /// # Safety
    /// As there.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn group(self, output: usize, at: usize) -> [__m256; 8] {
        // SAFETY: the group of 64 exists, as its weights do.
        let scale = unsafe { self.parts.scale_unchecked(output, at / nf4::GROUP) };
        let [low, high] = byte_tables(scale);
        let codes = self.parts.codes.as_ptr().wrapping_add((output * self.inputs + at) / 2);
        // SAFETY: the group has 32 bytes of codes.
        let codes = unsafe { _mm256_loadu_si256(codes.cast()) };
        let nibble = _mm256_set1_epi8(15);
        let even = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble);
        let odd = _mm256_and_si256(codes, nibble);
        let mut weights = [_mm256_setzero_ps(); 8];
        for (codes, weights) in [even, odd].into_iter().zip(weights.as_chunks_mut::<4>().0) {
            let (a, b) = (_mm256_shuffle_epi8(low, codes), _mm256_shuffle_epi8(high, codes));
            let zero = _mm256_setzero_si256();
            let (first, second) = (_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b));
            *weights = [
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, first)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, first)),
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, second)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, second)),
            ];
        }
        weights
    }
}

/// Of each 16 bytes of codes the first weights, then the second ones.
const NIBBLES_ORDER: [u8; 64] = {
    let mut order = [0; 64];
    let mut position = 0;
    while position < 64 {
        let (half, second, byte) = (position / 32, position / 16 % 2, position % 16);
        order[position] = (32 * half + 2 * byte + second) as u8;
        position += 1;
    }
    order
};

impl WideNf4<'_> {
    /// As [`Nf4::group`], in [`NIBBLES_ORDER`].
    ///
    /// # Safety
    /// The machine has AVX-512 F, BW and VL; the weights exist.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn group(self, output: usize, at: usize) -> [__m512; 4] {
        // SAFETY: the group of 64 exists, as its weights do.
        let scale = unsafe { self.parts.scale_unchecked(output, at / nf4::GROUP) };
        // SAFETY: sixteen f32.
        let levels = unsafe { _mm512_loadu_ps(nf4::LEVELS.as_ptr()) };
        let exact = _mm512_mul_ps(levels, _mm512_set1_ps(scale));
        let table = match self.dtype {
            DType::Bf16 => rounded16(exact),
            DType::F16 => _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(exact)),
            DType::F32 => exact,
        };
        let codes = self.parts.codes.as_ptr().wrapping_add((output * self.inputs + at) / 2);
        let mut weights = [_mm512_setzero_ps(); 4];
        for (half, weights) in weights.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            // SAFETY: the group has 32 bytes of codes.
            let bytes = unsafe { _mm_loadu_si128(codes.wrapping_add(16 * half).cast()) };
            let bytes = _mm512_cvtepu8_epi32(bytes);
            // A look-up takes the lower four bits; the upper half of a byte comes first.
            *weights = [_mm512_srli_epi32::<4>(bytes), bytes]
                .map(|codes| _mm512_permutexvar_ps(codes, table));
        }
        weights
    }
}

/// Sixteen numbers rounded to bfloat16: [`bf16_bits`](convert::bf16_bits) of each, widened.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded16(values: __m512) -> __m512 {
    let bits = _mm512_castps_si512(values);
    let upper = _mm512_srli_epi32::<16>(bits);
    let even = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    let half = _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff));
    let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
    let quiet = _mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40));
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(quiet))
}

/// Lower and upper bytes of the sixteen weights of a group as bfloat16, twice each.
#[inline]
#[target_feature(enable = "avx2")]
fn byte_tables(scale: f32) -> [__m256i; 2] {
    // SAFETY: the first eight of sixteen f32.
    let lower = rounded8(unsafe { _mm256_loadu_ps(nf4::LEVELS.as_ptr()) }, scale);
    // SAFETY: the last eight.
    let upper = rounded8(unsafe { _mm256_loadu_ps(nf4::LEVELS.as_ptr().wrapping_add(8)) }, scale);
    // Packing works on halves of a vector: quarters are put in order behind it.
    let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(lower, upper));
    let (low, high) =
        (_mm256_and_si256(words, _mm256_set1_epi16(255)), _mm256_srli_epi16::<8>(words));
    let bytes = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi16(low, high));
    [
        _mm256_permute2x128_si256::<0x00>(bytes, bytes),
        _mm256_permute2x128_si256::<0x11>(bytes, bytes),
    ]
}

/// Products rounded to bfloat16, in the lower halves of 32 bits: [`bf16_bits`](convert::bf16_bits)
/// of each.
#[inline]
#[target_feature(enable = "avx2")]
fn rounded8(levels: __m256, scale: f32) -> __m256i {
    let value = _mm256_mul_ps(levels, _mm256_set1_ps(scale));
    let bits = _mm256_castps_si256(value);
    let upper = _mm256_srli_epi32::<16>(bits);
    let even = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    let half = _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff));
    let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
    let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
    _mm256_blendv_epi8(rounded, quiet, is_nan)
}
