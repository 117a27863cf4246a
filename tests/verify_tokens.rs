//! Level tokens of `verify`: every reference of the fixtures, what it says no to and why, what it refuses, references that
//! it writes, and other models of the family.

#[path = "verify_tokens/family.rs"]
mod family;
#[path = "verify_tokens/references.rs"]
mod references;
#[path = "verify_tokens/refused.rs"]
mod refused;
#[path = "verify_tokens/says_no.rs"]
mod says_no;
mod support;
#[path = "verify_tokens/written.rs"]
mod written;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use coliconv::convert;
use coliconv::error::Faults;
use coliconv::progress::Silent;
use coliconv::report::{CheckStatus, Finding, Severity, Verdict, VerifyDocument, VerifyReport};
use coliconv::roles::Pass;
use coliconv::verify::{Level, Options, TokenOptions, verify};
use serde_json::Value;
use support::containers::{container, fixture};
use tempfile::TempDir;

const TOKENS: &str = "tokens-g64-mtp-indexer.json";
const DRAFTS: &str = "mtp-g64-mtp-indexer.json";

/// All passes of nano in groups of 64, with a manifest.
fn whole() -> TempDir {
    container("nano", "whole", || convert::Options { passes: Pass::ALL.to_vec(), ..Default::default() })
}

/// The same weights without one.
fn bare() -> TempDir {
    container("nano", "bare", || convert::Options { passes: Pass::ALL.to_vec(), bare: true, ..Default::default() })
}

fn expected(checkpoint: &str) -> PathBuf {
    fixture(checkpoint).join("expected")
}

fn options(tokens: TokenOptions) -> Options {
    Options { level: Level::Tokens, source: None, threads: 0, tokens }
}

/// Runs every level and checks that the report is as its schema says.
fn try_verify(directory: &Path, options: &Options) -> Result<VerifyReport, Faults> {
    static SCHEMA: OnceLock<jsonschema::Validator> = OnceLock::new();
    let schema = || jsonschema::validator_for(schemars::schema_for!(VerifyDocument).as_value()).unwrap();
    let report = verify(directory, options, &Silent)?;
    let document = serde_json::to_value(&report).unwrap();
    let wrong: Vec<String> = SCHEMA.get_or_init(schema).iter_errors(&document).map(|e| e.to_string()).collect();
    assert_eq!(wrong, [""; 0]);
    Ok(report)
}

/// Every level, with these references.
fn verified(directory: &Path, references: &[&PathBuf]) -> VerifyReport {
    let references = references.iter().map(|path| path.to_path_buf()).collect();
    let tokens = TokenOptions { references, ..TokenOptions::default() };
    try_verify(directory, &options(tokens)).unwrap_or_else(|faults| panic!("{faults}"))
}

/// The first reference of a file of nano, changed and stored alone.
fn edited(file: &str, edit: impl FnOnce(&mut Value)) -> (TempDir, PathBuf) {
    let text = fs::read(expected("nano").join(file)).unwrap();
    let mut reference = serde_json::from_slice::<Value>(&text).unwrap()["references"][0].take();
    edit(&mut reference);
    stored(&reference)
}

/// A reference file with this text.
fn stored(value: &Value) -> (TempDir, PathBuf) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("reference.json");
    fs::write(&path, value.to_string()).unwrap();
    (directory, path)
}

/// The first reference of a file of nano as it is.
fn first(file: &str) -> (TempDir, PathBuf) {
    edited(file, |_| {})
}

fn of_severity(report: &VerifyReport, severity: Severity) -> impl Iterator<Item = &Finding> {
    report.findings.iter().filter(move |finding| finding.severity == severity)
}

fn kinds(report: &VerifyReport, severity: Severity) -> BTreeSet<&str> {
    of_severity(report, severity).map(|finding| finding.kind.as_str()).collect()
}

fn status(report: &VerifyReport, check: &str) -> CheckStatus {
    let found = report.checks.iter().find(|found| found.name == check);
    found.unwrap_or_else(|| panic!("no check {check}: {report:#?}")).status
}

fn assert_passes(report: &VerifyReport) {
    assert_eq!(kinds(report, Severity::Error), BTreeSet::new(), "{report:#?}");
    assert_eq!((report.verdict, status(report, "forward")), (Verdict::Pass, CheckStatus::Pass));
}

/// Fails unless exactly these checks failed, for exactly these reasons.
fn assert_fails(report: &VerifyReport, checks: &[&str], reasons: &[&str]) {
    let failed = report.checks.iter().filter(|check| check.status == CheckStatus::Fail).map(|check| &*check.name);
    assert_eq!(failed.collect::<BTreeSet<_>>(), checks.iter().copied().collect(), "{report:#?}");
    assert_eq!(kinds(report, Severity::Error), reasons.iter().copied().collect(), "{report:#?}");
    assert_eq!(report.verdict, Verdict::Fail);
}
