// The choice of experts, and what becomes of it.
//
// Reference: src/backend/reference/moe.rs, choose and experts.
//
// Versions: 1, a group a row, a thread an expert, the best found by the whole group; experts counted by one thread. 2, an expert's
// place is counted, sums over the experts before (this one).
#include "common.cuh"

#define MOST_EXPERTS 1024u
#define NONE 0xffffffffu

struct ChooseConstants {
    u32 experts, chosen;
    u32 groups, chosen_groups;
    u32 normalized;
    float factor;
};

// Whether a is before b: the larger value, of equals the lower index. NaN is the least.
__device__ __forceinline__ bool before(float a, u32 a_at, float b, u32 b_at) {
    const float x = a != a ? -INFINITE : a, y = b != b ? -INFINITE : b;
    return b_at == NONE || (a_at != NONE && (x > y || (x == y && a_at < b_at)));
}

// Experts, and most rows, of a group.
#define EXPERTS_AT_ONCE 2u

struct RouterLogitsConstants {
    u32 experts, columns;
    u32 stride;  // of a row of the gate
    u32 rows;
};

// logits [n, experts] = x [n, columns] · gateᵀ, of a gate in f32. A thread takes four columns, then the next 1024 on; lanes are
// added as warp_sum does, then the warps in order. Groups: x pairs of experts, y tiles of R rows.
template <u32 R>
__device__ __forceinline__ void router_logits(const float* __restrict__ gate, const float* x, float* logits, RouterLogitsConstants c) {
    __shared__ float sums[8][EXPERTS_AT_ONCE][R];
    const u32 first = blockIdx.x * EXPERTS_AT_ONCE, first_row = blockIdx.y * R;
    if (blockIdx.y == 0)
        for (u32 at = LANES * threadIdx.x; at < EXPERTS_AT_ONCE * c.stride; at += LANES * 256)
            if (first * c.stride + at < c.experts * c.stride) fetch_ahead(gate + (size_t)first * c.stride + at);
    begin();
    const bool wide = c.columns % 4 == 0;
    float sum[EXPERTS_AT_ONCE][R] = {};
#pragma unroll 3
    for (u32 column = 4 * threadIdx.x; column < c.columns; column += 4 * 256) {
        float4 weight[EXPERTS_AT_ONCE];
#pragma unroll
        for (u32 e = 0; e < EXPERTS_AT_ONCE; e++)
            weight[e] = *(const float4*)(gate + (size_t)least(first + e, c.experts - 1) * c.stride + column);
#pragma unroll
        for (u32 r = 0; r < R; r++) {
            const float* from = x + (size_t)least(first_row + r, c.rows - 1) * c.columns + column;
            float4 v;
            if (wide) v = *(const float4*)from;
            else {
                v.x = from[0];
                v.y = column + 1 < c.columns ? from[1] : 0.0f;
                v.z = column + 2 < c.columns ? from[2] : 0.0f;
                v.w = column + 3 < c.columns ? from[3] : 0.0f;
            }
#pragma unroll
            for (u32 e = 0; e < EXPERTS_AT_ONCE; e++) {
                sum[e][r] = fmaf(weight[e].x, v.x, sum[e][r]);
                sum[e][r] = fmaf(weight[e].y, v.y, sum[e][r]);
                sum[e][r] = fmaf(weight[e].z, v.z, sum[e][r]);
                sum[e][r] = fmaf(weight[e].w, v.w, sum[e][r]);
            }
        }
    }
#pragma unroll
    for (u32 e = 0; e < EXPERTS_AT_ONCE; e++)
#pragma unroll
        for (u32 r = 0; r < R; r++) {
            const float of_warp = warp_sum(sum[e][r]);
            if (threadIdx.x % LANES == 0) sums[threadIdx.x / LANES][e][r] = of_warp;
        }
    __syncthreads();
    if (threadIdx.x >= EXPERTS_AT_ONCE * R) return;
    const u32 e = threadIdx.x / R, r = threadIdx.x % R;
    if (first + e >= c.experts || first_row + r >= c.rows) return;
    float total = 0.0f;
    for (u32 warp = 0; warp < 8; warp++) total += sums[warp][e][r];
    logits[(size_t)(first_row + r) * c.experts + first + e] = total;
}

