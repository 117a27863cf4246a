//! `verify --part` and `--finish`: parts make the report that one run makes, and refuse to be joined with what is not theirs.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use coliconv::backend::Device;
use coliconv::convert;
use coliconv::part::Part;
use coliconv::progress::Silent;
use coliconv::report::{CheckStatus, Severity, Verdict, VerifyReport};
use coliconv::roles::Pass;
use coliconv::verify::parts::{finish, part_file, verify_part};
use coliconv::verify::{Level, Options, TokenOptions, verify};
use serde_json::Value;
use support::containers::*;
use support::shards::edit_file;
use tempfile::TempDir;

const EXPERT: &str = "model.layers.1.mlp.experts.3.up_proj.weight";

/// All passes of nano in groups of 64, with a manifest.
fn whole() -> TempDir {
    container("nano", "whole", || convert::Options { passes: Pass::ALL.to_vec(), ..Default::default() })
}

/// The same weights without one.
fn bare() -> TempDir {
    container("nano", "bare", || convert::Options { passes: Pass::ALL.to_vec(), bare: true, ..Default::default() })
}

fn at(level: Level) -> Options {
    Options { level, source: None, threads: 0, tokens: TokenOptions::default() }
}

/// Every level, with the source and all references of two files.
fn everything() -> Options {
    let names = ["mtp-g64-mtp-indexer.json", "tokens-g64-mtp-indexer.json"];
    let references = names.map(|name| fixture("nano").join("expected").join(name)).to_vec();
    let tokens = TokenOptions { references, ..TokenOptions::default() };
    Options { source: Some(fixture("nano")), tokens, ..at(Level::Tokens) }
}

/// A directory for reports, and the report of the whole in it.
fn place() -> (TempDir, PathBuf) {
    let directory = TempDir::new().unwrap();
    let report = directory.path().join("verify.json");
    (directory, report)
}

/// Runs a part and stores its report.
fn store(model: &Path, options: &Options, part: Part, report: &Path) -> VerifyReport {
    let found = verify_part(model, options, part, &Silent).unwrap_or_else(|faults| panic!("{faults}"));
    fs::write(part_file(report, part), serde_json::to_vec(&found).unwrap()).unwrap();
    found
}

/// Runs all parts, the last one first.
fn parts(model: &Path, options: &Options, of: usize, report: &Path) -> Vec<VerifyReport> {
    let part = |number| store(model, options, Part::new(number, of).unwrap(), report);
    let mut found: Vec<VerifyReport> = (1..=of).rev().map(part).collect();
    found.reverse();
    found
}

/// A report without what depends on the time and on memory.
fn timeless(report: &VerifyReport) -> Value {
    let mut value = serde_json::to_value(report).unwrap();
    for key in ["seconds", "experts"] {
        value.as_object_mut().unwrap().remove(key);
    }
    value
}

fn joined(model: &Path, options: &Options, report: &Path) -> VerifyReport {
    finish(model, options, report, &Silent).unwrap_or_else(|faults| panic!("{faults}"))
}

/// Why parts cannot be joined.
fn refused(model: &Path, options: &Options, report: &Path) -> String {
    finish(model, options, report, &Silent).unwrap_err().to_string()
}

/// Fails unless parts of each count make the report of one run.
#[track_caller]
fn assert_same(model: &Path, options: &Options, counts: &[usize]) -> VerifyReport {
    let single = verify(model, options, &Silent).unwrap_or_else(|faults| panic!("{faults}"));
    for &of in counts {
        let (_kept, report) = place();
        parts(model, options, of, &report);
        let whole = joined(model, options, &report);
        assert_eq!(timeless(&whole), timeless(&single), "{of} parts");
    }
    single
}

#[test]
fn parts_make_what_one_run_makes() {
    let directory = whole();
    // More parts than files, references and devices.
    let report = assert_same(directory.path(), &everything(), &[1, 2, 3, 23]);
    assert_eq!(report.verdict, Verdict::Pass);
    assert!(report.tokens.len() > 3 && report.source_agreement.is_some() && report.model_sha256.is_some());
}

#[test]
fn every_level_and_kind() {
    let directory = whole();
    for level in [Level::Structure, Level::Payload] {
        assert_same(directory.path(), &at(level), &[2]);
    }
    let directory = bare();
    let weights = Options { source: Some(fixture("nano")), ..at(Level::Weights) };
    assert_same(directory.path(), &at(Level::Payload), &[3]);
    assert_same(directory.path(), &weights, &[3]);
    assert_same(&fixture("nano"), &at(Level::Payload), &[3]);
    // Texts of its own, with and without the source.
    assert_same(directory.path(), &at(Level::Tokens), &[2]);
    assert_same(directory.path(), &Options { source: weights.source, ..at(Level::Tokens) }, &[3, 5]);
}

