//! Stored source rows to codes and scales in one go, as fast as this CPU can.

use super::{Quantizer, check_lengths, int2_row, int3_g64, int4_row, int8_row, simd};
use crate::dequantize::{SourceDtype, first_non_finite};
use crate::isa::Isa;

/// Converts the rows of one matrix: what [`SourceDtype::dequantize_row`] and [`Quantizer::quantize_row`] do one after the
/// other, with the same bits, on every input whose values are finite.
#[derive(Debug)]
pub struct Converter {
    quantizer: Quantizer,
    dtype: SourceDtype,
    rows: simd::Rows,
    kernel: Option<simd::Kernel>,
    /// A row as f32, for the plain way.
    values: Vec<f32>,
    /// Codes that nobody wants.
    codes: Vec<u8>,
}

/// A row holds a value that is NaN or infinite, as it is stored or after its block scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NonFinite;

impl Converter {
    /// For rows of `columns` elements of `dtype`.
    ///
    /// # Panics
    ///
    /// On bits outside 5..=8 and on a group size of 0.
    pub fn new(quantizer: Quantizer, dtype: SourceDtype, columns: usize, isa: Isa) -> Converter {
        let (qmax, group_size) = match quantizer {
            Quantizer::F32 => (1.0, columns),
            Quantizer::Int8Row { bits } => (int8_row::qmax(bits), columns),
            Quantizer::Int4Row => (int4_row::QMAX, columns),
            Quantizer::Int4Grouped { group_size } => (int4_row::QMAX, group_size),
            Quantizer::Int3G64 => (int3_g64::QMAX, int3_g64::GROUP_SIZE),
            Quantizer::Int2Row => (int2_row::QMAX, columns),
        };
        assert!(columns == 0 || group_size > 0, "a group has at least one element");
        Converter {
            quantizer,
            dtype,
            rows: simd::Rows { columns, group_size, qmax },
            kernel: simd::Kernel::new(quantizer, dtype, isa),
            values: Vec::new(),
            codes: Vec::new(),
        }
    }

    /// Converts one row: `stored [I · bytes]` with `block_scales [⌈I/128⌉]` for FP8 (else none) → `codes
    /// [row_code_bytes(I)]`, `scales [row_scales(I)]`.
    ///
    /// # Errors
    ///
    /// [`NonFinite`], and then `codes` and `scales` hold nothing of use: it is for the caller to say what becomes of such
    /// values.
    ///
    /// # Panics
    ///
    /// On slices of other lengths.
    pub fn convert_row(
        &mut self,
        stored: &[u8],
        block_scales: &[f32],
        codes: &mut [u8],
        scales: &mut [f32],
    ) -> Result<(), NonFinite> {
        let columns = self.rows.columns;
        self.dtype.check_lengths(columns, stored.len(), block_scales.len());
        check_lengths(self.quantizer.format(), columns, codes.len(), scales.len());
        let Some(kernel) = self.kernel else { return self.plain_row(stored, block_scales, codes, scales) };
        let row = simd::Row { stored, block_scales, codes, scales };
        match kernel.convert(self.rows, row) {
            simd::Outcome::Done => Ok(()),
            simd::Outcome::NonFinite => Err(NonFinite),
            simd::Outcome::TooLarge => self.plain_row(stored, block_scales, codes, scales),
        }
    }

    /// Finds the scales that [`Converter::convert_row`] would give, and nothing else, of a quantizer that has scales.
    ///
    /// # Errors
    ///
    /// [`NonFinite`], and then `scales` holds nothing of use.
    ///
    /// # Panics
    ///
    /// On slices of other lengths.
    pub fn scales_row(&mut self, stored: &[u8], block_scales: &[f32], scales: &mut [f32]) -> Result<(), NonFinite> {
        let columns = self.rows.columns;
        self.dtype.check_lengths(columns, stored.len(), block_scales.len());
        assert_eq!(scales.len(), self.quantizer.row_scales(columns), "scales of a row of {columns}");
        let row = simd::Row { stored, block_scales, codes: &mut [], scales: &mut *scales };
        match self.kernel.map_or(simd::Outcome::TooLarge, |kernel| kernel.scales(self.rows, row)) {
            simd::Outcome::Done => Ok(()),
            simd::Outcome::NonFinite => Err(NonFinite),
            simd::Outcome::TooLarge => {
                let mut codes = std::mem::take(&mut self.codes);
                codes.resize(self.quantizer.row_code_bytes(columns), 0);
                let found = self.plain_row(stored, block_scales, &mut codes, scales);
                self.codes = codes;
                found
            }
        }
    }

    /// The oracle.
    fn plain_row(
        &mut self,
        stored: &[u8],
        block_scales: &[f32],
        codes: &mut [u8],
        scales: &mut [f32],
    ) -> Result<(), NonFinite> {
        self.values.resize(self.rows.columns, 0.0);
        self.dtype.dequantize_row(stored, block_scales, &mut self.values);
        if first_non_finite(&self.values).is_some() {
            return Err(NonFinite);
        }
        self.quantizer.quantize_row(&self.values, codes, scales);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
