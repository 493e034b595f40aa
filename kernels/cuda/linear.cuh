// What the tensor-core products for few rows (linear_few.cu) and for many (linear_many.cu) share: how weights become fragments of
// mma.m16n8k16, and the one order in which every element of a product is summed.
//
// The order. The inputs are walked in blocks of 64, a block in 4 steps of 16 inputs (one mma each). Lane q of a quad holds inputs
// 16 q .. 16 q + 15 of a block in its fragments and step s takes its inputs 4 s .. 4 s + 3, so that 16 neighbouring bytes of a row (or more) go to
// one lane, whatever the format; activations are permuted alike, for free. An NF4 block is one group: its 4 steps are summed from zero and
// enter the sum scaled, so that codes go through the tensor cores as they are. The walk is cut into at most 8 segments of a
// multiple of 256 inputs, a function of their number alone; the sums of segments are added from first to last. Nothing else is added up
// anywhere, so an element has the same bits in a step of 1 row and in a prefill of 1,000.
//
// Weights are the A operand (16 outputs), activations the B operand (8 tokens): a product of few tokens wastes nothing.
// Source of the fragments: PTX ISA 9.7.14.5.8.
#pragma once
#include "nf4.cuh"
#include "pairs.cuh"

// Inputs of a block, and the most segments of a walk.
#define BLOCK_INPUTS 64
#define SEGMENTS 8

// Inputs of a segment: 256 at least, a multiple of it.
__device__ __forceinline__ uint32_t segment_inputs(uint32_t inputs) {
    const uint32_t chunks = (inputs + 255) / 256;
    return (chunks + SEGMENTS - 1) / SEGMENTS * 256;
}

// Formats, and the bytes of a block of a row.
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

// --- the table of NF4 ------------------------------------------------------------------------------------------------

// Levels are multiplied by this before they are rounded to T, and scales divided: of all factors from 1 to 2 it rounds the 16 levels best.
// The error of a level is then 3.2e-4 root mean square in bf16 (3.4e-5 in f16), where rounding each product of level and scale has 8.4e-4
// (1.06e-4).
template <class T> __device__ __forceinline__ float nf4_factor();
template <> __device__ __forceinline__ float nf4_factor<bf16>() { return 1.43701171875f; }
template <> __device__ __forceinline__ float nf4_factor<f16>() { return 1.3662109375f; }

// Bytes of the table: for each byte of codes the pair of its levels, once per bank, so that lanes look up 2 weights each without conflicts
// (entry e of lane l is word 32 e + l). At 36 weights per SM and cycle, which is what an H200 reads at 4.3 TB/s, lookups fill
// 0.56 of the shared memory's cycles; with one copy of the table they would need 1.9 of them.
#define NF4_TABLE_BYTES (256 * 128)

template <class T> __device__ __forceinline__ void fill_nf4_table(uint32_t* table) {
    for (uint32_t byte = threadIdx.x / 8; byte < 256; byte += blockDim.x / 8) {
        const float factor = nf4_factor<T>();
        const uint32_t pair = pack<T>(NF4_LEVELS[byte >> 4] * factor, NF4_LEVELS[byte & 15] * factor);
        reinterpret_cast<uint4*>(table)[byte * 8 + threadIdx.x % 8] = make_uint4(pair, pair, pair, pair);
    }
}

// --- fragments -------------------------------------------------------------------------------------------------------

// What a lane reads of its block of one row: its 16 inputs.
template <class F> struct RowPart;
template <> struct RowPart<Nf4> {
    uint2 v;
};
template <> struct RowPart<Int8> {
    uint4 v;
};
template <> struct RowPart<Plain> {
    uint4 v[2];
};

// Codes of 4 inputs as pairs: the byte becomes the end of an f32 of value 2^23 + 128 + code.
template <class T> __device__ __forceinline__ void widen_int8(uint32_t word, uint32_t& first, uint32_t& second) {
    word ^= 0x80808080u;
    const float base = 8388736.0f;
    const float a = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440)) - base;
    const float b = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441)) - base;
    const float c = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7442)) - base;
    const float d = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7443)) - base;
    first = pack<T>(a, b);
    second = pack<T>(c, d);
}

