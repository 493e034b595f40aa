// Rotary position encoding, half-split: with c, s = cos, sin of position * inverse_frequency[i],
//   (x[i], x[i + d/2]) -> (x[i] c - x[i + d/2] s, x[i + d/2] c + x[i] s)
// Inputs, cos, sin, products and sums are rounded to T.
//
// Reference: kernels/src/ops/rope.rs. Source: transformers apply_rotary_pos_emb.
// rope_table: out f32 [tokens, 2, d/2] for the tokens of a batch; one thread per angle. The angle
//   is an f32 product, reduced in f64 so that large positions need no slow path.
// rope: x f32 [tokens, heads, d] in place; one thread per 4 pairs, or per pair if d/2 is not a
//   multiple of 4.
// rope_append: queries in place as in rope; rotated keys, and values, into the pages of their rows
//   and into the outbox (outbox.cuh) where the pages are mirrored. One launch instead of three: a
//   CTA per token and kv head, a pair per thread. Angles and the page come before pdl_wait.
// Traffic: x once in, once out. A token of a 70B block: 36 KB in, 40 KB out.
// expects rope_bf16: LDG.128 STG.128
// expects rope_*: no LDL STL
#include "outbox.cuh"
#include "pdl.cuh"
#include "rotate.cuh"

template <class T>
__device__ __forceinline__ void rope_table(const uint32_t* words, const float* frequencies,
                                           float* out, uint32_t half) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    const Batch batch = batch_of(words);
    if (i >= batch.tokens * half) return;
    const uint32_t token = i / half, at = i % half;
    const float angle = __fmul_rn((float)batch.token_position[token], frequencies[at]);
    // The angle in units of pi, reduced by whole multiples of 2 pi.
    const double half_circles = (double)angle * 0.31830988618379067;
    float sine, cosine;
    sincospif((float)(half_circles - 2.0 * rint(half_circles * 0.5)), &sine, &cosine);
    out[(size_t)token * 2 * half + at] = rounded<T>(cosine);
    out[(size_t)token * 2 * half + half + at] = rounded<T>(sine);
}

// Most threads of rope_append.
#define APPEND_THREADS 640
EXPORT(APPEND_THREADS, APPEND_THREADS);

template <class T>
__device__ __forceinline__ void rope(float* x, const float* table, uint32_t tokens, uint32_t heads,
                                     uint32_t head_dim, float sign) {
    const uint32_t half = head_dim / 2, width = half % 4 == 0 ? 4 : 1, per_head = half / width;
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (uint64_t)tokens * heads * per_head) return;
    const uint64_t head = i / per_head, token = head / heads;
    const uint32_t at = (uint32_t)(i % per_head) * width;
    float *first = x + head * head_dim + at, *second = first + half;
    const float *cosine = table + token * head_dim + at, *sine = cosine + half;
    if (width == 4) {
        float4 a = *reinterpret_cast<float4*>(first), b = *reinterpret_cast<float4*>(second);
        const float4 c = *reinterpret_cast<const float4*>(cosine),
                     s = *reinterpret_cast<const float4*>(sine);
        rotate<T>(a.x, b.x, c.x, sign * s.x);
        rotate<T>(a.y, b.y, c.y, sign * s.y);
        rotate<T>(a.z, b.z, c.z, sign * s.z);
        rotate<T>(a.w, b.w, c.w, sign * s.w);
        *reinterpret_cast<float4*>(first) = a;
        *reinterpret_cast<float4*>(second) = b;
    } else {
        rotate<T>(*first, *second, *cosine, sign * *sine);
    }
}

// One CTA per token and kv head; its threads process pairs of the query heads that read it, then of
// the key, with the values.
template <class T>
__device__ __forceinline__ void rope_append(float* q, const float* k, const float* v,
                                            const float* table, const uint32_t* words, T* pages,
                                            T* outbox, uint32_t block, uint32_t kv_heads,
                                            uint32_t group, uint32_t head_dim) {
    pdl_launch();
    const Batch batch = batch_of(words);
    const uint32_t token = blockIdx.x, head = blockIdx.y, half = head_dim / 2;
    if (token >= batch.tokens) { // recorded for more
        pdl_wait();
        return;
    }
    const float *cosines = table + (size_t)token * head_dim, *sines = cosines + half;
    const uint32_t position = batch.token_position[token],
                   page = page_of(batch, batch.token_row[token], position);
    const size_t key = vector_at(page, kv_heads, head, 0, position, head_dim),
                 value = vector_at(page, kv_heads, head, 1, position, head_dim),
                 out = outbox_at(words, block, token, kv_heads, head, 0, head_dim);
    q += ((size_t)token * kv_heads + head) * group * head_dim;
    k += ((size_t)token * kv_heads + head) * head_dim;
    v += ((size_t)token * kv_heads + head) * head_dim;
    // Angles of the first pair of this thread, most often the only one.
    const uint32_t first = threadIdx.x % half;
    float cosine = cosines[first], sine = sines[first];
    pdl_wait();
    for (uint32_t i = threadIdx.x; i < (group + 1) * half; i += blockDim.x) {
        const uint32_t at = i % half;
        if (i != threadIdx.x) cosine = cosines[at], sine = sines[at];
        if (i < group * half) {
            float* from = q + i / half * head_dim + at;
            rotate<T>(from[0], from[half], cosine, sine);
            continue;
        }
        float a = k[at], b = k[at + half];
        rotate<T>(a, b, cosine, sine);
        const T stored[4] = {narrow<T>(a), narrow<T>(b), narrow<T>(v[at]), narrow<T>(v[at + half])};
        pages[key + at] = stored[0];
        pages[key + at + half] = stored[1];
        pages[value + at] = stored[2];
        pages[value + at + half] = stored[3];
        if (outbox) {
            T* slot = outbox + out + at;
            slot[0] = stored[0];
            slot[half] = stored[1];
            slot[head_dim] = stored[2];
            slot[head_dim + half] = stored[3];
        }
    }
}

#define ROPE(T)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        rope_table_##T(const uint32_t* __restrict__ batch,                                         \
                       const float* __restrict__ inverse_frequencies /* [half] */,                 \
                       float* __restrict__ out /* [tokens, 2, half] */, uint32_t half) {           \
        rope_table<T>(batch, inverse_frequencies, out, half);                                      \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        rope_##T(float* __restrict__ x /* [tokens, heads, head_dim] */,                            \
                 const float* __restrict__ table /* [tokens, 2, head_dim / 2] */, uint32_t tokens, \
                 uint32_t heads, uint32_t head_dim, float sign /* -1: rotate back */) {            \
        rope<T>(x, table, tokens, heads, head_dim, sign);                                          \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(APPEND_THREADS) rope_append_##T(                  \
        float* __restrict__ q /* [tokens, heads, head_dim] */,                                     \
        const float* k /* [tokens, kv_heads, head_dim] */, const float* v /* as k */,              \
        const float* __restrict__ table, const uint32_t* __restrict__ batch,                       \
        T* __restrict__ pages, T* __restrict__ outbox /* or null */, uint32_t block,               \
        uint32_t kv_heads, uint32_t group, uint32_t head_dim) {                                    \
        rope_append<T>(q, k, v, table, batch, pages, outbox, block, kv_heads, group, head_dim);    \
    }
ROPE(f32)
ROPE(bf16)
ROPE(f16)
