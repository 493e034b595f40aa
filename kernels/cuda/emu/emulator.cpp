// The scheduler of fibers and the entry point for Rust, which has the shape of cuLaunchKernel.
// fiber.h describes the rules.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "fiber.h"

#ifdef EMU_TSAN
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#define EMU_RELEASE(at) __tsan_release(at)
#define EMU_ACQUIRE(at) __tsan_acquire(at)
#else
#define EMU_RELEASE(at) (void)0
#define EMU_ACQUIRE(at) (void)0
#endif
#ifdef EMU_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void**, const void*, size_t);
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
}
#endif

namespace emu {

__thread Fiber* current;

void die(const char* why) {
    Fiber* f = current;
    Cta* cta = f->cta;
    fprintf(stderr, "cuda emulator: %s\n  kernel %s, CTA %u,%u,%u, thread %u,%u,%u\n", why,
            cta->kernel, cta->index.x, cta->index.y, cta->index.z, f->thread.x, f->thread.y,
            f->thread.z);
    for (Cta* any : cta->cluster->ctas) {
        int shown = 0;
        for (auto& other : any->fibers)
            if (!other.finished && other.counter && shown++ < 4)
                fprintf(stderr, "  thread %u of CTA %u,%u,%u waits in %s\n", other.thread.x,
                        any->index.x, any->index.y, any->index.z, other.where);
    }
    abort();
}

#if defined(__x86_64__)
// Saves the registers that a callee keeps, and the stack pointer, and takes those of another fiber.
__attribute__((naked, noinline)) static void switch_stacks(void**, void*) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n\t"
        "movq %rsp, (%rdi); movq %rsi, %rsp\n\t"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}
#else
#error "the emulator switches stacks on x86-64 only"
#endif

