//! The matrix product `out = x W^T + bias` in AMX tiles of bfloat16, for any number of rows.
//!
//! ```text
//! piece of outputs (a thread) > group of rows that stays in the cache > strip of 32 outputs
//!     > chunk of the inputs, decoded once > block of 32 outputs and 32 rows
//!
//! block      C [2 x 16 outputs][2 x 16 rows] += A [16 outputs][32 inputs] B [16 pairs of inputs][16 rows]
//! registers  C 0 1 (first outputs)  2 3 (second)   A 4 5   B 6 7
//! ```
//!
//! The matrix is `A`: 16 of its rows are a tile as they lie in memory, and a single row of inputs costs
//! no more than reading the matrix. The inputs are packed by pairs. An element of the output is one chain
//! over 32 inputs at a time, from first to last, and what a register holds is all of it: the same bits in
//! every block, piece and thread, for any number of rows.
//!
//! Floor: for few rows the stored bytes of the matrix over the bandwidth of memory; for many rows 16
//! cycles for 16 outputs, 16 rows and 32 inputs. Sizes are computed from that and from the sizes of the
//! caches; nothing was measured on a processor with tiles.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use shared::dtype::DType;

use super::arithmetic::{Arithmetic, MatrixSource, row_lines};
use super::blocking::{Operand, Unpacked};
use super::pairs::{Pairs, STEP};
use super::sources::{Bf16, Int8, Nf4};
use crate::cpu::pool::{Disjoint, ThreadPool};
use crate::cpu::simd::Isa;
use crate::cpu::simd::amx::{
    Hardware, Model, ROW_BYTES, ROWS, Shape, TileConfig, TileSession, Tiles,
};
use crate::cpu::simd::line::{CacheLine, LINE, floats, resize};
use crate::cpu::simd::outer::transpose512;
use crate::tuning;

/// Outputs of a strip, and rows of a block: two tiles each.
const STRIP: usize = 2 * ROWS;
/// Inputs that are decoded at a time: those of a strip take two thirds of the first-level cache.
const CHUNK: usize = 512;
/// Bytes of a decoded row: a line more than needed, so that rows do not share their sets of the cache.
const DECODED_BYTES: usize = 2 * CHUNK + LINE;
/// Lines of the four sums of a block.
const BLOCK_LINES: usize = 4 * ROWS;

/// A matrix whose rows may lie in memory as tiles read them.
pub(super) trait InPlace: MatrixSource<Pairs> {
    /// Bytes from one row to the next, if they do.
    fn in_place(self) -> Option<usize>;
}

impl InPlace for Bf16<'_> {
    fn in_place(self) -> Option<usize> {
        Some(2 * self.inputs)
    }
}

impl InPlace for Int8<'_> {
    fn in_place(self) -> Option<usize> {
        None
    }
}

impl InPlace for Nf4<'_> {
    fn in_place(self) -> Option<usize> {
        None
    }
}

/// Scratch memory of a thread.
#[derive(Default)]
struct TiledScratch {
    /// A chunk of a strip: `[outputs][DECODED_BYTES]`.
    decoded: Vec<CacheLine>,
    /// Sums of the blocks of a group: `[block][outputs / 16][rows / 16][16 outputs][16 rows]`.
    sums: Vec<CacheLine>,
}

thread_local! {
    static LOCAL: RefCell<TiledScratch> = RefCell::default();
}

/// Packed inputs, which all pieces share.
#[derive(Clone, Copy)]
struct TiledInputs<'a> {
    inputs: usize,
    rows: usize,
    /// `[tile of rows][step][half][16 pairs][rows]`.
    panels: &'a [CacheLine],
}

impl TiledInputs<'_> {
    /// Rows of tile `index`: 16, but for the last.
    fn tile(self, index: usize) -> Range<usize> {
        self.rows.min(index * ROWS)..self.rows.min((index + 1) * ROWS)
    }
}

