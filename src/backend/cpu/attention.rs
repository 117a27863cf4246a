//! Attention over compressed keys and values, and the choice of the positions it looks at, spread over threads.

use rayon::prelude::*;

use super::simd::{self, Head};
use super::{Rows, Selection, Weight};
use crate::backend::reference::best_positions;
use crate::backend::{Dsa, Mla, Places};
use crate::isa::Isa;

/// For each row the `topk` rows of the cache with the best scores: see [`crate::backend::Backend::select`].
pub fn select(isa: Isa, dsa: &Dsa, q: &Rows, weights: &Rows, keys: &Rows, places: &Places) -> Selection {
    assert_eq!(
        (q.width, weights.width, keys.width),
        (dsa.heads * dsa.width, dsa.heads, dsa.width),
        "an indexer's rows"
    );
    assert_eq!((places.first() + places.rows(), places.rows()), (keys.count(), q.count()), "places of rows");
    let seen = places.seen();
    let of_row = |row: usize| {
        let score = |t| simd::score(isa, dsa, q.row(row), weights.row(row), keys.row(t));
        best_positions(dsa.topk, seen.row(row), score)
    };
    Selection((0..q.count()).into_par_iter().map(of_row).collect())
}

/// Causal attention: see [`crate::backend::Backend::attention`]. The rows of `kv_b` are decoded head by head.
pub fn attention(
    isa: Isa,
    mla: &Mla,
    q: &Rows,
    kv_b: &Weight,
    cache: &Rows,
    places: &Places,
    selection: Option<&Selection>,
) -> Rows {
    let Mla { heads, nope, rope, value, latent } = *mla;
    assert_eq!((q.width, cache.width), (heads * (nope + rope), latent + rope), "attention's rows");
    assert_eq!((kv_b.matrix.rows, kv_b.matrix.columns), (heads * (nope + value), latent), "kv_b");
    assert_eq!((places.first() + places.rows(), places.rows()), (cache.count(), q.count()), "places of rows");
    let (n, all) = (q.count(), places.seen());
    let of_head = |head: usize| {
        let mut kv = vec![0.0; (nope + value) * latent];
        for (j, out) in kv.chunks_exact_mut(latent).enumerate() {
            kv_b.matrix.dequantize_row(head * (nope + value) + j, out);
        }
        let (kv, mut out) = (Head { mla: *mla, kv: &kv, cache: &cache.values }, vec![0.0; n * value]);
        for (row, out) in out.chunks_exact_mut(value).enumerate() {
            let q = &q.row(row)[head * (nope + rope)..][..nope + rope];
            let seen = selection.map_or_else(|| all.row(row), |selection| &selection.0[row]);
            simd::attend_head(isa, &kv, q, seen, out);
        }
        out
    };
    let by_head: Vec<Vec<f32>> = (0..heads).into_par_iter().map(of_head).collect();
    let of_row = |row: usize| by_head.iter().flat_map(move |of_head| &of_head[row * value..][..value]);
    Rows { width: heads * value, values: (0..n).flat_map(of_row).copied().collect() }
}
