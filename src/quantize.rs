//! Container formats: f32 rows to codes and scales, and back.
//!
//! One file a format, each written like its formula in the container format description. These are the plain versions:
//! any faster one must give the same bytes on every input. The fast one is [`Converter`], which takes rows as they are
//! stored in a source. Everything here works on one row of a matrix [O, I]: I elements (*columns*), their codes packed into
//! bytes, and their scales.
//!
//! | format | elements | bytes of codes | scales | stored levels |
//! |---|---|---|---|---|
//! | `f32` | I | 4 · I | none | – |
//! | `int8-row` | I | I | 1 | −128 to 127 |
//! | `int4-row` | I | ⌈I/2⌉ | 1 | −8 to 7 |
//! | `int4-grouped` | I | ⌈I/2⌉ | ⌈I/group size⌉ | −8 to 7 |
//! | `int3-g64` | I | ⌈I/64⌉ · 24 | ⌈I/64⌉ | −4 to 3 |
//! | `int2-row` | I | ⌈I/4⌉ | 1 | −2 to 1 |
//! | `fp8-e4m3-b128` | I | I | ⌈I/128⌉, shared by 128 rows | – |
//!
//! An empty row has no codes; the formats with one scale a row still give it one, the smallest: 1e-8.

mod converter;
mod fp8_e4m3_b128;
mod int2_row;
mod int3_g64;
mod int4_grouped;
mod int4_row;
mod int8_row;
mod scale;
// Elsewhere there are no kernels yet.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod simd;

use crate::format::Format;

pub use converter::{Converter, NonFinite};

/// A format with its parameters, ready to encode rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantizer {
    /// Raw little-endian f32, no scales.
    F32,
    /// One signed byte an element, one scale a row.
    Int8Row {
        /// 5 to 8; the largest level is 2^(bits−1) − 1.
        bits: u32,
    },
    /// One nibble an element, one scale a row.
    Int4Row,
    /// One nibble an element, one scale per group.
    Int4Grouped {
        /// Elements of a row that share a scale; at least 1.
        group_size: usize,
    },
    /// Three bits an element, one scale per 64.
    Int3G64,
    /// Two bits an element, one scale a row.
    Int2Row,
}

impl Quantizer {
    /// The format of what this writes.
    ///
    /// With a group size of I or more the bytes are those of `int4-row`: see [`Format::canonical`].
    pub fn format(self) -> Format {
        match self {
            Quantizer::F32 => Format::F32,
            Quantizer::Int8Row { .. } => Format::Int8Row,
            Quantizer::Int4Row => Format::Int4Row,
            Quantizer::Int4Grouped { group_size } => Format::Int4Grouped { group_size: group_size as u64 },
            Quantizer::Int3G64 => Format::Int3G64,
            Quantizer::Int2Row => Format::Int2Row,
        }
    }

    /// Bytes of the codes of one row of `columns` elements.
    pub fn row_code_bytes(self, columns: usize) -> usize {
        row_code_bytes(self.format(), columns)
    }

    /// Scales of one row of `columns` elements; 0 for f32.
    pub fn row_scales(self, columns: usize) -> usize {
        row_scales(self.format(), columns)
    }

    /// Encodes one row: `row [I]` → `codes [row_code_bytes(I)]`, `scales [row_scales(I)]`.
    ///
    /// Every byte of `codes` is written. Values must be finite; what becomes of others is not defined (but for f32, which
    /// copies them). A level never leaves the symmetric range of [`Decoder::code_range`], because amax / s rounds to qmax
    /// at most, and the smallest scale only makes quotients smaller.
    ///
    /// # Panics
    ///
    /// On slices of other lengths, on bits outside 5..=8, on a group size of 0, and in debug builds on a value that is not
    /// finite.
    pub fn quantize_row(self, row: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        check_lengths(self.format(), row.len(), codes.len(), scales.len());
        match self {
            Quantizer::F32 => {
                for (code, value) in codes.chunks_exact_mut(4).zip(row) {
                    code.copy_from_slice(&value.to_le_bytes());
                }
            }
            Quantizer::Int8Row { bits } => int8_row::quantize(row, bits, codes, scales),
            Quantizer::Int4Row => int4_row::quantize(row, codes, scales),
            Quantizer::Int4Grouped { group_size } => int4_grouped::quantize(row, group_size, codes, scales),
            Quantizer::Int3G64 => int3_g64::quantize(row, codes, scales),
            Quantizer::Int2Row => int2_row::quantize(row, codes, scales),
        }
    }
}

