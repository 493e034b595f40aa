//! NF4 matrices as f32 products in AVX2 read them, decoded a group of 64 weights at a time.
//!
//! Floor: a GEMV reads 4.1 bits per weight, but decoding is the bound: per weight about one byte of
//! table look-ups and one store of four bytes, to lines that stay in the first-level cache.

use std::arch::x86_64::*;
use std::ops::Range;

use shared::dtype::DType;

use super::arithmetic::{IN_ORDER, Source};
use super::float::Float;
use crate::cpu::simd::line::{Line, floats};
use crate::ops::convert;
use crate::quant::nf4;

/// Weights of one vector.
const STEP: usize = 8;

/// NF4 whose rows are whole groups of 64: always decoded first, a group by a table of its sixteen
/// weights in two registers.
#[derive(Clone, Copy)]
pub(in crate::cpu::simd) struct Nf4<'a> {
    pub(in crate::cpu::simd) parts: nf4::Parts<'a>,
    pub(in crate::cpu::simd) inputs: usize,
    /// To which weights are rounded.
    pub(in crate::cpu::simd) dtype: DType,
}

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
        to: &mut [Line],
    ) {
        // SAFETY: as the caller says.
        unsafe { Source::<Float<__m256>>::decode(self, output, range, to) };
    }
}

impl Source<Float<__m256>> for Nf4<'_> {
    const ORDER: [u8; 64] = IN_ORDER;
    const SHARED_FROM: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(self, _output: usize, _at: usize) -> [__m256; 1] {
        [_mm256_setzero_ps()]
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_tail(self, _output: usize, _at: usize, _left: usize) -> [__m256; 1] {
        [_mm256_setzero_ps()]
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn decode(self, output: usize, range: Range<usize>, to: &mut [Line]) {
        let to = floats(to);
        // Places of the eight codes of four bytes; the upper half of a byte comes first.
        let shifts = _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24);
        for (start, to) in range.step_by(nf4::GROUP).zip(to.chunks_exact_mut(nf4::GROUP)) {
            let first = output * self.inputs + start;
            // SAFETY: the group of 64 exists, as its weights do.
            let scale = unsafe { self.parts.scale_unchecked(output, start / nf4::GROUP) };
            let mut table = nf4::LEVELS;
            convert::with_rounding!(self.dtype, round => for level in table.iter_mut() {
                *level = round(*level * scale);
            });
            // SAFETY: the first eight of sixteen f32.
            let lower = unsafe { _mm256_loadu_ps(table.as_ptr()) };
            // SAFETY: the last eight.
            let upper = unsafe { _mm256_loadu_ps(table.as_ptr().wrapping_add(8)) };
            let codes = self.parts.codes.as_ptr().wrapping_add(first / 2);
            for (four, to) in to.chunks_exact_mut(STEP).enumerate() {
                // SAFETY: the group has 32 bytes of codes.
                let bytes = unsafe { codes.wrapping_add(4 * four).cast::<i32>().read_unaligned() };
                let codes = _mm256_srlv_epi32(_mm256_set1_epi32(bytes), shifts);
                let low = _mm256_permutevar8x32_ps(lower, codes);
                let high = _mm256_permutevar8x32_ps(upper, codes);
                // The fourth bit of a code is where the choice looks: the sign.
                let is_high = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
                let weights = _mm256_blendv_ps(low, high, is_high);
                // SAFETY: 8 elements.
                unsafe { _mm256_storeu_ps(to.as_mut_ptr(), weights) };
            }
        }
    }

    fn row(self, output: usize) -> *const u8 {
        let start = output * self.inputs / 2;
        self.parts.codes.as_ptr().wrapping_add(start)
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}

/// [`Nf4`] of bfloat16: two tables of bytes, of which 32 codes are looked up at a time. What
/// unpacks them leaves the order to the inputs.
#[derive(Clone, Copy)]
pub(super) struct Nf4Bf16<'a> {
    pub(super) parts: nf4::Parts<'a>,
    pub(super) inputs: usize,
}

impl Source<Float<__m256>> for Nf4Bf16<'_> {
    // Even weights, then odd ones; of each 32 bytes of codes two times four, 16 apart.
    const ORDER: [u8; 64] = {
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
    const SHARED_FROM: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(self, _output: usize, _at: usize) -> [__m256; 1] {
        [_mm256_setzero_ps()]
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_tail(self, _output: usize, _at: usize, _left: usize) -> [__m256; 1] {
        [_mm256_setzero_ps()]
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn decode(self, output: usize, range: Range<usize>, to: &mut [Line]) {
        let to = floats(to);
        for (start, to) in range.step_by(nf4::GROUP).zip(to.chunks_exact_mut(nf4::GROUP)) {
            let first = output * self.inputs + start;
            // SAFETY: the group of 64 exists, as its weights do.
            let scale = unsafe { self.parts.scale_unchecked(output, start / nf4::GROUP) };
            let [low, high] = byte_tables(scale);
            let codes = self.parts.codes.as_ptr().wrapping_add(first / 2);
            // SAFETY: the group has 32 bytes of codes.
            let codes = unsafe { _mm256_loadu_si256(codes.cast()) };
            let nibble = _mm256_set1_epi8(15);
            let even = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble);
            let odd = _mm256_and_si256(codes, nibble);
            for (codes, to) in [even, odd].into_iter().zip(to.chunks_exact_mut(4 * STEP)) {
                let (a, b) = (_mm256_shuffle_epi8(low, codes), _mm256_shuffle_epi8(high, codes));
                let words = [_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)];
                for (words, to) in words.into_iter().zip(to.chunks_exact_mut(2 * STEP)) {
                    let zero = _mm256_setzero_si256();
                    let first = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, words));
                    let second = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, words));
                    // SAFETY: the first 8 of 16 elements.
                    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), first) };
                    // SAFETY: the last 8.
                    unsafe { _mm256_storeu_ps(to.as_mut_ptr().wrapping_add(STEP), second) };
                }
            }
        }
    }

    fn row(self, output: usize) -> *const u8 {
        let start = output * self.inputs / 2;
        self.parts.codes.as_ptr().wrapping_add(start)
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
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
