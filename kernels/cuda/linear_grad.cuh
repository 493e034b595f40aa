// Gradient of the input of a product on tensor cores, a tile of rows and inputs per CTA.
// linear_grad.cu describes it; linear_grad.cu and experts_grad.cu say which rows and matrices a CTA
// has.
#pragma once
#include "linear.cuh"

#define TILE_INPUTS 128
#define STEP        32
#define PIECES      (TILE_INPUTS / 8)
// Rows of a tile and stages of the ring. A tile of few rows has small stages and more of them,
// because such products wait for the weights.
#define GEMM_ROWS   128
#define GEMM_STAGES 4
#define GEMV_ROWS   32
template <class F> constexpr uint32_t GEMV_STAGES = same_type<F, Plain>::value ? 8 : 10;

// Offsets of piece `piece` (8 numbers): of output `output` in a tile of weights, and of row `row`
// in a stage of gradients. The swizzle keeps 8 neighbouring outputs and the pieces of an output on
// different banks; of NF4 also every second piece of outputs 8 apart, which threads decode
// together.
template <class F> __device__ __forceinline__ uint32_t weight_at(uint32_t output, uint32_t piece) {
    const uint32_t apart = same_type<F, Nf4>::value ? output >> 3 & 1 : 0;
    return output * (TILE_INPUTS * 2) + (piece ^ (output & 7) ^ apart ^ (piece >> 3)) * 16;
}
__device__ __forceinline__ uint32_t grad_at(uint32_t row, uint32_t piece) {
    return row * (STEP * 2) + (piece ^ (row >> 1 & 3)) * 16;
}

// Layout of stored weights: bytes of 16 weights, and whether they are decoded before the products.
template <class F, class T> struct WeightLayout {
    static constexpr uint32_t BYTES = same_type<F, Nf4>::value    ? 8
                                      : same_type<F, Int8>::value ? 16
                                                                  : 32;
    static constexpr uint32_t STAGE = STEP * TILE_INPUTS / 16 * BYTES;
    static constexpr bool DECODED = !(same_type<F, Plain>::value && same_type<T, bf16>::value);
    static constexpr uint32_t TILES = DECODED ? 2 * STEP * TILE_INPUTS * 2 : 0;
    static constexpr uint32_t TABLE =
        same_type<F, Nf4>::value ? NF4_TABLE_BYTES + NF4_DYNAMIC_BYTES : 0;
};

// Shared memory: NF4: the table of levels and the dynamic map; then two tiles of decoded weights,
// where weights are decoded; then the stages of weights, then those of gradients.
template <class F, class T, uint32_t ROWS, uint32_t STAGES>
constexpr uint32_t SHARED = WeightLayout<F, T>::TABLE + WeightLayout<F, T>::TILES +
                            STAGES * (WeightLayout<F, T>::STAGE + ROWS * STEP * 2);
template <class F, class T> constexpr uint32_t GEMM_SHARED = SHARED<F, T, GEMM_ROWS, GEMM_STAGES>;
template <class F, class T>
constexpr uint32_t GEMV_SHARED = SHARED<F, T, GEMV_ROWS, GEMV_STAGES<F>>;
EXPORT(STEP, STEP);
EXPORT(TILE_INPUTS, TILE_INPUTS);
EXPORT(GEMM_ROWS, GEMM_ROWS);
EXPORT(GEMM_SHARED_PLAIN_BF16, (GEMM_SHARED<Plain, bf16>));
EXPORT(GEMM_SHARED_PLAIN_F16, (GEMM_SHARED<Plain, f16>));
EXPORT(GEMM_SHARED_INT8, (GEMM_SHARED<Int8, bf16>));
EXPORT(GEMM_SHARED_NF4, (GEMM_SHARED<Nf4, bf16>));
EXPORT(GEMV_ROWS, GEMV_ROWS);
EXPORT(GEMV_SHARED_PLAIN_BF16, (GEMV_SHARED<Plain, bf16>));
EXPORT(GEMV_SHARED_PLAIN_F16, (GEMV_SHARED<Plain, f16>));
EXPORT(GEMV_SHARED_INT8, (GEMV_SHARED<Int8, bf16>));
EXPORT(GEMV_SHARED_NF4, (GEMV_SHARED<Nf4, bf16>));

