//! Attention over compressed keys and values, and the scores of an indexer, once for every instruction set.

// Arrays of vectors are indexed by constants: iterators would hide them from the registers.
#![allow(clippy::needless_range_loop)]

use super::{LANES, Lanes};
use crate::backend::{Dsa, Mla};

/// Sums of a dot product that are formed side by side, in vectors.
const CHAINS: usize = 4;

/// What all rows have in common for one head.
#[derive(Debug)]
pub(in crate::backend::cpu) struct Head<'a> {
    /// Dimensions.
    pub mla: Mla,
    /// K_h [nope, latent], then V_h [value, latent].
    pub kv: &'a [f32],
    /// Latents and rotated keys [T, latent + rope].
    pub cache: &'a [f32],
}

/// One row: q [nope + rope], out [value]. See [`crate::backend::Backend::attention`].
#[inline(always)]
pub(super) fn head<L: Lanes>(lanes: L, head: &Head<'_>, q: &[f32], positions: &[usize], out: &mut [f32]) {
    let Mla { nope, rope, value, latent, .. } = head.mla;
    let width = latent + rope;
    let (k, v) = head.kv.split_at(nope * latent);
    // query of the cached rows [latent + rope]: K_hᵀ q_nope, then q_rope
    let mut query = vec![0.0; width];
    for j in 0..nope {
        add_scaled(lanes, &mut query[..latent], q[j], &k[j * latent..][..latent]);
    }
    query[latent..].copy_from_slice(&q[nope..]);
    // scores [positions]
    let scale = ((nope + rope) as f64).powf(-0.5);
    let mut weights = Vec::with_capacity(positions.len());
    let mut largest = f64::NEG_INFINITY;
    for &t in positions {
        let score = f64::from(dot(lanes, &head.cache[t * width..][..width], &query)) * scale;
        largest = largest.max(score);
        weights.push(score);
    }
    // softmax [positions], not yet divided by its sum
    let mut total = 0.0;
    for weight in &mut weights {
        *weight = (*weight - largest).exp();
        total += *weight;
    }
    // Σ a_t c_t [latent]
    let mut context = vec![0.0; latent];
    for i in 0..positions.len() {
        add_scaled(lanes, &mut context, (weights[i] / total) as f32, &head.cache[positions[i] * width..][..latent]);
    }
    // V_h context [value]
    for j in 0..value {
        out[j] = dot(lanes, &v[j * latent..][..latent], &context);
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

/// sums + factor · values, fused, into the sums.
#[inline(always)]
fn add_scaled<L: Lanes>(lanes: L, sums: &mut [f32], factor: f32, values: &[f32]) {
    let (lines, rest) = sums.as_chunks_mut::<LANES>();
    let (values, values_rest) = values.as_chunks::<LANES>();
    let splat = lanes.splat(factor);
    for (sums, values) in lines.iter_mut().zip(values) {
        lanes.store(lanes.fma(splat, lanes.load(values), lanes.load(sums)), sums);
    }
    if !rest.is_empty() {
        let mut line = filled(rest);
        lanes.store(lanes.fma(splat, lanes.load(&filled(values_rest)), lanes.load(&line)), &mut line);
        rest.copy_from_slice(&line[..rest.len()]);
    }
}

/// Fewer values than a line, and zeros.
#[inline(always)]
fn filled(values: &[f32]) -> [f32; LANES] {
    let mut line = [0.0; LANES];
    line[..values.len()].copy_from_slice(values);
    line
}
