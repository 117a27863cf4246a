// Queries of attention over compressed keys: kernels/cuda/absorb.cu.
#version 450
#include "common.glsl"
#include "weights.glsl"

READS(2, Q, float q);
WRITES(3, Query, float query);

CONSTANTS {
    uint stride, row_scales, group_size;
    uint first_row, rows;
    uint heads, head_rows, nope, rope, latent;
    uint first;
} c;

void main() {
    const Weights w = Weights(0, 0, c.stride, c.row_scales, c.group_size);
    const uint column = gl_WorkGroupID.x * 256 + THREAD, head = gl_WorkGroupID.y;
    if (column >= c.latent + c.rope) return;
    const uint at = (c.first + gl_WorkGroupID.z) * c.heads + head;
    const uint from = at * (c.nope + c.rope);
    const uint to = at * (c.latent + c.rope) + column;
    if (column >= c.latent) {
        query[to] = q[from + c.nope + column - c.latent];
        return;
    }
    const uint first = head * c.head_rows;
    const uint end = min(first + c.nope, c.first_row + c.rows);
    float sum = c.first_row == 0 ? 0.0 : query[to];
    for (uint row = max(first, c.first_row); row < end; row++)
        sum = fma(q[from + row - first], one(w, row - c.first_row, column), sum);
    query[to] = sum;
}
