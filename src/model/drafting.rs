//! Greedy decoding with drafts: the MTP head proposes, the model verifies several tokens at once.

use super::Model;
use super::kv_cache::KvCache;
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

impl<B: Backend> Model<'_, B> {
    /// [`Model::greedy`] with up to `drafts` tokens drafted before each verification.
    pub fn greedy_drafted(
        &self,
        prompt: &[u32],
        count: usize,
        drafts: usize,
        index_topk: Option<u64>,
    ) -> Result<Drafted> {
        let mut cache = self.cache(index_topk)?;
        let mut out = Drafted::default();
        let mut text = prompt.to_vec();
        let mut x = self.absorb_prompt(&mut cache, prompt)?;
        // The first token follows from the prompt's last row.
        text.push(self.predict(&self.last_row(&x)?, &[None])?[0].id);
        while text.len() < prompt.len() + count {
            let wanted = drafts.min(prompt.len() + count - text.len() - 1);
            let drafted = self.draft(&mut cache, &x, &text, wanted)?;
            x = self.verify(&mut cache, &mut text, &drafted)?;
            out.proposed += drafted.len();
            // A verification adds the accepted drafts and one token of the model's own.
            out.accepted += self.backend.shape(&x).0 - 1;
        }
        out.ids = text.split_off(prompt.len());
        out.ids.truncate(count);
        Ok(out)
    }

    /// Runs a prompt through all layers and, but for its last piece, through the MTP layer: the rows of that piece.
    fn absorb_prompt(&self, cache: &mut KvCache<B>, prompt: &[u32]) -> Result<B::Rows> {
        let mut x = None;
        for chunk in self.chunks(prompt)? {
            if let Some(x) = &x {
                self.catch_up(cache, x, prompt)?;
            }
            x = Some(self.forward(cache, chunk)?);
        }
        Ok(x.expect("chunks are not empty"))
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

    /// Runs the text's last token and the drafts through the layers, adds to the text the drafts that the model would have
    /// chosen too and the token it chooses after them, and forgets the others: the rows of what stays.
    fn verify(&self, cache: &mut KvCache<B>, text: &mut Vec<u32>, drafted: &[u32]) -> Result<B::Rows> {
        let before = cache.len();
        let tokens: Vec<u32> = text.last().into_iter().chain(drafted).copied().collect();
        let x = self.forward(cache, &tokens)?;
        let predictions = self.predict(&x, &vec![None; tokens.len()])?;
        let accepted = drafted.iter().zip(&predictions).take_while(|(draft, own)| **draft == own.id).count();
        text.extend(predictions[..=accepted].iter().map(|own| own.id));
        cache.truncate(self.backend, before + 1 + accepted);
        self.backend.slice(&x, 0..accepted + 1, 0..self.backend.shape(&x).1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::testing::Synthetic;
    use super::*;
    use crate::backend::reference::Reference;

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
    }
}
