// Operations on each row by itself: kernels/cuda/pointwise.cu.
#version 450
#include "common.glsl"

#if defined(KERNEL_RMS_NORM) || defined(KERNEL_ADD_NORM) || defined(KERNEL_LAYER_NORM) || defined(KERNEL_KEEP)
#include "sums.glsl"

shared float warps_of[WARPS];

// Σ over the 256 threads of a group, in every thread: each warp, then the warps in order.
float group_sum(float value) {
    value = warp_sum(value);
    barrier();
    if (THREAD % LANES == 0) warps_of[THREAD / LANES] = value;
    barrier();
    float sum = 0.0;
    for (uint warp = 0; warp < WARPS; warp++) sum += warps_of[warp];
    return sum;
}

// 1 / √(sum / width + eps), or no number where squares are more than an f32 holds.
float norm_factor(float sum, uint width, float eps) {
    const float mean = sum / float(width) + eps;
    return is_finite(mean) ? 1.0 / sqrt(mean) : NOT_A_NUMBER;
}
#endif

#ifdef KERNEL_RMS_NORM
READS(0, X, float x);
READS(1, Weight, float weight);
WRITES(2, Out, float values_out);

CONSTANTS {
    uint width;
    float eps;
} c;

void main() {
    const uint row = gl_WorkGroupID.x * c.width;
    float square = 0.0;
    for (uint i = THREAD; i < c.width; i += 256) square = fma(x[row + i], x[row + i], square);
    const float factor = norm_factor(group_sum(square), c.width, c.eps);
    for (uint i = THREAD; i < c.width; i += 256) values_out[row + i] = x[row + i] * factor * weight[i];
}
#endif

#ifdef KERNEL_ADD_NORM
WRITES(0, X, float x);
READS(1, Y, float y);
READS(2, Weight, float weight);
WRITES(3, Out, float values_out);

CONSTANTS {
    uint width;
    float eps;
} c;

void main() {
    const uint row = gl_WorkGroupID.x * c.width;
    float square = 0.0;
    for (uint i = THREAD; i < c.width; i += 256) {
        const float value = x[row + i] + y[row + i];
        x[row + i] = value;
        square = fma(value, value, square);
    }
    const float factor = norm_factor(group_sum(square), c.width, c.eps);
    for (uint i = THREAD; i < c.width; i += 256) values_out[row + i] = x[row + i] * factor * weight[i];
}
#endif

#ifdef KERNEL_LAYER_NORM
READS(0, X, float x);
READS(1, Weight, float weight);
READS(2, Bias, float bias);
WRITES(3, Out, float values_out);

CONSTANTS {
    uint width;
    float eps;
} c;

void main() {
    const uint row = gl_WorkGroupID.x * c.width;
    float sum = 0.0;
    for (uint i = THREAD; i < c.width; i += 256) sum += x[row + i];
    const float mean = group_sum(sum) / float(c.width);
    float square = 0.0;
    for (uint i = THREAD; i < c.width; i += 256) square = fma(x[row + i] - mean, x[row + i] - mean, square);
    const float factor = norm_factor(group_sum(square), c.width, c.eps);
    for (uint i = THREAD; i < c.width; i += 256)
        values_out[row + i] = fma((x[row + i] - mean) * factor, weight[i], bias[i]);
}
#endif

#if defined(KERNEL_ROPE) || defined(KERNEL_KEEP)
// A pair turned by turn = cos a, sin a.
vec2 turned(vec2 pair, vec2 turn) {
    precise const float from_b = pair.y * turn.y, from_a = pair.x * turn.y;
    return vec2(fma(pair.x, turn.x, -from_b), fma(pair.y, turn.x, from_a));
}
#endif

#ifdef KERNEL_ROPE
WRITES(0, X, float x);
READS(1, Turns, float turns);

CONSTANTS {
    uint width, head_width, rope_at, pairs, heads;
} c;

