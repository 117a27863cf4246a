//! FP8 to f32: e4m3 (the *fn* variant: no infinities) and UE8M0, a bare power of two.
//!
//! Source: OCP 8-bit Floating Point Specification (e4m3) and OCP Microscaling Formats Specification (E8M0).

/// Elements of a row that share a block scale; blocks are squares of this side.
const BLOCK: usize = crate::format::FP8_BLOCK as usize;

static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = decode_e4m3(byte as u8);
        byte += 1;
    }
    table
};

/// The value of an e4m3 byte: 1 sign, 4 exponent (bias 7) and 3 mantissa bits.
///
/// 0x7F and 0xFF are NaN, the largest value is 448, the smallest above zero 2^−9. All are exact in f32.
pub fn e4m3(byte: u8) -> f32 {
    E4M3[usize::from(byte)]
}

/// Rebuilds the fields of an e4m3 byte as those of an f32, whose exponent bias is 127 and whose mantissa has 23 bits.
const fn decode_e4m3(byte: u8) -> f32 {
    let sign = (byte as u32 >> 7) << 31;
    let exponent = byte as u32 >> 3 & 0xf;
    let mantissa = byte as u32 & 7;
    if exponent == 0xf && mantissa == 7 {
        return f32::NAN;
    }
    let magnitude = if exponent == 0 {
        // Subnormal: mantissa / 8 · 2^(1 − 7)
        (mantissa as f32 / 512.0).to_bits()
    } else {
        (exponent + 127 - 7) << 23 | mantissa << 20
    };
    f32::from_bits(sign | magnitude)
}

/// The value of a UE8M0 byte: 2^(byte − 127); 255 is NaN, and 0 is 2^−127, which is subnormal in f32.
pub fn ue8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        byte => f32::from_bits(u32::from(byte) << 23),
    }
}

/// `codes` [I] e4m3, `scales` [⌈I/128⌉] of the row's block row → `out` [I]: e4m3 · scale, one f32 multiply.
pub(crate) fn dequantize_row(codes: &[u8], scales: &[f32], out: &mut [f32]) {
    for ((out, codes), &scale) in out.chunks_mut(BLOCK).zip(codes.chunks(BLOCK)).zip(scales) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = e4m3(code) * scale;
        }
    }
}