/// Computes all operands from inputs, rounded to bfloat16 and packed once; their pieces are one
/// heap of work.
///
/// # Safety
/// The machine has `isa`, or its tiles are those of the model; each source has its `outputs` rows of
/// `inputs` weights.
pub(super) unsafe fn multiply<S: InPlace>(
    isa: Isa,
    pool: &mut ThreadPool,
    panels: &mut Vec<CacheLine>,
    from: Unpacked<'_>,
    operands: &[Operand<'_, S>],
) {
    let Unpacked { rows, inputs, .. } = from;
    if rows == 0 || inputs == 0 {
        return;
    }
    pack_all::<S>(pool, panels, from);
    let shared = TiledInputs { inputs, rows, panels };
    let outputs: usize = operands.iter().map(|operand| operand.outputs).sum();
    let row_bytes = operands.iter().map(|operand| operand.row_bytes).max().unwrap_or(0);
    let split = tuning::tiled_split(outputs, row_bytes, rows, pool.threads());
    pool.share(split.ends.len(), split.wakes, |index| {
        let before = index.checked_sub(1).and_then(|i| split.ends.get(i));
        let piece = before.copied().unwrap_or(0)..split.ends[index];
        match isa {
            Isa::Amx => pieces::<Hardware, S>(shared, operands, piece),
            _ => pieces::<Model, S>(shared, operands, piece),
        }
    });
}

/// Packs all rows, by tiles.
fn pack_all<S: InPlace>(pool: &mut ThreadPool, panels: &mut Vec<CacheLine>, from: Unpacked<'_>) {
    let Unpacked { x, rows, inputs } = from;
    let lines = row_lines::<Pairs>(inputs);
    resize(panels, rows * lines);
    let whole = Disjoint::new(&mut panels[..]);
    let shared = TiledInputs { inputs, rows, panels: &[] };
    pool.share(rows.div_ceil(ROWS), tuning::packing_is_parallel(rows * inputs), |index| {
        let tile = shared.tile(index);
        // SAFETY: tiles have different rows.
        let panel = unsafe { whole.range(tile.start * lines, tile.len() * lines) };
        // SAFETY: the caller of `multiply` has the instruction set.
        unsafe { pack::<S>(&x[tile.start * inputs..tile.end * inputs], inputs, panel) };
    });
}

/// Computes outputs `piece` of the operands, counted as if they were those of one matrix.
fn pieces<T: Tiles, S: InPlace>(
    shared: TiledInputs<'_>,
    operands: &[Operand<'_, S>],
    piece: Range<usize>,
) {
    let (mut session, mut first) = (TileSession::<T>::default(), 0);
    for operand in operands {
        let end = first + operand.outputs;
        let own = piece.start.max(first)..piece.end.min(end);
        if !own.is_empty() {
            let product = TiledProduct { operand, shared };
            let own = own.start - first..own.end - first;
            LOCAL.with_borrow_mut(|local| product.piece(&mut session, own, local));
        }
        first = end;
    }
}

/// Rounds the rows of a tile and packs them by pairs, `[step][half][16 pairs][rows]`, in the order of the
/// source; zeros follow the inputs.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pack<S: MatrixSource<Pairs>>(x: &[f32], inputs: usize, panel: &mut [CacheLine]) {
    // SAFETY: as the caller says.
    unsafe { Pairs::pack::<S>(DType::Bf16, x, inputs, panel) };
    let rows = x.len() / inputs;
    if rows == 1 {
        return;
    }
    let mask = u16::MAX >> (ROWS - rows);
    for step in panel.chunks_exact_mut(2 * rows) {
        let mut halves = [[_mm512_setzero_ps(); ROWS]; 2];
        for (r, lines) in step.chunks_exact(2).enumerate() {
            halves[0][r] = _mm512_castsi512_ps(lines[0].get());
            halves[1][r] = _mm512_castsi512_ps(lines[1].get());
        }
        for (half, step) in halves.iter_mut().zip(floats(step).chunks_exact_mut(ROWS * rows)) {
            transpose512(half);
            for (pair, to) in half.iter().zip(step.chunks_exact_mut(rows)) {
                // SAFETY: as many numbers as the mask has bits.
                unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr(), mask, *pair) };
            }
        }
    }
}

