// Gradient of attention on tensor cores, for the queries, keys and values.
//   P = softmax of the scores; dP = dO V^T; dS = P (dP - sum of dP P)
//   dq = dS K / divisor; dk += dS^T q / divisor; dv += P^T dO
// dk and dv are summed over the query heads of a kv head.
//
// Shapes: q, grad, out, q_grad f32 [tokens, heads, D], with out as attention computed it; logsum
//   f32 [tokens, heads] as attention wrote it; pages as in pages.cuh; k_grad, v_grad f32
//   [positions, kv_heads, D].
// Reference: kernels/src/ops/attention_grad.rs.
// Rounding: P = exp(score - logsum) of scores that are rounded as in attention, so that the rows of
//   P sum to 1; the sum of dP P is dO . out. P, dS and their factors are bf16, also for f16 pages:
//   a gradient has the range of an f32, which f16 lacks. Sums are f32.
// Block: the 16 tokens of a page and one head, the M, N or K of an mma.
//
// attention_grad_begin: one warp per token and head rounds q to T and grad to bf16. It writes
//   `stats`, a float4 per token and head: logsum in powers of two, dO . out / divisor, and two
//   unused floats.
// attention_grad_keys: grid tiles of 64 keys x kv heads x rows; 4 warps. A warp holds 16 keys and
//   values as fragments and accumulates their gradients, beginning with the values in memory. A
//   ring of stages brings the queries that see them, 16 at a time: pages from last to first, in
//   each page the heads from first to last. So every element of dk and dv has one order of
//   additions, wherever a sequence is cut at multiples of a page. No two CTAs add to the same
//   element, and no atomics are needed. The kernel writes dS / divisor to `score_grads`.
// attention_grad_queries: grid 8 blocks of a row x kv heads x rows; blocks that see most keys come
//   first. Each of 4 warps has 2 blocks. The CTA shares tiles of 64 keys and `score_grads`, which
//   cp.async copies three stages deep, and sums dq over the keys from first to last.
// score_grads: bf16 [tiles, blocks, 64 keys, 16 queries] as 8 x 8 matrices: 16 keys of a warp, then
//   rows 0, 8, 0, 8 and columns 0, 0, 8, 8 of them. Tiles of which a block sees nothing are not
//   written. The host processes as many tiles at a time as fit in its memory, from first to last;
//   dq continues from the values in memory, with the same additions.
//
// Operations: 10 D per pair of query and key, the minimum of five products. score_grads takes 4
//   bytes of traffic per pair: computed 0.9 ps at 4.3 TB/s, where recomputing scores and dP would
//   be 4 D operations, 1.3 ps at 400 TFLOP/s. Without logsum and out, the host runs attention
//   first, which adds 2 products. 1,024 tokens of a 70B block: 43 GFLOP, computed 54 us at 788
//   TFLOP/s, and 134 MB of score_grads, 31 us.
// Expected bound (computed) of attention_grad_keys, per 16 queries and warp at D 128: 64 mma, 512
//   cycles of a quarter of the tensor cores; 4 warps read 64 KB of shared memory, also 512 cycles.
// Variants: one per D and dtype. Limits: D 64, 80, 96, 112, 128; bf16, f16. Everything else:
//   attention_grad_generic.cu.
// Source: Dao, FlashAttention-2 (arXiv 2307.08691), with one pass for keys and one for queries.
// expects attention_grad_begin_*: LDG.64 STG.128
// expects attention_grad_keys_*: only LDGSTS.128; loop HMMA LDGSTS LDSM; no LDG.U8 LDG.U16
// expects attention_grad_queries_*: only LDGSTS.128; loop HMMA LDGSTS LDSM; no LDG.U8 LDG.U16
#include "attention.cuh"

#define STAGES       3
#define BLOCKS       8                      // of a CTA of attention_grad_queries
#define KEYS16_BYTES (16 * PAGE_TOKENS * 2) // changes of 16 keys and a block
#define BLOCK_BYTES  (TILE_KEYS / 16 * KEYS16_BYTES)

