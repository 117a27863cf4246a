//! `score`: the numbers of other implementations, what is refused and what is never scored, interrupted runs, and the
//! comparison with a baseline.

#[path = "score/bad_rows.rs"]
mod bad_rows;
#[path = "score/baseline.rs"]
mod baseline;
#[path = "score/numbers.rs"]
mod numbers;
#[path = "score/page.rs"]
mod page;
#[path = "score/published.rs"]
mod published;
#[path = "score/results.rs"]
mod results;
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use coliconv::convert;
use coliconv::error::Faults;
use coliconv::report::{ScoreDocument, ScoreReport};
use coliconv::roles::Pass;
use coliconv::score::encode::PrefixChoice;
use coliconv::score::input::{Given, Kind};
use coliconv::score::{Options, Unwatched, score};
use serde_json::Value;
use support::containers::{container, fixture};
use tempfile::TempDir;

/// The container that the README makes.
fn g64() -> TempDir {
    container("nano", "whole", || convert::Options { passes: Pass::ALL.to_vec(), ..Default::default() })
}

/// A file of nano's expected values.
fn expected(name: &str) -> PathBuf {
    fixture("nano").join("expected").join(name)
}

fn given(kind: Kind, name: &str, path: impl Into<PathBuf>) -> Given {
    Given { kind, name: name.into(), path: path.into() }
}

/// The first rows of a file of nano's, as a file of its own.
fn head(directory: &Path, name: &str, rows: usize) -> PathBuf {
    let text = fs::read_to_string(expected(name)).unwrap();
    let lines: Vec<&str> = text.lines().take(rows).collect();
    written(directory, name, &(lines.join("\n") + "\n"))
}

fn written(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, text).unwrap();
    path
}

/// Scores and checks that the report is as its schema says.
fn try_score(model: &Path, options: &Options) -> Result<ScoreReport, Faults> {
    static SCHEMA: OnceLock<jsonschema::Validator> = OnceLock::new();
    let schema = || jsonschema::validator_for(schemars::schema_for!(ScoreDocument).as_value()).unwrap();
    let report = score(model, options, &Unwatched)?;
    let document = serde_json::to_value(&report).unwrap();
    let wrong: Vec<String> = SCHEMA.get_or_init(schema).iter_errors(&document).map(|e| e.to_string()).collect();
    assert_eq!(wrong, [""; 0]);
    Ok(report)
}

fn scored(model: &Path, options: &Options) -> ScoreReport {
    try_score(model, options).unwrap_or_else(|faults| panic!("{faults}"))
}

/// The kinds of a refusal.
fn refusal(model: &Path, options: &Options) -> Vec<&'static str> {
    try_score(model, options).unwrap_err().iter().map(|fault| fault.kind.name()).collect()
}

fn of(inputs: Vec<Given>) -> Options {
    Options { inputs, ..Options::default() }
}

/// The log-probabilities of an input, row by row.
fn logprobs(report: &ScoreReport, input: &str) -> Vec<Vec<f64>> {
    let mut rows: Vec<(u64, Vec<f64>)> = Vec::new();
    for request in report.requests.iter().filter(|request| request.input == input) {
        let logprob = request.logprob.unwrap_or(f64::NAN);
        match rows.last_mut() {
            Some((row, list)) if *row == request.row => list.push(logprob),
            _ => rows.push((request.row, vec![logprob])),
        }
    }
    rows.into_iter().map(|(_, list)| list).collect()
}

fn numbers_of(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// The report without what depends on time.
fn timeless(report: &ScoreReport) -> ScoreReport {
    ScoreReport {
        tokens: 0,
        seconds: 0.0,
        loading_seconds: 0.0,
        tokens_per_second: None,
        shares: None,
        experts: None,
        peak_anonymous_bytes: None,
        ..report.clone()
    }
}

fn with_prefix(prefix: &str) -> PrefixChoice {
    match prefix {
        "" => PrefixChoice::None,
        text => PrefixChoice::Text(text.to_owned()),
    }
}
