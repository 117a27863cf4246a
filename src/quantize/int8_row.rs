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

/// `row [I]` → `codes [I]`, `scales [1]`.
pub(super) fn quantize(row: &[f32], bits: u32, codes: &mut [u8], scales: &mut [f32]) {
    let mut levels = vec![0; row.len()];
    scales[0] = scale::quantize_group(row, qmax(bits), &mut levels);
    pack(&levels, codes);
}

/// `codes [I]`, `scales [1]` → `out [I]`.
pub(super) fn dequantize(codes: &[u8], scales: &[f32], out: &mut [f32]) {
    let mut levels = vec![0; out.len()];
    unpack(codes, &mut levels);
    scale::dequantize_group(&levels, scales[0], out);
}

/// `levels [I]` → `codes [I]`, two's complement.
fn pack(levels: &[i8], codes: &mut [u8]) {
    for (code, &level) in codes.iter_mut().zip(levels) {
        *code = level.cast_unsigned();
    }
}

/// `codes [I]` → `levels [I]`, −128 to 127.
pub(super) fn unpack(codes: &[u8], levels: &mut [i8]) {
    for (level, &code) in levels.iter_mut().zip(codes) {
        *level = code.cast_signed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_twos_complement() {
        let mut codes = [0; 7];
        let mut scales = [0.0];
        quantize(&[127.0, 0.5, 1.5, -2.5, 126.5, -126.5, -127.0], 8, &mut codes, &mut scales);
        assert_eq!(codes, [0x7f, 0x00, 0x02, 0xfe, 0x7e, 0x82, 0x81]);
        assert_eq!(scales, [1.0]);
        let mut out = [0.0; 7];
        dequantize(&codes, &[0.5], &mut out);
        assert_eq!(out, [63.5, 0.0, 1.0, -1.0, 63.0, -63.0, -63.5]);
    }

    #[test]
    fn fewer_bits_are_fewer_levels_in_the_same_storage() {
        for (bits, largest) in [(5, 15), (6, 31), (7, 63), (8, 127)] {
            assert_eq!(qmax(bits), f32::from(largest));
            let mut codes = [0; 3];
            let mut scales = [0.0];
            quantize(&[f32::from(largest), f32::from(-largest), 1.0], bits, &mut codes, &mut scales);
            assert_eq!(codes.map(u8::cast_signed), [largest, -largest, 1].map(|level: i16| level as i8), "{bits} bits");
            assert_eq!(scales, [1.0]);
        }
    }

    #[test]
    #[should_panic(expected = "5 to 8 bits, not 4")]
    fn four_bits_are_another_format() {
        qmax(4);
    }

    #[test]
    fn all_codes_survive() {
        let codes: Vec<u8> = (0..=255).collect();
        let mut levels = [0; 256];
        unpack(&codes, &mut levels);
        assert_eq!((levels[0x7f], levels[0x80], levels[0xff]), (127, -128, -1));
        let mut again = [0; 256];
        pack(&levels, &mut again);
        assert_eq!(again[..], codes);
    }
}
