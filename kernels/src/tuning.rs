//! Tile sizes and thresholds of the CPU and CUDA paths, as pure functions. Unless a function says
//! otherwise, its value changes no result.

use shared::dtype::DType;

use crate::sizes;

/// Work below this time stays on the calling thread: waking a sleeping thread costs 20 to 50 µs,
/// handing work to a spinning one about 1 µs. Measured 2026-11 on two cores of a Sapphire Rapids
/// server.
const INLINE_NS: usize = 12_000;

/// Matrices above this time wake sleeping threads. A lower threshold slows tiny models down: their
/// step ends before another core can help, or waits for a busy core.
const WAKE_NS: usize = 30_000;

/// Matrices between this time and [`WAKE_NS`] are shared with spinning threads only.
const HAND_OVER_NS: usize = 6_000;

/// Time of the last pieces of a large matrix. Threads with different last pieces wait for half of
/// it on average, less than they spin before they sleep.
const LAST_NS: usize = 24_000;

/// How the outputs of a matrix are spread over threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Ends of the pieces in order: multiples of 8 (the largest tile), except the last.
    pub ends: Vec<usize>,
    /// Whether the matrix wakes sleeping threads.
    pub wakes: bool,
}

/// Splits the outputs into rounds of pieces, each round half of the remaining outputs: long pieces
/// first, which suit the prefetchers, short ones last, which even out the end. Work that is only
/// worth handing to spinning threads gets one piece per thread; smaller work gets one piece.
pub fn linear_split(outputs: usize, row_bytes: usize, rows: usize, threads: usize) -> Split {
    // A thread reads about 16 bytes of weights per ns, or multiplies them with about 4 rows in that
    // time.
    let nanoseconds = (outputs * row_bytes).saturating_mul(rows.div_ceil(4)) / 16;
    let wakes = nanoseconds >= WAKE_NS;
    let share = |part: usize| outputs.div_ceil(part).next_multiple_of(8);
    let least = match nanoseconds {
        _ if threads == 1 => outputs,
        ..HAND_OVER_NS => outputs,
        HAND_OVER_NS..WAKE_NS => share(threads),
        _ => share((nanoseconds / LAST_NS).max(2 * threads)),
    };
    let (mut ends, mut end) = (Vec::new(), 0);
    while end < outputs {
        let round = (outputs - end).div_ceil(2 * threads).next_multiple_of(8);
        for _ in 0..threads {
            end = outputs.min(end + round.max(least));
            ends.push(end);
            if end == outputs {
                break;
            }
        }
    }
    Split { ends, wakes }
}

/// Rows of inputs that are multiplied with a piece of the matrix while both stay in the
/// second-level cache: a multiple of 6 (the tile) that takes at most 512 KiB.
pub fn linear_rows(row_bytes: usize) -> usize {
    ((512 << 10) / row_bytes.max(1)).max(6) / 6 * 6
}

/// Inputs that tiles of a strip walk before they come back for the next ones: 4 rows of the matrix
/// and 6 rows of inputs of this length stay in the first-level cache.
pub const PACKED_CHUNK: usize = 2048;

/// Most tiles whose sums wait for the next chunk.
pub const PACKED_TILES: usize = 16;

/// Tiles (6 rows of inputs each) that are multiplied with a strip of the matrix: their panels stay
/// in half of the second-level cache.
pub fn packed_tiles(inputs: usize, tiles: usize) -> usize {
    let most = ((1 << 20) / (6 * 2 * inputs.max(1))).clamp(1, PACKED_TILES);
    // Groups of nearly one size.
    tiles.div_ceil(tiles.div_ceil(most).max(1)).max(1)
}

/// Outputs of a strip of a product in AMX tiles.
const TILED_STRIP: usize = 32;

/// [`linear_split`] for a product in AMX tiles, which multiplies about eight times as fast: pieces of whole
/// strips. Computed, not measured.
pub fn tiled_split(outputs: usize, row_bytes: usize, rows: usize, threads: usize) -> Split {
    let Split { mut ends, wakes } = linear_split(outputs, row_bytes, rows.div_ceil(8), threads);
    for end in &mut ends {
        *end = outputs.min(end.next_multiple_of(TILED_STRIP));
    }
    ends.dedup();
    Split { ends, wakes }
}

