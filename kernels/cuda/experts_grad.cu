// The gradient of a mixture of experts, but for that of its router, which route.cu makes of the shares: with d = down_e^T grad[t] of a pair of token t and
// expert e, and s = 1 / (1 + exp(-gate)),
//   g = d up s (1 + gate (1 - s))    u = d gate s    out[t] = sum over its experts in their order of w_e gate_e^T g, then w_e up_e^T u
//   share[t, e] = sum of gate s up d
//
// grad, out f32 [tokens, hidden]; gate, up, d, g, u f32 [pairs, middle]; shares f32 [tokens, experts]; matrices NF4, INT8, bf16, f16, all of one format; what is
// multiplied is bf16, as in linear_grad.cu. CPU reference: kernels/src/ops/mixture_grad.rs. All sizes of grids are functions of the number of tokens.
// round: rows of tokens or of pairs as bf16 [pairs, padded], x pairs, y padded / 2,048; times the scales of INT8 rows of their expert.
// few, many: linear_grad.cuh over x tiles of at most 32 or 128 rows of one expert, in the order of experts.cuh, y inputs / 128. CTAs without a tile end at once.
// middle: x tokens, y chosen: a CTA has a pair. combine: x tokens, y 1,024 elements each.
// A row's sums do not depend on which other rows its experts have, and nothing is added atomically: the bits are those that a token has alone.
// Floor: 6 x pairs x middle x hidden operations; 512 tokens through 2 of 8 experts of Mixtral 8x7B 0.36 TFLOP, 0.46 ms at the 788 TFLOP/s of an H200, and the
// matrices of all experts once per 128 rows: 187 MB x 4 in NF4, 0.18 ms. middle and combine: rows in and out.
// Limits: those of linear_grad.cu. All else: experts_grad_any.cu.
// expects experts_grad_*_*: only LDGSTS.128; loop HMMA LDGSTS LDSM; no LDG.U16
// expects experts_grad_round: LDG.128 STG.128
// expects experts_grad_middle: LDG.128 STG.128
// expects experts_grad_combine: LDG.128 STG.128
#include "experts.cuh"
#include "linear_grad.cuh"
#include "route.cuh"

extern "C" __global__ void __launch_bounds__(256)
    experts_grad_round(EXPERTS, const float* __restrict__ grad /* [tokens or pairs, outputs] */, bf16* __restrict__ out /* [pairs, padded] */,
                       uint32_t which, uint32_t by_token, uint32_t is_int8, uint32_t outputs, uint32_t inputs, uint32_t padded) {
    const Lists lists = lists_of(words, tokens, chosen, experts);
    const uint32_t pair = blockIdx.x, output = (blockIdx.y * 256 + threadIdx.x) * 8;
    if (pair >= lists.count[0] || output >= padded) return;
    const uint8_t* weight = reinterpret_cast<const uint8_t*>(matrices[lists.pair_expert[pair] * 3 + which]);
    const float* absmax = is_int8 ? reinterpret_cast<const float*>(weight + part_end((size_t)outputs * inputs)) : nullptr;
    const size_t row = by_token ? lists.pair_token[pair] : pair;
    round_eight(grad + row * outputs, absmax, out + (size_t)pair * padded, output, outputs);
}

template <class F, class T, uint32_t ROWS, uint32_t STAGES>
__device__ __forceinline__ void experts_grad(const uint64_t* matrices, const Lists& lists, const bf16* grad, float* out, uint32_t which, uint32_t outputs,
                                             uint32_t inputs, uint32_t padded) {
    if (blockIdx.x >= lists.count[1]) return;
    const uint32_t expert = lists.tile_expert[blockIdx.x], first = lists.tile_first[blockIdx.x];
    linear_grad<F, T, ROWS, STAGES>(reinterpret_cast<const uint8_t*>(matrices[expert * 3 + which]), grad, out, outputs, inputs, first,
                                    lists.start[expert + 1], blockIdx.y * TILE_INPUTS, padded);
}

#define EXPERTS_GRAD(F, f, T, FEW_STAGES)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(256, 2) experts_grad_many_##f##_##T(                                                            \
        EXPERTS, const bf16* __restrict__ grad /* [pairs, padded] */, float* __restrict__ out /* [pairs, inputs] */, uint32_t which,             \
        uint32_t outputs, uint32_t inputs, uint32_t padded) {                                                                                    \
        experts_grad<F, T, 128, 4>(matrices, lists_of(words, tokens, chosen, experts), grad, out, which, outputs, inputs, padded);               \
    }                                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) experts_grad_few_##f##_##T(                                                                \
        EXPERTS, const bf16* __restrict__ grad /* [pairs, padded] */, float* __restrict__ out /* [pairs, inputs] */, uint32_t which,             \
        uint32_t outputs, uint32_t inputs, uint32_t padded) {                                                                                    \
        experts_grad<F, T, 32, FEW_STAGES>(matrices, lists_of(words, tokens, chosen, experts), grad, out, which, outputs, inputs, padded);       \
    }
EXPERTS_GRAD(Plain, plain, bf16, 8)
EXPERTS_GRAD(Plain, plain, f16, 8)
EXPERTS_GRAD(Int8, int8, bf16, 10)
EXPERTS_GRAD(Nf4, nf4, bf16, 10)

// The gradients of gate and up in their place; what the pair adds to the share.
__device__ __forceinline__ float slopes(float& gate, float& up, float d) {
    const float x = gate, s = 1.0f / (1.0f + expf(-x)), share = x * s * up * d;
    gate = d * up * s * (1.0f + x * (1.0f - s));
    up = d * x * s;
    return share;
}

extern "C" __global__ void __launch_bounds__(256)
    experts_grad_middle(uint32_t* words, uint32_t tokens, uint32_t chosen, uint32_t experts, float* __restrict__ gate /* [pairs, width] */,
                        float* __restrict__ up /* as gate */, const float* __restrict__ grad /* as gate */, float* __restrict__ shares /* [tokens, experts] */,
                        uint32_t width) {
    SMEM_DYN(shared); // 32 floats
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
            float4 a = reinterpret_cast<const float4*>(gate)[i], b = reinterpret_cast<const float4*>(up)[i];
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
    experts_grad_combine(uint32_t* words, uint32_t tokens, uint32_t chosen, uint32_t experts, const float* __restrict__ gate /* [pairs, width] */,
                         const float* __restrict__ up /* as gate */, float* __restrict__ out /* [tokens, width] */, uint32_t width) {
    const Lists lists = lists_of(words, tokens, chosen, experts);
    const uint32_t* pairs = lists.token_pair + (size_t)blockIdx.x * chosen;
    const uint32_t first = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    out += (size_t)blockIdx.x * width;
    if (width % 4 == 0 && first < width) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (uint32_t i = 0; i < chosen && pairs[i] != NONE; i++) {
            const size_t at = (size_t)pairs[i] * width + first;
            const float4 a = *reinterpret_cast<const float4*>(gate + at), b = *reinterpret_cast<const float4*>(up + at);
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
