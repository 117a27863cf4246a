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
    u32 weights_first;  // whether weights and groups may be read while the kernel before still runs
};

template <u32 MT, u32 R, Manner HOW, u32 BRICK_WORDS>
struct OfExperts {
    static const u32 ROWS = R;
    const u32* codes;
    const float* scales;
    const float* rows_of_x;
    float* out;
    const u32* groups;
    const u32* place;
    const StreamExpertsConstants& c;
    const Pieces<MT, HOW>& pieces;
    // where each expert's turns of up to ROWS rows begin, in shared memory; experts that are not here have none
    u32* begins;
    u32 piece, rows, turn, number, first;

    __device__ __forceinline__ const u32* offsets() const { return groups + 1 + c.most; }
    // The turns of all experts, by one thread.
    __device__ __forceinline__ void count() {
        if (threadIdx.x == 0) {
            u32 sum = 0;
            for (u32 number = 0; number < groups[0]; number++) {
                begins[number] = sum;
                if (place[groups[1 + number]] != ABSENT) sum += parts(offsets()[number + 1] - offsets()[number], R);
            }
            begins[groups[0]] = sum;
        }
        __syncthreads();
    }
    __device__ __forceinline__ u32 items() {
        count();
        return begins[groups[0]] * pieces.count();
    }
    __device__ __forceinline__ void go_to(u32 item) {
        piece = item % pieces.count();
        turn = item / pieces.count();
        while (begins[number + 1] <= turn) number++;
        first = offsets()[number] + (turn - begins[number]) * R;
        rows = least(R, offsets()[number + 1] - first);
    }
    __device__ __forceinline__ bool same_x(u32 item) const {
        const u32 other_piece = item % pieces.count(), other = item / pieces.count();
        if (pieces.range(other_piece) != pieces.range(piece) || pieces.step(other_piece) != pieces.step(piece)) return false;
        if (other == turn) return true;
        // one row each, of the same x: the experts that a token chose
        if (rows != 1 || c.divisor == 1) return false;
        u32 next = number;
        while (begins[next + 1] <= other) next++;
        const u32 slot = offsets()[next] + (other - begins[next]) * R;
        if (offsets()[next + 1] - slot != 1) return false;
        return slots()[slot] / c.divisor == slots()[first] / c.divisor;
    }
    __device__ __forceinline__ const u32* slots() const { return groups + 2 + 2 * c.most; }
    __device__ __forceinline__ const float* x(u32 r) const {
        return rows_of_x + (size_t)(slots()[first + r] / c.divisor) * c.columns;
    }
    __device__ __forceinline__ Bricks matrix() const {
        const size_t at = place[groups[1 + number]];
        return {codes + at * c.place_bricks * BRICK_WORDS, scales + at * c.place_scales, pieces.bricks, c.row_scales};
    }
    __device__ __forceinline__ void put(u32 r, u32 o, float sum) const {
        out[((size_t)(HOW == RANGES ? pieces.range(piece) * c.slots : 0) + slots()[first + r]) * c.outputs + o] = sum;
    }
};

template <class Brick, u32 MT, u32 NT, u32 TERMS, Manner HOW>
__device__ __forceinline__ void of_experts(const u32* codes, const float* scales, const float* x, float* out,
                                           const u32* groups, const u32* place, const StreamExpertsConstants& c) {
    __shared__ u32 begins[MOST_EXPERTS + 1];
    const Pieces<MT, HOW> pieces(c.columns, c.outputs);
    OfExperts<MT, 8 * NT / TERMS, HOW, Brick::PLANES * PLANE_WORDS> work = {codes, scales, x,      out, groups, place,
                                                                           c,     pieces, begins, 0,   0,      0, 0, 0};
    stream<Brick, MT, NT, TERMS, HOW>(work, c.columns, c.outputs, c.weights_first != 0);
}
