//! Operations on each row by itself: norms, activation, rotation.

use std::ops::Range;

use super::Rows;
use crate::backend::{Heads, Rope};

/// Some columns of some rows.
pub fn slice(x: &Rows, rows: Range<usize>, columns: Range<usize>) -> Rows {
    let width = columns.len();
    Rows { width, values: rows.flat_map(|row| &x.row(row)[columns.clone()]).copied().collect() }
}

/// Some rows, in the order of their numbers.
pub fn take(x: &Rows, rows: &[usize]) -> Rows {
    Rows { width: x.width, values: rows.iter().flat_map(|&row| x.row(row)).copied().collect() }
}

/// [a; b]: the columns of `a`, then those of `b`.
pub fn concat(a: &Rows, b: &Rows) -> Rows {
    assert_eq!(a.count(), b.count(), "rows side by side");
    let values = a.iter().zip(b.iter()).flat_map(|(a, b)| a.iter().chain(b)).copied().collect();
    Rows { width: a.width + b.width, values }
}

/// x + y, into x.
pub fn add(x: &mut Rows, y: &Rows) {
    assert_eq!((x.width, x.values.len()), (y.width, y.values.len()), "shapes of a sum");
    for (x, y) in x.values.iter_mut().zip(&y.values) {
        *x += y;
    }
}

/// x · rsqrt(mean(x²) + eps) · weight, for x [n, w] and weight [w].
pub fn rms_norm(x: &Rows, weight: &[f32], eps: f64) -> Rows {
    assert_eq!(x.width, weight.len(), "width of a norm");
    let mut values = Vec::with_capacity(x.values.len());
    for row in x.iter() {
        let mean_square = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / x.width as f64;
        let factor = 1.0 / (mean_square + eps).sqrt();
        values.extend(row.iter().zip(weight).map(|(&v, &w)| (f64::from(v) * factor * f64::from(w)) as f32));
    }
    Rows { width: x.width, values }
}

/// (x − mean) · rsqrt(variance + eps) · weight + bias, for x [n, w], weight [w] and bias [w].
pub fn layer_norm(x: &Rows, weight: &[f32], bias: &[f32], eps: f64) -> Rows {
    assert_eq!((x.width, x.width), (weight.len(), bias.len()), "width of a norm");
    let width = x.width as f64;
    let mut values = Vec::with_capacity(x.values.len());
    for row in x.iter() {
        let mean = row.iter().map(|&v| f64::from(v)).sum::<f64>() / width;
        let variance = row.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / width;
        let factor = 1.0 / (variance + eps).sqrt();
        let affine = weight.iter().zip(bias);
        values.extend(row.iter().zip(affine).map(|(&v, (&w, &b))| {
            let normal = (f64::from(v) - mean) * factor;
            (normal * f64::from(w) + f64::from(b)) as f32
        }));
    }
    Rows { width: x.width, values }
}

/// silu(gate) · up, with silu(g) = g / (1 + e^−g).
pub fn swiglu(gate: &Rows, up: &Rows) -> Rows {
    assert_eq!((gate.width, gate.values.len()), (up.width, up.values.len()), "shapes of gate and up");
    let silu = |g: f64| g / (1.0 + (-g).exp());
    let values = gate.values.iter().zip(&up.values).map(|(&g, &u)| (silu(g.into()) * f64::from(u)) as f32).collect();
    Rows { width: gate.width, values }
}

/// Interleaved rotation: (x₀, x₁) → (x₀ cos a − x₁ sin a, x₁ cos a + x₀ sin a) for each pair of each head.
pub fn rope(x: &mut Rows, rope: &Rope, heads: Heads, positions: &[usize]) {
    assert_eq!(x.width % heads.width, 0, "a row is a whole number of heads");
    assert_eq!(x.count(), positions.len(), "rows and positions");
    for (values, &position) in x.values.chunks_exact_mut(x.width).zip(positions) {
        // cos and sin of each pair at this position
        let position = position as f32;
        let turns: Vec<(f64, f64)> =
            rope.frequencies.iter().map(|frequency| f64::from(position * frequency).sin_cos()).collect();
        for head in values.chunks_exact_mut(heads.width) {
            let rotated = &mut head[heads.rope_at..][..2 * turns.len()];
            for ([x0, x1], &(sin, cos)) in rotated.as_chunks_mut().0.iter_mut().zip(&turns) {
                let (a, b) = (f64::from(*x0), f64::from(*x1));
                *x0 = (a * cos - b * sin) as f32;
                *x1 = (b * cos + a * sin) as f32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(width: usize, values: &[f32]) -> Rows {
        Rows { width, values: values.to_vec() }
    }

    #[test]
    fn norms_by_hand() {
        let x = rows(2, &[3.0, 4.0, 0.0, 0.0]);
        // mean(x²) = 12.5
        let scale = 1.0 / (12.5f64 + 0.5).sqrt();
        let expected = [(3.0 * scale * 2.0) as f32, (4.0 * scale * -1.5) as f32, 0.0, 0.0];
        let mut out = rms_norm(&x, &[2.0, -1.5], 0.5);
        out.values[3] += 0.0; // −0 is 0
        assert_eq!(out.values, expected);
        // mean 3.5, variance 0.25
        let scale = 1.0 / (0.25f64 + 0.75).sqrt();
        let expected = [(-0.5 * scale * 2.0 + 1.0) as f32, (0.5 * scale * -1.5 + 2.0) as f32, 1.0, 2.0];
        assert_eq!(layer_norm(&x, &[2.0, -1.5], &[1.0, 2.0], 0.75).values, expected);
    }

    #[test]
    fn silu_of_far_values_is_finite() {
        let out = swiglu(&rows(3, &[-1000.0, 0.0, 1000.0]), &rows(3, &[1.0, 5.0, 0.5]));
        assert_eq!(out.values, [0.0, 0.0, 500.0]);
    }

    #[test]
    fn pairs_turn_where_the_heads_say() {
        let half_turn = std::f32::consts::PI;
        let rope_of = Rope { frequencies: vec![half_turn, 0.0] };
        // Two heads of 5: one untouched dimension, then two pairs. The second row is at position 1.
        let row: Vec<f32> = (1..=10).map(|v| v as f32).collect();
        let mut x = rows(10, &[row.clone(), row.clone()].concat());
        rope(&mut x, &rope_of, Heads { width: 5, rope_at: 1 }, &[0, 1]);
        assert_eq!(x.row(0), row);
        let expected = [1.0, -2.0, -3.0, 4.0, 5.0, 6.0, -7.0, -8.0, 9.0, 10.0];
        for (found, expected) in x.row(1).iter().zip(expected) {
            assert!((found - expected).abs() < 1e-5, "{:?}", x.row(1));
        }
    }
}
