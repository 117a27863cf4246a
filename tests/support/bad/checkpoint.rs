//! Checkpoints whose index lies, and files config.json and generation_config.json.

use std::fs;
use std::path::Path;

use coliconv::checkpoint::INDEX_FILE;
use serde_json::{Value, json};

use super::Make;
use super::model::{FIRST, LAST, Model, lm_head};
use crate::support::shards::{Tensor, edit_file};

const NORM: &str = "model.norm.weight";

/// A checkpoint, changed in memory before it is stored.
fn changed(path: &Path, change: impl FnOnce(&mut Model)) {
    let mut model = Model::checkpoint(json!({}));
    change(&mut model);
    model.store(path);
}

/// A checkpoint with another text as its index, made from the right one.
fn index_text(path: &Path, change: impl FnOnce(String) -> Vec<u8>) {
    let model = Model::checkpoint(json!({}));
    let text = model.shards.index().to_string();
    model.store(path);
    fs::write(path.join(INDEX_FILE), change(text)).unwrap();
}

/// A checkpoint whose index gives one tensor this file.
fn placed(path: &Path, file: &str) {
    changed(path, |m| m.shards.index_entry(NORM, file));
}

pub fn indexes() -> Vec<(&'static str, Make)> {
    let mut cases = texts();
    cases.extend(maps());
    cases.extend(files());
    cases
}

/// The index as JSON.
fn texts() -> Vec<(&'static str, Make)> {
    vec![
        ("empty", |p| index_text(p, |_| Vec::new())),
        ("not-json", |p| index_text(p, |_| b"<html></html>".to_vec())),
        ("cut-off", |p| index_text(p, |text| text[..200].into())),
        ("array", |p| index_text(p, |text| format!("[{text}]").into())),
        ("invalid-utf-8", |p| {
            index_text(p, |text| {
                let mut bytes = text.into_bytes();
                let last = bytes.len() - 4;
                bytes[last] = 0xff;
                bytes
            });
        }),
        ("nested", |p| index_text(p, |_| ("{\"weight_map\":".repeat(300) + "{}" + &"}".repeat(300)).into())),
        ("no-weight-map", |p| index_text(p, |text| text.replace("weight_map", "weights").into())),
        ("weight-map-twice", |p| {
            index_text(p, |text| {
                text.replacen('{', "{\"weight_map\":{\"lm_head.weight\":\"x.safetensors\"},", 1).into()
            });
        }),
        ("weight-map-array", |p| index_text(p, |_| b"{\"metadata\":{},\"weight_map\":[]}".to_vec())),
        ("weight-map-null", |p| index_text(p, |_| b"{\"metadata\":{},\"weight_map\":null}".to_vec())),
        ("weight-map-empty", |p| index_text(p, |_| b"{\"metadata\":{\"total_size\":0},\"weight_map\":{}}".to_vec())),
        ("total-size-wrong", |p| changed(p, |m| m.shards.total_size(json!(12)))),
        ("total-size-missing", |p| changed(p, |m| m.shards.total_size(Value::Null))),
        ("total-size-negative", |p| changed(p, |m| m.shards.total_size(json!(-1)))),
        ("total-size-a-string", |p| changed(p, |m| m.shards.total_size(json!("1404")))),
        ("total-size-no-double-holds", |p| changed(p, |m| m.shards.total_size(json!((1u64 << 53) + 1)))),
        ("no-metadata", |p| index_text(p, |text| text.replace("\"metadata\"", "\"meta\"").into())),
    ]
}

