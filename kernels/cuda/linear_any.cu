// out = round(x) weight^T + bias for every shape and format: f32 weights, quantized ones that are computed with in f32, and sizes off the
// grain of the tensor-core kernels.
//
// x f32 [rows, inputs]; weight [outputs, inputs] as stored; out f32 [rows, outputs]. CPU reference: kernels/src/ops/linear.rs.
// Grid: x outputs / 8, y rows / 8. CTA: 8 warps, one output each, for 8 rows. A lane takes every 32nd group of 4 inputs (f32, inputs a
// multiple of 4: 16 bytes of weights at a time) or every 32nd input (else); its products are summed one after the other and then over the lanes
// (butterfly), so the bits of an element are a function of its row and the matrix.
// Floor: bytes of the matrix; each is read once per 8 rows. f32 only: other formats are read by the byte.
// expects linear_any_*: no LDL STL
#include "linear_any.cuh"

#define LINEAR_ANY(F, f, T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) linear_any_##f##_##T(                                   \
        const uint8_t* __restrict__ weight, const float* __restrict__ x /* [rows, inputs] */,                 \
        const float* __restrict__ bias /* [outputs] or null */, float* __restrict__ out /* [rows, outputs] */, \
        uint32_t outputs, uint32_t inputs, uint32_t rows) {                                                   \
        const uint32_t first = blockIdx.y * ROWS, output = blockIdx.x * 8 + threadIdx.x / 32;                 \
        if (output < outputs)                                                                                 \
            linear_any<F, T>(weight, x + (size_t)first * inputs, bias, out + (size_t)first * outputs, output, \
                             outputs, inputs, min(rows - first, (uint32_t)ROWS));                             \
    }
#define LINEAR_ANY_DTYPES(F, f) LINEAR_ANY(F, f, f32) LINEAR_ANY(F, f, bf16) LINEAR_ANY(F, f, f16)
LINEAR_ANY_DTYPES(Plain, plain)
LINEAR_ANY_DTYPES(Int8, int8)
LINEAR_ANY_DTYPES(Nf4, nf4)
