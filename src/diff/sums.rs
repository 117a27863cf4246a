//! The sums that every measure is made of.

use crate::report::{DiffElement, DiffTensor, Side};

/// Accumulators that go side by side, so that additions need not wait for each other. The order of additions is fixed.
const LANES: usize = 8;

/// Sums over pairs of elements; pairs with an element that is not finite are counted, not summed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Sums {
    /// Pairs in the sums.
    pub elements: u64,
    /// Σ a².
    pub squares_a: f64,
    /// Σ b².
    pub squares_b: f64,
    /// Σ a·b.
    pub products: f64,
    /// Σ (a − b)².
    pub errors: f64,
    /// Largest |a − b|.
    pub max_abs_err: f64,
    /// Where that is, the first such place.
    pub worst: Option<DiffElement>,
    /// Pairs of which one is not finite and the other is another value.
    pub non_finite: u64,
}

impl Sums {
    /// Adds a row.
    pub fn row(&mut self, row: u64, a: &[f32], b: &[f32]) {
        let finite = |values: &[f32]| values.iter().fold(true, |all, value| all & value.is_finite());
        let before = self.max_abs_err;
        if finite(a) && finite(b) {
            self.add(a, b);
        } else {
            // Rare: one pair at a time, those in the sums alone.
            for (&a, &b) in a.iter().zip(b) {
                if a.is_finite() && b.is_finite() {
                    self.add(&[a], &[b]);
                } else {
                    self.non_finite += u64::from(a != b && !(a.is_nan() && b.is_nan()));
                }
            }
        }
        if self.max_abs_err > before {
            let is_worst = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).abs() == self.max_abs_err;
            let column = a.iter().zip(b).position(is_worst).expect("the largest is one of them");
            self.worst = Some(DiffElement { row, column: column as u64, a: a[column], b: b[column] });
        }
    }

    fn add(&mut self, a: &[f32], b: &[f32]) {
        let mut lanes = [[0f64; LANES]; 4];
        let mut largest = [0f64; LANES];
        let ((chunks_a, rest_a), (chunks_b, rest_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        let mut one = |lane: usize, a: f32, b: f32| {
            let (a, b) = (f64::from(a), f64::from(b));
            let error = a - b;
            lanes[0][lane] += a * a;
            lanes[1][lane] += b * b;
            lanes[2][lane] += a * b;
            lanes[3][lane] += error * error;
            largest[lane] = if error.abs() > largest[lane] { error.abs() } else { largest[lane] };
        };
        for (chunk_a, chunk_b) in chunks_a.iter().zip(chunks_b) {
            for lane in 0..LANES {
                one(lane, chunk_a[lane], chunk_b[lane]);
            }
        }
        for (lane, (&a, &b)) in rest_a.iter().zip(rest_b).enumerate() {
            one(lane, a, b);
        }
        let [squares_a, squares_b, products, errors] = lanes.map(|lanes| lanes.iter().sum::<f64>());
        self.elements += a.len() as u64;
        self.squares_a += squares_a;
        self.squares_b += squares_b;
        self.products += products;
        self.errors += errors;
        self.max_abs_err = largest.into_iter().fold(self.max_abs_err, f64::max);
    }

    /// Joins the sums of the rows that follow.
    pub fn join(&mut self, next: &Sums) {
        self.elements += next.elements;
        self.squares_a += next.squares_a;
        self.squares_b += next.squares_b;
        self.products += next.products;
        self.errors += next.errors;
        self.non_finite += next.non_finite;
        if next.max_abs_err > self.max_abs_err {
            (self.max_abs_err, self.worst) = (next.max_abs_err, next.worst);
        }
    }

    /// Root of the mean squared difference, where there are elements.
    pub fn rmse(&self) -> Option<f64> {
        (self.elements > 0).then(|| (self.errors / self.elements as f64).sqrt())
    }

    /// Signal to noise in decibels, where there are both.
    pub fn sqnr_db(&self, reference: Side) -> Option<f64> {
        let signal = match reference {
            Side::A => self.squares_a,
            Side::B => self.squares_b,
        };
        (signal > 0.0 && self.errors > 0.0).then(|| 10.0 * (signal / self.errors).log10())
    }

    /// Writes the measures into the report of a tensor.
    pub fn describe(&self, tensor: &mut DiffTensor, reference: Side) {
        let lengths = self.squares_a.sqrt() * self.squares_b.sqrt();
        tensor.same_values = Some(self.max_abs_err == 0.0 && self.non_finite == 0);
        tensor.max_abs_err = Some(self.max_abs_err);
        tensor.rmse = Some(self.rmse().unwrap_or(0.0));
        tensor.cosine = (lengths > 0.0).then(|| (self.products / lengths).clamp(-1.0, 1.0));
        tensor.sqnr_db = self.sqnr_db(reference);
        tensor.non_finite = self.non_finite;
        tensor.worst = self.worst;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sums(a: &[f32], b: &[f32]) -> Sums {
        let mut sums = Sums::default();
        sums.row(0, a, b);
        sums
    }

    #[test]
    fn measures_by_hand() {
        let sums = sums(&[3.0, 4.0, 0.0], &[3.0, 5.0, 0.0]);
        assert_eq!((sums.elements, sums.max_abs_err, sums.errors), (3, 1.0, 1.0));
        assert_eq!(sums.worst, Some(DiffElement { row: 0, column: 1, a: 4.0, b: 5.0 }));
        assert_eq!(sums.sqnr_db(Side::A), Some(10.0 * 25f64.log10()));
        assert_eq!(sums.sqnr_db(Side::B), Some(10.0 * 34f64.log10()));
        assert_eq!(sums.rmse(), Some((1.0f64 / 3.0).sqrt()));
    }

    #[test]
    fn what_is_not_finite_is_counted_and_left_out() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let sums = sums(&[nan, nan, inf, inf, 1.0, 2.0], &[nan, 1.0, inf, -inf, inf, 2.5]);
        assert_eq!((sums.elements, sums.non_finite), (1, 3));
        assert_eq!(sums.max_abs_err, 0.5);
        assert_eq!(sums.worst.map(|worst| worst.column), Some(5));
        let same = super::tests::sums(&[nan, inf], &[nan, inf]);
        assert_eq!((same.elements, same.non_finite, same.rmse()), (0, 0, None));
    }

    #[test]
    fn without_signal_or_noise_there_is_no_ratio() {
        assert_eq!(sums(&[0.0; 9], &[0.0; 9]).sqnr_db(Side::A), None);
        assert_eq!(sums(&[0.0; 9], &[1.0; 9]).sqnr_db(Side::A), None);
        assert_eq!(sums(&[1.0; 9], &[1.0; 9]).sqnr_db(Side::A), None);
        assert_eq!(sums(&[1.0; 9], &[0.0; 9]).sqnr_db(Side::A), Some(0.0));
    }

    proptest! {
        #[test]
        fn sums_are_near_the_plain_ones(pairs in proptest::collection::vec((-1e3f32..1e3, -1e3f32..1e3), 0..100)) {
            let (a, b): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            let sums = sums(&a, &b);
            let each = || a.iter().zip(&b).map(|(&a, &b)| (f64::from(a), f64::from(b)));
            let near = |x: f64, y: f64| (x - y).abs() <= 1e-9 * (1.0 + y.abs().max(1e6));
            prop_assert!(near(sums.errors, each().map(|(a, b)| (a - b) * (a - b)).sum()));
            prop_assert!(near(sums.products, each().map(|(a, b)| a * b).sum()));
            prop_assert_eq!(sums.max_abs_err, each().map(|(a, b)| (a - b).abs()).fold(0.0, f64::max));
            // Split anywhere and joined, the counts and the worst place stay.
            let middle = a.len() / 2;
            let mut joined = super::tests::sums(&a[..middle], &b[..middle]);
            let mut rest = Sums::default();
            rest.row(1, &a[middle..], &b[middle..]);
            joined.join(&rest);
            prop_assert_eq!((joined.elements, joined.max_abs_err), (sums.elements, sums.max_abs_err));
        }
    }
}