#[test]
fn devices_and_references_twice() {
    let directory = whole();
    let mut options = Options { source: None, ..everything() };
    options.tokens.devices = vec![Device::Reference, Device::Cpu, Device::Reference];
    options.tokens.references.truncate(1);
    options.tokens.references.push(options.tokens.references[0].clone());
    assert_same(directory.path(), &options, &[3]);
}

#[test]
fn damage_is_found_by_the_part_that_has_it() {
    let directory = whole();
    edit_tensor(directory.path(), EXPERT, |bytes| bytes[7] ^= 1);
    let single = assert_same(directory.path(), &at(Level::Payload), &[2, 3]);
    assert_eq!(single.verdict, Verdict::Fail);
    let (_kept, report) = place();
    let found = parts(directory.path(), &at(Level::Payload), 3, &report);
    let failed = found.iter().filter(|part| part.verdict == Verdict::Fail);
    assert_eq!(failed.count(), 1, "one part has the file");
    let whole = joined(directory.path(), &at(Level::Payload), &report);
    assert_eq!((whole.verdict, whole.model_sha256, whole.files.len()), (Verdict::Fail, None, 0));

    // Several weights with findings, in the order of one run; and what is not the source's.
    let directory = bare();
    for expert in 0..7 {
        let name = EXPERT.replace(".3.", &format!(".{expert}."));
        edit_tensor(directory.path(), &name, |bytes| bytes[7] ^= 4);
    }
    let options = Options { source: Some(fixture("nano")), ..at(Level::Weights) };
    let single = assert_same(directory.path(), &options, &[2, 3]);
    assert!(single.findings.iter().filter(|finding| finding.severity == Severity::Error).count() > 3);
}

#[test]
fn a_reference_of_something_else_fails_in_its_part() {
    let directory = whole();
    let mut options = Options { source: None, ..everything() };
    let text = fs::read_to_string(&options.tokens.references[1]).unwrap();
    let mut file: Value = serde_json::from_str(&text).unwrap();
    let predicted = &mut file["references"][1]["tf_pred"][3];
    *predicted = Value::from((predicted.as_u64().unwrap() + 1) % 100);
    let (_kept, report) = place();
    options.tokens.references = vec![report.with_file_name("reference.json")];
    fs::write(&options.tokens.references[0], file.to_string()).unwrap();
    let single = assert_same(directory.path(), &options, &[1, 2, 3]);
    assert_eq!(single.verdict, Verdict::Fail);
    let found = parts(directory.path(), &options, 2, &report);
    assert_eq!(found.iter().map(|part| part.verdict).collect::<Vec<_>>(), [Verdict::Pass, Verdict::Fail]);
    let forward = |part: &VerifyReport| part.checks.iter().find(|check| check.name == "forward").unwrap().status;
    assert_eq!(found.iter().map(forward).collect::<Vec<_>>(), [CheckStatus::Pass, CheckStatus::Skipped]);
}

#[test]
fn an_unsound_structure() {
    let directory = whole();
    fs::remove_file(directory.path().join("out-00002.safetensors")).unwrap();
    let single = assert_same(directory.path(), &everything(), &[2]);
    assert_eq!(single.verdict, Verdict::Fail);
}

#[test]
fn parts_that_are_not_there() {
    let directory = whole();
    let options = at(Level::Payload);
    let (_kept, report) = place();
    let text = refused(directory.path(), &options, &report);
    assert!(text.contains("no reports of parts beside it, as verify-K-of-N.json would be"), "{text}");
    parts(directory.path(), &options, 4, &report);
    for number in [2, 3] {
        fs::remove_file(part_file(&report, Part::new(number, 4).unwrap())).unwrap();
    }
    let text = refused(directory.path(), &options, &report);
    assert!(text.contains("the reports of 2 parts are missing: 2/4, 3/4"), "{text}");
    store(directory.path(), &options, Part::new(1, 2).unwrap(), &report);
    let text = refused(directory.path(), &options, &report);
    assert!(text.contains("a verification in 2 parts and of one in 4"), "{text}");
}

