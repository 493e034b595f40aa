// GEMV of 1 to 32 rows. linear_gemv.cu describes its CTAs; linear_gemv.cu and experts_gemv.cu say
// which rows and matrices a CTA has.
#pragma once
#include "linear.cuh"
#include "pdl.cuh"

#define WARPS    8
#define MAX_ROWS 32

// Bytes of a row per stage, and blocks in them.
#define CHUNK_BYTES 128
template <class F> struct Chunk {
    static constexpr uint32_t BLOCKS = CHUNK_BYTES / F::BLOCK_BYTES;
    static constexpr uint32_t INPUTS = BLOCKS * BLOCK_INPUTS;
};

// Shared memory: TABLES (NF4: the table of levels and the dynamic map), then for each warp a ring
// of `stages` stages, each for M tiles of 16 outputs. The epilogue reuses the rings for its sums.
template <class F>
constexpr uint32_t TABLES = same_type<F, Nf4>::value ? NF4_TABLE_BYTES + NF4_DYNAMIC_BYTES : 0;
#define WARP_STAGE (16 * CHUNK_BYTES)
EXPORT(CTA_THREADS, WARPS * 32);
EXPORT(MAX_ROWS, MAX_ROWS);
EXPORT(TABLES_NF4, TABLES<Nf4>);
EXPORT(STAGE_PER_TILE, WARPS* WARP_STAGE);

// Offset of piece `piece` of row `row` in a stage of rows. The swizzle keeps lanes that read
// together (2 rows of 64 bytes, or of every second piece) on different banks.
template <class F> __device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t piece) {
    const uint32_t mask = same_type<F, Int8>::value ? (row & 1) * 4 : row & 1;
    return row * CHUNK_BYTES + (piece ^ mask) * 16;
}

// Reads what lane `lane` needs of block `block` of the chunk, of tile m.
__device__ __forceinline__ void read(Fragment<Nf4>& fragment, const unsigned char* stage, int m,
                                     uint32_t block, uint32_t lane) {
    fragment.v = *reinterpret_cast<const uint4*>(stage + (m * NF4_CHUNK + block) * NF4_TILE_BYTES +
                                                 lane * 16);
}
__device__ __forceinline__ void read(Fragment<Int8>& fragment, const unsigned char* stage, int m,
                                     uint32_t block, uint32_t lane) {
    const uint32_t row = m * 16 + lane / 4, piece = block * 4 + lane % 4;
    fragment.low = *reinterpret_cast<const uint4*>(stage + swizzled<Int8>(row, piece));
    fragment.high = *reinterpret_cast<const uint4*>(stage + swizzled<Int8>(row + 8, piece));
}
__device__ __forceinline__ void read(Fragment<Plain>& fragment, const unsigned char* stage, int m,
                                     uint32_t, uint32_t lane) {
    const uint32_t row = m * 16 + lane / 4;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t piece = lane % 4 * 2 + i;
        fragment.low[i] = *reinterpret_cast<const uint4*>(stage + swizzled<Plain>(row, piece));
        fragment.high[i] = *reinterpret_cast<const uint4*>(stage + swizzled<Plain>(row + 8, piece));
    }
}

// x is f32, one row (linear_gemv.cu).
struct Contiguous {
    static constexpr bool GATHERED = false, PACKED = false;
    __device__ __forceinline__ uint32_t operator[](uint32_t row) const { return row; }
};

// x is several rows, rounded and in the order of the lanes (linear_pack.cu).
struct Packed {
    static constexpr bool GATHERED = false, PACKED = true;
    __device__ __forceinline__ uint32_t operator[](uint32_t row) const { return row; }
};

// The rows of x come from a list or an offset (experts_gemv.cu). An expert often has fewer tokens
// than the tile holds.
struct Gathered {
    static constexpr bool GATHERED = true, PACKED = false;
    const uint32_t* list; // null: one after the other
    uint32_t first;
    __device__ __forceinline__ uint32_t operator[](uint32_t row) const {
        return list ? list[first + row] : first + row;
    }
};