// Shared memory of attention_grad_keys: TILE_KEYS keys, their values, then STAGES stages of 16
// queries, their gradients and stats.
template <int D>
constexpr uint32_t KEYS_STAGE = 2 * PAGE_TOKENS * Pitch<D>::BYTES + PAGE_TOKENS * 16;
template <int D> constexpr uint32_t KEYS_SHARED = 2 * Pitch<D>::TILE + STAGES * KEYS_STAGE<D>;
// Shared memory of attention_grad_queries: STAGES stages of TILE_KEYS keys and the score gradients
// of BLOCKS blocks.
template <int D> constexpr uint32_t QUERIES_STAGE = Pitch<D>::TILE + BLOCKS * BLOCK_BYTES;
EXPORT(BLOCKS, BLOCKS);
EXPORT(SCORE_GRAD_BYTES, BLOCK_BYTES);
EXPORT(KEYS_SHARED_D64, KEYS_SHARED<64>);
EXPORT(KEYS_SHARED_D80, KEYS_SHARED<80>);
EXPORT(KEYS_SHARED_D96, KEYS_SHARED<96>);
EXPORT(KEYS_SHARED_D112, KEYS_SHARED<112>);
EXPORT(KEYS_SHARED_D128, KEYS_SHARED<128>);
EXPORT(QUERIES_SHARED_D64, STAGES* QUERIES_STAGE<64>);
EXPORT(QUERIES_SHARED_D80, STAGES* QUERIES_STAGE<80>);
EXPORT(QUERIES_SHARED_D96, STAGES* QUERIES_STAGE<96>);
EXPORT(QUERIES_SHARED_D112, STAGES* QUERIES_STAGE<112>);
EXPORT(QUERIES_SHARED_D128, STAGES* QUERIES_STAGE<128>);

// A pair of T as a pair of bf16.
template <class T> __device__ __forceinline__ uint32_t as_bf16(uint32_t pair);
template <> __device__ __forceinline__ uint32_t as_bf16<bf16>(uint32_t pair) { return pair; }
template <> __device__ __forceinline__ uint32_t as_bf16<f16>(uint32_t pair) {
    const float2 both = unpack<f16>(pair);
    return pack<bf16>(both.x, both.y);
}

// Per row: position 0 in the sums of keys and values, and the page of its first block among those
// of all rows.
struct RowOffsets {
    const uint32_t *starts, *pages;
};

// Whether a block whose page begins at `page` sees any key of a tile. One kernel asks before it
// writes, the other one before it reads.
__device__ __forceinline__ bool sees(uint32_t page, uint32_t tile, uint32_t prefix, uint32_t until,
                                     const Scoring& scoring) {
    const uint32_t first_key = tile * TILE_KEYS, last_key = min(first_key + TILE_KEYS, until) - 1,
                   first = max(page, prefix);
    return page + PAGE_TOKENS > first_key && (uint64_t)first < (uint64_t)last_key + scoring.window;
}

template <class T>
__device__ __forceinline__ void begin(const float* q, const float* grad, const float* out,
                                      const float* logsum, T* q_rounded, bf16* grad_rounded,
                                      float4* stats, uint32_t pairs, uint32_t head_dim,
                                      float inverse_divisor) {
    const uint32_t pair = blockIdx.x * 8 + threadIdx.x / 32;
    if (pair >= pairs) return;
    const size_t offset = (size_t)pair * head_dim;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x % 32 * 2; i < head_dim; i += 64) {
        const float2 of_q = *reinterpret_cast<const float2*>(q + offset + i),
                     of_grad = *reinterpret_cast<const float2*>(grad + offset + i);
        const float2 of_out = *reinterpret_cast<const float2*>(out + offset + i);
        const uint32_t two = pack<bf16>(of_grad.x, of_grad.y);
        *reinterpret_cast<uint32_t*>(q_rounded + offset + i) = pack<T>(of_q.x, of_q.y);
        *reinterpret_cast<uint32_t*>(grad_rounded + offset + i) = two;
        const float2 given = unpack<bf16>(two);
        sum = __fmaf_rn(given.y, of_out.y, __fmaf_rn(given.x, of_out.x, sum));
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        stats[pair] = make_float4(__fmul_rn(logsum[pair], LOG2_E), __fmul_rn(sum, inverse_divisor),
                                  0.0f, 0.0f);
}

