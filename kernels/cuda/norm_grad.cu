// Gradients of RMSNorm and LayerNorm, in place of the gradient of the output:
//   u = grad weight; h = (x - m) r; grad = r (u - [mean(u)] - h mean(u h))
// RMSNorm: m = 0, without the term in [].
//
// Shapes: f32 x, grad [rows, width], weight [width].
// Reference: kernels/src/ops/gradient.rs.
// Grid: one CTA per row. Sums over threads, lanes, then warps depend on the width and the CTA only.
// Traffic: x and grad in, grad out.
// expects *_grad: no LDL STL
#include "common.cuh"

// Shared memory: four sums per warp.
EXPORT(SHARED, 4 * 32 * 4);

template <bool CENTERED>
__device__ __forceinline__ void norm_grad(const float* x, const float* weight, float* grad,
                                          uint32_t width, float eps) {
    SMEM_DYN(shared);
    float* scratch = reinterpret_cast<float*>(shared);
    x += (size_t)blockIdx.x * width;
    grad += (size_t)blockIdx.x * width;
    const float n = (float)width;
    float mean = 0.0f, level = 0.0f, sum = 0.0f;
    if (CENTERED) {
        for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
            sum += x[i];
            level += grad[i] * weight[i];
        }
        mean = cta_sum(sum, scratch) / n;
        level = cta_sum(level, scratch + 32) / n;
    }
    float squares = 0.0f, along = 0.0f;
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
        const float v = x[i] - mean;
        squares += v * v;
        along += grad[i] * weight[i] * v;
    }
    const float scale = 1.0f / sqrtf(cta_sum(squares, scratch + 64) / n + eps);
    along = cta_sum(along, scratch + 96) * scale / n;
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x)
        grad[i] = scale * (grad[i] * weight[i] - level - (x[i] - mean) * scale * along);
}

#define NORM_GRAD(name, CENTERED)                                                                  \
    extern "C" __global__ void __launch_bounds__(512)                                              \
        name(const float* __restrict__ x /* [rows, width] */,                                      \
             const float* __restrict__ weight /* [width] */,                                       \
             float* __restrict__ grad /* [rows, width] */, uint32_t width, float eps) {            \
        norm_grad<CENTERED>(x, weight, grad, width, eps);                                          \
    }
NORM_GRAD(rmsnorm_grad, false)
NORM_GRAD(layernorm_grad, true)
