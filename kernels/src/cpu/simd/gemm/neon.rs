//! Products in NEON beyond plain vectors: bfloat16 pairs (`bfdot`) as an [`Arithmetic`], and NF4.
//!
//! A step is 64 inputs: eight registers of eight. Products of bfloat16 are exact, and two of them are summed
//! before they meet a sum of f32; the architecture defines every bit. Intrinsics for bfloat16 are not
//! stable, so the instruction is written out.

use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

use shared::dtype::DType;

use super::arithmetic::{self, Arithmetic, IN_ORDER, MatrixSource, Panel, TilePrefetch};
use super::float::{Float, NeonGroups};
use super::sources::{Bf16, Int8, Nf4};
use crate::cpu::simd::Isa;
use crate::cpu::simd::line::{CacheLine, LINE};
use crate::cpu::simd::neon::{Neon, total4};
use crate::cpu::simd::vector::{Lanes, Vector};
use crate::ops::convert::bf16_bits;
use crate::quant::nf4;
use crate::tuning;

/// Inputs of a step, and registers that hold them.
const STEP: usize = 64;
const HALVES: usize = 8;
/// Bytes of a row in one step of a panel.
const STEP_BYTES: usize = 2 * STEP;
/// Accumulators of a tile: with the weights of a step and an input they fit 32 registers.
const ACCUMULATORS: usize = 16;

/// Weights or inputs of a step.
type Registers = [uint16x8_t; HALVES];

/// Products of bfloat16 pairs in NEON.
#[derive(Clone, Copy)]
pub(super) struct BfDot;

impl Arithmetic for BfDot {
    type Vector = uint16x8_t;
    type Accumulator = float32x4_t;
    type Weights = Registers;
    type TileSums = [float32x4_t; ACCUMULATORS];
    type GroupSums = [float32x4_t; ACCUMULATORS * tuning::PACKED_TILES];

    const SET: Isa = Isa::NeonBf16;
    const STEP: usize = STEP;
    const STEP_BYTES: usize = STEP_BYTES;
    const HALVES: usize = HALVES;
    const ACCUMULATORS: usize = ACCUMULATORS;
    const TILE_ROWS: usize = 4;
    const HAS_PANELS: bool = false;
    const CHUNK: usize = tuning::PACKED_CHUNK;
    // SAFETY: four f32 zeros.
    const ZERO: float32x4_t = unsafe { std::mem::transmute::<[f32; 4], float32x4_t>([0.0; 4]) };

    fn tile_sums() -> Self::TileSums {
        [Self::ZERO; ACCUMULATORS]
    }

    fn group_sums() -> Self::GroupSums {
        [Self::ZERO; ACCUMULATORS * tuning::PACKED_TILES]
    }

