//! Level tokens: what the model computes, against references and against its source.
//!
//! Without a reference the model is run along a text of its own. As long as the cpu backend is the plain one there is
//! nothing independent to compare that with, and the report says so.

mod entry;
mod prepare;
mod source;

use std::path::{Path, PathBuf};

use super::{Stage, counted};
use crate::backend::reference::Reference as Plain;
use crate::backend::{Backend, Device};
use crate::error::{Fault, FaultKind, Faults, Place, Result, Severity};
use crate::io::write_whole;
use crate::model::Model;
use crate::model::tokenizer::Tokenizer;
use crate::progress::Progress;
use crate::reference::{Agreement, Recording, Reference, ReferenceFile, accepted_drafts, compare, fingerprint, record};
use crate::report::{VerifyAgreement, VerifyTokens};
use crate::weights::Weights;

pub(super) use prepare::{Prepared, prepare};

/// Tokens that follow a prompt in references that are written.
const RECORDED_TOKENS: usize = 48;
/// Tokens that follow a prompt where no reference is given.
const OWN_TOKENS: usize = 16;
/// Beginnings of the model's own texts.
const PROMPTS: [&str; 3] = ["[gMASK]<sop>The", "[gMASK]<sop>In the beginning", "[gMASK]<sop>a kind of"];

/// What of the token level a user chooses.
#[derive(Debug, Clone, Default)]
pub struct TokenOptions {
    /// Reference files.
    pub references: Vec<PathBuf>,
    /// Devices that compute; none means the CPU.
    pub devices: Vec<Device>,
    /// Where to write references of this model.
    pub write_reference: Option<PathBuf>,
    /// Memory for the model, in bytes; by default what is available.
    pub memory: Option<u64>,
}

/// The model that is run.
pub(super) struct Subject<'a> {
    pub(super) weights: &'a dyn Weights,
    /// What it was made from.
    pub(super) source: Option<&'a dyn Weights>,
    /// Whether it holds the source's values themselves, not quantized ones.
    pub(super) same_weights: bool,
    /// Whether the levels below found nothing wrong.
    pub(super) good: bool,
}

/// What the level found, for the report.
#[derive(Default)]
pub(super) struct Outcome {
    pub(super) stage: Stage,
    pub(super) tokens: Vec<VerifyTokens>,
    pub(super) agreement: Option<VerifyAgreement>,
}

impl Outcome {
    /// Nothing can be computed.
    pub(super) fn skip(&mut self, why: &str, options: &TokenOptions) {
        self.stage.skip("tokens", why);
        if options.write_reference.is_some() {
            self.stage.skip("written", why);
        }
    }
}

/// Runs a model.
pub(super) fn run(
    subject: &Subject<'_>,
    mut prepared: Prepared,
    options: &TokenOptions,
    progress: &dyn Progress,
) -> Result<Outcome, Faults> {
    let backend = Plain::default();
    progress.file("loading the model");
    let model = match Model::load(subject.weights, &backend) {
        Ok(model) => model,
        Err(faults) => {
            let mut outcome = Outcome::default();
            let findings = faults.into_vec().into_iter().map(|fault| (Severity::Error, fault)).collect();
            outcome.stage.check("forward", findings, "");
            outcome.skip("the model does not load", options);
            return Ok(outcome);
        }
    };
    let directory = subject.weights.directory();
    let mut level = Level { model: &model, directory, options, outcome: Outcome::default() };
    level.forward(progress);
    level.references(&mut prepared, progress);
    if let Some(source) = subject.source {
        level.source(source, subject.same_weights, &prepared, progress);
    }
    match &options.write_reference {
        Some(path) if subject.good => level.write(path, &prepared)?,
        Some(_) => level.outcome.stage.skip("written", "the checks above failed: nobody should rely on this model"),
        None => {}
    }
    Ok(level.outcome)
}

struct Level<'a, B: Backend> {
    model: &'a Model<'a, B>,
    directory: PathBuf,
    options: &'a TokenOptions,
    outcome: Outcome,
}

