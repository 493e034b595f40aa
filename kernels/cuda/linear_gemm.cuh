// GEMM of many rows with a tile of 128 rows and 128 outputs per CTA. linear_gemm.cu describes it;
// linear_gemm.cu and experts_gemm.cu say which rows and matrices a CTA has.
#pragma once
#include "linear.cuh"

#define TILE_OUTPUTS 128
#define TILE_ROWS    128
#define STAGES       3
#define X_STAGE      (TILE_ROWS * 128)

// Shared memory: TABLES (NF4: the table of levels, the dynamic map and the scales of two blocks),
// then STAGES stages of weights, then as many of x.
template <class F>
constexpr uint32_t TABLES =
    same_type<F, Nf4>::value ? NF4_TABLE_BYTES + NF4_DYNAMIC_BYTES + 2 * TILE_OUTPUTS * 4 : 0;
template <class F>
constexpr uint32_t SHARED = TABLES<F> + STAGES * (TILE_OUTPUTS * F::BLOCK_BYTES + X_STAGE);
EXPORT(TILE_ROWS, TILE_ROWS);
EXPORT(TILE_OUTPUTS, TILE_OUTPUTS);
EXPORT(SHARED_PLAIN, SHARED<Plain>);
EXPORT(SHARED_INT8, SHARED<Int8>);
EXPORT(SHARED_NF4, SHARED<Nf4>);

// Offset of a piece of 16 bytes in rows of 128 bytes. Odd rows have neighbouring pieces swapped, so
// that lanes that read every second piece of two rows use different banks.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t piece) {
    return row * 128 + (piece ^ (row & 1)) * 16;
}

// Reads what lane `lane` needs of strip `strip` of 16 outputs.
__device__ __forceinline__ void read(Fragment<Nf4>& fragment, const unsigned char* stage,
                                     uint32_t strip, uint32_t lane) {
    fragment.v = *reinterpret_cast<const uint4*>(stage + strip * NF4_TILE_BYTES + lane * 16);
}
__device__ __forceinline__ void read(Fragment<Int8>& fragment, const unsigned char* stage,
                                     uint32_t strip, uint32_t lane) {
    const unsigned char* at = stage + (strip * 16 + lane / 4) * 64 + lane % 4 * 16;
    fragment.low = *reinterpret_cast<const uint4*>(at);
    fragment.high = *reinterpret_cast<const uint4*>(at + 8 * 64);
}
__device__ __forceinline__ void read(Fragment<Plain>& fragment, const unsigned char* stage,
                                     uint32_t strip, uint32_t lane) {
    const uint32_t row = strip * 16 + lane / 4;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t piece = lane % 4 * 2 + i;
        fragment.low[i] = *reinterpret_cast<const uint4*>(stage + swizzled(row, piece));
        fragment.high[i] = *reinterpret_cast<const uint4*>(stage + swizzled(row + 8, piece));
    }
}

// Producer: sources of this thread's pieces of the next block. The pieces have equal distances, so
// one address each is enough for weights and x. Of NF4 each warp has a strip, and a lane its piece.
template <class F, class T> struct Copies {
    static constexpr bool IS_NF4 = same_type<F, Nf4>::value;
    static constexpr uint32_t W_STAGE = TILE_OUTPUTS * F::BLOCK_BYTES;
    static constexpr uint32_t PIECES = F::BLOCK_BYTES / 16, W_STEP = 256 / PIECES, X_STEP = 32;

    const uint8_t *w, *x;
    uint32_t w_left, x_left; // rows of the tile that exist, from this thread's first on

    __device__ __forceinline__ Copies(const LinearProduct& product, const T* from, uint32_t inputs,
                                      uint32_t first, uint32_t rows) {
        const uint32_t output = product.tile * TILE_OUTPUTS +
                                (IS_NF4 ? threadIdx.x / 32 * NF4_STRIP : threadIdx.x / PIECES),
                       row = first + threadIdx.x / 8;
        if constexpr (IS_NF4)
            w = product.weight + output * row_bytes<F>(inputs) + threadIdx.x % 32 * 16;
        else
            w = product.weight + output * row_bytes<F>(inputs) + threadIdx.x % PIECES * 16;
        x = reinterpret_cast<const uint8_t*>(from + (size_t)row * inputs) + threadIdx.x % 8 * 16;
        w_left = output < product.outputs ? product.outputs - output : 0;
        x_left = row < rows ? rows - row : 0;
    }

    // Copies the next block to stage `stage`, with zeros for outputs and rows past the end.
    __device__ __forceinline__ void next(unsigned char* w_ring, unsigned char* x_ring,
                                         uint32_t stage, uint32_t inputs) {
#pragma unroll
        for (uint32_t i = 0; i < PIECES / 2; i++) {
            const uint32_t row = threadIdx.x / PIECES + i * W_STEP, piece = threadIdx.x % PIECES;
            const uint32_t to = same_type<F, Plain>::value ? swizzled(row, piece)
                                                           : row * F::BLOCK_BYTES + piece * 16;
            cp_async16(w_ring + stage * W_STAGE + to,
                       w + i * W_STEP * (uint32_t)row_bytes<F>(inputs), i * W_STEP < w_left);
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t row = threadIdx.x / 8 + i * X_STEP;
            cp_async16(x_ring + stage * X_STAGE + swizzled(row, threadIdx.x % 8),
                       x + i * X_STEP * inputs * (uint32_t)sizeof(T), i * X_STEP < x_left);
        }
        w += IS_NF4 ? NF4_TILE_BYTES : F::BLOCK_BYTES;
        x += BLOCK_INPUTS * sizeof(T);
    }
};