/// Decoder of one row of a container matrix.
///
/// The value of an element is its level as f32 times its scale, one f32 multiply (for fp8: e4m3 times the scale of its
/// block; for f32: the value as stored).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoder {
    /// Never `E8Iq3Lattice` nor `Mxfp4`, and a group size is at least 1 and fits a usize.
    format: Format,
}

impl Decoder {
    /// The decoder of `format`, or `None` for `E8Iq3Lattice` and `Mxfp4`, which are not decoded, and for a group size that
    /// is 0 or larger than any row in memory.
    pub fn new(format: Format) -> Option<Decoder> {
        let decoded = match format {
            Format::E8Iq3Lattice | Format::Mxfp4 => false,
            Format::Int4Grouped { group_size } => group_size > 0 && usize::try_from(group_size).is_ok(),
            _ => true,
        };
        decoded.then_some(Decoder { format })
    }

    /// The format that is decoded.
    pub fn format(self) -> Format {
        self.format
    }

    /// Bytes of the codes of one row of `columns` elements.
    pub fn row_code_bytes(self, columns: usize) -> usize {
        row_code_bytes(self.format, columns)
    }

    /// Scales that one row of `columns` elements needs: 0 for f32, ⌈I/128⌉ for fp8, which 128 rows share.
    pub fn row_scales(self, columns: usize) -> usize {
        row_scales(self.format, columns)
    }

    /// Decodes one row: `codes [row_code_bytes(I)]`, `scales [row_scales(I)]` in the format's own order → `out [I]`.
    ///
    /// For `fp8-e4m3-b128` the scales are those of the row's block row. Codes and scales may be anything: unusual ones give
    /// unusual values, a NaN scale NaN, and a large scale times a large level may be infinite.
    ///
    /// # Panics
    ///
    /// On slices of other lengths.
    pub fn dequantize_row(self, codes: &[u8], scales: &[f32], out: &mut [f32]) {
        check_lengths(self.format, out.len(), codes.len(), scales.len());
        match self.format {
            Format::F32 => {
                for (out, code) in out.iter_mut().zip(codes.as_chunks().0) {
                    *out = f32::from_le_bytes(*code);
                }
            }
            Format::Int8Row => int8_row::dequantize(codes, scales, out),
            Format::Int4Row => int4_row::dequantize(codes, scales, out),
            Format::Int4Grouped { group_size } => int4_grouped::dequantize(codes, group_size as usize, scales, out),
            Format::Int3G64 => int3_g64::dequantize(codes, scales, out),
            Format::Int2Row => int2_row::dequantize(codes, scales, out),
            Format::Fp8E4m3B128 => fp8_e4m3_b128::dequantize(codes, scales, out),
            Format::E8Iq3Lattice | Format::Mxfp4 => unreachable!("Decoder::new refuses {}", self.format),
        }
    }

    /// The level of every element of a row, the offset removed (int4: −8 to 7): `codes [row_code_bytes(I)]` → `out [I]`.
    ///
    /// Returns whether the format has levels; for f32 and fp8 it is false and `out` is left as it is.
    ///
    /// # Panics
    ///
    /// On slices of other lengths.
    pub fn codes_row(self, codes: &[u8], out: &mut [i8]) -> bool {
        check_codes_length(self.format, out.len(), codes.len());
        match self.format {
            Format::Int8Row => int8_row::unpack(codes, out),
            Format::Int4Row | Format::Int4Grouped { .. } => int4_row::unpack(codes, out),
            Format::Int3G64 => int3_g64::unpack(codes, out),
            Format::Int2Row => int2_row::unpack(codes, out),
            Format::F32 | Format::Fp8E4m3B128 | Format::E8Iq3Lattice | Format::Mxfp4 => return false,
        }
        true
    }

