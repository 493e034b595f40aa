// NF4 on the device: the tables of kernels/src/quant/nf4.rs (a test compares them), the layout of a
// stored matrix, and that of a tiled one.
#pragma once
#include "common.cuh"

// Weights that share a scale, and groups of a whole matrix that share a second scale.
#define NF4_GROUP       64
#define NF4_SUPER_GROUP 256
// Bytes of a copy of NF4_DYNAMIC.
#define NF4_DYNAMIC_BYTES (256 * 4)
// Each section of a stored matrix begins at a multiple of this.
#define PART_ALIGNMENT 64

// Value of each code.
__device__ const float NF4_LEVELS[16] = {
    -1.0f,         -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f,
    -0.091050036f, 0.0f,        0.0795803f,   0.1609302f,  0.2461123f,   0.33791524f,
    0.44070983f,   0.562617f,   0.72295684f,  1.0f,
};

// The dynamic map of the codes of scales.
__device__ const float NF4_DYNAMIC[256] = {
    -0x1.fc66660000000p-1f,  -0x1.f533340000000p-1f,
    -0x1.ee00000000000p-1f,  -0x1.e6cccc0000000p-1f,
    -0x1.df999a0000000p-1f,  -0x1.d866660000000p-1f,
    -0x1.d133340000000p-1f,  -0x1.ca00000000000p-1f,
    -0x1.c2cccc0000000p-1f,  -0x1.bb999a0000000p-1f,
    -0x1.b466660000000p-1f,  -0x1.ad33340000000p-1f,
    -0x1.a600000000000p-1f,  -0x1.9ecccc0000000p-1f,
    -0x1.97999a0000000p-1f,  -0x1.9066660000000p-1f,
    -0x1.8933340000000p-1f,  -0x1.8200000000000p-1f,
    -0x1.7acccc0000000p-1f,  -0x1.73999a0000000p-1f,
    -0x1.6c66680000000p-1f,  -0x1.6533340000000p-1f,
    -0x1.5e00000000000p-1f,  -0x1.56cccc0000000p-1f,
    -0x1.4f999a0000000p-1f,  -0x1.4866680000000p-1f,
    -0x1.4133340000000p-1f,  -0x1.3a00000000000p-1f,
    -0x1.32cccc0000000p-1f,  -0x1.2b999a0000000p-1f,
    -0x1.2466680000000p-1f,  -0x1.1d33340000000p-1f,
    -0x1.1600000000000p-1f,  -0x1.0ecccc0000000p-1f,
    -0x1.0799980000000p-1f,  -0x1.0066660000000p-1f,
    -0x1.f266640000000p-2f,  -0x1.e400000000000p-2f,
    -0x1.d599980000000p-2f,  -0x1.c733340000000p-2f,
    -0x1.b8cccc0000000p-2f,  -0x1.aa66660000000p-2f,
    -0x1.9c00000000000p-2f,  -0x1.8d99980000000p-2f,
    -0x1.7f33340000000p-2f,  -0x1.70cccc0000000p-2f,
    -0x1.6266660000000p-2f,  -0x1.5400000000000p-2f,
    -0x1.4599980000000p-2f,  -0x1.3733340000000p-2f,
    -0x1.28cccc0000000p-2f,  -0x1.1a66680000000p-2f,
    -0x1.0c00000000000p-2f,  -0x1.fb33320000000p-3f,
    -0x1.de66660000000p-3f,  -0x1.c1999a0000000p-3f,
    -0x1.a4cccc0000000p-3f,  -0x1.8800000000000p-3f,
    -0x1.6b33340000000p-3f,  -0x1.4e66660000000p-3f,
    -0x1.31999a0000000p-3f,  -0x1.14cccc0000000p-3f,
    -0x1.f000000000000p-4f,  -0x1.b666680000000p-4f,
    -0x1.93d70a0000000p-4f,  -0x1.8851ee0000000p-4f,
    -0x1.7cccce0000000p-4f,  -0x1.7147ae0000000p-4f,
    -0x1.65c2900000000p-4f,  -0x1.5a3d700000000p-4f,
    -0x1.4eb8540000000p-4f,  -0x1.4333340000000p-4f,
    -0x1.37ae140000000p-4f,  -0x1.2c28f60000000p-4f,
    -0x1.20a3d60000000p-4f,  -0x1.151eba0000000p-4f,
    -0x1.09999a0000000p-4f,  -0x1.fc28f60000000p-5f,
    -0x1.e51eba0000000p-5f,  -0x1.ce147a0000000p-5f,
    -0x1.b70a3e0000000p-5f,  -0x1.a000000000000p-5f,
    -0x1.88f5c20000000p-5f,  -0x1.71eb860000000p-5f,
    -0x1.5ae1460000000p-5f,  -0x1.43d70a0000000p-5f,
    -0x1.2cccce0000000p-5f,  -0x1.15c2900000000p-5f,
    -0x1.fd70a40000000p-6f,  -0x1.cf5c2a0000000p-6f,
    -0x1.a147ae0000000p-6f,  -0x1.7333340000000p-6f,
    -0x1.451eba0000000p-6f,  -0x1.170a3e0000000p-6f,
    -0x1.d1eb860000000p-7f,  -0x1.75c2900000000p-7f,
    -0x1.3e76c80000000p-7f,  -0x1.2c08300000000p-7f,
    -0x1.19999a0000000p-7f,  -0x1.072b020000000p-7f,
    -0x1.e978d40000000p-8f,  -0x1.c49ba60000000p-8f,
    -0x1.9fbe760000000p-8f,  -0x1.7ae1480000000p-8f,
    -0x1.56041a0000000p-8f,  -0x1.3126e80000000p-8f,
    -0x1.0c49ba0000000p-8f,  -0x1.ced9140000000p-9f,
    -0x1.851eb80000000p-9f,  -0x1.3b645a0000000p-9f,
    -0x1.e353f80000000p-10f, -0x1.4fdf3a0000000p-10f,
    -0x1.eecbfe0000000p-11f, -0x1.b3d07c0000000p-11f,
    -0x1.78d5000000000p-11f, -0x1.3dd9820000000p-11f,
    -0x1.02de020000000p-11f, -0x1.8fc5060000000p-12f,
    -0x1.19ce0a0000000p-12f, -0x1.47ae160000000p-13f,
    -0x1.743e960000000p-14f, -0x1.15df660000000p-14f,
    -0x1.6f00680000000p-15f, -0x1.64840c0000000p-16f,
    -0x1.040bfe0000000p-17f, -0x1.b435280000000p-19f,
    -0x1.27476e0000000p-21f, 0x0.0p+0f,
    0x1.27476e0000000p-21f,  0x1.b435280000000p-19f,
    0x1.040bfe0000000p-17f,  0x1.64840c0000000p-16f,
    0x1.6f00680000000p-15f,  0x1.15df660000000p-14f,
    0x1.743e960000000p-14f,  0x1.47ae160000000p-13f,
    0x1.19ce0a0000000p-12f,  0x1.8fc5060000000p-12f,
    0x1.02de020000000p-11f,  0x1.3dd9820000000p-11f,
    0x1.78d5000000000p-11f,  0x1.b3d07c0000000p-11f,
    0x1.eecbfe0000000p-11f,  0x1.4fdf3a0000000p-10f,
    0x1.e353f80000000p-10f,  0x1.3b645a0000000p-9f,
    0x1.851eb80000000p-9f,   0x1.ced9140000000p-9f,
    0x1.0c49ba0000000p-8f,   0x1.3126e80000000p-8f,
    0x1.56041a0000000p-8f,   0x1.7ae1480000000p-8f,
    0x1.9fbe760000000p-8f,   0x1.c49ba60000000p-8f,
    0x1.e978d40000000p-8f,   0x1.072b020000000p-7f,
    0x1.19999a0000000p-7f,   0x1.2c08300000000p-7f,
    0x1.3e76c80000000p-7f,   0x1.75c2900000000p-7f,
    0x1.d1eb860000000p-7f,   0x1.170a3e0000000p-6f,
    0x1.451eba0000000p-6f,   0x1.7333340000000p-6f,
    0x1.a147ae0000000p-6f,   0x1.cf5c2a0000000p-6f,
    0x1.fd70a40000000p-6f,   0x1.15c2900000000p-5f,
    0x1.2cccce0000000p-5f,   0x1.43d70a0000000p-5f,
    0x1.5ae1460000000p-5f,   0x1.71eb860000000p-5f,
    0x1.88f5c20000000p-5f,   0x1.a000000000000p-5f,
    0x1.b70a3e0000000p-5f,   0x1.ce147a0000000p-5f,
    0x1.e51eba0000000p-5f,   0x1.fc28f60000000p-5f,
    0x1.09999a0000000p-4f,   0x1.151eba0000000p-4f,
    0x1.20a3d60000000p-4f,   0x1.2c28f60000000p-4f,
    0x1.37ae140000000p-4f,   0x1.4333340000000p-4f,
    0x1.4eb8540000000p-4f,   0x1.5a3d700000000p-4f,
    0x1.65c2900000000p-4f,   0x1.7147ae0000000p-4f,
    0x1.7cccce0000000p-4f,   0x1.8851ee0000000p-4f,
    0x1.93d70a0000000p-4f,   0x1.b666680000000p-4f,
    0x1.f000000000000p-4f,   0x1.14cccc0000000p-3f,
    0x1.31999a0000000p-3f,   0x1.4e66660000000p-3f,
    0x1.6b33340000000p-3f,   0x1.8800000000000p-3f,
    0x1.a4cccc0000000p-3f,   0x1.c1999a0000000p-3f,
    0x1.de66660000000p-3f,   0x1.fb33320000000p-3f,
    0x1.0c00000000000p-2f,   0x1.1a66680000000p-2f,
    0x1.28cccc0000000p-2f,   0x1.3733340000000p-2f,
    0x1.4599980000000p-2f,   0x1.5400000000000p-2f,
    0x1.6266660000000p-2f,   0x1.70cccc0000000p-2f,
    0x1.7f33340000000p-2f,   0x1.8d99980000000p-2f,
    0x1.9c00000000000p-2f,   0x1.aa66660000000p-2f,
    0x1.b8cccc0000000p-2f,   0x1.c733340000000p-2f,
    0x1.d599980000000p-2f,   0x1.e400000000000p-2f,
    0x1.f266640000000p-2f,   0x1.0066660000000p-1f,
    0x1.0799980000000p-1f,   0x1.0ecccc0000000p-1f,
    0x1.1600000000000p-1f,   0x1.1d33340000000p-1f,
    0x1.2466680000000p-1f,   0x1.2b999a0000000p-1f,
    0x1.32cccc0000000p-1f,   0x1.3a00000000000p-1f,
    0x1.4133340000000p-1f,   0x1.4866680000000p-1f,
    0x1.4f999a0000000p-1f,   0x1.56cccc0000000p-1f,
    0x1.5e00000000000p-1f,   0x1.6533340000000p-1f,
    0x1.6c66680000000p-1f,   0x1.73999a0000000p-1f,
    0x1.7acccc0000000p-1f,   0x1.8200000000000p-1f,
    0x1.8933340000000p-1f,   0x1.9066660000000p-1f,
    0x1.97999a0000000p-1f,   0x1.9ecccc0000000p-1f,
    0x1.a600000000000p-1f,   0x1.ad33340000000p-1f,
    0x1.b466660000000p-1f,   0x1.bb999a0000000p-1f,
    0x1.c2cccc0000000p-1f,   0x1.ca00000000000p-1f,
    0x1.d133340000000p-1f,   0x1.d866660000000p-1f,
    0x1.df999a0000000p-1f,   0x1.e6cccc0000000p-1f,
    0x1.ee00000000000p-1f,   0x1.f533340000000p-1f,
    0x1.fc66660000000p-1f,   0x1.0000000000000p+0f,
};

