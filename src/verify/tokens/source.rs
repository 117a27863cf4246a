//! What the model says, against what its source says.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Level, OF_SOURCE, OWN_TOKENS, Prepared, Stage, placed};
use crate::backend::Backend;
use crate::error::{Fault, FaultKind, Faults, Place, Severity};
use crate::model::Model;
use crate::part::Part;
use crate::progress::Progress;
use crate::report::VerifyAgreement;
use crate::weights::Weights;

/// A text, and what overrides `index_topk` for it.
type Text = (Vec<u32>, Option<u64>);

/// What a part says of its texts.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(in crate::verify) struct SourceShare {
    /// Whether model and source have the same weights.
    pub(in crate::verify) exact: bool,
    /// Each text with its rank.
    pub(in crate::verify) texts: Vec<(u64, TextAgreement)>,
}

/// Predictions along one text.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(in crate::verify) struct TextAgreement {
    matched: u64,
    total: u64,
    /// Differences of log-probabilities, and how many.
    difference: f64,
    counted: u64,
}

impl SourceShare {
    /// Adds the check of these texts, in the order of their ranks.
    pub(in crate::verify) fn conclude(&self, directory: &Path, stage: &mut Stage) -> Option<VerifyAgreement> {
        let mut texts = self.texts.clone();
        texts.sort_by_key(|(rank, _)| *rank);
        let add = |sum: TextAgreement, (_, text): &(u64, TextAgreement)| TextAgreement {
            matched: sum.matched + text.matched,
            total: sum.total + text.total,
            difference: sum.difference + text.difference,
            counted: sum.counted + text.counted,
        };
        let TextAgreement { matched, total, difference, counted } = texts.iter().fold(TextAgreement::default(), add);
        if total == 0 {
            stage.skip("source", "the model computes nothing that could be compared");
            return None;
        }
        let mut findings = Vec::new();
        if self.exact && matched < total {
            let kind = FaultKind::SourceTokensDiffer { matched, total };
            findings.push((0, (Severity::Error, Fault::new(Place::file(directory), kind))));
        }
        let share = 100.0 * matched as f64 / total as f64;
        let detail = format!("the source says the same after {matched} of {total} tokens ({share:.1} %)");
        stage.share("source", findings, &detail);
        let mean_abs_logprob_diff = (counted > 0).then(|| difference / counted as f64);
        Some(VerifyAgreement { matched, total, mean_abs_logprob_diff })
    }
}

impl<B: Backend> Level<'_, B> {
    /// How often model and source agree along the texts of the part: a report, not a verdict, unless their weights are the
    /// same.
    pub(super) fn source(
        &mut self,
        source: &dyn Weights,
        backend: &B,
        same_weights: bool,
        prepared: &Prepared,
        part: Part,
        progress: &dyn Progress,
    ) {
        let texts = self.texts(prepared).into_iter().enumerate();
        let texts: Vec<(u64, Source)> =
            texts.filter(|(rank, _)| part.has(*rank)).map(|(rank, text)| (rank as u64, text)).collect();
        if texts.is_empty() {
            return self.outcome.stage.elsewhere("source");
        }
        progress.file("running the source");
        let compared = Model::load_parts(source, backend, OF_SOURCE).and_then(|theirs| {
            let exact = same_weights && theirs.has_indexers() == self.model.has_indexers();
            let compared = texts.into_iter().map(|(rank, text)| Ok((rank, self.agreement(&theirs, text)?)));
            Ok(SourceShare { exact, texts: compared.collect::<Result<_, Faults>>()? })
        });
        match compared {
            Ok(share) => {
                self.outcome.agreement = share.conclude(&self.directory, &mut self.outcome.stage);
                self.outcome.source = Some(share);
            }
            Err(faults) => {
                let placed = |fault| (Severity::Error, placed(fault, &source.directory()));
                let findings = faults.into_vec().into_iter().map(placed).collect();
                self.outcome.stage.check("source", findings, "");
            }
        }
    }

    /// Predictions along a text of the references, or along one of the source's own.
    fn agreement(&self, theirs: &Model<'_, B>, text: Source) -> Result<TextAgreement, Faults> {
        let (text, index_topk) = match text {
            Source::Text(text) => text,
            Source::Prompt(mut prompt) => {
                prompt.extend(theirs.greedy(&prompt, OWN_TOKENS, None)?);
                (prompt, None)
            }
        };
        // What the model cannot compute is an error of another check already.
        let Ok(ours) = self.model.teacher_forced(&text, index_topk) else { return Ok(TextAgreement::default()) };
        let theirs = theirs.teacher_forced(&text, index_topk)?;
        let matched = ours.iter().zip(&theirs).filter(|(a, b)| a.id == b.id).count() as u64;
        let mut agreement = TextAgreement { matched, total: ours.len() as u64, ..TextAgreement::default() };
        for apart in ours.iter().zip(&theirs).filter_map(|(a, b)| Some((a.logprob()? - b.logprob()?).abs())) {
            agreement.difference += apart;
            agreement.counted += 1;
        }
        Ok(agreement)
    }

    /// The texts of the references, each once, or without any beginnings that the source continues.
    fn texts(&self, prepared: &Prepared) -> Vec<Source> {
        let mut texts: Vec<Text> = Vec::new();
        for text in prepared.references().map(|reference| (reference.full_ids.clone(), reference.index_topk)) {
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        match texts.is_empty() {
            true => self.prompts().into_iter().map(Source::Prompt).collect(),
            false => texts.into_iter().map(Source::Text).collect(),
        }
    }
}

/// Where a text comes from.
enum Source {
    Text(Text),
    /// A beginning, which the source continues.
    Prompt(Vec<u32>),
}
