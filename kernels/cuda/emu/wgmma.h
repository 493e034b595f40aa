// The CPU half of wgmma.cuh. A product is recorded when it is issued. It runs at the wgmma_wait
// that waits for its group, on the registers of A and the shared memory of B of that moment. Sums
// in flight are NaN, so that an early read gives NaN. The emulator ends the process when
//   - a group does not begin with wgmma_fence
//   - a thread ends, or changes registers of A or D, while products run
//   - warps of a warpgroup issue different products, or one more than another
//   - a descriptor names memory that does not exist, or is no canonical layout with a swizzle
//   - cp_async16 wrote B and the writing thread has not called fence_proxy_async since; ordinary
//     stores are not tracked
// Bulk copies run when a thread waits for their barrier or, with an even seed of the order of
// fibers, when they are issued: a stage that is overwritten too early then gives wrong values. The
// emulator ends the process when
//   - another CTA uses a barrier that was not initialised in this CTA or not published
//   - the phase of a barrier ends and the barrier is used again before a thread has waited
//   - more bytes or arrivals come than a phase expects
//   - a CTA ends before it has waited for everything that comes to it
#pragma once
#include "cuda_cpu.h"

static inline void fence_proxy_async() { emu::current->proxy_fences++; }
static inline void wgmma_fence() { emu::current->wgmma.is_fenced = true; }
static inline void wgmma_commit() { emu::commit_products(); }

static inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    emu::init_barrier(barrier, arrivals);
}
static inline void fence_barrier_init() { emu::publish_barriers(); }
static inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    emu::arrive(barrier, emu::current->cta->rank, bytes);
}
template <uint32_t CTAS>
static inline void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    emu::copy_bulk({to, from, bytes}, barrier, CTAS);
}
static inline void barrier_wait(uint64_t* barrier, uint32_t phase) {
    emu::wait_barrier(barrier, phase);
}
static inline void barrier_arrive(uint64_t* barrier, uint32_t rank) {
    emu::arrive(barrier, rank, 0);
}

// Where shared memory begins is 0.
static inline uint32_t smem_address(const void* p) {
    return (uint32_t)((const unsigned char*)p - emu::current->cta->shared);
}

namespace emu {

// Element [input k, column n] of B.
template <class H> static inline float element_of(const Product& product, uint32_t k, uint32_t n) {
    H h;
    memcpy(&h, current->cta->shared + address_of(product, k, n), 2);
    return element(h);
}

// What a lane does of a product: the sums of rows g and g + 8, two columns of each 8, inputs in
// order as in mma.
template <class H> static inline void carry_out(const Product& product) {
    const Message* all = meet(~0u, "wgmma_wait", product.a, 16);
    const unsigned group = current->lane / 4, pair = current->lane % 4;
    float a[2][16];
    for (unsigned row = 0; row < 2; row++)
        for (unsigned k = 0; k < 16; k++) {
            H h;
            memcpy(
                &h,
                (const char*)all[group * 4 + k % 8 / 2].words + 4 * (row + k / 8 * 2) + k % 2 * 2,
                2);
            a[row][k] = element(h);
        }
    float* d = sums_of(product);
    const unsigned char* shared = current->cta->shared;
    for (unsigned n = 2 * pair; n < product.columns; n += n % 2 ? 7 : 1) {
        float b[16];
        for (unsigned k = 0; k < 16; k++) {
            H h;
            memcpy(&h, shared + address_of(product, k, n), 2);
            b[k] = element(h);
        }
        for (unsigned row = 0; row < 2; row++) {
            float& at = d[n / 8 * 4 + row * 2 + n % 2];
            float sum = product.adds ? at : 0.0f;
            if (current->cta->adds_backwards)
                for (unsigned k = 16; k-- > 0;) sum += a[row][k] * b[k];
            else
                for (unsigned k = 0; k < 16; k++) sum += a[row][k] * b[k];
            at = sum;
        }
    }
}

} // namespace emu

template <int N> static inline void wgmma_wait() {
    auto& groups = emu::current->wgmma.groups;
    while (groups.size() > (size_t)N) {
        const std::vector<emu::Product> products = std::move(groups.front());
        groups.erase(groups.begin());
        for (const auto& product : products) {
            if (product.is_bf16)
                emu::carry_out<__nv_bfloat16>(product);
            else
                emu::carry_out<__half>(product);
            emu::end_product(product);
        }
    }
}
template <int N, int M> static inline void wgmma_wait(float (&)[M]) { wgmma_wait<N>(); }
template <int M> static inline void wgmma_hold(float (&)[M]) {}
template <int N, bool COLUMNS = false>
static inline void wgmma_bf16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add) {
    emu::issue_product(d, a, b, N, COLUMNS, add, true);
}
template <int N, bool COLUMNS = false>
static inline void wgmma_f16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add) {
    emu::issue_product(d, a, b, N, COLUMNS, add, false);
}
