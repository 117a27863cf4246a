// Kernels under names of right ones that do what the emulation must notice.
#include "common.cuh"

struct Constants {
    u32 what;
};

// 0: nothing wrong; 1: reads past the end of x; 2: some threads leave before a barrier; 3: lanes leave before their warp's sum;
// 4: reads words that are not aligned; 5: writes shared memory outside of an array; 6: reads shared memory that nobody wrote.
KERNEL(256, add)(float* __restrict__ x, const float* __restrict__ y, Constants c) {
    __shared__ float shared[256];
    const u32 thread = threadIdx.x;
    switch (c.what) {
        case 0: x[thread] = warp_sum(1.0f) + y[thread]; break;
        case 1: x[thread] = y[thread + 1]; break;
        case 2:
            if (thread == 77) return;
            __syncthreads();
            break;
        case 3:
            if (thread % LANES == 3) return;
            x[thread] = warp_sum(y[thread]);
            break;
        case 4: x[thread] = *(const float*)((const u8*)y + 1); break;
        case 5: shared[thread + c.what] = 1.0f; break;
        default: x[thread] = shared[255 - thread];
    }
}
