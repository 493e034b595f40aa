//! Products of bfloat16 pairs (`vdpbf16ps`) as an [`Arithmetic`], and the matrices that they read:
//! bfloat16, INT8 and NF4.
//!
//! A step is 64 inputs: two vectors of 32. A source gives the two vectors of one row of the matrix,
//! decoded in registers if it is quantized; it may give the 64 elements in an order of its own, in
//! which the inputs are then packed too. Products of bfloat16 are exact; sums are f32.

use std::arch::x86_64::*;
use std::ops::Range;

use shared::dtype::DType;

use super::arithmetic::{self, Arithmetic, IN_ORDER, MatrixSource, Panel, TilePrefetch};
use super::sources::{Bf16, Int8, Nf4};
use crate::cpu::simd::Isa;
use crate::cpu::simd::bf16::{dot_pairs, round32};
use crate::cpu::simd::line::{CacheLine, LINE};
use crate::cpu::simd::vector::totals512;
use crate::quant::nf4;
use crate::tuning;

/// Inputs of one step.
pub(in crate::cpu::simd) const STEP: usize = 64;
/// Accumulators of a tile: with a weight and an input they fit 32 registers.
const ACCUMULATORS: usize = 24;
/// Bytes of one row in one step of a panel.
const STEP_BYTES: usize = 2 * LINE;

/// Products of bfloat16 pairs in AVX-512.
#[derive(Clone, Copy)]
pub(in crate::cpu::simd) struct Pairs;

impl Arithmetic for Pairs {
    type Vector = __m512i;
    type Accumulator = __m512;
    type Weights = [__m512i; 2];
    type TileSums = [__m512; ACCUMULATORS];
    type GroupSums = [__m512; ACCUMULATORS * tuning::PACKED_TILES];

    const SET: Isa = Isa::Avx512Bf16;
    const STEP: usize = STEP;
    const STEP_BYTES: usize = STEP_BYTES;
    const HALVES: usize = 2;
    const ACCUMULATORS: usize = ACCUMULATORS;
    const TILE_ROWS: usize = 6;
    const HAS_PANELS: bool = false;
    const CHUNK: usize = tuning::PACKED_CHUNK;
    // SAFETY: sixteen f32 zeros.
    const ZERO: __m512 = unsafe { std::mem::transmute::<[f32; 16], __m512>([0.0; 16]) };

    fn tile_sums() -> Self::TileSums {
        [Self::ZERO; ACCUMULATORS]
    }

