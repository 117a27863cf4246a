//! `coliconv publish`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::progress::Meter;
use super::{Talk, findings_text, print, print_json, size, text};
use crate::error::{Faults, escaped};
use crate::publish::policy::Policy;
use crate::publish::{Options, publish, withdraw};
use crate::report::{PublishReport, Severity, Verdict};

/// Arguments of `publish`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Directory of the container
    container: PathBuf,
    /// A report of `verify --report FILE`, or the score.json of `score --out DIR`; may be given several times
    #[arg(long, value_name = "FILE")]
    report: Vec<PathBuf>,
    /// The repository that the container is to become, for the commands of the upload
    #[arg(long, value_name = "ORG/NAME")]
    repo_id: Option<String>,
    /// How good the container must be, as JSON [default: what every sound container reaches]
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Compare with a listing of the repository, as JSON; alone, nothing else is done
    #[arg(long, value_name = "FILE")]
    check_listing: Option<PathBuf>,
    /// Threads; 0 for one per core [default: 0]
    #[arg(long, value_name = "N", value_parser = super::threads, default_value_t = 0, hide_default_value = true)]
    threads: usize,
    #[command(flatten)]
    pub(super) talk: Talk,
}

/// Runs `publish`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Faults> {
    let policy = arguments.policy.as_deref().map(Policy::read).transpose();
    if policy.is_err() {
        withdraw(&arguments.container)?;
    }
    let options = Options {
        reports: arguments.report.clone(),
        repo_id: arguments.repo_id.clone(),
        policy: policy?,
        listing: arguments.check_listing.clone(),
        threads: arguments.threads,
    };
    let report = publish(&arguments.container, &options, &Meter::new(arguments.talk.quiet))?;
    let printed = if arguments.talk.json { print_json(&report) } else { print(&report_text(&report)) };
    let good = report.verdict == Verdict::Pass;
    Ok(if printed == ExitCode::SUCCESS && !good { ExitCode::from(1) } else { printed })
}

/// A report for people: checks, what is wrong, what was written, what to do.
pub(super) fn report_text(report: &PublishReport) -> String {
    let mut out = escaped(&report.container).to_string();
    if let Some(id) = &report.repo_id {
        out += &format!(" → {}", escaped(id));
    }
    let row = |check: &crate::report::VerifyCheck| {
        vec![check.name.clone(), check.status.name().to_owned(), escaped(&check.detail).to_string()]
    };
    let rows = report.checks.iter().map(row).collect();
    out += &format!("\n\n{}", text::table(&["check", "status", "detail"], &[], rows));
    if !report.findings.is_empty() {
        out += &format!("\n{}", findings_text(&report.findings));
    }
    if let Some(listing) = &report.listing {
        out += &format!("\n{} of {} files are in the repository as they should be", listing.matched, listing.expected);
        let others = [
            ("short", &listing.short),
            ("wrong", &listing.wrong),
            ("missing", &listing.missing),
            ("extra", &listing.extra),
        ];
        for (what, names) in others.into_iter().filter(|(_, names)| !names.is_empty()) {
            out += &format!(", {} {what}", names.len());
        }
        out.push('\n');
    }
    if let Some(plan) = &report.plan {
        out += &format!(
            "\n{} files, {} bytes ({}), in the order of {}\n",
            report.files.len(),
            size::grouped(report.total_bytes),
            size::human(report.total_bytes),
            escaped(plan)
        );
        out += &match report.written.len() {
            0 => "nothing was written: everything was there already\n".to_owned(),
            n => format!("written: {n} file{}, nothing was uploaded\n", if n == 1 { "" } else { "s" }),
        };
        out += &match report.steps.is_empty() {
            true => "give --repo-id ORG/NAME for the commands of the upload\n".to_owned(),
            false => steps_text(report),
        };
    }
    let errors = report.findings.iter().filter(|finding| finding.severity == Severity::Error).count();
    let wrong = match errors {
        0 => String::new(),
        1 => ", 1 error".to_owned(),
        n => format!(", {n} errors"),
    };
    out + &format!("\nverdict: {}{wrong}\n", report.verdict.name())
}

/// The commands of the upload, in order.
fn steps_text(report: &PublishReport) -> String {
    let mut out = "\nto upload:\n".to_owned();
    for step in &report.steps {
        out += &format!("\n# {}\n{}\n", step.what, step.command);
        if let Some(command) = &step.with_hub_1 {
            out += &format!("# with huggingface_hub 1 in its place:\n# {command}\n");
        }
    }
    out
}
