//! Scales looked at as their bytes go by.

use crate::error::FaultKind;
use crate::format::{FP8_BLOCK, Format};
use crate::tensor::Shape;

/// Looks for scales that are not positive and finite in bytes that come in parts of any length.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct ScaleScan {
    /// Bytes of a scale that the last part cut in two.
    cut: Vec<u8>,
    /// Scales seen.
    count: u64,
    bad: u64,
    /// Index and value of the first bad one.
    first_bad: Option<(u64, f32)>,
}

/// Whether the bits are those of a positive finite number: zero, signs, infinities and NaN lie outside of the range.
fn is_good(bits: i32) -> bool {
    (bits > 0) & (bits < f32::INFINITY.to_bits().cast_signed())
}

impl ScaleScan {
    /// The next bytes.
    pub fn feed(&mut self, mut bytes: &[u8]) {
        if !self.cut.is_empty() {
            let (head, rest) = bytes.split_at(bytes.len().min(4 - self.cut.len()));
            self.cut.extend_from_slice(head);
            bytes = rest;
            if let Ok(scale) = <[u8; 4]>::try_from(&*self.cut) {
                self.cut.clear();
                self.whole(&[scale]);
            }
        }
        let (scales, cut) = bytes.as_chunks();
        self.whole(scales);
        self.cut.extend_from_slice(cut);
    }

    fn whole(&mut self, scales: &[[u8; 4]]) {
        let bad = |scale: &[u8; 4]| !is_good(i32::from_le_bytes(*scale));
        if scales.iter().fold(0, |any, scale| any | u32::from(bad(scale))) != 0 {
            for (i, scale) in scales.iter().enumerate().filter(|(_, scale)| bad(scale)) {
                self.bad += 1;
                self.first_bad.get_or_insert((self.count + i as u64, f32::from_le_bytes(*scale)));
            }
        }
        self.count += scales.len() as u64;
    }

    /// Index of the first bad scale; 0 if there is none.
    pub fn first_bad_index(&self) -> u64 {
        self.first_bad.map_or(0, |(index, _)| index)
    }

    /// What is wrong with the scales of a weight of that format and shape.
    pub fn fault(&self, format: Option<Format>, shape: Option<Shape>) -> Option<FaultKind> {
        let (index, value) = self.first_bad?;
        let columns = shape.and_then(|shape| shape.matrix()).map_or(1, |(_, columns)| columns);
        let row = match format {
            Some(Format::Fp8E4m3B128) => index / columns.div_ceil(FP8_BLOCK).max(1) * FP8_BLOCK,
            Some(format) => index / format.scales_per_row(columns).unwrap_or(1).max(1),
            None => 0,
        };
        Some(FaultKind::BadScale { index, row, value, count: self.bad })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn positive_finite_numbers_are_good() {
        for good in [f32::from_bits(1), 1e-8, 1.0, f32::MAX] {
            assert!(is_good(good.to_bits().cast_signed()), "{good}");
        }
        for bad in [0.0, -0.0, -1e-30, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
            assert!(!is_good(bad.to_bits().cast_signed()), "{bad}");
        }
    }

    #[test]
    fn rows_follow_from_the_format() {
        let scan = ScaleScan { first_bad: Some((9, -1.0)), bad: 1, ..ScaleScan::default() };
        let row = |format, columns| match scan.fault(Some(format), Some([1000, columns].into())) {
            Some(FaultKind::BadScale { row, .. }) => row,
            other => panic!("{other:?}"),
        };
        assert_eq!(row(Format::Int8Row, 500), 9);
        assert_eq!(row(Format::Int4Grouped { group_size: 128 }, 500), 2);
        assert_eq!(row(Format::Int3G64, 129), 3);
        assert_eq!(row(Format::Fp8E4m3B128, 300), 384);
    }

    proptest! {
        #[test]
        fn parts_of_any_length_give_the_same(
            scales in proptest::collection::vec(prop_oneof![Just(1f32), Just(0f32), any::<f32>()], 0..40),
            parts in proptest::collection::vec(0usize..9, 0..60),
        ) {
            let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            let mut whole = ScaleScan::default();
            whole.feed(&bytes);
            let mut split = ScaleScan::default();
            let mut rest = &bytes[..];
            for part in parts {
                let (head, tail) = rest.split_at(part.min(rest.len()));
                split.feed(head);
                rest = tail;
            }
            split.feed(rest);
            let bits = |scan: &ScaleScan| (scan.count, scan.bad, scan.first_bad.map(|(i, v)| (i, v.to_bits())));
            prop_assert_eq!(bits(&whole), bits(&split));
            let bad = scales.iter().filter(|scale| !(scale.is_finite() && **scale > 0.0)).count() as u64;
            prop_assert_eq!((whole.count, whole.bad), (scales.len() as u64, bad));
        }
    }
}
