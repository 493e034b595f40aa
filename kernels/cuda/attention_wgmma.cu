// Attention of prefill on warpgroups (wgmma.cuh): out = softmax(q K^T) V for many new tokens.
//
// Shapes: q, out f32 [tokens, heads, D]; pages as in pages.cuh; logsum f32 [tokens, heads] where a
//   gradient needs it.
// Reference: kernels/src/ops/attention.rs. Order of sums: attention.cuh. A token has the same bits
//   as in attention_decode.cu on devices whose wgmma sums as mma.sync does; the host uses this
//   kernel on no other device.
// Grid: tiles of 128 queries of a row (query = token * group + head of the group) x kv heads x
//   rows. Tiles that see most keys come first.
// CTA: two warpgroups of 64 queries each share tiles of 64 keys and values. cp.async fills a ring
//   of stages; rows are swizzled, so that tensor cores read keys by rows of 128 bytes and values by
//   columns, in rows of 128, 64 or 32 bytes that D fills (WGMMA_ROW). Queries, scores and weights
//   stay in registers. The product of earlier groups of tiles waits in `out`.
// Pipeline: a warpgroup issues the product of tile t with its values together with the scores of
//   tile t + 1, merges the former while the latter runs, then computes the softmax of the scores.
//   The first warpgroup does so after the barrier of a tile, the second one before it: while one of
//   them multiplies, the other one computes its softmax.
// Operations: 4 D per query and visible key; 1,024 tokens of a 70B block without a prefix: 17
//   GFLOP, computed 22 us at 788 TFLOP/s. L2 gives keys and values once per 128 queries: 128
//   operations per byte, 6.2 TB/s at that rate.
// Expected bound (computed): a tile of a warpgroup at D 128 takes 512 cycles of the tensor cores.
//   Each warp issues about 500 instructions: 276 for the softmax (36 of them ex2, 72 cycles), 150
//   to merge, 60 to copy. Two warps per scheduler take 1,000 issue slots beside 1,024 cycles of
//   products, about 0.6 of the peak.
// Variants: one per D and dtype. Limits: D 64, 80, 96, 112, 128; bf16, f16. Everything else:
//   attention_prefill.cu.
// Source: Shah and others, FlashAttention-3 (arXiv 2407.08608), with two warpgroups in alternation;
//   here no producer warp exists and tiles are summed separately.
// Architectures: 90a
// expects attention_wgmma_*: loop HGMMA LDGSTS; only LDGSTS.128; no HMMA LDG.U8 LDG.U16
#include "attention.cuh"
#include "wgmma.cuh"

#define QUERIES 128
#define STAGES  4

// Layout of a stage: a tile of keys, parts of 64 dimensions, [64 keys, 128 bytes] each; then the
// values, parts of [64 keys, ROW bytes] each.
template <int D> struct StageLayout {
    static constexpr uint32_t PART = TILE_KEYS * 128, KEYS = (D + 63) / 64 * PART,
                              ROW = WGMMA_ROW<D>, VALUE_PART = TILE_KEYS * ROW,
                              STAGE = KEYS + TILE_KEYS * D * 2;
    static_assert(STAGE % 1024 == 0, "tiles begin at multiples of 1024");
};
// Shared memory: STAGES stages; what each thread keeps of earlier groups.
template <int D> constexpr uint32_t RING = STAGES * StageLayout<D>::STAGE;
template <int D> constexpr uint32_t SHARED = RING<D> + 2 * QUERIES * 16;
EXPORT(QUERIES, QUERIES);
EXPORT(SHARED_D64, SHARED<64>);
EXPORT(SHARED_D80, SHARED<80>);
EXPORT(SHARED_D96, SHARED<96>);
EXPORT(SHARED_D112, SHARED<112>);
EXPORT(SHARED_D128, SHARED<128>);