/// Fails unless parts are refused for this reason, both of them by name.
#[track_caller]
fn assert_other(model: &Path, options: &Options, report: &Path, what: &str) {
    let text = refused(model, options, report);
    for part in ["verify-1-of-2.json", "verify-2-of-2.json"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(text.matches(&format!("of another verification: its {what} is ")).count(), 2, "{text}");
}

#[test]
fn parts_of_something_else() {
    let directory = whole();
    let (_kept, report) = place();
    let options = Options { source: None, ..everything() };
    parts(directory.path(), &options, 2, &report);
    assert_other(directory.path(), &at(Level::Payload), &report, "level");
    let with_source = Options { source: Some(fixture("nano")), ..options.clone() };
    assert_other(directory.path(), &with_source, &report, "source");
    let mut other = options.clone();
    other.tokens.references.truncate(1);
    assert_other(directory.path(), &other, &report, "reference");
    let mut other = options.clone();
    other.tokens.devices = vec![Device::Reference];
    assert_other(directory.path(), &other, &report, "device");
    assert_other(bare().path(), &options, &report, "model");
    let mut writing = options.clone();
    writing.tokens.write_reference = Some(report.with_file_name("written.json"));
    assert!(refused(directory.path(), &writing, &report).contains("--write-reference says nothing without"));
    let part = verify_part(directory.path(), &writing, Part::new(1, 2).unwrap(), &Silent);
    assert!(part.unwrap_err().to_string().contains("--write-reference says nothing without"));
    // Nothing was wrong with them.
    joined(directory.path(), &options, &report);
    edit_file(&directory.path().join("out-00001.safetensors"), |bytes| *bytes.last_mut().unwrap() ^= 1);
    assert_other(directory.path(), &options, &report, "model");
}

#[test]
fn a_structure_that_changed() {
    let directory = whole();
    let (_kept, report) = place();
    parts(directory.path(), &at(Level::Payload), 2, &report);
    fs::remove_file(directory.path().join("tokenizer_config.json")).unwrap();
    assert_other(directory.path(), &at(Level::Payload), &report, "check manifest");
}

/// Without a manifest nothing says what the bytes were; beginnings and ends of the files stay the same here.
#[test]
fn a_file_that_changed_in_its_middle_between_two_parts() {
    let (model, (_reports, report)) = (bare(), place());
    let options = at(Level::Payload);
    parts(model.path(), &options, 2, &report);
    edit_tensor(model.path(), EXPERT, |bytes| bytes[7] ^= 1);
    assert_other(model.path(), &options, &report, "time of change");
    // Seen by the second part alone it does not go with the first.
    store(model.path(), &options, Part::new(2, 2).unwrap(), &report);
    let text = refused(model.path(), &options, &report);
    assert!(text.contains("verify-1-of-2.json: ") && text.contains("its time of change is "), "{text}");
    parts(model.path(), &options, 2, &report);
    joined(model.path(), &options, &report);
    // A source has no manifest either.
    let (model, source) = (whole(), copy(&fixture("nano")));
    let options = Options { source: Some(source.path().to_owned()), ..at(Level::Weights) };
    parts(model.path(), &options, 2, &report);
    edit_tensor(source.path(), EXPERT, |bytes| bytes[7] ^= 1);
    assert_other(model.path(), &options, &report, "source's time of change");
}

#[test]
fn reports_that_are_not_of_parts() {
    let directory = whole();
    let options = at(Level::Payload);
    let (_kept, report) = place();
    parts(directory.path(), &options, 2, &report);
    let second = part_file(&report, Part::new(2, 2).unwrap());
    fs::copy(part_file(&report, Part::new(1, 2).unwrap()), &second).unwrap();
    let text = refused(directory.path(), &options, &report);
    assert!(text.contains("its part is 1/2, here it is 2/2"), "{text}");
    let single = verify(directory.path(), &options, &Silent).unwrap();
    fs::write(&second, serde_json::to_vec(&single).unwrap()).unwrap();
    let text = refused(directory.path(), &options, &report);
    assert!(text.contains("its part is the whole, here it is 2/2"), "{text}");
    fs::write(&second, "{}").unwrap();
    assert!(refused(directory.path(), &options, &report).contains("no report of `coliconv verify`"));
}

#[test]
fn the_command() {
    let directory = whole();
    let (_kept, report) = place();
    let level = ["verify", "--quiet", "--level", "payload"];
    let path = report.to_str().unwrap();
    let run = |more: &[&str]| run(&[&level[..], more].concat(), &[directory.path()]);
    for flag in [&["--part", "1/2"][..], &["--finish"]] {
        let output = run(flag);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("says nothing without --report"));
    }
    for number in 1..=2 {
        let (code, document) = run_json(
            &["verify", "--level", "payload", "--part", &format!("{number}/2"), "--report", path],
            &[directory.path()],
        );
        assert_eq!((code, document["part"]["part"].as_str()), (0, Some(&*format!("{number}/2"))));
        assert_valid("verify", &document);
    }
    assert!(!report.exists());
    let output = run(&["--part", "2/2", "--report", path]);
    let text = redacted(&output.stdout, &[(directory.path(), "CONTAINER")]);
    insta::assert_snapshot!("part", text);
    assert_eq!(run(&["--finish", "--report", path]).status.code(), Some(0));
    let whole: VerifyReport = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    assert_eq!((whole.verdict, whole.part), (Verdict::Pass, None));
    edit_tensor(directory.path(), EXPERT, |bytes| bytes[7] ^= 1);
    let codes: Vec<Option<i32>> =
        (1..=2).map(|k| run(&["--part", &format!("{k}/2"), "--report", path]).status.code()).collect();
    assert!(codes.contains(&Some(0)) && codes.contains(&Some(1)), "{codes:?}");
    assert_eq!(run(&["--finish", "--report", path]).status.code(), Some(1));
}
