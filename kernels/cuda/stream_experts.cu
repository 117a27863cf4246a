// One matrix of the chosen experts, in bricks: each expert's weights for all rows that chose it, few at a time.
//
//     out[slot, o] = Σ_i weight_e[o, i] · x[slot / divisor, i]     for the slots (row, choice) of expert e
//
// Slots are grouped by expert (router.cu, group_rows). An expert's matrix stands at `place[e]` of this buffer, or, if that is
// ABSENT, in another one. stream_experts and stream_experts_ranges are to each other as stream and stream_ranges, fast_… too: the latter leave
//
//     partial[side, range, slot, o]
//
// to sum_experts_ranges. The matrices of a second projection that stand at the same places are another side of the same work:
// gate and up. Groups: any number in x, they share the work.
//
// Reference: src/backend/reference/moe.rs, experts.
#include "of_experts.cuh"

#define BUFFERS                                                                                             \
    (const u32* __restrict__ codes, const float* __restrict__ scales, const float* x, float* out,           \
     const u32* groups, const u32* place, const u32* __restrict__ second_codes,                             \
     const float* __restrict__ second_scales, float* second_out, StreamExpertsConstants c)
#define OF_EXPERTS(Brick, MT, NT, TERMS, HOW) \
    BUFFERS {                                                                                                \
        of_experts<Brick, MT, NT, TERMS, HOW>({codes, scales, out}, {second_codes, second_scales, second_out}, \
                                              x, groups, place, c);                                           \
    }
#define DEFINE(name, Brick)                                                                             \
    KERNEL_RESIDENT(256, 2, stream_experts_##name##_2) OF_EXPERTS(Brick, 2, 1, 3, WHOLE)                \
    KERNEL_RESIDENT(256, 2, stream_experts_ranges_##name##_2) OF_EXPERTS(Brick, 2, 1, 3, RANGES)        \
    KERNEL_RESIDENT(256, 2, stream_experts_ranges_##name##_8) OF_EXPERTS(Brick, 1, 3, 3, RANGES)        \
    KERNEL_RESIDENT(256, 2, fast_experts_##name##_8) OF_EXPERTS(Brick, 2, 1, 1, WHOLE)                  \
    KERNEL_RESIDENT(256, 2, fast_experts_ranges_##name##_8) OF_EXPERTS(Brick, 2, 1, 1, RANGES)
EACH_BRICK(DEFINE)
