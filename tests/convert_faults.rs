//! What is wrong with a checkpoint is told before anything is written: file, tensor, expected, found, hint; exit code 2.

mod support;

use coliconv::tensor::Dtype;
use insta::assert_snapshot;
use serde_json::{Value, json};
use support::convert::{G32, Place, refusal, small, text};
use support::shards::{Shards, Tensor};

const O: &str = "model.layers.0.self_attn.o_proj.weight";
const DOWN: &str = "model.layers.0.mlp.down_proj.weight";
const DOWN_SCALE: &str = "model.layers.0.mlp.down_proj.weight_scale_inv";
const NORM: &str = "model.norm.weight";
const FIRST: &str = "model-00001-of-00003.safetensors";
const LAST: &str = "model-00003-of-00003.safetensors";

/// A change of the small model, with a title.
type Edit = (&'static str, fn(&mut Shards));

/// What is said about edits of the small model, one after the other.
fn refusals(edits: &[Edit]) -> String {
    edits.iter().map(|(title, edit)| refusal(title, edit, &G32)).collect()
}

#[test]
fn names() {
    let told = refusals(&[
        ("an unknown tensor", |s| s.add(FIRST, "model.rotary.inv_freq", Tensor::zeros(Dtype::F32, &[5]))),
        ("25 unknown tensors", |s| {
            (0..25).for_each(|i| s.add(LAST, &format!("vision.blocks.{i}.weight"), Tensor::zeros(Dtype::BF16, &[2])));
        }),
        ("nested under another prefix", |s| {
            let names: Vec<String> = s.names().map(|(name, _)| name.to_owned()).collect();
            for name in names.iter().filter(|name| name.contains("o_proj") || name.contains("embed")) {
                s.rename(name, &name.replace("model.", "model.language_model."));
            }
        }),
        ("names that control a terminal", |s| {
            s.add(FIRST, "a\u{1b}[2J\r\n\u{202e}b", Tensor::zeros(Dtype::F32, &[1]));
            s.add(FIRST, &"x".repeat(300), Tensor::zeros(Dtype::F32, &[1]));
            s.add(FIRST, "../../etc/passwd", Tensor::zeros(Dtype::F32, &[1]));
        }),
        ("an MTP layer that config.json does not have", |s| s.set_config("num_nextn_predict_layers", Value::Null)),
        ("a layer more than config.json has", |s| {
            s.set_config("num_nextn_predict_layers", Value::Null);
            s.retain(|name| !name.contains("layers.3.") || name.ends_with("layernorm.weight"));
            s.rename("model.layers.3.input_layernorm.weight", "model.layers.7.input_layernorm.weight");
        }),
    ]);
    assert_snapshot!(told);
}

#[test]
fn json_lists_every_fault() {
    let mut shards = small();
    for i in 0..25 {
        shards.add(LAST, &format!("vision.blocks.{i:02}\u{1b}.weight"), Tensor::zeros(Dtype::BF16, &[2]));
    }
    shards.remove(O);
    let place = Place::of(&shards);
    let output = place.command(&G32).arg("--json").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let refused: Value = serde_json::from_slice(&output.stdout).unwrap();
    let refused = refused["refused"].as_array().unwrap();
    assert_eq!(refused.len(), 27);
    assert_eq!(refused[24]["tensor"], "vision.blocks.24\u{1b}.weight");
    assert!(refused.iter().all(|finding| finding["severity"] == "error" && finding["file"].is_string()));
    assert!(text(&output.stderr).contains("… and 7 more (27 in all)"));
    assert!(!place.container.exists());
}

#[test]
fn scales() {
    let told = refusals(&[
        ("without scales", |s| drop(s.remove(DOWN_SCALE))),
        ("scales without a weight", |s| s.add(LAST, "model.norm.weight_scale_inv", Tensor::f32(&[1, 1], &[1.0]))),
        // The weight is [96, 201] and its grid [1, 2].
        ("transposed", |s| s.tensor_mut(DOWN_SCALE).shape = vec![2, 1]),
        ("oversize", |s| *s.tensor_mut(DOWN_SCALE) = Tensor::zeros(Dtype::F32, &[2, 4])),
        ("too small", |s| *s.tensor_mut(DOWN_SCALE) = Tensor::zeros(Dtype::F32, &[1, 1])),
        ("[O, 1]", |s| *s.tensor_mut(DOWN_SCALE) = Tensor::zeros(Dtype::F32, &[96, 1])),
        ("[O]", |s| *s.tensor_mut(DOWN_SCALE) = Tensor::zeros(Dtype::F32, &[96])),
        ("[1, I]", |s| *s.tensor_mut(DOWN_SCALE) = Tensor::zeros(Dtype::F32, &[1, 201])),
        ("scalar", |s| *s.tensor_mut(DOWN_SCALE) = Tensor::zeros(Dtype::F32, &[])),
        ("of F16", |s| *s.tensor_mut(DOWN_SCALE) = Tensor::zeros(Dtype::F16, &[1, 2])),
        ("of bytes", |s| *s.tensor_mut(DOWN_SCALE) = Tensor::zeros(Dtype::U8, &[1, 2])),
        ("NaN", |s| *s.tensor_mut(DOWN_SCALE) = Tensor::f32(&[1, 2], &[1.0, f32::NAN])),
        ("infinite", |s| *s.tensor_mut(DOWN_SCALE) = Tensor::f32(&[1, 2], &[f32::NEG_INFINITY, 1.0])),
        ("NaN of BF16", |s| {
            *s.tensor_mut(DOWN_SCALE) = Tensor::new(Dtype::BF16, &[1, 2], vec![0x80, 0x3f, 0xc0, 0x7f]);
        }),
        ("NaN of UE8M0", |s| *s.tensor_mut(DOWN_SCALE) = Tensor::new(Dtype::F8_E8M0, &[1, 2], vec![0x78, 0xff])),
        ("a vector of FP8", |s| *s.tensor_mut(NORM) = Tensor::zeros(Dtype::F8_E4M3, &[96])),
    ]);
    assert_snapshot!(told);
}

/// Puts everything into one shard, so that a fault in a value is met before any file is finished.
fn single(mut shards: Shards) -> Shards {
    let all: Vec<(String, Tensor)> = shards.files.values().flat_map(|shard| shard.tensors.clone()).collect();
    shards.files.clear();
    all.into_iter().for_each(|(name, tensor)| shards.add("model.safetensors", &name, tensor));
    shards
}

#[test]
fn values() {
    let edits: [Edit; 7] = [
        ("NaN of FP8 twice, in row 2", |s| {
            s.tensor_mut(DOWN).set(2 * 201 + 5, &[0x7f]);
            s.tensor_mut(DOWN).set(2 * 201 + 200, &[0xff]);
        }),
        ("NaN of BF16, in two tensors", |s| {
            s.tensor_mut("lm_head.weight").set(300 * 96 + 95, &[0xc0, 0x7f]);
            s.tensor_mut(NORM).set(7, &[0xc0, 0x7f]);
        }),
        ("infinite BF16", |s| s.tensor_mut("model.embed_tokens.weight").set(0, &[0x80, 0xff])),
        ("NaN of F16", |s| *s.tensor_mut(NORM) = Tensor::new(Dtype::F16, &[96], [0x00, 0x7e].repeat(96))),
        ("infinite F16", |s| *s.tensor_mut(NORM) = Tensor::new(Dtype::F16, &[96], [0x00, 0x7c].repeat(96))),
        ("infinite F32", |s| {
            s.tensor_mut("model.layers.1.mlp.gate.e_score_correction_bias").set(3, &f32::INFINITY.to_le_bytes());
        }),
        ("finite FP8 times a finite scale, beyond f32", |s| {
            *s.tensor_mut(DOWN_SCALE) = Tensor::f32(&[1, 2], &[1.0, f32::MAX]);
        }),
    ];
    let told: String = edits
        .iter()
        .map(|(title, edit)| {
            let mut shards = single(small());
            edit(&mut shards);
            support::convert::refusal_of(title, &shards, &G32)
        })
        .collect();
    assert_snapshot!(told);
}

#[test]
fn formats_that_are_not_read() {
    let nvfp4 = |s: &mut Shards, codes: &str, scale: &str, global: &str| {
        s.remove(O);
        s.remove(&format!("{O}_scale_inv"));
        s.add(FIRST, codes, Tensor::zeros(Dtype::U8, &[96, 71]));
        s.add(FIRST, scale, Tensor::zeros(Dtype::F8_E4M3, &[96, 9]));
        s.add(FIRST, global, Tensor::f32(&[], &[0.5]));
    };
    let fused = |s: &mut Shards| {
        s.add(LAST, "model.layers.2.mlp.experts.gate_up_proj", Tensor::zeros(Dtype::BF16, &[4, 262, 96]));
        s.add(LAST, "model.layers.2.mlp.experts.down_proj", Tensor::zeros(Dtype::BF16, &[4, 96, 131]));
    };
    let mut told = String::new();
    let mut tell = |title: &str, edit: &dyn Fn(&mut Shards)| told += &refusal(title, edit, &G32);
    tell("NVFP4 of modelopt, by names", &|s| {
        nvfp4(s, O, &format!("{O}_scale"), &format!("{O}_scale_2"));
    });
    tell("NVFP4 of modelopt, by config.json", &|s| {
        s.set_config("quantization_config", json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}));
    });
    tell("NVFP4 of compressed-tensors, by names", &|s| {
        nvfp4(s, &format!("{O}_packed"), &format!("{O}_scale"), &format!("{O}_global_scale"));
    });
    tell("compressed-tensors, by config.json", &|s| {
        s.set_config(
            "quantization_config",
            json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
        );
    });
    tell("MXFP4", &|s| {
        s.add(LAST, "model.layers.2.mlp.experts.gate_up_proj_blocks", Tensor::zeros(Dtype::U8, &[4, 262, 3, 16]));
        s.add(LAST, "model.layers.2.mlp.experts.gate_up_proj_scales", Tensor::zeros(Dtype::U8, &[4, 262, 3]));
    });
    tell("FP4 elements", &|s| *s.tensor_mut(O) = Tensor::zeros(Dtype::F4, &[96, 142]));
    tell("E5M2", &|s| s.tensor_mut(O).dtype = Dtype::F8_E5M2);
    tell("integers", &|s| *s.tensor_mut(NORM) = Tensor::zeros(Dtype::I32, &[96]));
    tell("FP8 with another fmt", &|s| s.set_config("quantization_config.fmt", json!("e5m2")));
    tell("fused experts beside single ones", &fused);
    tell("fused experts", &|s| {
        fused(s);
        s.retain(|name| !name.contains("layers.2.mlp.experts.0") && !name.contains("layers.2.mlp.experts.1"));
        s.retain(|name| !name.contains("layers.2.mlp.experts.2") && !name.contains("layers.2.mlp.experts.3"));
    });
    tell("fused experts of FP8", &|s| {
        let name = "model.layers.2.mlp.experts.gate_up_proj";
        s.add(LAST, name, Tensor::zeros(Dtype::F8_E4M3, &[4, 262, 96]));
        s.add(LAST, &format!("{name}_scale_inv"), Tensor::zeros(Dtype::F32, &[4, 3, 1]));
    });
    assert_snapshot!(told);
}

