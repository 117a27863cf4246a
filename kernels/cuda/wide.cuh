// Products of many outputs with many rows of x, where four warps multiply together (wgmma): for compute capability 9.0, and no other
// has such instructions.
//
//     sum[o][r] = Σ_i weight[o, i] · x[r, i]
//
// round_rows has made bf16 of x, TERMS of each value, and put its columns in the order in which pairs() gives those of weights. A
// group takes 128 outputs, 16 a warp, and ROWS rows of x, brick after brick. Weights come from memory to registers, decoded once for
// all columns of b, which are the first term of all rows, then the next: four warps of 16 rows are what an instruction takes of a
// from registers. x comes by asynchronous copies to shared memory, a brick ahead.
// Sums are in the order of stream.cuh (TILE), and the instructions add up as those of a warp do: all bits are the same.
//
// Of few outputs and rows, groups take a range of columns each and leave partial sums to sum_ranges.
//
// Reference: src/backend/reference/linear.rs, matmul. Versions tried: docs/performance.md.
#pragma once
#include "stream.cuh"

// Bricks of x that there is shared memory for.
#define STAGES 2u

#ifndef COLICONV_EMULATED
// What matrices of N columns want of an instruction: sum [64, N] = a [64, 16] · b [16, N] + add · sum, of bf16 with sums in f32. Each
// of the four warps has of a and of sum what it has of them of mma_bf16, sixteen rows of its own and eight columns after the other.
// `b` is as columns_at() says. `a` and `sum` may not be touched before products_wait().
template <u32 N>
struct Products;
#define SUMS_8(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define PRODUCTS(N, sums, a, b, add, ...)                                                                             \
    template <>                                                                                                       \
    struct Products<N> {                                                                                              \
        static __device__ __forceinline__ void start(float (&c)[N / 2], const u32 (&x)[4], u64 y, u32 z) {            \
            asm volatile("{.reg .pred p; setp.ne.u32 p, " add ", 0;\n"                                                \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" sums "}, {" a "}, " b           \
                         ", p, 1, 1, 0;}"                                                                             \
                         : __VA_ARGS__                                                                                \
                         : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "r"(z));                               \
        }                                                                                                             \
    };
#define FIRST_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FIRST_16 FIRST_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FIRST_24 FIRST_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define FIRST_32 FIRST_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
PRODUCTS(16, FIRST_8, "%8,%9,%10,%11", "%12", "%13", SUMS_8(0))
PRODUCTS(32, FIRST_16, "%16,%17,%18,%19", "%20", "%21", SUMS_8(0), SUMS_8(8))
PRODUCTS(48, FIRST_24, "%24,%25,%26,%27", "%28", "%29", SUMS_8(0), SUMS_8(8), SUMS_8(16))
PRODUCTS(64, FIRST_32, "%32,%33,%34,%35", "%36", "%37", SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24))

// Before the first product of several, and after them; then, when they are done.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// b [16, N] for a product, in shared memory: each column's 64 rows in 128 bytes, of which sixteen bytes each lie where their number,
// XOR the column's of eight, says. Two more are the next 16 rows, 8·N more the next 64. `at` is aligned to 1024 bytes.
__device__ __forceinline__ u64 columns_at(const uint4* at) {
    return (u64)((u32)__cvta_generic_to_shared(at) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// Sixteen bytes to shared memory, some time before copies_wait().
__device__ __forceinline__ void copy_16(uint4* to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
// Ends what is copied together.
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for this thread's copies but for the last OPEN that were ended, and lets products see them.
template <u32 OPEN>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif

// The start of shared memory that is aligned to 1024 bytes: launches ask for so much more.
__device__ __forceinline__ uint4* aligned_shared_memory() {
    return shared_memory + (1024 - (size_t)shared_memory % 1024) % 1024 / 16;
}

// pairs() of a brick, as cheap as they are where many columns of b leave few instructions for each weight.
template <class Brick>
struct Pairs : Brick {};
template <>
struct Pairs<BrickInt8> {
    static __device__ __forceinline__ void pairs(const uint4 (&planes)[8], u32 block, u32 i, u32 half, u32 magic, u32 (&out)[4]) {
        const uint4 v = planes[2 * block + i];
        const u32 low = half ? v.z : v.x, high = half ? v.w : v.y;
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const u32 both = __byte_perm(low, high, k * 0x11 | (4 + k) * 0x1100);
            // 128 and the lower seven bits, less 128 or, of a negative code, 256
            out[k] = fma_bf16x2(masked(both, 0x007f007fu, magic), ONES, masked(both, 0x00800080u, magic ^ 0x80008000u));
        }
    }
};

// A block of 64 columns of what a warp's reader stands at, as the a of four products.
template <class Brick>
__device__ __forceinline__ void decode(const Reader<Brick, 1>& reader, u32 block, u32 magic, u32 (&a)[4][4]) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 pairs[2][4];
#pragma unroll
        for (u32 i = 0; i < 2; i++) Pairs<Brick>::pairs(reader.planes[0], block, i, half, magic, pairs[i]);
#pragma unroll
        for (u32 step = 0; step < 2; step++) {
            u32(&to)[4] = a[2 * half + step];
            to[0] = pairs[0][2 * step], to[1] = pairs[1][2 * step];
            to[2] = pairs[0][2 * step + 1], to[3] = pairs[1][2 * step + 1];
        }
    }
}

