//! Product with a transposed matrix over packed f32 panels: the gradient of a matrix product where
//! the machine has no products of bfloat16 pairs.
//!
//! ```text
//! piece of columns (a thread) > chunk of the matrix's rows, widened once into panels of two vectors of
//!     columns > panel, which stays in the first-level cache > tile of rows of gradients
//! ```
//!
//! An element of the output is one chain of multiply-adds over the rows of the matrix, from first to
//! last: the same as in [`super::gradient`], whatever the tile, the piece and the number of rows.
//!
//! Shapes: grad `[rows, outputs]`, matrix `[outputs, inputs]`, out `[rows, inputs]`, all f32. Floor:
//! `2 * rows * outputs * inputs` operations over the f32 rate of the multipliers.

use std::cell::RefCell;
use std::ops::Range;

use shared::dtype::DType;

use super::Scratch;
#[cfg(target_arch = "x86_64")]
use super::gemm::nf4::Nf4;
use super::line::{CacheLine, LINE, ZEROS, floats, prefetch, resize};
use super::outer::{InputRows, MOST_LANES, OuterPrefetch, Sums, WIDTH, Widen, tile_of};
use crate::cpu::pool::{Disjoint, ThreadPool};
use crate::ops::LinearGrad;
use crate::tensor::{Format, WeightView};
use crate::tuning;

/// Columns of a piece: long enough parts of the matrix's rows for the prefetchers, and panels that
/// stay in the second-level cache.
const COLUMNS: usize = 1024;
/// How many rows of the matrix ahead of the widening are prefetched.
const ROWS_AHEAD: usize = 2;
/// Numbers of the largest tile.
const EDGE: usize = 12 * WIDTH * MOST_LANES;
/// Numbers of a line of the cache.
const LINE_FLOATS: usize = LINE / 4;

thread_local! {
    /// Widened rows of a chunk: `[panel][row][2 vectors]`.
    static PANELS: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
}

/// What all pieces share.
struct PanelArguments<'a> {
    weight: WeightView<'a>,
    /// Gradients of all rows.
    rows: InputRows<'a>,
    packed: &'a [f32],
    count: usize,
    tiles: usize,
    out: Disjoint<'a, f32>,
}

impl PanelArguments<'_> {
    /// Rows of a tile.
    fn tile(&self, index: usize) -> Range<usize> {
        index * self.count / self.tiles..(index + 1) * self.count / self.tiles
    }
}

/// Computes the gradient.
///
/// # Safety
/// The machine has the instruction set of the vector.
pub(super) unsafe fn multiply<V: Widen>(
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    args: LinearGrad<'_, [f32], WeightView<'_>>,
) {
    let (weight, count) = (args.weight, args.rows);
    let (inputs, outputs) = (weight.inputs(), weight.outputs());
    if count == 0 || inputs == 0 {
        return;
    }
    let chunk = tuning::panel_steps(V::LANES).next_multiple_of(64);
    let x = &args.grad[..count * outputs];
    let (width, dtype) = (outputs, DType::F32);
    let rows = InputRows { x, width, dtype, order: None, item: 1, classes: 1, step: 1, chunk };
    let out = Disjoint::new(&mut args.out[..count * inputs]);
    let tiles = count.div_ceil(V::ROWS);
    let mut shared = PanelArguments { weight, rows, packed: &[], count, tiles, out };
    let panels = &mut scratch.panels;
    resize(panels, rows.packed().div_ceil(LINE_FLOATS));
    let whole = Disjoint::new(floats(panels));
    pool.share(tiles, tuning::packing_is_parallel(x.len()), |index| {
        // SAFETY: the caller has the instruction set; tiles have different rows.
        unsafe { V::pack(rows, shared.tile(index), &whole) };
    });
    shared.packed = floats(panels);
    let piece = inputs.div_ceil(pool.threads()).next_multiple_of(64).min(COLUMNS);
    pool.run(inputs.div_ceil(piece), |index| {
        let columns = index * piece..inputs.min((index + 1) * piece);
        PANELS.with_borrow_mut(|panels| columns_of::<V>(&shared, columns, panels));
    });
}

/// Computes some columns of all rows.
fn columns_of<V: Widen>(
    shared: &PanelArguments<'_>,
    columns: Range<usize>,
    panels: &mut Vec<CacheLine>,
) {
    let (outputs, width) = (shared.rows.width, WIDTH * V::LANES);
    if outputs == 0 {
        let inputs = shared.weight.inputs();
        for row in 0..shared.count {
            // SAFETY: pieces differ in their columns; the borrow ends here.
            unsafe { shared.out.range(row * inputs + columns.start, columns.len()) }.fill(0.0);
        }
    }
    for start in (0..outputs).step_by(shared.rows.chunk.max(1)) {
        let chunk = shared.rows.chunk(start);
        // A line between panels: those of a power of two would share their sets of the cache.
        let stride = chunk.len() * width + LINE_FLOATS;
        resize(panels, (columns.len().div_ceil(width) * stride).div_ceil(LINE_FLOATS));
        widen::<V>(shared.weight, chunk.clone(), columns.clone(), stride, floats(panels));
        let panels = floats(panels).chunks_exact(stride);
        for (first, panel) in columns.clone().step_by(width).zip(panels) {
            for index in 0..shared.tiles {
                let at = first..columns.end.min(first + width);
                add::<V>(shared, chunk.clone(), shared.tile(index), at, panel);
            }
        }
    }
}

