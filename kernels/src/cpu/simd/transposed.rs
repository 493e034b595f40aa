//! Product with a transposed matrix by products of bfloat16 pairs: the gradient of a matrix
//! product, `out = round(grad) W`.
//!
//! ```text
//! piece of columns (a thread) > chunk of the matrix's rows > 64 columns, interleaved by two into the cache
//!     > tile of up to 6 rows of gradients x 4 vectors of columns > pairs of the chunk
//! ```
//!
//! Two rows of the matrix side by side are what `vdpbf16ps` multiplies with two neighbours of a
//! gradient, so a matrix that lies row-major needs no other packing. An element of the output is
//! the sum of its chunks from first to last, whatever the tile and the piece. The first tile
//! interleaves while it multiplies, since shuffles and products use different ports of the core. All
//! tiles prefetch columns to come: rows lie too far apart for the hardware prefetcher.
//!
//! Shapes: grad `[rows, outputs]` f32, rounded to bfloat16; matrix `[outputs, inputs]`; out
//! `[rows, inputs]` f32. Floor: `2 * rows * outputs * inputs` operations over the rate of bfloat16
//! pairs, and for few rows the stored bytes of the matrix over the bandwidth of memory.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use super::Scratch;
use super::bf16::{dot_pairs, round_row};
use super::gemm::Source;
use super::gemm::pairs::{Bf16, Int8, Nf4, Pairs, STEP};
use super::line::{LINE, Line, resize};
use crate::cpu::pool::{Disjoint, Pool};
use crate::ops::LinearGrad;
use crate::tensor::{Format, WeightView};
use crate::tuning;

/// Rows of the matrix of a chunk, interleaved by two.
const CHUNK: usize = 256;
/// Most rows of gradients of a tile: with four vectors of columns each they fit 32 registers.
const TILE_ROWS: usize = 6;
/// How many pairs of rows ahead of the interleaving the matrix is brought close.
const AHEAD: usize = 4;
/// How many times 64 columns ahead the matrix is asked for. Not a whole chunk: rows of a power of
/// two share their sets of the cache.
const STEPS_AHEAD: usize = 3;

thread_local! {
    /// Interleaved 64 columns of a chunk: `[pairs][4 vectors]`.
    static PACKED: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Arguments that all pieces share.
struct Product<'a, S> {
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
            run(pool, scratch, args, Bf16 { bytes, inputs }, None::<fn(usize) -> f32>);
        }
        Format::Int8(parts) => {
            // The codes are exact in bfloat16; the scale of a row goes to what the row is
            // multiplied with.
            let scale = Some(|output| parts.scale(output));
            run(pool, scratch, args, Int8 { parts, inputs }, scale);
        }
        Format::Nf4(parts) if parts.is_grouped() => {
            run(pool, scratch, args, Nf4 { parts, inputs }, None::<fn(usize) -> f32>);
        }
        Format::Nf4(_) => return Some(args),
    }
    None
}

fn run<S: Source<Pairs>>(
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: LinearGrad<'_, [f32], WeightView<'_>>,
    source: S,
    scale: Option<impl Fn(usize) -> f32 + Sync>,
) {
    let (inputs, outputs, rows) = (args.weight.inputs(), args.weight.outputs(), args.rows);
    // One line more than needed: rows of a power of two would share their sets of the first-level
    // cache.
    let stride = (2 * outputs).next_multiple_of(LINE) + LINE;
    scratch.grads.resize(rows * stride, 0);
    let scales: Option<Vec<f32>> = scale.map(|scale| (0..outputs).map(scale).collect());
    let grad = args.grad;
    let prepare = |row: usize, bytes: &mut [u8]| {
        let grad = &grad[row * outputs..(row + 1) * outputs];
        // SAFETY: the caller of `multiply` has the instruction set.
        unsafe { round_row(grad, scales.as_deref(), bytes) };
    };
    if tuning::packing_is_parallel(rows * outputs) {
        pool.chunks(&mut scratch.grads, stride, prepare);
    } else {
        let rows = scratch.grads.chunks_exact_mut(stride);
        rows.enumerate().for_each(|(row, bytes)| prepare(row, bytes));
    }
    let product = Product {
        source,
        inputs,
        outputs,
        grad: &scratch.grads,
        stride,
        rows,
        out: Disjoint::new(&mut args.out[..rows * inputs]),
    };
    let piece = tuning::transposed_piece(inputs, pool.threads());
    pool.run(inputs.div_ceil(piece), |index| {
        PACKED.with_borrow_mut(|packed| {
            product.piece(index * piece..inputs.min((index + 1) * piece), packed);
        });
    });
}