// A brick times a brick of x at `b`, added to `sums`. `again` reads the next brick as soon as planes are used up; the reader stands
// there already, and `scales` are this brick's.
template <class Brick, u32 N>
__device__ __forceinline__ void add_wide(Reader<Brick, 1>& reader, const float (&scales)[2][4], u64 b, u32 magic, bool again,
                                         float (&sums)[N / 2]) {
#pragma unroll
    for (u32 block = 0; block < BRICK_BLOCKS; block++) {
        u32 a[4][4];
        decode(reader, block, magic, a);
        float sum[N / 2];
        products_begin();
#pragma unroll
        for (u32 step = 0; step < 4; step++) Products<N>::start(sum, a[step], b + 8 * N * block + 2 * step, step != 0);
        products_end();
#pragma unroll
        for (u32 plane = 0; plane < Brick::PLANES; plane++)
            if (again && needed_until<Brick>(plane) == block) reader.read_plane(plane);
        products_wait();
#pragma unroll
        for (u32 j = 0; j < N / 2; j++) {
            if (Brick::SCALES == OF_ROWS) sums[j] += sum[j];
            if (Brick::SCALES == OF_GROUPS) sums[j] = fmaf(scales[j / 2 % 2][block], sum[j], sums[j]);
            if (Brick::SCALES == OF_BLOCKS) sums[j] = fmaf(scales[0][block / 2], sum[j], sums[j]);
        }
    }
}

// Scales of the brick whose bits the reader has.
template <class Brick>
__device__ __forceinline__ void take_scales(const Reader<Brick, 1>& reader, float (&scales)[2][4]) {
    if (Brick::SCALES == OF_GROUPS) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const float4 v = reader.of_groups[0][i];
            scales[i][0] = v.x, scales[i][1] = v.y, scales[i][2] = v.z, scales[i][3] = v.w;
        }
    }
    if (Brick::SCALES == OF_BLOCKS) scales[0][0] = reader.of_blocks[0], scales[0][1] = reader.of_blocks[1];
}

// Copies a brick of N rows to shared memory, a row a warp at a time. `row_at` is where rows of x begin, in sixteen bytes.
template <u32 N>
__device__ __forceinline__ void copy_brick(const uint4* x, const u32* row_at, u32 brick, uint4* to) {
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    x += 32 * brick + lane;
    to += 8 * N * (lane / 8) + 8 * warp + (lane % 8 ^ warp % 8);
#pragma unroll
    for (u32 i = 0; i < N / WARPS; i++) copy_16(to + 8 * WARPS * i, x + row_at[warp + WARPS * i]);
}

// Where rows of b are and results go, of a thread that has of a tile of 16 outputs what a product gives it.
struct Results {
    u32 outputs, tile;

    __device__ __forceinline__ u32 output(u32 i) const { return BRICK_ROWS * tile + threadIdx.x % LANES / 4 + 8 * i; }
    static __device__ __forceinline__ u32 row(u32 j) { return 8 * (j / 4) + 2 * (threadIdx.x % 4) + j % 2; }
};

