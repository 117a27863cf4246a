//! The forward pass of `glm_moe_dsa`, over any weights and on any backend.
//!
//! A token goes through [`embedding`], then each layer ([`layer`]): [`attention_mla`], whose positions a [`dsa_indexer`]
//! may choose, and [`mlp`], dense or a mixture of experts chosen by a [`moe_router`]; then final norm and output head.
//! [`mtp`] drafts one token further. What later tokens need of a position is in [`kv_cache`]. Source: model description;
//! transformers' `GlmMoeDsa*` (5.11 and later, eager, f32) computes the same.
//!
//! Shapes: [n, w] are n rows, one a token, of w values; d is `hidden_size`, V is `vocab_size`.

pub mod attention_mla;
pub mod chat;
pub mod detokenize;
pub mod drafting;
pub mod dsa_indexer;
pub mod embedding;
pub mod ending;
pub mod kv_cache;
pub mod layer;
mod load;
pub mod memory;
pub mod mlp;
pub mod moe_router;
pub mod mtp;
pub mod sampler;
#[cfg(test)]
pub(crate) mod testing;
pub mod tokenizer;

use crate::backend::{Backend, Places, Prediction};
use crate::config::Config;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::roles::{Pass, Role};
use crate::weights::Weights;

use embedding::{Embedding, OutputHead};
use kv_cache::KvCache;
use layer::DecoderLayer;
use load::Loader;
pub use load::{check_memory, plain_bytes, stored_bytes};
use mtp::Mtp;

/// Rows of one pass through the layers; longer texts go in pieces. The results are the same for any number.
pub const CHUNK_ROWS: usize = 512;

/// Which parts of a model are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loaded {
    /// Everything that is there.
    Whole,
    /// Everything but the MTP head: nobody asks for a draft.
    WithoutMtp,
}

impl Loaded {
    /// What a run needs that drafts, or does not.
    pub fn for_drafts(drafts: bool) -> Loaded {
        if drafts { Loaded::Whole } else { Loaded::WithoutMtp }
    }

    /// Whether the model computes with weights of this role. The indexer that a shared layer may carry is never used.
    pub fn uses(self, role: &Role) -> bool {
        match role.pass {
            Pass::Main => true,
            Pass::Mtp => self == Loaded::Whole,
            Pass::Indexer => !role.optional,
        }
    }
}

/// A model on a backend.
pub struct Model<'b, B: Backend> {
    backend: &'b B,
    config: Config,
    embedding: Embedding<B>,
    layers: Vec<DecoderLayer<B>>,
    has_indexers: bool,
    head: OutputHead<B>,
    mtp: Option<Mtp<B>>,
}

