//! Runs a model along the continuations of a row. What they share is computed once.

use std::sync::Arc;

use super::encode::Encoded;
use crate::backend::Backend;
use crate::error::Result;
use crate::limits;
use crate::model::kv_cache::KvCache;
use crate::model::{CHUNK_ROWS, Model};

/// A model with the cache of the text that it saw last.
pub struct Runner<'m, 'b, B: Backend> {
    model: &'m Model<'b, B>,
    cache: KvCache<B>,
    /// The ids that are in the cache.
    seen: Vec<u32>,
    /// Tokens that went through the layers.
    pub computed: u64,
}

/// Rows of the residual stream, in order: after each token that stands right before a scored one.
pub struct Hidden<B: Backend> {
    pieces: Vec<Arc<B::Rows>>,
}

impl<'m, 'b, B: Backend> Runner<'m, 'b, B> {
    /// A model that has seen nothing.
    pub fn new(model: &'m Model<'b, B>) -> Result<Self> {
        Ok(Runner { model, cache: model.cache(None)?, seen: Vec::new(), computed: 0 })
    }

    /// The model.
    pub fn model(&self) -> &'m Model<'b, B> {
        self.model
    }

    /// Runs the texts of one row, one after the other: what all of them begin with goes through the layers once, and what
    /// the row before began with not again.
    pub fn run(&mut self, texts: &[Encoded]) -> Result<Vec<Hidden<B>>> {
        let shared = shared(texts);
        // The last shared token goes through again: the row after it is needed.
        self.rewind(&texts[0].ids[..shared - 1]);
        let after_shared = self.forward(&texts[0].ids, shared)?;
        let last = after_shared.last().expect("at least the last shared token went through");
        let last = Arc::new(self.model.backend().slice(last, self.last_row(last), self.width(last))?);
        let mut all = Vec::with_capacity(texts.len());
        for text in texts {
            self.rewind(&text.ids[..shared]);
            let from = self.seen.len();
            let pieces = self.forward(&text.ids, text.ids.len() - 1)?;
            all.push(self.before_scored(text, from, &last, pieces)?);
        }
        Ok(all)
    }

    /// The rows after the tokens from `start` − 1 to the last but one; `pieces` are those from position `from` on, which is
    /// where the shared part ends, or 0 for a text that shares nothing.
    fn before_scored(
        &self,
        text: &Encoded,
        from: usize,
        last_shared: &Arc<B::Rows>,
        pieces: Vec<B::Rows>,
    ) -> Result<Hidden<B>> {
        let mut rows = Vec::with_capacity(pieces.len() + 1);
        if text.start == from {
            rows.push(last_shared.clone());
        }
        let mut position = from;
        for piece in pieces {
            let count = self.model.backend().shape(&piece).0;
            let skip = (text.start - 1).saturating_sub(position).min(count);
            if skip == 0 {
                rows.push(Arc::new(piece));
            } else if skip < count {
                rows.push(Arc::new(self.model.backend().slice(&piece, skip..count, self.width(&piece))?));
            }
            position += count;
        }
        Ok(Hidden { pieces: rows })
    }

    /// Forgets what the next text does not begin with.
    fn rewind(&mut self, ids: &[u32]) {
        let same = self.seen.iter().zip(ids).take_while(|(a, b)| a == b).count();
        self.seen.truncate(same);
        self.cache.truncate(self.model.backend(), same);
    }

    /// Runs the text from where the cache is up to `end`.
    fn forward(&mut self, ids: &[u32], end: usize) -> Result<Vec<B::Rows>> {
        let mut pieces = Vec::new();
        for chunk in ids[self.seen.len().min(end)..end].chunks(CHUNK_ROWS) {
            pieces.push(self.model.forward(&mut self.cache, chunk)?);
            self.seen.extend(chunk);
            self.computed += chunk.len() as u64;
        }
        Ok(pieces)
    }

    fn last_row(&self, rows: &B::Rows) -> std::ops::Range<usize> {
        let count = self.model.backend().shape(rows).0;
        count - 1..count
    }

    fn width(&self, rows: &B::Rows) -> std::ops::Range<usize> {
        0..self.model.backend().shape(rows).1
    }

