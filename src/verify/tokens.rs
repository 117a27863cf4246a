//! Level tokens: what the model computes, against references and against its source.
//!
//! Without a reference the plain backend makes some, where it fits into memory: what the CPU's kernels say is compared
//! with them.

mod entry;
mod own;
mod prepare;
mod source;

use std::path::{Path, PathBuf};

use super::Stage;
use crate::backend::cpu::Cpu;
use crate::backend::gpu::device::Injection;
use crate::backend::gpu::placement::Spread;
use crate::backend::reference::Reference as Plain;
use crate::backend::{self, Backend, Device, Gpus, Mode, OnGpus};
use crate::container::reader::Found;
use crate::error::{Fault, FaultKind, Faults, Place, Result, Severity, counted};
use crate::io::write_whole;
use crate::isa::Isa;
use crate::model::Model;
use crate::part::Part;
use crate::progress::Progress;
use crate::reference::{Agreement, Recording, Reference, ReferenceFile, accepted_drafts, compare, fingerprint, record};
use crate::report::{DeviceExperts, Experts, VerifyAgreement, VerifyOwnDrafts, VerifyTokens};
use crate::weights::Weights;

pub use entry::{FAST_LOGPROB_TOLERANCE, LOGPROB_TOLERANCE, logprob_tolerance};
pub use own::OWN as OWN_REFERENCE;
use own::Texts;
pub use prepare::{OF_SOURCE, positions};
pub(super) use source::SourceShare;

pub(super) use prepare::{Prepared, prepare};

/// Tokens that follow a prompt in references that are written.
const RECORDED_TOKENS: usize = 48;
/// Tokens that follow a prompt where no reference is given.
const OWN_TOKENS: usize = 16;

/// What of the token level a user chooses.
#[derive(Debug, Clone, Default)]
pub struct TokenOptions {
    /// Reference files.
    pub references: Vec<PathBuf>,
    /// Devices that compute; none means the CPU.
    pub devices: Vec<Device>,
    /// How sums are formed.
    pub mode: Mode,
    /// Other devices that would have been used, with the reason why they are not.
    pub unused: Vec<(String, String)>,
    /// Where to write references of this model.
    pub write_reference: Option<PathBuf>,
    /// Memory for the model, in bytes; by default what is available.
    pub memory: Option<u64>,
    /// Memory of a GPU for the model, in bytes; by default what is free.
    pub device_memory: Option<u64>,
    /// A fault on purpose, on devices that are GPUs.
    pub injection: Option<Injection>,
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
    /// The hash that references which are written carry.
    pub(super) model_sha256: Option<String>,
}

