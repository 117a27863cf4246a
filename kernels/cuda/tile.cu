// x [n, I] · weightᵀ [I, O] → [n, O] for many rows of x, of a weight in bricks: exact with 16 rows at a time, fast (x rounded to
// bf16) with 48. As stream.cu, from which the bits are the same.
#include "of_matrix.cuh"

#define BUFFERS                                                                                    \
    (const u32* __restrict__ codes, const float* __restrict__ scales, const float* x, \
     float* out, float* second, StreamConstants c)
#define DEFINE(name, Brick)                                                                                         \
    KERNEL(256, stream_tile_##name##_16) BUFFERS { of_matrix<Brick, 2, 6, 3, TILE>(codes, scales, x, out, second, c); }      \
    KERNEL(256, fast_tile_##name##_48) BUFFERS { of_matrix<Brick, 2, 6, 1, TILE>(codes, scales, x, out, second, c); }
EACH_BRICK(DEFINE)
