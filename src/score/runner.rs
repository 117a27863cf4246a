//! Runs a model, and a baseline beside it, along the continuations of many rows at once.

use rayon::prelude::*;

use super::encode::Encoded;
use super::plan::{Ask, Piece, Plan, keepable};
use crate::backend::Backend;
use crate::error::Result;
use crate::limits;
use crate::model::Model;
use crate::model::kv_cache::KvCache;

/// A model, and perhaps another one beside it, with the caches of the text that both saw last.
pub struct Runner<'m, 'b, B: Backend> {
    own: Side<'m, 'b, B>,
    theirs: Option<Side<'m, 'b, B>>,
    /// The text that the caches hold from their first row on.
    held: Vec<u32>,
    /// Tokens that go through the layers together.
    rows: usize,
    /// Tokens that went through the layers.
    pub computed: u64,
}

struct Side<'m, 'b, B: Backend> {
    model: &'m Model<'b, B>,
    cache: KvCache<B>,
}

impl<'m, 'b, B: Backend> Side<'m, 'b, B> {
    fn new(model: &'m Model<'b, B>) -> Result<Self> {
        Ok(Side { model, cache: model.cache(None)? })
    }

    fn truncate(&mut self, rows: usize) {
        self.cache.truncate(self.model.backend(), rows);
    }

    /// The rows of the residual stream after which something is asked.
    fn forward(&mut self, piece: &Piece<'_>, asked: &[usize]) -> Result<B::Rows> {
        let x = self.model.forward_at(&mut self.cache, piece.ids, &piece.places)?;
        self.model.backend().take(&x, asked)
    }

    /// Logits after some rows [n, V], one row after the other.
    fn logits(&self, x: &B::Rows, rows: std::ops::Range<usize>) -> Result<Vec<f32>> {
        let backend = self.model.backend();
        let rows = backend.slice(x, rows, 0..backend.shape(x).1)?;
        backend.read(&self.model.logits(&rows)?)
    }
}

impl<'m, 'b, B: Backend> Runner<'m, 'b, B> {
    /// Models that have seen nothing, and take so many tokens at a time: it changes no answer.
    pub fn new(model: &'m Model<'b, B>, theirs: Option<&'m Model<'b, B>>, rows: usize) -> Result<Self> {
        let theirs = theirs.map(Side::new).transpose()?;
        Ok(Runner { own: Side::new(model)?, theirs, held: Vec::new(), rows, computed: 0 })
    }

    /// The model.
    pub fn model(&self) -> &'m Model<'b, B> {
        self.own.model
    }

    /// Runs texts. `look` is called for every token after which something is asked, with the logits `[V]` of the model and
    /// of the other one, and answers each question: the answers of each text, in the order of its scored tokens.
    pub fn run<T: Send>(
        &mut self,
        texts: &[Encoded],
        look: impl Fn(&[Ask], &[f32], Option<&[f32]>) -> Vec<T> + Sync,
    ) -> Result<Vec<Vec<T>>> {
        self.held.truncate(keepable(&self.held, texts));
        let plan = Plan::new(&self.held, texts);
        self.truncate(self.held.len());
        let mut answers: Vec<Vec<Option<T>>> =
            texts.iter().map(|text| std::iter::repeat_with(|| None).take(text.tokens()).collect()).collect();
        for piece in plan.pieces(self.rows) {
            let answered = self.piece(&piece, &look);
            // A cache that has not all of the plan holds no text.
            if answered.is_err() {
                self.held.clear();
            }
            for (ask, answer) in answered? {
                answers[ask.text][ask.at] = Some(answer);
            }
            self.computed += piece.ids.len() as u64;
        }
        self.held = plan.held(&self.held);
        let whole =
            |answers: Vec<Option<T>>| answers.into_iter().map(|answer| answer.expect("all was asked")).collect();
        Ok(answers.into_iter().map(whole).collect())
    }

    fn truncate(&mut self, rows: usize) {
        self.own.truncate(rows);
        if let Some(theirs) = &mut self.theirs {
            theirs.truncate(rows);
        }
    }