/// What the level found, for the report.
#[derive(Default)]
pub(super) struct Outcome {
    pub(super) stage: Stage,
    /// Each with the rank of its reference among those of all files.
    pub(super) tokens: Vec<(u64, VerifyTokens)>,
    /// All of these together.
    pub(super) total: Agreement,
    pub(super) source: Option<SourceShare>,
    pub(super) agreement: Option<VerifyAgreement>,
    pub(super) experts: Option<Experts>,
    pub(super) device_experts: Option<DeviceExperts>,
    pub(super) own_drafts: Option<VerifyOwnDrafts>,
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

/// Runs a model on every device that was asked for, one after the other, along the texts that the part has.
pub(super) fn run(
    subject: &Subject<'_>,
    mut prepared: Prepared,
    options: &TokenOptions,
    part: Part,
    progress: &dyn Progress,
) -> Result<Outcome, Faults> {
    if !part.has(0) && part.number() > units(subject, &prepared) {
        return Ok(elsewhere(subject));
    }
    let devices = devices(options);
    let mut texts = own::given(&prepared);
    let warnings = std::mem::take(&mut prepared.warnings);
    let mut findings: Vec<(u64, Found)> = (0..).zip(warnings).collect();
    // Texts of its own are one thing, for the first part.
    let (mut nothing, mut share) = (None, part);
    if texts.is_empty() && part.has(0) {
        share = Part::WHOLE;
        match own::recorded(subject, &prepared, &devices, progress) {
            Ok(own) => texts.push(own),
            Err(why) => nothing = Some(why),
        }
    }
    let mut distinct: Vec<Device> = Vec::new();
    devices.iter().for_each(|device| {
        if !distinct.contains(device) {
            distinct.push(*device)
        }
    });
    let mut ran = Vec::new();
    for (number, &device) in distinct.iter().enumerate() {
        let first = number == 0;
        let work = Work { subject, prepared: &prepared, texts: &texts, options, device, first, part, share };
        match work.on(progress)? {
            Ok(done) => ran.push(done),
            Err(outcome) => return Ok(outcome),
        }
    }
    let mut outcome = Outcome::default();
    if !options.unused.is_empty() && part.has(0) {
        outcome.stage.check(
            "devices",
            unused(subject, options),
            &devices.iter().map(Device::to_string).collect::<Vec<_>>().join(", "),
        );
    }
    let forward = ran.iter_mut().flat_map(|ran| std::mem::take(&mut ran.forward.0)).collect();
    let looked_at: Vec<&str> = ran.iter().map(|ran| &*ran.forward.1).collect();
    match part.has(0) {
        true => outcome.stage.check("forward", forward, &looked_at.join("; ")),
        false => outcome.stage.elsewhere("forward"),
    }
    let references = texts.iter().map(|texts| texts.file.references.len()).sum::<usize>() as u64;
    let mut first_rank = findings.len() as u64;
    for ran in &mut ran {
        findings.extend(ran.findings.drain(..).map(|(rank, found)| (first_rank + rank, found)));
        first_rank += references;
        outcome.total = ran.compared.iter().fold(outcome.total, |total, (.., agreement)| total.and(agreement));
    }
    match nothing {
        Some(why) => outcome.stage.skip("tokens", &why),
        None if texts.is_empty() => outcome.stage.elsewhere("tokens"),
        None => outcome.stage.share("tokens", findings, &entry::summary(&outcome.total)),
    }
    let of = |device| ran.iter().find(|ran| ran.device == device).expect("every device ran");
    for number in 0..ran[0].compared.len() {
        let entry = |&device| (of(device).compared[number].0, of(device).compared[number].1.clone());
        outcome.tokens.extend(devices.iter().map(entry));
    }
    outcome.experts = ran.iter().find_map(|ran| ran.outcome.experts);
    outcome.device_experts = ran.iter().find_map(|ran| ran.outcome.device_experts);
    outcome.own_drafts = ran.iter().find_map(|ran| ran.outcome.own_drafts);
    let first = &mut ran[0].outcome;
    outcome.stage.checks.append(&mut first.stage.checks);
    (outcome.source, outcome.agreement) = (first.source.take(), first.agreement.take());
    Ok(outcome)
}

/// A warning for each device that is not used.
fn unused(subject: &Subject<'_>, options: &TokenOptions) -> Vec<Found> {
    let place = || Place::file(subject.weights.directory());
    let kind = |(device, reason): &(String, String)| FaultKind::DeviceUnused {
        device: device.clone(),
        reason: reason.clone(),
    };
    options.unused.iter().map(|unused| (Severity::Warning, Fault::new(place(), kind(unused)))).collect()
}

/// How many parts have something to compute.
fn units(subject: &Subject<'_>, prepared: &Prepared) -> usize {
    let own = if subject.source.is_some() { own::PROMPTS.len() } else { 1 };
    match prepared.references().count() {
        0 => own,
        references => references,
    }
}

/// What a part says that has nothing to compute.
fn elsewhere(subject: &Subject<'_>) -> Outcome {
    let mut outcome = Outcome::default();
    outcome.stage.elsewhere("forward");
    outcome.stage.elsewhere("tokens");
    if subject.source.is_some() {
        outcome.stage.elsewhere("source");
    }
    outcome
}

/// What references say of a model, all together, in one line.
pub(super) fn summary(total: &Agreement) -> String {
    entry::summary(total)
}

/// The devices that were asked for.
pub(super) fn devices(options: &TokenOptions) -> Vec<Device> {
    if options.devices.is_empty() { vec![Device::Cpu] } else { options.devices.clone() }
}

/// What is done on one device.
struct Work<'a> {
    subject: &'a Subject<'a>,
    prepared: &'a Prepared,
    texts: &'a [Texts],
    options: &'a TokenOptions,
    device: Device,
    /// Whether it is the first: what it says is compared with the source, and written.
    first: bool,
    part: Part,
    /// What of the texts the part has.
    share: Part,
}

