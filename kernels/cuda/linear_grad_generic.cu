// Gradient of the input of a product, generic fallback: out = grad weight, for f32 weights and for
// inputs that are not a multiple of 64.
//
// Shapes: grad f32 [rows, outputs]; weight [outputs, inputs] as stored, with T the dtype that it
//   stands for; out f32 [rows, inputs]. All arithmetic is f32: the backward pass rounds nothing.
// Reference: kernels/src/ops/gradient.rs.
// Grid: x inputs / 128, y rows / 32. CTA: 256 threads. For 16 outputs at a time the CTA decodes 16
//   x 128 weights to shared memory, next to 32 x 16 gradients. Thread t sums 4 rows x 4 inputs:
//   inputs t % 32 + 32 j, rows 4 (t / 32) + i.
// Order of sums: one sum per element, from the first output to the last.
// Bound: the f32 units. Per 16 outputs a warp reads 4 x (4 + 1) words of shared memory for 16 x 4 x
//   4 products. Limits: none.
// expects linear_grad_generic_*: no LDL STL
#include "linear_grad_generic.cuh"

#define LINEAR_GRAD_GENERIC(F, f, T)                                                               \
    extern "C" __global__ void __launch_bounds__(256, 3)                                           \
        linear_grad_generic_##f##_##T(const uint8_t* __restrict__ weight, uint32_t layout,         \
                                      const float* __restrict__ grad /* [rows, outputs] */,        \
                                      float* __restrict__ out /* [rows, inputs] */,                \
                                      uint32_t outputs, uint32_t inputs, uint32_t rows) {          \
        linear_grad_generic<F, T>(weight, layout, grad, nullptr, out, outputs, inputs,             \
                                  blockIdx.y * TILE_ROWS, rows, blockIdx.x * TILE_INPUTS);         \
    }
#define LINEAR_GRAD_GENERIC_DTYPES(F, f)                                                           \
    LINEAR_GRAD_GENERIC(F, f, f32) LINEAR_GRAD_GENERIC(F, f, bf16) LINEAR_GRAD_GENERIC(F, f, f16)
LINEAR_GRAD_GENERIC_DTYPES(Plain, plain)
LINEAR_GRAD_GENERIC_DTYPES(Int8, int8)
LINEAR_GRAD_GENERIC_DTYPES(Nf4, nf4)
