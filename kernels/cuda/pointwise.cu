// Operations on each row by itself: norms, rotation, activation, copies.
//
// Reference: src/backend/reference/pointwise.rs.
//
// Versions: 1, a group a row, or a thread a value; norms went twice through memory, one value of a thread at a time. 2, norms keep
// a row in registers (this one).
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

// 1 / √(sum / width + eps). Where squares are more than an f32 holds it is no number, and so are the outputs: by 0 they would all be
// alike, and look sound.
__device__ __forceinline__ float norm_factor(float sum, u32 width, float eps) {
    const float mean = sum / (float)width + eps;
    return isinf(mean) ? NOT_A_NUMBER : 1.0f / sqrtf(mean);
}

// Pieces of a row, four values each, that a thread keeps at most.
#define KEPT 8u

// Σ x² over a row of `width` values, of which `value(i)` is one and `four(i)` four from i on: in pieces of four where `in_fours`.
// What a thread reads of a row in fours it keeps.
struct Squares {
    float4 kept[KEPT];

    template <class Four, class One>
    __device__ __forceinline__ float sum(u32 width, bool in_fours, Four four, One one) {
        float square = 0.0f;
        if (in_fours) {
#pragma unroll
            for (u32 j = 0; j < KEPT; j++) {
                const u32 i = 4 * (threadIdx.x + 256 * j);
                if (i < width) kept[j] = four(i);
            }
#pragma unroll
            for (u32 j = 0; j < KEPT; j++) {
                if (4 * (threadIdx.x + 256 * j) >= width) break;
                square = fmaf(kept[j].x, kept[j].x, square);
                square = fmaf(kept[j].y, kept[j].y, square);
                square = fmaf(kept[j].z, kept[j].z, square);
                square = fmaf(kept[j].w, kept[j].w, square);
            }
        } else {
            for (u32 i = threadIdx.x; i < width; i += 256) {
                const float value = one(i);
                square = fmaf(value, value, square);
            }
        }
        return square;
    }
};

__device__ __forceinline__ bool in_fours(u32 width) { return width % 4 == 0 && width <= 4 * 256 * KEPT; }

struct NormConstants {
    u32 width;
    float eps;
};

// x · rsqrt(mean(x²) + eps) · weight, with y added to x before if there is one. Σ x²: a thread takes four values at a time of
// rows that consist of fours, then the next 1024 values on.
template <bool ADDED>
__device__ __forceinline__ void norm(float* x, const float* y, const float* __restrict__ weight, float* out, NormConstants c) {
    __shared__ float sums[8];
    const size_t at = (size_t)blockIdx.x * c.width;
    const bool fours = in_fours(c.width);
    float4 weights[KEPT];
    if (fours) {
#pragma unroll
        for (u32 j = 0; j < KEPT; j++) {
            const u32 i = 4 * (threadIdx.x + 256 * j);
            if (i < c.width) weights[j] = *(const float4*)(weight + i);
        }
    }
    begin();
    Squares squares;
    const auto four = [&](u32 i) {
        float4 v = *(const float4*)(x + at + i);
        if (ADDED) {
            const float4 other = *(const float4*)(y + at + i);
            v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
            *(float4*)(x + at + i) = v;
        }
        return v;
    };
    const auto one = [&](u32 i) {
        if (ADDED) x[at + i] += y[at + i];
        return x[at + i];
    };
    const float square = squares.sum(c.width, fours, four, one);
    const float factor = norm_factor(group_sum(square, sums), c.width, c.eps);
    if (fours) {
#pragma unroll
        for (u32 j = 0; j < KEPT; j++) {
            const u32 i = 4 * (threadIdx.x + 256 * j);
            if (i >= c.width) break;
            const float4 v = squares.kept[j], w = weights[j];
            *(float4*)(out + at + i) = {v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w};
        }
    } else {
        for (u32 i = threadIdx.x; i < c.width; i += 256) out[at + i] = x[at + i] * factor * weight[i];
    }
}

// Groups: x rows.
KERNEL(256, rms_norm)(float* x, const float* __restrict__ weight, float* out, NormConstants c) {
    norm<false>(x, x, weight, out, c);
}

// y is added to x, then as rms_norm. Groups: x rows.
KERNEL(256, add_norm)(float* x, const float* y, const float* __restrict__ weight, float* out, NormConstants c) {
    norm<true>(x, y, weight, out, c);
}

// (x − mean(x)) · rsqrt(mean((x − mean(x))²) + eps) · weight + bias. Groups: x rows.
KERNEL(256, layer_norm)
(const float* x, const float* __restrict__ weight, const float* __restrict__ bias, float* out, NormConstants c) {
    __shared__ float sums[8];
    begin();
    const float* row = x + (size_t)blockIdx.x * c.width;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < c.width; i += 256) sum += row[i];
    const float mean = group_sum(sum, sums) / (float)c.width;
    float square = 0.0f;
    for (u32 i = threadIdx.x; i < c.width; i += 256) square = fmaf(row[i] - mean, row[i] - mean, square);
    const float factor = norm_factor(group_sum(square, sums), c.width, c.eps);
    for (u32 i = threadIdx.x; i < c.width; i += 256)
        out[(size_t)blockIdx.x * c.width + i] = fmaf((row[i] - mean) * factor, weight[i], bias[i]);
}

