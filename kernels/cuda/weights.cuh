// Stored weights: eight of a row at a time, or one.
//
// A matrix [O, I] lies row after row. A row's codes are padded to whole 16 bytes (`stride` words); its scales follow those of
// the row before. Of the eight columns 8·chunk … 8·chunk+7 the last may be past I: what is decoded there is finite unless
// the matrix itself is not, and meets an x of 0.
//
// Values: int8 b, int4 n − 8, int3 u − 4, int2 u − 2, fp8 e4m3, times the scale of the row, of the group, or of the block of
// 128 × 128. Reference: src/quantize.rs, Decoder.
#pragma once
#include "common.cuh"

struct Weights {
    const u32* __restrict__ codes;
    const float* __restrict__ scales;
    u32 stride;      // words of a row's codes
    u32 row_scales;  // scales of a row; of fp8, of a row of blocks
    u32 group_size;  // of int4 in groups
};

// An f32 in eight values: no scale.
struct F32 {
    static const bool BY_ROW = true;

    static __device__ __forceinline__ float eight(const Weights& w, u32 row, u32 chunk, float out[8]) {
        const float4* from = (const float4*)(w.codes + (size_t)row * w.stride) + 2 * chunk;
        const float4 a = from[0], b = from[1];
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
        out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
        return 1.0f;
    }

    static __device__ __forceinline__ float row_scale(const Weights&, u32) { return 1.0f; }

    static __device__ __forceinline__ float one(const Weights& w, u32 row, u32 column) {
        return ((const float*)w.codes)[(size_t)row * w.stride + column];
    }
};

// Formats with one scale a row.
template <class Code>
struct ByRow {
    static const bool BY_ROW = true;

    static __device__ __forceinline__ float eight(const Weights& w, u32 row, u32 chunk, float out[8]) {
        Code::eight(w.codes + (size_t)row * w.stride, chunk, out);
        return 1.0f;
    }

    static __device__ __forceinline__ float row_scale(const Weights& w, u32 row) { return w.scales[row]; }

    static __device__ __forceinline__ float one(const Weights& w, u32 row, u32 column) {
        return Code::one(w.codes + (size_t)row * w.stride, column) * w.scales[row];
    }
};

struct Int8Code {
    static __device__ __forceinline__ void eight(const u32* row, u32 chunk, float out[8]) {
        const uint2 words = ((const uint2*)row)[chunk];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            out[k] = (float)(i8)(words.x >> 8 * k);
            out[4 + k] = (float)(i8)(words.y >> 8 * k);
        }
    }

    static __device__ __forceinline__ float one(const u32* row, u32 column) { return (float)((const i8*)row)[column]; }
};

struct Int4Code {
    static __device__ __forceinline__ void eight(const u32* row, u32 chunk, float out[8]) {
        const u32 word = row[chunk];
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            // 2^23 + n by its bits, minus 2^23 + 8
            out[k] = __uint_as_float(0x4b000000u | (word >> 4 * k & 15u)) - 8388616.0f;
        }
    }

    static __device__ __forceinline__ float one(const u32* row, u32 column) {
        return (float)(int)(row[column / 8] >> 4 * (column % 8) & 15u) - 8.0f;
    }
};

struct Int2Code {
    static __device__ __forceinline__ void eight(const u32* row, u32 chunk, float out[8]) {
        const u32 half = ((const u16*)row)[chunk];
#pragma unroll
        for (u32 k = 0; k < 8; k++) out[k] = (float)(int)(half >> 2 * k & 3u) - 2.0f;
    }

    static __device__ __forceinline__ float one(const u32* row, u32 column) {
        return (float)(int)(row[column / 16] >> 2 * (column % 16) & 3u) - 2.0f;
    }
};

typedef ByRow<Int8Code> Int8Row;
typedef ByRow<Int4Code> Int4Row;
typedef ByRow<Int2Code> Int2Row;

struct Int4Grouped {
    static const bool BY_ROW = false;

