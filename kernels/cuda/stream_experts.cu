// One matrix of the chosen experts, in bricks: each expert's weights for all rows that chose it, few at a time.
//
//     out[slot, o] = Σ_i weight_e[o, i] · x[slot / divisor, i]     for the slots (row, choice) of expert e
//
// Slots are grouped by expert (router.cu, group_rows). An expert's matrix stands at `place[e]` of this buffer, or, if that is
// ABSENT, in another one. stream_experts and stream_experts_ranges are to each other as stream and stream_ranges: the latter leaves
//
//     partial[range, slot, o]
//
// to sum_ranges. Groups: any number in x, they share the work.
//
// Reference: src/backend/reference/moe.rs, experts.
#include "stream.cuh"

#define ABSENT 0xffffffffu
#define MOST_EXPERTS 1024u

struct StreamExpertsConstants {
    u32 columns, row_scales, outputs;
    u32 place_bricks, place_scales;  // from one place to the next
    u32 most;                        // experts that `groups` has room for
    u32 divisor, slots;
    u32 weights_first;  // whether weights and groups may be read while the kernel before still runs
};

template <u32 MT, u32 ROWS, bool WHOLE, u32 BRICK_WORDS>
struct OfExperts {
    const u32* codes;
    const float* scales;
    const float* rows_of_x;
    float* out;
    const u32* groups;
    const u32* place;
    const StreamExpertsConstants& c;
    // where each expert's turns of up to ROWS rows begin, in shared memory; experts that are not here have none
    u32* begins;
    u32 tile, range, rows, turn, number, first;

    __device__ __forceinline__ const u32* offsets() const { return groups + 1 + c.most; }
    __device__ __forceinline__ u32 ranges() const {
        return WHOLE ? 1 : parts(parts(c.columns, BRICK_COLUMNS), parts(parts(c.columns, BRICK_COLUMNS), SLOTS));
    }
    __device__ __forceinline__ u32 pieces() const { return parts(c.outputs, BRICK_ROWS * MT * (WHOLE ? 1 : WARPS)) * ranges(); }

    // The turns of all experts, by one thread.
    __device__ __forceinline__ void count() {
        if (threadIdx.x == 0) {
            u32 sum = 0;
            for (u32 number = 0; number < groups[0]; number++) {
                begins[number] = sum;
                if (place[groups[1 + number]] != ABSENT) sum += parts(offsets()[number + 1] - offsets()[number], ROWS);
            }
            begins[groups[0]] = sum;
        }
        __syncthreads();
    }
    __device__ __forceinline__ u32 items() {
        count();
        return begins[groups[0]] * pieces();
    }
    __device__ __forceinline__ void go_to(u32 item) {
        const u32 all = pieces(), tiles = all / ranges(), piece = item % all;
        turn = item / all;
        while (begins[number + 1] <= turn) number++;
        first = offsets()[number] + (turn - begins[number]) * ROWS;
        rows = least(ROWS, offsets()[number + 1] - first);
        range = piece / tiles;
        tile = piece % tiles * MT * (WHOLE ? 1 : WARPS);
    }
    __device__ __forceinline__ bool same_x(u32 item) const {
        const u32 all = pieces(), tiles = all / ranges(), other = item / all;
        if (item % all / tiles != range) return false;
        if (other == turn) return true;
        // one row each, of the same x: the experts that a token chose
        if (rows != 1 || c.divisor == 1) return false;
        u32 next = number;
        while (begins[next + 1] <= other) next++;
        const u32 slot = offsets()[next] + (other - begins[next]) * ROWS;
        if (offsets()[next + 1] - slot != 1) return false;
        return slots()[slot] / c.divisor == slots()[first] / c.divisor;
    }
    __device__ __forceinline__ const u32* slots() const { return groups + 2 + 2 * c.most; }
    __device__ __forceinline__ const float* x(u32 r) const {
        return rows_of_x + (size_t)(slots()[first + r] / c.divisor) * c.columns;
    }
    __device__ __forceinline__ Bricks matrix() const {
        const size_t at = place[groups[1 + number]];
        return {codes + at * c.place_bricks * BRICK_WORDS, scales + at * c.place_scales, parts(c.columns, BRICK_COLUMNS),
                c.row_scales};
    }
    __device__ __forceinline__ void put(u32 r, u32 o, float sum) const {
        out[((size_t)(WHOLE ? 0 : range * c.slots) + slots()[first + r]) * c.outputs + o] = sum;
    }
};

template <class Brick, u32 MT, u32 NT, u32 ROWS, bool WHOLE>
__device__ __forceinline__ void of_experts(const u32* codes, const float* scales, const float* x, float* out,
                                           const u32* groups, const u32* place, const StreamExpertsConstants& c) {
    __shared__ u32 begins[MOST_EXPERTS + 1];
    OfExperts<MT, ROWS, WHOLE, Brick::PLANES * PLANE_WORDS> work = {codes, scales, x, out, groups, place, c, begins,
                                                                   0, 0, 0, 0, 0, 0};
    stream<Brick, MT, NT, WHOLE>(work, c.columns, c.outputs, c.weights_first != 0);
}

#define BUFFERS                                                                                              \
    (const u32* __restrict__ codes, const float* __restrict__ scales, const float* __restrict__ x,           \
     float* __restrict__ out, const u32* __restrict__ groups, const u32* __restrict__ place, StreamExpertsConstants c)
#define DEFINE(name, Brick)                                                                                      \
    KERNEL_RESIDENT(256, 2, stream_experts_##name) BUFFERS {                                                     \
        of_experts<Brick, 2, 1, 2, true>(codes, scales, x, out, groups, place, c);                               \
    }                                                                                                            \
    KERNEL_RESIDENT(256, 2, stream_experts_ranges_##name##_2) BUFFERS {                                          \
        of_experts<Brick, 2, 1, 2, false>(codes, scales, x, out, groups, place, c);                              \
    }                                                                                                            \
    KERNEL_RESIDENT(256, 2, stream_experts_ranges_##name##_8) BUFFERS {                                          \
        of_experts<Brick, 1, 3, 8, false>(codes, scales, x, out, groups, place, c);                              \
    }
EACH_BRICK(DEFINE)