// The GEMV of one warp over its segment.
template <class F, class T, int M, int N, class Rows> struct SegmentGemv {
    // Where this lane's rows of a copy begin, with its piece; of NF4, where each strip begins.
    const uint8_t* rows[same_type<F, Nf4>::value ? M : M * 4];
    const uint8_t* weight;
    const float* x;
    const unsigned char* table;
    const float* dynamic;
    unsigned char* ring;
    Nf4Tiles tiles;
    uint32_t inputs, outputs, first, tokens, lane;
    uint32_t
        offset[Rows::GATHERED ? N : 1]; // where this lane's tokens begin in x, if they are listed
    uint32_t codes[M]; // of the block of this lane of the quad, in the chunk that comes next
    float absmax2[M][2];
    float scales[M][2];

    // Output `g` or `g + 8` of tile m; past the end, the last output again.
    __device__ __forceinline__ uint32_t output(int m, int high) const {
        const uint32_t wanted = first + m * 16 + high * 8 + lane / 4;
        return wanted < outputs ? wanted : outputs - 1;
    }

    // The strip of tile m; past the end, the last strip again.
    __device__ __forceinline__ uint32_t strip(int m) const {
        return min(first / NF4_STRIP + m, nf4_strips(outputs) - 1);
    }

    __device__ __forceinline__ void copy(uint32_t stage, uint32_t from, uint32_t end) {
        unsigned char* to = ring + stage * (M * WARP_STAGE);
        if constexpr (same_type<F, Nf4>::value) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (uint32_t block = 0; block < Chunk<F>::BLOCKS; block++) {
                    const uint32_t at = (m * NF4_CHUNK + block) * NF4_TILE_BYTES + lane * 16;
                    const bool valid = from + block * BLOCK_INPUTS < end;
                    const size_t offset = (size_t)(from / BLOCK_INPUTS + block) * NF4_TILE_BYTES;
                    cp_async16(to + at, valid ? rows[m] + offset : weight, valid);
                }
        } else {
            const uint32_t piece = lane % 8;
            // `from + ...` is the first input of this lane's piece. A piece holds 16 or 8 inputs
            // and never crosses the end.
            const bool valid = from + piece * (Chunk<F>::INPUTS / 8) < end;
            const size_t offset = (size_t)(from / BLOCK_INPUTS) * F::BLOCK_BYTES;
#pragma unroll
            for (int i = 0; i < M * 4; i++)
                cp_async16(to + swizzled<F>(i * 4 + lane / 8, piece),
                           valid ? rows[i] + offset : weight, valid);
        }
    }

    __device__ __forceinline__ void fetch_scales(uint32_t from) {
        if constexpr (same_type<F, Nf4>::value) {
            const uint32_t first = from / BLOCK_INPUTS,
                           block = min(first + lane % 4, tiles.blocks - 1);
#pragma unroll
            for (int m = 0; m < M; m++) {
                codes[m] = *reinterpret_cast<const uint16_t*>(
                    tiles.absmax_at(strip(m), first / NF4_CHUNK, lane));
#pragma unroll
                for (int high = 0; high < 2; high++)
                    absmax2[m][high] = tiles.second(output(m, high), block);
            }
        }
    }

    __device__ __forceinline__ void compute_scales() {
        if constexpr (same_type<F, Nf4>::value) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int high = 0; high < 2; high++)
                    scales[m][high] = nf4_scale(dynamic, (uint8_t)(codes[m] >> high * 8),
                                                absmax2[m][high], tiles.offset) *
                                      (1.0f / nf4_factor<T>());
        }
    }

    // What a lane has of the activations of a block: 16 inputs of N tokens, packed or f32.
    static constexpr int PIECES = Rows::PACKED ? 2 : 4;

    // The 16 inputs of this lane's tokens from `from` on; zeros for a missing token.
    __device__ __forceinline__ void fetch_inputs(float4 (&v)[N][PIECES], uint32_t from) const {
        if constexpr (Rows::PACKED) {
            const float4* at = reinterpret_cast<const float4*>(x) +
                               (size_t)(from / BLOCK_INPUTS) * (N * 64) + lane;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < PIECES; i++) v[n][i] = at[n * 64 + i * 32];
            return;
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint32_t token = n * 8 + lane / 4;
            const size_t start = Rows::GATHERED ? (size_t)(offset[Rows::GATHERED ? n : 0] + from)
                                                : (size_t)token * inputs + from;
            const float4* at = reinterpret_cast<const float4*>(x + start + lane % 4 * 16);
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[n][i] = token < tokens ? at[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

    __device__ __forceinline__ void multiply(float (&sum)[M][N][4], const unsigned char* stage,
                                             uint32_t block, const float4 (&v)[N][PIECES]) const {
        uint32_t b[N][8];
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                const float4& of = v[n][i];
                if constexpr (Rows::PACKED) {
                    b[n][4 * i] = __float_as_uint(of.x);
                    b[n][4 * i + 1] = __float_as_uint(of.y);
                    b[n][4 * i + 2] = __float_as_uint(of.z);
                    b[n][4 * i + 3] = __float_as_uint(of.w);
                } else {
                    b[n][2 * i] = pack<T>(of.x, of.y);
                    b[n][2 * i + 1] = pack<T>(of.z, of.w);
                }
            }
#pragma unroll
        for (int m = 0; m < M; m++) {
            Fragment<F> fragment;
            read(fragment, stage, m, block, lane);
            uint32_t a[4][4];
            fragments<T>(a, fragment, table);
            float low_scale = 1.0f, high_scale = 1.0f;
            if constexpr (same_type<F, Nf4>::value) {
                low_scale = __shfl_sync(~0u, scales[m][0], (lane & 28) | block);
                high_scale = __shfl_sync(~0u, scales[m][1], (lane & 28) | block);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (Rows::GATHERED && n > 0 && (uint32_t)n * 8 >= tokens) break;
                add_block<F, T>(sum[m][n], a, b[n], low_scale, high_scale);
            }
        }
    }

    // Adds the products of inputs start .. end.
    __device__ __forceinline__ void run(float (&sum)[M][N][4], uint32_t start, uint32_t end,
                                        uint32_t stages) {
        constexpr uint32_t STEP = Chunk<F>::INPUTS;
        float4 next[N][PIECES];
        fetch_inputs(next, start);
        fetch_scales(start);
        uint32_t stage = 0;
        for (uint32_t from = start; from < end; from += STEP) {
            // Producer: copies the chunk `stages - 1` ahead into the stage that was read last.
            const uint32_t ahead = from + (stages - 1) * STEP;
            if (ahead < end) copy(stage == 0 ? stages - 1 : stage - 1, ahead, end);
            cp_commit();
            compute_scales();
            if (from + STEP < end) fetch_scales(from + STEP);
            if (stages == 4)
                cp_wait<3>();
            else if (stages == 3)
                cp_wait<2>();
            else
                cp_wait<1>();
            __syncwarp();
#pragma unroll
            for (uint32_t block = 0; block < Chunk<F>::BLOCKS; block++) {
                const uint32_t at = from + block * BLOCK_INPUTS;
                if (at >= end) break;
                float4 now[N][PIECES];
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < PIECES; i++) now[n][i] = next[n][i];
                if (at + BLOCK_INPUTS < end) fetch_inputs(next, at + BLOCK_INPUTS);
                multiply(sum, ring + stage * (M * WARP_STAGE), block, now);
            }
            __syncwarp();
            stage = stage + 1 == stages ? 0 : stage + 1;
        }
        cp_wait<0>();
    }
};

