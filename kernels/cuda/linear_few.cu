// out = round(x) weight^T + bias for 1 to 32 rows of x: the products of a decode step. Reads each weight once.
//
// x f32 [rows, inputs]; up to 3 matrices [outputs, inputs] (NF4, INT8, bf16, f16) of the same inputs; out f32 [rows, outputs]. T is the dtype
// to which x is rounded. CPU reference: kernels/src/ops/linear.rs. Order of the sums: linear.cuh.
//
// Grid: tiles of 16 M outputs, over all matrices. CTA: 8 warps, warp w walks segment w of the inputs for all outputs of the tile, by itself: it
// copies 128 bytes of each row at a time into a ring of its own in shared memory (cp.async of 16 bytes, 4 rows of 128 bytes per instruction,
// `stages` deep), and multiplies them with 8 N tokens. No barrier until the sums of the segments meet at the end.
//
// Floor: the bytes of the matrix at the device's bandwidth. A 70B block is 442 MB in NF4, 103 us at the 4.3 TB/s of an H200. To keep 132 SMs
// at that for 0.7 us of latency takes 23 KB in flight per SM; 8 warps x 2 to 3 stages x 2 or 4 KB are 32 to 96 KB.
// Shared memory of one 16 x 16 step of NF4: 4 cycles of look-ups, 1 + 1 of weights in and out, 0.5 of scales, 1 / M of activations: 7 cycles
// for 256 weights at M = 2, where 4.3 TB/s leave 7. Tensor cores: 0.14 N mma per cycle, of about 0.6 possible.
// Variants: M 1 for matrices so small that 32 outputs a tile would leave SMs idle, else 2; N 1, 2, 4 for up to 8, 16, 32 rows. The bits of an
// element are the same in all of them, and in linear_many.cu.
// Limits: inputs a multiple of 64, matrices aligned to 16 bytes. All else goes to linear_any.cu.
// expects linear_few_*: only LDGSTS.128; loop HMMA LDGSTS LDG.128; loop no LDG.64 LDG.U16 STG
// expects linear_few_plain_*: loop only LDG.128; no LDG.U8
// expects linear_few_int8_*: loop only LDG.128; no LDG.U8
#include "linear_few.cuh"

#define LINEAR_FEW(F, f, T, M, N)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, N == 1 ? 2 : 1) linear_few_##f##_##T##_m##M##n##N(                                        \
        LINEAR_PARTS, const float* __restrict__ x /* [rows, inputs] */, uint32_t inputs, uint32_t rows, uint32_t stages) { \
        linear_few<F, T, M, N>(LINEAR_PART(blockIdx.x, M * 16), x, InOrder(), inputs, rows, stages);                                                                        \
    }
#define LINEAR_FEW_SIZES(F, f, T) \
    LINEAR_FEW(F, f, T, 1, 1)     \
    LINEAR_FEW(F, f, T, 1, 2)     \
    LINEAR_FEW(F, f, T, 1, 4)     \
    LINEAR_FEW(F, f, T, 2, 1)     \
    LINEAR_FEW(F, f, T, 2, 2)     \
    LINEAR_FEW(F, f, T, 2, 4)
LINEAR_FEW_SIZES(Nf4, nf4, bf16)
LINEAR_FEW_SIZES(Nf4, nf4, f16)
LINEAR_FEW_SIZES(Int8, int8, bf16)
LINEAR_FEW_SIZES(Int8, int8, f16)
LINEAR_FEW_SIZES(Plain, plain, bf16)
LINEAR_FEW_SIZES(Plain, plain, f16)
