//! How far a stored weight may be from its source.
//!
//! With d the decoded value, w the source's and s the scale of its group, the quantizer computed q = round(w / s) and the
//! decoder d = q · s, each operation rounded to f32. A quotient is wrong by |w / s| · 2^−24 at most and a product by
//! |d| · 2^−24, so that |w − d| ≤ s/2 + (|w| + |d|) · 2^−24, but for numbers below the normal ones.

use crate::error::FaultKind;
use crate::format::{FP8_BLOCK, Format};

/// Half a unit in the last place of an f32, relative.
const ROUNDING: f64 = 1.0 / (1 << 24) as f64;
/// What rounding of the smallest numbers adds: one step of the f32 below the normal ones.
const TINY: f64 = 1.5e-45;

/// The element that is farthest away, in half steps.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Worst {
    half_steps: f64,
    row: u64,
    column: u64,
    expected: f32,
    found: f32,
    half_step: f32,
}

/// What a comparison of some rows came to.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Distance {
    /// Elements that are too far away.
    count: u64,
    worst: Option<Worst>,
    /// Elements of the source that are not finite: how many, and row, column and value of the first.
    pub non_finite: Option<(u64, u64, u64, f32)>,
    /// Zeros in the left half of the columns and in the right: of the source, and stored.
    zeros_expected: [u64; 2],
    zeros_found: [u64; 2],
}

/// The scale of the coarsest quantizer of a format for a group: amax over its largest level, for int8 with 5 bits.
fn widest_scale(format: Format, expected: &[f32]) -> f32 {
    let qmax = match format {
        Format::Int8Row => 15.0,
        Format::Int3G64 => 3.0,
        Format::Int2Row => 1.0,
        _ => 7.0,
    };
    let amax = expected.iter().fold(0.0f32, |amax, value| amax.max(value.abs()));
    (amax / qmax).max(1e-8)
}

impl Distance {
    /// Compares a row. What is not finite in `expected` counts as 0, as it does when it is converted.
    pub fn row(&mut self, row: u64, format: Format, scales: &[f32], expected: &mut [f32], found: &[f32]) {
        if !expected.iter().fold(true, |all, value| all & value.is_finite()) {
            self.zero(row, expected);
        }
        let exact = matches!(format, Format::F32 | Format::Fp8E4m3B128);
        let group_size = match format {
            _ if exact => FP8_BLOCK,
            format => format.group_size().unwrap_or(u64::MAX),
        };
        let group_size = usize::try_from(group_size).unwrap_or(usize::MAX).min(expected.len().max(1));
        for (group, (expected, found)) in expected.chunks(group_size).zip(found.chunks(group_size)).enumerate() {
            // The stored scale is no witness for itself: a step wider than any quantizer's would let everything pass.
            let scale = if exact { 0.0 } else { scales[group].min(widest_scale(format, expected)) };
            self.group(row, group * group_size, scale, expected, found);
        }
        let half = expected.len() / 2;
        let zeros = |values: &[f32]| values.iter().filter(|value| **value == 0.0).count() as u64;
        for (side, range) in [0..half, half..expected.len()].into_iter().enumerate() {
            self.zeros_expected[side] += zeros(&expected[range.clone()]);
            self.zeros_found[side] += zeros(&found[range]);
        }
    }

    fn zero(&mut self, row: u64, expected: &mut [f32]) {
        for (column, value) in expected.iter_mut().enumerate().filter(|(_, value)| !value.is_finite()) {
            let (count, row, column, first) = self.non_finite.unwrap_or((0, row, column as u64, *value));
            self.non_finite = Some((count + 1, row, column, first));
            *value = 0.0;
        }
    }

    /// Compares elements that share a scale; 0 asks for equal bits.
    fn group(&mut self, row: u64, first_column: usize, scale: f32, expected: &[f32], found: &[f32]) {
        let half_step = f64::from(scale) / 2.0;
        let within = |w: f32, d: f32| {
            if scale == 0.0 {
                return w.to_bits() == d.to_bits();
            }
            let (w, d) = (f64::from(w), f64::from(d));
            (w - d).abs() <= half_step + (w.abs() + d.abs()) * ROUNDING + TINY
        };
        if expected.iter().zip(found).fold(true, |all, (&w, &d)| all & within(w, d)) {
            return;
        }
        for (i, (&w, &d)) in expected.iter().zip(found).enumerate().filter(|(_, (w, d))| !within(**w, **d)) {
            self.count += 1;
            let ratio = (f64::from(w) - f64::from(d)).abs() / half_step;
            // Not a number, or no step at all: nothing is farther away.
            let half_steps = if ratio.is_nan() { f64::INFINITY } else { ratio };
            if self.worst.is_none_or(|worst| half_steps > worst.half_steps) {
                let column = (first_column + i) as u64;
                self.worst =
                    Some(Worst { half_steps, row, column, expected: w, found: d, half_step: half_step as f32 });
            }
        }
    }

    /// Joins what the rows that follow came to.
    pub fn join(&mut self, next: &Distance) {
        self.count += next.count;
        self.worst = match (self.worst, next.worst) {
            (Some(worst), Some(other)) if worst.half_steps >= other.half_steps => Some(worst),
            (worst, other) => other.or(worst),
        };
        self.non_finite = match (self.non_finite, next.non_finite) {
            (Some((count, row, column, value)), Some((more, ..))) => Some((count + more, row, column, value)),
            (before, after) => before.or(after),
        };
        for side in 0..2 {
            self.zeros_expected[side] += next.zeros_expected[side];
            self.zeros_found[side] += next.zeros_found[side];
        }
    }

