// Layout of keys and values: the pool of a block is [pages, kv_heads, 2, PAGE_TOKENS, head_dim] of
// the block's dtype (kernels/src/kv.rs).
#pragma once
#include "common.cuh"

// Index of the first element of the key (half 0) or value (1) of a head at a position of page
// `page`.
__device__ __forceinline__ size_t vector_at(uint32_t page, uint32_t kv_heads, uint32_t head,
                                            uint32_t half, uint32_t position, uint32_t head_dim) {
    return ((((size_t)page * kv_heads + head) * 2 + half) * PAGE_TOKENS + position % PAGE_TOKENS) *
           head_dim;
}