    fn group_sums() -> Self::GroupSums {
        [Self::ZERO; ACCUMULATORS * tuning::PACKED_TILES]
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack<S: MatrixSource<Self>>(
        _dtype: DType,
        x: &[f32],
        inputs: usize,
        panel: &mut [CacheLine],
    ) {
        let positions: [[u16; STEP / 2]; 2] =
            const { [halved_order(S::ORDER, 0), halved_order(S::ORDER, STEP / 2)] };
        // SAFETY: 64 bytes each.
        let positions = positions.map(|half| unsafe { load(half.as_ptr().cast()) });
        let rows = x.len() / inputs;
        for (step, lines) in panel.chunks_exact_mut(2 * rows).enumerate() {
            let start = step * STEP;
            let left = STEP.min(inputs - start);
            for (r, lines) in lines.chunks_exact_mut(2).enumerate() {
                let x = &x[r * inputs + start..][..left];
                let (first, second) = (round32(x), round32(x.get(STEP / 2..).unwrap_or(&[])));
                for (line, positions) in lines.iter_mut().zip(positions) {
                    line.set(_mm512_permutex2var_epi16(first, positions, second));
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(p: *const u8) -> __m512i {
        // SAFETY: as the caller says.
        unsafe { load(p) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_weights(p: *const u8) -> [__m512i; 2] {
        // SAFETY: as the caller says.
        let first = unsafe { load(p) };
        // SAFETY: as the caller says.
        [first, unsafe { load(p.wrapping_add(LINE)) }]
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store_weights(weights: [__m512i; 2], p: *mut u8) {
        for (half, weights) in weights.into_iter().enumerate() {
            // SAFETY: 64 bytes, as the caller says.
            unsafe { _mm512_storeu_si512(p.wrapping_add(half * LINE).cast(), weights) };
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn multiply_add(weights: __m512i, inputs: __m512i, sum: __m512) -> __m512 {
        dot_pairs(weights, inputs, sum)
    }

    arithmetic::compiled_for!("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16");

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn totals<const O: usize>(sums: &[__m512], first: usize, stride: usize) -> [f32; O] {
        totals512(sums, first, stride)
    }
}

/// Returns one half of the positions of an order.
const fn halved_order(order: [u8; STEP], start: usize) -> [u16; STEP / 2] {
    let mut half = [0; STEP / 2];
    let mut i = 0;
    while i < STEP / 2 {
        half[i] = order[start + i] as u16;
        i += 1;
    }
    half
}

impl MatrixSource<Pairs> for Bf16<'_> {
    const ORDER: [u8; STEP] = IN_ORDER;
    const SHARED_FROM: usize = usize::MAX;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(self, output: usize, at: usize) -> [__m512i; 2] {
        let p = self.row(output).wrapping_add(2 * at);
        // SAFETY: 128 bytes of the row, as the caller promises.
        let first = unsafe { load(p) };
        // SAFETY: as above.
        [first, unsafe { load(p.wrapping_add(LINE)) }]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load_tail(self, output: usize, at: usize, left: usize) -> [__m512i; 2] {
        let p = self.row(output).wrapping_add(2 * at);
        let mask = (1u64 << left) - 1;
        // SAFETY: only the lanes of the mask are read, which lie in the row.
        let first = unsafe { _mm512_maskz_loadu_epi16(mask as u32, p.cast()) };
        let p = p.wrapping_add(LINE);
        // SAFETY: as above.
        let second = unsafe { _mm512_maskz_loadu_epi16((mask >> 32) as u32, p.cast()) };
        [first, second]
    }

    fn row(self, output: usize) -> *const u8 {
        self.start(output)
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}

impl MatrixSource<Pairs> for Int8<'_> {
    // Lanes of two vectors of 16 become the lower and upper halves of one of 32.
    const ORDER: [u8; STEP] = widened_order();
    const SHARED_FROM: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(self, output: usize, at: usize) -> [__m512i; 2] {
        let p = self.row(output).wrapping_add(at);
        // SAFETY: 64 bytes of the row, as the caller promises.
        let [a, b] = unsafe { widen16(p) };
        // SAFETY: as above.
        let [c, d] = unsafe { widen16(p.wrapping_add(32)) };
        [halves(a, b), halves(c, d)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load_tail(self, output: usize, at: usize, left: usize) -> [__m512i; 2] {
        let p = self.row(output).wrapping_add(at);
        let mut padded = [0u8; STEP];
        for (i, byte) in padded.iter_mut().enumerate().take(left) {
            // SAFETY: one of the `left` bytes of the row.
            *byte = unsafe { p.wrapping_add(i).read() };
        }
        // SAFETY: 64 bytes.
        let [a, b] = unsafe { widen16(padded.as_ptr()) };
        // SAFETY: as above.
        let [c, d] = unsafe { widen16(padded.as_ptr().wrapping_add(32)) };
        [halves(a, b), halves(c, d)]
    }

    fn row(self, output: usize) -> *const u8 {
        self.start(output)
    }

    fn scale(self, output: usize) -> f32 {
        self.parts.scale(output)
    }
}

impl MatrixSource<Pairs> for Nf4<'_> {
    // The first vector is made of the upper halves of the bytes, the second of the lower ones.
    const ORDER: [u8; STEP] = {
        let mut order = [0; STEP];
        let mut i = 0;
        while i < STEP / 2 {
            order[i] = 2 * i as u8;
            order[STEP / 2 + i] = 2 * i as u8 + 1;
            i += 1;
        }
        order
    };
    const SHARED_FROM: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn load(self, output: usize, at: usize) -> [__m512i; 2] {
        let p = self.row(output).wrapping_add(at / 2);
        // SAFETY: 32 bytes of the row, as the caller promises.
        let bytes = _mm512_cvtepu8_epi16(unsafe { _mm256_loadu_si256(p.cast()) });
        // SAFETY: the group of 64 exists, as its weights do.
        let scale = unsafe { self.parts.scale_unchecked(output, at / STEP) };
        // SAFETY: sixteen f32.
        let levels = unsafe { _mm512_loadu_ps(nf4::LEVELS.as_ptr()) };
        let table = _mm512_cvtneps_pbh(_mm512_mul_ps(levels, _mm512_set1_ps(scale)));
        // SAFETY: both are 256 bits in which every pattern is valid.
        let table = unsafe { std::mem::transmute::<__m256bh, __m256i>(table) };
        // Indexes are below 16: the upper half is never looked up.
        let table = _mm512_castsi256_si512(table);
        let high = _mm512_srli_epi16::<4>(bytes);
        let low = _mm512_and_si512(bytes, _mm512_set1_epi16(15));
        [_mm512_permutexvar_epi16(high, table), _mm512_permutexvar_epi16(low, table)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn load_tail(self, _output: usize, _at: usize, _left: usize) -> [__m512i; 2] {
        // Rows are whole groups: the dispatch takes no others.
        [_mm512_setzero_si512(); 2]
    }

    fn row(self, output: usize) -> *const u8 {
        self.start(output)
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}

/// Returns the order in which two vectors of 16 lanes become the lower and upper halves of one of
/// 32: in each 32 elements, position `2 i` holds element `i`, position `2 i + 1` element `i + 16`.
const fn widened_order() -> [u8; STEP] {
    let mut order = [0; STEP];
    let mut i = 0;
    while i < STEP {
        order[i] = (i / 32 * 32 + i % 32 / 2 + i % 2 * 16) as u8;
        i += 1;
    }
    order
}

/// Loads a vector.
///
/// # Safety
/// 64 bytes at the pointer are readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(p: *const u8) -> __m512i {
    // SAFETY: an unaligned load of bytes that the caller says are readable.
    unsafe { _mm512_loadu_si512(p.cast()) }
}

/// Widens 32 signed bytes to two vectors of f32, as bits.
///
/// # Safety
/// 32 bytes at the pointer are readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn widen16(p: *const u8) -> [__m512i; 2] {
    // SAFETY: as the caller says.
    let first = unsafe { _mm_loadu_si128(p.cast()) };
    // SAFETY: as above.
    let second = unsafe { _mm_loadu_si128(p.wrapping_add(16).cast()) };
    [
        _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first))),
        _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(second))),
    ]
}

/// Joins the upper halves of two vectors of f32: pairs of bfloat16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn halves(lower: __m512i, upper: __m512i) -> __m512i {
    _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(lower), upper)
}
