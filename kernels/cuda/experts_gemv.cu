// GEMV of experts, for few rows per expert: gate and up, or down, of all experts of a step in one
//   launch.
//   out[p] = round(x[token of p, or p]) weight^T of the expert of p, for all pairs p
//
// Shapes: x f32 [tokens or pairs, inputs]; matrices [outputs, inputs] of one format (NF4, INT8,
//   bf16, f16); out f32 [pairs, outputs].
// Reference: kernels/src/ops/experts.rs. Order of sums: linear.cuh, so the bits are those of
//   linear_gemv.cu and linear_gemm.cu.
// Grid: x tiles of 32 outputs of one or two matrices, y tiles of at most 32 rows of one expert, in
//   the order of experts.cuh. The grid has as many y as can exist: min(experts, pairs) for up to 32
//   tokens. CTAs without a tile end at once.
// CTA: as linear_gemv.cu. In addition a lane knows which row of x each of its tokens has, and skips
//   tiles of 8 tokens that an expert does not have.
// Traffic: the weights of the chosen experts once per 32 rows. 2 of 8 experts of Mixtral 8x7B are
//   187 MB in NF4, computed 43 us at the 4.3 TB/s of an H200.
// Variants: N 1 for up to 8 tokens in all, else 4. Limits: as linear_gemv.cu.
// expects experts_gemv_*: only LDGSTS.128; loop HMMA LDGSTS LDG.128; loop no LDG.64 STG; no LDG.U8
// expects experts_gemv_*: no LD.U8
// expects experts_gemv_nf4_*: loop LDS.128
// expects experts_gemv_plain_*: no LDG.U16 LD.U16
// expects experts_gemv_int8_*: no LDG.U16 LD.U16
#include "experts.cuh"
#include "linear_gemv.cuh"

template <class F, class T, int N>
__device__ __forceinline__ void experts_gemv(const uint64_t* matrices, const Lists& lists,
                                             const float* x, float* out0, float* out1,
                                             uint32_t which, uint32_t layout, uint32_t by_token,
                                             uint32_t outputs, uint32_t inputs, uint32_t stages) {
    constexpr int M = 2;
    pdl_launch();
    pdl_wait();
    if (blockIdx.y >= lists.count[1]) return;
    const uint32_t expert = lists.tile_expert[blockIdx.y], first = lists.tile_first[blockIdx.y];
    const uint32_t rows = min(lists.start[expert + 1] - first, (uint32_t)N * 8);
    const uint32_t tiles = (outputs + M * 16 - 1) / (M * 16), second = blockIdx.x >= tiles ? 1 : 0;
    LinearProduct product;
    product.weight = reinterpret_cast<const uint8_t*>(matrices[expert * 3 + which + second]);
    product.bias = nullptr;
    product.out = (second ? out1 : out0) + (size_t)first * outputs;
    product.outputs = outputs;
    product.layout = layout;
    product.tile = blockIdx.x - second * tiles;
    Gathered rows_of;
    rows_of.list = by_token ? lists.pair_token : nullptr;
    rows_of.first = first;
    linear_gemv<F, T, M, N>(product, x, rows_of, inputs, rows, stages);
}

#define EXPERTS_GEMV(F, f, T, N)                                                                   \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, N == 1 ? 2 : 1)                       \
        experts_gemv_##f##_##T##_n##N(EXPERTS, const float* x, float* out0, float* out1,           \
                                      uint32_t which, uint32_t layout, uint32_t by_token,          \
                                      uint32_t outputs, uint32_t inputs, uint32_t stages) {        \
        experts_gemv<F, T, N>(matrices, lists_of(words, tokens, chosen, experts), x, out0, out1,   \
                              which, layout, by_token, outputs, inputs, stages);                   \
    }
#define EXPERTS_GEMV_SIZES(F, f, T)                                                                \
    EXPERTS_GEMV(F, f, T, 1)                                                                       \
    EXPERTS_GEMV(F, f, T, 4)
EXPERTS_GEMV_SIZES(Nf4, nf4, bf16)
EXPERTS_GEMV_SIZES(Nf4, nf4, f16)
EXPERTS_GEMV_SIZES(Int8, int8, bf16)
EXPERTS_GEMV_SIZES(Int8, int8, f16)
EXPERTS_GEMV_SIZES(Plain, plain, bf16)
EXPERTS_GEMV_SIZES(Plain, plain, f16)