    unsafe fn pack<S: MatrixSource<Self>>(
        _dtype: DType,
        x: &[f32],
        inputs: usize,
        panel: &mut [CacheLine],
    ) {
        let rows = x.len() / inputs;
        let steps = panel.chunks_exact_mut(STEP_BYTES / LINE * rows);
        for (lines, start) in steps.zip((0..inputs).step_by(STEP)) {
            for (r, lines) in lines.chunks_exact_mut(STEP_BYTES / LINE).enumerate() {
                let x = &x[r * inputs + start..][..STEP.min(inputs - start)];
                let mut words = [0u16; STEP];
                for (word, from) in words.iter_mut().zip(S::ORDER) {
                    *word = x.get(usize::from(from)).map_or(0, |x| bf16_bits(*x));
                }
                // SAFETY: the lines of a row in a step hold as many bytes.
                unsafe { lines.as_mut_ptr().cast::<[u16; STEP]>().write(words) };
            }
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(p: *const u8) -> uint16x8_t {
        // SAFETY: as the caller says.
        unsafe { vld1q_u16(p.cast()) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_weights(p: *const u8) -> Registers {
        // SAFETY: as the caller says.
        unsafe { load_step(p) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store_weights(weights: Registers, p: *mut u8) {
        for (half, weights) in weights.into_iter().enumerate() {
            // SAFETY: as the caller says.
            unsafe { vst1q_u16(p.wrapping_add(16 * half).cast(), weights) };
        }
    }

    #[inline]
    #[target_feature(enable = "neon,bf16")]
    unsafe fn multiply_add(
        weights: uint16x8_t,
        inputs: uint16x8_t,
        sum: float32x4_t,
    ) -> float32x4_t {
        let mut sum = sum;
        // SAFETY: the caller has the instruction.
        unsafe {
            asm!("bfdot {0:v}.4s, {1:v}.8h, {2:v}.8h",
                inout(vreg) sum, in(vreg) weights, in(vreg) inputs,
                options(pure, nomem, nostack, preserves_flags));
        }
        sum
    }

    arithmetic::compiled_for!("neon,bf16");

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn totals<const O: usize>(
        sums: &[float32x4_t],
        first: usize,
        stride: usize,
    ) -> [f32; O] {
        std::array::from_fn(|o| total4(sums[first + o * stride]))
    }
}

/// Loads the registers of a step.
///
/// # Safety
/// 128 bytes at the pointer are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load_step(p: *const u8) -> Registers {
    let mut step = [BfDot::NONE; HALVES];
    for (half, register) in step.iter_mut().enumerate() {
        // SAFETY: as the caller says.
        *register = unsafe { vld1q_u16(p.wrapping_add(16 * half).cast()) };
    }
    step
}

impl BfDot {
    /// Eight zeros.
    // SAFETY: every pattern is valid.
    const NONE: uint16x8_t = unsafe { std::mem::transmute::<[u16; 8], uint16x8_t>([0; 8]) };
}

impl MatrixSource<BfDot> for Bf16<'_> {
    const ORDER: [u8; STEP] = IN_ORDER;
    const SHARED_FROM: usize = usize::MAX;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(self, output: usize, at: usize) -> Registers {
        // SAFETY: 128 bytes of the row, as the caller promises.
        unsafe { load_step(self.start(output).wrapping_add(2 * at)) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_tail(self, output: usize, at: usize, left: usize) -> Registers {
        let mut padded = [0u8; STEP_BYTES];
        let start = 2 * (output * self.inputs + at);
        padded[..2 * left].copy_from_slice(&self.bytes[start..start + 2 * left]);
        // SAFETY: 128 bytes.
        unsafe { load_step(padded.as_ptr()) }
    }

    fn row(self, output: usize) -> *const u8 {
        self.start(output)
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}

impl MatrixSource<BfDot> for Int8<'_> {
    const ORDER: [u8; STEP] = IN_ORDER;
    const SHARED_FROM: usize = 2;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(self, output: usize, at: usize) -> Registers {
        // SAFETY: 64 bytes of the row, as the caller promises.
        unsafe { codes(self.start(output).wrapping_add(at)) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_tail(self, output: usize, at: usize, left: usize) -> Registers {
        let mut padded = [0u8; STEP];
        let start = output * self.inputs + at;
        padded[..left].copy_from_slice(&self.parts.codes[start..start + left]);
        // SAFETY: 64 bytes.
        unsafe { codes(padded.as_ptr()) }
    }

    fn row(self, output: usize) -> *const u8 {
        self.start(output)
    }

    fn scale(self, output: usize) -> f32 {
        self.parts.scale(output)
    }
}

/// 64 signed bytes as bfloat16, which holds them exactly.
///
/// # Safety
/// 64 bytes at the pointer are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn codes(p: *const u8) -> Registers {
    let mut step = [BfDot::NONE; HALVES];
    for (i, registers) in step.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        // SAFETY: sixteen of the bytes.
        let Neon([a, b, c, d]) = unsafe { Neon::load_i8(p.wrapping_add(16 * i)) };
        let upper = |a, b| vuzp2q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b));
        *registers = [upper(a, b), upper(c, d)];
    }
    step
}

/// Of each 16 bytes of codes the even weights, then the odd ones.
const NIBBLES: [u8; STEP] = {
    let mut order = [0; STEP];
    let mut position = 0;
    while position < STEP {
        let (block, odd, byte) = (position / 32, position % 32 / 16, position % 16);
        order[position] = (32 * block + 2 * byte + odd) as u8;
        position += 1;
    }
    order
};

impl Nf4<'_> {
    /// The group of row `output` that begins at input `at`, in the order of [`NIBBLES`]: its sixteen
    /// weights, rounded to bfloat16, are a table of lower and one of upper bytes.
    ///
    /// # Safety
    /// The group exists.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn group(self, output: usize, at: usize) -> Registers {
        // SAFETY: the group of 64 exists, as the caller says.
        let scale = unsafe { self.parts.scale_unchecked(output, at / nf4::GROUP) };
        let table: [u16; 16] = std::array::from_fn(|i| bf16_bits(nf4::LEVELS[i] * scale));
        let p = self.start(output).wrapping_add(at / 2);
        let mut step = [BfDot::NONE; HALVES];
        // SAFETY: the first eight of sixteen words.
        let first = vreinterpretq_u8_u16(unsafe { vld1q_u16(table.as_ptr()) });
        // SAFETY: the last eight.
        let second = vreinterpretq_u8_u16(unsafe { vld1q_u16(table.as_ptr().wrapping_add(8)) });
        let (lower, upper) = (vuzp1q_u8(first, second), vuzp2q_u8(first, second));
        for (block, registers) in step.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            // SAFETY: half of the 32 bytes of codes of the group.
            let bytes = unsafe { vld1q_u8(p.wrapping_add(16 * block)) };
            let nibbles = [vshrq_n_u8::<4>(bytes), vandq_u8(bytes, vdupq_n_u8(15))];
            for (codes, to) in nibbles.into_iter().zip(registers.as_chunks_mut::<2>().0) {
                let (low, high) = (vqtbl1q_u8(lower, codes), vqtbl1q_u8(upper, codes));
                *to = [vzip1q_u8(low, high), vzip2q_u8(low, high)]
                    .map(|bytes| vreinterpretq_u16_u8(bytes));
            }
        }
        step
    }

    /// The same, widened.
    ///
    /// # Safety
    /// As there.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn wide_group(self, output: usize, at: usize) -> [Neon; 4] {
        // SAFETY: as the caller says.
        let group = unsafe { self.group(output, at) };
        let mut wide = [Neon::ZERO; 4];
        for ([a, b], wide) in group.as_chunks::<2>().0.iter().zip(&mut wide) {
            let parts = [
                vshll_n_u16::<16>(vget_low_u16(*a)),
                vshll_high_n_u16::<16>(*a),
                vshll_n_u16::<16>(vget_low_u16(*b)),
                vshll_high_n_u16::<16>(*b),
            ];
            *wide = Neon(parts.map(|part| vreinterpretq_f32_u32(part)));
        }
        wide
    }
}

