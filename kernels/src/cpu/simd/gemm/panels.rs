//! Products of many rows over packed panels, with the bits of [`super::blocking`].
//!
//! ```text
//! group of rows > strip of outputs (a thread) > chunk of the inputs, decoded once into a panel
//!     > tile of rows, whose sums stay in the first-level cache > class of the inputs: a run of the panel
//! ```
//!
//! An item is an f32, or a pair of bfloat16. [`super::blocking`] gives an element one accumulator vector, whose
//! lane `c` sums the items of class `c` (`item % lanes`) from first to last, and a tree that sums the lanes. Here
//! the inputs and weights are sorted by class, an outer product ([`Outer::tile`]) sums one class after the
//! other, and [`Outer::fold`] takes the same tree. Every element has the same chain of the same
//! operations, so the choice between the two may depend on the number of rows.
//!
//! Memory of a thread: a panel of a chunk (256 KiB in AVX-512, 128 KiB in AVX2), and the sums of a tile, or of all tiles of a group
//! where the inputs are several chunks (1 MiB in AVX-512, 256 KiB in AVX2).
//!
//! Floor: `2 * rows * outputs * inputs` operations over the rate of the multipliers.

use std::cell::RefCell;
use std::ops::Range;

use shared::dtype::DType;

use super::arithmetic::{Arithmetic, IN_ORDER, MatrixSource};
use super::blocking::{Operand, Unpacked};
use crate::cpu::pool::{Disjoint, ThreadPool};
use crate::cpu::simd::line::{CacheLine, LINE, ZEROS, floats, resize};
use crate::cpu::simd::outer::{
    Classes, InputRows, MOST_LANES, Outer, OuterPrefetch, Sums, WIDTH, tile_of,
};
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
struct PanelScratch {
    /// `[MOST_LANES][DECODED_LINES]`.
    decoded: Vec<CacheLine>,
    /// A chunk of a strip: `[class][step][2 vectors]`.
    panel: Vec<CacheLine>,
    /// `[tile][class][row][2 vectors]`.
    sums: Vec<CacheLine>,
}

thread_local! {
    static LOCAL: RefCell<PanelScratch> = RefCell::default();
}

/// What the strips of a group of rows share.
struct StripGroup<'a> {
    rows: InputRows<'a>,
    packed: &'a [f32],
    /// First row of the group, and its rows.
    first: usize,
    count: usize,
    tiles: usize,
}

impl StripGroup<'_> {
    /// Rows of a tile, counted in the group.
    fn tile(&self, index: usize) -> Range<usize> {
        index * self.count / self.tiles..(index + 1) * self.count / self.tiles
    }
}

