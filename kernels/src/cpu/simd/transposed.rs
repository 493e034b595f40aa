//! Product with a transposed matrix by products of bfloat16 pairs: the gradient of a matrix product, `out = round(grad) W`.
//!
//! ```text
//! piece of columns (a thread) > chunk of the matrix's rows, interleaved by two into the cache > 64 columns
//!     > tile of up to 6 rows of gradients x 4 vectors of columns > pairs of the chunk
//! ```
//!
//! Two rows of the matrix side by side are what `vdpbf16ps` multiplies with two neighbours of a gradient, so a matrix that lies
//! row-major needs no other packing. An element of the output is the sum of its chunks from first to last, whatever the tile
//! and the piece.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use super::Scratch;
use super::tile512::{self, Bf16, Int8, LINE, Line, Nf4, STEP, Source};
use crate::cpu::pool::{Disjoint, Pool};
use crate::ops::LinearGrad;
use crate::tensor::{Format, WeightView};
use crate::tuning;

/// Rows of the matrix of a chunk, interleaved by two.
const CHUNK: usize = 256;
/// Most rows of gradients of a tile: with four vectors of columns each they fit 32 registers.
const TILE_ROWS: usize = 6;
/// How many rows ahead of the interleaving the matrix is asked for.
const AHEAD: usize = 8;

thread_local! {
    /// The interleaved chunk of this thread: `[64 columns each][pairs][4 vectors]`.
    static PACKED: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// What all pieces share.
struct Task<'a, S> {
    source: S,
    inputs: usize,
    outputs: usize,
    /// Rounded gradients `[rows, stride]`, zeros after the outputs.
    grad: &'a [u8],
    /// Bytes of a row of them.
    stride: usize,
    rows: usize,
    out: Disjoint<'a, f32>,
}

/// Computes the gradient if the matrix is one that this path takes; else gives `args` back.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL and BF16.
pub(super) unsafe fn multiply<'a>(
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: LinearGrad<'a, [f32], WeightView<'a>>,
) -> Option<LinearGrad<'a, [f32], WeightView<'a>>> {
    let (weight, inputs) = (args.weight, args.weight.inputs());
    match weight.format() {
        Format::Plain => {
            let bytes = weight.bytes();
            run(
                pool,
                scratch,
                args,
                Bf16 { bytes, inputs },
                None::<fn(usize) -> f32>,
            );
        }
        Format::Int8(parts) => {
            // The codes are exact in bfloat16; the scale of a row goes to what the row is multiplied with.
            let codes = parts.codes;
            let scale = Some(|output| parts.scale(output));
            run(pool, scratch, args, Int8 { codes, inputs }, scale);
        }
        Format::Nf4(parts) if inputs.is_multiple_of(STEP) => {
            run(
                pool,
                scratch,
                args,
                Nf4 { parts, inputs },
                None::<fn(usize) -> f32>,
            );
        }
        Format::Nf4(_) => return Some(args),
    }
    None
}

fn run<S: Source>(
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: LinearGrad<'_, [f32], WeightView<'_>>,
    source: S,
    scale: Option<impl Fn(usize) -> f32 + Sync>,
) {
    let (inputs, outputs, rows) = (args.weight.inputs(), args.weight.outputs(), args.rows);
    // One line more than needed: rows of a power of two would share their places in the first-level cache.
    let stride = (2 * outputs).next_multiple_of(LINE) + LINE;
    scratch.inputs.resize(rows * stride, 0);
    let scales: Option<Vec<f32>> = scale.map(|scale| (0..outputs).map(scale).collect());
    let grad = args.grad;
    let prepare = |row: usize, bytes: &mut [u8]| {
        let grad = &grad[row * outputs..(row + 1) * outputs];
        // SAFETY: the caller of `multiply` has the instruction set.
        unsafe { tile512::round_row(grad, scales.as_deref(), bytes) };
    };
    if tuning::packing_is_parallel(rows * outputs) {
        pool.chunks(&mut scratch.inputs, stride, prepare);
    } else {
        let parts = scratch.inputs.chunks_exact_mut(stride);
        parts
            .enumerate()
            .for_each(|(row, bytes)| prepare(row, bytes));
    }
    let task = Task {
        source,
        inputs,
        outputs,
        grad: &scratch.inputs,
        stride,
        rows,
        out: Disjoint::new(&mut args.out[..rows * inputs]),
    };
    let piece = tuning::transposed_piece(inputs, pool.threads());
    pool.run(inputs.div_ceil(piece), |index| {
        PACKED.with_borrow_mut(|packed| {
            task.piece(index * piece..inputs.min((index + 1) * piece), packed);
        });
    });
}

