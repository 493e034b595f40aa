// out = x weight^T + bias for many rows: the products of prefill. Weights become numbers on their way to the tensor cores.
//
// x T [rows, inputs], rounded before (convert.cu); up to 3 matrices [outputs, inputs] (NF4, INT8, bf16, f16) of the same inputs;
// out f32 [rows, outputs]. CPU reference: kernels/src/ops/linear.rs. Order of the sums: linear.cuh, so a row has the bits that linear_few.cu gives it.
//
// Grid: x tiles of 128 rows, y tiles of 128 outputs over all matrices, so that CTAs that run together share weights. CTA: 8 warps, 4 along the outputs and 2 along the rows, each with 32 x 64 sums.
// A ring of 3 stages in shared memory holds one block (64 inputs) of the weights as stored and of x, copied by cp.async of 16 bytes; the scales
// of an NF4 block are worked out one block ahead by the threads of its rows. Per block a warp makes the fragments of its 32 outputs once (2 warps
// make the same ones) and goes over its 64 rows in 8 tiles with 8 sums of the group each, so an NF4 group costs 8 registers and not 64.
// Sums of segments are kept apart (64 more registers) until a segment ends.
//
// Floor: 2 x rows x inputs x outputs operations; a 70B block has 0.856 G weights, 1,024 rows 1.75 TFLOP, 2.2 ms at the 788 TFLOP/s that cuBLAS
// reaches on an H200. mma.sync reaches about 0.62 of wgmma there. Shared memory per block and CTA: 256 cycles of look-ups (NF4), 512 of x, 128 + 32 of
// copies, 64 of weights: 0.99 k cycles for 1 M products, which take 0.85 k cycles of the tensor cores at that rate.
// Variants: one. Limits: inputs a multiple of 64, matrices and x aligned to 16 bytes.
#include "linear.cuh"

#define TILE_OUTPUTS 128
#define TILE_ROWS 128
#define STAGES 3
#define X_STAGE (TILE_ROWS * 128)

// Of the 8 pieces of 16 bytes of a row of 128, odd rows have neighbours swapped: lanes of two rows that read every second piece share no bank.
__device__ __forceinline__ uint32_t twisted(uint32_t row, uint32_t piece) { return row * 128 + (piece ^ (row & 1)) * 16; }

__device__ __forceinline__ void read(RowPart<Nf4>& part, const unsigned char* stage, uint32_t row, uint32_t q) {
    part.v = *reinterpret_cast<const uint2*>(stage + row * 32 + q * 8);
}
__device__ __forceinline__ void read(RowPart<Int8>& part, const unsigned char* stage, uint32_t row, uint32_t q) {
    part.v = *reinterpret_cast<const uint4*>(stage + row * 64 + q * 16);
}
__device__ __forceinline__ void read(RowPart<Plain>& part, const unsigned char* stage, uint32_t row, uint32_t q) {
    part.v[0] = *reinterpret_cast<const uint4*>(stage + twisted(row, q * 2));
    part.v[1] = *reinterpret_cast<const uint4*>(stage + twisted(row, q * 2 + 1));
}

// Where this thread's pieces of the next block come from. Its pieces lie at equal distances, so one address each is kept for weights and x.
template <class F, class T> struct Copies {
    static constexpr uint32_t W_STAGE = TILE_OUTPUTS * F::BLOCK_BYTES;
    static constexpr uint32_t PIECES = F::BLOCK_BYTES / 16, W_STEP = 256 / PIECES, X_STEP = 32;

    const uint8_t *w, *x;
    uint32_t w_left, x_left; // rows of the tile that exist, from this thread's first on

    __device__ __forceinline__ Copies(const LinearPart& part, const T* from, uint32_t inputs, uint32_t rows) {
        const uint32_t output = part.tile * TILE_OUTPUTS + threadIdx.x / PIECES, row = blockIdx.x * TILE_ROWS + threadIdx.x / 8;
        w = part.weight + output * row_bytes<F>(inputs) + threadIdx.x % PIECES * 16;
        x = reinterpret_cast<const uint8_t*>(from + (size_t)row * inputs) + threadIdx.x % 8 * 16;
        w_left = output < part.outputs ? part.outputs - output : 0;
        x_left = row < rows ? rows - row : 0;
    }

    // Copies the next block to stage `stage`; outputs and rows past the end are zeros.
    __device__ __forceinline__ void next(unsigned char* w_ring, unsigned char* x_ring, uint32_t stage, uint32_t inputs) {
#pragma unroll
        for (uint32_t i = 0; i < PIECES / 2; i++) {
            const uint32_t row = threadIdx.x / PIECES + i * W_STEP, piece = threadIdx.x % PIECES;
            const uint32_t to = same_type<F, Plain>::value ? twisted(row, piece) : row * F::BLOCK_BYTES + piece * 16;
            cp_async16(w_ring + stage * W_STAGE + to, w + i * W_STEP * (uint32_t)row_bytes<F>(inputs), i * W_STEP < w_left);
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t row = threadIdx.x / 8 + i * X_STEP;
            cp_async16(x_ring + stage * X_STAGE + twisted(row, threadIdx.x % 8), x + i * X_STEP * inputs * (uint32_t)sizeof(T), i * X_STEP < x_left);
        }
        w += F::BLOCK_BYTES;
        x += BLOCK_INPUTS * sizeof(T);
    }
};

