// Products of many outputs with rows of x, on tensor cores: a weight is read once for all rows that a group takes.
//
//     sum[o][r] = Σ_i weight[o, i] · x[r, i]
//
// x is the sum of TERMS bf16. Exact products have three, its bits from the highest to the lowest, eight each; fast ones have one,
// x rounded to the nearest. Each term is a column of b. Codes are exact in bf16, so every product is; a tensor core adds up 64
// columns, four steps of 16. These sums are scaled by their group's scale and added up with f32 FMAs in the order of the columns, for
// each term and each of SLOTS ranges of columns. Then the terms of a range are added, the lowest first, the scale of the row is
// applied, and ranges are added in their order. So a result has the same bits however many rows are computed together, and by
// whichever of the kernels:
//
// WHOLE: the eight warps of a group take a range each of the same outputs.
// RANGES: they take different outputs of the same range, whose part of x is all that has to be in shared memory, and leave
// partial sums to sum_ranges.
// TILE: they take different outputs and many rows, and go through the ranges one after the other.
//
// Groups go on from one piece of work to the next, and read ahead the bricks that come next, across pieces.
//
// Reference: src/backend/reference/linear.rs, matmul. Versions tried: docs/performance.md.
#pragma once
#include "bricks.cuh"

// What a kernel reads of what others wrote is nowhere declared __restrict__: such loads could come before the wait for those.
#define SLOTS 8u
#define WARPS 8u

enum Manner { WHOLE, RANGES, TILE };

// Bricks whose part of x is in shared memory at a time, of TILE.
#define STAGED_BRICKS 2u

// Sixteen bytes from one half of a block to the next, of so many columns of b: an odd number of 64 bytes, so that what lanes write
// together lies in different banks.
__device__ __forceinline__ u32 step_of(u32 columns) { return 4 * (columns | 1); }

// An f32 by its bits, to the nearest bf16, which are the upper half; what is no number stays so.
__device__ __forceinline__ u32 rounded(u32 x) {
    return (x & 0x7fffffffu) > 0x7f800000u ? x | 0x00400000u : x + 0x7fffu + (x >> 16 & 1u);
}

// Rows of x as bf16 terms in shared memory: for each block of 64 columns, half, row, term and lane of four, the eight columns of
// pairs(). `of_row(r)` is where a row is.
template <class Brick, u32 TERMS, class OfRow>
__device__ __forceinline__ void stage(OfRow of_row, u32 rows, u32 columns, u32 first_block, u32 blocks, uint4* to) {
    // Of each row eight columns for so many threads.
    const u32 pieces = 8 * blocks;
    if (pieces == 0) return;
    for (u32 r = 0, at = threadIdx.x;; at += 256) {
        while (at >= pieces) at -= pieces, r++;
        if (r >= rows) break;
        const float* x = of_row(r);
        const bool wide = columns % 4 == 0 && (size_t)x % 16 == 0;
        const u32 t = at % 4, half = at / 4 % 2, block = at / 8, base = 64 * (first_block + block) + 16 * t;
        const u32 c0 = base + (Brick::APART == 4 ? 8 : 4) * half, c1 = c0 + Brick::APART;
        float v[8];
        if (wide && c1 + 4 <= columns) {
            const float4 a = *(const float4*)(x + c0), b = *(const float4*)(x + c1);
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
            v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        } else {
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                v[k] = c0 + k < columns ? x[c0 + k] : 0.0f;
                v[4 + k] = c1 + k < columns ? x[c1 + k] : 0.0f;
            }
        }
#pragma unroll
        for (u32 term = 0; term < TERMS; term++) {
            u32 pair[4];
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                u32 a = __float_as_uint(v[k]), b = __float_as_uint(v[4 + k]);
                if (TERMS == 1) a = rounded(a), b = rounded(b);
                pair[k] = __byte_perm(a, b, 0x7632);
                // what is left is exact; of an infinite value it is no number
                v[k] -= __uint_as_float(a & 0xffff0000u), v[4 + k] -= __uint_as_float(b & 0xffff0000u);
            }
            to[(2 * block + half) * step_of(rows * TERMS) + (TERMS * r + term) * 4 + t] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        }
    }
}