/// One operand and the inputs.
struct TiledProduct<'a, S> {
    operand: &'a Operand<'a, S>,
    shared: TiledInputs<'a>,
}

/// A strip of outputs and a group of rows.
struct Strip {
    outputs: Range<usize>,
    /// Tiles of rows.
    tiles: Range<usize>,
    /// Bytes from one row of the matrix to the next, if its tiles are read where they lie.
    in_place: Option<usize>,
}

/// What a block is computed from.
#[derive(Clone, Copy)]
struct Block {
    /// Inputs of the rows of the two tiles, from the first step of the chunk on.
    x: [*const u8; 2],
    /// Rows of the two tiles; the second may have none.
    rows: [usize; 2],
    /// Weights of the outputs, and bytes from one output to the next.
    weights: *const u8,
    stride: usize,
    steps: usize,
    /// Where the sums wait for the next chunk.
    sums: *mut u8,
    start: Start,
    is_stored: bool,
    ahead: BlockPrefetch,
}

/// What a block adds to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    Zero,
    /// Sums in memory.
    Stored,
    /// Those that the registers hold.
    Registers,
}

/// Weights to prefetch while a block computes.
#[derive(Clone, Copy)]
struct BlockPrefetch {
    start: *const u8,
    /// Bytes for each step.
    step_bytes: usize,
}

