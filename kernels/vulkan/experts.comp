// One matrix of the chosen experts, each expert's weights for all rows that chose it: kernels/cuda/experts.cu.
#version 450
#include "common.glsl"
#include "weights.glsl"
#include "sums.glsl"
#include "product.glsl"

const uint ABSENT = 0xffffffffu;

WRITES(3, Out, float values_out);
READS(4, Groups, uint groups);
READS(5, Places, uint place);

CONSTANTS {
    uint stride, row_scales, group_size, columns;
    uint outputs;
    uint expert_words, expert_scales;
    uint most;
    uint divisor;
} c;

void main() {
    const uint number = gl_WorkGroupID.y;
    if (number >= groups[0]) return;
    const uint begin = groups[1 + c.most + number], end = groups[2 + c.most + number];
    const uint slots = 2 + 2 * c.most;
    const uint at = place[groups[1 + number]];
    if (at == ABSENT) return;
    const uint first_output = (gl_WorkGroupID.x * WARPS + THREAD / LANES) * OUTS;
    const Weights w = Weights(at * c.expert_words, at * c.expert_scales, c.stride, c.row_scales, c.group_size);
    [[unroll]] for (uint o = 0; o < OUTS; o++) row_of[o] = min(first_output + o, c.outputs - 1);
    for (uint first = begin; first < end; first += ROWS) {
        if (THREAD < ROWS) x_at[THREAD] = groups[slots + min(first + THREAD, end - 1)] / c.divisor * c.columns;
        rows_here = min(ROWS, end - first);
        product(w, c.columns, c.columns % 4 == 0);
        if (THREAD % LANES == 0) {
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                if (first + r >= end) break;
                const uint to = groups[slots + first + r] * c.outputs + first_output;
                [[unroll]] for (uint o = 0; o < OUTS; o++)
                    if (first_output + o < c.outputs) values_out[to + o] = sum[o * ROWS + r];
            }
        }
    }
}
