// Quantizes matrices to INT8 and NF4, with the same bytes as kernels/src/quant/int8.rs and nf4.rs.
//
// Shapes: weights T [outputs, inputs] (f32, bf16, f16); the stored matrix, whose padding the host
//   has zeroed.
// quantize_int8: one CTA per row computes the largest magnitude, then round(127 w / largest), ties
//   to even.
// quantize_nf4_codes: one warp per group of 64, 2 weights and one byte per lane; writes the largest
//   magnitude of each group to `absmax`.
// quantize_nf4_mean: one CTA computes their mean with an f64 sum.
//   quantize_nf4_scales: one CTA per 256 groups computes the largest distance from the mean and the
//   nearest values of the dynamic map.
// Source: bitsandbytes 0.41.1 quantize_4bit(compress_statistics=True), int8_vectorwise_quant.
// Traffic: weights read twice, codes written once.
// expects quantize_*: no LDL STL
#include "nf4.cuh"

// Shared memory: of quantize_int8 and quantize_nf4_scales a maximum per warp, of quantize_nf4_mean
// a sum (f64) per thread.
EXPORT(MAXIMA_SHARED, 32 * 4);
EXPORT(MEAN_SHARED, 256 * 8);

__device__ __forceinline__ float cta_max(float v, float* scratch) {
    v = warp_max(v);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_max(threadIdx.x % 32 < blockDim.x / 32 ? scratch[threadIdx.x % 32] : 0.0f);
}

template <class T>
__device__ __forceinline__ void quantize_int8(const T* weights, int8_t* codes, float* absmax,
                                              uint32_t inputs, float* scratch) {
    weights += (size_t)blockIdx.x * inputs;
    codes += (size_t)blockIdx.x * inputs;
    float largest = 0.0f;
    for (uint32_t i = threadIdx.x; i < inputs; i += blockDim.x)
        largest = fmaxf(largest, fabsf(widen(weights[i])));
    largest = cta_max(largest, scratch);
    const float scale = largest > 0.0f ? __fdiv_rn(127.0f, largest) : 0.0f;
    for (uint32_t i = threadIdx.x; i < inputs; i += blockDim.x)
        codes[i] = (int8_t)__float2int_rn(
            fminf(fmaxf(__fmul_rn(widen(weights[i]), scale), -127.0f), 127.0f));
    if (threadIdx.x == 0) absmax[blockIdx.x] = largest;
}

// Code of the nearest level: the number of midpoints between levels below x.
__device__ __forceinline__ uint32_t level_of(float x) {
    uint32_t code = 0;
    for (uint32_t i = 0; i < 15; i++)
        code += (double)x > ((double)NF4_LEVELS[i] + (double)NF4_LEVELS[i + 1]) * 0.5;
    return code;
}

template <class T>
__device__ __forceinline__ void quantize_nf4_codes(const T* weights, uint8_t* codes, float* absmax,
                                                   uint64_t count) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t group = (uint64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32,
                   at = group * NF4_GROUP + lane * 2;
    const bool has_first = at < count, has_second = at + 1 < count;
    const float first = has_first ? widen(weights[at]) : 0.0f,
                second = has_second ? widen(weights[at + 1]) : 0.0f;
    const float largest = warp_max(fmaxf(fabsf(first), fabsf(second)));
    const float inverse = largest > 0.0f ? __fdiv_rn(1.0f, largest) : 0.0f;
    const uint32_t low = has_second ? level_of(__fmul_rn(second, inverse)) : 0;
    if (has_first) codes[at / 2] = (uint8_t)(level_of(__fmul_rn(first, inverse)) << 4 | low);
    if (has_first && lane == 0) absmax[group] = largest;
}

extern "C" __global__ void __launch_bounds__(256)
    quantize_nf4_mean(const float* __restrict__ absmax /* [groups] */, float* __restrict__ offset,
                      uint64_t groups) {
    SMEM_DYN(shared);
    double *sums = reinterpret_cast<double*>(shared), sum = 0.0;
    for (uint64_t i = threadIdx.x; i < groups; i += blockDim.x) sum += (double)absmax[i];
    sums[threadIdx.x] = sum;
    for (uint32_t half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *offset = (float)(sums[0] / (double)groups);
}

extern "C" __global__ void __launch_bounds__(NF4_SUPER_GROUP)
    quantize_nf4_scales(const float* __restrict__ absmax /* [groups] */,
                        const float* __restrict__ offset,
                        uint8_t* __restrict__ codes /* [groups] */,
                        float* __restrict__ absmax2 /* [groups / 256] */, uint64_t groups) {
    SMEM_DYN(shared);
    const uint64_t group = (uint64_t)blockIdx.x * NF4_SUPER_GROUP + threadIdx.x;
    const float away = group < groups ? __fsub_rn(absmax[group], *offset) : 0.0f;
    const float largest = cta_max(fabsf(away), reinterpret_cast<float*>(shared));
    if (threadIdx.x == 0) absmax2[blockIdx.x] = largest;
    if (group >= groups) return;
    const float x = __fmul_rn(away, largest > 0.0f ? __fdiv_rn(1.0f, largest) : 0.0f);
    // The first value above x, at least the second of all.
    uint32_t above = 1, end = 255;
    while (above < end) {
        const uint32_t middle = (above + end) / 2;
        if (NF4_DYNAMIC[middle] <= x)
            above = middle + 1;
        else
            end = middle;
    }
    codes[group] = (uint8_t)(__fsub_rn(x, NF4_DYNAMIC[above - 1]) > __fsub_rn(NF4_DYNAMIC[above], x)
                                 ? above
                                 : above - 1);
}

#define QUANTIZE(T)                                                                                \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        quantize_int8_##T(const T* __restrict__ weights /* [outputs, inputs] */,                   \
                          int8_t* __restrict__ codes /* as weights */,                             \
                          float* __restrict__ absmax /* [outputs] */, uint32_t inputs) {           \
        SMEM_DYN(shared);                                                                          \
        quantize_int8<T>(weights, codes, absmax, inputs, reinterpret_cast<float*>(shared));        \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        quantize_nf4_codes_##T(const T* __restrict__ weights /* [count] */,                        \
                               uint8_t* __restrict__ codes /* [count / 2] */,                      \
                               float* __restrict__ absmax /* [count / 64] */, uint64_t count) {    \
        quantize_nf4_codes<T>(weights, codes, absmax, count);                                      \
    }
QUANTIZE(f32)
QUANTIZE(bf16)
QUANTIZE(f16)
