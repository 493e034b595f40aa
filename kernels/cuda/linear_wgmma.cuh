// The product of many rows by warpgroups, a tile of 128 rows and 128 outputs per CTA: what linear_wgmma.cu says of it, for whoever says where rows
// and matrices lie.
#pragma once
#include "linear.cuh"
#include "wgmma.cuh"

#define TILE_OUTPUTS 128
#define TILE_ROWS 128
#define STAGES 6
#define X_STAGE (TILE_ROWS * 128)

template <int I> struct Number {
    static constexpr int value = I;
};
template <class F> constexpr bool IS_NF4 = same_type<F, Nf4>::value;
template <class F> constexpr uint32_t W_STAGE = TILE_OUTPUTS * F::BLOCK_BYTES;
// CTAs of a cluster, which have the same rows and neighbouring tiles of outputs: linear_wgmma.cu says why as many.
template <class F> constexpr uint32_t CLUSTER = same_type<F, Plain>::value ? 4 : 2;
// Blocks of a chunk, through which products run without a pause.
#define CHUNK 4
// Bytes before the ring: barriers; of NF4 the table, the dynamic map and the scales of two chunks. All parts are multiples of 1024.
template <class F> constexpr uint32_t TABLES = IS_NF4<F> ? NF4_TABLE_BYTES + 1024 + 1024 + 2 * CHUNK * TILE_OUTPUTS * 4 : 1024;

// Of the 8 pieces of 16 bytes of a row of 128, odd rows have neighbours swapped: lanes of two rows that read every second piece share no bank.
__device__ __forceinline__ uint32_t twisted_piece(uint32_t row, uint32_t piece) { return row * 128 + (piece ^ (row & 1)) * 16; }

__device__ __forceinline__ void read_part(RowPart<Nf4>& part, const unsigned char* stage, uint32_t row, uint32_t q) {
    part.v = *reinterpret_cast<const uint2*>(stage + row * 32 + q * 8);
}
__device__ __forceinline__ void read_part(RowPart<Int8>& part, const unsigned char* stage, uint32_t row, uint32_t q) {
    part.v = *reinterpret_cast<const uint4*>(stage + row * 64 + q * 16);
}
__device__ __forceinline__ void read_part(RowPart<Plain>& part, const unsigned char* stage, uint32_t row, uint32_t q) {
    part.v[0] = *reinterpret_cast<const uint4*>(stage + twisted_piece(row, q * 2));
    part.v[1] = *reinterpret_cast<const uint4*>(stage + twisted_piece(row, q * 2 + 1));
}

// Where this thread's pieces of the weights of the next block come from: at equal distances, so one address is kept.
template <class F> struct WeightCopies {
    static constexpr uint32_t PIECES = F::BLOCK_BYTES / 16, STEP = 256 / PIECES;

    const uint8_t* from;
    uint32_t left, to; // outputs of the tile that exist, from this thread's first on; place in a stage

    __device__ __forceinline__ WeightCopies(const LinearPart& part, uint32_t inputs) {
        const uint32_t row = threadIdx.x / PIECES, output = part.tile * TILE_OUTPUTS + row;
        from = part.weight + output * row_bytes<F>(inputs) + threadIdx.x % PIECES * 16;
        left = output < part.outputs ? part.outputs - output : 0;
        to = same_type<F, Plain>::value ? twisted_piece(row, threadIdx.x % PIECES) : threadIdx.x * 16;
    }

    // Copies the weights of the next block; outputs past the end are zeros. Steps are even, so that a thread's pieces are twisted alike.
    __device__ __forceinline__ void next(unsigned char* stage, uint32_t inputs) {
#pragma unroll
        for (uint32_t i = 0; i < PIECES / 2; i++)
            cp_async16(stage + to + i * STEP * F::BLOCK_BYTES, from + i * STEP * (uint32_t)row_bytes<F>(inputs), i * STEP < left);
        from += F::BLOCK_BYTES;
    }
};

// Scales of the outputs of a tile for a chunk of 4 blocks, of which each thread works out two: those of one output and two blocks.
struct ScaleCopies {
    uint32_t codes;
    float second[2];

