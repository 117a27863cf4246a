// Rows as they are stored, each padded to whole 16 bytes, laid in bricks: bricks.cuh. And sums over ranges of columns.
//
// arrange: tiles `first_tile` … of a matrix, from `rows` rows of `stride` words. arrange_scales: the scales of groups of
// 64 · `blocks` columns, `row_scales` a row, one for each block of 64. Groups: any number in x, a thread a word.
#include "bricks.cuh"

struct ArrangeConstants {
    u32 stride, rows, bricks, first_tile;
};

template <class Brick>
__device__ __forceinline__ u32 word_of(const u32* codes, const ArrangeConstants& c, u32 tile, u32 brick, u32 plane, u32 lane,
                                       u32 w) {
    const u32 g = lane / 4, t = lane % 4;
    u32 i, word;
    if (Brick::PLANES == 8) {
        i = plane % 2, word = 64 * brick + 16 * (plane / 2) + 4 * t + w;
    } else if (Brick::PLANES == 4) {
        i = w / 2, word = 32 * brick + 8 * plane + 2 * t + w % 2;
    } else if (Brick::PLANES == 2) {
        i = w % 2, word = 16 * brick + 4 * (2 * plane + w / 2) + t;
    } else if (plane < 2) {
        i = plane, word = 24 * brick + 6 * w + t;
    } else {
        const u32 half = 2 * (24 * brick + 6 * w + 4) + t;
        u32 both = 0;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 row = BRICK_ROWS * tile + 8 * r + g;
            if (row < c.rows && half < 2 * c.stride) both |= (u32)((const u16*)(codes + (size_t)row * c.stride))[half] << 16 * r;
        }
        return both;
    }
    const u32 row = BRICK_ROWS * tile + 8 * i + g;
    return row < c.rows && word < c.stride ? codes[(size_t)row * c.stride + word] : 0;
}

template <class Brick>
__device__ __forceinline__ void arrange(const u32* from, u32* to, const ArrangeConstants& c) {
    const u32 of_brick = Brick::PLANES * PLANE_WORDS;
    const size_t words = (size_t)parts(c.rows, BRICK_ROWS) * c.bricks * of_brick;
    to += (size_t)c.first_tile * c.bricks * of_brick;
    for (size_t at = blockIdx.x * (size_t)256 + threadIdx.x; at < words; at += (size_t)gridDim.x * 256) {
        const u32 in_brick = (u32)(at % of_brick);
        const size_t brick = at / of_brick;
        to[at] = word_of<Brick>(from, c, (u32)(brick / c.bricks), (u32)(brick % c.bricks), in_brick / PLANE_WORDS,
                                in_brick % PLANE_WORDS / 4, in_brick % 4);
    }
}

#define DEFINE(name, Brick) \
    KERNEL(256, arrange_##name)(const u32* __restrict__ from, u32* __restrict__ to, ArrangeConstants c) { arrange<Brick>(from, to, c); }
EACH_BRICK(DEFINE)

struct ArrangeScalesConstants {
    u32 row_scales, blocks, rows, bricks, first_tile;
};

KERNEL(256, arrange_scales)(const float* __restrict__ from, float* __restrict__ to, ArrangeScalesConstants c) {
    const size_t count = (size_t)parts(c.rows, BRICK_ROWS) * c.bricks * BRICK_SCALES;
    to += (size_t)c.first_tile * c.bricks * BRICK_SCALES;
    for (size_t at = blockIdx.x * (size_t)256 + threadIdx.x; at < count; at += (size_t)gridDim.x * 256) {
        const size_t brick = at / BRICK_SCALES;
        const u32 row = BRICK_ROWS * (u32)(brick / c.bricks) + (u32)(at % BRICK_SCALES) / BRICK_BLOCKS;
        const u32 block = BRICK_BLOCKS * (u32)(brick % c.bricks) + (u32)(at % BRICK_BLOCKS);
        to[at] = row < c.rows ? from[(size_t)row * c.row_scales + least(block / c.blocks, c.row_scales - 1)] : 0.0f;
    }
}

struct SumRangesConstants {
    u32 ranges, rows, outputs;
    u32 out_stride, out_at;  // of `out`, whose first row is that of the sums
};

// out[r, out_at + o] = Σ partial[range, r, o], in the order of the ranges. Groups: x tiles of 256 outputs, y rows.
KERNEL(256, sum_ranges)(const float* __restrict__ partial, float* __restrict__ out, SumRangesConstants c) {
    wait_for_kernels_before();
    const u32 o = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (o >= c.outputs) return;
    float sum = 0.0f;
    for (u32 range = 0; range < c.ranges; range++) sum += partial[((size_t)range * c.rows + row) * c.outputs + o];
    out[(size_t)row * c.out_stride + c.out_at + o] = sum;
}
