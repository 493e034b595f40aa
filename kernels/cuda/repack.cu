// Turns stored NF4 matrices (kernels/src/quant/nf4.rs) into tiled ones (nf4.cuh), in pieces of
// whole strips of 16 outputs, while they are uploaded. Second scales and the offset stay as they
// are.
//
// Shapes: codes u8 [rows, blocks, 32], scale codes u8 [rows, blocks]; tiled codes u8 [strips,
//   blocks, 32 lanes, 16], tiled scale codes u8 [strips, chunks, 32 lanes, 2]. Rows past the last
//   one and blocks past the last one are zero.
// Grid: 8 tiles of a strip and a block (scales: of a strip and a chunk) per CTA, one per warp. A
// lane
//   writes its 16 bytes (scales: 2).
// Traffic: every byte read once and written once; a quad of lanes reads 32 neighbouring bytes of a
//   row. The bus that brings the bytes is slower.
// Limits: rows of whole groups of 64.
// expects repack_nf4_codes: only LDG.64; only STG.128
// expects repack_nf4_scales: only LDG.U8; only STG.U16
#include "nf4.cuh"

// Warps of a CTA, and what the host plans with.
#define WARPS 8
EXPORT(WARPS, WARPS);
EXPORT(STRIP, NF4_STRIP);
EXPORT(CHUNK, NF4_CHUNK);
EXPORT(TILE_BYTES, NF4_TILE_BYTES);
EXPORT(CHUNK_BYTES, NF4_CHUNK_BYTES);

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    repack_nf4_codes(const uint8_t* __restrict__ from /* [rows, blocks, 32] */,
                     uint8_t* __restrict__ to /* [strips, blocks, 32, 16] */, uint32_t rows,
                     uint32_t blocks) {
    const uint64_t tile = (uint64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const uint32_t strip = (uint32_t)(tile / blocks), block = (uint32_t)(tile % blocks),
                   lane = threadIdx.x % 32, row = strip * NF4_STRIP + lane / 4;
    if (strip >= nf4_strips(rows)) return;
    uint2 halves[2];
#pragma unroll
    for (uint32_t high = 0; high < 2; high++) {
        const size_t at = ((size_t)(row + high * 8) * blocks + block) * (NF4_GROUP / 2);
        halves[high] = row + high * 8 < rows
                           ? *reinterpret_cast<const uint2*>(from + at + lane % 4 * 8)
                           : make_uint2(0, 0);
    }
    reinterpret_cast<uint4*>(to)[tile * 32 + lane] =
        make_uint4(halves[0].x, halves[0].y, halves[1].x, halves[1].y);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    repack_nf4_scales(const uint8_t* __restrict__ from /* [rows, blocks] */,
                      uint8_t* __restrict__ to /* [strips, chunks, 32, 2] */, uint32_t rows,
                      uint32_t blocks) {
    const uint32_t chunks = (blocks + NF4_CHUNK - 1) / NF4_CHUNK;
    const uint64_t tile = (uint64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const uint32_t strip = (uint32_t)(tile / chunks), chunk = (uint32_t)(tile % chunks),
                   lane = threadIdx.x % 32, row = strip * NF4_STRIP + lane / 4,
                   block = chunk * NF4_CHUNK + lane % 4;
    if (strip >= nf4_strips(rows)) return;
    uint32_t codes = 0;
#pragma unroll
    for (uint32_t high = 0; high < 2; high++)
        if (row + high * 8 < rows && block < blocks)
            codes |= (uint32_t)from[(size_t)(row + high * 8) * blocks + block] << high * 8;
    reinterpret_cast<uint16_t*>(to)[tile * 32 + lane] = (uint16_t)codes;
}
