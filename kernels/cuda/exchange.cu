// Exchanges between the ranks of a group, each on a device of its own: sums, and values of rank 0.
//   exchange_once, exchange_twice: v[i] = ((v_0[i] + v_1[i]) + v_2[i]) + ...    over the ranks
//   exchange_copy: v[i] = v_0[i]
//
// Shapes: up to 3 parts, each f32 [len], in place.
// Reference: shared/src/shm/group/member.rs, whose bits these are: f32, in the order of ranks.
//
// Memory. Each rank has exchange memory that all ranks reach: device memory that other processes
//   map, or host memory of the group's segment. Only the addresses differ.
//     flags  uint64_t [16 ranks, MAX_LANES]    flag [r, b]: what lane b of rank r has published
//     data   float4 [lanes, 2, capacity]       two buffers of each lane
// Lanes. CTA b of every rank is a lane: an exchange of its own, with its own flags, epoch and
//   buffers. It only ever waits for the CTAs b of other ranks, and no CTA waits for one of the same
//   device. A lane takes chunks b, b + lanes, ... of the message.
// Epochs. The epoch of a lane counts its exchanges. It lies in memory of the device, and the kernel
//   advances it, so a recorded launch is right each time it is replayed. All ranks launch the same
//   exchanges in the same order, so the epochs of lane b are equal on all ranks.
// An exchange of a lane in epoch E, by one CTA:
//     W  all threads write to the own buffer of parity E mod 2 (not all exchanges do)
//     B  barrier of the CTA
//     P  thread r of warp 0 stores (E, operation) to flag [own, b] of rank r, with release
//     Q  thread r of warp 0 loads flag [r, b] of its own rank until its epoch is E or later, with
//        acquire
//     B  barrier of the CTA
//     R  all threads read the buffers of parity E mod 2 of other ranks
//
// Why R sees what W wrote: W of a thread happens before P through the barrier, and P releases at
//   system scope all that happened before it. Q acquires it, and R follows Q through the barrier. R
//   reads past L1.
// Why W overwrites nothing that is still read: the buffer was last written in epoch E - 2, and
//   other ranks read it in R of E - 2. Each of them did so before P of E - 1, which this rank has
//   acquired in Q of E - 1. A later epoch in a flag says no less. Lanes never share a buffer, so
//   this holds for launches of different lengths, too.
// Why a flag may be overwritten: P of E + 1 follows Q of E, which has seen this rank's flag of E,
// so
//   this rank may still be in Q of E. It takes E + 1 for E. No rank is two epochs ahead: Q of E + 1
//   waits for this rank. Epochs are compared by their difference, so that they may wrap.
// Why the threads of warp 0 do not wait for each other in vain: all of them store before one looks,
//   and they look together, one vote per look.
// Why waiting CTAs do not starve those that are waited for: a grid has at most as many CTAs as the
//   smallest device of the group has multiprocessors, so all of them are resident at once.
//
// Two shots (exchange_twice) are two such exchanges: in the first, each rank sums its segment of
// the
//   chunk; in the second, it collects the other segments. The sum goes into the buffer of E + 1
//   before P of E + 1; after Q of E, nobody reads that buffer.
//   One shot reads world - 1 times the message, two shots less than twice.
// A wait looks at the group's word `aborted` every 64 looks, and every millisecond writes to
//   `waits_for` which rank is missing; it clears the word when it ends. After an abort, or when
//   a flag of this epoch names another operation, the lane sets STATE_ENDED: this launch and all
//   later ones end at once. What they leave is unspecified; the host looks at the words when the
//   device is done.
// Order of sums: each value by itself, whatever the lane, the length and the number of shots.
// Grid: a CTA per chunk, at most as many as there are lanes. n2, n4, n8, n16: most ranks.
// Traffic of a rank and a value: 8 bytes of the message, 4 of the own buffer, 4 (world - 1) from
//   others; two shots: 4 (world - 1) / world from others twice. Decode is bound by two latencies:
//   P to Q, and R.
// Limits: 16 ranks; below 2^29 groups of 4 values.
// expects exchange_*: LDG.128.STRONG.SYS LDG.64.STRONG.SYS STG.64.STRONG.SYS STG.128 MEMBAR
#include "common.cuh"
#include "pdl.cuh"
#include "peers.cuh"

