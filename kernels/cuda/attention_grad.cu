// Gradient of attention on the tensor cores: that of the queries, and what the queries of a piece add to the gradients of keys and values.
//   P = softmax of the scores; dP = dO V^T; dS = P (dP - sum of dP P)
//   dq = dS K / divisor; dk += dS^T q / divisor; dv += P^T dO          summed over the query heads of a kv head
//
// q T and grad bf16 [tokens, heads, D], rounded before (convert.cu); pages as in pages.cuh; q_grad f32 as q; k_grad, v_grad f32
// [positions, kv_heads, D]. Scores and softmax are f32; P, dS and what they multiply is bf16, of f16 pages too: a gradient has the range of an f32,
// which f16 has not. CPU reference: kernels/src/ops/attention_grad.rs.
// 16 queries, the M or K of an mma, are the tokens of one page (16 positions from a multiple of 16 on) and one head.
//
// attention_grad_queries: grid 4 x 16 queries of a row x kv heads x rows, those that see most keys first. CTA: 4 warps, 16 queries each, over tiles
// of 64 keys and values that they share, copied two deep by cp.async; taken 32 keys at a time. It walks the tiles twice: for the maximum, the
// sum of the weights and that of dP P, left in `stats` (one float4 per token and head: maximum, 1 / sum, sum of dP P, nothing), then for dq.
// attention_grad_keys: grid tiles of 64 keys x kv heads x rows. CTA: 4 warps; a warp holds its 16 keys and values as fragments, and their gradients
// as sums that begin with what is there. The queries that see them go by 16 at a time through a ring of copies: pages from the last to the
// first, in each the heads from first to last. So an element of dk and dv has one order of additions, 16 queries of a page at a time, wherever a
// sequence is cut at multiples of a page; no two CTAs add to the same element, and there are no atomics.
//
// Floor: 10 D operations per pair (5 products: FlashAttention-2 is given maximum and sum by forward; here they are made again, 9 products). 1,024
// tokens of a 70B block: 43 GFLOP, 54 us at 788 TFLOP/s. Keys: per 16 queries and warp 64 mma at D 128, 512 cycles of a quarter of the
// tensor cores; 4 warps read 64 KB of shared memory, 512 cycles: neither waits much for the other.
// Variants: one per D and dtype. Limits: D 64, 80, 96, 112, 128; bf16, f16. All else: attention_grad_any.cu.
// Source: Dao, FlashAttention-2 (arXiv 2307.08691), with a pass for keys and one for queries.
// expects attention_grad_*: only LDGSTS.128; loop HMMA LDGSTS LDSM; no LDG.U8 LDG.U16
#include "attention.cuh"

#define HALF_KEYS 32
#define RING 3

// A pair of T as a pair of bf16.
template <class T> __device__ __forceinline__ uint32_t as_bf16(uint32_t pair);
template <> __device__ __forceinline__ uint32_t as_bf16<bf16>(uint32_t pair) { return pair; }
template <> __device__ __forceinline__ uint32_t as_bf16<f16>(uint32_t pair) {
    return pack<bf16>(widen(__ushort_as_half((unsigned short)pair)), widen(__ushort_as_half((unsigned short)(pair >> 16))));
}

// A score of a query and the key at `position`; `product` that of the two.
template <class T> __device__ __forceinline__ float score_of(float product, float slope, uint32_t position, const Scoring& scoring) {
    const float bias = scoring.alibi_scale == 0.0f ? 0.0f : __fmul_rn(scoring.alibi_scale, rounded<T>(__fmul_rn(slope, (float)position)));
    return __fadd_rn(__fmul_rn(product, scoring.inverse_divisor), bias);
}