    static __device__ __forceinline__ float eight(const Weights& w, u32 row, u32 chunk, float out[8]) {
        Int4Code::eight(w.codes + (size_t)row * w.stride, chunk, out);
        const float* scales = w.scales + (size_t)row * w.row_scales;
        if (w.group_size % 8 == 0) return scales[8 * chunk / w.group_size];
        // eight columns of several groups: each has its own; those past the row's end have the last
#pragma unroll
        for (u32 k = 0; k < 8; k++) out[k] *= scales[least((8 * chunk + k) / w.group_size, w.row_scales - 1)];
        return 1.0f;
    }

    static __device__ __forceinline__ float row_scale(const Weights&, u32) { return 1.0f; }

    static __device__ __forceinline__ float one(const Weights& w, u32 row, u32 column) {
        const float scale = w.scales[(size_t)row * w.row_scales + column / w.group_size];
        return Int4Code::one(w.codes + (size_t)row * w.stride, column) * scale;
    }
};

struct Int3G64 {
    static const bool BY_ROW = false;

    static __device__ __forceinline__ float eight(const Weights& w, u32 row, u32 chunk, float out[8]) {
        // 24 bytes a group: two low bits of each in 16, the high bits in 8
        const u8* group = (const u8*)(w.codes + (size_t)row * w.stride) + 24 * (chunk / 8);
        const u32 low = *(const u16*)(group + 2 * (chunk % 8));
        const u32 high = group[16 + chunk % 8];
#pragma unroll
        for (u32 k = 0; k < 8; k++) out[k] = (float)(int)((low >> 2 * k & 3u) | (high >> k & 1u) << 2) - 4.0f;
        return w.scales[(size_t)row * w.row_scales + chunk / 8];
    }

    static __device__ __forceinline__ float row_scale(const Weights&, u32) { return 1.0f; }

    static __device__ __forceinline__ float one(const Weights& w, u32 row, u32 column) {
        const u8* group = (const u8*)(w.codes + (size_t)row * w.stride) + 24 * (column / 64);
        const u32 at = column % 64, low = group[at / 4] >> 2 * (at % 4) & 3u, high = group[16 + at / 8] >> at % 8 & 1u;
        return ((float)(int)(low | high << 2) - 4.0f) * w.scales[(size_t)row * w.row_scales + column / 64];
    }
};

struct Fp8E4m3B128 {
    static const bool BY_ROW = false;

    // Exponent and mantissa of an e4m3 are those of an f32 that is smaller by 2^120, subnormal ones too.
    static __device__ __forceinline__ float e4m3(u32 code) {
        const float magnitude = __uint_as_float((code & 0x7fu) << 20 | (code & 0x80u) << 24) * 0x1p120f;
        return (code & 0x7fu) == 0x7fu ? NOT_A_NUMBER : magnitude;
    }

    static __device__ __forceinline__ float eight(const Weights& w, u32 row, u32 chunk, float out[8]) {
        const uint2 words = ((const uint2*)(w.codes + (size_t)row * w.stride))[chunk];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            out[k] = e4m3(words.x >> 8 * k & 255u);
            out[4 + k] = e4m3(words.y >> 8 * k & 255u);
        }
        return w.scales[(size_t)(row / 128) * w.row_scales + chunk / 16];
    }

    static __device__ __forceinline__ float row_scale(const Weights&, u32) { return 1.0f; }

    static __device__ __forceinline__ float one(const Weights& w, u32 row, u32 column) {
        const float value = e4m3(((const u8*)(w.codes + (size_t)row * w.stride))[column]);
        return value * w.scales[(size_t)(row / 128) * w.row_scales + column / 128];
    }
};

// A function of every coding.
#define EACH_CODING(DEFINE)   \
    DEFINE(f32, F32)          \
    DEFINE(int8_row, Int8Row) \
    DEFINE(int4_row, Int4Row) \
    DEFINE(int4_grouped, Int4Grouped) \
    DEFINE(int3_g64, Int3G64) \
    DEFINE(int2_row, Int2Row) \
    DEFINE(fp8_e4m3_b128, Fp8E4m3B128)