impl<S: Source> Task<'_, S> {
    /// Some columns, from a multiple of 64 on, of all rows.
    fn piece(&self, columns: Range<usize>, packed: &mut Vec<Line>) {
        let steps = columns.start / STEP..columns.end.div_ceil(STEP);
        let tiles = self.rows.div_ceil(TILE_ROWS);
        for first in (0..self.outputs).step_by(CHUNK) {
            let chunk = first..self.outputs.min(first + CHUNK);
            let lines = 4 * chunk.len().div_ceil(2);
            tile512::resize(packed, steps.len() * lines);
            // SAFETY: the caller of `multiply` has the instruction set; rows and steps exist.
            unsafe {
                interleave(
                    self.source,
                    self.inputs,
                    chunk.clone(),
                    steps.clone(),
                    packed,
                )
            };
            for (step, lines) in steps.clone().zip(packed.chunks_exact(lines)) {
                for tile in 0..tiles {
                    let rows = tile * self.rows / tiles..(tile + 1) * self.rows / tiles;
                    match rows.len() {
                        1 => self.tile::<1>(lines, chunk.start, step, rows.start),
                        2 => self.tile::<2>(lines, chunk.start, step, rows.start),
                        3 => self.tile::<3>(lines, chunk.start, step, rows.start),
                        4 => self.tile::<4>(lines, chunk.start, step, rows.start),
                        5 => self.tile::<5>(lines, chunk.start, step, rows.start),
                        _ => self.tile::<6>(lines, chunk.start, step, rows.start),
                    }
                }
            }
        }
    }

    /// Adds the chunk from row `first` of the matrix to `R` rows of the output from `row` on, in the 64 columns of `step`.
    fn tile<const R: usize>(&self, lines: &[Line], first: usize, step: usize, row: usize) {
        let pairs = lines.len() / 4;
        let start = row * self.stride + 2 * first;
        let last = start + (R - 1) * self.stride + 4 * pairs;
        let grad = &self.grad[start..last];
        // SAFETY: the caller of `multiply` has the instruction set; `grad` reaches to the last pair of the last row.
        let sums = unsafe { tile::<S, R>(lines, grad, self.stride) };
        let columns = step * STEP..self.inputs.min((step + 1) * STEP);
        for (r, sums) in sums.iter().enumerate() {
            let start = (row + r) * self.inputs + columns.start;
            // SAFETY: pieces differ in their columns; the borrow ends here.
            let out = unsafe { self.out.range(start, columns.len()) };
            if first == 0 {
                out.copy_from_slice(&sums.0[..columns.len()]);
            } else {
                out.iter_mut()
                    .zip(&sums.0)
                    .for_each(|(out, sum)| *out += sum);
            }
        }
    }
}

/// 64 columns in their order.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Columns([f32; STEP]);

