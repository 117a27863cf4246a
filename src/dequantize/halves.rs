//! BF16 and F16 to f32. Both widen exactly.

use half::{bf16, f16};

/// `stored [2 · n]` little-endian bf16 → `out [n]`.
pub(super) fn bf16_row(stored: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(stored.as_chunks().0) {
        *out = bf16::from_le_bytes(*bytes).to_f32();
    }
}

/// `stored [2 · n]` little-endian IEEE binary16 → `out [n]`.
pub(super) fn f16_row(stored: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(stored.as_chunks().0) {
        *out = f16::from_le_bytes(*bytes).to_f32();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// IEEE 754: sign, exponent and mantissa of those widths after each other, as a number. Exact in f64.
    fn formula(bits: u16, exponent_bits: u32, mantissa_bits: u32) -> f64 {
        let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
        let exponent = i32::from(bits >> mantissa_bits & ((1 << exponent_bits) - 1));
        let fraction = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
        let bias = (1 << (exponent_bits - 1)) - 1;
        sign * match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            e if e == (1 << exponent_bits) - 1 && fraction == 0.0 => f64::INFINITY,
            e if e == (1 << exponent_bits) - 1 => f64::NAN,
            e => (1.0 + fraction) * 2f64.powi(e - bias),
        }
    }

    fn check_all(decode: fn(&[u8], &mut [f32]), exponent_bits: u32, mantissa_bits: u32) {
        let stored: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut out = vec![0.0; 65_536];
        decode(&stored, &mut out);
        for (bits, value) in (0..=u16::MAX).zip(out) {
            let expected = formula(bits, exponent_bits, mantissa_bits);
            assert_eq!(value.is_nan(), expected.is_nan(), "{bits:#06x}");
            if !expected.is_nan() {
                // Bit for bit, so that the sign of zero counts; the widening to f64 is exact.
                assert_eq!(f64::from(value).to_bits(), expected.to_bits(), "{bits:#06x}");
            }
        }
    }

    #[test]
    fn all_f16() {
        check_all(f16_row, 5, 10);
    }

    #[test]
    fn all_bf16() {
        check_all(bf16_row, 8, 7);
    }

    #[test]
    fn known_bytes() {
        let mut out = [0.0; 3];
        f16_row(&[0x00, 0x3c, 0xff, 0x7b, 0x01, 0x80], &mut out);
        assert_eq!(out, [1.0, 65504.0, -(2f32.powi(-24))]);
        bf16_row(&[0x80, 0x3f, 0x49, 0x40, 0xc0, 0x7f], &mut out);
        assert_eq!(out[..2], [1.0, 3.140625]);
        assert!(out[2].is_nan());
    }
}