template <int D, class T>
__device__ __forceinline__ void queries(const T* pages, const uint32_t* words,
                                        const RowOffsets& offsets, const unsigned char* score_grads,
                                        float* q_grad, uint32_t kv_heads, uint32_t group,
                                        uint32_t blocks, uint32_t first_tile, uint32_t tiles,
                                        const Scoring& scoring) {
    SMEM_DYN(shared);
    constexpr uint32_t BYTES = Pitch<D>::BYTES, TILE = Pitch<D>::TILE, STAGE = QUERIES_STAGE<D>;
    const Batch batch = batch_of(words);
    const uint32_t kv_head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32,
                   heads = kv_heads * group;
    const uint32_t start = batch.row_start[row], tokens = batch.row_start[row + 1] - start,
                   prefix = batch.row_prefix[row], until = prefix + tokens;
    if (tokens == 0) return;
    const uint32_t first_page = prefix / PAGE_TOKENS,
                   count = ((until - 1) / PAGE_TOKENS - first_page + 1) * group;
    const uint32_t first = (gridDim.x - 1 - blockIdx.x) * BLOCKS;
    if (first >= count) return;
    const uint32_t* table = batch.pages + batch.row_table[row];
    auto page_of_block = [&](uint32_t block) { return (first_page + block / group) * PAGE_TOKENS; };
    auto head_of_block = [&](uint32_t block) { return kv_head * group + block % group; };

    // Tiles of this launch that at least one of the blocks sees.
    const uint32_t begin = max(prefix, page_of_block(first)),
                   end = min(until, page_of_block(min(first + BLOCKS, count) - 1) + PAGE_TOKENS);
    const uint32_t low =
        max(first_tile, begin + 1 > scoring.window ? (begin + 1 - scoring.window) / TILE_KEYS : 0);
    const uint32_t high = min(first_tile + tiles, (end + TILE_KEYS - 1) / TILE_KEYS);
    if (low >= high && first_tile > 0) return;

    auto copy = [&](uint32_t tile) {
        unsigned char* to = shared + tile % STAGES * STAGE;
        copy_tile<D>(to, pages, table, kv_heads, kv_head, 0, tile * TILE_KEYS, end, threadIdx.x,
                     128);
        for (uint32_t i = threadIdx.x; i < BLOCKS * (BLOCK_BYTES / 16); i += 128) {
            const uint32_t block = first + i / (BLOCK_BYTES / 16);
            const bool valid =
                block < count && sees(page_of_block(block), tile, prefix, until, scoring);
            const size_t at =
                ((size_t)(tile - first_tile) * blocks +
                 (size_t)(offsets.pages[row] + block / group) * heads + head_of_block(block)) *
                BLOCK_BYTES;
            cp_async16(to + TILE + i * 16,
                       score_grads + (valid ? at + i % (BLOCK_BYTES / 16) * 16 : 0), valid);
        }
    };
    for (uint32_t s = 0; s < STAGES - 1; s++) {
        if (low + s < high) copy(low + s);
        cp_commit();
    }

    const uint32_t mine = first + threadIdx.x / 32 * 2; // blocks of this warp
    auto offset_of = [&](uint32_t block, uint32_t position) {
        return ((size_t)(start + position - prefix) * heads + head_of_block(block)) * D +
               lane % 4 * 2;
    };
    float sum[2][D / 8][4];
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t position = page_of_block(mine + u) + lane / 4 + i * 8;
            const bool exists =
                first_tile > 0 && mine + u < count && position >= prefix && position < until;
            const float* from = q_grad + (exists ? offset_of(mine + u, position) : 0);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                const float2 of = exists ? *reinterpret_cast<const float2*>(from + n * 8)
                                         : make_float2(0.0f, 0.0f);
                sum[u][n][i * 2] = of.x, sum[u][n][i * 2 + 1] = of.y;
            }
        }
    for (uint32_t tile = low; tile < high; tile++) {
        cp_wait<STAGES - 2>();
        __syncthreads();
        if (tile + STAGES - 1 < high) copy(tile + STAGES - 1);
        cp_commit();
        const unsigned char* keys =
            shared + tile % STAGES * STAGE + (lane % 8 + lane / 8 % 2 * 8) * BYTES + lane / 16 * 16;
        // Rows of the matrices whose transposes are the A operand, in the order of its registers.
        const unsigned char* own = shared + tile % STAGES * STAGE + TILE +
                                   threadIdx.x / 32 * 2 * BLOCK_BYTES +
                                   (lane / 8 % 2 * 2 + lane / 16) * 128 + lane % 8 * 16;
        bool takes[2];
#pragma unroll
        for (int u = 0; u < 2; u++)
            takes[u] =
                mine + u < count && sees(page_of_block(mine + u), tile, prefix, until, scoring);
#pragma unroll 1
        for (uint32_t j = 0; j < TILE_KEYS / 16; j++) {
            uint32_t a[2][4];
            bool any = false;
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const bool seen = takes[u] && tile * TILE_KEYS + j * 16 <=
                                                  page_of_block(mine + u) + PAGE_TOKENS - 1;
                any = any || seen;
                if (seen) {
                    ldsm4_t(a[u], own + u * BLOCK_BYTES + j * KEYS16_BYTES);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; i++) a[u][i] = 0;
                }
            }
            if (!any) break;
