// RMSNorm: out = weight * round(x * (mean(x^2) + eps)^-1/2) per row.
//
// Shapes: x, out f32 [rows, width]; weight f32 [width]. T is the dtype of the normalised value.
// Source: transformers LlamaRMSNorm.
// Grid: one CTA per row, whole warps in one dimension. A thread has eights of elements, the first
//   KEPT of them in registers; it reads the others again from the cache. Where the width is a
//   multiple of 4, it reads 16 bytes at a time. The first weights come before pdl_wait.
// Order of sums: rmsnorm.cuh; it depends on the width alone.
// rmsnorm_add: first adds a branch, x = round(x + round(y)), and stores the sum. This saves one
//   launch and one read. linear_cluster.cu can do the same before a product.
// expects rmsnorm_*: LDG.128 STG.128
#include "pdl.cuh"
#include "rmsnorm.cuh"

// Shared memory: the squares of each block of a row.
EXPORT(SHARED_PER_BLOCK, 4);

// Eights of a row that a thread keeps in registers: all of them up to a width of 8,192.
#define KEPT 2

// A row, in whole eights.
struct Row {
    float* at;
    uint32_t width;
    bool is_fours; // the width is a multiple of 4

    __device__ __forceinline__ Eight load(uint32_t eight) const {
        Eight to;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t from = eight * 8 + i * 4;
            to.v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (is_fours) {
                if (from < width) to.v[i] = *reinterpret_cast<const float4*>(at + from);
            } else {
                if (from < width) to.v[i].x = at[from];
                if (from + 1 < width) to.v[i].y = at[from + 1];
                if (from + 2 < width) to.v[i].z = at[from + 2];
                if (from + 3 < width) to.v[i].w = at[from + 3];
            }
        }
        return to;
    }
    __device__ __forceinline__ void store(uint32_t eight, const Eight& from) const {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t to = eight * 8 + i * 4;
            if (is_fours) {
                if (to < width) *reinterpret_cast<float4*>(at + to) = from.v[i];
            } else {
                if (to < width) at[to] = from.v[i].x;
                if (to + 1 < width) at[to + 1] = from.v[i].y;
                if (to + 2 < width) at[to + 2] = from.v[i].z;
                if (to + 3 < width) at[to + 3] = from.v[i].w;
            }
        }
    }
};

// ADD: first x = round(x + round(y)), as in add.cu; each thread adds the elements that it sums.
template <class T, bool ADD>
__device__ __forceinline__ void rmsnorm(float* x, const float* y, const float* weight, float* out,
                                        uint32_t width, float eps) {
    SMEM_DYN(shared);
    float* of_blocks = reinterpret_cast<float*>(shared);
    pdl_launch();
    const size_t row = (size_t)blockIdx.x * width;
    const bool is_fours = width % 4 == 0;
    const Row from = {x + row, width, is_fours},
              branch = {const_cast<float*>(y) + row, width, is_fours},
              factors = {const_cast<float*>(weight), width, is_fours},
              to = {out + row, width, is_fours};
    const uint32_t blocks = (width + 63) / 64, all = blocks * NORM_EIGHTS;
    Eight kept[KEPT], weights[KEPT];
#pragma unroll
    for (int j = 0; j < KEPT; j++) weights[j] = factors.load(threadIdx.x + j * blockDim.x);
    pdl_wait();
    auto take = [&](uint32_t eight) {
        Eight v = from.load(eight);
        if (ADD) {
            const Eight b = branch.load(eight);
            for (int i = 0; i < 2; i++) v.v[i] = added<T>(v.v[i], b.v[i]);
        }
        return v;
    };
    // Whole warps sum blocks; those of eights that are not there are none.
    auto sum = [&](uint32_t eight, const Eight& v) {
        if (ADD) from.store(eight, v);
        const float of_block = block_squares(v);
        if (eight < all && eight % NORM_EIGHTS == 0) of_blocks[eight / NORM_EIGHTS] = of_block;
    };
#pragma unroll
    for (int j = 0; j < KEPT; j++) kept[j] = take(threadIdx.x + j * blockDim.x);
#pragma unroll
    for (int j = 0; j < KEPT; j++) sum(threadIdx.x + j * blockDim.x, kept[j]);
    for (uint32_t first = KEPT * blockDim.x; first < all; first += blockDim.x)
        sum(first + threadIdx.x, take(first + threadIdx.x));
    __syncthreads();
    const float scale = norm_scale(of_blocks, blocks, width, eps);
    auto put = [&](uint32_t eight, const Eight& v, const Eight& w) {
        to.store(eight, {{normed<T>(v.v[0], w.v[0], scale), normed<T>(v.v[1], w.v[1], scale)}});
    };
#pragma unroll
    for (int j = 0; j < KEPT; j++) put(threadIdx.x + j * blockDim.x, kept[j], weights[j]);
    for (uint32_t i = threadIdx.x + KEPT * blockDim.x; i < all; i += blockDim.x)
        put(i, from.load(i), factors.load(i));
}

#define RMSNORM(T)                                                                                 \
    extern "C" __global__ void __launch_bounds__(512) rmsnorm_##T(                                 \
        float* x /* [rows, width], read */, const float* __restrict__ weight /* [width] */,        \
        float* __restrict__ out /* [rows, width] */, uint32_t width, float eps) {                  \
        rmsnorm<T, false>(x, nullptr, weight, out, width, eps);                                    \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(512) rmsnorm_add_##T(                             \
        float* x /* [rows, width], becomes the sum */, const float* y /* [rows, width] */,         \
        const float* __restrict__ weight /* [width] */,                                            \
        float* __restrict__ out /* [rows, width] */, uint32_t width, float eps) {                  \
        rmsnorm<T, true>(x, y, weight, out, width, eps);                                           \
    }
RMSNORM(f32)
RMSNORM(bf16)
RMSNORM(f16)