    // Asks for those of blocks `block` to `block` + 4. Past the last block they are of others, and not used.
    __device__ __forceinline__ void ask(const LinearPart& part, uint32_t inputs, uint32_t block) {
        const Nf4Parts parts = nf4_parts(part.weight, part.outputs, inputs);
        const uint32_t blocks = inputs / BLOCK_INPUTS, output = min(part.tile * TILE_OUTPUTS + threadIdx.x % TILE_OUTPUTS, part.outputs - 1);
        codes = 0;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t index = output * blocks + min(block + threadIdx.x / TILE_OUTPUTS * 2 + i, blocks - 1);
            codes |= (uint32_t)parts.absmax[index] << i * 8;
            second[i] = parts.absmax2[index / NF4_SUPER_GROUP];
        }
    }
    // Stores them at [4, TILE_OUTPUTS]; `offset` is that of the matrix.
    template <class T> __device__ __forceinline__ void store(float* to, const float* dynamic, float offset) const {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
            to[threadIdx.x * 2 - threadIdx.x % TILE_OUTPUTS + i * TILE_OUTPUTS] = nf4_scale(dynamic, (uint8_t)(codes >> i * 8), second[i], offset) * (1.0f / nf4_factor<T>());
    }
};

// Fragments as fragments() in linear.cuh makes them. The addresses of look-ups in the table of NF4 take one shift and one logical instruction:
// byte x 128, and this lane's bank.
template <class T, class F>
__device__ __forceinline__ void make_fragments(uint32_t (&a)[4][4], const RowPart<F>& low, const RowPart<F>& high, const unsigned char* table) {
    if constexpr (IS_NF4<F>) {
        const uint32_t bank = threadIdx.x % 32 * 4;
        auto pair = [&](uint32_t word, int byte) {
            const uint32_t at = byte == 0 ? word << 7 : word >> (byte * 8 - 7);
            return *reinterpret_cast<const uint32_t*>(table + ((at & 0x7f80) | bank));
        };
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const uint32_t l = s < 2 ? low.v.x : low.v.y, h = s < 2 ? high.v.x : high.v.y;
            a[s][0] = pair(l, s % 2 * 2);
            a[s][1] = pair(h, s % 2 * 2);
            a[s][2] = pair(l, s % 2 * 2 + 1);
            a[s][3] = pair(h, s % 2 * 2 + 1);
        }
    } else {
        fragments<T>(a, low, high, nullptr);
    }
}

