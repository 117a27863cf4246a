//! Decoding with drafts: the MTP head proposes, the model verifies several tokens at once.
//!
//! A draft stays if it is the token that the model itself would have chosen there. As a choice depends on the text before
//! it and on its number alone ([`Sampler`]), drafts change no token, be it the best one or one drawn at random.

use super::kv_cache::KvCache;
use super::sampler::Sampler;
use super::{CHUNK_ROWS, Model};
use crate::backend::Backend;
use crate::error::Result;

/// Tokens that were found with drafts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Drafted {
    /// The tokens, the same as without drafts.
    pub ids: Vec<u32>,
    /// Drafts that were verified.
    pub proposed: usize,
    /// Drafts that were right.
    pub accepted: usize,
}

/// A text that is being continued.
pub struct Decoding<'m, 'b, B: Backend> {
    model: &'m Model<'b, B>,
    cache: KvCache<B>,
    sampler: Sampler,
    /// Most drafts before each verification; with 0 the MTP head is not used.
    drafts: usize,
    /// Tokens of the prompt; at least one.
    prompt: usize,
    /// The prompt and what follows it.
    text: Vec<u32>,
    /// The rows that the MTP layer has not seen [n, d]; the last one is that of the last token in the cache.
    x: Option<B::Rows>,
    /// Drafts that were verified.
    pub proposed: usize,
    /// Drafts that were right.
    pub accepted: usize,
}

impl<'m, 'b, B: Backend> Decoding<'m, 'b, B> {
    /// A prompt, of which nothing has gone through the layers yet. Without an MTP head `drafts` must be 0.
    pub fn new(
        model: &'m Model<'b, B>,
        prompt: &[u32],
        sampler: Sampler,
        drafts: usize,
        index_topk: Option<u64>,
    ) -> Result<Self> {
        model.check_ids(prompt)?;
        if drafts > 0 {
            model.mtp()?;
        }
        let (cache, text) = (model.cache(index_topk)?, prompt.to_vec());
        Ok(Decoding { model, cache, sampler, drafts, prompt: prompt.len(), text, x: None, proposed: 0, accepted: 0 })
    }

    /// Runs the next piece of the prompt through the layers; whether there was one left.
    pub fn absorb_prompt(&mut self) -> Result<bool> {
        let begin = self.cache.len().min(self.prompt);
        let end = self.prompt.min(begin + CHUNK_ROWS);
        if begin == end {
            return Ok(false);
        }
        if let Some(x) = self.x.as_ref().filter(|_| self.drafts > 0) {
            self.model.catch_up(&mut self.cache, x, &self.text)?;
        }
        self.x = Some(self.model.forward(&mut self.cache, &self.text[begin..end])?);
        Ok(true)
    }

    /// The next tokens: at least one, at most as many as were drafted and one more, and at most `most`, which is above 0.
    pub fn step(&mut self, most: usize) -> Result<&[u32]> {
        while self.absorb_prompt()? {}
        let (model, before) = (self.model, self.text.len());
        let x = self.x.as_ref().expect("the prompt went through");
        if before == self.prompt {
            // The first token follows from the prompt's last row.
            self.text.extend(self.sampler.choose(model, &model.last_row(x)?, 0)?);
            return Ok(&self.text[before..]);
        }
        let drafted = match self.drafts {
            0 => Vec::new(),
            drafts => model.draft(&mut self.cache, x, &self.text, drafts.min(most - 1))?,
        };
        self.x = Some(self.verify(&drafted)?);
        Ok(&self.text[before..])
    }

    /// The tokens that follow the prompt.
    pub fn generated(&self) -> &[u32] {
        &self.text[self.prompt..]
    }

    /// Runs the text's last token and the drafts through the layers, adds to the text the drafts that the model would have
    /// chosen too and the token it chooses after them, and forgets the others: the rows of what stays.
    fn verify(&mut self, drafted: &[u32]) -> Result<B::Rows> {
        let (model, before) = (self.model, self.cache.len());
        let tokens: Vec<u32> = self.text.last().into_iter().chain(drafted).copied().collect();
        let x = model.forward(&mut self.cache, &tokens)?;
        let own = self.sampler.choose(model, &x, self.generated().len())?;
        let accepted = drafted.iter().zip(&own).take_while(|(draft, own)| draft == own).count();
        self.text.extend(&own[..=accepted]);
        self.cache.truncate(model.backend, before + 1 + accepted);
        self.proposed += drafted.len();
        self.accepted += accepted;
        model.backend.slice(&x, 0..accepted + 1, 0..model.backend.shape(&x).1)
    }
}