EMU_NO_TSAN static void go(Fiber* from, Fiber* to) {
    if (from == to) return;
    from->cta->cluster->before = from;
    current = to;
#ifdef EMU_TSAN
    __tsan_switch_to_fiber(to->tsan, 1 /* no synchronisation */);
#endif
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(from->finished ? nullptr : &from->fake_stack, to->stack_bottom,
                                   to->stack_bytes);
#endif
    switch_stacks(&from->stack_pointer, to->stack_pointer);
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

EMU_NO_TSAN static bool is_ready(const Fiber& f) {
    return !f.finished && (!f.counter || *f.counter != f.value);
}

EMU_NO_TSAN static uint64_t random_of(Cluster* cluster) {
    cluster->order ^= cluster->order << 13;
    cluster->order ^= cluster->order >> 7;
    cluster->order ^= cluster->order << 17;
    return cluster->order;
}

// The next fiber that may run after `from`, or null: one of the same CTA if there is any.
EMU_NO_TSAN static Fiber* pick(Fiber* from) {
    Cluster* cluster = from->cta->cluster;
    unsigned rank = from->cta->rank, ctas = (unsigned)cluster->ctas.size(),
             count = (unsigned)from->cta->fibers.size();
    unsigned start = from == &cluster->host ? 0 : (unsigned)(from - from->cta->fibers.data()) + 1;
    if (start == count) start = 0;
    if (cluster->order != 1) {
        start = (unsigned)(random_of(cluster) % count);
        if (ctas > 1 && random_of(cluster) % 1024 == 0)
            rank = (unsigned)(random_of(cluster) % ctas);
    }
    for (unsigned c = 0; c < ctas; c++) {
        Fiber* fibers = cluster->ctas[rank]->fibers.data();
        for (unsigned k = start; k < count; k++)
            if (is_ready(fibers[k])) return &fibers[k];
        for (unsigned k = 0; k < start; k++)
            if (is_ready(fibers[k])) return &fibers[k];
        rank = rank + 1 == ctas ? 0 : rank + 1;
    }
    return nullptr;
}

EMU_NO_TSAN static void wait(Fiber* me, const unsigned* counter, unsigned value,
                             const char* where) {
    me->counter = counter;
    me->value = value;
    me->where = where;
    if (*counter == value) {
        Fiber* next = pick(me);
        // The others are at pdl_wait: that is the end of a rehearsal.
        if (!next && me->cta->is_rehearsal) next = &me->cta->cluster->host;
        if (!next) die("deadlock: a barrier in divergent code, or lanes missing from a mask");
        go(me, next);
    }
    me->counter = nullptr;
}

// The meeting of exactly these lanes, a free one if they have none yet.
EMU_NO_TSAN static Meeting* find_meeting(Warp& warp, unsigned lanes) {
    for (auto& meeting : warp.meetings)
        if (meeting.mask == lanes) return &meeting;
    for (auto& meeting : warp.meetings)
        if (!meeting.arrived) {
            meeting.mask = lanes;
            return &meeting;
        }
    die("too many masks of one warp at once");
}

EMU_NO_TSAN const Message* meet(unsigned mask, const char* what, const void* words, size_t bytes) {
    Fiber* me = current;
    Warp& warp = me->cta->warps[me->warp];
    if (!(mask >> me->lane & 1)) die("a lane is not in the mask that it names");
    if (mask & warp.exited) die("a mask names a lane that has exited");
    unsigned lanes = mask & warp.lanes;
    Meeting* meeting = find_meeting(warp, lanes);
    if (meeting->arrived && meeting->what != what && strcmp(meeting->what, what))
        die("lanes of one warp meet in different collectives");
    meeting->what = what;
    unsigned generation = meeting->generation;
    uint64_t* message = meeting->messages[generation & 1][me->lane].words;
    // Shuffles are most of all.
    if (bytes == 4)
        memcpy(message, words, 4);
    else
        memcpy(message, words, bytes);
    EMU_RELEASE(meeting);
    if (++meeting->arrived == (unsigned)__builtin_popcount(lanes)) {
        meeting->arrived = 0;
        meeting->generation = generation + 1;
    } else {
        wait(me, &meeting->generation, generation, what);
    }
    EMU_ACQUIRE(meeting);
    return meeting->messages[generation & 1];
}

EMU_NO_TSAN static void pass_barrier(Cta* cta) {
    cta->arrived = 0;
    cta->result = cta->votes;
    cta->votes = 0;
    cta->generation++;
}

EMU_NO_TSAN unsigned barrier(bool vote, unsigned line) {
    Fiber* me = current;
    Cta* cta = me->cta;
    if (cta->arrived && cta->line != line)
        die("threads of one CTA stand at barriers of different lines");
    cta->line = line;
    cta->votes += vote;
    EMU_RELEASE(cta);
    unsigned generation = cta->generation;
    if (++cta->arrived == cta->live)
        pass_barrier(cta);
    else
        wait(me, &cta->generation, generation, "__syncthreads");
    EMU_ACQUIRE(cta);
    return cta->result;
}

EMU_NO_TSAN void wait_for_earlier_launches() {
    static const unsigned never = 0;
    current->has_waited = true;
    if (current->cta->is_rehearsal) wait(current, &never, 0, "pdl_wait");
}

// --- flags of other devices ----------------------------------------------------------------------

void let_others_run(unsigned looks) {
    if (looks <= 16) {
        std::this_thread::yield();
    } else {
        unsigned microseconds = std::min(10 * (looks - 16), 200u);
        std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    }
}

uint64_t nanoseconds() {
    return (uint64_t)std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

EMU_NO_TSAN void note_copy(const void* to) {
    Cta* cta = current->cta;
    size_t at = (size_t)((const unsigned char*)to - cta->shared) / 16;
    if (at < cta->writers.size())
        cta->writers[at] = {(unsigned)(current - cta->fibers.data()) + 1, current->proxy_fences};
}

// --- products of warpgroups (wgmma.h) ------------------------------------------------------------

static const uint32_t IN_FLIGHT = 0xffc0dead; // NaN

// The canonical layouts with a swizzle (PTX ISA 9.7.15.5.1): no base offset, groups of 8 rows
// follow each other. Contiguous columns fill whole rows; contiguous inputs begin at a multiple of
// 16 of them.
static void check_descriptor(const Product& product) {
    uint64_t b = product.b;
    uint32_t start = (uint32_t)(b & 0x3fff) << 4, leading = (uint32_t)(b >> 16 & 0x3fff) << 4;
    const uint32_t row = row_bytes_of(product), group = 8 * row;
    if (!row || (b >> 32 & 0x3fffffff) != group >> 4 || (b & 0xc000c000))
        die("wgmma with a descriptor of another layout");
    if (start % group >= row) die("wgmma of a tile that does not begin with a group of 8 rows");
    if (product.is_columns && product.columns % (row / 2))
        die("wgmma of columns that do not fill the rows of their swizzle");
    if (product.is_columns ? start % row || leading % group : start % 32)
        die("wgmma of a tile that is misaligned");
}

// Every 16 bytes of B are there and visible to tensor cores.
static void check_operand(const Product& product) {
    Cta* cta = current->cta;
    for (unsigned n = 0; n < product.columns; n += product.is_columns ? 8 : 1)
        for (unsigned k = 0; k < 16; k += product.is_columns ? 1 : 8) {
            uint32_t at = address_of(product, k, n);
            if (at + 16 > cta->shared_bytes) die("wgmma of memory that is not there");
            const Writer& writer = cta->writers[at / 16];
            if (writer.thread && cta->fibers[writer.thread - 1].proxy_fences == writer.fences)
                die("wgmma of what was copied without fence_proxy_async");
        }
}

// All warps of a warpgroup issue the same products.
static void check_warpgroup(const Product& product) {
    Cta* cta = current->cta;
    auto& all = cta->warpgroups[current->warp / 4];
    unsigned number = current->wgmma.issued++;
    if (number == all.size()) {
        all.push_back(product);
        return;
    }
    const Product& other = all[number];
    if (other.b != product.b || other.columns != product.columns ||
        other.is_columns != product.is_columns || other.adds != product.adds ||
        other.is_bf16 != product.is_bf16)
        die("warps of one warpgroup issue different products");
}

void issue_product(float* d, const uint32_t* a, uint64_t b, unsigned columns, bool is_columns,
                   bool adds, bool is_bf16) {
    Fiber* me = current;
    if (!me->wgmma.is_fenced) die("wgmma in a group that does not begin with wgmma_fence");
    if ((me->warp / 4 + 1) * 128 > me->cta->fibers.size())
        die("wgmma in a warpgroup that is not whole");
    Product product = {d, a, {a[0], a[1], a[2], a[3]}, b, columns, is_columns, adds, is_bf16};
    check_descriptor(product);
    if (me->lane == 0) check_operand(product);
    check_warpgroup(product);
    me->wgmma.open.push_back(product);
    for (auto& sums : me->wgmma.sums)
        if (sums.at == d && sums.count == columns / 2) {
            sums.products++;
            return;
        }
    Sums sums = {d, columns / 2, 1, {}};
    memcpy(sums.values, d, sums.count * 4);
    for (unsigned i = 0; i < sums.count; i++) memcpy(d + i, &IN_FLIGHT, 4);
    me->wgmma.sums.push_back(sums);
}

void commit_products() {
    Products& own = current->wgmma;
    own.is_fenced = false;
    own.groups.push_back(std::move(own.open));
    own.open.clear();
}

static Sums& find_sums(const Product& product) {
    for (auto& sums : current->wgmma.sums)
        if (sums.at == product.d && sums.count == product.columns / 2) return sums;
    die("sums that are not in flight");
}

float* sums_of(const Product& product) { return find_sums(product).values; }

void end_product(const Product& product) {
    if (memcmp(product.a, product.a_then, sizeof product.a_then))
        die("registers of A were changed while wgmma read them");
    Sums& sums = find_sums(product);
    if (--sums.products) return;
    for (unsigned i = 0; i < sums.count; i++)
        if (memcmp(sums.at + i, &IN_FLIGHT, 4)) die("sums were changed while wgmma added to them");
    memcpy(sums.at, sums.values, sums.count * 4);
    auto& all = current->wgmma.sums;
    all.erase(all.begin() + (&sums - all.data()));
}

// --- the copy engine (wgmma.h) -------------------------------------------------------------------

EMU_NO_TSAN static BulkBarrier& find_barrier(Cta* cta, const void* at) {
    for (auto& barrier : cta->barriers)
        if (barrier.at == at) return barrier;
    die("a barrier of copies that was not made");
}

EMU_NO_TSAN void init_barrier(const void* at, unsigned arrivals) {
    auto& all = current->cta->barriers;
    all.emplace_back();
    all.back().at = at;
    all.back().arrivals = arrivals;
}

EMU_NO_TSAN void publish_barriers() {
    for (auto& barrier : current->cta->barriers) barrier.is_known = true;
}

// The place in CTA `rank` of the cluster that `at` is in this one.
EMU_NO_TSAN static void* place_in(unsigned rank, const void* at) {
    Cta* own = current->cta;
    if (rank >= own->cluster->ctas.size()) die("a CTA that the cluster does not have");
    return own->cluster->ctas[rank]->shared + ((const unsigned char*)at - own->shared);
}

EMU_NO_TSAN void* in_cluster(unsigned rank, const void* at) {
    void* there = place_in(rank, at);
    if (!current->cta->cluster->ctas[rank]->live) die("a store to a CTA that has ended");
    return there;
}

// The barrier of CTA `rank`, for something that comes to it.
EMU_NO_TSAN static BulkBarrier& reach_barrier(const void* at, unsigned rank) {
    void* there = place_in(rank, at);
    Cta* cta = current->cta->cluster->ctas[rank];
    if (!cta->live) die("something comes to a CTA that has ended");
    BulkBarrier& barrier = find_barrier(cta, there);
    if (!barrier.is_known) die("a barrier of copies that was not made known by fence_barrier_init");
    if (barrier.ended > barrier.seen) die("a barrier is used again before it was waited for");
    return barrier;
}

EMU_NO_TSAN static unsigned bytes_asked(const BulkBarrier& barrier) {
    unsigned bytes = 0;
    for (unsigned i = 0; i < barrier.asked; i++) bytes += barrier.copies[i].bytes;
    return bytes;
}
EMU_NO_TSAN static bool may_end(const BulkBarrier& barrier) {
    return barrier.arrived == barrier.arrivals &&
           barrier.expected == barrier.copied + bytes_asked(barrier);
}

EMU_NO_TSAN static void carry_out(Cta* cta, const BulkCopy& copy) {
    memcpy(copy.to, copy.from, copy.bytes);
    size_t first = (size_t)((unsigned char*)copy.to - cta->shared) / 16;
    for (size_t i = first; i < first + copy.bytes / 16; i++) cta->writers.at(i) = Writer();
}

EMU_NO_TSAN static void end_phase(Cta* cta, BulkBarrier& barrier) {
    EMU_ACQUIRE(&barrier);
    for (unsigned i = 0; i < barrier.asked; i++) carry_out(cta, barrier.copies[i]);
    barrier.asked = barrier.arrived = barrier.expected = barrier.copied = 0;
    barrier.ended++;
    EMU_RELEASE(&barrier);
}

// After something has come to a barrier: its phase ends, unless copies are to be carried out, which
// waits until somebody needs them.
EMU_NO_TSAN static void after_arrival(Cta* cta, BulkBarrier& barrier) {
    EMU_RELEASE(&barrier);
    barrier.changes++;
    if (barrier.arrived > barrier.arrivals)
        die("more threads arrive at a barrier than it was made for");
    if (barrier.arrived == barrier.arrivals &&
        barrier.copied + bytes_asked(barrier) > barrier.expected)
        die("more bytes come to a barrier than are expected");
    if (!barrier.asked && may_end(barrier)) end_phase(cta, barrier);
}

EMU_NO_TSAN void arrive(const void* at, unsigned rank, unsigned bytes) {
    BulkBarrier& barrier = reach_barrier(at, rank);
    barrier.arrived++;
    barrier.expected += bytes;
    after_arrival(current->cta->cluster->ctas[rank], barrier);
}

EMU_NO_TSAN void copy_bulk(const BulkCopy& copy, const void* at, unsigned ctas) {
    if ((uintptr_t)copy.to % 16 || (uintptr_t)copy.from % 16 || copy.bytes % 16)
        die("copy_bulk with a misaligned address or size");
    for (unsigned rank = 0; rank < ctas; rank++) {
        BulkCopy own = {place_in(rank, copy.to), copy.from, copy.bytes};
        BulkBarrier& barrier = reach_barrier(at, rank);
        Cta* cta = current->cta->cluster->ctas[rank];
        if (cta->cluster->is_early) {
            carry_out(cta, own);
            barrier.copied += own.bytes;
        } else {
            if (barrier.asked == sizeof barrier.copies / sizeof own)
                die("too many copies to one barrier at once");
            barrier.copies[barrier.asked++] = own;
        }
        after_arrival(cta, barrier);
    }
}

EMU_NO_TSAN void wait_barrier(const void* at, unsigned phase) {
    BulkBarrier& barrier = find_barrier(current->cta, at);
    while ((barrier.ended & 1) == phase) {
        if (may_end(barrier)) {
            barrier.changes++;
            end_phase(current->cta, barrier);
        } else {
            wait(current, &barrier.changes, barrier.changes, "barrier_wait");
        }
    }
    barrier.seen = barrier.ended;
    EMU_ACQUIRE(&barrier);
}

// --- the barrier of a cluster --------------------------------------------------------------------

EMU_NO_TSAN static void pass_cluster_barrier(Cluster* cluster) {
    cluster->arrived = 0;
    cluster->generation++;
}

EMU_NO_TSAN void cluster_arrive() {
    Cluster* cluster = current->cta->cluster;
    if (current->is_between) die("cluster_arrive before the cluster_wait of the last one");
    current->is_between = true;
    current->cluster_generation = cluster->generation;
    EMU_RELEASE(cluster);
    if (++cluster->arrived == cluster->live) pass_cluster_barrier(cluster);
}

EMU_NO_TSAN void cluster_wait() {
    Cluster* cluster = current->cta->cluster;
    if (!current->is_between) die("cluster_wait without cluster_arrive");
    current->is_between = false;
    wait(current, &cluster->generation, current->cluster_generation, "cluster_wait");
    EMU_ACQUIRE(cluster);
}

// At the end of a thread, and of a CTA.
static void check_waited(const Fiber& f) {
    if (!f.wgmma.open.empty() || !f.wgmma.groups.empty()) die("a thread ends while its wgmma run");
    if (f.is_between) die("a thread ends between cluster_arrive and cluster_wait");
}
static void check_whole(const Cta& cta) {
    for (auto& f : cta.fibers)
        if (f.wgmma.issued != cta.warpgroups[f.warp / 4].size())
            die("a warp issued fewer wgmma than others of its warpgroup");
}

// What a fiber runs from its first switch on.
EMU_NO_TSAN static void entry() {
    Fiber* me = current;
    Cta* cta = me->cta;
    Cluster* cluster = cta->cluster;
#ifdef EMU_ASAN
    const void* bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (cluster->before == &cluster->host) {
        cluster->host.stack_bottom = bottom;
        cluster->host.stack_bytes = bytes;
    }
#endif
    EMU_ACQUIRE(&cta->body);
    cta->body(cta->params);
    check_waited(*me);
    me->finished = true;
    if (!me->has_waited) cta->has_not_waited = true;
    me->open.clear();
    me->groups.clear();
    cta->warps[me->warp].exited |= 1u << me->lane;
    EMU_RELEASE(&cluster->host);
    if (--cta->live && cta->arrived == cta->live) pass_barrier(cta);
    if (!cta->live)
        for (auto& barrier : cta->barriers)
            if (barrier.arrived || barrier.asked || barrier.ended > barrier.seen)
                die("a CTA ends before it has waited for all that comes to it");
    if (--cluster->live && cluster->arrived == cluster->live) pass_cluster_barrier(cluster);
    if (!cluster->live) go(me, &cluster->host);
    Fiber* next = pick(me);
    if (!next && cta->is_rehearsal) next = &cluster->host;
    if (!next) die("deadlock: threads have exited that others wait for");
    go(me, next);
    __builtin_unreachable();
}

EMU_NO_TSAN static void start_fiber(Cta& cta, unsigned number) {
    Fiber& f = cta.fibers[number];
    f.cta = &cta;
    f.finished = false;
    f.counter = nullptr;
    f.wgmma.is_fenced = false;
    f.wgmma.issued = 0;
    f.proxy_fences = 0;
    f.has_waited = false;
    f.is_between = false;
    f.thread = {number % cta.size.x, number / cta.size.x % cta.size.y,
                number / cta.size.x / cta.size.y};
    f.lane = number % 32;
    f.warp = number / 32;
    cta.warps[f.warp].lanes |= 1u << f.lane;
    // What switch_stacks takes from a stack: six registers, then where to return to; and the return
    // address of entry(), which has none.
    void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(f.stack) + STACK_BYTES) &
                                          ~uintptr_t(15));
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    f.stack_pointer = top;
}

