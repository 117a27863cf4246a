//! From a checkpoint to an upload plan in one go: convert, verify, score the source, score the container, publish.
//!
//! Every step can be gone on from. The conversion and the scores continue what an earlier run left; a verification, and
//! the scores of the source, are kept where container, options and program are those of an earlier run. The
//! first step that says no is the last.

mod before;
mod passes;
mod settings;
mod state;
mod words;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::checkpoint::Allowed;
use crate::container::manifest::json_text;
use crate::convert::{self, Follow, Job};
use crate::error::{Fault, Faults, Result};
use crate::io::{Claim, DirectoryLock, hook, read_small, write_whole};
use crate::limits;
use crate::progress::Progress;
use crate::publish::{self, publish};
use crate::report::{
    ConvertReport, Finding, PipelineReport, PipelineStep, PublishReport, ScoreReport, Severity, StepStatus, Verdict,
    VerifyReport,
};
use crate::roles::Pass;
use crate::score::encode::PrefixChoice;
use crate::score::input::Sampling;
use crate::score::{self, Watch, score};
use crate::verify::{self, Level, TokenOptions, verify};

pub use settings::{Convert, Publish, Score, Settings, Verify};
use state::State;
pub use words::reworded;

/// Who is told how far a pipeline is.
pub struct Observers<'a> {
    /// Told what converting, verifying and publishing do.
    pub progress: &'a dyn Progress,
    /// Told what scoring does.
    pub watch: &'a dyn Watch,
    /// Told when a step begins.
    pub step: &'a dyn Fn(&str),
    /// Told what the conversion will do, before it does anything.
    pub planned: &'a dyn Fn(&Job),
}

/// Runs a pipeline, or goes on with it.
pub fn run(path: &Path, observers: &Observers<'_>) -> Result<PipelineReport, Faults> {
    let started = Instant::now();
    let settings = Settings::read(path)?;
    let directory = &settings.reports;
    let checked = match before::check(&settings, path) {
        // Where there were no reports there are none now.
        Err(faults) if !directory.is_dir() => {
            publish::withdraw(&settings.container)?;
            return Err(faults);
        }
        checked => checked,
    };
    fs::create_dir_all(directory).map_err(|e| Fault::io("create the directory", directory, e))?;
    let _lock = DirectoryLock::take(directory, &Claim::Whole)?;
    let mut run = Run { settings: &settings, observers, steps: Vec::new() };
    let mut report = PipelineReport {
        pipeline: path.to_string_lossy().into_owned(),
        container: settings.container.to_string_lossy().into_owned(),
        reports: directory.to_string_lossy().into_owned(),
        verdict: Verdict::Fail,
        steps: Vec::new(),
        convert: None,
        verify: None,
        score: None,
        publish: None,
        warnings: Vec::new(),
        seconds: 0.0,
    };
    // What an earlier run said of the whole must not outlive this one, however it ends.
    for name in ["pipeline.json", "publish.json"] {
        remove(&directory.join(name))?;
    }
    if let Err(faults) = checked.and_then(|()| run.all(&mut report)) {
        publish::withdraw(&settings.container)?;
        return Err(faults);
    }
    let done = run.steps.len();
    let names = ["convert", "verify", "score-source", "score", "publish"];
    let skipped = |name: &&str| PipelineStep {
        step: (*name).to_owned(),
        status: StepStatus::Skipped,
        detail: "a step before it said no".to_owned(),
        report: None,
        seconds: 0.0,
    };
    report.steps = run.steps;
    report.steps.extend(names[done..].iter().map(skipped));
    let failed = report.steps.iter().any(|step| step.status == StepStatus::Failed);
    report.verdict = if failed { Verdict::Fail } else { Verdict::Pass };
    if failed {
        publish::withdraw(&settings.container)?;
    }
    report.seconds = started.elapsed().as_secs_f64();
    write_report(&directory.join("pipeline.json"), &report)?;
    Ok(report)
}

/// A run under way.
struct Run<'a> {
    settings: &'a Settings,
    observers: &'a Observers<'a>,
    steps: Vec<PipelineStep>,
}

