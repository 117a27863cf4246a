//! `convert --verify`: what was converted is verified at once.

mod support;

use std::fs;

use serde_json::Value;
use support::containers::{assert_valid, edit_tensor, redacted};
use support::convert::{Place, text};

const PASSES: [&str; 3] = ["--mtp", "--indexer", "--verify"];

fn check<'v>(report: &'v Value, name: &str) -> &'v Value {
    let checks = report["verify"]["checks"].as_array().unwrap_or_else(|| panic!("{report:#}"));
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no check {name}: {checks:#?}"))
}

/// Exit code and document.
fn run(place: &Place, arguments: &[&str]) -> (i32, Value) {
    let output = place.command(arguments).args(["--json", "--quiet"]).output().unwrap();
    let document: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output.stderr)));
    assert_valid("convert", &document);
    (output.status.code().unwrap(), document)
}

#[test]
fn the_report_holds_that_of_verify() {
    let place = Place::copy("nano");
    let (code, report) = run(&place, &PASSES);
    assert_eq!((code, &report["verify"]["verdict"]), (0, &"pass".into()), "{report:#}");
    assert_eq!((&report["verify"]["level"], &report["complete"]), (&"tokens".into(), &true.into()));
    assert_eq!(report["verify"]["source"], place.source.to_str().unwrap());
    for name in ["checksums", "weights", "tokens", "source"] {
        assert_eq!(check(&report, name)["status"], "pass", "{name}");
    }
    assert_eq!(report["verify"]["tokens"][0]["device"], "cpu");
    let without = run(&place, &["--mtp", "--indexer"]).1;
    assert_eq!(without.get("verify"), None);
}

#[test]
fn the_text_goes_on_with_the_verdict() {
    let place = Place::copy("nano");
    let output = place.output(&[&PASSES[..], &["--quiet"]].concat());
    assert_eq!(output.status.code(), Some(0));
    let told = redacted(&output.stdout, &[(&place.source, "SOURCE"), (&place.container, "CONTAINER")]);
    // Space, time and rounding are other ones each time.
    let ends = [" in CONTAINER", " on the cpu backend", "; log-probabilities", " read, "];
    let cut = |line: &str| ends.iter().fold(line.to_owned(), |line, end| line.split(end).next().unwrap().to_owned());
    let lines = told.lines().filter(|line| !line.starts_with("disk needed")).map(cut);
    let lines: Vec<String> = lines.collect();
    insta::assert_snapshot!("text", lines.join("\n"));
}

#[test]
fn a_bad_source_gives_a_bad_verdict_and_the_container_stays() {
    let place = Place::copy("nano");
    // What is written is what stands in the source: finite numbers that overflow when they are multiplied.
    edit_tensor(&place.source, "model.norm.weight", |bytes| {
        let huge = if bytes.len() == 512 { vec![0x7f, 0x7f] } else { f32::MAX.to_be_bytes().to_vec() };
        bytes
            .chunks_exact_mut(huge.len())
            .for_each(|value| value.copy_from_slice(&huge.iter().rev().copied().collect::<Vec<_>>()));
    });
    let (code, report) = run(&place, &PASSES);
    assert_eq!((code, &report["verify"]["verdict"]), (1, &"fail".into()), "{report:#}");
    assert_eq!(check(&report, "forward")["status"], "fail");
    assert!(place.container.join("coliconv.manifest.json").exists());
    let output = place.output(&PASSES);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("\nverdict: fail, "));
}

#[test]
fn the_part_that_ends_last_verifies() {
    let place = Place::copy("nano");
    let part = |number: &'static str| [&PASSES[..], &["--part", number]].concat();
    let (code, report) = run(&place, &part("1/2"));
    assert_eq!((code, &report["complete"], report.get("verify")), (0, &false.into(), None));
    let output = place.output(&part("1/2"));
    assert!(
        text(&output.stdout).ends_with("not verified yet: the part that ends last does it\n"),
        "{}",
        text(&output.stdout)
    );
    let (code, report) = run(&place, &part("2/2"));
    assert_eq!((code, &report["verify"]["verdict"]), (0, &"pass".into()), "{report:#}");
}

#[test]
fn a_consumed_source_is_not_compared_with() {
    let place = Place::copy("nano");
    let (code, report) = run(&place, &[&PASSES[..], &["--consume"]].concat());
    assert_eq!((code, &report["verify"]["verdict"]), (0, &"pass".into()), "{report:#}");
    assert_eq!((check(&report, "weights")["status"].as_str(), report["verify"].get("source")), (Some("skipped"), None));
    assert_eq!(check(&report, "tokens")["status"], "pass");
    // Once more, without its shards.
    assert!(!place.source.join("model-00001-of-00003.safetensors").exists());
    let (code, report) = run(&place, &PASSES);
    assert_eq!((code, check(&report, "weights")["status"].as_str()), (0, Some("skipped")));
}

#[test]
fn a_dry_run_verifies_nothing() {
    let place = Place::copy("nano");
    let said = place.refused(&["--verify", "--dry-run"]);
    assert_eq!(
        said,
        "error: --verify and --dry-run cannot be given together: a dry run makes nothing that could be verified\n"
    );
    assert!(fs::read_dir(&place.container).is_err());
}
