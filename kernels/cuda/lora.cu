// Low-rank adapters (LoRA) beside a matrix product, with an adapter per row:
//   t = round_a(A round_a(x))    d = round_a(B round_a(t))    out = round(out) + round_a(scale d)
//   gradient: t = B^T grad, out += scale A^T t, all f32
//
// Shapes: x, out, grad f32 [rows, inputs or outputs]; A [rank, inputs], B [outputs, rank] of f32,
//   bf16 or f16, which is also round_a; middle f32 [rows, pitch] holds
//   t before it is rounded: ranks of a group sum it between the two launches.
// Reference: kernels/src/ops/lora.rs.
// Adapters of rows: a list in device memory names the adapter of each row, so that one recorded
//   launch serves every assignment. A second list may name the row of x (or grad) that a row takes:
//   rows are then pairs of token and expert (experts.cuh), and adapters those of all experts.
// lora_down: grid x largest rank / 4, y rows / 8. A CTA has 4 rows of A (gradient: 4 columns of B).
//   A thread takes 8 neighbouring inputs of every 2,048 (gradient: every 256th output); then lanes
//   are added, then warps.
// lora_up: grid x outputs / 256 (gradient: inputs / 256), y rows / 8. A thread computes one output
//   from its row of B (gradient: column of A) and the rows of t in shared memory.
// Order of sums: depends only on the row and its adapter.
// Traffic: of 8 rows, those of one adapter read A and B once. Rank 16 beside a matrix of 8192 x
//   8192 has 0.5 MB, an eightieth of the NF4 matrix. Up to 32 rows the launches are the bound.
// expects lora_down: LDG.128 LD.128; no LDL STL
// expects lora_up: LD.128; no LDL STL
// expects lora_grad_*: no LDL STL
#include "common.cuh"
#include "pdl.cuh"

#define ROWS  8
#define RANKS 4
#define WARPS 8
// Shared memory, f32: of the down products a sum per row, element and warp; of the up products ROWS
// rows of the middle, whose rank is rounded up to RANK_STEP.
#define RANK_STEP 8
EXPORT(ROWS, ROWS);
EXPORT(RANKS, RANKS);
EXPORT(RANK_STEP, RANK_STEP);
EXPORT(DOWN_SHARED, ROWS* RANKS* WARPS * 4);
EXPORT(UP_SHARED_PER_RANK, ROWS * 4);

// An adapter of a matrix; rank 0 means none. The host writes it as 8 words.
struct Adapter {
    const void *a, *b;
    uint32_t rank, dtype; // of A and B: 0 f32, 1 bf16, 2 f16
    float scale;
    uint32_t unused;
};

// Adapters of rows: the table, the adapter of each row (a number past the table means none), and
// the number of rows, if only the device knows it.
#define ADAPTERS                                                                                   \
    const Adapter *__restrict__ table, const uint32_t *row_adapter /* [rows] */,                   \
        const uint32_t *there /* or null */, uint32_t adapters, uint32_t rows

__device__ __forceinline__ float rounded_as(uint32_t dtype, float v) {
    return dtype == 0 ? v : dtype == 1 ? rounded<bf16>(v) : rounded<f16>(v);
}

// Bit mask of the 8 rows from `first` on that have an adapter.
__device__ __forceinline__ uint32_t adapted(const uint32_t* row_adapter, uint32_t adapters,
                                            uint32_t first, uint32_t rows) {
    uint32_t mask = 0;
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        if (first + r < rows && row_adapter[first + r] < adapters) mask |= 1u << r;
    return mask;
}

// Takes the rows with the adapter of the first row out of `left` and returns them.
__device__ __forceinline__ uint32_t next_rows(const uint32_t* row_adapter, uint32_t first,
                                              uint32_t& left, uint32_t& adapter) {
    uint32_t mask = 0;
    adapter = row_adapter[first + __ffs(left) - 1];
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        if ((left >> r & 1) && row_adapter[first + r] == adapter) mask |= 1u << r;
    left &= ~mask;
    return mask;
}

