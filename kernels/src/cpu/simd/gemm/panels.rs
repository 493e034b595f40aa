//! Products of many rows over packed f32 panels, with the bits of [`super::blocking`].
//!
//! ```text
//! group of rows > strip of outputs (a thread) > chunk of the inputs, decoded once into a panel
//!     > class of the inputs: a run of the panel that stays in the first-level cache > tile of rows
//! ```
//!
//! [`super::blocking`] gives an element one accumulator vector, whose lane `c` sums the inputs of
//! class `c` (`input % lanes`) from first to last, and a tree that sums the lanes. Here the inputs
//! and weights are sorted by class, an outer product ([`Outer::tile`]) sums one class after the
//! other, and [`Outer::fold`] takes the same tree. Every element has the same chain of the same
//! operations, so the choice between the two may depend on the number of rows.
//!
//! Memory of a thread: a panel of a chunk, and the sums of
//! all classes of a group of rows: 0.8 MiB in AVX-512, 0.3 MiB in AVX2.
//!
//! Floor: `2 * rows * outputs * inputs` operations over the f32 rate of the multipliers.

use std::cell::RefCell;
use std::ops::Range;

use shared::dtype::DType;

use super::arithmetic::{Arithmetic, IN_ORDER, Source};
use super::blocking::Operand;
use crate::cpu::pool::{Disjoint, Pool};
use crate::cpu::simd::line::{LINE, Line, ZEROS, floats, resize};
use crate::cpu::simd::outer::{Ahead, Classes, MOST_LANES, Outer, Rows, Sums, WIDTH, tile_of};
use crate::tuning;

/// Inputs that are decoded at a time, before they are sorted.
const DECODED: usize = 256;
/// Lines of a decoded row: one more than needed, so that rows do not share their sets of the
/// cache.
const DECODED_LINES: usize = 4 * DECODED / LINE + 1;
/// Numbers of a line.
const LINE_FLOATS: usize = LINE / 4;

/// Scratch memory of a thread.
#[derive(Default)]
struct Local {
    /// `[MOST_LANES][DECODED_LINES]`.
    decoded: Vec<Line>,
    /// A chunk of a strip: `[class][step][2 vectors]`.
    panel: Vec<Line>,
    /// `[class][row][2 vectors]`.
    sums: Vec<Line>,
}

thread_local! {
    static LOCAL: RefCell<Local> = RefCell::default();
}

/// What the strips of a group of rows share.
struct Shared<'a> {
    rows: Rows<'a>,
    packed: &'a [f32],
    /// First row of the group, and its rows.
    first: usize,
    count: usize,
    tiles: usize,
}

impl Shared<'_> {
    /// Rows of a tile, counted in the group.
    fn tile(&self, index: usize) -> Range<usize> {
        index * self.count / self.tiles..(index + 1) * self.count / self.tiles
    }
}

