// GEMM of experts, for many rows per expert: gate and up, or down, of all experts of a prefill in
//   one launch. out[p] = x[p] weight^T of the expert of p, for all pairs p
//
// Shapes: x T [pairs, inputs], rounded before (experts.cu, convert.cu); matrices [outputs, inputs]
//   of one format (NF4, INT8, bf16, f16); out f32 [pairs, outputs].
// Reference: kernels/src/ops/experts.rs. Order of sums: linear.cuh, so the bits are those of
//   linear_gemv.cu and linear_gemm.cu.
// Grid: x tiles of at most 128 rows of one expert, in the order of experts.cuh, as many as can
//   exist (pairs / 128 + experts); y tiles of 128 outputs of one or two matrices. CTAs without a
//   tile end at once.
// CTA: as linear_gemm.cu.
// Operations: 2 x pairs x inputs x outputs. 1,024 tokens through 2 of 8 experts of Mixtral 8x7B:
//   0.72 TFLOP, computed 0.9 ms at the 788 TFLOP/s of an H200; 2,048 pairs are 16 tiles and up to 8
//   partial ones.
// Variants: one. Limits: as linear_gemm.cu.
// expects experts_gemm_*: only LDGSTS.128; loop HMMA LDGSTS LDS.128; loop no LDG.64 LDG.U16 STG
// expects experts_gemm_plain_*: no LDG.U8 LD.U8
// expects experts_gemm_int8_*: no LDG.U8 LD.U8
#include "experts.cuh"
#include "linear_gemm.cuh"

template <class F, class T>
__device__ __forceinline__ void experts_gemm(const uint64_t* matrices, const Lists& lists,
                                             const T* x, float* out0, float* out1, uint32_t which,
                                             uint32_t layout, uint32_t outputs, uint32_t inputs) {
    if (blockIdx.x >= lists.count[1]) return;
    const uint32_t expert = lists.tile_expert[blockIdx.x], first = lists.tile_first[blockIdx.x];
    const uint32_t tiles = (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS,
                   second = blockIdx.y >= tiles ? 1 : 0;
    LinearProduct product;
    product.weight = reinterpret_cast<const uint8_t*>(matrices[expert * 3 + which + second]);
    product.bias = nullptr;
    product.out = second ? out1 : out0;
    product.outputs = outputs;
    product.layout = layout;
    product.tile = blockIdx.y - second * tiles;
    linear_gemm<F, T>(product, x, inputs, first, lists.start[expert + 1]);
}

#define EXPERTS_GEMM(F, f, T)                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 1) experts_gemm_##f##_##T(                   \
        EXPERTS, const T* __restrict__ x, float* out0, float* out1, uint32_t which,                \
        uint32_t layout, uint32_t outputs, uint32_t inputs) {                                      \
        experts_gemm<F, T>(matrices, lists_of(words, tokens, chosen, experts), x, out0, out1,      \
                           which, layout, outputs, inputs);                                        \
    }
EXPERTS_GEMM(Nf4, nf4, bf16)
EXPERTS_GEMM(Nf4, nf4, f16)
EXPERTS_GEMM(Int8, int8, bf16)
EXPERTS_GEMM(Int8, int8, f16)
EXPERTS_GEMM(Plain, plain, bf16)
EXPERTS_GEMM(Plain, plain, f16)
