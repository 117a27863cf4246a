// Products on cooperative matrices: of halves, in the fast mode.
//
//     out[o, r] = 2^e_r · Σ_ranges Σ_groups scale[o, group] · Σ_i code[o, i] · half[r, i]
//
// Codes are halves without rounding; x was rounded and laid by `round_halves`. Columns go in blocks of 64, blocks in RANGES
// ranges as long as each other but the last. A group is what has one scale; its products are added up by the device, in f32, a
// tile of TILE_K columns after the other, then the groups of a range and the ranges in their order. So a result has the same
// bits in every shape that a group of threads has: with few rows of x it computes all ranges at the same time, with many one
// after the other. Reference: src/backend/reference/linear.rs, matmul, with x rounded to a half.
//
// x is at binding 2. Every thread of the group has to come here. The kernel sets `x_at`, `rows_here` and `row_of`, and says in
// `put` what becomes of a result.
READS(2, X, uint x);
READS(2, X4, uvec4 x_4);

// Shape of the device's matrices, lanes of a subgroup, and how many subgroups stand side by side over rows of x:
// src/backend/vulkan/matrices.rs.
layout(constant_id = 2) const uint TILE_M = 16;
layout(constant_id = 3) const uint TILE_N = 16;
layout(constant_id = 4) const uint TILE_K = 16;
layout(constant_id = 5) const uint SUBGROUP_LANES = 32;
layout(constant_id = 6) const uint ACROSS = 1;

const uint RANGES = 4;
const bool MANY = ROWS > 16;
// Ranges at the same time, and outputs of a group of threads.
const uint PLANES = MANY ? 1 : RANGES;
const uint OUTPUTS = 128 / PLANES;
const uint BLOCK = 64;
// vec4s from one row of a tile to the next: one more than a block has, so that rows begin at different banks.
const uint STEP = BLOCK / 8 + 1;
// Subgroups of a plane, those one below the other, and the tiles of each.
const uint OF_PLANE = 256 / SUBGROUP_LANES / PLANES;
const uint DOWN = OF_PLANE / ACROSS < OUTPUTS / TILE_M ? OF_PLANE / ACROSS : OUTPUTS / TILE_M;
const uint TILES_M = OUTPUTS / TILE_M / DOWN;
const uint TILES_N = ROWS / TILE_N / ACROSS;
const uint TILES = TILES_M * TILES_N;

#define MATRIX(type, rows, columns, use) coopmat<type, gl_ScopeSubgroup, rows, columns, use>
#define SUMS MATRIX(float, TILE_M, TILE_N, gl_MatrixUseAccumulator)
#define COLUMN_MAJOR gl_CooperativeMatrixLayoutColumnMajor
#define ROW_MAJOR gl_CooperativeMatrixLayoutRowMajor

// Where each row of x begins, in words.
shared uint x_at[ROWS];
shared uvec4 a_tile[PLANES * OUTPUTS * STEP];
shared uvec4 b_tile[PLANES * ROWS * STEP];
// Of the first 32 columns of a block, then of the others.
shared float scale_tile[2 * PLANES * OUTPUTS];

// A thread's row of the matrix, and how many rows of x there are: nothing is read of the others, which are 0.
uint row_of, rows_here;
// Codes, scale and x that are on their way.
uint ahead[WORDS];
float scale_ahead;
uvec4 x_ahead[2];

void put(uint o, uint r, float value);

// The output of a group of threads that a thread reads the codes of, its plane, and which half of a block.
uvec3 place_of_codes() { return uvec3(THREAD / 2 % OUTPUTS, THREAD / 2 / OUTPUTS, THREAD % 2); }

// The block of a plane in a step, of `blocks`; past the last of its range there is none.
uint block_of(uint plane, uint step, uint blocks) {
    const uint of_range = parts(blocks, RANGES);
    if (MANY) return step;
    return step < of_range ? min(plane * of_range + step, blocks) : blocks;
}

void read_ahead(Weights w, uint step, uint blocks, uint columns) {
    const uvec3 place = place_of_codes();
    const uint of_codes = block_of(place.y, step, blocks), chunk = 2 * of_codes + place.z;
    read_32(w, row_of, chunk, columns, ahead);
    // a group that ends within a block has its scale until the block does
    scale_ahead = of_codes < blocks ? scale_of(w, row_of, chunk) : 0.0;
    [[unroll]] for (uint copy = 0; copy < 2; copy++) {
        const uint at = 256 * copy + THREAD, row = at / 8 % ROWS;
        const uint block = block_of(at / 8 / ROWS, step, blocks);
        x_ahead[copy] = uvec4(0);
        if (block < blocks && row < rows_here) x_ahead[copy] = x_4[x_at[row] / 4 + 1 + 8 * block + at % 8];
    }
}

void write_tiles(uint step) {
    const uvec3 place = place_of_codes();
    const uint row = place.y * OUTPUTS + place.x;
    [[unroll]] for (uint four = 0; four < 4; four++) {
        uvec4 halves;
        [[unroll]] for (uint k = 0; k < 4; k++) halves[k] = packFloat2x16(two(4 * four + k));
        a_tile[row * STEP + 4 * place.z + four] = halves;
    }
    scale_tile[place.z * PLANES * OUTPUTS + row] = scale_ahead;
    [[unroll]] for (uint copy = 0; copy < 2; copy++) {
        const uint at = 256 * copy + THREAD;
        if (step == 0 || at / 8 % ROWS < rows_here) b_tile[at / 8 * STEP + at % 8] = x_ahead[copy];
    }
}

