//! The multi-token prediction head: a decoder layer of its own that drafts the token after the next.
//!
//! At position p it is given the hidden layers' output h_p and the next token tok[p+1], and says what tok[p+2] will be. Its
//! attention is dense and has a cache of its own, position p at index p, so a prompt has to be absorbed first.

use super::Model;
use super::embedding::{Embedding, OutputHead};
use super::kv_cache::{KvCache, LayerCache};
use super::layer::{self, DecoderLayer};
use super::load::Loader;
use crate::backend::{Backend, Places, Prediction};
use crate::error::{Fault, FaultKind, Faults, Place, Result};

/// The MTP head.
pub struct Mtp<B: Backend> {
    /// `embed_tokens` [V, d] where the layer carries one of its own: it is what the head was trained with. Usually it has
    /// none, or a copy, and shares `model.embed_tokens`.
    embed_tokens: Option<B::Weight>,
    /// [d].
    enorm: B::Weight,
    /// [d].
    hnorm: B::Weight,
    /// [d, 2 · d]: the first half of its inputs is the embedding's.
    eh_proj: B::Weight,
    layer: DecoderLayer<B>,
    /// `shared_head.norm` [d].
    norm: B::Weight,
    /// `shared_head.head` [V, d] where the layer carries one of its own; else `lm_head` is shared.
    head: Option<B::Weight>,
    rms_norm_eps: f64,
}

impl<B: Backend> Mtp<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: u64) -> Result<Mtp<B>, Faults> {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        Ok(Mtp {
            embed_tokens: loader.optional(&name("embed_tokens"))?,
            enorm: loader.weight(&name("enorm"))?,
            hnorm: loader.weight(&name("hnorm"))?,
            eh_proj: loader.linear(&name("eh_proj"))?,
            layer: DecoderLayer::load_mtp(loader, layer)?,
            norm: loader.weight(&name("shared_head.norm"))?,
            head: loader.optional(&name("shared_head.head"))?,
            rms_norm_eps: loader.config().rms_norm_eps,
        })
    }

    /// `h` [n, d] and the tokens that follow, `next [n]` → the layer's output [n, d], without `shared_head.norm`.
    pub fn forward(
        &self,
        backend: &B,
        embedding: &Embedding<B>,
        h: &B::Rows,
        next: &[u32],
        cache: &mut LayerCache<B>,
    ) -> Result<B::Rows> {
        // e = enorm(embed next) [n, d]
        let e = backend.embed(self.embed_tokens.as_ref().unwrap_or(embedding.table()), next)?;
        let e = backend.rms_norm(&e, &self.enorm, self.rms_norm_eps)?;
        // x = eh_proj [e; hnorm(h)] [n, d]
        let h = backend.rms_norm(h, &self.hnorm, self.rms_norm_eps)?;
        let x = backend.matmul(&self.eh_proj, &backend.concat(&e, &h)?)?;
        // the decoder layer; without an indexer it leaves the selection at none and so attends to all positions
        let places = Places::after(backend.cache_len(&cache.kv), next.len());
        let pass = layer::Pass { places: &places, index_topk: usize::MAX, next: None };
        self.layer.forward(backend, x, cache, &pass, &mut None)
    }

    /// Best ids after each row of [`Mtp::forward`]: x [n, d], `asked [n]`.
    pub fn predict(
        &self,
        backend: &B,
        embedding: &Embedding<B>,
        head: &OutputHead<B>,
        x: &B::Rows,
        asked: &[Option<u32>],
    ) -> Result<Vec<Prediction>> {
        let x = backend.rms_norm(x, &self.norm, self.rms_norm_eps)?;
        backend.predict(self.head.as_ref().unwrap_or(head.matrix(embedding)), &x, asked)
    }
}

