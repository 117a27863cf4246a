// The positions that sparse attention looks at.
//
//     score[r, t] = heads^−½ · Σ_h weight[r, h] · relu(q[r, h] · key[t] · width^−½)
//
// for the entries of a row's list (attention.cu), in its order; then the `topk` largest, of equals the first in the list.
// Reference: src/backend/reference/attention.rs, select.
//
// Versions: 1, tiles of 64 entries and 32 heads in shared memory; eight bits of a key at a time (this one).
#include "common.cuh"

#define WHOLE 0xffffffffu
#define TILE 64u     // entries of a group
#define AT_ONCE 32u  // heads of a group at a time
#define DEPTH 32u    // dimensions at a time

struct IndexScoresConstants {
    u32 first_row;  // for group y = 0
    u32 heads, width;
    u32 stride;  // of scores
    float width_scale, heads_scale;
};

// Groups: x tiles of entries, y rows. q [n, heads · width], weights [n, heads], scores [rows, stride].
//
// A thread takes an entry and eight of 32 heads; dot products go along the dimensions in order, then the heads are added in
// order.
KERNEL(256, index_scores)
(const float* q, const float* weights, const float* keys, const u32* lists, float* scores, IndexScoresConstants c) {
    __shared__ float key_tile[TILE][DEPTH + 1];
    __shared__ float q_tile[AT_ONCE][DEPTH];
    __shared__ float head_sums[4][TILE];
    begin();
    const u32 row = c.first_row + blockIdx.y;
    const u32 begin = lists[2 * row], count = lists[2 * row + 1];
    const u32 first = blockIdx.x * TILE;
    if (first >= count) return;
    const u32 own = threadIdx.x % TILE, quarter = threadIdx.x / TILE;
    float total = 0.0f;
    for (u32 head = 0; head < c.heads; head += AT_ONCE) {
        float dot[8] = {};
        for (u32 depth = 0; depth < c.width; depth += DEPTH) {
            __syncthreads();
            for (u32 i = threadIdx.x; i < TILE * DEPTH; i += 256) {
                const u32 at = least(first + i / DEPTH, count - 1), d = depth + i % DEPTH;
                const u32 entry = begin == WHOLE ? at : lists[begin + at];
                key_tile[i / DEPTH][i % DEPTH] = d < c.width ? keys[(size_t)entry * c.width + d] : 0.0f;
            }
            for (u32 i = threadIdx.x; i < AT_ONCE * DEPTH; i += 256) {
                const u32 h = head + i / DEPTH, d = depth + i % DEPTH;
                q_tile[i / DEPTH][i % DEPTH] =
                    h < c.heads && d < c.width ? q[((size_t)row * c.heads + h) * c.width + d] : 0.0f;
            }
            __syncthreads();
            for (u32 d = 0; d < DEPTH; d++) {
                const float key = key_tile[own][d];
#pragma unroll
                for (u32 h = 0; h < 8; h++) dot[h] = fmaf(q_tile[8 * quarter + h][d], key, dot[h]);
            }
        }
        float sum = 0.0f;
#pragma unroll
        for (u32 h = 0; h < 8; h++) {
            const u32 number = head + 8 * quarter + h;
            const float scaled = dot[h] * c.width_scale;
            // not fmaxf, which would make a number of NaN
            const float weight = number < c.heads ? weights[(size_t)row * c.heads + number] : 0.0f;
            if (number < c.heads) sum = fmaf(weight, scaled < 0.0f ? 0.0f : scaled, sum);
        }
        head_sums[quarter][own] = sum;
        __syncthreads();
        for (u32 part = 0; part < 4; part++) total += head_sums[part][own];
    }
    if (quarter == 0 && first + own < count) scores[(size_t)blockIdx.y * c.stride + first + own] = total * c.heads_scale;
}

struct TopPositionsConstants {
    u32 first_row;  // for group x = 0
    u32 rows;       // of the selection
    u32 topk;
    u32 stride;
};

// Larger numbers for larger scores; 0 and −0 are equal, NaN by its bits.
__device__ __forceinline__ u32 order_of(float score) {
    const u32 bits = __float_as_uint(score + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Groups: x rows. selection: as lists, `topk` entries a row.
//
// The key of the last score that is chosen is found eight bits at a time, from the highest; then the list is gone through in
// order.
KERNEL(256, top_positions)
(const float* scores, const u32* lists, u32* selection, TopPositionsConstants c) {
    __shared__ u32 histogram[256];
    __shared__ u32 sums[2][256];
    __shared__ u32 found[2];  // the key's bits so far, how many of the equal ones are chosen
    begin();
    const u32 row = c.first_row + blockIdx.x, thread = threadIdx.x;
    const u32 begin = lists[2 * row], count = lists[2 * row + 1];
    const u32 to = 2 * c.rows + row * c.topk;
    if (thread == 0) {
        selection[2 * row] = to;
        selection[2 * row + 1] = least(count, c.topk);
        found[0] = 0;
        found[1] = c.topk;
    }
    if (count <= c.topk) {
        for (u32 at = thread; at < count; at += 256) selection[to + at] = begin == WHOLE ? at : lists[begin + at];
        return;
    }
    const float* from = scores + (size_t)blockIdx.x * c.stride;
    for (int shift = 24; shift >= 0; shift -= 8) {
        histogram[thread] = 0;
        __syncthreads();
        const u32 known = found[0];
        for (u32 at = thread; at < count; at += 256) {
            const u32 key = order_of(from[at]);
            if (shift == 24 || key >> (shift + 8) == known) atomicAdd(&histogram[key >> shift & 255u], 1u);
        }
        __syncthreads();
        if (thread == 0) {
            u32 left = found[1], digit = 255;
            while (histogram[digit] < left) left -= histogram[digit--];
            found[0] = known << 8 | digit;
            found[1] = left;
        }
        __syncthreads();
    }
    const u32 last = found[0], equals = found[1];
    u32 written = 0, equal_before = 0;
    for (u32 first = 0; first < count; first += 256) {
        const u32 at = first + thread;
        const u32 key = at < count ? order_of(from[at]) : 0;
        const u32 above = at < count && key > last, equal = at < count && key == last;
        // how many there are up to this thread: above in the low half, equal in the high half
        u32 side = 0;
        sums[0][thread] = above | equal << 16;
        __syncthreads();
        for (u32 apart = 1; apart < 256; apart *= 2) {
            sums[1 - side][thread] = sums[side][thread] + (thread >= apart ? sums[side][thread - apart] : 0);
            side = 1 - side;
            __syncthreads();
        }
        const u32 all = sums[side][255], own = sums[side][thread];
        const u32 equal_rank = equal_before + (own >> 16);  // this one counted
        const u32 equal_chosen = least(equal_rank, equals) - least(equal_before, equals);
        const u32 chosen = (own & 0xffffu) + equal_chosen;
        if (above || (equal && equal_rank <= equals))
            selection[to + written + chosen - 1] = begin == WHOLE ? at : lists[begin + at];
        written += (all & 0xffffu) + least(equal_before + (all >> 16), equals) - least(equal_before, equals);
        equal_before += all >> 16;
        __syncthreads();
    }
}