impl<S: InPlace> TiledProduct<'_, S> {
    /// Computes some outputs of all rows.
    fn piece<T: Tiles>(
        &self,
        session: &mut TileSession<T>,
        outputs: Range<usize>,
        local: &mut TiledScratch,
    ) {
        let (inputs, tiles) = (self.shared.inputs, self.shared.rows.div_ceil(ROWS));
        let most = tuning::tiled_rows(inputs) / ROWS;
        for first in (0..tiles).step_by(most) {
            let tiles = first..tiles.min(first + most);
            for start in outputs.clone().step_by(STRIP) {
                let outputs = start..outputs.end.min(start + STRIP);
                // Several blocks would read rows of a power of two from few sets of the cache.
                let is_whole = outputs.len().is_multiple_of(ROWS)
                    && inputs.is_multiple_of(STEP)
                    && tiles.len() <= 2;
                let in_place = self.operand.source.in_place().filter(|_| is_whole);
                let tiles = tiles.clone();
                self.strip(session, &Strip { outputs, tiles, in_place }, local);
            }
        }
    }

    /// Computes a strip of outputs of a group of rows.
    fn strip<T: Tiles>(
        &self,
        session: &mut TileSession<T>,
        strip: &Strip,
        local: &mut TiledScratch,
    ) {
        let Strip { outputs, tiles, in_place } = strip;
        let (inputs, source) = (self.shared.inputs, self.operand.source);
        let blocks = tiles.len().div_ceil(2);
        resize(&mut local.sums, blocks * BLOCK_LINES);
        let chunk = if in_place.is_some() { inputs } else { CHUNK };
        // The next strip begins where this one ends; each block asks for its share.
        let step_bytes =
            (outputs.len() * self.operand.row_bytes).div_ceil(blocks * inputs.div_ceil(STEP));
        for start in (0..inputs).step_by(chunk) {
            let range = start..inputs.min(start + chunk);
            let steps = range.len().div_ceil(STEP);
            let (weights, stride) = match in_place {
                Some(stride) => (source.row(outputs.start), *stride),
                None => {
                    self.decode(outputs.clone(), range.clone(), &mut local.decoded);
                    (local.decoded.as_ptr().cast(), DECODED_BYTES)
                }
            };
            for index in 0..blocks {
                let tile = tiles.start + 2 * index;
                let rows = [self.rows(strip, tile), self.rows(strip, tile + 1)];
                let done = (start / STEP * blocks + index * steps) * step_bytes;
                let block = Block {
                    x: [self.inputs(tile, start), self.inputs(tile + 1, start)],
                    rows,
                    weights,
                    stride,
                    steps,
                    sums: local.sums[index * BLOCK_LINES..].as_mut_ptr().cast(),
                    start: match (start, blocks) {
                        (0, _) => Start::Zero,
                        (_, 1) => Start::Registers,
                        _ => Start::Stored,
                    },
                    is_stored: blocks > 1 || range.end == inputs,
                    ahead: BlockPrefetch {
                        start: source.row(outputs.end).wrapping_add(done),
                        step_bytes,
                    },
                };
                // SAFETY: the caller of `multiply` has the instructions; the memory of weights, inputs
                // and sums is that of the block.
                unsafe { block_of(session, block, outputs.len() > ROWS) };
            }
        }
        for index in 0..blocks {
            let sums = &local.sums[index * BLOCK_LINES..][..BLOCK_LINES];
            // SAFETY: the caller of `multiply` has the instruction set.
            unsafe { self.store(strip, tiles.start + 2 * index, sums) };
        }
    }

    /// How many rows a tile of a group has.
    fn rows(&self, strip: &Strip, tile: usize) -> usize {
        if strip.tiles.contains(&tile) { self.shared.tile(tile).len() } else { 0 }
    }

    /// Packed inputs of a tile of rows, from a step on.
    fn inputs(&self, tile: usize, start: usize) -> *const u8 {
        let (rows, lines) = (self.shared.tile(tile), row_lines::<Pairs>(self.shared.inputs));
        let line = rows.start * lines + start / STEP * 2 * rows.len();
        self.shared.panels.as_ptr().wrapping_add(line).cast()
    }

    /// Decodes a chunk of some outputs; zeros follow the last of them, to a whole tile.
    fn decode(&self, outputs: Range<usize>, range: Range<usize>, decoded: &mut Vec<CacheLine>) {
        const LINES: usize = DECODED_BYTES / LINE;
        let lines = row_lines::<Pairs>(range.len());
        resize(decoded, STRIP * LINES);
        for (index, row) in decoded.chunks_exact_mut(LINES).enumerate() {
            let output = outputs.start + index;
            if output < outputs.end {
                let row = &mut row[..lines];
                // SAFETY: the caller of `multiply` has the instruction set, and the source has these
                // rows and inputs.
                unsafe { Pairs::decode(self.operand.source, output, range.clone(), row) };
            } else {
                floats(row).fill(0.0);
            }
        }
    }

    /// Epilogue of a block: scales, adds the bias and stores the outputs.
    ///
    /// # Safety
    /// The machine has AVX-512 F, BW, DQ and VL.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn store(&self, strip: &Strip, first: usize, sums: &[CacheLine]) {
        for (o, sums) in sums.chunks_exact(2 * ROWS).enumerate() {
            let start = strip.outputs.start + o * ROWS;
            let outputs = start..strip.outputs.end.min(start + ROWS);
            if outputs.is_empty() {
                return;
            }
            let (mut scales, mut biases) = ([0.0; ROWS], [0.0; ROWS]);
            for (i, output) in outputs.clone().enumerate() {
                scales[i] = self.operand.source.scale(output);
                biases[i] = self.operand.bias.map_or(0.0, |bias| bias[output]);
            }
            for (tile, sums) in sums.chunks_exact(ROWS).enumerate() {
                let rows = match self.rows(strip, first + tile) {
                    0 => continue,
                    _ => self.shared.tile(first + tile),
                };
                let mut columns: [__m512; ROWS] =
                    std::array::from_fn(|i| _mm512_castsi512_ps(sums[i].get()));
                transpose512(&mut columns);
                for (row, totals) in rows.zip(columns) {
                    let mut all = [0.0; ROWS];
                    // SAFETY: sixteen f32.
                    unsafe { _mm512_storeu_ps(all.as_mut_ptr(), totals) };
                    let at = row * self.operand.outputs + outputs.start;
                    // SAFETY: pieces differ in their outputs, so these ranges of a row do not overlap.
                    let out = unsafe { self.operand.out.range(at, outputs.len()) };
                    let factors = scales.iter().zip(&biases);
                    for ((out, total), (scale, bias)) in out.iter_mut().zip(all).zip(factors) {
                        *out = total * scale + bias;
                    }
                }
            }
        }
    }
}

