// Attention of a decode step: out = softmax(q K^T) V, split-K over tiles of 64 keys. One kernel
// computes every tile by itself; a second one merges the tiles of a token.
//
// Shapes: q, out f32 [tokens, heads, D]; pages as in pages.cuh; logsum f32 [tokens, heads] where a
//   gradient needs it; workspace f32 [tiles of all tokens, heads, D + 4] with product, maximum and
//   sum. `token_tile` of the batch has the first tile of each token.
// Reference: kernels/src/ops/attention.rs. Order of sums: attention.cuh.
// attention_decode: grid splits x kv heads x tokens; a CTA is one warp. It copies 64 keys and 64
//   values with cp.async (32 KB in flight at D = 128) and computes the scores of the heads of the
//   group, 16 at a time. Of few tiles, a CTA takes every gridDim.x-th one and writes its result to
//   the workspace. Where there are groups of tiles for all CTAs (by_groups), it takes every
//   gridDim.x-th group, merges its tiles in registers and writes one result. The number of splits
//   changes no bits. What was cached of a first tile is copied before pdl_wait. CTAs of tokens
//   that do not exist end at once, so that one recorded launch serves all lengths and all smaller
//   batches.
//   Where k is given (D <= 128), keys and values of the new tokens are not in the pages yet: a CTA
//   rotates its queries and the new keys of its tiles by itself, and the one with the last tile of
//   a token writes that token's key and value into the pages and the outbox. The bits are those of
//   rope_append or kv_append, then attention.
// attention_join: grid heads x tokens; a row of D / 4 threads merges the tiles of a group, up to
//   MERGERS rows at a time, and the first one then merges these groups and divides. The number of
//   rows changes no bits.
// Traffic: keys and values once per token: 8.4 MB for 2,048 positions of a 70B block, computed 2 us
//   at 4.3 TB/s. The workspace is an eighth of that, written and read; of long sequences, a 128th.
// Variants: one per D and dtype. Limits: D 64, 80, 96, 112, 128, 256; bf16, f16. Everything else:
//   attention_generic.cu.
// expects attention_decode_*: only LDGSTS.128; loop HMMA LDGSTS LDSM; no LDG.U8 LDG.U16
// expects attention_join: LDG.128 STG.128
#include "attention.cuh"
#include "outbox.cuh"
#include "pdl.cuh"
#include "rotate.cuh"

// Shared memory: TILE_KEYS keys, then their values.
template <int D> constexpr uint32_t SHARED = 2 * Pitch<D>::TILE;
EXPORT(SHARED_D64, SHARED<64>);
EXPORT(SHARED_D80, SHARED<80>);
EXPORT(SHARED_D96, SHARED<96>);
EXPORT(SHARED_D112, SHARED<112>);
EXPORT(SHARED_D128, SHARED<128>);
EXPORT(SHARED_D256, SHARED<256>);

// token_tile [tokens] of the batch, after row_start.
__device__ __forceinline__ const uint32_t* tiles_of(const Batch& batch) {
    return batch.row_start + batch.rows + 1;
}

// The tiles that a token sees.
struct Range {
    uint32_t begin, end;
    __device__ Range(uint32_t position, uint32_t window)
        : begin(position + 1 > window ? (position + 1 - window) / TILE_KEYS : 0),
          end(position / TILE_KEYS + 1) {}
    // Groups, counted from position 0.
    __device__ uint32_t first_group() const { return begin / GROUP_TILES; }
    __device__ uint32_t end_group() const { return (end + GROUP_TILES - 1) / GROUP_TILES; }
};

// CTAs take whole groups where a grid has at most this many times as many.
#define GROUP_SHARE 4
EXPORT(GROUP_SHARE, GROUP_SHARE);
EXPORT(GROUP_TILES, GROUP_TILES);

// Whether CTAs take whole groups. A grid has 12 CTAs for each multiprocessor, so there are groups
// for three at least, which keep its memory busy, and the join reads a sixteenth of the results.
// More or longer heads would take more registers than there are.
__device__ __forceinline__ bool by_groups(const Range& range, uint32_t splits, uint32_t group,
                                          uint32_t head_dim) {
    const uint32_t groups = range.end_group() - range.first_group();
    return head_dim <= 128 && group <= 8 && groups > 1 && groups * GROUP_SHARE >= splits;
}

