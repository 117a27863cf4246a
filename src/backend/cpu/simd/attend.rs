//! Attention over compressed keys and values, and the scores of an indexer, once for every instruction set.

// Arrays of vectors are indexed by constants: iterators would hide them from the registers.
#![allow(clippy::needless_range_loop)]

use super::{LANES, Lanes};
use crate::backend::Dsa;

/// Sums of a dot product that are formed side by side, in vectors.
const CHAINS: usize = 4;

/// Queries that look at the same rows of a cache, each at the first so many of them.
#[derive(Debug)]
pub(in crate::backend::cpu) struct Task<'a> {
    /// Latents and rotated keys [T, width].
    pub cache: &'a [f32],
    /// kv_lora_rank + rope.
    pub width: usize,
    /// kv_lora_rank.
    pub latent: usize,
    /// What scores are multiplied by.
    pub scale: f64,
    /// The rows of the cache, in the order of the text.
    pub rows: &'a [usize],
    /// Queries [n, width], one after the other.
    pub queries: &'a [f32],
    /// Of each query how many rows it looks at; ascending.
    pub seen: &'a [usize],
}

/// softmax(scores) · latents for each query: `out` [n, latent].
#[inline(always)]
pub(super) fn attend<L: Lanes>(lanes: L, task: &Task<'_>, out: &mut [f32]) {
    let (n, width, latent) = (task.seen.len(), task.width, task.latent);
    let most = task.seen[n - 1];
    // scores [n, most], then weights
    let mut weights = vec![0.0f32; n * most];
    for first in (0..most).step_by(NEAR_ROWS) {
        let rows = &task.rows[first..most.min(first + NEAR_ROWS)];
        dots(lanes, task, rows, &mut weights[first..], most);
    }
    for (weights, &seen) in weights.chunks_exact_mut(most).zip(task.seen) {
        softmax(&mut weights[..seen], task.scale);
    }
    // Σ a_t c_t: what all look at together, the rest one by one, so that nobody meets what comes after it.
    let together = task.seen[0];
    let cache = Terms { values: task.cache, stride: width, rows: &task.rows[..together] };
    out.fill(0.0);
    combine(lanes, &weights, most, &cache, latent, out, latent);
    for (query, &seen) in task.seen.iter().enumerate() {
        let cache = Terms { rows: &task.rows[together..seen], ..cache };
        combine(
            lanes,
            &weights[query * most + together..],
            most,
            &cache,
            latent,
            &mut out[query * latent..][..latent],
            latent,
        );
    }
}

/// Rows of a cache whose scores are formed for all queries while they are near.
const NEAR_ROWS: usize = 64;

/// Scores to weights: e^(scale · (s − largest)), divided by their sum; exponentials in f64.
#[inline(always)]
fn softmax(scores: &mut [f32], scale: f64) {
    let largest = f64::from(scores.iter().copied().fold(f32::NEG_INFINITY, f32::max)) * scale;
    let mut total = 0.0;
    let mut weights = Vec::with_capacity(scores.len());
    for &score in &*scores {
        let weight = (f64::from(score) * scale - largest).exp();
        total += weight;
        weights.push(weight);
    }
    for (score, weight) in scores.iter_mut().zip(weights) {
        *score = (weight / total) as f32;
    }
}

/// Queries [n, width] times rows of the cache: `out` [n, rows], `stride` from one query to the next.
#[inline(always)]
fn dots<L: Lanes>(lanes: L, task: &Task<'_>, rows: &[usize], out: &mut [f32], stride: usize) {
    let n = task.seen.len();
    let most = L::TILE.1;
    let mut query = 0;
    while query < n {
        let left = n - query;
        let t = left.div_ceil(left.div_ceil(most));
        let out = &mut out[query * stride..];
        match t {
            6 => dots_of::<L, 6>(lanes, task, query, rows, out, stride),
            5 => dots_of::<L, 5>(lanes, task, query, rows, out, stride),
            4 => dots_of::<L, 4>(lanes, task, query, rows, out, stride),
            3 => dots_of::<L, 3>(lanes, task, query, rows, out, stride),
            2 => dots_of::<L, 2>(lanes, task, query, rows, out, stride),
            _ => dots_of::<L, 1>(lanes, task, query, rows, out, stride),
        }
        query += t;
    }
}

/// T queries with all rows, as many at once as there are registers for.
#[inline(always)]
fn dots_of<L: Lanes, const T: usize>(
    lanes: L,
    task: &Task<'_>,
    query: usize,
    rows: &[usize],
    out: &mut [f32],
    stride: usize,
) {
    let mut at = 0;
    while at < rows.len() {
        let left = rows.len() - at;
        match L::TILE.0 {
            4 if left >= 4 => {
                dot_tile::<L, T, 4>(lanes, task, query, &rows[at..], &mut out[at..], stride);
                at += 4;
            }
            2 | 4 if left >= 2 => {
                dot_tile::<L, T, 2>(lanes, task, query, &rows[at..], &mut out[at..], stride);
                at += 2;
            }
            _ => {
                dot_tile::<L, T, 1>(lanes, task, query, &rows[at..], &mut out[at..], stride);
                at += 1;
            }
        }
    }
}