EMU_NO_TSAN static void start_cta(Cta& cta) {
    unsigned count = (unsigned)cta.fibers.size();
    cta.live = count;
    cta.arrived = 0;
    cta.votes = 0;
    cta.warps.assign((count + 31) / 32, Warp());
    for (unsigned i = 0; i < count; i++) start_fiber(cta, i);
    cta.warpgroups.assign((count + 127) / 128, {});
    cta.barriers.clear();
    cta.writers.assign(cta.shared_bytes / 16, Writer());
    if (cta.shared_bytes) memset(cta.shared, 0xff, cta.shared_bytes);
    EMU_RELEASE(&cta.body);
}

EMU_NO_TSAN static void run_cluster(Cluster& cluster) {
    cluster.arrived = 0;
    cluster.live = 0;
    for (Cta* cta : cluster.ctas) {
        start_cta(*cta);
        cluster.live += cta->live;
    }
    cluster.host.cta = cluster.ctas[0];
    cluster.host.finished = false;
#ifdef EMU_TSAN
    cluster.host.tsan = __tsan_get_current_fiber();
#endif
    current = &cluster.host;
    go(&cluster.host, &cluster.ctas[0]->fibers[0]);
    EMU_ACQUIRE(&cluster.host);
    for (Cta* cta : cluster.ctas) check_whole(*cta);
}

