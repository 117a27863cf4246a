//! Attention over compressed keys and values, and the choice of the positions it looks at.

use rayon::prelude::*;

use super::linear::{dot, widened};
use super::{Rows, Selection, Weight};
use crate::backend::{Dsa, Mla, Places};

/// For each row the `topk` rows of the cache with the best scores: see [`crate::backend::Backend::select`].
pub fn select(dsa: &Dsa, q: &Rows, weights: &Rows, keys: &Rows, places: &Places) -> Selection {
    dsa.check(q.width, weights.width, keys.width);
    places.check(keys.count(), q.count());
    let seen = places.seen();
    let of_row = |row: usize| {
        let wide = widened(q.row(row));
        best_positions(dsa.topk, seen.row(row), |t| score(dsa, &wide, weights.row(row), keys.row(t)))
    };
    Selection((0..q.count()).into_par_iter().map(of_row).collect())
}

/// The `topk` with the best scores of the rows of a cache that one row sees, in the order of its text.
pub fn best_positions(topk: usize, seen: &[usize], score: impl Fn(usize) -> f32) -> Vec<usize> {
    if seen.len() <= topk {
        return seen.to_vec();
    }
    let mut scored: Vec<(f32, usize)> = seen.iter().enumerate().map(|(position, &t)| (score(t), position)).collect();
    // best first, of equals the lowest position
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut chosen: Vec<usize> = scored[..topk].iter().map(|&(_, position)| position).collect();
    chosen.sort_unstable();
    chosen.into_iter().map(|position| seen[position]).collect()
}

/// heads^−½ · Σ_h w_h · relu(q_h · k · width^−½), for q [heads · width], w [heads] and k [width].
fn score(dsa: &Dsa, q: &[f64], weights: &[f32], key: &[f32]) -> f32 {
    let scale = (dsa.width as f64).powf(-0.5);
    let of_head = |(q, &w): (&[f64], &f32)| f64::from(w) * (dot(key, q) * scale).max(0.0);
    let sum: f64 = q.chunks_exact(dsa.width).zip(weights).map(of_head).sum();
    // The sum of nothing but −0 is 0.
    (sum * (dsa.heads as f64).powf(-0.5)) as f32 + 0.0
}

/// Causal attention: see [`crate::backend::Backend::attention`].
pub fn attention(
    mla: &Mla,
    q: &Rows,
    kv_b: &Weight,
    cache: &Rows,
    places: &Places,
    selection: Option<&Selection>,
) -> Rows {
    let Mla { heads, nope, rope, value, .. } = *mla;
    mla.check(q.width, cache.width, (kv_b.rows, kv_b.columns));
    places.check(cache.count(), q.count());
    let all = places.seen();
    let width = heads * value;
    let mut values = vec![0.0; q.count() * width];
    values.par_chunks_mut(value).enumerate().for_each(|(at, out)| {
        let (row, head) = (at / heads, at % heads);
        let q = &q.row(row)[head * (nope + rope)..][..nope + rope];
        let seen = selection.map_or_else(|| all.row(row), |selection| &selection.0[row]);
        one_head(mla, head, q, kv_b, cache, seen, out);
    });
    Rows { width, values }
}

/// One head of one row: q [nope + rope], out [value].
fn one_head(mla: &Mla, head: usize, q: &[f32], kv_b: &Weight, cache: &Rows, positions: &[usize], out: &mut [f32]) {
    let first_row = head * (mla.nope + mla.value);
    let (q_nope, q_rope) = q.split_at(mla.nope);
    // query of the cached rows [latent + rope]: K_hᵀ q_nope, then q_rope
    let mut query = vec![0.0f64; mla.latent];
    for (j, &q) in q_nope.iter().enumerate() {
        for (sum, &k) in query.iter_mut().zip(kv_b.row(first_row + j)) {
            *sum += f64::from(q) * f64::from(k);
        }
    }
    query.extend(q_rope.iter().map(|&q| f64::from(q)));
    // scores [positions]
    let scale = ((mla.nope + mla.rope) as f64).powf(-0.5);
    let scores: Vec<f64> = positions.iter().map(|&t| dot(cache.row(t), &query) * scale).collect();
    // softmax [positions], not yet divided by its sum
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    // Σ a_t c_t [latent]
    let mut context = vec![0.0f64; mla.latent];
    for (&t, weight) in positions.iter().zip(&weights) {
        for (sum, &c) in context.iter_mut().zip(&cache.row(t)[..mla.latent]) {
            *sum += weight / total * f64::from(c);
        }
    }
    // V_h context [value]
    for (j, out) in out.iter_mut().enumerate() {
        *out = dot(kv_b.row(first_row + mla.nope + j), &context) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_equal_scores_the_lowest_positions_are_chosen() {
        let dsa = Dsa { heads: 1, width: 1, topk: 2 };
        let rows = |values: &[f32]| Rows { width: 1, values: values.to_vec() };
        // A negative key scores relu(·) = 0; so does a weight of −1 with it, as −0.
        let keys = rows(&[-1.0, -2.0, 3.0, -3.0, 3.0]);
        let positions = |q: &[f32], w: &[f32]| {
            let places = Places::after(5 - q.len(), q.len());
            select(&dsa, &rows(q), &rows(w), &keys, &places).0
        };
        assert_eq!(positions(&[1.0], &[1.0]), [[2, 4]]);
        assert_eq!(positions(&[1.0], &[-1.0]), [[0, 1]]);
        assert_eq!(positions(&[-1.0], &[1.0]), [[1, 3]]);
        // Four rows at positions 1 to 4: the first is not longer than topk.
        assert_eq!(positions(&[1.0; 4], &[1.0; 4]), [[0, 1], [0, 2], [0, 2], [2, 4]]);
    }
}
