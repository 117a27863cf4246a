// x [n, I] · weightᵀ [I, O] → [n, O], of a weight in bricks: its rows `first_row` … lie in this part of it.
//
// stream: few rows of x at a time. stream_ranges: the same of x that is too large for shared memory, or a few more; it leaves
//
//     partial[range, r, o]
//
// to sum_ranges. stream_narrow: for few outputs, half as many a group as stream. stream_tile: many rows. fast_…: the same of x rounded to bf16. Groups: any number in x, they share the work.
// Shared memory: src/backend/gpu/stream.rs, Plan.
//
// Reference: src/backend/reference/linear.rs, matmul.
#include "of_matrix.cuh"

#define BUFFERS                                                                                    \
    (const u32* __restrict__ codes, const float* __restrict__ scales, const float* x, \
     float* out, float* second, StreamConstants c)
#define DEFINE(name, Brick)                                                                                               \
    KERNEL_RESIDENT(256, 3, stream_narrow_##name##_2) BUFFERS { of_matrix<Brick, 1, 1, 3, WHOLE>(codes, scales, x, out, second, c); } \
    KERNEL_RESIDENT(256, 3, fast_narrow_##name##_8) BUFFERS { of_matrix<Brick, 1, 1, 1, WHOLE>(codes, scales, x, out, second, c); }   \
    KERNEL_RESIDENT(256, 2, stream_##name##_2) BUFFERS { of_matrix<Brick, 2, 1, 3, WHOLE>(codes, scales, x, out, second, c); }        \
    KERNEL_RESIDENT(256, 2, stream_ranges_##name##_2) BUFFERS { of_matrix<Brick, 2, 1, 3, RANGES>(codes, scales, x, out, second, c); } \
    KERNEL_RESIDENT(256, 2, stream_ranges_##name##_8) BUFFERS { of_matrix<Brick, 1, 3, 3, RANGES>(codes, scales, x, out, second, c); } \
    KERNEL_RESIDENT(256, 2, fast_##name##_8) BUFFERS { of_matrix<Brick, 2, 1, 1, WHOLE>(codes, scales, x, out, second, c); }          \
    KERNEL_RESIDENT(256, 2, fast_ranges_##name##_8) BUFFERS { of_matrix<Brick, 2, 1, 1, RANGES>(codes, scales, x, out, second, c); }
EACH_BRICK(DEFINE)
