// GEMV for 1 to 32 rows on clusters of CTAs: linear_gemv.cu, but each of the 4 CTAs of a cluster
// takes two of the 8 segments of the inputs, for four times as many outputs.
//
// Why: a CTA that has all inputs reads all of x. With 8 rows of f32 that is as much as 62 outputs
// of
//   NF4, the share of a multiprocessor in a matrix of 8,192. Here a CTA reads a quarter of x, and
//   holds it in shared memory, for 16 strips at a time.
// Shapes, reference, order of sums, variants, limits: as linear_gemv.cu, and 8 segments.
// Grid: clusters that the device certainly holds (kernels/src/tuning.rs).
// CTA: 8 warps: 4 groups with the same activations and different strips, for each of 2 segments.
//   Sums go to the CTA of the cluster that has the number of the group; it adds and writes them.
// Barriers: cluster_wait before sums are stored: all CTAs have started, and have written the sums
//   before these. cluster_wait after that: all sums are there. cluster_wait at the end: no peer
//   stores to this CTA any more. Every thread passes all of them equally often, for the CTAs of a
//   cluster have the same strips.
// Architectures: 90a
// expects linear_cluster_*: HMMA; loop HMMA LDG.128; no LDGSTS
#include "linear_stream.cuh"

#define CLUSTER 4
EXPORT(CLUSTER, CLUSTER);

#define LINEAR_CLUSTER(F, f, T, r, N, ONE)                                                         \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WARPS * 32, 1)    \
        linear_cluster_##f##_##T##_r##r(LINEAR_PRODUCTS, const float* x /* [rows, inputs] */,      \
                                        uint32_t inputs, uint32_t rows, uint32_t window) {         \
        const Products products = LINEAR_ALL;                                                      \
        linear_stream<F, T, N, ONE, SEGMENTS / CLUSTER>(products, x, inputs, rows, window);        \
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