// The two numbers of a register.
template <class T>
__device__ __forceinline__ void widen_pair(uint32_t pair, float& low, float& high);
template <>
__device__ __forceinline__ void widen_pair<bf16>(uint32_t pair, float& low, float& high) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
}
template <>
__device__ __forceinline__ void widen_pair<f16>(uint32_t pair, float& low, float& high) {
    low = widen(__ushort_as_half((unsigned short)pair));
    high = widen(__ushort_as_half((unsigned short)(pair >> 16)));
}

// Reads 8 or 4 neighbours with one or two loads.
__device__ __forceinline__ void whole(const float* from, float (&v)[4]) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}
__device__ __forceinline__ void whole(const float* from, float (&v)[8]) {
    const float4 low = *reinterpret_cast<const float4*>(from),
                 high = *reinterpret_cast<const float4*>(from + 4);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}
template <class T> __device__ __forceinline__ void whole(const T* from, float (&v)[4]) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    widen_pair<T>(two.x, v[0], v[1]);
    widen_pair<T>(two.y, v[2], v[3]);
}
template <class T> __device__ __forceinline__ void whole(const T* from, float (&v)[8]) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    widen_pair<T>(four.x, v[0], v[1]);
    widen_pair<T>(four.y, v[2], v[3]);
    widen_pair<T>(four.z, v[4], v[5]);
    widen_pair<T>(four.w, v[6], v[7]);
}

// Reads the N neighbours from `i`, a multiple of N, of a row of `width`, with zeros past its end.
template <class T, uint32_t N>
__device__ __forceinline__ void neighbours(const T* row, uint32_t i, uint32_t width,
                                           float (&v)[N]) {
    if (width % N == 0) {
        whole(row + i, v);
    } else {
#pragma unroll
        for (uint32_t k = 0; k < N; k++) v[k] = i + k < width ? widen(row[i + k]) : 0.0f;
    }
}

// Adds the sums of the threads of a CTA, 4 elements of t of 8 rows each, and writes those of the
// rows of `mask`.
__device__ __forceinline__ void put_sums(const float (&sum)[RANKS][ROWS], float* scratch,
                                         float* middle, uint32_t mask, uint32_t at, uint32_t rank,
                                         uint32_t first, uint32_t pitch) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        if (!(mask >> r & 1)) continue;
#pragma unroll
        for (uint32_t k = 0; k < RANKS; k++) {
            const float total = warp_sum(sum[k][r]);
            if (lane == 0) scratch[(r * RANKS + k) * WARPS + warp] = total;
        }
    }
    __syncthreads();
    const uint32_t r = threadIdx.x / RANKS, k = threadIdx.x % RANKS;
    if (r < ROWS && (mask >> r & 1) && at + k < rank) {
        float total = 0.0f;
#pragma unroll
        for (uint32_t w = 0; w < WARPS; w++)
            total = __fadd_rn(total, scratch[threadIdx.x * WARPS + w]);
        middle[(size_t)(first + r) * pitch + at + k] = total;
    }
    __syncthreads(); // scratch is read
}

// Computes 4 elements of t, from `at` on, of the rows of `mask`.
template <class T>
__device__ __forceinline__ void down(const Adapter& adapter, const float* x, const uint32_t* row_of,
                                     float* scratch, float* middle, uint32_t mask, uint32_t at,
                                     uint32_t first, uint32_t inputs, uint32_t pitch) {
    const T* a = static_cast<const T*>(adapter.a) + (size_t)at * inputs;
    float sum[RANKS][ROWS] = {};
    for (uint32_t i = threadIdx.x * 8; i < inputs; i += 256 * 8) {
        float w[RANKS][8];
#pragma unroll
        for (uint32_t k = 0; k < RANKS; k++)
            neighbours<T>(a + (at + k < adapter.rank ? (size_t)k * inputs : 0), i, inputs, w[k]);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            if (!(mask >> r & 1)) continue;
            float v[8];
            neighbours<float>(x + (size_t)(row_of ? row_of[first + r] : first + r) * inputs, i,
                              inputs, v);
#pragma unroll
            for (uint32_t e = 0; e < 8; e++) {
                const float own = rounded<T>(v[e]);
#pragma unroll
                for (uint32_t k = 0; k < RANKS; k++) sum[k][r] = __fmaf_rn(own, w[k][e], sum[k][r]);
            }
        }
    }
    put_sums(sum, scratch, middle, mask, at, adapter.rank, first, pitch);
}

