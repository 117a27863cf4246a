// Stored weights: eight of a row at a time, or one. As kernels/cuda/weights.cuh, from whole words alone.
//
// A kernel that includes this comes once for each coding: CODING_NAME is defined.
READS(0, Codes, uint codes);
READS(0, Codes2, uvec2 codes_2);
READS(0, Codes4, uvec4 codes_4);
READS(1, Scales, float scales);

struct Weights {
    uint codes_at;    // where the matrix begins, in words
    uint scales_at;
    uint stride;      // words of a row's codes
    uint row_scales;  // scales of a row; of fp8, of a row of blocks
    uint group_size;  // of int4 in groups
};

#if defined(CODING_F32)
#define BY_ROW true

float eight(Weights w, uint row, uint chunk, out float values[8]) {
    const uint at = (w.codes_at + row * w.stride) / 4 + 2 * chunk;
    const vec4 a = uintBitsToFloat(codes_4[at]), b = uintBitsToFloat(codes_4[at + 1]);
    values = float[8](a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w);
    return 1.0;
}

float row_scale(Weights w, uint row) { return 1.0; }

float one(Weights w, uint row, uint column) { return uintBitsToFloat(codes[w.codes_at + row * w.stride + column]); }

#elif defined(CODING_INT8_ROW) || defined(CODING_INT4_ROW) || defined(CODING_INT2_ROW)
#define BY_ROW true

#if defined(CODING_INT8_ROW)
float eight(Weights w, uint row, uint chunk, out float values[8]) {
    const uvec2 words = codes_2[(w.codes_at + row * w.stride) / 2 + chunk];
    [[unroll]] for (int k = 0; k < 4; k++) {
        values[k] = float(bitfieldExtract(int(words.x), 8 * k, 8));
        values[4 + k] = float(bitfieldExtract(int(words.y), 8 * k, 8));
    }
    return 1.0;
}
#elif defined(CODING_INT4_ROW)
float eight(Weights w, uint row, uint chunk, out float values[8]) {
    const uint word = codes[w.codes_at + row * w.stride + chunk];
    [[unroll]] for (int k = 0; k < 8; k++) values[k] = float(bitfieldExtract(word, 4 * k, 4)) - 8.0;
    return 1.0;
}
#else
float eight(Weights w, uint row, uint chunk, out float values[8]) {
    const uint half_word = codes[w.codes_at + row * w.stride + chunk / 2] >> 16 * (chunk % 2);
    [[unroll]] for (int k = 0; k < 8; k++) values[k] = float(bitfieldExtract(half_word, 2 * k, 2)) - 2.0;
    return 1.0;
}
#endif

float row_scale(Weights w, uint row) { return scales[w.scales_at + row]; }

float one(Weights w, uint row, uint column) {
    float values[8];
    eight(w, row, column / 8, values);
    return values[column % 8] * row_scale(w, row);
}

#elif defined(CODING_INT4_GROUPED)
#define BY_ROW false

void nibbles(Weights w, uint row, uint chunk, out float values[8]) {
    const uint word = codes[w.codes_at + row * w.stride + chunk];
    [[unroll]] for (int k = 0; k < 8; k++) values[k] = float(bitfieldExtract(word, 4 * k, 4)) - 8.0;
}

float eight(Weights w, uint row, uint chunk, out float values[8]) {
    nibbles(w, row, chunk, values);
    const uint from = w.scales_at + row * w.row_scales;
    if (w.group_size % 8 == 0) return scales[from + 8 * chunk / w.group_size];
    // eight columns of several groups: each has its own; those past the row's end have the last
    for (uint k = 0; k < 8; k++) values[k] *= scales[from + min((8 * chunk + k) / w.group_size, w.row_scales - 1)];
    return 1.0;
}

float row_scale(Weights w, uint row) { return 1.0; }

float one(Weights w, uint row, uint column) {
    float values[8];
    nibbles(w, row, column / 8, values);
    return values[column % 8] * scales[w.scales_at + row * w.row_scales + column / w.group_size];
}

#elif defined(CODING_INT3_G64)
#define BY_ROW false

float eight(Weights w, uint row, uint chunk, out float values[8]) {
    // six words a group: two low bits of each in four, the high bits in two
    const uint group = w.codes_at + row * w.stride + 6 * (chunk / 8), at = chunk % 8;
    const uint low = codes[group + at / 2] >> 16 * (at % 2);
    const uint high = codes[group + 4 + at / 4] >> 8 * (at % 4);
    [[unroll]] for (int k = 0; k < 8; k++)
        values[k] = float(bitfieldExtract(low, 2 * k, 2) | bitfieldExtract(high, k, 1) << 2) - 4.0;
    return scales[w.scales_at + row * w.row_scales + chunk / 8];
}

float row_scale(Weights w, uint row) { return 1.0; }

float one(Weights w, uint row, uint column) {
    float values[8];
    const float scale = eight(w, row, column / 8, values);
    return values[column % 8] * scale;
}

#elif defined(CODING_FP8_E4M3_B128)
#define BY_ROW false

// Exponent and mantissa of an f32 by their bits; subnormal ones, which a device may take for 0, as m · 2^−9.
float e4m3(uint code) {
    const uint magnitude = code & 0x7fu;
    const float normal = uintBitsToFloat((magnitude << 20) + (120u << 23));
    const float value = magnitude < 8 ? float(magnitude) * 0.001953125 : normal;
    return magnitude == 0x7fu ? NOT_A_NUMBER : (code & 0x80u) != 0 ? -value : value;
}

float eight(Weights w, uint row, uint chunk, out float values[8]) {
    const uvec2 words = codes_2[(w.codes_at + row * w.stride) / 2 + chunk];
    [[unroll]] for (int k = 0; k < 4; k++) {
        values[k] = e4m3(bitfieldExtract(words.x, 8 * k, 8));
        values[4 + k] = e4m3(bitfieldExtract(words.y, 8 * k, 8));
    }
    return scales[w.scales_at + row / 128 * w.row_scales + chunk / 16];
}

float row_scale(Weights w, uint row) { return 1.0; }

float one(Weights w, uint row, uint column) {
    float values[8];
    const float scale = eight(w, row, column / 8, values);
    return values[column % 8] * scale;
}
#else
#error "weights are read in a coding: CODING_NAME is to be defined"
#endif
