// out = weight * round(x * (mean(x^2) + eps)^-1/2) per row
//
// x, out f32 [rows, width]; weight f32 [width]; T is the dtype that the normalised value is rounded to.
// One CTA per row. Each thread reads its elements twice (the second time from the cache) and writes them once; the row is read in pieces of
// 16 bytes when its width allows. Sums are f32: per thread from first to last, then over lanes, then over warps, so the bits of a row are
// a function of its values, its width and the size of the CTA, which the host derives from the width alone.
// Limits: CTA of whole warps in one dimension.
// Source: transformers LlamaRMSNorm.
#include "common.cuh"

template <class T>
__device__ __forceinline__ void rmsnorm(const float* __restrict__ x, const float* __restrict__ weight, float* __restrict__ out,
                                        uint32_t width, float eps) {
    SMEM_DYN(shared); // 32 floats
    x += (size_t)blockIdx.x * width;
    out += (size_t)blockIdx.x * width;
    const bool whole = width % 4 == 0;
    float sum = 0.0f;
    if (whole) {
        for (uint32_t i = threadIdx.x; i < width / 4; i += blockDim.x) {
            float4 v = reinterpret_cast<const float4*>(x)[i];
            sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
    } else {
        for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) sum += x[i] * x[i];
    }
    const float mean = cta_sum(sum, reinterpret_cast<float*>(shared)) / (float)width;
    const float scale = 1.0f / sqrtf(mean + eps);
    if (whole) {
        for (uint32_t i = threadIdx.x; i < width / 4; i += blockDim.x) {
            float4 v = reinterpret_cast<const float4*>(x)[i], w = reinterpret_cast<const float4*>(weight)[i];
            v.x = w.x * rounded<T>(v.x * scale);
            v.y = w.y * rounded<T>(v.y * scale);
            v.z = w.z * rounded<T>(v.z * scale);
            v.w = w.w * rounded<T>(v.w * scale);
            reinterpret_cast<float4*>(out)[i] = v;
        }
    } else {
        for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) out[i] = weight[i] * rounded<T>(x[i] * scale);
    }
}

#define RMSNORM(T)                                                                                                               \
    extern "C" __global__ void __launch_bounds__(512) rmsnorm_##T(const float* __restrict__ x,      /* [rows, width] */          \
                                                                  const float* __restrict__ weight, /* [width] */                \
                                                                  float* __restrict__ out,          /* [rows, width] */          \
                                                                  uint32_t width, float eps) {                                   \
        rmsnorm<T>(x, weight, out, width, eps);                                                                                  \
    }
RMSNORM(f32)
RMSNORM(bf16)
RMSNORM(f16)