#[test]
fn missing_parts() {
    let told = refusals(&[
        ("a tensor", |s| drop(s.remove(NORM))),
        ("the router of a layer", |s| drop(s.remove("model.layers.1.mlp.gate.weight"))),
        ("a layer", |s| s.retain(|name| !name.contains("layers.1."))),
        ("the last layer", |s| s.retain(|name| !name.contains("layers.2."))),
        ("an expert", |s| s.retain(|name| !name.contains("layers.2.mlp.experts.3."))),
        ("an expert of the MTP layer", |s| s.retain(|name| !name.contains("layers.3.mlp.experts.0."))),
        ("a part of an indexer", |s| s.retain(|name| !name.contains("layers.1.self_attn.indexer.k_norm.bias"))),
        ("an indexer", |s| s.retain(|name| !name.contains("layers.1.self_attn.indexer."))),
        ("lm_head, not tied", |s| drop(s.remove("lm_head.weight"))),
        ("a row of the embedding", |s| {
            *s.tensor_mut("model.embed_tokens.weight") = Tensor::zeros(Dtype::BF16, &[300, 96]);
        }),
        ("everything but the MTP layer", |s| s.retain(|name| name.contains("layers.3."))),
        ("all tensors", |s| s.retain(|_| false)),
    ]);
    assert_snapshot!(told);
}

