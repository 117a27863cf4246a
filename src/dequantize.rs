//! Source element types: stored bytes to f32 rows.
//!
//! BF16, F16 and F32 widen exactly. FP8 is e4m3 times the f32 scale of its 128 × 128 block, one f32 multiply; the scales
//! themselves may be stored as F32, BF16 or UE8M0. Source of the layouts: checkpoint description, element types.

pub mod fp8;
mod halves;

use crate::format::FP8_BLOCK;
use crate::tensor::Dtype;

/// Element types of a source matrix that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceDtype {
    /// IEEE binary32.
    F32,
    /// The upper half of an IEEE binary32.
    Bf16,
    /// IEEE binary16.
    F16,
    /// e4m3 with one scale per 128 × 128 block.
    Fp8E4m3,
}

impl SourceDtype {
    /// The source element type of that name in a safetensors header, or `None` if it is not read.
    pub fn from_dtype(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(SourceDtype::F32),
            Dtype::BF16 => Some(SourceDtype::Bf16),
            Dtype::F16 => Some(SourceDtype::F16),
            Dtype::F8_E4M3 => Some(SourceDtype::Fp8E4m3),
            _ => None,
        }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            SourceDtype::F32 => 4,
            SourceDtype::Bf16 | SourceDtype::F16 => 2,
            SourceDtype::Fp8E4m3 => 1,
        }
    }

    /// Block scales that one row of `columns` elements needs: ⌈I/128⌉ for FP8, else 0.
    pub fn row_scales(self, columns: usize) -> usize {
        match self {
            SourceDtype::Fp8E4m3 => columns.div_ceil(FP8_BLOCK as usize),
            SourceDtype::F32 | SourceDtype::Bf16 | SourceDtype::F16 => 0,
        }
    }

    /// Decodes one row: `stored [I · bytes()]` little-endian → `out [I]`.
    ///
    /// For FP8 `block_scales` are the ⌈I/128⌉ scales of the row's block row; for the others it is empty. Values that are
    /// not finite, of elements or of scales, are passed on: see [`first_non_finite`].
    ///
    /// # Panics
    ///
    /// On slices of other lengths.
    pub fn dequantize_row(self, stored: &[u8], block_scales: &[f32], out: &mut [f32]) {
        let columns = out.len();
        self.check_lengths(columns, stored.len(), block_scales.len());
        match self {
            SourceDtype::F32 => {
                for (out, bytes) in out.iter_mut().zip(stored.as_chunks().0) {
                    *out = f32::from_le_bytes(*bytes);
                }
            }
            SourceDtype::Bf16 => halves::bf16_row(stored, out),
            SourceDtype::F16 => halves::f16_row(stored, out),
            SourceDtype::Fp8E4m3 => fp8::dequantize_row(stored, block_scales, out),
        }
    }

    /// Panics if a row of `columns` elements has other lengths.
    pub(crate) fn check_lengths(self, columns: usize, stored: usize, block_scales: usize) {
        assert_eq!(stored / self.bytes(), columns, "elements of a row of {columns} as {self:?}");
        assert_eq!(stored % self.bytes(), 0, "a row of {self:?} ends within an element");
        assert_eq!(block_scales, self.row_scales(columns), "scales of a row of {columns} as {self:?}");
    }
}

/// Element types of a grid of block scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleDtype {
    /// IEEE binary32.
    F32,
    /// The upper half of an IEEE binary32.
    Bf16,
    /// One byte b: 2^(b−127).
    Ue8m0,
}

impl ScaleDtype {
    /// The scale type of that name in a safetensors header, or `None` if it is not read.
    pub fn from_dtype(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(ScaleDtype::F32),
            Dtype::BF16 => Some(ScaleDtype::Bf16),
            Dtype::F8_E8M0 => Some(ScaleDtype::Ue8m0),
            _ => None,
        }
    }

    /// Bytes of one scale.
    pub fn bytes(self) -> usize {
        match self {
            ScaleDtype::F32 => 4,
            ScaleDtype::Bf16 => 2,
            ScaleDtype::Ue8m0 => 1,
        }
    }

    /// Appends the scales that `stored [n · bytes()]` holds, little-endian, to `out`; all three types widen exactly.
    ///
    /// # Panics
    ///
    /// If `stored` ends within a scale.
    pub fn decode(self, stored: &[u8], out: &mut Vec<f32>) {
        assert_eq!(stored.len() % self.bytes(), 0, "scales of {self:?} end within a scale");
        let before = out.len();
        out.resize(before + stored.len() / self.bytes(), 0.0);
        let new = &mut out[before..];
        match self {
            ScaleDtype::F32 => SourceDtype::F32.dequantize_row(stored, &[], new),
            ScaleDtype::Bf16 => SourceDtype::Bf16.dequantize_row(stored, &[], new),
            ScaleDtype::Ue8m0 => {
                for (out, &byte) in new.iter_mut().zip(stored) {
                    *out = fp8::ue8m0(byte);
                }
            }
        }
    }
}

/// Index of the first element of `row [I]` that is NaN or infinite.
pub fn first_non_finite(row: &[f32]) -> Option<usize> {
    row.iter().position(|value| !value.is_finite())
}