// Fragments of 16 queries (A operand): this lane has parts of rows lane / 4 and lane / 4 + 8, null where there is none.
template <int D, class T> __device__ __forceinline__ void load_rows(uint32_t (&a)[D / 16][4], const T* low, const T* high) {
    const uint32_t at = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        a[i][0] = low ? *reinterpret_cast<const uint32_t*>(low + i * 16 + at) : 0;
        a[i][1] = high ? *reinterpret_cast<const uint32_t*>(high + i * 16 + at) : 0;
        a[i][2] = low ? *reinterpret_cast<const uint32_t*>(low + i * 16 + at + 8) : 0;
        a[i][3] = high ? *reinterpret_cast<const uint32_t*>(high + i * 16 + at + 8) : 0;
    }
}

template <int D, class T>
__device__ __forceinline__ void queries(const T* q, const bf16* grad, const T* pages, const uint32_t* words, const float* slopes, float* q_grad,
                                        float4* stats, uint32_t kv_heads, uint32_t group, const Scoring& scoring) {
    SMEM_DYN(shared); // 2 x 64 keys and 64 values
    constexpr uint32_t BYTES = Pitch<D>::BYTES, TILE = Pitch<D>::TILE;
    const Batch batch = batch_of(words);
    const uint32_t kv_head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, heads = kv_heads * group;
    const uint32_t start = batch.row_start[row], tokens = batch.row_start[row + 1] - start, prefix = batch.row_prefix[row], until = prefix + tokens;
    if (tokens == 0) return;
    const uint32_t first_page = prefix / PAGE_TOKENS, count = ((until - 1) / PAGE_TOKENS - first_page + 1) * group;
    const uint32_t first = (gridDim.x - 1 - blockIdx.x) * 4, mine = first + threadIdx.x / 32;
    if (first >= count) return;
    const uint32_t begin = max(prefix, (first_page + first / group) * PAGE_TOKENS);
    const uint32_t end = min(until, (first_page + min(first + 3, count - 1) / group + 1) * PAGE_TOKENS);
    const uint32_t* table = batch.pages + batch.row_table[row];

    const uint32_t head = kv_head * group + mine % group, page = (first_page + mine / group) * PAGE_TOKENS;
    uint32_t position[2], sees[2]; // of this lane's two queries, and the first that they see
    bool exists[2];
    size_t place[2];
#pragma unroll
    for (int high = 0; high < 2; high++) {
        position[high] = page + lane / 4 + high * 8;
        exists[high] = mine < count && position[high] >= prefix && position[high] < until;
        sees[high] = position[high] + 1 > scoring.window ? position[high] + 1 - scoring.window : 0;
        place[high] = exists[high] ? (size_t)(start + position[high] - prefix) * heads + head : 0;
    }
    const float slope = scoring.alibi_scale != 0.0f && mine < count ? slopes[head] : 0.0f;
    uint32_t query[D / 16][4], given[D / 16][4];
    load_rows<D>(query, exists[0] ? q + place[0] * D : nullptr, exists[1] ? q + place[1] * D : nullptr);
    load_rows<D>(given, exists[0] ? grad + place[0] * D : nullptr, exists[1] ? grad + place[1] * D : nullptr);

    const uint32_t first_tile = begin + 1 > scoring.window ? (begin + 1 - scoring.window) / TILE_KEYS : 0;
    const uint32_t tiles = (end + TILE_KEYS - 1) / TILE_KEYS - first_tile;
    auto copy = [&](uint32_t turn) {
        unsigned char* to = shared + turn % 2 * 2 * TILE;
        const uint32_t from = (first_tile + turn % tiles) * TILE_KEYS;
        copy_tile<D>(to, pages, table, kv_heads, kv_head, 0, from, end, threadIdx.x, 128);
        copy_tile<D>(to + TILE, pages, table, kv_heads, kv_head, 1, from, end, threadIdx.x, 128);
    };
    float top[2] = {-INFINITY, -INFINITY}, share[2] = {0.0f, 0.0f}, mean[2] = {0.0f, 0.0f}, sum[D / 8][4] = {};
    copy(0);
    cp_commit();
    for (uint32_t turn = 0; turn < 2 * tiles; turn++) {
        if (turn + 1 < 2 * tiles) copy(turn + 1);
        cp_commit();
        cp_wait<1>();
        __syncthreads();
        if (turn == tiles) {
#pragma unroll
            for (int high = 0; high < 2; high++) {
                share[high] = __fadd_rn(share[high], __shfl_xor_sync(~0u, share[high], 1));
                share[high] = __fadd_rn(share[high], __shfl_xor_sync(~0u, share[high], 2));
                mean[high] = __fadd_rn(mean[high], __shfl_xor_sync(~0u, mean[high], 1));
                mean[high] = __fadd_rn(mean[high], __shfl_xor_sync(~0u, mean[high], 2));
                share[high] = share[high] > 0.0f ? __fdiv_rn(1.0f, share[high]) : 0.0f;
                mean[high] = __fmul_rn(mean[high], share[high]);
                if (top[high] == -INFINITY) top[high] = 0.0f;
                if (exists[high] && lane % 4 == 0) stats[place[high]] = make_float4(top[high], share[high], mean[high], 0.0f);
            }
        }
        const unsigned char* keys = shared + turn % 2 * 2 * TILE;
#pragma unroll 1
        for (uint32_t half = 0; half < TILE_KEYS / HALF_KEYS; half++) {
            const uint32_t from = (first_tile + turn % tiles) * TILE_KEYS + half * HALF_KEYS;
            if (from > page + PAGE_TOKENS - 1) break; // nobody of this warp sees them
            const unsigned char* own = keys + (half * HALF_KEYS + lane % 8) * BYTES;
            float s[4][4], p[4][4];
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
#pragma unroll
                for (int i = 0; i < 4; i++) s[n][i] = s[n + 1][i] = p[n][i] = p[n + 1][i] = 0.0f;
                const unsigned char* at = own + (n * 8 + lane / 16 * 8) * BYTES + lane / 8 % 2 * 16;
#pragma unroll
                for (int i = 0; i < D / 16; i++) {
                    uint32_t b[4];
                    ldsm4(b, at + i * 32);
                    mma<T>(s[n], query[i], b[0], b[1]);
                    mma<T>(s[n + 1], query[i], b[2], b[3]);
                    ldsm4(b, at + TILE + i * 32);
                    mma<bf16>(p[n], given[i], as_bf16<T>(b[0]), as_bf16<T>(b[1]));
                    mma<bf16>(p[n + 1], given[i], as_bf16<T>(b[2]), as_bf16<T>(b[3]));
                }
            }
            float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint32_t key = from + n * 8 + lane % 4 * 2 + i % 2;
                    const bool seen = exists[i / 2] && key <= position[i / 2] && key >= sees[i / 2];
                    s[n][i] = seen ? score_of<T>(s[n][i], slope, key, scoring) : -INFINITY;
                    highest[i / 2] = fmaxf(highest[i / 2], s[n][i]);
                }
            if (turn < tiles) {
#pragma unroll
                for (int high = 0; high < 2; high++) {
                    highest[high] = fmaxf(highest[high], __shfl_xor_sync(~0u, highest[high], 1));
                    highest[high] = fmaxf(highest[high], __shfl_xor_sync(~0u, highest[high], 2));
                    float old_share, new_share;
                    merge(top[high], highest[high], old_share, new_share);
                    share[high] = __fmul_rn(share[high], old_share);
                    mean[high] = __fmul_rn(mean[high], old_share);
                }
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float base = top[i / 2] == -INFINITY ? 0.0f : top[i / 2];
                        const float weight = exp2f(__fmul_rn(__fsub_rn(s[n][i], base), LOG2_E));
                        share[i / 2] = __fadd_rn(share[i / 2], weight);
                        mean[i / 2] = __fmaf_rn(weight, p[n][i], mean[i / 2]);
                    }
                continue;
            }
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float weight = __fmul_rn(exp2f(__fmul_rn(__fsub_rn(s[n][i], top[i / 2]), LOG2_E)), share[i / 2]);
                    s[n][i] = __fmul_rn(__fmul_rn(weight, __fsub_rn(p[n][i], mean[i / 2])), scoring.inverse_divisor);
                }
            const unsigned char* at = own + lane / 8 % 2 * 8 * BYTES + lane / 16 * 16;
