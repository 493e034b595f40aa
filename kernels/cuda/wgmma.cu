// out = a b^T for 64 rows of a: every product of wgmma.cuh alone, each size and both layouts of b.
// This tells a device with a wrong product from a wrong kernel.
//
// Shapes: a T [64, inputs]; b T [N, inputs] (rows) or [inputs, N] (columns); out f32 [64, N].
// Reference: kernels/src/selftest/wgmma.rs.
// Grid: one CTA of one warpgroup copies 64 inputs at a time to shared memory, waits and multiplies.
//   Not meant to be fast.
// Variants: N, dtype, rows or columns. Limits: inputs a multiple of 64, a and b aligned to 16
//   bytes.
// Architectures: 90a
// expects wgmma_*: loop HGMMA LDGSTS; only LDGSTS.128; no HMMA
#include "wgmma.cuh"

// Shared memory: 64 inputs of b for up to 128 columns, [N, 64] or two times [64, 64].
EXPORT(SHARED, 128 * 64 * 2);

template <class T, int N, bool COLUMNS>
__device__ __forceinline__ void product(const T* a, const T* b, float* out, uint32_t inputs) {
    SMEM_DYN(tile);
    constexpr uint32_t ROWS = COLUMNS ? 64 : N, PIECES = COLUMNS ? N / 8 : 8,
                       ROW = COLUMNS ? WGMMA_ROW<N> : 128, IN_ROW = ROW / 16;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4,
                   row = warp * 16 + g;
    float d[N / 2];
    for (uint32_t block = 0; block < inputs; block += 64) {
        for (uint32_t i = threadIdx.x; i < ROWS * PIECES; i += 128) {
            const uint32_t r = i / PIECES, piece = i % PIECES;
            const T* from = COLUMNS ? b + (size_t)(block + r) * N + piece * 8
                                    : b + (size_t)r * inputs + block + piece * 8;
            cp_async16(tile + piece / IN_ROW * 64 * ROW + wgmma_piece<ROW>(r, piece % IN_ROW),
                       from);
        }
        cp_commit();
        cp_wait<0>();
        fence_proxy_async();
        __syncthreads();
        uint32_t fragments[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const size_t at =
                    (size_t)(row + i % 2 * 8) * inputs + block + s * 16 + i / 2 * 8 + q * 2;
                fragments[s][i] = *reinterpret_cast<const uint32_t*>(a + at);
            }
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const uint64_t at =
                COLUMNS ? wgmma_columns<N>(tile, 64 * ROW) + s * ROW : wgmma_rows(tile) + s * 2;
            wgmma<T, N, COLUMNS>(d, fragments[s], at, block + s > 0);
        }
        wgmma_commit();
        wgmma_wait<0>(d);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        out[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + q * 2 + i % 2] = d[i];
}

#define WGMMA_CHECK(T, N)                                                                          \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        wgmma_rows_##T##_##N(const T* __restrict__ a, const T* __restrict__ b,                     \
                             float* __restrict__ out, uint32_t inputs) {                           \
        product<T, N, false>(a, b, out, inputs);                                                   \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        wgmma_columns_##T##_##N(const T* __restrict__ a, const T* __restrict__ b,                  \
                                float* __restrict__ out, uint32_t inputs) {                        \
        product<T, N, true>(a, b, out, inputs);                                                    \
    }
#define WGMMA_CHECKS(T)                                                                            \
    WGMMA_CHECK(T, 64) WGMMA_CHECK(T, 80) WGMMA_CHECK(T, 96) WGMMA_CHECK(T, 112) WGMMA_CHECK(T, 128)
WGMMA_CHECKS(bf16)
WGMMA_CHECKS(f16)