    /// Smallest and largest level that a quantizer emits from finite values; `None` for f32 and fp8.
    ///
    /// The range is symmetric, and storage holds one level more, at the negative end: int4 is −7 to 7 here, while −8 can be
    /// stored. A level outside this range comes from another kind of quantizer.
    pub fn code_range(self) -> Option<(i8, i8)> {
        match self.format {
            Format::Int8Row => Some((-127, 127)),
            Format::Int4Row | Format::Int4Grouped { .. } => Some((-7, 7)),
            Format::Int3G64 => Some((-3, 3)),
            Format::Int2Row => Some((-1, 1)),
            Format::F32 | Format::Fp8E4m3B128 | Format::E8Iq3Lattice | Format::Mxfp4 => None,
        }
    }

    /// Whether what `codes [row_code_bytes(columns)]` holds after the last column is what the format demands.
    ///
    /// int4: after an odd last column a high nibble of 0. int3: the value 0 up to the end of the group (low bits 0, high
    /// bits 1). int2: bits 0; the format description is silent there. The other formats have no padding.
    ///
    /// # Panics
    ///
    /// On a slice of another length.
    pub fn padding_ok(self, codes: &[u8], columns: usize) -> bool {
        check_codes_length(self.format, columns, codes.len());
        match self.format {
            Format::Int4Row | Format::Int4Grouped { .. } => int4_row::padding_ok(codes, columns),
            Format::Int3G64 => int3_g64::padding_ok(codes, columns),
            Format::Int2Row => int2_row::padding_ok(codes, columns),
            Format::F32 | Format::Int8Row | Format::Fp8E4m3B128 | Format::E8Iq3Lattice | Format::Mxfp4 => true,
        }
    }
}

/// Bytes of the codes of one row; `usize::MAX`, which no slice has, where the count does not fit.
fn row_code_bytes(format: Format, columns: usize) -> usize {
    let bytes = format.code_bytes(1, columns as u64);
    bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX)
}

/// Scales of one row (of one block row for fp8); `usize::MAX` where the count does not fit.
fn row_scales(format: Format, columns: usize) -> usize {
    let bytes = format.scale_bytes(1, columns as u64);
    bytes.and_then(|bytes| usize::try_from(bytes / 4).ok()).unwrap_or(usize::MAX)
}

fn check_codes_length(format: Format, columns: usize, codes: usize) {
    assert_eq!(codes, row_code_bytes(format, columns), "bytes of codes of a row of {columns} as {format}");
}

