// Products of some outputs with some rows of x, by one warp.
//
//     sum[o · ROWS + r] = Σ_i weight[row_of[o], i] · x[x_at[r] + i]
//
// A step is 32 · COLUMNS columns. Lane l adds up those of its units: 32 · UNIT · i + UNIT · l … + UNIT − 1 of each step, in
// this order, with f32 FMAs. Formats with scales in a row fold them in eight columns at a time, the others once at the end.
// Then the lanes are added as warp_sum does. So a result has the same bits however many outputs and rows a warp takes.
//
// A step is gone through in slices of SLICE columns of each lane, so that 64 floats of x a lane are the most that stand in
// shared memory, where all warps read them. Of one row a slice is the whole step, and a lane reads 16 bytes of codes at a
// time; of several, products take longer than reading. Codes and x of a slice are read while the one before is computed.
// From four rows on, those that are not there (`rows_here`) are not multiplied.
// A vec4 of lane l stands at 33 · (its number) + l: neither writing nor reading meets a bank twice.
//
// Reference: src/backend/reference/linear.rs, matmul. x is at binding 2. Every thread of the group has to come here.
READS(2, X, float x);
READS(2, X4, vec4 x_4);

// Outputs that a warp takes at a time: src/backend/vulkan/pipelines.rs.
layout(constant_id = 1) const uint OUTS = 4;

// vec4s of x in a slice: of a lane, of a row, and those that a thread copies.
const uint LANE_FOURS = SLICE / 4;
const uint ROW_FOURS = LANES * LANE_FOURS;
const uint COPIES = (ROWS * ROW_FOURS + 255) / 256;
const uint SLICES = COLUMNS / SLICE;

// Where each row of x begins; the kernel sets it. Those past the last begin where it does.
shared uint x_at[ROWS];
shared vec4 x_slice[ROWS * LANE_FOURS * (LANES + 1)];

// The rows of the matrix, and how many rows of x there are; the kernel sets them.
uint row_of[OUTS];
uint rows_here;
float sum[OUTS * ROWS];

// Codes and scales of a slice, piece after piece of each output, and those that are on their way, with vec4s of x.
uint words[OUTS * PIECES * PIECE_WORDS];
uint words_ahead[OUTS * PIECES * PIECE_WORDS];
float scale[OUTS * PIECES];
float scale_ahead[OUTS * PIECES];
vec4 x_ahead[COPIES];

// Begins to read the codes of a slice. What is past the row's end is code 0, and meets an x of 0.
void read_codes(Weights w, uint slice, uint columns) {
    [[unroll]] for (uint i = 0; i < PIECES; i++) {
        const uint of_lane = slice % SLICES * SLICE + i * PIECE;
        const uint unit = (slice / SLICES * (COLUMNS / UNIT) + of_lane / UNIT) * LANES + THREAD % LANES;
        const bool here = unit * UNIT < columns;
        [[unroll]] for (uint o = 0; o < OUTS; o++) {
            uvec4 piece = uvec4(0);
            if (here) piece = read_piece(w, row_of[o], unit, of_lane % UNIT / PIECE);
            [[unroll]] for (uint k = 0; k < PIECE_WORDS; k++) words_ahead[(o * PIECES + i) * PIECE_WORDS + k] = piece[k];
#if !BY_ROW
            scale_ahead[o * PIECES + i] = 0.0;
            if (here) scale_ahead[o * PIECES + i] = scales[unit_scale(w, row_of[o], unit)];
#endif
        }
    }
}

// The row of a thread's vec4 in a slice of x, its lane, and its number among the lane's: neighbours read what is side by side.
uvec3 place_of_copy(uint copy) {
    const uint at = copy * 256 + THREAD, four = at % ROW_FOURS;
    if (UNIT == 4) return uvec3(at / ROW_FOURS, four % LANES, four / LANES);
    return uvec3(at / ROW_FOURS, four / LANE_FOURS, four % LANE_FOURS);
}

// Begins to read a slice of x; columns past the end are 0. `wide` says that rows are aligned to 16 bytes.
void read_x(uint slice, uint columns, bool wide) {
    [[unroll]] for (uint copy = 0; copy < COPIES; copy++) {
        const uvec3 place = place_of_copy(copy);
        const uint of_lane = slice % SLICES * SLICE + 4 * place.z;
        const uint unit = (slice / SLICES * (COLUMNS / UNIT) + of_lane / UNIT) * LANES + place.y;
        const uint column = unit * UNIT + of_lane % UNIT;
        vec4 values = vec4(0.0);
        if (place.x < ROWS && column < columns) {
            const uint from = x_at[place.x] + column;
            if (wide && column + 4 <= columns) {
                values = x_4[from / 4];
            } else {
                [[dont_unroll]] for (uint k = 0; k < min(4, columns - column); k++)
                    values = mix(values, vec4(x[from + k]), equal(uvec4(k), uvec4(0, 1, 2, 3)));
            }
        }
        x_ahead[copy] = values;
    }
}

void write_x() {
    [[unroll]] for (uint copy = 0; copy < COPIES; copy++) {
        const uvec3 place = place_of_copy(copy);
        if (place.x < ROWS) x_slice[(place.x * LANE_FOURS + place.z) * (LANES + 1) + place.y] = x_ahead[copy];
    }
}