// How a matrix in bricks is laid out.
struct Bricks {
    const u32* __restrict__ codes;
    const float* __restrict__ scales;
    u32 bricks;      // of a tile
    u32 row_scales;  // of a row of blocks of 128 × 128
};

// What a warp reads: MT tiles of 16 rows, brick after brick.
template <class Brick, u32 MT>
struct Reader {
    const u32* codes[MT];
    const float* scales[Brick::SCALES == OF_GROUPS ? MT : 1];
    uint4 planes[MT][Brick::PLANES];
    float4 of_groups[Brick::SCALES == OF_GROUPS ? MT : 1][2];
    float of_blocks[2];

    // The bricks of `tile` and the MT − 1 after it, of which `last` is the last, from `brick` on.
    __device__ __forceinline__ void go_to(const Bricks& w, u32 tile, u32 last, u32 brick) {
        const u32 lane = threadIdx.x % LANES;
#pragma unroll
        for (u32 m = 0; m < MT; m++) {
            const size_t at = (size_t)least(tile + m, last) * w.bricks + brick;
            codes[m] = w.codes + at * (Brick::PLANES * PLANE_WORDS) + 4 * lane;
            if (Brick::SCALES == OF_GROUPS) scales[m] = w.scales + at * BRICK_SCALES + lane / 4 * BRICK_BLOCKS;
        }
        if (Brick::SCALES == OF_BLOCKS) scales[0] = w.scales + (size_t)(least(tile, last) / 8) * w.row_scales + 2 * brick;
    }

    __device__ __forceinline__ void go_on() {
#pragma unroll
        for (u32 m = 0; m < MT; m++) {
            codes[m] += Brick::PLANES * PLANE_WORDS;
            if (Brick::SCALES == OF_GROUPS) scales[m] += BRICK_SCALES;
        }
        if (Brick::SCALES == OF_BLOCKS) scales[0] += 2;
    }

    __device__ __forceinline__ void read_plane(u32 plane) {
#pragma unroll
        for (u32 m = 0; m < MT; m++) planes[m][plane] = read_once(codes[m] + PLANE_WORDS * plane);
    }

    // `columns` from this brick on: a row of blocks of 128 has a scale for each of them and no more.
    __device__ __forceinline__ void read_scales(u32 columns) {
        if (Brick::SCALES == OF_GROUPS) {
#pragma unroll
            for (u32 m = 0; m < MT; m++) {
                of_groups[m][0] = *(const float4*)scales[m];
                of_groups[m][1] = *(const float4*)(scales[m] + BRICK_SCALES / 2);
            }
        }
        if (Brick::SCALES == OF_BLOCKS) {
            of_blocks[0] = scales[0][0];
            of_blocks[1] = scales[0][columns > 128 ? 1 : 0];
        }
    }

    __device__ __forceinline__ void read(u32 columns) {
#pragma unroll
        for (u32 plane = 0; plane < Brick::PLANES; plane++) read_plane(plane);
        read_scales(columns);
    }
};

// The last of the four blocks that needs a plane.
template <class Brick>
__device__ __forceinline__ u32 needed_until(u32 plane) {
    return Brick::PLANES == 8 ? plane / 2 : Brick::PLANES == 4 ? plane : Brick::PLANES == 2 ? 2 * plane + 1 : 3;
}

