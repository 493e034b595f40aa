// What most kernels share: conversions between f32 and stored dtypes, sums in a fixed order, and
// the batch of a step.
#pragma once
#include "ptx.h"

typedef __nv_bfloat16 bf16;
typedef __half f16;
typedef float f32;

// --- dtypes --------------------------------------------------------------------------------------

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(bf16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float widen(f16 v) { return __half2float(v); }

template <class T> __device__ __forceinline__ T narrow(float v);
template <> __device__ __forceinline__ float narrow<float>(float v) { return v; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float v) { return __float2bfloat16_rn(v); }
template <> __device__ __forceinline__ f16 narrow<f16>(float v) { return __float2half_rn(v); }

// The value of T nearest to v.
template <class T> __device__ __forceinline__ float rounded(float v) { return widen(narrow<T>(v)); }

// --- sums in a fixed order -----------------------------------------------------------------------

// Sum over the lanes of a full warp; every lane gets it.
__device__ __forceinline__ float warp_sum(float v) {
    for (int bits = 16; bits > 0; bits /= 2) v += __shfl_xor_sync(~0u, v, bits);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
    for (int bits = 16; bits > 0; bits /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, bits));
    return v;
}

// Sum over a CTA of at most 32 whole warps in one dimension; every thread gets it. `scratch` holds
// 32 floats of shared memory, which may be reused after the next barrier.
__device__ __forceinline__ float cta_sum(float v, float* scratch) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    v = warp_sum(v);
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

// --- the batch of a step -------------------------------------------------------------------------

// Positions per page of the KV cache.
#define PAGE_TOKENS 16

// The rows of a step as the host lays them out in one array of words (kernels/src/cuda/batch.rs):
//   0 rows, 1 tokens, 2..7 where the arrays below begin
//   token_row [tokens]          row of each new token
//   token_position [tokens]     position of each new token in its row
//   row_prefix [rows]           cached positions of each row
//   row_table [rows]            index in `pages` of the first page of each row
//   pages                       page ids of positions 0..16, 16..32, ... of each row
//   row_start [rows + 1]        first new token of each row, then the number of tokens
struct Batch {
    const uint32_t* token_row;
    const uint32_t* token_position;
    const uint32_t* row_prefix;
    const uint32_t* row_table;
    const uint32_t* pages;
    const uint32_t* row_start;
    uint32_t rows, tokens;
};

__device__ __forceinline__ Batch batch_of(const uint32_t* words) {
    Batch batch;
    batch.rows = words[0];
    batch.tokens = words[1];
    batch.token_row = words + words[2];
    batch.token_position = words + words[3];
    batch.row_prefix = words + words[4];
    batch.row_table = words + words[5];
    batch.pages = words + words[6];
    batch.row_start = words + words[7];
    return batch;
}

// Page of a position of a row.
__device__ __forceinline__ uint32_t page_of(const Batch& batch, uint32_t row, uint32_t position) {
    return batch.pages[batch.row_table[row] + position / PAGE_TOKENS];
}
