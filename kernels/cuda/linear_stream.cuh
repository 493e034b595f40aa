// Products of 1 to 32 rows by CTAs that stay on their multiprocessor: every weight goes from memory
// to registers once. linear_cluster.cu says how CTAs share the work.
#pragma once
#include "cluster.cuh"
#include "linear_source.cuh"
#include "pdl.cuh"
#include "rmsnorm.cuh"
#include "silu.cuh"

#define WARPS    8
#define MAX_ROWS 32

// Shared memory: TABLE (of NF4), activations, then the sums that the segments of 64 outputs and 8
// rows have.
#define SUM_OUTPUTS (STRIPS * STRIP)
#define SUM_BYTES   (SEGMENTS * SUM_OUTPUTS * 8 * 4)
// Activations of a block of inputs: 8 rows, or one.
#define TILE_BYTES 1024
#define ROW_BYTES  128
EXPORT(CTA_THREADS, WARPS * 32);
EXPORT(MAX_ROWS, MAX_ROWS);
EXPORT(STRIP, STRIP);
EXPORT(SEGMENTS, SEGMENTS);
EXPORT(TABLE_NF4, TABLE<Nf4>);
EXPORT(SUM_BYTES, SUM_BYTES);
EXPORT(TILE_BYTES, TILE_BYTES);
EXPORT(ROW_BYTES, ROW_BYTES);

// Widest rows that are normed before they are multiplied: the sums of a warp's share stay in
// registers.
#define NORM_WIDTH 8192
EXPORT(NORM_WIDTH, NORM_WIDTH);

// The norm of rows before they are multiplied, as rmsnorm_add of rmsnorm.cu computes it.
struct Norm {
    const float *y, *weight; // y null: the activations are multiplied as they are
    float* sum;              // [rows, inputs], gets round(x + round(y))
    float eps;
};

// --- shares --------------------------------------------------------------------------------------

// Where part `part` of `parts` nearly equal ones of `count` begins.
__device__ __forceinline__ uint32_t cut(uint32_t count, uint32_t part, uint32_t parts) {
    return count * part / parts;
}

struct Products {
    LinearProduct a, b, c;
    // 1: a and b are gate and up of an MLP, and only the activated gate is written. Their strips
    // alternate, so that the same warps have both. 0: products of their own.
    uint32_t gated;

    __device__ __forceinline__ uint32_t strips() const {
        return (a.outputs + STRIP - 1) / STRIP + (b.outputs + STRIP - 1) / STRIP +
               (c.outputs + STRIP - 1) / STRIP;
    }
    // Its tile is the strip of the matrix.
    __device__ __forceinline__ LinearProduct of(uint32_t strip) const {
        if (gated) {
            LinearProduct product = strip % 2 ? b : a;
            product.tile = strip / 2;
            return product;
        }
        return product_of(strip, STRIP, a, b, c);
    }
};

#define LINEAR_ALL                                                                                 \
    {{weight0, bias0, out0, outputs0, layout0, 0},                                                 \
     {weight1, bias1, out1, outputs1, layout1, 0},                                                 \
     {weight2, bias2, out2, outputs2, layout2, 0},                                                 \
     gated}

// The strips of a CTA or a cluster, in passes of at most STRIPS for each group of warps. Where
// strips come in pairs (`paired` 1), a pair stays together.
template <int GROUPS> struct Share {
    uint32_t first, strips, passes, paired;

    __device__ __forceinline__ Share(uint32_t all, uint32_t unit, uint32_t units, uint32_t pairs)
        : paired(pairs) {
        first = cut(all, unit, units);
        strips = cut(all, unit + 1, units) - first;
        passes = (strips + GROUPS * STRIPS - 1) / (GROUPS * STRIPS);
    }
    // `cut` of strips.
    __device__ __forceinline__ uint32_t cut(uint32_t count, uint32_t part, uint32_t parts) const {
        return ::cut(count >> paired, part, parts) << paired;
    }
    // First strip of a pass. All passes but the last have the same number of strips for each group.
    __device__ __forceinline__ uint32_t begin(uint32_t pass) const {
        const uint32_t even = GROUPS << paired, from = ::cut(strips, pass, passes);
        return pass < passes ? (from + even - 1) / even * even : strips;
    }
    // First strip and number of strips of a group in a pass.
    __device__ __forceinline__ uint2 of(uint32_t pass, uint32_t group) const {
        if (pass >= passes) return make_uint2(0, 0);
        const uint32_t from = begin(pass), count = begin(pass + 1) - from,
                       start = cut(count, group, GROUPS);
        return make_uint2(first + from + start, cut(count, group + 1, GROUPS) - start);
    }
};