// A brick of MT tiles times what is staged at `x`, added to `sums`; NT tiles of eight columns of b, of which `column` has those of
// this lane. `again` reads the next brick as soon as planes are used up; the reader stands there already.
template <class Brick, u32 MT, u32 NT>
__device__ __forceinline__ void add_brick(Reader<Brick, MT>& reader, const uint4* x, const u32 (&column)[NT], u32 step,
                                          u32 magic, bool again, u32 next_columns, float (&sums)[MT][NT][4]) {
    float scales[Brick::SCALES == OF_GROUPS ? MT : 1][2][4];
    if (Brick::SCALES == OF_GROUPS) {
#pragma unroll
        for (u32 m = 0; m < MT; m++)
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const float4 v = reader.of_groups[m][i];
                scales[m][i][0] = v.x, scales[m][i][1] = v.y, scales[m][i][2] = v.z, scales[m][i][3] = v.w;
            }
    }
    if (Brick::SCALES == OF_BLOCKS) scales[0][0][0] = reader.of_blocks[0], scales[0][0][1] = reader.of_blocks[1];
    if (again) reader.read_scales(next_columns);
#pragma unroll
    for (u32 block = 0; block < BRICK_BLOCKS; block++) {
        float sum[MT][NT][4];
#pragma unroll
        for (u32 m = 0; m < MT; m++)
#pragma unroll
            for (u32 j = 0; j < NT; j++) sum[m][j][0] = sum[m][j][1] = sum[m][j][2] = sum[m][j][3] = 0.0f;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 a[MT][2][4];
#pragma unroll
            for (u32 m = 0; m < MT; m++)
#pragma unroll
                for (u32 i = 0; i < 2; i++) Brick::pairs(reader.planes[m], block, i, half, magic, a[m][i]);
#pragma unroll
            for (u32 j = 0; j < NT; j++) {
                const uint4 b = x[column[j]];
#pragma unroll
                for (u32 m = 0; m < MT; m++) {
                    const u32 first[4] = {a[m][0][0], a[m][1][0], a[m][0][1], a[m][1][1]};
                    mma_bf16(sum[m][j], first, b.x, b.y);
                }
#pragma unroll
                for (u32 m = 0; m < MT; m++) {
                    const u32 second[4] = {a[m][0][2], a[m][1][2], a[m][0][3], a[m][1][3]};
                    mma_bf16(sum[m][j], second, b.z, b.w);
                }
            }
            x += step;
        }
#pragma unroll
        for (u32 m = 0; m < MT; m++)
#pragma unroll
            for (u32 j = 0; j < NT; j++)
#pragma unroll
                for (u32 q = 0; q < 4; q++) {
                    if (Brick::SCALES == OF_ROWS) sums[m][j][q] += sum[m][j][q];
                    if (Brick::SCALES == OF_GROUPS) sums[m][j][q] = fmaf(scales[m][q / 2][block], sum[m][j][q], sums[m][j][q]);
                    if (Brick::SCALES == OF_BLOCKS) sums[m][j][q] = fmaf(scales[0][0][block / 2], sum[m][j][q], sums[m][j][q]);
                }
#pragma unroll
        for (u32 plane = 0; plane < Brick::PLANES; plane++)
            if (again && needed_until<Brick>(plane) == block) reader.read_plane(plane);
    }
}

// Sums of a warp to where others find them: [outputs][columns of b].
template <u32 MT, u32 NT>
__device__ __forceinline__ void lay_down(const float (&sums)[MT][NT][4], u32 columns, float (*to)[8 * NT + 1]) {
    const u32 lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 m = 0; m < MT; m++)
#pragma unroll
        for (u32 j = 0; j < NT; j++)
#pragma unroll
            for (u32 q = 0; q < 4; q++) {
                const u32 column = 8 * j + 2 * t + q % 2;
                if (column < columns) to[16 * m + 8 * (q / 2) + g][column] = sums[m][j][q];
            }
}

// The terms of row r, the lowest first.
template <u32 TERMS>
__device__ __forceinline__ float of_terms(const float* sums, u32 r) {
    if (TERMS == 1) return sums[r];
    return (sums[TERMS * r + 2] + sums[TERMS * r + 1]) + sums[TERMS * r];
}

// How the pieces of work for the same rows of x and the same matrix follow each other. A group of threads never stops between
// pieces that belong together.
template <u32 MT, Manner HOW>
struct Pieces {
    u32 bricks, of_range, ranges, steps, tiles;