// Stacks of MAX_THREADS fibers and shared memory, kept from launch to launch.
struct Room {
    Cta cta;
    char* stacks;
    unsigned char* shared;
    std::vector<Fiber> spare;
};

static std::mutex rooms_lock;
static std::vector<Room*> rooms;

static Room* take_room() {
    {
        std::lock_guard<std::mutex> guard(rooms_lock);
        if (!rooms.empty()) {
            Room* room = rooms.back();
            rooms.pop_back();
            return room;
        }
    }
    Room* room = new Room();
    void* stacks = mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    room->shared = static_cast<unsigned char*>(aligned_alloc(1024, MAX_SHARED_BYTES));
    if (stacks == MAP_FAILED || !room->shared) {
        fprintf(stderr, "cuda emulator: no memory for the stacks of a CTA\n");
        abort();
    }
    room->stacks = static_cast<char*>(stacks);
    return room;
}

static void give_room(Room* room) {
    std::lock_guard<std::mutex> guard(rooms_lock);
    rooms.push_back(room);
}

struct Launch {
    const Kernel* kernel;
    dim3 grid, size;
    size_t shared_bytes;
    void** params;
    uint64_t order;
    bool adds_backwards;
    // Whether a thread has ended without pdl_wait.
    std::atomic<bool> has_not_waited{false};
};