__device__ __forceinline__ size_t aligned_end(size_t bytes) {
    return (bytes + PART_ALIGNMENT - 1) / PART_ALIGNMENT * PART_ALIGNMENT;
}

// The sections of a stored matrix `[outputs, inputs]` whose rows follow each other: a whole matrix,
// or a slice whose rows are whole groups (kernels/src/quant/slice.rs). Generic kernels read it.
struct Nf4Parts {
    const uint8_t* codes;  // two weights a byte, the first in the upper half
    const uint8_t* absmax; // [groups], codes of the dynamic map
    const float* absmax2;  // [groups >> shift]
    float offset;
    uint32_t shift; // 2^shift groups share a second scale: 8 of a whole matrix
};

// `layout` is what the host says of a matrix (nf4::Parts::layout): the shift, or NF4_RAGGED.
#define NF4_RAGGED 16

__device__ __forceinline__ Nf4Parts nf4_parts(const uint8_t* bytes, size_t outputs, size_t inputs,
                                              uint32_t layout) {
    const size_t weights = outputs * inputs, groups = (weights + NF4_GROUP - 1) / NF4_GROUP;
    Nf4Parts parts;
    parts.codes = bytes;
    parts.absmax = bytes + aligned_end((weights + 1) / 2);
    parts.absmax2 = reinterpret_cast<const float*>(parts.absmax + aligned_end(groups));
    parts.offset = parts.absmax2[(groups + (1u << layout) - 1) >> layout];
    parts.shift = layout;
    return parts;
}

