// Peak rate of the tensor cores without memory traffic, the yardstick of `sepal selftest`.
//
// Each warp multiplies the same fragments `iterations` times into 8 independent accumulators,
// m16n8k16 of bf16 each: 4,096 operations, counting multiplications and additions. Everything stays
// in registers; the sums are written at the end so that the compiler keeps them.
// expects peak_mma_bf16: loop HMMA; loop no LDG STG
#include "peak.cuh"

#define CHAINS 8

extern "C" __global__ void __launch_bounds__(256)
    peak_mma_bf16(float* __restrict__ out /* [CTAs, threads] */, uint32_t iterations) {
    const uint32_t seed = threadIdx.x * 6,
                   a[4] = {noise(seed), noise(seed + 1), noise(seed + 2), noise(seed + 3)};
    const uint32_t b[2] = {noise(seed + 4), noise(seed + 5)};
    float sums[CHAINS][4] = {};
    for (uint32_t i = 0; i < iterations; i++) {
#pragma unroll
        for (int c = 0; c < CHAINS; c++) mma_bf16(sums[c], a, b[0], b[1]);
    }
    float total = 0.0f;
#pragma unroll
    for (int c = 0; c < CHAINS; c++) total += sums[c][0] + sums[c][1] + sums[c][2] + sums[c][3];
    out[(size_t)blockIdx.x * blockDim.x + threadIdx.x] = total;
}
