// Attention of a decode step: out = softmax(q K^T) V, split-K over tiles of 64 keys. One kernel
// computes every tile by itself; a second one merges the tiles of a token.
//
// Shapes: q, out f32 [tokens, heads, D]; pages as in pages.cuh; logsum f32 [tokens, heads] where a
//   gradient needs it; workspace f32 [tiles of all tokens, heads, D + 4] with the product, the
//   maximum and the sum of each tile. `token_tile` of the batch has the first tile of each token.
// Reference: kernels/src/ops/attention.rs. Order of sums: attention.cuh.
// attention_decode: grid splits x kv heads x tokens; a CTA is one warp, which takes every
//   gridDim.x-th tile of its token. It copies 64 keys and 64 values with cp.async (32 KB in flight
//   at D = 128), computes the scores of the heads of the group, 16 at a time, and writes the tile
//   to the workspace. The number of splits changes no bits. CTAs of tokens that do not exist end at
//   once, so that one recorded launch serves all lengths and all smaller batches.
// attention_join: grid heads x tokens; D / 4 threads merge the tiles from first to last and divide.
// Traffic: keys and values once per token: 8.4 MB for 2,048 positions of a 70B block, computed 2 us
//   at 4.3 TB/s. The workspace is an eighth of that, written and read.
// Variants: one per D and dtype. Limits: D 64, 80, 96, 112, 128, 256; bf16, f16. Everything else:
//   attention_generic.cu.
// expects attention_decode_*: only LDGSTS.128; loop HMMA LDGSTS LDSM; no LDG.U8 LDG.U16
// expects attention_join: LDG.128 STG.128
#include "attention.cuh"

// Shared memory: TILE_KEYS keys, then their values.
template <int D> constexpr uint32_t SHARED = 2 * Pitch<D>::TILE;
EXPORT(SHARED_D64, SHARED<64>);
EXPORT(SHARED_D80, SHARED<80>);
EXPORT(SHARED_D96, SHARED<96>);
EXPORT(SHARED_D112, SHARED<112>);
EXPORT(SHARED_D128, SHARED<128>);
EXPORT(SHARED_D256, SHARED<256>);

// token_tile [tokens] of the batch, after row_start.
__device__ __forceinline__ const uint32_t* tiles_of(const Batch& batch) {
    return batch.row_start + batch.rows + 1;
}