// A value of what was written to `a_tile` as floats.
float written(uint at) { return uintBitsToFloat(a_tile[at / 4][at % 4]); }

// `flush` are chunks of 32 columns with one scale; 0 where a row has one.
void half_product(Weights w, uint columns, uint flush) {
    const uint blocks = parts(columns, BLOCK), of_range = parts(blocks, RANGES);
    const uint steps = MANY ? blocks : of_range;
    const uint plane = gl_SubgroupID % PLANES, of_plane = gl_SubgroupID / PLANES;
    const bool busy = of_plane < DOWN * ACROSS;
    const uint first_m = of_plane % DOWN * TILES_M * TILE_M, first_n = of_plane / DOWN * TILES_N * TILE_N;
    SUMS group[TILES], range[TILES], total[TILES];
    [[unroll]] for (uint t = 0; t < TILES; t++) group[t] = range[t] = total[t] = SUMS(0.0);
    barrier();
    read_ahead(w, 0, blocks, columns);
    for (uint step = 0; step < steps; step++) {
        barrier();
        write_tiles(step);
        barrier();
        read_ahead(w, step + 1, blocks, columns);
        const uint block = block_of(plane, step, blocks);
        if (!busy || block >= blocks || !MANY && block >= (plane + 1) * of_range) continue;
        const bool last = (block + 1) % of_range == 0 || block + 1 == blocks;
        [[unroll]] for (uint chunk = 0; chunk < 2; chunk++) {
            [[unroll]] for (uint k = 0; k < 32 / TILE_K; k++) {
                const uint at = 4 * chunk + k * TILE_K / 8;
                MATRIX(float16_t, TILE_M, TILE_K, gl_MatrixUseA) a[TILES_M];
                [[unroll]] for (uint m = 0; m < TILES_M; m++) {
                    const uint row = plane * OUTPUTS + first_m + m * TILE_M;
                    coopMatLoad(a[m], a_tile, row * STEP + at, STEP, ROW_MAJOR);
                }
                [[unroll]] for (uint n = 0; n < TILES_N; n++) {
                    MATRIX(float16_t, TILE_K, TILE_N, gl_MatrixUseB) b;
                    coopMatLoad(b, b_tile, (plane * ROWS + first_n + n * TILE_N) * STEP + at, STEP, COLUMN_MAJOR);
                    [[unroll]] for (uint m = 0; m < TILES_M; m++)
                        group[n * TILES_M + m] = coopMatMulAdd(a[m], b, group[n * TILES_M + m]);
                }
            }
            const bool whole = flush != 0 && (2 * block + chunk + 1) % flush == 0;
            if (!whole && !(last && chunk == 1)) continue;
            [[unroll]] for (uint m = 0; m < TILES_M; m++) {
                // the same scale all along a row
                SUMS scale;
                coopMatLoad(scale, scale_tile, (chunk * PLANES + plane) * OUTPUTS + first_m + m * TILE_M, 0, COLUMN_MAJOR);
                [[unroll]] for (uint n = 0; n < TILES_N; n++) {
                    const uint t = n * TILES_M + m;
                    precise SUMS scaled = group[t] * scale;
                    range[t] = range[t] + scaled;
                    group[t] = SUMS(0.0);
                }
            }
        }
        if (MANY && last) {
            [[unroll]] for (uint t = 0; t < TILES; t++) {
                total[t] = total[t] + range[t];
                range[t] = SUMS(0.0);
            }
        }
    }
    barrier();
    if (!MANY) {
        [[unroll]] for (uint t = 0; t < TILES; t++) {
            const uint m = first_m + t % TILES_M * TILE_M, n = first_n + t / TILES_M * TILE_N;
            if (busy) coopMatStore(range[t], a_tile, ((plane * ROWS + n) * OUTPUTS + m) / 4, OUTPUTS / 4, COLUMN_MAJOR);
        }
        barrier();
        for (uint at = THREAD; at < OUTPUTS * ROWS; at += 256) {
            float sum = 0.0;
            [[unroll]] for (uint of = 0; of < PLANES; of++) sum += written(of * OUTPUTS * ROWS + at);
            if (at / OUTPUTS < rows_here) put(at % OUTPUTS, at / OUTPUTS, sum * uintBitsToFloat(x[x_at[at / OUTPUTS]]));
        }
        return;
    }
    const uint from = gl_SubgroupID * TILE_M * TILE_N;
    [[unroll]] for (uint t = 0; t < TILES; t++) {
        if (busy) coopMatStore(total[t], a_tile, from / 4, TILE_M / 4, COLUMN_MAJOR);
        barrier();
        for (uint at = gl_SubgroupInvocationID; busy && at < TILE_M * TILE_N; at += SUBGROUP_LANES) {
            const uint m = first_m + t % TILES_M * TILE_M + at % TILE_M;
            const uint n = first_n + t / TILES_M * TILE_N + at / TILE_M;
            if (n < rows_here) put(m, n, written(from + at) * uintBitsToFloat(x[x_at[n]]));
        }
        barrier();
    }
}
