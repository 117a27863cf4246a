//! Level tokens: what the model computes, against references and against its source.
//!
//! Without a reference the model is run along texts of its own. As long as the cpu backend is the plain one there is
//! nothing independent to compare that with, and the report says so.

use std::path::{Path, PathBuf};

use super::{Stage, counted};
use crate::backend::reference::Reference as Plain;
use crate::backend::{Backend, Device, Mode};
use crate::config::Config;
use crate::container::reader::Found;
use crate::error::{Fault, FaultKind, Faults, Place, Result, Severity};
use crate::io::{available_bytes, write_whole};
use crate::model::Model;
use crate::model::tokenizer::Tokenizer;
use crate::progress::Progress;
use crate::reference::{
    Agreement, Fingerprint, Matches, Recording, Reference, ReferenceFile, compare, fingerprint, record,
};
use crate::report::{VerifyAgreement, VerifyDrafts, VerifyGreedy, VerifyTeacherForced, VerifyTokens};
use crate::roles::Census;
use crate::weights::Weights;

/// Largest difference of a log-probability in exact mode; other implementations in f32 stay below a tenth of it.
const LOGPROB_TOLERANCE: f64 = 1e-3;
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

/// References that were read, with their files.
pub(super) struct Prepared {
    files: Vec<(PathBuf, ReferenceFile)>,
    warnings: Vec<Found>,
}

/// Reads the references and refuses what can be refused before anything long begins: another model's references, and a
/// model that does not fit into memory.
pub(super) fn prepare(directory: &Path, options: &TokenOptions) -> Result<Prepared, Faults> {
    let mut prepared = Prepared { files: Vec::new(), warnings: Vec::new() };
    for path in &options.references {
        prepared.files.push((path.clone(), ReferenceFile::read(path)?));
    }
    // A config that cannot be read is a finding of the structure, which ends before the tokens.
    let Ok(config) = Config::read(directory) else { return Ok(prepared) };
    fits(directory, &config, options.memory)?;
    let own = match prepared.files.is_empty() {
        true => String::new(),
        false => fingerprint(directory, &config)?,
    };
    for (path, file) in &prepared.files {
        let mut anonymous = None;
        for (number, reference) in file.references.iter().enumerate() {
            if reference.check_fingerprint(&own, path, number)? == Fingerprint::Absent {
                anonymous = anonymous.or(Some(number));
            }
            if let Some(&id) = reference.full_ids.iter().find(|&&id| u64::from(id) >= config.vocab_size) {
                let kind = FaultKind::TokenId { id: id.into(), vocab_size: config.vocab_size };
                return Err(Fault::new(Place::file(path), kind).into());
            }
        }
        let fault = |reference| Fault::new(Place::file(path), FaultKind::ReferenceAnonymous { reference });
        prepared.warnings.extend(anonymous.map(|number| (Severity::Warning, fault(number))));
    }
    Ok(prepared)
}

/// The plain backend keeps every weight as f32.
fn fits(directory: &Path, config: &Config, memory: Option<u64>) -> Result<()> {
    let census = Census::of(config);
    let needed = census.iter().filter(|(_, role)| !role.optional).filter_map(|(_, role)| role.shape.elements());
    let needed = needed.fold(0u64, |sum, elements| sum.saturating_add(elements.saturating_mul(4)));
    match memory.or_else(available_bytes) {
        Some(available) if needed > available => {
            Err(Fault::new(Place::file(directory), FaultKind::ModelTooLarge { needed, available }))
        }
        _ => Ok(()),
    }
}

/// What the level found, for the report.
#[derive(Default)]
pub(super) struct Outcome {
    pub(super) stage: Stage,
    pub(super) tokens: Vec<VerifyTokens>,
    pub(super) agreement: Option<VerifyAgreement>,
}