#pragma unroll
            for (int j = 0; j < HALF_KEYS / 16; j++) {
                const uint32_t a[4] = {pack<bf16>(s[2 * j][0], s[2 * j][1]), pack<bf16>(s[2 * j][2], s[2 * j][3]),
                                       pack<bf16>(s[2 * j + 1][0], s[2 * j + 1][1]), pack<bf16>(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
                for (int piece = 0; piece < D / 16; piece++) {
                    uint32_t b[4];
                    ldsm4_t(b, at + j * 16 * BYTES + piece * 32);
                    mma<bf16>(sum[2 * piece], a, as_bf16<T>(b[0]), as_bf16<T>(b[1]));
                    mma<bf16>(sum[2 * piece + 1], a, as_bf16<T>(b[2]), as_bf16<T>(b[3]));
                }
            }
        }
        __syncthreads();
    }
    cp_wait<0>();
#pragma unroll
    for (int high = 0; high < 2; high++) {
        if (!exists[high]) continue;
        float* to = q_grad + place[high] * D + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < D / 8; n++) *reinterpret_cast<float2*>(to + n * 8) = make_float2(sum[n][high * 2], sum[n][high * 2 + 1]);
    }
}

template <int D, class T>
__device__ __forceinline__ void keys(const T* q, const bf16* grad, const T* pages, const uint32_t* words, const float* slopes,
                                     const uint32_t* starts, const float4* stats, float* k_grad, float* v_grad, uint32_t kv_heads, uint32_t group,
                                     const Scoring& scoring) {
    SMEM_DYN(shared); // 64 keys, 64 values, then 3 stages of 16 queries, gradients and stats
    constexpr uint32_t BYTES = Pitch<D>::BYTES, TILE = Pitch<D>::TILE, STAGE = 2 * PAGE_TOKENS * BYTES + PAGE_TOKENS * 16;
    const Batch batch = batch_of(words);
    const uint32_t kv_head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, heads = kv_heads * group;
    const uint32_t start = batch.row_start[row], tokens = batch.row_start[row + 1] - start, prefix = batch.row_prefix[row], until = prefix + tokens;
    const uint32_t first_key = blockIdx.x * TILE_KEYS;
    if (tokens == 0 || first_key >= until) return;
    // Queries that see one of the keys, and their pages.
    const uint32_t last_key = min(first_key + TILE_KEYS, until) - 1, lowest = max(prefix, first_key);
    const uint32_t highest = (uint32_t)min((uint64_t)until - 1, (uint64_t)last_key + scoring.window - 1);
    if (highest < lowest) return;
    const uint32_t last_page = highest / PAGE_TOKENS, count = (last_page - lowest / PAGE_TOKENS + 1) * group;
    const uint32_t* table = batch.pages + batch.row_table[row];
    unsigned char* ring = shared + 2 * TILE;

    auto copy = [&](uint32_t turn) {
        unsigned char* to = ring + turn % RING * STAGE;
        const uint32_t page = (last_page - turn / group) * PAGE_TOKENS, head = kv_head * group + turn % group;
        for (uint32_t i = threadIdx.x; i < PAGE_TOKENS * (D / 8); i += 128) {
            const uint32_t index = i / (D / 8), piece = i % (D / 8), position = page + index;
            const bool valid = position >= prefix && position < until;
            const size_t from = valid ? ((size_t)(start + position - prefix) * heads + head) * D + piece * 8 : 0;
            cp_async16(to + index * BYTES + piece * 16, q + from, valid);
            cp_async16(to + (PAGE_TOKENS + index) * BYTES + piece * 16, grad + from, valid);
        }
        if (threadIdx.x < PAGE_TOKENS) {
            const uint32_t position = page + threadIdx.x;
            const bool valid = position >= prefix && position < until;
            cp_async16(to + 2 * PAGE_TOKENS * BYTES + threadIdx.x * 16, stats + (valid ? (size_t)(start + position - prefix) * heads + head : 0), valid);
        }
    };
    copy_tile<D>(shared, pages, table, kv_heads, kv_head, 0, first_key, until, threadIdx.x, 128);
    copy_tile<D>(shared + TILE, pages, table, kv_heads, kv_head, 1, first_key, until, threadIdx.x, 128);
    for (uint32_t s = 0; s < RING - 1; s++) {
        if (s < count) copy(s);
        cp_commit();
    }

    const uint32_t own = first_key + threadIdx.x / 32 * 16, mine = own + lane / 4; // first key of this warp; of this lane, beside mine + 8
    float dk[D / 8][4], dv[D / 8][4];
    auto place_of = [&](int high) { return ((size_t)(starts[row] + mine + high * 8) * kv_heads + kv_head) * D + lane % 4 * 2; };
#pragma unroll
    for (int high = 0; high < 2; high++) {
        const bool exists = mine + high * 8 < until;
        const size_t place = exists ? place_of(high) : 0;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            const float2 zero = make_float2(0.0f, 0.0f);
            const float2 of_k = exists ? *reinterpret_cast<const float2*>(k_grad + place + n * 8) : zero;
            const float2 of_v = exists ? *reinterpret_cast<const float2*>(v_grad + place + n * 8) : zero;
            dk[n][high * 2] = of_k.x, dk[n][high * 2 + 1] = of_k.y;
            dv[n][high * 2] = of_v.x, dv[n][high * 2 + 1] = of_v.y;
        }
    }
    uint32_t key[D / 16][4], value[D / 16][4];
    for (uint32_t turn = 0; turn < count; turn++) {
        cp_wait<RING - 2>();
        __syncthreads();
        if (turn + RING - 1 < count) copy(turn + RING - 1);
        cp_commit();
        if (turn == 0) {
            const unsigned char* at = shared + (threadIdx.x / 32 * 16 + lane % 16) * BYTES + lane / 16 * 16;
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                ldsm4(key[i], at + i * 32);
                ldsm4(value[i], at + TILE + i * 32);
#pragma unroll
                for (int j = 0; j < 4; j++) value[i][j] = as_bf16<T>(value[i][j]);
            }
        }
        const uint32_t page = (last_page - turn / group) * PAGE_TOKENS;
        if (page + PAGE_TOKENS - 1 < own) continue; // its queries see no key of this warp
        const unsigned char* stage = ring + turn % RING * STAGE;
        const float4* stat = reinterpret_cast<const float4*>(stage + 2 * PAGE_TOKENS * BYTES);
        float s[2][4] = {}, p[2][4] = {};
        const unsigned char* by_query = stage + (lane % 8 + lane / 16 * 8) * BYTES + lane / 8 % 2 * 16;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t b[4];
            ldsm4(b, by_query + i * 32);
            mma<T>(s[0], key[i], b[0], b[1]);
            mma<T>(s[1], key[i], b[2], b[3]);
            ldsm4(b, by_query + PAGE_TOKENS * BYTES + i * 32);
            mma<bf16>(p[0], value[i], b[0], b[1]);
            mma<bf16>(p[1], value[i], b[2], b[3]);
        }
        const float slope = scoring.alibi_scale != 0.0f ? slopes[kv_head * group + turn % group] : 0.0f;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t index = n * 8 + lane % 4 * 2 + i, position = page + index;
                const float4 of = stat[index];
