// Products and sums in registers alone: how many the device does at most, measured in every run of `bench`.
//
//     out[i] = Σ_k of chains k of thread i, each x ← fma(x, factor, term), `steps` times 16, from k
//
// Groups: any number in x.
//
// Reference: src/backend/gpu/tests.rs, multiplies.
//
// Versions: 1, eight chains a thread, which hide the time that one takes (this one).
#include "common.cuh"

#define CHAINS 8u
#define UNROLLED 16u

struct PeakConstants {
    u32 steps;
    float factor, term;
};

KERNEL(256, fma_peak)(float* out, PeakConstants c) {
    begin();
    float x[CHAINS];
#pragma unroll
    for (u32 k = 0; k < CHAINS; k++) x[k] = (float)k;
    for (u32 step = 0; step < c.steps; step++) {
#pragma unroll
        for (u32 i = 0; i < UNROLLED; i++)
#pragma unroll
            for (u32 k = 0; k < CHAINS; k++) x[k] = fmaf(x[k], c.factor, c.term);
    }
    float sum = 0.0f;
#pragma unroll
    for (u32 k = 0; k < CHAINS; k++) sum += x[k];
    out[blockIdx.x * 256 + threadIdx.x] = sum;
}