/// Computes all operands from `x` `[rows, inputs]`, rounded to `dtype`.
///
/// # Safety
/// The machine has the instruction sets of the vector and of the arithmetic, whose accumulator is
/// one vector of f32; each source has its `outputs` rows of `inputs` weights.
pub(super) unsafe fn multiply<V: Outer, A: Arithmetic, S: Source<A>>(
    pool: &mut Pool,
    panels: &mut Vec<Line>,
    dtype: DType,
    (x, rows, inputs): (&[f32], usize, usize),
    operands: &[Operand<'_, S>],
) {
    let width = WIDTH * V::LANES;
    let strips_of = |(index, operand): (usize, &Operand<'_, S>)| {
        let outputs = operand.outputs;
        let strip = move |first| (index, first..outputs.min(first + width));
        (0..outputs).step_by(width).map(strip)
    };
    let strips: Vec<_> = operands.iter().enumerate().flat_map(strips_of).collect();
    let chunk = A::STEP * tuning::panel_steps(V::LANES);
    let groups = rows.div_ceil(tuning::PANEL_GROUP_ROWS);
    for group in 0..groups {
        let range = group * rows / groups..(group + 1) * rows / groups;
        let x = &x[range.start * inputs..range.end * inputs];
        let order = in_another_order(S::ORDER);
        let rows = Rows { x, width: inputs, dtype, order, classes: A::STEP, chunk };
        let (first, count, tiles) = (range.start, range.len(), range.len().div_ceil(V::ROWS));
        let mut shared = Shared { rows, packed: &[], first, count, tiles };
        resize(panels, rows.packed().div_ceil(LINE_FLOATS));
        let whole = Disjoint::new(floats(panels));
        pool.share(tiles, tuning::packing_is_parallel(x.len()), |index| {
            // SAFETY: the caller has the instruction set; tiles have different rows.
            unsafe { V::pack(rows, shared.tile(index), &whole) };
        });
        shared.packed = floats(panels);
        // Several strips in a row, so that a thread prefetches what it decodes next.
        let share = strips.len().div_ceil(8 * pool.threads()).max(1);
        pool.run(strips.len().div_ceil(share), |index| {
            let own = &strips[index * share..strips.len().min((index + 1) * share)];
            LOCAL.with_borrow_mut(|local| {
                for (i, (operand, outputs)) in own.iter().enumerate() {
                    let next = own.get(i + 1).unwrap_or(&own[i]);
                    let next = operands[next.0].source.row(next.1.start);
                    strip::<V, A, S>(&shared, &operands[*operand], outputs.clone(), next, local);
                }
            });
        });
    }
}

/// Weights of some outputs that are decoded next.
struct Next {
    /// First byte of the first output.
    start: *const u8,
    /// From one output to the next.
    row_bytes: usize,
    outputs: usize,
    /// Bytes of an output.
    bytes: usize,
}

impl Next {
    /// The share of tile `index` of `tiles`, prefetched over its steps.
    fn ahead(&self, index: usize, tiles: usize, steps: usize, sums: &[f32]) -> Ahead {
        let total = self.outputs * self.bytes;
        let at = index * total / tiles.max(1);
        let (row, column) = (at / self.bytes.max(1), at % self.bytes.max(1));
        Ahead {
            weights: self.start.wrapping_add(row * self.row_bytes + column),
            weight_bytes: total.div_ceil(tiles.max(1)).div_ceil(steps.max(1)),
            // The sums of the next tile follow those of this one.
            sums: sums.as_ptr_range().end.cast(),
            sum_bytes: size_of_val(sums).div_ceil(steps.max(1)),
        }
    }
}

/// Returns the order of a source if it is another one than that of the inputs.
fn in_another_order(order: [u8; 64]) -> Option<[u8; 64]> {
    (order != IN_ORDER).then_some(order)
}

/// Computes a strip of outputs of all rows of a group; the next one begins at `next`.
fn strip<V: Outer, A: Arithmetic, S: Source<A>>(
    shared: &Shared<'_>,
    operand: &Operand<'_, S>,
    outputs: Range<usize>,
    next: *const u8,
    local: &mut Local,
) {
    let (width, rows, inputs) = (WIDTH * V::LANES, shared.count, shared.rows.width);
    resize(&mut local.sums, (A::STEP * rows * width).div_ceil(LINE_FLOATS));
    let row_bytes = operand.row_bytes;
    let bytes = |inputs_of: usize| row_bytes * inputs_of / inputs;
    for start in (0..inputs).step_by(shared.rows.chunk) {
        let range = shared.rows.chunk(start);
        let steps = range.len().div_ceil(A::STEP);
        // A line between runs: those of a power of two would share their sets of the cache.
        let run = steps * width + LINE_FLOATS;
        let classes = Classes { count: A::STEP, stride: run };
        decode::<V, A, S>(operand.source, outputs.clone(), range.clone(), classes, local);
        let (next, later) = match range.end < inputs {
            true => {
                let own = operand.source.row(outputs.start).wrapping_add(bytes(range.end));
                (own, shared.rows.chunk(range.end))
            }
            false => (next, shared.rows.chunk(0)),
        };
        let (outputs, bytes) = (outputs.len(), bytes(later.len()));
        let next = Next { start: next, row_bytes, outputs, bytes };
        let (panel, sums) = (floats(&mut local.panel), floats(&mut local.sums));
        for class in 0..A::STEP {
            let weights = &panel[class * run..][..steps * width];
            for index in 0..shared.tiles {
                let tile = shared.tile(index);
                let (count, first) = (tile.len(), shared.rows.run(&range, class, &tile));
                let x = &shared.packed[first..first + count * steps];
                let out = &mut sums[(class * rows + tile.start) * width..][..count * width];
                let (call, calls) = (class * shared.tiles + index, A::STEP * shared.tiles);
                let ahead = next.ahead(call, calls, steps, out);
                let out = Sums { out: out.as_mut_ptr(), stride: width, is_new: start == 0 };
                // SAFETY: the caller of `multiply` has the instruction set; the slices hold the
                // steps and rows of the tile.
                unsafe { tile_of::<V>(count, steps, x.as_ptr(), weights.as_ptr(), out, ahead) };
            }
        }
    }
    store::<V, A, S>(shared, operand, outputs, floats(&mut local.sums));
}

/// Decodes the weights `range` of some outputs into the panel; zeros follow the last output.
fn decode<V: Outer, A: Arithmetic, S: Source<A>>(
    source: S,
    outputs: Range<usize>,
    range: Range<usize>,
    classes: Classes,
    local: &mut Local,
) {
    let Local { decoded, panel, .. } = local;
    resize(decoded, MOST_LANES * DECODED_LINES);
    resize(panel, (classes.count * classes.stride).div_ceil(LINE_FLOATS));
    for lane in (0..WIDTH * V::LANES).step_by(V::LANES) {
        let own = outputs.start + lane..outputs.end.min(outputs.start + lane + V::LANES);
        if own.len() < V::LANES {
            decoded.fill(ZEROS);
        }
        for start in range.clone().step_by(DECODED) {
            let part = start..range.end.min(start + DECODED);
            let count = part.len().next_multiple_of(A::STEP);
            for (output, row) in own.clone().zip(decoded.chunks_exact_mut(DECODED_LINES)) {
                // SAFETY: the caller of `multiply` has the instruction set, and the source has
                // these rows and inputs.
                unsafe {
                    A::decode(source, output, part.clone(), &mut row[..DECODED_LINES - 1]);
                };
            }
            let step = (start - range.start) / A::STEP;
            let to = &mut floats(panel)[step * WIDTH * V::LANES + lane..];
            let from = floats(decoded).as_ptr();
            let stride = DECODED_LINES * LINE_FLOATS;
            // SAFETY: the caller of `multiply` has the instruction set; the rows hold the part,
            // the panel its steps.
            unsafe { V::interleave(from, stride, count, to.as_mut_ptr(), classes) };
        }
    }
}

/// Epilogue of a strip: sums the classes, scales, adds the bias and stores the outputs.
fn store<V: Outer, A: Arithmetic, S: Source<A>>(
    shared: &Shared<'_>,
    operand: &Operand<'_, S>,
    outputs: Range<usize>,
    sums: &[f32],
) {
    let width = WIDTH * V::LANES;
    let classes = Classes { count: A::STEP, stride: shared.count * width };
    let mut totals = [0.0; WIDTH * MOST_LANES];
    let (mut scales, mut biases) = (totals, totals);
    for (i, output) in outputs.clone().enumerate() {
        scales[i] = operand.source.scale(output);
        biases[i] = operand.bias.map_or(0.0, |bias| bias[output]);
    }
    for row in 0..shared.count {
        let of_row = &sums[row * width..];
        // SAFETY: the caller of `multiply` has the instruction set; the sums have all classes of
        // the row.
        unsafe { V::fold(of_row.as_ptr(), classes, totals.as_mut_ptr()) };
        let start = (shared.first + row) * operand.outputs + outputs.start;
        // SAFETY: strips differ in their outputs, so these ranges of a row do not overlap.
        let out = unsafe { operand.out.range(start, outputs.len()) };
        let factors = scales.iter().zip(&biases);
        for ((out, total), (scale, bias)) in out.iter_mut().zip(&totals).zip(factors) {
            *out = total * scale + bias;
        }
    }
}
