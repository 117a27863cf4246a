// The choice of experts, and what becomes of it: kernels/cuda/router.cu.
#version 450
#include "common.glsl"

const uint MOST_EXPERTS = 1024;
const uint NONE = 0xffffffffu;

#ifdef KERNEL_ROUTER_LOGITS
#include "sums.glsl"

// Experts of a group, which takes tiles of ROWS rows.
const uint AT_A_TIME = 2;

READS(0, Gate, float gate);
READS(1, X, float x);
WRITES(2, Logits, float logits);

CONSTANTS {
    uint experts, columns;
    uint stride;
    uint rows;
} c;

shared float warps_of[WARPS][AT_A_TIME * ROWS];

void main() {
    const uint first = gl_WorkGroupID.x * AT_A_TIME, first_row = gl_WorkGroupID.y * ROWS;
    float sum[AT_A_TIME * ROWS];
    [[unroll]] for (uint i = 0; i < AT_A_TIME * ROWS; i++) sum[i] = 0.0;
    for (uint column = 4 * THREAD; column < c.columns; column += 4 * 256) {
        const uint four = min(4, c.columns - column);
        for (uint k = 0; k < four; k++) {
            float weight[AT_A_TIME];
            [[unroll]] for (uint e = 0; e < AT_A_TIME; e++)
                weight[e] = gate[min(first + e, c.experts - 1) * c.stride + column + k];
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                const float value = x[min(first_row + r, c.rows - 1) * c.columns + column + k];
                [[unroll]] for (uint e = 0; e < AT_A_TIME; e++)
                    sum[e * ROWS + r] = fma(weight[e], value, sum[e * ROWS + r]);
            }
        }
    }
    WARP_SUMS(sum, AT_A_TIME * ROWS);
    if (THREAD % LANES == 0)
        [[unroll]] for (uint i = 0; i < AT_A_TIME * ROWS; i++) warps_of[THREAD / LANES][i] = sum[i];
    barrier();
    if (THREAD >= AT_A_TIME * ROWS) return;
    const uint e = THREAD / ROWS, r = THREAD % ROWS;
    if (first + e >= c.experts || first_row + r >= c.rows) return;
    float total = 0.0;
    for (uint warp = 0; warp < WARPS; warp++) total += warps_of[warp][THREAD];
    logits[(first_row + r) * c.experts + first + e] = total;
}
#endif

#ifdef KERNEL_CHOOSE
READS(0, Logits, float logits);
READS(1, Bias, float bias);
WRITES(2, Ids, uint ids);
WRITES(3, ChoiceWeights, float weights);
WRITES(4, Groups, uint groups_out);

CONSTANTS {
    uint experts, chosen;
    uint groups, chosen_groups;
    uint normalized;
    float factor;
} c;

shared float scores[MOST_EXPERTS];
shared float biased[MOST_EXPERTS];
shared float best[MOST_EXPERTS];
shared uint best_at[MOST_EXPERTS];
shared uint not_finite;

// Whether a is before b: the larger value, of equals the lower index. NaN is the least.
bool before(float a, uint a_at, float b, uint b_at) {
    const float x = is_nan(a) ? -INFINITE : a, y = is_nan(b) ? -INFINITE : b;
    return b_at == NONE || (a_at != NONE && (x > y || (x == y && a_at < b_at)));
}

void choose_groups(uint thread) {
    const uint size = c.experts / c.groups;
    for (uint group = thread; group < c.groups; group += 256) {
        float first = -INFINITE, second = -INFINITE;
        for (uint e = group * size; e < (group + 1) * size; e++) {
            const float value = biased[e];
            if (value > first) {
                second = first;
                first = value;
            } else if (value > second) {
                second = value;
            }
        }
        if (group < 256) best[group] = size > 1 ? first + second : first;
    }
    barrier();
    for (uint group = thread; group < c.groups; group += 256) {
        uint rank = 0;
        for (uint other = 0; other < c.groups; other++) rank += uint(before(best[other], other, best[group], group));
        best_at[group] = rank;
    }
    barrier();
    for (uint e = thread; e < c.experts; e += 256)
        if (best_at[e / size] >= c.chosen_groups) biased[e] = -INFINITE;
    barrier();
}

