//! Matrix product over packed inputs, for tiles of [`super::tile512`].
//!
//! ```text
//! piece of outputs (a thread) > group of rows that stays in the cache > strip of 4 outputs (8 for one row)
//!     > chunk of the inputs > tile of up to 6 rows
//! ```
//!
//! As everywhere, an element of the output has one accumulator vector that walks the inputs from first to last: a chunk
//! continues from the sums of the one before. While a strip is computed, the weights of the next one are asked for, spread
//! evenly over its steps, so that memory is read all the time and in the order in which it lies.

use std::ops::Range;

use super::linear::{Part, run_pieces};
use super::tile512::{self, Ahead, Decoded, Line, Panel, STEP, SUMS, Source, no_sums, row_lines};
use crate::cpu::pool::{Disjoint, Pool};
use crate::tuning;

/// Lines of a decoded chunk: 4 rows, two lines for each step.
const DECODED_LINES: usize = 4 * 2 * (tuning::PACKED_CHUNK / STEP);

/// Most rows of a tile.
const TILE_ROWS: usize = 6;

/// What all pieces share.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    inputs: usize,
    panels: &'a [Line],
    tiles: Tiles,
}

/// A piece of one part.
struct Task<'a, S> {
    part: &'a Part<'a, S>,
    shared: Inputs<'a>,
}

/// Rows in tiles of nearly one size.
#[derive(Clone, Copy)]
struct Tiles {
    rows: usize,
    count: usize,
}

impl Tiles {
    fn new(rows: usize) -> Tiles {
        Tiles {
            rows,
            count: rows.div_ceil(TILE_ROWS),
        }
    }

    /// Rows of tile `index`.
    fn range(self, index: usize) -> Range<usize> {
        index * self.rows / self.count..(index + 1) * self.rows / self.count
    }
}

