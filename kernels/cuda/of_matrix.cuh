// Work of stream.cu and tile.cu: rows of x, a part of a weight.
#pragma once
#include "stream.cuh"

struct StreamConstants {
    u32 columns, row_scales, outputs;
    u32 first, count;  // rows of x: this launch's first, and all
    u32 x_stride, out_stride, out_at;
    u32 split;  // outputs that go to `out`; those that follow go to `second`
    u32 weights_first;  // whether weights may be read while the kernel before still runs
};

template <u32 MT, u32 R, Manner HOW>
struct OfMatrix {
    static const u32 ROWS = R;
    const u32* codes;
    const float* scales;
    const float* rows_of_x;
    float *out, *second;
    const StreamConstants& c;
    const Pieces<MT, HOW>& pieces;
    u32 piece, rows, first;

    __device__ __forceinline__ u32 items() const { return parts(c.count - c.first, R) * pieces.count(); }
    __device__ __forceinline__ void go_to(u32 item) {
        piece = item % pieces.count();
        first = c.first + item / pieces.count() * R;
        rows = least(R, c.count - first);
    }
    __device__ __forceinline__ bool same_x(u32 item) const {
        const u32 other = item % pieces.count();
        return c.first + item / pieces.count() * R == first && pieces.range(other) == pieces.range(piece) &&
               pieces.step(other) == pieces.step(piece);
    }
    __device__ __forceinline__ const float* x(u32 r) const { return rows_of_x + (size_t)(first + r) * c.x_stride; }
    __device__ __forceinline__ Bricks matrix() const { return {codes, scales, pieces.bricks, c.row_scales}; }
    __device__ __forceinline__ void put(u32 r, u32 o, float sum) const {
        if (HOW == RANGES) out[((size_t)pieces.range(piece) * (c.count - c.first) + (first - c.first + r)) * c.outputs + o] = sum;
        else if (o < c.split) out[(size_t)(first + r) * c.out_stride + c.out_at + o] = sum;
        else second[(size_t)(first + r) * (c.outputs - c.split) + o - c.split] = sum;
    }
};

template <class Brick, u32 MT, u32 NT, u32 TERMS, Manner HOW>
__device__ __forceinline__ void of_matrix(const u32* codes, const float* scales, const float* x, float* out,
                                          float* second, const StreamConstants& c) {
    const Pieces<MT, HOW> pieces(c.columns, c.outputs);
    OfMatrix<MT, 8 * NT / TERMS, HOW> work = {codes, scales, x, out, second, c, pieces, 0, 0, 0};
    stream<Brick, MT, NT, TERMS, HOW>(work, c.columns, c.outputs, c.weights_first != 0);
}

