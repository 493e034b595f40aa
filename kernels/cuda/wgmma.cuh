// Products of a warpgroup (wgmma), which only sm_90a has, once as inline PTX and once, in
// emu/wgmma.h, as plain C++. A file that includes this one is compiled for sm_90a only and says so
// in its head, in a line "// Architectures: 90a" (kernels/prebuilt/build.py).
// Source: NVIDIA, "PTX ISA", chapter 9.7.15; layouts of shared memory as in CUTLASS,
// mma_traits_sm90_gmma.hpp.
//
// Four warps, the first a multiple of 4, issue D[64, N] (+)= A[64, 16] B[16, N] together; the
// product runs asynchronously. Warp w has rows 16 w .. 16 w + 15 of A and D: A as in mma.m16n8k16,
// D as its sums, where d[4 j + i] is sum i of columns 8 j .. 8 j + 7. In order:
//   wgmma_fence()     after writes to registers of A or D, once before the products of a group
//   wgmma_...()       products; those of one D are summed in the order of issue
//   wgmma_commit()    ends the group
//   wgmma_wait<N>(D)  waits until at most the N last groups run
// Before the wait neither D nor A may be touched, nor B overwritten. D names the sums that are read
// next: nothing else tells the compiler to read them after the wait.
// The async proxy reads B: its writer calls fence_proxy_async() after the write (after cp_wait for
// cp_async16), then all threads meet at a barrier.
#pragma once
#include "cluster.cuh"
#include "pairs.cuh"

#ifdef CUDA_CPU
#include "emu/wgmma.h"
#else
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// Without sums, for callers that only overwrite A or B.
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}
template <int N, int M> __device__ __forceinline__ void wgmma_wait(float (&d)[M]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
#pragma unroll
    for (int i = 0; i < M; i++) asm volatile("" : "+f"(d[i])::"memory");
}
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Marks sums as read after a wait that named other sums.
template <int M> __device__ __forceinline__ void wgmma_hold(float (&d)[M]) {
#pragma unroll
    for (int i = 0; i < M; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Bulk copies run on the copy engine, which writes through the proxy that tensor cores read: no
// fence is needed in between. One thread, after the barrier was initialised and published, calls
// barrier_expect with the number of bytes, then copy_bulk for as many. Any thread calls
// barrier_wait for the 1st, 2nd, 3rd ... time with `phase` 0, 1, 0 ... Addresses and bytes are
// multiples of 16. A phase ends when as many threads have arrived as the barrier was initialised
// for (barrier_expect is one) and all bytes have arrived. Before the end of the first phase, a wait
// with phase 1 returns at once.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(smem_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}
// Publishes barriers to the copy engine and to the cluster.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(smem_address(barrier)),
        "r"(bytes)
        : "memory");
}
// To CTAs 0 .. CTAS - 1 of the cluster (below) at once, and the bytes to the barrier of each of
// them. They may be there before they are expected, but not before the phase that expects them has
// begun.
template <uint32_t CTAS>
__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes,
                                          uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;\n" ::"r"(smem_address(to)),
        "l"(from), "r"(bytes), "r"(smem_address(barrier)), "h"((uint16_t)((1 << CTAS) - 1))
        : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t phase) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}\n" ::"r"(smem_address(barrier)),
        "r"(phase)
        : "memory");
}

// One arrival at this barrier in CTA `rank` of the cluster, which may be this one.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, uint32_t rank) {
    asm volatile(
        "{.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];}\n" ::"r"(smem_address(barrier)),
        "r"(rank)
        : "memory");
}

// Operands of the instruction for each N: the sums, and the positions of A, B and "add to D" in the
// list.
#define WGMMA_D0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_D1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_D2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_D3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_D4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_D5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_D6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_D7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_OUT(i)                                                                               \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_LIST64 WGMMA_D0 "," WGMMA_D1 "," WGMMA_D2 "," WGMMA_D3
#define WGMMA_OUT64  WGMMA_OUT(0), WGMMA_OUT(8), WGMMA_OUT(16), WGMMA_OUT(24)
#define WGMMA_IN64   "{%32,%33,%34,%35}, %36, p, 1, 1, %38;"
#define WGMMA_IF64   "%37"
#define WGMMA_LIST80 WGMMA_D0 "," WGMMA_D1 "," WGMMA_D2 "," WGMMA_D3 "," WGMMA_D4
#define WGMMA_OUT80  WGMMA_OUT(0), WGMMA_OUT(8), WGMMA_OUT(16), WGMMA_OUT(24), WGMMA_OUT(32)
#define WGMMA_IN80   "{%40,%41,%42,%43}, %44, p, 1, 1, %46;"
#define WGMMA_IF80   "%45"
#define WGMMA_LIST96 WGMMA_D0 "," WGMMA_D1 "," WGMMA_D2 "," WGMMA_D3 "," WGMMA_D4 "," WGMMA_D5
#define WGMMA_OUT96                                                                                \
    WGMMA_OUT(0), WGMMA_OUT(8), WGMMA_OUT(16), WGMMA_OUT(24), WGMMA_OUT(32), WGMMA_OUT(40)
#define WGMMA_IN96 "{%48,%49,%50,%51}, %52, p, 1, 1, %54;"
#define WGMMA_IF96 "%53"
#define WGMMA_LIST112                                                                              \
    WGMMA_D0 "," WGMMA_D1 "," WGMMA_D2 "," WGMMA_D3 "," WGMMA_D4 "," WGMMA_D5 "," WGMMA_D6
