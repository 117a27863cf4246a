// Products and sums in registers alone: kernels/cuda/peak.cu.
#version 450
#include "common.glsl"

#ifdef KERNEL_FMA_PEAK
const uint CHAINS = 8;
const uint UNROLLED = 16;

WRITES(0, Out, float values_out);

CONSTANTS {
    uint steps;
    float factor, term;
} c;

void main() {
    float x[CHAINS];
    [[unroll]] for (uint k = 0; k < CHAINS; k++) x[k] = float(k);
    for (uint step = 0; step < c.steps; step++) {
        [[unroll]] for (uint i = 0; i < UNROLLED; i++)
            [[unroll]] for (uint k = 0; k < CHAINS; k++) x[k] = fma(x[k], c.factor, c.term);
    }
    float sum = 0.0;
    [[unroll]] for (uint k = 0; k < CHAINS; k++) sum += x[k];
    values_out[gl_WorkGroupID.x * 256 + THREAD] = sum;
}
#endif