impl<S: Source<Pairs>> Product<'_, S> {
    /// Some columns, from a multiple of 64 on, of all rows.
    fn piece(&self, columns: Range<usize>, packed: &mut Vec<Line>) {
        let steps = columns.start / STEP..columns.end.div_ceil(STEP);
        let tiles = self.rows.div_ceil(TILE_ROWS);
        for first in (0..self.outputs).step_by(CHUNK) {
            let chunk = first..self.outputs.min(first + CHUNK);
            resize(packed, 4 * chunk.len().div_ceil(2));
            let walk = Walk {
                next: chunk.end..self.outputs.min(chunk.end + CHUNK),
                chunk,
                steps: steps.clone(),
            };
            for step in steps.clone() {
                for tile in 0..tiles {
                    // The first is the smallest.
                    let rows = tile * self.rows / tiles..(tile + 1) * self.rows / tiles;
                    let at = TileAt {
                        chunk: walk.chunk.clone(),
                        step,
                        row: rows.start,
                        is_first: tile == 0,
                        ahead: self.ahead(&walk, step, tile, tiles),
                    };
                    match rows.len() {
                        1 => self.tile::<1>(at, packed),
                        2 => self.tile::<2>(at, packed),
                        3 => self.tile::<3>(at, packed),
                        4 => self.tile::<4>(at, packed),
                        5 => self.tile::<5>(at, packed),
                        _ => self.tile::<6>(at, packed),
                    }
                }
            }
        }
    }

    /// What tile `tile` of `tiles` asks for while it is at `step`: its share of the 64 columns
    /// [`STEPS_AHEAD`] steps later, in this chunk or the next.
    fn ahead(&self, walk: &Walk, step: usize, tile: usize, tiles: usize) -> Ahead {
        let row_bytes = self.source.row(1).addr() - self.source.row(0).addr();
        let start = |step: usize| step * row_bytes / self.inputs.div_ceil(STEP);
        let (rows, step) = match step + STEPS_AHEAD {
            later if later < walk.steps.end => (&walk.chunk, later),
            later => (&walk.next, walk.steps.start + later - walk.steps.end),
        };
        let share = |tile: usize| rows.start + tile * rows.len() / tiles;
        Ahead {
            start: self.source.row(share(tile)).wrapping_add(start(step)),
            row_bytes,
            row_lines: (start(step + 1) - start(step)).div_ceil(LINE),
            rows: share(tile + 1) - share(tile),
        }
    }

    /// Adds a chunk of the matrix to `R` rows of the output, in 64 columns.
    fn tile<const R: usize>(&self, at: TileAt, lines: &mut [Line]) {
        let pairs = lines.len() / 4;
        let start = at.row * self.stride + 2 * at.chunk.start;
        let last = start + (R - 1) * self.stride + 4 * pairs;
        let grad = GradPairs { bytes: &self.grad[start..last], stride: self.stride, count: pairs };
        let (step, row, is_new) = (at.step, at.row, at.chunk.start == 0);
        let sums = if at.is_first {
            // SAFETY: the caller of `multiply` has the instruction set; rows and steps of the
            // matrix exist, and `grad` reaches to the last pair of the last row.
            unsafe { interleave::<S, R>(self.source, self.inputs, at, lines, grad) }
        } else {
            // SAFETY: as above.
            unsafe { tile::<S, R>(lines, grad, at.ahead) }
        };
        let columns = step * STEP..self.inputs.min((step + 1) * STEP);
        for (r, sums) in sums.iter().enumerate() {
            let start = (row + r) * self.inputs + columns.start;
            // SAFETY: pieces differ in their columns; the borrow ends here.
            let out = unsafe { self.out.range(start, columns.len()) };
            // SAFETY: the caller of `multiply` has the instruction set.
            unsafe { sums.add_to(out, is_new) };
        }
    }
}

/// The chunk that a piece works on, and the one after it.
struct Walk {
    /// Rows of the matrix, and those that come after them.
    chunk: Range<usize>,
    next: Range<usize>,
    /// Columns of the piece, 64 at a time.
    steps: Range<usize>,
}

/// Position of a tile.
struct TileAt {
    /// Rows of the matrix.
    chunk: Range<usize>,
    /// Which 64 of its columns.
    step: usize,
    /// First row of the gradients.
    row: usize,
    /// Whether the columns are still to be interleaved.
    is_first: bool,
    ahead: Ahead,
}

/// Pairs of neighbours of some rows of gradients.
#[derive(Clone, Copy)]
struct GradPairs<'a> {
    /// From the first pair of the first row.
    bytes: &'a [u8],
    /// From one row to the next.
    stride: usize,
    /// Pairs of a row.
    count: usize,
}

/// Columns of some rows of the matrix, to prefetch evenly while a tile computes.
#[derive(Clone, Copy)]
struct Ahead {
    /// First byte of the columns in the first row.
    start: *const u8,
    /// From one row to the next.
    row_bytes: usize,
    /// Cache lines of the columns in a row.
    row_lines: usize,
    rows: usize,
}

/// 64 columns in their order.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Columns([f32; STEP]);

impl Columns {
    /// Adds them to `out`, or begins it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn add_to(&self, out: &mut [f32], is_new: bool) {
        if is_new {
            out.copy_from_slice(&self.0[..out.len()]);
        } else {
            out.iter_mut().zip(&self.0).for_each(|(out, sum)| *out += sum);
        }
    }
}

