// Kernels that are wrong on purpose, each in the way that one sanitizer, or the emulation of wgmma, is there for. Compiled only into an
// instrumented emulator; kernels/tests/sanitized.rs launches them and fails unless that ends the process.
#include "../wgmma.cuh"

// Writes one element past the end: for the address sanitizer.
extern "C" __global__ void faulty_overrun(float* __restrict__ out /* [count] */, uint32_t count) {
    if (threadIdx.x <= count) out[threadIdx.x] = 1.0f;
}

// Reads what the neighbour wrote, without a barrier in between: for the thread sanitizer. In the order of the emulator's threads the
// result is right most of the time.
extern "C" __global__ void faulty_race(float* __restrict__ out /* [blockDim.x] */, uint32_t count) {
    SMEM_DYN(shared); // blockDim.x floats
    float* values = reinterpret_cast<float*>(shared);
    values[threadIdx.x] = (float)threadIdx.x;
    if (threadIdx.x < count) out[threadIdx.x] = values[(threadIdx.x + blockDim.x - 1) % blockDim.x];
}

// A product of zeros by a warpgroup; what is wrong comes in between.
template <bool IS_FENCED, bool IS_WAITED, bool IS_ONE>
static void faulty_wgmma(float* out) {
    SMEM_DYN(tile); // [64, 64] of bf16
    for (uint32_t i = threadIdx.x; i < 64 * 8; i += 128) cp_async16(tile + i * 16, tile, false);
    cp_commit();
    cp_wait<0>();
    if (IS_FENCED) fence_proxy_async();
    __syncthreads();
    uint32_t a[4] = {};
    float d[32] = {};
    wgmma_fence();
    wgmma_bf16<64>(d, a, wgmma_rows(tile) + (IS_ONE ? 0 : threadIdx.x / 32), false);
    wgmma_commit();
    if (!IS_WAITED) a[0] = 1;
    wgmma_wait<0>(d);
    out[threadIdx.x % 64] = d[0];
}

// Tensor cores may not see what was copied.
extern "C" __global__ void faulty_wgmma_proxy(float* __restrict__ out /* [64] */, uint32_t) { faulty_wgmma<false, true, true>(out); }

// Writes registers that a product still reads.
extern "C" __global__ void faulty_wgmma_wait(float* __restrict__ out /* [64] */, uint32_t) { faulty_wgmma<true, false, true>(out); }

// The warps of a warpgroup name different memory.
extern "C" __global__ void faulty_wgmma_warps(float* __restrict__ out /* [64] */, uint32_t) { faulty_wgmma<true, true, false>(out); }
