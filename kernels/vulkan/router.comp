// The choice of experts, and what becomes of it: kernels/cuda/router.cu.
#version 450
#include "common.glsl"

const uint MOST_EXPERTS = 1024;
const uint NONE = 0xffffffffu;

#ifdef KERNEL_CHOOSE
READS(0, Logits, float logits);
READS(1, Bias, float bias);
WRITES(2, Ids, uint ids);
WRITES(3, ChoiceWeights, float weights);

CONSTANTS {
    uint experts, chosen;
    uint groups, chosen_groups;
    uint normalized;
    float factor;
} c;

shared float scores[MOST_EXPERTS];
shared float biased[MOST_EXPERTS];
shared uint taken[MOST_EXPERTS];
shared float best[256];
shared uint best_at[256];
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
        taken[e] = 0;
        if (!is_finite(logit) || !is_finite(bias[e])) atomicOr(not_finite, 1u);
    }
    barrier();
    if (c.groups > 1) choose_groups(thread);

    float sum = 0.0;
    for (uint number = 0; number < c.chosen; number++) {
        uint at = NONE;
        float value = -INFINITE;
        for (uint e = thread; e < c.experts; e += 256)
            if (taken[e] == 0 && before(biased[e], e, value, at)) {
                value = biased[e];
                at = e;
            }
        best[thread] = value;
        best_at[thread] = at;
        barrier();
        for (uint apart = 128; apart > 0; apart /= 2) {
            if (thread < apart && before(best[thread + apart], best_at[thread + apart], best[thread], best_at[thread])) {
                best[thread] = best[thread + apart];
                best_at[thread] = best_at[thread + apart];
            }
            barrier();
        }
        const uint expert = best_at[0];
        if (thread == 0) {
            taken[expert] = 1;
            ids[row * c.chosen + number] = expert;
        }
        // a thread that gives a weight below keeps its score
        sum += scores[expert];
        if (thread == number % 256) weights[row * c.chosen + number] = scores[expert];
        barrier();
    }
    const float divisor = c.normalized != 0 ? sum + 1e-20 : 1.0;
    for (uint number = thread; number < c.chosen; number += 256) {
        const uint at = row * c.chosen + number;
        weights[at] = not_finite != 0 ? NOT_A_NUMBER : weights[at] / divisor * c.factor;
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

#ifdef KERNEL_COMBINE
READS(0, Y, float y);
READS(1, ChoiceWeights, float weights);
WRITES(2, Out, float values_out);

CONSTANTS {
    uint chosen, width;
} c;

void main() {
    const uint column = gl_WorkGroupID.x * 256 + THREAD, row = gl_WorkGroupID.y;
    if (column >= c.width) return;
    float sum = 0.0;
    for (uint j = 0; j < c.chosen; j++) {
        const uint slot = row * c.chosen + j;
        sum = fma(weights[slot], y[slot * c.width + column], sum);
    }
    values_out[row * c.width + column] = sum;
}
#endif
