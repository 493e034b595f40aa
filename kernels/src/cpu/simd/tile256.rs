//! Register tiles of f32 products in AVX2: the arithmetic of [`super::wide`].
//!
//! A step is 8 inputs. A source gives the 8 weights of a row as f32; 12 sums, three inputs and a weight are the 16 registers. Weights
//! that take work to widen are widened once for all tiles of a strip, into a buffer that stays in the first-level cache.

use std::arch::x86_64::*;
use std::ops::Range;

use shared::dtype::DType;

use super::x86::{load256_bf16, load256_f16, load256f, sum256};
use crate::ops::convert;
use crate::quant::{int8, nf4};

/// Inputs of one step.
pub(super) const STEP: usize = 8;
/// Most sums of a tile.
pub(super) const SUMS: usize = 12;
/// Bytes of a cache line.
const LINE: usize = 64;

/// The sums of one tile: vector `o * R + r`.
pub(super) type Sums = [__m256; SUMS];

/// No products yet.
pub(super) fn no_sums() -> Sums {
    // SAFETY: eight f32 zeros.
    let zero = unsafe { std::mem::transmute::<[f32; 8], __m256>([0.0; 8]) };
    [zero; SUMS]
}

/// A matrix as a tile reads it.
pub(super) trait Source: Copy + Sync {
    /// Input of the 64 that lies at each place of eight vectors.
    const ORDER: [u8; 64];
    /// From how many tiles of a strip on its weights are widened first; before, each tile widens for itself.
    const SHARED_FROM: usize;

    /// Weights `at..at + 8` of row `output`.
    ///
    /// # Safety
    /// The row has them; the machine has AVX2, FMA and F16C.
    unsafe fn load(self, output: usize, at: usize) -> __m256;

    /// The `left` last weights of row `output`, fewer than 8, and zeros.
    ///
    /// # Safety
    /// As [`load`](Self::load).
    unsafe fn load_tail(self, output: usize, at: usize, left: usize) -> __m256;

    /// Weights `range` of row `output`, from a multiple of 64 on, into `to`, which ends with a whole step.
    ///
    /// # Safety
    /// As [`load`](Self::load).
    unsafe fn widen(self, output: usize, range: Range<usize>, to: &mut [f32]);

    /// Where the weights of row `output` begin; only for prefetching.
    fn row(self, output: usize) -> *const u8;

    /// What the sum of row `output` is multiplied with.
    fn scale(self, output: usize) -> f32;
}

/// The order in which inputs lie.
const IN_ORDER: [u8; 64] = {
    let mut order = [0; 64];
    let mut i = 0;
    while i < 64 {
        order[i] = i as u8;
        i += 1;
    }
    order
};

/// What to ask the memory for while a tile computes.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// First byte of it, at input 0.
    pub(super) start: *const u8,
    /// Bytes for each step.
    pub(super) step_bytes: usize,
}

/// Rows of inputs, each of `stride` elements, a multiple of 8, with zeros after the inputs.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub(super) values: &'a [f32],
    pub(super) stride: usize,
}

/// Adds the products of `O` rows of the matrix from `output` on, and the `R` rows of `panel`, over the inputs `range`, which begins at a step: to
/// nothing from input 0 on, else to the sums of the inputs before.
///
/// # Safety
/// The machine has AVX2, FMA and F16C; `source` has these rows and inputs; `panel` holds `R` rows of them.
#[allow(
    clippy::needless_range_loop,
    reason = "indexes that are constants keep the sums in registers"
)]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn tile<S: Source, const O: usize, const R: usize>(
    source: S,
    output: usize,
    panel: Panel<'_>,
    range: Range<usize>,
    ahead: Ahead,
    all: &mut Sums,
) {
    debug_assert!(panel.values.len() == R * panel.stride && O * R <= SUMS);
    debug_assert!(range.end <= panel.stride && range.start.is_multiple_of(STEP));
    let mut sums = [[_mm256_setzero_ps(); R]; O];
    if range.start > 0 {
        for o in 0..O {
            for r in 0..R {
                sums[o][r] = all[o * R + r];
            }
        }
    }
    let whole = range.start + (range.end - range.start) / STEP * STEP;
    let x = panel.values.as_ptr();
    let mut asked = ahead
        .start
        .wrapping_add(range.start / STEP * ahead.step_bytes);
    let mut until = asked;
    let mut at = range.start;
    while at < whole {
        until = until.wrapping_add(ahead.step_bytes);
        while asked < until {
            _mm_prefetch::<_MM_HINT_T1>(asked.cast());
            asked = asked.wrapping_add(LINE);
        }
        let mut xs = [_mm256_setzero_ps(); R];
        for r in 0..R {
            // SAFETY: inside row `r` of the panel.
            xs[r] = unsafe { load256f(x.wrapping_add(r * panel.stride + at).cast()) };
        }
        for o in 0..O {
            // SAFETY: the caller gives rows and inputs that exist.
            let weight = unsafe { source.load(output + o, at) };
            for r in 0..R {
                sums[o][r] = _mm256_fmadd_ps(weight, xs[r], sums[o][r]);
            }
        }
        at += STEP;
    }
    if at < range.end {
        for o in 0..O {
            // SAFETY: as above; fewer than a step are left.
            let weight = unsafe { source.load_tail(output + o, at, range.end - at) };
            for r in 0..R {
                // SAFETY: rows of the panel are whole steps.
                let x = unsafe { load256f(x.wrapping_add(r * panel.stride + at).cast()) };
                sums[o][r] = _mm256_fmadd_ps(weight, x, sums[o][r]);
            }
        }
    }
    for o in 0..O {
        for r in 0..R {
            all[o * R + r] = sums[o][r];
        }
    }
}

