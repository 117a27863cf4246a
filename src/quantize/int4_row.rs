//! `int4-row`: one nibble an element, one scale a row.
//!
//! Value of element i: `(nibble − 8) · s`. Nibbles are offset by 8, not two's complement: 0x0 is −8, 0xF is +7. The low
//! nibble of byte j is column 2j, the high nibble column 2j + 1; with an odd number of columns the last high nibble is 0.

use super::scale;

/// Largest level; the smallest storable one is −8, which finite values never reach.
pub(super) const QMAX: f32 = 7.0;
/// What a nibble exceeds its level by.
const BIAS: i8 = 8;

/// `row` [I] → `codes` [⌈I/2⌉], `scales` [1].
pub(super) fn quantize(row: &[f32], codes: &mut [u8], scales: &mut [f32]) {
    let mut levels = vec![0; row.len()];
    scales[0] = scale::quantize_group(row, QMAX, &mut levels);
    pack(&levels, codes);
}

/// `codes` [⌈I/2⌉], `scales` [1] → `out` [I].
pub(super) fn dequantize(codes: &[u8], scales: &[f32], out: &mut [f32]) {
    let mut levels = vec![0; out.len()];
    unpack(codes, &mut levels);
    scale::dequantize_group(&levels, scales[0], out);
}

/// `levels` [I], −8 to 7 → `codes` [⌈I/2⌉].
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

/// `codes` [⌈I/2⌉] → `levels` [I], −8 to 7.
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
