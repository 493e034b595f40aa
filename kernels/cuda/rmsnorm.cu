// RMSNorm: out = weight * round(x * (mean(x^2) + eps)^-1/2) per row.
//
// Shapes: x, out f32 [rows, width]; weight f32 [width]. T is the dtype of the normalised value.
// Source: transformers LlamaRMSNorm.
// Grid: one CTA per row, whole warps in one dimension. Where the width allows, a thread reads its
//   elements and weights in pieces of 16 bytes and keeps the first KEPT of them in registers; it
//   reads the others again from the cache. Weights come before pdl_wait.
// Order of sums: f32 per thread from first to last, then lanes, then warps. The bits of a row
//   depend on its values, its width and the size of the CTA, which the host derives from the width
//   alone.
// rmsnorm_add: first adds a branch, x = round(x + round(y)), and stores the sum. This saves one
//   launch and one read.
// expects rmsnorm_*: LDG.128 STG.128
#include "common.cuh"
#include "pdl.cuh"

// Shared memory: a sum per warp.
EXPORT(SHARED, 32 * 4);

// Pieces of a row that a thread keeps in registers: all of them up to a width of 8,192.
#define KEPT 4

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

// Factor of a row whose squares this thread has summed to `sum`.
__device__ __forceinline__ float scale_of(float sum, float* scratch, uint32_t width, float eps) {
    return 1.0f / sqrtf(cta_sum(sum, scratch) / (float)width + eps);
}

// A row whose width is a multiple of 4. ADD: first x = round(x + round(y)), as in add.cu; each
// thread adds the elements that it sums.
template <class T, bool ADD>
__device__ __forceinline__ void rmsnorm_fours(float4* x, const float4* y,
                                              const float4* __restrict__ weight, float4* out,
                                              float* scratch, uint32_t width, float eps) {
    const uint32_t fours = width / 4;
    float4 kept[KEPT], weights[KEPT];
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const uint32_t i = threadIdx.x + j * blockDim.x;
        weights[j] = i < fours ? weight[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    pdl_wait();
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const uint32_t i = threadIdx.x + j * blockDim.x;
        kept[j] = i < fours ? x[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (ADD && i < fours) kept[j] = added<T>(kept[j], y[i]);
    }
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const uint32_t i = threadIdx.x + j * blockDim.x;
        if (ADD && i < fours) x[i] = kept[j];
        if (i < fours) sum = squares(sum, kept[j]);
    }
    for (uint32_t i = threadIdx.x + KEPT * blockDim.x; i < fours; i += blockDim.x) {
        float4 v = x[i];
        if (ADD) x[i] = v = added<T>(v, y[i]);
        sum = squares(sum, v);
    }
    const float scale = scale_of(sum, scratch, width, eps);
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const uint32_t i = threadIdx.x + j * blockDim.x;
        if (i < fours) out[i] = normed<T>(kept[j], weights[j], scale);
    }
    for (uint32_t i = threadIdx.x + KEPT * blockDim.x; i < fours; i += blockDim.x)
        out[i] = normed<T>(x[i], weight[i], scale);
}

template <class T, bool ADD>
__device__ __forceinline__ void rmsnorm(float* x, const float* y, const float* __restrict__ weight,
                                        float* __restrict__ out, uint32_t width, float eps) {
    SMEM_DYN(shared);
    float* scratch = reinterpret_cast<float*>(shared);
    pdl_launch();
    x += (size_t)blockIdx.x * width;
    out += (size_t)blockIdx.x * width;
    if (ADD) y += (size_t)blockIdx.x * width;
    if (width % 4 == 0) {
        rmsnorm_fours<T, ADD>(reinterpret_cast<float4*>(x), reinterpret_cast<const float4*>(y),
                              reinterpret_cast<const float4*>(weight),
                              reinterpret_cast<float4*>(out), scratch, width, eps);
        return;
    }
    pdl_wait();
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
        if (ADD) x[i] = rounded<T>(x[i] + rounded<T>(y[i]));
        sum = __fmaf_rn(x[i], x[i], sum);
    }
    const float scale = scale_of(sum, scratch, width, eps);
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x)
        out[i] = weight[i] * rounded<T>(x[i] * scale);
}

#define RMSNORM(T)                                                                                 \
    extern "C" __global__ void __launch_bounds__(512) rmsnorm_##T(                                 \
        float* x /* [rows, width], read */, const float* __restrict__ weight /* [width] */,        \
        float* __restrict__ out /* [rows, width] */, uint32_t width, float eps) {                  \
        rmsnorm<T, false>(x, nullptr, weight, out, width, eps);                                    \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(512) rmsnorm_add_##T(                             \
        float* x /* [rows, width], becomes the sum */, const float* y /* [rows, width] */,         \
        const float* __restrict__ weight /* [width] */,                                            \
        float* __restrict__ out /* [rows, width] */, uint32_t width, float eps) {                  \
        rmsnorm<T, true>(x, y, weight, out, width, eps);                                           \
    }
RMSNORM(f32)
RMSNORM(bf16)
RMSNORM(f16)
