//! `coliconv diff`: the same bytes, or how far the values are from each other.

mod support;

use std::path::Path;

use coliconv::convert::Options;
use coliconv::recipe::{GroupSize, Settings};
use coliconv::roles::Pass;
use coliconv::weights::{Model, Weights};
use serde_json::Value;
use support::containers::*;
use support::shards::{Shards, edit_file};
use tempfile::TempDir;

const EXPERT: &str = "model.layers.1.mlp.experts.3.up_proj.weight";

fn grouped(group_size: Option<u64>) -> TempDir {
    container("nano", &format!("{group_size:?}"), || {
        let group_size = Some(group_size.map_or(GroupSize::ROW, GroupSize::Elements));
        let settings = Settings { group_size, ..Settings::default() };
        Options { settings, passes: Pass::ALL.to_vec(), ..Options::default() }
    })
}

fn bare() -> TempDir {
    container("nano", "bare", || Options { passes: Pass::ALL.to_vec(), bare: true, ..Options::default() })
}

fn main_only() -> TempDir {
    container("nano", "main", Options::default)
}

fn diff(a: &Path, b: &Path, more: &[&str]) -> (i32, Value) {
    let (code, document) = run_json(&[&["diff"], more].concat(), &[a, b]);
    assert_valid("diff", &document);
    (code, document)
}

fn names(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect()
}

