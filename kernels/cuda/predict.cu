// What logits [n, V] say after each row: the best id, of equals the lowest; its logit; the best of the others; Σ e^(logit −
// best); the logit of the id that was asked for (any, if none was).
//
// Slices of the logits by themselves, then the slices of a row in their order. Sums are compensated within a slice (Kahan: Further
// remarks on reducing truncation errors, 1965), then added as a tree. Reference: src/backend/reference/linear.rs, prediction.
//
// Versions: 1, a group a row, twice through its logits. 2, a group a slice of a row (this one).
#include "common.cuh"

#define SLICE 4096u

struct PredictConstants {
    u32 vocabulary, slices;
};

struct Best {
    float value, runner_up;
    u32 at;
};

// The best of both: of equals the lower id.
__device__ __forceinline__ Best better(Best a, Best b) {
    const bool wins = b.value > a.value || (b.value == a.value && b.at < a.at);
    const Best& first = wins ? b : a;
    const Best& other = wins ? a : b;
    return {first.value, fmaxf(first.runner_up, other.value), first.at};
}

// Of each slice: id by its bits, best, runner-up, Σ e^(logit − best). Groups: x slices of 4096 ids, y rows. partial [n, slices, 4].
KERNEL(256, predict)(const float* logits, float* partial, PredictConstants c) {
    __shared__ Best best[256];
    __shared__ float sums[256];
    begin();
    const u32 thread = threadIdx.x, first = blockIdx.x * SLICE, end = least(first + SLICE, c.vocabulary);
    const float* row = logits + (size_t)blockIdx.y * c.vocabulary;
    Best own = {-INFINITE, -INFINITE, first};
    for (u32 id = first + thread; id < end; id += 256) {
        const float logit = row[id];
        if (logit > own.value) own = {logit, own.value, id};
        else if (logit > own.runner_up) own.runner_up = logit;
    }
    best[thread] = own;
    __syncthreads();
    for (u32 apart = 128; apart > 0; apart /= 2) {
        if (thread < apart) best[thread] = better(best[thread], best[thread + apart]);
        __syncthreads();
    }
    const Best found = best[0];

    // Logits that are all −∞ add nothing, those that are no numbers are seen.
    const float above = found.value == -INFINITE ? 0.0f : found.value;
    float sum = 0.0f, lost = 0.0f;
    for (u32 id = first + thread; id < end; id += 256) {
        const float term = exponential(row[id] - above) - lost;
        const float next = sum + term;
        lost = next - sum - term;
        sum = next;
    }
    sums[thread] = sum;
    __syncthreads();
    for (u32 apart = 128; apart > 0; apart /= 2) {
        if (thread < apart) sums[thread] += sums[thread + apart];
        __syncthreads();
    }
    if (thread == 0) {
        float* to = partial + 4 * ((size_t)blockIdx.y * c.slices + blockIdx.x);
        to[0] = __uint_as_float(found.at);
        to[1] = found.value;
        to[2] = found.runner_up;
        to[3] = sums[0];
    }
}

// Of each row: id by its bits, best, runner-up, Σ e^(logit − best), the asked id's logit. Groups: x rows. out [n, 5].
KERNEL(256, predict_merge)
(const float* logits, const float* partial, const u32* asked, float* out, PredictConstants c) {
    begin();
    if (threadIdx.x != 0) return;
    const float* from = partial + 4 * (size_t)blockIdx.x * c.slices;
    Best found = {-INFINITE, -INFINITE, 0};
    for (u32 slice = 0; slice < c.slices; slice++) {
        const float* of = from + 4 * slice;
        found = better(found, {of[1], of[2], __float_as_uint(of[0])});
    }
    float sum = 0.0f;
    for (u32 slice = 0; slice < c.slices; slice++) sum = fmaf(exponential(from[4 * slice + 1] - found.value), from[4 * slice + 3], sum);
    float* to = out + 5 * (size_t)blockIdx.x;
    to[0] = __uint_as_float(found.at);
    to[1] = found.value;
    to[2] = found.runner_up;
    to[3] = sum;
    to[4] = logits[(size_t)blockIdx.x * c.vocabulary + asked[blockIdx.x]];
}
