//! Attention over compressed keys and values, and the choice of the positions it looks at, spread over threads.

use std::ops::Range;

use rayon::prelude::*;

use super::linear::Packed;
use super::simd::{self, CHUNK, Job, Task, Terms};
use super::{Rows, Selection, Weight};
use crate::backend::reference::best_positions;
use crate::backend::{Dsa, Mla, Places};
use crate::isa::Isa;

/// For each row the `topk` rows of the cache with the best scores: see [`crate::backend::Backend::select`].
pub fn select(isa: Isa, dsa: &Dsa, q: &Rows, weights: &Rows, keys: &Rows, places: &Places) -> Selection {
    dsa.check(q.width, weights.width, keys.width);
    places.check(keys.count(), q.count());
    let seen = places.seen();
    let of_row = |row: usize| {
        let score = |t| simd::score(isa, dsa, q.row(row), weights.row(row), keys.row(t));
        best_positions(dsa.topk, seen.row(row), score)
    };
    Selection((0..q.count()).into_par_iter().map(of_row).collect())
}

/// Queries of one task.
const TASK_QUERIES: usize = 24;
/// Queries whose intermediate results are kept at once, of all tasks.
const QUERIES: usize = 2048;
/// Rows of one head that are absorbed together.
const ABSORBED_ROWS: usize = 48;

/// Causal attention, absorbed: see [`crate::backend::Backend::attention`]. The latents are keys and values of all heads, so
/// heads are rows like others: a piece of the cache is read once for many of them.
pub fn attention(
    isa: Isa,
    mla: &Mla,
    q: &Rows,
    kv_b: &Weight,
    cache: &Rows,
    places: &Places,
    selection: Option<&Selection>,
) -> Rows {
    let Mla { heads, nope, rope, value, .. } = *mla;
    mla.check(q.width, cache.width, (kv_b.matrix.rows, kv_b.matrix.columns));
    places.check(cache.count(), q.count());
    let (n, seen) = (q.count(), places.seen());
    let groups: Vec<Group<'_>> = match selection {
        Some(selection) => {
            selection.0.iter().enumerate().map(|(row, path)| Group { rows: row..row + 1, path }).collect()
        }
        None => seen.runs().map(|(rows, path)| Group { rows, path }).collect(),
    };
    let layer = Layer { isa, mla, q, kv_b, cache, groups: &groups };
    let mut values = vec![0.0; n * heads * value];
    let at_once = (QUERIES / n.max(1)).clamp(1, heads);
    for first in (0..heads).step_by(at_once) {
        let heads = first..heads.min(first + at_once);
        let contexts = layer.contexts(heads.clone(), &layer.queries(heads.clone()));
        for (head, of_head) in heads.zip(layer.values(first, contexts)) {
            // [value, n]: feature by feature
            for (row, out) in values.chunks_exact_mut(q.width / (nope + rope) * value).enumerate() {
                for (j, out) in out[head * value..][..value].iter_mut().enumerate() {
                    *out = of_head[j * n + row];
                }
            }
        }
    }
    Rows { width: heads * value, values }
}

/// Rows that look at the beginning of the same path, the last at all of it, each before at one row less.
struct Group<'a> {
    rows: Range<usize>,
    path: &'a [usize],
}

impl Group<'_> {
    /// How many rows of the path one of its rows looks at.
    fn seen(&self, row: usize) -> usize {
        self.path.len() - (self.rows.end - 1 - row)
    }
}

/// The attention of a layer over some rows.
struct Layer<'a> {
    isa: Isa,
    mla: &'a Mla,
    q: &'a Rows,
    kv_b: &'a Weight,
    cache: &'a Rows,
    groups: &'a [Group<'a>],
}

