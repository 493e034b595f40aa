// What the attention kernels share: one warp, 16 queries, 64 keys, and the order in which keys
// enter a result.
//
// Order of sums: keys are processed in tiles of 64 whose positions begin at multiples of 64. A tile
//   is computed by itself: its scores, their maximum, exp(score - maximum) rounded to T, the sum of
//   the unrounded exponentials, and their product with the values. Tiles form groups of GROUP_TILES
//   whose positions begin at multiples of 1,024. merge() below adds the tiles of a group from first
//   to last, beginning with nothing, then the groups in the same way. A tile or group that a query
//   does not see changes no bit. So a token's bits depend neither on the other tokens of the batch,
//   nor on where a sequence was cut, nor on the kernel.
//
// A query is a pair of a token and a head of the group; queries of one kv head share its keys, so 8
// heads of one token fill half of the 16 rows of an mma.
// Rounding: scores are rounded to T as in the definition; weights are rounded before the division
//   by their sum.
// Source: Dao, FlashAttention-2 (arXiv 2307.08691), with independent tiles.
#pragma once
#include "ex2.cuh"
#include "pages.cuh"
#include "pairs.cuh"

#define TILE_KEYS 64
EXPORT(TILE_KEYS, TILE_KEYS);
#define GROUP_TILES 16
#define LOG2_E      1.44269504f
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// Bytes of a key or value in shared memory: 16 more than its elements, so that 8 rows of an
// ldmatrix use different banks.
template <int D> struct Pitch {
    static constexpr uint32_t BYTES = D * 2 + 16;
    static constexpr uint32_t TILE = TILE_KEYS * BYTES;
};

// Copies keys (half 0) or values (1) of positions first .. first + 64 of a row. From `end` on it
// writes zeros, because a weight of zero must meet a finite number.
template <int D, class T>
__device__ __forceinline__ void copy_tile(unsigned char* to, const T* pages, const uint32_t* table,
                                          uint32_t kv_heads, uint32_t head, uint32_t half,
                                          uint32_t first, uint32_t end, uint32_t thread,
                                          uint32_t threads) {
    constexpr uint32_t PIECES = D / 8;
    for (uint32_t i = thread; i < TILE_KEYS * PIECES; i += threads) {
        const uint32_t key = i / PIECES, piece = i % PIECES, position = first + key;
        const bool valid = position < end;
        const T* from = pages;
        if (valid)
            from += vector_at(table[position / PAGE_TOKENS], kv_heads, head, half, position, D) +
                    piece * 8;
        cp_async16(to + key * Pitch<D>::BYTES + piece * 16, from, valid);
    }
}

// Parameters of the softmax.
struct Scoring {
    float inverse_divisor;
    float alibi_scale; // 0: no bias
    uint32_t window;   // positions that a query sees, its own included
};

// Turns the products of a query with two keys into scores, rounded as in the definition.
template <class T>
__device__ __forceinline__ void score_pair(float& a, float& b, const Scoring& scoring) {
    round_pair<T>(a, b);
    a = __fmul_rn(a, scoring.inverse_divisor), b = __fmul_rn(b, scoring.inverse_divisor);
    round_pair<T>(a, b);
}

// A score with an ALiBi bias, not rounded yet.
template <class T>
__device__ __forceinline__ float biased(float product, float slope, uint32_t position,
                                        const Scoring& scoring) {
    const float bias =
        __fmul_rn(scoring.alibi_scale, rounded<T>(__fmul_rn(slope, (float)position)));
    return __fadd_rn(__fmul_rn(product, scoring.inverse_divisor), bias);
}

// The 16 queries of a warp. This lane has elements of rows lane / 4 and lane / 4 + 8.
template <int D> struct Queries {
    uint32_t q[D / 16][4];
    uint32_t first[2], last[2]; // positions that the two rows see; last < first: none
    float slope[2];
};

