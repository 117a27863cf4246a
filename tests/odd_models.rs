//! Models of unusual shapes convert like any other, and every tensor arrives.

mod support;

use std::fs;

use coliconv::checkpoint::{Allowed, Checkpoint};
use coliconv::container::manifest::Manifest;
use coliconv::convert::Options;
use coliconv::roles::Pass;
use serde_json::{Value, json};
use support::convert::{G32, Place, groups_of_32, load, small, text};
use support::shards::{Shards, Tensor};
use support::synthetic::{Synthetic, small_config};

/// The small config with other values.
fn config(changes: Value) -> Value {
    let mut config = small_config();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

/// Converts all passes that the checkpoint has and checks that every weight is in the manifest.
fn converts(title: &str, shards: &Shards) {
    let place = Place::of(shards);
    let checkpoint =
        Checkpoint::open(&place.source, &Pass::ALL, Allowed::default()).unwrap_or_else(|f| panic!("{title}: {f}"));
    let passes: Vec<Pass> =
        Pass::ALL.into_iter().filter(|pass| checkpoint.weights(&[*pass]).next().is_some()).collect();
    let allowed = Allowed { ambiguous: true, ..Allowed::default() };
    let options = Options { passes, allowed, ..groups_of_32() };
    let report = place.run(options).unwrap_or_else(|faults| panic!("{title}: {faults}"));
    let manifest = Manifest::read(&place.container).unwrap().unwrap();
    assert_eq!(manifest.tensors.len() as u64, report.tensors, "{title}");
    assert_eq!(manifest.tensors.len(), checkpoint.weights(&Pass::ALL).count(), "{title}");
    assert_eq!(
        report.source_bytes,
        shards.files.values().flat_map(|s| &s.tensors).map(|(_, t)| t.bytes.len() as u64).sum::<u64>()
    );
}

#[test]
fn unusual_shapes() {
    let mtp_less = json!({"num_nextn_predict_layers": 0});
    let many: Vec<&str> = std::iter::once("full").chain(std::iter::repeat_n("shared", 127)).collect();
    let tiny = json!({"hidden_size": 2, "intermediate_size": 1, "moe_intermediate_size": 1, "q_lora_rank": 1, "kv_lora_rank": 1,
        "num_attention_heads": 1, "qk_nope_head_dim": 1, "qk_rope_head_dim": 2, "v_head_dim": 1, "index_n_heads": 1,
        "index_head_dim": 2, "vocab_size": 1, "eos_token_id": 0});
    for (title, changes) in [
        ("two shared experts", json!({"n_shared_experts": 2})),
        ("one expert", json!({"n_routed_experts": 1, "num_experts_per_tok": 1})),
        ("dense layers only", json!({"first_k_dense_replace": 3})),
        ("dense layers only, without MTP", json!({"first_k_dense_replace": 3, "num_nextn_predict_layers": null})),
        ("sparse layers only", json!({"first_k_dense_replace": 0})),
        (
            "layer types by name",
            json!({"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": null}),
        ),
        ("no MTP", mtp_less),
        ("one layer", json!({"num_hidden_layers": 1, "indexer_types": ["full"]})),
        ("odd vocabulary", json!({"vocab_size": 513})),
        ("hidden size of no round number", json!({"hidden_size": 101})),
        ("exactly a block", json!({"hidden_size": 128, "q_lora_rank": 128, "vocab_size": 384})),
        ("as small as it gets", tiny),
        (
            "null keys",
            json!({"topk_group": null, "n_group": null, "bos_token_id": null, "rope_scaling": null, "hidden_act": null}),
        ),
        (
            "128 layers",
            json!({"num_hidden_layers": 128, "num_nextn_predict_layers": 0, "indexer_types": many, "n_routed_experts": 2}),
        ),
    ] {
        println!("{title}");
        converts(title, &load(&Synthetic::new(config(changes)).shards(4).optional()));
    }
}

#[test]
fn tied_embeddings() {
    let mut shards = small();
    shards.set_config("tie_word_embeddings", json!(true));
    let head = shards.remove("lm_head.weight");
    converts("without a head", &shards);
    let embedding = shards.tensor("model.embed_tokens.weight").clone();
    assert_ne!(head, embedding);
    let last = "model-00003-of-00003.safetensors";
    shards.add(last, "lm_head.weight", embedding.clone());
    converts("with the same head", &shards);
    let values: Vec<f32> =
        embedding.bytes.as_chunks().0.iter().map(|bytes| half::bf16::from_le_bytes(*bytes).to_f32()).collect();
    *shards.tensor_mut("lm_head.weight") = Tensor::f32(&embedding.shape, &values);
    converts("with the same head, of another type", &shards);
    let last = values.len() - 1;
    shards.tensor_mut("lm_head.weight").set(last, &0.1f32.to_le_bytes());
    assert!(Place::of(&shards).refused(&G32).contains("tensor lm_head.weight: `tie_word_embeddings` is true"));
}

#[test]
fn odd_files_around_good_ones() {
    let mut shards = small();
    shards.add("empty.safetensors", "x", Tensor::f32(&[1], &[0.0]));
    shards.files.get_mut("empty.safetensors").unwrap().tensors.clear();
    // An indexer of a shared layer beside the index, and one in the MTP layer, which is left out.
    let key = |layer: u64, part: &str| format!("model.layers.{layer}.self_attn.indexer.{part}");
    let of = |part: &str| small().tensor(&key(0, part)).clone();
    for part in ["wq_b.weight", "wq_b.weight_scale_inv", "k_norm.bias"] {
        shards.add("extra.safetensors", &key(2, part), of(part));
        shards.add("extra.safetensors", &key(3, part), of(part));
    }
    shards.unindex_file("extra.safetensors");
    let place = Place::of(&shards);
    let index = place.source.join("model.safetensors.index.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&index).unwrap()).unwrap();
    value["more"] = json!([1, {"weight_map": null}]);
    value["metadata"]["total_parameters"] = json!("many");
    fs::write(&index, value.to_string()).unwrap();
    place.convert(&["--group-size", "32", "--indexer"]);
    let manifest = Manifest::read(&place.container).unwrap().unwrap();
    assert!(manifest.tensors.contains_key(key(2, "wq_b.weight").as_str()));
    assert!(!manifest.tensors.contains_key(key(3, "wq_b.weight").as_str()));
}

#[test]
fn limits_of_the_engine() {
    let many: Vec<&str> = std::iter::repeat_n("full", 128).collect();
    let mut config = config(json!({"num_hidden_layers": 128, "indexer_types": many, "first_k_dense_replace": 128}));
    config["eos_token_id"] = json!([]);
    let said = Place::made(&Synthetic::new(config).holes()).refused(&G32);
    assert!(said.contains("would break a limit of the colibri engine: 129 layers, at most 128"), "{said}");
}

#[test]
fn allow_incomplete_converts_what_is_there() {
    let mut shards = small();
    shards.remove("model.layers.1.mlp.experts.2.up_proj.weight");
    shards.remove("model.layers.1.mlp.experts.2.up_proj.weight_scale_inv");
    let place = Place::of(&shards);
    fs::remove_file(place.source.join("model-00003-of-00003.safetensors")).unwrap();
    let arguments = ["--group-size", "32", "--allow-incomplete"];
    let output = place.output(&arguments);
    let said = place.redacted(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    for part in ["up_proj.weight: the tensor is missing", "model-00003-of-00003.safetensors: the index names this file"]
    {
        assert!(said.contains(part), "{said}");
    }
    // A scale that went with the shard is not made up for.
    let mut apart = small();
    apart.move_to("model.layers.0.self_attn.o_proj.weight_scale_inv", "model-00003-of-00003.safetensors");
    let place = Place::of(&apart);
    fs::remove_file(place.source.join("model-00003-of-00003.safetensors")).unwrap();
    assert!(place.refused(&arguments).contains("F8_E4M3 without its scales"));
    assert!(text(&place.output(&G32).stderr).contains("the index names this file, which is missing"));
}