/// What the map says of names and files.
fn maps() -> Vec<(&'static str, Make)> {
    vec![
        ("file-in-the-parent", |p| placed(p, "../x.safetensors")),
        ("file-by-absolute-path", |p| placed(p, "/etc/x.safetensors")),
        ("file-in-a-folder", |p| placed(p, "a/x.safetensors")),
        ("file-by-backslash", |p| placed(p, "..\\x.safetensors")),
        ("file-on-a-drive", |p| placed(p, "C:x.safetensors")),
        ("file-with-a-nul", |p| placed(p, "x\0.safetensors")),
        ("file-with-an-escape", |p| placed(p, "\u{1b}[2Jx.safetensors")),
        ("file-of-another-kind", |p| placed(p, "config.json")),
        ("file-without-a-name", |p| placed(p, ".safetensors")),
        ("file-empty", |p| placed(p, "")),
        ("file-a-number", |p| {
            index_text(p, |text| {
                text.replacen(
                    "model-00002-of-00002.safetensors\"",
                    "\",\"x\":3,\"y\":\"model-00002-of-00002.safetensors\"",
                    1,
                )
                .into()
            })
        }),
        ("tensor-twice", |p| {
            index_text(p, |text| {
                text.replacen("\"lm_head.weight\"", "\"lm_head.weight\":\"x.safetensors\",\"lm_\\u0068ead.weight\"", 1)
                    .into()
            });
        }),
        ("tensor-absent", |p| changed(p, |m| m.shards.index_entry("model.norm.bias", LAST))),
        ("tensor-called-metadata", |p| changed(p, |m| m.shards.index_entry("__metadata__", LAST))),
        ("tensor-in-the-other-shard", |p| placed(p, FIRST)),
        ("tensor-not-indexed", |p| changed(p, |m| m.shards.unindex(NORM))),
        ("tensors-of-a-shard-not-indexed", |p| changed(p, |m| m.shards.unindex_file(LAST))),
        ("tensor-of-no-model", |p| {
            changed(p, |m| m.shards.add(LAST, "../\n\u{1b}[31mx", Tensor::f32(&[1], &[1.0])));
        }),
    ]
}

/// The files that it speaks of.
fn files() -> Vec<(&'static str, Make)> {
    vec![
        ("shard-missing", |p| {
            changed(p, |_| ());
            fs::remove_file(p.join(LAST)).unwrap();
        }),
        ("shard-missing-of-one-tensor", |p| placed(p, "model-00003-of-00003.safetensors")),
        ("shard-cut-off", |p| {
            changed(p, |_| ());
            edit_file(&p.join(LAST), |bytes| bytes.truncate(bytes.len() - 10));
        }),
        ("shard-empty", |p| {
            changed(p, |_| ());
            edit_file(&p.join(LAST), Vec::clear);
        }),
        ("no-index", |p| changed(p, |m| m.shards.without_index())),
        ("tensor-in-two-shards", |p| {
            changed(p, |m| {
                let copy = m.shards.tensor(NORM).clone();
                m.shards.add(FIRST, NORM, copy);
                m.shards.index_entry(NORM, LAST);
            });
        }),
        ("tensor-also-in-an-extra-file", |p| {
            changed(p, |m| {
                let copy = m.shards.tensor(NORM).clone();
                m.shards.add("model-extra.safetensors", NORM, copy);
                m.shards.index_entry(NORM, LAST);
            });
        }),
        ("tensor-in-two-files-without-index", |p| {
            changed(p, |m| {
                for (from, to) in [(FIRST, "model.safetensors"), (LAST, "more.safetensors")] {
                    let shard = m.shards.files.remove(from).unwrap();
                    m.shards.files.insert(to.to_owned(), shard);
                }
                let copy = m.shards.tensor(NORM).clone();
                m.shards.add("model.safetensors", NORM, copy);
                m.shards.without_index();
            });
        }),
        ("tensor-missing", |p| changed(p, |m| drop(m.shards.remove(lm_head())))),
        ("norm-short", |p| {
            changed(p, |m| {
                let norm = m.shards.tensor_mut(NORM);
                norm.shape = vec![7];
                norm.bytes.truncate(14);
            });
        }),
    ]
}

/// config.json of the base model, changed.
fn config_with(path: &Path, change: impl FnOnce(&mut serde_json::Map<String, Value>)) {
    let mut model = Model::checkpoint(json!({}));
    change(model.config.as_object_mut().unwrap());
    fs::write(path, model.config_text()).unwrap();
}

fn set(path: &Path, key: &str, value: Value) {
    config_with(path, |config| drop(config.insert(key.to_owned(), value)));
}

