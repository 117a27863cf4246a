// Products of some outputs with some rows of x, by one warp.
//
//     sum[o · ROWS + r] = Σ_i weight[row_of[o], i] · x[x_at[r] + i]
//
// A step is 32 · COLUMNS columns. Lane l adds up those of its units: 32 · UNIT · i + UNIT · l … + UNIT − 1 of each step, in
// this order, with f32 FMAs. Formats with scales in a row fold them in eight columns at a time, the others once at the end.
// Then the lanes are added as warp_sum does. So a result has the same bits however many outputs and rows a warp takes.
//
// Codes are read 16 bytes a lane at a time where a unit has as many, AHEAD steps before they are used. x goes through shared
// memory, where all warps read it in the order of lanes: SLICE columns of each lane at a time, so that 64 floats a lane are
// the most. A vec4 of lane l stands at 33 · (its number) + l: neither writing nor reading meets a bank twice.
//
// Reference: src/backend/reference/linear.rs, matmul. x is at binding 2. Every thread of the group has to come here.
READS(2, X, float x);
READS(2, X4, vec4 x_4);

// Outputs that a warp takes at a time: src/backend/vulkan/pipelines.rs.
layout(constant_id = 1) const uint OUTS = 4;

// Steps whose codes are on their way.
const uint AHEAD = 2;
// Columns of a lane that stand in shared memory.
const uint SLICE = COLUMNS * ROWS <= 64 ? COLUMNS : 64 / ROWS;
// vec4s of x in a slice: of a lane, of a row, and those that a thread copies.
const uint LANE_FOURS = SLICE / 4;
const uint ROW_FOURS = LANES * LANE_FOURS;
const uint COPIES = (ROWS * ROW_FOURS + 255) / 256;

// Where each row of x begins; the kernel sets it.
shared uint x_at[ROWS];
shared vec4 x_slice[ROWS * LANE_FOURS * (LANES + 1)];

// The rows of the matrix; the kernel sets them.
uint row_of[OUTS];
float sum[OUTS * ROWS];

// Codes and scales of the steps that are on their way, and vec4s of x for the next slice.
uint ahead[AHEAD * OUTS * WORDS];
float scale_ahead[AHEAD * OUTS];
vec4 x_ahead[COPIES];

// Begins to read the codes of a step for place `a`. What is past the row's end is code 0, and meets an x of 0.
void read_codes(Weights w, uint a, uint step, uint columns) {
    [[unroll]] for (uint i = 0; i < COLUMNS / UNIT; i++) {
        const uint unit = (step * (COLUMNS / UNIT) + i) * LANES + THREAD % LANES;
        const bool here = unit * UNIT < columns;
        [[unroll]] for (uint o = 0; o < OUTS; o++) {
            uint words[UNIT_WORDS];
            [[unroll]] for (uint k = 0; k < UNIT_WORDS; k++) words[k] = 0;
            if (here) read_unit(w, row_of[o], unit, words);
            [[unroll]] for (uint k = 0; k < UNIT_WORDS; k++) ahead[(a * OUTS + o) * WORDS + i * UNIT_WORDS + k] = words[k];
#if !BY_ROW
            scale_ahead[a * OUTS + o] = here ? scales[unit_scale(w, row_of[o], unit)] : 0.0;
#endif
        }
    }
}

// Begins to read a slice of a step of x; columns past the end are 0. `wide` says that rows are aligned to 16 bytes.
void read_x(uint step, uint slice, uint columns, bool wide) {
    [[unroll]] for (uint copy = 0; copy < COPIES; copy++) {
        const uint at = copy * 256 + THREAD, four = at % ROW_FOURS;
        // neighbours read what is side by side
        const uint lane = UNIT == 4 ? four % LANES : four / LANE_FOURS;
        const uint of_lane = slice * SLICE + 4 * (UNIT == 4 ? four / LANES : four % LANE_FOURS);
        const uint column = step * LANES * COLUMNS + (of_lane / UNIT * LANES + lane) * UNIT + of_lane % UNIT;
        vec4 values = vec4(0.0);
        if (at < ROWS * ROW_FOURS && column < columns) {
            const uint from = x_at[at / ROW_FOURS] + column;
            if (wide && column + 4 <= columns) {
                values = x_4[from / 4];
            } else {
                [[unroll]] for (uint k = 0; k < 4; k++) if (column + k < columns) values[k] = x[from + k];
            }
        }
        x_ahead[copy] = values;
    }
}

