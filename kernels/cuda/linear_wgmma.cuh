// GEMM of many rows on warpgroups with a tile of 128 rows and 128 outputs per CTA. linear_wgmma.cu
// describes it and says which rows and matrices a CTA has.
#pragma once
#include "linear.cuh"
#include "wgmma.cuh"

#define TILE_OUTPUTS 128
#define TILE_ROWS    128
#define STAGES       6
#define X_STAGE      (TILE_ROWS * 128)

template <int I> struct Number {
    static constexpr int value = I;
};
template <class F> constexpr bool IS_NF4 = same_type<F, Nf4>::value;
template <class F> constexpr uint32_t W_STAGE = TILE_OUTPUTS * F::BLOCK_BYTES;
// CTAs of a cluster, which share rows and have neighbouring tiles of outputs. linear_wgmma.cu
// explains the numbers.
template <class F> constexpr uint32_t CLUSTER = same_type<F, Plain>::value ? 4 : 2;
// Blocks of a chunk: straight-line code in which products overlap.
#define CHUNK NF4_CHUNK
// Bytes before the ring: barriers; for NF4 also the table of levels, the dynamic map and the scales
// of two chunks. All of them are multiples of 1024.
template <class F>
constexpr uint32_t TABLES =
    IS_NF4<F> ? NF4_TABLE_BYTES + NF4_DYNAMIC_BYTES + 1024 + 2 * CHUNK * TILE_OUTPUTS * 4 : 1024;
// Shared memory: TABLES, then STAGES stages of x and weights.
template <class F> constexpr uint32_t SHARED = TABLES<F> + STAGES * (X_STAGE + W_STAGE<F>);
EXPORT(TILE_ROWS, TILE_ROWS);
EXPORT(TILE_OUTPUTS, TILE_OUTPUTS);
EXPORT(CLUSTER_PLAIN, CLUSTER<Plain>);
EXPORT(CLUSTER_INT8, CLUSTER<Int8>);
EXPORT(CLUSTER_NF4, CLUSTER<Nf4>);
EXPORT(SHARED_PLAIN, SHARED<Plain>);
EXPORT(SHARED_INT8, SHARED<Int8>);
EXPORT(SHARED_NF4, SHARED<Nf4>);

// Offset of a piece of 16 bytes in rows of 128 bytes. Odd rows have neighbouring pieces swapped, so
// that lanes that read every second piece of two rows use different banks.
__device__ __forceinline__ uint32_t swizzled_piece(uint32_t row, uint32_t piece) {
    return row * 128 + (piece ^ (row & 1)) * 16;
}

// Reads what this lane needs of its warp's strip of 16 outputs.
__device__ __forceinline__ void read_fragment(Fragment<Nf4>& fragment, const unsigned char* stage) {
    fragment.v = *reinterpret_cast<const uint4*>(stage + threadIdx.x * 16);
}
__device__ __forceinline__ void read_fragment(Fragment<Int8>& fragment,
                                              const unsigned char* stage) {
    const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const unsigned char* at = stage + row * 64 + threadIdx.x % 4 * 16;
    fragment.low = *reinterpret_cast<const uint4*>(at);
    fragment.high = *reinterpret_cast<const uint4*>(at + 8 * 64);
}
__device__ __forceinline__ void read_fragment(Fragment<Plain>& fragment,
                                              const unsigned char* stage) {
    const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t piece = threadIdx.x % 4 * 2 + i;
        fragment.low[i] = *reinterpret_cast<const uint4*>(stage + swizzled_piece(row, piece));
        fragment.high[i] = *reinterpret_cast<const uint4*>(stage + swizzled_piece(row + 8, piece));
    }
}

// Producer of weights: the source of this thread's pieces of the next block. The pieces have equal
// distances, so one address is enough. Of NF4 each warp has a strip, and a lane its piece.
template <class F> struct WeightCopies {
    static constexpr uint32_t PIECES = F::BLOCK_BYTES / 16, STEP = 256 / PIECES;

    const uint8_t* from;
    uint32_t left,
        to; // outputs of the tile that exist, from this thread's first on; place in a stage

    __device__ __forceinline__ WeightCopies(const LinearProduct& product, uint32_t inputs) {
        const uint32_t row = IS_NF4<F> ? threadIdx.x / 32 * NF4_STRIP : threadIdx.x / PIECES,
                       piece = IS_NF4<F> ? threadIdx.x % 32 : threadIdx.x % PIECES,
                       output = product.tile * TILE_OUTPUTS + row;
        from = product.weight + output * row_bytes<F>(inputs) + piece * 16;
        left = output < product.outputs ? product.outputs - output : 0;
        to = same_type<F, Plain>::value ? swizzled_piece(row, piece) : threadIdx.x * 16;
    }

    // Copies the weights of the next block, with zeros for outputs past the end. STEP is even, so
    // that a thread's pieces have the same swizzle.
    __device__ __forceinline__ void next(unsigned char* stage, uint32_t inputs) {
#pragma unroll
        for (uint32_t i = 0; i < PIECES / 2; i++)
            cp_async16(stage + to + i * STEP * F::BLOCK_BYTES,
                       from + i * STEP * (uint32_t)row_bytes<F>(inputs), i * STEP < left);
        from += IS_NF4<F> ? NF4_TILE_BYTES : F::BLOCK_BYTES;
    }
};

