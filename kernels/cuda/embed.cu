// Rows of a table [V, w]: out[r] = table[id[r]], for the ids that lie in this part of it.
//
// Groups: x tiles of 256 columns, y ids. Reference: src/backend/reference.rs, embed.
//
// Versions: 1, a thread a value (this one).
#include "weights.cuh"

struct EmbedConstants {
    u32 stride, row_scales, group_size, columns;
    u32 first_row, rows;
};

template <class Coding>
__device__ __forceinline__ void embed(const u32* codes, const float* scales, const u32* ids, float* out, EmbedConstants c) {
    const Weights w = {codes, scales, c.stride, c.row_scales, c.group_size};
    begin();
    const u32 row = ids[blockIdx.y] - c.first_row;
    const u32 column = blockIdx.x * 256 + threadIdx.x;
    if (row >= c.rows || column >= c.columns) return;
    out[(size_t)blockIdx.y * c.columns + column] = Coding::one(w, row, column);
}

#define DEFINE(name, Coding)                                                                                      \
    KERNEL(256, embed_##name)                                                                                     \
    (const u32* __restrict__ codes, const float* __restrict__ scales, const u32* ids, float* out,                 \
     EmbedConstants c) {                                                                                          \
        embed<Coding>(codes, scales, ids, out, c);                                                                \
    }
EACH_CODING(DEFINE)
