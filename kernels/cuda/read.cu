// Reads words and does next to nothing with them: what the memory gives at most, measured in every run of `bench`.
//
//     sums[8 · group + warp] = Σ of the words that the warp read, modulo 2^32
//
// of 16-byte pieces `first` … `first + count − 1` of the buffer. Every word is in one of the sums, so none can be left out.
// Groups: any number in x; each takes tiles of 2048 pieces, eight of them a thread, all of them asked for before the first is
// added.
//
// Reference: src/backend/gpu/tests.rs, reads.
//
// Versions: 1, eight loads of 16 bytes in flight a thread, tiles one after the other by all groups (this one).
#include "common.cuh"

#define WARPS 8u
#define IN_FLIGHT 8u
#define TILE (256u * IN_FLIGHT)

struct ReadConstants {
    u32 first, count;
};

__device__ __forceinline__ u32 sum_of(uint4 piece) { return piece.x + piece.y + piece.z + piece.w; }

KERNEL(256, read)(const uint4* __restrict__ words, u32* sums, ReadConstants c) {
    begin();
    const uint4* from = words + c.first;
    const u32 thread = threadIdx.x, tiles = parts(c.count, TILE);
    u32 sum = 0;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 at = tile * TILE + thread;
        if (c.count - tile * TILE >= TILE) {
            uint4 pieces[IN_FLIGHT];
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; i++) pieces[i] = from[at + 256 * i];
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; i++) sum += sum_of(pieces[i]);
        } else {
            for (u32 i = 0; i < IN_FLIGHT; i++)
                if (at + 256 * i < c.count) sum += sum_of(from[at + 256 * i]);
        }
    }
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    if (thread % LANES == 0) sums[blockIdx.x * WARPS + thread / LANES] = sum;
}
