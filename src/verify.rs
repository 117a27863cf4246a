//! Whether a model is whole, undamaged, and made from its source.
//!
//! Levels are cumulative: *structure* is everything that headers, index, config, stamps and manifest say; *payload* is
//! every stored byte; *weights* is every weight against the checkpoint that it was made from. What is wrong is data, not
//! an error: the report lists all of it, each finding under the check that it makes fail. Only what cannot be verified at
//! all is refused.

mod checkpoint;
mod payload;
mod structure;
mod tokens;
mod weights;

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::checkpoint::Checkpoint;
use crate::container::manifest::{FileRecord, Manifest};
use crate::container::reader::{Container, Found, StoredWeight, Survey};
use crate::error::{Fault, FaultKind, Faults, Place, Severity};
use crate::format::Format;
use crate::progress::Progress;
use crate::report::{CheckStatus, Finding, Verdict, VerifyCheck, VerifyFile, VerifyReport};
use crate::score::identity::{model_sha256_in, model_sha256_of};
use crate::threads;
use crate::weights::{ModelKind, Weights};
use weights::Opened;

pub use tokens::{OWN_REFERENCE, TokenOptions};

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
    let kind = ModelKind::of(path)?;
    check_options(path, kind, options)?;
    let prepare = || tokens::prepare(path, options.source.as_deref(), &options.tokens);
    let prepared = (options.level == Level::Tokens).then(prepare).transpose()?;
    let pool = threads::pool(options.threads, path)?;
    let Levels { mut stages, source, model, same_weights, hashed, manifest_sha256, source_model_sha256 } = match kind {
        ModelKind::Checkpoint => checkpoint::levels(path, options, &pool, progress)?,
        ModelKind::Container => container(path, options, &pool, progress)?,
    };
    let mut computed = tokens::Outcome::default();
    if let Some(prepared) = prepared {
        match &model {
            Some(model) => {
                let source = source.as_ref().map(|(_, source)| source as &dyn Weights);
                let good = !stages.iter().any(Stage::failed);
                let model_sha256 = writer(path, kind, &hashed, options)?;
                let subject = tokens::Subject { weights: &**model, source, same_weights, good, model_sha256 };
                computed = pool.install(|| tokens::run(&subject, prepared, &options.tokens, progress))?;
            }
            None => computed.skip("the structure is not sound", &options.tokens),
        }
    }
    stages.push(computed.stage);
    let failed = stages.iter().any(Stage::failed);
    let mut report = VerifyReport {
        path: path.to_string_lossy().into_owned(),
        kind: kind.name().to_owned(),
        level: options.level.name().to_owned(),
        source: source.map(|(path, _)| path.to_string_lossy().into_owned()),
        source_model_sha256,
        model_sha256: (!hashed.is_empty()).then(|| model_sha256_of(&hashed)),
        files: hashed
            .into_iter()
            .map(|FileRecord { name, bytes, sha256 }| VerifyFile { name, bytes, sha256 })
            .collect(),
        manifest_sha256,
        verdict: if failed { Verdict::Fail } else { Verdict::Pass },
        checks: Vec::new(),
        tokens: computed.tokens,
        source_agreement: computed.agreement,
        own_drafts: computed.own_drafts,
        experts: computed.experts,
        findings: Vec::new(),
        bytes_read: stages.iter().map(|stage| stage.bytes_read).sum(),
        seconds: started.elapsed().as_secs_f64(),
    };
    for stage in stages {
        report.checks.extend(stage.checks);
        report.findings.extend(stage.findings.iter().map(|(severity, fault)| Finding::new(*severity, fault)));
    }
    Ok(report)
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
struct Levels<'a> {
    stages: Vec<Stage>,
    /// The source that the weights were compared with.
    source: Option<(&'a Path, Checkpoint)>,
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
fn container<'a>(
    path: &Path,
    options: &'a Options,
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<Levels<'a>, Faults> {
    let stated = Manifest::read_stated(path).unwrap_or_default();
    let mut survey = Survey::read(path)?;
    let mut stages = vec![structure::of_container(&mut survey)];
    // A wrong source is refused now, not after hours of checksums.
    let source = options.source.as_deref().filter(|_| options.level >= Level::Weights);
    let sound = !stages[0].failed();
    let opened: Option<Opened> = source.map(|source| weights::open_source(&survey, source, sound)).transpose()?;
    let mut hashed = Vec::new();
    if options.level >= Level::Payload {
        stages.push(pool.install(|| payload::of_container(&survey, progress)));
        hashed = as_recorded(&survey, &stages);
    }
    // What the survey read must be what was hashed.
    let stated = stated.filter(|(manifest, _)| !hashed.is_empty() && survey.manifest.as_ref() == Some(manifest));
    let manifest_sha256 = stated.map(|(_, sha256)| sha256);
    let (mut compared, mut source_model_sha256) = (None, None);
    match opened {
        Some(Opened::Comparable(checkpoint)) => {
            stages.push(pool.install(|| weights::against(&survey, &checkpoint, progress)));
            compared = source.map(|path| (path, *checkpoint));
            if let Some((path, _)) = compared.as_ref().filter(|_| !stages.iter().any(Stage::failed)) {
                progress.file("hashing the source");
                source_model_sha256 = Some(pool.install(|| model_sha256_in(path))?);
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
fn as_recorded(survey: &Survey, stages: &[Stage]) -> Vec<FileRecord> {
    let mut checks = stages.iter().flat_map(|stage| &stage.checks);
    let good = |name| checks.any(|check| check.name == name && check.status == CheckStatus::Pass);
    let Some(manifest) = survey.manifest.as_ref().filter(|_| ["manifest", "checksums"].into_iter().all(good)) else {
        return Vec::new();
    };
    let mut files: Vec<FileRecord> = manifest.files.iter().chain(&manifest.small_files).cloned().collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files
}

/// What one level found.
#[derive(Debug, Default)]
struct Stage {
    checks: Vec<VerifyCheck>,
    findings: Vec<Found>,
    bytes_read: u64,
}

impl Stage {
    /// Whether a check failed.
    fn failed(&self) -> bool {
        self.checks.iter().any(|check| check.status == CheckStatus::Fail)
    }

    /// Adds a check that ended with these findings; without an error it passed, and `looked_at` says what.
    fn check(&mut self, name: &str, findings: Vec<Found>, looked_at: &str) {
        let count = |severity| findings.iter().filter(|(found, _)| *found == severity).count();
        let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
        let mut parts = Vec::new();
        if errors > 0 {
            parts.push(counted(errors, "error"));
        } else {
            parts.push(looked_at.to_owned());
        }
        if warnings > 0 {
            parts.push(counted(warnings, "warning"));
        }
        let status = if errors > 0 { CheckStatus::Fail } else { CheckStatus::Pass };
        self.checks.push(VerifyCheck { name: name.to_owned(), status, detail: parts.join("; ") });
        self.findings.extend(findings);
    }

    /// Adds a check that had nothing to look at, unless it found something all the same.
    fn check_or_skip(&mut self, name: &str, findings: Vec<Found>, looked_at: Result<String, &str>) {
        match looked_at {
            Err(why) if findings.is_empty() => self.skip(name, why),
            Err(why) => self.check(name, findings, why),
            Ok(looked_at) => self.check(name, findings, &looked_at),
        }
    }

    fn skip(&mut self, name: &str, why: &str) {
        let (name, detail) = (name.to_owned(), why.to_owned());
        self.checks.push(VerifyCheck { name, status: CheckStatus::Skipped, detail });
    }
}

/// `1 error`, `2 errors`
fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
