// What logits [n, V] say after each row: the best id, of equals the lowest; its logit; the best of the others; Σ e^(logit −
// best); the logit of the id that was asked for (any, if none was).
//
// Sums are compensated (Kahan: Further remarks on reducing truncation errors, 1965), then added as a tree.
// Groups: x rows. out [n, 5]: id by its bits, best, runner-up, sum, asked. Reference: src/backend/reference/linear.rs, prediction.
//
// Versions: 1, a group a row, twice through its logits (this one).
#include "common.cuh"

struct PredictConstants {
    u32 vocabulary;
};

KERNEL(256, predict)
(const float* __restrict__ logits, const u32* __restrict__ asked, float* __restrict__ out, PredictConstants c) {
    __shared__ float best[256];
    __shared__ u32 best_at[256];
    __shared__ float second[256];
    const u32 thread = threadIdx.x;
    const float* row = logits + (size_t)blockIdx.x * c.vocabulary;
    float largest = -INFINITE, runner_up = -INFINITE;
    u32 at = 0;
    for (u32 id = thread; id < c.vocabulary; id += 256) {
        const float logit = row[id];
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
    __syncthreads();
    for (u32 apart = 128; apart > 0; apart /= 2) {
        if (thread < apart) {
            const u32 other = thread + apart;
            const bool wins = best[other] > best[thread] || (best[other] == best[thread] && best_at[other] < best_at[thread]);
            const float lost = wins ? best[thread] : best[other];
            if (wins) {
                best[thread] = best[other];
                best_at[thread] = best_at[other];
                second[thread] = fmaxf(second[other], lost);
            } else {
                second[thread] = fmaxf(second[thread], lost);
            }
        }
        __syncthreads();
    }
    largest = best[0];
    at = best_at[0];
    runner_up = second[0];
    __syncthreads();

    float sum = 0.0f, lost = 0.0f;
    for (u32 id = thread; id < c.vocabulary; id += 256) {
        const float term = exponential(row[id] - largest) - lost;
        const float next = sum + term;
        lost = next - sum - term;
        sum = next;
    }
    best[thread] = sum;
    __syncthreads();
    for (u32 apart = 128; apart > 0; apart /= 2) {
        if (thread < apart) best[thread] += best[thread + apart];
        __syncthreads();
    }
    if (thread == 0) {
        float* to = out + 5 * (size_t)blockIdx.x;
        to[0] = __uint_as_float(at);
        to[1] = largest;
        to[2] = runner_up;
        to[3] = best[0];
        to[4] = row[asked[blockIdx.x]];
    }
}