// --- tiled matrices ------------------------------------------------------------------------------

// Layout of a matrix for tensor cores: one of 16-bit arithmetic whose rows are whole groups.
// repack.cu makes it from the stored bytes when a matrix is uploaded. Outputs are padded to strips
// of 16. Lane l = 4 g + q of a warp has inputs 16 q .. 16 q + 15 of each block of 64, of rows g and
// g + 8 of a strip:
//   codes    u8  [strips, blocks, 32 lanes, 16]   8 bytes of row g, then 8 of row g + 8
//   absmax   u8  [strips, chunks, 32 lanes, 2]    lane 4 g + q: block 4 c + q of chunk c, rows g
//                                                 and g + 8
//   absmax2  f32 [groups >> shift]                as stored: groups are numbered row by row
//   offset   f32                                  as stored
// So a lane reads the codes of a block with one load of 16 bytes, and a warp 512 bytes in a row.
// Padding is zero and its products are not written.
#define NF4_STRIP       16
#define NF4_TILE_BYTES  512 // codes of a strip and a block
#define NF4_CHUNK       4   // blocks of a chunk of scales
#define NF4_CHUNK_BYTES 64  // codes of the scales of a strip and a chunk

struct Nf4Tiles {
    const uint8_t *codes, *absmax;
    const float* absmax2;
    float offset;
    uint32_t shift, blocks, chunks;