#pragma unroll
            for (int piece = 0; piece < D / 16; piece++) {
                uint32_t b[4];
                ldsm4_t(b, keys + j * 16 * BYTES + piece * 32);
#pragma unroll
                for (int i = 0; i < 4; i++) b[i] = as_bf16<T>(b[i]);
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    mma<bf16>(sum[u][2 * piece], a[u], b[0], b[1]);
                    mma<bf16>(sum[u][2 * piece + 1], a[u], b[2], b[3]);
                }
            }
        }
    }
    cp_wait<0>();
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t position = page_of_block(mine + u) + lane / 4 + i * 8;
            if (mine + u >= count || position < prefix || position >= until) continue;
            float* to = q_grad + offset_of(mine + u, position);
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                *reinterpret_cast<float2*>(to + n * 8) =
                    make_float2(sum[u][n][i * 2], sum[u][n][i * 2 + 1]);
        }
}

template <int D, class T>
__device__ __forceinline__ void keys(const T* q, const bf16* grad, const T* pages,
                                     const uint32_t* words, const float* slopes,
                                     const RowOffsets& offsets, const float4* stats, float* k_grad,
                                     float* v_grad, unsigned char* score_grads, uint32_t kv_heads,
                                     uint32_t group, uint32_t blocks, uint32_t first_tile,
                                     const Scoring& scoring) {
    SMEM_DYN(shared);
    constexpr uint32_t BYTES = Pitch<D>::BYTES, TILE = Pitch<D>::TILE, STAGE = KEYS_STAGE<D>;
    const Batch batch = batch_of(words);
    const uint32_t kv_head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32,
                   heads = kv_heads * group;
    const uint32_t start = batch.row_start[row], tokens = batch.row_start[row + 1] - start,
                   prefix = batch.row_prefix[row], until = prefix + tokens;
    const uint32_t first_key = (first_tile + blockIdx.x) * TILE_KEYS;
    if (tokens == 0 || first_key >= until) return;
    // Queries that see one of the keys, and their pages.
    const uint32_t last_key = min(first_key + TILE_KEYS, until) - 1,
                   lowest = max(prefix, first_key);
    const uint32_t highest =
        (uint32_t)min((uint64_t)until - 1, (uint64_t)last_key + scoring.window - 1);
    if (highest < lowest) return;
    const uint32_t last_page = highest / PAGE_TOKENS,
                   count = (last_page - lowest / PAGE_TOKENS + 1) * group;
    const uint32_t* table = batch.pages + batch.row_table[row];
    unsigned char* ring = shared + 2 * TILE;
    // In score_grads: this kv head's first block of the last page.
    const uint32_t last_block = blockIdx.x * blocks +
                                (offsets.pages[row] + last_page - prefix / PAGE_TOKENS) * heads +
                                kv_head * group;

    auto copy = [&](uint32_t step) {
        unsigned char* to = ring + step % STAGES * STAGE;
        const uint32_t page = (last_page - step / group) * PAGE_TOKENS,
                       head = kv_head * group + step % group;
        for (uint32_t i = threadIdx.x; i < PAGE_TOKENS * (D / 8); i += 128) {
            const uint32_t index = i / (D / 8), piece = i % (D / 8), position = page + index;
            const bool valid = position >= prefix && position < until;
            const size_t from =
                valid ? ((size_t)(start + position - prefix) * heads + head) * D + piece * 8 : 0;
            cp_async16(to + index * BYTES + piece * 16, q + from, valid);
            cp_async16(to + (PAGE_TOKENS + index) * BYTES + piece * 16, grad + from, valid);
        }
        if (threadIdx.x < PAGE_TOKENS) {
            const uint32_t position = page + threadIdx.x;
            const bool valid = position >= prefix && position < until;
            cp_async16(to + 2 * PAGE_TOKENS * BYTES + threadIdx.x * 16,
                       stats + (valid ? (size_t)(start + position - prefix) * heads + head : 0),
                       valid);
        }
    };
    copy_tile<D>(shared, pages, table, kv_heads, kv_head, 0, first_key, until, threadIdx.x, 128);
    copy_tile<D>(shared + TILE, pages, table, kv_heads, kv_head, 1, first_key, until, threadIdx.x,
                 128);
    for (uint32_t s = 0; s < STAGES - 1; s++) {
        if (s < count) copy(s);
        cp_commit();
    }

    const uint32_t own = first_key + threadIdx.x / 32 * 16,
                   mine = own + lane / 4; // first key of this warp; of this lane, beside mine + 8
    float dk[D / 8][4], dv[D / 8][4];
    auto offset_of = [&](int high) {
        return ((size_t)(offsets.starts[row] + mine + high * 8) * kv_heads + kv_head) * D +
               lane % 4 * 2;
    };
#pragma unroll
    for (int high = 0; high < 2; high++) {
        const bool exists = mine + high * 8 < until;
        const size_t offset = exists ? offset_of(high) : 0;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            const float2 zero = make_float2(0.0f, 0.0f);
            const float2 of_k =
                exists ? *reinterpret_cast<const float2*>(k_grad + offset + n * 8) : zero;
            const float2 of_v =
                exists ? *reinterpret_cast<const float2*>(v_grad + offset + n * 8) : zero;
            dk[n][high * 2] = of_k.x, dk[n][high * 2 + 1] = of_k.y;
            dv[n][high * 2] = of_v.x, dv[n][high * 2 + 1] = of_v.y;
        }
    }
    // At D 128 no registers are left for the last fragment of the values.
    constexpr int EXPERTS_PER_LANE = D == 128 ? D / 16 - 1 : D / 16;
    uint32_t key[D / 16][4], value[EXPERTS_PER_LANE][4];
    for (uint32_t step = 0; step < count; step++) {
        cp_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < count) copy(step + STAGES - 1);
        cp_commit();
        const unsigned char* fixed =
            shared + (threadIdx.x / 32 * 16 + lane % 16) * BYTES + lane / 16 * 16;
        auto load_value = [&](uint32_t (&to)[4], int i) {
            ldsm4(to, fixed + TILE + i * 32);
#pragma unroll
            for (int j = 0; j < 4; j++) to[j] = as_bf16<T>(to[j]);
        };
        if (step == 0) {
#pragma unroll
            for (int i = 0; i < D / 16; i++) ldsm4(key[i], fixed + i * 32);
#pragma unroll
            for (int i = 0; i < EXPERTS_PER_LANE; i++) load_value(value[i], i);
        }
        const uint32_t page = (last_page - step / group) * PAGE_TOKENS;
        if (page + PAGE_TOKENS - 1 < own) continue; // its queries see no key of this warp
        const unsigned char* stage = ring + step % STAGES * STAGE;
        const float4* stat = reinterpret_cast<const float4*>(stage + 2 * PAGE_TOKENS * BYTES);
        float s[2][4] = {}, p[2][4] = {};
        const unsigned char* by_query =
            stage + (lane % 8 + lane / 16 * 8) * BYTES + lane / 8 % 2 * 16;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t b[4];
            ldsm4(b, by_query + i * 32);
            mma<T>(s[0], key[i], b[0], b[1]);
            mma<T>(s[1], key[i], b[2], b[3]);
            ldsm4(b, by_query + PAGE_TOKENS * BYTES + i * 32);
            if (i < EXPERTS_PER_LANE) {
                mma<bf16>(p[0], value[i % EXPERTS_PER_LANE], b[0], b[1]);
                mma<bf16>(p[1], value[i % EXPERTS_PER_LANE], b[2], b[3]);
            } else {
                uint32_t last[4];
                load_value(last, i);
                mma<bf16>(p[0], last, b[0], b[1]);
                mma<bf16>(p[1], last, b[2], b[3]);
            }
        }
        if (scoring.alibi_scale == 0.0f) {
#pragma unroll
            for (int n = 0; n < 2; n++)
                score_pair<T>(s[n][0], s[n][1], scoring), score_pair<T>(s[n][2], s[n][3], scoring);
        } else {
            const float slope = slopes[kv_head * group + step % group];
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s[n][i] = biased<T>(s[n][i], slope, mine + i / 2 * 8, scoring);
                round_pair<T>(s[n][0], s[n][1]), round_pair<T>(s[n][2], s[n][3]);
            }
        }
        // Whether all of these queries exist and see all of these keys.
        const bool is_whole = page >= prefix && page + PAGE_TOKENS <= until && own + 15 <= page &&
                              page + PAGE_TOKENS - 1 - own < scoring.window;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 of = *reinterpret_cast<const float2*>(stat + n * 8 + lane % 4 * 2 + i);
