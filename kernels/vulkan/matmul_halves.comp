// x [n, I] · weightᵀ [I, O] → [n, O], in the fast mode.
#version 450
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#define SUBGROUPS
#include "common.glsl"
#include "half_weights.glsl"
#include "half_product.glsl"

WRITES(3, Out, float values_out);

CONSTANTS {
    uint stride, row_scales, group_size, columns;
    uint flush;
    uint outputs;
    uint first, count;
    uint x_stride;
    uint out_stride, out_at;
} c;

void put(uint o, uint r, float value) {
    const uint row = c.first + gl_WorkGroupID.x * ROWS + r, at = gl_WorkGroupID.y * OUTPUTS + o;
    if (at < c.outputs) values_out[row * c.out_stride + c.out_at + at] = value;
}

void main() {
    const Weights w = Weights(0, 0, c.stride, c.row_scales, c.group_size);
    const uint first_x = gl_WorkGroupID.x * ROWS;
    rows_here = min(ROWS, c.count - c.first - first_x);
    if (THREAD < rows_here) x_at[THREAD] = (first_x + THREAD) * c.x_stride;
    row_of = min(gl_WorkGroupID.y * OUTPUTS + place_of_codes().x, c.outputs - 1);
    half_product(w, c.columns, c.flush);
}
