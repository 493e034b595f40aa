// Residual connections and deep prompts: x = round(x + round(y)).
//
// Shapes: f32 [len]. For deep prompts y is shorter than x; the host says where in x it begins.
// Variants: T is the dtype to which y and the sum are rounded.
// Reference: kernels/src/ops/add.rs.
// Grid: four neighbouring elements per thread. The fast path needs both addresses aligned to 16.
// Traffic: 12 bytes per element.
// expects add_*: LDG.128 STG.128
#include "common.cuh"
#include "pdl.cuh"

template <class T> __device__ __forceinline__ void add(float* x, const float* y, uint64_t len) {
    pdl_launch();
    pdl_wait();
    const uint64_t at = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    const bool aligned = ((reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(y)) & 15) == 0;
    if (aligned && at + 4 <= len) {
        float4 a = reinterpret_cast<const float4*>(x)[at / 4];
        const float4 b = reinterpret_cast<const float4*>(y)[at / 4];
        a.x = rounded<T>(a.x + rounded<T>(b.x));
        a.y = rounded<T>(a.y + rounded<T>(b.y));
        a.z = rounded<T>(a.z + rounded<T>(b.z));
        a.w = rounded<T>(a.w + rounded<T>(b.w));
        reinterpret_cast<float4*>(x)[at / 4] = a;
    } else {
        for (uint64_t i = at; i < len && i < at + 4; i++)
            x[i] = rounded<T>(x[i] + rounded<T>(y[i]));
    }
}

#define ADD(T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        add_##T(float* __restrict__ x /* [len] */, const float* y /* [len] */, uint64_t len) {     \
        add<T>(x, y, len);                                                                         \
    }
ADD(f32)
ADD(bf16)
ADD(f16)
