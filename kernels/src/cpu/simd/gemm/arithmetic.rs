//! The register tile of a matrix product, and what an instruction set brings to it.
//!
//! A tile has `O` outputs and `R` rows, one accumulator vector for each pair. It walks the inputs
//! in steps: per step it loads the weights of each output once and the inputs of each row once.
//!
//! ```text
//! panel of R input rows:    step 0: row 0 ... row R-1 | step 1: ...        STEP_BYTES per row
//! decoded strip:            output 0: step 0, step 1, ... | output 1: ...  STEP_BYTES per step
//! accumulators of a tile:   o * R + r
//! ```
//!
//! Floor of a tile: `O * R` multiply-adds per vector and step against `O + R` loads; with 12 or 24
//! accumulators the multiplier is the bound, with one row the bandwidth of memory.

use std::ops::Range;

use shared::dtype::DType;

use crate::cpu::simd::Isa;
use crate::cpu::simd::line::{CacheLine, LINE, prefetch};
use crate::tuning::{self, Split};

/// Vectors, steps and block sizes of one kind of product.
///
/// # Safety
/// Every unsafe method asks that the machine has the instruction set of the arithmetic.
pub(in crate::cpu::simd) trait Arithmetic:
    Copy + Send + Sync + 'static
{
    /// Packed inputs, or weights, of one multiply-add.
    type Vector: Copy;
    /// Sums of one output and row.
    type Accumulator: Copy;
    /// Weights of one output in one step: [`HALVES`](Self::HALVES) vectors.
    type Weights: Copy + AsRef<[Self::Vector]>;
    /// Accumulators of one tile.
    type TileSums: AsMut<[Self::Accumulator]>;
    /// Accumulators of all tiles of a group.
    type GroupSums: AsMut<[Self::Accumulator]>;

    /// The least instruction set that has its instructions.
    const SET: Isa;
    /// Inputs of a step.
    const STEP: usize;
    /// Bytes of a row in one step of a panel.
    const STEP_BYTES: usize;
    /// Vectors of a row in one step.
    const HALVES: usize;
    /// Most accumulators of a tile: those that fit the registers beside weights and inputs.
    const ACCUMULATORS: usize;
    /// Most rows of a tile.
    const TILE_ROWS: usize;
    /// Inputs that the tiles of a strip walk before they return for the next ones.
    const CHUNK: usize;
    /// Zero in every lane.
    const ZERO: Self::Accumulator;
    /// Whether products of many rows go over packed panels of f32 (`panels`): decoded weights are f32, an
    /// accumulator is one vector of them, and lane `c` sums inputs `c`, `c + STEP`, ...
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        allow(dead_code, reason = "for vectors with instructions of their own")
    )]
    const HAS_PANELS: bool;

    /// Returns zeroed accumulators of one tile.
    fn tile_sums() -> Self::TileSums;

    /// Returns zeroed accumulators of a group.
    fn group_sums() -> Self::GroupSums;

    /// Returns the most tiles of a group, of `tiles` in all. As for bfloat16 pairs, if nothing else is said.
    fn group_tiles(inputs: usize, tiles: usize) -> usize {
        tuning::packed_tiles(inputs, tiles)
    }

    /// Spreads `outputs` outputs, with at most `row_bytes` stored bytes each, over threads.
    fn split(
        outputs: usize,
        row_bytes: usize,
        _inputs: usize,
        rows: usize,
        threads: usize,
    ) -> Split {
        tuning::linear_split(outputs, row_bytes, rows, threads)
    }

    /// Rounds the rows of `x` `[rows, inputs]` to `dtype` and packs them as a panel in the order of
    /// the source.
    unsafe fn pack<S: MatrixSource<Self>>(
        dtype: DType,
        x: &[f32],
        inputs: usize,
        panel: &mut [CacheLine],
    );

    /// Loads a vector; the bytes at `p` exist.
    unsafe fn load(p: *const u8) -> Self::Vector;

    /// Loads the weights of a step of a decoded strip; the bytes at `p` exist.
    unsafe fn load_weights(p: *const u8) -> Self::Weights;

    /// Stores the weights of a step; the bytes at `p` exist.
    unsafe fn store_weights(weights: Self::Weights, p: *mut u8);

    /// Adds the products of two vectors to a sum.
    unsafe fn multiply_add(
        weights: Self::Vector,
        inputs: Self::Vector,
        sum: Self::Accumulator,
    ) -> Self::Accumulator;

    /// [`tile`], compiled for the instruction set.
    unsafe fn tile<S: MatrixSource<Self>, const O: usize, const R: usize>(
        source: S,
        output: usize,
        panel: Panel<'_>,
        range: Range<usize>,
        ahead: TilePrefetch,
        sums: &mut [Self::Accumulator],
    );

    /// [`Source::decode`], compiled for the instruction set.
    unsafe fn decode<S: MatrixSource<Self>>(
        source: S,
        output: usize,
        range: Range<usize>,
        to: &mut [CacheLine],
    );

    /// Sums the lanes of accumulators `first`, `first + stride`, ... (`O` of them).
    unsafe fn totals<const O: usize>(
        sums: &[Self::Accumulator],
        first: usize,
        stride: usize,
    ) -> [f32; O];
}

