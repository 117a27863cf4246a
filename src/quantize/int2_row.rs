//! `int2-row`: two bits an element, one scale a row.
//!
//! Value of element i: `(u − 2) · s`, u being 0 to 3. Column 4j + k is at bits 2k of byte j; bits after the last column
//! are 0.

use super::scale;

/// Largest level; the smallest storable one is −2, which finite values never reach.
const QMAX: f32 = 1.0;
/// What a code exceeds its level by.
const BIAS: i8 = 2;
/// Elements of a byte.
const PER_BYTE: usize = 4;

/// `row` [I] → `codes` [⌈I/4⌉], `scales` [1].
pub(super) fn quantize(row: &[f32], codes: &mut [u8], scales: &mut [f32]) {
    let mut levels = vec![0; row.len()];
    scales[0] = scale::quantize_group(row, QMAX, &mut levels);
    pack(&levels, codes);
}

/// `codes` [⌈I/4⌉], `scales` [1] → `out` [I].
pub(super) fn dequantize(codes: &[u8], scales: &[f32], out: &mut [f32]) {
    let mut levels = vec![0; out.len()];
    unpack(codes, &mut levels);
    scale::dequantize_group(&levels, scales[0], out);
}

/// `levels` [I], −2 to 1 → `codes` [⌈I/4⌉].
fn pack(levels: &[i8], codes: &mut [u8]) {
    for (code, levels) in codes.iter_mut().zip(levels.chunks(PER_BYTE)) {
        *code = 0;
        for (k, &level) in levels.iter().enumerate() {
            *code |= (level + BIAS).cast_unsigned() << (2 * k);
        }
    }
}

/// `codes` [⌈I/4⌉] → `levels` [I], −2 to 1.
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
