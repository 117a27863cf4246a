//! Products of rows with matrices, and the output head.

use rayon::prelude::*;

use super::{Rows, Weight};
use crate::backend::Prediction;

/// Features that one task computes at least, so that small matrices are not torn into crumbs.
const MIN_FEATURES: usize = 64;
/// Rows whose logits the output head keeps at once.
const HEAD_ROWS: usize = 64;

/// Σ w_i · x_i in f64, as four interleaved partial sums that are added in a fixed order.
pub fn dot(w: &[f32], x: &[f64]) -> f64 {
    debug_assert_eq!(w.len(), x.len());
    let (w_fours, w_rest) = w.as_chunks::<4>();
    let (x_fours, x_rest) = x.as_chunks::<4>();
    let mut sums = [0.0f64; 4];
    for (w, x) in w_fours.iter().zip(x_fours) {
        sums[0] += f64::from(w[0]) * x[0];
        sums[1] += f64::from(w[1]) * x[1];
        sums[2] += f64::from(w[2]) * x[2];
        sums[3] += f64::from(w[3]) * x[3];
    }
    for (w, x) in w_rest.iter().zip(x_rest) {
        sums[0] += f64::from(*w) * x;
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}

/// Values as f64.
pub fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// x [n, I] · weightᵀ [I, O] → [n, O].
pub fn matmul(weight: &Weight, x: &Rows) -> Rows {
    assert_eq!(x.width, weight.columns, "inputs of a product");
    let (n, features) = (x.count(), weight.rows);
    let x = widened(&x.values);
    // Feature by feature first [O, n]: a task reads each row of the matrix once for all rows of x.
    let mut by_feature = vec![0.0f32; features * n];
    by_feature
        .par_chunks_mut(n.max(1))
        .zip(weight.values.par_chunks(weight.columns))
        .with_min_len(MIN_FEATURES)
        .for_each(|(out, w)| {
            for (out, x) in out.iter_mut().zip(x.chunks_exact(weight.columns)) {
                *out = dot(w, x) as f32;
            }
        });
    let mut values = vec![0.0; n * features];
    for (feature, of_rows) in by_feature.chunks_exact(n.max(1)).enumerate() {
        for (row, &value) in of_rows.iter().enumerate() {
            values[row * features + feature] = value;
        }
    }
    Rows { width: features, values }
}

/// What the output head says after each row of x [n, I]; `asked [n]`.
pub fn predict(head: &Weight, x: &Rows, asked: &[Option<u32>]) -> Vec<Prediction> {
    assert_eq!(x.count(), asked.len(), "rows and asked ids");
    let mut predictions = Vec::with_capacity(asked.len());
    for (x, asked) in x.values.chunks(HEAD_ROWS * x.width).zip(asked.chunks(HEAD_ROWS)) {
        let logits = matmul(head, &Rows { width: head.columns, values: x.to_vec() });
        predictions.extend(logits.iter().zip(asked).map(|(logits, &asked)| prediction(logits, asked)));
    }
    predictions
}

/// Best and second best of logits [V], and ln Σ exp.
pub fn prediction(logits: &[f32], asked: Option<u32>) -> Prediction {
    let (mut id, mut logit, mut runner_up) = (0, f32::NEG_INFINITY, f32::NEG_INFINITY);
    for (at, &value) in logits.iter().enumerate() {
        if value > logit {
            (id, logit, runner_up) = (at as u32, value, logit);
        } else if value > runner_up {
            runner_up = value;
        }
    }
    let sum: f64 = logits.iter().map(|&value| (f64::from(value) - f64::from(logit)).exp()).sum();
    let asked = asked.map(|id| logits[id as usize]);
    Prediction { id, logit, runner_up, log_sum_exp: f64::from(logit) + sum.ln(), asked }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;

    #[test]
    fn products_are_sums_of_products() {
        let weight = Weight { rows: 2, columns: 5, format: Format::F32, values: (1..=10).map(|v| v as f32).collect() };
        let x = Rows { width: 5, values: vec![1.0, 0.0, 0.0, 0.0, 1.0, 0.5, 1.0, -1.0, 2.0, 0.25] };
        let out = matmul(&weight, &x);
        assert_eq!(out, Rows { width: 2, values: vec![6.0, 16.0, 8.75, 22.5] });
        assert_eq!(matmul(&weight, &Rows { width: 5, values: Vec::new() }).count(), 0);
    }

    #[test]
    fn cancelling_sums_keep_their_small_part() {
        let w = [1e8f32, 1.0, -1e8, 1e-3, 2.0];
        let expected = 1.0 + f64::from(1e-3f32) + 2.0;
        assert!((dot(&w, &[1.0; 5]) - expected).abs() < 1e-8);
    }

    #[test]
    fn of_equal_logits_the_lowest_id_wins_and_the_margin_is_zero() {
        let p = prediction(&[0.0, 2.0, 2.0, -1.0], Some(3));
        assert_eq!((p.id, p.margin()), (1, 0.0));
        let log_sum = (1f64 + 2.0 * 2f64.exp() + (-1f64).exp()).ln();
        assert!((p.log_sum_exp - log_sum).abs() < 1e-12);
        assert!((p.logprob().unwrap() - (-1.0 - log_sum)).abs() < 1e-12);
        assert_eq!(prediction(&[0.5], None).runner_up, f32::NEG_INFINITY);
    }
}
