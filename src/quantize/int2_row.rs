//! `int2-row`: two bits an element, one scale a row.
//!
//! Value of element i: `(u − 2) · s`, u being 0 to 3. Column 4j + k is at bits 2k of byte j; bits after the last column
//! are 0.

use super::scale;

/// Largest level; the smallest storable one is −2, which finite values never reach.
pub(super) const QMAX: f32 = 1.0;
/// What a code exceeds its level by.
const BIAS: i8 = 2;
/// Elements of a byte.
const PER_BYTE: usize = 4;

/// `row [I]` → `codes [⌈I/4⌉]`, `scales [1]`.
pub(super) fn quantize(row: &[f32], codes: &mut [u8], scales: &mut [f32]) {
    let mut levels = vec![0; row.len()];
    scales[0] = scale::quantize_group(row, QMAX, &mut levels);
    pack(&levels, codes);
}

/// `codes [⌈I/4⌉]`, `scales [1]` → `out [I]`.
pub(super) fn dequantize(codes: &[u8], scales: &[f32], out: &mut [f32]) {
    let mut levels = vec![0; out.len()];
    unpack(codes, &mut levels);
    scale::dequantize_group(&levels, scales[0], out);
}

/// `levels [I]`, −2 to 1 → `codes [⌈I/4⌉]`.
fn pack(levels: &[i8], codes: &mut [u8]) {
    for (code, levels) in codes.iter_mut().zip(levels.chunks(PER_BYTE)) {
        *code = 0;
        for (k, &level) in levels.iter().enumerate() {
            *code |= (level + BIAS).cast_unsigned() << (2 * k);
        }
    }
}

/// `codes [⌈I/4⌉]` → `levels [I]`, −2 to 1.
pub(super) fn unpack(codes: &[u8], levels: &mut [i8]) {
    for (levels, &code) in levels.chunks_mut(PER_BYTE).zip(codes) {
        for (k, level) in levels.iter_mut().enumerate() {
            *level = (code >> (2 * k) & 3).cast_signed() - BIAS;
        }
    }
}

/// Whether the bits after the last column are 0. `codes` is [⌈I/4⌉], `columns` is I.
pub(super) fn padding_ok(codes: &[u8], columns: usize) -> bool {
    let used = columns % PER_BYTE;
    used == 0 || codes.last().is_none_or(|&code| code >> (2 * used) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_rows() {
        let mut codes = [0xaa; 2];
        let mut scales = [0.0];
        quantize(&[2.0, 1.0, -1.0, -2.0, 1.5], &mut codes, &mut scales);
        assert_eq!(scales, [2.0]);
        // levels 1 0 0 -1 1
        assert_eq!(codes, [0b01_10_10_11, 0b11]);
        let mut out = [0.0; 5];
        dequantize(&[0b01_10_00_11, 0b11], &scales, &mut out);
        assert_eq!(out, [2.0, -4.0, 0.0, -2.0, 2.0]);
        quantize(&[0.0; 5], &mut codes, &mut scales);
        assert_eq!((codes, scales), ([0b10_10_10_10, 0b10], [1e-8]));
    }

    #[test]
    fn all_codes_survive() {
        let codes: Vec<u8> = (0..=255).collect();
        let mut levels = [0; 1024];
        unpack(&codes, &mut levels);
        assert!(levels.iter().all(|level| (-2..=1).contains(level)));
        let mut again = [0; 256];
        pack(&levels, &mut again);
        assert_eq!(again[..], codes);
    }

    #[test]
    fn padding_is_above_the_last_column() {
        assert!(padding_ok(&[0xff, 0b11], 5));
        assert!(!padding_ok(&[0, 0b100], 5));
        assert!(padding_ok(&[0x3f], 3));
        assert!(!padding_ok(&[0x40], 3));
        assert!(padding_ok(&[0xff], 4));
        assert!(padding_ok(&[], 0));
    }
}
