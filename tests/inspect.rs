//! `coliconv inspect` as its users see it.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use coliconv::convert::{Job, Options};
use coliconv::progress::Silent;
use coliconv::report::inspect::{InspectDocument, InspectReport};
use coliconv::roles::Pass;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn convert(name: &str, options: Options) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let options = Options { passes: Pass::ALL.to_vec(), ..options };
    Job::prepare(&fixture(name), directory.path(), options).unwrap().run(&Silent).unwrap();
    directory
}

/// Exit code, stdout and stderr with the directory's path shortened.
fn run(directory: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::cargo_bin("coliconv").unwrap().arg("inspect").args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| {
        String::from_utf8(bytes)
            .unwrap()
            .replace(directory.parent().unwrap().to_str().unwrap(), "")
            .replace(directory.file_name().unwrap().to_str().unwrap(), "DIR")
    };
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn path(directory: &Path) -> &str {
    directory.to_str().unwrap()
}

fn report(arguments: &[&str]) -> InspectReport {
    let output = Command::cargo_bin("coliconv").unwrap().args(["inspect", "--json"]).args(arguments).output().unwrap();
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let schema = serde_json::to_value(schemars::schema_for!(InspectDocument)).unwrap();
    jsonschema::validator_for(&schema).unwrap().validate(&value).unwrap();
    serde_json::from_value(value).unwrap()
}

#[test]
fn a_container_in_text() {
    let directory = convert("nano", Options::default());
    let (code, out, err) = run(directory.path(), &[path(directory.path())]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.lines().all(|line| line.chars().count() <= 80), "a line is longer than 80 columns");
    insta::assert_snapshot!("container", out);
}

#[test]
fn a_checkpoint_in_text() {
    let (code, out, _) = run(&fixture("tiny"), &[path(&fixture("tiny"))]);
    assert_eq!(code, 0);
    insta::assert_snapshot!("checkpoint", out.lines().take(30).collect::<Vec<_>>().join("\n"));
}

#[test]
fn one_file_in_text() {
    let directory = convert("nano", Options::default());
    let (code, out, _) = run(directory.path(), &[path(&directory.path().join("out-idx-00002.safetensors"))]);
    assert_eq!(code, 0);
    insta::assert_snapshot!("file", out);
}

#[test]
fn statistics_values_and_histograms_in_text() {
    let directory = convert("nano", Options::default());
    let arguments = ["--tensor", "*.1.*experts.0.down_proj.weight", "--stats", "--row", "255", "--values", "8"];
    let (code, out, _) = run(directory.path(), &[&[path(directory.path())], &arguments[..]].concat());
    assert_eq!(code, 0);
    assert!(out.lines().skip(2).all(|line| line.chars().count() <= 80));
    insta::assert_snapshot!("statistics", out);
    let arguments = ["--tensor", "model.norm.weight", "--histogram", "--class", "f32"];
    let (_, out, _) = run(directory.path(), &[&[path(directory.path())], &arguments[..]].concat());
    insta::assert_snapshot!("histogram", out);
}

#[test]
fn csv_for_pipes() {
    let directory = convert("nano", Options::default());
    let arguments = ["--csv", "--class", "kvb"];
    let (code, out, _) = run(directory.path(), &[&[path(directory.path())], &arguments[..]].concat());
    assert_eq!(code, 0);
    insta::assert_snapshot!("csv", out);
    let arguments = ["--csv", "--tensor", "model.layers.0.self_attn.kv_b_proj.weight", "--row", "3", "--values", "4"];
    let (_, out, _) = run(directory.path(), &[&[path(directory.path())], &arguments[..]].concat());
    insta::assert_snapshot!("csv-values", out);
}

#[test]
fn values_are_those_of_every_format() {
    let checkpoint = fixture("nano");
    let name = "model.layers.1.mlp.experts.3.up_proj.weight";
    let values = |directory: &Path| -> Vec<f32> {
        let report = report(&[path(directory), "--tensor", name, "--row", "7"]);
        report.tensors[0].values.as_ref().unwrap().values.iter().map(|value| value.unwrap()).collect()
    };
    let source = values(&checkpoint);
    assert_eq!(source.len(), 256);
    let amax = source.iter().fold(0.0f32, |amax, value| amax.max(value.abs()));
    for (bits, levels) in [(8, 127.0), (5, 15.0), (4, 7.0), (3, 3.0)] {
        let mut options = Options::default();
        options.settings.xbits = Some(bits);
        let directory = convert("nano", options);
        let worst = source.iter().zip(values(directory.path())).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst > 0.0 && worst <= amax / levels / 2.0 * 1.001, "{bits} bits: {worst} of {amax}");
    }
}

#[test]
fn json_tells_formats_and_the_head() {
    let directory = convert("nano", Options::default());
    let report = report(&[path(directory.path())]);
    assert_eq!((report.layers, report.experts, report.indexer), (Some(4), Some(8), true));
    assert_eq!((report.mtp.present, report.mtp.format.as_deref()), (true, Some("int8-row")));
    assert_eq!((report.tensors.len(), report.findings.len()), (191, 0));
    let down = report.tensors.iter().find(|t| t.name == "model.layers.1.mlp.experts.0.down_proj.weight").unwrap();
    assert_eq!((down.format.as_deref(), down.group_size), (Some("int4-grouped"), Some(64)));
    assert_eq!((down.bytes, down.scale_bytes, down.shape.as_deref()), (20480, 3072, Some(&[256, 160][..])));
    assert_eq!(down.candidates, ["int4-grouped(64)"]);
    assert_eq!(report.totals.iter().map(|total| total.tensors).sum::<u64>(), 191);
}

#[test]
fn damage_is_an_answer_and_no_path_a_refusal() {
    let directory = convert("nano", Options::default());
    fs::remove_file(directory.path().join("out-00001.safetensors")).unwrap();
    let (code, out, _) = run(directory.path(), &[path(directory.path())]);
    assert_eq!(code, 1);
    insta::assert_snapshot!("damaged", out.lines().filter(|l| !l.starts_with("  ")).collect::<Vec<_>>().join("\n"));
    let (code, out, err) = run(directory.path(), &[path(&directory.path().join("nothing"))]);
    assert_eq!((code, out.as_str()), (2, ""));
    insta::assert_snapshot!("nothing", err);
    let (code, _, err) = run(directory.path(), &[path(directory.path()), "--tensor", "nope*"]);
    assert_eq!(code, 2);
    insta::assert_snapshot!("no-match", err);
}

#[test]
fn inspecting_writes_nothing() {
    let directory = convert("tiny", {
        let mut options = Options { bare: true, ..Options::default() };
        options.allowed.ambiguous = true;
        options
    });
    let listing = || {
        let mut files: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| {
                (entry.file_name(), entry.metadata().unwrap().len(), entry.metadata().unwrap().modified().unwrap())
            })
            .collect();
        files.sort();
        files
    };
    let before = listing();
    let report = report(&[path(directory.path()), "--stats"]);
    assert_eq!(listing(), before);
    // Without a manifest the colliding sizes of this model are told, and what the engine takes.
    let ambiguous: Vec<_> = report.findings.iter().filter(|finding| finding.kind == "ambiguous").collect();
    assert!(!ambiguous.is_empty() && ambiguous.iter().all(|finding| finding.message.contains("int4-grouped(48)")));
}
