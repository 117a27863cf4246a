//! The two ends of the model: ids to rows, and rows to what follows them.

use super::load::Loader;
use crate::backend::{Backend, Prediction};
use crate::error::Result;

/// The embedding table.
pub struct Embedding<B: Backend> {
    /// `model.embed_tokens` [V, d].
    table: B::Weight,
}

impl<B: Backend> Embedding<B> {
    pub(super) fn load(loader: &Loader<'_, B>) -> Result<Embedding<B>> {
        Ok(Embedding { table: loader.weight("model.embed_tokens.weight")? })
    }

    /// The rows of some ids, each below V → [n, d].
    pub fn forward(&self, backend: &B, ids: &[u32]) -> Result<B::Rows> {
        backend.embed(&self.table, ids)
    }

    /// [V, d].
    pub fn table(&self) -> &B::Weight {
        &self.table
    }
}

/// Final norm and output head.
pub struct OutputHead<B: Backend> {
    /// `model.norm` [d].
    norm: B::Weight,
    /// `lm_head` [V, d]; with `tie_word_embeddings` there is none and the embedding table takes its place.
    lm_head: Option<B::Weight>,
    rms_norm_eps: f64,
}

impl<B: Backend> OutputHead<B> {
    pub(super) fn load(loader: &Loader<'_, B>) -> Result<OutputHead<B>> {
        let config = loader.config();
        let lm_head = if config.tie_word_embeddings { None } else { Some(loader.linear("lm_head.weight")?) };
        Ok(OutputHead { norm: loader.weight("model.norm.weight")?, lm_head, rms_norm_eps: config.rms_norm_eps })
    }

    /// model.norm(x): [n, d] → [n, d].
    pub fn normalized(&self, backend: &B, x: &B::Rows) -> Result<B::Rows> {
        backend.rms_norm(x, &self.norm, self.rms_norm_eps)
    }

    /// The output matrix [V, d].
    pub fn matrix<'a>(&'a self, embedding: &'a Embedding<B>) -> &'a B::Weight {
        self.lm_head.as_ref().unwrap_or(&embedding.table)
    }

    /// Best ids after each row of x [n, d]; `asked [n]`.
    pub fn predict(
        &self,
        backend: &B,
        embedding: &Embedding<B>,
        x: &B::Rows,
        asked: &[Option<u32>],
    ) -> Result<Vec<Prediction>> {
        backend.predict(self.matrix(embedding), &self.normalized(backend, x)?, asked)
    }

    /// x [n, d] → logits [n, V].
    pub fn logits(&self, backend: &B, embedding: &Embedding<B>, x: &B::Rows) -> Result<B::Rows> {
        backend.matmul(self.matrix(embedding), &self.normalized(backend, x)?)
    }
}