/// Rows `chunk` of the matrix by two, of the 64 columns of each of `steps`: lower and upper halves of the two vectors of a step.
///
/// # Safety
/// The machine has AVX-512 F and BW and what the source needs; the source has these rows and steps.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn interleave<S: Source>(
    source: S,
    inputs: usize,
    chunk: Range<usize>,
    steps: Range<usize>,
    packed: &mut [Line],
) {
    let pairs = chunk.len().div_ceil(2);
    let bytes = source.row(1).addr() - source.row(0).addr();
    let part = |step: usize| step * bytes / inputs.div_ceil(STEP);
    for pair in 0..pairs {
        for row in [0, 1] {
            let ahead = source.row(chunk.start + 2 * (pair + AHEAD) + row);
            for at in (part(steps.start)..part(steps.end)).step_by(LINE) {
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(at).cast());
            }
        }
        for (index, step) in steps.clone().enumerate() {
            let left = inputs - step * STEP;
            let mut rows = [[_mm512_setzero_si512(); 2]; 2];
            for (i, row) in rows.iter_mut().enumerate() {
                let output = chunk.start + 2 * pair + i;
                if output < chunk.end {
                    *row = if left >= STEP {
                        // SAFETY: a whole step of a row that exists.
                        unsafe { source.load(output, step) }
                    } else {
                        // SAFETY: the last step of a row that exists.
                        unsafe { source.load_tail(output, step, left) }
                    };
                }
            }
            let [first, second] = rows;
            let place = &mut packed[4 * (index * pairs + pair)..][..4];
            for half in 0..2 {
                let (a, b) = (first[half], second[half]);
                place[2 * half].set(_mm512_unpacklo_epi16(a, b));
                place[2 * half + 1].set(_mm512_unpackhi_epi16(a, b));
            }
        }
    }
}

/// Sums over the pairs of a chunk for `R` rows of gradients and 64 columns, which come in their order.
///
/// # Safety
/// The machine has AVX-512 F and BF16; `grad` holds the pairs of `R` rows, `stride` bytes apart.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
#[allow(
    clippy::needless_range_loop,
    reason = "indexes that are constants keep the sums in registers"
)]
unsafe fn tile<S: Source, const R: usize>(
    lines: &[Line],
    grad: &[u8],
    stride: usize,
) -> [Columns; R] {
    let mut sums = [[_mm512_setzero_ps(); 4]; R];
    let start = grad.as_ptr();
    for (pair, lines) in lines.as_chunks::<4>().0.iter().enumerate() {
        let weights = [
            lines[0].get(),
            lines[1].get(),
            lines[2].get(),
            lines[3].get(),
        ];
        for r in 0..R {
            let p = start.wrapping_add(r * stride + 4 * pair);
            // SAFETY: a pair of a row, as the caller promises.
            let grad = _mm512_set1_epi32(unsafe { p.cast::<i32>().read_unaligned() });
            for i in 0..4 {
                sums[r][i] = tile512::pairs(weights[i], grad, sums[r][i]);
            }
        }
    }
    let mut out = [Columns([0.0; STEP]); R];
    let order = const { columns_order(S::ORDER) };
    for r in 0..R {
        for (k, out) in out[r].0.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            // SAFETY: sixteen i32.
            let index = unsafe { _mm512_loadu_si512(order[k].as_ptr().cast()) };
            let lower = _mm512_permutex2var_ps(sums[r][0], index, sums[r][1]);
            let upper = _mm512_permutex2var_ps(sums[r][2], index, sums[r][3]);
            // Bit 5 of an index tells the pair of vectors.
            let is_upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
            let columns = _mm512_mask_blend_ps(is_upper, lower, upper);
            // SAFETY: sixteen f32.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), columns) };
        }
    }
    out
}

/// Where column `16 k + i` of 64 lies in the four vectors of sums: 16 times the vector, plus the lane.
const fn columns_order(order: [u8; STEP]) -> [[i32; 16]; 4] {
    let mut places = [[0; 16]; 4];
    let mut place = 0;
    while place < STEP {
        // Of each 8 elements of a vector of 32, unpacking puts 4 into the lower and 4 into the upper one.
        let (half, within) = (place / 32, place % 32);
        let vector = 2 * half + within % 8 / 4;
        let lane = within / 8 * 4 + within % 4;
        let column = order[place] as usize;
        places[column / 16][column % 16] = (16 * vector + lane) as i32;
        place += 1;
    }
    places
}