void main() {
    const uint at = gl_WorkGroupID.x * 256 + THREAD, row = gl_WorkGroupID.y;
    if (at >= c.heads * c.pairs) return;
    const uint head = at / c.pairs, pair = at % c.pairs;
    const uint values = row * c.width + head * c.head_width + c.rope_at + 2 * pair, turn = (row * c.pairs + pair) * 2;
    const vec2 result = turned(vec2(x[values], x[values + 1]), vec2(turns[turn], turns[turn + 1]));
    x[values] = result.x;
    x[values + 1] = result.y;
}
#endif

#ifdef KERNEL_KEEP
WRITES(0, Q, float q);
READS(1, Kv, float kv);
READS(2, Weight, float weight);
READS(3, Turns, float turns);
WRITES(4, Cache, float cache);

CONSTANTS {
    uint q_width, head_width, rope_at, pairs, heads;
    uint latent;
    uint first;
    float eps;
} c;

void main() {
    const uint row = gl_WorkGroupID.y;
    if (gl_WorkGroupID.x > 0) {
        const uint at = (gl_WorkGroupID.x - 1) * 256 + THREAD;
        if (at >= c.heads * c.pairs) return;
        const uint head = at / c.pairs, pair = at % c.pairs;
        const uint values = row * c.q_width + head * c.head_width + c.rope_at + 2 * pair, turn = (row * c.pairs + pair) * 2;
        const vec2 result = turned(vec2(q[values], q[values + 1]), vec2(turns[turn], turns[turn + 1]));
        q[values] = result.x;
        q[values + 1] = result.y;
        return;
    }
    const uint width = c.latent + 2 * c.pairs, from = row * width, to = (c.first + row) * width;
    float square = 0.0;
    for (uint i = THREAD; i < c.latent; i += 256) square = fma(kv[from + i], kv[from + i], square);
    const float factor = norm_factor(group_sum(square), c.latent, c.eps);
    for (uint i = THREAD; i < c.latent; i += 256) cache[to + i] = kv[from + i] * factor * weight[i];
    for (uint pair = THREAD; pair < c.pairs; pair += 256) {
        const uint at = c.latent + 2 * pair, turn = (row * c.pairs + pair) * 2;
        const vec2 result = turned(vec2(kv[from + at], kv[from + at + 1]), vec2(turns[turn], turns[turn + 1]));
        cache[to + at] = result.x;
        cache[to + at + 1] = result.y;
    }
}
#endif

#ifdef KERNEL_COPY_ROWS
READS(0, X, float x);
WRITES(1, Out, float values_out);

CONSTANTS {
    uint rows, width;
    uint x_first, x_stride, x_at;
    uint out_first, out_stride, out_at;
} c;

void main() {
    const uint all = c.rows * c.width;
    for (uint at = gl_WorkGroupID.x * 256 + THREAD; at < all; at += gl_NumWorkGroups.x * 256) {
        const uint row = at / c.width, i = at % c.width;
        values_out[(c.out_first + row) * c.out_stride + c.out_at + i] = x[(c.x_first + row) * c.x_stride + c.x_at + i];
    }
}
#endif

#ifdef KERNEL_TAKE_ROWS
READS(0, X, float x);
READS(1, Numbers, uint numbers);
WRITES(2, Out, float values_out);

CONSTANTS {
    uint rows, width;
} c;

void main() {
    const uint all = c.rows * c.width;
    for (uint at = gl_WorkGroupID.x * 256 + THREAD; at < all; at += gl_NumWorkGroups.x * 256)
        values_out[at] = x[numbers[at / c.width] * c.width + at % c.width];
}
#endif

#ifdef KERNEL_ADD
WRITES(0, X, float x);
READS(1, Y, float y);

CONSTANTS {
    uint count;
} c;

void main() {
    for (uint at = gl_WorkGroupID.x * 256 + THREAD; at < c.count; at += gl_NumWorkGroups.x * 256) x[at] += y[at];
}
#endif

#ifdef KERNEL_SWIGLU
READS(0, Gate, float gate);
READS(1, Up, float up);
WRITES(2, Out, float values_out);

CONSTANTS {
    uint count;
} c;

void main() {
    for (uint at = gl_WorkGroupID.x * 256 + THREAD; at < c.count; at += gl_NumWorkGroups.x * 256)
        values_out[at] = gate[at] / (1.0 + exponential(-gate[at])) * up[at];
}
#endif