#pragma unroll
                for (int high = 0; high < 2; high++) {
                    const uint32_t at = mine + high * 8;
                    const bool seen = at <= position && position - at < scoring.window;
                    const float score = score_of<T>(s[n][high * 2 + i], slope, at, scoring);
                    const float weight = seen ? __fmul_rn(exp2f(__fmul_rn(__fsub_rn(score, of.x), LOG2_E)), of.y) : 0.0f;
                    s[n][high * 2 + i] = weight;
                    p[n][high * 2 + i] = __fmul_rn(__fmul_rn(weight, __fsub_rn(p[n][high * 2 + i], of.z)), scoring.inverse_divisor);
                }
            }
        const uint32_t weights[4] = {pack<bf16>(s[0][0], s[0][1]), pack<bf16>(s[0][2], s[0][3]), pack<bf16>(s[1][0], s[1][1]), pack<bf16>(s[1][2], s[1][3])};
        const uint32_t changes[4] = {pack<bf16>(p[0][0], p[0][1]), pack<bf16>(p[0][2], p[0][3]), pack<bf16>(p[1][0], p[1][1]), pack<bf16>(p[1][2], p[1][3])};
        const unsigned char* by_dim = stage + (lane % 8 + lane / 8 % 2 * 8) * BYTES + lane / 16 * 16;
