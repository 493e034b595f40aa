// The router of a mixture of experts, its gradient, and gathering of rows:
//   p = softmax(round(logits)); E = the `chosen` largest; of equals, the first
//   weights[e] = round(p_e / sum over E of p) for e in E, else 0
//
// Reference: kernels/src/ops/route.rs. Source: transformers MixtralSparseMoeBlock.
// route, route_grad: one warp per token, 4 tokens per CTA. Lane l holds experts l, l + 32, ..., at
//   most 8 of them: 256 experts. The launch is the bound.
// gather: one CTA per row; rows once in, once out.
// expects route_*: no LDL STL
// expects gather: LDG.128 STG.128
#include "pdl.cuh"
#include "route.cuh"

template <class T>
__device__ __forceinline__ void route(float* logits, uint32_t tokens, uint32_t experts,
                                      uint32_t count) {
    pdl_launch();
    pdl_wait();
    const uint32_t token = blockIdx.x * 4 + threadIdx.x / 32;
    if (token < tokens) route_token<T>(logits + (size_t)token * experts, experts, count);
}

// With S the sum of the chosen: dp_e = (dw_e - sum dw w) / S for them, else 0; dlogits = p (dp -
// sum p dp).
template <class T>
__device__ __forceinline__ void route_grad(float* logits, const float* grad, uint32_t tokens,
                                           uint32_t experts, uint32_t count) {
    const uint32_t token = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= tokens) return;
    logits += (size_t)token * experts;
    grad += (size_t)token * experts;
    const Choice choice = choose<T>(logits, experts, count);
    float mean = 0.0f, level = 0.0f, slope[EXPERTS_PER_LANE];
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; i++)
        if (choice.chosen[i]) mean += grad[lane + 32 * i] * choice.p[i] / choice.sum;
    mean = warp_sum(mean);
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; i++) {
        slope[i] = choice.chosen[i] ? (grad[lane + 32 * i] - mean) / choice.sum : 0.0f;
        level += choice.p[i] * slope[i];
    }
    level = warp_sum(level);
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; i++)
        if (lane + 32 * i < experts) logits[lane + 32 * i] = choice.p[i] * (slope[i] - level);
}

// out[i] = x[index[i]]
extern "C" __global__ void __launch_bounds__(256)
    gather(const float* x /* [rows, width] */, const uint32_t* __restrict__ index /* [count] */,
           float* __restrict__ out /* [count, width] */, uint32_t width) {
    x += (size_t)index[blockIdx.x] * width;
    out += (size_t)blockIdx.x * width;
    if (width % 4 == 0) {
        for (uint32_t i = threadIdx.x; i < width / 4; i += blockDim.x)
            reinterpret_cast<float4*>(out)[i] = reinterpret_cast<const float4*>(x)[i];
    } else {
        for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) out[i] = x[i];
    }
}

#define ROUTE(T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        route_##T(float* __restrict__ logits /* [tokens, experts] */, uint32_t tokens,             \
                  uint32_t experts, uint32_t chosen) {                                             \
        route<T>(logits, tokens, experts, chosen);                                                 \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        route_grad_##T(float* __restrict__ logits /* [tokens, experts] */,                         \
                       const float* __restrict__ grad /* as logits */, uint32_t tokens,            \
                       uint32_t experts, uint32_t chosen) {                                        \
        route_grad<T>(logits, grad, tokens, experts, chosen);                                      \
    }
ROUTE(f32)
ROUTE(bf16)
ROUTE(f16)
