// One matrix of the chosen experts, each expert's weights for all rows that chose it, in the fast mode.
#version 450
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#define SUBGROUPS
#include "common.glsl"
#include "half_weights.glsl"
#include "half_product.glsl"

const uint ABSENT = 0xffffffffu;

WRITES(3, Out, float values_out);
READS(4, Groups, uint groups);
READS(5, Places, uint place);

CONSTANTS {
    uint stride, row_scales, group_size, columns;
    uint flush;
    uint outputs;
    uint expert_words, expert_scales;
    uint most;
    uint divisor;
    uint x_stride;
} c;

// The first slot of a tile, as `groups` has it.
uint first_slot;

void put(uint o, uint r, float value) {
    const uint at = gl_WorkGroupID.x * OUTPUTS + o;
    if (at < c.outputs) values_out[groups[first_slot + r] * c.outputs + at] = value;
}

void main() {
    const uint number = gl_WorkGroupID.y;
    if (number >= groups[0]) return;
    const uint slots = 2 + 2 * c.most;
    const uint begin = slots + groups[1 + c.most + number];
    const uint at = place[groups[1 + number]];
    if (at == ABSENT) return;
    const uint end = slots + groups[2 + c.most + number];
    const Weights w = Weights(at * c.expert_words, at * c.expert_scales, c.stride, c.row_scales, c.group_size);
    row_of = min(gl_WorkGroupID.x * OUTPUTS + place_of_codes().x, c.outputs - 1);
    for (first_slot = begin; first_slot < end; first_slot += ROWS) {
        barrier();
        rows_here = min(ROWS, end - first_slot);
        if (THREAD < rows_here) x_at[THREAD] = groups[first_slot + THREAD] / c.divisor * c.x_stride;
        half_product(w, c.columns, c.flush);
    }
}