// Piece `number` of x, 8 inputs of a row, to its place in the tiles. Step s of a block takes inputs 4 s .. 4 s + 3 of each 16 (linear.cuh): the first
// two are elements 2 q, 2 q + 1 of the step, the others 2 q + 8, 2 q + 9.
template <class T> __device__ __forceinline__ void tile_piece(const float* x, T* out, uint32_t inputs, uint32_t rows, uint64_t number) {
    const uint32_t row = (uint32_t)(number / (inputs / 8)), at = (uint32_t)(number % (inputs / 8)), block = at / 8, piece = at % 8;
    if (row >= rows) return;
    const float* from = x + (size_t)row * inputs + block * 64 + piece / 2 * 4 + piece % 2 * 2;
    uint32_t pairs[4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const float2 two = *reinterpret_cast<const float2*>(from + q * 16);
        pairs[q] = pack<T>(two.x, two.y);
    }
    unsigned char* tile = reinterpret_cast<unsigned char*>(out) + ((size_t)(row / TILE_ROWS) * (inputs / BLOCK_INPUTS) + block) * X_STAGE;
    *reinterpret_cast<uint4*>(tile + wgmma_piece(row % TILE_ROWS, piece)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Tile `tile` of 128 rows of x, which lies as linear_wgmma.cu says; rows are numbered from the tile's first, and `rows` of them are there.
template <class F, class T>
__device__ __forceinline__ void linear_wgmma(const LinearPart& part, const T* x, uint32_t inputs, uint32_t tile, float* out, uint32_t rows) {
    SMEM_DYN(shared); // tables and barriers, then a ring of stages, each x [128, 64] and weights
    constexpr uint32_t STAGE = X_STAGE + W_STAGE<F>;
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, w_row = threadIdx.x / 32 * 16 + g;
    const uint32_t blocks = inputs / BLOCK_INPUTS;
    unsigned char* table = shared; // of NF4 alone
    float* dynamic = reinterpret_cast<float*>(table + NF4_TABLE_BYTES);
    float* scales = dynamic + 256;
    unsigned char* ring = shared + TABLES<F>;
    uint64_t* full = reinterpret_cast<uint64_t*>(ring - 1024); // [STAGES]: x of the stage is there
    uint64_t* empty = full + STAGES;                           // [STAGES]: all CTAs of the cluster have done with it
    float* offset = reinterpret_cast<float*>(full + 16);       // of the scales
    const uint8_t* x_from = reinterpret_cast<const uint8_t*>(x) + (size_t)tile * blocks * X_STAGE;
    WeightCopies<F> weights(part, inputs);
    // One thread copies this CTA's share of a block of x to a stage of all CTAs of the cluster, and expects the whole.
    auto copy_x = [&](uint32_t block, uint32_t stage) {
        constexpr uint32_t SHARE = X_STAGE / CLUSTER<F>;
        const uint32_t share = cluster_rank() * SHARE;
        barrier_expect(full + stage, X_STAGE);
        copy_bulk<CLUSTER<F>>(ring + stage * STAGE + share, x_from + (size_t)block * X_STAGE + share, SHARE, full + stage);
    };
    if (threadIdx.x == 0) {
        for (uint32_t s = 0; s < STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, CLUSTER<F>);
        }
        fence_barrier_init();
    }
    cluster_arrive();
    // Weights of blocks, one after the other, to stages.
#pragma unroll
    for (uint32_t s = 0; s < STAGES - 1; s++) {
        if (s < blocks) weights.next(ring + s * STAGE + X_STAGE, inputs);
        cp_commit();
    }
    // Each thread of the cluster arrives once, above.
    cluster_wait();
    if (threadIdx.x == 0)
        for (uint32_t s = 0; s < min(blocks, STAGES - 2u); s++) copy_x(s, s);
    ScaleCopies asked = {};
    if constexpr (IS_NF4<F>) {
        asked.ask(part, inputs, 0);
        fill_nf4_table<T>(reinterpret_cast<uint32_t*>(table));
        dynamic[threadIdx.x] = NF4_DYNAMIC[threadIdx.x];
        if (threadIdx.x == 0) *offset = nf4_parts(part.weight, part.outputs, inputs).offset;
        __syncthreads();
        asked.template store<T>(scales, dynamic, *offset);
    }

    // Stages of this block, the one before, and the one before that; phase of `full` of this block.
    uint32_t a[2][4][4], stage = 0, freed = STAGES - 1, next = STAGES - 2, phase = 0;
    float low = 1.0f, high = 1.0f; // scales of this block, of outputs g and g + 8
    auto make = [&](uint32_t (&to)[4][4]) {
        const unsigned char* at = ring + stage * STAGE + X_STAGE;
        RowPart<F> l, h;
        read_part(l, at, w_row, q);
        read_part(h, at, w_row + 8, q);
        make_fragments<T>(to, l, h, table);
    };
    cp_wait<STAGES - 2>();
    __syncthreads();
    make(a[0]);
    barrier_wait(full, 0);

    float total[2][32], sum[2][32], group[2][32];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        total[i / 32][i % 32] = -0.0f; // leaves even the first sum's sign of zero alone
        sum[i / 32][i % 32] = 0.0f;
    }
    // What comes between the products of a block and those of the next. This CTA has done with the block before: weights are copied into its stage
    // again, and all CTAs are told. x goes into the stage of the one before that, with which they had done a block ago: so none waits for
    // another that is a little slower. All threads wait, as a loop of one alone would cost registers. While a stage was not used yet, the wait is for
    // the phase before the first, which counts as ended.
    // Why every wait ends. A phase of `empty` has one arrival of each CTA, made between the next two blocks; a phase of `full` that of thread 0 of its CTA
    // and the bytes of all CTAs, copied 4 blocks before. So the CTA that is furthest behind never waits for others: they have passed there. No phase is
    // missed: the next one of `empty` ends after all threads of this CTA have passed here again, the next one of `full` after it has arrived at `empty`.
    // Arrivals are made where a stage is filled again, and only there: each is waited for, so none is on its way to a CTA that ends.
    auto between = [&](uint32_t block, uint32_t (&to)[4][4]) {
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
            low = scales[block % (2 * CHUNK) * TILE_OUTPUTS + w_row];
            high = scales[block % (2 * CHUNK) * TILE_OUTPUTS + w_row + 8];
        }
        next = freed;
        freed = stage;
        stage++;
        if (stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
        if (block + 1 < blocks) {
            make(to);
            barrier_wait(full + stage, phase);
        }
    };
    auto finish = [&]() {
#pragma unroll
        for (int i = 0; i < 64; i++) {
            total[i / 32][i % 32] = __fadd_rn(total[i / 32][i % 32], sum[i / 32][i % 32]);
            sum[i / 32][i % 32] = 0.0f;
        }
    };
    // NF4: a group of half the rows (64) at a time is summed from zero while the last one is scaled and added.
    auto issue = [&](int half, const uint32_t (&from)[4][4]) {
        const uint64_t b = wgmma_rows(ring + stage * STAGE) + half * 512;
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) wgmma<T, 64>(group[half], from[s], b + s * 2, s > 0);
        wgmma_commit();
    };
    auto scaled = [&](int half) {
#pragma unroll
        for (int i = 0; i < 32; i++) sum[half][i] = __fmaf_rn(group[half][i], i % 4 / 2 ? high : low, sum[half][i]);
    };
    // Other formats: one sum goes on.
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
    // `count` blocks from `block`, the first of a chunk, on. At its end no products run: the compiler follows none from one turn of a loop to the next.
    auto chunk = [&](uint32_t block, bool first, auto count) {
        constexpr int COUNT = decltype(count)::value;
        if constexpr (IS_NF4<F>) asked.ask(part, inputs, block + CHUNK);
#pragma unroll
        for (int u = 0; u < COUNT; u++) {
            if constexpr (IS_NF4<F>) {
                issue(0, a[u % 2]);
                if (u > 0) {
                    wgmma_wait<1>(group[1]);
                    scaled(1);
                }
                issue(1, a[u % 2]);
                between(block + u, a[1 - u % 2]);
                wgmma_wait<1>(group[0]);
                scaled(0);
                if (u == COUNT - 1) asked.template store<T>(scales + (block / CHUNK + 1) % 2 * CHUNK * TILE_OUTPUTS, dynamic, *offset);
            } else {
                add(a[u % 2], first && u == 0);
                if (u > 0) wgmma_wait<1>();
                between(block + u, a[1 - u % 2]);
            }
        }
        if constexpr (IS_NF4<F>) {
            wgmma_wait<0>(group[1]);
            scaled(1);
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
            finish();
            left = segment_blocks;
        }
    }
    if (block < blocks) {
        if (blocks - block == 1) chunk(block, left == segment_blocks, Number<1>());
        if (blocks - block == 2) chunk(block, left == segment_blocks, Number<2>());
        if (blocks - block == 3) chunk(block, left == segment_blocks, Number<3>());
        finish();
    }
    cp_wait<0>();
    // No CTA ends before what it copies to the others has come, for which they have waited here. Each thread of the cluster comes by once.
    cluster_arrive();

#pragma unroll
    for (int high = 0; high < 2; high++) {
        const uint32_t output = part.tile * TILE_OUTPUTS + w_row + high * 8;
        if (output >= part.outputs) continue;
        const float scale = output_scale<F>(part.weight, part.outputs, inputs, output);
        const float bias = part.bias ? part.bias[output] : 0.0f;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const uint32_t row = i / 2 * 8 + q * 2 + i % 2;
            const float value = __fmul_rn(total[i / 16][i % 16 / 2 * 4 + high * 2 + i % 2], scale);
            if (row < rows) out[(size_t)row * part.outputs + output] = part.bias ? __fadd_rn(value, bias) : value;
        }
    }
    cluster_wait();
}
