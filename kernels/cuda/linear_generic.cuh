// Product in every shape and format, one output per warp. linear_generic.cu describes it;
// linear_generic.cu and experts.cu say which rows and matrices a CTA has.
#pragma once
#include "linear.cuh"

#define ROWS  8
#define WARPS 8
EXPORT(ROWS, ROWS);
EXPORT(OUTPUTS, WARPS);

template <class F, class T> struct Weight;
template <class T> struct Weight<Plain, T> {
    const T* at;
    __device__ __forceinline__ Weight(const uint8_t* bytes, size_t, size_t inputs, size_t output,
                                      uint32_t)
        : at(reinterpret_cast<const T*>(bytes) + output * inputs) {}
    __device__ __forceinline__ float operator[](size_t i) const { return widen(at[i]); }
};
template <class T> struct Weight<Int8, T> {
    const int8_t* at;
    float scale;
    __device__ __forceinline__ Weight(const uint8_t* bytes, size_t outputs, size_t inputs,
                                      size_t output, uint32_t)
        : at(reinterpret_cast<const int8_t*>(bytes) + output * inputs),
          scale(reinterpret_cast<const float*>(bytes + aligned_end(outputs * inputs))[output] *
                (1.0f / 127.0f)) {}
    __device__ __forceinline__ float operator[](size_t i) const { return (float)at[i] * scale; }
};
template <class T> struct Weight<Nf4, T> {
    Nf4Matrix matrix;
    size_t output;
    __device__ __forceinline__ Weight(const uint8_t* bytes, size_t outputs, size_t inputs,
                                      size_t output, uint32_t layout)
        : matrix(nf4_matrix(bytes, outputs, inputs, layout)), output(output) {}
    __device__ __forceinline__ float operator[](size_t i) const {
        return rounded<T>(nf4_weight(matrix, output, i));
    }
};

// Computes output `output` of `count` rows, at most 8, with one warp.
template <class F, class T>
__device__ __forceinline__ void linear_generic(const uint8_t* bytes, uint32_t layout,
                                               const float* x, const float* bias, float* out,
                                               uint32_t output, uint32_t outputs, uint32_t inputs,
                                               uint32_t count) {
    const uint32_t lane = threadIdx.x % 32;
    const Weight<F, T> weight(bytes, outputs, inputs, output, layout);
    float sum[ROWS] = {};
    if (same_type<F, Plain>::value && same_type<T, float>::value && inputs % 4 == 0) {
        const float4* row = reinterpret_cast<const float4*>(bytes) + (size_t)output * (inputs / 4);
        for (uint32_t i = lane; i < inputs / 4; i += 32) {
            const float4 w = row[i];
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) {
                if (r >= count) break;
                const float4 v = reinterpret_cast<const float4*>(x + (size_t)r * inputs)[i];
                sum[r] = __fmaf_rn(
                    v.w, w.w,
                    __fmaf_rn(v.z, w.z, __fmaf_rn(v.y, w.y, __fmaf_rn(v.x, w.x, sum[r]))));
            }
        }
    } else {
        for (uint32_t i = lane; i < inputs; i += 32) {
            const float w = weight[i];
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) {
                if (r >= count) break;
                sum[r] = __fmaf_rn(rounded<T>(x[(size_t)r * inputs + i]), w, sum[r]);
            }
        }
    }
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        if (r >= count) break;
        const float total = warp_sum(sum[r]);
        if (lane == 0)
            out[(size_t)r * outputs + output] = bias ? __fadd_rn(total, bias[output]) : total;
    }
}
