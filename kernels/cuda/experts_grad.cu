// Gradient of a mixture of experts; route.cu computes that of the router from `shares`.
// With d = down_e^T grad[t] for a pair of token t and expert e, and s = 1 / (1 + exp(-gate)):
//   g = d up s (1 + gate (1 - s))    u = d gate s
//   out[t] = sum over the experts e of t, in their order: w_e gate_e^T g, then w_e up_e^T u
//   share[t, e] = sum of gate s up d
//
// Shapes: grad, out f32 [tokens, hidden]; gate, up, d, g, u f32 [pairs, middle]; shares f32
//   [tokens, experts]; matrices of one format (NF4, INT8, bf16, f16). Factors are bf16, as in
//   linear_grad.cu.
// Reference: kernels/src/ops/mixture_grad.rs.
// Grids depend only on the number of tokens. CTAs without a tile end at once.
// experts_grad_round: rows of tokens or pairs as bf16 [pairs, padded], times the scales of the INT8
//   rows of their expert; x pairs, y padded / 2,048.
// experts_grad_gemv, experts_grad_gemm: linear_grad.cuh; x tiles of at most 32 or 128 rows of one
//   expert, in the order of experts.cuh; y inputs / 128.
// experts_grad_middle: one CTA per pair; x tokens, y chosen.
// experts_grad_combine: x tokens, y tiles of 1,024 elements.
// Order of sums: those of a row do not depend on the other rows of its experts, and nothing is
//   added atomically. A token has the bits that it has alone.
// Operations: 6 x pairs x middle x hidden. 512 tokens through 2 of 8 experts of Mixtral 8x7B: 0.36
//   TFLOP, computed 0.46 ms at the 788 TFLOP/s of an H200, and the matrices of all experts once per
//   128 rows: 187 MB x 4 in NF4, 0.18 ms. experts_grad_middle and _combine read and write their
//   rows once.
// Limits: those of linear_grad.cu. Everything else: experts_grad_generic.cu.
// expects experts_grad_*_*: only LDGSTS.128; loop HMMA LDGSTS LDSM; no LDG.U16
// expects experts_grad_round: LDG.128 STG.128
// expects experts_grad_middle: LDG.128 STG.128
// expects experts_grad_combine: LDG.128 STG.128
#include "experts.cuh"
#include "linear_grad.cuh"
#include "route.cuh"

// Shared memory of experts_grad_middle: a sum per warp.
EXPORT(MIDDLE_SHARED, 32 * 4);

extern "C" __global__ void __launch_bounds__(256)
    experts_grad_round(EXPERTS, const float* __restrict__ grad /* [tokens or pairs, outputs] */,
                       bf16* __restrict__ out /* [pairs, padded] */, uint32_t which,
                       uint32_t by_token, uint32_t is_int8, uint32_t outputs, uint32_t inputs,
                       uint32_t padded) {
    const Lists lists = lists_of(words, tokens, chosen, experts);
    const uint32_t pair = blockIdx.x, output = (blockIdx.y * 256 + threadIdx.x) * 8;
    if (pair >= lists.count[0] || output >= padded) return;
    const uint8_t* weight =
        reinterpret_cast<const uint8_t*>(matrices[lists.pair_expert[pair] * 3 + which]);
    const float* absmax =
        is_int8 ? reinterpret_cast<const float*>(weight + aligned_end((size_t)outputs * inputs))
                : nullptr;
    const size_t row = by_token ? lists.pair_token[pair] : pair;
    round_eight(grad + row * outputs, absmax, out + (size_t)pair * padded, output, outputs);
}

template <class F, class T, uint32_t ROWS, uint32_t STAGES>
__device__ __forceinline__ void experts_grad(const uint64_t* matrices, const Lists& lists,
                                             const bf16* grad, float* out, uint32_t which,
                                             uint32_t layout, uint32_t outputs, uint32_t inputs,
                                             uint32_t padded) {
    if (blockIdx.x >= lists.count[1]) return;
    const uint32_t expert = lists.tile_expert[blockIdx.x], first = lists.tile_first[blockIdx.x];
    linear_grad<F, T, ROWS, STAGES>(reinterpret_cast<const uint8_t*>(matrices[expert * 3 + which]),
                                    layout, grad, out, outputs, inputs, first,
                                    lists.start[expert + 1], blockIdx.y * TILE_INPUTS, padded);
}

#define EXPERTS_GRAD(F, f, T)                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 2) experts_grad_gemm_##f##_##T(              \
        EXPERTS, const bf16* __restrict__ grad /* [pairs, padded] */,                              \
        float* __restrict__ out /* [pairs, inputs] */, uint32_t which, uint32_t layout,            \
        uint32_t outputs, uint32_t inputs, uint32_t padded) {                                      \
        experts_grad<F, T, GEMM_ROWS, GEMM_STAGES>(matrices,                                       \
                                                   lists_of(words, tokens, chosen, experts), grad, \
                                                   out, which, layout, outputs, inputs, padded);   \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 1) experts_grad_gemv_##f##_##T(              \
        EXPERTS, const bf16* __restrict__ grad /* [pairs, padded] */,                              \
        float* __restrict__ out /* [pairs, inputs] */, uint32_t which, uint32_t layout,            \
        uint32_t outputs, uint32_t inputs, uint32_t padded) {                                      \
        experts_grad<F, T, GEMV_ROWS, GEMV_STAGES<F>>(                                             \
            matrices, lists_of(words, tokens, chosen, experts), grad, out, which, layout, outputs, \
            inputs, padded);                                                                       \
    }