extern "C" __global__ void __launch_bounds__(256)
    lora_down(ADAPTERS, const uint32_t* row_of /* [rows] or null */,
              const float* x /* [rows, inputs] */, float* __restrict__ middle /* [rows, pitch] */,
              uint32_t inputs, uint32_t pitch) {
    SMEM_DYN(shared);
    pdl_launch();
    pdl_wait();
    float* scratch = reinterpret_cast<float*>(shared);
    const uint32_t at = blockIdx.x * RANKS, first = blockIdx.y * ROWS;
    uint32_t left = adapted(row_adapter, adapters, first, there ? min(*there, rows) : rows), number;
    while (left) {
        const uint32_t mask = next_rows(row_adapter, first, left, number);
        const Adapter adapter = table[number];
        if (at >= adapter.rank) continue;
        if (adapter.dtype == 0)
            down<float>(adapter, x, row_of, scratch, middle, mask, at, first, inputs, pitch);
        else if (adapter.dtype == 1)
            down<bf16>(adapter, x, row_of, scratch, middle, mask, at, first, inputs, pitch);
        else
            down<f16>(adapter, x, row_of, scratch, middle, mask, at, first, inputs, pitch);
    }
}

// Copies t of the rows of `mask`, rounded, to shared memory, with zeros from `rank` to a multiple
// of 8.
__device__ __forceinline__ void load_middle(const float* middle, float* t, uint32_t mask,
                                            uint32_t first, uint32_t rank, uint32_t pitch,
                                            uint32_t dtype) {
    const uint32_t padded = (rank + RANK_STEP - 1) / RANK_STEP * RANK_STEP;
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        if (!(mask >> r & 1)) continue;
        for (uint32_t i = threadIdx.x; i < padded; i += blockDim.x)
            t[r * padded + i] =
                i < rank ? rounded_as(dtype, middle[(size_t)(first + r) * pitch + i]) : 0.0f;
    }
    __syncthreads();
}

template <class T>
__device__ __forceinline__ void up(const Adapter& adapter, const float* t, float* out,
                                   uint32_t mask, uint32_t first, uint32_t output, uint32_t outputs,
                                   uint32_t round) {
    const T* b = static_cast<const T*>(adapter.b) + (size_t)output * adapter.rank;
    const uint32_t padded = (adapter.rank + RANK_STEP - 1) / RANK_STEP * RANK_STEP;
    float sum[ROWS] = {};
    for (uint32_t i = 0; i < adapter.rank; i += 8) {
        float w[8];
        neighbours<T>(b, i, adapter.rank, w);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            if (!(mask >> r & 1)) continue;
#pragma unroll
            for (uint32_t e = 0; e < 8; e++)
                sum[r] = __fmaf_rn(t[r * padded + i + e], w[e], sum[r]);
        }
    }
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        if (!(mask >> r & 1)) continue;
        float* to = out + (size_t)(first + r) * outputs + output;
        *to = __fadd_rn(rounded_as(round, *to),
                        rounded<T>(__fmul_rn(adapter.scale, rounded<T>(sum[r]))));
    }
}

extern "C" __global__ void __launch_bounds__(256)
    lora_up(ADAPTERS, const float* middle /* [rows, pitch] */,
            float* __restrict__ out /* [rows, outputs] */, uint32_t outputs, uint32_t pitch,
            uint32_t round /* dtype of the block */) {
    SMEM_DYN(shared);
    pdl_launch();
    pdl_wait();
    float* t = reinterpret_cast<float*>(shared);
    const uint32_t output = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * ROWS;
    uint32_t left = adapted(row_adapter, adapters, first, there ? min(*there, rows) : rows), number;
    while (left) {
        const uint32_t mask = next_rows(row_adapter, first, left, number);
        const Adapter adapter = table[number];
        load_middle(middle, t, mask, first, adapter.rank, pitch, adapter.dtype);
        if (output < outputs && adapter.rank > 0) {
            if (adapter.dtype == 0)
                up<float>(adapter, t, out, mask, first, output, outputs, round);
            else if (adapter.dtype == 1)
                up<bf16>(adapter, t, out, mask, first, output, outputs, round);
            else
                up<f16>(adapter, t, out, mask, first, output, outputs, round);
        }
        __syncthreads(); // t is read
    }
}