// Scales of the outputs of a tile for a chunk of 4 blocks. Each thread computes two: lane 4 g + q
// of the warp of a strip those of block q and rows g and g + 8.
struct ScaleCopies {
    uint32_t codes;
    float second[2];

    // Starts to read the scales of blocks `block` to `block` + 4, a chunk; `layout` is the
    // product's. Past the last block the values belong to other blocks and are not used.
    __device__ __forceinline__ void prefetch(const LinearProduct& product, uint32_t layout,
                                             uint32_t inputs, uint32_t block) {
        const Nf4Tiles tiles = nf4_tiles(product.weight, product.outputs, inputs, layout);
        const uint32_t lane = threadIdx.x % 32, last = product.outputs - 1,
                       first = product.tile * TILE_OUTPUTS + threadIdx.x / 32 * NF4_STRIP;
        codes = *reinterpret_cast<const uint16_t*>(tiles.absmax_at(
            min(first, last) / NF4_STRIP, min(block / NF4_CHUNK, tiles.chunks - 1), lane));
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
            second[i] = tiles.second(min(first + lane / 4 + i * 8, last),
                                     min(block + lane % 4, tiles.blocks - 1));
    }
    // Computes the scales and stores them at [256 threads, 2]; `offset` is that of the matrix.
    template <class T>
    __device__ __forceinline__ void store(float* to, const float* dynamic, float offset) const {
        const float low = nf4_scale(dynamic, (uint8_t)codes, second[0], offset),
                    high = nf4_scale(dynamic, (uint8_t)(codes >> 8), second[1], offset);
        reinterpret_cast<float2*>(to)[threadIdx.x] =
            make_float2(low * (1.0f / nf4_factor<T>()), high * (1.0f / nf4_factor<T>()));
    }
};