#define DEFINE_LOGITS(R)                                                                                       \
    KERNEL(256, router_logits_##R)                                                                             \
    (const float* __restrict__ gate, const float* x, float* logits, RouterLogitsConstants c) {                 \
        router_logits<R>(gate, x, logits, c);                                                                  \
    }
DEFINE_LOGITS(1)
DEFINE_LOGITS(8)

// For each row the `chosen` best experts by sigmoid(logit) + bias, best first, with their weights: the sigmoid, if
// `normalized` divided by the sum of the chosen + 1e-20, times `factor`. With several groups only experts of the
// `chosen_groups` groups whose two best are the largest together. Where a logit or a bias is not finite, weights are NaN.
// Groups: x rows. logits [n, experts], bias [experts], ids and weights [n, chosen]; of one row groups as group_rows gives them.
KERNEL(256, choose)
(const float* logits, const float* __restrict__ bias, u32* ids, float* weights, u32* groups, ChooseConstants c) {
    __shared__ float scores[MOST_EXPERTS];
    __shared__ float biased[MOST_EXPERTS];
    // of groups, then of the chosen
    __shared__ float best[MOST_EXPERTS];
    __shared__ u32 best_at[MOST_EXPERTS];
    __shared__ u32 not_finite;
    const u32 thread = threadIdx.x;
    if (thread == 0) not_finite = 0;
    begin();
    __syncthreads();
    for (u32 e = thread; e < c.experts; e += 256) {
        const float logit = logits[(size_t)blockIdx.x * c.experts + e];
        scores[e] = sigmoid(logit);
        biased[e] = scores[e] + bias[e];
        // x − x is 0 for finite x alone
        if (logit - logit != 0.0f || bias[e] - bias[e] != 0.0f) not_finite = 1;
    }
    __syncthreads();

    if (c.groups > 1) {
        const u32 size = c.experts / c.groups;
        // the two best of each group; a group of one counts by its only one
        for (u32 group = thread; group < c.groups; group += 256) {
            float first = -INFINITE, second = -INFINITE;
            for (u32 e = group * size; e < (group + 1) * size; e++) {
                const float value = biased[e];
                if (value > first) {
                    second = first;
                    first = value;
                } else if (value > second) {
                    second = value;
                }
            }
            // a group is a number of `best`, its place in the order a number of `best_at`
            if (group < 256) best[group] = size > 1 ? first + second : first;
        }
        __syncthreads();
        for (u32 group = thread; group < c.groups; group += 256) {
            u32 rank = 0;
            for (u32 other = 0; other < c.groups; other++) rank += before(best[other], other, best[group], group);
            best_at[group] = rank;
        }
        __syncthreads();
        for (u32 e = thread; e < c.experts; e += 256)
            if (best_at[e / size] >= c.chosen_groups) biased[e] = -INFINITE;
        __syncthreads();
    }

    // An expert's place is how many come before it.
    for (u32 e = thread; e < c.experts; e += 256) {
        const float own = biased[e];
        u32 place = 0;
#pragma unroll 8
        for (u32 other = 0; other < c.experts; other++) place += before(biased[other], other, own, e);
        if (place >= c.chosen) continue;
        best[place] = scores[e];
        best_at[place] = e;
        ids[blockIdx.x * c.chosen + place] = e;
    }
    __syncthreads();
    float sum = 0.0f;
    for (u32 number = 0; number < c.chosen; number++) sum += best[number];
    const float divisor = c.normalized ? sum + 1e-20f : 1.0f;
    for (u32 number = thread; number < c.chosen; number += 256)
        weights[blockIdx.x * c.chosen + number] = not_finite ? NOT_A_NUMBER : best[number] / divisor * c.factor;
    if (gridDim.x > 1) return;
    // The slots of one row by expert, as group_rows gives them: each expert has one.
    for (u32 number = thread; number < c.chosen; number += 256) {
        u32 place = 0;
        for (u32 other = 0; other < c.chosen; other++) place += best_at[other] < best_at[number];
        groups[1 + place] = best_at[number];
        groups[1 + c.chosen + place] = place;
        groups[2 + 2 * c.chosen + place] = number;
    }
    if (thread == 0) {
        groups[0] = c.chosen;
        groups[1 + 2 * c.chosen] = c.chosen;
    }
}

struct GroupRowsConstants {
    u32 slots;    // n · chosen
    u32 experts;
    u32 most;     // the lesser of both
};

// Slots by expert, for experts.cu. One group of threads.
//
// groups: how many experts were chosen, their numbers [most], where the slots of each begin [most + 1], slots [n · chosen],
// ascending for each expert.
KERNEL(256, group_rows)(const u32* ids, u32* groups, GroupRowsConstants c) {
    __shared__ u32 counts[MOST_EXPERTS];
    __shared__ u32 begins[MOST_EXPERTS];
    __shared__ uint2 of_warps[8];
    begin();
    const u32 thread = threadIdx.x, lane = thread % LANES, warp = thread / LANES;
    for (u32 e = thread; e < MOST_EXPERTS; e += 256) counts[e] = 0;
    __syncthreads();
    for (u32 slot = thread; slot < c.slots; slot += 256) atomicAdd(&counts[ids[slot]], 1u);
    __syncthreads();
    // Slots, and experts that have some, of this thread's four experts; then of all threads up to this one.
    u32 slots_of = 0, some = 0;
    for (u32 e = 4 * thread; e < 4 * thread + 4; e++) {
        slots_of += counts[e];
        some += counts[e] > 0;
    }
    u32 slots_before = slots_of, some_before = some;
    for (u32 by = 1; by < LANES; by *= 2) {
        const u32 other_slots = __shfl_up_sync(0xffffffffu, slots_before, by);
        const u32 other_some = __shfl_up_sync(0xffffffffu, some_before, by);
        if (lane >= by) slots_before += other_slots, some_before += other_some;
    }
    if (lane == LANES - 1) of_warps[warp] = {slots_before, some_before};
    __syncthreads();
    slots_before -= slots_of, some_before -= some;
    for (u32 w = 0; w < warp; w++) slots_before += of_warps[w].x, some_before += of_warps[w].y;
    u32* offsets = groups + 1 + c.most;
    for (u32 e = 4 * thread; e < 4 * thread + 4; e++) {
        begins[e] = slots_before;
        if (counts[e] == 0) continue;
        groups[1 + some_before] = e;
        offsets[some_before] = slots_before;
        slots_before += counts[e];
        some_before++;
    }
    // what the last thread has come to is all
    if (thread == 255) {
        offsets[some_before] = slots_before;
        groups[0] = some_before;
    }
    __syncthreads();
    u32* slots = groups + 2 + 2 * c.most;
    for (u32 e = thread; e < c.experts; e += 256) {
        if (counts[e] == 0) continue;
        u32 to = begins[e];
        for (u32 slot = 0; slot < c.slots; slot++)
            if (ids[slot] == e) slots[to++] = slot;
    }
}

struct CombineConstants {
    u32 chosen, width;
};

// Σ_j weight[r, j] · y[r · chosen + j], in the order of the choice.
__device__ __forceinline__ float combined(const float* y, const float* weights, u32 row, u32 column, CombineConstants c) {
    float sum = 0.0f;
#pragma unroll 8
    for (u32 j = 0; j < c.chosen; j++) {
        const size_t slot = (size_t)row * c.chosen + j;
        sum = fmaf(weights[slot], y[slot * c.width + column], sum);
    }
    return sum;
}

// out[r] = that sum. Groups: x tiles of 256 columns, y rows.
KERNEL(256, combine)(const float* y, const float* weights, float* out, CombineConstants c) {
    begin();
    const u32 column = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (column < c.width) out[(size_t)row * c.width + column] = combined(y, weights, row, column, c);
}

// x[r] + (that sum + shared[r]), into x. Groups: x tiles of 256 columns, y rows.
KERNEL(256, combine_onto)(const float* y, const float* weights, const float* shared, float* x, CombineConstants c) {
    begin();
    const u32 column = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (column >= c.width) return;
    const size_t at = (size_t)row * c.width + column;
    x[at] += combined(y, weights, row, column, c) + shared[at];
}
