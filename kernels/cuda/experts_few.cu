// The products of experts with few rows each: gate and up, or down, of all experts of a step in one launch. Reads each weight of the experts
// that have rows once per 32 rows.
//   out[p] = round(x[token of p, or p]) weight^T of the expert of p, for all pairs p
//
// x f32 [tokens or pairs, inputs]; matrices [outputs, inputs] (NF4, INT8, bf16, f16), all of one format; out f32 [pairs, outputs]. CPU reference:
// kernels/src/ops/experts.rs. Sums and so bits: those of linear_few.cu and linear_many.cu.
//
// Grid: x tiles of 32 outputs of one or two matrices, y tiles of at most 32 rows of one expert, in the order of experts.cuh, with as many y as
// there can be (min(experts, pairs) for up to 32 tokens): CTAs without a tile end at once. The rest as linear_few.cu, whose walk this is, but that a
// lane keeps which row of x each of its tokens is, and tiles of 8 tokens that an expert does not have are left out of the products.
// Floor: bytes of the chosen experts: 2 of 8 experts of Mixtral 8x7B 187 MB in NF4, 43 us at the 4.3 TB/s of an H200.
// Variants: N 1 for up to 8 tokens in all, else 4. Limits: as linear_few.cu.
// expects experts_few_*: only LDGSTS.128; loop HMMA LDGSTS LDG.128; loop no LDG.64 LDG.U16 STG
// expects experts_few_plain_*: no LDG.U8 LD.U8
// expects experts_few_int8_*: no LDG.U8 LD.U8
#include "experts.cuh"
#include "linear_few.cuh"

template <class F, class T, int N>
__device__ __forceinline__ void experts_few(const uint64_t* matrices, const Lists& lists, const float* x, float* out0, float* out1, uint32_t which,
                                            uint32_t by_token, uint32_t outputs, uint32_t inputs, uint32_t stages) {
    constexpr int M = 2;
    if (blockIdx.y >= lists.count[1]) return;
    const uint32_t expert = lists.tile_expert[blockIdx.y], first = lists.tile_first[blockIdx.y];
    const uint32_t rows = min(lists.start[expert + 1] - first, (uint32_t)N * 8);
    const uint32_t tiles = (outputs + M * 16 - 1) / (M * 16), second = blockIdx.x >= tiles ? 1 : 0;
    LinearPart part;
    part.weight = reinterpret_cast<const uint8_t*>(matrices[expert * 3 + which + second]);
    part.bias = nullptr;
    part.out = (second ? out1 : out0) + (size_t)first * outputs;
    part.outputs = outputs;
    part.tile = blockIdx.x - second * tiles;
    Listed listed;
    listed.list = by_token ? lists.pair_token : nullptr;
    listed.first = first;
    linear_few<F, T, M, N>(part, x, listed, inputs, rows, stages);
}

#define EXPERTS_FEW(F, f, T, N)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, N == 1 ? 2 : 1) experts_few_##f##_##T##_n##N(                             \
        EXPERTS, const float* x, float* out0, float* out1, uint32_t which, uint32_t by_token, uint32_t outputs, uint32_t inputs,       \
        uint32_t stages) {                                                                                                             \
        experts_few<F, T, N>(matrices, lists_of(words, tokens, chosen, experts), x, out0, out1, which, by_token, outputs, inputs, stages); \
    }
#define EXPERTS_FEW_SIZES(F, f, T) \
    EXPERTS_FEW(F, f, T, 1)        \
    EXPERTS_FEW(F, f, T, 4)
EXPERTS_FEW_SIZES(Nf4, nf4, bf16)
EXPERTS_FEW_SIZES(Nf4, nf4, f16)
EXPERTS_FEW_SIZES(Int8, int8, bf16)
EXPERTS_FEW_SIZES(Int8, int8, f16)
EXPERTS_FEW_SIZES(Plain, plain, bf16)
EXPERTS_FEW_SIZES(Plain, plain, f16)
