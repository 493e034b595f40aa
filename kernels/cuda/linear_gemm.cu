// GEMM for many rows: out = x weight^T + bias, the products of prefill, on tensor cores (mma.sync).
//
// Shapes: x T [rows, inputs], rounded before (convert.cu); up to 3 matrices [outputs, inputs] (NF4,
//   INT8, bf16, f16) with the same inputs; out f32 [rows, outputs].
// Reference: kernels/src/ops/linear.rs. Order of sums: linear.cuh, so a row has the same bits as in
//   linear_gemv.cu.
// Grid: x tiles of 128 rows, y tiles of 128 outputs over all matrices, so that concurrent CTAs
//   share weights.
// CTA: 8 warps, 4 along the outputs and 2 along the rows, each with 32 x 64 sums. cp.async fills a
//   ring of 3 stages with one block (64 inputs) of the stored weights and of x. The threads of an
//   output read the scale of an NF4 block two blocks ahead and compute it one block ahead. Per
//   block a warp decodes the fragments of its 32 outputs once (two warps decode the same ones),
//   then multiplies them with its 64 rows in 8 tiles; an NF4 group then needs 8 registers for sums
//   instead of 64. Sums of finished segments have 64 registers of their own.
// Operations: 2 x rows x inputs x outputs. A 70B block has 0.856 G weights; 1,024 rows are 1.75
//   TFLOP, computed 2.2 ms at the 788 TFLOP/s that cuBLAS reaches on an H200. mma.sync reaches
//   about 0.62 of wgmma there.
// Expected bound (computed), shared memory per block and CTA: 256 cycles of look-ups (NF4), 512 of
//   x, 128 + 32 of copies, 64 of weights: 990 cycles for 1 M products, which take 850 cycles of the
//   tensor cores.
// Variants: one. Limits: inputs a multiple of 64; matrices and x aligned to 16 bytes.
// expects linear_gemm_*: only LDGSTS.128; loop HMMA LDGSTS LDS.128; loop no LDG.64 LDG.U16 STG
// expects linear_gemm_plain_*: loop no LDG
// expects linear_gemm_int8_*: loop no LDG
#include "linear_gemm.cuh"

#define LINEAR_GEMM(F, f, T)                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 1)                                           \
        linear_gemm_##f##_##T(LINEAR_PRODUCTS, const T* __restrict__ x /* [rows, inputs] */,       \
                              uint32_t inputs, uint32_t rows) {                                    \
        linear_gemm<F, T>(LINEAR_PRODUCT(blockIdx.y, TILE_OUTPUTS), x, inputs,                     \
                          blockIdx.x * TILE_ROWS, rows);                                           \
    }
LINEAR_GEMM(Nf4, nf4, bf16)
LINEAR_GEMM(Nf4, nf4, f16)
LINEAR_GEMM(Int8, int8, bf16)
LINEAR_GEMM(Int8, int8, f16)
LINEAR_GEMM(Plain, plain, bf16)
LINEAR_GEMM(Plain, plain, f16)
