//! Tiles of outer products: the kernel of products with many rows.
//!
//! ```text
//! inputs   [steps][rows]         one item per row and step, broadcast: a number, or a pair of bfloat16
//! weights  [steps][2 vectors]    a run of a panel, which stays in the first-level cache
//! out      [rows][2 vectors]     one accumulator per row and vector, in registers over all steps
//! ```
//!
//! An element of a tile is one chain of multiply-adds from the first step to the last; it continues
//! from what `out` holds. Neither the height of a tile nor the width of its vectors changes a bit.
//!
//! Floor of a tile: `2 * rows` multiply-adds per step against `2 + rows` loads. With 12 rows
//! (AVX-512) or 6 rows (AVX2) the multipliers are the bound.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;

use super::line::prefetch;
#[cfg(target_arch = "aarch64")]
use super::neon::{Neon, transpose};
use super::vector::Lanes;
use crate::cpu::pool::Disjoint;

#[cfg(target_arch = "x86_64")]
mod pairs;
mod rows;
#[cfg(target_arch = "x86_64")]
mod transpose;
mod widen;

#[cfg(target_arch = "x86_64")]
pub(super) use pairs::Pairs512;
#[cfg(target_arch = "x86_64")]
use pairs::{rounded_pairs, transpose_pairs};
pub(super) use rows::InputRows;
use rows::{pack, rounded};
#[cfg(target_arch = "x86_64")]
use transpose::transpose256;
#[cfg(target_arch = "x86_64")]
pub(super) use transpose::transpose512;
pub(super) use widen::Widen;

/// Vectors of a step of a panel.
pub(super) const WIDTH: usize = 2;
/// Most lanes of a vector.
pub(super) const MOST_LANES: usize = 16;
/// Most rows of a tile.
const MOST_ROWS: usize = 12;

/// Accumulators of a tile in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    /// First row.
    pub(super) out: *mut f32,
    /// Numbers from one row to the next.
    pub(super) stride: usize,
    /// Whether the sums begin at zero: `out` is not read.
    pub(super) is_new: bool,
}

/// Memory to prefetch while a tile computes: weights into the second-level cache, and sums of the
/// next tile into the first-level cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct OuterPrefetch {
    /// First byte of the weights.
    pub(super) weights: *const u8,
    /// Bytes of weights for each step.
    pub(super) weight_bytes: usize,
    /// First byte of the sums.
    pub(super) sums: *const u8,
    /// Bytes of sums for each step.
    pub(super) sum_bytes: usize,
}

/// Where a block of decoded weights goes in a panel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Classes {
    /// Accumulators of an element, 1, 8 or 16: item `i` belongs to
    /// class `i % count`.
    pub(super) count: usize,
    /// Numbers from the run of one class to that of the next.
    pub(super) stride: usize,
}

/// Vectors of one instruction set, and the loops compiled for it.
///
/// # Safety
/// Every unsafe method asks that the machine has the vector's instruction set, and that the memory
/// that it names exists.
pub(super) trait Outer: Lanes {
    /// Most rows of a tile.
    const ROWS: usize;
    /// Inputs of an item, which is a lane of weights, or what is broadcast of the inputs.
    const ITEM: usize;

    /// Transposes a square of [`LANES`](Lanes::LANES) vectors.
    unsafe fn transpose(square: &mut [Self; MOST_LANES]);

    /// Adds the products of `steps` steps to `R` rows of sums.
    unsafe fn tile<const R: usize>(
        steps: usize,
        a: *const f32,
        b: *const f32,
        sums: Sums,
        ahead: OuterPrefetch,
    );

    /// Sorts rows of decoded weights into the runs of their classes: [`interleave`].
    unsafe fn interleave(from: *const f32, stride: usize, count: usize, to: *mut f32, at: Classes);

    /// Sums the classes of two vectors: [`fold`].
    unsafe fn fold(sums: *const f32, at: Classes, to: *mut f32);

    /// Packs the rows of a tile: [`pack`](rows::pack).
    unsafe fn pack(rows: InputRows<'_>, tile: Range<usize>, to: &Disjoint<'_, f32>);
}

