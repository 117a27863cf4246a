// Products of some outputs with some rows of x, by one warp, in the order of kernels/cuda/product.cuh.
//
// x is at binding 2. Every thread of the group has to come here.
READS(2, X, float x);
READS(2, X4, vec4 x_4);

// Outputs that a warp takes at a time.
const uint OUTS = 4;

// Eight columns of the row of x at `from`; those past its end are 0.
void eight_of_x(uint from, uint chunk, uint columns, bool wide, out float values[8]) {
    const uint at = 8 * chunk;
    if (wide && at + 8 <= columns) {
        const vec4 a = x_4[(from + at) / 4], b = x_4[(from + at) / 4 + 1];
        values = float[8](a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w);
    } else {
        [[unroll]] for (uint k = 0; k < 8; k++) values[k] = at + k < columns ? x[from + at + k] : 0.0;
    }
}

// sum[o · ROWS + r]: row rows[o] of w with the row of x at from[r]; in every lane. `wide` says that each is aligned.
#define PRODUCT(w, rows, from, columns, wide, sum)                                                               \
    {                                                                                                            \
        [[unroll]] for (uint s = 0; s < OUTS * ROWS; s++) sum[s] = 0.0;                                          \
        const uint chunks = parts(columns, 8);                                                                   \
        for (uint chunk = THREAD % LANES; chunk < chunks; chunk += LANES) {                                      \
            float xs[8 * ROWS];                                                                                  \
            [[unroll]] for (uint r = 0; r < ROWS; r++) {                                                         \
                float values[8];                                                                                 \
                eight_of_x(from[r], chunk, columns, wide, values);                                               \
                [[unroll]] for (uint k = 0; k < 8; k++) xs[8 * r + k] = values[k];                               \
            }                                                                                                    \
            [[unroll]] for (uint o = 0; o < OUTS; o++) {                                                         \
                float ws[8];                                                                                     \
                const float scale = eight(w, rows[o], chunk, ws);                                                \
                [[unroll]] for (uint r = 0; r < ROWS; r++) {                                                     \
                    if (BY_ROW) {                                                                                \
                        [[unroll]] for (uint k = 0; k < 8; k++)                                                  \
                            sum[o * ROWS + r] = fma(ws[k], xs[8 * r + k], sum[o * ROWS + r]);                    \
                    } else {                                                                                     \
                        precise float dot_8 = ws[0] * xs[8 * r];                                                 \
                        [[unroll]] for (uint k = 1; k < 8; k++) dot_8 = fma(ws[k], xs[8 * r + k], dot_8);        \
                        sum[o * ROWS + r] = fma(scale, dot_8, sum[o * ROWS + r]);                                \
                    }                                                                                            \
                }                                                                                                \
            }                                                                                                    \
        }                                                                                                        \
        WARP_SUMS(sum, OUTS * ROWS);                                                                             \
        if (BY_ROW) {                                                                                            \
            [[unroll]] for (uint o = 0; o < OUTS; o++) {                                                         \
                const float scale = row_scale(w, rows[o]);                                                       \
                [[unroll]] for (uint r = 0; r < ROWS; r++) sum[o * ROWS + r] *= scale;                           \
            }                                                                                                    \
        }                                                                                                        \
    }