/// [`tile`], whose lines it makes on the way: the rows of the chunk by two, lower and upper halves
/// of the two vectors of the step.
///
/// # Safety
/// As [`tile`]; the machine has what the source needs, and the source has the rows and the step.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn interleave<S: Source<Pairs>, const R: usize>(
    source: S,
    inputs: usize,
    at: TileAt,
    lines: &mut [Line],
    grad: GradPairs<'_>,
) -> [Columns; R] {
    let TileAt { chunk, step, .. } = at;
    let left = inputs - step * STEP;
    let row_bytes = source.row(1).addr() - source.row(0).addr();
    let offset = |step: usize| step * row_bytes / inputs.div_ceil(STEP);
    let close = source.row(chunk.start + 2 * AHEAD).wrapping_add(offset(step));
    let weights = |pair: usize| {
        for row in [2 * pair, 2 * pair + 1] {
            let row = close.wrapping_add(row * row_bytes);
            for line in (0..offset(step + 1) - offset(step)).step_by(LINE) {
                _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(line).cast());
            }
        }
        let mut rows = [[_mm512_setzero_si512(); 2]; 2];
        for (i, row) in rows.iter_mut().enumerate() {
            let output = chunk.start + 2 * pair + i;
            if output < chunk.end {
                *row = if left >= STEP {
                    // SAFETY: a whole step of a row that exists.
                    unsafe { source.load(output, step * STEP) }
                } else {
                    // SAFETY: the last step of a row that exists.
                    unsafe { source.load_tail(output, step * STEP, left) }
                };
            }
        }
        let [a, b] = rows;
        let weights = [
            _mm512_unpacklo_epi16(a[0], b[0]),
            _mm512_unpackhi_epi16(a[0], b[0]),
            _mm512_unpacklo_epi16(a[1], b[1]),
            _mm512_unpackhi_epi16(a[1], b[1]),
        ];
        for (line, vector) in lines[4 * pair..][..4].iter_mut().zip(weights) {
            line.set(vector);
        }
        weights
    };
    // SAFETY: as the caller says.
    unsafe { sums::<S, R>(weights, grad, at.ahead) }
}

/// Sums over the pairs of a chunk for `R` rows of gradients and 64 columns, which come in their
/// order.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL and BF16; `grad` holds the pairs of `R` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn tile<S: Source<Pairs>, const R: usize>(
    lines: &[Line],
    grad: GradPairs<'_>,
    ahead: Ahead,
) -> [Columns; R] {
    let lines = lines.as_chunks::<4>().0;
    let weights = |pair: usize| lines[pair].each_ref().map(|line| line.get());
    // SAFETY: as the caller says.
    unsafe { sums::<S, R>(weights, grad, ahead) }
}

/// The sums of [`tile`]; `weights` gives the four vectors of a pair.
///
/// # Safety
/// As [`tile`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
#[allow(
    clippy::needless_range_loop,
    reason = "indexes that are constants keep the sums in registers"
)]
unsafe fn sums<S: Source<Pairs>, const R: usize>(
    mut weights: impl FnMut(usize) -> [__m512i; 4],
    grad: GradPairs<'_>,
    ahead: Ahead,
) -> [Columns; R] {
    let mut sums = [[_mm512_setzero_ps(); 4]; R];
    let (start, more) = (grad.bytes.as_ptr(), ahead.rows * ahead.row_lines);
    let (mut due, mut asked, mut line) = (0, ahead.start, 0);
    for pair in 0..grad.count {
        due += more;
        while due >= grad.count {
            due -= grad.count;
            _mm_prefetch::<_MM_HINT_T1>(asked.wrapping_add(line * LINE).cast());
            line += 1;
            if line == ahead.row_lines {
                (asked, line) = (asked.wrapping_add(ahead.row_bytes), 0);
            }
        }
        let weights = weights(pair);
        for r in 0..R {
            let p = start.wrapping_add(r * grad.stride + 4 * pair);
            // SAFETY: a pair of a row, as the caller promises.
            let grad = _mm512_set1_epi32(unsafe { p.cast::<i32>().read_unaligned() });
            for i in 0..4 {
                sums[r][i] = dot_pairs(weights[i], grad, sums[r][i]);
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

/// Where column `16 k + i` of 64 lies in the four vectors of sums: 16 times the vector, plus the
/// lane.
const fn columns_order(order: [u8; STEP]) -> [[i32; 16]; 4] {
    let mut positions = [[0; 16]; 4];
    let mut position = 0;
    while position < STEP {
        // Of each 8 elements of a vector of 32, unpacking puts 4 into the lower and 4 into the
        // upper one.
        let (half, within) = (position / 32, position % 32);
        let vector = 2 * half + within % 8 / 4;
        let lane = within / 8 * 4 + within % 4;
        let column = order[position] as usize;
        positions[column / 16][column % 16] = (16 * vector + lane) as i32;
        position += 1;
    }
    positions
}
