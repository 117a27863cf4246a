// What logits say after each row: kernels/cuda/predict.cu.
#version 450
#include "common.glsl"

READS(0, Logits, float logits);
READS(1, Asked, uint asked);
WRITES(2, Out, uint values_out);

CONSTANTS {
    uint vocabulary;
} c;

shared float best[256];
shared uint best_at[256];
shared float second[256];

void main() {
    const uint thread = THREAD, row = gl_WorkGroupID.x * c.vocabulary;
    float largest = -INFINITE, runner_up = -INFINITE;
    uint at = 0;
    for (uint id = thread; id < c.vocabulary; id += 256) {
        const float logit = logits[row + id];
        if (logit > largest) {
            runner_up = largest;
            largest = logit;
            at = id;
        } else if (logit > runner_up) {
            runner_up = logit;
        }
    }
    best[thread] = largest;
    best_at[thread] = at;
    second[thread] = runner_up;
    barrier();
    for (uint apart = 128; apart > 0; apart /= 2) {
        if (thread < apart) {
            const uint other = thread + apart;
            const bool wins = best[other] > best[thread] || (best[other] == best[thread] && best_at[other] < best_at[thread]);
            const float lost = wins ? best[thread] : best[other];
            second[thread] = max(wins ? second[other] : second[thread], lost);
            if (wins) {
                best[thread] = best[other];
                best_at[thread] = best_at[other];
            }
        }
        barrier();
    }
    largest = best[0];
    at = best_at[0];
    runner_up = second[0];
    barrier();

    precise float sum = 0.0, lost = 0.0;
    for (uint id = thread; id < c.vocabulary; id += 256) {
        precise const float term = exponential(logits[row + id] - largest) - lost;
        precise const float next = sum + term;
        lost = next - sum - term;
        sum = next;
    }
    best[thread] = sum;
    barrier();
    for (uint apart = 128; apart > 0; apart /= 2) {
        if (thread < apart) best[thread] += best[thread + apart];
        barrier();
    }
    if (thread == 0) {
        const uint to = 5 * gl_WorkGroupID.x;
        values_out[to] = at;
        values_out[to + 1] = floatBitsToUint(largest);
        values_out[to + 2] = floatBitsToUint(runner_up);
        values_out[to + 3] = floatBitsToUint(best[0]);
        values_out[to + 4] = floatBitsToUint(logits[row + asked[gl_WorkGroupID.x]]);
    }
}