static void seat_fibers(Room& room, size_t count) {
    auto& fibers = room.cta.fibers;
    while (fibers.size() > count) {
        room.spare.push_back(std::move(fibers.back()));
        fibers.pop_back();
    }
    while (fibers.size() < count) {
        Fiber f;
        if (room.spare.empty()) {
#ifdef EMU_TSAN
            f.tsan = __tsan_create_fiber(0);
#endif
        } else {
            f = std::move(room.spare.back());
            room.spare.pop_back();
        }
        fibers.push_back(std::move(f));
    }
    for (size_t i = 0; i < count; i++) {
        fibers[i].stack = room.stacks + i * STACK_BYTES;
#ifdef EMU_ASAN
        fibers[i].stack_bottom = fibers[i].stack;
        fibers[i].stack_bytes = STACK_BYTES;
#endif
    }
}

static void seat_cta(const Launch& launch, Room& room, Cluster& cluster) {
    Cta& cta = room.cta;
    cta.cluster = &cluster;
    cta.rank = (unsigned)cluster.ctas.size();
    cta.grid = launch.grid;
    cta.size = launch.size;
    cta.kernel = launch.kernel->name;
    cta.body = launch.kernel->call;
    cta.params = launch.params;
    cta.adds_backwards = launch.adds_backwards;
    cta.shared = room.shared;
    cta.shared_bytes = launch.shared_bytes;
    cta.is_rehearsal = cta.has_not_waited = false;
    seat_fibers(room, (size_t)launch.size.x * launch.size.y * launch.size.z);
    cluster.ctas.push_back(&cta);
}

