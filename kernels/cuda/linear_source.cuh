// Where a lane reads the weights of linear_stream.cuh, and how it decodes them.
#pragma once
#include "linear.cuh"

// Strips of 16 outputs that a warp multiplies at a time, and blocks of a chunk, for which scales
// are read together.
#define STRIPS       4
#define STRIP        16
#define CHUNK_BLOCKS 4

// The table of NF4 has 256 bytes for each byte of codes or of scales: 32 times its pair of levels,
// once per bank, then 32 times its value in the dynamic map. So lanes look up without bank
// conflicts, and one PRMT makes an address.
#define NF4_LINE 256
template <class F> constexpr uint32_t TABLE = same_type<F, Nf4>::value ? 256 * NF4_LINE : 0;
// Steps (a strip and a block) that are loaded before they are used; it divides the steps of a
// chunk. At 0.7 us of latency 4.3 TB/s need 23 KB in flight per multiprocessor; 8 warps have 32 KB,
// and 64 KB of 16-bit weights, of which registers are left for half with 32 rows.
#define STEPS (CHUNK_BLOCKS * STRIPS)
template <class F, int N> constexpr int AHEAD = 4;
template <int N> constexpr int AHEAD<Nf4, N> = 8;
template <> constexpr int AHEAD<Plain, 4> = 2;

template <class T> __device__ __forceinline__ void fill_tables(unsigned char* table) {
    for (uint32_t byte = threadIdx.x / 16; byte < 256; byte += blockDim.x / 16) {
        const float factor = nf4_factor<T>();
        const uint32_t pair =
            pack<T>(NF4_LEVELS[byte >> 4] * factor, NF4_LEVELS[byte & 15] * factor);
        const uint32_t word = threadIdx.x % 16 < 8 ? pair : __float_as_uint(NF4_DYNAMIC[byte]);
        reinterpret_cast<uint4*>(table)[byte * 16 + threadIdx.x % 16] =
            make_uint4(word, word, word, word);
    }
}

// What a lane knows to decode NF4: its banks of the table, and the bytes of the 16 levels.
struct Levels {
    const unsigned char* table;
    uint32_t bank;
    uint32_t lower[4], upper[4]; // of 4 levels each

    // Word of the line of byte `byte` of `word`; `at` is the offset in a line.
    __device__ __forceinline__ uint32_t look_up(uint32_t word, int byte, uint32_t at) const {
        return *reinterpret_cast<const uint32_t*>(table + permute(word, at, 0x5504 | byte << 4));
    }
    __device__ __forceinline__ uint32_t pair(uint32_t word, int byte) const {
        return look_up(word, byte, bank);
    }
    __device__ __forceinline__ float dynamic(uint32_t codes, int byte) const {
        return __uint_as_float(look_up(codes, byte, bank + 128));
    }

    __device__ __forceinline__ void open(const unsigned char* filled, bool computes) {
        table = filled;
        bank = threadIdx.x % 32 * 4;
        if (!computes) return;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            // Byte 0x01 has the levels 0 and 1, in this order.
            const uint32_t first = pair(i * 0x44 + 0x01, 0), second = pair(i * 0x44 + 0x23, 0);
            lower[i] = permute(first, second, 0x6420);
            upper[i] = permute(first, second, 0x7531);
        }
    }

    // The pairs of a word without the table, for a quarter of the codes: load/store units would
    // otherwise be busier than arithmetic. `half` is 0 for bytes 0 and 1 of the word, 1 for 2, 3.
    __device__ __forceinline__ void compute(uint32_t word, int half, uint32_t& first,
                                            uint32_t& second) const {
        const uint32_t index = (word & 0x77777777u) >> half * 16;
        // 255 where the highest bit of a code is set.
        const uint32_t is_upper = permute(word, word << 4, half ? 0xbfae : 0x9d8c);
        const uint32_t low = (permute(lower[0], lower[1], index) & ~is_upper) |
                             (permute(lower[2], lower[3], index) & is_upper);
        const uint32_t high = (permute(upper[0], upper[1], index) & ~is_upper) |
                              (permute(upper[2], upper[3], index) & is_upper);
        // The upper half of a byte is the first code.
        first = permute(low, high, 0x4051);
        second = permute(low, high, 0x6273);
    }
};

// Fragments of NF4. COMPUTES: word 3 is computed; otherwise all words are looked up.
template <class T, bool COMPUTES>
__device__ __forceinline__ void decode(uint32_t (&a)[4][4], const Fragment<Nf4>& from,
                                       const Levels& levels) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const uint32_t low = s < 2 ? from.v.x : from.v.y, high = s < 2 ? from.v.z : from.v.w;
        a[s][0] = levels.pair(low, s % 2 * 2);
        a[s][2] = levels.pair(low, s % 2 * 2 + 1);
        if (COMPUTES && s >= 2) {
            levels.compute(high, s - 2, a[s][1], a[s][3]);
        } else {
            a[s][1] = levels.pair(high, s % 2 * 2);
            a[s][3] = levels.pair(high, s % 2 * 2 + 1);
        }
    }
}
template <class T, bool COMPUTES, class F>
__device__ __forceinline__ void decode(uint32_t (&a)[4][4], const Fragment<F>& from,
                                       const Levels&) {
    fragments<T>(a, from, nullptr);
}

