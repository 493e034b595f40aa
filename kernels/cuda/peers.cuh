// Words and values that other devices and the host read and write at the same time, as inline PTX;
// in emu/cuda_cpu.h as plain C++ with the same signatures. A release makes everything before it
// visible to who acquires what it wrote, also on other devices. Source: NVIDIA, "PTX ISA", chapter
// 8 (memory consistency model) and 9.7.9.
#pragma once
#include "ptx.h"

#ifndef CUDA_CPU
__device__ __forceinline__ void st_release_sys(uint64_t* at, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;\n" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t ld_acquire_sys(const uint64_t* at) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];\n" : "=l"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void st_relaxed_sys(uint64_t* at, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;\n" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t ld_relaxed_sys(const uint64_t* at) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];\n" : "=l"(value) : "l"(at) : "memory");
    return value;
}
// Reads 16 bytes that another device wrote: past L1. Aligned to 16.
__device__ __forceinline__ float4 ld_peer16(const float4* at) {
    float4 value;
    asm volatile("ld.relaxed.sys.global.v4.f32 {%0,%1,%2,%3}, [%4];\n"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(at)
                 : "memory");
    return value;
}
// A clock of the device, in nanoseconds; its steps are up to a microsecond.
__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;\n" : "=l"(now));
    return now;
}
// Between two looks at a flag, for all lanes of a warp at once; `looks` is their number so far.
__device__ __forceinline__ void pause_between_looks(uint32_t looks) {
    if (looks > 4096) __nanosleep(200);
}
#endif
