//! Containers whose stamps or manifest say other than their bytes.

use std::fs;
use std::path::Path;

use coliconv::container::manifest::MANIFEST_FILE;
use coliconv::container::progress::PROGRESS_FILE;
use coliconv::quantize::Quantizer;
use serde_json::{Map, Value, json};

use super::Make;
use super::manifest::write_manifest;
use super::model::Model;
use crate::support::shards::edit_file;

const FILE: &str = "out-00000.safetensors";
const HEAD: &str = "lm_head.weight";
const NORM: &str = "model.norm.weight";

/// A container with its output head as int8-row.
fn base() -> Model {
    let mut model = Model::container(json!({}));
    model.quantize(HEAD, Quantizer::Int8Row { bits: 8 });
    model
}

/// The base container with this text as the stamps of its file.
fn text(path: &Path, text: &str) {
    let mut model = base();
    model.stamp_text(FILE, text);
    model.store(path);
}

/// The base container with one stamp.
fn stamp(path: &Path, name: &str, format: &str) {
    text(path, &json!({name: format}).to_string());
}

pub fn stamps() -> Vec<(&'static str, Make)> {
    vec![
        ("not-json", |p| text(p, "int8-row")),
        ("empty", |p| text(p, "")),
        ("array", |p| text(p, "[\"lm_head.weight\",\"int8-row\"]")),
        ("null", |p| text(p, "null")),
        ("cut-off", |p| text(p, "{\"lm_head.weight\":\"int8-row\"")),
        ("nested", |p| text(p, &("{\"a\":".repeat(300) + "{}" + &"}".repeat(300)))),
        ("entry-number", |p| text(p, "{\"lm_head.weight\":1}")),
        ("entry-null", |p| text(p, "{\"lm_head.weight\":null}")),
        ("entry-object", |p| text(p, "{\"lm_head.weight\":{\"fmt\":\"int8-row\"}}")),
        ("object-instead-of-text", |p| {
            text(p, "{}");
            let from = br#""colibri.fmt":"{}""#;
            edit_file(&p.join(FILE), |bytes| {
                let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
                bytes.splice(at..at + from.len(), br#""colibri.fmt":{}  "#.iter().copied());
            });
        }),
        ("conflict-in-one-file", |p| {
            text(p, "{\"lm_head.weight\":\"int8-row\",\"lm_h\\u0065ad.weight\":\"fp8-e4m3-b128\"}");
        }),
        ("conflict-in-two-files", |p| {
            let mut model = base();
            model.shards.move_to(NORM, "out-00001.safetensors");
            model.stamp_text(FILE, "{\"lm_head.weight\":\"int8-row\"}");
            model.stamp_text("out-00001.safetensors", "{\"lm_head.weight\":\"int4-row\"}");
            model.store(p);
        }),
        ("unknown-format", |p| stamp(p, HEAD, "q8_0")),
        ("unknown-format-upper-case", |p| stamp(p, HEAD, "INT8-ROW")),
        ("unknown-format-with-an-escape", |p| stamp(p, HEAD, "\u{1b}[31mint8-row")),
        ("unknown-format-mxfp4", |p| stamp(p, HEAD, "mxfp4")),
        ("unknown-format-empty", |p| stamp(p, HEAD, "")),
        ("unknown-format-of-a-norm", |p| stamp(p, NORM, "float32")),
        ("unknown-format-of-no-tensor", |p| stamp(p, "x", "q8_0")),
        ("mismatch", |p| stamp(p, HEAD, "int4-row")),
        ("mismatch-of-groups", |p| stamp(p, HEAD, "int4-grouped")),
        ("mismatch-of-f32", |p| stamp(p, HEAD, "f32")),
        ("mismatch-of-a-norm", |p| stamp(p, NORM, "int8-row")),
        ("mismatch-of-a-raw-matrix", |p| stamp(p, "model.embed_tokens.weight", "int8-row")),
        ("mismatch-of-a-group-as-wide-as-the-row", |p| {
            let mut model = Model::container(json!({}));
            model.quantize(HEAD, Quantizer::Int4Grouped { group_size: 64 });
            model.stamp(HEAD, "int4-grouped");
            model.store(p);
        }),
        ("against-the-manifest", |p| {
            // Both fit one row of eight bytes with one scale.
            let up = "model.layers.0.mlp.up_proj.weight";
            let mut model = Model::container(json!({"intermediate_size": 1}));
            model.set_counts(up, 8, 1);
            model.stamp(up, "fp8-e4m3-b128");
            model.store(p);
            write_manifest(p);
            edit(p, |m| m["tensors"][up]["format"] = json!("int8-row"));
        }),
        ("of-no-tensor", |p| stamp(p, "model.layers.9.x", "int8-row")),
        ("of-scales", |p| stamp(p, "lm_head.weight.qs", "f32")),
        ("of-an-expert", |p| {
            let name = "model.layers.0.mlp.experts.1.up_proj.weight";
            let mut model = Model::container(json!({"first_k_dense_replace": 0}));
            model.quantize(name, Quantizer::Int8Row { bits: 8 });
            model.stamp(name, "int8-row");
            model.store(p);
        }),
    ]
}

/// Changes the manifest of a container.
fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let path = path.join(MANIFEST_FILE);
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    fs::write(path, sorted(manifest).to_string()).unwrap();
}

