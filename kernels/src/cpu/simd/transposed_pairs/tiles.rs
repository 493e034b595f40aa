//! Product with a transposed matrix in AMX tiles.
//!
//! ```text
//! piece of columns (a thread) > group of rows of gradients > chunk of the matrix's rows
//!     > 64 columns, interleaved by two into the cache > block of 16 rows and 64 columns
//!
//! block      C [16 rows][4 x 16 columns] += A [16 rows][32 outputs] B [16 pairs of outputs][16 columns]
//! registers  C 0 1 2 3   A 4   B 5 6, in turn
//! ```
//!
//! A tile of gradients is read where they lie. An element of the output is one chain over 32 rows of the
//! matrix at a time, from first to last: the same bits in every block, group, piece and thread. Sums keep
//! the order of the interleaved columns until the last chunk.
//!
//! Floor: 16 cycles for 16 rows, 16 columns and 32 outputs. Computed, not measured.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use super::chunk::{Interleaved, TransposedProduct, Walk, in_order};
use crate::cpu::simd::amx::{ROW_BYTES, ROWS, Shape, TileConfig, TileSession, Tiles};
use crate::cpu::simd::gemm::MatrixSource;
use crate::cpu::simd::gemm::pairs::{Pairs, STEP};
use crate::cpu::simd::line::{CacheLine, LINE, ZEROS, resize};
use crate::tuning::TILED_GRADIENT_ROWS;

/// Lines of the four vectors of a pair.
const VECTORS: usize = 4;

/// Scratch memory of a thread.
#[derive(Default)]
struct TileScratch {
    /// Interleaved 64 columns of a chunk: `[pairs][4 vectors]`, whole tiles.
    packed: Vec<CacheLine>,
    /// Sums of a piece: `[row][step][4 vectors]`, and a line between rows.
    sums: Vec<CacheLine>,
}

thread_local! {
    static LOCAL: RefCell<TileScratch> = RefCell::default();
}

/// What a block is computed from.
#[derive(Clone, Copy)]
struct Block {
    /// Gradients of its rows, and bytes from one row to the next.
    grad: *const u8,
    stride: usize,
    /// Interleaved columns.
    packed: *const u8,
    /// Tiles of pairs.
    steps: usize,
    /// Sums of its rows, and bytes from one row to the next.
    sums: *mut u8,
    sums_stride: usize,
    is_new: bool,
}