impl MatrixSource<BfDot> for Nf4<'_> {
    const ORDER: [u8; STEP] = NIBBLES;
    const SHARED_FROM: usize = 2;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(self, output: usize, at: usize) -> Registers {
        // SAFETY: as the caller says.
        unsafe { self.group(output, at) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_tail(self, _output: usize, _at: usize, _left: usize) -> Registers {
        // Rows are whole groups: the dispatch takes no others.
        [BfDot::NONE; HALVES]
    }

    fn row(self, output: usize) -> *const u8 {
        self.start(output)
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}

impl MatrixSource<NeonGroups> for Nf4<'_> {
    const ORDER: [u8; STEP] = NIBBLES;
    const SHARED_FROM: usize = usize::MAX;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(self, output: usize, at: usize) -> [Neon; 4] {
        // SAFETY: as the caller says.
        unsafe { self.wide_group(output, at) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_tail(self, _output: usize, _at: usize, _left: usize) -> [Neon; 4] {
        // Rows are whole groups: the dispatch takes no others.
        [Neon::ZERO; 4]
    }

    fn row(self, output: usize) -> *const u8 {
        self.start(output)
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}

impl MatrixSource<Float<Neon>> for Nf4<'_> {
    const ORDER: [u8; STEP] = NIBBLES;
    const SHARED_FROM: usize = 1;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(self, _output: usize, _at: usize) -> [Neon; 1] {
        [Neon::ZERO]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_tail(self, _output: usize, _at: usize, _left: usize) -> [Neon; 1] {
        [Neon::ZERO]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn decode(self, output: usize, range: Range<usize>, to: &mut [CacheLine]) {
        // A step of sixteen f32 is a line, a group is four.
        for (start, lines) in range.step_by(nf4::GROUP).zip(to.as_chunks_mut::<4>().0) {
            // SAFETY: the group exists, as its weights do.
            let weights = unsafe { self.wide_group(output, start) };
            for (weights, line) in weights.into_iter().zip(lines) {
                // SAFETY: a line holds a vector.
                unsafe { weights.store(std::ptr::from_mut(line).cast()) };
            }
        }
    }

    fn row(self, output: usize) -> *const u8 {
        self.start(output)
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}