EXPERTS_GRAD(Plain, plain, bf16)
EXPERTS_GRAD(Plain, plain, f16)
EXPERTS_GRAD(Int8, int8, bf16)
EXPERTS_GRAD(Nf4, nf4, bf16)

// Replaces gate and up by their gradients; returns the share of the pair.
__device__ __forceinline__ float slopes(float& gate, float& up, float d) {
    const float x = gate, s = 1.0f / (1.0f + expf(-x)), share = x * s * up * d;
    gate = d * up * s * (1.0f + x * (1.0f - s));
    up = d * x * s;
    return share;
}

extern "C" __global__ void __launch_bounds__(256)
    experts_grad_middle(uint32_t* words, uint32_t tokens, uint32_t chosen, uint32_t experts,
                        float* __restrict__ gate /* [pairs, width] */,
                        float* __restrict__ up /* as gate */,
                        const float* __restrict__ grad /* as gate */,
                        float* __restrict__ shares /* [tokens, experts] */, uint32_t width) {
    SMEM_DYN(shared);
    const Lists lists = lists_of(words, tokens, chosen, experts);
    const size_t token = blockIdx.x, at = token * chosen + blockIdx.y;
    if (blockIdx.y == 0) {
        for (uint32_t expert = threadIdx.x; expert < experts; expert += 256) {
            bool is_taken = false;
            for (uint32_t i = 0; i < chosen; i++) is_taken |= lists.token_expert[at + i] == expert;
            if (!is_taken) shares[token * experts + expert] = 0.0f;
        }
    }
    const uint32_t pair = lists.token_pair[at];
    if (pair == NONE) return;
    gate += (size_t)pair * width;
    up += (size_t)pair * width;
    grad += (size_t)pair * width;
    float sum = 0.0f;
    if (width % 4 == 0) {
        for (uint32_t i = threadIdx.x; i < width / 4; i += 256) {
            float4 a = reinterpret_cast<const float4*>(gate)[i],
                   b = reinterpret_cast<const float4*>(up)[i];
            const float4 d = reinterpret_cast<const float4*>(grad)[i];
            sum += slopes(a.x, b.x, d.x);
            sum += slopes(a.y, b.y, d.y);
            sum += slopes(a.z, b.z, d.z);
            sum += slopes(a.w, b.w, d.w);
            reinterpret_cast<float4*>(gate)[i] = a;
            reinterpret_cast<float4*>(up)[i] = b;
        }
    } else {
        for (uint32_t i = threadIdx.x; i < width; i += 256) sum += slopes(gate[i], up[i], grad[i]);
    }
    sum = cta_sum(sum, reinterpret_cast<float*>(shared));
    if (threadIdx.x == 0) shares[token * experts + lists.token_expert[at]] = sum;
}

extern "C" __global__ void __launch_bounds__(256)
    experts_grad_combine(uint32_t* words, uint32_t tokens, uint32_t chosen, uint32_t experts,
                         const float* __restrict__ gate /* [pairs, width] */,
                         const float* __restrict__ up /* as gate */,
                         float* __restrict__ out /* [tokens, width] */, uint32_t width) {
    const Lists lists = lists_of(words, tokens, chosen, experts);
    const uint32_t* pairs = lists.token_pair + (size_t)blockIdx.x * chosen;
    const uint32_t first = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    out += (size_t)blockIdx.x * width;
    if (width % 4 == 0 && first < width) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (uint32_t i = 0; i < chosen && pairs[i] != NONE; i++) {
            const size_t at = (size_t)pairs[i] * width + first;
            const float4 a = *reinterpret_cast<const float4*>(gate + at),
                         b = *reinterpret_cast<const float4*>(up + at);
            const float weight = lists.pair_weight[pairs[i]];
            sum.x = shared_in<float>(shared_in<float>(sum.x, weight, a.x), weight, b.x);
            sum.y = shared_in<float>(shared_in<float>(sum.y, weight, a.y), weight, b.y);
            sum.z = shared_in<float>(shared_in<float>(sum.z, weight, a.z), weight, b.z);
            sum.w = shared_in<float>(shared_in<float>(sum.w, weight, a.w), weight, b.w);
        }
        *reinterpret_cast<float4*>(out + first) = sum;
    } else {
        for (uint32_t at = first; at < min(first + 4, width); at++) {
            float sum = 0.0f;
            for (uint32_t i = 0; i < chosen && pairs[i] != NONE; i++) {
                const size_t from = (size_t)pairs[i] * width + at;
                const float weight = lists.pair_weight[pairs[i]];
                sum = shared_in<float>(shared_in<float>(sum, weight, gate[from]), weight, up[from]);
            }
            out[at] = sum;
        }
    }
}