    __device__ __forceinline__ Pieces(u32 columns, u32 outputs) {
        bricks = parts(columns, BRICK_COLUMNS);
        of_range = parts(bricks, SLOTS);
        ranges = HOW == WHOLE ? 1 : parts(bricks, of_range);
        steps = HOW == TILE ? parts(of_range, STAGED_BRICKS) : 1;
        tiles = parts(outputs, BRICK_ROWS * MT * (HOW == WHOLE ? 1 : WARPS));
    }
    __device__ __forceinline__ u32 count() const { return tiles * ranges * steps; }
    __device__ __forceinline__ u32 together() const { return HOW == TILE ? ranges * steps : 1; }
    // The first tile of 16 rows, the range, the step in it.
    __device__ __forceinline__ u32 tile(u32 piece) const {
        return (HOW == TILE ? piece / (ranges * steps) : piece % tiles) * MT * (HOW == WHOLE ? 1 : WARPS);
    }
    __device__ __forceinline__ u32 range(u32 piece) const { return HOW == TILE ? piece / steps % ranges : piece / tiles; }
    __device__ __forceinline__ u32 step(u32 piece) const { return HOW == TILE ? piece % steps : 0; }
};

// All work of a group. `Work` says what there is:
//
//     items()          how many pieces of work there are, those for the same rows of x and the same matrix together
//     go_to(item)      makes it the current piece: its matrix, `rows`, `piece`
//     same_x(item)     whether it has the x of the current piece
//     x(r)             where row r of the current piece is
//     put(r, o, sum)   a result of the current piece, or a range's share of it
template <class Brick, u32 MT, u32 NT, u32 TERMS, Manner HOW, class Work>
__device__ __forceinline__ void stream(Work& work, u32 columns, u32 outputs, bool weights_first) {
    typedef float Results[16 * MT][8 * NT + 1];
    __shared__ Results own_results[HOW == WHOLE ? 2 * WARPS : HOW == RANGES ? WARPS : 1];
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
    const u32 magic = in_register(MAGIC), last_tile = parts(outputs, BRICK_ROWS) - 1;
    const Pieces<MT, HOW> pieces(columns, outputs);
    const u32 bricks = pieces.bricks, beside = HOW == WHOLE ? 0 : MT * warp;
    // Of TILE shared memory is the results of all warps, their sums of ranges [rows][outputs], then x.
    Results* results = HOW == TILE ? (Results*)shared_memory : own_results;
    float* totals = (float*)(results + WARPS) + warp * 16 * MT * Work::ROWS;
    uint4* staged_x = HOW == TILE ? (uint4*)((float*)(results + WARPS) + WARPS * 16 * MT * Work::ROWS) : shared_memory;
    if (!weights_first) wait_for_kernels_before();
    const u32 together = pieces.together(), items = work.items() / together;
    u32 item = (u32)((u64)items * blockIdx.x / gridDim.x) * together;
    const u32 end = (u32)((u64)items * (blockIdx.x + 1) / gridDim.x) * together;
    if (item == end) {
        if (weights_first) wait_for_kernels_before();
        return;
    }
    u32 first, last;  // bricks of the current piece, of this warp
    const auto bricks_of = [&](u32 piece) {
        const u32 range = HOW == WHOLE ? warp : pieces.range(piece), end_of_range = least((range + 1) * pieces.of_range, bricks);
        first = least(range * pieces.of_range + pieces.step(piece) * STAGED_BRICKS, end_of_range);
        last = HOW == TILE ? least(first + STAGED_BRICKS, end_of_range) : end_of_range;
    };
    work.go_to(item);
    bricks_of(work.piece);
    Reader<Brick, MT> reader;
    if (first < last) {
        reader.go_to(work.matrix(), pieces.tile(work.piece) + beside, last_tile, first);
        reader.read(columns - BRICK_COLUMNS * first);
    }
    if (weights_first) wait_for_kernels_before();
    bool staged = false;
    u32 turn = 0;
    float sums[MT][NT][4];
    for (; item < end; item++) {
        const u32 rows = work.rows, columns_of_b = TERMS * rows, staged_from = HOW == WHOLE ? 0 : first;
        if (!staged) {
            __syncthreads();
            stage<Brick, TERMS>([&](u32 r) { return work.x(r); }, rows, columns, BRICK_BLOCKS * staged_from,
                                BRICK_BLOCKS * (HOW == WHOLE ? bricks : last - first), staged_x);
            __syncthreads();
        }
        u32 column[NT];
#pragma unroll
        for (u32 j = 0; j < NT; j++) column[j] = least(8 * j + g, columns_of_b - 1) * 4 + t;
        const u32 step = step_of(columns_of_b);
        if (pieces.step(work.piece) == 0) {
#pragma unroll
            for (u32 m = 0; m < MT; m++)
#pragma unroll
                for (u32 j = 0; j < NT; j++) sums[m][j][0] = sums[m][j][1] = sums[m][j][2] = sums[m][j][3] = 0.0f;
        }
        const bool more = item + 1 < end;
        if (!more) let_next_kernel_begin();
        const Work now = work;
        const u32 now_first = first, now_last = last;
        if (more) {
            staged = work.same_x(item + 1);
            work.go_to(item + 1);
            bricks_of(work.piece);
        }
        const u32 next_tile = pieces.tile(work.piece) + beside;
        const uint4* x = staged_x + (size_t)(now_first - staged_from) * (2 * BRICK_BLOCKS) * step;
        for (u32 brick = now_first; brick < now_last; brick++) {
            u32 next = brick + 1;
            bool again = true;
            if (next < now_last) {
                reader.go_on();
            } else {
                next = first;
                again = more && first < last;
                if (again) reader.go_to(work.matrix(), next_tile, last_tile, first);
            }
            add_brick<Brick, MT, NT>(reader, x, column, step, magic, again, columns - BRICK_COLUMNS * next, sums);
            x += 2 * BRICK_BLOCKS * step;
        }
        if (now_first >= now_last && more && first < last) {
            // nothing was there to read ahead in
            reader.go_to(work.matrix(), next_tile, last_tile, first);
            reader.read(columns - BRICK_COLUMNS * first);
        }
        if (pieces.step(now.piece) + 1 < pieces.steps) continue;
        Results& mine = results[HOW == WHOLE ? turn * WARPS + warp : warp];
        lay_down<MT, NT>(sums, columns_of_b, mine);
        const u32 output_of_tile = BRICK_ROWS * (pieces.tile(now.piece) + beside);
        if (HOW == WHOLE) {
            __syncthreads();
            // one warp after the other adds the ranges up, while the others go on
            if (warp == item % WARPS) {
                for (u32 at = lane; at < 16 * MT * rows; at += LANES) {
                    const u32 o = at % (16 * MT), r = at / (16 * MT), output = output_of_tile + o;
                    if (output >= outputs) continue;
                    float sum = 0.0f;
#pragma unroll
                    for (u32 range = 0; range < SLOTS; range++) {
                        float share = of_terms<TERMS>(results[turn * WARPS + range][o], r);
                        if (Brick::SCALES == OF_ROWS) share *= now.matrix().scales[output];
                        sum += share;
                    }
                    now.put(r, output, sum);
                }
            }
            turn ^= 1;
        } else {
            __syncwarp();
            const u32 range = pieces.range(now.piece);
            for (u32 at = lane; at < 16 * MT * rows; at += LANES) {
                const u32 o = at % (16 * MT), r = at / (16 * MT), output = output_of_tile + o;
                if (output >= outputs) continue;
                float share = of_terms<TERMS>(mine[o], r);
                if (Brick::SCALES == OF_ROWS) share *= now.matrix().scales[output];
                if (HOW == RANGES) {
                    now.put(r, output, share);
                } else {
                    const float total = (range == 0 ? 0.0f : totals[at]) + share;
                    if (range + 1 < pieces.ranges) totals[at] = total;
                    else now.put(r, output, total);
                }
            }
            __syncwarp();
        }
    }
}
