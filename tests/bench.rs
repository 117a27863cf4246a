//! `coliconv bench`: that it runs and says what it should; figures are never asserted.

mod support;

use std::fs;

use support::containers::{assert_valid, run, run_json};
use tempfile::TempDir;

#[test]
fn inspect_is_measured_and_leaves_nothing() {
    let directory = TempDir::new().unwrap();
    let arguments = ["bench", "inspect", "--size", "2M", "--layers", "5", "--rounds", "1", "--dir"];
    let (code, report) = run_json(&arguments, &[directory.path()]);
    assert_eq!(code, 0, "{report}");
    assert_valid("bench", &report);
    let measures = report["measures"].as_array().unwrap();
    assert!(measures.iter().all(|measure| measure["seconds"].as_f64().unwrap() > 0.0));
    assert_eq!(measures.iter().filter(|measure| measure["of_limit"].is_f64()).count(), 2);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn other_targets_are_refused_by_name() {
    for target in ["convert", "kernels", "decode", "score"] {
        let output = run(&["bench", target], &[]);
        assert_eq!(output.status.code(), Some(2));
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(text, format!("error: `coliconv bench {target}` is not available in this version\n"));
    }
    assert_eq!(run(&["bench"], &[]).status.code(), Some(2));
}