/// The registers of a block whose tiles of rows have so many rows.
fn config([first, second]: [usize; 2]) -> TileConfig {
    let of = |rows, columns| match columns {
        0 => Shape::default(),
        _ => Shape { rows, row_bytes: 4 * columns },
    };
    // Sums have 16 outputs, inputs have 16 pairs.
    let (first, second) = (of(ROWS, first), of(ROWS, second));
    let weights = Shape { rows: ROWS, row_bytes: ROW_BYTES };
    TileConfig::new([first, second, first, second, weights, weights, first, second])
}

/// [`block`] for one or two tiles of outputs and of rows.
///
/// # Safety
/// As there.
unsafe fn block_of<T: Tiles>(session: &mut TileSession<T>, block: Block, is_wide: bool) {
    // SAFETY: the caller has the instructions.
    let tiles = unsafe { session.with(&config(block.rows)) };
    let compute = match (is_wide, block.rows[1] > 0) {
        (true, true) => self::block::<T, 2, 2>,
        (true, false) => self::block::<T, 2, 1>,
        (false, true) => self::block::<T, 1, 2>,
        (false, false) => self::block::<T, 1, 1>,
    };
    // SAFETY: the configuration has the tiles of the block; the rest is as the caller says.
    unsafe { compute(tiles, block) };
}

/// Adds the products of a chunk for `O` tiles of outputs and `R` tiles of rows.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL and the instructions of `T`, configured by [`config`]; the
/// memory that the block names exists.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
#[allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "the instructions of a block have one contract"
)]
unsafe fn block<T: Tiles, const O: usize, const R: usize>(tiles: &mut T, block: Block) {
    let Block { weights, stride, sums, ahead, .. } = block;
    let at = |o: usize, r: usize| sums.wrapping_add((2 * o + r) * ROWS * LINE);
    // Calls a method for the registers of sums that the block has.
    macro_rules! for_sums {
        ($method:ident $(, $at:expr)?) => {{
            tiles.$method::<0>($($at(0, 0), LINE)?);
            if R == 2 {
                tiles.$method::<1>($($at(0, 1), LINE)?);
            }
            if O == 2 {
                tiles.$method::<2>($($at(1, 0), LINE)?);
            }
            if O == 2 && R == 2 {
                tiles.$method::<3>($($at(1, 1), LINE)?);
            }
        }};
    }
    // SAFETY: the registers are configured, and the memory of sums is the caller's.
    unsafe {
        match block.start {
            Start::Zero => for_sums!(zero),
            Start::Stored => for_sums!(load, at),
            Start::Registers => {}
        }
    }
    let mut asked = ahead.start;
    for half in 0..2 * block.steps {
        let until = ahead.start.wrapping_add((half + 1) * ahead.step_bytes / 2);
        while asked < until {
            _mm_prefetch::<_MM_HINT_T1>(asked.cast());
            asked = asked.wrapping_add(LINE);
        }
        let a = weights.wrapping_add(half * ROW_BYTES);
        let b = |r: usize| block.x[r].wrapping_add(half * 4 * ROWS * block.rows[r]);
        // SAFETY: the registers are configured; rows of weights and inputs have as many steps.
        unsafe {
            tiles.load::<4>(a, stride);
            tiles.load::<6>(b(0), 4 * block.rows[0]);
            tiles.multiply_add::<0, 4, 6>();
            if R == 2 {
                tiles.load::<7>(b(1), 4 * block.rows[1]);
                tiles.multiply_add::<1, 4, 7>();
            }
            if O == 2 {
                tiles.load::<5>(a.wrapping_add(ROWS * stride), stride);
                tiles.multiply_add::<2, 5, 6>();
                if R == 2 {
                    tiles.multiply_add::<3, 5, 7>();
                }
            }
        }
    }
    if block.is_stored {
        // SAFETY: as above.
        unsafe { for_sums!(store, at) };
    }
}