/// Runs a model.
pub(super) fn run(
    weights: &dyn Weights,
    source: Option<&dyn Weights>,
    mut prepared: Prepared,
    options: &TokenOptions,
    progress: &dyn Progress,
) -> Result<Outcome, Faults> {
    let backend = Plain::default();
    progress.file("loading the model");
    let model = match Model::load(weights, &backend) {
        Ok(model) => model,
        Err(faults) => {
            let mut outcome = Outcome::default();
            let findings = faults.into_vec().into_iter().map(|fault| (Severity::Error, fault)).collect();
            outcome.stage.check("forward", findings, "");
            return Ok(outcome);
        }
    };
    let mut level = Level { model: &model, directory: weights.directory(), options, outcome: Outcome::default() };
    level.forward(progress);
    level.references(&mut prepared, progress);
    if let Some(source) = source {
        level.source(source, &prepared, progress)?;
    }
    if let Some(path) = &options.write_reference {
        level.write(path, &prepared)?;
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

    fn name(&self, device: Device) -> String {
        match device {
            Device::Cpu => "cpu (the reference backend: there are no CPU kernels yet)".to_owned(),
            Device::Reference => "reference".to_owned(),
        }
    }

    /// Whether the model says anything: finite logits along its own texts.
    fn forward(&mut self, progress: &dyn Progress) {
        progress.file("running the model");
        let prompt = &self.prompts()[0];
        let findings = match self.model.greedy(prompt, OWN_TOKENS, None) {
            Ok(_) => Vec::new(),
            Err(fault) => vec![(Severity::Error, placed(fault, &self.directory))],
        };
        self.outcome.stage.check("forward", findings, &format!("{OWN_TOKENS} tokens, all logits finite"));
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

    fn references(&mut self, prepared: &mut Prepared, progress: &dyn Progress) {
        if prepared.files.is_empty() {
            let why = "no --reference, and the cpu backend is the reference backend: nothing to compare with";
            return self.outcome.stage.skip("tokens", why);
        }
        let mut findings = std::mem::take(&mut prepared.warnings);
        let mut total = Agreement::default();
        for (path, file) in &prepared.files {
            progress.file(&path.to_string_lossy());
            for (number, reference) in file.references.iter().enumerate() {
                let name = format!("{}[{number}]", path.to_string_lossy());
                // Devices that are the same backend say the same.
                let agreement = match compare(self.model, reference) {
                    Ok(agreement) => agreement,
                    Err(fault) => {
                        findings.push((Severity::Error, placed(fault, path)));
                        continue;
                    }
                };
                findings.extend(disagreements(&agreement, path, number));
                total = total.and(&agreement);
                for device in self.devices() {
                    let device = self.name(device);
                    self.outcome.tokens.push(entry(name.clone(), device, self.model.backend().mode(), &agreement));
                }
            }
        }
        self.outcome.stage.check("tokens", findings, &summary(&total));
    }

    /// How often container and source agree: a report, not a verdict, since their weights are not the same.
    fn source(&mut self, source: &dyn Weights, prepared: &Prepared, progress: &dyn Progress) -> Result<(), Faults> {
        progress.file("running the source");
        let backend = Plain::default();
        let theirs = Model::load(source, &backend)?;
        let references = prepared.files.iter().flat_map(|(_, file)| &file.references);
        let mut texts: Vec<(Vec<u32>, Option<u64>)> = Vec::new();
        for text in references.map(|reference| (reference.full_ids.clone(), reference.index_topk)) {
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
        let (mut matched, mut total, mut difference, mut counted) = (0, 0, 0.0, 0u64);
        for (text, index_topk) in &texts {
            // What the model cannot compute is an error of another check already.
            let Ok(ours) = self.model.teacher_forced(text, *index_topk) else { continue };
            let theirs = theirs.teacher_forced(text, *index_topk)?;
            total += ours.len() as u64;
            matched += ours.iter().zip(&theirs).filter(|(a, b)| a.id == b.id).count() as u64;
            let both = ours.iter().zip(&theirs).filter_map(|(a, b)| Some((a.logprob()? - b.logprob()?).abs()));
            for apart in both {
                difference += apart;
                counted += 1;
            }
        }
        let agreement = VerifyAgreement {
            matched,
            total,
            mean_abs_logprob_diff: (counted > 0).then(|| difference / counted as f64),
        };
        let share = 100.0 * matched as f64 / total.max(1) as f64;
        let detail = format!("the source says the same after {matched} of {total} tokens ({share:.1} %)");
        self.outcome.stage.check("source", Vec::new(), &detail);
        self.outcome.agreement = Some(agreement);
        Ok(())
    }

    /// Writes references of this model: to the prompts of the given ones, or to a few of its own.
    fn write(&mut self, path: &Path, prepared: &Prepared) -> Result<(), Faults> {
        let given: Vec<&Reference> = prepared.files.iter().flat_map(|(_, file)| &file.references).collect();
        let prompts: Vec<(Vec<u32>, Option<u64>)> = match given.is_empty() {
            true => self.prompts().into_iter().map(|prompt| (prompt, None)).collect(),
            false => given.iter().map(|r| (r.prompt_ids.clone(), r.index_topk)).collect(),
        };
        let fingerprint = fingerprint(&self.directory, self.model.config())?;
        let mut references = Vec::with_capacity(prompts.len());
        for (prompt, index_topk) in prompts {
            let recording = Recording {
                tokens: RECORDED_TOKENS,
                index_topk,
                drafts: self.model.has_mtp(),
                fingerprint: Some(fingerprint.clone()),
            };
            references.push(record(self.model, &prompt, &recording)?);
        }
        let count = counted(references.len(), "reference");
        write_whole(path, ReferenceFile { references }.to_text().as_bytes(), false)?;
        self.outcome.stage.check("written", Vec::new(), &format!("{count} to {}", path.to_string_lossy()));
        Ok(())
    }
}

/// A fault of a computation, which knows no file, at the file that it is about.
fn placed(fault: Fault, path: &Path) -> Fault {
    let place = if fault.place == Place::default() { Place::file(path) } else { fault.place };
    Fault { place, kind: fault.kind }
}

/// Real mismatches of one reference, and log-probabilities that rounding cannot explain.
fn disagreements(agreement: &Agreement, path: &Path, reference: usize) -> Vec<Found> {
    let mut findings = Vec::new();
    let mut push = |kind| findings.push((Severity::Error, Fault::new(Place::file(path), kind)));
    let compared = [
        ("teacher-forced predictions", agreement.teacher_forced),
        ("greedy tokens", agreement.greedy),
        ("drafts", agreement.mtp.map(|mtp| mtp.matches)),
    ];
    for (what, matches) in compared {
        let Some(Matches { matched, near_tie, total, first_mismatch }) = matches.filter(|m| !m.good()) else {
            continue;
        };
        let (at, expected, found) = first_mismatch.unwrap_or_default();
        push(FaultKind::TokensDiffer { reference, what, equal: matched + near_tie, total, at, expected, found });
    }
    if let Some(found) = agreement.max_abs_logprob_diff.filter(|&apart| apart.is_nan() || apart > LOGPROB_TOLERANCE) {
        push(FaultKind::LogprobsDiffer { reference, found, tolerance: LOGPROB_TOLERANCE });
    }
    findings
}

fn entry(reference: String, device: String, mode: Mode, agreement: &Agreement) -> VerifyTokens {
    VerifyTokens {
        reference,
        device,
        mode: <&str>::from(mode).to_owned(),
        teacher_forced: agreement.teacher_forced.map(|m| VerifyTeacherForced {
            matched: m.matched as u64,
            near_tie: m.near_tie as u64,
            total: m.total as u64,
        }),
        greedy: agreement.greedy.map(|m| VerifyGreedy { matched: m.matched as u64, total: m.total as u64 }),
        max_abs_logprob_diff: agreement.max_abs_logprob_diff.filter(|apart| apart.is_finite()),
        mtp: agreement.mtp.map(|mtp| VerifyDrafts {
            matched: mtp.matches.matched as u64,
            total: mtp.matches.total as u64,
            proposed: mtp.proposed as u64,
            accepted: mtp.accepted as u64,
        }),
        gpu: None,
    }
}

/// All references together in one line.
fn summary(total: &Agreement) -> String {
    let mut parts = Vec::new();
    let of = |m: &Matches| match m.near_tie {
        0 => format!("{} of {}", m.matched, m.total),
        ties => format!("{} of {} ({})", m.matched, m.total, counted(ties, "near-tie")),
    };
    parts.extend(total.teacher_forced.as_ref().map(|m| format!("teacher-forced {}", of(m))));
    parts.extend(total.greedy.as_ref().map(|m| format!("greedy {}", of(m))));
    parts.extend(total.max_abs_logprob_diff.map(|apart| format!("log-probabilities within {apart:.1e}")));
    parts.extend(
        total
            .mtp
            .as_ref()
            .map(|mtp| format!("drafts {}, {} of {} accepted", of(&mtp.matches), mtp.accepted, mtp.proposed)),
    );
    parts.join("; ")
}
