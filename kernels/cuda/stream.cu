// x [n, I] · weightᵀ [I, O] → [n, O] for few rows of x, of a weight in bricks: its rows `first_row` … lie in this part of it.
//
// stream: up to two rows of x at a time. stream_ranges: up to 2 or 8 rows, of which x is too large for shared memory; it leaves
//
//     partial[range, r, o]
//
// to sum_ranges. Groups: any number in x, they share the work. Shared memory: stage() of stream.cuh.
//
// Reference: src/backend/reference/linear.rs, matmul.
#include "stream.cuh"

struct StreamConstants {
    u32 columns, row_scales, outputs;
    u32 first, count;  // rows of x: this launch's first, and all
    u32 x_stride, out_stride, out_at;
    u32 weights_first;  // whether weights may be read while the kernel before still runs
};

template <u32 MT, u32 ROWS, bool WHOLE>
struct OfMatrix {
    const u32* codes;
    const float* scales;
    const float* rows_of_x;
    float* out;
    const StreamConstants& c;
    u32 tile, range, rows, first;

    // Pieces of work for the same rows of x.
    __device__ __forceinline__ u32 pieces() const { return parts(c.outputs, BRICK_ROWS * MT * (WHOLE ? 1 : WARPS)) * ranges(); }
    __device__ __forceinline__ u32 ranges() const {
        return WHOLE ? 1 : parts(parts(c.columns, BRICK_COLUMNS), parts(parts(c.columns, BRICK_COLUMNS), SLOTS));
    }
    __device__ __forceinline__ u32 items() const { return parts(c.count - c.first, ROWS) * pieces(); }
    __device__ __forceinline__ void go_to(u32 item) {
        const u32 all = pieces(), tiles = all / ranges(), piece = item % all;
        first = c.first + item / all * ROWS;
        rows = least(ROWS, c.count - first);
        range = piece / tiles;
        tile = piece % tiles * MT * (WHOLE ? 1 : WARPS);
    }
    __device__ __forceinline__ bool same_x(u32 item) const {
        const u32 all = pieces(), tiles = all / ranges();
        return c.first + item / all * ROWS == first && item % all / tiles == range;
    }
    __device__ __forceinline__ const float* x(u32 r) const { return rows_of_x + (size_t)(first + r) * c.x_stride; }
    __device__ __forceinline__ Bricks matrix() const { return {codes, scales, parts(c.columns, BRICK_COLUMNS), c.row_scales}; }
    __device__ __forceinline__ void put(u32 r, u32 o, float sum) const {
        if (WHOLE) out[(size_t)(first + r) * c.out_stride + c.out_at + o] = sum;
        else out[((size_t)range * (c.count - c.first) + (first - c.first + r)) * c.outputs + o] = sum;
    }
};

template <class Brick, u32 MT, u32 NT, u32 ROWS, bool WHOLE>
__device__ __forceinline__ void of_matrix(const u32* codes, const float* scales, const float* x, float* out,
                                          const StreamConstants& c) {
    OfMatrix<MT, ROWS, WHOLE> work = {codes, scales, x, out, c, 0, 0, 0, 0};
    stream<Brick, MT, NT, WHOLE>(work, c.columns, c.outputs, c.weights_first != 0);
}

#define BUFFERS                                                                                    \
    (const u32* __restrict__ codes, const float* __restrict__ scales, const float* __restrict__ x, \
     float* __restrict__ out, StreamConstants c)
#define DEFINE(name, Brick)                                                                                           \
    KERNEL_RESIDENT(256, 2, stream_##name) BUFFERS { of_matrix<Brick, 2, 1, 2, true>(codes, scales, x, out, c); }          \
    KERNEL_RESIDENT(256, 2, stream_ranges_##name##_2) BUFFERS { of_matrix<Brick, 2, 1, 2, false>(codes, scales, x, out, c); } \
    KERNEL_RESIDENT(256, 2, stream_ranges_##name##_8) BUFFERS { of_matrix<Brick, 1, 3, 8, false>(codes, scales, x, out, c); }
EACH_BRICK(DEFINE)
