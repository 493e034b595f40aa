// Attention of prefill: out = softmax(q K^T) V for many new tokens, on tensor cores (mma.sync).
//
// Shapes: q, out f32 [tokens, heads, D]; pages as in pages.cuh; logsum f32 [tokens, heads] where a
//   gradient needs it.
// Reference: kernels/src/ops/attention.rs. Order of sums: attention.cuh, so a token has the same
//   bits as in attention_decode.cu.
// Grid: tiles of 64 queries of a row (query = token * group + head of the group) x kv heads x rows.
// CTA: 4 warps of 16 queries each share tiles of 64 keys and values, from the first tile that its
//   first query sees to the last tile that its last query sees. cp.async fills two stages. A tile's
//   product is merged 16 dimensions at a time, which takes 8 registers instead of D / 2. The
//   product of earlier groups of tiles waits in `out`.
// Operations: 4 D per query and visible key; 1,024 tokens of a 70B block without a prefix: 17
//   GFLOP, computed 22 us at 788 TFLOP/s.
// Variants: one per D and dtype. Limits: D 64, 80, 96, 112, 128; bf16, f16. Everything else:
//   attention_generic.cu.
// expects attention_prefill_*: only LDGSTS.128; loop HMMA LDGSTS LDSM; no LDG.U8 LDG.U16
#include "attention.cuh"

#define QUERIES 64
#define STAGES  2
// Shared memory: STAGES stages of TILE_KEYS keys, then their values; maxima and sums of each
// thread.
template <int D> constexpr uint32_t RING = STAGES * 2 * Pitch<D>::TILE;
template <int D> constexpr uint32_t SHARED = RING<D> + 2 * 128 * 16;
EXPORT(QUERIES, QUERIES);
EXPORT(SHARED_D64, SHARED<64>);
EXPORT(SHARED_D80, SHARED<80>);
EXPORT(SHARED_D96, SHARED<96>);
EXPORT(SHARED_D112, SHARED<112>);
EXPORT(SHARED_D128, SHARED<128>);

template <int D, class T>
__device__ __forceinline__ void attention_prefill(const float* q, const T* pages,
                                                  const uint32_t* words, const float* slopes,
                                                  float* out, float* logsum, uint32_t kv_heads,
                                                  uint32_t group, const Scoring& scoring) {
    SMEM_DYN(shared);
    const Batch batch = batch_of(words);
    const uint32_t kv_head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32,
                   heads = kv_heads * group;
    const uint32_t start = batch.row_start[row], tokens = batch.row_start[row + 1] - start,
                   prefix = batch.row_prefix[row];
    const uint32_t first_query = blockIdx.x * QUERIES;
    if (first_query >= tokens * group) return;
    const uint32_t last_query = min(first_query + QUERIES, tokens * group) - 1;
    const uint32_t begin = prefix + first_query / group,
                   end = prefix + last_query / group + 1; // positions of the queries
    const uint32_t* table = batch.pages + batch.row_table[row];

    // Query of one of this lane's two rows, and the offset of the query and its result.
    auto query_of = [&](int high) {
        return first_query + threadIdx.x / 32 * 16 + high * 8 + lane / 4;
    };
    auto offset_of = [&](uint32_t query) {
        return ((size_t)(start + query / group) * heads + kv_head * group + query % group) * D;
    };
    Queries<D> queries;
#pragma unroll
    for (int high = 0; high < 2; high++) {
        const uint32_t query = query_of(high);
        const bool exists = query <= last_query;
        load_query<D, T>(
            queries, high, exists ? q + offset_of(query) : nullptr, prefix + query / group, scoring,
            exists && scoring.alibi_scale != 0.0f ? slopes[kv_head * group + query % group] : 0.0f);
    }
    float o[D / 16][2][4] = {};
    const uint32_t first_tile =
                       begin + 1 > scoring.window ? (begin + 1 - scoring.window) / TILE_KEYS : 0,
                   tiles = (end + TILE_KEYS - 1) / TILE_KEYS;
    // Maxima and sums: of earlier groups, and of the group at hand.
    float4 *kept = reinterpret_cast<float4*>(shared + RING<D>) + threadIdx.x, *own = kept + 128;
    const float4 none = make_float4(-INFINITY, -INFINITY, 0.0f, 0.0f);
    *own = none;
    // Adds the group at hand to the earlier ones, and writes the product: for the next group, or
    // divided by the sum.
    auto end_group = [&](uint32_t tile, bool is_last) {
        const Groups group_of(own, true);
        Groups groups(kept, tile / GROUP_TILES > first_tile / GROUP_TILES);
#pragma unroll
        for (int high = 0; high < 2; high++) {
            float old_share, new_share;
            groups.add(high, group_of.top[high], group_of.sum[high], old_share, new_share);
            const uint32_t query = query_of(high);
            const bool exists = query <= last_query;
            const float total = groups.sum[high];
            if (exists && is_last && logsum && lane % 4 == 0)
                logsum[offset_of(query) / D] = logsum_of(groups.top[high], total);
            float* to = out + offset_of(query) + lane % 4 * 2;
#pragma unroll
            for (int piece = 0; piece < D / 16; piece++) {
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    if (!exists) continue;
                    float* at = to + piece * 16 + n * 8;
                    float2 pair = groups.product(at, o[piece][n][high * 2],
                                                 o[piece][n][high * 2 + 1], old_share, new_share);
                    if (is_last)
                        pair.x = __fdiv_rn(pair.x, total), pair.y = __fdiv_rn(pair.y, total);
                    *reinterpret_cast<float2*>(at) = pair;
                }
            }
        }
        groups.keep(kept);
    };
    auto copy = [&](uint32_t tile) {
        unsigned char* to = shared + tile % STAGES * 2 * Pitch<D>::TILE;
        copy_tile<D>(to, pages, table, kv_heads, kv_head, 0, tile * TILE_KEYS, end, threadIdx.x,
                     128);
        copy_tile<D>(to + Pitch<D>::TILE, pages, table, kv_heads, kv_head, 1, tile * TILE_KEYS, end,
                     threadIdx.x, 128);
    };
    copy(first_tile);
    cp_commit();