#define THREADS   256
#define MAX_LANES 64
#define MAX_RANKS 16
#define MAX_PARTS 3
// Words of the table: addresses of the exchange memory of all ranks, then of aborted, waits_for and
// misled.
#define TABLE_ABORTED   MAX_RANKS
#define TABLE_WAITS_FOR (MAX_RANKS + 1)
#define TABLE_MISLED    (MAX_RANKS + 2)
// Words of the state: the epoch of each lane, then whether the group has ended.
#define STATE_ENDED MAX_LANES
EXPORT(THREADS, THREADS);
EXPORT(MAX_LANES, MAX_LANES);
EXPORT(MAX_RANKS, MAX_RANKS);
EXPORT(MAX_PARTS, MAX_PARTS);
EXPORT(TABLE_WORDS, MAX_RANKS + 3);
EXPORT(STATE_WORDS, MAX_LANES + 1);
EXPORT(FLAG_BYTES, MAX_RANKS* MAX_LANES * 8);

// Looks between two looks at `aborted` and at the clock, and how long a wait is long.
#define LOOKS     64
#define LONG_WAIT 1000000

// The message: groups of 4 neighbours of one part, numbered across the parts.
struct Message {
    float* parts[MAX_PARTS];
    uint32_t len, per_part, groups;
};

__device__ __forceinline__ float* place_of(const Message& message, uint32_t group, uint32_t& there,
                                           bool& whole) {
    const uint32_t part = group / message.per_part, at = (group - part * message.per_part) * 4;
    float* first = (part == 0 ? message.parts[0] : part == 1 ? message.parts[1] : message.parts[2]);
    first += at;
    there = min(message.len - at, 4u);
    whole = there == 4 && (reinterpret_cast<size_t>(first) & 15) == 0;
    return first;
}

// Missing neighbours are 0.
__device__ __forceinline__ float4 load(const Message& message, uint32_t group) {
    uint32_t there;
    bool whole;
    const float* from = place_of(message, group, there, whole);
    if (whole) return *reinterpret_cast<const float4*>(from);
    return make_float4(from[0], there > 1 ? from[1] : 0.0f, there > 2 ? from[2] : 0.0f,
                       there > 3 ? from[3] : 0.0f);
}

__device__ __forceinline__ void store(const Message& message, uint32_t group, const float4& v) {
    uint32_t there;
    bool whole;
    float* to = place_of(message, group, there, whole);
    if (whole) {
        *reinterpret_cast<float4*>(to) = v;
    } else {
        to[0] = v.x;
        if (there > 1) to[1] = v.y;
        if (there > 2) to[2] = v.z;
        if (there > 3) to[3] = v.w;
    }
}

// One lane of one rank.
struct Lane {
    const uint64_t* table;
    uint32_t* state;
    uint32_t rank, world, capacity, epoch;
};

// The exchange memory of a rank.
__device__ __forceinline__ uint8_t* memory_of(const Lane& lane, uint32_t rank) {
    return reinterpret_cast<uint8_t*>(lane.table[rank]);
}

__device__ __forceinline__ uint64_t* flag_of(const Lane& lane, uint32_t at, uint32_t of) {
    return reinterpret_cast<uint64_t*>(memory_of(lane, at)) + of * MAX_LANES + blockIdx.x;
}

// The buffer of a rank for this epoch.
__device__ __forceinline__ float4* buffer_of(const Lane& lane, uint32_t rank) {
    float4* data = reinterpret_cast<float4*>(memory_of(lane, rank) + MAX_RANKS * MAX_LANES * 8);
    return data + (size_t)(blockIdx.x * 2 + (lane.epoch & 1)) * lane.capacity;
}

__device__ __forceinline__ uint64_t* word_of(const Lane& lane, uint32_t which) {
    return reinterpret_cast<uint64_t*>(lane.table[which]);
}

