//! `int4-row`: one nibble an element, one scale a row.
//!
//! Value of element i: `(nibble − 8) · s`. Nibbles are offset by 8, not two's complement: 0x0 is −8, 0xF is +7. The low
//! nibble of byte j is column 2j, the high nibble column 2j + 1; with an odd number of columns the last high nibble is 0.

use super::scale;

/// Largest level; the smallest storable one is −8, which finite values never reach.
pub(super) const QMAX: f32 = 7.0;
/// What a nibble exceeds its level by.
const BIAS: i8 = 8;

/// `row [I]` → `codes [⌈I/2⌉]`, `scales [1]`.
pub(super) fn quantize(row: &[f32], codes: &mut [u8], scales: &mut [f32]) {
    let mut levels = vec![0; row.len()];
    scales[0] = scale::quantize_group(row, QMAX, &mut levels);
    pack(&levels, codes);
}

/// `codes [⌈I/2⌉]`, `scales [1]` → `out [I]`.
pub(super) fn dequantize(codes: &[u8], scales: &[f32], out: &mut [f32]) {
    let mut levels = vec![0; out.len()];
    unpack(codes, &mut levels);
    scale::dequantize_group(&levels, scales[0], out);
}

/// `levels [I]`, −8 to 7 → `codes [⌈I/2⌉]`.
pub(super) fn pack(levels: &[i8], codes: &mut [u8]) {
    let nibble = |level: i8| (level + BIAS).cast_unsigned();
    for (code, pair) in codes.iter_mut().zip(levels.chunks(2)) {
        *code = match *pair {
            [even, odd] => nibble(even) | nibble(odd) << 4,
            [even, ..] => nibble(even),
            [] => 0,
        };
    }
}

/// `codes [⌈I/2⌉]` → `levels [I]`, −8 to 7.
pub(super) fn unpack(codes: &[u8], levels: &mut [i8]) {
    for (pair, &code) in levels.chunks_mut(2).zip(codes) {
        let nibbles = [code & 0xf, code >> 4];
        for (level, nibble) in pair.iter_mut().zip(nibbles) {
            *level = nibble.cast_signed() - BIAS;
        }
    }
}

/// Whether the high nibble after an odd last column is 0. `codes` is [⌈I/2⌉], `columns` is I.
pub(super) fn padding_ok(codes: &[u8], columns: usize) -> bool {
    columns.is_multiple_of(2) || codes.last().is_none_or(|&code| code >> 4 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized(row: &[f32]) -> (Vec<u8>, f32) {
        let mut codes = vec![0xaa; row.len().div_ceil(2)];
        let mut scales = [0.0];
        quantize(row, &mut codes, &mut scales);
        (codes, scales[0])
    }

    #[test]
    fn known_rows() {
        let ties = [7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -7.0];
        assert_eq!(quantized(&ties), (vec![0x8f, 0xaa, 0x68, 0x16], 1.0));
        assert_eq!(quantized(&[7.0, -7.0, 3.0, 1.0, -2.0]), (vec![0x1f, 0x9b, 0x06], 1.0));
        // one scale for two halves that differ by a factor of 30: the small half is lost
        let halves = [0.05, -0.05, 0.04, 0.03, 1.5, -1.4, 0.7, 0.2];
        assert_eq!(quantized(&halves), (vec![0x88, 0x88, 0x1f, 0x9b], 1.5 / 7.0));
        assert_eq!(quantized(&[0.0; 4]), (vec![0x88, 0x88], 1e-8));
        assert_eq!(quantized(&[-0.0; 3]), (vec![0x88, 0x08], 1e-8));
        assert_eq!(quantized(&[-2.0]), (vec![0x01], 2.0 / 7.0));
        assert_eq!(quantized(&[]), (vec![], 1e-8));
    }

    #[test]
    fn nibbles_are_offset_and_low_first() {
        let mut out = [0.0; 3];
        dequantize(&[0xf0, 0x07], &[2.0], &mut out);
        assert_eq!(out, [-16.0, 14.0, -2.0]);
    }

    #[test]
    fn all_codes_survive() {
        let codes: Vec<u8> = (0..=255).collect();
        let mut levels = [0; 512];
        unpack(&codes, &mut levels);
        assert!(levels.iter().all(|level| (-8..=7).contains(level)));
        let mut again = [0; 256];
        pack(&levels, &mut again);
        assert_eq!(again[..], codes);
    }

    #[test]
    fn padding_is_the_last_high_nibble_of_an_odd_row() {
        assert!(padding_ok(&[0xff, 0x0f], 3));
        assert!(!padding_ok(&[0x0f, 0x1f], 3));
        assert!(!padding_ok(&[0x0f, 0x8f], 3));
        assert!(padding_ok(&[0xff, 0xff], 4));
        assert!(padding_ok(&[], 0));
    }
}
