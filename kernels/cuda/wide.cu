// x [n, I] · weightᵀ [I, O] → [n, O] for many rows of x, of a weight in bricks: as tile.cu, from which the bits are the same.
//
//     round_rows                          x as bf16 terms, its columns as products want them    groups: x eight columns a thread
//     stream_wide_…_ROWS, fast_wide_…_ROWS    the product, exact and fast, with ROWS rows a group    groups: x, see WideMatrix
#include "wide.cuh"

struct RoundConstants {
    u32 columns, first, rows, stride;  // of x: its first row
    u32 apart;                         // APART of the weight's bricks
    u32 terms;
};

// Thread 8·block + 2·step + k of a row has the columns of lanes 0 … 3 in that k of a step of a product. Terms are those of stage().
KERNEL(256, round_rows)(const float* x, uint4* out, RoundConstants c) {
    // In this order: what reads its results looks at the choice of experts before it waits.
    wait_for_kernels_before();
    let_next_kernel_begin();
    const u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    const u32 of_row = BRICK_COLUMNS / 8 * parts(c.columns, BRICK_COLUMNS), row = at / of_row, piece = at % of_row;
    if (row >= c.rows) return;
    x += (size_t)(c.first + row) * c.stride;
    const u32 first = 64 * (piece / 8) + (c.apart == 4 ? 8 : 4) * (piece / 4 % 2) + piece % 4;
    float v[8];
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        const u32 column = first + 16 * (k / 2) + c.apart * (k % 2);
        v[k] = column < c.columns ? x[column] : 0.0f;
    }
    for (u32 term = 0; term < c.terms; term++) {
        u32 pairs[4];
#pragma unroll
        for (u32 t = 0; t < 4; t++) {
            u32 a = __float_as_uint(v[2 * t]), b = __float_as_uint(v[2 * t + 1]);
            if (c.terms == 1) a = rounded(a), b = rounded(b);
            pairs[t] = __byte_perm(a, b, 0x7632);
            v[2 * t] -= __uint_as_float(a & 0xffff0000u), v[2 * t + 1] -= __uint_as_float(b & 0xffff0000u);
        }
        out[((size_t)row * c.terms + term) * of_row + piece] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

struct WideConstants {
    u32 columns, row_scales, outputs;
    u32 first, count;  // rows of x: this launch's first, and all; x has those from the first on
    u32 out_stride, out_at;
    u32 split;   // outputs that go to `out`; those that follow go to `second`
    u32 ranges;  // that are left to sum_ranges; 0 if none are
};

// Groups take ROWS rows each of the same outputs and range, then other outputs, then other ranges.
template <u32 ROWS>
struct WideMatrix {
    const u32* codes;
    const float* scales;
    float *out, *second;
    const WideConstants& c;

    __device__ __forceinline__ u32 of_launch() const { return c.count - c.first; }
    __device__ __forceinline__ u32 turns() const { return parts(of_launch(), ROWS); }
    __device__ __forceinline__ u32 tiles() const { return parts(c.outputs, BRICK_ROWS * WARPS); }
    __device__ __forceinline__ u32 tile() const { return blockIdx.x / turns() % tiles() * WARPS; }
    __device__ __forceinline__ u32 first() const { return blockIdx.x / turns() / tiles(); }
    __device__ __forceinline__ u32 last() const { return c.ranges ? first() + 1 : SLOTS; }
    __device__ __forceinline__ u32 begin() const { return blockIdx.x % turns() * ROWS; }
    __device__ __forceinline__ u32 rows() const { return least(ROWS, of_launch() - begin()); }
    __device__ __forceinline__ u32 row(u32 r) const { return begin() + r; }
    __device__ __forceinline__ Bricks matrix() const { return {codes, scales, parts(c.columns, BRICK_COLUMNS), c.row_scales}; }
    __device__ __forceinline__ void put(u32 r, u32 o, float sum) const {
        const size_t row = begin() + r;
        if (c.ranges) out[(first() * of_launch() + row) * c.outputs + o] = sum;
        else if (o < c.split) out[(c.first + row) * c.out_stride + c.out_at + o] = sum;
        else second[(c.first + row) * (c.outputs - c.split) + o - c.split] = sum;
    }
};

#define BUFFERS                                                                                                     \
    (const u32* __restrict__ codes, const float* __restrict__ scales, const uint4* x, float* out, float* second,      \
     WideConstants c)
#define WIDE(name, Brick, ROWS, TERMS)                                                              \
    KERNEL_RESIDENT(256, 2, name##_##ROWS) BUFFERS {                                                \
        wide<Brick, ROWS, TERMS>(WideMatrix<ROWS>{codes, scales, out, second, c}, x, c.columns, c.outputs); \
    }
#define DEFINE(name, Brick)                   \
    WIDE(stream_wide_##name, Brick, 16, 3)    \
    WIDE(fast_wide_##name, Brick, 32, 1)      \
    WIDE(fast_wide_##name, Brick, 64, 1)
EACH_BRICK(DEFINE)