/// Widens some columns of the rows of a chunk into panels. What follows the last column is not
/// read.
fn widen<V: Widen>(
    weight: WeightView<'_>,
    chunk: Range<usize>,
    columns: Range<usize>,
    stride: usize,
    panels: &mut [f32],
) {
    let (inputs, count) = (weight.inputs(), columns.len());
    let whole = match weight.format() {
        Format::Plain => count / V::LANES * V::LANES,
        Format::Int8(_) | Format::Nf4(_) => 0,
    };
    let (size, row_bytes) = (weight.dtype().size_bytes(), weight.row_bytes());
    let bytes = |inputs_of: usize| row_bytes * inputs_of / inputs;
    let first = weight.bytes().as_ptr().wrapping_add(bytes(columns.start));
    let mut decoded = [ZEROS; COLUMNS / LINE_FLOATS];
    for (step, row) in chunk.enumerate() {
        let ahead = first.wrapping_add((row + ROWS_AHEAD) * row_bytes);
        for line in (0..bytes(count)).step_by(LINE) {
            prefetch::<true>(ahead.wrapping_add(line));
        }
        let to = panels[step * WIDTH * V::LANES..].as_mut_ptr();
        if whole > 0 {
            let from = first.wrapping_add(row * inputs * size);
            // SAFETY: the caller of `multiply` has the instruction set; the row has the columns,
            // the panels the step.
            unsafe { V::widen(weight.dtype(), from, 0..whole, to, stride) };
        }
        if whole < count {
            let rest = columns.start + whole..columns.end;
            match weight.format() {
                #[cfg(target_arch = "x86_64")]
                Format::Nf4(parts) if parts.is_grouped() && rest.len().is_multiple_of(64) => {
                    let source = Nf4 { parts, inputs, dtype: weight.dtype() };
                    // SAFETY: as above; rows and columns are whole groups.
                    unsafe { source.widen(row, rest, &mut decoded) };
                }
                _ => {
                    let to = &mut floats(&mut decoded)[..rest.len()];
                    // SAFETY: as above.
                    unsafe { V::decode(&weight, row, rest.start, to) };
                }
            }
            let (from, rest) = (decoded.as_ptr().cast(), whole..count.next_multiple_of(V::LANES));
            // SAFETY: as above.
            unsafe { V::widen(DType::F32, from, rest, to, stride) };
        }
    }
}

/// Adds the products of a chunk to a tile of at most two vectors of columns.
fn add<V: Widen>(
    shared: &PanelArguments<'_>,
    chunk: Range<usize>,
    tile: Range<usize>,
    columns: Range<usize>,
    panel: &[f32],
) {
    let (inputs, width, count) = (shared.weight.inputs(), WIDTH * V::LANES, tile.len());
    let (steps, first, is_new) = (chunk.len(), shared.rows.run(&chunk, 0, &tile), chunk.start == 0);
    let x = &shared.packed[first..first + count * steps];
    let panel = &panel[..steps * width];
    // Rows that are widened prefetch the weights; a tile has nothing to prefetch.
    let none = panel.as_ptr().cast();
    let ahead = OuterPrefetch { weights: none, weight_bytes: 0, sums: none, sum_bytes: 0 };
    if columns.len() == width {
        let all = (count - 1) * inputs + width;
        let start = tile.start * inputs + columns.start;
        let out = Sums { out: shared.out.pointer(start, all), stride: inputs, is_new };
        // SAFETY: the caller of `multiply` has the instruction set; the slices hold the steps; the
        // tile reads and writes its own columns alone, in which pieces differ.
        unsafe { tile_of::<V>(count, steps, x.as_ptr(), panel.as_ptr(), out, ahead) };
        return;
    }
    let mut edge = [0.0; EDGE];
    // SAFETY: pieces differ in their columns; each borrow ends with its row.
    let row = |row: usize| unsafe { shared.out.range(row * inputs + columns.start, columns.len()) };
    if !is_new {
        for (at, edge) in tile.clone().zip(edge.chunks_exact_mut(width)) {
            edge[..columns.len()].copy_from_slice(row(at));
        }
    }
    let out = Sums { out: edge.as_mut_ptr(), stride: width, is_new };
    // SAFETY: as above.
    unsafe { tile_of::<V>(count, steps, x.as_ptr(), panel.as_ptr(), out, ahead) };
    for (at, edge) in tile.zip(edge.chunks_exact(width)) {
        row(at).copy_from_slice(&edge[..columns.len()]);
    }
}
