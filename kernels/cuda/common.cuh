// What all kernels share: types, the way a kernel is declared, sums over a warp, the exponential.
//
// A kernel is declared as KERNEL(threads, name)(buffers…, constants): `threads` is the size of its groups (blocks). The
// buffers come in the order of src/backend/gpu/kernels.rs, the constants as one struct of u32 and float.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

#ifdef COLICONV_EMULATED
// Threads of the CPU in the place of those of a GPU: tests.
#include "emulated.h"
#else
// One group a multiprocessor is enough: with more in mind the compiler would rather spill registers.
#define KERNEL(threads, name) KERNEL_RESIDENT(threads, 1, name)
// With registers for so many groups a multiprocessor.
#define KERNEL_RESIDENT(threads, groups, name) extern "C" __global__ void __launch_bounds__(threads, groups) name

// Waits for what the kernels before wrote.
__device__ __forceinline__ void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel begin, up to where it waits.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Brings a line of 128 bytes nearer, before it is asked for: what nobody writes while kernels run may be asked for before begin().
__device__ __forceinline__ void fetch_ahead(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

// Σ over the 32 lanes of a warp, in every lane: pairs 16 apart, then 8, 4, 2, 1.
__device__ __forceinline__ float warp_sum(float value) {
    for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
    return value;
}

// The largest value of the 32 lanes of a warp, in every lane.
__device__ __forceinline__ float warp_max(float value) {
    for (int apart = 16; apart > 0; apart /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, apart));
    return value;
}
#endif

// The first thing that a kernel does: it may have been started before the one before has ended, and so may the next be. What is
// read before this, nobody writes while kernels run; and what others wrote is nowhere declared __restrict__, because such loads
// could come before the wait.
__device__ __forceinline__ void begin() {
    let_next_kernel_begin();
    wait_for_kernels_before();
}

#define LANES 32u
#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)

__device__ __forceinline__ u32 least(u32 a, u32 b) { return a < b ? a : b; }

// ⌈a / b⌉.
__device__ __forceinline__ u32 parts(u32 a, u32 b) { return (a + b - 1) / b; }

// e^x within two units in the last place, the same on every device: x = k·ln 2 + r with |r| ≤ ½ ln 2, Taylor's series of
// e^r to the seventh power, times 2^k in two steps so that results below 2^−126 are right too.
__device__ __forceinline__ float exponential(float x) {
    if (!(x < 88.75f)) return x != x ? x : INFINITE;
    if (x < -104.0f) return 0.0f;
    const float k = rintf(x * 1.44269504f);
    // ln 2 in two parts: the first has few enough bits for its product with k to be exact
    float r = fmaf(k, -0.693359375f, x);
    r = fmaf(k, 2.12194440e-4f, r);
    float sum = 1.0f / 5040.0f;
    sum = fmaf(sum, r, 1.0f / 720.0f);
    sum = fmaf(sum, r, 1.0f / 120.0f);
    sum = fmaf(sum, r, 1.0f / 24.0f);
    sum = fmaf(sum, r, 1.0f / 6.0f);
    sum = fmaf(sum, r, 0.5f);
    sum = fmaf(sum, r, 1.0f);
    sum = fmaf(sum, r, 1.0f);
    const int half = (int)k / 2;
    return sum * __int_as_float((127 + half) << 23) * __int_as_float((127 + (int)k - half) << 23);
}

// 1 / (1 + e^−x).
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
