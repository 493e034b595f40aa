// Two 16-bit numbers in one register, and tensor-core products of them.
#pragma once
#include "common.cuh"

template <class T> __device__ __forceinline__ uint32_t pack(float low, float high);
template <> __device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return (uint32_t)__bfloat16_as_ushort(pair.x) | (uint32_t)__bfloat16_as_ushort(pair.y) << 16;
}
template <> __device__ __forceinline__ uint32_t pack<f16>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return (uint32_t)__half_as_ushort(pair.x) | (uint32_t)__half_as_ushort(pair.y) << 16;
}

template <class T> __device__ __forceinline__ float2 unpack(uint32_t pair);
template <> __device__ __forceinline__ float2 unpack<bf16>(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack<f16>(uint32_t pair) {
    return make_float2(widen(__ushort_as_half((unsigned short)pair)),
                       widen(__ushort_as_half((unsigned short)(pair >> 16))));
}

// Rounds two numbers in one conversion.
template <class T> __device__ __forceinline__ void round_pair(float& a, float& b) {
    const float2 two = unpack<T>(pack<T>(a, b));
    a = two.x, b = two.y;
}

template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1);
template <>
__device__ __forceinline__ void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
    mma_bf16(d, a, b0, b1);
}
template <>
__device__ __forceinline__ void mma<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
    mma_f16(d, a, b0, b1);
}
