//! `fp8-e4m3-b128`: one e4m3 byte an element, one f32 scale per 128 × 128 block. Decoded only.
//!
//! Value of element (o, i): `e4m3(code) · s[o / 128][i / 128]`.

use crate::dequantize::fp8;

/// `codes [I]`, `scales [⌈I/128⌉]` of the row's block row → `out [I]`.
pub(super) fn dequantize(codes: &[u8], scales: &[f32], out: &mut [f32]) {
    fp8::dequantize_row(codes, scales, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_spans_128_columns() {
        // 0x38 is 1, 0xc0 is -2
        let mut codes = [0x38; 257];
        codes[128] = 0xc0;
        let mut out = [0.0; 257];
        dequantize(&codes, &[0.5, 3.0, 7.0], &mut out);
        assert_eq!(out[..128], [0.5; 128]);
        assert_eq!(out[128], -6.0);
        assert_eq!(out[129..256], [3.0; 127]);
        assert_eq!(out[256], 7.0);
    }
}