#pragma unroll
        for (int piece = 0; piece < D / 16; piece++) {
            uint32_t b[4];
            ldsm4_t(b, by_dim + PAGE_TOKENS * BYTES + piece * 32);
            mma<bf16>(dv[2 * piece], weights, b[0], b[1]);
            mma<bf16>(dv[2 * piece + 1], weights, b[2], b[3]);
            ldsm4_t(b, by_dim + piece * 32);
            mma<bf16>(dk[2 * piece], changes, as_bf16<T>(b[0]), as_bf16<T>(b[1]));
            mma<bf16>(dk[2 * piece + 1], changes, as_bf16<T>(b[2]), as_bf16<T>(b[3]));
        }
    }
    cp_wait<0>();
#pragma unroll
    for (int high = 0; high < 2; high++) {
        if (mine + high * 8 >= until) continue;
        const size_t place = place_of(high);
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            *reinterpret_cast<float2*>(k_grad + place + n * 8) = make_float2(dk[n][high * 2], dk[n][high * 2 + 1]);
            *reinterpret_cast<float2*>(v_grad + place + n * 8) = make_float2(dv[n][high * 2], dv[n][high * 2 + 1]);
        }
    }
}

#define ATTENTION_GRAD(D, T)                                                                                                         \
    extern "C" __global__ void __launch_bounds__(128, 2) attention_grad_queries_##T##_d##D(                                          \
        const T* __restrict__ q /* [tokens, heads, D] */, const bf16* __restrict__ grad /* as q */, const T* __restrict__ pages,     \
        const uint32_t* __restrict__ batch, const float* __restrict__ slopes /* [heads] or null */,                                  \
        float* __restrict__ q_grad /* as q */, float4* __restrict__ stats /* [tokens, heads] */, uint32_t kv_heads, uint32_t group,   \
        float inverse_divisor, float alibi_scale, uint32_t window) {                                                                 \
        queries<D, T>(q, grad, pages, batch, slopes, q_grad, stats, kv_heads, group, {inverse_divisor, alibi_scale, window});        \
    }                                                                                                                                \
    extern "C" __global__ void __launch_bounds__(128, 2) attention_grad_keys_##T##_d##D(                                             \
        const T* __restrict__ q /* [tokens, heads, D] */, const bf16* __restrict__ grad /* as q */, const T* __restrict__ pages,     \
        const uint32_t* __restrict__ batch, const float* __restrict__ slopes /* [heads] or null */,                                  \
        const uint32_t* __restrict__ starts /* [rows] */, const float4* __restrict__ stats /* [tokens, heads] */,                    \
        float* __restrict__ k_grad /* [positions, kv_heads, D] */, float* __restrict__ v_grad /* as k_grad */, uint32_t kv_heads,    \
        uint32_t group, float inverse_divisor, float alibi_scale, uint32_t window) {                                                 \
        keys<D, T>(q, grad, pages, batch, slopes, starts, stats, k_grad, v_grad, kv_heads, group, {inverse_divisor, alibi_scale, window}); \
    }
#define ATTENTION_GRAD_SIZES(T) \
    ATTENTION_GRAD(64, T)       \
    ATTENTION_GRAD(80, T)       \
    ATTENTION_GRAD(96, T)       \
    ATTENTION_GRAD(112, T)      \
    ATTENTION_GRAD(128, T)
ATTENTION_GRAD_SIZES(bf16)
ATTENTION_GRAD_SIZES(f16)
