//! Containers in which something of the model is missing, twice, or of no model.

use std::fs;
use std::path::Path;

use coliconv::quantize::Quantizer;
use serde_json::json;

use super::Make;
use super::model::Model;
use crate::support::shards::{Tensor, edit_file};

const MAIN: [&str; 3] = ["out-00000.safetensors", "out-00001.safetensors", "out-00002.safetensors"];
const MTP: &str = "out-mtp-00000.safetensors";
const NORM: &str = "model.norm.weight";
const LAYER_2: &str = "model.layers.2.input_layernorm.weight";

/// Three dense layers, one a file; embedding, norm and head are in the first.
fn three_layers() -> Model {
    let mut model = Model::container(json!({
        "num_hidden_layers": 3, "first_k_dense_replace": 3, "indexer_types": ["full", "shared", "full"]
    }));
    for (layer, file) in [(1, MAIN[1]), (2, MAIN[2])] {
        let names: Vec<String> = model.shards.names().map(|(name, _)| name.to_owned()).collect();
        for name in names.iter().filter(|name| name.starts_with(&format!("model.layers.{layer}."))) {
            model.shards.move_to(name, file);
        }
    }
    model
}

/// The three layers without some names.
fn without(path: &Path, unwanted: impl Fn(&str) -> bool) {
    let mut model = three_layers();
    model.shards.retain(|name| !unwanted(name));
    model.store(path);
}

/// The three layers without some files.
fn without_files(path: &Path, files: &[&str]) {
    let mut model = three_layers();
    model.shards.files.retain(|name, _| !files.contains(&name.as_str()));
    model.store(path);
}

/// One sparse layer of two experts and an MTP layer of two, without some names.
fn sparse(path: &Path, unwanted: impl Fn(&str) -> bool) {
    let mut model = Model::container(json!({"first_k_dense_replace": 0, "num_nextn_predict_layers": 1}));
    model.shards.retain(|name| !unwanted(name));
    model.store(path);
}

pub fn bad() -> Vec<(&'static str, Make)> {
    let mut cases = layers();
    cases.extend(parts());
    cases.extend(strangers());
    cases
}

/// Whole layers and files.
fn layers() -> Vec<(&'static str, Make)> {
    vec![
        ("layer-missing", |p| without(p, |name| name.contains("layers.1."))),
        ("two-of-three-layers-missing", |p| {
            without(p, |name| name.contains("layers.1.") || name.contains("layers.2."))
        }),
        ("file-missing-first", |p| without_files(p, &MAIN[..1])),
        ("file-missing-between", |p| without_files(p, &MAIN[1..2])),
        ("file-missing-last", |p| without_files(p, &MAIN[2..])),
        // Three numbered files for three, but one of them is the MTP head's.
        ("file-missing-hidden-by-mtp", |p| {
            let mut model = three_layers();
            let mtp = Model::container(json!({
                "num_hidden_layers": 3, "first_k_dense_replace": 3, "indexer_types": ["full", "shared", "full"],
                "num_nextn_predict_layers": 1
            }));
            model.shards.files.remove(MAIN[1]);
            model.shards.files.insert(MTP.to_owned(), mtp.shards.files[MTP].clone());
            model.config = mtp.config;
            model.store(p);
        }),
        ("file-missing-of-other-names", |p| {
            let mut model = three_layers();
            model.quantize("lm_head.weight", Quantizer::Int8Row { bits: 8 });
            for (from, to) in
                [(MAIN[0], "model-00001-of-00003.safetensors"), (MAIN[2], "model-00003-of-00003.safetensors")]
            {
                let shard = model.shards.files.remove(from).unwrap();
                model.shards.files.insert(to.to_owned(), shard);
            }
            model.shards.files.remove(MAIN[1]);
            model.store(p);
        }),
        ("file-cut-off", |p| {
            three_layers().store(p);
            edit_file(&p.join(MAIN[1]), |bytes| bytes.truncate(bytes.len() - 4));
        }),
        ("file-empty", |p| {
            three_layers().store(p);
            fs::write(p.join(MAIN[2]), "").unwrap();
        }),
        ("file-without-tensors", |p| {
            let mut model = three_layers();
            model.shards.files.get_mut(MAIN[2]).unwrap().tensors.clear();
            model.store(p);
        }),
        ("index-of-a-missing-file", |p| {
            // The index still names what is gone.
            let model = three_layers();
            let index = model.shards.index().to_string();
            without_files(p, &MAIN[2..]);
            fs::write(p.join("model.safetensors.index.json"), index).unwrap();
        }),
        ("index-of-another-file", |p| {
            let model = three_layers();
            let right = format!("{LAYER_2}\":\"{}", MAIN[2]);
            let index = model.shards.index().to_string().replace(&right, &format!("{LAYER_2}\":\"{}", MAIN[1]));
            model.store(p);
            fs::write(p.join("model.safetensors.index.json"), index).unwrap();
        }),
        ("index-not-json", |p| {
            three_layers().store(p);
            fs::write(p.join("model.safetensors.index.json"), "{").unwrap();
        }),
        ("no-config", |p| {
            three_layers().store(p);
            fs::remove_file(p.join("config.json")).unwrap();
        }),
        ("no-small-files", |p| {
            three_layers().store(p);
            fs::remove_file(p.join("tokenizer.json")).unwrap();
            fs::remove_file(p.join("generation_config.json")).unwrap();
        }),
        ("stop-ids-in-generation-config", |p| {
            let mut model = three_layers();
            model.shards.others.insert("generation_config.json".to_owned(), b"{\"eos_token_id\":[4,5]}\n".to_vec());
            model.store(p);
        }),
        ("generation-config-not-json", |p| {
            let mut model = three_layers();
            model.shards.others.insert("generation_config.json".to_owned(), b"eos: 4\n".to_vec());
            model.store(p);
        }),
        ("generation-config-key-twice", |p| {
            let mut model = three_layers();
            let text = b"{\"eos_token_id\":4,\"eos_token_id\":3}\n".to_vec();
            model.shards.others.insert("generation_config.json".to_owned(), text);
            model.store(p);
        }),
    ]
}

