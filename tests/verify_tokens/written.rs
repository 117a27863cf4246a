//! References that are written, and the devices of the report.

use std::fs;
use std::path::Path;

use coliconv::backend::Device;
use coliconv::reference::ReferenceFile;
use coliconv::report::{CheckStatus, Severity, VerifyReport};
use coliconv::verify::TokenOptions;
use serde_json::Value;
use tempfile::TempDir;

use super::support::containers::{fixture, run_json};
use super::{
    DRAFTS, TOKENS, assert_passes, bare, edited, expected, first, kinds, options, status, try_verify, verified, whole,
};

/// Writes references of a model, with these given.
fn write(model: &Path, path: &Path, references: &[&Path]) -> VerifyReport {
    let references = references.iter().map(|path| path.to_path_buf()).collect();
    let tokens = TokenOptions { write_reference: Some(path.to_owned()), references, ..TokenOptions::default() };
    try_verify(model, &options(tokens)).unwrap_or_else(|faults| panic!("{faults}"))
}

#[test]
fn what_is_written_is_what_the_model_says() {
    let container = bare();
    for model in [container.path(), &fixture("nano")] {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("own.json");
        assert_eq!(status(&write(model, &path, &[]), "written"), CheckStatus::Pass);
        let report = verified(model, &[&path]);
        assert_passes(&report);
        assert!(!kinds(&report, Severity::Warning).contains("reference-anonymous"));
        assert_eq!(report.tokens.len(), 3);
        for entry in &report.tokens {
            let (forced, mtp) = (entry.teacher_forced.as_ref().unwrap(), entry.mtp.as_ref().unwrap());
            assert_eq!((forced.matched, forced.near_tie), (forced.total, 0));
            assert_eq!(entry.greedy.as_ref().map(|m| (m.matched, m.total)), Some((48, 48)));
            assert_eq!((entry.max_abs_logprob_diff, mtp.matched, mtp.proposed), (Some(0.0), mtp.total, 47));
        }
        // Written once more it is refused, and stays.
        let written = fs::read(&path).unwrap();
        let again = options(TokenOptions { write_reference: Some(path.clone()), ..TokenOptions::default() });
        assert_eq!(try_verify(model, &again).unwrap_err().iter().next().unwrap().kind.name(), "file-exists");
        assert_eq!(fs::read(&path).unwrap(), written);
    }
}

#[test]
fn what_is_written_is_of_this_model_alone() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("own.json");
    write(&fixture("nano"), &path, &[]);
    // A container has the same fingerprint, but not the same weights.
    let report = verified(whole().path(), &[&path]);
    assert_eq!(kinds(&report, Severity::Error), ["tokens-differ", "logprobs-differ"].into());
    let tokens = TokenOptions { references: vec![path], ..TokenOptions::default() };
    let faults = try_verify(&fixture("tiny"), &options(tokens)).unwrap_err();
    assert_eq!(faults.iter().next().unwrap().kind.name(), "reference-fingerprint");
}

#[test]
fn given_references_lend_their_prompts() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("own.json");
    let container = bare();
    let (_one, sparse) = first("dsa-topk4-g64-mtp-indexer.json");
    let (_other, own) = first(TOKENS);
    assert_passes(&write(container.path(), &path, &[&sparse, &own]));
    let [sparse, own, written] = [&sparse, &own, &path].map(|path| ReferenceFile::read(path).unwrap().references);
    assert_eq!(written.len(), 2);
    assert_eq!((&written[0].prompt_ids, written[0].index_topk), (&sparse[0].prompt_ids, Some(4)));
    assert_eq!((&written[1].full_ids, &written[1].tf_pred), (&own[0].full_ids, &own[0].tf_pred));
    assert_eq!(written[1].index_topk, None);
    assert_passes(&verified(container.path(), &[&path]));
}

#[test]
fn every_reference_has_an_entry_for_every_device() {
    let container = bare();
    let file = expected("nano").join(TOKENS);
    let (_directory, drafts) = first(DRAFTS);
    let tokens = TokenOptions {
        references: vec![file.clone(), drafts.clone()],
        devices: vec![Device::Reference, Device::Cpu],
        ..TokenOptions::default()
    };
    let report = try_verify(container.path(), &options(tokens)).unwrap_or_else(|faults| panic!("{faults}"));
    assert_passes(&report);
    let found: Vec<(&Path, u64, &str)> =
        report.tokens.iter().map(|entry| (Path::new(&entry.reference), entry.number, &*entry.device)).collect();
    let references = (0..6).map(|number| (file.as_path(), number)).chain([(drafts.as_path(), 0)]);
    let each = references.flat_map(|(path, number)| [(path, number, "reference"), (path, number, "cpu")]);
    assert_eq!(found, each.collect::<Vec<_>>());
    assert!(report.tokens.iter().all(|entry| entry.backend == entry.device));
    for said in ["on the reference backend", "on the cpu backend"] {
        assert!(
            report.checks.iter().any(|check| check.name == "forward" && check.detail.contains(said)),
            "{report:#?}"
        );
    }
}

#[test]
fn without_a_reference_the_reference_backend_makes_some() {
    let container = whole();
    let report = verified(container.path(), &[]);
    assert_passes(&report);
    assert_eq!(status(&report, "tokens"), CheckStatus::Pass);
    assert_eq!(report.tokens.len(), 3);
    for entry in &report.tokens {
        assert_eq!((&*entry.reference, &*entry.device, &*entry.backend), ("reference backend", "cpu", "cpu"));
        let (forced, mtp) = (entry.teacher_forced.as_ref().unwrap(), entry.mtp.as_ref().unwrap());
        assert_eq!((forced.matched, mtp.matched), (forced.total, mtp.total));
        assert_eq!(entry.greedy.as_ref().map(|m| (m.matched, m.total)), Some((16, 16)));
        assert!(entry.max_abs_logprob_diff.unwrap() < 1e-4);
    }
    // The reference backend with itself, or too large, says nothing.
    let alone = TokenOptions { devices: vec![Device::Reference], ..TokenOptions::default() };
    let small = TokenOptions { memory: Some(20 << 20), ..TokenOptions::default() };
    for tokens in [alone, small] {
        let report = try_verify(container.path(), &options(tokens)).unwrap_or_else(|faults| panic!("{faults}"));
        assert_passes(&report);
        assert_eq!((status(&report, "tokens"), report.tokens.len()), (CheckStatus::Skipped, 0));
    }
}

#[test]
fn a_report_does_not_replace_what_was_written_with_it() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("both.json");
    let both = path.to_str().unwrap();
    let (code, _) = run_json(&["verify", "--write-reference", both, "--report", both], &[&fixture("nano")]);
    assert_eq!(code, 2);
    assert_eq!(ReferenceFile::read(&path).unwrap().references.len(), 3);
}

#[test]
fn keys_that_do_not_apply_are_null() {
    let (_directory, drafts) = edited(DRAFTS, |_| {});
    let (_, document) = run_json(&["verify", "--reference", drafts.to_str().unwrap()], &[bare().path()]);
    let entry = &document["tokens"][0];
    for key in ["teacher_forced", "greedy", "max_abs_logprob_diff", "gpu"] {
        assert_eq!(entry.get(key), Some(&Value::Null), "{key}");
    }
    assert_eq!(entry["mtp"], serde_json::json!({"matched": 53, "total": 53, "proposed": 47, "accepted": 28}));
}
