// Rows of activations for linear_gemv.cu: out = round(x), in the order in which its lanes read
// them.
//
// Shapes: x f32 [rows, inputs]; out 16-bit [blocks of 64 inputs, tiles of 8 rows, 2, 32 lanes, 8]:
//   lane 4 g + q of a half has inputs 16 q + 8 half .. + 7 of row g of the tile. Rows that are not
//   there are zeros.
// Reference: kernels/src/ops/linear.rs, which rounds x in the same way.
// Grid: blocks x tiles; one warp each.
// Traffic: x once in, half of it out. It is read once here in place of once per tile of outputs, in
//   a sixteenth of the wavefronts.
// Limits: inputs a multiple of 64.
// expects linear_pack_*: LDG.128 STG.128
#include "linear.cuh"
#include "pdl.cuh"

template <class T>
__device__ __forceinline__ void linear_pack(const float* x, uint4* out, uint32_t inputs,
                                            uint32_t rows) {
    pdl_launch();
    const uint32_t lane = threadIdx.x, block = blockIdx.x, row = blockIdx.y * 8 + lane / 4;
    pdl_wait();
    const float4* from = reinterpret_cast<const float4*>(x + (size_t)row * inputs +
                                                         block * BLOCK_INPUTS + lane % 4 * 16);
    float4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = row < rows ? from[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    uint4* to = out + ((size_t)block * gridDim.y + blockIdx.y) * 64 + lane;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 &a = v[half * 2], &b = v[half * 2 + 1];
        to[half * 32] =
            make_uint4(pack<T>(a.x, a.y), pack<T>(a.z, a.w), pack<T>(b.x, b.y), pack<T>(b.z, b.w));
    }
}

#define LINEAR_PACK(T)                                                                             \
    extern "C" __global__ void __launch_bounds__(32)                                               \
        linear_pack_##T(const float* x /* [rows, inputs] */, uint4* __restrict__ out,              \
                        uint32_t inputs, uint32_t rows) {                                          \
        linear_pack<T>(x, out, inputs, rows);                                                      \
    }
LINEAR_PACK(bf16)
LINEAR_PACK(f16)