impl Run<'_> {
    /// Step after step, until one says no.
    fn all(&mut self, report: &mut PipelineReport) -> Result<(), Faults> {
        report.convert = Some(self.convert(&mut report.warnings)?);
        let verified = self.verify()?;
        let good = verified.verdict == Verdict::Pass;
        report.verify = Some(verified);
        if !good {
            return Ok(());
        }
        let baseline = self.score_source()?;
        let scored = self.score(&baseline)?;
        report.score = Some(ScoreReport { requests: Vec::new(), ..scored });
        report.publish = Some(self.publish()?);
        Ok(())
    }

    fn report_path(&self, name: &str) -> PathBuf {
        self.settings.reports.join(name)
    }

    /// Notes how a step ended.
    fn ended(&mut self, step: &str, status: StepStatus, detail: String, report: Option<PathBuf>, started: Instant) {
        let report = report.map(|path| path.to_string_lossy().into_owned());
        let seconds = started.elapsed().as_secs_f64();
        self.steps.push(PipelineStep { step: step.to_owned(), status, detail, report, seconds });
    }

    fn convert(&mut self, warnings: &mut Vec<Finding>) -> Result<ConvertReport, Faults> {
        let (started, settings) = (Instant::now(), &self.settings.convert);
        (self.observers.step)("convert");
        let passes = [(Pass::Main, true), (Pass::Mtp, settings.mtp), (Pass::Indexer, settings.indexer)];
        let options = convert::Options {
            settings: settings.recipe.clone(),
            passes: passes.into_iter().filter_map(|(pass, wanted)| wanted.then_some(pass)).collect(),
            follow: settings.follow.then(Follow::default),
            consume: settings.consume,
            allowed: Allowed {
                ambiguous: settings.allow_ambiguous,
                non_finite: settings.allow_non_finite,
                incomplete: settings.allow_incomplete,
            },
            threads: self.settings.threads,
            ..convert::Options::default()
        };
        let checkpoint = &self.settings.checkpoint;
        if let Some(follow) = options.follow {
            convert::wait_for_model(checkpoint, follow, self.observers.progress)?;
        }
        let mut job = Job::prepare(checkpoint, &self.settings.container, options)?;
        job.check_space()?;
        before::check_memory(self.settings, &job)?;
        let finished = job.finished_files();
        (self.observers.planned)(&job);
        let unwanted = passes::of_source(&job, self.settings);
        let mut report = job.run(self.observers.progress)?;
        reword(&mut report.warnings);
        let told = passes::told(&unwanted, self.settings)?;
        warnings.extend(told.iter().map(|fault| Finding::new(Severity::Warning, fault)));
        let path = self.report_path("convert.json");
        write_report(&path, &report)?;
        let status = if finished == report.files.len() { StepStatus::Kept } else { StepStatus::Done };
        let detail = format!("{} files, {} of them of an earlier run", report.files.len(), finished);
        self.ended("convert", status, detail, Some(path), started);
        Ok(report)
    }

    fn verify(&mut self) -> Result<VerifyReport, Faults> {
        let (started, settings) = (Instant::now(), self.settings);
        (self.observers.step)("verify");
        let path = self.report_path("verify.json");
        let state = State::of_verify(settings)?;
        let earlier = state.is_kept(&settings.reports).then(|| read_report::<VerifyReport>(&path)).flatten();
        if let Some(report) = earlier.filter(|report| report.verdict == Verdict::Pass) {
            self.ended("verify", StepStatus::Kept, "the same bytes and options".to_owned(), Some(path), started);
            return Ok(report);
        }
        state.forget(&settings.reports)?;
        let options = verify::Options {
            level: Level::Tokens,
            source: settings.verify.source.then(|| settings.checkpoint.clone()),
            threads: settings.threads,
            tokens: TokenOptions {
                references: settings.verify.references.clone(),
                devices: settings.devices()?,
                memory: settings.memory,
                device_memory: settings.device_memory,
                ..TokenOptions::default()
            },
        };
        let mut report = verify(&settings.container, &options, self.observers.progress)?;
        reword(&mut report.findings);
        write_report(&path, &report)?;
        state.keep(&settings.reports)?;
        let good = report.verdict == Verdict::Pass;
        let status = if good { StepStatus::Done } else { StepStatus::Failed };
        let failed = report.checks.iter().filter(|check| check.status == crate::report::CheckStatus::Fail).count();
        let detail = format!("{} of {} checks failed", failed, report.checks.len());
        self.ended("verify", status, detail, Some(path), started);
        Ok(report)
    }

    /// Scores the source, unless its results are given; the directory of the results.
    fn score_source(&mut self) -> Result<PathBuf, Faults> {
        let (started, settings) = (Instant::now(), self.settings);
        if let Some(baseline) = &settings.score.baseline {
            self.ended("score-source", StepStatus::Skipped, "its results are given".to_owned(), None, started);
            return Ok(baseline.clone());
        }
        (self.observers.step)("score-source");
        let out = self.report_path("source");
        let path = out.join("score.json");
        let state = State::of_source(settings)?;
        if state.is_kept(&settings.reports) && read_report::<ScoreReport>(&path).is_some() {
            self.ended("score-source", StepStatus::Kept, "the same source and inputs".to_owned(), Some(path), started);
            return Ok(out);
        }
        state.forget(&settings.reports)?;
        let options = score::Options { out: Some(out.clone()), ..self.score_options() };
        let report = score(&settings.checkpoint, &options, self.observers.watch)?;
        state.keep(&settings.reports)?;
        let detail = format!("{} requests", report.requests.len());
        self.ended("score-source", StepStatus::Done, detail, Some(path), started);
        Ok(out)
    }

    fn score(&mut self, baseline: &Path) -> Result<ScoreReport, Faults> {
        let started = Instant::now();
        (self.observers.step)("score");
        let out = self.report_path("scores");
        let options = score::Options {
            baseline: Some(baseline.to_owned()),
            out: Some(out.clone()),
            probes: self.settings.score.probes,
            ..self.score_options()
        };
        let report = score(&self.settings.container, &options, self.observers.watch)?;
        // What the rows show is held against the policy by the next step.
        let (requests, excluded) = (report.requests.len(), report.excluded.len());
        let detail = format!("{requests} requests, {excluded} rows without a score");
        let status = if report.tokens == 0 { StepStatus::Kept } else { StepStatus::Done };
        self.ended("score", status, detail, Some(out.join("score.json")), started);
        Ok(report)
    }

    fn score_options(&self) -> score::Options {
        let settings = &self.settings.score;
        score::Options {
            inputs: self.settings.inputs(),
            sampling: Sampling { limit: settings.limit, seed: settings.seed },
            prefix: match settings.prefix.as_deref() {
                None | Some("auto") => PrefixChoice::Auto,
                Some("none") => PrefixChoice::None,
                Some(text) => PrefixChoice::Text(text.to_owned()),
            },
            threads: self.settings.threads,
            memory: self.settings.memory,
            device_memory: self.settings.device_memory,
            ..score::Options::default()
        }
    }

    fn publish(&mut self) -> Result<PublishReport, Faults> {
        let (started, settings) = (Instant::now(), self.settings);
        (self.observers.step)("publish");
        let options = publish::Options {
            reports: vec![self.report_path("verify.json"), self.report_path("scores").join("score.json")],
            repo_id: settings.publish.repo_id.clone(),
            policy: Some(settings.publish.policy.clone()),
            threads: settings.threads,
            ..publish::Options::default()
        };
        let mut report = publish(&settings.container, &options, self.observers.progress)?;
        reword(&mut report.findings);
        let path = self.report_path("publish.json");
        write_report(&path, &report)?;
        let good = report.verdict == Verdict::Pass;
        let status = match (good, report.written.is_empty()) {
            (false, _) => StepStatus::Failed,
            (true, false) => StepStatus::Done,
            (true, true) => StepStatus::Kept,
        };
        let detail = match good {
            true => format!("{} files to upload", report.files.len()),
            false => "the gate is closed".to_owned(),
        };
        self.ended("publish", status, detail, Some(path), started);
        Ok(report)
    }
}

/// Makes findings speak of the pipeline's keys.
fn reword(findings: &mut [Finding]) {
    findings.iter_mut().for_each(|finding| *finding = reworded(finding.clone()));
}

/// Removes a report of an earlier run, if there is one.
fn remove(path: &Path) -> Result<()> {
    match hook::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Fault::io("remove the file", path, e)),
        _ => Ok(()),
    }
}

/// Writes a report whole; the directory holds nothing else, so an earlier one is replaced.
fn write_report<T: Serialize>(path: &Path, report: &T) -> Result<()> {
    write_whole(path, &json_text(report), true)
}

/// A report of an earlier run, if it is there and is one.
fn read_report<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&read_small(path, limits::MAX_REPORT_BYTES).ok()?).ok()
}