#pragma unroll
                for (int high = 0; high < 2; high++) {
                    float& weight = s[n][high * 2 + i];
                    float& change = p[n][high * 2 + i];
                    weight = ex2(__fmaf_rn(weight, LOG2_E, -of.x));
                    change = __fmul_rn(weight, __fmaf_rn(change, scoring.inverse_divisor, -of.y));
                }
            }
        if (!is_whole) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint32_t position = page + i / 4 * 8 + lane % 4 * 2 + i % 2,
                               at = mine + i % 4 / 2 * 8;
                const bool seen = position >= prefix && position < until && at <= position &&
                                  position - at < scoring.window;
                s[i / 4][i % 4] = seen ? s[i / 4][i % 4] : 0.0f;
                p[i / 4][i % 4] = seen ? p[i / 4][i % 4] : 0.0f;
            }
        }
        const uint32_t weights[4] = {pack<bf16>(s[0][0], s[0][1]), pack<bf16>(s[0][2], s[0][3]),
                                     pack<bf16>(s[1][0], s[1][1]), pack<bf16>(s[1][2], s[1][3])};
        const uint32_t changed[4] = {pack<bf16>(p[0][0], p[0][1]), pack<bf16>(p[0][2], p[0][3]),
                                     pack<bf16>(p[1][0], p[1][1]), pack<bf16>(p[1][2], p[1][3])};
        const uint32_t keys16 =
            (last_block - step / group * heads + step % group) * (TILE_KEYS / 16) +
            threadIdx.x / 32;
        uint32_t* left =
            reinterpret_cast<uint32_t*>(score_grads + (size_t)keys16 * KEYS16_BYTES) + lane;
