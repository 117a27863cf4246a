// Queries of attention over compressed keys.
//
//     query[r, h] = [ Σ_j q[r, h, j] · K_h[j] ; q[r, h, nope…] ]        K_h[j] = kv_b[h · head_rows + j], j < nope
//
// q [n, H · (nope + rope)], query [n, H, latent + rope]. Sums are f32, in the order of j. A kv_b in several parts is gone
// through part by part, `first_row` and `rows`; each goes on with the sums of the one before.
// Groups: x tiles of 256 columns, y heads, z rows. Reference: src/backend/reference/attention.rs, head.
//
// Versions: 1, a thread a column (this one).
#include "weights.cuh"

struct AbsorbConstants {
    u32 stride, row_scales, group_size;
    u32 first_row, rows;
    u32 heads, head_rows, nope, rope, latent;
    u32 first;  // row of q of group z = 0
};

template <class Coding>
__device__ __forceinline__ void absorb(const u32* codes, const float* scales, const float* q, float* query, AbsorbConstants c) {
    const Weights w = {codes, scales, c.stride, c.row_scales, c.group_size};
    const u32 column = blockIdx.x * 256 + threadIdx.x, head = blockIdx.y;
    if (column >= c.latent + c.rope) return;
    const size_t at = (size_t)(c.first + blockIdx.z) * c.heads + head;
    const float* from = q + at * (c.nope + c.rope);
    float* to = query + at * (c.latent + c.rope) + column;
    if (column >= c.latent) {
        *to = from[c.nope + column - c.latent];
        return;
    }
    const u32 first = head * c.head_rows, end = first + c.nope;
    const u32 begin = first < c.first_row ? c.first_row : first;
    float sum = c.first_row == 0 ? 0.0f : *to;
#pragma unroll 8
    for (u32 row = begin; row < least(end, c.first_row + c.rows); row++)
        sum = fmaf(from[row - first], Coding::one(w, row - c.first_row, column), sum);
    *to = sum;
}

#define DEFINE(name, Coding)                                                                                      \
    KERNEL(256, absorb_##name)                                                                                    \
    (const u32* __restrict__ codes, const float* __restrict__ scales, const float* __restrict__ q,                \
     float* __restrict__ query, AbsorbConstants c) {                                                              \
        absorb<Coding>(codes, scales, q, query, c);                                                               \
    }
EACH_CODING(DEFINE)
