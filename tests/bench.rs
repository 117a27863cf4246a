//! `coliconv bench`: that it runs and says what it should; figures are never asserted.

mod support;

use std::fs;

use coliconv::isa::Isa;
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
fn quantizing_is_measured_with_every_instruction_set() {
    let (code, report) = run_json(&["bench", "convert", "--size", "1M", "--rounds", "1"], &[]);
    assert_eq!(code, 0, "{report}");
    assert_valid("bench", &report);
    let measures = report["measures"].as_array().unwrap();
    for isa in Isa::available() {
        let of_isa: Vec<_> =
            measures.iter().filter(|measure| measure["name"].as_str().unwrap().ends_with(isa.name())).collect();
        assert!(of_isa.len() >= 14, "{isa}");
        assert!(of_isa.iter().all(|measure| measure["g_weights_per_second"].as_f64().unwrap() > 0.0));
        assert!(of_isa.iter().all(|measure| measure["of_baseline"].is_f64() != (isa == Isa::Plain)));
    }
    assert!(measures.iter().any(|measure| measure["name"] == "SHA-256, one core"));
}

#[test]
fn weights_beyond_the_memory_are_refused() {
    let (code, document) = run_json(&["bench", "kernels", "--size", "900000G"], &[]);
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &"bench-memory".into()), "{document}");
}

#[test]
fn kernels_are_measured_against_their_limits() {
    let (code, report) = run_json(&["bench", "kernels", "--size", "1M", "--rounds", "1", "--device", "cpu"], &[]);
    assert_eq!(code, 0, "{report}");
    assert_valid("bench", &report);
    let measures = report["measures"].as_array().unwrap();
    for format in ["f32", "int8-row", "int4-row", "int4-grouped", "int3-g64", "int2-row", "fp8-e4m3-b128"] {
        let of_format: Vec<_> =
            measures.iter().filter(|measure| measure["name"].as_str().unwrap().starts_with(format)).collect();
        let with = |key: &str| of_format.iter().filter(|measure| measure[key].as_f64() > Some(0.0)).count();
        assert!(with("gb_per_second") >= 2 && with("gflop_per_second") >= 2 && with("of_limit") >= 3, "{format}");
    }
}

#[test]
fn decoding_is_measured_against_disk_and_memory() {
    let directory = TempDir::new().unwrap();
    let arguments = ["bench", "decode", "--size", "24M", "--rounds", "2", "--device", "cpu", "--dir"];
    let (code, report) = run_json(&arguments, &[directory.path()]);
    assert_eq!(code, 0, "{report}");
    assert_valid("bench", &report);
    let measures = report["measures"].as_array().unwrap();
    let decoded: Vec<_> = measures.iter().filter(|measure| measure["tokens_per_second"].as_f64() > Some(0.0)).collect();
    assert_eq!((measures.len(), decoded.len()), (4, 2));
    assert!(decoded.iter().all(|measure| measure["of_limit"].as_f64() > Some(0.0)));
    let (disk, memory) = (&decoded[0]["experts"], &decoded[1]["experts"]);
    assert!(disk["bytes_read"].as_u64() > Some(0) && disk["evictions"].as_u64() > Some(0), "{disk}");
    assert!(disk["peak_bytes"].as_u64() <= disk["budget_bytes"].as_u64(), "{disk}");
    assert_eq!((memory["evictions"].as_u64(), memory["requests"].as_u64() > Some(0)), (Some(0), true), "{memory}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn other_targets_are_refused_by_name() {
    let output = run(&["bench", "score"], &[]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text, "error: `coliconv bench score` is not available in this version\n");
    assert_eq!(run(&["bench"], &[]).status.code(), Some(2));
}