/// [`Arithmetic::tile`] and [`Arithmetic::decode`], compiled for instructions.
macro_rules! compiled_for {
    ($($features:literal)?) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn tile<S: MatrixSource<Self>, const O: usize, const R: usize>(
            source: S,
            output: usize,
            panel: Panel<'_>,
            range: Range<usize>,
            ahead: TilePrefetch,
            sums: &mut [Self::Accumulator],
        ) {
            // SAFETY: as the caller says.
            unsafe { arithmetic::tile::<Self, S, O, R>(source, output, panel, range, ahead, sums) };
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn decode<S: MatrixSource<Self>>(
            source: S,
            output: usize,
            range: Range<usize>,
            to: &mut [CacheLine],
        ) {
            // SAFETY: as the caller says.
            unsafe { source.decode(output, range, to) };
        }
    };
}
pub(super) use compiled_for;

/// A matrix as a tile reads it.
///
/// # Safety
/// Every unsafe method asks that the machine has the instruction set of the arithmetic, and that
/// the weights that it names exist.
pub(in crate::cpu::simd) trait MatrixSource<A: Arithmetic>:
    Copy + Sync
{
    /// For each position of 64 packed inputs, the input that lies there.
    const ORDER: [u8; 64];
    /// Number of tiles of a strip from which on its weights are decoded once for all; below, every
    /// tile decodes in registers.
    const SHARED_FROM: usize;

    /// Loads a whole step of row `output`, from input `at` on.
    unsafe fn load(self, output: usize, at: usize) -> A::Weights;

    /// Loads the `left` last weights of row `output`, fewer than a step, followed by zeros.
    unsafe fn load_tail(self, output: usize, at: usize, left: usize) -> A::Weights;

    /// Decodes weights `range` of row `output`, from a whole step on, into whole steps; zeros
    /// follow the last weight.
    #[inline(always)]
    unsafe fn decode(self, output: usize, range: Range<usize>, to: &mut [CacheLine]) {
        debug_assert!(size_of_val(to) >= range.len().div_ceil(A::STEP) * A::STEP_BYTES);
        let to = to.as_mut_ptr().cast::<u8>();
        for (step, at) in range.clone().step_by(A::STEP).enumerate() {
            let weights = if range.end - at >= A::STEP {
                // SAFETY: a whole step of a row that exists, as the caller says.
                unsafe { self.load(output, at) }
            } else {
                // SAFETY: the last weights of the row.
                unsafe { self.load_tail(output, at, range.end - at) }
            };
            // SAFETY: `to` holds the steps of the range.
            unsafe { A::store_weights(weights, to.wrapping_add(step * A::STEP_BYTES)) };
        }
    }

    /// Returns where the weights of row `output` begin; only for prefetching.
    fn row(self, output: usize) -> *const u8;

    /// Returns the factor of the sum of row `output`.
    fn scale(self, output: usize) -> f32;
}

/// Inputs in their own order.
pub(in crate::cpu::simd) const IN_ORDER: [u8; 64] = {
    let mut order = [0; 64];
    let mut i = 0;
    while i < 64 {
        order[i] = i as u8;
        i += 1;
    }
    order
};

/// Memory to prefetch while a tile computes.
#[derive(Clone, Copy)]
pub(in crate::cpu::simd) struct TilePrefetch {
    /// First byte, for input 0.
    pub(super) start: *const u8,
    /// Bytes for each step.
    pub(super) step_bytes: usize,
}

/// Packed inputs of the rows of one tile.
#[derive(Clone, Copy)]
pub(in crate::cpu::simd) struct Panel<'a> {
    pub(super) lines: &'a [CacheLine],
    pub(super) inputs: usize,
}

/// Lines that a row of `inputs` packed inputs takes.
pub(super) fn row_lines<A: Arithmetic>(inputs: usize) -> usize {
    (inputs.div_ceil(A::STEP) * A::STEP_BYTES).div_ceil(LINE)
}

/// A chunk of a strip that was decoded; its rows are numbered from 0.
#[derive(Clone, Copy)]
pub(super) struct Decoded<'a> {
    /// `[rows, row_lines]`.
    pub(super) lines: &'a [CacheLine],
    /// First input of the chunk.
    pub(super) first: usize,
    pub(super) row_lines: usize,
}

