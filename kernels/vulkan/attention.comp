// Attention over compressed keys and values: kernels/cuda/attention.cu.
#version 450
#include "common.glsl"

const uint SPLIT = 64;
const uint WHOLE = 0xffffffffu;

#ifdef KERNEL_ATTEND
#include "sums.glsl"

const uint HEADS = 8;
const uint ENTRIES = 4;

READS(0, Query, float query);
READS(1, Cache, float cache);
READS(2, Lists, uint lists);
WRITES(3, Partial, float partial);

CONSTANTS {
    uint first_row;
    uint heads, width, latent;
    uint splits;
    float scale;
} c;

shared float weights[HEADS][SPLIT];

void main() {
    const uint row = c.first_row + gl_WorkGroupID.z;
    const uint begin = lists[2 * row], count = lists[2 * row + 1];
    const uint first = gl_WorkGroupID.x * SPLIT;
    if (first >= count) return;
    const uint entries = min(count - first, SPLIT);
    const uint first_head = gl_WorkGroupID.y * HEADS, warp = THREAD / LANES, lane = THREAD % LANES;
    uint q[HEADS];
    [[unroll]] for (uint h = 0; h < HEADS; h++) q[h] = (row * c.heads + min(first_head + h, c.heads - 1)) * c.width;

    // scores, four entries a warp at a time; all warps go on as long as one has some
    for (uint tile = 0; tile < entries; tile += WARPS * ENTRIES) {
        const uint entry = tile + warp * ENTRIES;
        uint keys[ENTRIES];
        [[unroll]] for (uint e = 0; e < ENTRIES; e++) {
            const uint at = first + min(entry + e, entries - 1);
            keys[e] = (begin == WHOLE ? at : lists[begin + at]) * c.width;
        }
        float sum[HEADS * ENTRIES];
        [[unroll]] for (uint s = 0; s < HEADS * ENTRIES; s++) sum[s] = 0.0;
        for (uint d = lane; d < c.width; d += LANES) {
            float key[ENTRIES];
            [[unroll]] for (uint e = 0; e < ENTRIES; e++) key[e] = cache[keys[e] + d];
            [[unroll]] for (uint h = 0; h < HEADS; h++) {
                const float value = query[q[h] + d];
                [[unroll]] for (uint e = 0; e < ENTRIES; e++)
                    sum[h * ENTRIES + e] = fma(value, key[e], sum[h * ENTRIES + e]);
            }
        }
        WARP_SUMS(sum, HEADS * ENTRIES);
        if (lane == 0) {
            [[unroll]] for (uint h = 0; h < HEADS; h++)
                [[unroll]] for (uint e = 0; e < ENTRIES; e++)
                    if (entry + e < entries) weights[h][entry + e] = sum[h * ENTRIES + e] * c.scale;
        }
    }
    barrier();

    // softmax of the split, a warp a head
    float largest = -INFINITE;
    for (uint entry = lane; entry < entries; entry += LANES) largest = max(largest, weights[warp][entry]);
    largest = warp_max(largest);
    float total = 0.0;
    for (uint entry = lane; entry < entries; entry += LANES) {
        const float weight = exponential(weights[warp][entry] - largest);
        weights[warp][entry] = weight;
        total += weight;
    }
    total = warp_sum(total);
    const uint stride = c.latent + 2;
    const uint out_at = (gl_WorkGroupID.z * c.heads * c.splits + gl_WorkGroupID.x) * stride;
    if (lane == 0 && first_head + warp < c.heads) {
        const uint to = out_at + (first_head + warp) * c.splits * stride + c.latent;
        partial[to] = largest;
        partial[to + 1] = total;
    }
    barrier();

    // Σ weight · latent, a thread a column
    for (uint column = THREAD; column < c.latent; column += 256) {
        float sum[HEADS];
        [[unroll]] for (uint h = 0; h < HEADS; h++) sum[h] = 0.0;
        for (uint entry = 0; entry < entries; entry++) {
            const uint at = first + entry;
            const float value = cache[(begin == WHOLE ? at : lists[begin + at]) * c.width + column];
            [[unroll]] for (uint h = 0; h < HEADS; h++) sum[h] = fma(weights[h][entry], value, sum[h]);
        }
        [[unroll]] for (uint h = 0; h < HEADS; h++)
            if (first_head + h < c.heads) partial[out_at + (first_head + h) * c.splits * stride + column] = sum[h];
    }
}
#endif

#ifdef KERNEL_MERGE
READS(0, Partial, float partial);
READS(1, Lists, uint lists);
WRITES(2, Context, float context);

CONSTANTS {
    uint first_row;
    uint heads, latent, splits;
} c;

void main() {
    const uint column = gl_WorkGroupID.x * 256 + THREAD;
    if (column >= c.latent) return;
    const uint splits = parts(lists[2 * (c.first_row + gl_WorkGroupID.z) + 1], SPLIT);
    const uint stride = c.latent + 2, at = gl_WorkGroupID.z * c.heads + gl_WorkGroupID.y;
    const uint from = at * c.splits * stride;
    float largest = -INFINITE;
    for (uint split = 0; split < splits; split++) largest = max(largest, partial[from + split * stride + c.latent]);
    float sum = 0.0, total = 0.0;
    for (uint split = 0; split < splits; split++) {
        const uint part = from + split * stride;
        const float weight = exponential(partial[part + c.latent] - largest);
        total = fma(weight, partial[part + c.latent + 1], total);
        sum = fma(weight, partial[part + column], sum);
    }
    context[at * c.latent + column] = sum / total;
}
#endif