impl<B: Backend> Level<'_, B> {
    /// The devices that were asked for.
    fn devices(&self) -> Vec<Device> {
        if self.options.devices.is_empty() { vec![Device::Cpu] } else { self.options.devices.clone() }
    }

    /// Whether the model says anything: finite logits along a text of its own, and drafts that are of some use.
    fn forward(&mut self, progress: &dyn Progress) {
        progress.file("running the model");
        let recording = Recording { tokens: OWN_TOKENS, drafts: self.model.has_mtp(), ..Recording::default() };
        let own = match record(self.model, &self.prompts()[0], &recording) {
            Ok(own) => own,
            Err(fault) => {
                let found = (Severity::Error, placed(fault, &self.directory));
                return self.outcome.stage.check("forward", vec![found], "");
            }
        };
        let (backend, devices) = (self.model.backend().name(), self.devices());
        let why = if devices.contains(&Device::Cpu) { " (there are no CPU kernels yet)" } else { "" };
        let once = if devices.len() > 1 { ", once for all devices" } else { "" };
        let mut looked_at = format!("{OWN_TOKENS} tokens on the {backend} backend{why}{once}; all logits finite");
        let mut findings = Vec::new();
        if let Some(drafts) = &own.draft_pred {
            let (accepted, proposed) = accepted_drafts(&own, drafts);
            looked_at += &format!("; {accepted} of {proposed} drafts accepted");
            if accepted == 0 {
                let kind = FaultKind::NoDraftAccepted { proposed };
                findings.push((Severity::Warning, Fault::new(Place::file(&self.directory), kind)));
            }
        }
        self.outcome.stage.check("forward", findings, &looked_at);
    }

    /// Beginnings of texts: those that the tokenizer makes of [`PROMPTS`], or some ids without a tokenizer.
    fn prompts(&self) -> Vec<Vec<u32>> {
        let vocab_size = self.model.config().vocab_size;
        let tokenizer = Tokenizer::load(&self.directory).ok();
        let encode = |text: &&str| tokenizer.as_ref()?.encode(text).ok().filter(|ids| !ids.is_empty());
        let known = |ids: &Vec<u32>| ids.iter().all(|&id| u64::from(id) < vocab_size);
        let prompts: Vec<Vec<u32>> = PROMPTS.iter().filter_map(encode).filter(known).collect();
        if prompts.len() == PROMPTS.len() {
            return prompts;
        }
        (1..=3u64).map(|n| (0..8).map(|i| (n * (i * i + 7 * i + 1) % vocab_size) as u32).collect()).collect()
    }

    /// Every reference on every device. So far all devices are one backend, so each reference is computed once.
    fn references(&mut self, prepared: &mut Prepared, progress: &dyn Progress) {
        if prepared.files.is_empty() {
            let why = "no --reference, and the cpu backend is the reference backend: nothing to compare with";
            return self.outcome.stage.skip("tokens", why);
        }
        let devices = self.devices();
        let mut findings = std::mem::take(&mut prepared.warnings);
        let mut total = Agreement::default();
        for (path, file) in &prepared.files {
            progress.file(&path.to_string_lossy());
            let mut dense = None;
            for (number, reference) in file.references.iter().enumerate() {
                let (agreement, fault) = self.compare(reference);
                findings.extend(fault.map(|fault| (Severity::Error, placed(fault, path))));
                findings.extend(entry::disagreements(&agreement, path, number));
                dense = dense.or_else(|| self.dense(reference, number));
                for &device in &devices {
                    self.outcome.tokens.push(entry::entry(path, number, device, self.model.backend(), &agreement));
                }
                total = total.and(&agreement);
            }
            findings.extend(dense.map(|kind| (Severity::Warning, Fault::new(Place::file(path), kind))));
        }
        self.outcome.stage.check("tokens", findings, &entry::summary(&total));
    }

    /// How far the model agrees with a reference, and why it cannot be compared where it cannot.
    fn compare(&self, reference: &Reference) -> (Agreement, Option<Fault>) {
        let headless = reference.draft_pred.is_some() && !self.model.has_mtp();
        let compared = match headless {
            true => compare(self.model, &Reference { draft_pred: None, ..reference.clone() }),
            false => compare(self.model, reference),
        };
        match compared {
            Ok(agreement) => (agreement, headless.then(|| Fault::new(Place::default(), FaultKind::NoMtpHead))),
            Err(fault) => (Agreement::default(), Some(fault)),
        }
    }

    /// Whether a reference wants sparse attention of a model that has none.
    fn dense(&self, reference: &Reference, number: usize) -> Option<FaultKind> {
        let index_topk = reference.index_topk.unwrap_or(self.model.config().index_topk);
        let tokens = reference.full_ids.len();
        let sparse = (tokens as u64) > index_topk && !self.model.has_indexers();
        sparse.then_some(FaultKind::NoIndexer { reference: number, tokens, index_topk })
    }

    /// Writes references of this model: to the prompts of the given ones, or to a few of its own.
    fn write(&mut self, path: &Path, prepared: &Prepared) -> Result<(), Faults> {
        let fingerprint = fingerprint(&self.directory, self.model.config())?;
        let prompts: Vec<(Vec<u32>, Option<u64>)> = match prepared.files.is_empty() {
            true => self.prompts().into_iter().map(|prompt| (prompt, None)).collect(),
            false => prepared.references().map(|r| (r.prompt_ids.clone(), r.index_topk)).collect(),
        };
        let recorded = prompts.iter().map(|(prompt, index_topk)| {
            let recording = Recording {
                tokens: RECORDED_TOKENS,
                index_topk: *index_topk,
                drafts: self.model.has_mtp(),
                fingerprint: Some(fingerprint.clone()),
            };
            record(self.model, prompt, &recording)
        });
        match recorded.collect::<Result<Vec<Reference>>>() {
            Ok(references) => {
                let detail = format!("{} to {}", counted(references.len(), "reference"), path.to_string_lossy());
                write_whole(path, ReferenceFile { references }.to_text().as_bytes(), false)?;
                self.outcome.stage.check("written", Vec::new(), &detail);
            }
            Err(fault) => {
                let found = (Severity::Error, placed(fault, &self.directory));
                self.outcome.stage.check("written", vec![found], "");
            }
        }
        Ok(())
    }
}

/// A fault of a computation, which knows no file, at the file that it is about.
fn placed(fault: Fault, path: &Path) -> Fault {
    let place = if fault.place == Place::default() { Place::file(path) } else { fault.place };
    Fault { place, kind: fault.kind }
}