// The end of a range: its terms are added, the lowest first, scaled by their row, and added to what the ranges before have, in
// their order; `totals` keeps that for the next range. At the end it is in the first of `sums`, else `sums` begins anew.
template <Scales SCALES, u32 ROWS, u32 TERMS>
__device__ __forceinline__ void end_range(float (&sums)[TERMS * ROWS / 2], const float (&of_rows)[2], float4* totals, bool first,
                                          bool last) {
#pragma unroll
    for (u32 j = 0; j < ROWS / 8; j++) {
        float share[4];
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            const u32 at = 4 * j + q;
            share[q] = sums[at];
            if (TERMS == 3) share[q] = (sums[(2 * ROWS / 2 + at) % (TERMS * ROWS / 2)] + sums[(ROWS / 2 + at) % (TERMS * ROWS / 2)]) + sums[at];
            if (SCALES == OF_ROWS) share[q] *= of_rows[q / 2];
        }
        float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
        if (!first) total = totals[256 * j];
        total.x += share[0], total.y += share[1], total.z += share[2], total.w += share[3];
        if (!last) totals[256 * j] = total;
        sums[4 * j] = total.x, sums[4 * j + 1] = total.y, sums[4 * j + 2] = total.z, sums[4 * j + 3] = total.w;
    }
    if (last) return;
#pragma unroll
    for (u32 at = 0; at < TERMS * ROWS / 2; at++) sums[at] = 0.0f;
}

// What a group does: `Work` has the matrix, which of its outputs and columns, and where rows of x are and results go.
//
//     tile()           the first tile of 16 outputs
//     first(), last()  ranges of columns
//     rows(), row(r)   rows of x, at most ROWS, and each one's number
//     put(r, o, sum)   a result
template <class Brick, u32 ROWS, u32 TERMS, class Work>
__device__ __forceinline__ void wide(const Work& work, const uint4* x, u32 columns, u32 outputs) {
    const u32 N = TERMS * ROWS;
    __shared__ u32 row_at[N];
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const u32 magic = in_register(MAGIC), last_tile = parts(outputs, BRICK_ROWS) - 1;
    const u32 all = parts(columns, BRICK_COLUMNS), of_range = parts(all, SLOTS);
    const u32 first = work.first() * of_range, bricks = least(work.last() * of_range, all);
    const Results results = {outputs, work.tile() + warp};
    Reader<Brick, 1> reader;
    reader.go_to(work.matrix(), results.tile, last_tile, first);
    reader.read(columns - BRICK_COLUMNS * first);
    float of_rows[2] = {1.0f, 1.0f};
    if (Brick::SCALES == OF_ROWS) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) of_rows[i] = work.matrix().scales[least(results.output(i), outputs - 1)];
    }
    if (threadIdx.x < N) {
        const u32 r = work.row(least(threadIdx.x % ROWS, work.rows() - 1));
        row_at[threadIdx.x] = (TERMS * r + threadIdx.x / ROWS) * (32 * all);
    }
    uint4* const staged = aligned_shared_memory();
    // Sums of ranges, each thread's own.
    float4* const totals = (float4*)(staged + STAGES * 32 * N) + threadIdx.x;
    __syncthreads();
    wait_for_kernels_before();
    copy_brick<N>(x, row_at, first, staged);
    copies_end();
    float sums[N / 2];
#pragma unroll
    for (u32 j = 0; j < N / 2; j++) sums[j] = 0.0f;
    u32 end_of_range = first + of_range, stage = 0;
    for (u32 brick = first; brick < bricks; brick++, stage ^= 1) {
        copies_wait<0>();
        __syncthreads();
        const bool again = brick + 1 < bricks;
        float scales[2][4];
        take_scales(reader, scales);
        if (again) {
            copy_brick<N>(x, row_at, brick + 1, staged + (stage ^ 1) * (32 * N));
            copies_end();
            reader.go_on();
            reader.read_scales(columns - BRICK_COLUMNS * (brick + 1));
            // the brick after that: where there are few, it costs more than it gains
            if (all > SLOTS && brick + 2 < bricks && lane < 4 * Brick::PLANES)
                fetch_ahead(reader.codes[0] + Brick::PLANES * PLANE_WORDS + 28 * lane);
        }
        add_wide<Brick, N>(reader, scales, columns_at(staged + stage * (32 * N)), magic, again, sums);
        if (brick + 1 < end_of_range && again) continue;
        end_range<Brick::SCALES, ROWS, TERMS>(sums, of_rows, totals, brick < first + of_range, !again);
        end_of_range += of_range;
    }
    let_next_kernel_begin();
#pragma unroll
    for (u32 j = 0; j < ROWS / 2; j++) {
        const u32 r = results.row(j), o = results.output(j / 2 % 2);
        if (r < work.rows() && o < outputs) work.put(r, o, sums[j]);
    }
}
