// Attention over compressed keys and values, absorbed form, for rows of a cache [T, latent + rope] that a list names.
//
//     s_t = (query · cache_t) · scale,   a = softmax(s),   context[r, h] = Σ_t a_t · cache_t[0 … latent)
//
// The list of a row is cut into splits of SPLIT entries. `attend` takes one split of 8 heads of a row and gives the largest
// score m, Σ e^(s − m), and Σ e^(s − m) · cache_t; `merge` adds the splits of a row up, in their order. What a row gives
// depends on its own list alone. Reference: src/backend/reference/attention.rs, head.
//
// Lists: for each row where its list begins in the buffer and how many entries it has, then the lists; a beginning of WHOLE
// stands for 0, 1, 2, … without a list.
//
// Versions: 1, splits of 256 entries, eight heads a group. 2, splits of 64: a row alone gives more groups (this one).
#include "common.cuh"

#define SPLIT 64u
#define HEADS 8u
#define AT_ONCE 4u
#define DEPTHS 3u  // dimensions of a lane that are read before any is multiplied
#define WHOLE 0xffffffffu

struct AttendConstants {
    u32 first_row;  // of the lists, for group z = 0
    u32 heads, width, latent;
    u32 splits;  // that the output has room for
    float scale;
};

// Groups: x splits, y tiles of 8 heads, z rows. partial [rows, H, splits, latent + 2].
KERNEL(256, attend)
(const float* query, const float* cache, const u32* lists, float* partial, AttendConstants c) {
    __shared__ float weights[HEADS][SPLIT];
    begin();
    const u32 row = c.first_row + blockIdx.z;
    const u32 begin = lists[2 * row], count = lists[2 * row + 1];
    const u32 first = blockIdx.x * SPLIT;
    if (first >= count) return;
    const u32 entries = least(count - first, SPLIT);
    const u32 first_head = blockIdx.y * HEADS, warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const float* q[HEADS];
#pragma unroll
    for (u32 h = 0; h < HEADS; h++)
        q[h] = query + ((size_t)row * c.heads + least(first_head + h, c.heads - 1)) * c.width;

    // scores, four entries a warp at a time
    for (u32 entry = warp * AT_ONCE; entry < entries; entry += 8 * AT_ONCE) {
        const float* keys[AT_ONCE];
#pragma unroll
        for (u32 e = 0; e < AT_ONCE; e++) {
            const u32 at = first + least(entry + e, entries - 1);
            keys[e] = cache + (size_t)(begin == WHOLE ? at : lists[begin + at]) * c.width;
        }
        float sum[HEADS][AT_ONCE] = {};
        for (u32 first_d = lane; first_d < c.width; first_d += DEPTHS * LANES) {
            float key[DEPTHS][AT_ONCE], value[DEPTHS][HEADS];
#pragma unroll
            for (u32 k = 0; k < DEPTHS; k++) {
                const u32 d = first_d + k * LANES;
                const bool here = d < c.width;
#pragma unroll
                for (u32 e = 0; e < AT_ONCE; e++) key[k][e] = here ? keys[e][d] : 0.0f;
#pragma unroll
                for (u32 h = 0; h < HEADS; h++) value[k][h] = here ? q[h][d] : 0.0f;
            }
#pragma unroll
            for (u32 k = 0; k < DEPTHS; k++)
#pragma unroll
                for (u32 h = 0; h < HEADS; h++)
#pragma unroll
                    for (u32 e = 0; e < AT_ONCE; e++) sum[h][e] = fmaf(value[k][h], key[k][e], sum[h][e]);
        }
#pragma unroll
        for (u32 h = 0; h < HEADS; h++)
#pragma unroll
            for (u32 e = 0; e < AT_ONCE; e++) {
                const float score = warp_sum(sum[h][e]) * c.scale;
                if (lane == 0 && entry + e < entries) weights[h][entry + e] = score;
            }
    }
    __syncthreads();

    // softmax of the split, a warp a head
    float largest = -INFINITE, total = 0.0f;
    for (u32 entry = lane; entry < entries; entry += LANES) largest = fmaxf(largest, weights[warp][entry]);
    largest = warp_max(largest);
    for (u32 entry = lane; entry < entries; entry += LANES) {
        const float weight = exponential(weights[warp][entry] - largest);
        weights[warp][entry] = weight;
        total += weight;
    }
    total = warp_sum(total);
    const size_t stride = c.latent + 2;
    float* out = partial + ((size_t)blockIdx.z * c.heads * c.splits + blockIdx.x) * stride;
    if (lane == 0 && first_head + warp < c.heads) {
        float* to = out + (size_t)(first_head + warp) * c.splits * stride + c.latent;
        to[0] = largest;
        to[1] = total;
    }
    __syncthreads();

    // Σ weight · latent, a thread a column
    for (u32 column = threadIdx.x; column < c.latent; column += 256) {
        float sum[HEADS] = {};
#pragma unroll 8
        for (u32 entry = 0; entry < entries; entry++) {
            const u32 at = first + entry;
            const float value = cache[(size_t)(begin == WHOLE ? at : lists[begin + at]) * c.width + column];
#pragma unroll
            for (u32 h = 0; h < HEADS; h++) sum[h] = fmaf(weights[h][entry], value, sum[h]);
        }
#pragma unroll
        for (u32 h = 0; h < HEADS; h++)
            if (first_head + h < c.heads) out[(size_t)(first_head + h) * c.splits * stride + column] = sum[h];
    }
}

struct MergeConstants {
    u32 first_row;
    u32 heads, latent, splits;
};

// Groups: x tiles of 256 columns, y heads, z rows. context [rows, H, latent].
KERNEL(256, merge)
(const float* partial, const u32* lists, float* context, MergeConstants c) {
    begin();
    const u32 column = blockIdx.x * 256 + threadIdx.x;
    if (column >= c.latent) return;
    const u32 splits = parts(lists[2 * (c.first_row + blockIdx.z) + 1], SPLIT);
    const size_t stride = c.latent + 2, at = (size_t)blockIdx.z * c.heads + blockIdx.y;
    const float* from = partial + at * c.splits * stride;
    float largest = -INFINITE;
    for (u32 split = 0; split < splits; split++) largest = fmaxf(largest, from[split * stride + c.latent]);
    float sum = 0.0f, total = 0.0f;
    for (u32 split = 0; split < splits; split++) {
        const float* part = from + split * stride;
        const float weight = exponential(part[c.latent] - largest);
        total = fmaf(weight, part[c.latent + 1], total);
        sum = fmaf(weight, part[column], sum);
    }
    context[at * c.latent + column] = sum / total;
}
