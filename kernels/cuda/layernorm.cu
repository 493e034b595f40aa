// LayerNorm: out = round(weight * (x - mean) * (variance + eps)^-1/2 + bias) per row.
//
// Shapes: x, out f32 [rows, width]; weight, bias f32 [width]. T is the dtype of the result.
// Reference: kernels/src/ops/layernorm.rs.
// Grid: one CTA per row of at most 512 threads, whole warps in one dimension. Where the width
//   allows, a thread reads its elements and weights in pieces of 16 bytes and keeps the first KEPT
//   of them in registers; it reads the others again from the cache. Weights come before pdl_wait.
//   As in torch, the variance is taken around the mean.
// Order of sums: f32 per thread, then lanes, then warps; it depends on the width and the CTA only.
// layernorm_add: first adds a branch, x = round(x + round(y)) as in add.cu, and stores the sum.
//   This saves one launch and one read.
// Traffic: x and out once, 12 bytes per element with the branch; 32 KB per row of a 70B block.
// expects layernorm_*: LDG.128 STG.128
#include "common.cuh"
#include "pdl.cuh"

// Shared memory: two sums per warp.
EXPORT(SHARED, 2 * 32 * 4);

// Pieces of a row that a thread keeps in registers: all of them up to a width of 8,192.
#define KEPT 4

template <class T> __device__ __forceinline__ float4 added(float4 v, const float4& b) {
    v.x = rounded<T>(v.x + rounded<T>(b.x));
    v.y = rounded<T>(v.y + rounded<T>(b.y));
    v.z = rounded<T>(v.z + rounded<T>(b.z));
    v.w = rounded<T>(v.w + rounded<T>(b.w));
    return v;
}
__device__ __forceinline__ float squares_of(float squares, const float4& v, float mean) {
    const float a = v.x - mean, b = v.y - mean, c = v.z - mean, d = v.w - mean;
    return __fmaf_rn(d, d, __fmaf_rn(c, c, __fmaf_rn(b, b, __fmaf_rn(a, a, squares))));
}
template <class T>
__device__ __forceinline__ float4 normed(const float4& v, const float4& w, const float4& b,
                                         float mean, float scale) {
    return make_float4(rounded<T>(w.x * ((v.x - mean) * scale) + b.x),
                       rounded<T>(w.y * ((v.y - mean) * scale) + b.y),
                       rounded<T>(w.z * ((v.z - mean) * scale) + b.z),
                       rounded<T>(w.w * ((v.w - mean) * scale) + b.w));
}

// Calls `piece(number, index)` for the pieces that a thread keeps, then `other(index)`.
template <class Piece, class Other>
__device__ __forceinline__ void pieces(uint32_t fours, const Piece& piece, const Other& other) {
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const uint32_t i = threadIdx.x + j * blockDim.x;
        if (i < fours) piece(j, i);
    }
    for (uint32_t i = threadIdx.x + KEPT * blockDim.x; i < fours; i += blockDim.x) other(i);
}

// A row whose width is a multiple of 4.
template <class T, bool ADD>
__device__ __forceinline__ void layernorm_fours(float4* x, const float4* y, const float4* weight,
                                                const float4* bias, float4* out, float* scratch,
                                                uint32_t width, float eps) {
    const uint32_t fours = width / 4;
    float4 kept[KEPT] = {}, weights[KEPT] = {};
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const uint32_t i = threadIdx.x + j * blockDim.x;
        if (i < fours) weights[j] = weight[i];
    }
    pdl_wait();
    float sum = 0.0f, squares = 0.0f;
    auto add = [&](const float4& v) { sum += v.x + v.y + v.z + v.w; };
    pieces(
        fours,
        [&](int j, uint32_t i) {
            kept[j] = x[i];
            if (ADD) x[i] = kept[j] = added<T>(kept[j], y[i]);
            add(kept[j]);
        },
        [&](uint32_t i) {
            float4 v = x[i];
            if (ADD) x[i] = v = added<T>(v, y[i]);
            add(v);
        });
    const float mean = cta_sum(sum, scratch) / (float)width;
    pieces(
        fours, [&](int j, uint32_t) { squares = squares_of(squares, kept[j], mean); },
        [&](uint32_t i) { squares = squares_of(squares, x[i], mean); });
    const float scale = 1.0f / sqrtf(cta_sum(squares, scratch + 32) / (float)width + eps);
    pieces(
        fours,
        [&](int j, uint32_t i) { out[i] = normed<T>(kept[j], weights[j], bias[i], mean, scale); },
        [&](uint32_t i) { out[i] = normed<T>(x[i], weight[i], bias[i], mean, scale); });
}

template <class T, bool ADD>
__device__ __forceinline__ void layernorm(float* x, const float* y, const float* weight,
                                          const float* bias, float* out, uint32_t width,
                                          float eps) {
    SMEM_DYN(shared);
    float* scratch = reinterpret_cast<float*>(shared);
    pdl_launch();
    x += (size_t)blockIdx.x * width;
    out += (size_t)blockIdx.x * width;
    if (ADD) y += (size_t)blockIdx.x * width;
    if (width % 4 == 0) {
        layernorm_fours<T, ADD>(reinterpret_cast<float4*>(x), reinterpret_cast<const float4*>(y),
                                reinterpret_cast<const float4*>(weight),
                                reinterpret_cast<const float4*>(bias),
                                reinterpret_cast<float4*>(out), scratch, width, eps);
        return;
    }
    pdl_wait();
    float sum = 0.0f, squares = 0.0f;
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
        if (ADD) x[i] = rounded<T>(x[i] + rounded<T>(y[i]));
        sum += x[i];
    }
    const float mean = cta_sum(sum, scratch) / (float)width;
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x)
        squares = __fmaf_rn(x[i] - mean, x[i] - mean, squares);
    const float scale = 1.0f / sqrtf(cta_sum(squares, scratch + 32) / (float)width + eps);
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x)
        out[i] = rounded<T>(weight[i] * ((x[i] - mean) * scale) + bias[i]);
}

#define LAYERNORM(T)                                                                               \
    extern "C" __global__ void __launch_bounds__(512) layernorm_##T(                               \
        float* x /* [rows, width] */, const float* __restrict__ weight /* [width] */,              \
        const float* __restrict__ bias /* [width] */, float* out /* [rows, width] */,              \
        uint32_t width, float eps) {                                                               \
        layernorm<T, false>(x, nullptr, weight, bias, out, width, eps);                            \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(512) layernorm_add_##T(                           \
        float* x /* [rows, width], becomes the sum */, const float* y /* [rows, width] */,         \
        const float* __restrict__ weight /* [width] */,                                            \
        const float* __restrict__ bias /* [width] */, float* out /* [rows, width] */,              \
        uint32_t width, float eps) {                                                               \
        layernorm<T, true>(x, y, weight, bias, out, width, eps);                                   \
    }
LAYERNORM(f32)
LAYERNORM(bf16)
LAYERNORM(f16)
