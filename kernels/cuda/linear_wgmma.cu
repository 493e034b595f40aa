// GEMM for many rows on warpgroups (compute capability 9.0): out = x weight^T + bias, the products
// of prefill. linear_gemm.cu does the same on other devices.
//
// Shapes: x T in tiles (below); up to 3 matrices [outputs, inputs] (NF4, INT8, bf16, f16) with the
//   same inputs; out f32 [rows, outputs].
// Reference: kernels/src/ops/linear.rs. Order of sums: linear.cuh. No document says whether wgmma
//   rounds as mma.sync does, so the host multiplies a sample both ways before it uses these kernels
//   (kernels/src/cuda/agree.rs).
// Tiles of x: linear_wgmma_x writes [tiles of rows, blocks, 128, 64], 16 KiB for 128 rows and 64
//   inputs, swizzled as in shared memory (wgmma.cuh), so that one bulk copy brings one tile. The
//   inputs of a block are permuted: step s of a row of x has the same 16 inputs as step s of a
//   lane's weights.
// Grid: x tiles of 128 rows, y tiles of 128 outputs over all matrices, so that concurrent CTAs
//   share weights.
// CTA: 2 warpgroups of 64 outputs. Weights are operand A, decoded in registers; x is operand B of
//   both. A ring of 6 stages holds one block (64 inputs) each of x, which the copy engine brings,
//   and of the stored weights, which cp.async brings.
// Pipeline: while the products of a block run, each warp waits for the weights of the next block
//   and decodes its fragments. NF4 products have two halves of 64 rows: the group of one half is
//   scaled and added while the other half is summed. Scales are read and computed for 4 blocks at a
//   time, 4 blocks ahead. ptxas tracks running products only through straight-line code, hence
//   chunks of 4 blocks; at the end of a chunk a warpgroup waits for its products while the other
//   one continues.
// Clusters: 2 CTAs (4 for plain weights) with the same rows and neighbouring tiles of outputs. Each
//   CTA multicasts its share of a block of x to all of them, so L2 is read once. A stage of x is
//   filled again after all CTAs have released it (barriers `empty`); linear_wgmma.cuh explains why
//   every wait ends. The grid's y is a multiple of the cluster; a CTA past the last tile
//   participates and has no outputs.
// Operations: 2 x rows x inputs x outputs. A 70B block has 0.856 G weights; 1,024 rows are 1.75
//   TFLOP, computed 2.2 ms at the 790 TFLOP/s that an H200 reaches.
// Expected bound (computed), per block and CTA with 1 M products and 512 cycles of the tensor
//   cores:
//   shared memory   x: 256 to read, 128 to write. Weights: NF4 128 of look-ups + 64, INT8 128,
//                   bf16 256. In all 576, 512 and 640: 0.89 of the peak for NF4, 0.80 for bf16
//   instructions    NF4: 225 per warp (64 FFMA, 18 LDS, 8 HGMMA), 450 of 512 cycles per scheduler
//   L2              NF4 12 KiB, INT8 16, bf16 20: 24, 32 and 40 bytes per cycle at the peak.
//                   With the published 25 to 31 of an H100: NF4 is not bound, INT8 at 0.78 to
//                   0.97 of the peak, bf16 at 0.62 to 0.78. Without clusters: 0.62 to 0.78, 0.52
//                   to 0.65, 0.4 to 0.5.
// Clusters of 4 leave 4 of an H200's 132 multiprocessors idle, because clusters lie within a GPC of
//   up to 18. So only plain weights have them; clusters of 2 would take 48 bytes per cycle there.
// Variants: one. Limits: inputs a multiple of 64; matrices and x aligned to 16 bytes.
// Architectures: 90a
// expects linear_wgmma_nf4_*: loop HGMMA LDGSTS LDS UBLKCP; loop no LDG.64 STG
// expects linear_wgmma_nf4_*: only LDGSTS.128 UBLKCP.MULTICAST; no HMMA MEMBAR
// expects linear_wgmma_int8_*: loop HGMMA LDGSTS LDS.128 UBLKCP; loop no LDG STG
// expects linear_wgmma_int8_*: only LDGSTS.128 UBLKCP.MULTICAST; no HMMA MEMBAR
// expects linear_wgmma_plain_*: loop HGMMA LDGSTS LDS.128 UBLKCP; loop no LDG STG
// expects linear_wgmma_plain_*: only LDGSTS.128 UBLKCP.MULTICAST; no HMMA MEMBAR
// expects linear_wgmma_x_*: LDG.64; only STG.128
#include "linear_wgmma.cuh"

#define LINEAR_WGMMA(F, f, T)                                                                      \
    extern "C" __global__ void __cluster_dims__(1, CLUSTER<F>, 1) __launch_bounds__(256, 1)        \
        linear_wgmma_##f##_##T(LINEAR_PRODUCTS, const T* __restrict__ x /* tiles */,               \
                               uint32_t inputs, uint32_t rows) {                                   \
        LinearProduct product = LINEAR_PRODUCT(blockIdx.y, TILE_OUTPUTS);                          \
        if (product.outputs == 0)                                                                  \
            product = {weight0, bias0,     out0, outputs0,                                         \
                       layout0, blockIdx.y}; /* fills a cluster: past the end of a matrix */       \
        const uint32_t first = blockIdx.x * TILE_ROWS;                                             \
        linear_wgmma<F, T>(product, x, inputs, blockIdx.x,                                         \
                           product.out + (size_t)first * product.outputs, rows - first);           \
    }
LINEAR_WGMMA(Nf4, nf4, bf16)
LINEAR_WGMMA(Nf4, nf4, f16)
LINEAR_WGMMA(Int8, int8, bf16)
LINEAR_WGMMA(Int8, int8, f16)
LINEAR_WGMMA(Plain, plain, bf16)
LINEAR_WGMMA(Plain, plain, f16)

// x as tiles, rounded. Rows past the last of a tile are left alone: a row of x is a column of the
// product, and theirs are not written. Grid: 256 pieces of 8 inputs per CTA. Floor: bytes read and
// written.
#define LINEAR_WGMMA_X(T)                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        linear_wgmma_x_##T(const float* __restrict__ x /* [rows, inputs] */, T* __restrict__ out,  \
                           uint32_t inputs, uint32_t rows) {                                       \
        tile_piece(x, out, inputs, rows, (uint64_t)blockIdx.x * 256 + threadIdx.x);                \
    }
LINEAR_WGMMA_X(bf16)
LINEAR_WGMMA_X(f16)
