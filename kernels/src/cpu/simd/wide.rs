//! Matrix product over f32 inputs, for tiles of [`super::tile256`]: everything on machines with AVX2, and quantized matrices on those
//! with AVX-512 but without products of bfloat16 pairs.
//!
//! ```text
//! piece of outputs (a thread) > group of rows that stays in the cache > strip of 4 outputs (8 for one row)
//!     > chunk of the inputs, widened once > tile of up to 3 rows
//! ```
//!
//! As everywhere, an element of the output has one accumulator vector that walks the inputs from first to last.

use std::ops::Range;

use shared::dtype::DType;

use super::linear::{Part, run_pieces};
use super::tile256::{self, Ahead, Panel, STEP, SUMS, Source, Sums, Widened, no_sums};
use crate::cpu::pool::Pool;
use crate::ops::convert;
use crate::tuning;

/// Most rows of a tile, and outputs of a strip for several rows.
const TILE_ROWS: usize = 3;
const STRIP: usize = 4;

/// Inputs of a chunk that is widened: with four rows of it and three of the inputs half of the first-level cache.
const CHUNK: usize = 512;

/// Most tiles whose sums wait for the next chunk.
const TILES: usize = 64;

/// What all pieces share.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    /// f32 `[rows, stride]`, zeros after the inputs.
    values: &'a [f32],
    stride: usize,
    inputs: usize,
    rows: usize,
}

/// A piece of one part.
struct Task<'a, S> {
    part: &'a Part<'a, S>,
    shared: Inputs<'a>,
}