/// Rows of inputs, whole blocks of 32, that are multiplied with a strip in AMX tiles: packed they take half
/// of the second-level cache, and their sums fit beside them. Computed, not measured.
pub fn tiled_rows(inputs: usize) -> usize {
    ((1 << 20) / (2 * inputs.max(1))).clamp(32, 256) / 32 * 32
}

/// Rows of gradients whose sums in AMX tiles, 4 KiB a row in a piece of 1,024 columns, take half of the
/// second-level cache. Computed, not measured.
pub const TILED_GRADIENT_ROWS: usize = 256;

/// Whether a product without bfloat16 pairs goes over packed f32 panels: for so many rows that
/// sorting the weights by class costs less than reading the inputs again for every four outputs.
/// Both ways have the same bits. Measured 2026-11-23 on an AMD EPYC (Zen 4): 32 rows are faster
/// without panels, 512 rows with them.
pub fn linear_takes_panels(rows: usize, inputs: usize) -> bool {
    // A vector of NEON is four registers, which leaves a tile one row: panels share what they load sooner.
    // Not measured on a processor.
    let most = if cfg!(target_arch = "aarch64") { 4 } else { 32 };
    rows > most && inputs >= 64
}

/// Whether a product of bfloat16 pairs goes over packed panels, as above. Measured 2026-11-27 on an AMD EPYC (Zen 5): 64
/// rows of quantized matrices are faster without panels, 128 of all formats with them.
pub fn pairs_take_panels(rows: usize, inputs: usize) -> bool {
    rows > 64 && inputs >= 64
}

/// Whether a gradient of a product without bfloat16 pairs goes over packed f32 panels. Both ways
/// have the same bits.
pub fn gradient_takes_panels(rows: usize) -> bool {
    rows >= 3
}

/// Steps of a run of a panel, for vectors of `lanes` f32: the run takes 16 KiB, half of the
/// smallest first-level cache, beside the inputs of a tile.
pub fn panel_steps(lanes: usize) -> usize {
    2048 / lanes
}

/// Most rows that share decoded panels. Measured 2026-11-27 on an AMD EPYC (Zen 5): 512 rows at a time are 4 to 8 % faster
/// than 256.
pub const PANEL_GROUP_ROWS: usize = 512;

/// Columns of a piece of a product with a transposed matrix, a multiple of 64: wide, so that rows
/// of the matrix are read in long parts, but several pieces per thread.
pub fn transposed_piece(inputs: usize, threads: usize) -> usize {
    let share = inputs.div_ceil(2 * threads).next_multiple_of(64);
    share.min(1024)
}

/// Whether several threads pack `elements` inputs; packing takes about 1 ns per input.
pub fn packing_is_parallel(elements: usize) -> bool {
    elements >= 2 * INLINE_NS
}

/// Elements of one piece of an element-wise operation; small operations have one piece.
pub fn elementwise_piece(elements: usize, threads: usize) -> usize {
    // About one element per ns.
    if elements < 2 * INLINE_NS { elements.max(1) } else { elements.div_ceil(threads * 4) }
}

/// Query tokens that share the conversion of a page: with all queries of a kv head about 64
/// queries, whose scores stay in the second-level cache up to 8,000 positions.
pub fn attention_tokens(group: usize) -> usize {
    (64 / group.max(1)).clamp(8, 32)
}

/// Whether several threads compute attention with so many multiplications.
pub fn attention_is_parallel(multiplications: usize) -> bool {
    // About 8 per ns.
    multiplications / 8 >= INLINE_NS
}

/// Threads of a CTA that norms a row: whole warps, about eight elements each. A function of the
/// width alone, as sums depend on it. Not measured on a device yet.
pub fn cuda_norm_threads(width: usize) -> u32 {
    (width.div_ceil(8).next_multiple_of(32) as u32).clamp(32, 512)
}

/// Rows that `linear_gemv.cu` takes; more go to `linear_gemm.cu`, with the same bits.
pub const CUDA_GEMV_ROWS: usize = sizes::linear_gemv::MAX_ROWS;

/// Whether the tensor-core products take a matrix: 16-bit arithmetic, and rows of whole blocks of
/// 64 inputs.
pub fn cuda_linear_is_tiled(dtype: DType, inputs: usize) -> bool {
    dtype != DType::F32 && inputs.is_multiple_of(64)
}