// Q of all threads of warp 0; whether the group goes on. `missing` has a bit per rank.
__device__ __forceinline__ bool wait_for_flags(const Lane& lane, uint32_t operation) {
    const uint32_t peer = threadIdx.x;
    const bool is_peer = peer < lane.world && peer != lane.rank;
    const uint64_t* flag = flag_of(lane, lane.rank, is_peer ? peer : 0);
    uint64_t since = 0;
    bool is_told = false, goes_on = true;
    for (uint32_t looks = 1;; looks++) {
        const uint64_t found = is_peer ? ld_acquire_sys(flag) : 0;
        const int32_t ahead = (int32_t)((uint32_t)(found >> 32) - lane.epoch);
        const uint32_t missing = __ballot_sync(~0u, is_peer && ahead < 0),
                       strange = __ballot_sync(
                           ~0u, is_peer && ahead == 0 && (uint32_t)found != operation);
        if (strange) {
            if (peer == 0) st_relaxed_sys(word_of(lane, TABLE_MISLED), (uint64_t)__ffs(strange));
            goes_on = false;
        }
        if (!missing || !goes_on) break;
        if (looks % LOOKS == 0) {
            // The other lanes of this device may have seen the end first.
            const bool is_over =
                peer == 0 && (ld_relaxed_sys(word_of(lane, TABLE_ABORTED)) != 0 ||
                              *reinterpret_cast<volatile uint32_t*>(lane.state + STATE_ENDED) != 0);
            if (__any_sync(~0u, is_over)) {
                goes_on = false;
                break;
            }
            const uint64_t now = nanoseconds();
            if (since == 0) {
                since = now;
            } else if (peer == 0 && now - since >= LONG_WAIT) {
                st_relaxed_sys(word_of(lane, TABLE_WAITS_FOR), (uint64_t)__ffs(missing));
                is_told = true;
                since = now;
            }
        }
        pause_between_looks(looks);
    }
    if (is_told) st_relaxed_sys(word_of(lane, TABLE_WAITS_FOR), 0);
    return goes_on;
}

// B, P, Q and B of an exchange; whether the group goes on.
__device__ __forceinline__ bool meet(const Lane& lane, uint32_t operation) {
    __syncthreads();
    bool goes_on = true;
    if (threadIdx.x < 32) {
        const uint32_t peer = threadIdx.x;
        if (peer < lane.world && peer != lane.rank)
            st_release_sys(flag_of(lane, peer, lane.rank), (uint64_t)lane.epoch << 32 | operation);
        __syncwarp();
        goes_on = wait_for_flags(lane, operation);
        if (!goes_on && peer == 0)
            *reinterpret_cast<volatile uint32_t*>(lane.state + STATE_ENDED) = 1;
    }
    return __syncthreads_and(goes_on) != 0;
}

// What an exchange is: its kind, and below it the groups of the message. Equal on ranks that follow
// one plan.
__device__ __forceinline__ uint32_t operation_of(uint32_t kind, const Message& message) {
    return kind << 29 | message.groups;
}
#define SUM_AT_ONCE      1
#define SUM_SEGMENT      2
#define COLLECT_SEGMENTS 3
#define COPY             4

__device__ __forceinline__ float4 added(const float4& a, const float4& b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                       __fadd_rn(a.w, b.w));
}

// The buffers of all ranks for this epoch.
template <uint32_t N> struct Buffers {
    const float4* of[N];
};
template <uint32_t N> __device__ __forceinline__ Buffers<N> buffers_of(const Lane& lane) {
    Buffers<N> buffers;
#pragma unroll
    for (uint32_t r = 0; r < N; r++) buffers.of[r] = buffer_of(lane, r < lane.world ? r : 0);
    return buffers;
}

// The sum of group `at` of the buffers, in the order of ranks; `own` is this rank's.
template <uint32_t N>
__device__ __forceinline__ float4 sum_of(const Lane& lane, const Buffers<N>& buffers, uint32_t at,
                                         const float4& own) {
    float4 values[N];
#pragma unroll
    for (uint32_t r = 0; r < N; r++)
        if (r < lane.world) values[r] = r == lane.rank ? own : ld_peer16(buffers.of[r] + at);
    float4 sum = values[0];
#pragma unroll
    for (uint32_t r = 1; r < N; r++)
        if (r < lane.world) sum = added(sum, values[r]);
    return sum;
}

// Each takes `count` groups from `first` on, and says whether the group goes on.
template <uint32_t N>
__device__ __forceinline__ bool sum_at_once(Lane& lane, const Message& message, uint32_t first,
                                            uint32_t count) {
    lane.epoch++;
    float4* own = buffer_of(lane, lane.rank);
    for (uint32_t i = threadIdx.x; i < count; i += THREADS) own[i] = load(message, first + i);
    if (!meet(lane, operation_of(SUM_AT_ONCE, message))) return false;
    const Buffers<N> buffers = buffers_of<N>(lane);
    for (uint32_t i = threadIdx.x; i < count; i += THREADS)
        store(message, first + i, sum_of<N>(lane, buffers, i, load(message, first + i)));
    return true;
}