// Computes the tile of rows `first` to `rows`, at most TILE_ROWS of them.
template <class F, class T>
__device__ __forceinline__ void linear_gemm(const LinearProduct& product, const T* x,
                                            uint32_t inputs, uint32_t first, uint32_t rows) {
    SMEM_DYN(shared);
    constexpr bool IS_NF4 = same_type<F, Nf4>::value;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float* dynamic = reinterpret_cast<float*>(shared + NF4_TABLE_BYTES);
    float* scales = dynamic + 256;
    unsigned char* w_ring = shared + TABLES<F>;
    unsigned char* x_ring = w_ring + STAGES * Copies<F, T>::W_STAGE;
    Copies<F, T> copies(product, x, inputs, first, rows);
    const uint32_t blocks = inputs / BLOCK_INPUTS,
                   segment_blocks = segment_inputs(inputs) / BLOCK_INPUTS;
    const uint32_t w_row = warp % 4 * 32 + g, x_row = warp / 4 * 64 + g;

    for (uint32_t s = 0; s < STAGES - 1; s++) {
        if (s < blocks) copies.next(w_ring, x_ring, s, inputs);
        cp_commit();
    }
    __shared__ Nf4Tiles tiles; // where they take no registers
    // The first scale code of this thread's output, and its number.
    const uint8_t* scale_codes = nullptr;
    uint32_t scale_output = 0;
    if constexpr (IS_NF4) {
        if (threadIdx.x == 0)
            tiles = nf4_tiles(product.weight, product.outputs, inputs, product.layout);
        fill_nf4_table<T>(reinterpret_cast<uint32_t*>(shared));
        dynamic[threadIdx.x] = NF4_DYNAMIC[threadIdx.x];
        __syncthreads();
        scale_output =
            min(product.tile * TILE_OUTPUTS + threadIdx.x % TILE_OUTPUTS, product.outputs - 1);
        const uint32_t in_strip = scale_output % NF4_STRIP;
        scale_codes = tiles.absmax_at(scale_output / NF4_STRIP, 0, in_strip % 8 * 4) + in_strip / 8;
    }
    // Code and second scale of this thread's output, read one block before the scale is computed to
    // hide the latency of memory.
    uint32_t code = 0;
    float coarse = 0.0f;
    auto fetch = [&](uint32_t block) {
        if (!IS_NF4 || threadIdx.x >= TILE_OUTPUTS || block >= blocks) return;
        code = scale_codes[block / NF4_CHUNK * NF4_CHUNK_BYTES + block % NF4_CHUNK * 2];
        coarse = tiles.second(scale_output, block);
    };
    auto put_scale = [&](uint32_t block) {
        if (!IS_NF4 || threadIdx.x >= TILE_OUTPUTS || block >= blocks) return;
        const float scale =
            nf4_scale(dynamic, (uint8_t)code, coarse, tiles.offset) * (1.0f / nf4_factor<T>());
        scales[block % 2 * TILE_OUTPUTS + threadIdx.x] = scale;
    };
    fetch(0);
    put_scale(0);
    fetch(1);

    float total[2][8][4], sum[2][8][4] = {};
#pragma unroll
    for (int i = 0; i < 64; i++)
        total[i / 32][i / 4 % 8][i % 4] = -0.0f; // leaves even the first sum's sign of zero alone
    for (uint32_t block = 0; block < blocks; block++) {
        cp_wait<STAGES - 2>();
        __syncthreads();
        if (block + STAGES - 1 < blocks)
            copies.next(w_ring, x_ring, (block + STAGES - 1) % STAGES, inputs);
        cp_commit();
        put_scale(block + 1);
        fetch(block + 2);
        const unsigned char* w_stage = w_ring + block % STAGES * Copies<F, T>::W_STAGE;
        const unsigned char* x_stage = x_ring + block % STAGES * X_STAGE;
        uint32_t a[2][4][4];
        float scale[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
#pragma unroll
        for (int m = 0; m < 2; m++) {
            Fragment<F> fragment;
            read(fragment, w_stage, warp % 4 * 2 + m, lane);
            fragments<T>(a[m], fragment, shared);
            if constexpr (IS_NF4) {
                scale[m][0] = scales[block % 2 * TILE_OUTPUTS + w_row + m * 16];
                scale[m][1] = scales[block % 2 * TILE_OUTPUTS + w_row + m * 16 + 8];
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const uint4 b0 =
                *reinterpret_cast<const uint4*>(x_stage + swizzled(x_row + n * 8, q * 2));
            const uint4 b1 =
                *reinterpret_cast<const uint4*>(x_stage + swizzled(x_row + n * 8, q * 2 + 1));
            const uint32_t b[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
            for (int m = 0; m < 2; m++)
                add_block<F, T>(sum[m][n], a[m], b, scale[m][0], scale[m][1]);
        }
        if ((block + 1) % segment_blocks == 0 || block + 1 == blocks) {
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        total[m][n][i] = __fadd_rn(total[m][n][i], sum[m][n][i]);
                        sum[m][n][i] = 0.0f;
                    }
        }
    }
    cp_wait<0>();

#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int high = 0; high < 2; high++) {
            const uint32_t output = product.tile * TILE_OUTPUTS + w_row + m * 16 + high * 8;
            if (output >= product.outputs) continue;
            const float scale = output_scale<F>(product.weight, product.outputs, inputs, output);
            const float bias = product.bias ? product.bias[output] : 0.0f;
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t row = first + warp / 4 * 64 + n * 8 + q * 2 + i;
                    const float value = __fmul_rn(total[m][n][high * 2 + i], scale);
                    if (row < rows)
                        product.out[(size_t)row * product.outputs + output] =
                            product.bias ? __fadd_rn(value, bias) : value;
                }
        }
}