impl<'b, B: Backend> Model<'b, B> {
    /// Loads every weight and uploads it. Without any weight of the MTP layer the model drafts nothing; without any of an
    /// indexer it attends densely. A part that is there must be whole.
    pub fn load(weights: &dyn Weights, backend: &'b B) -> Result<Model<'b, B>, Faults> {
        Model::load_parts(weights, backend, Loaded::Whole)
    }

    /// Loads these parts alone: what is left out is not looked at, and the model is one without it.
    pub fn load_parts(weights: &dyn Weights, backend: &'b B, loaded: Loaded) -> Result<Model<'b, B>, Faults> {
        let loader = Loader::new(weights, backend);
        let config = weights.config().clone();
        let has_indexers = loader.has_any(Pass::Indexer);
        let layers = (0..config.num_hidden_layers).map(|layer| DecoderLayer::load(&loader, layer, has_indexers));
        let mtp_layer = config.mtp_layer().filter(|_| loaded == Loaded::Whole && loader.has_any(Pass::Mtp));
        Ok(Model {
            backend,
            embedding: Embedding::load(&loader)?,
            layers: layers.collect::<Result<_, Faults>>()?,
            has_indexers,
            head: OutputHead::load(&loader)?,
            mtp: mtp_layer.map(|layer| Mtp::load(&loader, layer)).transpose()?,
            config,
        })
    }

    /// The backend it is on.
    pub fn backend(&self) -> &'b B {
        self.backend
    }

    /// Its config.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether it has an MTP head that is loaded.
    pub fn has_mtp(&self) -> bool {
        self.mtp.is_some()
    }

    /// Whether it has indexers; without, every token attends to all positions before it.
    pub fn has_indexers(&self) -> bool {
        self.has_indexers
    }

    /// An empty cache. `index_topk` is the number of positions that sparse attention looks at, by default the config's.
    pub fn cache(&self, index_topk: Option<u64>) -> Result<KvCache<B>> {
        let topk = index_topk.unwrap_or(self.config.index_topk);
        KvCache::new(self.backend, &self.config, usize::try_from(topk).unwrap_or(usize::MAX))
    }

    /// Runs the next tokens through all layers: the residual stream after the last one [n, d], without the final norm.
    ///
    /// On an error the cache is what it was before.
    pub fn forward(&self, cache: &mut KvCache<B>, ids: &[u32]) -> Result<B::Rows> {
        let places = Places::after(cache.len(), ids.len());
        self.forward_at(cache, ids, &places)
    }

    /// Runs tokens of one or several texts through all layers, each at its place: the residual stream after the last layer
    /// [n, d], without the final norm. The cache keeps them in this order.
    ///
    /// On an error the cache is what it was before.
    pub fn forward_at(&self, cache: &mut KvCache<B>, ids: &[u32], places: &Places) -> Result<B::Rows> {
        self.check_ids(ids)?;
        let before = cache.len();
        assert_eq!((places.first(), places.rows()), (before, ids.len()), "places of tokens");
        let rows = self.through_layers(cache, ids, places);
        match &rows {
            Ok(_) => cache.set_len(before + ids.len()),
            Err(_) => cache.truncate(self.backend, before),
        }
        rows
    }

    fn through_layers(&self, cache: &mut KvCache<B>, ids: &[u32], places: &Places) -> Result<B::Rows> {
        let index_topk = cache.index_topk();
        // x = embed(ids) [n, d]
        let mut x = self.embedding.forward(self.backend, ids)?;
        // The positions that the nearest full indexer before a layer chose; `None` is all.
        let mut selection = None;
        for (number, (layer, cache)) in self.layers.iter().zip(cache.layers_mut()).enumerate() {
            let pass = layer::Pass { places, index_topk, next: self.layers.get(number + 1) };
            x = layer.forward(self.backend, x, cache, &pass, &mut selection)?;
        }
        Ok(x)
    }

    /// What the model says after each row of [`Model::forward`]: x [n, d], `asked [n]`.
    pub fn predict(&self, x: &B::Rows, asked: &[Option<u32>]) -> Result<Vec<Prediction>> {
        finite("the model", self.head.predict(self.backend, &self.embedding, x, asked)?)
    }

    /// All logits after each row of [`Model::forward`]: x [n, d] → [n, V].
    pub fn logits(&self, x: &B::Rows) -> Result<B::Rows> {
        self.head.logits(self.backend, &self.embedding, x)
    }

    /// Runs the next tokens, in pieces, and tells what the model says after the last.
    pub fn next(&self, cache: &mut KvCache<B>, ids: &[u32]) -> Result<Prediction> {
        let mut last = None;
        for chunk in self.chunks(ids)? {
            last = Some(self.forward(cache, chunk)?);
        }
        let x = self.last_row(&last.expect("chunks are not empty"))?;
        Ok(self.predict(&x, &[None])?[0])
    }

    /// What the model says after each token of a text, asked for the token that follows there; for the last for none.
    pub fn teacher_forced(&self, ids: &[u32], index_topk: Option<u64>) -> Result<Vec<Prediction>> {
        let mut cache = self.cache(index_topk)?;
        let mut predictions = Vec::with_capacity(ids.len());
        for chunk in self.chunks(ids)? {
            let asked: Vec<Option<u32>> = (1..=chunk.len()).map(|i| ids.get(predictions.len() + i).copied()).collect();
            let x = self.forward(&mut cache, chunk)?;
            predictions.extend(self.predict(&x, &asked)?);
        }
        Ok(predictions)
    }

    /// The `count` tokens that follow a prompt, each the model's best; stop ids do not stop it.
    pub fn greedy(&self, prompt: &[u32], count: usize, index_topk: Option<u64>) -> Result<Vec<u32>> {
        let mut cache = self.cache(index_topk)?;
        let mut ids = Vec::with_capacity(count);
        while ids.len() < count {
            let next = match ids.last() {
                None => self.next(&mut cache, prompt)?,
                Some(&last) => self.next(&mut cache, &[last])?,
            };
            ids.push(next.id);
        }
        Ok(ids)
    }

    /// The last row of x [n, d] → [1, d].
    fn last_row(&self, x: &B::Rows) -> Result<B::Rows> {
        let (rows, width) = self.backend.shape(x);
        self.backend.slice(x, rows - 1..rows, 0..width)
    }

    /// A text in the pieces that go through the layers together; at least one.
    fn chunks<'i>(&self, ids: &'i [u32]) -> Result<std::slice::Chunks<'i, u32>> {
        self.check_ids(ids)?;
        Ok(ids.chunks(CHUNK_ROWS))
    }

    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        let vocab_size = self.config.vocab_size;
        let fault = |kind| Err(Fault::new(Place::default(), kind));
        match ids.iter().find(|&&id| u64::from(id) >= vocab_size) {
            Some(&id) => fault(FaultKind::TokenId { id: id.into(), vocab_size }),
            None if ids.is_empty() => fault(FaultKind::NoTokens),
            None => Ok(()),
        }
    }
}

