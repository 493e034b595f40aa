//! Tiles of outer products in f32: the kernel of products with many rows.
//!
//! ```text
//! inputs   [steps][rows]         one number per row and step, broadcast
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

use shared::dtype::DType;

use super::line::prefetch;
#[cfg(target_arch = "aarch64")]
use super::neon::{Neon, transpose};
use super::vector::Vector;
use crate::cpu::pool::Disjoint;
use crate::ops::convert;
use crate::tensor::WeightView;

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
pub(super) struct Ahead {
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
    /// Accumulators of an element, a power of two of at most [`MOST_LANES`]: input `i` belongs to
    /// class `i % count`.
    pub(super) count: usize,
    /// Numbers from the run of one class to that of the next.
    pub(super) stride: usize,
}

/// Rows of inputs to pack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    /// `[rows, width]`.
    pub(super) x: &'a [f32],
    pub(super) width: usize,
    /// To which the inputs are rounded.
    pub(super) dtype: DType,
    /// For each position of a whole group of 64, the input that lies there; `None` for inputs in
    /// their own order.
    pub(super) order: Option<[u8; 64]>,
    /// See [`Classes`].
    pub(super) classes: usize,
    /// Inputs of a chunk, a multiple of 64.
    pub(super) chunk: usize,
}

impl Rows<'_> {
    /// Numbers that the packed rows take.
    pub(super) fn packed(&self) -> usize {
        self.x.len() / self.width.max(1) * self.width.next_multiple_of(self.classes)
    }

    /// The chunk that begins with input `start` or holds it.
    pub(super) fn chunk(&self, start: usize) -> Range<usize> {
        let first = start / self.chunk * self.chunk;
        first..self.width.min(first + self.chunk)
    }

    /// Where the run of a class in a chunk begins, `[step][row]`, for a tile of rows. The runs of
    /// all tiles follow each other, as they are read.
    pub(super) fn run(&self, chunk: &Range<usize>, class: usize, tile: &Range<usize>) -> usize {
        let (rows, steps) = (self.x.len() / self.width, chunk.len().div_ceil(self.classes));
        rows * chunk.start + (class * rows + tile.start) * steps
    }
}

/// Vectors of one instruction set, and the loops compiled for it.
///
/// # Safety
/// Every unsafe method asks that the machine has the vector's instruction set, and that the memory
/// that it names exists.
pub(super) trait Outer: Vector {
    /// Most rows of a tile.
    const ROWS: usize;

    /// Transposes a square of [`LANES`](Vector::LANES) vectors.
    unsafe fn transpose(square: &mut [Self; MOST_LANES]);

    /// Adds the products of `steps` steps to `R` rows of sums.
    unsafe fn tile<const R: usize>(
        steps: usize,
        a: *const f32,
        b: *const f32,
        sums: Sums,
        ahead: Ahead,
    );

    /// Sorts rows of decoded weights into the runs of their classes: [`interleave`].
    unsafe fn interleave(from: *const f32, stride: usize, count: usize, to: *mut f32, at: Classes);

    /// Sums the classes of two vectors: [`fold`].
    unsafe fn fold(sums: *const f32, at: Classes, to: *mut f32);

