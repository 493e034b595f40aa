// The router of a mixture of experts, the moves of rows to and from experts, and the gradients of both.
//   p = softmax(round(logits)); E = the `chosen` largest, of equals the first; weights = round(p_e / sum over E of p) for e in E, else 0
//
// CPU reference: kernels/src/ops/route.rs; source: transformers MixtralSparseMoeBlock.
// route, route_grad: one warp per token, 4 tokens per CTA; lane l holds experts l, l + 32, ... (at most 8 each: 256 experts).
// gather, scatter_add: one CTA per moved row; no row is named twice, so nothing is added atomically.
// gate_dot: one CTA per row; sums over threads, lanes, warps in a fixed order.
// Floor: rows once in, once out. The router itself is bound by its launch.
#include "common.cuh"

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define HELD 8

// Probabilities of a token's experts, and which are chosen.
struct Choice {
    float p[HELD];
    bool chosen[HELD];
    float sum; // of the probabilities of the chosen, from the most probable on
};

template <class T> __device__ __forceinline__ Choice choose(const float* logits, uint32_t experts, uint32_t count) {
    const uint32_t lane = threadIdx.x % 32;
    Choice choice;
    float top = -INFINITY, total = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const uint32_t expert = lane + 32 * i;
        choice.p[i] = expert < experts ? rounded<T>(logits[expert]) : -INFINITY;
        choice.chosen[i] = false;
        top = fmaxf(top, choice.p[i]);
    }
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        choice.p[i] = lane + 32 * i < experts ? expf(choice.p[i] - top) : 0.0f;
        total += choice.p[i];
    }
    total = warp_sum(total);
#pragma unroll
    for (int i = 0; i < HELD; i++) choice.p[i] = choice.p[i] / total;
    choice.sum = 0.0f;
    for (uint32_t n = 0; n < count; n++) {
        // The largest that is left, and of equals the first. What is no number is never larger; a token of such logits goes to the first experts.
        float best = -1.0f;
        uint32_t where = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const uint32_t expert = lane + 32 * i;
            if (expert < experts && !choice.chosen[i] && (choice.p[i] > best || where == 0xffffffffu)) {
                best = choice.p[i];
                where = expert;
            }
        }
        for (int bits = 16; bits > 0; bits /= 2) {
            const float other = __shfl_xor_sync(~0u, best, bits);
            const uint32_t at = __shfl_xor_sync(~0u, where, bits);
            const bool better = other > best || (!(best > other) && at < where);
            if (at != 0xffffffffu && (where == 0xffffffffu || better)) {
                best = other;
                where = at;
            }
        }
        choice.sum += best;
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (lane + 32 * i == where) choice.chosen[i] = true;
    }
    return choice;
}

template <class T> __device__ __forceinline__ void route(float* logits, uint32_t tokens, uint32_t experts, uint32_t count) {
    const uint32_t token = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= tokens) return;
    logits += (size_t)token * experts;
    const Choice choice = choose<T>(logits, experts, count);
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (lane + 32 * i < experts) logits[lane + 32 * i] = choice.chosen[i] ? rounded<T>(choice.p[i] / choice.sum) : 0.0f;
}

// With S the sum of the chosen: dp_e = (dw_e - sum dw w) / S for them, else 0; dlogits = p (dp - sum p dp).
template <class T>
__device__ __forceinline__ void route_grad(float* logits, const float* grad, uint32_t tokens, uint32_t experts, uint32_t count) {
    const uint32_t token = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= tokens) return;
    logits += (size_t)token * experts;
    grad += (size_t)token * experts;
    const Choice choice = choose<T>(logits, experts, count);
    float mean = 0.0f, level = 0.0f, slope[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (choice.chosen[i]) mean += grad[lane + 32 * i] * choice.p[i] / choice.sum;
    mean = warp_sum(mean);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        slope[i] = choice.chosen[i] ? (grad[lane + 32 * i] - mean) / choice.sum : 0.0f;
        level += choice.p[i] * slope[i];
    }
    level = warp_sum(level);
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (lane + 32 * i < experts) logits[lane + 32 * i] = choice.p[i] * (slope[i] - level);
}

