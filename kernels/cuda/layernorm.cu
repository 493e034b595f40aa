// LayerNorm: out = round(weight * (x - mean) * (variance + eps)^-1/2 + bias) per row.
//
// Shapes: x, out f32 [rows, width]; weight, bias f32 [width]. T is the dtype of the result.
// Reference: kernels/src/ops/layernorm.rs.
// Grid: one CTA per row of at most 512 threads, whole warps in one dimension. A thread reads its
//   elements three times, twice from the cache, in pieces of 16 bytes where the width allows. As in
//   torch, the variance is taken around the mean.
// Order of sums: f32 per thread, then lanes, then warps; it depends on the width and the CTA only.
// layernorm_add: first adds a branch, x = round(x + round(y)) as in add.cu, and stores the sum.
//   This saves one launch and one read.
// Traffic: x and out once, 12 bytes per element with the branch; 32 KB per row of a 70B block.
// expects layernorm_*: LDG.128 STG.128
#include "common.cuh"

// Shared memory: two sums per warp.
EXPORT(SHARED, 2 * 32 * 4);

template <class T, bool ADD>
__device__ __forceinline__ void layernorm(float* x, const float* y, const float* weight,
                                          const float* bias, float* out, uint32_t width,
                                          float eps) {
    SMEM_DYN(shared);
    float* scratch = reinterpret_cast<float*>(shared);
    x += (size_t)blockIdx.x * width;
    out += (size_t)blockIdx.x * width;
    float sum = 0.0f, squares = 0.0f;
    const uint32_t fours = width % 4 == 0 ? width / 4 : 0;
    if (ADD) {
        y += (size_t)blockIdx.x * width;
        for (uint32_t i = threadIdx.x; i < fours; i += blockDim.x) {
            float4 v = reinterpret_cast<const float4*>(x)[i];
            const float4 b = reinterpret_cast<const float4*>(y)[i];
            v.x = rounded<T>(v.x + rounded<T>(b.x));
            v.y = rounded<T>(v.y + rounded<T>(b.y));
            v.z = rounded<T>(v.z + rounded<T>(b.z));
            v.w = rounded<T>(v.w + rounded<T>(b.w));
            reinterpret_cast<float4*>(x)[i] = v;
        }
        if (!fours)
            for (uint32_t i = threadIdx.x; i < width; i += blockDim.x)
                x[i] = rounded<T>(x[i] + rounded<T>(y[i]));
    }
    for (uint32_t i = threadIdx.x; i < fours; i += blockDim.x) {
        const float4 v = reinterpret_cast<const float4*>(x)[i];
        sum += v.x + v.y + v.z + v.w;
    }
    if (!fours)
        for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) sum += x[i];
    const float mean = cta_sum(sum, scratch) / (float)width;
    for (uint32_t i = threadIdx.x; i < fours; i += blockDim.x) {
        const float4 v = reinterpret_cast<const float4*>(x)[i];
        const float a = v.x - mean, b = v.y - mean, c = v.z - mean, d = v.w - mean;
        squares = __fmaf_rn(d, d, __fmaf_rn(c, c, __fmaf_rn(b, b, __fmaf_rn(a, a, squares))));
    }
    if (!fours)
        for (uint32_t i = threadIdx.x; i < width; i += blockDim.x)
            squares = __fmaf_rn(x[i] - mean, x[i] - mean, squares);
    const float scale = 1.0f / sqrtf(cta_sum(squares, scratch + 32) / (float)width + eps);
    for (uint32_t i = threadIdx.x; i < fours; i += blockDim.x) {
        float4 v = reinterpret_cast<const float4*>(x)[i];
        const float4 w = reinterpret_cast<const float4*>(weight)[i],
                     b = reinterpret_cast<const float4*>(bias)[i];
        v.x = rounded<T>(w.x * ((v.x - mean) * scale) + b.x);
        v.y = rounded<T>(w.y * ((v.y - mean) * scale) + b.y);
        v.z = rounded<T>(w.z * ((v.z - mean) * scale) + b.z);
        v.w = rounded<T>(w.w * ((v.w - mean) * scale) + b.w);
        reinterpret_cast<float4*>(out)[i] = v;
    }
    if (!fours)
        for (uint32_t i = threadIdx.x; i < width; i += blockDim.x)
            out[i] = rounded<T>(weight[i] * ((x[i] - mean) * scale) + bias[i]);
}

#define LAYERNORM(T)                                                                               \
    extern "C" __global__ void __launch_bounds__(512) layernorm_##T(                               \
        float* x /* [rows, width] */, const float* __restrict__ weight /* [width] */,              \
        const float* __restrict__ bias /* [width] */, float* out /* [rows, width] */,              \
        uint32_t width, float eps) {                                                               \
        layernorm<T, false>(x, nullptr, weight, bias, out, width, eps);                            \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(512)                                              \
        layernorm_add_##T(float* x /* [rows, width], becomes the sum */,                           \
                          const float* __restrict__ y /* [rows, width] */,                         \
                          const float* __restrict__ weight /* [width] */,                          \
                          const float* __restrict__ bias /* [width] */,                            \
                          float* out /* [rows, width] */, uint32_t width, float eps) {             \
        layernorm<T, true>(x, y, weight, bias, out, width, eps);                                   \
    }
LAYERNORM(f32)
LAYERNORM(bf16)
LAYERNORM(f16)