/// T queries with R rows: 16 sums each, added in a fixed order.
#[inline(always)]
fn dot_tile<L: Lanes, const T: usize, const R: usize>(
    lanes: L,
    task: &Task<'_>,
    query: usize,
    rows: &[usize],
    out: &mut [f32],
    stride: usize,
) {
    let width = task.width;
    let whole = width / LANES;
    let mut c: [&[[f32; LANES]]; R] = [&[]; R];
    let mut q: [&[[f32; LANES]]; T] = [&[]; T];
    for r in 0..R {
        c[r] = &task.cache[rows[r] * width..][..width].as_chunks().0[..whole];
    }
    for t in 0..T {
        q[t] = &task.queries[(query + t) * width..][..width].as_chunks().0[..whole];
    }
    let mut sums = [[lanes.zero(); T]; R];
    for step in 0..whole {
        let mut values = [lanes.zero(); R];
        for r in 0..R {
            values[r] = lanes.load(&c[r][step]);
        }
        for t in 0..T {
            let x = lanes.load(&q[t][step]);
            for r in 0..R {
                sums[r][t] = lanes.fma(values[r], x, sums[r][t]);
            }
        }
    }
    if !width.is_multiple_of(LANES) {
        for r in 0..R {
            let values = lanes.load(&filled(&task.cache[rows[r] * width..][whole * LANES..width]));
            for t in 0..T {
                let x = lanes.load(&filled(&task.queries[(query + t) * width..][whole * LANES..width]));
                sums[r][t] = lanes.fma(values, x, sums[r][t]);
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            out[t * stride + r] = lanes.sum(sums[r][t]);
        }
    }
}

/// Rows that are multiplied by a factor each and added.
#[derive(Debug, Clone, Copy)]
pub(in crate::backend::cpu) struct Terms<'a> {
    /// Values, row after row.
    pub values: &'a [f32],
    /// From one row to the next.
    pub stride: usize,
    /// Which rows, in the order in which they are added.
    pub rows: &'a [usize],
}

/// out_q += Σ_k factor_qk · row_k, one after the other, fused, for each of the outputs [n, columns]; factors are `stride`
/// apart from one output to the next.
#[inline(always)]
pub(super) fn combine<L: Lanes>(
    lanes: L,
    factors: &[f32],
    stride: usize,
    terms: &Terms<'_>,
    columns: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    let n = out.len().div_ceil(out_stride);
    if terms.rows.is_empty() {
        return;
    }
    let most = L::TILE.1;
    let mut output = 0;
    while output < n {
        let left = n - output;
        let t = left.div_ceil(left.div_ceil(most));
        let (factors, out) = (&factors[output * stride..], &mut out[output * out_stride..]);
        match t {
            6 => combine_of::<L, 6>(lanes, factors, stride, terms, columns, out, out_stride),
            5 => combine_of::<L, 5>(lanes, factors, stride, terms, columns, out, out_stride),
            4 => combine_of::<L, 4>(lanes, factors, stride, terms, columns, out, out_stride),
            3 => combine_of::<L, 3>(lanes, factors, stride, terms, columns, out, out_stride),
            2 => combine_of::<L, 2>(lanes, factors, stride, terms, columns, out, out_stride),
            _ => combine_of::<L, 1>(lanes, factors, stride, terms, columns, out, out_stride),
        }
        output += t;
    }
}

/// T outputs, as many columns at once as there are registers for.
#[inline(always)]
fn combine_of<L: Lanes, const T: usize>(
    lanes: L,
    factors: &[f32],
    stride: usize,
    terms: &Terms<'_>,
    columns: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    let mut column = 0;
    while column < columns {
        let left = (columns - column) / LANES;
        let lines = match L::TILE.0 {
            4 if left >= 4 => {
                combine_tile::<L, T, 4>(lanes, factors, stride, terms, column, out, out_stride);
                4
            }
            2 | 4 if left >= 2 => {
                combine_tile::<L, T, 2>(lanes, factors, stride, terms, column, out, out_stride);
                2
            }
            _ if left >= 1 => {
                combine_tile::<L, T, 1>(lanes, factors, stride, terms, column, out, out_stride);
                1
            }
            _ => {
                combine_rest::<L, T>(lanes, factors, stride, terms, column..columns, out, out_stride);
                1
            }
        };
        column += lines * LANES;
    }
}