// Loads one of the two rows. `from` is its query, or null for a missing row.
template <int D, class T>
__device__ __forceinline__ void load_query(Queries<D>& queries, int high, const float* from,
                                           uint32_t position, const Scoring& scoring, float slope) {
    const uint32_t q = threadIdx.x % 4;
    queries.first[high] =
        from ? (position + 1 > scoring.window ? position + 1 - scoring.window : 0) : 1;
    queries.last[high] = from ? position : 0;
    queries.slope[high] = slope;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const float2 a = from ? *reinterpret_cast<const float2*>(from + i * 16 + q * 2)
                              : make_float2(0.0f, 0.0f);
        const float2 b = from ? *reinterpret_cast<const float2*>(from + i * 16 + q * 2 + 8)
                              : make_float2(0.0f, 0.0f);
        queries.q[i][high] = pack<T>(a.x, a.y);
        queries.q[i][high + 2] = pack<T>(b.x, b.y);
    }
}

// Softmax of a tile: weights as fragments, and maximum and sum of the two rows, equal in all lanes
// of a quad.
struct Weights {
    uint32_t p[TILE_KEYS / 16][4];
    float top[2], sum[2];
};

// Softmax of the products of the queries with a tile of keys that begins at `first`. s[n] has the
// products of keys 8 n .. 8 n + 7 as sums of an mma.
template <int D, class T>
__device__ __forceinline__ void softmax_tile(Weights& weights, float (&s)[8][4],
                                             const Queries<D>& queries, uint32_t first,
                                             const Scoring& scoring) {
    const uint32_t lane = threadIdx.x % 32;
    // Tiles that both queries see completely need no mask.
    const uint32_t last = first + TILE_KEYS - 1;
    const bool is_whole = first >= max(queries.first[0], queries.first[1]) &&
                          last <= min(queries.last[0], queries.last[1]);
    if (scoring.alibi_scale == 0.0f) {
#pragma unroll
        for (int n = 0; n < 8; n++)
            score_pair<T>(s[n][0], s[n][1], scoring), score_pair<T>(s[n][2], s[n][3], scoring);
    } else {
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[n][i] = biased<T>(s[n][i], queries.slope[i / 2],
                                    first + n * 8 + lane % 4 * 2 + i % 2, scoring);
            round_pair<T>(s[n][0], s[n][1]), round_pair<T>(s[n][2], s[n][3]);
        }
    }
    if (!__all_sync(~0u, is_whole)) {
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t position = first + n * 8 + lane % 4 * 2 + i % 2;
                if (position < queries.first[i / 2] || position > queries.last[i / 2])
                    s[n][i] = -INFINITY;
            }
    }
    float base[2];
#pragma unroll
    for (int high = 0; high < 2; high++) {
        float top = fmaxf(s[0][high * 2], s[0][high * 2 + 1]);
#pragma unroll
        for (int n = 1; n < 8; n++) top = fmaxf(top, fmaxf(s[n][high * 2], s[n][high * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        weights.top[high] = top;
        base[high] = top == -INFINITY ? 0.0f : __fmul_rn(top, LOG2_E);
        weights.sum[high] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[n][i] = ex2(__fmaf_rn(s[n][i], LOG2_E, -base[i / 2]));
            weights.sum[i / 2] = __fadd_rn(weights.sum[i / 2], s[n][i]);
        }
        weights.p[n / 2][n % 2 * 2] = pack<T>(s[n][0], s[n][1]);
        weights.p[n / 2][n % 2 * 2 + 1] = pack<T>(s[n][2], s[n][3]);
    }
#pragma unroll
    for (int high = 0; high < 2; high++) {
        weights.sum[high] =
            __fadd_rn(weights.sum[high], __shfl_xor_sync(~0u, weights.sum[high], 1));
        weights.sum[high] =
            __fadd_rn(weights.sum[high], __shfl_xor_sync(~0u, weights.sum[high], 2));
    }
}

// Multiplies the queries with a tile of keys and computes the softmax.
template <int D, class T>
__device__ __forceinline__ void score_tile(Weights& weights, const Queries<D>& queries,
                                           const unsigned char* keys, uint32_t first,
                                           const Scoring& scoring) {
    const uint32_t lane = threadIdx.x % 32;
    float s[8][4];
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = s[n + 1][i] = 0.0f;
        const unsigned char* row =
            keys + (n * 8 + lane % 8 + lane / 16 * 8) * Pitch<D>::BYTES + lane / 8 % 2 * 16;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t b[4];
            ldsm4(b, row + i * 32);
            mma<T>(s[n], queries.q[i], b[0], b[1]);
            mma<T>(s[n + 1], queries.q[i], b[2], b[3]);
        }
    }
    softmax_tile<D, T>(weights, s, queries, first, scoring);
}

