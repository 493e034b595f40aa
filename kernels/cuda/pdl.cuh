// Programmatic dependent launch, once as inline PTX and once as plain C++, as in ptx.h.
#pragma once
#include "ptx.h"

#ifndef CUDA_CPU
// From sm_90 on; before it, nothing. A kernel that calls pdl_wait is
// launched so that it may start while earlier launches still run (Gpu::launch_early).
//
// pdl_wait returns when all earlier launches have ended and what they wrote is visible. Before it,
// a thread may only touch memory that no kernel of a step writes: weights, constants, the rows of
// the step, keys and values of earlier steps. Every thread calls it, on every path: a launch ends
// only when those before it have, so that the launch after it waits for all of them by waiting for
// one. What earlier launches write has no `const __restrict__` pointer: loads through one may move
// before the wait. Source: PTX ISA, griddepcontrol; CUDA C++ Programming Guide, Programmatic
// Dependent Launch.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
// Lets the next launch start once all CTAs of this one have come here or ended. It says nothing
// about memory, so a kernel calls it first of all.
__device__ __forceinline__ void pdl_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
#endif
