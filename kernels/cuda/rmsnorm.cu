// RMSNorm: out = weight * round(x * (mean(x^2) + eps)^-1/2) per row.
//
// Shapes: x, out f32 [rows, width]; weight f32 [width]. T is the dtype of the normalised value.
// Source: transformers LlamaRMSNorm.
// Grid: one CTA per row, whole warps in one dimension. A thread reads its elements twice, the
//   second time from the cache, in pieces of 16 bytes where the width allows, and writes them once.
// Order of sums: f32 per thread from first to last, then lanes, then warps. The bits of a row
//   depend on its values, its width and the size of the CTA, which the host derives from the width
//   alone.
// rmsnorm_add: first adds a branch, x = round(x + round(y)), and stores the sum. This saves one
//   launch and one read.
// expects rmsnorm_*: LDG.128 STG.128
#include "common.cuh"

// Shared memory: a sum per warp.
EXPORT(SHARED, 32 * 4);

// ADD: first x = round(x + round(y)), as in add.cu; each thread adds the elements that it sums.
template <class T, bool ADD>
__device__ __forceinline__ void rmsnorm(float* x, const float* y, const float* __restrict__ weight,
                                        float* __restrict__ out, uint32_t width, float eps) {
    SMEM_DYN(shared);
    x += (size_t)blockIdx.x * width;
    out += (size_t)blockIdx.x * width;
    if (ADD) y += (size_t)blockIdx.x * width;
    const bool whole = width % 4 == 0;
    float sum = 0.0f;
    if (whole) {
        for (uint32_t i = threadIdx.x; i < width / 4; i += blockDim.x) {
            float4 v = reinterpret_cast<const float4*>(x)[i];
            if (ADD) {
                const float4 b = reinterpret_cast<const float4*>(y)[i];
                v.x = rounded<T>(__fadd_rn(v.x, rounded<T>(b.x)));
                v.y = rounded<T>(v.y + rounded<T>(b.y));
                v.z = rounded<T>(v.z + rounded<T>(b.z));
                v.w = rounded<T>(v.w + rounded<T>(b.w));
                reinterpret_cast<float4*>(x)[i] = v;
            }
            sum = __fmaf_rn(v.w, v.w,
                            __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, sum))));
        }
    } else {
        for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
            if (ADD) x[i] = rounded<T>(x[i] + rounded<T>(y[i]));
            sum = __fmaf_rn(x[i], x[i], sum);
        }
    }
    const float mean = cta_sum(sum, reinterpret_cast<float*>(shared)) / (float)width;
    const float scale = 1.0f / sqrtf(mean + eps);
    if (whole) {
        for (uint32_t i = threadIdx.x; i < width / 4; i += blockDim.x) {
            float4 v = reinterpret_cast<const float4*>(x)[i],
                   w = reinterpret_cast<const float4*>(weight)[i];
            v.x = w.x * rounded<T>(v.x * scale);
            v.y = w.y * rounded<T>(v.y * scale);
            v.z = w.z * rounded<T>(v.z * scale);
            v.w = w.w * rounded<T>(v.w * scale);
            reinterpret_cast<float4*>(out)[i] = v;
        }
    } else {
        for (uint32_t i = threadIdx.x; i < width; i += blockDim.x)
            out[i] = weight[i] * rounded<T>(x[i] * scale);
    }
}

#define RMSNORM(T)                                                                                 \
    extern "C" __global__ void __launch_bounds__(512) rmsnorm_##T(                                 \
        float* x /* [rows, width], read */, const float* __restrict__ weight /* [width] */,        \
        float* __restrict__ out /* [rows, width] */, uint32_t width, float eps) {                  \
        rmsnorm<T, false>(x, nullptr, weight, out, width, eps);                                    \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(512)                                              \
        rmsnorm_add_##T(float* x /* [rows, width], becomes the sum */,                             \
                        const float* __restrict__ y /* [rows, width] */,                           \
                        const float* __restrict__ weight /* [width] */,                            \
                        float* __restrict__ out /* [rows, width] */, uint32_t width, float eps) {  \
        rmsnorm<T, true>(x, y, weight, out, width, eps);                                           \
    }
RMSNORM(f32)
RMSNORM(bf16)
RMSNORM(f16)
