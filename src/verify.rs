//! Whether a model is whole, undamaged, and made from its source.
//!
//! Levels are cumulative: *structure* is everything that headers, index, config, stamps and manifest say; *payload* is
//! every stored byte; *weights* is every weight against the checkpoint that it was made from. What is wrong is data, not
//! an error: the report lists all of it, each finding under the check that it makes fail. Only what cannot be verified at
//! all is refused.

mod checkpoint;
pub mod parts;
mod payload;
mod stage;
mod structure;
mod tokens;
mod weights;

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::backend::Mode;
use crate::checkpoint::Checkpoint;
use crate::container::manifest::{CARD_FILE, FileRecord, Manifest, has_model_card};
use crate::container::reader::{Container, StoredWeight, Survey};
use crate::error::{Fault, FaultKind, Faults, Place};
use crate::format::Format;
use crate::part::Part;
use crate::progress::Progress;
use crate::report::{CheckStatus, Verdict, VerifyFile, VerifyPart, VerifyReport};
use crate::score::identity::{model_sha256_in, model_sha256_of};
use crate::threads;
use crate::weights::{ModelKind, Weights};
use stage::Stage;
use weights::Opened;

pub use tokens::{
    FAST_LOGPROB_TOLERANCE, LOGPROB_TOLERANCE, OF_SOURCE, OWN_REFERENCE, TokenOptions, logprob_tolerance, positions,
};

/// How far to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Headers, index, census, counts, stamps, config.
    Structure,
    /// Checksums, scales, codes.
    Payload,
    /// Every weight against its source.
    Weights,
    /// What the model computes.
    Tokens,
}

impl Level {
    /// The word on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Structure => "structure",
            Level::Payload => "payload",
            Level::Weights => "weights",
            Level::Tokens => "tokens",
        }
    }
}

/// What a user asks for.
#[derive(Debug, Clone)]
pub struct Options {
    /// How far to go.
    pub level: Level,
    /// The checkpoint that a container was made from.
    pub source: Option<PathBuf>,
    /// Threads; 0 for one per core.
    pub threads: usize,
    /// What is compared at the level tokens.
    pub tokens: TokenOptions,
}

/// Verifies a container or a checkpoint.
pub fn verify(path: &Path, options: &Options, progress: &dyn Progress) -> Result<VerifyReport, Faults> {
    let started = Instant::now();
    let examined = examine(path, options, Part::WHOLE, progress)?;
    Ok(examined.report(path, options, None, started.elapsed().as_secs_f64()))
}

/// Everything that a verification, or one part of it, found.
struct Examined {
    kind: ModelKind,
    /// The levels, structure first, tokens last.
    stages: Vec<Stage>,
    /// Whether the weights were compared with the source.
    has_source: bool,
    /// The files of a manifest, where all of them were hashed and found to be as it says.
    hashed: Vec<FileRecord>,
    /// The hash of what this manifest says.
    manifest_sha256: Option<String>,
    /// The hash of the source, if the weights are its.
    source_model_sha256: Option<String>,
    computed: tokens::Outcome,
}

/// Goes through the levels, with the structure as a whole and of the others what the part has.
fn examine(path: &Path, options: &Options, part: Part, progress: &dyn Progress) -> Result<Examined, Faults> {
    let kind = ModelKind::of(path)?;
    check_options(path, kind, options)?;
    let prepare = || tokens::prepare(path, options.source.as_deref(), &options.tokens);
    let prepared = (options.level == Level::Tokens).then(prepare).transpose()?;
    let pool = threads::pool(options.threads, path)?;
    let Levels { mut stages, source, model, same_weights, hashed, manifest_sha256, source_model_sha256 } =
        levels(path, kind, options, part, &pool, progress)?;
    let mut computed = tokens::Outcome::default();
    if let Some(prepared) = prepared {
        match &model {
            Some(model) => {
                let source = source.as_ref().map(|source| source as &dyn Weights);
                let good = !stages.iter().any(Stage::failed);
                let model_sha256 = writer(path, kind, &hashed, options)?;
                let subject = tokens::Subject { weights: &**model, source, same_weights, good, model_sha256 };
                computed = pool.install(|| tokens::run(&subject, prepared, &options.tokens, part, progress))?;
            }
            None => computed.skip("the structure is not sound", &options.tokens),
        }
    }
    stages.push(std::mem::take(&mut computed.stage));
    let has_source = source.is_some();
    Ok(Examined { kind, stages, has_source, hashed, manifest_sha256, source_model_sha256, computed })
}