    /// Packs the rows of a tile: [`pack`].
    unsafe fn pack(rows: Rows<'_>, tile: Range<usize>, to: &Disjoint<'_, f32>);

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

/// Implements [`Outer`] for one vector.
macro_rules! outer {
    ($vector:ty, $features:literal, rows $rows:literal, $transpose:ident) => {
        impl Outer for $vector {
            const ROWS: usize = $rows;

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
                ahead: Ahead,
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
            unsafe fn pack(rows: Rows<'_>, tile: Range<usize>, to: &Disjoint<'_, f32>) {
                // SAFETY: as the caller says.
                unsafe { pack(rows, tile, to) };
            }

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
outer!(__m256, "avx2,fma,f16c", rows 6, transpose256);
#[cfg(target_arch = "x86_64")]
outer!(__m512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", rows 12, transpose512);
// A vector is four registers: three rows have 24 accumulators.
#[cfg(target_arch = "aarch64")]
outer!(Neon, "neon", rows 3, transpose);

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
    ahead: Ahead,
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
    ahead: Ahead,
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
    let Ahead { weights: mut asked, sums: mut asked_sums, weight_bytes, sum_bytes } = ahead;
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

/// Sorts `count` weights of [`LANES`](Vector::LANES) rows, from a whole step on, into one vector of
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

/// Sums the classes of one row as the balanced tree that [`Vector::totals`] takes: halves,
/// quarters, eighths, pairs.
///
/// # Safety
/// The machine has the instruction set; two vectors of every class exist, and so does `to`.
#[inline(always)]
unsafe fn fold<V: Outer>(sums: *const f32, at: Classes, to: *mut f32) {
    for w in 0..WIDTH {
        let mut classes = [V::ZERO; MOST_LANES];
        for (class, vector) in classes.iter_mut().enumerate().take(at.count) {
            let p = sums.wrapping_add(class * at.stride + w * V::LANES);
            // SAFETY: a vector of the class.
            *vector = unsafe { V::load(p.cast()) };
        }
        let mut half = at.count / 2;
        while half > 0 {
            for i in 0..half {
                // SAFETY: the machine has the instruction set.
                classes[i] = unsafe { classes[i].add(classes[i + half]) };
            }
            half /= 2;
        }
        // SAFETY: a vector of `to`.
        unsafe { classes[0].store(to.wrapping_add(w * V::LANES).cast()) };
    }
}

/// Rounds the rows of a tile and packs them `[step][row]`, by chunk and class; zeros follow the
/// inputs.
///
/// # Safety
/// The rows of the tile exist in `to`, and no one else writes there.
#[inline(always)]
unsafe fn pack(of: Rows<'_>, tile: Range<usize>, to: &Disjoint<'_, f32>) {
    let (count, mut rounded) = (tile.len(), [[0.0; 64]; MOST_ROWS]);
    for start in (0..of.width).step_by(64) {
        let left = 64.min(of.width - start);
        for (r, rounded) in tile.clone().zip(&mut rounded) {
            let x = &of.x[r * of.width + start..][..left];
            convert::with_rounding!(of.dtype, round => match &of.order {
                Some(order) if left == 64 => {
                    for (to, from) in rounded.iter_mut().zip(order) {
                        *to = round(x[usize::from(from % 64)]);
                    }
                }
                _ => rounded.iter_mut().zip(x).for_each(|(to, x)| *to = round(*x)),
            });
            rounded[left..].fill(0.0);
        }
        let chunk = of.chunk(start);
        let (first, steps) = ((start - chunk.start) / of.classes, left.div_ceil(of.classes));
        for class in 0..of.classes {
            let at = of.run(&chunk, class, &tile) + first * count;
            // SAFETY: as the caller says; the borrow ends here.
            let to = unsafe { to.range(at, steps * count) };
            for (i, to) in to.chunks_exact_mut(count).enumerate() {
                for (to, rounded) in to.iter_mut().zip(&rounded) {
                    *to = rounded[i * of.classes + class];
                }
            }
        }
    }
}

/// Widens the numbers of some columns, whole vectors, into a step of panels `stride` numbers apart.
///
/// # Safety
/// The machine has the instruction set; the numbers and the panels exist.
#[inline(always)]
unsafe fn widen<V: Outer>(
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

/// Rows to columns of 16 vectors.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn transpose512(v: &mut [__m512; MOST_LANES]) {
    let mut quads = [_mm512_setzero_ps(); MOST_LANES];
    for g in 0..4 {
        let [a, b, c, d] = [v[4 * g], v[4 * g + 1], v[4 * g + 2], v[4 * g + 3]];
        let (low, high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let (low2, high2) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let pairs = [(low, low2), (high, high2)];
        for (half, (a, b)) in pairs.into_iter().enumerate() {
            let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
            quads[4 * g + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            quads[4 * g + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    for c in 0..4 {
        let [a, b, d, e] = [quads[c], quads[4 + c], quads[8 + c], quads[12 + c]];
        let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
        let (even2, odd2) =
            (_mm512_shuffle_f32x4::<0x88>(d, e), _mm512_shuffle_f32x4::<0xdd>(d, e));
        v[c] = _mm512_shuffle_f32x4::<0x88>(even, even2);
        v[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd, odd2);
        v[8 + c] = _mm512_shuffle_f32x4::<0xdd>(even, even2);
        v[12 + c] = _mm512_shuffle_f32x4::<0xdd>(odd, odd2);
    }
}

/// Rows to columns of the first 8 vectors.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn transpose256(v: &mut [__m256; MOST_LANES]) {
    let mut quads = [_mm256_setzero_ps(); 8];
    for g in 0..2 {
        let [a, b, c, d] = [v[4 * g], v[4 * g + 1], v[4 * g + 2], v[4 * g + 3]];
        let (low, high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (low2, high2) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let pairs = [(low, low2), (high, high2)];
        for (half, (a, b)) in pairs.into_iter().enumerate() {
            let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
            quads[4 * g + 2 * half] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
            quads[4 * g + 2 * half + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        }
    }
    for c in 0..4 {
        v[c] = _mm256_permute2f128_ps::<0x20>(quads[c], quads[4 + c]);
        v[4 + c] = _mm256_permute2f128_ps::<0x31>(quads[c], quads[4 + c]);
    }
}
