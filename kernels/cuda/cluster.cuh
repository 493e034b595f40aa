// Clusters of CTAs, which compute capability 9.0 and later have, once as inline PTX and once, in
// emu/, as plain C++.
//
// Clusters (__cluster_dims__): CTAs that run at the same time and access each other's shared
// memory; equal addresses mean equal offsets. The rank numbers the CTAs of a cluster. All their
// threads call cluster_arrive or cluster_release, then cluster_wait, which waits for all arrivals:
// once before a peer's memory is accessed, after the barriers were initialised and
// fence_barrier_init was called; and once before a CTA ends that a peer may still access.
// cluster_release publishes what this thread has stored before, in its CTA and in peers
// (store_in_cluster). cluster_arrive and barrier_arrive (wgmma.cuh) do not, which would need a
// fence of all memory at each arrival: callers of these exchange bulk copies, and the fact that
// products have completed (wgmma_wait) and their B may be overwritten. CUTLASS's ClusterBarrier
// does the same. cluster_arrive does not wait for an earlier barrier_arrive: a CTA waits for all
// arrivals at its barriers before it ends. Source: PTX ISA, chapters 9.7.8.24 (mapa) and 9.7.13.4
// (barrier.cluster).
#pragma once
#include "common.cuh"

#ifdef CUDA_CPU
static inline uint32_t cluster_rank() { return emu::current->cta->rank; }
static inline void cluster_arrive() { emu::cluster_arrive(); }
static inline void cluster_release() { emu::cluster_arrive(); }
static inline void cluster_wait() { emu::cluster_wait(); }
static inline void store_in_cluster(float2* at, uint32_t rank, float2 value) {
    *static_cast<float2*>(emu::in_cluster(rank, at)) = value;
}
static inline void store_in_cluster(float* at, uint32_t rank, float value) {
    *static_cast<float*>(emu::in_cluster(rank, at)) = value;
}
#else
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank; // read anew each time, which is cheaper than a register that is kept
    asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_release() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
// Stores to the place in CTA `rank` of the cluster, which may be this one, that `at` is in this
// one.
__device__ __forceinline__ void store_in_cluster(float2* at, uint32_t rank, float2 value) {
    asm volatile(
        "{.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.v2.f32 [there], {%2, %3};}\n" ::"r"(smem_address(at)),
        "r"(rank), "f"(value.x), "f"(value.y)
        : "memory");
}
__device__ __forceinline__ void store_in_cluster(float* at, uint32_t rank, float value) {
    asm volatile(
        "{.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.f32 [there], %2;}\n" ::"r"(smem_address(at)),
        "r"(rank), "f"(value)
        : "memory");
}
#endif