// Computes 4 elements of B^T grad, from `at` on, of the rows of `mask`.
template <class T>
__device__ __forceinline__ void grad_down(const Adapter& adapter, const float* grad,
                                          const uint32_t* row_of, float* scratch, float* middle,
                                          uint32_t mask, uint32_t at, uint32_t first,
                                          uint32_t outputs, uint32_t pitch) {
    const T* b = static_cast<const T*>(adapter.b);
    float sum[RANKS][ROWS] = {};
    for (uint32_t i = threadIdx.x; i < outputs; i += 256) {
        float w[RANKS];
        neighbours<T>(b + (size_t)i * adapter.rank, at, adapter.rank, w);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            if (!(mask >> r & 1)) continue;
            const float own = grad[(size_t)(row_of ? row_of[first + r] : first + r) * outputs + i];
#pragma unroll
            for (uint32_t k = 0; k < RANKS; k++) sum[k][r] = __fmaf_rn(own, w[k], sum[k][r]);
        }
    }
    put_sums(sum, scratch, middle, mask, at, adapter.rank, first, pitch);
}

extern "C" __global__ void __launch_bounds__(256)
    lora_grad_down(ADAPTERS, const uint32_t* __restrict__ row_of /* [rows] or null */,
                   const float* __restrict__ grad /* [rows, outputs] */,
                   float* __restrict__ middle /* [rows, pitch] */, uint32_t outputs,
                   uint32_t pitch) {
    SMEM_DYN(shared);
    float* scratch = reinterpret_cast<float*>(shared);
    const uint32_t at = blockIdx.x * RANKS, first = blockIdx.y * ROWS;
    uint32_t left = adapted(row_adapter, adapters, first, there ? min(*there, rows) : rows), number;
    while (left) {
        const uint32_t mask = next_rows(row_adapter, first, left, number);
        const Adapter adapter = table[number];
        if (at >= adapter.rank) continue;
        if (adapter.dtype == 0)
            grad_down<float>(adapter, grad, row_of, scratch, middle, mask, at, first, outputs,
                             pitch);
        else if (adapter.dtype == 1)
            grad_down<bf16>(adapter, grad, row_of, scratch, middle, mask, at, first, outputs,
                            pitch);
        else
            grad_down<f16>(adapter, grad, row_of, scratch, middle, mask, at, first, outputs, pitch);
    }
}

template <class T>
__device__ __forceinline__ void grad_up(const Adapter& adapter, const float* t, float* out,
                                        uint32_t mask, uint32_t first, uint32_t input,
                                        uint32_t inputs) {
    const T* a = static_cast<const T*>(adapter.a) + input;
    const uint32_t padded = (adapter.rank + RANK_STEP - 1) / RANK_STEP * RANK_STEP;
    float sum[ROWS] = {};
    for (uint32_t i = 0; i < adapter.rank; i++) {
        const float w = widen(a[(size_t)i * inputs]);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            if (mask >> r & 1) sum[r] = __fmaf_rn(t[r * padded + i], w, sum[r]);
    }
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        if (!(mask >> r & 1)) continue;
        float* to = out + (size_t)(first + r) * inputs + input;
        *to = __fmaf_rn(adapter.scale, sum[r], *to);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    lora_grad_up(ADAPTERS, const float* middle /* [rows, pitch] */,
                 float* __restrict__ out /* [rows, inputs] */, uint32_t inputs, uint32_t pitch) {
    SMEM_DYN(shared);
    float* t = reinterpret_cast<float*>(shared);
    const uint32_t input = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * ROWS;
    uint32_t left = adapted(row_adapter, adapters, first, there ? min(*there, rows) : rows), number;
    while (left) {
        const uint32_t mask = next_rows(row_adapter, first, left, number);
        const Adapter adapter = table[number];
        load_middle(middle, t, mask, first, adapter.rank, pitch, 0);
        if (input < inputs && adapter.rank > 0) {
            if (adapter.dtype == 0)
                grad_up<float>(adapter, t, out, mask, first, input, inputs);
            else if (adapter.dtype == 1)
                grad_up<bf16>(adapter, t, out, mask, first, input, inputs);
            else
                grad_up<f16>(adapter, t, out, mask, first, input, inputs);
        }
        __syncthreads(); // t is read
    }
}
