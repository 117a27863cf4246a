//! What the model says, against what its source says.

use super::{Level, OWN_TOKENS, Prepared, placed};
use crate::backend::Backend;
use crate::error::{Fault, FaultKind, Faults, Place, Severity};
use crate::model::Model;
use crate::progress::Progress;
use crate::report::VerifyAgreement;
use crate::weights::Weights;

/// A text, and what overrides `index_topk` for it.
type Text = (Vec<u32>, Option<u64>);

impl<B: Backend> Level<'_, B> {
    /// How often model and source agree: a report, not a verdict, unless their weights are the same.
    pub(super) fn source(
        &mut self,
        source: &dyn Weights,
        backend: &B,
        same_weights: bool,
        prepared: &Prepared,
        progress: &dyn Progress,
    ) {
        progress.file("running the source");
        let compared = Model::load(source, backend).and_then(|theirs| {
            let exact = same_weights && theirs.has_indexers() == self.model.has_indexers();
            Ok((self.agreement(&theirs, prepared)?, exact))
        });
        let (agreement, exact) = match compared {
            Ok(compared) => compared,
            Err(faults) => {
                let placed = |fault| (Severity::Error, placed(fault, &source.directory()));
                let findings = faults.into_vec().into_iter().map(placed).collect();
                return self.outcome.stage.check("source", findings, "");
            }
        };
        let VerifyAgreement { matched, total, .. } = agreement;
        if total == 0 {
            return self.outcome.stage.skip("source", "the model computes nothing that could be compared");
        }
        let mut findings = Vec::new();
        if exact && matched < total {
            let kind = FaultKind::SourceTokensDiffer { matched, total };
            findings.push((Severity::Error, Fault::new(Place::file(&self.directory), kind)));
        }
        let share = 100.0 * matched as f64 / total as f64;
        let detail = format!("the source says the same after {matched} of {total} tokens ({share:.1} %)");
        self.outcome.stage.check("source", findings, &detail);
        self.outcome.agreement = Some(agreement);
    }

    /// Predictions along the texts of the references, or along the source's own.
    fn agreement(&self, theirs: &Model<'_, B>, prepared: &Prepared) -> Result<VerifyAgreement, Faults> {
        let mut agreement = VerifyAgreement { matched: 0, total: 0, mean_abs_logprob_diff: None };
        let (mut difference, mut counted) = (0.0, 0u64);
        for (text, index_topk) in self.texts(theirs, prepared)? {
            // What the model cannot compute is an error of another check already.
            let Ok(ours) = self.model.teacher_forced(&text, index_topk) else { continue };
            let theirs = theirs.teacher_forced(&text, index_topk)?;
            agreement.total += ours.len() as u64;
            agreement.matched += ours.iter().zip(&theirs).filter(|(a, b)| a.id == b.id).count() as u64;
            for apart in ours.iter().zip(&theirs).filter_map(|(a, b)| Some((a.logprob()? - b.logprob()?).abs())) {
                difference += apart;
                counted += 1;
            }
        }
        agreement.mean_abs_logprob_diff = (counted > 0).then(|| difference / counted as f64);
        Ok(agreement)
    }

    /// The texts, each once.
    fn texts(&self, theirs: &Model<'_, B>, prepared: &Prepared) -> Result<Vec<Text>, Faults> {
        let mut texts: Vec<Text> = Vec::new();
        for text in prepared.references().map(|reference| (reference.full_ids.clone(), reference.index_topk)) {
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        if texts.is_empty() {
            for mut prompt in self.prompts() {
                prompt.extend(theirs.greedy(&prompt, OWN_TOKENS, None)?);
                texts.push((prompt, None));
            }
        }
        Ok(texts)
    }
}
