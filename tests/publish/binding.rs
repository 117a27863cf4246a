//! Reports are about bytes: whatever is edited after them closes the gate.

use std::fs::{self, OpenOptions};

use coliconv::io::SourceFile;
use coliconv::verify::Level;
use serde_json::{Value, json};

use super::support::containers::edit_tensor;
use super::support::shards::edit_file;
use super::{Place, errors, lines};

#[test]
fn a_container_that_was_edited_after_verification_is_refused() {
    let place = Place::new();
    edit_tensor(&place.container(), "model.layers.1.mlp.experts.3.up_proj.weight", |bytes| bytes[7] ^= 1);
    let report = place.refuses(&place.options(), &["evidence-missing", "file-hash", "report-of-other-bytes"]);
    assert!(lines(&report).contains("nano-g64/out-0000"), "{}", lines(&report));
}

#[test]
fn so_is_one_whose_manifest_was_made_to_fit() {
    let place = Place::new();
    let name = "tokenizer_config.json";
    edit_file(&place.container().join(name), |bytes| bytes.push(b' '));
    let file = SourceFile::open(&place.container().join(name)).unwrap().bytes();
    let sha256 = coliconv::score::identity::sha256_of(&place.container().join(name)).unwrap();
    place.edit("nano-g64/coliconv.manifest.json", |manifest| {
        let files = manifest["small_files"].as_array_mut().unwrap();
        let record = files.iter_mut().find(|file| file["name"] == name).unwrap();
        (record["bytes"], record["sha256"]) = (json!(file), json!(sha256));
    });
    let report = place.refuses(&place.options(), &["evidence-missing", "report-of-other-bytes"]);
    assert!(lines(&report).contains("verify.json: the report is of other bytes: tokenizer_config.json was "));
}

#[test]
fn a_size_or_time_that_stays_the_same_hides_nothing() {
    let place = Place::new();
    let path = place.container().join("config.json");
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    edit_file(&path, |bytes| *bytes.last_mut().unwrap() = b' ');
    OpenOptions::new().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    place.refuses(&place.options(), &["evidence-missing", "file-hash", "report-of-other-bytes"]);
}

#[test]
fn what_is_missing_short_or_foreign_is_named() {
    let place = Place::new();
    let path = |name: &str| place.container().join(name);
    fs::remove_file(path("generation_config.json")).unwrap();
    OpenOptions::new().write(true).open(path("out-00001.safetensors")).unwrap().set_len(1000).unwrap();
    fs::write(path("notes.txt"), "mine").unwrap();
    fs::create_dir(path("old")).unwrap();
    fs::create_dir_all(path(".cache/huggingface/upload")).unwrap();
    let options = place.options();
    let report = coliconv::publish::publish(&place.container(), &options, &coliconv::convert::Silent).unwrap();
    let text = lines(&report);
    for says in [
        "generation_config.json: the manifest names this file, which is missing",
        "out-00001.safetensors: the manifest gives 1771784 bytes, the file has 1000",
        "notes.txt: the manifest does not name this, and an upload would take it along",
        "old: the manifest does not name this",
    ] {
        assert!(text.contains(says), "{says}\n{text}");
    }
    assert!(!text.contains(".cache") && report.plan.is_none());
}

#[test]
fn a_list_of_checksums_that_somebody_else_wrote_stays() {
    let zeros = "0".repeat(64);
    let lists = [
        "mine".to_owned(),
        String::new(),
        format!("{zeros}  README.md\n"),
        format!("{zeros}  coliconv.manifest.json\n{zeros}  README.md\n"),
        format!("{zeros} *README.md\n{zeros} *coliconv.manifest.json\n"),
    ];
    for list in lists {
        let place = Place::new();
        let path = place.container().join("SHA256SUMS");
        fs::write(&path, &list).unwrap();
        let report = place.refuses(&place.options(), &["sums-foreign"]);
        assert!(report.findings[0].hint.as_deref().unwrap().starts_with("move it out"), "{report:#?}");
        assert_eq!(fs::read_to_string(&path).unwrap(), list);
    }
    // One of an earlier publishing, of whatever files, is made anew.
    let place = Place::new();
    let path = place.container().join("SHA256SUMS");
    fs::write(&path, format!("{zeros}  README.md\n{zeros}  coliconv.manifest.json\n{zeros}  out-00000.safetensors\n"))
        .unwrap();
    place.published();
    assert!(!fs::read_to_string(&path).unwrap().contains(&zeros));
}