/// T outputs, V lines of columns.
#[inline(always)]
fn combine_tile<L: Lanes, const T: usize, const V: usize>(
    lanes: L,
    factors: &[f32],
    stride: usize,
    terms: &Terms<'_>,
    column: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    let mut sums = [[lanes.zero(); V]; T];
    for t in 0..T {
        let lines = out[t * out_stride + column..][..V * LANES].as_chunks::<LANES>().0;
        for v in 0..V {
            sums[t][v] = lanes.load(&lines[v]);
        }
    }
    let mut f: [&[f32]; T] = [&[]; T];
    for t in 0..T {
        f[t] = &factors[t * stride..][..terms.rows.len()];
    }
    for (k, &row) in terms.rows.iter().enumerate() {
        let lines = terms.values[row * terms.stride + column..][..V * LANES].as_chunks::<LANES>().0;
        let mut values = [lanes.zero(); V];
        for v in 0..V {
            values[v] = lanes.load(&lines[v]);
        }
        for t in 0..T {
            let factor = lanes.splat(f[t][k]);
            for v in 0..V {
                sums[t][v] = lanes.fma(factor, values[v], sums[t][v]);
            }
        }
    }
    for t in 0..T {
        let lines = out[t * out_stride + column..][..V * LANES].as_chunks_mut::<LANES>().0;
        for v in 0..V {
            lanes.store(sums[t][v], &mut lines[v]);
        }
    }
}

/// T outputs, fewer columns than a line has.
#[inline(always)]
fn combine_rest<L: Lanes, const T: usize>(
    lanes: L,
    factors: &[f32],
    stride: usize,
    terms: &Terms<'_>,
    columns: std::ops::Range<usize>,
    out: &mut [f32],
    out_stride: usize,
) {
    for t in 0..T {
        let out = &mut out[t * out_stride..][columns.clone()];
        let mut line = filled(out);
        let mut sums = lanes.load(&line);
        for (k, &row) in terms.rows.iter().enumerate() {
            let values = lanes.load(&filled(&terms.values[row * terms.stride..][columns.clone()]));
            sums = lanes.fma(lanes.splat(factors[t * stride + k]), values, sums);
        }
        lanes.store(sums, &mut line);
        out.copy_from_slice(&line[..out.len()]);
    }
}

/// heads^−½ · Σ_h w_h · relu(q_h · k · width^−½), for q [heads · width], weights [heads] and key [width].
#[inline(always)]
pub(super) fn score<L: Lanes>(lanes: L, dsa: &Dsa, q: &[f32], weights: &[f32], key: &[f32]) -> f32 {
    let scale = (dsa.width as f64).powf(-0.5);
    let mut sum = 0.0;
    for h in 0..dsa.heads {
        let product = f64::from(dot(lanes, &q[h * dsa.width..][..dsa.width], key));
        sum += f64::from(weights[h]) * (product * scale).max(0.0);
    }
    // The sum of nothing but −0 is 0.
    (sum * (dsa.heads as f64).powf(-0.5)) as f32 + 0.0
}

/// Σ a_i · b_i: four vectors of sums, then their sum in a fixed order.
#[inline(always)]
fn dot<L: Lanes>(lanes: L, a: &[f32], b: &[f32]) -> f32 {
    let (a_lines, a_rest) = a.as_chunks::<LANES>();
    let (b_lines, b_rest) = b.as_chunks::<LANES>();
    let count = a_lines.len().min(b_lines.len());
    let (a_lines, b_lines) = (&a_lines[..count], &b_lines[..count]);
    let mut sums = [lanes.zero(); CHAINS];
    let whole = count / CHAINS * CHAINS;
    for step in (0..whole).step_by(CHAINS) {
        for i in 0..CHAINS {
            sums[i] = lanes.fma(lanes.load(&a_lines[step + i]), lanes.load(&b_lines[step + i]), sums[i]);
        }
    }
    for step in whole..count {
        let i = step - whole;
        sums[i] = lanes.fma(lanes.load(&a_lines[step]), lanes.load(&b_lines[step]), sums[i]);
    }
    if !a_rest.is_empty() {
        sums[CHAINS - 1] = lanes.fma(lanes.load(&filled(a_rest)), lanes.load(&filled(b_rest)), sums[CHAINS - 1]);
    }
    let one = lanes.splat(1.0);
    let low = lanes.fma(sums[0], one, sums[1]);
    let high = lanes.fma(sums[2], one, sums[3]);
    lanes.sum(lanes.fma(low, one, high))
}

/// Fewer values than a line, and zeros.
#[inline(always)]
fn filled(values: &[f32]) -> [f32; LANES] {
    let mut line = [0.0; LANES];
    line[..values.len()].copy_from_slice(values);
    line
}