// Copies keys and values of positions first .. first + 64 of a row, with zeros from `end` on. Where
// rows of values are shorter than 128 bytes, eight lanes copy such rows of neighbouring keys, whose
// 128 bytes have no bank conflict.
template <int D, class T>
__device__ __forceinline__ void copy_stage(unsigned char* to, const T* pages, const uint32_t* table,
                                           uint32_t kv_heads, uint32_t head, uint32_t first,
                                           uint32_t end) {
    typedef StageLayout<D> Layout;
    constexpr uint32_t PIECES = D / 8, IN_ROW = Layout::ROW / 16;
#pragma unroll
    for (uint32_t i = threadIdx.x; i < TILE_KEYS * PIECES; i += 2 * 128) {
        constexpr bool BY_PARTS = Layout::ROW < 128;
        const uint32_t key = BY_PARTS ? i / IN_ROW % TILE_KEYS : i / PIECES,
                       piece =
                           BY_PARTS ? i / (IN_ROW * TILE_KEYS) * IN_ROW + i % IN_ROW : i % PIECES,
                       position = first + key;
        const bool valid = position < end;
        const T* from = pages;
        if (valid)
            from += vector_at(table[position / PAGE_TOKENS], kv_heads, head, 0, position, D) +
                    piece * 8;
        cp_async16(to + piece / 8 * Layout::PART + wgmma_piece(key, piece % 8), from, valid);
        cp_async16(to + Layout::KEYS + piece / IN_ROW * Layout::VALUE_PART +
                       wgmma_piece<Layout::ROW>(key, piece % IN_ROW),
                   valid ? from + PAGE_TOKENS * D : from, valid);
    }
}

template <int D, class T>
__device__ __forceinline__ void attention_wgmma(const float* q, const T* pages,
                                                const uint32_t* words, const float* slopes,
                                                float* out, float* logsum, uint32_t kv_heads,
                                                uint32_t group, const Scoring& scoring) {
    SMEM_DYN(shared);
    constexpr uint32_t STAGE = StageLayout<D>::STAGE;
    const Batch batch = batch_of(words);
    const uint32_t kv_head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32,
                   heads = kv_heads * group;
    const uint32_t start = batch.row_start[row], tokens = batch.row_start[row + 1] - start,
                   prefix = batch.row_prefix[row];
    const uint32_t first_query = (gridDim.x - 1 - blockIdx.x) * QUERIES;
    if (first_query >= tokens * group) return;
    const uint32_t last_query = min(first_query + QUERIES, tokens * group) - 1;
    const uint32_t begin = prefix + first_query / group,
                   end = prefix + last_query / group + 1; // positions of the queries
    const uint32_t* table = batch.pages + batch.row_table[row];
    // Uniform within a warp. The shuffle tells the compiler, which then keeps lanes together around
    // barriers.
    const bool is_second = __shfl_sync(~0u, threadIdx.x / 128, 0) != 0;

    // Query of one of this lane's two rows, and the offset of the query and its result.
    auto query_of = [&](int high) {
        return first_query + threadIdx.x / 32 * 16 + high * 8 + lane / 4;
    };
    auto offset_of = [&](uint32_t query) {
        return ((size_t)(start + query / group) * heads + kv_head * group + query % group) * D;
    };

    const uint32_t first_tile =
                       begin + 1 > scoring.window ? (begin + 1 - scoring.window) / TILE_KEYS : 0,
                   tiles = (end + TILE_KEYS - 1) / TILE_KEYS;
    auto stage_of = [&](uint32_t tile) { return shared + tile % STAGES * STAGE; };
    auto copy = [&](uint32_t tile) {
        if (tile < tiles)
            copy_stage<D>(stage_of(tile), pages, table, kv_heads, kv_head, tile * TILE_KEYS, end);
        cp_commit();
    };
    for (uint32_t s = 0; s < STAGES - 1; s++) copy(first_tile + s);
    Queries<D> queries;
#pragma unroll
    for (int high = 0; high < 2; high++) {
        const uint32_t query = query_of(high);
        const bool exists = query <= last_query;
        load_query<D, T>(
            queries, high, exists ? q + offset_of(query) : nullptr, prefix + query / group, scoring,
            exists && scoring.alibi_scale != 0.0f ? slopes[kv_head * group + query % group] : 0.0f);
    }
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, o[D / 2] = {}, tile_out[D / 2],
          s[8][4];
    Weights weights;
    float4* kept = reinterpret_cast<float4*>(shared + RING<D>) + threadIdx.x;
    // Adds the group at hand to the earlier ones, and writes the product: for the next group, or
    // divided by the sum.
    auto end_group = [&](uint32_t tile, bool is_last) {
        Groups groups(kept, tile / GROUP_TILES > first_tile / GROUP_TILES);
#pragma unroll
        for (int high = 0; high < 2; high++) {
            float old_share, new_share;
            groups.add(high, top[high], sum[high], old_share, new_share);
            const uint32_t query = query_of(high);
            if (query > last_query) continue;
            const float total = groups.sum[high];
            if (is_last && logsum && lane % 4 == 0)
                logsum[offset_of(query) / D] = logsum_of(groups.top[high], total);
            float* to = out + offset_of(query) + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                float2 pair = groups.product(to + n * 8, o[n * 4 + high * 2],
                                             o[n * 4 + high * 2 + 1], old_share, new_share);
                if (is_last) pair.x = __fdiv_rn(pair.x, total), pair.y = __fdiv_rn(pair.y, total);
                *reinterpret_cast<float2*>(to + n * 8) = pair;
            }
        }
        groups.keep(kept);
    };
    auto score = [&](uint32_t tile) {
        const uint64_t keys = wgmma_rows(stage_of(tile));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            wgmma<T, 64>(reinterpret_cast<float (&)[32]>(s), queries.q[i],
                         keys + i / 4 * (StageLayout<D>::PART / 16) + i % 4 * 2, i > 0);
        wgmma_commit();
    };
    cp_wait<STAGES - 2>();
    fence_proxy_async();
    __syncthreads();
    score(first_tile);
    wgmma_wait<0>(reinterpret_cast<float (&)[32]>(s));
