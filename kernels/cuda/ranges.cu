// Sums over ranges of columns, in their order: what stream.cu and stream_experts.cu leave.
//
//     sum_ranges           out[first + r, out_at + o] = Σ partial[range, r, o]    groups: x tiles of 256 outputs, y rows
//     sum_experts_ranges   out[slot, o] = Σ partial[side, range, slot, o]         groups: x tiles of 256 outputs, y experts, z sides
//
// the latter for the slots of experts that have a place. Reference: src/backend/reference/linear.rs, matmul.
#include "tensor.cuh"

struct SumRangesConstants {
    u32 ranges, rows, outputs;
    u32 out_stride, out_at, first;  // of `out`, and its row that is the first of the sums
    u32 split;                      // outputs that go to `out`; those that follow go to `second`
};

KERNEL(256, sum_ranges)(const float* partial, float* out, float* second, SumRangesConstants c) {
    begin();
    const u32 o = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (o >= c.outputs) return;
    float sum = 0.0f;
    for (u32 range = 0; range < c.ranges; range++) sum += partial[((size_t)range * c.rows + row) * c.outputs + o];
    const size_t to = c.first + row;
    if (o < c.split) out[to * c.out_stride + c.out_at + o] = sum;
    else second[to * (c.outputs - c.split) + o - c.split] = sum;
}

#define ABSENT 0xffffffffu

struct SumExpertsRangesConstants {
    u32 ranges, slots, outputs;
    u32 most;  // experts that `groups` has room for
};

KERNEL(256, sum_experts_ranges)
(const float* partial, float* out, float* second, const u32* groups, const u32* place, SumExpertsRangesConstants c) {
    begin();
    const u32 o = blockIdx.x * 256 + threadIdx.x;
    if (blockIdx.y >= groups[0] || place[groups[1 + blockIdx.y]] == ABSENT || o >= c.outputs) return;
    const u32* offsets = groups + 1 + c.most + blockIdx.y;
    const u32* slots = groups + 2 + 2 * c.most;
    for (u32 at = offsets[0]; at < offsets[1]; at++) {
        float sum = 0.0f;
        for (u32 range = 0; range < c.ranges; range++) {
            const u32 of_side = blockIdx.z * c.ranges + range;
            sum += partial[((size_t)of_side * c.slots + slots[at]) * c.outputs + o];
        }
        (blockIdx.z ? second : out)[(size_t)slots[at] * c.outputs + o] = sum;
    }
}