/// Single tensors, experts, the MTP head and the indexer.
fn parts() -> Vec<(&'static str, Make)> {
    vec![
        ("norm-missing", |p| without(p, |name| name == NORM)),
        ("embedding-missing", |p| without(p, |name| name == "model.embed_tokens.weight")),
        ("output-head-missing", |p| without(p, |name| name == "lm_head.weight")),
        ("projection-missing", |p| without(p, |name| name == "model.layers.2.self_attn.kv_b_proj.weight")),
        ("expert-missing", |p| sparse(p, |name| name.contains("layers.0.mlp.experts.1."))),
        ("expert-without-down-proj", |p| sparse(p, |name| name.ends_with("layers.0.mlp.experts.0.down_proj.weight"))),
        ("router-missing", |p| sparse(p, |name| name.ends_with("layers.0.mlp.gate.weight"))),
        ("correction-bias-missing", |p| sparse(p, |name| name.ends_with("layers.0.mlp.gate.e_score_correction_bias"))),
        ("shared-expert-missing", |p| sparse(p, |name| name.contains("layers.0.mlp.shared_experts."))),
        ("mtp-expert-missing", |p| sparse(p, |name| name.contains("layers.1.mlp.experts.0."))),
        ("mtp-eh-proj-missing", |p| sparse(p, |name| name.ends_with("layers.1.eh_proj.weight"))),
        ("mtp-only", |p| sparse(p, |name| !name.contains("layers.1."))),
        ("indexer-of-a-layer-missing", |p| {
            let mut model = three_layers().with_indexer();
            model.shards.retain(|name| !name.contains("layers.2.self_attn.indexer."));
            model.store(p);
        }),
        ("indexer-tensor-missing", |p| {
            let mut model = three_layers().with_indexer();
            model.shards.retain(|name| name != "model.layers.0.self_attn.indexer.k_norm.bias");
            model.store(p);
        }),
    ]
}

/// The three layers with one tensor more.
fn with_extra(path: &Path, file: &str, name: &str) {
    let mut model = three_layers();
    model.shards.add(file, name, Tensor::f32(&[1], &[1.0]));
    model.store(path);
}

/// Tensors that are twice there or should not be.
fn strangers() -> Vec<(&'static str, Make)> {
    vec![
        ("tensor-in-two-files", |p| {
            let mut model = three_layers();
            let copy = model.shards.tensor(NORM).clone();
            model.shards.add(MAIN[2], NORM, copy);
            model.store(p);
        }),
        ("tensor-in-two-files-with-an-index", |p| {
            let mut model = three_layers();
            let index = model.shards.index().to_string();
            let copy = model.shards.tensor(NORM).clone();
            model.shards.add(MAIN[2], NORM, copy);
            model.store(p);
            let last = index.replace(&format!("\"{NORM}\":\"{}\"", MAIN[0]), &format!("\"{NORM}\":\"{}\"", MAIN[2]));
            fs::write(p.join("model.safetensors.index.json"), last).unwrap();
        }),
        ("tensor-twice-in-a-file", |p| {
            let mut model = three_layers();
            let copy = model.shards.tensor(NORM).clone();
            model.shards.add(MAIN[0], NORM, copy);
            model.store(p);
        }),
        ("tensor-of-a-layer-too-many", |p| with_extra(p, MAIN[2], "model.layers.3.input_layernorm.weight")),
        ("tensor-of-another-model", |p| with_extra(p, MAIN[2], "model.language_model.norm.weight")),
        ("tensor-called-like-a-path", |p| with_extra(p, MAIN[0], "../../etc/passwd")),
        ("tensor-with-a-newline", |p| with_extra(p, MAIN[0], "x\nerror: model.norm.weight")),
        ("tensor-with-an-escape", |p| with_extra(p, MAIN[0], "\u{1b}[31mx\u{1b}[0m")),
    ]
}
