// Low-rank adapters beside a matrix product, every row with the adapter of its part:
//   t = round_a(A round_a(x))    d = round_a(B round_a(t))    out = round(out) + round_a(scale d)
//   gradient: t = B^T grad, out += scale A^T t, all f32
//
// x, out, grad f32 [rows, inputs or outputs]; A [rank, inputs], B [outputs, rank] of f32, bf16 or f16 (round_a); middle f32 [rows, pitch] holds t.
// CPU reference: kernels/src/ops/lora.rs.
// Forward, rows are taken by 8, and of these those of one adapter together: each row names its adapter in a table that lies in device memory, so that a
// launch is the same whoever uses which adapter, and can be recorded. Each adapter of 8 rows is read once for them.
// lora_down: grid x largest rank / 8, y rows / 8; CTA 8 warps, one row of A each: lanes take every 32nd input, then a butterfly.
// lora_up: grid x outputs / 256, y rows / 8; a thread has one output: its row of B against the rows of t, which lie in shared memory.
// Gradients: rows are cut into tiles of at most 8 of one adapter (struct Tile, written by the host), so adapters of any number share a launch.
// lora_grad_down: grid x largest rank, y tiles; a CTA has one column of B: threads take every 256th output, then lanes, then warps.
// lora_grad_up: grid x inputs / 256, y tiles; a thread has one input: its column of A, rank by rank.
// Every element has an order of sums that depends on its row and adapter alone.
// Floor: A and B once per 8 rows: rank 16 beside a 8192 x 8192 matrix 0.5 MB, an eightieth of the matrix in NF4.
// expects lora_*: no LDL STL
#include "common.cuh"

#define ROWS 8

// At most 8 consecutive rows of one adapter, for gradients. The host writes it as 10 words.
struct Tile {
    const void *a, *b;
    uint32_t rank, first, rows, dtype; // dtype of A and B: 0 f32, 1 bf16, 2 f16
    float scale;
    uint32_t unused;
};

__device__ __forceinline__ float rounded_as(uint32_t dtype, float v) {
    return dtype == 0 ? v : dtype == 1 ? rounded<bf16>(v) : rounded<f16>(v);
}
__device__ __forceinline__ float element(const void* values, uint32_t dtype, size_t i) {
    if (dtype == 0) return static_cast<const float*>(values)[i];
    return dtype == 1 ? widen(static_cast<const bf16*>(values)[i]) : widen(static_cast<const f16*>(values)[i]);
}

// An adapter beside a matrix; one of rank 0 is not there. The host writes it as 8 words.
struct Adapter {
    const void *a, *b;
    uint32_t rank, dtype; // of A and B: 0 f32, 1 bf16, 2 f16
    float scale;
    uint32_t unused;
};

// What rows go through: a table of adapters, which of them each row has (or none: a number past the table), and how many rows there are, if the
// host does not know.
#define ADAPTERS                                                                                                                       \
    const Adapter *__restrict__ table, const uint32_t *__restrict__ row_adapter /* [rows] */, const uint32_t *__restrict__ there /* or null */, \
        uint32_t adapters, uint32_t rows

// Of 8 rows from `first` on those that have an adapter, as bits.
__device__ __forceinline__ uint32_t adapted(const uint32_t* row_adapter, uint32_t adapters, uint32_t first, uint32_t rows) {
    uint32_t mask = 0;
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        if (first + r < rows && row_adapter[first + r] < adapters) mask |= 1u << r;
    return mask;
}

// The rows of `left` with the adapter of the first of them, which are taken out of it.
__device__ __forceinline__ uint32_t next_rows(const uint32_t* row_adapter, uint32_t first, uint32_t& left, uint32_t& adapter) {
    uint32_t mask = 0;
    adapter = row_adapter[first + __ffs(left) - 1];
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        if ((left >> r & 1) && row_adapter[first + r] == adapter) mask |= 1u << r;
    left &= ~mask;
    return mask;
}

