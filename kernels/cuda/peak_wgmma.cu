// Peak rate of the tensor cores with warpgroups, the yardstick of `sepal selftest` on devices that
// have them.
//
// Each of 2 warpgroups multiplies the same fragments with the same tile of shared memory,
// m64n128k16 of bf16, 4 times per iteration. The sums are written at the end so that the compiler
// keeps them.
// Architectures: 90a
// expects peak_wgmma_bf16: loop HGMMA; loop no LDS; no HMMA
#include "peak.cuh"
#include "wgmma.cuh"

// Shared memory: b, [128, 64] of bf16.
EXPORT(SHARED, 128 * 64 * 2);

extern "C" __global__ void __launch_bounds__(256)
    peak_wgmma_bf16(float* __restrict__ out /* [CTAs, threads] */, uint32_t iterations) {
    SMEM_DYN(tile);
    for (uint32_t i = threadIdx.x; i < 128 * 32; i += 256)
        reinterpret_cast<uint32_t*>(tile)[i] = noise(i);
    fence_proxy_async();
    __syncthreads();
    uint32_t a[4][4];
    float sums[64] = {};
#pragma unroll
    for (uint32_t i = 0; i < 16; i++) a[i / 4][i % 4] = noise(~(i * 256 + threadIdx.x));
    for (uint32_t i = 0; i < iterations; i++) {
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) wgmma_bf16<128>(sums, a[s], wgmma_rows(tile) + s * 2, true);
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>(sums);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; i++) total += sums[i];
    out[(size_t)blockIdx.x * blockDim.x + threadIdx.x] = total;
}
