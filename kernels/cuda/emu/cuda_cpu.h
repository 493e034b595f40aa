// CUDA C++ for g++: keywords, built-in variables, vector types, warp and CTA functions, and the CPU
// half of ptx.h. It has only what our kernels use; a kernel that needs more adds it with the same
// signature. fiber.h describes how threads run.
#pragma once
// build.rs also preprocesses each source for the names of its kernels (EMU_SCAN), which needs no
// standard library.
#ifndef EMU_SCAN
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>
#endif

#include "fiber.h"

// build.rs finds kernels in preprocessed text by the mark that __global__ leaves there.
#ifdef EMU_SCAN
#define __global__            emu_global_mark
#define __cluster_dims__(...) emu_cluster_mark(__VA_ARGS__)
#else
#define __global__
#define __cluster_dims__(...)
#endif
#define __device__
#define __host__
// A device needs the whole kernel in one function. Here g++ may choose: forced, it compiles twice
// as long, for the same speed.
#define __forceinline__ inline
#define __noinline__    __attribute__((noinline))
#define __launch_bounds__(...)
#define __constant__ static const
// One CTA at a time runs on an OS thread, but for clusters, whose kernels use dynamic shared memory
// alone. Not filled with NaN before each CTA, as that is.
#define __shared__   static thread_local
#define __align__(n) __attribute__((aligned(n)))
// Exports a constant to Rust (ptx.h); build.rs finds it in preprocessed text by the prefix.
#define EXPORT(NAME, VALUE) static constexpr uint32_t exported_##NAME = (VALUE)
// Declares `name` as the dynamic shared memory, aligned to 1024 bytes.
#define SMEM_DYN(name) unsigned char* name = emu::current->cta->shared

#define threadIdx (emu::current->thread)
#define blockIdx  (emu::current->cta->index)
#define blockDim  (emu::current->cta->size)
#define gridDim   (emu::current->cta->grid)
static const int warpSize = 32;

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) ushort4 {
    unsigned short x, y, z, w;
};
struct alignas(4) uchar4 {
    unsigned char x, y, z, w;
};
struct alignas(4) char4 {
    signed char x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

#include "half.h"

// --- barriers and warp collectives ---------------------------------------------------------------

static inline void __syncthreads(unsigned line = __builtin_LINE()) { emu::barrier(false, line); }
static inline int __syncthreads_or(int vote, unsigned line = __builtin_LINE()) {
    return emu::barrier(vote != 0, line) != 0;
}
static inline int __syncthreads_count(int vote, unsigned line = __builtin_LINE()) {
    return (int)emu::barrier(vote != 0, line);
}
static inline int __syncthreads_and(int vote, unsigned line = __builtin_LINE()) {
    return emu::barrier(vote == 0, line) == 0;
}
static inline void __syncwarp(unsigned mask = ~0u) {
    uint64_t nothing = 0;
    emu::meet(mask, "__syncwarp", &nothing, sizeof nothing);
}
static inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static inline void __threadfence_block() {}

namespace emu {

template <class T>
static inline T from_lane(unsigned mask, T value, unsigned lane, const char* what) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t word = 0;
    memcpy(&word, &value, sizeof value);
    const Message* all = meet(mask, what, &word, sizeof word);
    T result;
    memcpy(&result, all[lane & 31].words, sizeof result);
    return result;
}

} // namespace emu

template <class T> static inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    unsigned lane = emu::current->lane;
    return emu::from_lane(mask, value, (lane & ~(width - 1u)) | ((unsigned)from & (width - 1u)),
                          "__shfl_sync");
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int = 32) {
    return emu::from_lane(mask, value, emu::current->lane ^ (unsigned)bits, "__shfl_xor_sync");
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    unsigned lane = emu::current->lane, place = lane & (width - 1u);
    return emu::from_lane(mask, value, place + by >= (unsigned)width ? lane : lane + by,
                          "__shfl_down_sync");
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    unsigned lane = emu::current->lane, place = lane & (width - 1u);
    return emu::from_lane(mask, value, place < by ? lane : lane - by, "__shfl_up_sync");
}
static inline unsigned __ballot_sync(unsigned mask, int vote) {
    uint64_t word = vote ? 1 : 0;
    const emu::Message* all = emu::meet(mask, "__ballot_sync", &word, sizeof word);
    unsigned lanes = emu::current->cta->warps[emu::current->warp].lanes & mask, result = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        if (lanes >> lane & 1) result |= (unsigned)(all[lane].words[0] & 1) << lane;
    return result;
}
static inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
static inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, !vote) == 0; }