/// Implements [`Outer`] for one vector; `$items` makes items of 64 inputs.
macro_rules! outer {
    ($vector:ty, $features:literal, rows $rows:literal, item $item:literal, $transpose:ident, $items:ident) => {
        impl Outer for $vector {
            const ROWS: usize = $rows;
            const ITEM: usize = $item;

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn transpose(square: &mut [Self; MOST_LANES]) {
                $transpose(square);
            }

            #[target_feature(enable = $features)]
            unsafe fn tile<const R: usize>(
                steps: usize,
                a: *const f32,
                b: *const f32,
                sums: Sums,
                ahead: OuterPrefetch,
            ) {
                // SAFETY: as the caller says.
                unsafe { tile::<Self, R>(steps, a, b, sums, ahead) };
            }

            #[target_feature(enable = $features)]
            unsafe fn interleave(
                from: *const f32,
                stride: usize,
                count: usize,
                to: *mut f32,
                at: Classes,
            ) {
                // SAFETY: as the caller says.
                unsafe { interleave::<Self>(from, stride, count, to, at) };
            }

            #[target_feature(enable = $features)]
            unsafe fn fold(sums: *const f32, at: Classes, to: *mut f32) {
                // SAFETY: as the caller says.
                unsafe { fold::<Self>(sums, at, to) };
            }

            #[target_feature(enable = $features)]
            unsafe fn pack(rows: InputRows<'_>, tile: Range<usize>, to: &Disjoint<'_, f32>) {
                // SAFETY: as the caller says.
                unsafe { pack(rows, tile, to, |rows, x, items| $items(rows, x, items)) };
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
outer!(__m256, "avx2,fma,f16c", rows 6, item 1, transpose256, rounded);
#[cfg(target_arch = "x86_64")]
outer!(__m512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", rows 12, item 1, transpose512, rounded);
#[cfg(target_arch = "x86_64")]
outer!(Pairs512, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16", rows 12, item 2, transpose_pairs, rounded_pairs);
// A vector is four registers: three rows have 24 accumulators.
#[cfg(target_arch = "aarch64")]
outer!(Neon, "neon", rows 3, item 1, transpose, rounded);

/// [`Outer::tile`] of `rows` rows, at most [`Outer::ROWS`].
///
/// # Safety
/// As [`tile`].
pub(super) unsafe fn tile_of<V: Outer>(
    rows: usize,
    steps: usize,
    a: *const f32,
    b: *const f32,
    sums: Sums,
    ahead: OuterPrefetch,
) {
    macro_rules! of {
        ($($rows:literal),*) => {
            match rows {
                // SAFETY: as the caller says.
                $($rows if const { $rows <= V::ROWS } => unsafe {
                    V::tile::<$rows>(steps, a, b, sums, ahead);
                },)*
                _ => unreachable!("tiles have at most {} rows", V::ROWS),
            }
        };
    }
    of!(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
}

/// Adds the products of `steps` steps of `a` `[steps][R]` and `b` `[steps][2 vectors]`.
///
/// # Safety
/// The machine has the instruction set; `a`, `b` and `R` rows of the sums exist.
#[inline(always)]
#[allow(
    clippy::needless_range_loop,
    reason = "indexes that are constants keep the sums in registers"
)]
unsafe fn tile<V: Outer, const R: usize>(
    steps: usize,
    a: *const f32,
    b: *const f32,
    Sums { out, stride, is_new }: Sums,
    ahead: OuterPrefetch,
) {
    let at = |r: usize, w: usize| out.wrapping_add(r * stride + w * V::LANES).cast::<u8>();
    let mut sums = [[V::ZERO; WIDTH]; R];
    if !is_new {
        for r in 0..R {
            for w in 0..WIDTH {
                // SAFETY: a vector of the sums.
                sums[r][w] = unsafe { V::load(at(r, w)) };
            }
        }
    }
    let (mut a, mut b) = (a, b);
    let OuterPrefetch { weights: mut asked, sums: mut asked_sums, weight_bytes, sum_bytes } = ahead;
    for _ in 0..steps {
        prefetch::<false>(asked);
        prefetch::<true>(asked_sums);
        (asked, asked_sums) =
            (asked.wrapping_add(weight_bytes), asked_sums.wrapping_add(sum_bytes));
        let mut weights = [V::ZERO; WIDTH];
        for w in 0..WIDTH {
            // SAFETY: a step of the panel.
            weights[w] = unsafe { V::load(b.wrapping_add(w * V::LANES).cast()) };
        }
        for r in 0..R {
            // SAFETY: a number of the step.
            let x = unsafe { a.wrapping_add(r).read() };
            // SAFETY: the machine has the instruction set.
            let x = unsafe { V::splat(x) };
            for w in 0..WIDTH {
                // SAFETY: the machine has the instruction set.
                sums[r][w] = unsafe { weights[w].mul_add(x, sums[r][w]) };
            }
        }
        (a, b) = (a.wrapping_add(R), b.wrapping_add(WIDTH * V::LANES));
    }
    for r in 0..R {
        for w in 0..WIDTH {
            // SAFETY: a vector of the sums.
            unsafe { sums[r][w].store(at(r, w)) };
        }
    }
}

/// Sorts `count` weights of [`LANES`](Lanes::LANES) rows, from a whole step on, into one vector of
/// each step of the runs of their classes.
///
/// # Safety
/// The machine has the instruction set; rows `stride` numbers apart hold whole vectors; the runs
/// hold the steps.
#[inline(always)]
unsafe fn interleave<V: Outer>(
    from: *const f32,
    stride: usize,
    count: usize,
    to: *mut f32,
    at: Classes,
) {
    let step = WIDTH * V::LANES;
    let mut offsets = [0; MOST_LANES];
    for (i, offset) in offsets.iter_mut().enumerate() {
        *offset = i % at.count * at.stride + i / at.count * step;
    }
    for first in (0..count).step_by(V::LANES) {
        let mut square = [V::ZERO; MOST_LANES];
        for (row, vector) in square.iter_mut().enumerate().take(V::LANES) {
            // SAFETY: a vector of the row.
            *vector = unsafe { V::load(from.wrapping_add(row * stride + first).cast()) };
        }
        // SAFETY: the machine has the instruction set.
        unsafe { V::transpose(&mut square) };
        let to = to.wrapping_add(first / at.count * step);
        if count - first >= V::LANES {
            for i in 0..V::LANES {
                // SAFETY: a vector of a step of its run.
                unsafe { square[i].store(to.wrapping_add(offsets[i]).cast()) };
            }
        } else {
            for i in 0..count - first {
                // SAFETY: as above.
                unsafe { square[i].store(to.wrapping_add(offsets[i]).cast()) };
            }
        }
    }
}

/// Sums the classes of one row as the balanced tree that [`Vector::totals`](super::vector::Vector::totals) takes: halves,
/// quarters, eighths, pairs.
///
/// # Safety
/// The machine has the instruction set; two vectors of every class exist, and so does `to`.
#[inline(always)]
unsafe fn fold<V: Outer>(sums: *const f32, at: Classes, to: *mut f32) {
    match at.count {
        // SAFETY: as the caller says.
        8 => unsafe { fold_classes::<V, 8>(sums, at.stride, to) },
        // SAFETY: as the caller says.
        16 => unsafe { fold_classes::<V, 16>(sums, at.stride, to) },
        count => unreachable!("accumulators have 8 or 16 lanes, not {count}"),
    }
}

/// [`fold`] of `COUNT` classes, 8 or 16, in registers.
///
/// # Safety
/// As there.
#[inline(always)]
#[allow(clippy::multiple_unsafe_ops_per_block, reason = "a tree of sums has one contract")]
unsafe fn fold_classes<V: Outer, const COUNT: usize>(
    sums: *const f32,
    stride: usize,
    to: *mut f32,
) {
    let at = |class: usize, w: usize| sums.wrapping_add(class * stride + w * V::LANES).cast();
    for w in 0..WIDTH {
        let mut eighths = [V::ZERO; 8];
        for (class, eighth) in eighths.iter_mut().enumerate() {
            // SAFETY: a vector of the class.
            *eighth = unsafe { V::load(at(class, w)) };
            if COUNT == 16 {
                // SAFETY: as above.
                let other = unsafe { V::load(at(class + 8, w)) };
                // SAFETY: the machine has the instruction set.
                *eighth = unsafe { eighth.add(other) };
            }
        }
        // SAFETY: the machine has the instruction set.
        let total = unsafe {
            let quarters = [
                eighths[0].add(eighths[4]),
                eighths[1].add(eighths[5]),
                eighths[2].add(eighths[6]),
                eighths[3].add(eighths[7]),
            ];
            let halves = [quarters[0].add(quarters[2]), quarters[1].add(quarters[3])];
            halves[0].add(halves[1])
        };
        // SAFETY: a vector of `to`.
        unsafe { total.store(to.wrapping_add(w * V::LANES).cast()) };
    }
}
