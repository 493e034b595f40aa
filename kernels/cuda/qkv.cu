// Splits a fused projection into queries, keys and values, and joins their gradients:
//   fused [tokens, kv_heads, group + 2, head_dim]
//     <-> q [tokens, kv_heads, group, head_dim], k and v [tokens, kv_heads, head_dim]
//
// Shapes: f32. Reference: kernels/src/ops/qkv.rs.
// Grid: one thread per element of the fused tensor. Traffic: 8 bytes per element.
// expects *_qkv: no LDL STL
#include "common.cuh"
#include "pdl.cuh"

// Where element `i` of the fused tensor lies outside of it.
__device__ __forceinline__ float* offset_of(uint64_t i, float* q, float* k, float* v,
                                            uint32_t group, uint32_t head_dim) {
    const uint64_t width = (uint64_t)(group + 2) * head_dim, head = i / width, at = i % width,
                   queries = (uint64_t)group * head_dim;
    if (at < queries) return q + head * queries + at;
    if (at < queries + head_dim) return k + head * head_dim + (at - queries);
    return v + head * head_dim + (at - queries - head_dim);
}

extern "C" __global__ void __launch_bounds__(256)
    split_qkv(const float* fused /* [heads, group + 2, head_dim] */,
              float* __restrict__ q /* [heads, group, head_dim] */,
              float* __restrict__ k /* [heads, head_dim] */, float* __restrict__ v /* as k */,
              uint32_t heads /* tokens * kv_heads */, uint32_t group, uint32_t head_dim) {
    pdl_launch();
    pdl_wait();
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (uint64_t)heads * (group + 2) * head_dim)
        *offset_of(i, q, k, v, group, head_dim) = fused[i];
}

extern "C" __global__ void __launch_bounds__(256)
    join_qkv(float* __restrict__ fused /* [heads, group + 2, head_dim] */,
             float* q /* [heads, group, head_dim], read */, float* k /* [heads, head_dim], read */,
             float* v /* as k, read */, uint32_t heads /* tokens * kv_heads */, uint32_t group,
             uint32_t head_dim) {
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (uint64_t)heads * (group + 2) * head_dim)
        fused[i] = *offset_of(i, q, k, v, group, head_dim);
}