extern "C" __global__ void __launch_bounds__(256)
    lora_down(ADAPTERS, const float* __restrict__ x /* [rows, inputs] */, float* __restrict__ middle /* [rows, pitch] */, uint32_t inputs,
              uint32_t pitch) {
    const uint32_t at = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * ROWS;
    uint32_t left = adapted(row_adapter, adapters, first, there ? min(*there, rows) : rows), number;
    while (left) {
        const uint32_t mask = next_rows(row_adapter, first, left, number);
        const Adapter adapter = table[number];
        if (at >= adapter.rank) continue;
        float sum[ROWS] = {};
        for (uint32_t i = lane; i < inputs; i += 32) {
            const float w = element(adapter.a, adapter.dtype, (size_t)at * inputs + i);
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++)
                if (mask >> r & 1) sum[r] = __fmaf_rn(rounded_as(adapter.dtype, x[(size_t)(first + r) * inputs + i]), w, sum[r]);
        }
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            const float total = warp_sum(sum[r]);
            if (lane == 0 && (mask >> r & 1)) middle[(size_t)(first + r) * pitch + at] = rounded_as(adapter.dtype, total);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    lora_up(ADAPTERS, const float* __restrict__ middle /* [rows, pitch] */, float* __restrict__ out /* [rows, outputs] */, uint32_t outputs,
            uint32_t pitch, uint32_t round /* dtype of the block */) {
    SMEM_DYN(shared); // 8 x pitch floats
    float* t = reinterpret_cast<float*>(shared);
    const uint32_t output = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * ROWS;
    uint32_t left = adapted(row_adapter, adapters, first, there ? min(*there, rows) : rows), number;
    while (left) {
        const uint32_t mask = next_rows(row_adapter, first, left, number);
        const Adapter adapter = table[number];
        for (uint32_t i = threadIdx.x; i < ROWS * adapter.rank; i += blockDim.x) {
            const uint32_t r = i / adapter.rank, column = i % adapter.rank;
            if (mask >> r & 1) t[r * pitch + column] = middle[(size_t)(first + r) * pitch + column];
        }
        __syncthreads();
        float sum[ROWS] = {};
        if (output < outputs && adapter.rank > 0) {
            for (uint32_t i = 0; i < adapter.rank; i++) {
                const float w = element(adapter.b, adapter.dtype, (size_t)output * adapter.rank + i);
#pragma unroll
                for (uint32_t r = 0; r < ROWS; r++)
                    if (mask >> r & 1) sum[r] = __fmaf_rn(t[r * pitch + i], w, sum[r]);
            }
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) {
                if (!(mask >> r & 1)) continue;
                float* to = out + (size_t)(first + r) * outputs + output;
                const float scaled = __fmul_rn(adapter.scale, rounded_as(adapter.dtype, sum[r]));
                *to = __fadd_rn(rounded_as(round, *to), rounded_as(adapter.dtype, scaled));
            }
        }
        __syncthreads(); // t is read
    }
}

extern "C" __global__ void __launch_bounds__(256)
    lora_grad_down(const Tile* __restrict__ tiles, const float* __restrict__ grad /* [rows, outputs] */, float* __restrict__ middle /* [rows, pitch] */,
                   uint32_t outputs, uint32_t pitch) {
    SMEM_DYN(shared); // 8 x 32 floats
    const Tile tile = tiles[blockIdx.y];
    const uint32_t at = blockIdx.x;
    if (at >= tile.rank) return;
    float sum[ROWS] = {};
    for (uint32_t i = threadIdx.x; i < outputs; i += blockDim.x) {
        const float w = element(tile.b, tile.dtype, (size_t)i * tile.rank + at);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            if (r < tile.rows) sum[r] = __fmaf_rn(grad[(size_t)(tile.first + r) * outputs + i], w, sum[r]);
    }
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        const float total = cta_sum(sum[r], reinterpret_cast<float*>(shared) + r * 32);
        if (threadIdx.x == 0 && r < tile.rows) middle[(size_t)(tile.first + r) * pitch + at] = total;
    }
}

extern "C" __global__ void __launch_bounds__(256)
    lora_grad_up(const Tile* __restrict__ tiles, const float* __restrict__ middle /* [rows, pitch] */, float* __restrict__ out /* [rows, inputs] */,
                 uint32_t inputs, uint32_t pitch) {
    const Tile tile = tiles[blockIdx.y];
    const uint32_t input = blockIdx.x * blockDim.x + threadIdx.x;
    if (input >= inputs) return;
    float sum[ROWS] = {};
    for (uint32_t i = 0; i < tile.rank; i++) {
        const float w = element(tile.a, tile.dtype, (size_t)i * inputs + input);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            if (r < tile.rows) sum[r] = __fmaf_rn(middle[(size_t)(tile.first + r) * pitch + i], w, sum[r]);
    }
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        if (r < tile.rows) {
            float* to = out + (size_t)(tile.first + r) * inputs + input;
            *to = __fmaf_rn(tile.scale, sum[r], *to);
        }
}