// --- where a lane reads the weights of a strip ---------------------------------------------------

template <class F> struct Strip;

template <> struct Strip<Nf4> {
    const uint8_t* codes;
    uint32_t absmax, absmax2; // bytes from `codes` on; a matrix has less than 4 GiB
    uint32_t first[2];        // group of block 0 of rows g and g + 8
    uint32_t shift, code;
    float offset, second[2];

    __device__ __forceinline__ void open(const LinearProduct& product, uint32_t inputs,
                                         uint32_t block, uint32_t lane) {
        const Nf4Tiles tiles = nf4_tiles(product.weight, product.outputs, inputs, product.layout);
        codes = tiles.codes_at(product.tile, block, lane);
        absmax = (uint32_t)(tiles.absmax_at(product.tile, block / NF4_CHUNK, lane) - codes);
        absmax2 = (uint32_t)(reinterpret_cast<const uint8_t*>(tiles.absmax2) - codes);
        offset = tiles.offset;
        shift = tiles.shift;
#pragma unroll
        for (int high = 0; high < 2; high++)
            first[high] =
                min(product.tile * STRIP + high * 8 + lane / 4, product.outputs - 1) * tiles.blocks;
    }
    // The scales of the chunk, whose first block is `block`, of a row of `blocks`.
    __device__ __forceinline__ void fetch_scales(uint32_t block, uint32_t blocks, uint32_t lane) {
        code = *reinterpret_cast<const uint16_t*>(codes + absmax);
        const uint32_t own = min(block + lane % 4, blocks - 1);
#pragma unroll
        for (int high = 0; high < 2; high++)
            second[high] =
                reinterpret_cast<const float*>(codes + absmax2)[(first[high] + own) >> shift];
    }
    template <class T>
    __device__ __forceinline__ void scales(float (&to)[2], const Levels& levels) const {
#pragma unroll
        for (int high = 0; high < 2; high++)
            to[high] = __fadd_rn(__fmul_rn(levels.dynamic(code, high), second[high]), offset) *
                       (1.0f / nf4_factor<T>());
    }
    __device__ __forceinline__ void load(Fragment<Nf4>& to, int block) const {
        to.v = ld_stream16(codes + block * NF4_TILE_BYTES);
    }
    __device__ __forceinline__ void advance() {
        codes += CHUNK_BLOCKS * NF4_TILE_BYTES;
        absmax -= CHUNK_BLOCKS * NF4_TILE_BYTES - NF4_CHUNK_BYTES;
        absmax2 -= CHUNK_BLOCKS * NF4_TILE_BYTES;
    }
};

// Rows g and g + 8; past the end, the last row again.
template <class F> struct Rows {
    const uint8_t* rows[2];

    __device__ __forceinline__ void open(const LinearProduct& product, uint32_t inputs,
                                         uint32_t block, uint32_t lane) {
#pragma unroll
        for (int high = 0; high < 2; high++) {
            const uint32_t row =
                min(product.tile * STRIP + high * 8 + lane / 4, product.outputs - 1);
            rows[high] = product.weight + row * row_bytes<F>(inputs) +
                         (size_t)block * F::BLOCK_BYTES + lane % 4 * (F::BLOCK_BYTES / 4);
        }
    }
    __device__ __forceinline__ void fetch_scales(uint32_t, uint32_t, uint32_t) {}
    template <class T> __device__ __forceinline__ void scales(float (&to)[2], const Levels&) const {
        to[0] = to[1] = 1.0f;
    }
    __device__ __forceinline__ void advance() {
        rows[0] += CHUNK_BLOCKS * F::BLOCK_BYTES;
        rows[1] += CHUNK_BLOCKS * F::BLOCK_BYTES;
    }
};
template <> struct Strip<Int8> : Rows<Int8> {
    __device__ __forceinline__ void load(Fragment<Int8>& to, int block) const {
        to.low = ld_stream16(rows[0] + block * Int8::BLOCK_BYTES);
        to.high = ld_stream16(rows[1] + block * Int8::BLOCK_BYTES);
    }
};
// The second load of 16 bytes finds its sector in the first-level cache.
template <> struct Strip<Plain> : Rows<Plain> {
    __device__ __forceinline__ void load(Fragment<Plain>& to, int block) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            to.low[i] = ld_once16(rows[0] + block * Plain::BLOCK_BYTES + i * 16);
            to.high[i] = ld_once16(rows[1] + block * Plain::BLOCK_BYTES + i * 16);
        }
    }
};
