//! One decoder layer: attention and MLP, each behind a norm and around the residual stream.

use super::attention_mla::AttentionMla;
use super::kv_cache::LayerCache;
use super::load::Loader;
use super::mlp::Mlp;
use crate::backend::{Backend, Places};
use crate::config::IndexerType;
use crate::error::{Faults, Result};

/// How rows go through a layer.
pub struct Pass<'a, B: Backend> {
    /// Where the rows are.
    pub places: &'a Places,
    /// How many positions sparse attention looks at.
    pub index_topk: usize,
    /// The layer that follows, if any: some of its experts can be foreseen.
    pub next: Option<&'a DecoderLayer<B>>,
}

/// A decoder layer.
pub struct DecoderLayer<B: Backend> {
    /// [d].
    input_layernorm: B::Weight,
    self_attn: AttentionMla<B>,
    /// [d].
    post_attention_layernorm: B::Weight,
    mlp: Mlp<B>,
    rms_norm_eps: f64,
}

impl<B: Backend> DecoderLayer<B> {
    /// Hidden layer `layer`; `has_indexers` tells whether the model has indexers at all.
    pub(super) fn load(loader: &Loader<'_, B>, layer: u64, has_indexers: bool) -> Result<DecoderLayer<B>, Faults> {
        let config = loader.config();
        let full = config.indexer_types[layer as usize] == IndexerType::Full;
        let sparse = config.sparse_layers[layer as usize];
        DecoderLayer::load_as(loader, layer, full && has_indexers, sparse)
    }

    /// The decoder layer inside the MTP head: a mixture of experts, attending densely.
    pub(super) fn load_mtp(loader: &Loader<'_, B>, layer: u64) -> Result<DecoderLayer<B>, Faults> {
        DecoderLayer::load_as(loader, layer, false, true)
    }

    fn load_as(loader: &Loader<'_, B>, layer: u64, indexer: bool, sparse: bool) -> Result<DecoderLayer<B>, Faults> {
        let prefix = format!("model.layers.{layer}");
        Ok(DecoderLayer {
            input_layernorm: loader.weight(&format!("{prefix}.input_layernorm.weight"))?,
            self_attn: AttentionMla::load(loader, layer, indexer)?,
            post_attention_layernorm: loader.weight(&format!("{prefix}.post_attention_layernorm.weight"))?,
            mlp: Mlp::load(loader, layer, sparse)?,
            rms_norm_eps: loader.config().rms_norm_eps,
        })
    }

    /// x [n, d] → [n, d]. `selection` holds the positions that the nearest full indexer chose for these rows; a layer with an
    /// indexer of its own replaces it.
    pub fn forward(
        &self,
        backend: &B,
        mut x: B::Rows,
        cache: &mut LayerCache<B>,
        pass: &Pass<'_, B>,
        selection: &mut Option<B::Selection>,
    ) -> Result<B::Rows> {
        let &Pass { places, index_topk, next } = pass;
        // x += self_attn(input_layernorm(x))
        let normalized = backend.rms_norm(&x, &self.input_layernorm, self.rms_norm_eps)?;
        let attended = self.self_attn.forward(backend, &normalized, cache, places, index_topk, selection)?;
        // x += mlp(post_attention_layernorm(x))
        let normalized = backend.add_norm(&mut x, &attended, &self.post_attention_layernorm, self.rms_norm_eps)?;
        self.mlp.add_to(backend, &mut x, &normalized, next.map(|next| &next.mlp))?;
        Ok(x)
    }
}