/// Refuses predictions from logits of `what` that are not numbers: their argmax would say nothing.
fn finite(what: &'static str, predictions: Vec<Prediction>) -> Result<Vec<Prediction>> {
    match predictions.iter().position(|prediction| !prediction.log_sum_exp.is_finite()) {
        Some(row) => Err(Fault::new(Place::default(), FaultKind::LogitsNotFinite { what, row })),
        None => Ok(predictions),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::testing::{Synthetic, TOKENS, assert_close, blocks, pieces, whole};
    use super::*;
    use crate::backend::reference::Reference;

    fn text_ids() -> Vec<u32> {
        serde_json::from_value(blocks()["text"]["ids"].clone()).unwrap()
    }

    #[test]
    fn logits_are_those_of_transformers_in_any_pieces() {
        let backend = Reference::default();
        let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
        let ids = text_ids();
        let logits = |pieces: &[std::ops::Range<usize>]| -> Vec<f32> {
            let mut cache = model.cache(None).unwrap();
            let mut logits = Vec::new();
            for piece in pieces {
                let x = model.forward(&mut cache, &ids[piece.clone()]).unwrap();
                logits.extend(backend.read(&model.logits(&x).unwrap()).unwrap());
            }
            assert_eq!(cache.len(), ids.len());
            logits
        };
        let at_once = logits(&whole());
        assert_close(&at_once, &blocks()["text"]["logits"]);
        for seed in 0..8 {
            assert_eq!(logits(&pieces(TOKENS, seed)), at_once);
        }
    }

    #[test]
    fn sparse_attention_begins_beyond_index_topk() {
        let backend = Reference::default();
        let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
        let bare = Synthetic::new(json!({})).only(|name| !name.contains("indexer"));
        let dense = Model::load(&bare, &backend).unwrap();
        let ids = text_ids();
        let sparse = model.teacher_forced(&ids, None).unwrap();
        let all = model.teacher_forced(&ids, Some(TOKENS as u64)).unwrap();
        assert_eq!(sparse[..4], all[..4]);
        assert_ne!(sparse[4..], all[4..]);
        assert_eq!(dense.teacher_forced(&ids, None).unwrap(), all);
        assert!(all[..TOKENS - 1].iter().all(|p| p.logprob().is_some()) && all[TOKENS - 1].asked.is_none());
    }

    #[test]
    fn a_part_that_is_there_must_be_whole() {
        let backend = Reference::default();
        let load = |present| Model::load(&Synthetic::new(json!({})).only(present), &backend);
        assert!(load(|_| true).unwrap().has_mtp());
        let bare = load(|name| !name.contains("layers.4.")).unwrap();
        assert!(!bare.has_mtp());
        assert_eq!(bare.drafts(&[1, 2], None).unwrap_err().to_string(), "the model has no MTP head");
        let missing = |present| load(present).err().unwrap().to_string();
        for (name, message) in [
            (missing(|name| name != "model.layers.4.hnorm.weight"), "model.layers.4.hnorm.weight"),
            (
                missing(|name| !name.contains("layers.2.self_attn.indexer")),
                "model.layers.2.self_attn.indexer.wq_b.weight",
            ),
            (missing(|name| !name.contains("experts.7.up_proj")), "model.layers.1.mlp.experts.7.up_proj.weight"),
        ] {
            assert!(name.contains(message) && name.contains("the tensor is missing"), "{name}");
        }
        // A head that is left out need not be whole.
        let damaged = Synthetic::new(json!({})).only(|name| name != "model.layers.4.hnorm.weight");
        let model = Model::load_parts(&damaged, &backend, Loaded::WithoutMtp).unwrap();
        assert!(!model.has_mtp());
        let whole = load(|_| true).unwrap();
        assert_eq!(model.teacher_forced(&[1, 2, 3], None).unwrap(), whole.teacher_forced(&[1, 2, 3], None).unwrap());
    }

    #[test]
    fn ids_are_checked_and_an_error_leaves_the_cache_as_it_was() {
        let backend = Reference::default();
        let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
        let mut cache = model.cache(None).unwrap();
        model.forward(&mut cache, &[1, 2]).unwrap();
        let message = |result: Result<Vec<Prediction>>| result.unwrap_err().to_string();
        assert_eq!(message(model.teacher_forced(&[1, 40], None)), "token id 40 is not below vocab_size 40");
        assert_eq!(message(model.teacher_forced(&[], None)), "there is no token to start from");
        assert!(model.forward(&mut cache, &[u32::MAX]).is_err());
        assert_eq!(cache.len(), 2);
        assert!(model.greedy(&[], 1, None).is_err());
        assert!(model.greedy(&[1], 0, None).unwrap().is_empty());
    }

    #[test]
    fn tied_embeddings_take_the_heads_place() {
        let backend = Reference::default();
        let tied = Synthetic::new(json!({"tie_word_embeddings": true})).only(|name| name != "lm_head.weight");
        let model = Model::load(&tied, &backend).unwrap();
        let x = backend.write(&[1.0; 24], 24).unwrap();
        let logits = backend.read(&model.logits(&x).unwrap()).unwrap();
        let normalized = model.head.normalized(&backend, &x).unwrap();
        let expected = backend.read(&backend.matmul(model.embedding.table(), &normalized).unwrap()).unwrap();
        assert_eq!(logits, expected);
    }

    #[test]
    fn logits_that_are_no_numbers_are_refused() {
        let backend = Reference::default();
        let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
        let mut values = vec![1.0; 48];
        values[30] = f32::NAN;
        let x = backend.write(&values, 24).unwrap();
        let message = model.predict(&x, &[None, None]).unwrap_err().to_string();
        assert_eq!(message, "the logits of the model, row 1 of those that were computed together, are not finite");
        assert!(model.predict_drafts(&x, &[None, None]).is_err());
    }
}