/// Members in the order of their names, whatever serde_json does with them.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(members) => {
            let mut members: Vec<(String, Value)> = members.into_iter().map(|(k, v)| (k, sorted(v))).collect();
            members.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(Map::from_iter(members))
        }
        Value::Array(values) => values.into_iter().map(sorted).collect(),
        other => other,
    }
}

/// The base container with its manifest, changed.
fn manifest(path: &Path, change: impl FnOnce(&mut Value)) {
    base().store(path);
    write_manifest(path);
    edit(path, change);
}

/// The base container with this text as its manifest, made from the right one.
fn manifest_text(path: &Path, change: impl FnOnce(String) -> Vec<u8>) {
    manifest(path, |_| ());
    edit_file(&path.join(MANIFEST_FILE), |bytes| *bytes = change(String::from_utf8(bytes.clone()).unwrap()));
}

pub fn manifests() -> Vec<(&'static str, Make)> {
    let mut cases = manifest_texts();
    cases.extend(manifest_files());
    cases.extend(manifest_tensors());
    cases
}

fn manifest_texts() -> Vec<(&'static str, Make)> {
    vec![
        ("empty", |p| manifest_text(p, |_| Vec::new())),
        ("not-json", |p| manifest_text(p, |_| b"version: 1\n".to_vec())),
        ("array", |p| manifest_text(p, |text| format!("[{text}]").into())),
        ("cut-off", |p| manifest_text(p, |text| text[..text.len() - 30].into())),
        ("invalid-utf-8", |p| manifest_text(p, |text| [&text.as_bytes()[..text.len() - 1], b",\"\xff\":1}"].concat())),
        ("nested", |p| {
            manifest_text(p, |_| {
                ("{\"version\":1,\"files\":".to_owned() + &"[".repeat(300) + &"]".repeat(300) + "}").into()
            })
        }),
        ("other-version", |p| manifest(p, |m| m["version"] = json!(2))),
        ("version-a-string", |p| manifest(p, |m| m["version"] = json!("1"))),
        ("no-version", |p| manifest(p, |m| drop(m.as_object_mut().unwrap().remove("version")))),
        ("no-tensors", |p| manifest(p, |m| drop(m.as_object_mut().unwrap().remove("tensors")))),
        ("key-twice", |p| manifest_text(p, |text| text.replacen('{', "{\"files\":[],", 1).into())),
        ("tensor-twice", |p| {
            manifest_text(p, |text| {
                let at = text.find("\"tensors\":{").unwrap() + "\"tensors\":{".len();
                let from = text.find("\"model.norm.weight\"").unwrap();
                let to = from + text[from..].find('}').unwrap() + 1;
                format!("{}{},{}", &text[..at], text[from..to].replace("norm", "\\u006eorm"), &text[at..]).into()
            });
        }),
        ("bytes-negative", |p| manifest(p, |m| m["files"][0]["bytes"] = json!(-1))),
        ("bytes-float", |p| manifest(p, |m| m["tensors"][NORM]["bytes"] = json!(32.0))),
        ("other-checksum", |p| manifest(p, |m| m["checksum"] = json!("crc32"))),
        ("progress-beside-it", |p| {
            manifest(p, |_| ());
            fs::write(p.join(PROGRESS_FILE), "{}").unwrap();
        }),
    ]
}

