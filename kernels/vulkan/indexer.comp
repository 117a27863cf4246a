// The positions that sparse attention looks at: kernels/cuda/indexer.cu.
#version 450
#include "common.glsl"

const uint WHOLE = 0xffffffffu;

#ifdef KERNEL_INDEX_SCORES
const uint TILE = 64;
const uint AT_ONCE = 32;
const uint DEPTH = 32;

READS(0, Q, float q);
READS(1, HeadWeights, float weights);
READS(2, Keys, float keys);
READS(3, Lists, uint lists);
WRITES(4, Scores, float scores);

CONSTANTS {
    uint first_row;
    uint heads, width;
    uint stride;
    float width_scale, heads_scale;
} c;

shared float key_tile[TILE][DEPTH + 1];
shared float q_tile[AT_ONCE][DEPTH];
shared float head_sums[4][TILE];

// 0 for what is below it; not max, of which NaN need not come out.
float relu(float x) {
    const uint bits = floatBitsToUint(x);
    return bits >= 0x80000000u && bits <= 0xff800000u ? 0.0 : x;
}

void main() {
    const uint row = c.first_row + gl_WorkGroupID.y;
    const uint begin = lists[2 * row], count = lists[2 * row + 1];
    const uint first = gl_WorkGroupID.x * TILE;
    if (first >= count) return;
    const uint own = THREAD % TILE, quarter = THREAD / TILE;
    float total = 0.0;
    for (uint head = 0; head < c.heads; head += AT_ONCE) {
        float dot_of[8] = float[8](0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
        for (uint depth = 0; depth < c.width; depth += DEPTH) {
            barrier();
            for (uint i = THREAD; i < TILE * DEPTH; i += 256) {
                const uint at = min(first + i / DEPTH, count - 1), d = depth + i % DEPTH;
                const uint entry = begin == WHOLE ? at : lists[begin + at];
                key_tile[i / DEPTH][i % DEPTH] = d < c.width ? keys[entry * c.width + d] : 0.0;
            }
            for (uint i = THREAD; i < AT_ONCE * DEPTH; i += 256) {
                const uint h = head + i / DEPTH, d = depth + i % DEPTH;
                q_tile[i / DEPTH][i % DEPTH] = h < c.heads && d < c.width ? q[(row * c.heads + h) * c.width + d] : 0.0;
            }
            barrier();
            for (uint d = 0; d < DEPTH; d++) {
                const float key = key_tile[own][d];
                [[unroll]] for (uint h = 0; h < 8; h++) dot_of[h] = fma(q_tile[8 * quarter + h][d], key, dot_of[h]);
            }
        }
        float sum = 0.0;
        [[unroll]] for (uint h = 0; h < 8; h++) {
            const uint number = head + 8 * quarter + h;
            if (number < c.heads) sum = fma(weights[row * c.heads + number], relu(dot_of[h] * c.width_scale), sum);
        }
        head_sums[quarter][own] = sum;
        barrier();
        for (uint part = 0; part < 4; part++) total += head_sums[part][own];
    }
    if (quarter == 0 && first + own < count) scores[gl_WorkGroupID.y * c.stride + first + own] = total * c.heads_scale;
}
#endif

#ifdef KERNEL_TOP_POSITIONS
READS(0, Scores, float scores);
READS(1, Lists, uint lists);
WRITES(2, Selection, uint selection);

CONSTANTS {
    uint first_row;
    uint rows;
    uint topk;
    uint stride;
} c;

shared uint histogram[256];
shared uint sums[2][256];
shared uint found[2];

// Larger numbers for larger scores; 0 and −0 are equal, NaN by its bits.
uint order_of(float score) {
    const uint bits = floatBitsToUint(score);
    if (bits == 0x80000000u) return bits;
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

void main() {
    const uint row = c.first_row + gl_WorkGroupID.x, thread = THREAD;
    const uint begin = lists[2 * row], count = lists[2 * row + 1];
    const uint to = 2 * c.rows + row * c.topk;
    if (thread == 0) {
        selection[2 * row] = to;
        selection[2 * row + 1] = min(count, c.topk);
        found[0] = 0;
        found[1] = c.topk;
    }
    if (count <= c.topk) {
        for (uint at = thread; at < count; at += 256) selection[to + at] = begin == WHOLE ? at : lists[begin + at];
        return;
    }
    const uint from = gl_WorkGroupID.x * c.stride;
    for (int shift = 24; shift >= 0; shift -= 8) {
        histogram[thread] = 0;
        barrier();
        const uint known = found[0];
        for (uint at = thread; at < count; at += 256) {
            const uint key = order_of(scores[from + at]);
            if (shift == 24 || key >> (shift + 8) == known) atomicAdd(histogram[key >> shift & 255u], 1u);
        }
        barrier();
        if (thread == 0) {
            uint left = found[1], digit = 255;
            while (histogram[digit] < left) left -= histogram[digit--];
            found[0] = known << 8 | digit;
            found[1] = left;
        }
        barrier();
    }
    const uint last = found[0], equals = found[1];
    uint written = 0, equal_before = 0;
    for (uint first = 0; first < count; first += 256) {
        const uint at = first + thread;
        const uint key = at < count ? order_of(scores[from + at]) : 0;
        const bool above = at < count && key > last, equal = at < count && key == last;
        // how many there are up to this thread: above in the low half, equal in the high half
        uint side = 0;
        sums[0][thread] = uint(above) | uint(equal) << 16;
        barrier();
        for (uint apart = 1; apart < 256; apart *= 2) {
            sums[1 - side][thread] = sums[side][thread] + (thread >= apart ? sums[side][thread - apart] : 0);
            side = 1 - side;
            barrier();
        }
        const uint all = sums[side][255], own = sums[side][thread];
        const uint equal_rank = equal_before + (own >> 16);
        const uint equal_chosen = min(equal_rank, equals) - min(equal_before, equals);
        const uint chosen = (own & 0xffffu) + equal_chosen;
        if (above || (equal && equal_rank <= equals))
            selection[to + written + chosen - 1] = begin == WHOLE ? at : lists[begin + at];
        written += (all & 0xffffu) + min(equal_before + (all >> 16), equals) - min(equal_before, equals);
        equal_before += all >> 16;
        barrier();
    }
}
#endif
