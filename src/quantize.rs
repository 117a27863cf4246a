//! Container formats: f32 rows to codes and scales, and back.
//!
//! One file a format, each written like its formula in the container format description. These are the plain versions:
//! any faster one must give the same bytes on every input. Everything here works on one row of a matrix [O, I]: I elements
//! (*columns*), their codes packed into bytes, and their scales.
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

mod fp8_e4m3_b128;
mod int2_row;
mod int3_g64;
mod int4_grouped;
mod int4_row;
mod int8_row;
mod scale;

use crate::format::Format;

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

    /// Encodes one row: `row` [I] → `codes` [`row_code_bytes(I)`], `scales` [`row_scales(I)`].
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

    /// Decodes one row: `codes` [`row_code_bytes(I)`], `scales` [`row_scales(I)`] in the format's own order → `out` [I].
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

    /// The level of every element of a row, the offset removed (int4: −8 to 7): `codes` [`row_code_bytes(I)`] → `out` [I].
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

    /// Whether what `codes` [`row_code_bytes(columns)`] holds after the last column is what the format demands.
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