/// The levels below tokens.
fn levels(
    path: &Path,
    kind: ModelKind,
    options: &Options,
    part: Part,
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<Levels, Faults> {
    match kind {
        ModelKind::Checkpoint => checkpoint::levels(path, options, part, pool, progress),
        ModelKind::Container => container(path, options, part, pool, progress),
    }
}

impl Examined {
    /// The report of a verification, or of the part of one. A part alone is about no bytes.
    fn report(self, path: &Path, options: &Options, part: Option<VerifyPart>, seconds: f64) -> VerifyReport {
        let hashed = if part.is_some() { Vec::new() } else { self.hashed };
        let source = options.source.as_ref().filter(|_| self.has_source);
        // A card that `publish` made is no evidence, and is made anew; the source's card counts, whatever its name.
        let made = has_model_card(path, &hashed);
        let (manifest_sha256, source_model_sha256) = match part {
            Some(_) => (None, None),
            None => (self.manifest_sha256, self.source_model_sha256),
        };
        let failed = self.stages.iter().any(Stage::failed);
        let mut report = VerifyReport {
            path: path.to_string_lossy().into_owned(),
            kind: self.kind.name().to_owned(),
            level: options.level.name().to_owned(),
            source: source.map(|path| path.to_string_lossy().into_owned()),
            source_model_sha256,
            model_sha256: (!hashed.is_empty()).then(|| model_sha256_of(&hashed)),
            files: hashed
                .into_iter()
                .filter(|file| !(made && file.name == CARD_FILE))
                .map(|FileRecord { name, bytes, sha256 }| VerifyFile { name, bytes, sha256 })
                .collect(),
            manifest_sha256,
            verdict: if failed { Verdict::Fail } else { Verdict::Pass },
            checks: Vec::new(),
            tokens: self.computed.tokens.into_iter().map(|(_, entry)| entry).collect(),
            source_agreement: self.computed.agreement,
            own_drafts: self.computed.own_drafts,
            experts: self.computed.experts,
            device_experts: self.computed.device_experts,
            findings: Vec::new(),
            bytes_read: self.stages.iter().map(|stage| stage.bytes_read).sum(),
            seconds,
            part,
        };
        for stage in self.stages {
            let (checks, findings) = stage.into_report(report.part.is_some());
            report.checks.extend(checks);
            report.findings.extend(findings);
        }
        report
    }
}

/// The hash that references of a container are to carry.
fn writer(path: &Path, kind: ModelKind, hashed: &[FileRecord], options: &Options) -> Result<Option<String>, Faults> {
    if options.tokens.write_reference.is_none() || kind != ModelKind::Container {
        return Ok(None);
    }
    if hashed.is_empty() { model_sha256_in(path).map(Some) } else { Ok(Some(model_sha256_of(hashed))) }
}

/// Refuses what the options cannot mean together.
fn check_options(path: &Path, kind: ModelKind, options: &Options) -> Result<(), Fault> {
    let level = options.level.name();
    let refuse = |kind| Err(Fault::new(Place::file(path), kind));
    let asked = &options.tokens;
    let token_flags = [
        (!asked.references.is_empty(), "--reference"),
        (!asked.devices.is_empty(), "--device"),
        (asked.mode != Mode::Exact, "--mode"),
        (asked.write_reference.is_some(), "--write-reference"),
    ];
    if let Some(&(_, flag)) = token_flags.iter().find(|(given, _)| *given && options.level < Level::Tokens) {
        return Err(Fault::new(Place::default(), FaultKind::FlagUnused { flag, level }));
    }
    match (options.level, &options.source) {
        (Level::Weights, _) if kind == ModelKind::Checkpoint => refuse(FaultKind::LevelOfContainers { level }),
        (Level::Tokens, Some(_)) if kind == ModelKind::Checkpoint => Err(Fault::new(
            Place::default(),
            FaultKind::FlagUnused { flag: "--source", level: "tokens of a checkpoint" },
        )),
        (Level::Weights, None) => refuse(FaultKind::SourceNeeded { level }),
        (Level::Structure | Level::Payload, Some(_)) => {
            Err(Fault::new(Place::default(), FaultKind::FlagUnused { flag: "--source", level }))
        }
        _ => Ok(()),
    }
}

/// What the levels below tokens found, and what they leave for it.
struct Levels {
    stages: Vec<Stage>,
    /// The source that the weights were compared with.
    source: Option<Checkpoint>,
    /// The model, if its structure is sound.
    model: Option<Box<dyn Weights>>,
    /// Whether the model holds the source's values themselves.
    same_weights: bool,
    /// The files of a manifest, where all of them were hashed and found to be as it says.
    hashed: Vec<FileRecord>,
    /// The hash of what this manifest says.
    manifest_sha256: Option<String>,
    /// The hash of the source, if the weights are its.
    source_model_sha256: Option<String>,
}

/// The levels of a container.
fn container(
    path: &Path,
    options: &Options,
    part: Part,
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<Levels, Faults> {
    let stated = Manifest::read_stated(path).unwrap_or_default();
    let mut survey = Survey::read(path)?;
    let mut stages = vec![structure::of_container(&mut survey)];
    // A wrong source is refused now, not after hours of checksums.
    let source = options.source.as_deref().filter(|_| options.level >= Level::Weights);
    let sound = !stages[0].failed();
    let opened: Option<Opened> = source.map(|source| weights::open_source(&survey, source, sound)).transpose()?;
    let mut hashed = Vec::new();
    if options.level >= Level::Payload {
        stages.push(pool.install(|| payload::of_container(&survey, part, progress)));
        hashed = as_recorded(survey.manifest.as_ref(), &stages);
    }
    // What the survey read must be what was hashed.
    let stated = stated.filter(|(manifest, _)| !hashed.is_empty() && survey.manifest.as_ref() == Some(manifest));
    let manifest_sha256 = stated.map(|(_, sha256)| sha256);
    let (mut compared, mut source_model_sha256) = (None, None);
    match opened {
        Some(Opened::Comparable(checkpoint)) => {
            let weights::Compared { stage, source_sha256 } =
                pool.install(|| weights::against(&survey, &checkpoint, part, progress));
            stages.push(stage);
            compared = Some(*checkpoint);
            // A source of which something is wrong vouches for nothing, read to its end or not.
            if !stages.iter().any(Stage::failed) {
                source_model_sha256 = source_sha256?;
            }
        }
        Some(Opened::OtherShapes) => stages.push(weights::skipped("names or shapes are not those of the source")),
        None if options.level >= Level::Weights => stages.push(weights::skipped("no --source")),
        None => {}
    }
    let exact = |weight: &StoredWeight| matches!(weight.format, Some(Format::F32 | Format::Fp8E4m3B128));
    let same_weights = survey.weights.values().all(exact);
    let model = if sound { Some(Box::new(Container::from_survey(survey)?) as Box<dyn Weights>) } else { None };
    Ok(Levels { stages, source: compared, model, same_weights, hashed, manifest_sha256, source_model_sha256 })
}

/// The files of the manifest, sorted, if they are there and their hashes are those that it gives.
fn as_recorded(manifest: Option<&Manifest>, stages: &[Stage]) -> Vec<FileRecord> {
    let mut checks = stages.iter().flat_map(|stage| &stage.checks);
    let good = |name| checks.any(|check| check.name == name && check.status() == CheckStatus::Pass);
    let Some(manifest) = manifest.filter(|_| ["manifest", "checksums"].into_iter().all(good)) else {
        return Vec::new();
    };
    let mut files: Vec<FileRecord> = manifest.files.iter().chain(&manifest.small_files).cloned().collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files
}
