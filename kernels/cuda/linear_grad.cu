// out = grad weight on the tensor cores: the gradient of the input of a product, for weights of 16 bits, INT8 and NF4.
//
// grad f32 [rows, outputs]; weight [outputs, inputs] as stored; out f32 [rows, inputs]. What is multiplied is bf16, whatever the 16-bit type of the
// weights: a gradient has the range of an f32, which f16 has not. CPU reference: kernels/src/ops/gradient.rs.
// linear_grad_round: grad to bf16 [rows, padded], zeros from `outputs` on; times the scales of INT8 rows, so that codes are multiplied as they are.
// A CTA makes 2048 numbers of a row.
// linear_grad_many, _few: grid x tiles of ROWS rows (128, or 32 where there are no more), y tiles of 128 inputs, so that CTAs that run together share weights.
// CTA: 8 warps; 128 rows: 2 along the rows, 4 along the inputs, 64 x 32 sums each; 32 rows: 8 along the inputs, 32 x 16 sums each. Outputs
// are walked 32 at a time through a ring of copies by cp.async of 16 bytes. Weights that are not bf16 become bf16 in a tile of shared memory, one step
// ahead of the products: an NF4 byte looks up its pair of levels in a table that every bank has for itself (nf4.cuh, linear.cuh), which is then
// scaled in f32 and rounded. Fragments come by ldmatrix, those of the weights transposed, out of rows whose pieces of 16 bytes are twisted
// so that no two share banks.
// The walk is cut into segments, at most 4, of 4096 outputs at least (kernels/src/tuning.rs): a function of the number of outputs alone. An element is
// summed 16 outputs at a time from the first of a segment to its last, and the sums of segments from first to last, so its bits depend on its row and the
// matrix alone. Up to 32 rows grid z is the segments, as tiles of inputs alone (64 of a 70B model) leave multiprocessors idle: each leaves its sums in
// a workspace, and linear_grad_join adds them. For more rows a CTA takes all segments and adds its sums to those that it has written: at most 3 times
// 64 KB read and written once more, where 4096 outputs take 128 steps.
//
// Floor: 2 x rows x outputs x inputs operations; a 70B block and 1,024 rows: 1.75 TFLOP, 2.2 ms at the 788 TFLOP/s that cuBLAS reaches on an
// H200, of which mma.sync reaches about 0.62. Shared memory per step of 32 outputs and CTA: 256 cycles of A, 128 of B, 64 + 16 of copies, and where
// weights are made 64 of tile, 16 of codes, 64 of look-ups: 0.38 k to 0.61 k cycles for 0.5 M products, which take 0.42 k cycles of the tensor
// cores at that rate. Two CTAs run on a multiprocessor of an H200.
// Limits: inputs a multiple of 64, matrices aligned to 16 bytes. All else: linear_grad_any.cu.
// expects linear_grad_*_*: only LDGSTS.128; loop HMMA LDGSTS LDSM; no LDG.U16
// expects linear_grad_*_plain_*: only LDG.64
// expects linear_grad_*_int8_*: only LDG.64
// expects linear_grad_round: LDG.128 STG.128
// expects linear_grad_join: only LDG.128; only STG.128
#include "linear_grad.cuh"

// Of few rows each CTA takes the segment of its z, and leaves its sums in part z of `out`. Stages of 32 rows are small: more of them, as such products wait
// for the weights.
#define LINEAR_GRAD(F, f, T, FEW_STAGES)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 2) linear_grad_many_##f##_##T(                                                        \
        const uint8_t* __restrict__ weight, const bf16* __restrict__ grad /* [rows, padded] */, float* out /* [rows, inputs] */,            \
        uint32_t outputs, uint32_t inputs, uint32_t rows, uint32_t padded, uint32_t segment) {                                              \
        linear_grad<F, T, 128, 4>(weight, grad, out, outputs, inputs, blockIdx.x * 128, rows, blockIdx.y * TILE_INPUTS, padded, segment);   \
    }                                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) linear_grad_few_##f##_##T(                                                            \
        const uint8_t* __restrict__ weight, const bf16* __restrict__ grad /* [rows, padded] */, float* out /* [segments, rows, inputs] */,  \
        uint32_t outputs, uint32_t inputs, uint32_t rows, uint32_t padded, uint32_t segment) {                                              \
        out += (size_t)blockIdx.z * rows * inputs;                                                                                          \
        linear_grad<F, T, 32, FEW_STAGES>(weight, grad, out, outputs, inputs, blockIdx.x * 32, rows, blockIdx.y * TILE_INPUTS, padded,      \
                                          segment, blockIdx.z);                                                                             \
    }
LINEAR_GRAD(Plain, plain, bf16, 8)
LINEAR_GRAD(Plain, plain, f16, 8)
LINEAR_GRAD(Int8, int8, bf16, 10)
LINEAR_GRAD(Nf4, nf4, bf16, 10)

extern "C" __global__ void __launch_bounds__(256)
    linear_grad_round(const float* __restrict__ grad /* [rows, outputs] */, const float* __restrict__ absmax /* [outputs] of INT8, or null */,
                      bf16* __restrict__ out /* [rows, padded] */, uint32_t outputs, uint32_t padded, uint32_t rows) {
    const uint32_t output = (blockIdx.y * 256 + threadIdx.x) * 8, row = blockIdx.x;
    if (output >= padded || row >= rows) return;
    round_eight(grad + (size_t)row * outputs, absmax, out + (size_t)row * padded, output, outputs);
}

// out = the sums of the segments, from first to last. 4 neighbours per thread.
extern "C" __global__ void __launch_bounds__(256)
    linear_grad_join(const float* __restrict__ sums /* [segments, len] */, float* __restrict__ out /* [len] */, uint32_t segments, uint64_t len) {
    const uint64_t at = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (at >= len) return;
    float4 total = *reinterpret_cast<const float4*>(sums + at);
    for (uint32_t s = 1; s < segments; s++) {
        const float4 next = *reinterpret_cast<const float4*>(sums + s * len + at);
        total = make_float4(__fadd_rn(total.x, next.x), __fadd_rn(total.y, next.y), __fadd_rn(total.z, next.z), __fadd_rn(total.w, next.w));
    }
    *reinterpret_cast<float4*>(out + at) = total;
}