// Runs clusters of the launch until `next` is past the last.
static void work(Launch& launch, std::atomic<size_t>& next, size_t clusters) {
    const unsigned (&size)[3] = launch.kernel->cluster;
    Cluster cluster;
    cluster.order = launch.order;
    cluster.is_early = launch.order % 2 == 0;
    std::vector<Room*> rooms;
    for (unsigned rank = 0; rank < size[0] * size[1] * size[2]; rank++) {
        rooms.push_back(take_room());
        seat_cta(launch, *rooms.back(), cluster);
    }
    const size_t x = launch.grid.x / size[0], y = launch.grid.y / size[1];
    for (size_t i; (i = next++) < clusters;) {
        for (Cta* cta : cluster.ctas) {
            const unsigned rank = cta->rank;
            cta->index.x = (unsigned)(i % x) * size[0] + rank % size[0];
            cta->index.y = (unsigned)(i / x % y) * size[1] + rank / size[0] % size[1];
            cta->index.z = (unsigned)(i / x / y) * size[2] + rank / size[0] / size[1];
        }
        run_cluster(cluster);
    }
    for (Room* room : rooms) {
        if (room->cta.has_not_waited) launch.has_not_waited = true;
        give_room(room);
    }
}

static void run(Launch& launch, unsigned threads) {
    const unsigned (&size)[3] = launch.kernel->cluster;
    size_t clusters =
        (size_t)(launch.grid.x / size[0]) * (launch.grid.y / size[1]) * (launch.grid.z / size[2]);
    std::atomic<size_t> next{0};
    std::vector<std::thread> others;
    for (size_t i = 1; i < std::min<size_t>(threads, clusters); i++)
        others.emplace_back([&] { work(launch, next, clusters); });
    work(launch, next, clusters);
    for (auto& thread : others) thread.join();
}

