// The outbox: what kernels append to the pages of a block, once more, for the host to copy to the
// mirror of the pages (kernels/src/cuda/cache/mirror.rs). A slot holds the keys and values of a
// token, [kv_heads, 2, head_dim]; the tokens of a block follow each other, and so do the blocks of
// a unit.
#pragma once
#include "pages.cuh"

// Word of a batch (common.cuh) that holds the slots before the first one of the unit, where `block`
// counts from the first block of the span; where `block` is 0, so is it.
#define FIRST_SLOT_WORD 8

// Index of the first element of the key (half 0) or value (1) of a head of a token.
__device__ __forceinline__ size_t outbox_at(const uint32_t* words, uint32_t block, uint32_t token,
                                            uint32_t kv_heads, uint32_t head, uint32_t half,
                                            uint32_t head_dim) {
    const size_t slot = (size_t)block * batch_of(words).tokens + token - words[FIRST_SLOT_WORD];
    return ((slot * kv_heads + head) * 2 + half) * head_dim;
}
