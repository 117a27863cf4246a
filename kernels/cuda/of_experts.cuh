// Work of stream_experts.cu and tile_experts.cu: rows that chose experts, and the experts' matrices.
#pragma once
#include "stream.cuh"

#define ABSENT 0xffffffffu
#define MOST_EXPERTS 1024u

struct StreamExpertsConstants {
    u32 columns, row_scales, outputs;
    u32 place_bricks, place_scales;  // from one place to the next
    u32 most;                        // experts that `groups` has room for
    u32 divisor, slots;
    u32 sides;  // 2 if there are matrices of a second projection with the same x, which stand at the same places, else 1
    u32 weights_first;  // whether weights and groups may be read while the kernel before still runs
};

// One projection's matrices, and where its results go.
struct ExpertsSide {
    const u32* codes;
    const float* scales;
    float* out;
};

template <u32 MT, u32 R, Manner HOW, u32 BRICK_WORDS>
struct OfExperts {
    static const u32 ROWS = R;
    const ExpertsSide sides[2];
    const float* rows_of_x;
    const u32* groups;
    const u32* place;
    const StreamExpertsConstants& c;
    const Pieces<MT, HOW>& pieces;
    // in shared memory, by the expert's number among the chosen: where its turns of up to ROWS rows begin (experts that are not here
    // have none), where its slots begin, and its place
    u32 *begins, *offsets, *places;
    u32 piece, rows, turn, number, first, side;

    // What is in shared memory, by one warp.
    __device__ __forceinline__ void count() {
        const u32 lane = threadIdx.x, chosen = groups[0];
        if (lane < LANES) {
            u32 before = 0;
            for (u32 base = 0; base <= chosen; base += LANES) {
                const u32 number = base + lane;
                const bool some = number < chosen;
                const u32 at = some ? place[groups[1 + number]] : ABSENT;
                const u32 offset = number <= chosen ? groups[1 + c.most + number] : 0;
                const u32 end = some ? groups[2 + c.most + number] : offset;
                const u32 turns = at != ABSENT ? parts(end - offset, R) : 0;
                u32 sum = turns;
                for (u32 by = 1; by < LANES; by *= 2) {
                    const u32 other = __shfl_up_sync(0xffffffffu, sum, by);
                    if (lane >= by) sum += other;
                }
                if (number <= chosen) begins[number] = before + sum - turns, offsets[number] = offset;
                if (some) places[number] = at;
                before += __shfl_sync(0xffffffffu, sum, LANES - 1);
            }
        }
        __syncthreads();
    }
    __device__ __forceinline__ u32 items() {
        count();
        return begins[groups[0]] * c.sides * pieces.count();
    }
    __device__ __forceinline__ void go_to(u32 item) {
        piece = item % pieces.count();
        turn = item / pieces.count();
        side = turn % c.sides;
        turn /= c.sides;
        while (begins[number + 1] <= turn) number++;
        first = offsets[number] + (turn - begins[number]) * R;
        rows = least(R, offsets[number + 1] - first);
    }
    __device__ __forceinline__ bool same_x(u32 item) const {
        const u32 other_piece = item % pieces.count(), other = item / pieces.count() / c.sides;
        if (pieces.range(other_piece) != pieces.range(piece) || pieces.step(other_piece) != pieces.step(piece)) return false;
        if (other == turn) return true;
        // one row each, of the same x: the experts that a token chose
        if (rows != 1 || c.divisor == 1) return false;
        u32 next = number;
        while (begins[next + 1] <= other) next++;
        const u32 slot = offsets[next] + (other - begins[next]) * R;
        if (offsets[next + 1] - slot != 1) return false;
        return slots()[slot] / c.divisor == slots()[first] / c.divisor;
    }
    __device__ __forceinline__ const u32* slots() const { return groups + 2 + 2 * c.most; }
    __device__ __forceinline__ const float* x(u32 r) const {
        return rows_of_x + (size_t)(slots()[first + r] / c.divisor) * c.columns;
    }
    __device__ __forceinline__ Bricks matrix() const {
        const size_t at = places[number];
        const u32* codes = side ? sides[1].codes : sides[0].codes;
        const float* scales = side ? sides[1].scales : sides[0].scales;
        return {codes + at * c.place_bricks * BRICK_WORDS, scales + at * c.place_scales, pieces.bricks, c.row_scales};
    }
    __device__ __forceinline__ void put(u32 r, u32 o, float sum) const {
        const size_t slot = slots()[first + r];
        // all that ranges leave is in one buffer
        float* out = HOW != RANGES && side ? sides[1].out : sides[0].out;
        const u32 range = HOW == RANGES ? side * pieces.ranges + pieces.range(piece) : 0;
        out[((size_t)range * c.slots + slot) * c.outputs + o] = sum;
    }
};

template <class Brick, u32 MT, u32 NT, u32 TERMS, Manner HOW>
__device__ __forceinline__ void of_experts(ExpertsSide first, ExpertsSide second, const float* x, const u32* groups,
                                           const u32* place, const StreamExpertsConstants& c) {
    __shared__ u32 begins[MOST_EXPERTS + 1], offsets[MOST_EXPERTS + 1], places[MOST_EXPERTS];
    const Pieces<MT, HOW> pieces(c.columns, c.outputs);
    OfExperts<MT, 8 * NT / TERMS, HOW, Brick::PLANES * PLANE_WORDS> work = {
        {first, second}, x, groups, place, c, pieces, begins, offsets, places, 0, 0, 0, 0, 0, 0};
    stream<Brick, MT, NT, TERMS, HOW>(work, c.columns, c.outputs, c.weights_first != 0);
}
