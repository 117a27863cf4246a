// x [n, I] · weightᵀ [I, O] → [n, O], also head by head.
//
//     out[r, head · out_head + out_at + o] = Σ_i weight[head · head_rows + head_first + o, i] · x[r, head · x_head + i]
//
// for each of `outputs` outputs o whose row of the weight lies in this part of it, which begins at row `first_row` and has
// `rows`. Groups: x tiles of rows of x, y tiles of outputs, z heads.
//
// Reference: src/backend/reference/linear.rs, matmul.
//
// Versions: 1, a warp for four outputs and up to eight rows, eight columns a lane at a time; with one row, two outputs (this one).
#include "product.cuh"

struct MatmulConstants {
    u32 stride, row_scales, group_size, columns;
    u32 first_row, rows;
    u32 head_rows, head_first, outputs;
    u32 first, count;  // rows of x: this launch's first, and all
    u32 x_stride, x_head;
    u32 out_stride, out_head, out_at;
};

template <class Coding, u32 R>
__device__ __forceinline__ void matmul(const u32* codes, const float* scales, const float* x, float* out, MatmulConstants c) {
    constexpr u32 OUTS = outputs_of_a_warp(R);
    const Weights w = {codes, scales, c.stride, c.row_scales, c.group_size};
    const u32 first_output = (blockIdx.y * WARPS + threadIdx.x / LANES) * OUTS;
    const u32 first_x = c.first + blockIdx.x * R, head = blockIdx.z;
    if (first_output >= c.outputs) return;
    u32 rows[OUTS];
    bool here[OUTS], any = false;
#pragma unroll
    for (u32 o = 0; o < OUTS; o++) {
        const u32 row = head * c.head_rows + c.head_first + first_output + o;
        here[o] = first_output + o < c.outputs && row >= c.first_row && row - c.first_row < c.rows;
        rows[o] = here[o] ? row - c.first_row : 0;
        any |= here[o];
    }
    if (!any) return;
    // The beginnings of its rows.
    const u32 ahead = LANES * (threadIdx.x % LANES);
#pragma unroll
    for (u32 o = 0; o < OUTS; o++)
        if (here[o] && ahead < c.stride) fetch_ahead(codes + (size_t)rows[o] * c.stride + ahead);
    begin();
    const float* xs[R];
#pragma unroll
    for (u32 r = 0; r < R; r++) xs[r] = x + (size_t)least(first_x + r, c.count - 1) * c.x_stride + head * c.x_head;
    float sum[OUTS][R];
    product<Coding, R>(w, rows, xs, c.columns, c.x_stride % 4 == 0 && c.x_head % 4 == 0, sum);
    if (threadIdx.x % LANES != 0) return;
#pragma unroll
    for (u32 r = 0; r < R; r++) {
        if (first_x + r >= c.count) break;
        float* to = out + (size_t)(first_x + r) * c.out_stride + head * c.out_head + c.out_at + first_output;
#pragma unroll
        for (u32 o = 0; o < OUTS; o++)
            if (here[o]) to[o] = sum[o][r];
    }
}

#define DEFINE_ROWS(name, Coding, R)                                                                              \
    KERNEL(256, matmul_##name##_##R)                                                                              \
    (const u32* __restrict__ codes, const float* __restrict__ scales, const float* x, float* out,                 \
     MatmulConstants c) {                                                                                         \
        matmul<Coding, R>(codes, scales, x, out, c);                                                              \
    }
#define DEFINE(name, Coding)        \
    DEFINE_ROWS(name, Coding, 1)    \
    DEFINE_ROWS(name, Coding, 2)    \
    DEFINE_ROWS(name, Coding, 4)    \
    DEFINE_ROWS(name, Coding, 8)
EACH_CODING(DEFINE)
