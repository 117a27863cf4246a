// One matrix of the chosen experts: each expert's weights for all rows that chose it.
//
//     out[slot, o] = Σ_i weight_e[o, i] · x[slot / divisor, i]     for the slots (row, choice) of expert e
//
// Slots are grouped by expert (router.cu, group_rows). An expert's matrix stands at `place[e]` of this buffer, or, if that is
// ABSENT, in another one. Groups: x tiles of outputs, y experts that were chosen. A group goes through the expert's slots R
// at a time.
//
// Reference: src/backend/reference/moe.rs, experts.
//
// Versions: 1, as matmul.cu, an expert a group in y (this one).
#include "product.cuh"

#define ABSENT 0xffffffffu

struct ExpertsConstants {
    u32 stride, row_scales, group_size, columns;
    u32 outputs;
    u32 expert_words, expert_scales;  // from one place to the next
    u32 most;                         // experts that `groups` has room for
    u32 divisor;
};

template <class Coding, u32 R>
__device__ __forceinline__ void experts(const u32* codes, const float* scales, const float* x, float* out, const u32* groups,
                                        const u32* place, ExpertsConstants c) {
    constexpr u32 OUTS = outputs_of_a_warp(R);
    begin();
    // groups: how many experts, their numbers [most], where their slots begin [most + 1], slots
    if (blockIdx.y >= groups[0]) return;
    const u32* offsets = groups + 1 + c.most + blockIdx.y;
    const u32* slots = groups + 2 + 2 * c.most;
    const u32 at = place[groups[1 + blockIdx.y]];
    const u32 first_output = (blockIdx.x * WARPS + threadIdx.x / LANES) * OUTS;
    if (at == ABSENT || first_output >= c.outputs) return;
    const Weights w = {codes + (size_t)at * c.expert_words, scales + (size_t)at * c.expert_scales, c.stride, c.row_scales,
                       c.group_size};
    u32 rows[OUTS];
#pragma unroll
    for (u32 o = 0; o < OUTS; o++) rows[o] = least(first_output + o, c.outputs - 1);
    for (u32 first = offsets[0]; first < offsets[1]; first += R) {
        u32 slot[R];
        const float* xs[R];
#pragma unroll
        for (u32 r = 0; r < R; r++) {
            slot[r] = slots[least(first + r, offsets[1] - 1)];
            xs[r] = x + (size_t)(slot[r] / c.divisor) * c.columns;
        }
        float sum[OUTS][R];
        product<Coding, R>(w, rows, xs, c.columns, c.columns % 4 == 0, sum);
        if (threadIdx.x % LANES != 0) continue;
#pragma unroll
        for (u32 r = 0; r < R; r++) {
            if (first + r >= offsets[1]) break;
#pragma unroll
            for (u32 o = 0; o < OUTS; o++)
                if (first_output + o < c.outputs) out[(size_t)slot[r] * c.outputs + first_output + o] = sum[o][r];
        }
    }
}

#define DEFINE_ROWS(name, Coding, R)                                                                              \
    KERNEL(256, experts_##name##_##R)                                                                             \
    (const u32* __restrict__ codes, const float* __restrict__ scales, const float* x, float* out,                 \
     const u32* groups, const u32* place, ExpertsConstants c) {                                                   \
        experts<Coding, R>(codes, scales, x, out, groups, place, c);                                              \
    }
#define DEFINE(name, Coding)        \
    DEFINE_ROWS(name, Coding, 1)    \
    DEFINE_ROWS(name, Coding, 2)    \
    DEFINE_ROWS(name, Coding, 4)    \
    DEFINE_ROWS(name, Coding, 8)
EACH_CODING(DEFINE)