/// The sum of the lanes of one of the sums.
///
/// # Safety
/// The machine has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn total(sums: &Sums, index: usize) -> f32 {
    sum256(sums[index])
}

/// Numbers as stored, or codes that are numbers: `$bytes` each, widened by `$load`.
macro_rules! plain {
    ($(#[doc = $doc:literal])* $source:ident, $bytes:literal, shared from $shared:expr, $load:ident) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $source<'a> {
            /// `[outputs, inputs]`.
            pub(super) bytes: &'a [u8],
            pub(super) inputs: usize,
        }

        impl Source for $source<'_> {
            const ORDER: [u8; 64] = IN_ORDER;
            const SHARED_FROM: usize = $shared;

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn load(self, output: usize, at: usize) -> __m256 {
                // SAFETY: 8 weights of the row, as the caller promises.
                unsafe { $load(self.row(output).wrapping_add(at * $bytes)) }
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn load_tail(self, output: usize, at: usize, left: usize) -> __m256 {
                let start = (output * self.inputs + at) * $bytes;
                let mut padded = [0u8; STEP * $bytes];
                padded[..left * $bytes].copy_from_slice(&self.bytes[start..][..left * $bytes]);
                // SAFETY: 8 weights.
                unsafe { $load(padded.as_ptr()) }
            }

            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn widen(self, output: usize, range: Range<usize>, to: &mut [f32]) {
                for (at, to) in range.clone().step_by(STEP).zip(to.chunks_exact_mut(STEP)) {
                    let weights = match range.end - at {
                        // SAFETY: 8 weights of the row, as the caller promises.
                        STEP.. => unsafe { self.load(output, at) },
                        // SAFETY: the last ones of the row.
                        left => unsafe { self.load_tail(output, at, left) },
                    };
                    // SAFETY: 8 elements.
                    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), weights) };
                }
            }

            fn row(self, output: usize) -> *const u8 {
                self.bytes.as_ptr().wrapping_add(output * self.inputs * $bytes)
            }

            fn scale(self, _output: usize) -> f32 {
                1.0
            }
        }
    };
}

plain!(
    /// f32 as stored.
    F32, 4, shared from usize::MAX, load256f);
plain!(
    /// bfloat16 as stored.
    Bf16, 2, shared from 2, load256_bf16);
plain!(
    /// float16 as stored.
    F16, 2, shared from 2, load256_f16);
plain!(
    /// Codes of INT8 as numbers.
    Codes, 1, shared from 2, load256_i8);

/// INT8: the codes, whose scale comes after the sum of a row.
#[derive(Clone, Copy)]
pub(super) struct Int8<'a> {
    pub(super) parts: int8::Parts<'a>,
    pub(super) inputs: usize,
}

impl<'a> Int8<'a> {
    fn codes(self) -> Codes<'a> {
        Codes {
            bytes: self.parts.codes,
            inputs: self.inputs,
        }
    }
}

