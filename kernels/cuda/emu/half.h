// __half and __nv_bfloat16 with the conversions that kernels use, rounded to nearest even.
#pragma once
#ifndef EMU_SCAN
#include <stdint.h>
#include <string.h>
#endif

static inline unsigned __float_as_uint(float f) {
    unsigned bits;
    memcpy(&bits, &f, 4);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline int __float_as_int(float f) { return (int)__float_as_uint(f); }
static inline float __int_as_float(int bits) { return __uint_as_float((unsigned)bits); }

namespace emu {

#ifdef __F16C__
typedef float Floats __attribute__((vector_size(16)));
typedef short Halves __attribute__((vector_size(16)));
#endif

static inline uint16_t bf16_bits(float f) {
    uint32_t x = __float_as_uint(f);
    if ((x & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (uint16_t)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}

static inline float f16_value(uint16_t h) {
#ifdef __F16C__
    // The built-in functions themselves: <immintrin.h> takes longer to read than most kernels.
    return __builtin_ia32_vcvtph2ps((Halves){(short)h})[0];
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) {
        float value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
#endif
}

static inline uint16_t f16_bits(float f) {
    if (f != f) return 0x7fff;
#ifdef __F16C__
    return (uint16_t)__builtin_ia32_vcvtps2ph((Floats){f}, 0 /* to nearest even */)[0];
#else
    uint32_t x = __float_as_uint(f), sign = x >> 16 & 0x8000;
    x &= 0x7fffffff;
    // 65520 and above round to infinity.
    if (x >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    // Below the smallest normal number: the sum with 0.5 has the wanted bits at its end, rounded by
    // the addition.
    if (x < 0x38800000) {
        float shifted = __uint_as_float(x) + 0.5f;
        return (uint16_t)(sign | (__float_as_uint(shifted) - 0x3f000000));
    }
    x += 0xfff + (x >> 13 & 1);
    return (uint16_t)(sign | (x - 0x38000000) >> 13);
#endif
}

} // namespace emu

struct __nv_bfloat16 {
    uint16_t u;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float f) : u(emu::bf16_bits(f)) {}
};
struct __half {
    uint16_t u;
    __half() = default;
    explicit __half(float f) : u(emu::f16_bits(f)) {}
};
struct alignas(4) __half2 {
    __half x, y;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

static inline float __half2float(__half h) { return emu::f16_value(h.u); }
static inline __half __float2half_rn(float f) { return __half(f); }
static inline float __bfloat162float(__nv_bfloat16 h) {
    return __uint_as_float((uint32_t)h.u << 16);
}
static inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
static inline unsigned short __half_as_ushort(__half h) { return h.u; }
static inline __half __ushort_as_half(unsigned short u) {
    __half h;
    h.u = u;
    return h;
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.u; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) {
    __nv_bfloat16 h;
    h.u = u;
    return h;
}
static inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 h) {
    return {__bfloat162float(h.x), __bfloat162float(h.y)};
}
static inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