template <class F, class T>
__device__ __forceinline__ void linear_many(const LinearPart& part, const T* x, uint32_t inputs, uint32_t rows) {
    SMEM_DYN(shared); // NF4: table, dynamic map, two times 128 scales; then 3 stages of weights and of x
    constexpr bool IS_NF4 = same_type<F, Nf4>::value;
    constexpr uint32_t TABLES = IS_NF4 ? NF4_TABLE_BYTES + 1024 + 1024 : 0;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    uint32_t* table = reinterpret_cast<uint32_t*>(shared);
    float* dynamic = reinterpret_cast<float*>(shared + NF4_TABLE_BYTES);
    float* scales = dynamic + 256;
    unsigned char* w_ring = shared + TABLES;
    unsigned char* x_ring = w_ring + STAGES * Copies<F, T>::W_STAGE;
    Copies<F, T> copies(part, x, inputs, rows);
    const uint32_t blocks = inputs / BLOCK_INPUTS, segment_blocks = segment_inputs(inputs) / BLOCK_INPUTS;
    const uint32_t w_row = warp % 4 * 32 + g, x_row = warp / 4 * 64 + g;

    for (uint32_t s = 0; s < STAGES - 1; s++) {
        if (s < blocks) copies.next(w_ring, x_ring, s, inputs);
        cp_commit();
    }
    Nf4Parts parts = {};
    uint32_t scale_row = 0;
    if constexpr (IS_NF4) {
        parts = nf4_parts(part.weight, part.outputs, inputs);
        fill_nf4_table<T>(table);
        dynamic[threadIdx.x] = NF4_DYNAMIC[threadIdx.x];
        __syncthreads();
        scale_row = min(part.tile * TILE_OUTPUTS + threadIdx.x % TILE_OUTPUTS, part.outputs - 1) * blocks;
    }
    auto scale_of = [&](uint32_t block) {
        const uint32_t index = scale_row + block;
        return nf4_scale(dynamic, parts.absmax[index], parts.absmax2[index / NF4_SUPER_GROUP], parts.offset) * (1.0f / nf4_factor<T>());
    };
    float ahead = 0.0f; // of the block after the next
    if constexpr (IS_NF4) {
        if (threadIdx.x < TILE_OUTPUTS) {
            scales[threadIdx.x] = scale_of(0);
            if (blocks > 1) ahead = scale_of(1);
        }
    }

    float total[2][8][4], sum[2][8][4] = {};
#pragma unroll
    for (int i = 0; i < 64; i++) total[i / 32][i / 4 % 8][i % 4] = -0.0f; // leaves even the first sum's sign of zero alone
    for (uint32_t block = 0; block < blocks; block++) {
        cp_wait<STAGES - 2>();
        __syncthreads();
        if (block + STAGES - 1 < blocks) copies.next(w_ring, x_ring, (block + STAGES - 1) % STAGES, inputs);
        cp_commit();
        if constexpr (IS_NF4) {
            if (threadIdx.x < TILE_OUTPUTS && block + 1 < blocks) {
                scales[(block + 1) % 2 * TILE_OUTPUTS + threadIdx.x] = ahead;
                if (block + 2 < blocks) ahead = scale_of(block + 2);
            }
        }
        const unsigned char* w_stage = w_ring + block % STAGES * Copies<F, T>::W_STAGE;
        const unsigned char* x_stage = x_ring + block % STAGES * X_STAGE;
        uint32_t a[2][4][4];
        float scale[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
#pragma unroll
        for (int m = 0; m < 2; m++) {
            RowPart<F> low, high;
            read(low, w_stage, w_row + m * 16, q);
            read(high, w_stage, w_row + m * 16 + 8, q);
            fragments<T>(a[m], low, high, table + lane);
            if constexpr (IS_NF4) {
                scale[m][0] = scales[block % 2 * TILE_OUTPUTS + w_row + m * 16];
                scale[m][1] = scales[block % 2 * TILE_OUTPUTS + w_row + m * 16 + 8];
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const uint4 b0 = *reinterpret_cast<const uint4*>(x_stage + twisted(x_row + n * 8, q * 2));
            const uint4 b1 = *reinterpret_cast<const uint4*>(x_stage + twisted(x_row + n * 8, q * 2 + 1));
            const uint32_t b[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
            for (int m = 0; m < 2; m++) add_block<F, T>(sum[m][n], a[m], b, scale[m][0], scale[m][1]);
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
            const uint32_t output = part.tile * TILE_OUTPUTS + w_row + m * 16 + high * 8;
            if (output >= part.outputs) continue;
            const float scale = output_scale<F>(part.weight, part.outputs, inputs, output);
            const float bias = part.bias ? part.bias[output] : 0.0f;
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t row = blockIdx.x * TILE_ROWS + warp / 4 * 64 + n * 8 + q * 2 + i;
                    const float value = __fmul_rn(total[m][n][high * 2 + i], scale);
                    if (row < rows) part.out[(size_t)row * part.outputs + output] = part.bias ? __fadd_rn(value, bias) : value;
                }
        }
}

#define LINEAR_MANY(F, f, T)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 1) linear_many_##f##_##T(                                                   \
        LINEAR_PARTS, const T* __restrict__ x /* [rows, inputs] */, uint32_t inputs, uint32_t rows) {                  \
        linear_many<F, T>(LINEAR_PART(blockIdx.y, TILE_OUTPUTS), x, inputs, rows);                                                                                \
    }
LINEAR_MANY(Nf4, nf4, bf16)
LINEAR_MANY(Nf4, nf4, f16)
LINEAR_MANY(Int8, int8, bf16)
LINEAR_MANY(Int8, int8, f16)
LINEAR_MANY(Plain, plain, bf16)
LINEAR_MANY(Plain, plain, f16)
