//! The blocked matrix product `out = x W^T + bias`, for every [`Arithmetic`].
//!
//! ```text
//! piece of outputs (a thread) > group of rows that stays in the cache > strip of 4 outputs (8 for one row)
//!     > chunk of the inputs, decoded once > tile of rows
//! ```
//!
//! An element of the output has one accumulator vector that walks the inputs from first to last: a
//! chunk continues from the sums of the chunk before. Pieces, groups, strips and tiles only choose
//! which elements are computed side by side, so they never change a bit. While a strip is computed,
//! the weights of the next one are prefetched, spread evenly over its steps, so that memory is read
//! all the time and in the order in which it lies.
//!
//! Floor: for few rows the stored bytes of the matrix over the bandwidth of memory, each read once;
//! for many rows `2 * rows * outputs * inputs` operations over the rate of the multipliers.

use std::ops::Range;

use shared::dtype::DType;

use super::arithmetic::{Arithmetic, Decoded, MatrixSource, Panel, TilePrefetch, row_lines};
use crate::cpu::pool::{Disjoint, ThreadPool};
use crate::cpu::simd::line::{CacheLine, LINE, ZEROS, resize};
use crate::tuning;

/// Outputs of a strip for several rows, and for one row.
const STRIP: usize = 4;
const SINGLE_ROW_STRIP: usize = 8;

/// Lines of a decoded chunk.
const DECODED_LINES: usize = 256;

/// One of several matrix products of the same inputs.
pub(super) struct Operand<'a, S> {
    pub(super) source: S,
    pub(super) outputs: usize,
    /// Stored bytes of a row of the matrix.
    pub(super) row_bytes: usize,
    pub(super) bias: Option<&'a [f32]>,
    /// `[rows, outputs]`.
    pub(super) out: Disjoint<'a, f32>,
}

/// Inputs before they are rounded and packed.
#[derive(Clone, Copy)]
pub(super) struct Unpacked<'a> {
    /// `[rows, inputs]`.
    pub(super) x: &'a [f32],
    pub(super) rows: usize,
    pub(super) inputs: usize,
}

/// Packed inputs, which all pieces share.
#[derive(Clone, Copy)]
struct PackedInputs<'a> {
    inputs: usize,
    panels: &'a [CacheLine],
    tiles: Tiles,
}

/// One operand and the inputs.
struct BlockedProduct<'a, S> {
    operand: &'a Operand<'a, S>,
    shared: PackedInputs<'a>,
}

/// Rows in tiles of nearly one size.
#[derive(Clone, Copy)]
struct Tiles {
    rows: usize,
    count: usize,
}

impl Tiles {
    /// Rows of tile `index`.
    fn range(self, index: usize) -> Range<usize> {
        index * self.rows / self.count..(index + 1) * self.rows / self.count
    }
}

