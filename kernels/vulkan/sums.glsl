// Sums and largest values of the 32 lanes of each warp, in every lane: pairs 16 apart, then 8, 4, 2, 1.
//
// Every thread of the group has to come here. AT_ONCE sums go through shared memory together.
#ifdef SUBGROUPS
shared float lanes_of[WARPS * LANES];

// The value of the lane that is so far apart, which may be one of another subgroup.
float from_lane(float value, uint apart) {
    if (apart < gl_SubgroupSize) return subgroupShuffleXor(value, apart);
    barrier();
    lanes_of[THREAD] = value;
    barrier();
    return lanes_of[THREAD ^ apart];
}

float warp_sum(float value) {
    [[unroll]] for (uint apart = 16; apart > 0; apart /= 2) value += from_lane(value, apart);
    return value;
}

float warp_max(float value) {
    [[unroll]] for (uint apart = 16; apart > 0; apart /= 2) value = max(value, from_lane(value, apart));
    return value;
}

#define WARP_SUMS(sums, count) [[unroll]] for (uint s = 0; s < (count); s++) sums[s] = warp_sum(sums[s])
#else
#define AT_ONCE 4
// The values of a warp's lanes, and behind them their sum.
#define ROOM (LANES + 1)
shared float lanes_of[AT_ONCE * WARPS * ROOM];

// The sum of the lanes at `from`, behind them.
void add_lanes(uint from) {
    float sums[LANES / 2];
    [[unroll]] for (uint i = 0; i < 16; i++) sums[i] = lanes_of[from + i] + lanes_of[from + i + 16];
    [[unroll]] for (uint i = 0; i < 8; i++) sums[i] += sums[i + 8];
    [[unroll]] for (uint i = 0; i < 4; i++) sums[i] += sums[i + 4];
    [[unroll]] for (uint i = 0; i < 2; i++) sums[i] += sums[i + 2];
    lanes_of[from + LANES] = sums[0] + sums[1];
}

// The sums of `count` values of each thread, in their place.
#define WARP_SUMS(sums, count)                                                                      \
    for (uint batch = 0; batch < (count); batch += AT_ONCE) {                                       \
        const uint left = min(AT_ONCE, (count) - batch);                                            \
        for (uint s = 0; s < left; s++)                                                             \
            lanes_of[(s * WARPS + THREAD / LANES) * ROOM + THREAD % LANES] = sums[batch + s];       \
        barrier();                                                                                  \
        if (THREAD < left * WARPS) add_lanes(THREAD * ROOM);                                        \
        barrier();                                                                                  \
        for (uint s = 0; s < left; s++)                                                             \
            sums[batch + s] = lanes_of[(s * WARPS + THREAD / LANES) * ROOM + LANES];                \
    }

float warp_sum(float value) {
    float sums[1] = float[1](value);
    WARP_SUMS(sums, 1)
    return sums[0];
}

float warp_max(float value) {
    const uint from = THREAD / LANES * ROOM;
    lanes_of[from + THREAD % LANES] = value;
    barrier();
    if (THREAD % LANES == 0) {
        for (uint i = 1; i < LANES; i++) value = max(value, lanes_of[from + i]);
        lanes_of[from + LANES] = value;
    }
    barrier();
    return lanes_of[from + LANES];
}
#endif