// Which weights of a tile this thread decodes: of output `output`, 16 from input 16 `sixteen` on. A
// stage of NF4 has [2 strips, 2 blocks, 32 lanes, 2 rows] of 8 bytes (nf4.cuh).
template <class F> struct Own {
    static constexpr bool IS_NF4 = same_type<F, Nf4>::value;
    const uint32_t output = IS_NF4 ? threadIdx.x / 128 * NF4_STRIP + threadIdx.x % 2 * 8 +
                                         threadIdx.x / 8 % 8
                                   : threadIdx.x / 8,
                   sixteen =
                       IS_NF4 ? threadIdx.x / 64 % 2 * 4 + threadIdx.x / 2 % 4 : threadIdx.x % 8;
};

// Decodes this thread's weights from a stage into a tile.
template <class F, class T>
__device__ __forceinline__ void decode_tile(unsigned char* tile, const unsigned char* stage,
                                            const unsigned char* table, float scale) {
    const Own<F> own;
    const uint32_t output = own.output, sixteen = own.sixteen;
    uint32_t decoded[8];
    if constexpr (same_type<F, Nf4>::value) {
        const uint2 codes = *reinterpret_cast<const uint2*>(stage + threadIdx.x * 8);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t pair =
                nf4_pair(table, threadIdx.x % 32 * 4, i < 4 ? codes.x : codes.y, i % 4);
            decoded[i] = pack<bf16>(__fmul_rn(__uint_as_float(pair << 16), scale),
                                    __fmul_rn(__uint_as_float(pair & 0xffff0000u), scale));
        }
    } else if constexpr (same_type<F, Int8>::value) {
        const uint4 codes = *reinterpret_cast<const uint4*>(stage + threadIdx.x * 16);
        widen_int8<bf16>(codes.x, decoded[0], decoded[1]);
        widen_int8<bf16>(codes.y, decoded[2], decoded[3]);
        widen_int8<bf16>(codes.z, decoded[4], decoded[5]);
        widen_int8<bf16>(codes.w, decoded[6], decoded[7]);
    } else {
        const uint4 low =
            *reinterpret_cast<const uint4*>(stage + weight_at<F>(output, sixteen * 2));
        const uint4 high =
            *reinterpret_cast<const uint4*>(stage + weight_at<F>(output, sixteen * 2 + 1));
        const uint32_t halves[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            decoded[i] = pack<bf16>(widen(__ushort_as_half((unsigned short)halves[i])),
                                    widen(__ushort_as_half((unsigned short)(halves[i] >> 16))));
    }
    *reinterpret_cast<uint4*>(tile + weight_at<F>(output, sixteen * 2)) =
        make_uint4(decoded[0], decoded[1], decoded[2], decoded[3]);
    *reinterpret_cast<uint4*>(tile + weight_at<F>(output, sixteen * 2 + 1)) =
        make_uint4(decoded[4], decoded[5], decoded[6], decoded[7]);
}

