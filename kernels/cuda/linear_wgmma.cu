// out = x weight^T + bias for many rows where warpgroups multiply (compute capability 9.0): the products of prefill, as linear_many.cu does them elsewhere.
//
// x T in tiles, as linear_wgmma_x makes them of f32; up to 3 matrices [outputs, inputs] (NF4, INT8, bf16, f16) of the same inputs; out f32 [rows,
// outputs]. CPU reference: kernels/src/ops/linear.rs. Order of the sums: linear.cuh; that warpgroups round as mma.sync does is not documented, so the
// host multiplies a sample both ways before it takes these kernels (kernels/src/cuda/agree.rs).
//
// Tiles of x: for 128 rows and 64 inputs 16 KiB as shared memory has them, swizzled (wgmma.cuh), [tiles of rows, blocks, 128, 64]; the inputs of a block
// permuted so that step s of a row of x and of a lane's weights is the same 16 inputs. One bulk copy brings one.
//
// Grid: x tiles of 128 rows, y tiles of 128 outputs over all matrices, so that CTAs that run together share weights. CTA: 2 warpgroups of 64 outputs;
// weights are the A operand, made in registers, x is B for both. A ring of 6 stages holds one block (64 inputs) of x, brought by the copy engine, and of the
// weights as stored, by cp.async. While the products of a block run, each warp waits for the next one's weights and makes their fragments. Products of NF4
// go in halves of 64 rows: one half's group is scaled and added while the other's is summed, so that tensor cores need not wait. The scales of 4 blocks
// are worked out 4 blocks before, and asked for before that. ptxas follows products in flight through straight code alone, hence chunks of 4 blocks;
// at the end of each a warpgroup waits for its own, and the other one's run.
//
// Clusters: 2 CTAs (of plain weights 4) with the same rows and neighbouring tiles of outputs; each copies its share of a block of x to all of them
// (multicast), so that it leaves the second-level cache once. A stage of x is filled again when all have done with it, which each tells all (barriers
// `empty`); linear_wgmma.cuh says why every wait ends. The grid's y is a multiple of the cluster: a CTA past the last tile takes part, and has no outputs.
//
// Floor: 2 x rows x inputs x outputs operations; a 70B block has 0.856 G weights, 1,024 rows 1.75 TFLOP, 2.2 ms at the 790 TFLOP/s that an H200
// reaches. Per block and CTA: 1 M products, 512 cycles of the tensor cores. Shared memory: 256 cycles of x for them, 128 of x coming in, and of NF4 128 of
// look-ups and 64 of weights in and out (576 in all), INT8 128 (512), bf16 256 (640). Instructions of NF4: 230 a warp and block (64 FFMA, 20 LDS, 8
// HGMMA), 460 of the 512 cycles of each scheduler. So shared memory bounds NF4 at 0.89 of the peak and bf16 at 0.80. The second-level cache gives a CTA
// 12 KiB of NF4 and x for them, 16 of INT8, 20 of bf16: 24, 32 and 40 bytes a cycle at the peak; at the 25 to 31 that are told of an H100 it does not
// bound NF4, INT8 at 0.78 to 0.97, and bf16 at 0.62 to 0.78. Without clusters these were 40, 48 and 64 bytes: 0.62 to 0.78, 0.52 to 0.65, 0.4 to 0.5;
// as many still come in at a multiprocessor, which takes 64. Clusters of 4 leave multiprocessors idle: they lie within a GPC, and of one with 18 there are
// 2 left over, 4 of an H200's 132. So bf16 alone has them, for which 2 would still be 48 bytes, 0.52 to 0.65.
// Variants: one. Limits: inputs a multiple of 64, matrices and x aligned to 16 bytes.
// Architectures: 90a
// expects linear_wgmma_nf4_*: loop HGMMA LDGSTS LDS UBLKCP; only LDGSTS.128 UBLKCP.MULTICAST; loop no LDG.64 STG; no HMMA MEMBAR
// expects linear_wgmma_int8_*: loop HGMMA LDGSTS LDS.128 UBLKCP; only LDGSTS.128 UBLKCP.MULTICAST; loop no LDG STG; no HMMA MEMBAR
// expects linear_wgmma_plain_*: loop HGMMA LDGSTS LDS.128 UBLKCP; only LDGSTS.128 UBLKCP.MULTICAST; loop no LDG STG; no HMMA MEMBAR
// expects linear_wgmma_x_*: LDG.64; only STG.128
#include "linear_wgmma.cuh"

#define LINEAR_WGMMA(F, f, T)                                                                                                         \
    extern "C" __global__ void __cluster_dims__(1, CLUSTER<F>, 1) __launch_bounds__(256, 1)                                           \
        linear_wgmma_##f##_##T(LINEAR_PARTS, const T* __restrict__ x /* tiles */, uint32_t inputs, uint32_t rows) {                   \
        LinearPart part = LINEAR_PART(blockIdx.y, TILE_OUTPUTS);                                                                      \
        if (part.outputs == 0) part = {weight0, bias0, out0, outputs0, blockIdx.y}; /* fills a cluster: past the end of a matrix */    \
        const uint32_t first = blockIdx.x * TILE_ROWS;                                                                                \
        linear_wgmma<F, T>(part, x, inputs, blockIdx.x, part.out + (size_t)first * part.outputs, rows - first);                       \
    }
LINEAR_WGMMA(Nf4, nf4, bf16)
LINEAR_WGMMA(Nf4, nf4, f16)
LINEAR_WGMMA(Int8, int8, bf16)
LINEAR_WGMMA(Int8, int8, f16)
LINEAR_WGMMA(Plain, plain, bf16)
LINEAR_WGMMA(Plain, plain, f16)

// x as tiles, rounded. Rows past the last of a tile are left alone: a row of x is a column of the product, and theirs are not written.
// Grid: 256 pieces of 8 inputs per CTA. Floor: bytes read and written.
#define LINEAR_WGMMA_X(T)                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                                 \
        linear_wgmma_x_##T(const float* __restrict__ x /* [rows, inputs] */, T* __restrict__ out, uint32_t inputs, uint32_t rows) {    \
        tile_piece(x, out, inputs, rows, (uint64_t)blockIdx.x * 256 + threadIdx.x);                                                   \
    }
LINEAR_WGMMA_X(bf16)
LINEAR_WGMMA_X(f16)