impl Source for Int8<'_> {
    const ORDER: [u8; 64] = IN_ORDER;
    const SHARED_FROM: usize = Codes::SHARED_FROM;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(self, output: usize, at: usize) -> __m256 {
        // SAFETY: as the caller says.
        unsafe { self.codes().load(output, at) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_tail(self, output: usize, at: usize, left: usize) -> __m256 {
        // SAFETY: as the caller says.
        unsafe { self.codes().load_tail(output, at, left) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn widen(self, output: usize, range: Range<usize>, to: &mut [f32]) {
        // SAFETY: as the caller says.
        unsafe { self.codes().widen(output, range, to) }
    }

    fn row(self, output: usize) -> *const u8 {
        self.codes().row(output)
    }

    fn scale(self, output: usize) -> f32 {
        self.parts.scale(output)
    }
}

/// NF4 whose rows are whole groups of 64: always widened first, a group by a table of its sixteen weights in two registers.
#[derive(Clone, Copy)]
pub(super) struct Nf4<'a> {
    pub(super) parts: nf4::Parts<'a>,
    pub(super) inputs: usize,
    /// To which weights are rounded.
    pub(super) dtype: DType,
}

impl Source for Nf4<'_> {
    const ORDER: [u8; 64] = IN_ORDER;
    const SHARED_FROM: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(self, _output: usize, _at: usize) -> __m256 {
        _mm256_setzero_ps()
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_tail(self, _output: usize, _at: usize, _left: usize) -> __m256 {
        _mm256_setzero_ps()
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn widen(self, output: usize, range: Range<usize>, to: &mut [f32]) {
        // Places of the eight codes of four bytes; the upper half of a byte comes first.
        let shifts = _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24);
        for (start, to) in range
            .step_by(nf4::GROUP)
            .zip(to.chunks_exact_mut(nf4::GROUP))
        {
            let first = output * self.inputs + start;
            // SAFETY: the group of 64 exists, as its weights do.
            let scale = unsafe { self.parts.absmax_unchecked(first / nf4::GROUP) };
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

/// [`Nf4`] of bfloat16: two tables of bytes, of which 32 codes are looked up at a time. What unpacks them leaves the order to the inputs.
#[derive(Clone, Copy)]
pub(super) struct Nf4Bf16<'a> {
    pub(super) parts: nf4::Parts<'a>,
    pub(super) inputs: usize,
}

impl Source for Nf4Bf16<'_> {
    // Even weights, then odd ones; of each 32 bytes of codes two times four, 16 apart.
    const ORDER: [u8; 64] = {
        let mut order = [0; 64];
        let mut place = 0;
        while place < 64 {
            let (odd, vector, lane) = (place / 32, place / 8 % 4, place % 8);
            let byte = 4 * vector + lane % 4 + 16 * (lane / 4);
            order[place] = (2 * byte + odd) as u8;
            place += 1;
        }
        order
    };
    const SHARED_FROM: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(self, _output: usize, _at: usize) -> __m256 {
        _mm256_setzero_ps()
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_tail(self, _output: usize, _at: usize, _left: usize) -> __m256 {
        _mm256_setzero_ps()
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn widen(self, output: usize, range: Range<usize>, to: &mut [f32]) {
        for (start, to) in range
            .step_by(nf4::GROUP)
            .zip(to.chunks_exact_mut(nf4::GROUP))
        {
            let first = output * self.inputs + start;
            // SAFETY: the group of 64 exists, as its weights do.
            let scale = unsafe { self.parts.absmax_unchecked(first / nf4::GROUP) };
            let [low, high] = byte_tables(scale);
            let codes = self.parts.codes.as_ptr().wrapping_add(first / 2);
            // SAFETY: the group has 32 bytes of codes.
            let codes = unsafe { _mm256_loadu_si256(codes.cast()) };
            let nibble = _mm256_set1_epi8(15);
            let even = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble);
            let odd = _mm256_and_si256(codes, nibble);
            for (codes, to) in [even, odd].into_iter().zip(to.chunks_exact_mut(4 * STEP)) {
                let (a, b) = (
                    _mm256_shuffle_epi8(low, codes),
                    _mm256_shuffle_epi8(high, codes),
                );
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
    let upper = rounded8(
        unsafe { _mm256_loadu_ps(nf4::LEVELS.as_ptr().wrapping_add(8)) },
        scale,
    );
    // Packing works on halves of a vector: quarters are put in order behind it.
    let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(lower, upper));
    let (low, high) = (
        _mm256_and_si256(words, _mm256_set1_epi16(255)),
        _mm256_srli_epi16::<8>(words),
    );
    let bytes = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi16(low, high));
    [
        _mm256_permute2x128_si256::<0x00>(bytes, bytes),
        _mm256_permute2x128_si256::<0x11>(bytes, bytes),
    ]
}

/// Products rounded to bfloat16, in the lower halves of 32 bits: [`bf16_bits`](convert::bf16_bits) of each.
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

/// A chunk of a strip that was widened; its rows are numbered from 0.
#[derive(Clone, Copy)]
pub(super) struct Widened<'a> {
    /// `[rows, count]`, whole steps.
    pub(super) values: &'a [f32],
    /// The first input of the chunk.
    pub(super) first: usize,
    /// Elements of a row.
    pub(super) count: usize,
}

impl Source for Widened<'_> {
    const ORDER: [u8; 64] = IN_ORDER;
    const SHARED_FROM: usize = usize::MAX;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(self, output: usize, at: usize) -> __m256 {
        let place = output * self.count + at - self.first;
        // SAFETY: a step of the chunk, as the caller promises.
        unsafe { load256f(self.values.as_ptr().wrapping_add(place).cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_tail(self, output: usize, at: usize, _left: usize) -> __m256 {
        // SAFETY: what was widened are whole steps, padded with zeros.
        unsafe { self.load(output, at) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn widen(self, _output: usize, _range: Range<usize>, _to: &mut [f32]) {}

    fn row(self, output: usize) -> *const u8 {
        self.values
            .as_ptr()
            .wrapping_add(output * self.count)
            .cast()
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}

/// 8 signed bytes as f32.
///
/// # Safety
/// 8 bytes at the pointer are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load256_i8(p: *const u8) -> __m256 {
    // SAFETY: an unaligned load of bytes that the caller says are readable.
    let bytes = unsafe { _mm_loadl_epi64(p.cast()) };
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
}
