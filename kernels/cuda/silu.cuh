// The middle of a gated MLP, for silu_mul.cu and for products that apply it to their results.
#pragma once
#include "common.cuh"

// round(silu(round(gate))) * round(up); T is the dtype of the roundings.
template <class T> __device__ __forceinline__ float activated(float gate, float up) {
    const float x = rounded<T>(gate);
    return rounded<T>(x / (1.0f + expf(-x))) * rounded<T>(up);
}