// --- atomics -------------------------------------------------------------------------------------

template <class T> static inline T atomicAdd(T* at, T value) {
    static_assert(std::is_integral<T>::value,
                  "float atomics would make results depend on the order of threads");
    return reinterpret_cast<std::atomic<T>*>(at)->fetch_add(value);
}
template <class T> static inline T atomicExch(T* at, T value) {
    return reinterpret_cast<std::atomic<T>*>(at)->exchange(value);
}
template <class T> static inline T atomicCAS(T* at, T wanted, T value) {
    reinterpret_cast<std::atomic<T>*>(at)->compare_exchange_strong(wanted, value);
    return wanted;
}
template <class T> static inline T atomicMax(T* at, T value) {
    auto* atomic = reinterpret_cast<std::atomic<T>*>(at);
    T old = atomic->load();
    while (old < value && !atomic->compare_exchange_weak(old, value)) {
    }
    return old;
}

// --- arithmetic ----------------------------------------------------------------------------------

template <class T> static inline T __ldg(const T* at) { return *at; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline void sincospif(float x, float* sine, float* cosine) {
    *sine = (float)sin(3.14159265358979323846 * x);
    *cosine = (float)cos(3.14159265358979323846 * x);
}
static inline float emu_expf(float x) { return expf(x); }
#define __expf emu_expf
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __saturatef(float x) { return x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x; }
static inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((uint64_t)a * b >> 32);
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t both = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned byte = (unsigned)(both >> 8 * (selector >> 4 * i & 7)) & 255;
        if (selector >> 4 * i & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
    return c;
}
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

// --- the CPU half of ptx.h -----------------------------------------------------------------------

namespace emu {

static inline void check_aligned(const void* at, unsigned bytes, const char* what) {
    if (reinterpret_cast<uintptr_t>(at) % bytes) die(what);
}

} // namespace emu

static inline void cp_async16(void* to, const void* from, bool valid = true) {
    emu::check_aligned(to, 16, "cp_async16 to a misaligned address");
    emu::check_aligned(from, 16, "cp_async16 from a misaligned address");
    if (emu::current->cta->is_rehearsal) {
        if (valid)
            memcpy(to, from, 16);
        else
            memset(to, 0, 16);
        return;
    }
    emu::current->open.push_back({to, from, 16, valid ? 16u : 0u});
}
static inline void cp_commit() {
    if (emu::current->cta->is_rehearsal) return;
    emu::current->groups.push_back(std::move(emu::current->open));
    emu::current->open.clear();
}
template <int N> static inline void cp_wait() {
    auto& groups = emu::current->groups;
    while (groups.size() > (size_t)N) {
        for (auto& copy : groups.front()) {
            if (copy.valid) memcpy(copy.to, copy.from, copy.valid);
            if (copy.valid < copy.bytes)
                memset((char*)copy.to + copy.valid, 0, copy.bytes - copy.valid);
            emu::note_copy(copy.to);
        }
        groups.erase(groups.begin());
    }
}

namespace emu {

// Row `l` of matrix `i` lies where lane 8 i + l says; each lane gets two neighbours of row lane / 4
// of every matrix.
static inline void load_matrices(uint32_t* result, int count, const void* row, bool transposed,
                                 const char* what) {
    check_aligned(row, 16, "ldmatrix of a misaligned row");
    uint64_t address = (uint64_t)row;
    const Message* all = meet(~0u, what, &address, sizeof address);
    unsigned lane = current->lane;
    for (int i = 0; i < count; i++) {
        auto at = [&](unsigned r, unsigned c) {
            uint16_t value;
            memcpy(&value, (const char*)all[8 * i + r].words[0] + 2 * c, 2);
            return (uint32_t)value;
        };
        unsigned r = lane / 4, c = 2 * (lane % 4);
        result[i] = transposed ? at(c, r) | at(c + 1, r) << 16 : at(r, c) | at(r, c + 1) << 16;
    }
}

static inline float element(const __half& h) { return __half2float(h); }
static inline float element(const __nv_bfloat16& h) { return __bfloat162float(h); }

// D[16, 8] += A[16, 16] B[16, 8] with the fragments of PTX ISA, mma.m16n8k16.
template <class H>
static inline void multiply_16_8_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    const char* what) {
    uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const Message* all = meet(~0u, what, own, sizeof own);
    unsigned lane = current->lane, group = lane / 4, pair = lane % 4;
    // Element `k` of a row of A or a column of B: lanes 4 of .. 4 of + 3 hold it from `word` on.
    auto at = [&](unsigned of, int word, unsigned k) {
        H h;
        memcpy(&h, (const char*)all[4 * of + k % 8 / 2].words + 4 * word + k % 2 * 2, 2);
        return element(h);
    };
    float x[2][16], y[2][16];
    for (unsigned i = 0; i < 2; i++)
        for (unsigned k = 0; k < 16; k++) {
            x[i][k] = at(group, (int)(i + 2 * (k / 8)), k);
            y[i][k] = at(2 * pair + i, (int)(4 + k / 8), k);
        }
    for (unsigned k = 0; k < 16; k++)
        for (unsigned i = 0; i < 4; i++) d[i] += x[i / 2][k] * y[i & 1][k];
}

} // namespace emu