// out[i] = x[index[i]]
extern "C" __global__ void __launch_bounds__(256)
    gather(const float* __restrict__ x /* [rows, width] */, const uint32_t* __restrict__ index /* [count] */,
           float* __restrict__ out /* [count, width] */, uint32_t width) {
    x += (size_t)index[blockIdx.x] * width;
    out += (size_t)blockIdx.x * width;
    if (width % 4 == 0) {
        for (uint32_t i = threadIdx.x; i < width / 4; i += blockDim.x) reinterpret_cast<float4*>(out)[i] = reinterpret_cast<const float4*>(x)[i];
    } else {
        for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) out[i] = x[i];
    }
}

// out[index[i]] = round(out[index[i]] + round(weights[i] * round(x[i])))
template <class T> __device__ __forceinline__ float shared_in(float out, float weight, float x) {
    return rounded<T>(__fadd_rn(out, rounded<T>(__fmul_rn(weight, rounded<T>(x)))));
}
template <class T>
__device__ __forceinline__ void scatter_add(const float* x, const uint32_t* index, const float* weights, float* out, uint32_t width) {
    x += (size_t)blockIdx.x * width;
    out += (size_t)index[blockIdx.x] * width;
    const float weight = weights[blockIdx.x];
    if (width % 4 == 0) {
        for (uint32_t i = threadIdx.x; i < width / 4; i += blockDim.x) {
            const float4 v = reinterpret_cast<const float4*>(x)[i];
            float4 o = reinterpret_cast<float4*>(out)[i];
            o.x = shared_in<T>(o.x, weight, v.x);
            o.y = shared_in<T>(o.y, weight, v.y);
            o.z = shared_in<T>(o.z, weight, v.z);
            o.w = shared_in<T>(o.w, weight, v.w);
            reinterpret_cast<float4*>(out)[i] = o;
        }
    } else {
        for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) out[i] = shared_in<T>(out[i], weight, x[i]);
    }
}

// out[index[i], expert] = sum of silu(gate[i]) up[i] grad[i]
extern "C" __global__ void __launch_bounds__(256)
    gate_dot(const float* __restrict__ gate /* [count, width] */, const float* __restrict__ up /* as gate */,
             const float* __restrict__ grad /* as gate */, const uint32_t* __restrict__ index /* [count] */,
             float* __restrict__ out /* [tokens, experts] */, uint32_t width, uint32_t expert, uint32_t experts) {
    SMEM_DYN(shared); // 32 floats
    const size_t start = (size_t)blockIdx.x * width;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
        const float x = gate[start + i];
        sum += x / (1.0f + expf(-x)) * up[start + i] * grad[start + i];
    }
    sum = cta_sum(sum, reinterpret_cast<float*>(shared));
    if (threadIdx.x == 0) out[(size_t)index[blockIdx.x] * experts + expert] = sum;
}

#define ROUTE(T)                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(128)                                                                               \
        route_##T(float* __restrict__ logits /* [tokens, experts] */, uint32_t tokens, uint32_t experts, uint32_t chosen) {         \
        route<T>(logits, tokens, experts, chosen);                                                                                  \
    }                                                                                                                               \
    extern "C" __global__ void __launch_bounds__(128)                                                                               \
        route_grad_##T(float* __restrict__ logits /* [tokens, experts] */, const float* __restrict__ grad /* as logits */,          \
                       uint32_t tokens, uint32_t experts, uint32_t chosen) {                                                        \
        route_grad<T>(logits, grad, tokens, experts, chosen);                                                                       \
    }                                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                               \
        scatter_add_##T(const float* __restrict__ x /* [count, width] */, const uint32_t* __restrict__ index /* [count] */,         \
                        const float* __restrict__ weights /* [count] */, float* __restrict__ out /* [rows, width] */, uint32_t width) { \
        scatter_add<T>(x, index, weights, out, width);                                                                              \
    }
ROUTE(f32)
ROUTE(bf16)
ROUTE(f16)