template <uint32_t N>
__device__ __forceinline__ bool sum_in_two_shots(Lane& lane, const Message& message, uint32_t first,
                                                 uint32_t count) {
    const uint32_t segment = (count + lane.world - 1) / lane.world,
                   begin = min(lane.rank * segment, count), end = min(begin + segment, count);
    lane.epoch++;
    float4* own = buffer_of(lane, lane.rank);
    for (uint32_t i = threadIdx.x; i < count; i += THREADS)
        if (i < begin || i >= end) own[i] = load(message, first + i);
    if (!meet(lane, operation_of(SUM_SEGMENT, message))) return false;
    const Buffers<N> buffers = buffers_of<N>(lane);
    lane.epoch++;
    float4* sums = buffer_of(lane, lane.rank);
    for (uint32_t i = begin + threadIdx.x; i < end; i += THREADS) {
        const float4 sum = sum_of<N>(lane, buffers, i, load(message, first + i));
        sums[i] = sum;
        store(message, first + i, sum);
    }
    if (!meet(lane, operation_of(COLLECT_SEGMENTS, message))) return false;
    // The next rank's segment first, so that ranks do not all read from one at once.
    for (uint32_t k = 1; k < lane.world; k++) {
        const uint32_t peer = (lane.rank + k) % lane.world, last = min((peer + 1) * segment, count);
        const float4* from = buffer_of(lane, peer);
        for (uint32_t i = peer * segment + threadIdx.x; i < last; i += THREADS)
            store(message, first + i, ld_peer16(from + i));
    }
    return true;
}

__device__ __forceinline__ bool copy_of_first(Lane& lane, const Message& message, uint32_t first,
                                              uint32_t count) {
    lane.epoch++;
    if (lane.rank == 0) {
        float4* own = buffer_of(lane, 0);
        for (uint32_t i = threadIdx.x; i < count; i += THREADS) own[i] = load(message, first + i);
    }
    if (!meet(lane, operation_of(COPY, message))) return false;
    if (lane.rank != 0)
        for (uint32_t i = threadIdx.x; i < count; i += THREADS)
            store(message, first + i, ld_peer16(buffer_of(lane, 0) + i));
    return true;
}

#define EXCHANGE                                                                                   \
    const uint64_t *table /* [TABLE_WORDS] */, uint32_t *state /* [STATE_WORDS] */, float *part0,  \
        float *part1, float *part2, uint32_t len, uint32_t parts, uint32_t rank, uint32_t world,   \
        uint32_t capacity, uint32_t chunk /* groups, at most capacity */

// Runs `exchange` for the chunks of this lane, then keeps its epoch.
template <class Exchange> __device__ __forceinline__ void run(EXCHANGE, const Exchange& exchange) {
    pdl_launch();
    pdl_wait();
    Lane lane = {table, state, rank, world, capacity, state[blockIdx.x]};
    const bool has_ended = *reinterpret_cast<volatile uint32_t*>(state + STATE_ENDED) != 0;
    if (__syncthreads_or(has_ended)) return;
    Message message = {{part0, part1, part2}, len, (len + 3) / 4, 0};
    message.groups = message.per_part * parts;
    for (uint32_t first = blockIdx.x * chunk; first < message.groups; first += gridDim.x * chunk)
        if (!exchange(lane, message, first, min(message.groups - first, chunk))) return;
    if (threadIdx.x == 0) state[blockIdx.x] = lane.epoch;
}
#define RUN(exchange)                                                                              \
    run(table, state, part0, part1, part2, len, parts, rank, world, capacity, chunk,               \
        [](Lane& lane, const Message& message, uint32_t first, uint32_t count) {                   \
            return exchange(lane, message, first, count);                                          \
        })

#define EXCHANGE_ONCE(N)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) exchange_once_n##N(EXCHANGE) {           \
        RUN(sum_at_once<N>);                                                                       \
    }
EXCHANGE_ONCE(2)
EXCHANGE_ONCE(4)
EXCHANGE_ONCE(8)
EXCHANGE_ONCE(16)

#define EXCHANGE_TWICE(N)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) exchange_twice_n##N(EXCHANGE) {          \
        RUN(sum_in_two_shots<N>);                                                                  \
    }
EXCHANGE_TWICE(4)
EXCHANGE_TWICE(8)
EXCHANGE_TWICE(16)

extern "C" __global__ void __launch_bounds__(THREADS) exchange_copy(EXCHANGE) {
    RUN(copy_of_first);
}
