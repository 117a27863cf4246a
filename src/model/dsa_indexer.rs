//! The indexer of DeepSeek sparse attention: which earlier positions a token looks at.

use super::load::Loader;
use crate::backend::{Backend, Dsa, Heads, Rope};
use crate::error::Result;

/// eps of the keys' LayerNorm, fixed in transformers.
const KEY_NORM_EPS: f64 = 1e-6;

/// The indexer of a full layer: `heads` query heads of width `width`, one key a position.
pub struct DsaIndexer<B: Backend> {
    /// [heads · width, q_lora_rank].
    wq_b: B::Weight,
    /// [width, d].
    wk: B::Weight,
    /// Weight [width] and bias [width].
    k_norm: (B::Weight, B::Weight),
    /// [heads, d].
    weights_proj: B::Weight,
    heads: usize,
    width: usize,
}

impl<B: Backend> DsaIndexer<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: u64) -> Result<DsaIndexer<B>> {
        let weight = |part: &str| loader.weight(&format!("model.layers.{layer}.self_attn.indexer.{part}"));
        Ok(DsaIndexer {
            wq_b: weight("wq_b.weight")?,
            wk: weight("wk.weight")?,
            k_norm: (weight("k_norm.weight")?, weight("k_norm.bias")?),
            weights_proj: weight("weights_proj.weight")?,
            heads: loader.config().index_n_heads as usize,
            width: loader.config().index_head_dim as usize,
        })
    }

    /// Adds the keys of x [n, d] to `keys` and chooses for each row, with its c_q [n, q_lora_rank], the `topk` positions it
    /// looks at. `None` is all of them: no row has more than `topk` yet.
    pub fn select(
        &self,
        backend: &B,
        x: &B::Rows,
        c_q: &B::Rows,
        keys: &mut B::Cache,
        rope: &Rope,
        topk: usize,
    ) -> Result<Option<B::Selection>> {
        let first_position = backend.cache_len(keys);
        // The first dimensions of queries and keys are turned, the others are not.
        let heads = Heads { width: self.width, rope_at: 0 };
        // k = k_norm(wk x) [n, width]
        let (weight, bias) = &self.k_norm;
        let mut k = backend.layer_norm(&backend.matmul(&self.wk, x)?, weight, bias, KEY_NORM_EPS)?;
        backend.rope(&mut k, rope, heads, first_position)?;
        backend.append(keys, &k)?;
        if backend.cache_len(keys) <= topk {
            return Ok(None);
        }
        // q = wq_b c_q [n, heads · width]
        let mut q = backend.matmul(&self.wq_b, c_q)?;
        backend.rope(&mut q, rope, heads, first_position)?;
        // w = weights_proj x [n, heads]
        let w = backend.matmul(&self.weights_proj, x)?;
        // score_t = heads^−½ · Σ_h w_h · relu(q_h · k_t · width^−½)
        let dsa = Dsa { heads: self.heads, width: self.width, topk };
        Ok(Some(backend.select(&dsa, &q, &w, keys)?))
    }
}
