// Kernels that are wrong on purpose, each in a way that one sanitizer, or the emulation of wgmma or
// clusters, must report. Only an instrumented emulator contains them; kernels/tests/sanitized.rs
// launches them and fails unless the process ends.
#include "../wgmma.cuh"

// Writes one element past the end: for the address sanitizer.
extern "C" __global__ void faulty_overrun(float* __restrict__ out /* [count] */, uint32_t count) {
    if (threadIdx.x <= count) out[threadIdx.x] = 1.0f;
}

// Reads what the neighbour wrote, without a barrier in between: for the thread sanitizer. In the
// order of the emulator's threads the result is right most of the time.
extern "C" __global__ void faulty_race(float* __restrict__ out /* [blockDim.x] */, uint32_t count) {
    SMEM_DYN(shared); // blockDim.x floats
    float* values = reinterpret_cast<float*>(shared);
    values[threadIdx.x] = (float)threadIdx.x;
    if (threadIdx.x < count) out[threadIdx.x] = values[(threadIdx.x + blockDim.x - 1) % blockDim.x];
}

// A product of zeros by a warpgroup; what is wrong comes in between.
template <bool IS_FENCED, bool IS_WAITED, bool IS_ONE> static void faulty_wgmma(float* out) {
    SMEM_DYN(tile); // [64, 64] of bf16
    for (uint32_t i = threadIdx.x; i < 64 * 8; i += 128) cp_async16(tile + i * 16, tile, false);
    cp_commit();
    cp_wait<0>();
    if (IS_FENCED) fence_proxy_async();
    __syncthreads();
    uint32_t a[4] = {};
    float d[32] = {};
    wgmma_fence();
    wgmma_bf16<64>(d, a, wgmma_rows(tile) + (IS_ONE ? 0 : threadIdx.x / 32 * 2), false);
    wgmma_commit();
    if (!IS_WAITED) a[0] = 1;
    wgmma_wait<0>(d);
    out[threadIdx.x % 64] = d[0];
}

// Tensor cores may not see what was copied.
extern "C" __global__ void faulty_wgmma_proxy(float* __restrict__ out /* [64] */, uint32_t) {
    faulty_wgmma<false, true, true>(out);
}

// Writes registers that a product still reads.
extern "C" __global__ void faulty_wgmma_wait(float* __restrict__ out /* [64] */, uint32_t) {
    faulty_wgmma<true, false, true>(out);
}

// The warps of a warpgroup name different memory.
extern "C" __global__ void faulty_wgmma_warps(float* __restrict__ out /* [64] */, uint32_t) {
    faulty_wgmma<true, true, false>(out);
}

// 80 columns in rows of 64, of which the second is not filled: no canonical layout.
extern "C" __global__ void faulty_wgmma_layout(float* __restrict__ out /* [64] */, uint32_t) {
    SMEM_DYN(tile); // a row of each half
    uint32_t a[4] = {};
    float d[40] = {};
    wgmma_fence();
    wgmma_bf16<80, true>(d, a, wgmma_columns<128>(tile, 64 * 64), false);
    wgmma_commit();
    wgmma_wait<0>(d);
    out[threadIdx.x % 64] = d[0];
}

// Two CTAs of a cluster. CTA 0 copies a tile of zeros to both, both multiply it, and CTA 0 copies
// one of ones to its place, when both have done with it.
enum Fault { NONE, NOT_MADE, NOT_KNOWN, NOT_FREED, NOT_AWAITED, NOT_THERE };
template <Fault FAULT> static void faulty_cluster(float* out) {
    SMEM_DYN(tile); // [64, 64] of bf16, then barriers
    uint64_t *full = reinterpret_cast<uint64_t*>(tile + 64 * 128), *empty = full + 2;
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init(full + 1, 1);
        barrier_init(empty, 2);
        if (FAULT != NOT_KNOWN) fence_barrier_init();
    }
    if (FAULT == NOT_MADE) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
    auto copy = [&](uint32_t number) {
        if (threadIdx.x != 0) return;
        barrier_expect(full + number, 64 * 128);
        if (cluster_rank() == 0)
            copy_bulk<2>(tile, out + 64 + number * 2048, 64 * 128, full + number);
    };
    copy(0);
    barrier_wait(full, 0);
    uint32_t a[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    float d[32] = {};
    wgmma_fence();
    wgmma_bf16<64>(d, a, wgmma_rows(tile), false);
    wgmma_commit();
    wgmma_wait<0>(d);
    __syncthreads();
    const bool arrives = FAULT != NOT_THERE || cluster_rank() == 1;
    if (threadIdx.x < 2 && arrives) barrier_arrive(empty, threadIdx.x);
    if (FAULT != NOT_FREED && FAULT != NOT_THERE) barrier_wait(empty, 0);
    copy(1);
    if (FAULT != NOT_AWAITED) barrier_wait(full + 1, 0);
    if (FAULT == NOT_FREED) barrier_wait(empty, 0);
    if (threadIdx.x < 32) out[cluster_rank() * 32 + threadIdx.x] = d[threadIdx.x];
    if (FAULT != NOT_THERE) {
        cluster_arrive();
        cluster_wait();
    }
}
#define FAULTY_CLUSTER(name, fault)                                                                \
    extern "C" __global__ void __cluster_dims__(2, 1, 1)                                           \
        name(float* __restrict__ out /* [64], then two tiles */, uint32_t) {                       \
        faulty_cluster<fault>(out);                                                                \
    }
// Nothing is wrong: all sums are zero.
FAULTY_CLUSTER(sound_cluster, NONE)
// Copies to a CTA that may not have begun; to a barrier that the copy engine may not know.
FAULTY_CLUSTER(faulty_cluster_start, NOT_MADE)
FAULTY_CLUSTER(faulty_cluster_fence, NOT_KNOWN)
// Overwrites what the other CTA's products may still read.
FAULTY_CLUSTER(faulty_cluster_free, NOT_FREED)
// Ends without a wait for what is copied to it; before the other CTA arrives at its barrier.
FAULTY_CLUSTER(faulty_cluster_wait, NOT_AWAITED)
FAULTY_CLUSTER(faulty_cluster_end, NOT_THERE)
