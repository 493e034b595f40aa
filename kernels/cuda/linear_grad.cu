// Gradient of the input of a product on tensor cores: out = grad weight, for 16-bit, INT8 and NF4
// weights.
//
// Shapes: grad f32 [rows, outputs]; weight [outputs, inputs] as stored; out f32 [rows, inputs].
//   Factors are bf16, whatever 16-bit dtype the weights have: a gradient has the range of an f32,
//   which f16 lacks. Sums are f32.
// Reference: kernels/src/ops/gradient.rs.
// linear_grad_round: grad as bf16 [rows, padded], zeros from `outputs` on, times the scales of INT8
//   rows so that their codes are factors as they are. A CTA rounds 2,048 elements of a row.
// linear_grad_gemm, linear_grad_gemv: grid x tiles of 128 rows (gemv: 32), y tiles of 128 inputs,
//   so that concurrent CTAs share weights. 8 warps: gemm 2 along the rows and 4 along the inputs
//   with 64 x 32 sums each; gemv 8 along the inputs with 32 x 16 sums each. cp.async fills a ring
//   of stages with 32 outputs each. Weights other than bf16 are decoded to a bf16 tile of shared
//   memory, one step ahead of the products: NF4 with the table of linear.cuh, scaled in f32, then
//   rounded. ldmatrix loads the fragments, those of the weights transposed; rows are swizzled
//   against bank conflicts.
// Split-K: outputs are cut into at most 4 segments of at least 4,096 (kernels/src/tuning.rs), a
//   function of the number of outputs alone. An element is summed 16 outputs at a time within a
//   segment, then over the segments from first to last, so its bits depend only on its row and the
//   matrix. For up to 32 rows grid z has the segments, because the 64 tiles of inputs of a 70B
//   model would leave multiprocessors idle; linear_grad_join adds their sums. For more rows a CTA
//   processes all segments and adds to its earlier sums, at most three extra reads and writes of 64
//   KB.
// Operations: 2 x rows x outputs x inputs; a 70B block and 1,024 rows: 1.75 TFLOP, computed 2.2 ms
//   at the 788 TFLOP/s that cuBLAS reaches on an H200; mma.sync reaches about 0.62 of that.
// Expected bound (computed), shared memory per step of 32 outputs and CTA: 256 cycles of A, 128 of
//   B, 64 + 16 of copies; where weights are decoded 64 of the tile, 16 of codes, 64 of look-ups.
//   380 to 610 cycles for 0.5 M products, which take 420 cycles of the tensor cores. Two CTAs fit a
//   multiprocessor of an H200.
// Limits: inputs a multiple of 64, matrices aligned to 16 bytes. Everything else:
//   linear_grad_generic.cu.
// expects linear_grad_*_*: only LDGSTS.128; loop HMMA LDGSTS LDSM; no LDG.U16
// expects linear_grad_*_plain_*: only LDG.64
// expects linear_grad_*_int8_*: only LDG.64
// expects linear_grad_round: LDG.128 STG.128
// expects linear_grad_join: only LDG.128; only STG.128
#include "linear_grad.cuh"

// gemv: each CTA takes segment blockIdx.z and writes its sums to matrix blockIdx.z of `out`.
#define LINEAR_GRAD(F, f, T)                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 2) linear_grad_gemm_##f##_##T(               \
        const uint8_t* __restrict__ weight, uint32_t layout,                                       \
        const bf16* __restrict__ grad /* [rows, padded] */, float* out /* [rows, inputs] */,       \
        uint32_t outputs, uint32_t inputs, uint32_t rows, uint32_t padded, uint32_t segment) {     \
        linear_grad<F, T, GEMM_ROWS, GEMM_STAGES>(weight, layout, grad, out, outputs, inputs,      \
                                                  blockIdx.x * GEMM_ROWS, rows,                    \
                                                  blockIdx.y * TILE_INPUTS, padded, segment);      \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 1) linear_grad_gemv_##f##_##T(               \
        const uint8_t* __restrict__ weight, uint32_t layout,                                       \
        const bf16* __restrict__ grad /* [rows, padded] */,                                        \
        float* out /* [segments, rows, inputs] */, uint32_t outputs, uint32_t inputs,              \
        uint32_t rows, uint32_t padded, uint32_t segment) {                                        \
        out += (size_t)blockIdx.z * rows * inputs;                                                 \
        linear_grad<F, T, GEMV_ROWS, GEMV_STAGES<F>>(                                              \
            weight, layout, grad, out, outputs, inputs, blockIdx.x * GEMV_ROWS, rows,              \
            blockIdx.y * TILE_INPUTS, padded, segment, blockIdx.z);                                \
    }
LINEAR_GRAD(Plain, plain, bf16)
LINEAR_GRAD(Plain, plain, f16)
LINEAR_GRAD(Int8, int8, bf16)
LINEAR_GRAD(Nf4, nf4, bf16)

extern "C" __global__ void __launch_bounds__(256)
    linear_grad_round(const float* __restrict__ grad /* [rows, outputs] */,
                      const float* __restrict__ absmax /* [outputs] of INT8, or null */,
                      bf16* __restrict__ out /* [rows, padded] */, uint32_t outputs,
                      uint32_t padded, uint32_t rows) {
    const uint32_t output = (blockIdx.y * 256 + threadIdx.x) * 8, row = blockIdx.x;
    if (output >= padded || row >= rows) return;
    round_eight(grad + (size_t)row * outputs, absmax, out + (size_t)row * padded, output, outputs);
}

// out = the sums of the segments, from first to last. 4 neighbours per thread.
extern "C" __global__ void __launch_bounds__(256)
    linear_grad_join(const float* __restrict__ sums /* [segments, len] */,
                     float* __restrict__ out /* [len] */, uint32_t segments, uint64_t len) {
    const uint64_t at = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (at >= len) return;
    float4 total = *reinterpret_cast<const float4*>(sums + at);
    for (uint32_t s = 1; s < segments; s++) {
        const float4 next = *reinterpret_cast<const float4*>(sums + s * len + at);
        total = make_float4(__fadd_rn(total.x, next.x), __fadd_rn(total.y, next.y),
                            __fadd_rn(total.z, next.z), __fadd_rn(total.w, next.w));
    }
    *reinterpret_cast<float4*>(out + at) = total;
}
