// SwiGLU activation in place of the gate, and its gradient:
//   gate = round(silu(round(gate))) * round(up), silu(x) = x / (1 + exp(-x))
//   s = 1 / (1 + exp(-gate)); gate' = grad up s (1 + gate (1 - s)); up' = grad gate s
//
// Shapes: f32 [len]. T is the dtype of the roundings; gradients round nothing.
// Reference: kernels/src/ops/silu_mul.rs and gradient.rs.
// Grid: four neighbouring elements per thread, single elements at the end; addresses aligned to 16.
// Traffic: 12 bytes per element, 20 for the gradient.
// expects silu_mul_*: LDG.128 STG.128
#include "pdl.cuh"
#include "silu.cuh"

template <class T>
__device__ __forceinline__ void silu_mul(float* gate, const float* up, uint64_t len) {
    pdl_launch();
    pdl_wait();
    const uint64_t at = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (at + 4 <= len) {
        float4 a = reinterpret_cast<const float4*>(gate)[at / 4];
        const float4 b = reinterpret_cast<const float4*>(up)[at / 4];
        a = make_float4(activated<T>(a.x, b.x), activated<T>(a.y, b.y), activated<T>(a.z, b.z),
                        activated<T>(a.w, b.w));
        reinterpret_cast<float4*>(gate)[at / 4] = a;
    } else {
        for (uint64_t i = at; i < len; i++) gate[i] = activated<T>(gate[i], up[i]);
    }
}

__device__ __forceinline__ void slope(float& gate, float& up, float grad) {
    const float x = gate, sigmoid = 1.0f / (1.0f + expf(-x));
    gate = grad * up * sigmoid * (1.0f + x * (1.0f - sigmoid));
    up = grad * x * sigmoid;
}

extern "C" __global__ void __launch_bounds__(256)
    silu_mul_grad(float* __restrict__ gate /* [len] */, float* __restrict__ up /* [len] */,
                  const float* __restrict__ grad /* [len] */, uint64_t len) {
    const uint64_t at = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (at + 4 <= len) {
        float4 a = reinterpret_cast<const float4*>(gate)[at / 4],
               b = reinterpret_cast<const float4*>(up)[at / 4];
        const float4 g = reinterpret_cast<const float4*>(grad)[at / 4];
        slope(a.x, b.x, g.x);
        slope(a.y, b.y, g.y);
        slope(a.z, b.z, g.z);
        slope(a.w, b.w, g.w);
        reinterpret_cast<float4*>(gate)[at / 4] = a;
        reinterpret_cast<float4*>(up)[at / 4] = b;
    } else {
        for (uint64_t i = at; i < len; i++) slope(gate[i], up[i], grad[i]);
    }
}

#define SILU_MUL(T)                                                                                \
    extern "C" __global__ void __launch_bounds__(256) silu_mul_##T(                                \
        float* __restrict__ gate /* [len] */, const float* up /* [len] */, uint64_t len) {         \
        silu_mul<T>(gate, up, len);                                                                \
    }
SILU_MUL(f32)
SILU_MUL(bf16)
SILU_MUL(f16)