#pragma unroll 1
    for (uint32_t tile = first_tile; tile < tiles; tile++) {
        if (tile + 1 < tiles) copy(tile + 1);
        cp_commit();
        cp_wait<1>();
        __syncthreads();
        const unsigned char* keys = shared + tile % STAGES * 2 * Pitch<D>::TILE;
        Weights weights;
        score_tile<D, T>(weights, queries, keys, tile * TILE_KEYS, scoring);
        float old_share[2], new_share[2];
        Groups group_of(own, true);
#pragma unroll
        for (int high = 0; high < 2; high++)
            group_of.add(high, weights.top[high], weights.sum[high], old_share[high],
                         new_share[high]);
        group_of.keep(own);
#pragma unroll
        for (int piece = 0; piece < D / 16; piece++) {
            float tile_out[2][4];
            multiply_values<D, T>(tile_out, weights, keys + Pitch<D>::TILE, piece);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    o[piece][n][i] =
                        merged(o[piece][n][i], old_share[i / 2], tile_out[n][i], new_share[i / 2]);
        }
        __syncthreads();
        if (tile % GROUP_TILES == GROUP_TILES - 1 && tile + 1 < tiles) {
            end_group(tile, false);
            *own = none;
#pragma unroll
            for (int piece = 0; piece < D / 16; piece++)
#pragma unroll
                for (int i = 0; i < 8; i++) o[piece][i / 4][i % 4] = 0.0f;
        }
    }
    cp_wait<0>();
    end_group(tiles - 1, true);
}

#define ATTENTION_PREFILL(D, T)                                                                    \
    extern "C" __global__ void __launch_bounds__(128, 2) attention_prefill_##T##_d##D(             \
        const float* __restrict__ q /* [tokens, heads, D] */, const T* __restrict__ pages,         \
        const uint32_t* __restrict__ batch,                                                        \
        const float* __restrict__ slopes /* [heads] or null */, float* __restrict__ out,           \
        float* __restrict__ logsum /* [tokens, heads] or null */, uint32_t kv_heads,               \
        uint32_t group, float inverse_divisor, float alibi_scale, uint32_t window) {               \
        attention_prefill<D, T>(q, pages, batch, slopes, out, logsum, kv_heads, group,             \
                                {inverse_divisor, alibi_scale, window});                           \
    }
#define ATTENTION_PREFILL_SIZES(T)                                                                 \
    ATTENTION_PREFILL(64, T)                                                                       \
    ATTENTION_PREFILL(80, T)                                                                       \
    ATTENTION_PREFILL(96, T)                                                                       \
    ATTENTION_PREFILL(112, T)                                                                      \
    ATTENTION_PREFILL(128, T)
ATTENTION_PREFILL_SIZES(bf16)
ATTENTION_PREFILL_SIZES(f16)