// Copies piece `number` of x, 8 inputs of a row, into the tiles. Step s of a block takes inputs 4 s
// .. 4 s + 3 of each 16 (linear.cuh): the first two are elements 2 q, 2 q + 1 of the step, the
// others 2 q + 8, 2 q + 9.
template <class T>
__device__ __forceinline__ void tile_piece(const float* x, T* out, uint32_t inputs, uint32_t rows,
                                           uint64_t number) {
    const uint32_t row = (uint32_t)(number / (inputs / 8)), at = (uint32_t)(number % (inputs / 8)),
                   block = at / 8, piece = at % 8;
    if (row >= rows) return;
    const float* from = x + (size_t)row * inputs + block * 64 + piece / 2 * 4 + piece % 2 * 2;
    uint32_t pairs[4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const float2 two = *reinterpret_cast<const float2*>(from + q * 16);
        pairs[q] = pack<T>(two.x, two.y);
    }
    unsigned char* tile = reinterpret_cast<unsigned char*>(out) +
                          ((size_t)(row / TILE_ROWS) * (inputs / BLOCK_INPUTS) + block) * X_STAGE;
    *reinterpret_cast<uint4*>(tile + wgmma_piece(row % TILE_ROWS, piece)) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Computes tile `tile` of 128 rows of x, whose layout linear_wgmma.cu describes. Rows are numbered
// from the first row of the tile; `rows` of them exist.
template <class F, class T>
__device__ __forceinline__ void linear_wgmma(const LinearProduct& product, const T* x,
                                             uint32_t inputs, uint32_t tile, float* out,
                                             uint32_t rows) {
    SMEM_DYN(shared);
    constexpr uint32_t STAGE = X_STAGE + W_STAGE<F>;
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, q = lane % 4,
                   w_row = threadIdx.x / 32 * 16 + g;
    const uint32_t blocks = inputs / BLOCK_INPUTS;
    unsigned char* table = shared; // of NF4 alone
    float* dynamic = reinterpret_cast<float*>(table + NF4_TABLE_BYTES);
    float* scales = dynamic + 256;
    unsigned char* ring = shared + TABLES<F>;
    uint64_t* full = reinterpret_cast<uint64_t*>(ring - 1024); // [STAGES]: x of the stage is there
    uint64_t* empty = full + STAGES; // [STAGES]: all CTAs of the cluster have done with it
    float* offset = reinterpret_cast<float*>(full + 16); // of the scales
    // The product's layout, where it takes no register in the loop.
    uint32_t* layout = reinterpret_cast<uint32_t*>(offset + 1);
    const uint8_t* x_from = reinterpret_cast<const uint8_t*>(x) + (size_t)tile * blocks * X_STAGE;
    WeightCopies<F> weights(product, inputs);
    // Producer of x: one thread expects a whole block and multicasts this CTA's share of it to all
    // CTAs of the cluster.
    auto copy_x = [&](uint32_t block, uint32_t stage) {
        constexpr uint32_t SHARE = X_STAGE / CLUSTER<F>;
        const uint32_t share = cluster_rank() * SHARE;
        barrier_expect(full + stage, X_STAGE);
        copy_bulk<CLUSTER<F>>(ring + stage * STAGE + share,
                              x_from + (size_t)block * X_STAGE + share, SHARE, full + stage);
    };
    if (threadIdx.x == 0) {
        for (uint32_t s = 0; s < STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, CLUSTER<F>);
        }
        fence_barrier_init();
    }
    cluster_arrive();
    // Prologue: the weights of the first blocks.
#pragma unroll
    for (uint32_t s = 0; s < STAGES - 1; s++) {
        if (s < blocks) weights.next(ring + s * STAGE + X_STAGE, inputs);
        cp_commit();
    }
    // Waits for the cluster_arrive() above, once per thread of the cluster.
    cluster_wait();
    if (threadIdx.x == 0)
        for (uint32_t s = 0; s < min(blocks, STAGES - 2u); s++) copy_x(s, s);
    ScaleCopies prefetched = {};
    if constexpr (IS_NF4<F>) {
        prefetched.prefetch(product, product.layout, inputs, 0);
        fill_nf4_table<T>(reinterpret_cast<uint32_t*>(table));
        dynamic[threadIdx.x] = NF4_DYNAMIC[threadIdx.x];
        if (threadIdx.x == 0) {
            *offset = nf4_tiles(product.weight, product.outputs, inputs, product.layout).offset;
            *layout = product.layout;
        }
        __syncthreads();
        prefetched.template store<T>(scales, dynamic, *offset);
    }

    // Stages of this block, of the block before, and of the one before that; phase of `full` of
    // this block.
    uint32_t a[2][4][4], stage = 0, freed = STAGES - 1, next = STAGES - 2, phase = 0;
    float low = 1.0f, high = 1.0f; // scales of this block, of outputs g and g + 8
    auto load_fragments = [&](uint32_t (&to)[4][4]) {
        const unsigned char* at = ring + stage * STAGE + X_STAGE;
        Fragment<F> fragment;
        read_fragment(fragment, at);
        fragments<T>(to, fragment, table);
    };
    cp_wait<STAGES - 2>();
    __syncthreads();
    load_fragments(a[0]);
    barrier_wait(full, 0);

    float total[2][32], sum[2][32], group[2][32];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        total[i / 32][i % 32] = -0.0f; // leaves even the first sum's sign of zero alone
        sum[i / 32][i % 32] = 0.0f;
    }
    // Advances the pipeline between the products of a block and those of the next one. This CTA has
    // released the block before: its stage receives new weights, and all CTAs are notified. x goes
    // into the stage of the block before that, which all CTAs released one block ago, so that no
    // CTA waits for one that is slightly slower. All threads wait, because a loop of a single
    // thread would cost registers. For an unused stage, the wait is for the phase before the first
    // one, which counts as ended. Why every wait ends: a phase of `empty` has one arrival per CTA,
    // made between the next two blocks. A phase of `full` has the arrival of thread 0 of its CTA
    // and the bytes of all CTAs, copied 4 blocks earlier. So the CTA that is furthest behind never
    // waits for others, which have passed that point. No phase is missed: the next phase of `empty`
    // ends after all threads of this CTA have been here again, the next one of `full` after this
    // CTA has arrived at `empty`. A CTA arrives only where a stage is filled again. Each arrival is
    // waited for, so none is in flight to a CTA that ends.
    auto advance = [&](uint32_t block, uint32_t (&to)[4][4]) {
        cp_wait<STAGES - 3>();
        __syncthreads();
        if (block + STAGES - 1 < blocks) {
            if (threadIdx.x < CLUSTER<F> && block > 0) barrier_arrive(empty + freed, threadIdx.x);
            weights.next(ring + freed * STAGE + X_STAGE, inputs);
        }
        cp_commit();
        if (block + STAGES - 2 < blocks) {
            barrier_wait(empty + next, stage < 2 ? phase ^ 1 : phase);
            if (threadIdx.x == 0) copy_x(block + STAGES - 2, next);
        }
        if constexpr (IS_NF4<F>) {
            const float* chunk = scales + block / CHUNK % 2 * CHUNK * TILE_OUTPUTS;
            const float2 both = reinterpret_cast<const float2*>(
                chunk)[threadIdx.x - threadIdx.x % 4 + block % CHUNK];
            low = both.x;
            high = both.y;
        }
        next = freed;
        freed = stage;
        stage++;
        if (stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
        if (block + 1 < blocks) {
            load_fragments(to);
            barrier_wait(full + stage, phase);
        }
    };
    auto add_segment = [&]() {
#pragma unroll
        for (int i = 0; i < 64; i++) {
            total[i / 32][i % 32] = __fadd_rn(total[i / 32][i % 32], sum[i / 32][i % 32]);
            sum[i / 32][i % 32] = 0.0f;
        }
    };
    // NF4: a group of half the rows (64) is summed from zero while the previous group is scaled and
    // added.
    auto issue = [&](int half, const uint32_t (&from)[4][4]) {
        const uint64_t b = wgmma_rows(ring + stage * STAGE) + half * 512;
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) wgmma<T, 64>(group[half], from[s], b + s * 2, s > 0);
        wgmma_commit();
    };
    auto accumulate_group = [&](int half) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            sum[half][i] = __fmaf_rn(group[half][i], i % 4 / 2 ? high : low, sum[half][i]);
    };
    // Other formats: products add to one running sum.
    auto add = [&](const uint32_t (&from)[4][4], bool first) {
        const uint64_t b = wgmma_rows(ring + stage * STAGE);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) {
            wgmma<T, 64>(sum[0], from[s], b + s * 2, !first || s > 0);
            wgmma<T, 64>(sum[1], from[s], b + s * 2 + 512, !first || s > 0);
        }
        wgmma_commit();
    };
    // Computes `count` blocks from `block`, the first of a chunk. No products run at its end,
    // because the compiler tracks none across iterations of a loop.
    auto chunk = [&](uint32_t block, bool first, auto count) {
        constexpr int COUNT = decltype(count)::value;
        if constexpr (IS_NF4<F>) prefetched.prefetch(product, *layout, inputs, block + CHUNK);
#pragma unroll
        for (int u = 0; u < COUNT; u++) {
            if constexpr (IS_NF4<F>) {
                issue(0, a[u % 2]);
                if (u > 0) {
                    wgmma_wait<1>(group[1]);
                    accumulate_group(1);
                }
                issue(1, a[u % 2]);
                advance(block + u, a[1 - u % 2]);
                wgmma_wait<1>(group[0]);
                accumulate_group(0);
                if (u == COUNT - 1)
                    prefetched.template store<T>(
                        scales + (block / CHUNK + 1) % 2 * CHUNK * TILE_OUTPUTS, dynamic, *offset);
            } else {
                add(a[u % 2], first && u == 0);
                if (u > 0) wgmma_wait<1>();
                advance(block + u, a[1 - u % 2]);
            }
        }
        if constexpr (IS_NF4<F>) {
            wgmma_wait<0>(group[1]);
            accumulate_group(1);
        } else {
            wgmma_wait<0>(sum[0]);
            wgmma_hold(sum[1]);
        }
    };
    const uint32_t segment_blocks = segment_inputs(inputs) / BLOCK_INPUTS; // a multiple of CHUNK
    uint32_t block = 0, left = segment_blocks;
    for (; block + CHUNK <= blocks; block += CHUNK) {
        chunk(block, left == segment_blocks, Number<CHUNK>());
        left -= CHUNK;
        if (left == 0 || block + CHUNK == blocks) {
            add_segment();
            left = segment_blocks;
        }
    }
    if (block < blocks) {
        if (blocks - block == 1) chunk(block, left == segment_blocks, Number<1>());
        if (blocks - block == 2) chunk(block, left == segment_blocks, Number<2>());
        if (blocks - block == 3) chunk(block, left == segment_blocks, Number<3>());
        add_segment();
    }
    cp_wait<0>();
    // A CTA ends only after its copies to the others have arrived, which they have waited for
    // before this point. Each thread of the cluster arrives once.
    cluster_arrive();

#pragma unroll
    for (int high = 0; high < 2; high++) {
        const uint32_t output = product.tile * TILE_OUTPUTS + w_row + high * 8;
        if (output >= product.outputs) continue;
        const float scale = output_scale<F>(product.weight, product.outputs, inputs, output);
        const float bias = product.bias ? product.bias[output] : 0.0f;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const uint32_t row = i / 2 * 8 + q * 2 + i % 2;
            const float value = __fmul_rn(total[i / 16][i % 16 / 2 * 4 + high * 2 + i % 2], scale);
            if (row < rows)
                out[(size_t)row * product.outputs + output] =
                    product.bias ? __fadd_rn(value, bias) : value;
        }
    }
    cluster_wait();
}
