// The tokens of a step grouped by expert: the lists that experts.cu writes to device memory and the
// products of experts read.
#pragma once
#include "common.cuh"

// Marks a missing expert or pair of a token, and a missing adapter.
#define NONE 0xffffffffu

// A pair is a token and one of its experts. Pairs are numbered by expert, those of an expert by
// token, so that the rows of an expert lie one after the other; a tile is some of the rows of one
// expert. Words, with P = tokens x chosen:
//   0 pairs   1 tiles   start [experts + 1]
//   pair_token, pair_expert, pair_weight, pair_adapter, token_expert, token_pair   [P] each
//   tile_expert [P]   tile_first [P]
struct Lists {
    uint32_t* count; // pairs, tiles
    uint32_t* start; // first pair of each expert, and the number of pairs
    uint32_t* pair_token;
    uint32_t* pair_expert;
    float* pair_weight;
    uint32_t* pair_adapter; // expert x adapters + adapter of the token, or NONE
    uint32_t* token_expert; // [tokens, chosen]: its experts in their order, then NONE
    uint32_t* token_pair;   // the same as pairs
    uint32_t* tile_expert;
    uint32_t* tile_first; // first pair
};

__device__ __forceinline__ Lists lists_of(uint32_t* words, uint32_t tokens, uint32_t chosen,
                                          uint32_t experts) {
    const size_t pairs = (size_t)tokens * chosen;
    Lists lists;
    lists.count = words;
    lists.start = words + 2;
    lists.pair_token = lists.start + experts + 1;
    lists.pair_expert = lists.pair_token + pairs;
    lists.pair_weight = reinterpret_cast<float*>(lists.pair_expert + pairs);
    lists.pair_adapter = lists.pair_expert + 2 * pairs;
    lists.token_expert = lists.pair_adapter + pairs;
    lists.token_pair = lists.token_expert + pairs;
    lists.tile_expert = lists.token_pair + pairs;
    lists.tile_first = lists.tile_expert + pairs;
    return lists;
}

// Parameters of a product of experts: addresses of the matrices [experts, 3] (gate, up, down), the
// lists, and their sizes.
#define EXPERTS                                                                                    \
    const uint64_t *matrices, uint32_t *words, uint32_t tokens, uint32_t chosen, uint32_t experts