#[test]
fn reports_of_other_bytes_or_of_none_are_refused() {
    let place = Place::new();
    place.edit("score.json", |report| report["model_sha256"] = json!("0".repeat(64)));
    let report = place.refuses(&place.options(), &["evidence-missing", "report-of-other-bytes"]);
    assert!(lines(&report).contains("score.json: the report is of other bytes: "));
    let place = Place::new();
    place.edit("score.json", |report| report["tokenizer_sha256"] = json!("0".repeat(64)));
    place.refuses(&place.options(), &["evidence-missing", "report-of-other-bytes"]);
    let place = Place::new();
    place.store("verify.json", &place.verified(Level::Structure));
    let report = place.refuses(&place.options(), &["evidence-missing", "report-unbound"]);
    assert!(report.findings.iter().any(|finding| {
        finding.kind == "report-unbound" && finding.hint.as_deref().unwrap().starts_with("run `coliconv verify ")
    }));
}

#[test]
fn a_report_of_another_container_is_refused() {
    let place = Place::new();
    let mut verify = place.load("verify.json");
    verify["files"][4]["name"] = json!("out-00009.safetensors");
    place.store("verify.json", &verify);
    let report = place.refuses(&place.options(), &["evidence-missing", "report-of-other-bytes"]);
    assert!(lines(&report).contains("out-00009.safetensors was "), "{}", lines(&report));
    assert!(lines(&report).contains("now it is absent"), "{}", lines(&report));
}

#[test]
fn a_manifest_that_was_edited_after_verification_is_refused() {
    let edits: [fn(&mut Value); 9] = [
        |m| m["tensors"]["model.norm.weight"]["class"] = json!("io"),
        |m| m["tensors"]["model.norm.weight"]["checksum"] = json!("0123456789abcdef"),
        |m| m["tensors"]["model.norm.weight"]["bytes"] = json!(4),
        |m| m["tensors"]["model.norm.weight"]["file"] = json!("out-00001.safetensors"),
        |m| m["recipe"]["xbits"] = json!(8),
        |m| m["passes"]["mtp"]["shards"] = json!("none"),
        |m| m["source"][0]["bytes"] = json!(1),
        |m| m["tool"] = json!("another 1.0"),
        |m| m["model_type"] = json!("another"),
    ];
    for (number, edit) in edits.into_iter().enumerate() {
        let place = Place::new();
        place.edit("nano-g64/coliconv.manifest.json", edit);
        let report = place.publish(&place.options());
        assert!(errors(&report).contains(&"report-of-other-bytes"), "{number}: {report:#?}");
        assert!(lines(&report).contains("verify.json: the report is of other bytes: coliconv.manifest.json was "));
        assert!(report.plan.is_none() && report.written.is_empty(), "{number}");
    }
}

#[test]
fn so_is_one_that_was_edited_after_publishing_and_one_with_other_keys() {
    let place = Place::new();
    place.published();
    place.edit("nano-g64/coliconv.manifest.json", |m| m["tensors"]["model.norm.weight"]["class"] = json!("io"));
    assert!(errors(&place.publish(&place.options())).contains(&"report-of-other-bytes"));
    let place = Place::new();
    place.edit("nano-g64/coliconv.manifest.json", |m| m["note"] = json!("mine"));
    place.refuses(&place.options(), &["evidence-missing", "manifest-foreign-keys", "report-of-other-bytes"]);
    let place = Place::new();
    place.edit("verify.json", |report| {
        report.as_object_mut().unwrap().remove("manifest_sha256").unwrap();
    });
    let report = place.refuses(&place.options(), &["evidence-missing", "report-unbound"]);
    let of_kind = |kind: &str| report.findings.iter().find(|finding| finding.kind == kind).unwrap();
    assert!(of_kind("report-unbound").hint.as_deref().unwrap().starts_with("run `coliconv verify "));
}