// --- a warp --------------------------------------------------------------------------------------

// A warp multiplies segment `segment` of the inputs with the strips of its group. S segments are in
// a CTA. ONE: of one row, which all columns of the products have.
template <class F, class T, int N, bool ONE, int S> struct Stream {
    // With 32 rows tensor cores are busier than the table, and registers are few.
    static constexpr bool COMPUTES = N < 4;
    static constexpr int UNROLLED = N == 1                 ? CHUNK_BLOCKS
                                    : AHEAD<F, N> > STRIPS ? AHEAD<F, N> / STRIPS
                                                           : 1;
    static constexpr int GROUPS = WARPS / S;
    static constexpr int CTAS = SEGMENTS / S;
    static constexpr uint32_t BLOCK_X = ONE ? ROW_BYTES : N * TILE_BYTES;

    const Products& products;
    const float* x;
    unsigned char* held; // activations of S segments, `window` blocks each
    float* sums;
    Share<GROUPS> share;
    Levels levels;
    uint32_t inputs, tokens, window, lane, group, rank;
    uint32_t start, blocks, chunks; // of this warp's segment: first block, blocks; nominal chunks
    uint32_t staged;                // end of the blocks of the segment that are staged
    // The load side: the pass and the chunk that are read, and the strips of this pass.
    uint32_t load_pass, load_chunk, load_count;
    Strip<F> strips[STRIPS];
    Fragment<F> weights[AHEAD<F, N>];

    __device__ __forceinline__ Stream(const Products& of, uint32_t units)
        : products(of), share(of.strips(), blockIdx.x / CTAS, units, of.gated) {}

    __device__ __forceinline__ uint32_t segment() const { return rank * S + threadIdx.x / 32 % S; }

    __device__ __forceinline__ void open_pass() {
        const uint2 own = share.of(load_pass, group);
        load_count = own.y;
        load_chunk = 0;
#pragma unroll
        for (int m = 0; m < STRIPS; m++)
            if ((uint32_t)m < own.y) strips[m].open(products.of(own.x + m), inputs, start, lane);
        fetch_scales();
    }
    __device__ __forceinline__ void fetch_scales() {
        if (load_chunk * CHUNK_BLOCKS >= blocks) return;
#pragma unroll
        for (int m = 0; m < STRIPS; m++)
            if ((uint32_t)m < load_count)
                strips[m].fetch_scales(start + load_chunk * CHUNK_BLOCKS, inputs / BLOCK_INPUTS,
                                       lane);
    }
    __device__ __forceinline__ void advance() {
        if (++load_chunk == chunks) {
            load_pass++;
            open_pass();
            return;
        }
#pragma unroll
        for (int m = 0; m < STRIPS; m++) strips[m].advance();
        fetch_scales();
    }
    // Where step `m` of block `block` waits.
    __device__ __forceinline__ Fragment<F>& waiting(int m, int block) {
        return weights[AHEAD<F, N> > STRIPS ? block % (AHEAD<F, N> / STRIPS) * STRIPS + m
                                            : m % AHEAD<F, N>];
    }
    // Loads the step that is AHEAD of this one. After STEPS - AHEAD it is of the next chunk.
    __device__ __forceinline__ void load(int m, int block) {
        const int strip = (m + AHEAD<F, N>) % STRIPS,
                  of = (block + (m + AHEAD<F, N>) / STRIPS) % CHUNK_BLOCKS;
        if ((uint32_t)strip < load_count && load_chunk * CHUNK_BLOCKS + (uint32_t)of < blocks)
            strips[strip].load(waiting(m, block), of);
    }

    // The loads of a block that this segment does not have, for the next pass.
    __device__ __forceinline__ void load_past(int block) {
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            if (m > 0 && block * STRIPS + m + AHEAD<F, N> == STEPS) advance();
            load(m, block);
        }
    }
    __device__ __forceinline__ void load_first() {
#pragma unroll
        for (int step = 0; step < AHEAD<F, N>; step++)
            if ((uint32_t)step % STRIPS < load_count && (uint32_t)step / STRIPS < blocks)
                strips[step % STRIPS].load(waiting(step % STRIPS, step / STRIPS), step / STRIPS);
    }

    // Rounds the activations of blocks from `from` on, in the order of the fragments.
    __device__ __forceinline__ void stage(uint32_t from) {
        if constexpr (GROUPS > 1)
            __syncthreads();
        else
            __syncwarp();
        const uint32_t end = min(from + window, blocks), piece = lane % 8;
        unsigned char* to = held + threadIdx.x / 32 % S * (window * BLOCK_X);
        // A warp reads 8 pieces of 8 inputs of 4 rows, or of 4 blocks.
        constexpr uint32_t PARTS = ONE ? 1 : N * 2, AT_A_TIME = ONE ? 4 : 1, U = N < 4 ? 4 : 1;
        const uint32_t count = from < end ? (end - from + AT_A_TIME - 1) / AT_A_TIME * PARTS : 0;
        for (uint32_t i = group; i < count; i += GROUPS * U) {
            float4 v[U][2];
#pragma unroll
            for (uint32_t u = 0; u < U; u++) {
                const uint32_t at = i + u * GROUPS,
                               block = from + (ONE ? at * 4 + lane / 8 : at / PARTS),
                               token = ONE ? 0 : at % PARTS * 4 + lane / 8;
                if (block < end && token < tokens) {
                    const float4* row = reinterpret_cast<const float4*>(
                        x + (size_t)token * inputs + (size_t)(start + block) * BLOCK_INPUTS +
                        piece * 8);
                    v[u][0] = row[0];
                    v[u][1] = row[1];
                }
            }
#pragma unroll
            for (uint32_t u = 0; u < U; u++) {
                const uint32_t at = i + u * GROUPS,
                               block = from + (ONE ? at * 4 + lane / 8 : at / PARTS),
                               token = ONE ? 0 : at % PARTS * 4 + lane / 8;
                if (block < end && token < tokens)
                    *reinterpret_cast<uint4*>(
                        to + (block - from) * BLOCK_X +
                        place(token / 8, piece % 2, token % 8 * 4 + piece / 2)) =
                        make_uint4(pack<T>(v[u][0].x, v[u][0].y), pack<T>(v[u][0].z, v[u][0].w),
                                   pack<T>(v[u][1].x, v[u][1].y), pack<T>(v[u][1].z, v[u][1].w));
            }
        }
        staged = from + window;
        if constexpr (GROUPS > 1)
            __syncthreads();
        else
            __syncwarp();
    }
    // The same for normed rows, all of a segment. CTAs of the first cluster also write the sums.
    __device__ __forceinline__ void stage_normed(const Norm& norm, bool is_first) {
        constexpr uint32_t PARTS = ONE ? 1 : N * 2, AT_A_TIME = ONE ? 4 : 1,
                           MOST = NORM_WIDTH / BLOCK_INPUTS / SEGMENTS / AT_A_TIME * PARTS,
                           U = (MOST + GROUPS - 1) / GROUPS;
        const uint32_t piece = lane % 8, all = inputs / BLOCK_INPUTS;
        // Squares of the blocks of each row, and the factors of the rows: in the place of the sums,
        // which peers do not store before this CTA has passed two barriers more.
        float *of_blocks = sums, *scales = sums + N * 8 * (NORM_WIDTH / BLOCK_INPUTS);
        uint32_t kept[U][4];
        cluster_wait(); // all CTAs have started
#pragma unroll
        for (uint32_t u = 0; u < U; u++) {
            const uint32_t at = group + u * GROUPS, block = ONE ? at * 4 + lane / 8 : at / PARTS,
                           token = ONE ? 0 : at % PARTS * 4 + lane / 8;
            const bool exists = block < blocks && token < tokens;
            Eight eight = {
                {make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f)}};
            if (exists) {
                const size_t from =
                    (size_t)token * inputs + (size_t)(start + block) * BLOCK_INPUTS + piece * 8;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    eight.v[i] = added<T>(reinterpret_cast<const float4*>(x + from)[i],
                                          reinterpret_cast<const float4*>(norm.y + from)[i]);
                    if (is_first) reinterpret_cast<float4*>(norm.sum + from)[i] = eight.v[i];
                }
            }
            const float of_block = block_squares(eight);
            if (exists) store_in_cluster(of_blocks + token * all + start + block, piece, of_block);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                kept[u][i * 2] = pack<T>(eight.v[i].x, eight.v[i].y);
                kept[u][i * 2 + 1] = pack<T>(eight.v[i].z, eight.v[i].w);
            }
        }
        cluster_release();
        cluster_wait();
        for (uint32_t token = group; token < tokens; token += GROUPS) {
            const float scale = norm_scale(of_blocks + token * all, all, inputs, norm.eps);
            if (lane == 0) scales[token] = scale;
        }
        __syncthreads();