fn unset(path: &Path, key: &str) {
    config_with(path, |config| drop(config.remove(key)));
}

/// The text of config.json, changed.
fn config_text(path: &Path, change: impl FnOnce(String) -> Vec<u8>) {
    let text = String::from_utf8(Model::checkpoint(json!({})).config_text()).unwrap();
    fs::write(path, change(text)).unwrap();
}

/// Files to be put in the place of config.json.
pub fn configs() -> Vec<(&'static str, Make)> {
    let mut cases = config_texts();
    cases.extend(config_numbers());
    cases.extend(config_words());
    cases.extend(config_silences());
    cases
}

fn config_texts() -> Vec<(&'static str, Make)> {
    vec![
        ("empty.json", |p| config_text(p, |_| Vec::new())),
        ("not-json.json", |p| config_text(p, |_| b"model_type: glm_moe_dsa\n".to_vec())),
        ("array.json", |p| config_text(p, |text| format!("[{text}]").into())),
        ("cut-off.json", |p| config_text(p, |text| text[..100].into())),
        ("trailing-comma.json", |p| config_text(p, |text| text.replacen('}', ",}", 1).into())),
        ("invalid-utf-8.json", |p| config_text(p, |_| b"{\"model_type\":\"\xff\"}".to_vec())),
        ("nul-padding.json", |p| config_text(p, |text| (text + "\0\0\0\0").into())),
        ("nested.json", |p| {
            config_text(p, |text| {
                text.replacen('{', &format!("{{\"a\":{}{},", "[".repeat(300), "]".repeat(300)), 1).into()
            })
        }),
        ("key-twice.json", |p| config_text(p, |text| text.replacen('{', "{\"hidden_size\":8,", 1).into())),
        ("nested-key-twice.json", |p| {
            config_text(p, |text| text.replace("\"rope_theta\"", "\"rope_theta\":1.0,\"rope_\\u0074heta\"").into());
        }),
        ("number-beyond-doubles.json", |p| config_text(p, |text| text.replace("10000.0", "1e999").into())),
        ("not-a-number.json", |p| config_text(p, |text| text.replace("10000.0", "NaN").into())),
        ("other-model.json", |p| set(p, "model_type", json!("deepseek_v3"))),
        ("other-model-with-an-escape.json", |p| set(p, "model_type", json!("\u{1b}[31mred"))),
        ("no-model-type.json", |p| unset(p, "model_type")),
        ("model-type-a-number.json", |p| set(p, "model_type", json!(3))),
    ]
}

fn config_numbers() -> Vec<(&'static str, Make)> {
    vec![
        ("hidden-size-missing.json", |p| unset(p, "hidden_size")),
        ("hidden-size-null.json", |p| set(p, "hidden_size", Value::Null)),
        ("hidden-size-zero.json", |p| set(p, "hidden_size", json!(0))),
        ("hidden-size-negative.json", |p| set(p, "hidden_size", json!(-8))),
        ("hidden-size-float.json", |p| set(p, "hidden_size", json!(8.0))),
        ("hidden-size-string.json", |p| set(p, "hidden_size", json!("8"))),
        ("hidden-size-2-to-53-plus-1.json", |p| set(p, "hidden_size", json!((1u64 << 53) + 1))),
        ("hidden-size-2-to-64.json", |p| {
            config_text(p, |text| text.replace("\"hidden_size\":8", "\"hidden_size\":18446744073709551616").into());
        }),
        ("layers-zero.json", |p| set(p, "num_hidden_layers", json!(0))),
        ("layers-129.json", |p| set(p, "num_hidden_layers", json!(129))),
        ("two-mtp-layers.json", |p| set(p, "num_nextn_predict_layers", json!(2))),
        ("experts-5000.json", |p| set(p, "n_routed_experts", json!(5000))),
        ("experts-chosen-too-many.json", |p| set(p, "num_experts_per_tok", json!(3))),
        ("groups-of-experts-uneven.json", |p| {
            config_with(p, |config| {
                config.insert("n_routed_experts".to_owned(), json!(4));
                config.insert("n_group".to_owned(), json!(3));
            });
        }),
        ("groups-of-experts.json", |p| set(p, "n_group", json!(2))),
        ("vocabulary-2-to-25.json", |p| set(p, "vocab_size", json!(1 << 25))),
        ("rope-dim-odd.json", |p| set(p, "qk_rope_head_dim", json!(3))),
        ("index-head-dim-below-rope.json", |p| {
            config_with(p, |config| drop(config.insert("qk_rope_head_dim".to_owned(), json!(4))));
        }),
        ("rope-theta-zero.json", |p| set(p, "rope_parameters", json!({"rope_theta": 0, "rope_type": "default"}))),
        ("rope-theta-string.json", |p| set(p, "rope_parameters", json!({"rope_theta": "1e6"}))),
        ("scaling-factor-negative.json", |p| set(p, "routed_scaling_factor", json!(-2.5))),
        ("stop-id-beyond-the-vocabulary.json", |p| set(p, "eos_token_id", json!(5))),
        ("stop-id-negative.json", |p| set(p, "eos_token_id", json!([-1]))),
        ("stop-ids-nine.json", |p| {
            config_with(p, |config| {
                config.insert("vocab_size".to_owned(), json!(5));
                config.insert("eos_token_id".to_owned(), json!([0, 1, 2, 3, 4, 5, 6, 7, 8]));
            });
        }),
    ]
}