/// What came of it.
struct Ran {
    device: Device,
    /// Findings, and what was looked at.
    forward: (Vec<Found>, String),
    /// Of every text, with its rank.
    compared: Vec<Compared>,
    findings: Vec<(u64, Found)>,
    /// Checks after these, on the first device.
    outcome: Outcome,
}

impl Work<'_> {
    fn on(&self, progress: &dyn Progress) -> Result<Result<Ran, Outcome>, Faults> {
        let cpu = |number: usize| match self.prepared.cpu.get(number) {
            Some(&options) => Cpu::with_experts(Isa::detect(), options),
            None => Cpu::default(),
        };
        match self.device {
            Device::Reference => self.with(&Plain::default(), &|| Ok(Plain::default()), progress),
            Device::Cpu => self.with(&cpu(0), &|| Ok(cpu(1)), progress),
            Device::Cuda(_) | Device::Vulkan(_) | Device::Several(_) => {
                let gpus = Gpus::open(self.device, self.options.mode, self.options.injection)?;
                gpus.run(self.spread(0), RunOnGpus { work: self, progress })
            }
        }
    }

    /// How the model, 0, or the source, 1, lies on the GPUs.
    fn spread(&self, number: usize) -> &Spread {
        let planned = self.prepared.gpu.iter().find(|(device, _)| *device == self.device);
        planned.and_then(|(_, spreads)| spreads.get(number)).expect("every device was prepared")
    }

    /// On a backend, the source on another one; where the model does not load, what the level found is that.
    fn with<B: Backend>(
        &self,
        backend: &B,
        another: &dyn Fn() -> Result<B>,
        progress: &dyn Progress,
    ) -> Result<Result<Ran, Outcome>, Faults> {
        let (subject, options) = (self.subject, self.options);
        if self.device.is_gpu() {
            self.spread(0).told().iter().for_each(|told| progress.step(told));
        }
        progress.file("loading the model");
        let model = match Model::load(subject.weights, backend) {
            Ok(model) => model,
            Err(faults) => {
                let mut outcome = Outcome::default();
                let findings = faults.into_vec().into_iter().map(|fault| (Severity::Error, fault)).collect();
                outcome.stage.check("forward", findings, "");
                outcome.skip("the model does not load", options);
                return Ok(Err(outcome));
            }
        };
        let directory = subject.weights.directory();
        let mut level = Level { model: &model, directory, device: self.device, outcome: Outcome::default() };
        let forward = if self.part.has(0) { level.forward(progress) } else { Default::default() };
        backend.arm();
        let (compared, findings) = level.references(self.texts, self.share, progress);
        if let Some(source) = subject.source.filter(|_| self.first) {
            level.source(source, &another()?, subject.same_weights, self.prepared, self.part, progress);
        }
        match options.write_reference.as_ref().filter(|_| self.first) {
            Some(path) if subject.good => level.write(path, self.prepared, subject.model_sha256.as_deref())?,
            Some(_) => {
                level.outcome.stage.skip("written", "the checks above failed: nobody should rely on this model");
            }
            None => {}
        }
        level.outcome.experts = backend.expert_counters();
        level.outcome.device_experts = backend.device_expert_counters();
        Ok(Ok(Ran { device: self.device, forward, compared, findings, outcome: level.outcome }))
    }
}

/// The work on GPUs.
struct RunOnGpus<'a> {
    work: &'a Work<'a>,
    progress: &'a dyn Progress,
}

impl backend::Work for RunOnGpus<'_> {
    type Done = Result<Ran, Outcome>;

    fn on<B: OnGpus>(self, gpus: &B, another: &dyn Fn(&Spread) -> Result<B>) -> Result<Result<Ran, Outcome>, Faults> {
        let mut ran = self.work.with(gpus, &|| another(self.work.spread(1)), self.progress)?;
        self.work.injected(gpus, &mut ran);
        Ok(ran)
    }
}

