// One matrix of the chosen experts, in bricks, for many rows, x as round_rows leaves it: as tile_experts.cu, from which the bits are
// the same.
//
//     stream_experts_wide_…_ROWS, fast_experts_wide_…_ROWS    exact and fast, with ROWS rows of an expert a group
//
// Groups: x 128 outputs of ROWS rows of an expert, as often as there can be.
#include "wide.cuh"

#define ABSENT 0xffffffffu
#define MOST_EXPERTS 1024u

struct WideExpertsConstants {
    u32 columns, row_scales, outputs;
    u32 place_bricks, place_scales;  // from one place to the next
    u32 most;                        // experts that `groups` has room for
    u32 divisor;
};

template <u32 ROWS, u32 BRICK_WORDS>
struct WideExperts {
    const u32* codes;
    const float* scales;
    float* out;
    const u32* slots;
    const u32* place;
    const WideExpertsConstants& c;
    // which ROWS rows of all experts', then the expert, its first slot of these, and how many
    u32 turn, expert, begin, count;

    __device__ __forceinline__ u32 tiles() const { return parts(c.outputs, BRICK_ROWS * WARPS); }
    __device__ __forceinline__ u32 tile() const { return blockIdx.x % tiles() * WARPS; }
    __device__ __forceinline__ u32 first() const { return 0; }
    __device__ __forceinline__ u32 last() const { return SLOTS; }
    __device__ __forceinline__ u32 rows() const { return count; }
    __device__ __forceinline__ u32 row(u32 r) const { return slots[begin + r] / c.divisor; }
    __device__ __forceinline__ Bricks matrix() const {
        const size_t at = place[expert];
        return {codes + at * c.place_bricks * BRICK_WORDS, scales + at * c.place_scales, parts(c.columns, BRICK_COLUMNS), c.row_scales};
    }
    __device__ __forceinline__ void put(u32 r, u32 o, float sum) const { out[(size_t)slots[begin + r] * c.outputs + o] = sum; }

    // Finds what the group has to do; whether there is something. Each thread has an expert of 256, warps add up what comes before.
    __device__ __forceinline__ bool find(const u32* groups) {
        __shared__ u32 of_warps[MOST_EXPERTS / LANES], found[3];
        const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
        const u32* offsets = groups + 1 + c.most;
        u32 turns[MOST_EXPERTS / 256], up_to[MOST_EXPERTS / 256];
        if (threadIdx.x == 0) found[2] = 0;
#pragma unroll
        for (u32 k = 0; k < MOST_EXPERTS / 256; k++) {
            const u32 number = 256 * k + threadIdx.x;
            turns[k] = 0;
            if (number < groups[0] && place[groups[1 + number]] != ABSENT) turns[k] = parts(offsets[number + 1] - offsets[number], ROWS);
            up_to[k] = turns[k];
            for (u32 apart = 1; apart < LANES; apart *= 2) {
                const u32 before = __shfl_up_sync(0xffffffffu, up_to[k], apart);
                if (lane >= apart) up_to[k] += before;
            }
            if (lane == LANES - 1) of_warps[8 * k + warp] = up_to[k];
        }
        __syncthreads();
        u32 before = 0;
#pragma unroll
        for (u32 k = 0; k < MOST_EXPERTS / 256; k++) {
            u32 own = before;
            for (u32 w = 0; w < WARPS; w++) {
                if (w < warp) own += of_warps[8 * k + w];
                before += of_warps[8 * k + w];
            }
            const u32 number = 256 * k + threadIdx.x, at = turn - (own + up_to[k] - turns[k]);
            if (turn >= own + up_to[k] - turns[k] && at < turns[k]) {
                found[0] = groups[1 + number];
                found[1] = offsets[number] + at * ROWS;
                found[2] = least(ROWS, offsets[number + 1] - found[1]);
            }
        }
        __syncthreads();
        expert = found[0], begin = found[1], count = found[2];
        return count != 0;
    }
};

#define BUFFERS                                                                                                                  \
    (const u32* __restrict__ codes, const float* __restrict__ scales, const uint4* x, float* out, const u32* groups, const u32* place, \
     WideExpertsConstants c)
#define WIDE(name, Brick, ROWS, TERMS)                                                                                             \
    KERNEL_RESIDENT(256, 2, name##_##ROWS) BUFFERS {                                                                               \
        WideExperts<ROWS, Brick::PLANES * PLANE_WORDS> work = {codes, scales, out, groups + 2 + 2 * c.most, place, c, 0, 0, 0, 0}; \
        work.turn = blockIdx.x / work.tiles();                                                                                     \
        if (work.find(groups)) wide<Brick, ROWS, TERMS>(work, x, c.columns, c.outputs);                                            \
    }
#define DEFINE(name, Brick)                        \
    WIDE(stream_experts_wide_##name, Brick, 16, 3) \
    WIDE(fast_experts_wide_##name, Brick, 16, 1)   \
    WIDE(fast_experts_wide_##name, Brick, 32, 1)   \
    WIDE(fast_experts_wide_##name, Brick, 64, 1)
EACH_BRICK(DEFINE)