impl<S: MatrixSource<Pairs>> TransposedProduct<'_, S> {
    /// Some columns, from a multiple of 64 on, of all rows.
    pub(super) fn piece_in_tiles<T: Tiles>(&self, columns: Range<usize>) {
        let mut session = TileSession::<T>::default();
        LOCAL.with_borrow_mut(|local| {
            for first in (0..self.rows).step_by(TILED_GRADIENT_ROWS) {
                let rows = first..self.rows.min(first + TILED_GRADIENT_ROWS);
                self.group(&mut session, &columns, rows, local);
            }
        });
    }

    /// Some columns of a group of rows.
    fn group<T: Tiles>(
        &self,
        session: &mut TileSession<T>,
        columns: &Range<usize>,
        rows: Range<usize>,
        local: &mut TileScratch,
    ) {
        let TileScratch { packed, sums } = local;
        let row_lines = VECTORS * columns.len().div_ceil(STEP) + 1;
        resize(sums, rows.len() * row_lines);
        for walk in self.walks(columns) {
            let steps = walk.chunk.len().div_ceil(2 * ROWS);
            resize(packed, VECTORS * ROWS * steps);
            for step in walk.steps.clone() {
                // SAFETY: the caller of `multiply` has the instruction set.
                unsafe { self.interleave(&walk, step, packed) };
                for tile in rows.clone().step_by(ROWS) {
                    let line =
                        (tile - rows.start) * row_lines + (step - walk.steps.start) * VECTORS;
                    let grad = tile * self.stride + 2 * walk.chunk.start;
                    let block = Block {
                        grad: self.grad[grad..].as_ptr(),
                        stride: self.stride,
                        packed: packed.as_ptr().cast(),
                        steps,
                        sums: sums[line..].as_mut_ptr().cast(),
                        sums_stride: row_lines * LINE,
                        is_new: walk.chunk.start == 0,
                    };
                    let count = ROWS.min(rows.end - tile);
                    // SAFETY: the caller of `multiply` has the instructions.
                    let tiles = unsafe { session.with(&config(count)) };
                    // SAFETY: as above; gradients are zero behind the outputs, to whole tiles, and the
                    // sums are those of the rows.
                    unsafe { self::block(tiles, block) };
                }
            }
        }
        for (row, sums) in rows.zip(sums.chunks_exact(row_lines)) {
            // SAFETY: the caller of `multiply` has the instruction set.
            unsafe { self.store(row, columns, sums) };
        }
    }

    /// Interleaves 64 columns of a chunk; zeros follow, to whole tiles.
    ///
    /// # Safety
    /// The machine has AVX-512 F, BW, DQ, VL and BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn interleave(&self, walk: &Walk, step: usize, packed: &mut [CacheLine]) {
        let columns = Interleaved::new(self.source, self.inputs, walk.chunk.clone(), step);
        let ahead = self.ahead(walk, step, 0, 1);
        let count = walk.chunk.len().div_ceil(2);
        let (own, rest) = packed.split_at_mut(VECTORS * count);
        for (pair, lines) in own.chunks_exact_mut(VECTORS).enumerate() {
            for row in (2 * pair..2 * pair + 2).take_while(|row| *row < ahead.rows) {
                let row = ahead.start.wrapping_add(row * ahead.row_bytes);
                for line in 0..ahead.row_lines {
                    _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(line * LINE).cast());
                }
            }
            // SAFETY: the matrix has the rows and the step.
            let vectors = unsafe { columns.pair(pair) };
            for (line, vector) in lines.iter_mut().zip(vectors) {
                line.set(vector);
            }
        }
        rest.fill(ZEROS);
    }

    /// Epilogue of a row: puts the columns in their order and stores them.
    ///
    /// # Safety
    /// The machine has AVX-512 F, BW, DQ and VL.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn store(&self, row: usize, columns: &Range<usize>, sums: &[CacheLine]) {
        let steps = columns.clone().step_by(STEP).zip(sums.as_chunks::<VECTORS>().0);
        for (start, lines) in steps {
            let sums = lines.each_ref().map(|line| _mm512_castsi512_ps(line.get()));
            let mut all = [0.0; STEP];
            in_order::<S>(sums, &mut all);
            let count = STEP.min(columns.end - start);
            // SAFETY: pieces differ in their columns; the borrow ends here.
            let out = unsafe { self.out.range(row * self.inputs + start, count) };
            out.copy_from_slice(&all[..count]);
        }
    }
}

/// The registers of a block of so many rows.
fn config(rows: usize) -> TileConfig {
    let [own, packed] = [rows, ROWS].map(|rows| Shape { rows, row_bytes: ROW_BYTES });
    TileConfig::new([own, own, own, own, own, packed, packed, Shape::default()])
}

/// Adds the products of a chunk.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL and the instructions of `T`, configured by [`config`]; the
/// memory that the block names exists.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
#[allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "the instructions of a block have one contract"
)]
unsafe fn block<T: Tiles>(tiles: &mut T, block: Block) {
    let Block { grad, stride, packed, steps, sums, sums_stride, is_new } = block;
    let at = |vector: usize| sums.wrapping_add(vector * LINE);
    // SAFETY: the registers are configured, and the memory of sums is the caller's.
    unsafe {
        if is_new {
            tiles.zero::<0>();
            tiles.zero::<1>();
            tiles.zero::<2>();
            tiles.zero::<3>();
        } else {
            tiles.load::<0>(at(0), sums_stride);
            tiles.load::<1>(at(1), sums_stride);
            tiles.load::<2>(at(2), sums_stride);
            tiles.load::<3>(at(3), sums_stride);
        }
    }
    for step in 0..steps {
        const STRIDE: usize = VECTORS * LINE;
        let b = |vector: usize| packed.wrapping_add(step * ROWS * STRIDE + vector * LINE);
        // SAFETY: the registers are configured; gradients and columns have as many steps.
        unsafe {
            tiles.load::<4>(grad.wrapping_add(step * ROW_BYTES), stride);
            tiles.load::<5>(b(0), STRIDE);
            tiles.multiply_add::<0, 4, 5>();
            tiles.load::<6>(b(1), STRIDE);
            tiles.multiply_add::<1, 4, 6>();
            tiles.load::<5>(b(2), STRIDE);
            tiles.multiply_add::<2, 4, 5>();
            tiles.load::<6>(b(3), STRIDE);
            tiles.multiply_add::<3, 4, 6>();
        }
    }
    // SAFETY: as above.
    unsafe {
        tiles.store::<0>(at(0), sums_stride);
        tiles.store::<1>(at(1), sums_stride);
        tiles.store::<2>(at(2), sums_stride);
        tiles.store::<3>(at(3), sums_stride);
    }
}