    // Codes of lane `lane` of block `block`.
    __device__ __forceinline__ const uint8_t* codes_at(uint32_t strip, uint32_t block,
                                                       uint32_t lane) const {
        return codes + ((size_t)strip * blocks + block) * NF4_TILE_BYTES + lane * 16;
    }
    // Scale codes of lane `lane` of a chunk: two bytes.
    __device__ __forceinline__ const uint8_t* absmax_at(uint32_t strip, uint32_t chunk,
                                                        uint32_t lane) const {
        return absmax + ((size_t)strip * chunks + chunk) * NF4_CHUNK_BYTES + lane * 2;
    }
    // Second scale of block `block` of a row that exists.
    __device__ __forceinline__ float second(uint32_t output, uint32_t block) const {
        return absmax2[(output * blocks + block) >> shift];
    }
};

__device__ __forceinline__ uint32_t nf4_strips(uint32_t outputs) {
    return (outputs + NF4_STRIP - 1) / NF4_STRIP;
}

// The sections of a tiled matrix; `layout` is its shift.
__device__ __forceinline__ Nf4Tiles nf4_tiles(const uint8_t* bytes, uint32_t outputs,
                                              uint32_t inputs, uint32_t layout) {
    Nf4Tiles tiles;
    const uint32_t strips = nf4_strips(outputs);
    tiles.blocks = inputs / NF4_GROUP;
    tiles.chunks = (tiles.blocks + NF4_CHUNK - 1) / NF4_CHUNK;
    tiles.codes = bytes;
    tiles.absmax = bytes + (size_t)strips * tiles.blocks * NF4_TILE_BYTES;
    tiles.absmax2 = reinterpret_cast<const float*>(tiles.absmax +
                                                   (size_t)strips * tiles.chunks * NF4_CHUNK_BYTES);
    tiles.offset = tiles.absmax2[(outputs * tiles.blocks + (1u << layout) - 1) >> layout];
    tiles.shift = layout;
    return tiles;
}