    /// What is wrong, if anything is too far away.
    pub fn fault(&self) -> Option<FaultKind> {
        let Worst { row, column, expected, found, half_step, .. } = self.worst?;
        Some(FaultKind::NotTheSource { count: self.count, row, column, expected, found, half_step })
    }

    /// Columns of a half that is zero, or all but one element in 100, although the source's is not.
    pub fn lost_half(&self, rows: u64, columns: u64) -> Option<(u64, u64)> {
        let half = columns / 2;
        [(0, half), (half, columns)].into_iter().enumerate().find_map(|(side, (begin, end))| {
            let elements = rows * (end - begin);
            let lost = self.zeros_found[side] * 100 >= elements * 99 && self.zeros_expected[side] * 10 < elements * 9;
            (lost && elements > 0).then_some((begin, end))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::{Decoder, Quantizer};
    use proptest::prelude::*;

    const QUANTIZERS: [Quantizer; 7] = [
        Quantizer::F32,
        Quantizer::Int8Row { bits: 8 },
        Quantizer::Int8Row { bits: 5 },
        Quantizer::Int4Row,
        Quantizer::Int4Grouped { group_size: 16 },
        Quantizer::Int3G64,
        Quantizer::Int2Row,
    ];

    fn distance(quantizer: Quantizer, row: &[f32], spoil: impl FnOnce(&mut [u8], &mut [f32])) -> Distance {
        let mut codes = vec![0; quantizer.row_code_bytes(row.len())];
        let mut scales = vec![0.0; quantizer.row_scales(row.len())];
        quantizer.quantize_row(row, &mut codes, &mut scales);
        spoil(&mut codes, &mut scales);
        let mut found = vec![0.0; row.len()];
        Decoder::new(quantizer.format()).unwrap().dequantize_row(&codes, &scales, &mut found);
        let mut distance = Distance::default();
        distance.row(7, quantizer.format(), &scales, &mut row.to_vec(), &found);
        distance
    }

    fn values() -> impl Strategy<Value = Vec<f32>> {
        // Any magnitude, alike in a row or not, and halves of steps.
        let unlike = proptest::collection::vec(any::<f32>().prop_filter("finite", |v| v.is_finite()), 1..200);
        let alike = (any::<f32>(), proptest::collection::vec(-254i32..=254, 1..200)).prop_map(|(unit, steps)| {
            let unit = if unit.is_finite() { unit / 512.0 } else { 1.0 };
            steps.into_iter().map(|step| step as f32 * unit / 2.0).collect()
        });
        prop_oneof![unlike, alike]
    }

    proptest! {
        #[test]
        fn what_a_quantizer_writes_is_within_half_a_step(row in values(), which in 0..QUANTIZERS.len()) {
            let distance = distance(QUANTIZERS[which], &row, |_, _| ());
            prop_assert!(distance.fault().is_none(), "{:?}", distance.worst);
        }
    }

    #[test]
    fn another_code_is_not() {
        let row: Vec<f32> = (0..64).map(|i| (i as f32 - 31.0) / 10.0).collect();
        let spoiled = distance(Quantizer::Int8Row { bits: 8 }, &row, |codes, _| codes[5] = codes[5].wrapping_add(1));
        let Some(FaultKind::NotTheSource { count: 1, row: 7, column: 5, .. }) = spoiled.fault() else {
            panic!("{:?}", spoiled.fault());
        };
        for value in [f32::NAN, f32::INFINITY, 0.0, -1.0, 1e-30] {
            let spoiled = distance(Quantizer::Int4Grouped { group_size: 16 }, &row, |_, scales| scales[1] = value);
            assert!(spoiled.fault().is_some(), "scale {value}");
        }
        let spoiled = distance(Quantizer::F32, &row, |codes, _| codes[0] ^= 1);
        assert!(spoiled.fault().is_some());
    }

    #[test]
    fn a_half_that_was_lost_is_found() {
        let row: Vec<f32> = (0..64).map(|i| if i < 32 { 0.01 } else { 1.0 - i as f32 / 100.0 }).collect();
        let lost = distance(Quantizer::Int4Row, &row, |_, _| ());
        assert_eq!((lost.fault().is_none(), lost.lost_half(1, 64)), (true, Some((0, 32))));
        assert_eq!(distance(Quantizer::Int8Row { bits: 8 }, &row, |_, _| ()).lost_half(1, 64), None);
        // A half that the source has as zero is not lost.
        let zero: Vec<f32> = row.iter().map(|v| if *v < 0.02 { 0.0 } else { *v }).collect();
        assert_eq!(distance(Quantizer::Int4Row, &zero, |_, _| ()).lost_half(1, 64), None);
    }

    #[test]
    fn what_is_not_finite_in_the_source_counts_as_zero() {
        let mut expected = [1.0, f32::NAN, f32::INFINITY, -1.0];
        let mut distance = Distance::default();
        distance.row(3, Format::F32, &[], &mut expected, &[1.0, 0.0, 0.0, -1.0]);
        assert!(distance.fault().is_none());
        let (count, row, column, value) = distance.non_finite.unwrap();
        assert_eq!((count, row, column, value.is_nan()), (2, 3, 1, true));
    }
}
