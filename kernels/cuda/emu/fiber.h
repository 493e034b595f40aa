// How CUDA threads run on the CPU. Every CUDA thread is a fiber with its own stack. All fibers of a
// CTA run on one OS thread; CTAs are spread over OS threads, those of a cluster together. A fiber
// runs until it meets others: at a barrier, or at a collective of its warp (shuffle, ballot,
// ldmatrix, mma), where each lane leaves a message and reads those of the others. A CTA of a
// cluster runs until it waits for another one (in a random order, it is sometimes interrupted
// earlier), so that CTAs drift as far apart as they may.
//
// The emulator checks more than a device does. It ends the process with kernel, CTA and thread when
//   - lanes of a warp meet in different collectives
//   - a barrier can never complete
//   - threads of a CTA wait at barriers of different source lines
//   - an address is misaligned
// A launch that may start early (pdl_wait in pdl.cuh) is refused when one of its threads ends
// without pdl_wait, or when its first CTA is in another state at pdl_wait than it would have been
// before the earlier launches ran: then it has read what they wrote. sepal_emu_rehearse runs that
// CTA to this point and gives its state: stacks and shared memory. It fills dynamic shared memory
// with NaN before each CTA. It performs asynchronous copies and products of warpgroups (wgmma.h) as
// late as it may, so that a missing wait gives a wrong result.
#pragma once
#ifndef EMU_SCAN
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <deque>
#include <vector>
#endif

#if defined(__SANITIZE_THREAD__) || defined(EMU_TSAN)
#undef EMU_TSAN
#define EMU_TSAN    1
#define EMU_NO_TSAN __attribute__((no_sanitize("thread")))
#else
#define EMU_NO_TSAN
#endif
#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#endif

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

namespace emu {

// Bytes of the stack of a fiber; mapped when touched.
constexpr size_t STACK_BYTES = 128 * 1024;
// What a device allows a CTA.
constexpr unsigned MAX_THREADS = 1024;
constexpr size_t MAX_SHARED_BYTES = 227 * 1024;
// CTAs of a cluster, where nothing more is asked for.
constexpr unsigned MAX_CLUSTER = 8;

struct Cta;
struct Cluster;

// cp.async that has been issued: `valid` bytes come from `from`, the rest of `bytes` is zero.
struct AsyncCopy {
    void* to;
    const void* from;
    unsigned bytes, valid;
};

// wgmma that has been issued: registers of this thread, and the descriptor of B, whose addresses
// begin at 0 with shared memory.
struct Product {
    float* d;
    const uint32_t* a;
    uint32_t a_then[4]; // what A was
    uint64_t b;
    unsigned columns;
    bool is_columns, adds, is_bf16;
};

// Sums in flight; what the kernel has in their place is NaN.
struct Sums {
    float* at;
    unsigned count, products;
    float values[64];
};

// What a thread has to do with products of its warpgroup.
struct Products {
    std::vector<Product> open;
    std::vector<std::vector<Product>> groups;
    std::vector<Sums> sums;
    bool is_fenced = false;
    unsigned issued = 0;
};

// One CUDA thread.
struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    Cta* cta = nullptr;
    uint3 thread{};
    unsigned lane = 0, warp = 0;
    bool finished = false;
    // Sleeps while *counter == value; null: ready.
    const unsigned* counter = nullptr;
    unsigned value = 0;
    const char* where = "";
    std::vector<AsyncCopy> open;
    std::vector<std::vector<AsyncCopy>> groups;
    Products wgmma;
    unsigned proxy_fences = 0;
    // Whether it has called pdl_wait.
    bool has_waited = false;
    // Whether it has arrived at the barrier of the cluster and not waited, and how often that had
    // been passed.
    bool is_between = false;
    unsigned cluster_generation = 0;
#ifdef EMU_TSAN
    void* tsan = nullptr;
#endif
#ifdef EMU_ASAN
    void* fake_stack = nullptr;
    const void* stack_bottom = nullptr;
    size_t stack_bytes = 0;
#endif
};

// What one lane tells the others in a collective.
struct Message {
    uint64_t words[4];
};

// A meeting of the lanes of one mask. Two tables, so that the next meeting may begin while slow
// lanes still read the last.
struct Meeting {
    unsigned mask = 0, generation = 0, arrived = 0;
    const char* what = nullptr;
    Message messages[2][32];
};

struct Warp {
    Meeting meetings[4];
    unsigned lanes = 0, exited = 0;
};

// Who copied 16 bytes to shared memory last (thread + 1, 0: nobody), and its fences of the proxy by
// then.
struct Writer {
    unsigned thread, fences;
};

// A barrier of shared memory (mbarrier). Its phase ends when `arrivals` were made, and the bytes
// that are expected have been copied.
struct BulkCopy {
    void* to;
    const void* from;
    unsigned bytes;
};
struct BulkBarrier {
    const void* at = nullptr;
    unsigned arrivals = 0;
    // Whether fence_barrier_init was called since it was made.
    bool is_known = false;
    // Of this phase.
    unsigned arrived = 0, expected = 0, copied = 0;
    // Phases that have ended, and those of them that somebody has waited for.
    unsigned ended = 0, seen = 0;
    // Wakes those who wait.
    unsigned changes = 0;
    // What has been asked for and not been carried out. No vector: the thread sanitizer sees how
    // one grows, and would take it for what the kernel does.
    BulkCopy copies[16];
    unsigned asked = 0;
};

