// Stored weights: one of a row, or a piece of a row at a time, which a lane reads at once and decodes four by four.
//
// A matrix lies as kernels/cuda/weights.cuh says: rows of whole 16 bytes, read as words. A kernel that includes this comes
// once for each coding: CODING_NAME is defined. For products a coding says
//
//     UNIT, COLUMNS          columns of a unit, and of a lane's units in a step of a product
//     BY_ROW                 whether a row has one scale, or none: `row_scale`; else a unit has one, at `unit_scale`
//     DOT_FACTOR             by which decoded values are too small, where a unit has a scale
//     PIECE_WORDS            words of the codes of a piece: PIECE columns of a unit
//     read_piece             a piece of a unit
//     FOUR(at, number)       the four columns of that number of the piece that stands from `words[at]` on, both constant
//                            once loops are unrolled
//
// Small integers are decoded where they stand in a word: with the exponent of 2^(23 − p) above it, a field at bit p counts
// ones. So a weight takes one and-or and a subtraction, which is exact. Reference: src/quantize.rs, Decoder.
//
// An and-or with two constants is two instructions on an NVIDIA GPU, which have room for one each; with one constant it is a
// single one. So the exponent is a sum with `nothing`, which no compiler knows to be 0: `product` sets it.
#include "stored.glsl"

// Columns of a lane in a slice of a product (product.glsl), and of a unit in it; how many units that are.
#define SLICE (COLUMNS * ROWS <= 64 ? COLUMNS : 64 / ROWS)
#define PIECE (SLICE < UNIT ? SLICE : UNIT)
#define PIECES (SLICE / PIECE)

uint nothing = 0;

// The number 2^(23 − p), and its bits for an and-or.
#define POWER(p) uintBitsToFloat((150u - (p)) << 23)
#define POWER_BITS(p) (((150u - (p)) << 23) + nothing)

// One field of a word, which stands at bit p ≤ 23 − its width, less `zero`.
float field(uint word, uint mask, uint p, float zero) {
    precise const float above = uintBitsToFloat((word & (mask << p)) | POWER_BITS(p));
    precise const float value = above - (POWER(p) + zero);
    return value;
}

#if defined(CODING_F32)
#define BY_ROW 1
#define UNIT 4
#define COLUMNS 8
#define PIECE_WORDS 4

uvec4 read_piece(Weights w, uint row, uint unit, uint part) { return codes_4[(w.codes_at + row * w.stride) / 4 + unit]; }

#define FOUR(at, number) uintBitsToFloat(uvec4(words[at], words[(at) + 1], words[(at) + 2], words[(at) + 3]))

float row_scale(Weights w, uint row) { return 1.0; }

float one(Weights w, uint row, uint column) { return uintBitsToFloat(codes[w.codes_at + row * w.stride + column]); }

#elif defined(CODING_INT8_ROW)
#define BY_ROW 1
#define UNIT 16
#define COLUMNS 32
#define PIECE_WORDS (PIECE / 4)

uvec4 read_piece(Weights w, uint row, uint unit, uint part) {
    const uint from = w.codes_at + row * w.stride;
    return PIECE == UNIT ? codes_4[from / 4 + unit] : uvec4(codes_2[from / 2 + 2 * unit + part], 0, 0);
}

// b ^ 0x80 is b + 128.
vec4 four_bytes(uint word) {
    const uint raised = word ^ 0x80808080u, upper = raised >> 16;
    return vec4(field(raised, 255u, 0, 128.0), field(raised, 255u, 8, 128.0), field(upper, 255u, 0, 128.0),
                field(upper, 255u, 8, 128.0));
}

#define FOUR(at, number) four_bytes(words[(at) + (number)])

float row_scale(Weights w, uint row) { return scales[w.scales_at + row]; }

float one(Weights w, uint row, uint column) {
    const uint word = codes[w.codes_at + row * w.stride + column / 4];
    return float(bitfieldExtract(int(word), int(8 * (column % 4)), 8)) * row_scale(w, row);
}

#elif defined(CODING_INT4_ROW) || defined(CODING_INT4_GROUPED)
#define UNIT 32
#define COLUMNS 32
#define PIECE_WORDS (PIECE / 8)

uvec4 read_piece(Weights w, uint row, uint unit, uint part) {
    const uint from = w.codes_at + row * w.stride;
    if (PIECE == UNIT) return codes_4[from / 4 + unit];
    if (PIECE == UNIT / 2) return uvec4(codes_2[from / 2 + 2 * unit + part], 0, 0);
    return uvec4(codes[from + 4 * unit + part], 0, 0, 0);
}

