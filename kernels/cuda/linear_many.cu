// out = x weight^T + bias for many rows: the products of prefill. Weights become numbers on their way to the tensor cores.
//
// x T [rows, inputs], rounded before (convert.cu); up to 3 matrices [outputs, inputs] (NF4, INT8, bf16, f16) of the same inputs;
// out f32 [rows, outputs]. CPU reference: kernels/src/ops/linear.rs. Order of the sums: linear.cuh, so a row has the bits that linear_few.cu gives it.
//
// Grid: x tiles of 128 rows, y tiles of 128 outputs over all matrices, so that CTAs that run together share weights. CTA: 8 warps, 4 along the outputs and 2 along the rows, each with 32 x 64 sums.
// A ring of 3 stages in shared memory holds one block (64 inputs) of the weights as stored and of x, copied by cp.async of 16 bytes; the scales
// of an NF4 block are read two blocks ahead by the threads of its rows, and put together one block ahead. Per block a warp makes the fragments of its 32 outputs once (2 warps
// make the same ones) and goes over its 64 rows in 8 tiles with 8 sums of the group each, so an NF4 group costs 8 registers and not 64.
// Sums of segments are kept apart (64 more registers) until a segment ends.
//
// Floor: 2 x rows x inputs x outputs operations; a 70B block has 0.856 G weights, 1,024 rows 1.75 TFLOP, 2.2 ms at the 788 TFLOP/s that cuBLAS
// reaches on an H200. mma.sync reaches about 0.62 of wgmma there. Shared memory per block and CTA: 256 cycles of look-ups (NF4), 512 of x, 128 + 32 of
// copies, 64 of weights: 0.99 k cycles for 1 M products, which take 0.85 k cycles of the tensor cores at that rate.
// Variants: one. Limits: inputs a multiple of 64, matrices and x aligned to 16 bytes.
// expects linear_many_*: only LDGSTS.128; loop HMMA LDGSTS LDS.128; loop no LDG.64 LDG.U16 STG
// expects linear_many_plain_*: loop no LDG
// expects linear_many_int8_*: loop no LDG
#include "linear_many.cuh"

#define LINEAR_MANY(F, f, T)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 1) linear_many_##f##_##T(                                                   \
        LINEAR_PARTS, const T* __restrict__ x /* [rows, inputs] */, uint32_t inputs, uint32_t rows) {                  \
        linear_many<F, T>(LINEAR_PART(blockIdx.y, TILE_OUTPUTS), x, inputs, blockIdx.x * TILE_ROWS, rows);                                                                                \
    }
LINEAR_MANY(Nf4, nf4, bf16)
LINEAR_MANY(Nf4, nf4, f16)
LINEAR_MANY(Int8, int8, bf16)
LINEAR_MANY(Int8, int8, f16)
LINEAR_MANY(Plain, plain, bf16)
LINEAR_MANY(Plain, plain, f16)