/// Bytes of a stored NF4 matrix that `repack.cu` turns into tiles at a time, unless a strip of 16
/// outputs has more: device memory beside the matrix while it is uploaded. Pieces fit in a half of
/// the driver's staging.
pub const CUDA_REPACK_BYTES: usize = 4 << 20;

/// Bytes of workspace of `linear_grad.cu` for the rounded gradients of `rows` rows of `outputs`
/// outputs.
pub fn cuda_linear_grad_workspace(outputs: usize, rows: usize) -> usize {
    outputs.next_multiple_of(sizes::linear_grad::STEP).saturating_mul(rows) * 2
}

/// Up to so many rows, each segment of `linear_grad.cu` has CTAs of its own; for more rows one CTA
/// processes all segments. The bits are the same.
pub const CUDA_LINEAR_GRAD_GEMV_ROWS: usize = sizes::linear_grad::GEMV_ROWS;

/// Steps of 32 outputs of a segment of `linear_grad.cu`: at most 4 segments, of 4,096 outputs at
/// least. It depends on the number of outputs alone, because it defines the order of sums. Not
/// measured on a device yet.
pub fn cuda_linear_grad_segment(outputs: usize) -> usize {
    let steps = outputs.div_ceil(sizes::linear_grad::STEP);
    steps.div_ceil((steps / 128).clamp(1, 4)).max(1)
}

/// Segments of so many steps.
pub fn cuda_linear_grad_segments(outputs: usize, segment: usize) -> usize {
    outputs.div_ceil(sizes::linear_grad::STEP).div_ceil(segment.max(1)).max(1)
}

/// Bytes of workspace of `linear_grad.cu` for the sums of segments that have CTAs of their own.
pub fn cuda_linear_grad_sums(outputs: usize, inputs: usize, rows: usize) -> usize {
    match cuda_linear_grad_segments(outputs, cuda_linear_grad_segment(outputs)) {
        1 => 0,
        segments => rows.min(CUDA_LINEAR_GRAD_GEMV_ROWS) * inputs * segments * 4,
    }
}

/// Sizes of a launch of `linear_gemv.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaGemv {
    /// Tiles of 16 outputs of a CTA: 1 or 2.
    pub m: usize,
    /// Tiles of 8 rows: 1, 2 or 4.
    pub n: usize,
    /// Pipeline stages of a warp: 2 to 4.
    pub stages: usize,
    /// Dynamic shared memory of a CTA.
    pub shared_bytes: usize,
}

/// Sizes for `outputs` outputs in all and up to [`CUDA_GEMV_ROWS`] rows, on a device with
/// `multiprocessors` and `shared_bytes` of shared memory per CTA. Two tiles of outputs halve the
/// reads of activations, if every multiprocessor still gets a CTA. Two CTAs of up to 112 KiB fit an
/// H200, one an RTX. None of this changes a result. Not measured on a device yet.
pub fn cuda_gemv(
    outputs: usize,
    rows: usize,
    is_nf4: bool,
    multiprocessors: usize,
    shared_bytes: usize,
) -> CudaGemv {
    use sizes::linear_gemv::{STAGE_PER_TILE, TABLES_NF4};
    let m = if outputs >= 32 * multiprocessors { 2 } else { 1 };
    let n = match rows {
        0..=8 => 1,
        9..=16 => 2,
        _ => 4,
    };
    let table_bytes = if is_nf4 { TABLES_NF4 } else { 0 };
    let left = shared_bytes.min(112 << 10).saturating_sub(table_bytes);
    let stages = (left / (STAGE_PER_TILE * m)).clamp(2, 4);
    CudaGemv { m, n, stages, shared_bytes: table_bytes + stages * STAGE_PER_TILE * m }
}

/// Bytes of so many rows, a multiple of 8, as `linear_pack.cu` makes them.
pub fn cuda_packed_bytes(inputs: usize, rows: usize) -> usize {
    inputs.saturating_mul(rows * 2)
}

