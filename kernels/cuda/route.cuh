// The choice of experts for a token, which the router (route.cu) and the grouping by expert
// (experts.cu) share.
#pragma once
#include "common.cuh"

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define EXPERTS_PER_LANE 8

// Probabilities of a token's experts, and the chosen experts.
struct Choice {
    float p[EXPERTS_PER_LANE];
    bool chosen[EXPERTS_PER_LANE];
    float sum; // of the probabilities of the chosen, from the most probable on
};

template <class T>
__device__ __forceinline__ Choice choose(const float* logits, uint32_t experts, uint32_t count) {
    const uint32_t lane = threadIdx.x % 32;
    Choice choice;
    float top = -INFINITY, total = 0.0f;
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; i++) {
        const uint32_t expert = lane + 32 * i;
        choice.p[i] = expert < experts ? rounded<T>(logits[expert]) : -INFINITY;
        choice.chosen[i] = false;
        top = fmaxf(top, choice.p[i]);
    }
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; i++) {
        choice.p[i] = lane + 32 * i < experts ? expf(choice.p[i] - top) : 0.0f;
        total += choice.p[i];
    }
    total = warp_sum(total);
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; i++) choice.p[i] = choice.p[i] / total;
    choice.sum = 0.0f;
    for (uint32_t n = 0; n < count; n++) {
        // The largest remaining probability; of equals, the first. NaN is never larger: a token
        // with NaN logits goes to the first experts.
        float best = -1.0f;
        uint32_t where = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < EXPERTS_PER_LANE; i++) {
            const uint32_t expert = lane + 32 * i;
            if (expert < experts && !choice.chosen[i] &&
                (choice.p[i] > best || where == 0xffffffffu)) {
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
        for (int i = 0; i < EXPERTS_PER_LANE; i++)
            if (lane + 32 * i == where) choice.chosen[i] = true;
    }
    return choice;
}

// Writes the weights of a token's experts over its logits; one warp per token.
template <class T>
__device__ __forceinline__ void route_token(float* logits, uint32_t experts, uint32_t count) {
    const uint32_t lane = threadIdx.x % 32;
    const Choice choice = choose<T>(logits, experts, count);
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; i++)
        if (lane + 32 * i < experts)
            logits[lane + 32 * i] = choice.chosen[i] ? rounded<T>(choice.p[i] / choice.sum) : 0.0f;
}

// Adds a weighted row of an expert to the sum of its token.
template <class T> __device__ __forceinline__ float shared_in(float out, float weight, float x) {
    return rounded<T>(__fadd_rn(out, rounded<T>(__fmul_rn(weight, rounded<T>(x)))));
}
