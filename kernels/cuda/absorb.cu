// Queries of attention over compressed keys.
//
//     query[r, h] = [ Σ_j q[r, h, j] · K_h[j] ; q[r, h, nope…] ]        K_h[j] = kv_b[h · head_rows + j], j < nope
//
// q [n, H · (nope + rope)], query [n, H, latent + rope]. Sums are f32: warp w takes the rows w, w + 8, … of K_h in their order, then
// the warps are added in theirs. A kv_b in several parts is gone through part by part, `first_row` and `rows`; each goes on with
// the sums of the one before. Groups: x tiles of 256 columns, y heads, z rows. Reference: src/backend/reference/attention.rs, head.
//
// Versions: 1, a thread a column, all rows. 2, a lane eight columns, a warp an eighth of the rows (this one).
#include "weights.cuh"

#define WARPS 8u

struct AbsorbConstants {
    u32 stride, row_scales, group_size;
    u32 first_row, rows;
    u32 heads, head_rows, nope, rope, latent;
    u32 first;  // row of q of group z = 0
};

template <class Coding>
__device__ __forceinline__ void absorb(const u32* codes, const float* scales, const float* q, float* query, AbsorbConstants c) {
    __shared__ float sums[WARPS][8][LANES];
    const Weights w = {codes, scales, c.stride, c.row_scales, c.group_size};
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, head = blockIdx.y;
    const u32 first = head * c.head_rows, end = least(first + c.nope, c.first_row + c.rows);
    // the warp's first row of this part
    u32 row = first + warp;
    if (row < c.first_row) row += parts(c.first_row - row, WARPS) * WARPS;
    // A lane a row: this group's share of its codes, and its scales.
    const u32 share = 4 * c.stride / gridDim.x;
    for (u32 ahead = row + lane * WARPS; ahead < end; ahead += LANES * WARPS) {
        const size_t of_part = ahead - c.first_row;
        const u8* line = (const u8*)(codes + of_part * c.stride) + share * blockIdx.x;
        for (u32 at = 0; at < share; at += 128) fetch_ahead(line + at);
        if (c.group_size > 0) fetch_ahead(scales + of_part * c.row_scales);
    }
    begin();
    const size_t at = (size_t)(c.first + blockIdx.z) * c.heads + head;
    const float* from = q + at * (c.nope + c.rope);
    float* to = query + at * (c.latent + c.rope);
    if (blockIdx.x == 0)
        for (u32 i = threadIdx.x; i < c.rope; i += 256) to[c.latent + i] = from[c.nope + i];

    const u32 chunk = blockIdx.x * LANES + lane;
    float sum[8] = {};
    if (8 * chunk < c.latent) {
#pragma unroll 8
        for (; row < end; row += WARPS) {
            float value[8];
            float factor = Coding::eight(w, row - c.first_row, chunk, value) * from[row - first];
            if (Coding::BY_ROW) factor *= Coding::row_scale(w, row - c.first_row);
#pragma unroll
            for (u32 k = 0; k < 8; k++) sum[k] = fmaf(factor, value[k], sum[k]);
        }
    }
#pragma unroll
    for (u32 k = 0; k < 8; k++) sums[warp][k][lane] = sum[k];
    __syncthreads();
    const u32 column = blockIdx.x * 256 + threadIdx.x;
    if (column >= c.latent) return;
    float total = c.first_row == 0 ? 0.0f : to[column];
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) total += sums[i][threadIdx.x % 8][threadIdx.x / 8];
    to[column] = total;
}

#define DEFINE(name, Coding)                                                                                      \
    KERNEL(256, absorb_##name)                                                                                    \
    (const u32* __restrict__ codes, const float* __restrict__ scales, const float* q, float* query,               \
     AbsorbConstants c) {                                                                                         \
        absorb<Coding>(codes, scales, q, query, c);                                                               \
    }
EACH_CODING(DEFINE)