// The lower four nibbles of a word.
vec4 four_nibbles(uint word) {
    return vec4(field(word, 15u, 0, 8.0), field(word, 15u, 4, 8.0), field(word, 15u, 8, 8.0), field(word, 15u, 12, 8.0));
}

#define FOUR(at, number) four_nibbles(words[(at) + (number) / 2] >> 16 * ((number) % 2))

float nibble(Weights w, uint row, uint column) {
    const uint word = codes[w.codes_at + row * w.stride + column / 8];
    return float(bitfieldExtract(word, int(4 * (column % 8)), 4)) - 8.0;
}

#if defined(CODING_INT4_ROW)
#define BY_ROW 1
float row_scale(Weights w, uint row) { return scales[w.scales_at + row]; }

float one(Weights w, uint row, uint column) { return nibble(w, row, column) * row_scale(w, row); }
#else
#define BY_ROW 0
#define DOT_FACTOR 1.0

// Whether no unit has two scales.
#define HAS_UNITS(w) ((w).group_size % UNIT == 0 || (w).row_scales == 1)

uint unit_scale(Weights w, uint row, uint unit) {
    const uint size = w.group_size;
    // division takes as long as the rest
    const uint group = (size & (size - 1)) == 0 ? unit * UNIT >> findMSB(size) : unit * UNIT / size;
    return w.scales_at + row * w.row_scales + min(group, w.row_scales - 1);
}

// Eight columns of groups of any size, and the scale that they share.
float eight(Weights w, uint row, uint chunk, out float values[8]) {
    const uint word = codes[w.codes_at + row * w.stride + chunk];
    [[unroll]] for (int k = 0; k < 8; k++) values[k] = float(bitfieldExtract(word, 4 * k, 4)) - 8.0;
    const uint from = w.scales_at + row * w.row_scales;
    if (w.group_size % 8 == 0) return scales[from + 8 * chunk / w.group_size];
    // eight columns of several groups: each has its own; those past the row's end have the last
    for (uint k = 0; k < 8; k++) values[k] *= scales[from + min((8 * chunk + k) / w.group_size, w.row_scales - 1)];
    return 1.0;
}

float one(Weights w, uint row, uint column) {
    return nibble(w, row, column) * scales[w.scales_at + row * w.row_scales + column / w.group_size];
}
#endif

#elif defined(CODING_INT3_G64)
#define BY_ROW 0
#define DOT_FACTOR 1.0
#define UNIT 32
#define COLUMNS 32
#define PIECE_WORDS ((PIECE + 15) / 16 + 1)

// Six words a group of 64: two low bits of each in four, the high bits in two. A unit is half of each.
uvec4 read_piece(Weights w, uint row, uint unit, uint part) {
    const uint group = w.codes_at + row * w.stride + 6 * (unit / 2);
    const uint high = codes[group + 4 + unit % 2];
    if (PIECE == UNIT) return uvec4(codes_2[group / 2 + unit % 2], high, 0);
    const uint low = codes[group + unit % 2 * 2 + part * PIECE / 16];
    if (PIECE == UNIT / 2) return uvec4(low, high >> 16 * part, 0, 0);
    return uvec4(low >> 16 * (part % 2), high >> 8 * part, 0, 0);
}

uint unit_scale(Weights w, uint row, uint unit) { return w.scales_at + row * w.row_scales + unit / 2; }

// l + 4 h − 4 = l − 4 (1 − h), with l at bit 2 c % 16 of `low` and 1 − h at bit 2 + c % 16 of `not_high`. Both are below 2^24.
float three_bits(uint low, uint not_high, uint c) {
    const uint p = 2 * (c % 8), q = c % 16;
    precise const float l = uintBitsToFloat((low & (3u << p)) | POWER_BITS(p));
    precise const float h = uintBitsToFloat((not_high & (4u << q)) | POWER_BITS(q));
    precise const float value = (l - h) + (POWER(q) - POWER(p));
    return value;
}

vec4 four_of_three_bits(uint low, uint not_high, uint c) {
    return vec4(three_bits(low, not_high, c), three_bits(low, not_high, c + 1), three_bits(low, not_high, c + 2),
                three_bits(low, not_high, c + 3));
}

#define NOT_HIGH(at) ~words[(at) + PIECE_WORDS - 1]
#define FOUR(at, number)                                                      \
    four_of_three_bits(words[(at) + (number) / 4] >> 16 * ((number) % 4 / 2), \
                       (number) < 4 ? NOT_HIGH(at) << 2 : NOT_HIGH(at) >> 14, 4 * (number))

float one(Weights w, uint row, uint column) {
    const uint group = w.codes_at + row * w.stride + 6 * (column / 64), at = column % 64;
    const uint low = bitfieldExtract(codes[group + at / 16], int(2 * (at % 16)), 2);
    const uint high = bitfieldExtract(codes[group + 4 + at / 32], int(at % 32), 1);
    return (float(low | high << 2) - 4.0) * scales[w.scales_at + row * w.row_scales + column / 64];
}

