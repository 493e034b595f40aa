// What the tensor-core products share, GEMV (linear_gemv.cu) and GEMM (linear_gemm.cu and
// linear_wgmma.cu): how weights become fragments of mma.m16n8k16, and the order in which an element
// is summed.
//
// Order of sums: the inputs are cut into blocks of 64, a block into 4 steps of 16 inputs, one mma
//   each. Lane q of a quad holds inputs 16 q .. 16 q + 15 of a block; step s takes its inputs 4 s
//   .. 4 s + 3. So 16 or more neighbouring bytes of a row go to one lane in every format;
//   activations are permuted in the same way without extra work. An NF4 block is one group: its 4
//   steps are summed from zero, scaled, then added, so that tensor cores multiply codes without
//   scales. The blocks are cut into at most 8 segments, each a multiple of 256 inputs, as a
//   function of the number of inputs alone. The sums of the segments are added from first to last.
//   No other additions exist, so an element has the same bits in a step of 1 row and in a prefill
//   of 1,000.
//
// Weights are operand A (16 outputs), activations operand B (8 tokens), so that few tokens waste
//   nothing.
// Source of the fragments: PTX ISA 9.7.14.5.8.
#pragma once
#include "nf4.cuh"
#include "pairs.cuh"

// Inputs of a block, and the largest number of segments.
#define BLOCK_INPUTS 64
#define SEGMENTS     8

// Inputs of a segment: a multiple of 256.
__device__ __forceinline__ uint32_t segment_inputs(uint32_t inputs) {
    const uint32_t chunks = (inputs + 255) / 256;
    return (chunks + SEGMENTS - 1) / SEGMENTS * 256;
}

// Formats, with the bytes of a block of a row.
struct Plain {
    static constexpr uint32_t BLOCK_BYTES = 128;
};
struct Int8 {
    static constexpr uint32_t BLOCK_BYTES = 64;
};
struct Nf4 {
    static constexpr uint32_t BLOCK_BYTES = 32;
};
template <class A, class B> struct same_type {
    static constexpr bool value = false;
};
template <class A> struct same_type<A, A> {
    static constexpr bool value = true;
};

// --- the table of NF4 ----------------------------------------------------------------------------

// Levels are multiplied by this factor before they are rounded to T, and scales are divided by it.
// Of all factors from 1 to 2 it gives the smallest rounding error of the 16 levels: 3.2e-4 root
// mean square in bf16 (3.4e-5 in f16). Rounding each product of level and scale has 8.4e-4
// (1.06e-4).
template <class T> __device__ __forceinline__ float nf4_factor();
template <> __device__ __forceinline__ float nf4_factor<bf16>() { return 1.43701171875f; }
template <> __device__ __forceinline__ float nf4_factor<f16>() { return 1.3662109375f; }

// Bytes of the table. For each byte of codes it holds the pair of its levels, once per bank, so
// that lanes look up 2 weights each without bank conflicts (entry e of lane l is word 32 e + l). At
// 36 weights per multiprocessor and cycle, the rate of an H200 at 4.3 TB/s, look-ups take 0.56 of
// the shared memory's cycles; a single copy of the table would need 1.9.
#define NF4_TABLE_BYTES (256 * 128)

template <class T> __device__ __forceinline__ void fill_nf4_table(uint32_t* table) {
    for (uint32_t byte = threadIdx.x / 8; byte < 256; byte += blockDim.x / 8) {
        const float factor = nf4_factor<T>();
        const uint32_t pair =
            pack<T>(NF4_LEVELS[byte >> 4] * factor, NF4_LEVELS[byte & 15] * factor);
        reinterpret_cast<uint4*>(table)[byte * 8 + threadIdx.x % 8] =
            make_uint4(pair, pair, pair, pair);
    }
}

// --- fragments -----------------------------------------------------------------------------------

// What a lane reads of a block: its 16 inputs of rows g and g + 8.
template <class F> struct Fragment;
template <> struct Fragment<Nf4> {
    uint4 v; // 8 bytes of row g, then of row g + 8 (nf4.cuh)
};
template <> struct Fragment<Int8> {
    uint4 low, high;
};
template <> struct Fragment<Plain> {
    uint4 low[2], high[2];
};

// Converts the codes of 4 inputs to two pairs: a byte becomes the low bits of the f32 2^23 + 128 +
// code.
template <class T>
__device__ __forceinline__ void widen_int8(uint32_t word, uint32_t& first, uint32_t& second) {
    word ^= 0x80808080u;
    const float base = 8388736.0f;
    const float a = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440)) - base;
    const float b = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441)) - base;
    const float c = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7442)) - base;
    const float d = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7443)) - base;
    first = pack<T>(a, b);
    second = pack<T>(c, d);
}

// The pair of levels of byte `byte` of `word`. `bank` is 4 x this lane. The address takes one shift
// and one logical instruction: byte x 128 plus the bank.
__device__ __forceinline__ uint32_t nf4_pair(const unsigned char* table, uint32_t bank,
                                             uint32_t word, int byte) {
    const uint32_t at = byte == 0 ? word << 7 : word >> (byte * 8 - 7);
    return *reinterpret_cast<const uint32_t*>(table + ((at & 0x7f80) | bank));
}