// Where the result of a tile, or of the group that begins with it, goes.
__device__ __forceinline__ size_t result_at(uint32_t tile, uint32_t heads, uint32_t head,
                                            uint32_t head_dim) {
    return ((size_t)tile * heads + head) * (head_dim + 4);
}

// Longest heads whose keys may be new: for longer ones there are no registers.
#define FRESH_DIM 128
EXPORT(FRESH_DIM, FRESH_DIM);

// Keys and values of the new tokens, [tokens, kv_heads, D], and the angles of their positions, as
// in rope.cu. k null: they are in the pages, and queries are rotated. angles null: nothing rotates.
template <class T> struct Fresh {
    const float *k, *v, *angles;
    T* outbox; // or null
    uint32_t block;
    const uint32_t* words;
};

// A token and a kv head, as a warp sees them.
template <int D, class T> struct Token {
    T* pages;
    const uint32_t* table;
    unsigned char *keys, *values;
    uint32_t kv_heads, kv_head, position;
    uint32_t cached; // positions that are in the pages
    Fresh<T> fresh;

    // Pages of a tile, one in each of the first lanes. Pages that do not exist are not used.
    __device__ __forceinline__ uint32_t pages_of(uint32_t tile) const {
        const uint32_t page = tile * (TILE_KEYS / PAGE_TOKENS) + threadIdx.x % 4;
        return table[min(page, position / PAGE_TOKENS)];
    }
    // Copies keys (half 0) or values (1), with zeros behind `position`: a weight of zero must meet
    // a finite number. Vectors of a page follow each other, so the pieces of 16 bytes do.
    __device__ __forceinline__ void copy_half(unsigned char* to, uint32_t half, uint32_t tile,
                                              uint32_t own_page) const {
        constexpr uint32_t PIECES = D / 8;
#pragma unroll
        for (uint32_t p = 0; p < TILE_KEYS / PAGE_TOKENS; p++) {
            const uint32_t page = __shfl_sync(~0u, own_page, p),
                           first = tile * TILE_KEYS + p * PAGE_TOKENS;
            const T* from = pages + vector_at(page, kv_heads, kv_head, half, 0, D);
            unsigned char* to_page = to + p * PAGE_TOKENS * Pitch<D>::BYTES;
#pragma unroll
            for (uint32_t j = 0; j < PAGE_TOKENS * PIECES / 32; j++) {
                const uint32_t i = j * 32 + threadIdx.x, key = i / PIECES, piece = i % PIECES;
                cp_async16(to_page + key * Pitch<D>::BYTES + piece * 16, from + i * 8,
                           first + key < cached);
            }
        }
        cp_commit();
    }
    __device__ __forceinline__ void copy(uint32_t tile, uint32_t own_page) const {
        copy_half(keys, 0, tile, own_page);
        copy_half(values, 1, tile, own_page);
    }
    // Makes the new keys and values of a tile that is being copied.
    __device__ __forceinline__ void make_new(uint32_t tile) const {
        if (D > FRESH_DIM) return;
        const uint32_t begin = max(tile * TILE_KEYS, cached),
                       end = min((tile + 1) * TILE_KEYS, position + 1);
#pragma unroll 1
        for (uint32_t at = begin; at < end; at++) make(at);
    }
    // Makes the key and the value of a new token, in place of the zeros that the copies write.
    // Those of this token go into the pages, too.
    __device__ __forceinline__ void make(uint32_t at) const {
        constexpr uint32_t HALF = D / 2;
        const Batch batch = batch_of(fresh.words);
        const uint32_t number = batch.row_start[batch.token_row[blockIdx.z]] + (at - cached);
        const size_t head = ((size_t)number * kv_heads + kv_head) * D;
        const float* cosines = fresh.angles + (size_t)number * D;
        uint32_t* const places[2] = {reinterpret_cast<uint32_t*>(keys),
                                     reinterpret_cast<uint32_t*>(values)};
        T* caches[2] = {};
        T* outbox = nullptr;
        if (at == position) {
            const uint32_t page = table[position / PAGE_TOKENS];
            for (uint32_t v = 0; v < 2; v++)
                caches[v] = pages + vector_at(page, kv_heads, kv_head, v, position, D);
            if (fresh.outbox)
                outbox = fresh.outbox +
                         outbox_at(fresh.words, fresh.block, number, kv_heads, kv_head, 0, D);
        }
#pragma unroll 1
        for (uint32_t first = 0; first < HALF; first += 64) {
            const uint32_t i = first + threadIdx.x * 2;
            float2 pair[2][2];
            if (i < HALF) {
#pragma unroll
                for (uint32_t half = 0; half < 2; half++) {
                    const size_t from = head + half * HALF + i;
                    pair[0][half] = *reinterpret_cast<const float2*>(fresh.k + from);
                    pair[1][half] = *reinterpret_cast<const float2*>(fresh.v + from);
                }
                if (fresh.angles) {
                    const float2 c = *reinterpret_cast<const float2*>(cosines + i),
                                 s = *reinterpret_cast<const float2*>(cosines + HALF + i);
                    round_pair<T>(pair[0][0].x, pair[0][0].y);
                    round_pair<T>(pair[0][1].x, pair[0][1].y);
                    rotate_two<T>(pair[0][0], pair[0][1], c, s);
                }
            }
            // All lanes' zeros are there.
            cp_wait<0>();
            __syncwarp();
            if (i >= HALF) continue;
#pragma unroll
            for (uint32_t v = 0; v < 2; v++)
#pragma unroll
                for (uint32_t half = 0; half < 2; half++) {
                    const uint32_t stored = pack<T>(pair[v][half].x, pair[v][half].y),
                                   element = half * HALF + i;
                    places[v][(at % TILE_KEYS * Pitch<D>::BYTES + element * 2) / 4] = stored;
                    if (caches[v]) *reinterpret_cast<uint32_t*>(caches[v] + element) = stored;
                    if (outbox) *reinterpret_cast<uint32_t*>(outbox + v * D + element) = stored;
                }
        }
    }
    // Rotates the queries of a warp, which are of this token.
    __device__ __forceinline__ void rotate_queries(Queries<D>& queries) const {
        if (D > FRESH_DIM || !fresh.angles) return;
        const float* cosines = fresh.angles + (size_t)blockIdx.z * D + threadIdx.x % 4 * 2;
        // Lanes have two of each eight dimensions, and those half a head further.
#pragma unroll
        for (int low = 0; low < D / 16; low++) {
            const int high = low + D / 16;
            const float2 c = *reinterpret_cast<const float2*>(cosines + low * 8),
                         s = *reinterpret_cast<const float2*>(cosines + D / 2 + low * 8);
#pragma unroll
            for (int row = 0; row < 2; row++) {
                uint32_t &a = queries.q[low / 2][low % 2 * 2 + row],
                         &b = queries.q[high / 2][high % 2 * 2 + row];
                float2 x = unpack<T>(a), y = unpack<T>(b);
                rotate_two<T>(x, y, c, s);
                a = pack<T>(x.x, x.y);
                b = pack<T>(y.x, y.y);
            }
        }
    }
};