    fn piece<T: Send>(
        &mut self,
        piece: &Piece<'_>,
        look: &(impl Fn(&[Ask], &[f32], Option<&[f32]>) -> Vec<T> + Sync),
    ) -> Result<Vec<(Ask, T)>> {
        let asked: Vec<usize> = (0..piece.ids.len()).filter(|&row| !piece.asks[row].is_empty()).collect();
        let own = self.own.forward(piece, &asked)?;
        let theirs = self.theirs.as_mut().map(|theirs| theirs.forward(piece, &asked)).transpose()?;
        let vocab_size = self.own.model.config().vocab_size as usize;
        let mut answers = Vec::new();
        for first in (0..asked.len()).step_by(limits::LOGIT_ROWS) {
            let rows = first..asked.len().min(first + limits::LOGIT_ROWS);
            let own = self.own.logits(&own, rows.clone())?;
            let theirs = match (&self.theirs, &theirs) {
                (Some(side), Some(x)) => side.logits(x, rows.clone())?,
                _ => Vec::new(),
            };
            let of_row = |(row, &asked): (usize, &usize)| {
                let logits = |all: &[f32]| row * vocab_size..all.len().min((row + 1) * vocab_size);
                let theirs = (!theirs.is_empty()).then(|| &theirs[logits(&theirs)]);
                let asks = &piece.asks[asked];
                asks.iter().copied().zip(look(asks, &own[logits(&own)], theirs)).collect::<Vec<_>>()
            };
            let found: Vec<Vec<(Ask, T)>> =
                asked[rows].par_iter().enumerate().map(|(row, asked)| of_row((row, asked))).collect();
            answers.extend(found.into_iter().flatten());
        }
        Ok(answers)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::backend::cpu::Cpu;
    use crate::backend::reference::Reference;
    use crate::model::testing::Synthetic;
    use crate::score::distribution::Distribution;

    fn text(ids: &[u32], start: usize) -> Encoded {
        Encoded { ids: ids.to_vec(), start }
    }

    /// ln p of each scored token, each text by itself.
    fn alone<B: Backend>(model: &Model<'_, B>, texts: &[Encoded]) -> Vec<Vec<f64>> {
        let of = |text: &Encoded| {
            let predictions = model.teacher_forced(&text.ids, None).unwrap();
            predictions[text.start - 1..text.ids.len() - 1].iter().map(|p| p.logprob().unwrap()).collect()
        };
        texts.iter().map(of).collect()
    }

    fn together<B: Backend>(runner: &mut Runner<'_, '_, B>, texts: &[Encoded]) -> Vec<Vec<f64>> {
        let look = |asks: &[Ask], logits: &[f32], _: Option<&[f32]>| {
            let distribution = Distribution::of(logits).unwrap();
            asks.iter().map(|ask| distribution.logprob(ask.id)).collect()
        };
        runner.run(texts, look).unwrap()
    }

    #[test]
    fn sharing_changes_nothing() {
        let backend = Reference::default();
        let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
        let mut runner = Runner::new(&model, None, 512).unwrap();
        let batches: [&[Encoded]; 6] = [
            // One context, choices of several lengths, one of them a single token.
            &[text(&[1, 2, 3, 4, 5], 3), text(&[1, 2, 3, 9], 3), text(&[1, 2, 3, 4, 6, 7, 8], 3)],
            // What comes next begins like what came before.
            &[text(&[1, 2, 3, 11, 12], 4), text(&[1, 2, 3, 11, 13, 14], 4)],
            // A boundary inside a token: one text starts earlier.
            &[text(&[1, 2, 3, 4, 5, 6], 4), text(&[1, 2, 30, 31], 2)],
            // Other contexts, the same continuation.
            &[text(&[1, 7, 20, 21], 2), text(&[1, 8, 20, 21], 2)],
            // Nothing in common, and the same text twice.
            &[text(&[5, 6, 7], 1), text(&[6, 7, 8], 2), text(&[5, 6, 7], 1)],
            &[text(&(0..39).collect::<Vec<u32>>(), 1)],
        ];
        for texts in batches {
            assert_eq!(together(&mut runner, texts), alone(&model, texts), "{texts:?}");
        }
        // 4 tokens of the first text, none of the second, 2 of the third.
        let mut runner = Runner::new(&model, None, 512).unwrap();
        together(&mut runner, batches[0]);
        assert_eq!(runner.computed, 6);
        // The first three are there; 11 for both, 13 for one.
        together(&mut runner, batches[1]);
        assert_eq!(runner.computed, 8);
    }

    #[test]
    fn two_models_see_the_same_texts() {
        let backend = Reference::default();
        let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
        let bare = Synthetic::new(json!({})).only(|name| !name.contains("indexer"));
        let other = Model::load(&bare, &backend).unwrap();
        let texts = [text(&(0..12).collect::<Vec<u32>>(), 3), text(&[0, 1, 2, 3, 4, 5, 6, 30, 31], 2)];
        let mut runner = Runner::new(&model, Some(&other), 512).unwrap();
        let look = |asks: &[Ask], own: &[f32], theirs: Option<&[f32]>| {
            let [own, theirs] = [own, theirs.unwrap()].map(|logits| Distribution::of(logits).unwrap());
            asks.iter().map(|ask| (own.logprob(ask.id), theirs.logprob(ask.id))).collect()
        };
        let both = runner.run(&texts, look).unwrap();
        let side = |of: fn(&(f64, f64)) -> f64| -> Vec<Vec<f64>> {
            both.iter().map(|answers| answers.iter().map(of).collect()).collect()
        };
        assert_eq!((side(|pair| pair.0), side(|pair| pair.1)), (alone(&model, &texts), alone(&other, &texts)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn any_batches_say_the_same(
            // Few tokens, so that texts have much in common.
            texts in proptest::collection::vec((proptest::collection::vec(0u32..3, 2..14), 0usize..14), 1..12),
            (cut, rows) in (1usize..12, 1usize..20),
        ) {
            let backend = Cpu::default();
            let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
            let texts: Vec<Encoded> = texts.iter().map(|(ids, start)| text(ids, 1 + start % (ids.len() - 1))).collect();
            let mut runner = Runner::new(&model, None, rows).unwrap();
            let expected = alone(&model, &texts);
            let in_batches: Vec<Vec<f64>> = texts.chunks(cut).flat_map(|texts| together(&mut runner, texts)).collect();
            prop_assert_eq!(in_batches, expected);
        }
    }
}