#[test]
fn the_same_bytes_are_identical_whatever_lies_beside_them() {
    let (a, b) = (grouped(Some(64)), bare());
    let (code, report) = diff(a.path(), b.path(), &[]);
    assert_eq!((code, &report["identical"]), (0, &Value::Bool(true)));
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 191);
    for tensor in tensors {
        assert_eq!((&tensor["same_bytes"], tensor["max_abs_err"].as_f64()), (&Value::Bool(true), Some(0.0)));
        assert_eq!((tensor["cosine"].as_f64(), &tensor["sqnr_db"]), (Some(1.0), &Value::Null));
    }
    let kinds: Vec<&str> = report["warnings"].as_array().unwrap().iter().map(|w| w["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["stale-quantization"], "what opening warns of is kept");
}

#[test]
fn formats_are_compared_by_value_and_the_worst_comes_first() {
    let (a, b) = (grouped(Some(64)), grouped(Some(32)));
    let output = run(&["diff", "--quiet", "--threads", "3"], &[a.path(), b.path()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stderr.is_empty());
    let text = redacted(&output.stdout, &[(a.path(), "G64"), (b.path(), "G32")]);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    insta::assert_snapshot!("g64_against_g32", text);
}

#[test]
fn a_container_and_its_checkpoint_in_either_order() {
    let (a, b) = (grouped(None), fixture("nano"));
    let (_, report) = diff(a.path(), &b, &[]);
    let (_, turned) = diff(&b, a.path(), &[]);
    assert_eq!((report["reference"].as_str(), turned["reference"].as_str()), (Some("b"), Some("a")));
    for (one, other) in report["tensors"].as_array().unwrap().iter().zip(turned["tensors"].as_array().unwrap()) {
        for key in ["name", "max_abs_err", "rmse", "cosine", "sqnr_db"] {
            assert_eq!(one[key], other[key], "{}", one["name"]);
        }
        assert_eq!((&one["format_a"], &one["format_b"]), (&other["format_b"], &other["format_a"]));
    }
    let norm = report["tensors"].as_array().unwrap().iter().find(|t| t["name"] == "model.norm.weight").unwrap();
    assert_eq!((norm["format_a"].as_str(), norm["format_b"].as_str()), (Some("f32"), Some("bf16")));
    assert_eq!((&norm["same_bytes"], &norm["same_values"]), (&Value::Bool(false), &Value::Bool(true)));
}

#[test]
fn measures_are_those_of_the_plain_formulas() {
    let (a, b) = (grouped(Some(64)), fixture("nano"));
    let (_, report) = diff(a.path(), &b, &["--tensor", EXPERT]);
    let [tensor] = &report["tensors"].as_array().unwrap()[..] else { panic!("one tensor") };
    let values = |directory: &Path| -> Vec<f64> {
        let matrix = match Model::open(directory).unwrap() {
            Model::Checkpoint(model) => model.load(EXPERT).unwrap(),
            Model::Container(model) => model.load(EXPERT).unwrap(),
        };
        let mut values = vec![0.0; matrix.rows * matrix.columns];
        for (row, out) in values.chunks_mut(matrix.columns).enumerate() {
            matrix.dequantize_row(row, out);
        }
        values.into_iter().map(f64::from).collect()
    };
    let (ours, theirs) = (values(a.path()), values(&b));
    let sum = |f: &dyn Fn(f64, f64) -> f64| ours.iter().zip(&theirs).map(|(&x, &y)| f(x, y)).sum::<f64>();
    let (errors, signal, other) = (sum(&|x, y| (x - y) * (x - y)), sum(&|_, y| y * y), sum(&|x, _| x * x));
    let expected = [
        ("max_abs_err", ours.iter().zip(&theirs).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)),
        ("rmse", (errors / ours.len() as f64).sqrt()),
        ("cosine", sum(&|x, y| x * y) / (signal.sqrt() * other.sqrt())),
        ("sqnr_db", 10.0 * (signal / errors).log10()),
    ];
    for (key, expected) in expected {
        let found = tensor[key].as_f64().unwrap();
        assert!((found - expected).abs() <= 1e-9 * expected.abs(), "{key}: {found}, expected {expected}");
    }
}

#[test]
fn one_changed_value_is_found_with_its_place() {
    let (a, b) = (grouped(Some(64)), grouped(Some(64)));
    set_f32(b.path(), "model.layers.2.input_layernorm.weight", 5, 99.0);
    let (code, report) = diff(a.path(), b.path(), &[]);
    assert_eq!(code, 1);
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!(tensors[0]["name"], "model.layers.2.input_layernorm.weight");
    assert_eq!((&tensors[0]["worst"]["column"], &tensors[0]["worst"]["b"]), (&5.into(), &99.0.into()));
    assert!(tensors[1..].iter().all(|tensor| tensor["same_bytes"] == true));
}

#[test]
fn values_that_are_no_numbers_are_counted_and_come_first() {
    let (a, b) = (grouped(Some(64)), grouped(Some(64)));
    set_f32(b.path(), &format!("{EXPERT}.qs"), 0, f32::NAN);
    set_f32(b.path(), "model.norm.weight", 0, 1e6);
    let (_, report) = diff(a.path(), b.path(), &[]);
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!((&tensors[0]["name"], &tensors[0]["non_finite"]), (&EXPERT.into(), &64.into()));
    assert_eq!(tensors[0]["max_abs_err"], 0.0);
    assert_eq!(tensors[1]["name"], "model.norm.weight");
    // The same NaN on both sides is no difference.
    let (code, _) = diff(b.path(), b.path(), &[]);
    assert_eq!(code, 0);
}

#[test]
fn tensors_of_one_side_are_named() {
    let (a, b) = (main_only(), grouped(Some(64)));
    let (code, report) = diff(a.path(), b.path(), &[]);
    assert_eq!((code, names(&report["only_in_a"]).len()), (1, 0));
    let only = names(&report["only_in_b"]);
    assert!(only.contains(&"model.layers.4.eh_proj.weight") && only.is_sorted(), "{only:?}");
    let output = run(&["diff", "--quiet"], &[a.path(), b.path()]);
    let text = redacted(&output.stdout, &[(a.path(), "MAIN"), (b.path(), "ALL")]);
    assert!(text.contains("\nonly in b: 62 tensors\n") && text.contains("\n  … and 42 more\n"), "{text}");
    // What both have is the same.
    let (code, report) = diff(a.path(), b.path(), &["--tensor", "model.layers.0.mlp.*"]);
    assert_eq!((code, report["tensors"].as_array().unwrap().len()), (0, 3));
}

#[test]
fn results_do_not_depend_on_threads() {
    let (a, b) = (grouped(Some(32)), fixture("nano"));
    let report = |threads: &str| {
        let (_, mut report) = diff(a.path(), &b, &["--threads", threads]);
        report["seconds"] = Value::Null;
        report
    };
    let one = report("1");
    assert_eq!(one, report("2"));
    assert_eq!(one, report("7"));
}

#[test]
fn two_checkpoints_are_compared_too() {
    let other = TempDir::new().unwrap();
    let mut shards = Shards::load(&fixture("nano"));
    shards.tensor_mut("model.norm.weight").bytes[1] ^= 0x40;
    shards.store(other.path());
    let (code, report) = diff(&fixture("nano"), other.path(), &[]);
    assert_eq!((code, report["a"]["kind"].as_str()), (1, Some("checkpoint")));
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!(tensors[0]["name"], "model.norm.weight");
    assert_eq!(tensors.iter().filter(|tensor| tensor["same_bytes"] == false).count(), 1);
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let good = grouped(Some(64));
    let refused = |a: &Path, more: &[&str]| {
        let (code, document) = diff(a, good.path(), more);
        assert_eq!(code, 2, "{document}");
        document["refused"][0]["kind"].as_str().unwrap().to_owned()
    };
    assert_eq!(refused(good.path(), &["--tensor", "no.such.*"]), "nothing-matches");
    assert_eq!(refused(good.path(), &["--tensor", "[a"]), "glob");
    assert_eq!(refused(Path::new("no such directory"), &[]), "not-found");
    let cut = grouped(Some(64));
    edit_file(&cut.path().join("out-00001.safetensors"), |bytes| bytes.truncate(bytes.len() - 1));
    assert_eq!(refused(cut.path(), &[]), "data-truncated");
}