#define WGMMA_OUT112                                                                               \
    WGMMA_OUT(0), WGMMA_OUT(8), WGMMA_OUT(16), WGMMA_OUT(24), WGMMA_OUT(32), WGMMA_OUT(40),        \
        WGMMA_OUT(48)
#define WGMMA_IN112 "{%56,%57,%58,%59}, %60, p, 1, 1, %62;"
#define WGMMA_IF112 "%61"
#define WGMMA_LIST128                                                                              \
    WGMMA_D0 "," WGMMA_D1 "," WGMMA_D2 "," WGMMA_D3 "," WGMMA_D4 "," WGMMA_D5 "," WGMMA_D6         \
             "," WGMMA_D7
#define WGMMA_OUT128                                                                               \
    WGMMA_OUT(0), WGMMA_OUT(8), WGMMA_OUT(16), WGMMA_OUT(24), WGMMA_OUT(32), WGMMA_OUT(40),        \
        WGMMA_OUT(48), WGMMA_OUT(56)
#define WGMMA_IN128 "{%64,%65,%66,%67}, %68, p, 1, 1, %70;"
#define WGMMA_IF128 "%69"
#define WGMMA(N, TYPE)                                                                             \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " WGMMA_IF##N                                      \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                   \
                 " {" WGMMA_LIST##N "}, " WGMMA_IN##N "}\n"                                        \
                 : WGMMA_OUT##N                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add),              \
                   "n"(COLUMNS ? 1 : 0))
#define WGMMA_SIZES(TYPE)                                                                          \
    static_assert(N == 64 || N == 80 || N == 96 || N == 112 || N == 128, "no such product");       \
    if constexpr (N == 64) WGMMA(64, TYPE);                                                        \
    if constexpr (N == 80) WGMMA(80, TYPE);                                                        \
    if constexpr (N == 96) WGMMA(96, TYPE);                                                        \
    if constexpr (N == 112) WGMMA(112, TYPE);                                                      \
    if constexpr (N == 128) WGMMA(128, TYPE)

// D (+)= A B of bf16, summed in f32. Without `add`, D begins at zero. COLUMNS: wgmma_columns
// describes B, otherwise wgmma_rows.
template <int N, bool COLUMNS = false>
__device__ __forceinline__ void wgmma_bf16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                           bool add) {
    WGMMA_SIZES("bf16");
}
// The same for f16.
template <int N, bool COLUMNS = false>
__device__ __forceinline__ void wgmma_f16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                          bool add) {
    WGMMA_SIZES("f16");
}
#endif

// Descriptors of B with a swizzle: rows of BYTES (128, 64 or 32) follow each other, and the number
// of a piece of 16 bytes in its row is XORed with the bits of the address from bit 7 on. `tile` is
// shared memory at a multiple of 1024. The writer of B stores piece p of row r at
// wgmma_piece<BYTES>(r, p). Descriptors count units of 16 bytes: + 64 is 1,024 bytes further.
// Source: PTX ISA 9.7.15.5.1, canonical layouts.
template <uint32_t BYTES = 128>
__device__ __forceinline__ uint32_t wgmma_piece(uint32_t row, uint32_t piece) {
    return row * BYTES + (piece ^ row / (128 / BYTES) % (BYTES / 16)) * 16;
}

// Inputs are contiguous ("K-major", as in mma.sync): row n of 128 bytes holds 64 inputs of column
// n, and rows follow each other. The next 16 of the 64 inputs: + 2; the next 8 columns: + 64.
__device__ __forceinline__ uint64_t wgmma_rows(const void* tile) {
    return (uint64_t)(smem_address(tile) >> 4 & 0x3fff) | (uint64_t)1 << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
// Bytes of a row of contiguous columns, of a product of N: a canonical layout has whole rows. So 64
// and 128 columns take the swizzle of 128 bytes, 96 that of 64, 80 and 112 that of 32.
template <int N> constexpr uint32_t WGMMA_ROW = N % 64 == 0 ? 128 : N % 32 == 0 ? 64 : 32;

// Columns are contiguous ("MN-major"): row k of WGMMA_ROW<N> bytes holds columns of input k, and
// rows follow each other. Columns that do not fit into a row begin `next` bytes further (a multiple
// of 1024). The next 16 inputs: + WGMMA_ROW<N>. For products with COLUMNS.
template <int N>
__device__ __forceinline__ uint64_t wgmma_columns(const void* tile, uint32_t next) {
    constexpr uint64_t SWIZZLE = WGMMA_ROW<N> == 128 ? 1 : WGMMA_ROW<N> == 64 ? 2 : 3;
    return (uint64_t)(smem_address(tile) >> 4 & 0x3fff) | (uint64_t)(next >> 4) << 16 |
           (uint64_t)(8 * WGMMA_ROW<N> >> 4) << 32 | SWIZZLE << 62;
}

// bf16 or f16.
template <class T> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<bf16> = true;
template <class T, int N, bool COLUMNS = false>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                      bool add) {
    if constexpr (IS_BF16<T>)
        wgmma_bf16<N, COLUMNS>(d, a, b, add);
    else
        wgmma_f16<N, COLUMNS>(d, a, b, add);
}
