// GEMV for 1 to 32 rows on clusters of CTAs, compute capability 9.0: out = round(x) weight^T +
// bias.
//
// Shapes, reference, order of sums: as linear_gemv.cu, with more than 1,792 inputs. With fewer than
//   8 segments some CTAs have less to do.
// Grid: clusters of 8 CTAs, as many as the device certainly holds (kernels/src/tuning.rs). A
//   cluster has the same number of neighbouring strips of 16 outputs as the others, or one less.
//   Each of its CTAs takes one of the 8 segments, so it reads an eighth of x.
// CTA: 8 warps with the same activations and different strips, 4 at a time. A warp loads weights
//   from memory into registers, 16 bytes per lane, some steps ahead and across passes
//   (linear_source.cuh). Activations are rounded once, in the order of the fragments, into shared
//   memory: all of a segment where they fit, else `window` blocks at a time. Sums go to the CTA of
//   the cluster that has the number of the group; it adds and writes them.
// Gated (a parameter): the matrices are gate and up of an MLP with the same outputs. Their strips
//   alternate, so one CTA has the sums of both, and writes round(silu(round(gate))) * round(up) in
//   place of the gate. The bits are those of silu_mul.cu.
// Normed (y is given; up to 16 rows of up to 8,192 inputs): x is first added to and normed, with
//   the bits of rmsnorm_add. Each CTA adds and squares its segment; the squares of all segments go
//   to all CTAs. The first cluster writes the sum to a place of its own, for others still read x.
// Codes of NF4: a look-up takes one PRMT and one LDS. With up to 16 rows a quarter of the codes is
//   decoded by arithmetic, which balances load/store and integer units.
// Traffic: each weight once; x once per cluster if it fits into shared memory, else once per pass.
// Variants: for 1, 8, 16 and 32 rows. All variants and linear_gemm.cu give the same bits.
// Limits: as linear_gemv.cu, and matrices smaller than 4 GiB.
// Barriers: cluster_wait before sums are stored: all CTAs have started, have used the squares of a
//   norm, which lie in the same place, and have written the sums before these. cluster_wait after
//   that: all sums are there. cluster_wait at the end: no peer stores to this CTA any more. A norm
//   has two more: all CTAs have started; all squares are there. Every thread passes all of them
//   equally often, for the CTAs of a cluster have the same strips.
// Architectures: 90a
// expects linear_cluster_*: HMMA; loop HMMA LDG.128; no LDGSTS
#include "linear_stream.cuh"

#define CLUSTER 8
EXPORT(CLUSTER, CLUSTER);
// Most rows of gated and of normed products: with more, registers do not suffice.
#define GATED_ROWS 16
EXPORT(GATED_ROWS, GATED_ROWS);

#define LINEAR_CLUSTER(F, f, T, r, N, ONE)                                                         \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WARPS * 32, 1)    \
        linear_cluster_##f##_##T##_r##r(                                                           \
            LINEAR_PRODUCTS, const float* x /* [rows, inputs] */, uint32_t inputs, uint32_t rows,  \
            uint32_t window, uint32_t gated, const float* y /* as x, or null */,                   \
            const float* norm /* [inputs] */, float* sum /* as x */, float eps) {                  \
        Products products = LINEAR_ALL;                                                            \
        if (N * 8 > GATED_ROWS) products.gated = 0;                                                \
        linear_stream<F, T, N, ONE, SEGMENTS / CLUSTER>(products, x, inputs, rows, window,         \
                                                        {y, norm, sum, eps});                      \
    }
#define LINEAR_CLUSTER_ROWS(F, f, T)                                                               \
    LINEAR_CLUSTER(F, f, T, 1, 1, true)                                                            \
    LINEAR_CLUSTER(F, f, T, 8, 1, false)                                                           \
    LINEAR_CLUSTER(F, f, T, 16, 2, false)                                                          \
    LINEAR_CLUSTER(F, f, T, 32, 4, false)
LINEAR_CLUSTER_ROWS(Nf4, nf4, bf16)
LINEAR_CLUSTER_ROWS(Nf4, nf4, f16)
LINEAR_CLUSTER_ROWS(Int8, int8, bf16)
LINEAR_CLUSTER_ROWS(Int8, int8, f16)
LINEAR_CLUSTER_ROWS(Plain, plain, bf16)
LINEAR_CLUSTER_ROWS(Plain, plain, f16)