static inline void ldsm4(uint32_t (&r)[4], const void* row) {
    emu::load_matrices(r, 4, row, false, "ldsm4");
}
static inline void ldsm4_t(uint32_t (&r)[4], const void* row) {
    emu::load_matrices(r, 4, row, true, "ldsm4_t");
}
static inline void ldsm2(uint32_t (&r)[2], const void* row) {
    emu::load_matrices(r, 2, row, false, "ldsm2");
}
static inline void ldsm2_t(uint32_t (&r)[2], const void* row) {
    emu::load_matrices(r, 2, row, true, "ldsm2_t");
}
static inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emu::multiply_16_8_16<__nv_bfloat16>(d, a, b0, b1, "mma_bf16");
}
static inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emu::multiply_16_8_16<__half>(d, a, b0, b1, "mma_f16");
}
static inline uint4 ld_stream16(const void* at) {
    emu::check_aligned(at, 16, "ld_stream16 from a misaligned address");
    uint4 value;
    memcpy(&value, at, 16);
    return value;
}
static inline uint4 ld_once16(const void* at) {
    emu::check_aligned(at, 16, "ld_once16 from a misaligned address");
    uint4 value;
    memcpy(&value, at, 16);
    return value;
}
static inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    return __byte_perm(a, b, selector);
}

static inline void pdl_wait() { emu::wait_for_earlier_launches(); }
static inline void pdl_launch() {}

// Words that other devices read and write: other processes, or other threads of this one.
static inline void st_release_sys(uint64_t* at, uint64_t value) {
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
static inline uint64_t ld_acquire_sys(const uint64_t* at) {
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
static inline void st_relaxed_sys(uint64_t* at, uint64_t value) {
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
}
static inline uint64_t ld_relaxed_sys(const uint64_t* at) {
    return __atomic_load_n(at, __ATOMIC_RELAXED);
}
static inline float4 ld_peer16(const float4* at) {
    emu::check_aligned(at, 16, "ld_peer16 from a misaligned address");
    return *at;
}
static inline uint64_t nanoseconds() { return emu::nanoseconds(); }
static inline void pause_between_looks(uint32_t looks) {
    if (emu::current->lane == 0) emu::let_others_run(looks);
}

// --- the table of kernels of a file --------------------------------------------------------------

namespace emu {

template <auto F> struct Thunk;
template <class... A, void (*F)(A...)> struct Thunk<F> {
    static constexpr unsigned count = sizeof...(A);
    static constexpr unsigned sizes[count + 1] = {sizeof(A)..., 0};
    template <size_t... I> static void run(void** params, std::index_sequence<I...>) {
        F(*reinterpret_cast<std::remove_const_t<A>*>(params[I])...);
    }
    static void call(void** params) { run(params, std::index_sequence_for<A...>{}); }
};

} // namespace emu

#define EMU_KERNEL(name, ...)                                                                      \
    {                                                                                              \
        #name, emu::Thunk<name>::call, emu::Thunk<name>::sizes, emu::Thunk<name>::count, {         \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }
