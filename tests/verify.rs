//! `coliconv verify`: what is sound passes, and every kind of damage is told by its name and place.

mod support;

use std::fs;
use std::path::Path;

use coliconv::container::manifest::MANIFEST_FILE;
use coliconv::convert::Options;
use coliconv::header::Header;
use coliconv::io::SourceFile;
use coliconv::recipe::{GroupSize, Settings};
use coliconv::roles::Pass;
use proptest::prelude::*;
use serde_json::Value;
use support::containers::*;
use support::shards::{Shards, edit_file, edit_header};
use support::synthetic::{Synthetic, small_config};
use tempfile::TempDir;

const EXPERT: &str = "model.layers.1.mlp.experts.3.up_proj.weight";
const OTHER_EXPERT: &str = "model.layers.1.mlp.experts.4.up_proj.weight";
const EH_PROJ: &str = "model.layers.4.eh_proj.weight";
const MAIN_FILE: &str = "out-00001.safetensors";

/// Whole, with a manifest.
fn g64() -> TempDir {
    container("nano", "g64", || Options { passes: Pass::ALL.to_vec(), ..Options::default() })
}

/// The same weights without one.
fn bare() -> TempDir {
    container("nano", "bare", || Options { passes: Pass::ALL.to_vec(), bare: true, ..Options::default() })
}

fn verify(directory: &Path, level: &str, more: &[&str]) -> (i32, Value) {
    let (code, document) = run_json(&[&["verify", "--level", level], more].concat(), &[directory]);
    assert_valid("verify", &document);
    (code, document)
}

/// The level weights, with the source.
fn against_source(directory: &Path) -> (i32, Value) {
    let source = fixture("nano");
    verify(directory, "weights", &["--source", source.to_str().unwrap()])
}

/// Kind and tensor of every error.
fn errors(report: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let findings = report["findings"].as_array().unwrap_or_else(|| panic!("{report}"));
    let errors = findings.iter().filter(|finding| finding["severity"] == "error");
    errors.map(|finding| (text(&finding["kind"]), text(&finding["tensor"]))).collect()
}

fn failed_checks(report: &Value) -> Vec<&str> {
    let checks = report["checks"].as_array().unwrap().iter().filter(|check| check["status"] == "fail");
    checks.map(|check| check["name"].as_str().unwrap()).collect()
}

/// Fails unless the verdict is no, for this reason.
fn assert_fails((code, report): (i32, Value), check: &str, kind: &str, tensor: &str) {
    assert_eq!((code, report["verdict"].as_str()), (1, Some("fail")), "{report:#}");
    assert!(failed_checks(&report).contains(&check), "{check}: {report:#}");
    let expected = (kind.to_owned(), tensor.to_owned());
    assert!(errors(&report).contains(&expected), "{expected:?}: {:?}", errors(&report));
}

fn assert_passes((code, report): (i32, Value)) -> Value {
    assert_eq!((code, report["verdict"].as_str()), (0, Some("pass")), "{report:#}");
    assert_eq!(errors(&report), []);
    report
}

fn scales(name: &str) -> String {
    format!("{name}.qs")
}

#[test]
fn what_was_converted_passes_every_level() {
    let directory = g64();
    for level in ["structure", "payload"] {
        assert_passes(verify(directory.path(), level, &[]));
    }
    let report = assert_passes(against_source(directory.path()));
    assert_eq!(report["findings"], Value::Array(Vec::new()));
    let source = fixture("nano");
    let output = run(&["verify", "--quiet", "--level", "weights", "--source"], &[&source, directory.path()]);
    let text = redacted(&output.stdout, &[(directory.path(), "CONTAINER"), (&source, "SOURCE")]);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    insta::assert_snapshot!("sound", text);
}

#[test]
fn every_format_is_within_half_a_step() {
    for (key, settings) in [
        ("row", Settings { group_size: Some(GroupSize::ROW), ..Settings::default() }),
        ("x3", Settings { xbits: Some(3), ..Settings::default() }),
        ("x2", Settings { xbits: Some(2), group_size: Some(GroupSize::ROW), ..Settings::default() }),
        ("e5", Settings { ebits: Some(5), io_bits: Some(6), ..Settings::default() }),
    ] {
        let directory = container("nano", key, || Options { settings, ..Options::default() });
        assert_passes(against_source(directory.path()));
    }
}

#[test]
fn without_a_manifest_values_are_looked_at() {
    let directory = bare();
    let report = assert_passes(against_source(directory.path()));
    let check = |name: &str| report["checks"].as_array().unwrap().iter().find(|c| c["name"] == name).unwrap().clone();
    assert_eq!(check("checksums")["status"], "skipped");
    assert_eq!(check("codes")["status"], "pass");
    assert_eq!(report["findings"][0]["kind"], "stale-quantization", "a warning changes no verdict");
}

#[test]
fn damaged_bytes_are_reported_with_their_tensor() {
    let directory = g64();
    edit_tensor(directory.path(), EXPERT, |bytes| bytes[7] ^= 1);
    assert_passes(verify(directory.path(), "structure", &[]));
    let output = run(&["verify", "--quiet", "--level", "payload"], &[directory.path()]);
    assert_eq!(output.status.code(), Some(1));
    let text = redacted(&output.stdout, &[(directory.path(), "CONTAINER")]);
    insta::assert_snapshot!("flipped_code", text);
    assert_fails(verify(directory.path(), "payload", &[]), "checksums", "tensor-checksum", EXPERT);

    let directory = g64();
    edit_tensor(directory.path(), &scales(EXPERT), |bytes| bytes[0] ^= 1);
    assert_fails(verify(directory.path(), "payload", &[]), "checksums", "tensor-checksum", EXPERT);
    let directory = bare();
    // Four levels away; one level may still be half a step, where the source lies in the middle.
    edit_tensor(directory.path(), EXPERT, |bytes| bytes[7] ^= 4);
    assert_passes(verify(directory.path(), "payload", &[]));
    assert_fails(against_source(directory.path()), "weights", "not-the-source", EXPERT);
    let directory = bare();
    edit_tensor(directory.path(), "model.norm.weight", |bytes| bytes[1] ^= 1);
    assert_fails(against_source(directory.path()), "weights", "not-the-source", "model.norm.weight");
}

#[test]
fn scales_of_two_experts_exchanged() {
    let directory = g64();
    swap(directory.path(), &scales(EXPERT), &scales(OTHER_EXPERT));
    assert_fails(verify(directory.path(), "payload", &[]), "checksums", "tensor-checksum", EXPERT);
    assert_fails(verify(directory.path(), "payload", &[]), "checksums", "tensor-checksum", OTHER_EXPERT);
    let directory = bare();
    swap(directory.path(), &scales(EXPERT), &scales(OTHER_EXPERT));
    assert_passes(verify(directory.path(), "payload", &[]));
    assert_fails(against_source(directory.path()), "weights", "not-the-source", EXPERT);
    assert_fails(against_source(directory.path()), "weights", "not-the-source", OTHER_EXPERT);
}

#[test]
fn scales_that_are_not_positive_and_finite() {
    for make in [g64, bare] {
        for value in [f32::NAN, f32::INFINITY, 0.0, -0.5] {
            let directory = make();
            set_f32(directory.path(), &scales(EXPERT), 17, value);
            let (code, report) = verify(directory.path(), "payload", &[]);
            let bad = report["findings"].as_array().unwrap().iter().find(|f| f["kind"] == "bad-scale").unwrap();
            // Four groups of 64 a row.
            let message = format!("scale 17 (row 4) is {value}; scales are positive and finite; 1 scale is not");
            assert_eq!(bad["message"], message);
            assert_fails((code, report), "scales", "bad-scale", EXPERT);
        }
    }
}

#[test]
fn a_lost_half_of_the_head() {
    for make in [g64, bare] {
        let directory = make();
        let columns = 512;
        edit_tensor(directory.path(), EH_PROJ, |bytes| {
            bytes.chunks_mut(columns).for_each(|row| row[..columns / 2].fill(0));
        });
        assert_fails(verify(directory.path(), "payload", &[]), "head", "head-half-zero", EH_PROJ);
        assert_fails(against_source(directory.path()), "weights", "head-half-zero", EH_PROJ);
    }
}

#[test]
fn padding_of_int3() {
    let source = TempDir::new().unwrap();
    Synthetic::new(small_config()).write(source.path()).unwrap();
    let directory = TempDir::new().unwrap();
    let arguments = ["convert", "--quiet", "--bare", "--xbits", "3", "--group-size", "row", "--allow-ambiguous"];
    let output = run(&arguments, &[source.path(), directory.path()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // 131 columns: the third group has 61 elements of padding, whose high bits are 1.
    let down_proj = EXPERT.replace("up_proj", "down_proj");
    edit_tensor(directory.path(), &down_proj, |bytes| bytes[71] = 0);
    assert_fails(verify(directory.path(), "payload", &[]), "codes", "padding", &down_proj);
}

#[test]
fn files_cut_off_removed_and_added() {
    let directory = g64();
    edit_file(&directory.path().join(MAIN_FILE), |bytes| bytes.truncate(bytes.len() - 9));
    let (code, report) = verify(directory.path(), "payload", &[]);
    assert_eq!(failed_checks(&report)[0], "headers");
    assert!(errors(&report).iter().any(|(kind, _)| kind == "data-truncated"));
    assert_eq!(code, 1);

    for make in [g64, bare] {
        let directory = make();
        fs::remove_file(directory.path().join(MAIN_FILE)).unwrap();
        assert_fails(verify(directory.path(), "structure", &[]), "files", "numbering-gap", "");
        let directory = make();
        fs::remove_file(directory.path().join("out-00002.safetensors")).unwrap();
        // Nothing but the census can tell that the end of a series is missing.
        assert_fails(verify(directory.path(), "structure", &[]), "census", "expert-missing", "");
    }
    let directory = g64();
    fs::remove_file(directory.path().join("tokenizer.json")).unwrap();
    assert_fails(verify(directory.path(), "structure", &[]), "manifest", "manifest-file-missing", "");

    // A tokenizer of a larger vocabulary loads, but is no use.
    let directory = bare();
    let tokenizer = directory.path().join("tokenizer.json");
    let mut parsed: Value = serde_json::from_slice(&fs::read(&tokenizer).unwrap()).unwrap();
    assert!(parsed["model"]["vocab"]["ac"].is_u64());
    parsed["model"]["vocab"]["ac"] = 5000.into();
    fs::write(&tokenizer, parsed.to_string()).unwrap();
    assert_fails(verify(directory.path(), "structure", &[]), "small-files", "tokenizer-vocab", "");

    let directory = g64();
    fs::write(directory.path().join("out-00003.safetensors"), b"\x08\0\0\0\0\0\0\0{}      ").unwrap();
    assert_fails(verify(directory.path(), "structure", &[]), "manifest", "manifest-file-unknown", "");
    let directory = g64();
    fs::write(directory.path().join("MODEL_CARD.md"), "written later").unwrap();
    let report = assert_passes(verify(directory.path(), "payload", &[]));
    assert_eq!(report["findings"][0]["severity"], "note");
}

#[test]
fn headers_that_were_edited() {
    for file in ["out-00000.safetensors", "out-mtp-00000.safetensors", "out-idx-00000.safetensors"] {
        let directory = g64();
        // Another spelling of the same header: nothing but the hash tells.
        edit_header(&directory.path().join(file), |text| {
            let comma = text.windows(2).rposition(|pair| pair == b"},").unwrap();
            let padding = text.iter().rev().take_while(|byte| **byte == b' ').count();
            if padding > 0 {
                text.pop();
                text.insert(comma + 2, b' ');
            } else {
                text.extend_from_slice(b"        ");
            }
        });
        let (code, report) = verify(directory.path(), "payload", &[]);
        assert_eq!(code, 1);
        let kinds: Vec<String> = errors(&report).into_iter().map(|(kind, _)| kind).collect();
        assert!(kinds == ["file-hash"] || kinds == ["manifest-file-size"], "{file}: {kinds:?}");
    }
}

#[test]
fn config_and_manifest_that_were_edited() {
    let directory = g64();
    let config = directory.path().join("config.json");
    edit_file(&config, |bytes| {
        let text = String::from_utf8(bytes.clone()).unwrap();
        *bytes = text.replacen("\"routed_scaling_factor\": 2.5", "\"routed_scaling_factor\": 1.5", 1).into_bytes();
        assert_ne!(*bytes, text.into_bytes());
    });
    assert_passes(verify(directory.path(), "structure", &[]));
    assert_fails(verify(directory.path(), "payload", &[]), "checksums", "file-hash", "");
    edit_file(&config, |bytes| {
        let text = String::from_utf8(bytes.clone()).unwrap();
        *bytes = text.replace("norm_topk_prob", "norm_topk_bros").into_bytes();
    });
    assert_fails(verify(directory.path(), "structure", &[]), "config", "config-silent", "");

    let directory = g64();
    edit_file(&directory.path().join(MANIFEST_FILE), |bytes| {
        let mut manifest: Value = serde_json::from_slice(bytes).unwrap();
        manifest["tensors"][EXPERT]["scale_checksum"] = "0123456789abcdef".into();
        *bytes = manifest.to_string().into_bytes();
    });
    assert_fails(verify(directory.path(), "payload", &[]), "checksums", "tensor-checksum", EXPERT);
    edit_file(&directory.path().join(MANIFEST_FILE), |bytes| {
        let mut manifest: Value = serde_json::from_slice(bytes).unwrap();
        manifest["checksum"] = "crc32".into();
        *bytes = manifest.to_string().into_bytes();
    });
    assert_fails(verify(directory.path(), "payload", &[]), "checksums", "checksum-unknown", "");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_flipped_byte_of_a_container_with_a_manifest_fails(place: prop::sample::Index, bit in 0..8u32) {
        let directory = g64();
        let mut names: Vec<String> =
            fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != MANIFEST_FILE);
        names.sort();
        let sizes: Vec<usize> =
            names.iter().map(|name| fs::metadata(directory.path().join(name)).unwrap().len() as usize).collect();
        let mut offset = place.index(sizes.iter().sum());
        let file = sizes.iter().position(|size| offset < *size || { offset -= size; false }).unwrap();
        let path = directory.path().join(&names[file]);
        let header = names[file].ends_with(".safetensors").then(|| Header::read(&SourceFile::open(&path).unwrap()).unwrap());
        let tensor = header.and_then(|header| {
            let holds = |t: &&coliconv::header::StoredTensor| (t.offset..t.offset + t.bytes).contains(&(offset as u64));
            header.tensors().iter().find(holds).map(|t| t.name.as_str().trim_end_matches(".qs").to_owned())
        });
        edit_file(&path, |bytes| bytes[offset] ^= 1 << bit);
        let (code, report) = verify(directory.path(), "payload", &[]);
        prop_assert_eq!(code, 1, "{} byte {}", &names[file], offset);
        if let Some(tensor) = tensor {
            let expected = ("tensor-checksum".to_owned(), tensor);
            prop_assert!(errors(&report).contains(&expected), "{:?}: {:?}", expected, errors(&report));
        }
    }
}

#[test]
fn a_source_of_another_model_is_refused_and_other_weights_fail() {
    let other = fixture("tiny");
    let (code, document) = verify(g64().path(), "weights", &["--source", other.to_str().unwrap()]);
    assert_eq!((code, document["refused"][0]["kind"].as_str()), (2, Some("other-model")));

    let made = |seed| {
        let source = TempDir::new().unwrap();
        Synthetic::new(small_config()).seed(seed).write(source.path()).unwrap();
        source
    };
    let (source, other, directory) = (made(1), made(2), TempDir::new().unwrap());
    let output = run(&["convert", "--quiet", "--allow-ambiguous"], &[source.path(), directory.path()]);
    assert!(output.status.success());
    assert_passes(verify(directory.path(), "weights", &["--source", source.path().to_str().unwrap()]));
    let found = verify(directory.path(), "weights", &["--source", other.path().to_str().unwrap()]);
    assert_fails(found, "weights", "not-the-source", EXPERT);
}

#[test]
fn a_damaged_container_does_not_accuse_its_source() {
    let directory = g64();
    edit_file(&directory.path().join("config.json"), |bytes| {
        let text = String::from_utf8(bytes.clone()).unwrap();
        *bytes = text.replacen("\"moe_intermediate_size\": ", "\"moe_intermediate_size\": 1", 1).into_bytes();
    });
    let (code, report) = against_source(directory.path());
    assert_eq!(code, 1, "{report}");
    let weights = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "weights").unwrap();
    assert_eq!(weights["status"], "skipped");
}

#[test]
fn checkpoints_have_structure_and_payload() {
    let report = assert_passes(verify(&fixture("tiny"), "payload", &[]));
    assert_eq!(report["kind"], "checkpoint");
    let stored = |edit: &dyn Fn(&mut Shards)| {
        let directory = TempDir::new().unwrap();
        let mut shards = Shards::load(&fixture("nano"));
        edit(&mut shards);
        shards.store(directory.path());
        directory
    };
    let nan = stored(&|shards| shards.tensor_mut(EXPERT).bytes[300] = 0x7f);
    assert_passes(verify(nan.path(), "structure", &[]));
    assert_fails(verify(nan.path(), "payload", &[]), "values", "bad-value", EXPERT);
    let scale = format!("{EXPERT}_scale_inv");
    let nan = stored(&|shards| shards.tensor_mut(&scale).set(0, &f32::NAN.to_le_bytes()));
    assert_fails(verify(nan.path(), "payload", &[]), "values", "bad-value", &scale);
    let missing = stored(&|shards| drop(shards.remove(EXPERT)));
    assert_fails(verify(missing.path(), "structure", &[]), "census", "tensor-missing", EXPERT);
    let (code, document) = verify(&fixture("nano"), "weights", &["--source", "x"]);
    assert_eq!((code, document["refused"][0]["kind"].as_str()), (2, Some("level-of-containers")));
}

#[test]
fn what_cannot_be_verified_is_refused() {
    let directory = g64();
    let refused = |(code, document): (i32, Value)| {
        assert_eq!(code, 2, "{document}");
        document["refused"][0]["kind"].as_str().unwrap().to_owned()
    };
    assert_eq!(refused(verify(directory.path(), "weights", &[])), "source-needed");
    assert_eq!(refused(verify(directory.path(), "payload", &["--source", "x"])), "flag-unused");
    assert_eq!(refused(verify(directory.path(), "weights", &["--source", "no such place"])), "not-found");
    assert_eq!(refused(verify(Path::new("no such place"), "structure", &[])), "not-found");
    assert_eq!(refused(verify(&directory.path().join(MAIN_FILE), "structure", &[])), "not-a-directory");
    assert_eq!(refused(verify(TempDir::new().unwrap().path(), "structure", &[])), "no-weights");
}

#[test]
fn a_report_is_written_and_replaces_only_a_report() {
    let (directory, place) = (g64(), TempDir::new().unwrap());
    let path = place.path().join("verify.json");
    let arguments = ["--report", path.to_str().unwrap()];
    let (_, printed) = verify(directory.path(), "structure", &arguments);
    let written = || serde_json::from_slice::<Value>(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(written(), printed);
    edit_tensor(directory.path(), EXPERT, |bytes| bytes[0] ^= 1);
    let (code, printed) = verify(directory.path(), "payload", &arguments);
    assert_eq!((code, written()), (1, printed));
    fs::write(&path, "somebody's notes").unwrap();
    let (code, document) = verify(directory.path(), "structure", &arguments);
    assert_eq!((code, document["refused"][0]["kind"].as_str()), (2, Some("other-report")));
    assert_eq!(fs::read(&path).unwrap(), b"somebody's notes");
}

#[test]
fn a_report_does_not_stand_in_the_model() {
    let directory = g64();
    fs::create_dir(directory.path().join("reports")).unwrap();
    for name in ["verify.json", "reports/verify.json", "reports/../verify.json"] {
        let path = directory.path().join(name);
        let (code, document) = verify(directory.path(), "structure", &["--report", path.to_str().unwrap()]);
        assert_eq!((code, document["refused"][0]["kind"].as_str()), (2, Some("report-in-model")), "{name}");
        assert!(!path.exists());
    }
    // Beside it is not in it, by whatever way.
    let place = TempDir::new().unwrap();
    let model = place.path().join("model");
    fs::rename(directory.keep(), &model).unwrap();
    fs::remove_dir(model.join("reports")).unwrap();
    let path = model.join("../verify.json");
    assert_eq!(verify(&model, "structure", &["--report", path.to_str().unwrap()]).0, 0);
    assert!(place.path().join("verify.json").is_file());
}

#[test]
fn results_do_not_depend_on_threads() {
    let directory = bare();
    swap(directory.path(), &scales(EXPERT), &scales(OTHER_EXPERT));
    let report = |threads: &str| {
        let source = fixture("nano");
        let more = ["--threads", threads, "--source", source.to_str().unwrap()];
        let (_, mut report) = verify(directory.path(), "weights", &more);
        report["seconds"] = Value::Null;
        report
    };
    assert_eq!(report("1"), report("5"));
}