// Heads `done` to `done` + 15 of the group; `from` has the queries of all of them.
template <int D, class T>
__device__ __forceinline__ void load_heads(Queries<D>& queries, const float* from,
                                           const float* slopes, uint32_t done, uint32_t group,
                                           uint32_t position, const Scoring& scoring) {
#pragma unroll
    for (int high = 0; high < 2; high++) {
        const uint32_t head = done + high * 8 + threadIdx.x / 4;
        const bool exists = head < group;
        load_query<D, T>(queries, high, exists ? from + head * D : nullptr, position, scoring,
                         exists && scoring.alibi_scale != 0.0f ? slopes[head] : 0.0f);
    }
}

// Writes 16 dimensions of the results of two heads.
template <int D>
__device__ __forceinline__ void put_piece(float* to, const float (&o)[2][4], uint32_t done,
                                          uint32_t group, int piece) {
#pragma unroll
    for (int high = 0; high < 2; high++) {
        const uint32_t head = done + high * 8 + threadIdx.x / 4;
        if (head >= group) continue;
        float* at = to + head * (D + 4) + piece * 16 + threadIdx.x % 4 * 2;
        *reinterpret_cast<float2*>(at) = make_float2(o[0][high * 2], o[0][high * 2 + 1]);
        *reinterpret_cast<float2*>(at + 8) = make_float2(o[1][high * 2], o[1][high * 2 + 1]);
    }
}
template <int D>
__device__ __forceinline__ void put_ends(float* to, const float (&top)[2], const float (&sum)[2],
                                         uint32_t done, uint32_t group) {
#pragma unroll
    for (int high = 0; high < 2; high++) {
        const uint32_t head = done + high * 8 + threadIdx.x / 4;
        if (head < group && threadIdx.x % 4 == 0)
            *reinterpret_cast<float2*>(to + head * (D + 4) + D) = make_float2(top[high], sum[high]);
    }
}

