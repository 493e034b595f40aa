//! What the kernels of a transposed product share: its arguments, how a piece walks the matrix, and the
//! interleaving of its rows.
//!
//! Two rows of the matrix side by side are what products of pairs multiply with two neighbours of a
//! gradient, so a matrix that lies row-major needs no other packing. Rows lie too far apart for the
//! hardware prefetcher, so columns to come are asked for.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::cpu::pool::Disjoint;
use crate::cpu::simd::gemm::MatrixSource;
use crate::cpu::simd::gemm::pairs::{Pairs, STEP};
use crate::cpu::simd::line::LINE;

/// Rows of the matrix of a chunk, interleaved by two.
pub(super) const CHUNK: usize = 256;
/// How many pairs of rows ahead of the interleaving the matrix is brought close.
const AHEAD: usize = 4;
/// How many times 64 columns ahead the matrix is asked for. Not a whole chunk: rows of a power of
/// two share their sets of the cache.
const STEPS_AHEAD: usize = 3;

/// Arguments that all pieces share.
pub(super) struct TransposedProduct<'a, S> {
    pub(super) source: S,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// Rounded gradients `[rows, stride]`, zeros after the outputs.
    pub(super) grad: &'a [u8],
    /// Bytes of a row of them.
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) out: Disjoint<'a, f32>,
}

impl<S: MatrixSource<Pairs>> TransposedProduct<'_, S> {
    /// The chunks of the matrix, as a piece of columns walks them.
    pub(super) fn walks(&self, columns: &Range<usize>) -> impl Iterator<Item = Walk> {
        let steps = columns.start / STEP..columns.end.div_ceil(STEP);
        let outputs = self.outputs;
        (0..outputs).step_by(CHUNK).map(move |first| {
            let chunk = first..outputs.min(first + CHUNK);
            let next = chunk.end..outputs.min(chunk.end + CHUNK);
            Walk { chunk, next, steps: steps.clone() }
        })
    }

    /// What tile `tile` of `tiles` asks for while it is at `step`: its share of the 64 columns
    /// [`STEPS_AHEAD`] steps later, in this chunk or the next.
    pub(super) fn ahead(
        &self,
        walk: &Walk,
        step: usize,
        tile: usize,
        tiles: usize,
    ) -> ColumnPrefetch {
        let row_bytes = self.source.row(1).addr() - self.source.row(0).addr();
        let start = |step: usize| step * row_bytes / self.inputs.div_ceil(STEP);
        let (rows, step) = match step + STEPS_AHEAD {
            later if later < walk.steps.end => (&walk.chunk, later),
            later => (&walk.next, walk.steps.start + later - walk.steps.end),
        };
        let share = |tile: usize| rows.start + tile * rows.len() / tiles;
        ColumnPrefetch {
            start: self.source.row(share(tile)).wrapping_add(start(step)),
            row_bytes,
            row_lines: (start(step + 1) - start(step)).div_ceil(LINE),
            rows: share(tile + 1) - share(tile),
        }
    }
}

/// The chunk that a piece works on, and the one after it.
pub(super) struct Walk {
    /// Rows of the matrix, and those that come after them.
    pub(super) chunk: Range<usize>,
    pub(super) next: Range<usize>,
    /// Columns of the piece, 64 at a time.
    pub(super) steps: Range<usize>,
}

/// Columns of some rows of the matrix, to prefetch evenly while a tile computes.
#[derive(Clone, Copy)]
pub(super) struct ColumnPrefetch {
    /// First byte of the columns in the first row.
    pub(super) start: *const u8,
    /// From one row to the next.
    pub(super) row_bytes: usize,
    /// Cache lines of the columns in a row.
    pub(super) row_lines: usize,
    pub(super) rows: usize,
}

/// Columns of the matrix, two rows at a time: what [`Interleaved::pair`] makes of them.
#[derive(Clone)]
pub(super) struct Interleaved<S> {
    source: S,
    chunk: Range<usize>,
    /// Which 64 columns, and how many are left from there on.
    step: usize,
    left: usize,
    /// Where rows to bring close begin, and bytes of a row and of its columns.
    close: *const u8,
    row_bytes: usize,
    column_bytes: usize,
}

impl<S: MatrixSource<Pairs>> Interleaved<S> {
    /// Columns `step`, 64 of them, of the rows `chunk` of a matrix with `inputs` columns.
    pub(super) fn new(source: S, inputs: usize, chunk: Range<usize>, step: usize) -> Self {
        let row_bytes = source.row(1).addr() - source.row(0).addr();
        let offset = |step: usize| step * row_bytes / inputs.div_ceil(STEP);
        let close = source.row(chunk.start + 2 * AHEAD).wrapping_add(offset(step));
        let (left, column_bytes) = (inputs - step * STEP, offset(step + 1) - offset(step));
        Interleaved { source, chunk, step, left, close, row_bytes, column_bytes }
    }

    /// Rows `2 pair` and `2 pair + 1` of the chunk by two: lower and upper halves of the two vectors of
    /// the step. Rows behind the chunk are zero.
    ///
    /// # Safety
    /// The machine has AVX-512 F, BW, DQ, VL and BF16; the matrix has the rows and the step.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(super) unsafe fn pair(&self, pair: usize) -> [__m512i; 4] {
        for row in [2 * pair, 2 * pair + 1] {
            let row = self.close.wrapping_add(row * self.row_bytes);
            for line in (0..self.column_bytes).step_by(LINE) {
                _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(line).cast());
            }
        }
        let mut rows = [[_mm512_setzero_si512(); 2]; 2];
        for (i, row) in rows.iter_mut().enumerate() {
            let output = self.chunk.start + 2 * pair + i;
            if output < self.chunk.end {
                *row = if self.left >= STEP {
                    // SAFETY: a whole step of a row that exists.
                    unsafe { self.source.load(output, self.step * STEP) }
                } else {
                    // SAFETY: the last step of a row that exists.
                    unsafe { self.source.load_tail(output, self.step * STEP, self.left) }
                };
            }
        }
        let [a, b] = rows;
        [
            _mm512_unpacklo_epi16(a[0], b[0]),
            _mm512_unpackhi_epi16(a[0], b[0]),
            _mm512_unpacklo_epi16(a[1], b[1]),
            _mm512_unpackhi_epi16(a[1], b[1]),
        ]
    }
}

/// 64 sums, made of what [`Interleaved::pair`] gives, in the order of the columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn in_order<S: MatrixSource<Pairs>>(sums: [__m512; 4], out: &mut [f32; STEP]) {
    let order = const { columns_order(S::ORDER) };
    for (k, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // SAFETY: sixteen i32.
        let index = unsafe { _mm512_loadu_si512(order[k].as_ptr().cast()) };
        let lower = _mm512_permutex2var_ps(sums[0], index, sums[1]);
        let upper = _mm512_permutex2var_ps(sums[2], index, sums[3]);
        // Bit 5 of an index tells the pair of vectors.
        let is_upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
        let columns = _mm512_mask_blend_ps(is_upper, lower, upper);
        // SAFETY: sixteen f32.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), columns) };
    }
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
