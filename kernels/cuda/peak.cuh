// Operands for the peak rates of the tensor cores: random signs and mantissas. Constants would take
// less power and run faster.
#pragma once
#include "pairs.cuh"

// Pairs of bf16 from 1 to 2, of either sign. Source of the mixing: Wellons, "Prospecting for hash
// functions" (2018), lowbias32.
__device__ __forceinline__ uint32_t noise(uint32_t seed) {
    seed = (seed ^ seed >> 16) * 0x7feb352du;
    seed = (seed ^ seed >> 15) * 0x846ca68bu;
    return (seed & 0x807f807fu) | 0x3f803f80u;
}
