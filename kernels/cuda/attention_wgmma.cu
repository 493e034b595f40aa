// out = softmax(q K^T) V for many new tokens (prefill) on devices whose warpgroups multiply (wgmma.cuh).
//
// q f32 [tokens, heads, D]; pages as in pages.cuh; out f32 [tokens, heads, D]; logsum f32 [tokens, heads] where a gradient wants it.
// CPU reference: kernels/src/ops/attention.rs. Order: attention.cuh, so a token has the bits that attention_few.cu gives it where wgmma sums as
// mma.sync does; the host takes this kernel on no other device.
// Grid: tiles of 128 queries of a row (query = token * group + head of the group), those that see most keys first, x kv heads x rows. CTA: two
// warpgroups of 64 queries each, on tiles of 64 keys and values that they share, in a ring of copies by cp.async: rows of 128 bytes, swizzled,
// so that the tensor cores read keys as they lie and values by columns. Queries, scores and weights stay in registers.
// A warpgroup issues the product of tile t with its values and the scores of tile t + 1 together, merges the one while the other runs, then makes
// weights of the scores. The barrier of a tile stands before the weights in the first warpgroup and behind them in the second: one multiplies
// while the other weighs.
// Floor: 4 D operations per query and key that it sees; 1,024 tokens of a 70B block after nothing: 17 GFLOP, 22 us at 788 TFLOP/s. Keys and values
// come from L2 once per 128 queries: 128 operations per byte, 6.2 TB/s at that rate.
// A tile of a warpgroup at D 128: 512 cycles of the tensor cores, and of each of its warps about 500 instructions (276 for weights, 150 to merge, 60
// to copy; 36 of them powers of two, 72 cycles): the two warps of a quarter take 1,000 issue slots beside 1,024 cycles of products. Expected: 0.6
// of the peak.
// Variants: one per D and dtype. Limits: D 64, 80, 96, 112, 128; bf16, f16. All else: attention_many.cu.
// Source: Shah and others, FlashAttention-3 (arXiv 2407.08608): two warpgroups that take turns; ours has no producer and sums tiles apart.
// Architectures: 90a
// expects attention_wgmma_*: loop HGMMA LDGSTS; only LDGSTS.128; no HMMA LDG.U8 LDG.U16
#include "attention.cuh"
#include "wgmma.cuh"

#define QUERIES 128
#define RING 4

// A tile of keys in shared memory, and then as many values: pieces of 64 dimensions, [64 keys, 128 bytes] each.
template <int D> struct Piled {
    static constexpr uint32_t PIECE = TILE_KEYS * 128, HALF = (D + 63) / 64 * PIECE, STAGE = 2 * HALF;
};

// Keys and values of positions first .. first + 64 of a row; zeros from `end` on.
template <int D, class T>
__device__ __forceinline__ void copy_stage(unsigned char* to, const T* pages, const uint32_t* table, uint32_t kv_heads, uint32_t head, uint32_t first,
                                           uint32_t end) {
    constexpr uint32_t PIECES = D / 8;
#pragma unroll
    for (uint32_t i = threadIdx.x; i < TILE_KEYS * PIECES; i += 2 * 128) {
        const uint32_t key = i / PIECES, piece = i % PIECES, position = first + key;
        const bool valid = position < end;
        const T* from = pages;
        if (valid) from += vector_at(table[position / PAGE_TOKENS], kv_heads, head, 0, position, D) + piece * 8;
        unsigned char* at = to + piece / 8 * Piled<D>::PIECE + wgmma_piece(key, piece % 8);
        cp_async16(at, from, valid);
        cp_async16(at + Piled<D>::HALF, valid ? from + PAGE_TOKENS * D : from, valid);
    }
}

