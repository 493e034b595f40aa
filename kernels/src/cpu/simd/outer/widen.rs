//! Panels of any stored numbers, widened to f32.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};
use std::ops::Range;

use shared::dtype::DType;

use super::{Outer, WIDTH};
#[cfg(target_arch = "aarch64")]
use crate::cpu::simd::neon::Neon;
use crate::cpu::simd::vector::Vector;
use crate::tensor::WeightView;

/// What panels of any stored numbers need beside: [`Outer`] in f32.
///
/// # Safety
/// As [`Outer`].
pub(in crate::cpu::simd) trait Widen: Outer + Vector {
    /// [`WeightView::widen_part`], compiled for the instruction set.
    unsafe fn decode(weight: &WeightView<'_>, row: usize, first: usize, to: &mut [f32]);

    /// Widens numbers into panels: [`widen`].
    unsafe fn widen(
        dtype: DType,
        from: *const u8,
        columns: Range<usize>,
        to: *mut f32,
        stride: usize,
    );
}

/// Implements [`Widen`] for one vector.
macro_rules! widen {
    ($vector:ty, $features:literal) => {
        impl Widen for $vector {
            #[target_feature(enable = $features)]
            unsafe fn decode(weight: &WeightView<'_>, row: usize, first: usize, to: &mut [f32]) {
                weight.widen_part(row, first, to);
            }

            #[target_feature(enable = $features)]
            unsafe fn widen(
                dtype: DType,
                from: *const u8,
                columns: Range<usize>,
                to: *mut f32,
                stride: usize,
            ) {
                // SAFETY: as the caller says.
                unsafe { widen::<Self>(dtype, from, columns, to, stride) };
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
widen!(__m256, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
widen!(__m512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
widen!(Neon, "neon");

/// Widens the numbers of some columns, whole vectors, into a step of panels `stride` numbers apart.
///
/// # Safety
/// The machine has the instruction set; the numbers and the panels exist.
#[inline(always)]
unsafe fn widen<V: Vector>(
    dtype: DType,
    from: *const u8,
    columns: Range<usize>,
    to: *mut f32,
    stride: usize,
) {
    let width = WIDTH * V::LANES;
    let at = |column: usize| to.wrapping_add(column / width * stride + column % width).cast();
    let from = |column: usize, size: usize| from.wrapping_add((column - columns.start) * size);
    macro_rules! widen {
        ($load:ident, $size:literal) => {
            for column in columns.clone().step_by(V::LANES) {
                // SAFETY: a vector of numbers.
                let vector = unsafe { V::$load(from(column, $size)) };
                // SAFETY: a vector of a panel.
                unsafe { vector.store(at(column)) };
            }
        };
    }
    match dtype {
        DType::F32 => widen!(load, 4),
        DType::Bf16 => widen!(load_bf16, 2),
        DType::F16 => widen!(load_f16, 2),
    }
}