// Adds the slice whose codes are in `words`.
void add_slice() {
    const uint lane = THREAD % LANES;
    [[unroll]] for (uint eighth = 0; eighth < SLICE / 8; eighth++) {
#if !BY_ROW
        precise float dot_8[OUTS * ROWS];
        [[unroll]] for (uint s = 0; s < OUTS * ROWS; s++) dot_8[s] = 0.0;
#endif
        [[unroll]] for (uint part = 0; part < 2; part++) {
            const uint four = 2 * eighth + part, piece = 4 * four / PIECE;
            vec4 xs[ROWS];
            [[unroll]] for (uint r = 0; r < ROWS; r++) xs[r] = x_slice[(r * LANE_FOURS + four) * (LANES + 1) + lane];
            [[unroll]] for (uint o = 0; o < OUTS; o++) {
                const vec4 ws = FOUR((o * PIECES + piece) * PIECE_WORDS, four % (PIECE / 4));
                [[unroll]] for (uint r = 0; r < ROWS; r++) {
                    const uint s = o * ROWS + r;
#if BY_ROW
                    [[unroll]] for (uint k = 0; k < 4; k++) sum[s] = fma(ws[k], xs[r][k], sum[s]);
#else
                    [[unroll]] for (uint k = 0; k < 4; k++) dot_8[s] = fma(ws[k], xs[r][k], dot_8[s]);
#endif
                }
            }
        }
#if !BY_ROW
        [[unroll]] for (uint o = 0; o < OUTS; o++)
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                const uint s = o * ROWS + r;
                sum[s] = fma(scale[o * PIECES + 8 * eighth / PIECE], dot_8[s] * DOT_FACTOR, sum[s]);
            }
#endif
    }
}

// The same of `rows_here` rows of many: eight columns are decoded, then multiplied row by row.
void add_slice_by_rows() {
    const uint lane = THREAD % LANES;
    [[unroll]] for (uint eighth = 0; eighth < SLICE / 8; eighth++) {
        vec4 ws[2 * OUTS];
        [[unroll]] for (uint o = 0; o < OUTS; o++)
            [[unroll]] for (uint part = 0; part < 2; part++) {
                const uint four = 2 * eighth + part, piece = 4 * four / PIECE;
                ws[2 * o + part] = FOUR((o * PIECES + piece) * PIECE_WORDS, four % (PIECE / 4));
            }
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            if (r >= rows_here) continue;
            vec4 xs[2];
            [[unroll]] for (uint part = 0; part < 2; part++)
                xs[part] = x_slice[(r * LANE_FOURS + 2 * eighth + part) * (LANES + 1) + lane];
            [[unroll]] for (uint o = 0; o < OUTS; o++) {
                const uint s = o * ROWS + r;
#if BY_ROW
                [[unroll]] for (uint k = 0; k < 8; k++) sum[s] = fma(ws[2 * o + k / 4][k % 4], xs[k / 4][k % 4], sum[s]);
#else
                precise float dot_8 = 0.0;
                [[unroll]] for (uint k = 0; k < 8; k++) dot_8 = fma(ws[2 * o + k / 4][k % 4], xs[k / 4][k % 4], dot_8);
                sum[s] = fma(scale[o * PIECES + 8 * eighth / PIECE], dot_8 * DOT_FACTOR, sum[s]);
#endif
            }
        }
    }
}

void add_slices(Weights w, uint columns, bool wide) {
    const uint slices = parts(columns, LANES * COLUMNS) * SLICES;
    [[unroll]] for (uint copy = 0; copy < COPIES; copy++) x_ahead[copy] = vec4(0.0);
    // the first time there is nothing to add, the last time nothing to read
    for (uint next = 0; next <= slices; next++) {
        barrier();
        write_x();
        barrier();
        [[unroll]] for (uint k = 0; k < OUTS * PIECES * PIECE_WORDS; k++) words[k] = words_ahead[k];
        [[unroll]] for (uint k = 0; k < OUTS * PIECES; k++) scale[k] = scale_ahead[k];
        read_x(next, columns, wide);
        read_codes(w, next, columns);
        if (next > 0) {
            if (ROWS >= 4) add_slice_by_rows();
            else add_slice();
        }
    }
}

#ifdef CODING_INT4_GROUPED
// Of groups that are no whole units: eight columns a lane at a time, x as it stands.
void add_eights(Weights w, uint columns) {
    const uint chunks = parts(columns, 8);
    for (uint chunk = THREAD % LANES; chunk < chunks; chunk += LANES) {
        float xs[8 * ROWS];
        [[unroll]] for (uint r = 0; r < ROWS; r++)
            [[unroll]] for (uint k = 0; k < 8; k++)
                xs[8 * r + k] = 8 * chunk + k < columns ? x[x_at[r] + 8 * chunk + k] : 0.0;
        [[unroll]] for (uint o = 0; o < OUTS; o++) {
            float ws[8];
            const float scale = eight(w, row_of[o], chunk, ws);
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                precise float dot_8 = ws[0] * xs[8 * r];
                [[unroll]] for (uint k = 1; k < 8; k++) dot_8 = fma(ws[k], xs[8 * r + k], dot_8);
                sum[o * ROWS + r] = fma(scale, dot_8, sum[o * ROWS + r]);
            }
        }
    }
}
#endif

// Makes `sum` of `row_of` and `x_at`, in every lane.
void product(Weights w, uint columns, bool wide) {
    nothing = columns >> 31;
    barrier();
    [[unroll]] for (uint s = 0; s < OUTS * ROWS; s++) sum[s] = 0.0;
#ifdef CODING_INT4_GROUPED
    if (HAS_UNITS(w)) {
        add_slices(w, columns, wide);
    } else {
        add_eights(w, columns);
        barrier();
    }
#else
    add_slices(w, columns, wide);
#endif
    WARP_SUMS(sum, OUTS * ROWS);
#if BY_ROW
    [[unroll]] for (uint o = 0; o < OUTS; o++)
        [[unroll]] for (uint r = 0; r < ROWS; r++) sum[o * ROWS + r] *= row_scale(w, row_of[o]);
#endif
}