impl<A: Arithmetic> MatrixSource<A> for Decoded<'_> {
    // The inputs are packed in the order of the source that was decoded.
    const ORDER: [u8; 64] = IN_ORDER;
    const SHARED_FROM: usize = usize::MAX;

    #[inline(always)]
    unsafe fn load(self, output: usize, at: usize) -> A::Weights {
        let step = (at - self.first) / A::STEP * A::STEP_BYTES;
        let start = output * self.row_lines * LINE + step;
        // SAFETY: a step of the chunk, as the caller promises.
        unsafe { A::load_weights(self.lines.as_ptr().cast::<u8>().wrapping_add(start)) }
    }

    #[inline(always)]
    unsafe fn load_tail(self, output: usize, at: usize, _left: usize) -> A::Weights {
        // SAFETY: decoded steps are whole, padded with zeros.
        unsafe { <Self as MatrixSource<A>>::load(self, output, at) }
    }

    fn row(self, output: usize) -> *const u8 {
        self.lines.as_ptr().cast::<u8>().wrapping_add(output * self.row_lines * LINE)
    }

    fn scale(self, _output: usize) -> f32 {
        1.0
    }
}

/// Adds the products of `O` rows of the matrix from `output` on, and the `R` rows of `panel`, over
/// the inputs `range`, which begins at a step: to zero from input 0 on, else to the sums of the
/// inputs before.
///
/// # Safety
/// As [`Arithmetic`] and [`Source`]; `panel` holds `R` rows.
#[inline(always)]
#[allow(
    clippy::needless_range_loop,
    reason = "indexes that are constants keep the sums in registers"
)]
pub(super) unsafe fn tile<A: Arithmetic, S: MatrixSource<A>, const O: usize, const R: usize>(
    source: S,
    output: usize,
    panel: Panel<'_>,
    range: Range<usize>,
    ahead: TilePrefetch,
    all: &mut [A::Accumulator],
) {
    debug_assert!(panel.lines.len() == R * row_lines::<A>(panel.inputs));
    debug_assert!(range.end <= panel.inputs && range.start.is_multiple_of(A::STEP));
    let all = &mut all[..O * R];
    let mut sums = [[A::ZERO; R]; O];
    if range.start > 0 {
        for o in 0..O {
            for r in 0..R {
                sums[o][r] = all[o * R + r];
            }
        }
    }
    let x = panel.lines.as_ptr().cast::<u8>();
    let steps = range.start / A::STEP..range.end / A::STEP;
    let mut asked = ahead.start.wrapping_add(steps.start * ahead.step_bytes);
    let mut until = asked;
    for step in steps.clone() {
        until = until.wrapping_add(ahead.step_bytes);
        while asked < until {
            prefetch::<false>(asked);
            asked = asked.wrapping_add(LINE);
        }
        let x = x.wrapping_add(step * R * A::STEP_BYTES);
        for o in 0..O {
            // SAFETY: the caller gives rows and inputs that exist.
            let weights = unsafe { source.load(output + o, step * A::STEP) };
            // SAFETY: `x` is a step of the panel.
            unsafe { add::<A, R>(weights, x, &mut sums[o]) };
        }
    }
    if !range.end.is_multiple_of(A::STEP) {
        let at = steps.end * A::STEP;
        let x = x.wrapping_add(steps.end * R * A::STEP_BYTES);
        for o in 0..O {
            // SAFETY: as above; fewer than a step are left.
            let weights = unsafe { source.load_tail(output + o, at, range.end - at) };
            // SAFETY: panels end with whole steps, padded with zeros.
            unsafe { add::<A, R>(weights, x, &mut sums[o]) };
        }
    }
    for o in 0..O {
        for r in 0..R {
            all[o * R + r] = sums[o][r];
        }
    }
}

/// Adds the products of one step of weights and `R` rows.
///
/// # Safety
/// As [`tile`]; `x` is a step of a panel of `R` rows.
#[inline(always)]
#[allow(
    clippy::needless_range_loop,
    reason = "indexes that are constants keep the sums in registers"
)]
unsafe fn add<A: Arithmetic, const R: usize>(
    weights: A::Weights,
    x: *const u8,
    sums: &mut [A::Accumulator; R],
) {
    for half in 0..A::HALVES {
        let weights = weights.as_ref()[half];
        for r in 0..R {
            let p = x.wrapping_add(r * A::STEP_BYTES + half * (A::STEP_BYTES / A::HALVES));
            // SAFETY: a vector of row `r` of the step.
            let x = unsafe { A::load(p) };
            // SAFETY: the caller has the instruction set.
            sums[r] = unsafe { A::multiply_add(weights, x, sums[r]) };
        }
    }
}
