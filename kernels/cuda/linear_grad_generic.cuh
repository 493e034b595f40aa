// Gradient of the input of a product in every shape and format. linear_grad_generic.cu describes
// it; linear_grad_generic.cu and experts_grad_generic.cu say which rows and matrices a CTA has.
#pragma once
#include "linear.cuh"

#define TILE_INPUTS 128
#define TILE_ROWS   32
#define STEP        16
// Shared memory: weights [STEP, TILE_INPUTS], gradients [TILE_ROWS, STEP + 1], all f32.
EXPORT(TILE_INPUTS, TILE_INPUTS);
EXPORT(TILE_ROWS, TILE_ROWS);
EXPORT(SHARED, (STEP * TILE_INPUTS + TILE_ROWS * (STEP + 1)) * 4);

template <class F, class T> struct Decoded;
template <class T> struct Decoded<Plain, T> {
    const T* values;
    size_t inputs;
    __device__ __forceinline__ Decoded(const uint8_t* bytes, size_t, size_t inputs, uint32_t)
        : values(reinterpret_cast<const T*>(bytes)), inputs(inputs) {}
    __device__ __forceinline__ float at(size_t output, size_t input) const {
        return widen(values[output * inputs + input]);
    }
};
template <class T> struct Decoded<Int8, T> {
    const int8_t* codes;
    const float* absmax;
    size_t inputs;
    __device__ __forceinline__ Decoded(const uint8_t* bytes, size_t outputs, size_t inputs,
                                       uint32_t)
        : codes(reinterpret_cast<const int8_t*>(bytes)),
          absmax(reinterpret_cast<const float*>(bytes + aligned_end(outputs * inputs))),
          inputs(inputs) {}
    __device__ __forceinline__ float at(size_t output, size_t input) const {
        return __fmul_rn((float)codes[output * inputs + input], absmax[output] * (1.0f / 127.0f));
    }
};
template <class T> struct Decoded<Nf4, T> {
    Nf4Matrix matrix;
    __device__ __forceinline__ Decoded(const uint8_t* bytes, size_t outputs, size_t inputs,
                                       uint32_t layout)
        : matrix(nf4_matrix(bytes, outputs, inputs, layout)) {}
    __device__ __forceinline__ float at(size_t output, size_t input) const {
        return rounded<T>(nf4_weight(matrix, output, input));
    }
};

// Computes rows from `first_row` on, before `rows`, at most TILE_ROWS, and inputs from
// `first_input` on. `list` names the row of `grad` of each row, or is null.
template <class F, class T>
__device__ __forceinline__ void linear_grad_generic(const uint8_t* bytes, uint32_t layout,
                                                    const float* grad, const uint32_t* list,
                                                    float* out, uint32_t outputs, uint32_t inputs,
                                                    uint32_t first_row, uint32_t rows,
                                                    uint32_t first_input) {
    SMEM_DYN(shared);
    float *w = reinterpret_cast<float*>(shared), *g = w + STEP * TILE_INPUTS;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Decoded<F, T> weight(bytes, outputs, inputs, layout);
    float sum[4][4] = {};
    for (uint32_t from = 0; from < outputs; from += STEP) {
        __syncthreads();
#pragma unroll
        for (uint32_t i = threadIdx.x; i < STEP * TILE_INPUTS; i += 256) {
            const uint32_t output = from + i / TILE_INPUTS, input = first_input + i % TILE_INPUTS;
            w[i] = output < outputs && input < inputs ? weight.at(output, input) : 0.0f;
        }
#pragma unroll
        for (uint32_t i = threadIdx.x; i < TILE_ROWS * STEP; i += 256) {
            const uint32_t row = first_row + i / STEP, output = from + i % STEP;
            g[i / STEP * (STEP + 1) + i % STEP] =
                row < rows && output < outputs
                    ? grad[(size_t)(list ? list[row] : row) * outputs + output]
                    : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (uint32_t k = 0; k < STEP; k++) {
            float a[4], b[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                a[i] = g[(warp * 4 + i) * (STEP + 1) + k];
                b[i] = w[k * TILE_INPUTS + lane + 32 * i];
            }
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
#pragma unroll
                for (uint32_t j = 0; j < 4; j++) sum[i][j] = __fmaf_rn(a[i], b[j], sum[i][j]);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t row = first_row + warp * 4 + i, input = first_input + lane + 32 * j;
            if (row < rows && input < inputs) out[(size_t)row * inputs + input] = sum[i][j];
        }
}