// The fragments of 4 steps of rows g and g + 8. `table` is the NF4 table.
template <class T>
__device__ __forceinline__ void fragments(uint32_t (&a)[4][4], const Fragment<Nf4>& from,
                                          const unsigned char* table) {
    const uint32_t bank = threadIdx.x % 32 * 4;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const uint32_t low = s < 2 ? from.v.x : from.v.y, high = s < 2 ? from.v.z : from.v.w;
        a[s][0] = nf4_pair(table, bank, low, s % 2 * 2);
        a[s][1] = nf4_pair(table, bank, high, s % 2 * 2);
        a[s][2] = nf4_pair(table, bank, low, s % 2 * 2 + 1);
        a[s][3] = nf4_pair(table, bank, high, s % 2 * 2 + 1);
    }
}
template <class T>
__device__ __forceinline__ void fragments(uint32_t (&a)[4][4], const Fragment<Int8>& from,
                                          const unsigned char*) {
    const uint32_t l[4] = {from.low.x, from.low.y, from.low.z, from.low.w},
                   h[4] = {from.high.x, from.high.y, from.high.z, from.high.w};
#pragma unroll
    for (int s = 0; s < 4; s++) {
        widen_int8<T>(l[s], a[s][0], a[s][2]);
        widen_int8<T>(h[s], a[s][1], a[s][3]);
    }
}
template <class T>
__device__ __forceinline__ void fragments(uint32_t (&a)[4][4], const Fragment<Plain>& from,
                                          const unsigned char*) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const uint4 l = from.low[s / 2], h = from.high[s / 2];
        a[s][0] = s % 2 ? l.z : l.x;
        a[s][1] = s % 2 ? h.z : h.x;
        a[s][2] = s % 2 ? l.w : l.y;
        a[s][3] = s % 2 ? h.w : h.y;
    }
}

// Adds one block of 16 outputs and 8 tokens to their sums. `b[2 s]`, `b[2 s + 1]` are step s of the
// activations; `low` and `high` are the scales of outputs g and g + 8.
template <class F, class T>
__device__ __forceinline__ void add_block(float (&sum)[4], const uint32_t (&a)[4][4],
                                          const uint32_t (&b)[8], float low, float high) {
    if constexpr (same_type<F, Nf4>::value) {
        float group[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int s = 0; s < 4; s++) mma<T>(group, a[s], b[2 * s], b[2 * s + 1]);
        sum[0] = __fmaf_rn(group[0], low, sum[0]);
        sum[1] = __fmaf_rn(group[1], low, sum[1]);
        sum[2] = __fmaf_rn(group[2], high, sum[2]);
        sum[3] = __fmaf_rn(group[3], high, sum[3]);
    } else {
#pragma unroll
        for (int s = 0; s < 4; s++) mma<T>(sum, a[s], b[2 * s], b[2 * s + 1]);
    }
}

// Bytes of a row, of formats that are not tiled; and the factor of a finished sum of an output, the
// scale of an INT8 row (absmax / 127).
template <class F> __device__ __forceinline__ size_t row_bytes(uint32_t inputs) {
    return (size_t)inputs / BLOCK_INPUTS * F::BLOCK_BYTES;
}

template <class F>
__device__ __forceinline__ float output_scale(const uint8_t* bytes, uint32_t outputs,
                                              uint32_t inputs, uint32_t output) {
    if constexpr (same_type<F, Int8>::value)
        return reinterpret_cast<const float*>(bytes +
                                              aligned_end((size_t)outputs * inputs))[output] *
               (1.0f / 127.0f);
    else
        return 1.0f;
}

// --- several products of one input ---------------------------------------------------------------

// A matrix of a launch, which multiplies up to 3 matrices with the same input (queries, keys and
// values; gate and up). A missing matrix has no outputs. Tiles of outputs are numbered across the
// matrices.
struct LinearProduct {
    const uint8_t* weight;          // as stored, NF4 in tiles (nf4.cuh); aligned to 16
    const float* bias;              // [outputs], or null
    float* out;                     // [rows, outputs]
    uint32_t outputs, layout, tile; // layout: of NF4 alone (nf4_tiles)
};

#define LINEAR_PRODUCTS                                                                            \
    const uint8_t *weight0, const float *bias0, float *out0, uint32_t outputs0, uint32_t layout0,  \
        const uint8_t *weight1, const float *bias1, float *out1, uint32_t outputs1,                \
        uint32_t layout1, const uint8_t *weight2, const float *bias2, float *out2,                 \
        uint32_t outputs2, uint32_t layout2
#define LINEAR_PRODUCT(tile, tile_outputs)                                                         \
    product_of(tile, tile_outputs, {weight0, bias0, out0, outputs0, layout0, 0},                   \
               {weight1, bias1, out1, outputs1, layout1, 0},                                       \
               {weight2, bias2, out2, outputs2, layout2, 0})

// The matrix that tile `tile` belongs to.
__device__ __forceinline__ LinearProduct product_of(uint32_t tile, uint32_t outputs,
                                                    const LinearProduct& a, const LinearProduct& b,
                                                    const LinearProduct& c) {
    const uint32_t of_a = (a.outputs + outputs - 1) / outputs,
                   of_b = (b.outputs + outputs - 1) / outputs;
    LinearProduct product = a;
    product.tile = tile;
    if (tile >= of_a) {
        product = b;
        product.tile = tile - of_a;
    }
    if (tile >= of_a + of_b) {
        product = c;
        product.tile = tile - of_a - of_b;
    }
    return product;
}