// --- launches that may start early ---------------------------------------------------------------

#if !defined(EMU_TSAN) && !defined(EMU_ASAN)
// Bytes of a stack that are part of the state; what lies deeper is not looked at.
static const size_t STATE_BYTES = 4096;
static std::mutex rehearsal_lock;

static uint64_t hashed(uint64_t hash, const void* from, size_t bytes) {
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t word;
        memcpy(&word, static_cast<const char*>(from) + i, 8);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return hash;
}

// All that the stacks may point to has the same address in each rehearsal: the room, the cluster
// and the parameters.
static uint64_t rehearse(const Kernel& kernel, const unsigned* grid, const unsigned* size,
                         unsigned shared_bytes, void** params) {
    static Room* room = take_room();
    static Cluster cluster;
    static uint64_t words[64];
    static void* pointers[64];
    if (kernel.count > 64 || kernel.cluster[0] * kernel.cluster[1] * kernel.cluster[2] > 1)
        return 0;
    for (unsigned i = 0; i < kernel.count; i++) {
        memcpy(&words[i], params[i], kernel.sizes[i]);
        pointers[i] = &words[i];
    }
    Launch launch;
    launch.kernel = &kernel;
    launch.grid = dim3(grid[0], grid[1], grid[2]);
    launch.size = dim3(size[0], size[1], size[2]);
    launch.shared_bytes = shared_bytes;
    launch.params = pointers;
    launch.adds_backwards = false;
    Cta& cta = room->cta;
    cta.fibers.reserve(MAX_THREADS);
    cta.warps.reserve(MAX_THREADS / 32);
    cluster.ctas.clear();
    seat_cta(launch, *room, cluster);
    cta.is_rehearsal = true;
    cta.index = {0, 0, 0};
    for (auto& fiber : cta.fibers) memset(fiber.stack + STACK_BYTES - STATE_BYTES, 0, STATE_BYTES);
    start_cta(cta);
    cluster.order = 1;
    cluster.arrived = 0;
    cluster.live = cta.live;
    cluster.host.cta = &cta;
    cluster.host.finished = false;
    current = &cluster.host;
    go(&cluster.host, &cta.fibers[0]);
    uint64_t hash = hashed(1, cta.shared, cta.shared_bytes);
    for (auto& fiber : cta.fibers) {
        const char* top = fiber.stack + STACK_BYTES;
        const char* from =
            std::max(static_cast<const char*>(fiber.stack_pointer), top - STATE_BYTES);
        if (!fiber.finished) hash = hashed(hash, from, (size_t)(top - from));
    }
    return hash | 1;
}
#endif

// Written by build.rs: one table per .cu file.
extern const Table* const tables[];
extern const unsigned table_count;