/// Computes all operands from inputs, rounded to `dtype` and packed once; their pieces are one heap
/// of work.
///
/// # Safety
/// The machine has the instruction set of the arithmetic; each source has its `outputs` rows of
/// `inputs` weights.
pub(super) unsafe fn multiply<A: Arithmetic, S: MatrixSource<A>>(
    pool: &mut ThreadPool,
    panels: &mut Vec<CacheLine>,
    dtype: DType,
    from: Unpacked<'_>,
    operands: &[Operand<'_, S>],
) {
    let Unpacked { x, rows, inputs } = from;
    if rows == 0 || inputs == 0 {
        return;
    }
    let tiles = Tiles { rows, count: rows.div_ceil(A::TILE_ROWS) };
    let lines = row_lines::<A>(inputs);
    resize(panels, rows * lines);
    let whole = Disjoint::new(&mut panels[..]);
    let pack = |index: usize| {
        let tile = tiles.range(index);
        // SAFETY: tiles have different rows.
        let panel = unsafe { whole.range(tile.start * lines, tile.len() * lines) };
        let x = &x[tile.start * inputs..tile.end * inputs];
        // SAFETY: the caller has the instruction set.
        unsafe { A::pack::<S>(dtype, x, inputs, panel) };
    };
    if tuning::packing_is_parallel(rows * inputs) {
        pool.run(tiles.count, pack);
    } else {
        (0..tiles.count).for_each(pack);
    }
    let shared = PackedInputs { inputs, panels, tiles };
    run_pieces::<A, S>(pool, shared, operands);
}

/// Computes the outputs of all operands, cut as if they were those of one matrix, on all threads.
fn run_pieces<A: Arithmetic, S: MatrixSource<A>>(
    pool: &mut ThreadPool,
    shared: PackedInputs<'_>,
    operands: &[Operand<'_, S>],
) {
    let outputs: usize = operands.iter().map(|operand| operand.outputs).sum();
    let row_bytes = operands.iter().map(|operand| operand.row_bytes).max().unwrap_or(0);
    let split = A::split(outputs, row_bytes, shared.inputs, shared.tiles.rows, pool.threads());
    pool.share(split.ends.len(), split.wakes, |index| {
        let before = index.checked_sub(1).and_then(|i| split.ends.get(i));
        let piece = before.copied().unwrap_or(0)..split.ends[index];
        let mut first = 0;
        for operand in operands {
            let end = first + operand.outputs;
            let own = piece.start.max(first)..piece.end.min(end);
            if !own.is_empty() {
                let product = BlockedProduct { operand, shared };
                product.piece::<A>(own.start - first..own.end - first);
            }
            first = end;
        }
    });
}

impl<S> BlockedProduct<'_, S> {
    /// Computes some outputs of all rows.
    fn piece<A: Arithmetic>(&self, outputs: Range<usize>)
    where
        S: MatrixSource<A>,
    {
        // Zeroing the accumulators of a whole group would be felt in the products of a tiny model.
        if self.shared.tiles.count == 1 {
            self.groups::<A>(outputs, A::tile_sums().as_mut());
        } else {
            self.groups::<A>(outputs, A::group_sums().as_mut());
        }
    }

    /// [`piece`](Self::piece), as many tiles at a time as `sums` has accumulators for.
    fn groups<A: Arithmetic>(&self, outputs: Range<usize>, sums: &mut [A::Accumulator])
    where
        S: MatrixSource<A>,
    {
        let mut decoded = None;
        let Tiles { rows, count } = self.shared.tiles;
        let most = (sums.len() / A::ACCUMULATORS).min(A::group_tiles(self.shared.inputs, count));
        let is_single = rows == 1 && S::SHARED_FROM > 1;
        for first in (0..count).step_by(most) {
            let tiles = first..count.min(first + most);
            let steps = self.shared.inputs.div_ceil(A::STEP) * tiles.len();
            let prefetch = self.operand.row_bytes.div_ceil(steps);
            let mut output = outputs.start;
            while output < outputs.end {
                let (tiles, decoded) = (tiles.clone(), &mut decoded);
                output += match outputs.end - output {
                    SINGLE_ROW_STRIP.. if is_single && SINGLE_ROW_STRIP <= A::ACCUMULATORS => {
                        self.strip::<A, SINGLE_ROW_STRIP>(output, tiles, prefetch, sums, decoded)
                    }
                    STRIP.. if STRIP <= A::ACCUMULATORS => {
                        self.strip::<A, STRIP>(output, tiles, prefetch, sums, decoded)
                    }
                    _ => self.strip::<A, 1>(output, tiles, prefetch, sums, decoded),
                };
            }
        }
    }

    /// Computes `O` outputs of the rows of `tiles`; returns `O`. Each step of a tile prefetches
    /// `prefetch` bytes of every row of the next strip. `sums` has accumulators for every tile.
    fn strip<A: Arithmetic, const O: usize>(
        &self,
        output: usize,
        tiles: Range<usize>,
        prefetch: usize,
        sums: &mut [A::Accumulator],
        decoded: &mut Option<[CacheLine; DECODED_LINES]>,
    ) -> usize
    where
        S: MatrixSource<A>,
    {
        let (source, inputs) = (self.operand.source, self.shared.inputs);
        let is_shared = tiles.len() >= S::SHARED_FROM;
        let chunk = if tiles.len() == 1 && !is_shared { inputs } else { A::CHUNK };
        // The next strip begins where this one ends; each tile asks for its share.
        let (steps, step_bytes) = (inputs.div_ceil(A::STEP), O * prefetch);
        let ahead = |index: usize| TilePrefetch {
            start: source.row(output + O).wrapping_add((index - tiles.start) * steps * step_bytes),
            step_bytes,
        };
        for start in (0..inputs).step_by(chunk) {
            let range = start..inputs.min(start + chunk);
            let pairs = tiles.clone().zip(sums.chunks_exact_mut(A::ACCUMULATORS));
            if !is_shared {
                for (index, sums) in pairs {
                    let range = range.clone();
                    self.tile_of::<A, S, O>(source, output, index, range, ahead(index), sums);
                }
                continue;
            }
            let decoded = decoded.get_or_insert([ZEROS; DECODED_LINES]);
            let row_lines = row_lines::<A>(range.len());
            for (o, row) in decoded.chunks_exact_mut(row_lines).take(O).enumerate() {
                // SAFETY: the caller of `multiply` has the instruction set, and the source has
                // these rows and inputs.
                unsafe { A::decode(source, output + o, range.clone(), row) };
            }
            let source = Decoded { lines: decoded, first: start, row_lines };
            for (index, sums) in pairs {
                let range = range.clone();
                self.tile_of::<A, Decoded<'_>, O>(source, 0, index, range, ahead(index), sums);
            }
        }
        for (index, sums) in tiles.zip(sums.chunks_exact(A::ACCUMULATORS)) {
            self.store::<A, O>(output, self.shared.tiles.range(index), sums);
        }
        O
    }

    /// Adds the products of the inputs `range` to the sums of tile `index`; `output` is the first
    /// row of `source`.
    fn tile_of<A: Arithmetic, T: MatrixSource<A>, const O: usize>(
        &self,
        source: T,
        output: usize,
        index: usize,
        range: Range<usize>,
        ahead: TilePrefetch,
        sums: &mut [A::Accumulator],
    ) {
        let PackedInputs { inputs, panels, tiles } = self.shared;
        let (rows, lines) = (tiles.range(index), row_lines::<A>(inputs));
        let panel = Panel { lines: &panels[rows.start * lines..rows.end * lines], inputs };
        match rows.len() {
            1 => tile::<A, T, O, 1>(source, output, panel, range, ahead, sums),
            2 => tile::<A, T, O, 2>(source, output, panel, range, ahead, sums),
            3 => tile::<A, T, O, 3>(source, output, panel, range, ahead, sums),
            4 => tile::<A, T, O, 4>(source, output, panel, range, ahead, sums),
            5 => tile::<A, T, O, 5>(source, output, panel, range, ahead, sums),
            _ => tile::<A, T, O, 6>(source, output, panel, range, ahead, sums),
        }
    }

    /// Epilogue of a tile: sums the lanes, scales, adds the bias and stores the outputs.
    fn store<A: Arithmetic, const O: usize>(
        &self,
        output: usize,
        rows: Range<usize>,
        sums: &[A::Accumulator],
    ) where
        S: MatrixSource<A>,
    {
        let (operand, count) = (self.operand, rows.len());
        for (r, row) in rows.enumerate() {
            // SAFETY: the caller of `multiply` has the instruction set.
            let totals = unsafe { A::totals::<O>(sums, r, count) };
            // SAFETY: pieces differ in their outputs, so these ranges of a row do not overlap.
            let out = unsafe { operand.out.range(row * operand.outputs + output, O) };
            for (o, out) in out.iter_mut().enumerate() {
                let total = totals[o] * operand.source.scale(output + o);
                *out = total + operand.bias.map_or(0.0, |bias| bias[output + o]);
            }
        }
    }
}

/// A tile, if its accumulators fit the registers: strips of 8 outputs have one row.
#[inline(always)]
fn tile<A: Arithmetic, S: MatrixSource<A>, const O: usize, const R: usize>(
    source: S,
    output: usize,
    panel: Panel<'_>,
    range: Range<usize>,
    ahead: TilePrefetch,
    sums: &mut [A::Accumulator],
) {
    const {
        assert!(STRIP * A::CHUNK / A::STEP * A::STEP_BYTES <= DECODED_LINES * LINE);
        assert!(A::TILE_ROWS <= 6);
    }
    if const { O * R <= A::ACCUMULATORS && R <= A::TILE_ROWS } {
        // SAFETY: the caller of `multiply` has the instruction set, and the source has these rows
        // and inputs.
        unsafe { A::tile::<S, O, R>(source, output, panel, range, ahead, sums) };
    }
}