/// Sizes of a launch of `linear_cluster.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaCluster {
    /// Number of the variant: for 1, 8, 16 or 32 rows.
    pub variant: usize,
    /// CTAs.
    pub grid: usize,
    /// Blocks of 64 inputs of each segment whose activations are in shared memory at a time.
    pub window: usize,
    /// Dynamic shared memory of a CTA.
    pub shared_bytes: usize,
}

/// Whether `linear_cluster.cu` takes products of so many inputs: its CTAs share up to 8 segments.
pub fn cuda_may_cluster(inputs: usize) -> bool {
    inputs > 256 * (sizes::linear_cluster::SEGMENTS - 1)
}

/// Sizes for `strips` strips of 16 outputs in all and up to [`CUDA_GEMV_ROWS`] rows of `inputs`
/// inputs, on a device with `multiprocessors` and `shared_bytes` of shared memory per CTA. A
/// multiprocessor gets one CTA. A cluster needs multiprocessors of one processing cluster; 16 of one
/// are taken for granted, so a few may stay idle. None of this changes a result. Not measured on a
/// device yet.
pub fn cuda_cluster(
    strips: usize,
    inputs: usize,
    rows: usize,
    is_nf4: bool,
    multiprocessors: usize,
    shared_bytes: usize,
) -> CudaCluster {
    use sizes::linear_cluster::{CLUSTER, ROW_BYTES, SEGMENTS, SUM_BYTES, TABLE_NF4, TILE_BYTES};
    let variant = match rows {
        0..=1 => 0,
        2..=8 => 1,
        9..=16 => 2,
        _ => 3,
    };
    let units = (multiprocessors / 16 * (16 / CLUSTER)).max(1);
    let row_bytes = [ROW_BYTES, TILE_BYTES, 2 * TILE_BYTES, 4 * TILE_BYTES][variant];
    let block_bytes = SEGMENTS / CLUSTER * row_bytes;
    let segment = inputs.div_ceil(256).div_ceil(SEGMENTS) * 4;
    let table_bytes = if is_nf4 { TABLE_NF4 } else { 0 };
    let left = shared_bytes.saturating_sub(table_bytes + SUM_BYTES);
    let window = (left / block_bytes).clamp(1, segment);
    let shared_bytes = table_bytes + window * block_bytes + SUM_BYTES;
    CudaCluster { variant, grid: strips.clamp(1, units) * CLUSTER, window, shared_bytes }
}

/// Most rows of one expert in a tile of `experts_gemv.cu`, and in one of `experts_gemm.cu`.
pub const CUDA_EXPERT_ROWS: (usize, usize) =
    (sizes::experts_gemv::MAX_ROWS, sizes::experts_gemm::TILE_ROWS);

/// Whether `experts_gemv.cu` computes the products of `pairs` pairs of tokens and experts. It does
/// while an expert has at most 32 rows on average, so that its weights are read hardly more than
/// once. The bits are the same. Not measured on a device yet.
pub fn cuda_experts_use_gemv(pairs: usize, experts: usize) -> bool {
    pairs <= CUDA_EXPERT_ROWS.0 * experts
}

/// Most tiles of `rows` rows of one expert that the pairs of `tokens` tokens with `chosen` experts
/// each can make.
pub fn cuda_expert_tiles(tokens: usize, chosen: usize, experts: usize, rows: usize) -> usize {
    let pairs = tokens * chosen;
    let taking = experts.min(pairs);
    if tokens <= rows {
        return taking;
    }
    // Full tiles, and one that is not full for each expert.
    (pairs / rows + taking).min(pairs)
}

/// Most new tokens of `attention_decode.cu`, where each token reads its cache by itself; more go to
/// `attention_prefill.cu`, with the same bits. Not measured on a device yet.
pub const CUDA_ATTENTION_DECODE_TOKENS: usize = 32;

/// Keys of a tile of `attention_decode.cu`.
pub const CUDA_ATTENTION_TILE: usize = sizes::attention_decode::TILE_KEYS;

/// Bytes of workspace of `attention_decode.cu` for its largest batch, with `positions` positions
/// per row.
pub fn cuda_attention_workspace(heads: usize, head_dim: usize, positions: usize) -> usize {
    let tiles = positions.div_ceil(CUDA_ATTENTION_TILE);
    let floats = CUDA_ATTENTION_DECODE_TOKENS * heads * (head_dim + 4);
    (4 * floats).saturating_mul(tiles).min(CUDA_ATTENTION_WORKSPACE_BYTES)
}