impl<B: Backend> Model<'_, B> {
    /// [`Model::greedy`] with up to `drafts` tokens drafted before each verification.
    pub fn greedy_drafted(
        &self,
        prompt: &[u32],
        count: usize,
        drafts: usize,
        index_topk: Option<u64>,
    ) -> Result<Drafted> {
        let mut decoding = Decoding::new(self, prompt, Sampler::Greedy, drafts, index_topk)?;
        while decoding.generated().len() < count {
            decoding.step(count - decoding.generated().len())?;
        }
        let (ids, proposed, accepted) = (decoding.generated().to_vec(), decoding.proposed, decoding.accepted);
        Ok(Drafted { ids, proposed, accepted })
    }

    /// Runs the MTP layer at the positions it has not seen, whose rows are x [n, d]; `text` is at least one token longer
    /// than the hidden layers have seen → [n, d].
    fn catch_up(&self, cache: &mut KvCache<B>, x: &B::Rows, text: &[u32]) -> Result<B::Rows> {
        let next = &text[cache.mtp_len(self.backend) + 1..=cache.len()];
        self.absorb(cache, x, next)
    }

    /// Up to `count` tokens that may follow the text, of which the last token has not gone through the layers yet. `x` are
    /// the rows that the MTP layer has not seen.
    fn draft(&self, cache: &mut KvCache<B>, x: &B::Rows, text: &[u32], count: usize) -> Result<Vec<u32>> {
        let mut drafted = Vec::with_capacity(count);
        let caught_up = self.catch_up(cache, x, text)?;
        let mut x = self.last_row(&caught_up)?;
        while drafted.len() < count {
            if let Some(&previous) = drafted.last() {
                x = self.chain(cache, &x, &[previous])?;
            }
            drafted.push(self.predict_drafts(&x, &[None])?[0].id);
        }
        // What was absorbed on the way of drafts may turn out wrong.
        cache.truncate_mtp(self.backend, cache.len());
        Ok(drafted)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::sampler::Sampling;
    use super::super::testing::Synthetic;
    use super::*;
    use crate::backend::reference::Reference;

    /// Tokens of a drawn text.
    const COUNT: usize = 10;

    /// Tokens drawn one after the other, each from all logits after the whole text so far, without a cache.
    fn one_by_one(model: &Model<'_, Reference>, prompt: &[u32], sampling: Sampling, topk: u64) -> Vec<u32> {
        let mut text = prompt.to_vec();
        for number in 0..COUNT {
            let x = model.forward(&mut model.cache(Some(topk)).unwrap(), &text).unwrap();
            let logits = model.backend.read(&model.logits(&model.last_row(&x).unwrap()).unwrap()).unwrap();
            text.push(sampling.draw(&logits, number as u64).unwrap());
        }
        text.split_off(prompt.len())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn drafting_changes_no_token(
            prompt in proptest::collection::vec(0u32..40, 1..8), count in 0usize..12, drafts in 0usize..5, topk in 1u64..12,
        ) {
            let backend = Reference::default();
            let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
            let plain = model.greedy(&prompt, count, Some(topk)).unwrap();
            let drafted = model.greedy_drafted(&prompt, count, drafts, Some(topk)).unwrap();
            prop_assert_eq!(drafted.ids, plain);
            prop_assert!(drafted.accepted <= drafted.proposed);
        }

        #[test]
        fn drafting_changes_no_drawn_token(
            prompt in proptest::collection::vec(0u32..40, 1..8), seed in any::<u64>(), topk in 1u64..12,
            temperature in 0.05f64..3.0, top_p in 0.1f64..=1.0,
        ) {
            let backend = Reference::default();
            let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
            let sampling = Sampling { temperature, top_p, seed };
            let plain = one_by_one(&model, &prompt, sampling, topk);
            for drafts in 0..5 {
                let sampler = Sampler::Drawn(sampling);
                let mut decoding = Decoding::new(&model, &prompt, sampler, drafts, Some(topk)).unwrap();
                while decoding.generated().len() < COUNT {
                    let left = COUNT - decoding.generated().len();
                    prop_assert!((1..=left.min(drafts + 1)).contains(&decoding.step(left).unwrap().len()));
                }
                prop_assert_eq!(decoding.generated(), &plain);
            }
        }
    }
}
