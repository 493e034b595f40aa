// Kernels that are wrong on purpose, each in the way that one sanitizer is there for. Compiled only into an instrumented emulator;
// kernels/tests/sanitized.rs launches them and fails unless the sanitizer ends the process.
#include "../common.cuh"

// Writes one element past the end: for the address sanitizer.
extern "C" __global__ void faulty_overrun(float* __restrict__ out /* [count] */, uint32_t count) {
    if (threadIdx.x <= count) out[threadIdx.x] = 1.0f;
}

// Reads what the neighbour wrote, without a barrier in between: for the thread sanitizer. In the order of the emulator's threads the
// result is right most of the time.
extern "C" __global__ void faulty_race(float* __restrict__ out /* [blockDim.x] */, uint32_t count) {
    SMEM_DYN(shared); // blockDim.x floats
    float* values = reinterpret_cast<float*>(shared);
    values[threadIdx.x] = (float)threadIdx.x;
    if (threadIdx.x < count) out[threadIdx.x] = values[(threadIdx.x + blockDim.x - 1) % blockDim.x];
}