#pragma unroll
        for (uint32_t u = 0; u < U; u++) {
            const uint32_t at = group + u * GROUPS, block = ONE ? at * 4 + lane / 8 : at / PARTS,
                           token = ONE ? 0 : at % PARTS * 4 + lane / 8;
            if (block >= blocks || token >= tokens) continue;
            const float4* weight = reinterpret_cast<const float4*>(
                norm.weight + (size_t)(start + block) * BLOCK_INPUTS + piece * 8);
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 low = unpack<T>(kept[u][i * 2]), high = unpack<T>(kept[u][i * 2 + 1]);
                const float4 v =
                    normed<T>(make_float4(low.x, low.y, high.x, high.y), weight[i], scales[token]);
                words[i * 2] = pack<T>(v.x, v.y);
                words[i * 2 + 1] = pack<T>(v.z, v.w);
            }
            *reinterpret_cast<uint4*>(held + block * BLOCK_X +
                                      place(token / 8, piece % 2, token % 8 * 4 + piece / 2)) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
        staged = window;
        cluster_arrive(); // this CTA has read what lies where peers store sums
        __syncthreads();
    }
    // Half of what lane `of` has of a block: 8 inputs. Neighbouring pieces lie on different banks.
    __device__ __forceinline__ static uint32_t place(uint32_t n, uint32_t half, uint32_t of) {
        if constexpr (ONE)
            return half * 64 + of % 4 * 16;
        else
            return n * TILE_BYTES + half * 512 + (of * 16 ^ half * 64);
    }

    // COUNT: a constant number of strips, so that no branch keeps their instructions apart. 0: as
    // many as `count`.
    template <int COUNT>
    __device__ __forceinline__ void multiply(float (&sum)[STRIPS][N][4],
                                             const float (&scales)[STRIPS][2], uint32_t count,
                                             uint32_t from, int block) {
        uint32_t b[N][8];
        const unsigned char* at = held + threadIdx.x / 32 % S * (window * BLOCK_X) +
                                  (from + block - (staged - window)) * BLOCK_X;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 v = *reinterpret_cast<const uint4*>(at + place(n, half, lane));
                b[n][half * 4] = v.x;
                b[n][half * 4 + 1] = v.y;
                b[n][half * 4 + 2] = v.z;
                b[n][half * 4 + 3] = v.w;
            }
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            uint32_t a[4][4];
            const bool exists = COUNT ? m < COUNT : (uint32_t)m < count;
            if (exists) decode<T, COMPUTES>(a, waiting(m, block), levels);
            if (m > 0 && block * STRIPS + m + AHEAD<F, N> == STEPS) advance();
            load(m, block);
            if (exists) {
                float low = 1.0f, high = 1.0f;
                if constexpr (same_type<F, Nf4>::value) {
                    low = __shfl_sync(~0u, scales[m][0], (lane & 28) | block);
                    high = __shfl_sync(~0u, scales[m][1], (lane & 28) | block);
                }
#pragma unroll
                for (int n = N - 1; n >= 0; n--) add_block<F, T>(sum[m][n], a, b[n], low, high);
            }
        }
    }

    // One pass over the segment.
    template <int COUNT>
    __device__ __forceinline__ void run(float (&sum)[STRIPS][N][4], uint32_t count) {
#pragma unroll 1
        for (uint32_t chunk = 0; chunk < chunks; chunk++) {
            float scales[STRIPS][2];
#pragma unroll
            for (int m = 0; m < STRIPS; m++)
                if (COUNT ? m < COUNT : (uint32_t)m < count)
                    strips[m].template scales<T>(scales[m], levels);
            const uint32_t from = chunk * CHUNK_BLOCKS;
#pragma unroll(UNROLLED)
            for (int block = 0; block < CHUNK_BLOCKS; block++) {
                if (from + block >= staged || from + block + window < staged) stage(from + block);
                // Here, if that is early enough, because few registers are in use.
                if (block * STRIPS + AHEAD<F, N> == STEPS) advance();
                if (from + block < blocks)
                    multiply<COUNT>(sum, scales, count, from, block);
                else
                    load_past(block);
            }
        }
    }

    // An output of a product, whose sums begin at `from`; the segments are added from first to
    // last.
    __device__ __forceinline__ float value_of(const LinearProduct& product, const float* from,
                                              uint32_t output) const {
        const uint32_t segments = (inputs + segment_inputs(inputs) - 1) / segment_inputs(inputs);
        float total = from[0];
        for (uint32_t s = 1; s < segments; s++)
            total = __fadd_rn(total, from[s * (SUM_OUTPUTS * 8)]);
        total = __fmul_rn(total, output_scale<F>(product.weight, product.outputs, inputs, output));
        return product.bias ? __fadd_rn(total, product.bias[output]) : total;
    }

    // Writes the activated gate of the pairs of strips of group `rank`, a token per thread.
    __device__ __forceinline__ void write_gated(uint2 own, uint32_t n) const {
        const uint32_t at = threadIdx.x / 8, column = threadIdx.x % 8, token = n * 8 + column,
                       strip = at / STRIP * 2;
        if (strip >= own.y || token >= tokens) return;
        const LinearProduct gate = products.of(own.x + strip), up = products.of(own.x + strip + 1);
        const uint32_t output = gate.tile * STRIP + at % STRIP;
        if (output >= gate.outputs) return;
        const float* from = sums + (strip * STRIP + at % STRIP) * 8 + column;
        gate.out[(size_t)token * gate.outputs + output] =
            activated<T>(value_of(gate, from, output), value_of(up, from + STRIP * 8, output));
    }

    // Adds the sums of the segments from first to last, and writes the strips of group `rank`.
    __device__ __forceinline__ void write(uint2 own, uint32_t n) {
        if (products.gated) return write_gated(own, n);
        const uint32_t segments = (inputs + segment_inputs(inputs) - 1) / segment_inputs(inputs),
                       at = threadIdx.x / 4, pair = threadIdx.x % 4;
        if (at >= own.y * STRIP || (ONE && pair > 0)) return;
        const LinearProduct product = products.of(own.x + at / STRIP);
        const uint32_t output = product.tile * STRIP + at % STRIP;
        if (output >= product.outputs) return;
        const float2* from = reinterpret_cast<const float2*>(sums) + at * 4 + pair;
        float2 total = from[0];
        for (uint32_t s = 1; s < segments; s++) {
            const float2 next = from[s * (SUM_OUTPUTS * 4)];
            total.x = __fadd_rn(total.x, next.x);
            total.y = __fadd_rn(total.y, next.y);
        }
        const float scale = output_scale<F>(product.weight, product.outputs, inputs, output);
#pragma unroll
        for (int i = 0; i < (ONE ? 1 : 2); i++) {
            const uint32_t token = n * 8 + pair * 2 + i;
            if (token >= tokens) return;
            const float value = __fmul_rn(i ? total.y : total.x, scale);
            product.out[(size_t)token * product.outputs + output] =
                product.bias ? __fadd_rn(value, product.bias[output]) : value;
        }
    }

    // Group g of a cluster is CTA g's to write. Its sums come from all CTAs.
    __device__ __forceinline__ void join(const float (&sum)[STRIPS][N][4], uint32_t pass) {
        const uint2 own = share.of(pass, rank);
        const uint32_t count = share.of(pass, group).y;
#pragma unroll
        for (int n = 0; n < N; n++) {
            if constexpr (CTAS > 1)
                cluster_wait();
            else
                __syncthreads();
            float2* to = reinterpret_cast<float2*>(sums) + segment() * (SUM_OUTPUTS * 4) + lane;
#pragma unroll
            for (int m = 0; m < STRIPS; m++)
                if ((uint32_t)m < count && (!ONE || lane % 4 == 0))
#pragma unroll
                    for (int high = 0; high < 2; high++) {
                        const float2 two =
                            make_float2(sum[m][n][high * 2], sum[m][n][high * 2 + 1]);
                        float2* place = to + (m * STRIP + high * 8) * 4;
                        if constexpr (CTAS > 1)
                            store_in_cluster(place, group, two);
                        else
                            *place = two;
                    }
            if constexpr (CTAS > 1) {
                cluster_release();
                cluster_wait();
            } else {
                __syncthreads();
            }
            write(own, n);
            if constexpr (CTAS > 1) cluster_release();
        }
    }
};

