// Attention, generic fallback: out = softmax(q K^T) V for f32 caches and for head dimensions that
// the tensor-core kernels do not support.
//
// Shapes: q, out f32 [tokens, heads, head_dim]; pages as in pages.cuh; head_dim up to 256.
// Reference: kernels/src/ops/attention.rs. This kernel has the same roundings, one by one. It reads
//   the keys three times: for the maximum, for the sum, and for the normalised weights.
// Grid: heads x tokens; a CTA has 4 warps. Warp w takes the tiles of 32 keys 4 i + w, one key per
//   lane. Sums over lanes, then over warps, have a fixed order: the bits depend only on the token
//   and its cache.
// Traffic: keys three times, values once. Not meant for shapes that are served often.
// Local memory: the arguments of the score function, which is not inlined.
// expects attention_generic_*: may LDL STL
#include "pages.cuh"
#include "pdl.cuh"

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define WARPS 4
// Shared memory, f32: the query [head_dim], 32 + 32 sums, a result [head_dim] per warp.
EXPORT(SHARED_BASE, 64 * 4);
EXPORT(SHARED_PER_DIM, (1 + WARPS) * 4);

// Score of a key. Every pass recomputes it, with the same bits.
template <class T> struct Scores {
    const float* q; // shared memory
    const T* pages;
    const uint32_t* table;
    uint32_t kv_heads, kv_head, head_dim;
    float divisor, alibi_scale, slope;

    // Not inlined: the slow path of the division is a call, and inlined copies would spill
    // registers on some architectures.
    __device__ __noinline__ float operator()(uint32_t position) const {
        const T* key = pages + vector_at(table[position / PAGE_TOKENS], kv_heads, kv_head, 0,
                                         position, head_dim);
        float dot = 0.0f;
        for (uint32_t i = 0; i < head_dim; i++) dot = __fmaf_rn(q[i], widen(key[i]), dot);
        if (alibi_scale == 0.0f) return rounded<T>(__fdiv_rn(rounded<T>(dot), divisor));
        const float bias = __fmul_rn(alibi_scale, rounded<T>(__fmul_rn(slope, (float)position)));
        return rounded<T>(__fadd_rn(__fdiv_rn(dot, divisor), bias));
    }
};

template <class T>
__device__ __forceinline__ void attention_generic(const float* q, const T* pages,
                                                  const uint32_t* words, const float* slopes,
                                                  float* out, float* logsum, uint32_t kv_heads,
                                                  uint32_t group, uint32_t head_dim, float divisor,
                                                  float alibi_scale, uint32_t window) {
    SMEM_DYN(shared);
    pdl_launch();
    pdl_wait();
    float *query = reinterpret_cast<float*>(shared), *scratch = query + head_dim,
          *results = scratch + 64;
    const Batch batch = batch_of(words);
    const uint32_t head = blockIdx.x, token = blockIdx.y, heads = kv_heads * group,
                   lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (token >= batch.tokens) return; // recorded for more
    const uint32_t position = batch.token_position[token],
                   first = position + 1 > window ? position + 1 - window : 0;
    const size_t offset = ((size_t)token * heads + head) * head_dim;
    for (uint32_t i = threadIdx.x; i < head_dim; i += blockDim.x) query[i] = q[offset + i];
    __syncthreads();
    const Scores<T> score = {
        query,    pages,        batch.pages + batch.row_table[batch.token_row[token]],
        kv_heads, head / group, head_dim,
        divisor,  alibi_scale,  alibi_scale == 0.0f ? 0.0f : slopes[head]};
    float top = -INFINITY;
    for (uint32_t p = first + threadIdx.x; p <= position; p += blockDim.x)
        top = fmaxf(top, score(p));
    top = warp_max(top);
    if (lane == 0) scratch[warp] = top;
    __syncthreads();
    top = warp_max(lane < WARPS ? scratch[lane] : -INFINITY);
    float sum = 0.0f;
    for (uint32_t p = first + threadIdx.x; p <= position; p += blockDim.x)
        sum += expf(score(p) - top);
    sum = cta_sum(sum, scratch + 32);

    // Dimension lane + 32 j of this warp's share of the keys.
    float o[8] = {};
    for (uint32_t base = first; base <= position;
         base += WARPS * 32) { // the same for all warps, so that lanes stay together
        const uint32_t tile = base + warp * 32;
        const float own = tile + lane <= position
                              ? rounded<T>(__fdiv_rn(expf(score(tile + lane) - top), sum))
                              : 0.0f;
        for (uint32_t k = 0; k < 32; k++) {
            const float weight = __shfl_sync(~0u, own, k);
            if (tile + k > position) continue;
            const T* value = pages + vector_at(score.table[(tile + k) / PAGE_TOKENS], kv_heads,
                                               score.kv_head, 1, tile + k, head_dim);
#pragma unroll
            for (uint32_t j = 0; j < 8; j++)
                if (lane + 32 * j < head_dim)
                    o[j] = __fmaf_rn(weight, widen(value[lane + 32 * j]), o[j]);
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < 8; j++)
        if (lane + 32 * j < head_dim) results[warp * head_dim + lane + 32 * j] = o[j];
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < head_dim; i += blockDim.x) {
        float total = results[i];
        for (uint32_t w = 1; w < WARPS; w++) total += results[w * head_dim + i];
        out[offset + i] = total;
    }
    if (logsum && threadIdx.x == 0) logsum[(size_t)token * heads + head] = top + logf(sum);
}

#define ATTENTION_GENERIC(T)                                                                       \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) attention_generic_##T(                \
        const float* q /* [tokens, heads, head_dim] */, const T* __restrict__ pages,               \
        const uint32_t* __restrict__ batch,                                                        \
        const float* __restrict__ slopes /* [heads] or null */,                                    \
        float* __restrict__ out /* as q */,                                                        \
        float* __restrict__ logsum /* [tokens, heads] or null */, uint32_t kv_heads,               \
        uint32_t group, uint32_t head_dim, float divisor, float alibi_scale, uint32_t window) {    \
        attention_generic<T>(q, pages, batch, slopes, out, logsum, kv_heads, group, head_dim,      \
                             divisor, alibi_scale, window);                                        \
    }
ATTENTION_GENERIC(f32)
ATTENTION_GENERIC(bf16)
ATTENTION_GENERIC(f16)