/// Computes all parts from `x` `[rows, inputs]`, rounded to `dtype`.
///
/// # Safety
/// The machine has AVX2, FMA and F16C; each source has its `outputs` rows of `inputs` weights.
pub(super) unsafe fn multiply<S: Source>(
    pool: &mut Pool,
    values: &mut Vec<f32>,
    dtype: DType,
    (x, rows, inputs): (&[f32], usize, usize),
    parts: &[Part<'_, S>],
) {
    if rows == 0 || inputs == 0 {
        return;
    }
    let stride = inputs.next_multiple_of(STEP);
    values.resize(rows * stride, 0.0);
    for (x, to) in x
        .chunks_exact(inputs)
        .zip(values.chunks_exact_mut(stride))
        .take(rows)
    {
        let (own, rest) = to.split_at_mut(inputs);
        convert::with_rounding!(dtype, round => put::<S>(round, x, own));
        rest.fill(0.0);
    }
    let shared = Inputs {
        values,
        stride,
        inputs,
        rows,
    };
    let outputs: usize = parts.iter().map(|part| part.outputs).sum();
    // What widening takes counts as reading f32.
    let split = tuning::linear_split(outputs, 2 * inputs, 2 * rows, pool.threads());
    run_pieces(
        pool,
        parts,
        |part| part.outputs,
        &split,
        |part, outputs| Task { part, shared }.piece(outputs),
    );
}

/// Rounds a row into the order of the source, which is another one only of whole groups of 64.
fn put<S: Source>(round: impl Fn(f32) -> f32, x: &[f32], to: &mut [f32]) {
    let (groups, rest) = x.as_chunks::<64>();
    let (to_groups, to_rest) = to.as_chunks_mut::<64>();
    for (x, to) in groups.iter().zip(to_groups) {
        for (to, place) in to.iter_mut().zip(S::ORDER) {
            *to = round(x[usize::from(place % 64)]);
        }
    }
    for (x, to) in rest.iter().zip(to_rest) {
        *to = round(*x);
    }
}

impl<S: Source> Task<'_, S> {
    fn piece(&self, outputs: Range<usize>) {
        let mut sums = [no_sums(); TILES];
        let tiles = self.shared.rows.div_ceil(TILE_ROWS);
        for first in (0..tiles).step_by(TILES) {
            let tiles = first..tiles.min(first + TILES);
            let sums = &mut sums[..tiles.len()];
            let is_direct = self.shared.rows == 1 && S::SHARED_FROM > 1;
            let mut output = outputs.start;
            while output < outputs.end {
                output += match outputs.end - output {
                    8.. if is_direct => self.strip::<8>(output, tiles.clone(), sums),
                    STRIP.. => self.strip::<STRIP>(output, tiles.clone(), sums),
                    _ => self.strip::<1>(output, tiles.clone(), sums),
                };
            }
        }
    }

    /// `O` outputs of the rows of `tiles`; returns `O`. `sums` are room for those of the tiles.
    fn strip<const O: usize>(
        &self,
        output: usize,
        tiles: Range<usize>,
        sums: &mut [Sums],
    ) -> usize {
        let (part, inputs) = (self.part, self.shared.inputs);
        let is_shared = tiles.len() >= S::SHARED_FROM;
        let chunk = if tiles.len() == 1 && !is_shared {
            inputs
        } else {
            CHUNK
        };
        // The next strip begins where this one ends; each tile asks for its share.
        let steps = inputs.div_ceil(STEP);
        let step_bytes = (O * part.row_bytes).div_ceil(steps * tiles.len());
        let ahead = |index: usize| Ahead {
            start: part
                .source
                .row(output + O)
                .wrapping_add((index - tiles.start) * steps * step_bytes),
            step_bytes,
        };
        for start in (0..inputs).step_by(chunk) {
            let range = start..inputs.min(start + chunk);
            let pairs = tiles.clone().zip(sums.iter_mut());
            if !is_shared {
                for (index, sums) in pairs {
                    let range = range.clone();
                    self.tile_of::<S, O>(part.source, output, index, range, ahead(index), sums);
                }
                continue;
            }
            let mut widened = [0.0; STRIP * CHUNK];
            let count = range.len().next_multiple_of(STEP);
            for (o, row) in widened.chunks_exact_mut(count).take(O).enumerate() {
                // SAFETY: the caller of `multiply` has the instruction set, and the source has these rows and inputs.
                unsafe { part.source.widen(output + o, range.clone(), row) };
            }
            let source = Widened {
                values: &widened,
                first: start,
                count,
            };
            for (index, sums) in pairs {
                let range = range.clone();
                self.tile_of::<Widened<'_>, O>(source, 0, index, range, ahead(index), sums);
            }
        }
        for (index, sums) in tiles.zip(sums.iter()) {
            self.store::<O>(output, self.rows(index), sums);
        }
        O
    }

    /// Rows of tile `index`: all have nearly one size.
    fn rows(&self, index: usize) -> Range<usize> {
        let (rows, count) = (self.shared.rows, self.shared.rows.div_ceil(TILE_ROWS));
        index * rows / count..(index + 1) * rows / count
    }

    /// Adds the products of the inputs `range` to the sums of tile `index`; `output` is the first row of `source`.
    fn tile_of<T: Source, const O: usize>(
        &self,
        source: T,
        output: usize,
        index: usize,
        range: Range<usize>,
        ahead: Ahead,
        sums: &mut Sums,
    ) {
        let (rows, stride) = (self.rows(index), self.shared.stride);
        let panel = Panel {
            values: &self.shared.values[rows.start * stride..rows.end * stride],
            stride,
        };
        match rows.len() {
            1 => tile::<T, O, 1>(source, output, panel, range, ahead, sums),
            2 => tile::<T, O, 2>(source, output, panel, range, ahead, sums),
            _ => tile::<T, O, 3>(source, output, panel, range, ahead, sums),
        }
    }

    fn store<const O: usize>(&self, output: usize, rows: Range<usize>, sums: &Sums) {
        let (part, count) = (self.part, rows.len());
        for (r, row) in rows.enumerate() {
            // SAFETY: pieces differ in their outputs, so these parts of a row do not overlap.
            let out = unsafe { part.out.range(row * part.outputs + output, O) };
            for (o, out) in out.iter_mut().enumerate() {
                // SAFETY: the caller of `multiply` has the instruction set.
                let total = unsafe { tile256::total(sums, o * count + r) };
                let total = total * part.source.scale(output + o);
                *out = total + part.bias.map_or(0.0, |bias| bias[output + o]);
            }
        }
    }
}

/// A tile, if its sums fit the registers: strips of 8 outputs have one row.
#[inline(always)]
fn tile<S: Source, const O: usize, const R: usize>(
    source: S,
    output: usize,
    panel: Panel<'_>,
    range: Range<usize>,
    ahead: Ahead,
    sums: &mut Sums,
) {
    if const { O * R <= SUMS } {
        // SAFETY: the caller of `multiply` has the instruction set, and the source has these rows and inputs.
        unsafe { tile256::tile::<S, O, R>(source, output, panel, range, ahead, sums) };
    }
}