// Tiles `begin` to `end` of a group, merged, for at most 8 heads; the first one has been copied.
template <int D, class T>
__device__ __forceinline__ void take_group(const Token<D, T>& token, const float* q,
                                           const float* slopes, float* to, uint32_t begin,
                                           uint32_t end, uint32_t group, const Scoring& scoring) {
    const uint32_t head = threadIdx.x / 4;
    float top = -INFINITY, sum = 0.0f, o[D / 16][2][2] = {};
    Queries<D> queries;
    load_query<D, T>(queries, 0, head < group ? q + head * D : nullptr, token.position, scoring,
                     head < group && scoring.alibi_scale != 0.0f ? slopes[head] : 0.0f);
    load_query<D, T>(queries, 1, nullptr, token.position, scoring, 0.0f);
    token.rotate_queries(queries);
    uint32_t next_pages = token.pages_of(begin + 1);
#pragma unroll 1
    for (uint32_t tile = begin; tile < end; tile++) {
        if (tile > begin) {
            __syncwarp(); // all lanes have read the last tile
            token.copy(tile, next_pages);
            token.make_new(tile);
            next_pages = token.pages_of(tile + 1);
        }
        cp_wait<1>();
        __syncwarp();
        Weights weights;
        score_tile<D, T>(weights, queries, token.keys, tile * TILE_KEYS, scoring);
        float old_share, new_share;
        merge(top, weights.top[0], old_share, new_share);
        sum = merged(sum, old_share, weights.sum[0], new_share);
        cp_wait<0>();
        __syncwarp();
#pragma unroll
        for (int piece = 0; piece < D / 16; piece++) {
            float own[2][4];
            multiply_values<D, T>(own, weights, token.values, piece);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& so_far = o[piece][i / 2][i % 2];
                so_far = merged(so_far, old_share, own[i / 2][i % 2], new_share);
            }
        }
    }
    if (head >= group) return;
    float* at = to + head * (D + 4) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int piece = 0; piece < D / 16; piece++)
#pragma unroll
        for (int n = 0; n < 2; n++)
            *reinterpret_cast<float2*>(at + piece * 16 + n * 8) =
                make_float2(o[piece][n][0], o[piece][n][1]);
    if (threadIdx.x % 4 == 0) *reinterpret_cast<float2*>(at + D) = make_float2(top, sum);
}

// A tile, which has been copied.
template <int D, class T>
__device__ __forceinline__ void take_tile(const Token<D, T>& token, const float* q,
                                          const float* slopes, float* to, uint32_t tile,
                                          uint32_t group, const Scoring& scoring) {
    for (uint32_t done = 0; done < group; done += 16) {
        Queries<D> queries;
        load_heads<D, T>(queries, q, slopes, done, group, token.position, scoring);
        token.rotate_queries(queries);
        cp_wait<1>();
        __syncwarp();
        Weights weights;
        score_tile<D, T>(weights, queries, token.keys, tile * TILE_KEYS, scoring);
        cp_wait<0>();
        __syncwarp();
#pragma unroll
        for (int piece = 0; piece < D / 16; piece++) {
            float o[2][4];
            multiply_values<D, T>(o, weights, token.values, piece);
            put_piece<D>(to, o, done, group, piece);
        }
        put_ends<D>(to, weights.top, weights.sum, done, group);
    }
}