// Computes rows from `first_row` on, before `rows`, at most ROWS, and inputs from `first_input` on,
// at most TILE_INPUTS, with one CTA. Outputs are cut into segments of `segment` steps: each is
// summed from zero, and the sums are added from first to last. A CTA processes all segments, or
// only segment `only`, whose sums it writes to `out` for linear_grad_join.
template <class F, class T, uint32_t ROWS, uint32_t STAGES>
__device__ __forceinline__ void linear_grad(const uint8_t* bytes, uint32_t layout, const bf16* grad,
                                            float* out, uint32_t outputs, uint32_t inputs,
                                            uint32_t first_row, uint32_t rows, uint32_t first_input,
                                            uint32_t padded, uint32_t segment = ~0u,
                                            uint32_t only = ~0u) {
    SMEM_DYN(shared);
    typedef WeightLayout<F, T> W;
    constexpr bool IS_NF4 = same_type<F, Nf4>::value;
    constexpr uint32_t G_STAGE = ROWS * STEP * 2;
    constexpr int INPUT_WARPS = ROWS == 128 ? 4 : 8, M = ROWS == 128 ? 4 : 2,
                  N = TILE_INPUTS / INPUT_WARPS / 8;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* dynamic = reinterpret_cast<float*>(shared + NF4_TABLE_BYTES);
    unsigned char *tiles = shared + W::TABLE, *w_ring = tiles + W::TILES,
                  *g_ring = w_ring + STAGES * W::STAGE;
    // NF4: the scale of this thread's weights of step 0, its code and its group.
    const Own<F> own;
    const uint32_t blocks = inputs / BLOCK_INPUTS;
    uint32_t code_at = 0, group = 0;
    Nf4Tiles matrix = {};
    __shared__ float offset; // where it takes no register
    if constexpr (IS_NF4) {
        matrix = nf4_tiles(bytes, outputs, inputs, layout);
        const uint32_t block = first_input / BLOCK_INPUTS + own.sixteen / 4,
                       row = own.output % NF4_STRIP;
        code_at = (uint32_t)(matrix.absmax_at(own.output / NF4_STRIP, block / NF4_CHUNK,
                                              row % 8 * 4 + block % NF4_CHUNK) -
                             matrix.absmax) +
                  row / 8;
        group = own.output * blocks + block;
        if (threadIdx.x == 0) offset = matrix.offset;
    }
    // First step and the step past the last one.
    const uint32_t begin = only == ~0u ? 0 : only * segment,
                   steps = only == ~0u ? padded / STEP : min(begin + segment, padded / STEP);

    // Producer: copies the next 32 outputs of stored weights and of gradients, with zeros past the
    // ends.
    auto copy = [&](uint32_t step) {
        unsigned char *to_w = w_ring + step % STAGES * W::STAGE,
                      *to_g = g_ring + step % STAGES * G_STAGE;
        constexpr uint32_t ROW = W::BYTES / 2; // pieces of 16 bytes of an output
        if constexpr (IS_NF4) {
            // Each of the first 4 warps copies a block of a strip.
            const bool valid = step * STEP + warp / 2 * NF4_STRIP < outputs &&
                               first_input + warp % 2 * BLOCK_INPUTS < inputs;
            if (warp < W::STAGE / NF4_TILE_BYTES)
                cp_async16(to_w + threadIdx.x * 16,
                           valid ? matrix.codes_at(step * (STEP / NF4_STRIP) + warp / 2,
                                                   first_input / BLOCK_INPUTS + warp % 2, lane)
                                 : bytes,
                           valid);
        }
#pragma unroll
        for (uint32_t i = threadIdx.x; !IS_NF4 && i < STEP * ROW; i += 256) {
            const uint32_t output = step * STEP + i / ROW, piece = i % ROW,
                           input = first_input + piece * (256 / W::BYTES);
            const bool valid = output < outputs && input < inputs;
            const size_t from =
                ((size_t)output * inputs + input) / 16 * W::BYTES + (input % 16) * 2;
            cp_async16(to_w + (same_type<F, Plain>::value ? weight_at<F>(i / ROW, piece) : i * 16),
                       valid ? bytes + from : bytes, valid);
        }
#pragma unroll
        for (uint32_t i = threadIdx.x; i < ROWS * STEP / 8; i += 256) {
            const uint32_t row = i / (STEP / 8), piece = i % (STEP / 8);
            const bool valid = first_row + row < rows;
            cp_async16(
                to_g + grad_at(row, piece),
                valid ? grad + (size_t)(first_row + row) * padded + step * STEP + piece * 8 : grad,
                valid);
        }
    };
    if constexpr (IS_NF4) {
        fill_nf4_table<bf16>(reinterpret_cast<uint32_t*>(shared));
        dynamic[threadIdx.x] = NF4_DYNAMIC[threadIdx.x];
    }
    // Code and second scale of this thread's weights, read one step before the scale is computed to
    // hide the latency of memory.
    uint32_t code = 0;
    float coarse = 0.0f;
    auto fetch = [&](uint32_t step) {
        if (!IS_NF4 || step * STEP + own.output >= outputs ||
            first_input + own.sixteen * 16 >= inputs)
            return;
        code = matrix.absmax_at(step * (STEP / NF4_STRIP), 0, 0)[code_at];
        coarse = matrix.absmax2[(group + step * STEP * blocks) >> layout];
    };
    auto scale = [&]() {
        return IS_NF4
                   ? nf4_scale(dynamic, (uint8_t)code, coarse, offset) * (1.0f / nf4_factor<bf16>())
                   : 1.0f;
    };

    for (uint32_t s = begin; s < begin + STAGES - 1; s++) {
        if (s < steps) copy(s);
        cp_commit();
    }
    if constexpr (W::DECODED) {
        fetch(begin);
        cp_wait<STAGES - 2>();
        __syncthreads();
        decode_tile<F, T>(tiles + begin % 2 * (W::TILES / 2), w_ring + begin % STAGES * W::STAGE,
                          shared, scale());
        if (begin + 1 < steps) fetch(begin + 1);
    }
    for (uint32_t from = begin, until; from < steps; from = until) {
        until = min(from + segment, steps);
        float sum[M][N][4] = {};
        for (uint32_t step = from; step < until; step++) {
            // Waits for this step, and for the next one where its weights are decoded.
            cp_wait<W::DECODED ? STAGES - 3 : STAGES - 2>();
            __syncthreads();
            if (step + STAGES - 1 < steps) copy(step + STAGES - 1);
            cp_commit();
            const unsigned char *g = g_ring + step % STAGES * G_STAGE,
                                *w = w_ring + step % STAGES * W::STAGE;
            if constexpr (W::DECODED) {
                constexpr uint32_t TILE = W::TILES / 2;
                w = tiles + step % 2 * TILE;
                if (step + 1 < steps) {
                    const float factor = scale();
                    if (step + 2 < steps) fetch(step + 2);
                    decode_tile<F, T>(tiles + (step + 1) % 2 * TILE,
                                      w_ring + (step + 1) % STAGES * W::STAGE, shared, factor);
                }
            }
#pragma unroll
            for (int k = 0; k < STEP / 16; k++) {
                uint32_t a[M][4];
#pragma unroll
                for (int m = 0; m < M; m++)
                    ldsm4(a[m], g + grad_at(warp / INPUT_WARPS * 64 + m * 16 + lane % 16,
                                            k * 2 + lane / 16));
#pragma unroll
                for (int n = 0; n < N; n += 2) {
                    uint32_t b[4];
                    ldsm4_t(b, w + weight_at<F>(k * 16 + lane % 16,
                                                warp % INPUT_WARPS * N + n + lane / 16));
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        mma<bf16>(sum[m][n], a[m], b[0], b[1]);
                        mma<bf16>(sum[m][n + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
        // Offsets of the sums are computed here to save registers in the loop. The compiler cannot
        // hoist a shuffle.
        const uint32_t thread = __shfl_sync(~0u, threadIdx.x, threadIdx.x % 32),
                       row_of_lane = first_row + thread / 32 / INPUT_WARPS * 64 + thread % 32 / 4;
        const uint32_t input_of_lane =
            first_input + thread / 32 % INPUT_WARPS * N * 8 + thread % 4 * 2;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int high = 0; high < 2; high++) {
                const uint32_t row = row_of_lane + m * 16 + high * 8;
                if (row >= rows) continue;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const uint32_t input = input_of_lane + n * 8;
                    if (input >= inputs) continue;
                    float2* to = reinterpret_cast<float2*>(out + (size_t)row * inputs + input);
                    float2 total = make_float2(sum[m][n][high * 2], sum[m][n][high * 2 + 1]);
                    if (from > begin)
                        total = make_float2(__fadd_rn(to->x, total.x), __fadd_rn(to->y, total.y));
                    *to = total;
                }
            }
    }
    cp_wait<0>();
}

// Rounds 8 gradients of a row from `output` on to bf16, with zeros from `outputs` on. For INT8 it
// multiplies them by the scales of the rows.
__device__ __forceinline__ void round_eight(const float* grad, const float* absmax, bf16* out,
                                            uint32_t output, uint32_t outputs) {
    float v[8];
    if (outputs % 4 == 0 && output + 8 <= outputs) {
        const float4 a = *reinterpret_cast<const float4*>(grad + output),
                     b = *reinterpret_cast<const float4*>(grad + output + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z,
        v[7] = b.w;
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) v[i] = output + i < outputs ? grad[output + i] : 0.0f;
    }
    if (absmax) {
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            if (output + i < outputs) v[i] = __fmul_rn(v[i], absmax[output + i] * (1.0f / 127.0f));
    }
    const uint4 packed = make_uint4(pack<bf16>(v[0], v[1]), pack<bf16>(v[2], v[3]),
                                    pack<bf16>(v[4], v[5]), pack<bf16>(v[6], v[7]));
    *reinterpret_cast<uint4*>(out + output) = packed;
}
