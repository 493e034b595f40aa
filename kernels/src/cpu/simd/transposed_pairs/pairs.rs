//! Product with a transposed matrix by `vdpbf16ps`.
//!
//! ```text
//! piece of columns (a thread) > chunk of the matrix's rows > 64 columns, interleaved by two into the cache
//!     > tile of up to 6 rows of gradients x 4 vectors of columns > pairs of the chunk
//! ```
//!
//! An element of the output is the sum of its chunks from first to last, whatever the tile and the piece.
//! The first tile interleaves while it multiplies, since shuffles and products use different ports of the
//! core. All tiles prefetch columns to come.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use super::chunk::{ColumnPrefetch, Interleaved, TransposedProduct, in_order};
use crate::cpu::simd::bf16::dot_pairs;
use crate::cpu::simd::gemm::MatrixSource;
use crate::cpu::simd::gemm::pairs::{Pairs, STEP};
use crate::cpu::simd::line::{CacheLine, LINE, resize};

/// Most rows of gradients of a tile: with four vectors of columns each they fit 32 registers.
const TILE_ROWS: usize = 6;

thread_local! {
    /// Interleaved 64 columns of a chunk: `[pairs][4 vectors]`.
    static PACKED: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
}

impl<S: MatrixSource<Pairs>> TransposedProduct<'_, S> {
    /// Some columns, from a multiple of 64 on, of all rows.
    pub(super) fn piece(&self, columns: Range<usize>) {
        PACKED.with_borrow_mut(|packed| self.tiles(columns, packed));
    }

    fn tiles(&self, columns: Range<usize>, packed: &mut Vec<CacheLine>) {
        let tiles = self.rows.div_ceil(TILE_ROWS);
        for walk in self.walks(&columns) {
            resize(packed, 4 * walk.chunk.len().div_ceil(2));
            for step in walk.steps.clone() {
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

    /// Adds a chunk of the matrix to `R` rows of the output, in 64 columns.
    fn tile<const R: usize>(&self, at: TileAt, lines: &mut [CacheLine]) {
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
    ahead: ColumnPrefetch,
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
unsafe fn interleave<S: MatrixSource<Pairs>, const R: usize>(
    source: S,
    inputs: usize,
    at: TileAt,
    lines: &mut [CacheLine],
    grad: GradPairs<'_>,
) -> [Columns; R] {
    let columns = Interleaved::new(source, inputs, at.chunk, at.step);
    let weights = |pair: usize| {
        // SAFETY: as the caller says.
        let weights = unsafe { columns.pair(pair) };
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
unsafe fn tile<S: MatrixSource<Pairs>, const R: usize>(
    lines: &[CacheLine],
    grad: GradPairs<'_>,
    ahead: ColumnPrefetch,
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
unsafe fn sums<S: MatrixSource<Pairs>, const R: usize>(
    mut weights: impl FnMut(usize) -> [__m512i; 4],
    grad: GradPairs<'_>,
    ahead: ColumnPrefetch,
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
    for (sums, out) in sums.into_iter().zip(&mut out) {
        in_order::<S>(sums, &mut out.0);
    }
    out
}