/// Head dimensions of `attention_grad.cu`.
pub const CUDA_ATTENTION_GRAD_DIMS: [usize; 5] = [64, 80, 96, 112, 128];

/// Bytes of score gradients of 16 queries and a tile of keys in `attention_grad.cu`: 2 per pair.
pub const CUDA_SCORE_GRAD_BYTES: usize = sizes::attention_grad::SCORE_GRAD_BYTES;

/// Most bytes of score gradients at a time, unless one tile takes more: 2,048 keys of a unit of a
/// 70B block, whose tiles make two CTAs for each multiprocessor of an H200. Not measured on a
/// device yet.
pub const CUDA_ATTENTION_GRAD_BYTES: usize = 64 << 20;

/// Tiles of keys, of `tiles`, that `attention_grad.cu` processes at a time for `blocks` blocks of
/// 16 queries within `most_bytes` bytes.
pub fn cuda_attention_grad_tiles(blocks: usize, tiles: usize, most_bytes: usize) -> usize {
    let fit = most_bytes / (CUDA_SCORE_GRAD_BYTES * blocks.max(1));
    fit.clamp(1, tiles.max(1))
}

/// Most bytes of score gradients for at most `blocks` blocks of rows with `positions` positions.
pub fn cuda_attention_grad_workspace(blocks: usize, positions: usize) -> usize {
    let tile = CUDA_SCORE_GRAD_BYTES.saturating_mul(blocks);
    tile.saturating_mul(positions.div_ceil(CUDA_ATTENTION_TILE))
        .min(tile.max(CUDA_ATTENTION_GRAD_BYTES))
}

/// Splits of `attention_decode.cu`: CTAs that share the tiles of one kv head of one token, for
/// `pairs` pairs of kv head and token. The grid has twice the CTAs that the device holds at a time,
/// so that the last wave is short. The bits do not depend on it. Not measured on a device yet.
pub fn cuda_attention_splits(multiprocessors: usize, pairs: usize) -> usize {
    const HELD: usize = 6;
    (2 * HELD * multiprocessors.max(1)).div_ceil(pairs.max(1)).clamp(1, 1024)
}

/// Rows of threads of a CTA of `attention_join` for so many pairs of a token and a head: each
/// multiprocessor has registers for about 16 warps of it, which one wave of CTAs is to have. None of
/// this changes a result. Not measured on a device yet.
pub fn cuda_attention_mergers(multiprocessors: usize, pairs: usize) -> usize {
    let rows = 16 * multiprocessors.max(1) / pairs.max(1);
    rows.clamp(1, sizes::attention_decode::MERGERS)
}

/// Most bytes of workspace of attention in recorded decode steps: a quarter of a million positions
/// of a 70B model.
pub const CUDA_STEP_WORKSPACE_BYTES: usize = 128 << 20;

/// Most bytes of workspace of `attention_decode.cu`; larger steps go to `attention_prefill.cu`.
pub const CUDA_ATTENTION_WORKSPACE_BYTES: usize = 512 << 20;

