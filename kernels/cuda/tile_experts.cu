// One matrix of the chosen experts, in bricks, for many rows: as stream_experts.cu, from which the bits are the same.
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
#define DEFINE(name, Brick)                                                            \
    KERNEL(256, stream_experts_tile_##name##_16) OF_EXPERTS(Brick, 2, 6, 3, TILE)      \
    KERNEL(256, fast_experts_tile_##name##_48) OF_EXPERTS(Brick, 2, 6, 1, TILE)
EACH_BRICK(DEFINE)