impl Work<'_> {
    /// A report says what fault was made on purpose; one that did not happen, or that nothing noticed, fails.
    fn injected<B: OnGpus>(&self, gpu: &B, ran: &mut Result<Ran, Outcome>) {
        let (Some(injection), Ok(ran)) = (self.options.injection, ran) else { return };
        let noticed = ran.findings.iter().any(|(_, (severity, _))| *severity == Severity::Error);
        let (severity, kind) = match gpu.injected() {
            None => {
                let launches = gpu.armed_launches();
                (Severity::Error, FaultKind::GpuNotInjected { launch: injection.launch, launches })
            }
            // What failed was told where it failed.
            Some((launch, kernel)) if noticed => (Severity::Warning, FaultKind::GpuFaultMade { launch, kernel }),
            Some((launch, kernel)) => (Severity::Error, FaultKind::GpuFaultUnnoticed { launch, kernel }),
        };
        ran.forward.0.push((severity, Fault::new(Place::file(self.subject.weights.directory()), kind)));
    }
}

/// What became of a text: its rank, the entry of the report, all there is to say.
type Compared = (u64, VerifyTokens, Agreement);

struct Level<'a, B: Backend> {
    model: &'a Model<'a, B>,
    directory: PathBuf,
    device: Device,
    outcome: Outcome,
}

impl<B: Backend> Level<'_, B> {
    /// Whether the model says anything: finite logits along a text of its own, and drafts that are of some use.
    fn forward(&mut self, progress: &dyn Progress) -> (Vec<Found>, String) {
        progress.file("running the model");
        let recording = Recording { tokens: OWN_TOKENS, drafts: self.model.has_mtp(), ..Recording::default() };
        let own = match record(self.model, &self.prompts()[0], &recording) {
            Ok(own) => own,
            Err(fault) => return (vec![(Severity::Error, placed(fault, &self.directory))], String::new()),
        };
        let backend = self.model.backend();
        let (name, device) = (backend.name(), backend.device());
        let mut looked_at = format!("{OWN_TOKENS} tokens on the {name} backend ({device}); all logits finite");
        let mut findings = Vec::new();
        if let Some(drafts) = &own.draft_pred {
            let (accepted, proposed) = accepted_drafts(&own, drafts);
            looked_at += &format!("; {accepted} of {proposed} drafts accepted");
            self.outcome.own_drafts = Some(VerifyOwnDrafts { proposed: proposed as u64, accepted: accepted as u64 });
            if accepted == 0 {
                let kind = FaultKind::NoDraftAccepted { proposed };
                findings.push((Severity::Warning, Fault::new(Place::file(&self.directory), kind)));
            }
        }
        (findings, looked_at)
    }

    /// Beginnings of texts.
    fn prompts(&self) -> Vec<Vec<u32>> {
        own::prompts(&self.directory, self.model.config().vocab_size)
    }

    /// Every text of the share on this device.
    fn references(&self, texts: &[Texts], share: Part, progress: &dyn Progress) -> (Vec<Compared>, Vec<(u64, Found)>) {
        let (mut compared, mut findings) = (Vec::new(), Vec::new());
        let mut ranks = 0..;
        for Texts { name, place, file } in texts {
            progress.file(name);
            let mut told = false;
            for (number, reference) in file.references.iter().enumerate() {
                let rank = ranks.next().expect("without end");
                // Told of the first such reference, whose part it is.
                let dense = self.dense(reference, number).filter(|_| !std::mem::replace(&mut told, true));
                if !share.has(rank as usize) {
                    continue;
                }
                let before = self.model.backend().counters();
                let (agreement, fault) = self.compare(reference);
                let counted = self.model.backend().counters().since(&before);
                let fault = fault.map(|fault| (Severity::Error, placed(fault, place)));
                let dense = dense.map(|kind| (Severity::Warning, Fault::new(Place::file(place), kind)));
                let found = fault
                    .into_iter()
                    .chain(entry::disagreements(&agreement, place, number, self.model.backend().mode()))
                    .chain(dense);
                findings.extend(found.map(|found| (rank, found)));
                let entry = entry::entry(name, number, self.device, self.model.backend(), &counted, &agreement);
                let entry = VerifyTokens { written_by: reference.written_by.clone(), ..entry };
                compared.push((rank, entry, agreement));
            }
        }
        (compared, findings)
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
    fn write(&mut self, path: &Path, prepared: &Prepared, writer: Option<&str>) -> Result<(), Faults> {
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
            let reference = record(self.model, prompt, &recording)?;
            Ok(Reference { written_by: writer.map(str::to_owned), ..reference })
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
