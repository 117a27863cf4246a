// The choice of experts, and what becomes of it.
//
// Reference: src/backend/reference/moe.rs, choose and experts.
//
// Versions: 1, a group a row; a thread an expert (this one).
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

// For each row the `chosen` best experts by sigmoid(logit) + bias, best first, with their weights: the sigmoid, if
// `normalized` divided by the sum of the chosen + 1e-20, times `factor`. With several groups only experts of the
// `chosen_groups` groups whose two best are the largest together. Where a logit or a bias is not finite, weights are NaN.
// Groups: x rows. logits [n, experts], bias [experts], ids and weights [n, chosen].
KERNEL(256, choose)
(const float* __restrict__ logits, const float* __restrict__ bias, u32* __restrict__ ids, float* __restrict__ weights,
 ChooseConstants c) {
    __shared__ float scores[MOST_EXPERTS];
    __shared__ float biased[MOST_EXPERTS];  // those that are taken are marked in `taken`
    __shared__ u32 taken[MOST_EXPERTS];
    __shared__ float best[256];
    __shared__ u32 best_at[256];
    __shared__ u32 not_finite;
    const u32 thread = threadIdx.x;
    if (thread == 0) not_finite = 0;
    __syncthreads();
    for (u32 e = thread; e < c.experts; e += 256) {
        const float logit = logits[(size_t)blockIdx.x * c.experts + e];
        scores[e] = sigmoid(logit);
        biased[e] = scores[e] + bias[e];
        taken[e] = 0;
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

    float sum = 0.0f;
    for (u32 number = 0; number < c.chosen; number++) {
        u32 at = NONE;
        float value = -INFINITE;
        for (u32 e = thread; e < c.experts; e += 256)
            if (!taken[e] && before(biased[e], e, value, at)) {
                value = biased[e];
                at = e;
            }
        best[thread] = value;
        best_at[thread] = at;
        __syncthreads();
        for (u32 apart = 128; apart > 0; apart /= 2) {
            if (thread < apart && before(best[thread + apart], best_at[thread + apart], best[thread], best_at[thread])) {
                best[thread] = best[thread + apart];
                best_at[thread] = best_at[thread + apart];
            }
            __syncthreads();
        }
        const u32 expert = best_at[0];
        if (thread == 0) {
            taken[expert] = 1;
            ids[blockIdx.x * c.chosen + number] = expert;
        }
        sum += scores[expert];
        __syncthreads();
    }
    // every thread has the same sum
    const float divisor = c.normalized ? sum + 1e-20f : 1.0f;
    for (u32 number = thread; number < c.chosen; number += 256) {
        const u32 at = blockIdx.x * c.chosen + number;
        weights[at] = not_finite ? NOT_A_NUMBER : scores[ids[at]] / divisor * c.factor;
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
KERNEL(256, group_rows)(const u32* __restrict__ ids, u32* __restrict__ groups, GroupRowsConstants c) {
    __shared__ u32 counts[MOST_EXPERTS];
    __shared__ u32 numbers[MOST_EXPERTS];
    for (u32 e = threadIdx.x; e < c.experts; e += 256) {
        u32 count = 0;
        for (u32 slot = 0; slot < c.slots; slot++) count += ids[slot] == e;
        counts[e] = count;
    }
    __syncthreads();
    u32* offsets = groups + 1 + c.most;
    if (threadIdx.x == 0) {
        u32 number = 0, offset = 0;
        for (u32 e = 0; e < c.experts; e++) {
            if (counts[e] == 0) continue;
            groups[1 + number] = e;
            offsets[number] = offset;
            offset += counts[e];
            // where its slots begin
            numbers[e] = offset - counts[e];
            number++;
        }
        offsets[number] = offset;
        groups[0] = number;
    }
    __syncthreads();
    u32* slots = groups + 2 + 2 * c.most;
    for (u32 e = threadIdx.x; e < c.experts; e += 256) {
        if (counts[e] == 0) continue;
        u32 to = numbers[e];
        for (u32 slot = 0; slot < c.slots; slot++)
            if (ids[slot] == e) slots[to++] = slot;
    }
}

struct CombineConstants {
    u32 chosen, width;
};

// out[r] = Σ_j weight[r, j] · y[r · chosen + j], in the order of the choice. Groups: x tiles of 256 columns, y rows.
KERNEL(256, combine)
(const float* __restrict__ y, const float* __restrict__ weights, float* __restrict__ out, CombineConstants c) {
    const u32 column = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (column >= c.width) return;
    float sum = 0.0f;
    for (u32 j = 0; j < c.chosen; j++) {
        const size_t slot = (size_t)row * c.chosen + j;
        sum = fmaf(weights[slot], y[slot * c.width + column], sum);
    }
    out[(size_t)row * c.width + column] = sum;
}
