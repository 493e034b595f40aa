// Rotation of pairs of elements of a query or a key (rope.cu). Products are rounded before they are
// added, also in f32.
#pragma once
#include "pairs.cuh"

template <class T>
__device__ __forceinline__ void rotate(float& x, float& y, float cosine, float sine) {
    const float a = rounded<T>(x), b = rounded<T>(y);
    x = rounded<T>(__fsub_rn(rounded<T>(__fmul_rn(a, cosine)), rounded<T>(__fmul_rn(b, sine))));
    y = rounded<T>(__fadd_rn(rounded<T>(__fmul_rn(b, cosine)), rounded<T>(__fmul_rn(a, sine))));
}

// Two pairs of a 16-bit T, whose elements are rounded already; the results are not rounded yet.
template <class T>
__device__ __forceinline__ void rotate_two(float2& x, float2& y, const float2& cosines,
                                           const float2& sines) {
    float2 xc = make_float2(__fmul_rn(x.x, cosines.x), __fmul_rn(x.y, cosines.y)),
           ys = make_float2(__fmul_rn(y.x, sines.x), __fmul_rn(y.y, sines.y)),
           yc = make_float2(__fmul_rn(y.x, cosines.x), __fmul_rn(y.y, cosines.y)),
           xs = make_float2(__fmul_rn(x.x, sines.x), __fmul_rn(x.y, sines.y));
    round_pair<T>(xc.x, xc.y), round_pair<T>(ys.x, ys.y);
    round_pair<T>(yc.x, yc.y), round_pair<T>(xs.x, xs.y);
    x = make_float2(__fsub_rn(xc.x, ys.x), __fsub_rn(xc.y, ys.y));
    y = make_float2(__fadd_rn(yc.x, xs.x), __fadd_rn(yc.y, xs.y));
}
