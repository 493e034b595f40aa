// The sum of squares of a row, in an order that does not depend on who computes it: 8 neighbouring
// elements from first to last, the eights of a block of 64 in pairs, then the blocks, of which each
// lane of a warp adds every 32nd, and at last the lanes in pairs. What is behind the width is zero.
#pragma once
#include "common.cuh"

#define NORM_EIGHTS 8 // of a block

// 8 neighbouring elements.
struct Eight {
    float4 v[2];
};

template <class T> __device__ __forceinline__ float4 added(float4 v, const float4& b) {
    v.x = rounded<T>(__fadd_rn(v.x, rounded<T>(b.x)));
    v.y = rounded<T>(__fadd_rn(v.y, rounded<T>(b.y)));
    v.z = rounded<T>(__fadd_rn(v.z, rounded<T>(b.z)));
    v.w = rounded<T>(__fadd_rn(v.w, rounded<T>(b.w)));
    return v;
}
__device__ __forceinline__ float squares(float sum, const float4& v) {
    return __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, sum))));
}
template <class T>
__device__ __forceinline__ float4 normed(const float4& v, const float4& w, float scale) {
    return make_float4(w.x * rounded<T>(v.x * scale), w.y * rounded<T>(v.y * scale),
                       w.z * rounded<T>(v.z * scale), w.w * rounded<T>(v.w * scale));
}

// Squares of a block, of which 8 neighbouring lanes have an eight each; all of them get it.
__device__ __forceinline__ float block_squares(const Eight& eight) {
    float sum = squares(squares(0.0f, eight.v[0]), eight.v[1]);
    for (int bits = NORM_EIGHTS / 2; bits > 0; bits /= 2) sum += __shfl_xor_sync(~0u, sum, bits);
    return sum;
}
// Factor of a row with the squares of its `count` blocks; all lanes of a warp get it.
__device__ __forceinline__ float norm_scale(const float* of_blocks, uint32_t count, uint32_t width,
                                            float eps) {
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x % 32; i < count; i += 32) sum += of_blocks[i];
    return 1.0f / sqrtf(warp_sum(sum) / (float)width + eps);
}
