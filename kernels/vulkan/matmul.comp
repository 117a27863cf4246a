// x [n, I] · weightᵀ [I, O] → [n, O], also head by head: kernels/cuda/matmul.cu.
#version 450
#include "common.glsl"
#include "weights.glsl"
#include "sums.glsl"
#include "product.glsl"

WRITES(3, Out, float values_out);

CONSTANTS {
    uint stride, row_scales, group_size, columns;
    uint first_row, rows;
    uint head_rows, head_first, outputs;
    uint first, count;
    uint x_stride, x_head;
    uint out_stride, out_head, out_at;
} c;

void main() {
    const Weights w = Weights(0, 0, c.stride, c.row_scales, c.group_size);
    const uint head = gl_WorkGroupID.z, first_x = c.first + gl_WorkGroupID.x * ROWS;
    const uint first_of_group = gl_WorkGroupID.y * WARPS * OUTS;
    const uint row_of_group = head * c.head_rows + c.head_first + first_of_group;
    // a group whose rows are all in other parts; the others go on together, for their warps add up together
    if (row_of_group + WARPS * OUTS <= c.first_row || row_of_group >= c.first_row + c.rows) return;
    const uint first_output = first_of_group + THREAD / LANES * OUTS;
    bool here[OUTS];
    [[unroll]] for (uint o = 0; o < OUTS; o++) {
        const uint row = head * c.head_rows + c.head_first + first_output + o;
        here[o] = first_output + o < c.outputs && row >= c.first_row && row - c.first_row < c.rows;
        row_of[o] = here[o] ? row - c.first_row : 0;
    }
    if (THREAD < ROWS) x_at[THREAD] = min(first_x + THREAD, c.count - 1) * c.x_stride + head * c.x_head;
    rows_here = min(ROWS, c.count - first_x);
    product(w, c.columns, c.x_stride % 4 == 0 && c.x_head % 4 == 0);
    if (THREAD % LANES != 0) return;
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        if (first_x + r >= c.count) break;
        const uint to = (first_x + r) * c.out_stride + head * c.out_head + c.out_at + first_output;
        [[unroll]] for (uint o = 0; o < OUTS; o++)
            if (here[o]) values_out[to + o] = sum[o * ROWS + r];
    }
}
