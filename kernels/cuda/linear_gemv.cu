// GEMV for 1 to 32 rows: out = round(x) weight^T + bias, the products of a decode step.
//
// Shapes: x f32 [inputs], or of several rows as linear_pack.cu makes it; up to 3 matrices
//   [outputs, inputs] (NF4, INT8, bf16, f16) with the same inputs; out f32 [rows, outputs]. T is
//   the dtype to which x is rounded.
// Reference: kernels/src/ops/linear.rs. Order of sums: linear.cuh.
// Grid: tiles of 16 M outputs over all matrices.
// CTA: 8 warps; split-K: warp w computes segment w of the inputs for all outputs of the tile. A
//   warp fills its own ring of `stages` stages in shared memory, 128 bytes of each row per stage
//   (cp.async of 16 bytes; NF4 lies in tiles, see nf4.cuh), and multiplies them with 8 N rows of x.
//   The first barrier comes in the epilogue, which adds the sums of the segments.
// Traffic: each weight once. A 70B block has 442 MB in NF4, computed 103 us at the 4.3 TB/s of an
//   H200. At 0.7 us of latency this rate needs 23 KB in flight per multiprocessor; 8 warps x 2 to 3
//   stages x 2 or 4 KB are 32 to 96 KB.
// Expected bound (computed): a 16 x 16 step of NF4 takes 7 cycles of shared memory at M = 2 (4 of
//   table look-ups, 1 + 1 of weights in and out, 0.5 of scales, 1 / M of activations), and 4.3 TB/s
//   leave 7. Tensor cores: 0.14 N mma per cycle of about 0.6.
// Variants: M 1 for matrices so small that tiles of 32 outputs would leave multiprocessors idle,
//   else 2; r1 for one row, N 1, 2, 4 for up to 8, 16, 32 packed rows. All variants and
//   linear_gemm.cu give the same bits.
//   linear_cluster.cu does the same on compute capability 9.0 for more than 1,792 inputs.
// Limits: inputs a multiple of 64, matrices aligned to 16 bytes. Everything else:
//   linear_generic.cu.
// expects linear_gemv_*: only LDGSTS.128; loop HMMA LDGSTS LDG.128; loop no LDG.64 STG; no LDG.U8
// expects linear_gemv_nf4_*: loop LDS.128
// expects linear_gemv_plain_*: loop only LDG.128
// expects linear_gemv_int8_*: loop only LDG.128
#include "linear_gemv.cuh"

#define LINEAR_GEMV(F, f, T, M, n, N, ROWS)                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, N == 1 ? 2 : 1)                       \
        linear_gemv_##f##_##T##_m##M##n(LINEAR_PRODUCTS, const float* x, uint32_t inputs,          \
                                        uint32_t rows, uint32_t stages) {                          \
        linear_gemv<F, T, M, N>(LINEAR_PRODUCT(blockIdx.x, M * 16), x, ROWS(), inputs, rows,       \
                                stages);                                                           \
    }
#define LINEAR_GEMV_SIZES(F, f, T)                                                                 \
    LINEAR_GEMV(F, f, T, 1, r1, 1, Contiguous)                                                     \
    LINEAR_GEMV(F, f, T, 1, n1, 1, Packed)                                                         \
    LINEAR_GEMV(F, f, T, 1, n2, 2, Packed)                                                         \
    LINEAR_GEMV(F, f, T, 1, n4, 4, Packed)                                                         \
    LINEAR_GEMV(F, f, T, 2, r1, 1, Contiguous)                                                     \
    LINEAR_GEMV(F, f, T, 2, n1, 1, Packed)                                                         \
    LINEAR_GEMV(F, f, T, 2, n2, 2, Packed)                                                         \
    LINEAR_GEMV(F, f, T, 2, n4, 4, Packed)
LINEAR_GEMV_SIZES(Nf4, nf4, bf16)
LINEAR_GEMV_SIZES(Nf4, nf4, f16)
LINEAR_GEMV_SIZES(Int8, int8, bf16)
LINEAR_GEMV_SIZES(Int8, int8, f16)
LINEAR_GEMV_SIZES(Plain, plain, bf16)
LINEAR_GEMV_SIZES(Plain, plain, f16)