    /// The logits after rows `from` and following, at most [`limits::LOGIT_ROWS`]: [n, V] one after the other.
    pub fn logits(&self, hidden: &Hidden<B>, from: usize) -> Result<Vec<f32>> {
        let (backend, mut from) = (self.model.backend(), from);
        for piece in &hidden.pieces {
            let (count, width) = backend.shape(piece);
            if from < count {
                let end = count.min(from + limits::LOGIT_ROWS);
                let rows = backend.slice(piece, from..end, 0..width)?;
                return backend.read(&self.model.logits(&rows)?);
            }
            from -= count;
        }
        Ok(Vec::new())
    }
}

/// How many tokens all texts begin with, of those before the first scored one of any; at least 1.
fn shared(texts: &[Encoded]) -> usize {
    let first = &texts[0];
    let with = |text: &Encoded| {
        let same = first.ids.iter().zip(&text.ids).take_while(|(a, b)| a == b).count();
        same.min(text.start)
    };
    // Texts that differ from the first token on share nothing; each then goes through from its beginning.
    texts.iter().map(with).min().unwrap_or(0).max(1)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::backend::reference::Reference;
    use crate::model::testing::Synthetic;
    use crate::score::distribution::Distribution;

    /// Σ ln p of each text with a runner of its own, without any sharing.
    fn alone(model: &Model<'_, Reference>, texts: &[Encoded]) -> Vec<f64> {
        let of = |text: &Encoded| {
            let predictions = model.teacher_forced(&text.ids, None).unwrap();
            predictions[text.start - 1..text.ids.len() - 1].iter().map(|p| p.logprob().unwrap()).sum()
        };
        texts.iter().map(of).collect()
    }

    fn together(runner: &mut Runner<'_, '_, Reference>, texts: &[Encoded]) -> Vec<f64> {
        let hidden = runner.run(texts).unwrap();
        let of = |(text, hidden): (&Encoded, &Hidden<Reference>)| {
            let (mut sum, mut at) = (0.0, text.start);
            while at < text.ids.len() {
                let logits = runner.logits(hidden, at - text.start).unwrap();
                assert!(!logits.is_empty());
                for logits in logits.chunks(40) {
                    sum += Distribution::of(logits).unwrap().logprob(text.ids[at]);
                    at += 1;
                }
            }
            assert!(runner.logits(hidden, at - text.start).unwrap().is_empty());
            sum
        };
        texts.iter().zip(&hidden).map(of).collect()
    }

    #[test]
    fn sharing_changes_nothing() {
        let backend = Reference::default();
        let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
        let text = |ids: &[u32], start| Encoded { ids: ids.to_vec(), start };
        let mut runner = Runner::new(&model).unwrap();
        let rows: [&[Encoded]; 6] = [
            // One context, choices of several lengths, one of them a single token.
            &[text(&[1, 2, 3, 4, 5], 3), text(&[1, 2, 3, 9], 3), text(&[1, 2, 3, 4, 6, 7, 8], 3)],
            // The next row begins like the one before.
            &[text(&[1, 2, 3, 11, 12], 4), text(&[1, 2, 3, 11, 13, 14], 4)],
            // A boundary inside a token: one text starts earlier.
            &[text(&[1, 2, 3, 4, 5, 6], 4), text(&[1, 2, 30, 31], 2)],
            // Other contexts, the same continuation.
            &[text(&[1, 7, 20, 21], 2), text(&[1, 8, 20, 21], 2)],
            // Nothing in common, and the same text twice.
            &[text(&[5, 6, 7], 1), text(&[6, 7, 8], 2), text(&[5, 6, 7], 1)],
            &[text(&(0..39).collect::<Vec<u32>>(), 1)],
        ];
        for texts in rows {
            assert_eq!(together(&mut runner, texts), alone(&model, texts), "{texts:?}");
        }
        // 3 shared tokens, then 1, 0 and 3.
        let mut runner = Runner::new(&model).unwrap();
        runner.run(rows[0]).unwrap();
        assert_eq!(runner.computed, 7);
    }
}
