//! The indexer of DeepSeek sparse attention: which earlier positions a token looks at.

use super::load::Loader;
use crate::backend::{Backend, Dsa, Heads, Places, Rope};
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
    rope: Rope,
}

impl<B: Backend> DsaIndexer<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: u64, rope: Rope) -> Result<DsaIndexer<B>> {
        let name = |part: &str| format!("model.layers.{layer}.self_attn.indexer.{part}");
        let (weight, linear) = (|part: &str| loader.weight(&name(part)), |part: &str| loader.linear(&name(part)));
        Ok(DsaIndexer {
            wq_b: linear("wq_b.weight")?,
            wk: linear("wk.weight")?,
            k_norm: (weight("k_norm.weight")?, weight("k_norm.bias")?),
            weights_proj: linear("weights_proj.weight")?,
            heads: loader.config().index_n_heads as usize,
            width: loader.config().index_head_dim as usize,
            rope,
        })
    }

    /// Adds the keys of x [n, d] to `keys` and chooses for each row, with its c_q [n, q_lora_rank], the `topk` rows it
    /// looks at. `None` is all of them: no row sees more than `topk` yet.
    pub fn select(
        &self,
        backend: &B,
        x: &B::Rows,
        c_q: &B::Rows,
        keys: &mut B::Cache,
        places: &Places,
        topk: usize,
    ) -> Result<Option<B::Selection>> {
        let positions = places.positions();
        // The first dimensions of queries and keys are turned, the others are not.
        let heads = Heads { width: self.width, rope_at: 0 };
        // k = k_norm(wk x) [n, width]
        let (weight, bias) = &self.k_norm;
        let mut k = backend.layer_norm(&backend.matmul(&self.wk, x)?, weight, bias, KEY_NORM_EPS)?;
        backend.rope(&mut k, &self.rope, heads, positions)?;
        backend.append(keys, &k)?;
        if places.most_seen() <= topk {
            return Ok(None);
        }
        // q = wq_b c_q [n, heads · width]
        let mut q = backend.matmul(&self.wq_b, c_q)?;
        backend.rope(&mut q, &self.rope, heads, positions)?;
        // w = weights_proj x [n, heads]
        let w = backend.matmul(&self.weights_proj, x)?;
        // score_t = heads^−½ · Σ_h w_h · relu(q_h · k_t · width^−½)
        let dsa = Dsa { heads: self.heads, width: self.width, topk };
        Ok(Some(backend.select(&dsa, &q, &w, keys, places)?))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{Synthetic, assert_close, blocks, input};
    use super::*;
    use crate::backend::reference::Reference;
    use crate::weights::Weights;

    // Queries, scores and choice are tested with attention, which they serve.
    #[test]
    fn keys_are_those_of_transformers() {
        let backend = Reference::default();
        let weights = Synthetic::new(json!({}));
        let indexer =
            DsaIndexer::load(&Loader::new(&weights, &backend), 0, Rope { frequencies: vec![1.0; 3] }).unwrap();
        let (d, q_lora_rank) = (weights.config().hidden_size as usize, weights.config().q_lora_rank as usize);
        // a row so small that the norm's eps shows
        let x = backend.read(&input(&backend, "input.attention", d as u64)).unwrap();
        let x: Vec<f32> = x[..d].iter().map(|value| value / 1024.0).collect();
        let x = backend.write(&x, d).unwrap();
        let c_q = backend.write(&vec![0.0; q_lora_rank], q_lora_rank).unwrap();
        let mut keys = backend.cache(indexer.width).unwrap();
        assert!(indexer.select(&backend, &x, &c_q, &mut keys, &Places::after(0, 1), 4).unwrap().is_none());
        assert_close(&backend.read(&keys).unwrap(), &blocks()["index_key"]);
    }
}