template <int D, class T>
__device__ __forceinline__ void attention_wgmma(const float* q, const T* pages, const uint32_t* words, const float* slopes, float* out, float* logsum,
                                                uint32_t kv_heads, uint32_t group, const Scoring& scoring) {
    SMEM_DYN(shared); // 4 x 64 keys and 64 values
    constexpr uint32_t STAGE = Piled<D>::STAGE;
    const Batch batch = batch_of(words);
    const uint32_t kv_head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, heads = kv_heads * group;
    const uint32_t start = batch.row_start[row], tokens = batch.row_start[row + 1] - start, prefix = batch.row_prefix[row];
    const uint32_t first_query = (gridDim.x - 1 - blockIdx.x) * QUERIES;
    if (first_query >= tokens * group) return;
    const uint32_t last_query = min(first_query + QUERIES, tokens * group) - 1;
    const uint32_t begin = prefix + first_query / group, end = prefix + last_query / group + 1; // positions of the queries
    const uint32_t* table = batch.pages + batch.row_table[row];
    // The same for all threads of a warp, as the compiler must know: lanes stay together around barriers.
    const bool is_second = __shfl_sync(~0u, threadIdx.x / 128, 0) != 0;

    // Query of one of this lane's two rows, and where it and its result begin.
    auto query_of = [&](int high) { return first_query + threadIdx.x / 32 * 16 + high * 8 + lane / 4; };
    auto place_of = [&](uint32_t query) { return ((size_t)(start + query / group) * heads + kv_head * group + query % group) * D; };

    const uint32_t first_tile = begin + 1 > scoring.window ? (begin + 1 - scoring.window) / TILE_KEYS : 0, tiles = (end + TILE_KEYS - 1) / TILE_KEYS;
    auto stage_of = [&](uint32_t tile) { return shared + tile % RING * STAGE; };
    auto copy = [&](uint32_t tile) {
        if (tile < tiles) copy_stage<D>(stage_of(tile), pages, table, kv_heads, kv_head, tile * TILE_KEYS, end);
        cp_commit();
    };
    for (uint32_t s = 0; s < RING - 1; s++) copy(first_tile + s);
    Queries<D> queries;
#pragma unroll
    for (int high = 0; high < 2; high++) {
        const uint32_t query = query_of(high);
        const bool exists = query <= last_query;
        load_query<D, T>(queries, high, exists ? q + place_of(query) : nullptr, prefix + query / group, scoring,
                         exists && scoring.alibi_scale != 0.0f ? slopes[kv_head * group + query % group] : 0.0f);
    }
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, o[D / 2] = {}, part[D / 2], s[8][4];
    Weights weights;
    auto score = [&](uint32_t tile) {
        const uint64_t keys = wgmma_rows(stage_of(tile));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            wgmma<T, 64>(reinterpret_cast<float(&)[32]>(s), queries.q[i], keys + i / 4 * (Piled<D>::PIECE / 16) + i % 4 * 2, i > 0);
        wgmma_commit();
    };
    cp_wait<RING - 2>();
    fence_proxy_async();
    __syncthreads();
    score(first_tile);
    wgmma_wait<0>(reinterpret_cast<float(&)[32]>(s));
#pragma unroll 1
    for (uint32_t tile = first_tile; tile < tiles; tile++) {
        if (is_second) settle<D, T>(weights, s, queries, tile * TILE_KEYS, scoring);
        cp_wait<RING - 3>();
        fence_proxy_async();
        // The next tile is there, and everybody is done with the last one.
        __syncthreads();
        copy(tile + RING - 1);
        if (!is_second) settle<D, T>(weights, s, queries, tile * TILE_KEYS, scoring);
        const uint64_t values = wgmma_columns(stage_of(tile) + Piled<D>::HALF, Piled<D>::PIECE);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < TILE_KEYS / 16; j++) wgmma<T, D, true>(part, weights.p[j], values + j * 128, j > 0);
        wgmma_commit();
        score(tile + 1); // after the last tile of no use
        float old_share[2], new_share[2];
#pragma unroll
        for (int high = 0; high < 2; high++) {
            merge(top[high], weights.top[high], old_share[high], new_share[high]);
            sum[high] = merged(sum[high], old_share[high], weights.sum[high], new_share[high]);
        }
        wgmma_wait<1>(part);
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = merged(o[i], old_share[i / 2 % 2], part[i], new_share[i / 2 % 2]);
        wgmma_wait<0>(reinterpret_cast<float(&)[32]>(s));
    }
    cp_wait<0>();
#pragma unroll
    for (int high = 0; high < 2; high++) {
        const uint32_t query = query_of(high);
        if (query > last_query) continue;
        if (logsum && lane % 4 == 0) logsum[place_of(query) / D] = logsum_of(top[high], sum[high]);
        float* to = out + place_of(query) + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            const float a = __fdiv_rn(o[n * 4 + high * 2], sum[high]), b = __fdiv_rn(o[n * 4 + high * 2 + 1], sum[high]);
            *reinterpret_cast<float2*>(to + n * 8) = make_float2(a, b);
        }
    }
}

#define ATTENTION_WGMMA(D, T)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_wgmma_##T##_d##D(                                                 \
        const float* __restrict__ q /* [tokens, heads, D] */, const T* __restrict__ pages, const uint32_t* __restrict__ batch,       \
        const float* __restrict__ slopes /* [heads] or null */, float* __restrict__ out,                                             \
        float* __restrict__ logsum /* [tokens, heads] or null */, uint32_t kv_heads, uint32_t group, float inverse_divisor,          \
        float alibi_scale, uint32_t window) {                                                                                        \
        attention_wgmma<D, T>(q, pages, batch, slopes, out, logsum, kv_heads, group, {inverse_divisor, alibi_scale, window});        \
    }
#define ATTENTION_WGMMA_SIZES(T) \
    ATTENTION_WGMMA(64, T)       \
    ATTENTION_WGMMA(80, T)       \
    ATTENTION_WGMMA(96, T)       \
    ATTENTION_WGMMA(112, T)      \
    ATTENTION_WGMMA(128, T)
ATTENTION_WGMMA_SIZES(bf16)
ATTENTION_WGMMA_SIZES(f16)