fn check_lengths(format: Format, columns: usize, codes: usize, scales: usize) {
    check_codes_length(format, columns, codes);
    assert_eq!(scales, row_scales(format, columns), "scales of a row of {columns} as {format}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dequantize::fp8::e4m3;
    use proptest::prelude::*;

    const QUANTIZERS: [Quantizer; 12] = [
        Quantizer::F32,
        Quantizer::Int8Row { bits: 8 },
        Quantizer::Int8Row { bits: 7 },
        Quantizer::Int8Row { bits: 6 },
        Quantizer::Int8Row { bits: 5 },
        Quantizer::Int4Row,
        Quantizer::Int4Grouped { group_size: 1 },
        Quantizer::Int4Grouped { group_size: 16 },
        Quantizer::Int4Grouped { group_size: 33 },
        Quantizer::Int4Grouped { group_size: 64 },
        Quantizer::Int3G64,
        Quantizer::Int2Row,
    ];

    fn quantized(quantizer: Quantizer, row: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut codes = vec![0x5a; quantizer.row_code_bytes(row.len())];
        let mut scales = vec![f32::NAN; quantizer.row_scales(row.len())];
        quantizer.quantize_row(row, &mut codes, &mut scales);
        (codes, scales)
    }

    fn decoder(quantizer: Quantizer) -> Decoder {
        Decoder::new(quantizer.format()).unwrap()
    }

    fn decoded(decoder: Decoder, codes: &[u8], scales: &[f32], columns: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; columns];
        decoder.dequantize_row(codes, scales, &mut out);
        out
    }

    fn levels(decoder: Decoder, codes: &[u8], columns: usize) -> Option<Vec<i8>> {
        let mut out = vec![99; columns];
        decoder.codes_row(codes, &mut out).then_some(out)
    }

    // ---- a second opinion, element by element --------------------------------------------------------------------

    /// Largest level, and elements that share a scale in a row of `columns`.
    fn parameters(quantizer: Quantizer, columns: usize) -> (f64, usize) {
        match quantizer {
            Quantizer::F32 => unreachable!("f32 has no levels"),
            Quantizer::Int8Row { bits } => (2f64.powi(bits as i32 - 1) - 1.0, columns.max(1)),
            Quantizer::Int4Row => (7.0, columns.max(1)),
            Quantizer::Int4Grouped { group_size } => (7.0, group_size),
            Quantizer::Int3G64 => (3.0, 64),
            Quantizer::Int2Row => (1.0, columns.max(1)),
        }
    }

    /// The f32 quotient: rounding the f64 one to f32 is the same, because 53 bits are at least 2 · 24 + 2. (Below the
    /// normal f32 that fails, but there a scale is 1e-8 and a level 0 anyway.)
    fn quotient(a: f32, b: f64) -> f32 {
        (f64::from(a) / b) as f32
    }

    fn half_to_even(x: f64) -> f64 {
        let floor = x.floor();
        match x - floor {
            rest if rest < 0.5 => floor,
            rest if rest > 0.5 => floor + 1.0,
            _ if floor % 2.0 == 0.0 => floor,
            _ => floor + 1.0,
        }
    }

    /// Levels and scales without anything of the code under test.
    fn naive(quantizer: Quantizer, row: &[f32]) -> (Vec<i8>, Vec<f32>) {
        let (qmax, group_size) = parameters(quantizer, row.len());
        let mut levels = Vec::new();
        let mut scales = Vec::new();
        for group in row.chunks(group_size) {
            let mut amax = 0f32;
            for &value in group {
                amax = if value < 0.0 { amax.max(-value) } else { amax.max(value) };
            }
            let scale = quotient(amax, qmax).max(1e-8);
            scales.push(scale);
            for &value in group {
                levels.push(half_to_even(f64::from(quotient(value, f64::from(scale)))) as i8);
            }
        }
        (levels, scales)
    }

    /// The bits that hold element `i`, least significant first, counted from bit 0 of byte 0.
    fn bits_of(format: Format, i: usize) -> Vec<usize> {
        match format {
            Format::Int8Row => (8 * i..8 * i + 8).collect(),
            Format::Int4Row | Format::Int4Grouped { .. } => (4 * i..4 * i + 4).collect(),
            Format::Int2Row => (2 * i..2 * i + 2).collect(),
            Format::Int3G64 => {
                let (group, k) = (192 * (i / 64), i % 64);
                vec![group + 2 * k, group + 2 * k + 1, group + 128 + k]
            }
            _ => unreachable!("{format} has no levels"),
        }
    }

    fn naive_level(format: Format, codes: &[u8], i: usize) -> i8 {
        let bits = bits_of(format, i);
        let code = bits.iter().rev().fold(0, |code, bit| code << 1 | i32::from(codes[bit / 8] >> (bit % 8) & 1));
        let offset = match format {
            Format::Int8Row => return code as i8,
            Format::Int3G64 => 4,
            Format::Int2Row => 2,
            _ => 8,
        };
        (code - offset) as i8
    }

    // ---- strategies ----------------------------------------------------------------------------------------------

    /// Rows of up to 200 elements: anything finite, halves of a power of two (ties), FP8 with a scale.
    fn row() -> impl Strategy<Value = Vec<f32>> {
        let finite = prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL | prop::num::f32::ZERO;
        // The very largest magnitudes have a test of their own.
        let anything = finite.prop_map(|value| value / 4.0);
        let length = 0..=200usize;
        prop_oneof![
            prop::collection::vec(anything, length.clone()),
            prop::collection::vec(-1f32..1.0, length.clone()),
            (prop::collection::vec(-254i16..=254, length.clone()), 1i16..=254, -40i32..40).prop_map(
                |(row, largest, exponent)| {
                    let half = 2f32.powi(exponent - 1);
                    row.into_iter().map(|halves| f32::from(halves % (largest + 1)) * half).collect()
                }
            ),
            (prop::collection::vec((0u8..=0x7e, any::<bool>()), length), 1e-5f32..1e-2).prop_map(|(row, scale)| {
                row.into_iter().map(|(code, sign)| e4m3(code | u8::from(sign) << 7) * scale).collect()
            }),
        ]
    }

    /// A quantizer with levels.
    fn quantizer() -> impl Strategy<Value = Quantizer> {
        prop_oneof![
            prop::sample::select(QUANTIZERS[1..].to_vec()),
            (1usize..=256).prop_map(|group_size| Quantizer::Int4Grouped { group_size }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn levels_and_scales_are_those_of_the_formula(quantizer in quantizer(), row in row()) {
            let (codes, scales) = quantized(quantizer, &row);
            let decoder = decoder(quantizer);
            let levels = levels(decoder, &codes, row.len()).unwrap();
            let (naive_levels, naive_scales) = naive(quantizer, &row);
            prop_assert_eq!(&levels, &naive_levels);
            if !row.is_empty() {
                prop_assert_eq!(&scales, &naive_scales);
            }
            let (smallest, largest) = decoder.code_range().unwrap();
            prop_assert!(levels.iter().all(|level| (smallest..=largest).contains(level)));
            prop_assert!(decoder.padding_ok(&codes, row.len()));
        }

        /// Half a step, and the rounding of quotient and product: each at most 2^−24 of its result. No element is further
        /// off for being clamped, since no level of finite values is out of range.
        #[test]
        fn no_element_is_off_by_more_than_half_a_step(quantizer in quantizer(), row in row()) {
            let (codes, scales) = quantized(quantizer, &row);
            let out = decoded(decoder(quantizer), &codes, &scales, row.len());
            let (_, group_size) = parameters(quantizer, row.len());
            for (i, (&value, &stored)) in row.iter().zip(&out).enumerate() {
                let [value, stored, scale] = [value, stored, scales[i / group_size]].map(f64::from);
                let rounding = (value.abs() + stored.abs()) * 2f64.powi(-23);
                prop_assert!((value - stored).abs() <= scale / 2.0 + rounding, "{i}: {value} became {stored}");
            }
        }

        #[test]
        fn any_bytes_decode_as_the_table_says(
            quantizer in quantizer(),
            columns in 0usize..=200,
            bytes in prop::collection::vec(any::<u8>(), 200),
            numbers in prop::collection::vec(any::<f32>(), 200),
        ) {
            let decoder = decoder(quantizer);
            let codes = &bytes[..decoder.row_code_bytes(columns)];
            let scales = &numbers[..decoder.row_scales(columns)];
            let out = decoded(decoder, codes, scales, columns);
            let levels = levels(decoder, codes, columns).unwrap();
            let (_, group_size) = parameters(quantizer, columns);
            for (i, out) in out.into_iter().enumerate() {
                let level = naive_level(decoder.format(), codes, i);
                prop_assert_eq!(levels[i], level);
                let value = f32::from(level) * scales[i / group_size];
                prop_assert!(out.to_bits() == value.to_bits() || out.is_nan() && value.is_nan());
            }
        }

        #[test]
        fn a_group_that_spans_the_row_is_a_row(row in row(), more in 0usize..100) {
            prop_assume!(!row.is_empty());
            let grouped = Quantizer::Int4Grouped { group_size: row.len() + more };
            prop_assert_eq!(quantized(grouped, &row), quantized(Quantizer::Int4Row, &row));
        }

        /// With a scale of 1 the levels are the values.
        #[test]
        fn integers_are_kept(quantizer in quantizer(), seeds in prop::collection::vec(any::<i8>(), 1..=200)) {
            let (qmax, group_size) = parameters(quantizer, seeds.len());
            let qmax = qmax as i16;
            let row: Vec<f32> = seeds
                .iter()
                .enumerate()
                .map(|(i, &seed)| f32::from(if i % group_size == 0 { qmax } else { i16::from(seed) % (qmax + 1) }))
                .collect();
            let (codes, scales) = quantized(quantizer, &row);
            prop_assert!(scales.iter().all(|&scale| scale == 1.0));
            prop_assert_eq!(decoded(decoder(quantizer), &codes, &scales, row.len()), row);
        }

        #[test]
        fn f32_is_copied(row in prop::collection::vec(any::<f32>(), 0..100)) {
            let (codes, scales) = quantized(Quantizer::F32, &row);
            prop_assert!(scales.is_empty());
            let out = decoded(decoder(Quantizer::F32), &codes, &[], row.len());
            prop_assert!(out.iter().zip(&row).all(|(out, value)| out.to_bits() == value.to_bits()));
        }
    }

    #[test]
    fn padding_bits_are_guarded_and_no_others() {
        for quantizer in QUANTIZERS {
            let decoder = decoder(quantizer);
            for columns in 0..=130 {
                let row: Vec<f32> = (0..columns).map(|i| i as f32 - 40.0).collect();
                let (mut codes, _) = quantized(quantizer, &row);
                assert!(decoder.padding_ok(&codes, columns), "{quantizer:?} [{columns}]");
                let used: Vec<usize> = match quantizer {
                    Quantizer::F32 => (0..32 * columns).collect(),
                    _ => (0..columns).flat_map(|i| bits_of(decoder.format(), i)).collect(),
                };
                for bit in 0..8 * codes.len() {
                    codes[bit / 8] ^= 1 << (bit % 8);
                    let ok = decoder.padding_ok(&codes, columns);
                    assert_eq!(ok, used.contains(&bit), "{quantizer:?} [{columns}], bit {bit}");
                    codes[bit / 8] ^= 1 << (bit % 8);
                }
            }
        }
    }

    #[test]
    fn rows_without_magnitude_are_zero() {
        for quantizer in &QUANTIZERS[1..] {
            for row in [vec![0.0; 67], vec![-0.0; 67], vec![f32::from_bits(1); 67], vec![-4e-9; 67]] {
                let (codes, scales) = quantized(*quantizer, &row);
                assert_eq!(levels(decoder(*quantizer), &codes, 67).unwrap(), [0; 67], "{quantizer:?}");
                assert!(scales.iter().all(|&scale| scale == 1e-8), "{quantizer:?}");
            }
        }
    }

    #[test]
    fn the_smallest_scale_makes_levels_small() {
        // 2e-8 / 3 is less than 1e-8, 2e-8 / 1 is not.
        for (quantizer, expected) in [(Quantizer::Int4Row, [2, 0, -1]), (Quantizer::Int3G64, [2, 0, -1])] {
            let (codes, scales) = quantized(quantizer, &[2e-8, 4.9e-9, -1e-8]);
            assert_eq!(scales, [1e-8]);
            assert_eq!(levels(decoder(quantizer), &codes, 3).unwrap(), expected);
        }
        let (codes, scales) = quantized(Quantizer::Int2Row, &[2e-8, 4.9e-9, -1e-8]);
        assert_eq!((scales, levels(decoder(Quantizer::Int2Row), &codes, 3).unwrap()), (vec![2e-8], vec![1, 0, 0]));
    }

    #[test]
    fn empty_rows_have_no_codes() {
        for quantizer in QUANTIZERS {
            let (codes, scales) = quantized(quantizer, &[]);
            assert!(codes.is_empty(), "{quantizer:?}");
            assert!(scales.iter().all(|&scale| scale == 1e-8), "{quantizer:?}");
            let expected = match quantizer {
                Quantizer::F32 | Quantizer::Int4Grouped { .. } | Quantizer::Int3G64 => 0,
                Quantizer::Int8Row { .. } | Quantizer::Int4Row | Quantizer::Int2Row => 1,
            };
            assert_eq!(scales.len(), expected, "{quantizer:?}");
            assert!(decoded(decoder(quantizer), &codes, &scales, 0).is_empty());
        }
    }

    #[test]
    fn huge_values_quantize_like_others() {
        for quantizer in &QUANTIZERS[1..] {
            let (codes, scales) = quantized(*quantizer, &[f32::MAX, f32::MIN]);
            let largest = parameters(*quantizer, 2).0 as i8;
            let levels = levels(decoder(*quantizer), &codes, 2).unwrap();
            assert_eq!(levels, [largest, -largest], "{quantizer:?}");
            assert!(scales.iter().all(|scale| scale.is_finite()), "{quantizer:?}");
        }
    }

    /// The format's own limit: with f32::MAX / 127 rounded up, 127 steps are more than f32 holds. The float below is safe.
    #[test]
    fn the_largest_float_as_int8_decodes_as_infinity() {
        let int8 = Quantizer::Int8Row { bits: 8 };
        for (value, finite) in [(f32::MAX, false), (f32::MAX.next_down(), true)] {
            let (codes, scales) = quantized(int8, &[value]);
            assert_eq!(decoded(decoder(int8), &codes, &scales, 1)[0].is_finite(), finite);
        }
        for quantizer in [Quantizer::Int4Row, Quantizer::Int3G64, Quantizer::Int2Row] {
            let (codes, scales) = quantized(quantizer, &[f32::MAX]);
            assert!(decoded(decoder(quantizer), &codes, &scales, 1)[0].is_finite(), "{quantizer:?}");
        }
    }

    #[test]
    fn sizes_are_those_of_the_format() {
        for quantizer in QUANTIZERS {
            let (format, decoder) = (quantizer.format(), decoder(quantizer));
            assert_eq!(decoder.format(), format);
            for columns in 0..300 {
                let bytes = format.code_bytes(1, columns as u64).unwrap();
                assert_eq!(quantizer.row_code_bytes(columns) as u64, bytes);
                assert_eq!(decoder.row_code_bytes(columns) as u64, bytes);
                let scales = format.scales_per_row(columns as u64).unwrap_or(0);
                assert_eq!(quantizer.row_scales(columns) as u64, scales);
                assert_eq!(decoder.row_scales(columns) as u64, scales);
            }
        }
        assert_eq!(Quantizer::F32.row_code_bytes(usize::MAX), usize::MAX);
    }

    #[test]
    fn formats_without_a_decoder() {
        assert_eq!(Decoder::new(Format::E8Iq3Lattice), None);
        assert_eq!(Decoder::new(Format::Mxfp4), None);
        assert_eq!(Decoder::new(Format::Int4Grouped { group_size: 0 }), None);
        assert!(Decoder::new(Format::Int4Grouped { group_size: 100 }).is_some());
    }

    #[test]
    fn fp8_has_scales_but_no_levels() {
        let fp8 = Decoder::new(Format::Fp8E4m3B128).unwrap();
        assert_eq!((fp8.row_code_bytes(129), fp8.row_scales(129)), (129, 2));
        assert_eq!((fp8.code_range(), levels(fp8, &[0x38; 3], 3)), (None, None));
        assert!(fp8.padding_ok(&[0xff; 3], 3));
        let out = decoded(fp8, &[0x38; 129], &[1.5, -2.0], 129);
        assert_eq!((out[0], out[127], out[128]), (1.5, 1.5, -2.0));
        let f32 = Decoder::new(Format::F32).unwrap();
        assert_eq!((f32.code_range(), levels(f32, &[0; 4], 1)), (None, None));
    }

    #[test]
    fn storage_holds_one_level_more_than_a_quantizer_emits() {
        for (format, byte, lowest, range) in [
            (Format::Int8Row, 0x80, -128, (-127, 127)),
            (Format::Int4Row, 0x00, -8, (-7, 7)),
            (Format::Int4Grouped { group_size: 64 }, 0x00, -8, (-7, 7)),
            (Format::Int3G64, 0x00, -4, (-3, 3)),
            (Format::Int2Row, 0x00, -2, (-1, 1)),
        ] {
            let decoder = Decoder::new(format).unwrap();
            let codes = vec![byte; decoder.row_code_bytes(1)];
            assert_eq!(levels(decoder, &codes, 1), Some(vec![lowest]), "{format}");
            assert_eq!(decoder.code_range(), Some(range), "{format}");
        }
    }

    #[test]
    #[should_panic(expected = "bytes of codes of a row of 5 as int4-row")]
    fn codes_of_another_length_panic() {
        Quantizer::Int4Row.quantize_row(&[0.0; 5], &mut [0; 2], &mut [0.0]);
    }

    #[test]
    #[should_panic(expected = "scales of a row of 65 as int3-g64")]
    fn scales_of_another_length_panic() {
        decoder(Quantizer::Int3G64).dequantize_row(&[0; 48], &[1.0], &mut [0.0; 65]);
    }

    #[test]
    #[should_panic(expected = "bytes of codes of a row of 4 as int2-row")]
    fn levels_of_another_length_panic() {
        decoder(Quantizer::Int2Row).codes_row(&[0; 2], &mut [0; 4]);
    }
}
