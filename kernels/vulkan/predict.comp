// What logits say after each row: kernels/cuda/predict.cu.
#version 450
#include "common.glsl"

struct Best {
    float value, runner_up;
    uint at;
};

// The best of both: of equals the lower id.
Best better(Best a, Best b) {
    const bool wins = b.value > a.value || (b.value == a.value && b.at < a.at);
    return Best(wins ? b.value : a.value, max(wins ? b.runner_up : a.runner_up, wins ? a.value : b.value), wins ? b.at : a.at);
}

#ifdef KERNEL_PREDICT
const uint SLICE = 4096;

READS(0, Logits, float logits);
WRITES(1, Partial, uint partial);

CONSTANTS {
    uint vocabulary, slices;
} c;

shared Best best[256];
shared float sums[256];

void main() {
    const uint thread = THREAD, first = gl_WorkGroupID.x * SLICE, end = min(first + SLICE, c.vocabulary);
    const uint row = gl_WorkGroupID.y * c.vocabulary;
    Best own = Best(-INFINITE, -INFINITE, first);
    for (uint id = first + thread; id < end; id += 256) {
        const float logit = logits[row + id];
        if (logit > own.value) own = Best(logit, own.value, id);
        else if (logit > own.runner_up) own.runner_up = logit;
    }
    best[thread] = own;
    barrier();
    for (uint apart = 128; apart > 0; apart /= 2) {
        if (thread < apart) best[thread] = better(best[thread], best[thread + apart]);
        barrier();
    }
    const Best found = best[0];

    const float above = found.value == -INFINITE ? 0.0 : found.value;
    precise float sum = 0.0, lost = 0.0;
    for (uint id = first + thread; id < end; id += 256) {
        precise const float term = exponential(logits[row + id] - above) - lost;
        precise const float next = sum + term;
        lost = next - sum - term;
        sum = next;
    }
    sums[thread] = sum;
    barrier();
    for (uint apart = 128; apart > 0; apart /= 2) {
        if (thread < apart) sums[thread] += sums[thread + apart];
        barrier();
    }
    if (thread == 0) {
        const uint to = 4 * (gl_WorkGroupID.y * c.slices + gl_WorkGroupID.x);
        partial[to] = found.at;
        partial[to + 1] = floatBitsToUint(found.value);
        partial[to + 2] = floatBitsToUint(found.runner_up);
        partial[to + 3] = floatBitsToUint(sums[0]);
    }
}
#endif

#ifdef KERNEL_PREDICT_MERGE
READS(0, Logits, uint logits);
READS(1, Partial, uint partial);
READS(2, Asked, uint asked);
WRITES(3, Out, uint values_out);

CONSTANTS {
    uint vocabulary, slices;
} c;

float of(uint at) { return uintBitsToFloat(partial[at]); }

void main() {
    if (THREAD != 0) return;
    const uint row = gl_WorkGroupID.x, from = 4 * row * c.slices;
    Best found = Best(-INFINITE, -INFINITE, 0);
    for (uint slice = 0; slice < c.slices; slice++) {
        const uint at = from + 4 * slice;
        found = better(found, Best(of(at + 1), of(at + 2), partial[at]));
    }
    float sum = 0.0;
    for (uint slice = 0; slice < c.slices; slice++) {
        const uint at = from + 4 * slice;
        sum = fma(exponential(of(at + 1) - found.value), of(at + 3), sum);
    }
    const uint to = 5 * row;
    values_out[to] = found.at;
    values_out[to + 1] = floatBitsToUint(found.value);
    values_out[to + 2] = floatBitsToUint(found.runner_up);
    values_out[to + 3] = floatBitsToUint(sum);
    values_out[to + 4] = logits[row * c.vocabulary + asked[row]];
}
#endif
