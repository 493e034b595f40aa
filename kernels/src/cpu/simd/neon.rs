//! Sixteen lanes in four NEON registers: the vector of f32 of 64-bit ARM.
//!
//! It has the lanes of the plain vector, and each lane the same chain of fused products, so that products
//! of numbers as stored have the bits of plain code there. Every 64-bit ARM that Rust builds for has NEON.

use std::arch::aarch64::*;
use std::arch::asm;

use super::lanes::LANES;
use super::vector::{Lanes, Vector};

/// Registers of a vector.
pub(super) const PARTS: usize = 4;

/// A vector of sixteen f32.
#[derive(Clone, Copy)]
pub(super) struct Neon(pub(super) [float32x4_t; PARTS]);

impl Neon {
    /// Makes each register.
    #[inline]
    #[target_feature(enable = "neon")]
    fn from_parts(part: impl Fn(usize) -> float32x4_t) -> Neon {
        Neon([part(0), part(1), part(2), part(3)])
    }
}

impl Lanes for Neon {
    const LANES: usize = LANES;
    const ZERO: Self =
        // SAFETY: sixteen f32 zeros.
        Neon(unsafe {
            std::mem::transmute::<[f32; LANES], [float32x4_t; PARTS]>([0.0; LANES])
        });

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn splat(value: f32) -> Self {
        Neon([vdupq_n_f32(value); PARTS])
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(p: *const u8) -> Self {
        // SAFETY: four f32 each, of the sixteen that the caller says exist.
        Neon::from_parts(|i| unsafe { vld1q_f32(p.wrapping_add(16 * i).cast()) })
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store(self, p: *mut u8) {
        for (i, part) in self.0.into_iter().enumerate() {
            // SAFETY: four f32 each, of the sixteen that the caller says exist.
            unsafe { vst1q_f32(p.wrapping_add(16 * i).cast(), part) };
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn mul_add(self, b: Self, sum: Self) -> Self {
        Neon::from_parts(|i| vfmaq_f32(sum.0[i], self.0[i], b.0[i]))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn add(self, other: Self) -> Self {
        Neon::from_parts(|i| vaddq_f32(self.0[i], other.0[i]))
    }
}

impl Vector for Neon {
    const PARTS: usize = PARTS;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_bf16(p: *const u8) -> Self {
        Neon::from_parts(|i| {
            // SAFETY: four of the sixteen numbers that the caller says exist.
            let words = unsafe { vld1_u16(p.wrapping_add(8 * i).cast()) };
            vreinterpretq_f32_u32(vshll_n_u16::<16>(words))
        })
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_f16(p: *const u8) -> Self {
        Neon::from_parts(|i| {
            // SAFETY: four of the sixteen numbers that the caller says exist.
            let words = unsafe { vld1_u16(p.wrapping_add(8 * i).cast()) };
            widen_f16(words)
        })
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_i8(p: *const u8) -> Self {
        // SAFETY: sixteen bytes that the caller says exist.
        let bytes = unsafe { vld1q_s8(p.cast()) };
        widen_i8(bytes)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn totals<const O: usize>(sums: &[Self], first: usize, stride: usize) -> [f32; O] {
        std::array::from_fn(|o| total(sums[first + o * stride]))
    }
}

/// Sums the lanes: halves, quarters, eighths, pairs.
#[inline]
#[target_feature(enable = "neon")]
fn total(Neon([a, b, c, d]): Neon) -> f32 {
    total4(vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d)))
}

/// Sums four lanes: halves, then the pair.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn total4(four: float32x4_t) -> f32 {
    let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
}

/// Widens four float16 numbers. Stable Rust has the instruction for scalars of 16 bits under another
/// feature, so it is written out.
#[inline]
#[target_feature(enable = "neon")]
fn widen_f16(words: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: every 64-bit ARM has the instruction.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) words,
            options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Widens sixteen signed bytes.
#[inline]
#[target_feature(enable = "neon")]
fn widen_i8(bytes: int8x16_t) -> Neon {
    let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
    Neon([
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
        vcvtq_f32_s32(vmovl_high_s16(low)),
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
        vcvtq_f32_s32(vmovl_high_s16(high)),
    ])
}

/// Rows to columns of sixteen vectors.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn transpose(square: &mut [Neon; LANES]) {
    // Squares of four rows and four columns change places, each transposed.
    let before = *square;
    for (row, to) in square.chunks_exact_mut(PARTS).enumerate() {
        for column in 0..PARTS {
            let from: [float32x4_t; PARTS] =
                std::array::from_fn(|i| before[PARTS * column + i].0[row]);
            for (to, part) in to.iter_mut().zip(transpose4(from)) {
                to.0[column] = part;
            }
        }
    }
}

/// Rows to columns of four registers.
#[inline]
#[target_feature(enable = "neon")]
fn transpose4([a, b, c, d]: [float32x4_t; PARTS]) -> [float32x4_t; PARTS] {
    let (even, odd) = (vtrn1q_f32(a, b), vtrn2q_f32(a, b));
    let (even2, odd2) = (vtrn1q_f32(c, d), vtrn2q_f32(c, d));
    let pairs = |low, high| {
        let (low, high) = (vreinterpretq_f64_f32(low), vreinterpretq_f64_f32(high));
        [vtrn1q_f64(low, high), vtrn2q_f64(low, high)]
    };
    let ([first, third], [second, fourth]) = (pairs(even, even2), pairs(odd, odd2));
    [first, second, third, fourth].map(|row| vreinterpretq_f32_f64(row))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::vector::Plain;

    #[test]
    fn vectors_compute_what_plain_ones_do() {
        let bytes: Vec<u8> = (0..64u32).map(|i| (i * 37 + 11) as u8 & 0xbf).collect();
        let floats: [f32; LANES] = std::array::from_fn(|i| 1.0 / (3.0 + i as f32));
        let start = floats.as_ptr().cast();
        fn all<V: Vector>(bytes: *const u8, floats: *const u8) -> Vec<u32> {
            // SAFETY: all vectors exist; plain code and NEON are there.
            unsafe {
                let (a, b) = (V::load(floats), V::splat(3.5));
                let vectors = [
                    a.mul_add(b, a),
                    a.add(b),
                    V::load_bf16(bytes),
                    V::load_f16(bytes),
                    V::load_i8(bytes),
                ];
                let totals = V::totals::<2>(&vectors, 0, 1);
                let mut out = vec![0.0f32; vectors.len() * LANES];
                for (vector, out) in vectors.into_iter().zip(out.chunks_exact_mut(LANES)) {
                    vector.store(out.as_mut_ptr().cast());
                }
                out.into_iter().chain(totals).map(f32::to_bits).collect()
            }
        }
        assert_eq!(all::<Neon>(bytes.as_ptr(), start), all::<Plain>(bytes.as_ptr(), start));
    }

    #[test]
    fn columns_become_rows() {
        let value = |row: usize, column: usize| (100 * row + column) as f32;
        let mut square = [Neon::ZERO; LANES];
        for (row, vector) in square.iter_mut().enumerate() {
            let numbers: [f32; LANES] = std::array::from_fn(|column| value(row, column));
            // SAFETY: sixteen f32.
            *vector = unsafe { Neon::load(numbers.as_ptr().cast()) };
        }
        // SAFETY: every 64-bit ARM has NEON.
        unsafe { transpose(&mut square) };
        for (column, vector) in square.into_iter().enumerate() {
            let mut numbers = [0.0; LANES];
            // SAFETY: sixteen f32.
            unsafe { vector.store(numbers.as_mut_ptr().cast()) };
            assert_eq!(numbers, std::array::from_fn(|row| value(row, column)));
        }
    }
}