// Product of the weights and 16 dimensions of the values, from dimension 16 `piece` on: `o[0]` has
// the first 8, `o[1]` the others, as fragments.
template <int D, class T>
__device__ __forceinline__ void multiply_values(float (&o)[2][4], const Weights& weights,
                                                const unsigned char* values, int piece) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) o[0][i] = o[1][i] = 0.0f;
    const unsigned char* row =
        values + (lane % 8 + lane / 8 % 2 * 8) * Pitch<D>::BYTES + lane / 16 * 16 + piece * 32;
#pragma unroll
    for (int j = 0; j < TILE_KEYS / 16; j++) {
        uint32_t b[4];
        ldsm4_t(b, row + j * 16 * Pitch<D>::BYTES);
        mma<T>(o[0], weights.p[j], b[0], b[1]);
        mma<T>(o[1], weights.p[j], b[2], b[3]);
    }
}

// Factors of the result so far and of a new tile in the merged result; `top` becomes the maximum of
// both.
__device__ __forceinline__ void merge(float& top, float new_top, float& old_share,
                                      float& new_share) {
    const float both = fmaxf(top, new_top), base = both == -INFINITY ? 0.0f : both;
    old_share = ex2(__fmul_rn(__fsub_rn(top, base), LOG2_E));
    new_share = ex2(__fmul_rn(__fsub_rn(new_top, base), LOG2_E));
    top = both;
}
__device__ __forceinline__ float merged(float old_value, float old_share, float new_value,
                                        float new_share) {
    return __fmaf_rn(old_value, old_share, __fmul_rn(new_value, new_share));
}

// The earlier groups of the two queries of a thread, merged. Kernels of prefill keep them in memory
// between groups, since registers hold no second product: maxima and sums in shared memory of this
// thread's own, the product in `out`, where each thread reads and writes its own elements.
struct Groups {
    float top[2], sum[2];
    bool is_begun; // whether there are any

    __device__ __forceinline__ Groups(const float4* kept, bool begun) : is_begun(begun) {
        const float4 v = begun ? *kept : make_float4(-INFINITY, -INFINITY, 0.0f, 0.0f);
        top[0] = v.x, top[1] = v.y, sum[0] = v.z, sum[1] = v.w;
    }
    __device__ __forceinline__ void keep(float4* kept) const {
        *kept = make_float4(top[0], top[1], sum[0], sum[1]);
    }
    // Adds a group of one of the two queries; its shares in the product.
    __device__ __forceinline__ void add(int high, float group_top, float group_sum,
                                        float& old_share, float& new_share) {
        merge(top[high], group_top, old_share, new_share);
        sum[high] = merged(sum[high], old_share, group_sum, new_share);
    }
    // The product at two neighbouring dimensions with that of a group; `out` has the earlier one.
    __device__ __forceinline__ float2 product(const float* out, float a, float b, float old_share,
                                              float new_share) const {
        const float2 old =
            is_begun ? *reinterpret_cast<const float2*>(out) : make_float2(0.0f, 0.0f);
        return make_float2(merged(old.x, old_share, a, new_share),
                           merged(old.y, old_share, b, new_share));
    }
};

// Logarithm of the sum of the exponentials of a query's scores, which the gradient needs.
__device__ __forceinline__ float logsum_of(float top, float sum) {
    return __fadd_rn(top, logf(sum));
}
