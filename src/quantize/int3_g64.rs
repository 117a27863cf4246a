//! `int3-g64`: three bits an element, one scale per 64 elements of a row.
//!
//! Value of element i: `(u − 4) · s[i / 64]`, u being 0 to 7. A group takes 24 bytes: in the first 16, the low plane, byte
//! k / 4 holds the two low bits of element k at bits 2 (k mod 4); in the last 8, the high plane, byte k / 8 holds the
//! third bit at bit k mod 8. A partial last group is padded with u = 4, the value 0: low bits 0, high bit 1. Its scale
//! comes from the elements that it has.

use super::scale;

/// Elements of a row that share a scale.
pub(super) const GROUP_SIZE: usize = 64;
/// Bytes of a group, and of its low plane.
const GROUP_BYTES: usize = 24;
const LOW_BYTES: usize = 16;

/// Largest level; the smallest storable one is −4, which finite values never reach.
pub(super) const QMAX: f32 = 3.0;
/// What a code exceeds its level by.
const BIAS: i8 = 4;

/// `row [I]` → `codes [⌈I/64⌉ · 24]`, `scales [⌈I/64⌉]`.
pub(super) fn quantize(row: &[f32], codes: &mut [u8], scales: &mut [f32]) {
    let groups = row.chunks(GROUP_SIZE).zip(scales).zip(codes.chunks_exact_mut(GROUP_BYTES));
    for ((group, scale), codes) in groups {
        let mut levels = [0; GROUP_SIZE];
        *scale = scale::quantize_group(group, QMAX, &mut levels[..group.len()]);
        pack_group(&levels, codes);
    }
}

/// `codes [⌈I/64⌉ · 24]`, `scales [⌈I/64⌉]` → `out [I]`.
pub(super) fn dequantize(codes: &[u8], scales: &[f32], out: &mut [f32]) {
    let groups = out.chunks_mut(GROUP_SIZE).zip(scales).zip(codes.chunks_exact(GROUP_BYTES));
    for ((out, &scale), codes) in groups {
        scale::dequantize_group(&unpack_group(codes)[..out.len()], scale, out);
    }
}

/// `codes [⌈I/64⌉ · 24]` → `levels [I]`, −4 to 3.
pub(super) fn unpack(codes: &[u8], levels: &mut [i8]) {
    for (levels, codes) in levels.chunks_mut(GROUP_SIZE).zip(codes.chunks_exact(GROUP_BYTES)) {
        levels.copy_from_slice(&unpack_group(codes)[..levels.len()]);
    }
}

/// Whether the elements after the last column are u = 4. `codes` is [⌈I/64⌉ · 24], `columns` is I.
pub(super) fn padding_ok(codes: &[u8], columns: usize) -> bool {
    let used = columns % GROUP_SIZE;
    match codes.chunks_exact(GROUP_BYTES).next_back() {
        Some(last) if used > 0 => unpack_group(last)[used..].iter().all(|&level| level == 0),
        _ => true,
    }
}

/// 64 levels, −4 to 3 → the 24 bytes of a group.
fn pack_group(levels: &[i8; GROUP_SIZE], codes: &mut [u8]) {
    codes.fill(0);
    let (low, high) = codes.split_at_mut(LOW_BYTES);
    for (k, &level) in levels.iter().enumerate() {
        let code = (level + BIAS).cast_unsigned();
        low[k / 4] |= (code & 3) << (2 * (k % 4));
        high[k / 8] |= (code >> 2) << (k % 8);
    }
}

/// The 24 bytes of a group → 64 levels, −4 to 3.
fn unpack_group(codes: &[u8]) -> [i8; GROUP_SIZE] {
    let (low, high) = codes.split_at(LOW_BYTES);
    std::array::from_fn(|k| {
        let low_bits = low[k / 4] >> (2 * (k % 4)) & 3;
        let high_bit = high[k / 8] >> (k % 8) & 1;
        (low_bits | high_bit << 2).cast_signed() - BIAS
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_of_a_short_row() {
        let mut codes = [0xaa; 24];
        let mut scales = [0.0];
        quantize(&[3.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -3.0], &mut codes, &mut scales);
        assert_eq!(scales, [1.0]);
        // levels 3 0 2 2 0 -2 -2 -3, so u = 7 4 6 6 4 2 2 1
        let mut expected = [0; 24];
        expected[0] = 0b10_10_00_11;
        expected[1] = 0b01_10_10_00;
        expected[16] = 0b0001_1111;
        // the padding is u = 4
        expected[17..].fill(0xff);
        assert_eq!(codes, expected);
        assert!(padding_ok(&codes, 8));
    }

    #[test]
    fn a_partial_group_counts_what_it_has() {
        let mut row = [1.0; 65];
        row[0] = -300.0;
        row[64] = 0.03;
        let mut codes = [0; 48];
        let mut scales = [0.0; 2];
        quantize(&row, &mut codes, &mut scales);
        assert_eq!(scales, [100.0, 0.03 / 3.0]);
        // u = 1, then 63 zeros
        assert_eq!(codes[..4], [0x01, 0, 0, 0]);
        assert_eq!(codes[16..24], [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        // u = 7, then padding
        assert_eq!(codes[24..28], [0x03, 0, 0, 0]);
        assert_eq!(codes[40..48], [0xff; 8]);
        let mut out = [0.0; 65];
        dequantize(&codes, &[2.0, 0.5], &mut out);
        assert_eq!((out[0], out[1], out[63], out[64]), (-6.0, 0.0, 0.0, 1.5));
    }

    #[test]
    fn a_zero_row_is_zero() {
        let mut codes = [0; 24];
        let mut scales = [0.0];
        quantize(&[0.0, -0.0], &mut codes, &mut scales);
        assert_eq!(scales, [1e-8]);
        assert_eq!(codes[..16], [0; 16]);
        assert_eq!(codes[16..], [0xff; 8]);
    }

    #[test]
    fn all_codes_survive_at_every_place() {
        for k in 0..GROUP_SIZE {
            for level in -4..=3 {
                let mut levels = [-4; GROUP_SIZE];
                levels[k] = level;
                let mut codes = [0xaa; GROUP_BYTES];
                pack_group(&levels, &mut codes);
                assert_eq!(unpack_group(&codes), levels);
                let ones: u32 = codes.iter().map(|byte| byte.count_ones()).sum();
                assert_eq!(ones, (level + 4).count_ones());
            }
        }
    }

    #[test]
    fn zero_bytes_are_no_padding() {
        assert!(!padding_ok(&[0; 24], 63));
        assert!(padding_ok(&[0; 24], 64));
        assert!(padding_ok(&[], 0));
    }
}
