// out = grad weight: the gradient of the input of a product, for f32 weights, and for inputs that are no multiple of 64.
//
// grad f32 [rows, outputs]; weight [outputs, inputs] as stored, T the dtype that it stands for; out f32 [rows, inputs]. All in f32, as backward rounds
// nothing. CPU reference: kernels/src/ops/gradient.rs.
// Grid: x inputs / 128, y rows / 32. CTA: 256 threads. Outputs are walked 16 at a time: the 16 x 128 weights become numbers in shared memory once,
// beside 32 x 16 gradients; thread t sums 4 rows x 4 inputs (its inputs t % 32 + 32 j, its rows 4 (t / 32) + i). An element has one sum, from the first
// output to the last, so its bits depend on nothing else.
// Floor: 2 x rows x outputs x inputs operations of the f32 units. Per 16 outputs
// a warp reads 4 x (4 + 1) words of shared memory for 16 x 4 x 4 products: the f32 units, not the memory, are the limit.
// Limits: none.
// expects linear_grad_any_*: no LDL STL
#include "linear_grad_any.cuh"

#define LINEAR_GRAD_ANY(F, f, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) linear_grad_any_##f##_##T(                                                \
        const uint8_t* __restrict__ weight, const float* __restrict__ grad /* [rows, outputs] */,                               \
        float* __restrict__ out /* [rows, inputs] */, uint32_t outputs, uint32_t inputs, uint32_t rows) {                       \
        linear_grad_any<F, T>(weight, grad, nullptr, out, outputs, inputs, blockIdx.y * TILE_ROWS, rows, blockIdx.x * TILE_INPUTS);\
    }
#define LINEAR_GRAD_ANY_DTYPES(F, f) LINEAR_GRAD_ANY(F, f, f32) LINEAR_GRAD_ANY(F, f, bf16) LINEAR_GRAD_ANY(F, f, f16)
LINEAR_GRAD_ANY_DTYPES(Plain, plain)
LINEAR_GRAD_ANY_DTYPES(Int8, int8)
LINEAR_GRAD_ANY_DTYPES(Nf4, nf4)