void main() {
    const uint thread = THREAD, row = gl_WorkGroupID.x;
    if (thread == 0) not_finite = 0;
    barrier();
    for (uint e = thread; e < c.experts; e += 256) {
        const float logit = logits[row * c.experts + e];
        scores[e] = sigmoid(logit);
        biased[e] = scores[e] + bias[e];
        if (!is_finite(logit) || !is_finite(bias[e])) atomicOr(not_finite, 1u);
    }
    barrier();
    if (c.groups > 1) choose_groups(thread);

    // An expert's place is how many come before it.
    for (uint e = thread; e < c.experts; e += 256) {
        const float own = biased[e];
        uint place = 0;
        for (uint other = 0; other < c.experts; other++) place += uint(before(biased[other], other, own, e));
        if (place >= c.chosen) continue;
        best[place] = scores[e];
        best_at[place] = e;
        ids[row * c.chosen + place] = e;
    }
    barrier();
    float sum = 0.0;
    for (uint number = 0; number < c.chosen; number++) sum += best[number];
    const float divisor = c.normalized != 0 ? sum + 1e-20 : 1.0;
    for (uint number = thread; number < c.chosen; number += 256)
        weights[row * c.chosen + number] = not_finite != 0 ? NOT_A_NUMBER : best[number] / divisor * c.factor;
    if (gl_NumWorkGroups.x > 1) return;
    for (uint number = thread; number < c.chosen; number += 256) {
        uint place = 0;
        for (uint other = 0; other < c.chosen; other++) place += uint(best_at[other] < best_at[number]);
        groups_out[1 + place] = best_at[number];
        groups_out[1 + c.chosen + place] = place;
        groups_out[2 + 2 * c.chosen + place] = number;
    }
    if (thread == 0) {
        groups_out[0] = c.chosen;
        groups_out[1 + 2 * c.chosen] = c.chosen;
    }
}
#endif

#ifdef KERNEL_GROUP_ROWS
READS(0, Ids, uint ids);
WRITES(1, Groups, uint groups);

CONSTANTS {
    uint slots;
    uint experts;
    uint most;
} c;

shared uint counts[MOST_EXPERTS];
shared uint numbers[MOST_EXPERTS];

void main() {
    for (uint e = THREAD; e < c.experts; e += 256) {
        uint count = 0;
        for (uint slot = 0; slot < c.slots; slot++) count += uint(ids[slot] == e);
        counts[e] = count;
    }
    barrier();
    const uint offsets = 1 + c.most;
    if (THREAD == 0) {
        uint number = 0, offset = 0;
        for (uint e = 0; e < c.experts; e++) {
            if (counts[e] == 0) continue;
            groups[1 + number] = e;
            groups[offsets + number] = offset;
            numbers[e] = offset;
            offset += counts[e];
            number++;
        }
        groups[offsets + number] = offset;
        groups[0] = number;
    }
    barrier();
    const uint slots = 2 + 2 * c.most;
    for (uint e = THREAD; e < c.experts; e += 256) {
        if (counts[e] == 0) continue;
        uint to = slots + numbers[e];
        for (uint slot = 0; slot < c.slots; slot++)
            if (ids[slot] == e) groups[to++] = slot;
    }
}
#endif

#if defined(KERNEL_COMBINE) || defined(KERNEL_COMBINE_ONTO)
READS(0, Y, float y);
READS(1, ChoiceWeights, float weights);

CONSTANTS {
    uint chosen, width;
} c;

float combined(uint row, uint column) {
    float sum = 0.0;
    for (uint j = 0; j < c.chosen; j++) {
        const uint slot = row * c.chosen + j;
        sum = fma(weights[slot], y[slot * c.width + column], sum);
    }
    return sum;
}
#endif

#ifdef KERNEL_COMBINE
WRITES(2, Out, float values_out);

void main() {
    const uint column = gl_WorkGroupID.x * 256 + THREAD, row = gl_WorkGroupID.y;
    if (column < c.width) values_out[row * c.width + column] = combined(row, column);
}
#endif

#ifdef KERNEL_COMBINE_ONTO
READS(2, SharedExpert, float of_shared);
WRITES(3, X, float x);

void main() {
    const uint column = gl_WorkGroupID.x * 256 + THREAD, row = gl_WorkGroupID.y;
    if (column >= c.width) return;
    const uint at = row * c.width + column;
    precise const float sum = combined(row, column) + of_shared[at];
    x[at] += sum;
}
#endif
