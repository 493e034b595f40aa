// Appends keys (already rotated) and values of the new tokens to the pages of their rows, rounded
// to T. Where the pages are mirrored on the host, it also writes them to the outbox (outbox.cuh).
//
// Shapes: keys, values f32 [tokens, kv_heads, head_dim].
// Reference: kernels/src/ops/kv_append.rs.
// kv_append: one thread per 8 elements (two reads and one write of 16 bytes for 16-bit dtypes), or
//   per element if head_dim is not a multiple of 8.
// Traffic: keys and values once in, once or twice out. A token of a 70B block: 8 KB in, 8 KB out.
// expects kv_append_*: LDG.128 STG.128
#include "outbox.cuh"
#include "pdl.cuh"

template <class T> struct alignas(sizeof(T) * 8 > 16 ? 16 : sizeof(T) * 8) Eight {
    T v[8];
};

template <class T>
__device__ __forceinline__ void kv_append(const float* keys, const float* values,
                                          const uint32_t* words, T* pages, T* outbox,
                                          uint32_t block, uint32_t kv_heads, uint32_t head_dim) {
    pdl_launch();
    const Batch batch = batch_of(words);
    const uint32_t piece = head_dim % 8 == 0 ? 8 : 1, per_head = head_dim / piece;
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (uint64_t)batch.tokens * kv_heads * per_head * 2) {
        pdl_wait();
        return;
    }
    const uint32_t half = (uint32_t)(i / per_head % 2),
                   head = (uint32_t)(i / per_head / 2 % kv_heads);
    const uint32_t token = (uint32_t)(i / per_head / 2 / kv_heads),
                   at = (uint32_t)(i % per_head) * piece;
    const uint32_t position = batch.token_position[token];
    const size_t to = vector_at(page_of(batch, batch.token_row[token], position), kv_heads, head,
                                half, position, head_dim) +
                      at;
    const size_t out = outbox_at(words, block, token, kv_heads, head, half, head_dim) + at;
    const float* from = (half ? values : keys) + ((size_t)token * kv_heads + head) * head_dim + at;
    pdl_wait();
    if (piece == 8) {
        const float4 a = reinterpret_cast<const float4*>(from)[0],
                     b = reinterpret_cast<const float4*>(from)[1];
        const Eight<T> eight = {{narrow<T>(a.x), narrow<T>(a.y), narrow<T>(a.z), narrow<T>(a.w),
                                 narrow<T>(b.x), narrow<T>(b.y), narrow<T>(b.z), narrow<T>(b.w)}};
        *reinterpret_cast<Eight<T>*>(pages + to) = eight;
        if (outbox) *reinterpret_cast<Eight<T>*>(outbox + out) = eight;
    } else {
        pages[to] = narrow<T>(*from);
        if (outbox) outbox[out] = narrow<T>(*from);
    }
}

#define KV_APPEND(T)                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        kv_append_##T(const float* keys /* [tokens, kv_heads, head_dim] */,                        \
                      const float* values /* as keys */, const uint32_t* __restrict__ batch,       \
                      T* __restrict__ pages, T* __restrict__ outbox /* or null */, uint32_t block, \
                      uint32_t kv_heads, uint32_t head_dim) {                                      \
        kv_append<T>(keys, values, batch, pages, outbox, block, kv_heads, head_dim);               \
    }
KV_APPEND(f32)
KV_APPEND(bf16)
KV_APPEND(f16)