// CTAs that run together on one OS thread: one, or those of a cluster.
struct Cluster {
    std::vector<Cta*> ctas; // by rank
    // What runs before their first fiber and after the last, and the fiber that ran before this
    // one.
    Fiber host;
    Fiber* before = nullptr;
    // The barrier of the cluster: how often it was passed, who has arrived, who runs.
    unsigned generation = 0, arrived = 0, live = 0;
    // 1: fibers run in order; otherwise the seed of their order.
    uint64_t order = 1;
    // Whether copies of the copy engine are carried out as soon as they are asked for, not as late
    // as may be.
    bool is_early = false;
};

// One CTA while it runs, and the fibers of those that run after it on this OS thread.
struct Cta {
    Cluster* cluster = nullptr;
    unsigned rank = 0;
    dim3 grid, size;
    uint3 index{};
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    // The barrier: how often it was passed, who waits there, from which line, and the votes of
    // __syncthreads_or/_and/_count.
    unsigned generation = 0, arrived = 0, live = 0, line = 0, votes = 0, result = 0;
    unsigned char* shared = nullptr;
    size_t shared_bytes = 0;
    std::vector<Writer> writers;
    // What each warpgroup has issued.
    std::vector<std::vector<Product>> warpgroups;
    std::deque<BulkBarrier> barriers;
    void (*body)(void**) = nullptr;
    void** params = nullptr;
    const char* kernel = "";
    // Whether warpgroups add the 16 products of a step from the last to the first: a device on
    // which they round otherwise than warps.
    bool adds_backwards = false;
    // Whether it runs to pdl_wait only, and whether a thread has ended without calling it.
    bool is_rehearsal = false, has_not_waited = false;
};

// The fiber that runs on this OS thread.
extern __thread Fiber* current;

// Ends the process: kernel, CTA, thread, `why`, and where others wait.
[[noreturn]] void die(const char* why);

// Leaves `words` (of `bytes` bytes) for the lanes of `mask`, waits for them, returns what all left,
// by lane.
const Message* meet(unsigned mask, const char* what, const void* words, size_t bytes);

// Waits for the threads of the CTA; returns how many voted.
unsigned barrier(bool vote, unsigned line);

// pdl_wait.
void wait_for_earlier_launches();

// Lets other threads and processes have this core before a thread looks again at a flag of another
// device: the more it has looked, the longer.
void let_others_run(unsigned looks);
uint64_t nanoseconds();

// Notes that this thread has copied 16 bytes to `to`.
void note_copy(const void* to);

// wgmma.h.
void issue_product(float* d, const uint32_t* a, uint64_t b, unsigned columns, bool is_columns,
                   bool adds, bool is_bf16);
void commit_products();
float* sums_of(const Product& product);
void end_product(const Product& product);

void init_barrier(const void* at, unsigned arrivals);
void publish_barriers();
// One arrival at the barrier in CTA `rank` of the cluster, which then expects `bytes` more.
void arrive(const void* at, unsigned rank, unsigned bytes);
// To the same places in CTAs 0 .. `ctas` - 1 of the cluster.
void copy_bulk(const BulkCopy& copy, const void* at, unsigned ctas);
void wait_barrier(const void* at, unsigned phase);
// The place in CTA `rank` of the cluster, which runs, that `at` is in this one.
void* in_cluster(unsigned rank, const void* at);
void cluster_arrive();
void cluster_wait();

// Bytes of a row of a tile of B, by the swizzle that bits 62 and 63 of the descriptor name: 128, 64
// or 32; 0 for a descriptor without a swizzle.
static inline uint32_t row_bytes_of(const Product& product) {
    const uint32_t swizzle = (uint32_t)(product.b >> 62);
    return swizzle ? 256u >> swizzle : 0;
}

// Offset in shared memory of element [k, n] of B: the canonical layouts of PTX ISA 9.7.15.5.1, then
// the swizzle on the bits of the address.
static inline uint32_t address_of(const Product& product, uint32_t k, uint32_t n) {
    const uint32_t start = (uint32_t)(product.b & 0x3fff) << 4,
                   leading = (uint32_t)(product.b >> 16 & 0x3fff) << 4,
                   stride = (uint32_t)(product.b >> 32 & 0x3fff) << 4;
    const uint32_t row = row_bytes_of(product), width = row / 2;
    const uint32_t at = product.is_columns ? start + n % width * 2 + n / width * leading +
                                                 k % 8 * row + k / 8 * stride
                                           : start + n % 8 * row + n / 8 * stride + k * 2;
    return at ^ (at >> 7 & (row / 16 - 1)) << 4;
}

// A kernel in the table of its file.
struct Kernel {
    const char* name;
    void (*call)(void** params);
    const unsigned* sizes;
    unsigned count;
    unsigned cluster[3]; // __cluster_dims__
};

// Kernels of one .cu file.
// A constant that a .cu file exports to Rust.
struct Export {
    const char* name;
    uint32_t value;
};
struct Table {
    const char* source;
    const Kernel* kernels;
    unsigned count;
    const Export* exports;
    unsigned export_count;
};

} // namespace emu

// The state of the first CTA of a launch at pdl_wait if it ran now; 0: not known.
extern "C" uint64_t sepal_emu_rehearse(const char* name, const unsigned* grid, const unsigned* cta,
                                       unsigned shared_bytes, void** params, const unsigned* sizes,
                                       unsigned count);

// Runs a kernel by its name; 0, or why it was refused. Defined in emulator.cpp, called from Rust
// and by driver.cpp. `early`: of a launch that may start early, the state that sepal_emu_rehearse
// gave before the earlier launches, or 0; null for any other launch.
extern "C" int sepal_emu_launch(const char* name, const unsigned* grid, const unsigned* cta,
                                unsigned shared_bytes, void** params, const unsigned* sizes,
                                unsigned count, unsigned threads, uint64_t order,
                                bool adds_backwards, const uint64_t* early);