#pragma unroll
        for (int i = 0; i < 4; i++) left[i * 32] = changed[i];
        const unsigned char* by_dim =
            stage + (lane % 8 + lane / 8 % 2 * 8) * BYTES + lane / 16 * 16;
#pragma unroll
        for (int piece = 0; piece < D / 16; piece++) {
            uint32_t b[4];
            ldsm4_t(b, by_dim + PAGE_TOKENS * BYTES + piece * 32);
            mma<bf16>(dv[2 * piece], weights, b[0], b[1]);
            mma<bf16>(dv[2 * piece + 1], weights, b[2], b[3]);
            ldsm4_t(b, by_dim + piece * 32);
            mma<bf16>(dk[2 * piece], changed, as_bf16<T>(b[0]), as_bf16<T>(b[1]));
            mma<bf16>(dk[2 * piece + 1], changed, as_bf16<T>(b[2]), as_bf16<T>(b[3]));
        }
    }
    cp_wait<0>();
#pragma unroll
    for (int high = 0; high < 2; high++) {
        if (mine + high * 8 >= until) continue;
        const size_t offset = offset_of(high);
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            *reinterpret_cast<float2*>(k_grad + offset + n * 8) =
                make_float2(dk[n][high * 2], dk[n][high * 2 + 1]);
            *reinterpret_cast<float2*>(v_grad + offset + n * 8) =
                make_float2(dv[n][high * 2], dv[n][high * 2 + 1]);
        }
    }
}

