// x [n, I] as halves, for products on cooperative matrices: a row is
//
//     2^e, three words that are nothing, and x · 2^−e in blocks of 64 columns, two halves a word
//
// with the largest magnitude of x · 2^−e in a row from 2^14 up to 2^15: no half is infinite, and none of those that are more
// than 2^−29 of the largest is subnormal. Those that are less are 0. Of each run of columns, column i is at 2 i and column
// run / 2 + i at 2 i + 1 (half_weights.glsl). A row with a value that is no finite number has e = 0, and keeps it.
// To nearest, ties to even, by bits: how a device rounds is not said.
#version 450
#include "common.glsl"

READS(0, X, float x);
WRITES(1, Out, uint words);

CONSTANTS {
    uint columns;
    uint first;  // row of x
    uint stride; // words of a row
    uint run;
} c;

shared uint largest;

// The half nearest to a float below 2^16, or to one that is no finite number.
uint half_of(float value) {
    const uint bits = floatBitsToUint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) return sign | (magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u);
    const uint rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    if (rounded >= 0x47800000u) return sign | 0x7c00u;
    return rounded < 0x38800000u ? 0u : sign | rounded - 0x38000000u >> 13;
}

void main() {
    const uint from = (c.first + gl_WorkGroupID.x) * c.columns, to = gl_WorkGroupID.x * c.stride, thread = gl_LocalInvocationIndex;
    if (thread == 0) largest = 0;
    barrier();
    uint most = 0;
    for (uint i = thread; i < c.columns; i += 256) most = max(most, floatBitsToUint(x[from + i]) & 0x7fffffffu);
    atomicMax(largest, most);
    barrier();
    // 2^e of a largest value from 2^(e + 14) on; e from −126 on, so that both powers are normal
    const uint exponent = clamp(largest >> 23, 15u, 254u) - 14;
    const bool scaled = largest > 0 && largest < 0x7f800000u;
    const float up = scaled ? uintBitsToFloat(exponent << 23) : 1.0, down = scaled ? uintBitsToFloat(254 - exponent << 23) : 1.0;
    if (thread == 0) words[to] = floatBitsToUint(up);
    for (uint pair = thread; pair < (c.stride - 4); pair += 256) {
        const uint column = 2 * pair / c.run * c.run + pair % (c.run / 2);
        uint two = 0;
        [[unroll]] for (uint k = 0; k < 2; k++) {
            const uint at = column + k * c.run / 2;
            if (at < c.columns) two |= half_of(x[from + at] * down) << 16 * k;
        }
        words[to + 4 + pair] = two;
    }
}
