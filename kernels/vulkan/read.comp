// Reads words and does next to nothing with them: kernels/cuda/read.cu.
#version 450
#include "common.glsl"

const uint IN_FLIGHT = 8;
const uint TILE = 256 * IN_FLIGHT;

READS(0, Words, uvec4 words);
WRITES(1, Sums, uint sums);

CONSTANTS { uint first, count; } c;

shared uint of_thread[256];

uint sum_of(uvec4 piece) { return piece.x + piece.y + piece.z + piece.w; }

void main() {
    const uint thread = THREAD, tiles = parts(c.count, TILE);
    uint sum = 0;
    for (uint tile = gl_WorkGroupID.x; tile < tiles; tile += gl_NumWorkGroups.x) {
        const uint at = c.first + tile * TILE + thread;
        if (c.count - tile * TILE >= TILE) {
            uvec4 pieces[IN_FLIGHT];
            [[unroll]] for (uint i = 0; i < IN_FLIGHT; i++) pieces[i] = words[at + 256 * i];
            [[unroll]] for (uint i = 0; i < IN_FLIGHT; i++) sum += sum_of(pieces[i]);
        } else {
            for (uint i = 0; i < IN_FLIGHT; i++)
                if (at + 256 * i - c.first < c.count) sum += sum_of(words[at + 256 * i]);
        }
    }
    of_thread[thread] = sum;
    barrier();
    if (thread >= WARPS) return;
    sum = 0;
    for (uint lane = 0; lane < LANES; lane++) sum += of_thread[thread * LANES + lane];
    sums[gl_WorkGroupID.x * WARPS + thread] = sum;
}
