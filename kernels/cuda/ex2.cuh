// The power of two that attention uses, once as inline PTX and once as plain C++, as in ptx.h.
#pragma once
#include "ptx.h"

// 2 to the power of x, to 2 units in the last place; results below 2^-126 are 0. One instruction,
// where exp2f is four.
__device__ __forceinline__ float ex2(float x) {
#ifdef CUDA_CPU
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
#endif
}
