// Gradient of the input of a product of experts, generic fallback for shapes and formats that
//   experts_grad.cu does not support.
//   out[p] = grad[token of p, or p] weight of the expert of p, for all pairs p
//
// Shapes: grad f32 [tokens or pairs, outputs]; matrices [outputs, inputs] of all experts, of one
//   format; out f32 [pairs, inputs]. All arithmetic is f32.
// Reference: kernels/src/ops/mixture_grad.rs.
// Grid: x inputs / 128, y tiles of at most 32 rows of one expert, in the order of experts.cuh.
// CTA, bits and bound: as linear_grad_generic.cu. Limits: none.
// expects experts_grad_generic_*: no LDL STL
#include "experts.cuh"
#include "linear_grad_generic.cuh"

#define EXPERTS_GRAD_GENERIC(F, f, T)                                                              \
    extern "C" __global__ void __launch_bounds__(256, 2) experts_grad_generic_##f##_##T(           \
        EXPERTS, const float* __restrict__ grad, float* __restrict__ out /* [pairs, inputs] */,    \
        uint32_t which, uint32_t layout, uint32_t by_token, uint32_t outputs, uint32_t inputs) {   \
        const Lists lists = lists_of(words, tokens, chosen, experts);                              \
        if (blockIdx.y >= lists.count[1]) return;                                                  \
        const uint32_t expert = lists.tile_expert[blockIdx.y],                                     \
                       first = lists.tile_first[blockIdx.y];                                       \
        linear_grad_generic<F, T>(reinterpret_cast<const uint8_t*>(matrices[expert * 3 + which]),  \
                                  layout, grad, by_token ? lists.pair_token : nullptr, out,        \
                                  outputs, inputs, first, lists.start[expert + 1],                 \
                                  blockIdx.x * TILE_INPUTS);                                       \
    }
#define EXPERTS_GRAD_GENERIC_DTYPES(F, f)                                                          \
    EXPERTS_GRAD_GENERIC(F, f, f32) EXPERTS_GRAD_GENERIC(F, f, bf16) EXPERTS_GRAD_GENERIC(F, f, f16)
EXPERTS_GRAD_GENERIC_DTYPES(Plain, plain)
EXPERTS_GRAD_GENERIC_DTYPES(Int8, int8)
EXPERTS_GRAD_GENERIC_DTYPES(Nf4, nf4)
