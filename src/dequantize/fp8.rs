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

/// Bytes 2 and 3 of the f32 of each e4m3 byte without its sign; bytes 0 and 1 are 0 in all of them.
#[cfg(target_arch = "x86_64")]
pub(crate) static E4M3_UPPER: [[u8; 128]; 2] = {
    let mut bytes = [[0; 128]; 2];
    let mut byte = 0;
    while byte < 128 {
        [_, _, bytes[0][byte], bytes[1][byte]] = decode_e4m3(byte as u8).to_le_bytes();
        byte += 1;
    }
    bytes
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

/// `codes [I]` e4m3, `scales [⌈I/128⌉]` of the row's block row → `out [I]`: e4m3 · scale, one f32 multiply.
pub(crate) fn dequantize_row(codes: &[u8], scales: &[f32], out: &mut [f32]) {
    for ((out, codes), &scale) in out.chunks_mut(BLOCK).zip(codes.chunks(BLOCK)).zip(scales) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = e4m3(code) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The e4m3 formula in f64: mantissa/8 · 2^−6 below exponent 1, else (1 + mantissa/8) · 2^(exponent − 7).
    fn formula(byte: u8) -> f64 {
        let sign = if byte >= 0x80 { -1.0 } else { 1.0 };
        let fraction = f64::from(byte % 8) / 8.0;
        match byte % 0x80 / 8 {
            0 => sign * fraction * 2f64.powi(-6),
            15 if byte % 8 == 7 => f64::NAN,
            exponent => sign * (1.0 + fraction) * 2f64.powi(i32::from(exponent) - 7),
        }
    }

    #[test]
    fn all_e4m3() {
        for byte in 0..=255 {
            let (value, expected) = (e4m3(byte), formula(byte));
            assert_eq!(value.is_nan(), expected.is_nan(), "{byte:#04x}");
            if !expected.is_nan() {
                assert_eq!(f64::from(value).to_bits(), expected.to_bits(), "{byte:#04x}");
            }
        }
        assert_eq!((0..=255).filter(|&byte| e4m3(byte).is_nan()).collect::<Vec<u8>>(), [0x7f, 0xff]);
        assert!((0..0x7e).all(|byte| e4m3(byte) < e4m3(byte + 1)));
    }

    #[test]
    fn known_e4m3() {
        for (byte, expected) in [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x07, 0.013671875),
            (0x08, 0.015625),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0x7e, 448.0),
            (0x78, 256.0),
            (0xb8, -1.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(e4m3(byte), expected, "{byte:#04x}");
        }
        assert_eq!(e4m3(0x80).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn all_ue8m0() {
        for byte in 0..=254 {
            assert_eq!(f64::from(ue8m0(byte)), 2f64.powi(i32::from(byte) - 127), "{byte:#04x}");
        }
        assert!(ue8m0(255).is_nan());
        assert!(ue8m0(0).is_subnormal());
        assert_eq!(ue8m0(0x78), 0.0078125);
    }
}