// --- any matrix ----------------------------------------------------------------------------------

// Any matrix in the stored layout: of a slice that cuts groups, each row begins with a byte and has
// the scales of all groups that it touches.
struct Nf4Matrix {
    Nf4Parts parts;
    const uint64_t* starts; // ragged: which weight of the whole matrix each row begins with
    size_t inputs;
};

__device__ __forceinline__ size_t nf4_ragged_groups(size_t inputs) {
    return (inputs + NF4_GROUP - 1) / NF4_GROUP + 1;
}

__device__ __forceinline__ Nf4Matrix nf4_matrix(const uint8_t* bytes, size_t outputs, size_t inputs,
                                                uint32_t layout) {
    Nf4Matrix matrix;
    matrix.inputs = inputs;
    if (layout != NF4_RAGGED) {
        matrix.parts = nf4_parts(bytes, outputs, inputs, layout);
        matrix.starts = nullptr;
        return matrix;
    }
    Nf4Parts& parts = matrix.parts;
    parts.codes = bytes;
    parts.absmax = bytes + aligned_end(outputs * ((inputs + 1) / 2));
    const uint8_t* starts = parts.absmax + aligned_end(outputs * nf4_ragged_groups(inputs));
    matrix.starts = reinterpret_cast<const uint64_t*>(starts);
    const float* last = reinterpret_cast<const float*>(starts + aligned_end(outputs * 8));
    parts.offset = last[0];
    parts.absmax2 = last + 1; // of the whole matrix
    parts.shift = 8;
    return matrix;
}

// Scale from its code and second scale, computed as on the host: a product, then a sum, each
// rounded. `dynamic` is a copy of the map in any memory.
__device__ __forceinline__ float nf4_scale(const float* dynamic, uint8_t code, float absmax2,
                                           float offset) {
    return __fadd_rn(__fmul_rn(dynamic[code], absmax2), offset);
}

// Weight `input` of row `output` in f32, before any rounding.
__device__ __forceinline__ float nf4_weight(const Nf4Matrix& matrix, size_t output, size_t input) {
    const Nf4Parts& parts = matrix.parts;
    // Place of the weight among the codes, its group where that names a second scale, and the place
    // of its scale.
    size_t place = output * matrix.inputs + input, group = place / NF4_GROUP, held = group;
    if (matrix.starts) {
        const size_t start = matrix.starts[output];
        place = output * ((matrix.inputs + 1) / 2) * 2 + input;
        group = (start + input) / NF4_GROUP;
        held = output * nf4_ragged_groups(matrix.inputs) + group - start / NF4_GROUP;
    }
    const uint8_t byte = parts.codes[place / 2];
    const float scale = nf4_scale(NF4_DYNAMIC, parts.absmax[held],
                                  parts.absmax2[group >> parts.shift], parts.offset);
    return NF4_LEVELS[place % 2 == 0 ? byte >> 4 : byte & 15] * scale;
}
