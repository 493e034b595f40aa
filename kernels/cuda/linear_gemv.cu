// GEMV for 1 to 32 rows: out = round(x) weight^T + bias, the products of a decode step.
//
// Shapes: x f32 [rows, inputs]; up to 3 matrices [outputs, inputs] (NF4, INT8, bf16, f16) with the
//   same inputs; out f32 [rows, outputs]. T is the dtype to which x is rounded.
// Reference: kernels/src/ops/linear.rs. Order of sums: linear.cuh.
// Grid: as many CTAs as multiprocessors, if there are as many strips of 16 outputs. A CTA has the
//   same number of neighbouring strips as the others, or one less, in passes of up to 4.
// CTA: 8 warps. Warp w multiplies segment w of the inputs with the strips of a pass. It loads
//   weights from memory into registers, 16 bytes per lane, some steps ahead and across passes
//   (linear_source.cuh). Activations are rounded once, in the order of the fragments, into shared
//   memory: all of a segment where they fit, else a window of `window` blocks at a time. The sums
//   of the segments meet in shared memory at the end of a pass.
// Traffic: each weight once; x once per CTA if it fits into shared memory, else once per pass.
// Expected bound (computed, an H200 and one row of NF4): memory leaves 227 clocks for 8,192
// weights;
//   load/store takes 32 for weights, 96 for look-ups, 16 for scales, 16 for activations. A quarter
//   of the codes is decoded without the table, which balances load/store and integer arithmetic.
// Variants: for 1, 8, 16 and 32 rows. All variants and linear_gemm.cu give the same bits.
// Limits: inputs a multiple of 64, matrices aligned to 16 bytes and smaller than 4 GiB. Everything
//   else: linear_generic.cu.
// expects linear_gemv_*: HMMA; loop HMMA LDG.128; no LDGSTS
#include "linear_stream.cuh"

#define LINEAR_GEMV(F, f, T, r, N, ONE)                                                            \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)                                    \
        linear_gemv_##f##_##T##_r##r(LINEAR_PRODUCTS, const float* x /* [rows, inputs] */,         \
                                     uint32_t inputs, uint32_t rows, uint32_t window) {            \
        const Products products = LINEAR_ALL;                                                      \
        linear_stream<F, T, N, ONE, SEGMENTS>(products, x, inputs, rows, window);                  \
    }
#define LINEAR_GEMV_ROWS(F, f, T)                                                                  \
    LINEAR_GEMV(F, f, T, 1, 1, true)                                                               \
    LINEAR_GEMV(F, f, T, 8, 1, false)                                                              \
    LINEAR_GEMV(F, f, T, 16, 2, false)                                                             \
    LINEAR_GEMV(F, f, T, 32, 4, false)
LINEAR_GEMV_ROWS(Nf4, nf4, bf16)
LINEAR_GEMV_ROWS(Nf4, nf4, f16)
LINEAR_GEMV_ROWS(Int8, int8, bf16)
LINEAR_GEMV_ROWS(Int8, int8, f16)
LINEAR_GEMV_ROWS(Plain, plain, bf16)
LINEAR_GEMV_ROWS(Plain, plain, f16)
