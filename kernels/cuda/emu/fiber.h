// How CUDA threads run on the CPU: every CUDA thread is a fiber with a stack of its own, all fibers of a CTA run on one OS
// thread, and CTAs are spread over OS threads. A fiber runs until it meets others: at a barrier of its CTA, or at a
// collective of its warp (shuffle, ballot, ldmatrix, mma), where each lane leaves a message and reads those of the others.
//
// What the emulator does that a device does not: it ends the process with the kernel, CTA and thread when lanes of a warp
// meet in different collectives, when a barrier can never be complete, when threads of a CTA stand at barriers of
// different source lines, and when an address is misaligned; it fills dynamic shared memory with NaN before each CTA; and it
// carries out asynchronous copies as late as it may, so that a missing wait is a wrong result.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <vector>

#if defined(__SANITIZE_THREAD__) || defined(EMU_TSAN)
#undef EMU_TSAN
#define EMU_TSAN 1
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

struct Cta;

// cp.async that has been issued: `valid` bytes come from `from`, the rest of `bytes` is zero.
struct AsyncCopy {
    void* to;
    const void* from;
    unsigned bytes, valid;
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

// A meeting of the lanes of one mask. Two tables, so that the next meeting may begin while slow lanes still read the last.
struct Meeting {
    unsigned mask = 0, generation = 0, arrived = 0;
    const char* what = nullptr;
    Message messages[2][32];
};

struct Warp {
    Meeting meetings[4];
    unsigned lanes = 0, exited = 0;
};

// One CTA while it runs, and the fibers of those that run after it on this OS thread.
struct Cta {
    dim3 grid, size;
    uint3 index{};
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    // The barrier: how often it was passed, who waits there, from which line, and the votes of __syncthreads_or/_and/_count.
    unsigned generation = 0, arrived = 0, live = 0, line = 0, votes = 0, result = 0;
    unsigned char* shared = nullptr;
    size_t shared_bytes = 0;
    Fiber host;
    Fiber* before = nullptr;
    void (*body)(void**) = nullptr;
    void** params = nullptr;
    const char* kernel = "";
    // 1: fibers run in order; otherwise the seed of their order.
    uint64_t order = 1;
};

// The fiber that runs on this OS thread.
extern thread_local Fiber* current;

// Ends the process: kernel, CTA, thread, `why`, and where others wait.
[[noreturn]] void die(const char* why);

// Leaves `words` (of `bytes` bytes) for the lanes of `mask`, waits for them, returns what all left, by lane.
const Message* meet(unsigned mask, const char* what, const void* words, size_t bytes);

// Waits for the threads of the CTA; returns how many voted.
unsigned barrier(bool vote, unsigned line);

// A kernel in the table of its file.
struct Kernel {
    const char* name;
    void (*call)(void** params);
    const unsigned* sizes;
    unsigned count;
};

// Kernels of one .cu file.
struct Table {
    const Kernel* kernels;
    unsigned count;
};

} // namespace emu