// (x₀, x₁) → (x₀ cos a − x₁ sin a, x₁ cos a + x₀ sin a), of turn = cos a, sin a.
__device__ __forceinline__ float2 turned(float2 x, float2 turn) {
    return {fmaf(x.x, turn.x, -(x.y * turn.y)), fmaf(x.y, turn.x, x.x * turn.y)};
}

struct RopeConstants {
    u32 width, head_width, rope_at, pairs, heads;
};

// Pair number `at` of a row of `x` [n, width], in place: of each head the pairs from rope_at on.
__device__ __forceinline__ void turn_pair(float* x, const float* turns, u32 row, u32 at, const RopeConstants& c) {
    const u32 head = at / c.pairs, pair = at % c.pairs;
    float* values = x + (size_t)row * c.width + head * c.head_width + c.rope_at + 2 * pair;
    const float* turn = turns + ((size_t)row * c.pairs + pair) * 2;
    const float2 result = turned({values[0], values[1]}, {turn[0], turn[1]});
    values[0] = result.x;
    values[1] = result.y;
}

// Each pair of the rotated part of each head, in place. turns [n, pairs, 2]: cos a, sin a. Groups: x tiles of 256 pairs of a
// row, y rows.
KERNEL(256, rope)(float* x, const float* turns, RopeConstants c) {
    begin();
    const u32 at = blockIdx.x * 256 + threadIdx.x;
    if (at < c.heads * c.pairs) turn_pair(x, turns, blockIdx.y, at, c);
}

struct KeepConstants {
    RopeConstants q;
    u32 latent;  // of a row of kv [n, latent + 2 · pairs]
    u32 first;   // row of the cache that is the first of these
    float eps;
};

// What attention keeps of a position, and its queries: of kv the latent as rms_norm has it and the key turned, into the cache
// [T, latent + 2 · pairs]; q turned in place as rope does it. Groups: x one for kv, then tiles of 256 pairs of a row of q; y rows.
KERNEL(256, keep)
(float* q, const float* kv, const float* __restrict__ weight, const float* turns, float* cache, KeepConstants c) {
    __shared__ float sums[8];
    begin();
    const u32 row = blockIdx.y;
    if (blockIdx.x > 0) {
        const u32 at = (blockIdx.x - 1) * 256 + threadIdx.x;
        if (at < c.q.heads * c.q.pairs) turn_pair(q, turns, row, at, c.q);
        return;
    }
    const u32 width = c.latent + 2 * c.q.pairs;
    const float* from = kv + (size_t)row * width;
    float* to = cache + (size_t)(c.first + row) * width;
    // As norm sums up, whose bits these are.
    Squares squares;
    const auto one = [&](u32 i) { return from[i]; };
    const auto four = [&](u32 i) {
        if (width % 4 == 0) return *(const float4*)(from + i);
        return float4{from[i], from[i + 1], from[i + 2], from[i + 3]};
    };
    const float square = squares.sum(c.latent, in_fours(c.latent), four, one);
    const float factor = norm_factor(group_sum(square, sums), c.latent, c.eps);
    for (u32 i = threadIdx.x; i < c.latent; i += 256) to[i] = from[i] * factor * weight[i];
    for (u32 pair = threadIdx.x; pair < c.q.pairs; pair += 256) {
        const float* turn = turns + ((size_t)row * c.q.pairs + pair) * 2;
        const float* key = from + c.latent + 2 * pair;
        const float2 result = turned({key[0], key[1]}, {turn[0], turn[1]});
        to[c.latent + 2 * pair] = result.x;
        to[c.latent + 2 * pair + 1] = result.y;
    }
}

struct CopyRowsConstants {
    u32 rows, width;
    u32 x_first, x_stride, x_at;
    u32 out_first, out_stride, out_at;
};

// out[out_first + r, out_at + i] = x[x_first + r, x_at + i]. Groups: any number in x, each thread goes on.
KERNEL(256, copy_rows)(const float* x, float* out, CopyRowsConstants c) {
    begin();
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
(const float* x, const u32* numbers, float* out, TakeRowsConstants c) {
    begin();
    const u32 all = c.rows * c.width;
    for (u32 at = blockIdx.x * 256 + threadIdx.x; at < all; at += gridDim.x * 256)
        out[at] = x[(size_t)numbers[at / c.width] * c.width + at % c.width];
}

struct CountConstants {
    u32 count;
};

// x + y, into x. Groups: any number in x.
KERNEL(256, add)(float* x, const float* y, CountConstants c) {
    begin();
    for (u32 at = blockIdx.x * 256 + threadIdx.x; at < c.count; at += gridDim.x * 256) x[at] += y[at];
}

// silu(gate) · up, silu(g) = g / (1 + e^−g). Groups: any number in x.
KERNEL(256, swiglu)
(const float* gate, const float* up, float* out, CountConstants c) {
    begin();
    for (u32 at = blockIdx.x * 256 + threadIdx.x; at < c.count; at += gridDim.x * 256)
        out[at] = gate[at] / (1.0f + exponential(-gate[at])) * up[at];
}