/// Whether the ranks of a group sum a message in two shots: with two ranks one shot reads as much,
/// and a short message is bound by the second wait. The bits are the same. (Estimated: a wait takes
/// about 3 us, in which NVLink moves about 512 KB and PCIe less.)
pub fn cuda_exchange_takes_two_shots(world: usize, values: usize) -> bool {
    world > 2 && values >= 512 * 1024 / 4 / (world - 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_of_gradients_are_few_and_cover_the_outputs() {
        for (outputs, segments) in
            [(1, 1), (1024, 1), (8160, 1), (8192, 2), (14336, 3), (28672, 4), (1 << 20, 4)]
        {
            let segment = cuda_linear_grad_segment(outputs);
            assert_eq!(cuda_linear_grad_segments(outputs, segment), segments);
            assert!(segment * segments * 32 >= outputs && segment * (segments - 1) * 32 < outputs);
        }
        assert_eq!(cuda_linear_grad_sums(8192, 64, 100), 32 * 64 * 2 * 4);
        assert_eq!(cuda_linear_grad_sums(4096, 64, 100), 0);
    }

    #[test]
    fn products_of_clusters_fit_the_device() {
        use sizes::linear_cluster::{CLUSTER, SEGMENTS};
        // An H200; the fewest inputs on a device too small for the rule of 16, which gets one cluster.
        for (inputs, multiprocessors) in [(8192, 132), (28672, 132), (1856, 16), (1856, 4)] {
            for rows in [1, 2, 8, 9, 16, 17, 32] {
                for is_nf4 in [false, true] {
                    let sizes = cuda_cluster(512, inputs, rows, is_nf4, multiprocessors, 227 << 10);
                    let segment = inputs.div_ceil(256).div_ceil(SEGMENTS) * 4;
                    assert!(sizes.shared_bytes <= 227 << 10, "{rows} x {inputs}: {sizes:?}");
                    assert!((1..=segment).contains(&sizes.window), "{rows} x {inputs}: {sizes:?}");
                    assert!(sizes.grid <= multiprocessors.max(CLUSTER), "{rows} x {inputs}");
                    assert!([1, 8, 16, 32][sizes.variant] >= rows);
                }
            }
        }
        // The multiprocessors that do not fill a group of 16 stay idle.
        assert_eq!(cuda_cluster(512, 8192, 1, true, 132, 227 << 10).grid, 128);
        assert!(!cuda_may_cluster(1792) && cuda_may_cluster(1856));
    }

    #[test]
    fn there_are_tiles_for_any_choice_of_experts() {
        let tiles = |counts: &[usize], rows: usize| -> usize {
            counts.iter().map(|count| count.div_ceil(rows)).sum()
        };
        for (tokens, chosen, experts, worst) in [
            (1, 2, 8, vec![1, 1]),
            (32, 2, 8, vec![9; 7]),
            (33, 2, 3, vec![33, 32, 1]),
            (97, 2, 5, vec![33, 33, 33, 33, 62]),
            (256, 1, 4, vec![65, 65, 65, 61]),
        ] {
            for rows in [32, 128] {
                let room = cuda_expert_tiles(tokens, chosen, experts, rows);
                assert!(room >= tiles(&worst, rows), "{tokens} x {chosen} of {experts}");
                assert!(room <= tokens * chosen && room > 0);
            }
        }
    }

    #[test]
    fn pieces_cover_the_outputs_and_little_work_is_one_piece() {
        let awake = |ends: &[usize]| Split { ends: ends.to_vec(), wakes: false };
        assert_eq!(linear_split(64, 512, 1, 2), awake(&[64]));
        assert_eq!(linear_split(352, 512, 1, 2), awake(&[176, 352]));
        assert_eq!(linear_split(4096, 8192, 1, 1).ends, [4096]);
        for (outputs, threads) in [(4096, 2), (11008, 7), (9, 4), (32000, 64), (0, 3)] {
            let Split { ends, wakes } = linear_split(outputs, 8192, 16, threads);
            assert_eq!(ends.last().copied().unwrap_or(0), outputs);
            assert!(ends.is_sorted_by(|a, b| a < b) && wakes == (outputs > 9));
            let (_, inner) = ends.split_last().unwrap_or((&0, &[]));
            assert!(inner.iter().all(|end| end.is_multiple_of(8)));
            assert!(outputs < 4096 || ends.len() >= 2 * threads);
        }
        for (inputs, tiles) in [(1, 1), (4096, 3), (11008, 86), (usize::MAX / 24, 5)] {
            let group = packed_tiles(inputs, tiles);
            assert!((1..=PACKED_TILES).contains(&group));
        }
        assert!(linear_rows(16) >= 6 && linear_rows(usize::MAX) == 6);
        for (outputs, threads) in [(4096, 2), (11008, 7), (9, 4), (32000, 64), (70, 3), (0, 3)] {
            let Split { ends, .. } = tiled_split(outputs, 8192, 512, threads);
            assert_eq!(ends.last().copied().unwrap_or(0), outputs);
            assert!(ends.is_sorted_by(|a, b| a < b));
            let (_, inner) = ends.split_last().unwrap_or((&0, &[]));
            assert!(inner.iter().all(|end| end.is_multiple_of(32)));
        }
        assert_eq!([1, 4096, usize::MAX / 2].map(tiled_rows), [256, 128, 32]);
    }
}
