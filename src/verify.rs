//! Whether a model is whole, undamaged, and made from its source.
//!
//! Levels are cumulative: *structure* is everything that headers, index, config, stamps and manifest say; *payload* is
//! every stored byte; *weights* is every weight against the checkpoint that it was made from. What is wrong is data, not
//! an error: the report lists all of it, each finding under the check that it makes fail. Only what cannot be verified at
//! all is refused.

mod checkpoint;
mod payload;
mod structure;
mod weights;

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::container::reader::{Found, Survey};
use crate::error::{Fault, FaultKind, Faults, Place, Severity};
use crate::progress::Progress;
use crate::report::{CheckStatus, Finding, Verdict, VerifyCheck, VerifyReport};
use crate::threads;
use crate::weights::ModelKind;
use weights::Opened;

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
}

/// Verifies a container or a checkpoint.
pub fn verify(path: &Path, options: &Options, progress: &dyn Progress) -> Result<VerifyReport, Faults> {
    let started = Instant::now();
    let kind = ModelKind::of(path)?;
    check_options(path, kind, options)?;
    let (stages, source) = match kind {
        ModelKind::Checkpoint => (checkpoint::stages(path, options, progress)?, None),
        ModelKind::Container => container(path, options, progress)?,
    };
    let mut report = VerifyReport {
        path: path.to_string_lossy().into_owned(),
        kind: kind.name().to_owned(),
        level: options.level.name().to_owned(),
        source: source.map(|source| source.to_string_lossy().into_owned()),
        verdict: Verdict::Pass,
        checks: Vec::new(),
        tokens: Vec::new(),
        findings: Vec::new(),
        bytes_read: stages.iter().map(|stage| stage.bytes_read).sum(),
        seconds: started.elapsed().as_secs_f64(),
    };
    for stage in stages {
        report.checks.extend(stage.checks);
        report.findings.extend(stage.findings.iter().map(|(severity, fault)| Finding::new(*severity, fault)));
    }
    let failed = report.checks.iter().any(|check| check.status == CheckStatus::Fail);
    report.verdict = if failed { Verdict::Fail } else { Verdict::Pass };
    Ok(report)
}

/// Refuses what the options cannot mean together.
fn check_options(path: &Path, kind: ModelKind, options: &Options) -> Result<(), Fault> {
    let level = options.level.name();
    let refuse = |kind| Err(Fault::new(Place::file(path), kind));
    match (options.level, &options.source) {
        (Level::Tokens, _) => {
            let name = "level tokens (the default of `coliconv verify`; give --level structure, payload or weights)";
            Err(Fault::new(Place::default(), FaultKind::NotAvailable { name }))
        }
        (Level::Weights, _) if kind == ModelKind::Checkpoint => refuse(FaultKind::LevelOfContainers { level }),
        (Level::Weights, None) => refuse(FaultKind::SourceNeeded { level }),
        (Level::Structure | Level::Payload, Some(_)) => {
            Err(Fault::new(Place::default(), FaultKind::FlagUnused { flag: "--source", level }))
        }
        _ => Ok(()),
    }
}

/// The stages of a container, and the source that it was compared with.
fn container<'a>(
    path: &Path,
    options: &'a Options,
    progress: &dyn Progress,
) -> Result<(Vec<Stage>, Option<&'a Path>), Faults> {
    let pool = threads::pool(options.threads, path)?;
    let mut survey = Survey::read(path)?;
    let mut stages = vec![structure::of_container(&mut survey)];
    // A wrong source is refused now, not after hours of checksums.
    let source = options.source.as_deref().filter(|_| options.level >= Level::Weights);
    let sound = stages[0].checks.iter().all(|check| check.status != CheckStatus::Fail);
    let opened: Option<Opened> = source.map(|source| weights::open_source(&survey, source, sound)).transpose()?;
    if options.level >= Level::Payload {
        stages.push(pool.install(|| payload::of_container(&survey, progress)));
    }
    match &opened {
        Some(Opened::Comparable(source)) => stages.push(pool.install(|| weights::against(&survey, source, progress))),
        Some(Opened::OtherShapes) => stages.push(weights::skipped()),
        None => {}
    }
    Ok((stages, source))
}

/// What one level found.
#[derive(Debug, Default)]
struct Stage {
    checks: Vec<VerifyCheck>,
    findings: Vec<Found>,
    bytes_read: u64,
}

impl Stage {
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