#pragma unroll 1
    for (uint32_t tile = first_tile; tile < tiles; tile++) {
        if (is_second) softmax_tile<D, T>(weights, s, queries, tile * TILE_KEYS, scoring);
        cp_wait<STAGES - 3>();
        fence_proxy_async();
        // The next tile has arrived, and all warps have released the last one.
        __syncthreads();
        copy(tile + STAGES - 1);
        if (!is_second) softmax_tile<D, T>(weights, s, queries, tile * TILE_KEYS, scoring);
        const uint64_t values =
            wgmma_columns<D>(stage_of(tile) + StageLayout<D>::KEYS, StageLayout<D>::VALUE_PART);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < TILE_KEYS / 16; j++)
            wgmma<T, D, true>(tile_out, weights.p[j], values + j * StageLayout<D>::ROW, j > 0);
        wgmma_commit();
        score(tile + 1); // after the last tile of no use
        float old_share[2], new_share[2];
#pragma unroll
        for (int high = 0; high < 2; high++) {
            merge(top[high], weights.top[high], old_share[high], new_share[high]);
            sum[high] = merged(sum[high], old_share[high], weights.sum[high], new_share[high]);
        }
        wgmma_wait<1>(tile_out);
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            o[i] = merged(o[i], old_share[i / 2 % 2], tile_out[i], new_share[i / 2 % 2]);
        wgmma_wait<0>(reinterpret_cast<float (&)[32]>(s));
        if (tile % GROUP_TILES == GROUP_TILES - 1 && tile + 1 < tiles) {
            end_group(tile, false);
#pragma unroll
            for (int high = 0; high < 2; high++) top[high] = -INFINITY, sum[high] = 0.0f;
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] = 0.0f;
        }
    }
    cp_wait<0>();
    end_group(tiles - 1, true);
}

#define ATTENTION_WGMMA(D, T)                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_wgmma_##T##_d##D(               \
        const float* __restrict__ q /* [tokens, heads, D] */, const T* __restrict__ pages,         \
        const uint32_t* __restrict__ batch,                                                        \
        const float* __restrict__ slopes /* [heads] or null */, float* __restrict__ out,           \
        float* __restrict__ logsum /* [tokens, heads] or null */, uint32_t kv_heads,               \
        uint32_t group, float inverse_divisor, float alibi_scale, uint32_t window) {               \
        attention_wgmma<D, T>(q, pages, batch, slopes, out, logsum, kv_heads, group,               \
                              {inverse_divisor, alibi_scale, window});                             \
    }
#define ATTENTION_WGMMA_SIZES(T)                                                                   \
    ATTENTION_WGMMA(64, T)                                                                         \
    ATTENTION_WGMMA(80, T)                                                                         \
    ATTENTION_WGMMA(96, T)                                                                         \
    ATTENTION_WGMMA(112, T)                                                                        \
    ATTENTION_WGMMA(128, T)
ATTENTION_WGMMA_SIZES(bf16)
ATTENTION_WGMMA_SIZES(f16)