// Adds the sums of the segments from first to last and writes the tile.
template <class F, int M, int N>
__device__ __forceinline__ void epilogue(const float* sums, const LinearProduct& product,
                                         uint32_t inputs, uint32_t segments, uint32_t tokens) {
    constexpr uint32_t OUTPUTS = M * 16, TOKENS = N * 8;
    for (uint32_t i = threadIdx.x; i < OUTPUTS * TOKENS; i += WARPS * 32) {
        const uint32_t token = i / OUTPUTS, output = product.tile * OUTPUTS + i % OUTPUTS;
        if (token >= tokens || output >= product.outputs) continue;
        float total = sums[i];
        for (uint32_t s = 1; s < segments; s++)
            total = __fadd_rn(total, sums[s * (OUTPUTS * TOKENS) + i]);
        total = __fmul_rn(total, output_scale<F>(product.weight, product.outputs, inputs, output));
        product.out[(size_t)token * product.outputs + output] =
            product.bias ? __fadd_rn(total, product.bias[output]) : total;
    }
}

template <class F, class T, int M, int N, class Rows>
__device__ __forceinline__ void linear_gemv(const LinearProduct& product, const float* x,
                                            const Rows& rows, uint32_t inputs, uint32_t tokens,
                                            uint32_t stages) {
    if constexpr (!Rows::GATHERED) pdl_launch();
    SMEM_DYN(shared);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr uint32_t STAGE = M * WARP_STAGE;
    float* dynamic = reinterpret_cast<float*>(shared + NF4_TABLE_BYTES);

    SegmentGemv<F, T, M, N, Rows> gemv;
    gemv.weight = product.weight;
    gemv.x = x;
    gemv.table = shared;
    gemv.dynamic = dynamic;
    gemv.ring = shared + TABLES<F> + warp * stages * STAGE;
    gemv.inputs = inputs;
    gemv.outputs = product.outputs;
    gemv.first = product.tile * (M * 16);
    gemv.tokens = tokens;
    gemv.lane = lane;
    if constexpr (Rows::GATHERED) {
#pragma unroll
        for (int n = 0; n < N; n++)
            gemv.offset[n] = n * 8 + lane / 4 < tokens ? rows[n * 8 + lane / 4] * inputs : 0;
    }
    if constexpr (same_type<F, Nf4>::value) {
        gemv.tiles = nf4_tiles(product.weight, product.outputs, inputs, product.layout);
#pragma unroll
        for (int m = 0; m < M; m++) gemv.rows[m] = gemv.tiles.codes_at(gemv.strip(m), 0, lane);
    } else {
#pragma unroll
        for (int i = 0; i < M * 4; i++) {
            const uint32_t wanted = gemv.first + i * 4 + lane / 8,
                           row = wanted < product.outputs ? wanted : product.outputs - 1;
            gemv.rows[i] = product.weight + row * row_bytes<F>(inputs) + lane % 8 * 16;
        }
    }

    const uint32_t segment = segment_inputs(inputs), start = min(warp * segment, inputs),
                   end = min(start + segment, inputs);
    for (uint32_t s = 0; s + 1 < stages; s++) {
        if (start + s * Chunk<F>::INPUTS < end) gemv.copy(s, start + s * Chunk<F>::INPUTS, end);
        cp_commit();
    }
    // The tables are filled while the first copies run.
    if constexpr (same_type<F, Nf4>::value) {
        fill_nf4_table<T>(reinterpret_cast<uint32_t*>(shared));
        dynamic[threadIdx.x] = NF4_DYNAMIC[threadIdx.x];
        __syncthreads();
    }
    // Lists of rows come from earlier launches, so experts have waited.
    if constexpr (!Rows::GATHERED) pdl_wait();
    float sum[M][N][4] = {};
    if (start < end) gemv.run(sum, start, end, stages);
    cp_wait<0>();
    __syncthreads(); // all rings are read

    float* sums = reinterpret_cast<float*>(shared + TABLES<F>);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t output = m * 16 + lane / 4 + i / 2 * 8,
                               token = n * 8 + lane % 4 * 2 + i % 2;
                sums[(warp * N * 8 + token) * (M * 16) + output] = sum[m][n][i];
            }
    __syncthreads();
    epilogue<F, M, N>(sums, product, inputs, (inputs + segment - 1) / segment, tokens);
}