// `window`: blocks of each segment whose activations are in shared memory at a time. The sums take
// the place of the activations if these are not a whole segment.
template <class F, class T, int N, bool ONE, int S>
__device__ __forceinline__ void linear_stream(const Products& products, const float* x,
                                              uint32_t inputs, uint32_t rows, uint32_t window,
                                              const Norm& norm) {
    pdl_launch();
    SMEM_DYN(shared);
    using Warp = Stream<F, T, N, ONE, S>;
    Warp warp(products, gridDim.x / Warp::CTAS);
    const uint32_t lane = threadIdx.x % 32, segment = segment_inputs(inputs) / BLOCK_INPUTS;
    warp.x = x;
    warp.inputs = inputs;
    warp.tokens = rows;
    warp.window = window;
    warp.lane = lane;
    warp.rank = blockIdx.x % Warp::CTAS;
    warp.group = threadIdx.x / 32 / S;
    warp.held = shared + TABLE<F>;
    const bool is_whole = window >= segment;
    warp.sums = reinterpret_cast<float*>(
        warp.held + (is_whole || S < SEGMENTS ? S * window * Warp::BLOCK_X : 0));
    warp.start = warp.segment() * segment;
    warp.blocks = min(segment, inputs / BLOCK_INPUTS - min(warp.start, inputs / BLOCK_INPUTS));
    warp.chunks = segment / CHUNK_BLOCKS;
    warp.staged = 0;
    warp.load_pass = 0;
    // Nothing is published: peers only learn that this CTA has started.
    if constexpr (Warp::CTAS > 1) cluster_arrive();
    // The first weights are on their way while the tables are filled.
    warp.open_pass();
    warp.load_first();
    if constexpr (same_type<F, Nf4>::value) {
        fill_tables<T>(shared);
        __syncthreads();
        warp.levels.open(shared, Warp::COMPUTES);
    }
    pdl_wait(); // from here on activations are read and results are written
    if constexpr (Warp::CTAS > 1 && Warp::GROUPS == WARPS && N < 4)
        if (norm.y) warp.stage_normed(norm, blockIdx.x < Warp::CTAS);
    for (uint32_t pass = 0; pass < warp.share.passes; pass++) {
        float sum[STRIPS][N][4] = {};
        const uint32_t count = warp.share.of(pass, warp.group).y;
        // With 32 rows more code makes the usual case slower.
        if (count == STRIPS)
            warp.template run<STRIPS>(sum, count);
        else if (N < 4 && count == 3)
            warp.template run<3>(sum, count);
        else if (N < 4 && count == 2)
            warp.template run<2>(sum, count);
        else
            warp.template run<0>(sum, count);
        warp.join(sum, pass);
        if (S == SEGMENTS && !is_whole) __syncthreads();
    }
    if constexpr (Warp::CTAS > 1) cluster_wait();
}
