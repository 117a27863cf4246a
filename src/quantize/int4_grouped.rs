//! `int4-grouped`: the nibbles of `int4-row`, one scale per `group_size` elements of a row.
//!
//! Value of element i: `(nibble − 8) · s[i / group_size]`. The last group of a row may be shorter; its scale comes from
//! the elements that it has. With `group_size` ≥ I the bytes are those of `int4-row`.

use super::int4_row::{self, QMAX};
use super::scale;

/// `row [I]` → `codes [⌈I/2⌉]`, `scales [⌈I/group_size⌉]`.
pub(super) fn quantize(row: &[f32], group_size: usize, codes: &mut [u8], scales: &mut [f32]) {
    let mut levels = vec![0; row.len()];
    for ((scale, group), levels) in scales.iter_mut().zip(row.chunks(group_size)).zip(levels.chunks_mut(group_size)) {
        *scale = scale::quantize_group(group, QMAX, levels);
    }
    int4_row::pack(&levels, codes);
}

/// `codes [⌈I/2⌉]`, `scales [⌈I/group_size⌉]` → `out [I]`.
pub(super) fn dequantize(codes: &[u8], group_size: usize, scales: &[f32], out: &mut [f32]) {
    let mut levels = vec![0; out.len()];
    int4_row::unpack(codes, &mut levels);
    for ((&scale, levels), out) in scales.iter().zip(levels.chunks(group_size)).zip(out.chunks_mut(group_size)) {
        scale::dequantize_group(levels, scale, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_has_its_scale() {
        // The row that loses its small half under one scale keeps it under two.
        let row = [0.05, -0.05, 0.04, 0.03, 1.5, -1.4, 0.7, 0.2];
        let mut codes = [0; 4];
        let mut scales = [0.0; 2];
        quantize(&row, 4, &mut codes, &mut scales);
        assert_eq!(scales, [0.05 / 7.0, 1.5 / 7.0]);
        // .04 is 5.6 and .03 is 4.2 steps
        assert_eq!(codes, [0x1f, 0xce, 0x1f, 0x9b]);
        let mut out = [0.0; 8];
        dequantize(&codes, 4, &[1.0, 10.0], &mut out);
        assert_eq!(out, [7.0, -7.0, 6.0, 4.0, 70.0, -70.0, 30.0, 10.0]);
    }

    #[test]
    fn a_partial_group_counts_what_it_has() {
        let mut codes = [0; 3];
        let mut scales = [0.0; 2];
        quantize(&[70.0, 0.0, 0.0, -70.0, -0.07], 4, &mut codes, &mut scales);
        assert_eq!(scales, [10.0, 0.07 / 7.0]);
        assert_eq!(codes, [0x8f, 0x18, 0x01]);
    }

    #[test]
    fn groups_may_end_within_a_byte() {
        let mut codes = [0; 3];
        let mut scales = [0.0; 2];
        quantize(&[7.0, 1.0, -7.0, 14.0, 2.0, -14.0], 3, &mut codes, &mut scales);
        assert_eq!(scales, [1.0, 2.0]);
        assert_eq!(codes, [0x9f, 0xf1, 0x19]);
        let mut out = [0.0; 6];
        dequantize(&codes, 3, &scales, &mut out);
        assert_eq!(out, [7.0, 1.0, -7.0, 14.0, 2.0, -14.0]);
    }
}
