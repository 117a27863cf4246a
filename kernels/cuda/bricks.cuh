// Weights in bricks: how matrices lie in memory whose products tensor cores compute.
//
// A brick is 16 rows by 256 columns: PLANES planes of 512 bytes, 16 of each lane of a warp, so that a warp reads whole planes
// one after the other. Bricks follow each other along the rows of a tile, which is 16 rows high; tiles follow each other. What
// lies past the last row or column is 0. Lane 4·g + t has, of each of the brick's four blocks of 64 columns, columns
// 16·t … 16·t + 15 of the rows g and g + 8:
//
//     8 bits  plane 2·block + i: four words of row g + 8·i
//     4 bits  plane block: two words of row g, two of row g + 8
//     2 bits  plane block / 2: for each of two blocks a word of row g and one of row g + 8
//     3 bits  planes 0 and 1: two low bits of each of the 16, a word of row g + 8·plane for each block; plane 2: high bits, for
//             each block 16 of row g and 16 of row g + 8
//
// Scales of groups lie beside, spread out to one for every block: 64 a brick, [i][g][block]. Scales of rows and of blocks of
// 128 × 128 are as stored.
//
// pairs() gives 16 columns of a row as pairs of bf16, which hold every code exactly: half 0, then half 1, four pairs each.
// Columns c of half h in a pair k: {c0, c0 + APART}, c0 = 8·h + k for APART 4, 4·h + k for APART 8.
#pragma once
#include "tensor.cuh"

#define BRICK_ROWS 16u
#define BRICK_COLUMNS 256u
#define BRICK_BLOCKS 4u
#define PLANE_WORDS 128u
#define BRICK_SCALES 64u

enum Scales { OF_ROWS, OF_GROUPS, OF_BLOCKS };

// 128 in both halves, to whose mantissas codes are added; and what takes it away again with what a code is too large by.
#define MAGIC 0x43004300u
#define ONES 0x3f803f80u

struct BrickInt8 {
    static const u32 PLANES = 8, APART = 4;
    static const Scales SCALES = OF_ROWS;

    static __device__ __forceinline__ void pairs(const uint4 (&planes)[8], u32 block, u32 i, u32 half, u32, u32 (&out)[4]) {
        const uint4 v = planes[2 * block + i];
        const u32 low = (half ? v.z : v.x) ^ 0x80808080u, high = (half ? v.w : v.y) ^ 0x80808080u;
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            // 2^23 + 128 + b by its bits, minus 2^23 + 128: an f32 whose lower half is 0
            const float a = __uint_as_float(__byte_perm(low, 0x4b000000u, 0x7540 + k)) - 8388736.0f;
            const float b = __uint_as_float(__byte_perm(high, 0x4b000000u, 0x7540 + k)) - 8388736.0f;
            out[k] = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
        }
    }
};

struct BrickFp8 {
    static const u32 PLANES = 8, APART = 4;
    static const Scales SCALES = OF_BLOCKS;

    // No code is NaN: matrices with such codes are not laid in bricks.
    static __device__ __forceinline__ void pairs(const uint4 (&planes)[8], u32 block, u32 i, u32 half, u32, u32 (&out)[4]) {
        const uint4 v = planes[2 * block + i];
        const u32 low = half ? v.z : v.x, high = half ? v.w : v.y;
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            // exponent and mantissa are those of a bf16 that is smaller by 2^120, subnormal ones too
            const u32 both = __byte_perm(low, high, k | k << 4 | (4 + k) << 8 | (4 + k) << 12);
            out[k] = fma_bf16x2((both & 0x80008000u) | (both & 0x7f007f00u) >> 4, 0x7b807b80u, 0x80008000u);
        }
    }
};

template <Scales S>
struct BrickInt4 {
    static const u32 PLANES = 4, APART = 4;
    static const Scales SCALES = S;

    static __device__ __forceinline__ void pairs(const uint4 (&planes)[4], u32 block, u32 i, u32 half, u32 magic,
                                                 u32 (&out)[4]) {
        const uint4 v = planes[block];
        const u32 word = i ? (half ? v.w : v.z) : (half ? v.y : v.x);
#pragma unroll
        for (u32 k = 0; k < 4; k++) out[k] = fma_bf16x2(masked(word >> 4 * k, 0x000f000fu, magic), ONES, 0xc308c308u);
    }
};
typedef BrickInt4<OF_ROWS> BrickInt4Row;
typedef BrickInt4<OF_GROUPS> BrickInt4Grouped;

struct BrickInt2 {
    static const u32 PLANES = 2, APART = 8;
    static const Scales SCALES = OF_ROWS;

    static __device__ __forceinline__ void pairs(const uint4 (&planes)[2], u32 block, u32 i, u32 half, u32 magic,
                                                 u32 (&out)[4]) {
        const uint4 v = planes[block / 2];
        const u32 word = block % 2 ? (i ? v.w : v.z) : (i ? v.y : v.x);
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            // three codes at a time stand within the mantissa: n, 4·n or 16·n
            const u32 at = 4 * half + k, shifted = word >> 6 * (at / 3);
            if (at % 3 == 0) out[k] = fma_bf16x2(masked(shifted, 0x00030003u, magic), ONES, 0xc302c302u);
            if (at % 3 == 1) out[k] = fma_bf16x2(masked(shifted, 0x000c000cu, magic), 0x3e803e80u, 0xc208c208u);
            if (at % 3 == 2) out[k] = fma_bf16x2(masked(shifted, 0x00300030u, magic), 0x3d803d80u, 0xc120c120u);
        }
    }
};

struct BrickInt3 {
    static const u32 PLANES = 3, APART = 8;
    static const Scales SCALES = OF_GROUPS;

    static __device__ __forceinline__ u32 word(const uint4& v, u32 block) {
        return block == 0 ? v.x : block == 1 ? v.y : block == 2 ? v.z : v.w;
    }

    static __device__ __forceinline__ void pairs(const uint4 (&planes)[3], u32 block, u32 i, u32 half, u32 magic,
                                                 u32 (&out)[4]) {
        const u32 low = word(planes[i], block);
        // eight high bits in each half
        const u32 high = __byte_perm(word(planes[2], block), 0, i ? 0x4342 : 0x4140);
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const u32 at = 4 * half + k, bit = at < 2 ? high << (2 - at) : high >> (at - 2);
            out[k] = fma_bf16x2(masked(bit, 0x00040004u, masked(low >> 2 * at, 0x00030003u, magic)), ONES, 0xc304c304u);
        }
    }
};

// A function of every coding that is laid in bricks.
#define EACH_BRICK(DEFINE)              \
    DEFINE(int8_row, BrickInt8)         \
    DEFINE(int4_row, BrickInt4Row)      \
    DEFINE(int4_grouped, BrickInt4Grouped) \
    DEFINE(int3_g64, BrickInt3)         \
    DEFINE(int2_row, BrickInt2)         \
    DEFINE(fp8_e4m3_b128, BrickFp8)