static const Kernel* find(const char* name) {
    for (unsigned t = 0; t < table_count; t++)
        for (unsigned k = 0; k < tables[t]->count; k++)
            if (!strcmp(tables[t]->kernels[k].name, name)) return &tables[t]->kernels[k];
    return nullptr;
}

} // namespace emu

// The name of kernel `index` of all, null past the last.
extern "C" const char* sepal_emu_kernel(unsigned index) {
    for (unsigned t = 0; t < emu::table_count; t++) {
        if (index < emu::tables[t]->count) return emu::tables[t]->kernels[index].name;
        index -= emu::tables[t]->count;
    }
    return nullptr;
}

// Writes source, name and value of exported constant `index` of all; false past the last.
extern "C" bool sepal_emu_export(unsigned index, const char** source, const char** name,
                                 uint32_t* value) {
    for (unsigned t = 0; t < emu::table_count; t++) {
        const emu::Table* table = emu::tables[t];
        if (index < table->export_count) {
            *source = table->source;
            *name = table->exports[index].name;
            *value = table->exports[index].value;
            return true;
        }
        index -= table->export_count;
    }
    return false;
}

// Runs a kernel to its end. `params[i]` points to parameter i, of `sizes[i]` bytes. Returns 0; 1
// when there is no such kernel; 2 when the parameters are not of its number and sizes; 3 when a
// device would refuse the grid, the CTA or the shared memory; 4 when clusters do not fill the grid.
// Of a launch that may start early, 5 when it reads what earlier ones wrote before pdl_wait, 6 when
// a thread ends without pdl_wait.
extern "C" int sepal_emu_launch(const char* name, const unsigned* grid, const unsigned* cta,
                                unsigned shared_bytes, void** params, const unsigned* sizes,
                                unsigned count, unsigned threads, uint64_t order,
                                bool adds_backwards, const uint64_t* early) {
    const emu::Kernel* kernel = emu::find(name);
    if (!kernel) return 1;
    if (kernel->count != count || !std::equal(sizes, sizes + count, kernel->sizes)) return 2;
    uint64_t in_cta = (uint64_t)cta[0] * cta[1] * cta[2];
    bool fits = in_cta > 0 && in_cta <= emu::MAX_THREADS && cta[2] <= 64 &&
                shared_bytes <= emu::MAX_SHARED_BYTES;
    fits = fits && grid[0] > 0 && grid[0] < 0x80000000u && grid[1] > 0 && grid[1] < 65536 &&
           grid[2] > 0 && grid[2] < 65536;
    if (!fits) return 3;
    const unsigned (&cluster)[3] = kernel->cluster;
    bool is_filled = cluster[0] * cluster[1] * cluster[2] <= emu::MAX_CLUSTER;
    for (int i = 0; i < 3; i++) is_filled = is_filled && grid[i] % cluster[i] == 0;
    if (!is_filled) return 4;
    if (early && *early &&
        sepal_emu_rehearse(name, grid, cta, shared_bytes, params, sizes, count) != *early)
        return 5;
    emu::Launch launch{kernel,
                       dim3(grid[0], grid[1], grid[2]),
                       dim3(cta[0], cta[1], cta[2]),
                       shared_bytes,
                       params,
                       order,
                       adds_backwards};
    emu::run(launch, threads ? threads : 1);
    return early && launch.has_not_waited ? 6 : 0;
}

// Not with a sanitizer, which has other stacks.
extern "C" uint64_t sepal_emu_rehearse(const char* name, const unsigned* grid, const unsigned* cta,
                                       unsigned shared_bytes, void** params, const unsigned* sizes,
                                       unsigned count) {
#if defined(EMU_TSAN) || defined(EMU_ASAN)
    return 0;
#else
    const emu::Kernel* kernel = emu::find(name);
    const uint64_t threads = (uint64_t)cta[0] * cta[1] * cta[2];
    if (!kernel || kernel->count != count || !std::equal(sizes, sizes + count, kernel->sizes) ||
        !threads || threads > emu::MAX_THREADS || shared_bytes > emu::MAX_SHARED_BYTES)
        return 0;
    std::lock_guard<std::mutex> guard(emu::rehearsal_lock);
    return emu::rehearse(*kernel, grid, cta, shared_bytes, params);
#endif
}