/// Adds a record of a file to a list of the manifest.
fn extra_file(path: &Path, list: &str, name: &str) {
    manifest(path, |m| {
        let record = json!({"name": name, "bytes": 3, "sha256": "00"});
        m[list].as_array_mut().unwrap().push(record);
    });
}

fn manifest_files() -> Vec<(&'static str, Make)> {
    vec![
        ("file-missing", |p| extra_file(p, "files", "out-00001.safetensors")),
        ("file-in-the-parent", |p| extra_file(p, "files", "../out-00000.safetensors")),
        ("file-by-absolute-path", |p| extra_file(p, "small_files", "/etc/hostname")),
        ("file-by-backslash", |p| extra_file(p, "small_files", "..\\tokenizer.json")),
        ("file-of-two-dots", |p| extra_file(p, "small_files", "..")),
        ("file-of-a-dot", |p| extra_file(p, "small_files", ".")),
        ("file-empty", |p| extra_file(p, "small_files", "")),
        ("file-with-an-escape", |p| extra_file(p, "small_files", "\u{1b}[2J\n")),
        ("file-of-another-size", |p| manifest(p, |m| m["files"][0]["bytes"] = json!(12))),
        ("file-twice", |p| {
            manifest(p, |m| {
                let record = m["files"][0].clone();
                m["files"].as_array_mut().unwrap().push(record);
            });
        }),
        ("file-unnamed", |p| manifest(p, |m| m["files"] = json!([]))),
        ("small-file-missing", |p| {
            manifest(p, |_| ());
            fs::remove_file(p.join("tokenizer.json")).unwrap();
        }),
        ("small-file-of-another-size", |p| {
            manifest(p, |_| ());
            edit_file(&p.join("tokenizer.json"), |bytes| bytes.push(b'\n'));
        }),
    ]
}

fn manifest_tensors() -> Vec<(&'static str, Make)> {
    vec![
        ("tensor-unnamed", |p| manifest(p, |m| drop(m["tensors"].as_object_mut().unwrap().remove(NORM)))),
        ("tensor-missing", |p| manifest(p, |m| m["tensors"]["x"] = m["tensors"][NORM].clone())),
        ("tensor-in-another-file", |p| manifest(p, |m| m["tensors"][NORM]["file"] = json!("../x.safetensors"))),
        ("tensor-of-another-size", |p| manifest(p, |m| m["tensors"][NORM]["bytes"] = json!(31))),
        ("tensor-of-another-shape", |p| manifest(p, |m| m["tensors"][NORM]["shape"] = json!([4, 2]))),
        ("tensor-of-another-format", |p| manifest(p, |m| m["tensors"][NORM]["format"] = json!("int8-row"))),
        ("format-unknown", |p| manifest(p, |m| m["tensors"][HEAD]["format"] = json!("q8_0"))),
        ("format-unknown-of-a-norm", |p| manifest(p, |m| m["tensors"][NORM]["format"] = json!("q8_0"))),
        ("format-that-does-not-fit", |p| manifest(p, |m| m["tensors"][HEAD]["format"] = json!("int4-row"))),
        ("group-size-for-a-row", |p| manifest(p, |m| m["tensors"][HEAD]["group_size"] = json!(64))),
        ("group-size-zero", |p| {
            manifest(p, |m| {
                m["tensors"][HEAD]["format"] = json!("int4-grouped");
                m["tensors"][HEAD]["group_size"] = json!(0);
            });
        }),
        ("scale-bytes-wrong", |p| manifest(p, |m| m["tensors"][HEAD]["scale_bytes"] = json!(24))),
        ("scale-checksum-missing", |p| {
            manifest(p, |m| drop(m["tensors"][HEAD].as_object_mut().unwrap().remove("scale_checksum")));
        }),
        ("checksum-of-another-length", |p| manifest(p, |m| m["tensors"][NORM]["checksum"] = json!("00"))),
        ("group-that-the-engine-misreads", |p| {
            let name = "model.layers.0.self_attn.q_b_proj.weight";
            let mut model = Model::container(json!({"q_lora_rank": 144}));
            model.quantize(name, Quantizer::Int4Grouped { group_size: 64 });
            model.store(p);
            write_manifest(p);
            edit(p, |m| m["tensors"][name]["group_size"] = json!(64));
        }),
    ]
}