template <int D, class T>
__device__ __forceinline__ void attention_decode(const float* q, const Fresh<T>& fresh, T* pages,
                                                 const float* slopes, float* workspace,
                                                 uint32_t kv_heads, uint32_t group,
                                                 const Scoring& scoring) {
    SMEM_DYN(shared);
    pdl_launch();
    const Batch batch = batch_of(fresh.words);
    const uint32_t kv_head = blockIdx.y, number = blockIdx.z, heads = kv_heads * group;
    if (number >= batch.tokens) {
        pdl_wait();
        return;
    }
    const uint32_t row = batch.token_row[number], position = batch.token_position[number];
    const Range range(position, scoring.window);
    const Token<D, T> token = {
        pages,    batch.pages + batch.row_table[row],
        shared,   shared + Pitch<D>::TILE,
        kv_heads, kv_head,
        position, D <= FRESH_DIM && fresh.k ? batch.row_prefix[row] : position + 1,
        fresh};
    const bool has_groups = D <= 128 && by_groups(range, gridDim.x, group, D);
    const uint32_t first_unit = has_groups ? range.first_group() : range.begin,
                   end_unit = has_groups ? range.end_group() : range.end,
                   tiles = has_groups ? GROUP_TILES : 1;
    auto begin_of = [&](uint32_t unit) { return max(unit * tiles, range.begin); };
    uint32_t unit = first_unit + blockIdx.x;
    // Of the first tile, what was in the pages before this step.
    const bool is_early = unit < end_unit && min((begin_of(unit) + 1) * TILE_KEYS, token.cached) <=
                                                 batch.row_prefix[row];
    uint32_t pages_of_unit = unit < end_unit ? token.pages_of(begin_of(unit)) : 0;
    if (is_early) token.copy(begin_of(unit), pages_of_unit);
    pdl_wait();
    q += ((size_t)number * heads + kv_head * group) * D;
    if (slopes) slopes += kv_head * group;
    for (; unit < end_unit; unit += gridDim.x) {
        if (!is_early || unit >= first_unit + gridDim.x) {
            // All lanes have read the last tile before the next one overwrites it.
            __syncwarp();
            token.copy(begin_of(unit), pages_of_unit);
        }
        token.make_new(begin_of(unit));
        if (unit + gridDim.x < end_unit) pages_of_unit = token.pages_of(begin_of(unit + gridDim.x));
        float* to = workspace +
                    result_at(tiles_of(batch)[number] + unit * tiles, heads, kv_head * group, D);
        if constexpr (D <= 128) {
            if (has_groups) {
                const uint32_t end = min((unit + 1) * tiles, range.end);
                take_group<D, T>(token, q, slopes, to, begin_of(unit), end, group, scoring);
                continue;
            }
        }
        take_tile<D, T>(token, q, slopes, to, unit, group, scoring);
    }
}

// Most groups that a CTA of attention_join merges at a time.
#define MERGERS 8
EXPORT(MERGERS, MERGERS);
// Shared memory of attention_join for each of them: two results.
EXPORT(JOIN_SHARED_PER_DIM, 2 * 4);
EXPORT(JOIN_SHARED_BASE, 2 * 16);

// Part of a merged result: 4 dimensions.
struct Merged {
    float top = -INFINITY, sum = 0.0f;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    __device__ __forceinline__ void add(const float4& p, const float2& ends) {
        float old_share, new_share;
        merge(top, ends.x, old_share, new_share);
        sum = merged(sum, old_share, ends.y, new_share);
        o.x = merged(o.x, old_share, p.x, new_share);
        o.y = merged(o.y, old_share, p.y, new_share);
        o.z = merged(o.z, old_share, p.z, new_share);
        o.w = merged(o.w, old_share, p.w, new_share);
    }
    // Adds `count` results, `pitch` floats apart.
    __device__ __forceinline__ void add_all(const float* from, uint32_t count, size_t pitch,
                                            uint32_t at, uint32_t head_dim) {
#pragma unroll 8
        for (uint32_t i = 0; i < count; i++, from += pitch)
            add(*reinterpret_cast<const float4*>(from + at),
                *reinterpret_cast<const float2*>(from + head_dim));
    }
};

