//! `int8-row`: one signed byte an element, one scale a row.
//!
//! Value of element i: `codes[i] as i8 · s`. With 5, 6 or 7 bits fewer levels are used in the same storage.

use super::scale;

/// Largest level with that many bits: 2^(bits−1) − 1.
///
/// # Panics
///
/// Outside 5..=8 bits.
pub(super) fn qmax(bits: u32) -> f32 {
    assert!((5..=8).contains(&bits), "int8-row takes 5 to 8 bits, not {bits}");
    ((1 << (bits - 1)) - 1) as f32
}

/// `row` [I] → `codes` [I], `scales` [1].
pub(super) fn quantize(row: &[f32], bits: u32, codes: &mut [u8], scales: &mut [f32]) {
    let mut levels = vec![0; row.len()];
    scales[0] = scale::quantize_group(row, qmax(bits), &mut levels);
    pack(&levels, codes);
}

/// `codes` [I], `scales` [1] → `out` [I].
pub(super) fn dequantize(codes: &[u8], scales: &[f32], out: &mut [f32]) {
    let mut levels = vec![0; out.len()];
    unpack(codes, &mut levels);
    scale::dequantize_group(&levels, scales[0], out);
}

/// `levels` [I] → `codes` [I], two's complement.
fn pack(levels: &[i8], codes: &mut [u8]) {
    for (code, &level) in codes.iter_mut().zip(levels) {
        *code = level.cast_unsigned();
    }
}

/// `codes` [I] → `levels` [I], −128 to 127.
pub(super) fn unpack(codes: &[u8], levels: &mut [i8]) {
    for (level, &code) in levels.iter_mut().zip(codes) {
        *level = code.cast_signed();
    }
}
