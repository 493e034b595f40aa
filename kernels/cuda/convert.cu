// out = x in another dtype, rounded to nearest even: f32 to bf16 or f16 before a GEMM, and stored
// values to f32.
//
// Reference: kernels/src/ops/convert.rs.
// Grid: 1,024 elements per CTA of 256 threads, four neighbours each where all four exist.
// Traffic: every element read once and written once.
// expects convert_f32_*: LDG.128 STG.64
// expects convert_*_f32: LDG.64 STG.128
#include "common.cuh"

template <class T> struct alignas(4 * sizeof(T)) Four {
    T v[4];
};

template <class From, class To>
__device__ __forceinline__ void convert(const From* x, To* out, uint64_t len) {
    const uint64_t at = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (at + 4 <= len) {
        const Four<From> from = reinterpret_cast<const Four<From>*>(x)[at / 4];
        Four<To> to;
#pragma unroll
        for (int i = 0; i < 4; i++) to.v[i] = narrow<To>(widen(from.v[i]));
        reinterpret_cast<Four<To>*>(out)[at / 4] = to;
    } else {
        for (uint64_t i = at; i < len; i++) out[i] = narrow<To>(widen(x[i]));
    }
}

// x and out aligned to 4 elements.
#define CONVERT(From, To)                                                                          \
    extern "C" __global__ void __launch_bounds__(256) convert_##From##_##To(                       \
        const From* __restrict__ x /* [len] */, To* __restrict__ out /* [len] */, uint64_t len) {  \
        convert(x, out, len);                                                                      \
    }
CONVERT(f32, bf16)
CONVERT(f32, f16)
CONVERT(bf16, f32)
CONVERT(f16, f32)