#[test]
fn index_and_files() {
    let told = refusals(&[
        ("a missing shard", |s| drop(s.files.remove("model-00002-of-00003.safetensors"))),
        ("a tensor missing in its shard", |s| s.index_entry("model.layers.0.extra.weight", FIRST)),
        ("a tensor in another shard", |s| s.index_entry(NORM, LAST)),
        ("a tensor not in the index", |s| s.unindex(NORM)),
        ("a path out of the directory", |s| s.index_entry(NORM, "../x.safetensors")),
        ("a path that controls the terminal", |s| s.index_entry(NORM, "\u{1b}[31m/x.safetensors")),
        ("a tensor twice in a shard", |s| s.add(FIRST, NORM, Tensor::zeros(Dtype::BF16, &[96]))),
        ("a tensor in two shards", |s| s.add(LAST, NORM, Tensor::zeros(Dtype::BF16, &[96]))),
        ("a tensor in two files beside the index", |s| {
            let norm = s.remove(NORM);
            for file in ["more-1.safetensors", "more-2.safetensors"] {
                s.add(file, NORM, norm.clone());
                s.unindex_file(file);
            }
        }),
        ("no index", Shards::without_index),
        ("no weights", |s| s.files.clear()),
        ("a shard that is cut off", |s| {
            s.files.get_mut(FIRST).unwrap().tensors.last_mut().unwrap().1.bytes.truncate(100);
        }),
    ]);
    assert_snapshot!(told);
}