template <int D, class T>
__device__ __forceinline__ void attention_decode(const float* q, const T* pages,
                                                 const uint32_t* words, const float* slopes,
                                                 float* workspace, uint32_t kv_heads,
                                                 uint32_t group, const Scoring& scoring) {
    SMEM_DYN(shared);
    const Batch batch = batch_of(words);
    const uint32_t kv_head = blockIdx.y, token = blockIdx.z, lane = threadIdx.x,
                   heads = kv_heads * group;
    if (token >= batch.tokens) return;
    const uint32_t position = batch.token_position[token], begin = tiles_of(batch)[token];
    const uint32_t seen =
        position + 1 > scoring.window ? position + 1 - scoring.window : 0; // first position
    const uint32_t* table = batch.pages + batch.row_table[batch.token_row[token]];
    unsigned char *keys = shared, *values = shared + Pitch<D>::TILE;
    for (uint32_t tile = seen / TILE_KEYS + blockIdx.x; tile <= position / TILE_KEYS;
         tile += gridDim.x) {
        const uint32_t first = tile * TILE_KEYS;
        // All lanes have read the last tile before the next one overwrites it.
        __syncwarp();
        copy_tile<D>(keys, pages, table, kv_heads, kv_head, 0, first, position + 1, lane, 32);
        cp_commit();
        copy_tile<D>(values, pages, table, kv_heads, kv_head, 1, first, position + 1, lane, 32);
        cp_commit();
        for (uint32_t done = 0; done < group; done += 16) {
            Queries<D> queries;
#pragma unroll
            for (int high = 0; high < 2; high++) {
                const uint32_t head = done + high * 8 + lane / 4;
                const bool exists = head < group;
                const uint32_t index = kv_head * group + (exists ? head : 0);
                load_query<D, T>(
                    queries, high, exists ? q + ((size_t)token * heads + index) * D : nullptr,
                    position, scoring, scoring.alibi_scale != 0.0f ? slopes[index] : 0.0f);
            }
            cp_wait<1>();
            __syncwarp();
            Weights weights;
            score_tile<D, T>(weights, queries, keys, first, scoring);
            cp_wait<0>();
            __syncwarp();
#pragma unroll
            for (int piece = 0; piece < D / 16; piece++) {
                float o[2][4];
                multiply_values<D, T>(o, weights, values, piece);
#pragma unroll
                for (int high = 0; high < 2; high++) {
                    const uint32_t head = done + high * 8 + lane / 4;
                    if (head >= group) continue;
                    float* to = workspace +
                                ((size_t)(begin + tile) * heads + kv_head * group + head) * (D + 4);
                    float* at = to + piece * 16 + lane % 4 * 2;
                    *reinterpret_cast<float2*>(at) =
                        make_float2(o[0][high * 2], o[0][high * 2 + 1]);
                    *reinterpret_cast<float2*>(at + 8) =
                        make_float2(o[1][high * 2], o[1][high * 2 + 1]);
                    if (piece == 0 && lane % 4 == 0)
                        *reinterpret_cast<float2*>(to + D) =
                            make_float2(weights.top[high], weights.sum[high]);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(64)
    attention_join(const float* __restrict__ workspace /* [tiles, heads, head_dim + 4] */,
                   const uint32_t* __restrict__ words /* batch */,
                   float* __restrict__ out /* [tokens, heads, head_dim] */,
                   float* __restrict__ logsum /* [tokens, heads] or null */, uint32_t head_dim,
                   uint32_t window) {
    const Batch batch = batch_of(words);
    const uint32_t head = blockIdx.x, token = blockIdx.y, heads = gridDim.x, at = threadIdx.x * 4;
    if (token >= batch.tokens) return;
    const uint32_t position = batch.token_position[token], pitch = heads * (head_dim + 4);
    const float* from = workspace + (size_t)tiles_of(batch)[token] * pitch + head * (head_dim + 4);
    const uint32_t begin = position + 1 > window ? (position + 1 - window) / TILE_KEYS : 0,
                   end = position / TILE_KEYS + 1;
    float top = -INFINITY, sum = 0.0f;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (uint32_t tile = begin; tile < end; tile++) {
        const float* from_tile = from + (size_t)tile * pitch;
        const float4 p = *reinterpret_cast<const float4*>(from_tile + at);
        const float2 ends = *reinterpret_cast<const float2*>(from_tile + head_dim);
        float old_share, new_share;
        merge(top, ends.x, old_share, new_share);
        sum = merged(sum, old_share, ends.y, new_share);
        o.x = merged(o.x, old_share, p.x, new_share);
        o.y = merged(o.y, old_share, p.y, new_share);
        o.z = merged(o.z, old_share, p.z, new_share);
        o.w = merged(o.w, old_share, p.w, new_share);
    }
    if (logsum && at == 0) logsum[(size_t)token * heads + head] = logsum_of(top, sum);
    *reinterpret_cast<float4*>(out + ((size_t)token * heads + head) * head_dim + at) = make_float4(
        __fdiv_rn(o.x, sum), __fdiv_rn(o.y, sum), __fdiv_rn(o.z, sum), __fdiv_rn(o.w, sum));
}

#define ATTENTION_DECODE(D, T)                                                                     \
    extern "C" __global__ void __launch_bounds__(32, 8) attention_decode_##T##_d##D(               \
        const float* __restrict__ q /* [tokens, heads, D] */, const T* __restrict__ pages,         \
        const uint32_t* __restrict__ batch,                                                        \
        const float* __restrict__ slopes /* [heads] or null */, float* __restrict__ workspace,     \
        uint32_t kv_heads, uint32_t group, float inverse_divisor, float alibi_scale,               \
        uint32_t window) {                                                                         \
        attention_decode<D, T>(q, pages, batch, slopes, workspace, kv_heads, group,                \
                               {inverse_divisor, alibi_scale, window});                            \
    }
#define ATTENTION_DECODE_SIZES(T)                                                                  \
    ATTENTION_DECODE(64, T)                                                                        \
    ATTENTION_DECODE(80, T)                                                                        \
    ATTENTION_DECODE(96, T)                                                                        \
    ATTENTION_DECODE(112, T)                                                                       \
    ATTENTION_DECODE(128, T)                                                                       \
    ATTENTION_DECODE(256, T)
ATTENTION_DECODE_SIZES(bf16)
ATTENTION_DECODE_SIZES(f16)