// Fragments of 4 steps out of the parts of rows g and g + 8. `table` is that of NF4 from this lane's bank on.
template <class T>
__device__ __forceinline__ void fragments(uint32_t (&a)[4][4], const RowPart<Nf4>& low, const RowPart<Nf4>& high, const uint32_t* table) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const uint32_t l = (s < 2 ? low.v.x : low.v.y) >> (s % 2 * 16), h = (s < 2 ? high.v.x : high.v.y) >> (s % 2 * 16);
        a[s][0] = table[(l & 255) * 32];
        a[s][1] = table[(h & 255) * 32];
        a[s][2] = table[(l >> 8 & 255) * 32];
        a[s][3] = table[(h >> 8 & 255) * 32];
    }
}
template <class T>
__device__ __forceinline__ void fragments(uint32_t (&a)[4][4], const RowPart<Int8>& low, const RowPart<Int8>& high, const uint32_t*) {
    const uint32_t l[4] = {low.v.x, low.v.y, low.v.z, low.v.w}, h[4] = {high.v.x, high.v.y, high.v.z, high.v.w};
#pragma unroll
    for (int s = 0; s < 4; s++) {
        widen_int8<T>(l[s], a[s][0], a[s][2]);
        widen_int8<T>(h[s], a[s][1], a[s][3]);
    }
}
template <class T>
__device__ __forceinline__ void fragments(uint32_t (&a)[4][4], const RowPart<Plain>& low, const RowPart<Plain>& high, const uint32_t*) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const uint4 l = low.v[s / 2], h = high.v[s / 2];
        a[s][0] = s % 2 ? l.z : l.x;
        a[s][1] = s % 2 ? h.z : h.x;
        a[s][2] = s % 2 ? l.w : l.y;
        a[s][3] = s % 2 ? h.w : h.y;
    }
}

// One block of 16 outputs and 8 tokens into their sums. `b[2 s]`, `b[2 s + 1]` are step s of the activations; `low` and `high` the scales of
// outputs g and g + 8.
template <class F, class T>
__device__ __forceinline__ void add_block(float (&sum)[4], const uint32_t (&a)[4][4], const uint32_t (&b)[8], float low, float high) {
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

// Bytes of a row, and what a finished sum of an output is multiplied with: the scale of an INT8 row (absmax / 127).
template <class F> __device__ __forceinline__ size_t row_bytes(uint32_t inputs) { return (size_t)inputs / BLOCK_INPUTS * F::BLOCK_BYTES; }

template <class F> __device__ __forceinline__ float output_scale(const uint8_t* bytes, uint32_t outputs, uint32_t inputs, uint32_t output) {
    if constexpr (same_type<F, Int8>::value)
        return reinterpret_cast<const float*>(bytes + part_end((size_t)outputs * inputs))[output] * (1.0f / 127.0f);
    else
        return 1.0f;
}

// --- several products of one input -----------------------------------------------------------------------------------

// Matrices that one launch multiplies with the same input (queries, keys and values; gate and up), at most 3. One that is not there has no
// outputs. Tiles of outputs are numbered through.
struct LinearPart {
    const uint8_t* weight; // as stored, aligned to 16
    const float* bias;     // [outputs], or null
    float* out;            // [rows, outputs]
    uint32_t outputs, tile;
};

#define LINEAR_PARTS                                                                                                                \
    const uint8_t *weight0, const float *bias0, float *out0, uint32_t outputs0, const uint8_t *weight1, const float *bias1,         \
        float *out1, uint32_t outputs1, const uint8_t *weight2, const float *bias2, float *out2, uint32_t outputs2
#define LINEAR_PART(tile, tile_outputs)                                                                                                \
    part_of(tile, tile_outputs, {weight0, bias0, out0, outputs0, 0}, {weight1, bias1, out1, outputs1, 0},                    \
            {weight2, bias2, out2, outputs2, 0})

// The part that tile `tile` belongs to.
__device__ __forceinline__ LinearPart part_of(uint32_t tile, uint32_t outputs, const LinearPart& a, const LinearPart& b, const LinearPart& c) {
    const uint32_t of_a = (a.outputs + outputs - 1) / outputs, of_b = (b.outputs + outputs - 1) / outputs;
    LinearPart part = a;
    part.tile = tile;
    if (tile >= of_a) {
        part = b;
        part.tile = tile - of_a;
    }
    if (tile >= of_a + of_b) {
        part = c;
        part.tile = tile - of_a - of_b;
    }
    return part;
}
