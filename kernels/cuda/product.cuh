// Products of some outputs with some rows of x, by one warp.
//
//     sum[o][r] = Σ_i weight[o, i] · x[r, i]
//
// Lane l adds up the columns 8·(l + 32·j) … + 7 for j = 0, 1, …, in this order, with f32 FMAs; formats with scales in a row
// fold them in eight columns at a time, the others once at the end. Then the lanes are added as warp_sum does. So a result
// has the same bits however many outputs and rows a warp takes.
//
// Reference: src/backend/reference/linear.rs, matmul. Versions tried: docs/cuda.md.
#pragma once
#include "weights.cuh"

// Warps of a group.
#define WARPS 8u

// Outputs that a warp takes at a time. With one row few groups would be busy otherwise.
__device__ constexpr u32 outputs_of_a_warp(u32 rows) { return rows == 1 ? 2 : 4; }

// Eight columns of a row of x; those past its end are 0.
__device__ __forceinline__ void eight_of_x(const float* x, u32 chunk, u32 columns, bool wide, float out[8]) {
    const u32 at = 8 * chunk;
    if (wide && at + 8 <= columns) {
        const float4 a = *(const float4*)(x + at), b = *(const float4*)(x + at + 4);
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
        out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    } else {
#pragma unroll
        for (u32 k = 0; k < 8; k++) out[k] = at + k < columns ? x[at + k] : 0.0f;
    }
}

// Rows `rows[OUTS]` of w, the outputs that a warp takes at a time, with `x[R]`; the result is in every lane. `wide` says that each x is aligned to 16 bytes.
template <class Coding, u32 R, u32 OUTS = outputs_of_a_warp(R)>
__device__ __forceinline__ void product(const Weights& w, const u32 (&rows)[OUTS], const float* const (&x)[R], u32 columns,
                                        bool wide, float (&sum)[OUTS][R]) {
    const u32 lane = threadIdx.x % LANES;
#pragma unroll
    for (u32 o = 0; o < OUTS; o++)
#pragma unroll
        for (u32 r = 0; r < R; r++) sum[o][r] = 0.0f;
    const u32 chunks = parts(columns, 8);
    for (u32 chunk = lane; chunk < chunks; chunk += LANES) {
        float xs[R][8];
#pragma unroll
        for (u32 r = 0; r < R; r++) eight_of_x(x[r], chunk, columns, wide, xs[r]);
#pragma unroll
        for (u32 o = 0; o < OUTS; o++) {
            float ws[8];
            const float scale = Coding::eight(w, rows[o], chunk, ws);
#pragma unroll
            for (u32 r = 0; r < R; r++) {
                if (Coding::BY_ROW) {
#pragma unroll
                    for (u32 k = 0; k < 8; k++) sum[o][r] = fmaf(ws[k], xs[r][k], sum[o][r]);
                } else {
                    float dot = ws[0] * xs[r][0];
#pragma unroll
                    for (u32 k = 1; k < 8; k++) dot = fmaf(ws[k], xs[r][k], dot);
                    sum[o][r] = fmaf(scale, dot, sum[o][r]);
                }
            }
        }
    }
#pragma unroll
    for (u32 o = 0; o < OUTS; o++)
#pragma unroll
        for (u32 r = 0; r < R; r++) sum[o][r] = warp_sum(sum[o][r]);
    if (Coding::BY_ROW) {
#pragma unroll
        for (u32 o = 0; o < OUTS; o++) {
            const float scale = Coding::row_scale(w, rows[o]);
#pragma unroll
            for (u32 r = 0; r < R; r++) sum[o][r] *= scale;
        }
    }
}