/// Sets every element of `row [I]` that is NaN or infinite to 0 and returns how many there were.
pub fn zero_non_finite(row: &mut [f32]) -> usize {
    let mut zeroed = 0;
    for value in row {
        if !value.is_finite() {
            *value = 0.0;
            zeroed += 1;
        }
    }
    zeroed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn element_types() {
        let sources: Vec<_> =
            Dtype::ALL.into_iter().filter_map(|dtype| Some((dtype, SourceDtype::from_dtype(dtype)?))).collect();
        assert_eq!(
            sources,
            [
                (Dtype::F8_E4M3, SourceDtype::Fp8E4m3),
                (Dtype::F16, SourceDtype::F16),
                (Dtype::BF16, SourceDtype::Bf16),
                (Dtype::F32, SourceDtype::F32),
            ]
        );
        assert!(sources.iter().all(|(dtype, source)| dtype.bits() == 8 * source.bytes() as u64));
        let scales: Vec<_> =
            Dtype::ALL.into_iter().filter_map(|dtype| Some((dtype, ScaleDtype::from_dtype(dtype)?))).collect();
        assert_eq!(
            scales,
            [(Dtype::F8_E8M0, ScaleDtype::Ue8m0), (Dtype::BF16, ScaleDtype::Bf16), (Dtype::F32, ScaleDtype::F32)]
        );
        assert!(scales.iter().all(|(dtype, scale)| dtype.bits() == 8 * scale.bytes() as u64));
    }

    #[test]
    fn fp8_takes_the_scale_of_its_block() {
        let mut stored = [0x38; 257];
        stored[127] = 0x7e;
        let mut out = [0.0; 257];
        SourceDtype::Fp8E4m3.dequantize_row(&stored, &[0.25, -1.0, 1e-3], &mut out);
        assert_eq!((out[0], out[126], out[127], out[128], out[255], out[256]), (0.25, 0.25, 112.0, -1.0, -1.0, 1e-3));
        SourceDtype::Fp8E4m3.dequantize_row(&[], &[], &mut []);
    }

    #[test]
    fn fp8_is_one_f32_multiply() {
        for scale in [1.0, 0.1, 1e-40, 3e38, f32::MAX] {
            for byte in 0..=255 {
                let mut out = [0.0];
                SourceDtype::Fp8E4m3.dequantize_row(&[byte], &[scale], &mut out);
                let expected = (f64::from(fp8::e4m3(byte)) * f64::from(scale)) as f32;
                assert!(out[0] == expected || out[0].is_nan() && expected.is_nan(), "{byte:#04x} times {scale}");
            }
        }
    }

    #[test]
    fn scales_are_appended() {
        let mut out = vec![9.0];
        ScaleDtype::F32.decode(&[0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0], &mut out);
        ScaleDtype::Bf16.decode(&[0x80, 0x3e], &mut out);
        ScaleDtype::Ue8m0.decode(&[0x78, 0x7f, 0x80], &mut out);
        assert_eq!(out, [9.0, 1.0, -2.0, 0.25, 0.0078125, 1.0, 2.0]);
        ScaleDtype::Ue8m0.decode(&[0xff], &mut out);
        assert!(out[7].is_nan());
    }

    #[test]
    fn what_is_not_finite_is_found_and_zeroed() {
        // 7f 38 38 38 as FP8, c0 7f as BF16, an infinite scale
        let mut row = [0.0; 4];
        SourceDtype::Fp8E4m3.dequantize_row(&[0x38, 0x7f, 0x38, 0xff], &[2.0], &mut row);
        assert_eq!(first_non_finite(&row), Some(1));
        assert_eq!(zero_non_finite(&mut row), 2);
        assert_eq!(row, [2.0, 0.0, 2.0, 0.0]);
        assert_eq!((first_non_finite(&row), zero_non_finite(&mut row)), (None, 0));
        SourceDtype::Bf16.dequantize_row(&[0, 0, 0xc0, 0x7f], &[], &mut row[..2]);
        assert_eq!(first_non_finite(&row), Some(1));
        SourceDtype::Fp8E4m3.dequantize_row(&[0x38, 0x80, 0x38, 0x38], &[f32::INFINITY], &mut row);
        assert_eq!((first_non_finite(&row), zero_non_finite(&mut row)), (Some(0), 4));
        // a product of finite numbers that is none: 448 · f32::MAX
        SourceDtype::Fp8E4m3.dequantize_row(&[0x7e], &[f32::MAX], &mut row[..1]);
        assert_eq!(first_non_finite(&row), Some(0));
        assert_eq!(first_non_finite(&[f32::MAX, f32::MIN, f32::from_bits(1)]), None);
        assert_eq!(first_non_finite(&[]), None);
    }

    #[test]
    #[should_panic(expected = "scales of a row of 129 as Fp8E4m3")]
    fn too_few_scales_panic() {
        SourceDtype::Fp8E4m3.dequantize_row(&[0; 129], &[1.0], &mut [0.0; 129]);
    }

    #[test]
    #[should_panic(expected = "scales of a row of 1 as Bf16")]
    fn scales_of_a_type_without_scales_panic() {
        SourceDtype::Bf16.dequantize_row(&[0; 2], &[1.0], &mut [0.0]);
    }

    #[test]
    #[should_panic(expected = "ends within an element")]
    fn half_an_element_panics() {
        SourceDtype::F32.dequantize_row(&[0; 6], &[], &mut [0.0]);
    }

    proptest! {
        #[test]
        fn f32_is_copied(row in prop::collection::vec(any::<f32>(), 0..100)) {
            let stored: Vec<u8> = row.iter().flat_map(|value| value.to_le_bytes()).collect();
            let mut out = vec![0.0; row.len()];
            SourceDtype::F32.dequantize_row(&stored, &[], &mut out);
            prop_assert!(out.iter().zip(&row).all(|(out, value)| out.to_bits() == value.to_bits()));
        }
    }
}