impl<B: Backend> Model<'_, B> {
    /// Runs the MTP layer at its next positions, given the rows of [`Model::forward`] at those positions, x [n, d], and the
    /// tokens that follow each, `next [n]` → the layer's output [n, d].
    ///
    /// On an error the cache is what it was before.
    pub fn absorb(&self, cache: &mut KvCache<B>, x: &B::Rows, next: &[u32]) -> Result<B::Rows> {
        let normalized = self.head.normalized(self.backend, x)?;
        self.chain(cache, &normalized, next)
    }

    /// Like [`Model::absorb`], on rows that the MTP layer gave at the position before: a draft after a draft.
    pub fn chain(&self, cache: &mut KvCache<B>, x: &B::Rows, next: &[u32]) -> Result<B::Rows> {
        self.check_ids(next)?;
        let mtp = self.mtp()?;
        let before = cache.mtp_len(self.backend);
        let out = mtp.forward(self.backend, &self.embedding, x, next, cache.mtp_mut());
        if out.is_err() {
            cache.truncate_mtp(self.backend, before);
        }
        out
    }

    /// What the MTP head says after each row of [`Model::absorb`] or [`Model::chain`]: x [n, d], `asked [n]`.
    pub fn predict_drafts(&self, x: &B::Rows, asked: &[Option<u32>]) -> Result<Vec<Prediction>> {
        super::finite("the MTP head", self.mtp()?.predict(self.backend, &self.embedding, &self.head, x, asked)?)
    }

    /// The MTP head's drafts along a text: at each position p but the last, what it says tok[p+2] will be.
    pub fn drafts(&self, ids: &[u32], index_topk: Option<u64>) -> Result<Vec<Prediction>> {
        let mut cache = self.cache(index_topk)?;
        let mut drafts = Vec::with_capacity(ids.len());
        for chunk in self.chunks(ids)? {
            let x = self.forward(&mut cache, chunk)?;
            // the last token of the text has none after it
            let next = &ids[drafts.len() + 1..ids.len().min(drafts.len() + 1 + chunk.len())];
            if next.is_empty() {
                break;
            }
            let x = self.backend.slice(&x, 0..next.len(), 0..self.backend.shape(&x).1)?;
            let x = self.absorb(&mut cache, &x, next)?;
            let asked: Vec<Option<u32>> = (2..).take(next.len()).map(|i| ids.get(drafts.len() + i).copied()).collect();
            drafts.extend(self.predict_drafts(&x, &asked)?);
        }
        Ok(drafts)
    }

    pub(super) fn mtp(&self) -> Result<&Mtp<B>> {
        self.mtp.as_ref().ok_or_else(|| Fault::new(Place::default(), FaultKind::NoMtpHead))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::testing::{Synthetic, TOKENS, assert_close, blocks, pieces};
    use super::*;
    use crate::backend::reference::Reference;

    /// All logits of the head after each row.
    fn logits(model: &Model<'_, Reference>, x: &<Reference as Backend>::Rows) -> Vec<f32> {
        let (backend, mtp) = (model.backend, model.mtp.as_ref().unwrap());
        let normalized = backend.rms_norm(x, &mtp.norm, mtp.rms_norm_eps).unwrap();
        backend.read(&backend.matmul(model.head.matrix(&model.embedding), &normalized).unwrap()).unwrap()
    }

    #[test]
    fn drafts_and_drafts_after_drafts_are_those_of_transformers() {
        let text: &Value = &blocks()["text"];
        let ids: Vec<u32> = serde_json::from_value(text["ids"].clone()).unwrap();
        let backend = Reference::default();
        let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
        for seed in 0..4 {
            let mut cache = model.cache(None).unwrap();
            let hidden = model.forward(&mut cache, &ids).unwrap();
            let width = backend.shape(&hidden).1;
            // The prompt is absorbed in pieces.
            let mut found = Vec::new();
            let mut last = None;
            for rows in pieces(TOKENS - 1, seed) {
                let next = &ids[rows.start + 1..rows.end + 1];
                let x = model.absorb(&mut cache, &backend.slice(&hidden, rows, 0..width).unwrap(), next).unwrap();
                found.extend(logits(&model, &x));
                last = Some(model.last_row(&x).unwrap());
            }
            assert_close(&found, &text["draft_logits"]);
            let mut x = last.unwrap();
            for step in text["chained"].as_array().unwrap() {
                let draft = model.predict_drafts(&x, &[None]).unwrap()[0].id;
                assert_eq!(u64::from(draft), step["token"].as_u64().unwrap());
                x = model.chain(&mut cache, &x, &[draft]).unwrap();
                assert_close(&logits(&model, &x), &step["logits"]);
            }
            assert_eq!(cache.mtp_len(&backend), TOKENS + 1);
        }
    }

    #[test]
    fn drafts_along_a_text_are_one_fewer_than_its_tokens() {
        let backend = Reference::default();
        let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
        let drafts = model.drafts(&[1, 2, 3], None).unwrap();
        assert_eq!(drafts.len(), 2);
        assert!(drafts[0].asked.is_some() && drafts[1].asked.is_none());
        assert_eq!(model.drafts(&[1], None).unwrap(), []);
    }

    #[test]
    fn tables_of_its_own_are_used_where_the_layer_has_them() {
        let backend = Reference::default();
        let shared = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
        let own = Model::load(&Synthetic::new(json!({})).with_optional(), &backend).unwrap();
        let of = |model: &Model<'_, Reference>| {
            let mtp = model.mtp.as_ref().unwrap();
            (mtp.embed_tokens.is_some(), mtp.head.is_some())
        };
        assert_eq!((of(&shared), of(&own)), ((false, false), (true, true)));
        let ids = [1, 2, 3, 4];
        assert_eq!(shared.teacher_forced(&ids, None).unwrap(), own.teacher_forced(&ids, None).unwrap());
        assert_ne!(shared.drafts(&ids, None).unwrap(), own.drafts(&ids, None).unwrap());
    }
}
