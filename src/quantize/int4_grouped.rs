//! `int4-grouped`: the nibbles of `int4-row`, one scale per `group_size` elements of a row.
//!
//! Value of element i: `(nibble − 8) · s[i / group_size]`. The last group of a row may be shorter; its scale comes from
//! the elements that it has. With `group_size` ≥ I the bytes are those of `int4-row`.

use super::int4_row::{self, QMAX};
use super::scale;

/// `row` [I] → `codes` [⌈I/2⌉], `scales` [⌈I/group_size⌉].
pub(super) fn quantize(row: &[f32], group_size: usize, codes: &mut [u8], scales: &mut [f32]) {
    let mut levels = vec![0; row.len()];
    for ((scale, group), levels) in scales.iter_mut().zip(row.chunks(group_size)).zip(levels.chunks_mut(group_size)) {
        *scale = scale::quantize_group(group, QMAX, levels);
    }
    int4_row::pack(&levels, codes);
}

/// `codes` [⌈I/2⌉], `scales` [⌈I/group_size⌉] → `out` [I].
pub(super) fn dequantize(codes: &[u8], group_size: usize, scales: &[f32], out: &mut [f32]) {
    let mut levels = vec![0; out.len()];
    int4_row::unpack(codes, &mut levels);
    for ((&scale, levels), out) in scales.iter().zip(levels.chunks(group_size)).zip(out.chunks_mut(group_size)) {
        scale::dequantize_group(levels, scale, out);
    }
}
