//! `coliconv pipeline`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::progress::{Meter, duration, end_on_request};
use super::{Talk, convert, findings_text, print, print_json, publish, refuse_findings, score, tell, text};
use crate::convert::Job;
use crate::error::{Faults, escaped};
use crate::pipeline::{Observers, reworded, run as run_pipeline};
use crate::report::{Finding, PipelineReport, Severity, Verdict};

/// Arguments of `pipeline`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// What each step is to do, as JSON
    pipeline: PathBuf,
    #[command(flatten)]
    pub(super) talk: Talk,
}

/// Runs `pipeline`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Faults> {
    let Talk { json, quiet } = arguments.talk;
    end_on_request();
    let step = |name: &str| {
        if !quiet {
            tell(&format!("{name}\n"));
        }
    };
    let planned = |job: &Job| {
        let warnings: Vec<Finding> = job.warnings().iter().map(|fault| reworded(Finding::accepted(fault))).collect();
        tell(&findings_text(&warnings));
        if !quiet {
            tell(&convert::plan_text(job.source(), None, job));
        }
    };
    let (progress, watch) = (Meter::new(quiet), score::Meter::new(quiet));
    let observers = Observers { progress: &progress, watch: &watch, step: &step, planned: &planned };
    let report = match run_pipeline(&arguments.pipeline, &observers) {
        Ok(report) => report,
        Err(faults) => {
            let refused = faults.iter().map(|fault| reworded(Finding::new(Severity::Error, fault))).collect();
            return Ok(refuse_findings(refused, json));
        }
    };
    let of_score = report.score.iter().flat_map(|score| score.warnings.iter().cloned());
    let warnings: Vec<Finding> = report.warnings.iter().cloned().chain(of_score).collect();
    tell(&findings_text(&warnings));
    let printed = if json { print_json(&report) } else { print(&report_text(&report)) };
    let good = report.verdict == Verdict::Pass;
    Ok(if printed == ExitCode::SUCCESS && !good { ExitCode::from(1) } else { printed })
}

fn report_text(report: &PipelineReport) -> String {
    let row = |step: &crate::report::PipelineStep| {
        let path = step.report.as_deref().map(|path| escaped(path).to_string()).unwrap_or_default();
        let took = duration(step.seconds);
        vec![step.step.clone(), step.status.name().to_owned(), took, step.detail.clone(), path]
    };
    let rows = report.steps.iter().map(row).collect();
    let mut out = text::table(&["step", "status", "time", "detail", "report"], &["time"], rows);
    if let Some(verify) = report.verify.as_ref().filter(|verify| verify.verdict == Verdict::Fail) {
        out += &format!("\n{}", findings_text(&verify.findings));
    }
    match &report.publish {
        Some(published) => out + "\n" + &publish::report_text(published),
        None => out + &format!("\nverdict: {}\n", report.verdict.name()),
    }
}
