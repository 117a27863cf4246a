// Rows of a table: kernels/cuda/embed.cu.
#version 450
#include "common.glsl"
#include "weights.glsl"

READS(2, Ids, uint ids);
WRITES(3, Out, float values_out);

CONSTANTS {
    uint stride, row_scales, group_size, columns;
    uint first_row, rows;
} c;

void main() {
    const Weights w = Weights(0, 0, c.stride, c.row_scales, c.group_size);
    const uint row = ids[gl_WorkGroupID.y] - c.first_row;
    const uint column = gl_WorkGroupID.x * 256 + THREAD;
    if (row >= c.rows || column >= c.columns) return;
    values_out[gl_WorkGroupID.y * c.columns + column] = one(w, row, column);
}