#elif defined(CODING_INT2_ROW)
#define BY_ROW 1
#define UNIT 32
#define COLUMNS 64
#define PIECE_WORDS ((PIECE + 15) / 16)

uvec4 read_piece(Weights w, uint row, uint unit, uint part) {
    const uint from = w.codes_at + row * w.stride + 2 * unit;
    if (PIECE == UNIT) return uvec4(codes_2[from / 2], 0, 0);
    return uvec4(codes[from + part * PIECE / 16] >> (PIECE == 8 ? 16 * (part % 2) : 0), 0, 0, 0);
}

// Four fields of a word from bit p on.
vec4 four_pairs(uint word, uint p) {
    return vec4(field(word, 3u, p, 2.0), field(word, 3u, p + 2, 2.0), field(word, 3u, p + 4, 2.0), field(word, 3u, p + 6, 2.0));
}

#define FOUR(at, number) four_pairs(words[(at) + (number) / 4] >> 16 * ((number) % 4 / 2), 8 * ((number) % 2))

float row_scale(Weights w, uint row) { return scales[w.scales_at + row]; }

float one(Weights w, uint row, uint column) {
    const uint word = codes[w.codes_at + row * w.stride + column / 16];
    return (float(bitfieldExtract(word, int(2 * (column % 16)), 2)) - 2.0) * row_scale(w, row);
}

#elif defined(CODING_FP8_E4M3_B128)
#define BY_ROW 0
#define DOT_FACTOR 256.0
#define UNIT 16
#define COLUMNS 32
#define PIECE_WORDS (PIECE / 4)

uvec4 read_piece(Weights w, uint row, uint unit, uint part) {
    const uint from = w.codes_at + row * w.stride;
    return PIECE == UNIT ? codes_4[from / 4 + unit] : uvec4(codes_2[from / 2 + 2 * unit + part], 0, 0);
}

uint unit_scale(Weights w, uint row, uint unit) { return w.scales_at + row / 128 * w.row_scales + unit / 8; }

// e4m3 · 2^−8 of a code in the upper byte: sign, exponent and mantissa in the places of an f32's, whose exponent is 112 higher.
float upper_e4m3(uint word) { return uintBitsToFloat((uint(int(word) >> 4) & 0x87f00000u) | (0x38000000u + nothing)); }

// The same of any code: subnormal ones, which as an f32 a device may take for 0, as m · 2^−9, and those that are no numbers.
float any_e4m3(uint code) {
    const uint magnitude = code & 0x7fu;
    const float small = float(magnitude) * (0.001953125 / 256.0);
    if (magnitude == 0x7fu) return NOT_A_NUMBER;
    if (magnitude >= 8) return upper_e4m3(code << 24);
    return (code & 0x80u) != 0 ? -small : small;
}

// What `upper_e4m3` gives, put right: of exponent 0, below 2^−14, it has a one too much before the mantissa.
float mended(float value) {
    const float one_less = uintBitsToFloat((floatBitsToUint(value) & 0x80000000u) ^ 0xb8800000u);
    precise const float small = fma(2.0, value, one_less);
    return abs(value) < 0.00006103515625 ? small : value;
}

vec4 four_e4m3(uint word) {
    vec4 values = vec4(upper_e4m3(word << 24), upper_e4m3(word << 16), upper_e4m3(word << 8), upper_e4m3(word));
    // in each byte: the first sum has 0x80 from magnitude 8 on, the second of 0x7f alone
    const uint magnitudes = word & 0x7f7f7f7fu, normal = magnitudes + 0x78787878u, above = magnitudes + 0x01010101u;
    if ((normal & ~above & 0x80808080u) != 0x80808080u) {
        [[unroll]] for (uint k = 0; k < 4; k++) values[k] = mended(values[k]);
        if ((above & 0x80808080u) != 0) {
            [[unroll]] for (uint k = 0; k < 4; k++) values[k] = (above >> 8 * k & 0x80u) != 0 ? NOT_A_NUMBER : values[k];
        }
    }
    return values;
}

#define FOUR(at, number) four_e4m3(words[(at) + (number)])

float one(Weights w, uint row, uint column) {
    const uint code = codes[w.codes_at + row * w.stride + column / 4] >> 8 * (column % 4) & 255u;
    return any_e4m3(code) * DOT_FACTOR * scales[w.scales_at + row / 128 * w.row_scales + column / 128];
}
#else
#error "weights are read in a coding: CODING_NAME is to be defined"
#endif
