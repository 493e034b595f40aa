// Keys (rotated) and values of the new tokens into the pages of their rows, rounded to T; and into the mirror of the pages in host memory,
// where there is one (the writes go over the bus as they are made, and are done when an event after this kernel is).
//
// keys, values f32 [tokens, kv_heads, head_dim]. CPU reference: kernels/src/ops/kv_append.rs.
// Grid: one thread per 8 elements (2 x 16 bytes in, 16 bytes out in 16-bit dtypes), per element if head_dim is no multiple of 8.
// page_copy: the first `tokens` slots of pages, keys and values of every head; copies are (source, destination, tokens); one CTA each.
// Floor: keys and values once in, once out. 70B block and token: 8 KB in, 4 KB out, 4 KB over the bus.
// expects kv_append_*: LDG.128 STG.128
// expects page_copy_*: no LDL STL
#include "pages.cuh"

template <class T> struct alignas(sizeof(T) * 8 > 16 ? 16 : sizeof(T) * 8) Eight {
    T v[8];
};

template <class T>
__device__ __forceinline__ void kv_append(const float* keys, const float* values, const uint32_t* words, T* pages, T* mirror, uint32_t kv_heads,
                                          uint32_t head_dim) {
    const Batch batch = batch_of(words);
    const uint32_t piece = head_dim % 8 == 0 ? 8 : 1, per_head = head_dim / piece;
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (uint64_t)batch.tokens * kv_heads * per_head * 2) return;
    const uint32_t half = (uint32_t)(i / per_head % 2), head = (uint32_t)(i / per_head / 2 % kv_heads);
    const uint32_t token = (uint32_t)(i / per_head / 2 / kv_heads), at = (uint32_t)(i % per_head) * piece;
    const uint32_t position = batch.token_position[token];
    const size_t to = vector_at(page_of(batch, batch.token_row[token], position), kv_heads, head, half, position, head_dim) + at;
    const float* from = (half ? values : keys) + ((size_t)token * kv_heads + head) * head_dim + at;
    if (piece == 8) {
        const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
        const Eight<T> eight = {{narrow<T>(a.x), narrow<T>(a.y), narrow<T>(a.z), narrow<T>(a.w), narrow<T>(b.x), narrow<T>(b.y),
                                 narrow<T>(b.z), narrow<T>(b.w)}};
        *reinterpret_cast<Eight<T>*>(pages + to) = eight;
        if (mirror) *reinterpret_cast<Eight<T>*>(mirror + to) = eight;
    } else {
        pages[to] = narrow<T>(*from);
        if (mirror) mirror[to] = narrow<T>(*from);
    }
}

template <class T>
__device__ __forceinline__ void page_copy(const uint32_t* copies, T* pages, uint32_t kv_heads, uint32_t head_dim) {
    const uint32_t source = copies[blockIdx.x * 3], destination = copies[blockIdx.x * 3 + 1], used = copies[blockIdx.x * 3 + 2] * head_dim;
    const size_t half = (size_t)PAGE_TOKENS * head_dim;
    const T* from = pages + source * kv_heads * 2 * half;
    T* to = pages + destination * kv_heads * 2 * half;
    for (size_t i = threadIdx.x; i < kv_heads * 2 * half; i += blockDim.x)
        if (i % half < used) to[i] = from[i];
}

#define KV_APPEND(T)                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                                \
        kv_append_##T(const float* __restrict__ keys /* [tokens, kv_heads, head_dim] */, const float* __restrict__ values /* as keys */, \
                      const uint32_t* __restrict__ batch, T* __restrict__ pages, T* __restrict__ mirror /* or null */,               \
                      uint32_t kv_heads, uint32_t head_dim) {                                                                        \
        kv_append<T>(keys, values, batch, pages, mirror, kv_heads, head_dim);                                                        \
    }                                                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) page_copy_##T(const uint32_t* __restrict__ copies /* [count, 3] */, T* pages,  \
                                                                    uint32_t kv_heads, uint32_t head_dim) {                          \
        page_copy<T>(copies, pages, kv_heads, head_dim);                                                                             \
    }
KV_APPEND(f32)
KV_APPEND(bf16)
KV_APPEND(f16)
