// out = round(x) weight^T + bias for every shape and format: f32 weights, quantized ones that are computed with in f32, and sizes off the
// grain of the tensor-core kernels.
//
// x f32 [rows, inputs]; weight [outputs, inputs] as stored; out f32 [rows, outputs]. CPU reference: kernels/src/ops/linear.rs.
// Grid: x outputs / 8, y rows / 8. CTA: 8 warps, one output each, for 8 rows. A lane takes every 32nd group of 4 inputs (f32, inputs a
// multiple of 4: 16 bytes of weights at a time) or every 32nd input (else); its products are summed one after the other and then over the lanes
// (butterfly), so the bits of an element are a function of its row and the matrix.
// Floor: bytes of the matrix; each is read once per 8 rows. f32 only: other formats are read by the byte.
#include "linear.cuh"

#define ROWS 8

template <class F, class T> struct Weight;
template <class T> struct Weight<Plain, T> {
    const T* at;
    __device__ __forceinline__ Weight(const uint8_t* bytes, size_t, size_t inputs, size_t output)
        : at(reinterpret_cast<const T*>(bytes) + output * inputs) {}
    __device__ __forceinline__ float operator[](size_t i) const { return widen(at[i]); }
};
template <class T> struct Weight<Int8, T> {
    const int8_t* at;
    float scale;
    __device__ __forceinline__ Weight(const uint8_t* bytes, size_t outputs, size_t inputs, size_t output)
        : at(reinterpret_cast<const int8_t*>(bytes) + output * inputs),
          scale(reinterpret_cast<const float*>(bytes + part_end(outputs * inputs))[output] * (1.0f / 127.0f)) {}
    __device__ __forceinline__ float operator[](size_t i) const { return (float)at[i] * scale; }
};
template <class T> struct Weight<Nf4, T> {
    Nf4Parts parts;
    size_t start;
    __device__ __forceinline__ Weight(const uint8_t* bytes, size_t outputs, size_t inputs, size_t output)
        : parts(nf4_parts(bytes, outputs, inputs)), start(output * inputs) {}
    __device__ __forceinline__ float operator[](size_t i) const { return rounded<T>(nf4_weight(parts, start + i)); }
};

template <class F, class T>
__device__ __forceinline__ void linear_any(const uint8_t* bytes, const float* x, const float* bias, float* out, uint32_t outputs,
                                           uint32_t inputs, uint32_t rows) {
    const uint32_t output = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * ROWS;
    if (output >= outputs) return;
    const uint32_t count = min(rows - first, (uint32_t)ROWS);
    x += (size_t)first * inputs;
    const Weight<F, T> weight(bytes, outputs, inputs, output);
    float sum[ROWS] = {};
    if (same_type<F, Plain>::value && same_type<T, float>::value && inputs % 4 == 0) {
        const float4* row = reinterpret_cast<const float4*>(bytes) + (size_t)output * (inputs / 4);
        for (uint32_t i = lane; i < inputs / 4; i += 32) {
            const float4 w = row[i];
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) {
                if (r >= count) break;
                const float4 v = reinterpret_cast<const float4*>(x + (size_t)r * inputs)[i];
                sum[r] = __fmaf_rn(v.w, w.w, __fmaf_rn(v.z, w.z, __fmaf_rn(v.y, w.y, __fmaf_rn(v.x, w.x, sum[r]))));
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
        if (lane == 0) out[(size_t)(first + r) * outputs + output] = bias ? __fadd_rn(total, bias[output]) : total;
    }
}

#define LINEAR_ANY(F, f, T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) linear_any_##f##_##T(                                   \
        const uint8_t* __restrict__ weight, const float* __restrict__ x /* [rows, inputs] */,                 \
        const float* __restrict__ bias /* [outputs] or null */, float* __restrict__ out /* [rows, outputs] */, \
        uint32_t outputs, uint32_t inputs, uint32_t rows) {                                                   \
        linear_any<F, T>(weight, x, bias, out, outputs, inputs, rows);                                        \
    }
#define LINEAR_ANY_DTYPES(F, f) LINEAR_ANY(F, f, f32) LINEAR_ANY(F, f, bf16) LINEAR_ANY(F, f, f16)
LINEAR_ANY_DTYPES(Plain, plain)
LINEAR_ANY_DTYPES(Int8, int8)
LINEAR_ANY_DTYPES(Nf4, nf4)
