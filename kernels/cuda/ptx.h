// Hardware instructions without a CUDA C++ name, once as inline PTX and once, in emu/cuda_cpu.h, as
// plain C++ with the same signature. Kernels contain no asm. The floor is sm_80.
// Source: NVIDIA, "PTX ISA", chapters 9.7.9 and 9.7.14.
#pragma once
#ifdef CUDA_CPU
#include "emu/cuda_cpu.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

// EXPORT(NAME, VALUE) exports a constant to Rust as `crate::sizes::SOURCE::NAME`, so that launchers
// copy no numbers. build.py compiles each source once more with EXPORTS, without kernels, and
// writes the values to the manifest; images do not contain them.
#ifdef EXPORTS
#define EXPORT(NAME, VALUE) extern "C" __device__ uint32_t exported_##NAME = (VALUE)
#undef __global__
#define __global__ inline
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __cluster_dims__
#define __cluster_dims__(...)
#else
#define EXPORT(NAME, VALUE) static_assert((uint64_t)(VALUE) <= 0xffffffffu, #NAME)
#endif

// Declares `name` as the dynamic shared memory, aligned to 1024 bytes.
#define SMEM_DYN(name) extern __shared__ __align__(1024) unsigned char name[]

__device__ __forceinline__ uint32_t smem_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// Copies 16 bytes from global to shared memory, complete at a later cp_wait; zeros if not valid.
// Both addresses are aligned to 16.
__device__ __forceinline__ void cp_async16(void* to, const void* from, bool valid = true) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(smem_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}
// Ends a group of copies of this thread.
__device__ __forceinline__ void cp_commit() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Waits until at most the N last groups of this thread are incomplete.
template <int N> __device__ __forceinline__ void cp_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements from shared memory; lane 8 i + r names row r of matrix i,
// 16 bytes, aligned to 16.
__device__ __forceinline__ void ldsm4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(row))
                 : "memory");
}
// The same, each matrix transposed.
__device__ __forceinline__ void ldsm4_t(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(row))
                 : "memory");
}
// Two matrices; lanes 0 to 15 name the rows, the others any aligned address.
__device__ __forceinline__ void ldsm2(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(smem_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldsm2_t(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(smem_address(row))
                 : "memory");
}

// D[16, 8] += A[16, 16] B[16, 8], f32 sums of bf16 products.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same of f16.
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Reads 16 bytes of global memory that are used once, past the first-level cache. Aligned to
// 16.
__device__ __forceinline__ uint4 ld_stream16(const void* at) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(at));
    return value;
}
// The same through L1, for neighbours that another load of this warp reads next.
__device__ __forceinline__ uint4 ld_once16(const void* at) {
    uint4 value;
    asm volatile("ld.global.nc.L1::evict_first.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(at));
    return value;
}

// Four bytes of b:a. Digit i of `selector` names byte i: of a from 0 on, of b from 4 on; 8 more
// fill the byte with its highest bit.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
}
#endif
