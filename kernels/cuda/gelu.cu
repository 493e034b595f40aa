// GELU in place, in two forms, and its gradient: x = gelu(round(x)), grad *= gelu'(x).
//   tanh  x/2 (1 + tanh(0.79788456 x (1 + 0.044715 x^2)))
//   erf   x/2 (1 + erf(x / 2^1/2))
//
// Shapes: f32 [len]. T is the dtype to which the input is rounded; the gradient rounds nothing.
// Reference: kernels/src/ops/gelu.rs and gradient.rs.
// Grid: four neighbouring elements per thread, single elements at the end; addresses aligned to 16.
// Traffic: 8 bytes per element, 12 for the gradient.
// expects gelu_*: LDG.128 STG.128
#include "common.cuh"
#include "pdl.cuh"

struct Tanh {
    static __device__ __forceinline__ float value(float x) {
        return 0.5f * x * (1.0f + tanhf(0.79788456f * x * (1.0f + 0.044715f * x * x)));
    }
    static __device__ __forceinline__ float slope(float x) {
        const float t = tanhf(0.79788456f * x * (1.0f + 0.044715f * x * x));
        return 0.5f * (1.0f + t) +
               0.5f * x * (1.0f - t * t) * 0.79788456f * (1.0f + 0.134145f * x * x);
    }
};
struct Erf {
    static __device__ __forceinline__ float value(float x) {
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    }
    static __device__ __forceinline__ float slope(float x) {
        return 0.5f * (1.0f + erff(x * 0.70710678f)) + x * expf(-0.5f * x * x) * 0.39894228f;
    }
};

template <class Form, class T> __device__ __forceinline__ void gelu(float* x, uint64_t len) {
    pdl_launch();
    pdl_wait();
    const uint64_t at = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (at + 4 <= len) {
        float4 v = reinterpret_cast<const float4*>(x)[at / 4];
        v.x = Form::value(rounded<T>(v.x));
        v.y = Form::value(rounded<T>(v.y));
        v.z = Form::value(rounded<T>(v.z));
        v.w = Form::value(rounded<T>(v.w));
        reinterpret_cast<float4*>(x)[at / 4] = v;
    } else {
        for (uint64_t i = at; i < len; i++) x[i] = Form::value(rounded<T>(x[i]));
    }
}

template <class Form>
__device__ __forceinline__ void gelu_grad(const float* x, float* grad, uint64_t len) {
    const uint64_t at = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (at + 4 <= len) {
        const float4 v = reinterpret_cast<const float4*>(x)[at / 4];
        float4 g = reinterpret_cast<const float4*>(grad)[at / 4];
        g.x *= Form::slope(v.x);
        g.y *= Form::slope(v.y);
        g.z *= Form::slope(v.z);
        g.w *= Form::slope(v.w);
        reinterpret_cast<float4*>(grad)[at / 4] = g;
    } else {
        for (uint64_t i = at; i < len; i++) grad[i] *= Form::slope(x[i]);
    }
}

#define GELU(Form, form, T)                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        gelu_##form##_##T(float* __restrict__ x /* [len] */, uint64_t len) {                       \
        gelu<Form, T>(x, len);                                                                     \
    }
#define GELU_GRAD(Form, form)                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        gelu_##form##_grad(const float* __restrict__ x /* [len] */,                                \
                           float* __restrict__ grad /* [len] */, uint64_t len) {                   \
        gelu_grad<Form>(x, grad, len);                                                             \
    }
GELU(Tanh, tanh, f32)
GELU(Tanh, tanh, bf16)
GELU(Tanh, tanh, f16)
GELU(Erf, erf, f32)
GELU(Erf, erf, bf16)
GELU(Erf, erf, f16)
GELU_GRAD(Tanh, tanh)
GELU_GRAD(Erf, erf)