extern "C" __global__ void __launch_bounds__(64 * MERGERS, 1)
    attention_join(const float* workspace /* [tiles, heads, head_dim + 4] */,
                   const uint32_t* __restrict__ words /* batch */,
                   float* __restrict__ out /* [tokens, heads, head_dim] */,
                   float* __restrict__ logsum /* [tokens, heads] or null */, uint32_t head_dim,
                   uint32_t group, uint32_t window, uint32_t splits /* of attention_decode */) {
    SMEM_DYN(shared);
    pdl_launch();
    const Batch batch = batch_of(words);
    const uint32_t head = blockIdx.x, token = blockIdx.y, heads = gridDim.x, at = threadIdx.x * 4,
                   merger = threadIdx.y, mergers = blockDim.y, pitch = head_dim + 4;
    if (token >= batch.tokens) {
        pdl_wait();
        return;
    }
    const Range range(batch.token_position[token], window);
    const bool has_groups = by_groups(range, splits, group, head_dim);
    const uint32_t first_tile = tiles_of(batch)[token];
    float* const results = reinterpret_cast<float*>(shared);
    pdl_wait();
    Merged all;
    // Rounds use the two halves in turn: the first row has read a half before the barrier of the
    // round after.
    uint32_t half = 0;
    for (uint32_t first = range.first_group(); first < range.end_group(); first += mergers) {
        const uint32_t own = first + merger, count = min(range.end_group() - first, mergers);
        if (merger < count) {
            // Where has_groups, the result of the group is at its first tile.
            const uint32_t begin =
                               has_groups ? own * GROUP_TILES : max(own * GROUP_TILES, range.begin),
                           end = has_groups ? begin + 1 : min((own + 1) * GROUP_TILES, range.end);
            Merged part;
            part.add_all(workspace + result_at(first_tile + begin, heads, head, head_dim),
                         end - begin, (size_t)heads * pitch, at, head_dim);
            float* to = results + (half + merger) * pitch;
            *reinterpret_cast<float4*>(to + at) = part.o;
            if (at == 0)
                *reinterpret_cast<float2*>(to + head_dim) = make_float2(part.top, part.sum);
        }
        __syncthreads();
        if (merger == 0) all.add_all(results + half * pitch, count, pitch, at, head_dim);
        half = mergers - half;
    }
    if (merger != 0) return;
    if (logsum && at == 0) logsum[(size_t)token * heads + head] = logsum_of(all.top, all.sum);
    *reinterpret_cast<float4*>(out + ((size_t)token * heads + head) * head_dim + at) =
        make_float4(__fdiv_rn(all.o.x, all.sum), __fdiv_rn(all.o.y, all.sum),
                    __fdiv_rn(all.o.z, all.sum), __fdiv_rn(all.o.w, all.sum));
}

#define ATTENTION_DECODE(D, T)                                                                     \
    extern "C" __global__ void __launch_bounds__(32, 8) attention_decode_##T##_d##D(               \
        const float* q /* [tokens, heads, D] */,                                                   \
        const float* k /* [tokens, kv_heads, D] or null */, const float* v /* as k */,             \
        const float* __restrict__ angles /* [tokens, 2, D / 2] or null */, T* pages,               \
        T* outbox /* or null */, uint32_t block, const uint32_t* __restrict__ batch,               \
        const float* __restrict__ slopes /* [heads] or null */, float* __restrict__ workspace,     \
        uint32_t kv_heads, uint32_t group, float inverse_divisor, float alibi_scale,               \
        uint32_t window) {                                                                         \
        attention_decode<D, T>(q, {k, v, angles, outbox, block, batch}, pages, slopes, workspace,  \
                               kv_heads, group, {inverse_divisor, alibi_scale, window});           \
    }
#define ATTENTION_DECODE_SIZES(T)                                                                  \
    ATTENTION_DECODE(64, T)                                                                        \
    ATTENTION_DECODE(80, T)                                                                        \
    ATTENTION_DECODE(96, T)                                                                        \
    ATTENTION_DECODE(112, T)                                                                       \
    ATTENTION_DECODE(128, T)                                                                       \
    ATTENTION_DECODE(256, T)
ATTENTION_DECODE_SIZES(bf16)
ATTENTION_DECODE_SIZES(f16)
