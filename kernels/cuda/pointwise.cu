// Operations on each row by itself: norms, rotation, activation, copies.
//
// Reference: src/backend/reference/pointwise.rs.
//
// Versions: 1, a group a row, or a thread a value (this one).
#include "common.cuh"

// Σ over the 256 threads of a group, in every thread: each warp, then the warps in order.
__device__ __forceinline__ float group_sum(float value, float* parts_of) {
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % LANES == 0) parts_of[threadIdx.x / LANES] = value;
    __syncthreads();
    float sum = 0.0f;
    for (u32 warp = 0; warp < 8; warp++) sum += parts_of[warp];
    return sum;
}

struct NormConstants {
    u32 width;
    float eps;
};

// x · rsqrt(mean(x²) + eps) · weight. Groups: x rows.
KERNEL(256, rms_norm)
(const float* __restrict__ x, const float* __restrict__ weight, float* __restrict__ out, NormConstants c) {
    __shared__ float sums[8];
    const float* row = x + (size_t)blockIdx.x * c.width;
    float square = 0.0f;
    for (u32 i = threadIdx.x; i < c.width; i += 256) square = fmaf(row[i], row[i], square);
    const float factor = 1.0f / sqrtf(group_sum(square, sums) / (float)c.width + c.eps);
    for (u32 i = threadIdx.x; i < c.width; i += 256) out[(size_t)blockIdx.x * c.width + i] = row[i] * factor * weight[i];
}

// (x − mean(x)) · rsqrt(mean((x − mean(x))²) + eps) · weight + bias. Groups: x rows.
KERNEL(256, layer_norm)
(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias, float* __restrict__ out,
 NormConstants c) {
    __shared__ float sums[8];
    const float* row = x + (size_t)blockIdx.x * c.width;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < c.width; i += 256) sum += row[i];
    const float mean = group_sum(sum, sums) / (float)c.width;
    float square = 0.0f;
    for (u32 i = threadIdx.x; i < c.width; i += 256) square = fmaf(row[i] - mean, row[i] - mean, square);
    const float factor = 1.0f / sqrtf(group_sum(square, sums) / (float)c.width + c.eps);
    for (u32 i = threadIdx.x; i < c.width; i += 256)
        out[(size_t)blockIdx.x * c.width + i] = fmaf((row[i] - mean) * factor, weight[i], bias[i]);
}

struct RopeConstants {
    u32 width, head_width, rope_at, pairs, heads;
};

// (x₀, x₁) → (x₀ cos a − x₁ sin a, x₁ cos a + x₀ sin a) for each pair of the rotated part of each head, in place.
// turns [n, pairs, 2]: cos a, sin a. Groups: x tiles of 256 pairs of a row, y rows.
KERNEL(256, rope)(float* __restrict__ x, const float* __restrict__ turns, RopeConstants c) {
    const u32 at = blockIdx.x * 256 + threadIdx.x;
    if (at >= c.heads * c.pairs) return;
    const u32 head = at / c.pairs, pair = at % c.pairs;
    float* values = x + (size_t)blockIdx.y * c.width + head * c.head_width + c.rope_at + 2 * pair;
    const float* turn = turns + ((size_t)blockIdx.y * c.pairs + pair) * 2;
    const float a = values[0], b = values[1];
    values[0] = fmaf(a, turn[0], -(b * turn[1]));
    values[1] = fmaf(b, turn[0], a * turn[1]);
}

struct CopyRowsConstants {
    u32 rows, width;
    u32 x_first, x_stride, x_at;
    u32 out_first, out_stride, out_at;
};

// out[out_first + r, out_at + i] = x[x_first + r, x_at + i]. Groups: any number in x, each thread goes on.
KERNEL(256, copy_rows)(const float* __restrict__ x, float* __restrict__ out, CopyRowsConstants c) {
    const u32 all = c.rows * c.width;
    for (u32 at = blockIdx.x * 256 + threadIdx.x; at < all; at += gridDim.x * 256) {
        const u32 row = at / c.width, i = at % c.width;
        out[(size_t)(c.out_first + row) * c.out_stride + c.out_at + i] =
            x[(size_t)(c.x_first + row) * c.x_stride + c.x_at + i];
    }
}

struct TakeRowsConstants {
    u32 rows, width;
};

// out[r] = x[number[r]]. Groups: any number in x.
KERNEL(256, take_rows)
(const float* __restrict__ x, const u32* __restrict__ numbers, float* __restrict__ out, TakeRowsConstants c) {
    const u32 all = c.rows * c.width;
    for (u32 at = blockIdx.x * 256 + threadIdx.x; at < all; at += gridDim.x * 256)
        out[at] = x[(size_t)numbers[at / c.width] * c.width + at % c.width];
}

struct CountConstants {
    u32 count;
};

// x + y, into x. Groups: any number in x.
KERNEL(256, add)(float* __restrict__ x, const float* __restrict__ y, CountConstants c) {
    for (u32 at = blockIdx.x * 256 + threadIdx.x; at < c.count; at += gridDim.x * 256) x[at] += y[at];
}

// silu(gate) · up, silu(g) = g / (1 + e^−g). Groups: any number in x.
KERNEL(256, swiglu)
(const float* __restrict__ gate, const float* __restrict__ up, float* __restrict__ out, CountConstants c) {
    for (u32 at = blockIdx.x * 256 + threadIdx.x; at < c.count; at += gridDim.x * 256)
        out[at] = gate[at] / (1.0f + exponential(-gate[at])) * up[at];
}
