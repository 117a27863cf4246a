//! `fp8-e4m3-b128`: one e4m3 byte an element, one f32 scale per 128 × 128 block. Decoded only.
//!
//! Value of element (o, i): `e4m3(code) · s[o / 128][i / 128]`.

use crate::dequantize::fp8;

/// `codes` [I], `scales` [⌈I/128⌉] of the row's block row → `out` [I].
pub(super) fn dequantize(codes: &[u8], scales: &[f32], out: &mut [f32]) {
    fp8::dequantize_row(codes, scales, out);
}
