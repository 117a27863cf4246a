// Tensor cores and bits of bf16. For compute capability 8.0 and later.
#pragma once
#include "common.cuh"

#ifndef COLICONV_EMULATED
// c [16, 8] += a [16, 16] · b [16, 8], of bf16 with sums in f32. Lane 4·g + t has of a the rows g, g + 8 at columns 2·t, 2·t + 1,
// then both at columns 2·t + 8, 2·t + 9; of b the column g at rows 2·t, 2·t + 1, then 2·t + 8, 2·t + 9; of c the row g at columns
// 2·t, 2·t + 1, then the row g + 8.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a · b + c in both halves.
__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// (a & mask) | set, in one instruction: one of the two constants has to be in a register.
__device__ __forceinline__ u32 masked(u32 a, u32 mask, u32 set) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(set));
    return result;
}

// A value that stays in a register.
__device__ __forceinline__ u32 in_register(u32 value) {
    asm volatile("mov.u32 %0, %1;" : "=r"(value) : "r"(value));
    return value;
}

// Sixteen bytes that are read once.
__device__ __forceinline__ uint4 read_once(const u32* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

// Shared memory of the size that a launch asks for.
extern __shared__ uint4 shared_memory[];
#endif