impl Layer<'_> {
    /// A product with rows of `kv_b`.
    fn job<'x>(&'x self, x: &'x Packed) -> Job<'x> {
        x.job(self.kv_b.operand())
    }

    /// Queries of the cached rows: K_hᵀ q_nope, then q_rope; [heads, n, latent + rope].
    fn queries(&self, heads: Range<usize>) -> Vec<f32> {
        let Mla { nope, rope, value, latent, .. } = *self.mla;
        let (n, width) = (self.q.count(), latent + rope);
        let none = Packed::new(&Rows { width: latent, values: Vec::new() }, self.kv_b.operand().coding);
        let job = self.job(&none);
        let (columns, order) = (job.columns(), simd::order(self.kv_b.operand().coding));
        let identity: Vec<usize> = (0..nope).collect();
        let mut queries = vec![0.0; heads.len() * n * width];
        queries.par_chunks_mut(n * width).zip(heads).for_each(|(queries, head)| {
            let mut k = vec![0.0; nope * columns];
            simd::decode(self.isa, &job, head * (nope + value), &mut k);
            let terms = Terms { values: &k, stride: columns, rows: &identity };
            let of = |row: usize| self.q.row(row)[head * (nope + rope)..][..nope + rope].split_at(nope);
            for (number, queries) in queries.chunks_mut(ABSORBED_ROWS * width).enumerate() {
                let rows = number * ABSORBED_ROWS..number * ABSORBED_ROWS + queries.len() / width;
                let factors: Vec<f32> = rows.clone().flat_map(|row| of(row).0).copied().collect();
                let mut absorbed = vec![0.0; rows.len() * columns];
                simd::combine(self.isa, &factors, &terms, columns, &mut absorbed);
                for ((query, absorbed), row) in queries.chunks_mut(width).zip(absorbed.chunks(columns)).zip(rows) {
                    let (nope, rope) = query.split_at_mut(latent);
                    // Back from the order of the coding.
                    for (query, absorbed) in nope.chunks_mut(CHUNK).zip(absorbed.chunks(CHUNK)) {
                        for (&value, &column) in absorbed.iter().zip(&order) {
                            if let Some(query) = query.get_mut(usize::from(column)) {
                                *query = value;
                            }
                        }
                    }
                    rope.copy_from_slice(of(row).1);
                }
            }
        });
        queries
    }

    /// softmax(queries · cache) · latents: for each head [n, latent].
    fn contexts(&self, heads: Range<usize>, queries: &[f32]) -> Vec<Rows> {
        let Mla { nope, rope, latent, .. } = *self.mla;
        let (n, width, count) = (self.q.count(), latent + rope, heads.len());
        let per_task = (n * count / (4 * rayon::current_num_threads())).clamp(1, TASK_QUERIES);
        // Row by row, and of each row its heads, so that rows which look at about as much are together.
        let of_group = |group: &'_ Group<'_>| {
            let rows = group.rows.clone();
            let pairs = rows.flat_map(move |row| (0..count).map(move |head| (row, head)));
            pairs.collect::<Vec<(usize, usize)>>()
        };
        let tasks: Vec<(&Group<'_>, Vec<(usize, usize)>)> = self
            .groups
            .iter()
            .flat_map(|group| of_group(group).chunks(per_task).map(|pairs| (group, pairs.to_vec())).collect::<Vec<_>>())
            .collect();
        let scale = ((nope + rope) as f64).powf(-0.5);
        let run = |(group, pairs): &(&Group<'_>, Vec<(usize, usize)>)| {
            let query = |&(row, head): &(usize, usize)| &queries[(head * n + row) * width..][..width];
            let gathered: Vec<f32> = pairs.iter().flat_map(query).copied().collect();
            let seen: Vec<usize> = pairs.iter().map(|&(row, _)| group.seen(row)).collect();
            let task = Task {
                cache: &self.cache.values,
                width,
                latent,
                scale,
                rows: group.path,
                queries: &gathered,
                seen: &seen,
            };
            let mut out = vec![0.0; pairs.len() * latent];
            simd::attend(self.isa, &task, &mut out);
            out
        };
        let done: Vec<Vec<f32>> = tasks.par_iter().map(run).collect();
        let mut contexts = vec![Rows { width: latent, values: vec![0.0; n * latent] }; count];
        for ((_, pairs), out) in tasks.iter().zip(&done) {
            for (&(row, head), out) in pairs.iter().zip(out.chunks_exact(latent)) {
                contexts[head].values[row * latent..][..latent].copy_from_slice(out);
            }
        }
        contexts
    }

    /// V_h · context of the heads from `first` on: each [value, n].
    fn values(&self, first: usize, contexts: Vec<Rows>) -> Vec<Vec<f32>> {
        let Mla { nope, value, .. } = *self.mla;
        let of_head = |(number, context): (usize, &Rows)| {
            let packed = Packed::new(context, self.kv_b.operand().coding);
            let mut out = vec![0.0; value * context.count()];
            let row = (first + number) * (nope + value) + nope;
            simd::multiply(self.isa, &self.job(&packed), row, &mut out);
            out
        };
        contexts.par_iter().enumerate().map(of_head).collect()
    }
}