/// Computes all operands from inputs, rounded to `dtype`.
///
/// # Safety
/// The machine has the instruction sets of the vector and of the arithmetic, whose accumulator is
/// one vector of f32 and whose decoded weights are items of the vector; each source has its
/// `outputs` rows of `inputs` weights.
pub(super) unsafe fn multiply<V: Outer, A: Arithmetic, S: MatrixSource<A>>(
    pool: &mut ThreadPool,
    panels: &mut Vec<CacheLine>,
    dtype: DType,
    from: Unpacked<'_>,
    operands: &[Operand<'_, S>],
) {
    let Unpacked { x, rows, inputs } = from;
    let width = WIDTH * V::LANES;
    let strips_of = |(index, operand): (usize, &Operand<'_, S>)| {
        let outputs = operand.outputs;
        let strip = move |first| (index, first..outputs.min(first + width));
        (0..outputs).step_by(width).map(strip)
    };
    let strips: Vec<_> = operands.iter().enumerate().flat_map(strips_of).collect();
    let classes = classes::<V, A>();
    let chunk = V::ITEM * classes * tuning::panel_steps(V::LANES);
    let groups = rows.div_ceil(tuning::PANEL_GROUP_ROWS);
    for group in 0..groups {
        let range = group * rows / groups..(group + 1) * rows / groups;
        let x = &x[range.start * inputs..range.end * inputs];
        let order = in_another_order(S::ORDER);
        let (width, item, step) = (inputs, V::ITEM, A::STEP);
        let rows = InputRows { x, width, dtype, order, item, classes, step, chunk };
        let (first, count, tiles) = (range.start, range.len(), range.len().div_ceil(V::ROWS));
        let mut shared = StripGroup { rows, packed: &[], first, count, tiles };
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
    fn ahead(&self, index: usize, tiles: usize, steps: usize, sums: &[f32]) -> OuterPrefetch {
        let total = self.outputs * self.bytes;
        let at = index * total / tiles.max(1);
        let (row, column) = (at / self.bytes.max(1), at % self.bytes.max(1));
        OuterPrefetch {
            weights: self.start.wrapping_add(row * self.row_bytes + column),
            weight_bytes: total.div_ceil(tiles.max(1)).div_ceil(steps.max(1)),
            // The sums of the next class follow those of this one.
            sums: sums.as_ptr_range().end.cast(),
            sum_bytes: size_of_val(sums).div_ceil(steps.max(1)),
        }
    }
}

/// Lanes of an accumulator, each of which sums a class of the inputs.
const fn classes<V: Outer, A: Arithmetic>() -> usize {
    assert!(A::STEP_BYTES * V::ITEM == 4 * A::STEP, "a decoded step is one of items");
    A::STEP / A::HALVES / V::ITEM
}

/// Returns the order of a source if it is another one than that of the inputs.
fn in_another_order(order: [u8; 64]) -> Option<[u8; 64]> {
    (order != IN_ORDER).then_some(order)
}

/// Computes a strip of outputs of all rows of a group; the next one begins at `next`.
fn strip<V: Outer, A: Arithmetic, S: MatrixSource<A>>(
    shared: &StripGroup<'_>,
    operand: &Operand<'_, S>,
    outputs: Range<usize>,
    next: *const u8,
    local: &mut PanelScratch,
) {
    let (width, inputs) = (WIDTH * V::LANES, shared.rows.width);
    let (count, row_bytes) = (shared.rows.classes, operand.row_bytes);
    // A line between classes: those of a power of two would share their sets of the cache.
    let sums_of = Classes { count, stride: V::ROWS * width + LINE_FLOATS };
    // Sums are kept from chunk to chunk; those of a single one stay in the first-level cache.
    let kept = if shared.rows.chunk < inputs { count * sums_of.stride } else { 0 };
    resize(&mut local.sums, (kept * shared.tiles).max(count * sums_of.stride) / LINE_FLOATS);
    let bytes = |inputs_of: usize| row_bytes * inputs_of / inputs;
    let factors = Factors::new::<A, S>(operand, outputs.clone());
    for start in (0..inputs).step_by(shared.rows.chunk) {
        let range = shared.rows.chunk(start);
        let steps = shared.rows.steps(range.len());
        let run = steps * width + LINE_FLOATS;
        let classes = Classes { count, stride: run };
        decode::<V, A, S>(operand.source, outputs.clone(), range.clone(), classes, local);
        let (next, later) = match range.end < inputs {
            true => {
                let own = operand.source.row(outputs.start).wrapping_add(bytes(range.end));
                (own, shared.rows.chunk(range.end))
            }
            false => (next, shared.rows.chunk(0)),
        };
        let bytes = bytes(later.len());
        let next = Next { start: next, row_bytes, outputs: outputs.len(), bytes };
        let (panel, sums) = (floats(&mut local.panel), floats(&mut local.sums));
        for index in 0..shared.tiles {
            let (tile, sums) = (shared.tile(index), &mut sums[index * kept..]);
            for class in 0..count {
                let weights = &panel[class * run..][..steps * width];
                let first = shared.rows.run(&range, class, &tile);
                let x = &shared.packed[first..first + tile.len() * steps];
                let out = &mut sums[class * sums_of.stride..][..tile.len() * width];
                let ahead = next.ahead(index * count + class, count * shared.tiles, steps, out);
                let out = Sums { out: out.as_mut_ptr(), stride: width, is_new: start == 0 };
                // SAFETY: the caller of `multiply` has the instruction set; the slices hold the
                // steps and rows of the tile.
                unsafe {
                    tile_of::<V>(tile.len(), steps, x.as_ptr(), weights.as_ptr(), out, ahead)
                };
            }
            if range.end == inputs {
                store::<V, S>(
                    shared.first,
                    tile,
                    operand,
                    outputs.clone(),
                    &factors,
                    sums,
                    sums_of,
                );
            }
        }
    }
}

/// Decodes the weights `range` of some outputs into the panel; zeros follow the last output.
fn decode<V: Outer, A: Arithmetic, S: MatrixSource<A>>(
    source: S,
    outputs: Range<usize>,
    range: Range<usize>,
    classes: Classes,
    local: &mut PanelScratch,
) {
    let PanelScratch { decoded, panel, .. } = local;
    resize(decoded, MOST_LANES * DECODED_LINES);
    resize(panel, (classes.count * classes.stride).div_ceil(LINE_FLOATS));
    for lane in (0..WIDTH * V::LANES).step_by(V::LANES) {
        let own = outputs.start + lane..outputs.end.min(outputs.start + lane + V::LANES);
        if own.len() < V::LANES {
            decoded.fill(ZEROS);
        }
        for start in range.clone().step_by(DECODED) {
            let part = start..range.end.min(start + DECODED);
            let count = part.len().next_multiple_of(A::STEP) / V::ITEM;
            for (output, row) in own.clone().zip(decoded.chunks_exact_mut(DECODED_LINES)) {
                // SAFETY: the caller of `multiply` has the instruction set, and the source has
                // these rows and inputs.
                unsafe {
                    A::decode(source, output, part.clone(), &mut row[..DECODED_LINES - 1]);
                };
            }
            let step = (start - range.start) / (V::ITEM * classes.count);
            let to = &mut floats(panel)[step * WIDTH * V::LANES + lane..];
            let from = floats(decoded).as_ptr();
            let stride = DECODED_LINES * LINE_FLOATS;
            // SAFETY: the caller of `multiply` has the instruction set; the rows hold the part,
            // the panel its steps.
            unsafe { V::interleave(from, stride, count, to.as_mut_ptr(), classes) };
        }
    }
}

/// What the sums of a strip are multiplied with, and what is added to them.
struct Factors {
    scales: [f32; WIDTH * MOST_LANES],
    biases: [f32; WIDTH * MOST_LANES],
}

impl Factors {
    fn new<A: Arithmetic, S: MatrixSource<A>>(
        operand: &Operand<'_, S>,
        outputs: Range<usize>,
    ) -> Factors {
        let none = [0.0; WIDTH * MOST_LANES];
        let mut factors = Factors { scales: none, biases: none };
        for (i, output) in outputs.enumerate() {
            factors.scales[i] = operand.source.scale(output);
            factors.biases[i] = operand.bias.map_or(0.0, |bias| bias[output]);
        }
        factors
    }
}

/// Epilogue of a tile whose first row is row `tile.start` of the group: sums the classes, scales, adds the bias
/// and stores the outputs.
fn store<V: Outer, S>(
    first: usize,
    tile: Range<usize>,
    operand: &Operand<'_, S>,
    outputs: Range<usize>,
    factors: &Factors,
    sums: &[f32],
    classes: Classes,
) {
    let mut totals = [0.0; WIDTH * MOST_LANES];
    for (i, row) in tile.enumerate() {
        let of_row = &sums[i * WIDTH * V::LANES..];
        // SAFETY: the caller of `multiply` has the instruction set; the sums have all classes of
        // the row.
        unsafe { V::fold(of_row.as_ptr(), classes, totals.as_mut_ptr()) };
        let start = (first + row) * operand.outputs + outputs.start;
        // SAFETY: strips differ in their outputs, so these ranges of a row do not overlap.
        let out = unsafe { operand.out.range(start, outputs.len()) };
        let factors = factors.scales.iter().zip(&factors.biases);
        for ((out, total), (scale, bias)) in out.iter_mut().zip(&totals).zip(factors) {
            *out = total * scale + bias;
        }
    }
}
