// Prefetches to the second-level cache by the copy engine, which compute capability 9.0 and later
// have, once as inline PTX and once as plain C++, as in ptx.h.
#pragma once
#include "ptx.h"

#ifdef CUDA_CPU
// The bytes must exist, which a sanitizer checks.
static inline void prefetch_bulk(const void* at, uint32_t bytes) {
    const volatile unsigned char* from = static_cast<const volatile unsigned char*>(at);
    if (bytes % 16 || (uintptr_t)at % 16) emu::die("prefetch_bulk is misaligned");
    if (bytes) (void)from[0], (void)from[bytes - 1];
}
#else
// One lane calls it. Address and bytes are multiples of 16. Source: PTX ISA,
// cp.async.bulk.prefetch.
__device__ __forceinline__ void prefetch_bulk(const void* at, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(at), "r"(bytes) : "memory");
}
#endif
