// Stored weights as halves: 32 columns of a row at a time, which a thread reads at once.
//
// Every code is a half without rounding; scales are not multiplied in. An integer stands in the low bits of 1024 + n, whose
// half is 0x6400 | n. Two columns are decoded in one word, so columns stand in another order than they are stored in: of each
// run of RUN, column i is at 2 i and column RUN / 2 + i at 2 i + 1. `round_halves` lays x so, too. A kernel that includes this
// comes once for each coding but f32: CODING_NAME is defined. A coding says
//
//     WORDS          words of the codes of 32 columns
//     RUN            see above
//     read_32        those words
//     two(i)         halves 2 i and 2 i + 1 of what stands in `ahead`
//     scale_of       the scale of 32 columns of a row
//
// Reference: src/quantize.rs, Decoder.
#include "stored.glsl"

// Two integers of ten bits at most, less `zero`.
f16vec2 integers(uint fields, float16_t zero) { return unpackFloat2x16(fields | 0x64006400u) - (float16_t(1024.0) + zero); }

#if defined(CODING_INT8_ROW) || defined(CODING_FP8_E4M3_B128)
#define WORDS 8
#define RUN 4

void read_32(Weights w, uint row, uint chunk, uint columns, out uint words[WORDS]) {
    const uint from = (w.codes_at + row * w.stride) / 4 + 2 * chunk;
    [[unroll]] for (uint half_of = 0; half_of < 2; half_of++) {
        uvec4 codes_of = uvec4(0);
        if (32 * chunk + 16 * half_of < columns) codes_of = codes_4[from + half_of];
        [[unroll]] for (uint k = 0; k < 4; k++) words[4 * half_of + k] = codes_of[k];
    }
}
#endif

#if defined(CODING_INT8_ROW)
// b ^ 0x80 is b + 128.
#define two(i) integers((ahead[(i) / 2] ^ 0x80808080u) >> 8 * ((i) % 2) & 0x00ff00ffu, float16_t(128.0))

float scale_of(Weights w, uint row, uint chunk) { return scales[w.scales_at + row]; }

#elif defined(CODING_INT4_ROW) || defined(CODING_INT4_GROUPED)
#define WORDS 4
#define RUN 8

void read_32(Weights w, uint row, uint chunk, uint columns, out uint words[WORDS]) {
    uvec4 codes_of = uvec4(0);
    if (32 * chunk < columns) codes_of = codes_4[(w.codes_at + row * w.stride) / 4 + chunk];
    [[unroll]] for (uint k = 0; k < 4; k++) words[k] = codes_of[k];
}

#define two(i) integers(ahead[(i) / 4] >> 4 * ((i) % 4) & 0x000f000fu, float16_t(8.0))

#if defined(CODING_INT4_ROW)
float scale_of(Weights w, uint row, uint chunk) { return scales[w.scales_at + row]; }
#else
float scale_of(Weights w, uint row, uint chunk) {
    const uint size = w.group_size;
    // division takes as long as the rest
    const uint group = (size & (size - 1)) == 0 ? 32 * chunk >> findMSB(size) : 32 * chunk / size;
    return scales[w.scales_at + row * w.row_scales + min(group, w.row_scales - 1)];
}
#endif

#elif defined(CODING_INT3_G64)
#define WORDS 3
#define RUN 16

// Six words a group of 64: two low bits of each in four, the high bits in two.
void read_32(Weights w, uint row, uint chunk, uint columns, out uint words[WORDS]) {
    [[unroll]] for (uint k = 0; k < WORDS; k++) words[k] = 0;
    if (32 * chunk >= columns) return;
    const uint group = w.codes_at + row * w.stride + 6 * (chunk / 2);
    const uvec2 low = codes_2[group / 2 + chunk % 2];
    words[0] = low.x;
    words[1] = low.y;
    words[2] = codes[group + 4 + chunk % 2];
}

// The bits of columns i and i + 8 of 16, at bits 2 and 18.
uint high_bits(uint high, uint i) { return ((high & 0xffu) | (high & 0xff00u) << 8) >> i << 2 & 0x00040004u; }

#define two(i)                                                        \
    integers((ahead[(i) / 8] >> 2 * ((i) % 8) & 0x00030003u) |        \
                 high_bits(ahead[2] >> 16 * ((i) / 8), (i) % 8),      \
             float16_t(4.0))

float scale_of(Weights w, uint row, uint chunk) { return scales[w.scales_at + row * w.row_scales + chunk / 2]; }

#elif defined(CODING_INT2_ROW)
#define WORDS 2
#define RUN 16

void read_32(Weights w, uint row, uint chunk, uint columns, out uint words[WORDS]) {
    uvec2 codes_of = uvec2(0);
    if (32 * chunk < columns) codes_of = codes_2[(w.codes_at + row * w.stride) / 2 + chunk];
    words[0] = codes_of.x;
    words[1] = codes_of.y;
}

#define two(i) integers(ahead[(i) / 8] >> 2 * ((i) % 8) & 0x00030003u, float16_t(2.0))

float scale_of(Weights w, uint row, uint chunk) { return scales[w.scales_at + row]; }

#elif defined(CODING_FP8_E4M3_B128)
// e4m3 in bits 0–7 and 16–23. Moved to the place of a half's sign, exponent and mantissa the exponent is 8 too low; codes below
// 2^−6 have none, and stand behind a one that is taken away again. No half here is subnormal.
f16vec2 two_e4m3(uint word) {
    const uint magnitudes = word & 0x007f007fu, signs = (word & 0x00800080u) << 8;
    const f16vec2 value = unpackFloat2x16((magnitudes << 7) + 0x20002000u);
    // 2 (2^−7 (1 + m / 8) − 2^−7) = m 2^−9
    const f16vec2 small = (value - float16_t(0.0078125)) * float16_t(2.0);
    f16vec2 at = mix(value, small, lessThan(value, f16vec2(0.015625)));
    if (((magnitudes + 0x00010001u) & 0x00800080u) != 0) {
        [[unroll]] for (uint k = 0; k < 2; k++)
            if ((magnitudes >> 16 * k & 0x7fu) == 0x7fu) at[k] = unpackFloat2x16(0x7e00u).x;
    }
    return unpackFloat2x16(packFloat2x16(at) | signs);
}

#define two(i) two_e4m3(ahead[(i) / 2] >> 8 * ((i) % 2) & 0x00ff00ffu)

float scale_of(Weights w, uint row, uint chunk) { return scales[w.scales_at + row / 128 * w.row_scales + chunk / 4]; }
#else
#error "weights are read in a coding that has halves: CODING_NAME is to be defined"
#endif