/// Computes all parts from `x` `[rows, inputs]`, which is packed once; their pieces are one heap of work.
///
/// # Safety
/// The machine has the instruction set of [`tile512::tile`]; each source has its `outputs` rows of `inputs` weights.
pub(super) unsafe fn multiply<S: Source>(
    pool: &mut Pool,
    panels: &mut Vec<Line>,
    (x, rows, inputs): (&[f32], usize, usize),
    parts: &[Part<'_, S>],
) {
    if rows == 0 {
        return;
    }
    let tiles = Tiles::new(rows);
    let lines = row_lines(inputs);
    tile512::resize(panels, rows * lines);
    let whole = Disjoint::new(&mut panels[..]);
    let pack = |index: usize| {
        let tile = tiles.range(index);
        // SAFETY: tiles have different rows.
        let panel = unsafe { whole.range(tile.start * lines, tile.len() * lines) };
        let x = &x[tile.start * inputs..tile.end * inputs];
        // SAFETY: the caller has the instruction set.
        unsafe { tile512::pack::<S>(x, inputs, tile.len(), panel) };
    };
    if tuning::packing_is_parallel(rows * inputs) {
        pool.run(tiles.count, pack);
    } else {
        (0..tiles.count).for_each(pack);
    }
    let shared = Inputs {
        inputs,
        panels,
        tiles,
    };
    let outputs: usize = parts.iter().map(|part| part.outputs).sum();
    let row_bytes = parts.iter().map(|part| part.row_bytes).max().unwrap_or(0);
    let split = tuning::linear_split(outputs, row_bytes, rows, pool.threads());
    run_pieces(
        pool,
        parts,
        |part| part.outputs,
        &split,
        |part, outputs| {
            Task { part, shared }.piece(outputs);
        },
    );
}

impl<S: Source> Task<'_, S> {
    fn piece(&self, outputs: Range<usize>) {
        let mut sums = [no_sums(); tuning::PACKED_TILES];
        let group = tuning::packed_tiles(self.shared.inputs, self.shared.tiles.count);
        for first in (0..self.shared.tiles.count).step_by(group) {
            let tiles = first..self.shared.tiles.count.min(first + group);
            let sums = &mut sums[..tiles.len()];
            let mut output = outputs.start;
            while output < outputs.end {
                output += match outputs.end - output {
                    left if left >= 8 && self.shared.tiles.rows == 1 => {
                        self.strip::<8>(output, tiles.clone(), sums)
                    }
                    left if left >= 4 => self.strip::<4>(output, tiles.clone(), sums),
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
        sums: &mut [tile512::Sums],
    ) -> usize {
        let inputs = self.shared.inputs;
        let steps = inputs.div_ceil(STEP);
        let chunk = if tiles.len() == 1 {
            steps
        } else {
            tuning::PACKED_CHUNK / STEP
        };
        // The next strip begins where this one ends; each tile asks for its share.
        let step_bytes = (O * self.part.row_bytes).div_ceil(steps * tiles.len());
        let ahead = |index: usize| Ahead {
            start: self
                .part
                .source
                .row(output + O)
                .wrapping_add((index - tiles.start) * steps * step_bytes),
            step_bytes,
        };
        for start in (0..steps).step_by(chunk) {
            let steps = start..steps.min(start + chunk);
            let pairs = tiles.clone().zip(sums.iter_mut());
            if !S::DECODES || tiles.len() == 1 {
                for (index, sums) in pairs {
                    let steps = steps.clone();
                    self.tile_of::<S, O>(
                        self.part.source,
                        output,
                        index,
                        steps,
                        ahead(index),
                        sums,
                    );
                }
                continue;
            }
            let mut decoded = [tile512::ZEROS; DECODED_LINES];
            let lines = &mut decoded[..2 * O * steps.len()];
            let outputs = output..output + O;
            // SAFETY: the caller of `multiply` has the instruction set, and the source has these rows and steps.
            unsafe {
                tile512::decode(self.part.source, outputs, steps.clone(), inputs, lines);
            }
            let source = Decoded {
                lines,
                first: start,
                count: steps.len(),
            };
            for (index, sums) in pairs {
                self.tile_of::<Decoded<'_>, O>(source, 0, index, steps.clone(), ahead(index), sums);
            }
        }
        for (index, sums) in tiles.zip(sums.iter()) {
            self.store::<O>(output, self.shared.tiles.range(index), sums);
        }
        O
    }

    /// Adds the products of `steps` to the sums of tile `index`; `output` is the first row of `source`.
    fn tile_of<T: Source, const O: usize>(
        &self,
        source: T,
        output: usize,
        index: usize,
        steps: Range<usize>,
        ahead: Ahead,
        sums: &mut tile512::Sums,
    ) {
        let Inputs {
            inputs,
            panels,
            tiles,
        } = self.shared;
        let (rows, lines) = (tiles.range(index), row_lines(inputs));
        let panel = Panel {
            lines: &panels[rows.start * lines..rows.end * lines],
            inputs,
        };
        match rows.len() {
            1 => tile::<T, O, 1>(source, output, panel, steps, ahead, sums),
            2 => tile::<T, O, 2>(source, output, panel, steps, ahead, sums),
            3 => tile::<T, O, 3>(source, output, panel, steps, ahead, sums),
            4 => tile::<T, O, 4>(source, output, panel, steps, ahead, sums),
            5 => tile::<T, O, 5>(source, output, panel, steps, ahead, sums),
            _ => tile::<T, O, 6>(source, output, panel, steps, ahead, sums),
        }
    }

    fn store<const O: usize>(&self, output: usize, rows: Range<usize>, sums: &tile512::Sums) {
        let count = rows.len();
        for (r, row) in rows.enumerate() {
            // SAFETY: the caller of `multiply` has the instruction set.
            let totals = unsafe { tile512::totals::<O>(sums, r, count) };
            let part = self.part;
            // SAFETY: pieces differ in their outputs, so these parts of a row do not overlap.
            let out = unsafe { part.out.range(row * part.outputs + output, O) };
            for (o, out) in out.iter_mut().enumerate() {
                let total = totals[o] * part.source.scale(output + o);
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
    steps: Range<usize>,
    ahead: Ahead,
    sums: &mut tile512::Sums,
) {
    if const { O * R <= SUMS } {
        // SAFETY: the caller of `multiply` has the instruction set, and the source has these rows and steps.
        unsafe { tile512::tile::<S, O, R>(source, output, panel, steps, ahead, sums) };
    }
}
