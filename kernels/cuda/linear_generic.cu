// Matrix product, generic fallback: out = round(x) weight^T + bias for every shape and format. It
// takes f32 weights, quantized weights with f32 arithmetic, and sizes that the tensor-core kernels
// refuse.
//
// Shapes: x f32 [rows, inputs]; weight [outputs, inputs] as stored; out f32 [rows, outputs].
// Reference: kernels/src/ops/linear.rs.
// Grid: x outputs / 8, y rows / 8. CTA: 8 warps, one output each, for 8 rows.
// Order of sums: a lane takes every 32nd group of 4 inputs (f32 with inputs a multiple of 4, 16
//   bytes per read) or every 32nd input. It sums its products in order; a butterfly adds the lanes.
//   The bits of an element depend only on its row and the matrix.
// Traffic: the matrix once per 8 rows; formats other than f32 are read byte by byte.
// expects linear_generic_*: no LDL STL
#include "linear_generic.cuh"

#define LINEAR_GENERIC(F, f, T)                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        linear_generic_##f##_##T(const uint8_t* __restrict__ weight, uint32_t layout,              \
                                 const float* __restrict__ x /* [rows, inputs] */,                 \
                                 const float* __restrict__ bias /* [outputs] or null */,           \
                                 float* __restrict__ out /* [rows, outputs] */, uint32_t outputs,  \
                                 uint32_t inputs, uint32_t rows) {                                 \
        const uint32_t first = blockIdx.y * ROWS, output = blockIdx.x * 8 + threadIdx.x / 32;      \
        if (output < outputs)                                                                      \
            linear_generic<F, T>(weight, layout, x + (size_t)first * inputs, bias,                 \
                                 out + (size_t)first * outputs, output, outputs, inputs,           \
                                 min(rows - first, (uint32_t)ROWS));                               \
    }
#define LINEAR_GENERIC_DTYPES(F, f)                                                                \
    LINEAR_GENERIC(F, f, f32) LINEAR_GENERIC(F, f, bf16) LINEAR_GENERIC(F, f, f16)
LINEAR_GENERIC_DTYPES(Plain, plain)
LINEAR_GENERIC_DTYPES(Int8, int8)
LINEAR_GENERIC_DTYPES(Nf4, nf4)
