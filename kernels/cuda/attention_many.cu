// out = softmax(q K^T) V for many new tokens (prefill) over the pages of their rows, on tensor cores.
//
// q f32 [tokens, heads, D]; pages as in pages.cuh; out f32 [tokens, heads, D]; logsum f32 [tokens, heads] where a gradient wants it.
// CPU reference: kernels/src/ops/attention.rs. Order: attention.cuh, so a token has the bits that attention_few.cu gives it.
// Grid: tiles of 64 queries of a row (query = token * group + head of the group) x kv heads x rows. CTA: 4 warps with 16 queries each. They
// share tiles of 64 keys and values, copied two deep by cp.async of 16 bytes, from the first tile that its first query sees to the last
// that its last query sees. The product of a tile is merged 16 dimensions at a time: 8 registers, not D / 2.
// Floor: 4 D operations per query and key that it sees; 1,024 tokens of a 70B block after nothing: 17 GFLOP, 22 us at 788 TFLOP/s.
// Variants: one per D and dtype. Limits: D 64, 80, 96, 112, 128; bf16, f16. All else: attention_any.cu.
// expects attention_many_*: only LDGSTS.128; loop HMMA LDGSTS LDSM; no LDG.U8 LDG.U16
#include "attention.cuh"

#define QUERIES 64

template <int D, class T>
__device__ __forceinline__ void attention_many(const float* q, const T* pages, const uint32_t* words, const float* slopes, float* out,
                                               float* logsum, uint32_t kv_heads, uint32_t group, const Scoring& scoring) {
    SMEM_DYN(shared); // 2 x 64 keys and 64 values
    const Batch batch = batch_of(words);
    const uint32_t kv_head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, heads = kv_heads * group;
    const uint32_t start = batch.row_start[row], tokens = batch.row_start[row + 1] - start, prefix = batch.row_prefix[row];
    const uint32_t first_query = blockIdx.x * QUERIES;
    if (first_query >= tokens * group) return;
    const uint32_t last_query = min(first_query + QUERIES, tokens * group) - 1;
    const uint32_t begin = prefix + first_query / group, end = prefix + last_query / group + 1; // positions of the queries
    const uint32_t* table = batch.pages + batch.row_table[row];

    // Query of one of this lane's two rows, and where it and its result begin.
    auto query_of = [&](int high) { return first_query + threadIdx.x / 32 * 16 + high * 8 + lane / 4; };
    auto place_of = [&](uint32_t query) { return ((size_t)(start + query / group) * heads + kv_head * group + query % group) * D; };
    Queries<D> queries;
#pragma unroll
    for (int high = 0; high < 2; high++) {
        const uint32_t query = query_of(high);
        const bool exists = query <= last_query;
        load_query<D, T>(queries, high, exists ? q + place_of(query) : nullptr, prefix + query / group, scoring,
                         exists && scoring.alibi_scale != 0.0f ? slopes[kv_head * group + query % group] : 0.0f);
    }
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, o[D / 16][2][4] = {};

    const uint32_t first_tile = begin + 1 > scoring.window ? (begin + 1 - scoring.window) / TILE_KEYS : 0, tiles = (end + TILE_KEYS - 1) / TILE_KEYS;
    auto copy = [&](uint32_t tile) {
        unsigned char* to = shared + tile % 2 * 2 * Pitch<D>::TILE;
        copy_tile<D>(to, pages, table, kv_heads, kv_head, 0, tile * TILE_KEYS, end, threadIdx.x, 128);
        copy_tile<D>(to + Pitch<D>::TILE, pages, table, kv_heads, kv_head, 1, tile * TILE_KEYS, end, threadIdx.x, 128);
    };
    copy(first_tile);
    cp_commit();
    for (uint32_t tile = first_tile; tile < tiles; tile++) {
        if (tile + 1 < tiles) copy(tile + 1);
        cp_commit();
        cp_wait<1>();
        __syncthreads();
        const unsigned char* keys = shared + tile % 2 * 2 * Pitch<D>::TILE;
        Weights weights;
        weigh<D, T>(weights, queries, keys, tile * TILE_KEYS, scoring);
        float old_share[2], new_share[2];
#pragma unroll
        for (int high = 0; high < 2; high++) {
            merge(top[high], weights.top[high], old_share[high], new_share[high]);
            sum[high] = merged(sum[high], old_share[high], weights.sum[high], new_share[high]);
        }
#pragma unroll
        for (int piece = 0; piece < D / 16; piece++) {
            float part[2][4];
            apply<D, T>(part, weights, keys + Pitch<D>::TILE, piece);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[piece][n][i] = merged(o[piece][n][i], old_share[i / 2], part[n][i], new_share[i / 2]);
        }
        __syncthreads();
    }
    cp_wait<0>();
#pragma unroll
    for (int high = 0; high < 2; high++) {
        const uint32_t query = query_of(high);
        if (query > last_query) continue;
        if (logsum && lane % 4 == 0) logsum[place_of(query) / D] = logsum_of(top[high], sum[high]);
        float* to = out + place_of(query) + lane % 4 * 2;
#pragma unroll
        for (int piece = 0; piece < D / 16; piece++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float a = __fdiv_rn(o[piece][n][high * 2], sum[high]), b = __fdiv_rn(o[piece][n][high * 2 + 1], sum[high]);
                *reinterpret_cast<float2*>(to + piece * 16 + n * 8) = make_float2(a, b);
            }
    }
}

#define ATTENTION_MANY(D, T)                                                                                                         \
    extern "C" __global__ void __launch_bounds__(128, 2) attention_many_##T##_d##D(                                                  \
        const float* __restrict__ q /* [tokens, heads, D] */, const T* __restrict__ pages, const uint32_t* __restrict__ batch,       \
        const float* __restrict__ slopes /* [heads] or null */, float* __restrict__ out,                                             \
        float* __restrict__ logsum /* [tokens, heads] or null */, uint32_t kv_heads, uint32_t group, float inverse_divisor,          \
        float alibi_scale, uint32_t window) {                                                                                        \
        attention_many<D, T>(q, pages, batch, slopes, out, logsum, kv_heads, group, {inverse_divisor, alibi_scale, window});         \
    }
#define ATTENTION_MANY_SIZES(T) \
    ATTENTION_MANY(64, T)       \
    ATTENTION_MANY(80, T)       \
    ATTENTION_MANY(96, T)       \
    ATTENTION_MANY(112, T)      \
    ATTENTION_MANY(128, T)
ATTENTION_MANY_SIZES(bf16)
ATTENTION_MANY_SIZES(f16)