fn config_words() -> Vec<(&'static str, Make)> {
    vec![
        ("rope-parameters-array.json", |p| set(p, "rope_parameters", json!([]))),
        ("rope-yarn.json", |p| set(p, "rope_parameters", json!({"rope_theta": 1e4, "rope_type": "yarn"}))),
        ("hidden-act-gelu.json", |p| set(p, "hidden_act", json!("gelu"))),
        ("scoring-softmax.json", |p| set(p, "scoring_func", json!("softmax"))),
        ("attention-bias.json", |p| set(p, "attention_bias", json!(true))),
        ("norm-topk-prob-a-string.json", |p| set(p, "norm_topk_prob", json!("true"))),
        ("tie-a-number.json", |p| set(p, "tie_word_embeddings", json!(0))),
        ("indexer-types-short.json", |p| set(p, "indexer_types", json!([]))),
        ("indexer-types-unknown.json", |p| set(p, "indexer_types", json!(["half"]))),
        ("indexer-types-shared-first.json", |p| set(p, "indexer_types", json!(["shared"]))),
        ("indexer-types-a-string.json", |p| set(p, "indexer_types", json!("full"))),
        ("layer-types-long.json", |p| set(p, "mlp_layer_types", json!(["dense", "sparse"]))),
        ("index-pattern-short.json", |p| {
            config_with(p, |config| {
                config.remove("indexer_types");
                config.insert("index_topk_pattern".to_owned(), json!("FS"));
            });
        }),
        ("quantization-a-string.json", |p| set(p, "quantization_config", json!("fp8"))),
        ("quantization-awq.json", |p| set(p, "quantization_config", json!({"quant_method": "awq"}))),
        ("quantization-stale.json", |p| {
            let fp8 = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
            set(p, "quantization_config", fp8);
        }),
    ]
}

/// Keys whose absence silently changes results.
fn config_silences() -> Vec<(&'static str, Make)> {
    vec![
        ("no-rope-parameters.json", |p| unset(p, "rope_parameters")),
        ("no-rope-theta.json", |p| set(p, "rope_parameters", json!({"rope_type": "default"}))),
        ("rope-theta-null.json", |p| set(p, "rope_parameters", json!({"rope_theta": null}))),
        ("no-norm-topk-prob.json", |p| unset(p, "norm_topk_prob")),
        ("no-routed-scaling-factor.json", |p| unset(p, "routed_scaling_factor")),
        ("no-indexer-types.json", |p| unset(p, "indexer_types")),
        ("no-silent-key-at-all.json", |p| {
            config_with(p, |config| {
                for key in ["rope_parameters", "norm_topk_prob", "routed_scaling_factor", "indexer_types"] {
                    config.remove(key);
                }
            });
        }),
    ]
}