#define ATTENTION_GRAD_BEGIN(T)                                                                    \
    extern "C" __global__ void __launch_bounds__(256) attention_grad_begin_##T(                    \
        const float* __restrict__ q /* [pairs, head_dim] */,                                       \
        const float* __restrict__ grad /* as q */, const float* __restrict__ out,                  \
        const float* __restrict__ logsum /* [pairs] */, T* __restrict__ q_rounded /* as q */,      \
        bf16* __restrict__ grad_rounded, float4* __restrict__ stats /* [pairs] */, uint32_t pairs, \
        uint32_t head_dim, float inverse_divisor) {                                                \
        begin<T>(q, grad, out, logsum, q_rounded, grad_rounded, stats, pairs, head_dim,            \
                 inverse_divisor);                                                                 \
    }
ATTENTION_GRAD_BEGIN(bf16)
ATTENTION_GRAD_BEGIN(f16)

#define ATTENTION_GRAD(D, T)                                                                       \
    extern "C" __global__ void __launch_bounds__(128, 2) attention_grad_keys_##T##_d##D(           \
        const T* __restrict__ q /* [tokens, heads, D] */,                                          \
        const bf16* __restrict__ grad /* as q */, const T* __restrict__ pages,                     \
        const uint32_t* __restrict__ batch,                                                        \
        const float* __restrict__ slopes /* [heads] or null */,                                    \
        const uint32_t* __restrict__ starts /* [rows] */,                                          \
        const uint32_t* __restrict__ first_pages /* [rows] */,                                     \
        const float4* __restrict__ stats /* [tokens, heads] */,                                    \
        float* __restrict__ k_grad /* [positions, kv_heads, D] */,                                 \
        float* __restrict__ v_grad /* as k_grad */, unsigned char* __restrict__ score_grads,       \
        uint32_t kv_heads, uint32_t group, uint32_t blocks, uint32_t first_tile,                   \
        float inverse_divisor, float alibi_scale, uint32_t window) {                               \
        keys<D, T>(q, grad, pages, batch, slopes, {starts, first_pages}, stats, k_grad, v_grad,    \
                   score_grads, kv_heads, group, blocks, first_tile,                               \
                   {inverse_divisor, alibi_scale, window});                                        \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(128, 2) attention_grad_queries_##T##_d##D(        \
        const T* __restrict__ pages, const uint32_t* __restrict__ batch,                           \
        const uint32_t* __restrict__ first_pages /* [rows] */,                                     \
        const unsigned char* __restrict__ score_grads,                                             \
        float* __restrict__ q_grad /* [tokens, heads, D] */, uint32_t kv_heads, uint32_t group,    \
        uint32_t blocks, uint32_t first_tile, uint32_t tiles, uint32_t window) {                   \
        queries<D, T>(pages, batch, {nullptr, first_pages}, score_grads, q_grad, kv_heads, group,  \
                      blocks, first_tile, tiles, {0.0f, 0.0f, window});                            \
    }
#define ATTENTION_GRAD_SIZES(T)                                                                    \
    ATTENTION_GRAD(64, T)                                                                          \
    ATTENTION_GRAD(80, T)                                                                          \
    ATTENTION_GRAD(96, T)                                                                          \
    ATTENTION_GRAD(112, T)                                                                         \
    ATTENTION_GRAD(128, T)
ATTENTION_GRAD_SIZES(bf16)
ATTENTION_GRAD_SIZES(f16)