void write_slice() {
    [[unroll]] for (uint copy = 0; copy < COPIES; copy++) {
        const uint at = copy * 256 + THREAD, four = at % ROW_FOURS;
        const uint lane = UNIT == 4 ? four % LANES : four / LANE_FOURS;
        const uint number = at / ROW_FOURS * LANE_FOURS + (UNIT == 4 ? four / LANES : four % LANE_FOURS);
        if (at < ROWS * ROW_FOURS) x_slice[number * (LANES + 1) + lane] = x_ahead[copy];
    }
}

// Adds a slice of the step at place `a`.
void add_slice(uint a, uint slice) {
    const uint lane = THREAD % LANES;
    [[unroll]] for (uint eighth = 0; eighth < SLICE / 8; eighth++) {
#if !BY_ROW
        precise float dot_8[OUTS * ROWS];
        [[unroll]] for (uint s = 0; s < OUTS * ROWS; s++) dot_8[s] = 0.0;
#endif
        [[unroll]] for (uint part = 0; part < 2; part++) {
            const uint four = 2 * eighth + part;
            vec4 xs[ROWS];
            [[unroll]] for (uint r = 0; r < ROWS; r++) xs[r] = x_slice[(r * LANE_FOURS + four) * (LANES + 1) + lane];
            [[unroll]] for (uint o = 0; o < OUTS; o++) {
                const uint number = slice * LANE_FOURS + four;
                const vec4 ws = FOUR((a * OUTS + o) * WORDS, number);
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
            [[unroll]] for (uint r = 0; r < ROWS; r++)
                sum[o * ROWS + r] = fma(scale_ahead[a * OUTS + o], dot_8[o * ROWS + r] * DOT_FACTOR, sum[o * ROWS + r]);
#endif
    }
}

void add_steps(Weights w, uint columns, bool wide) {
    const uint steps = parts(columns, LANES * COLUMNS), slices = COLUMNS / SLICE;
    read_x(0, 0, columns, wide);
    [[unroll]] for (uint a = 0; a < AHEAD; a++) read_codes(w, a, a, columns);
    for (uint first = 0; first < steps; first += AHEAD) {
        [[unroll]] for (uint a = 0; a < AHEAD; a++) {
            const uint step = first + a;
            if (step < steps) {
                [[unroll]] for (uint slice = 0; slice < slices; slice++) {
                    barrier();
                    write_slice();
                    barrier();
                    if (slice + 1 < slices) {
                        read_x(step, slice + 1, columns, wide);
                    } else if (step + 1 < steps) {
                        read_x(step + 1, 0, columns, wide);
                    }
                    add_slice(a, slice);
                }
                read_codes(w, a, step + AHEAD, columns);
            }
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
    barrier();
    [[unroll]] for (uint s = 0; s < OUTS * ROWS; s++) sum[s] = 0.0;
#ifdef CODING_INT4_GROUPED
    if (HAS_UNITS(w)) {
        add_steps(w, columns, wide);
    } else {
        add_eights(w, columns);
        barrier();
    }
#else
    add_steps(w, columns, wide);
#endif
    WARP_SUMS(sum, OUTS * ROWS);
#if BY_ROW
    [[unroll]] for (uint o = 0; o < OUTS; o++)
        [[unroll]] for (uint r = 0; r < ROWS; r++) sum[o * ROWS + r] *= row_scale(w, row_of[o]);
#endif
}
