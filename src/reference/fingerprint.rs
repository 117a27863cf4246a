//! The fingerprint that ties a reference to a model.

use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Reference;
use crate::config::{Config, IndexerType};
use crate::error::{Fault, FaultKind, Place, Result};
use crate::io::read_small;
use crate::model::tokenizer::{MAX_TOKENIZER_BYTES, TOKENIZER_FILE};

/// How a reference's fingerprint relates to a model's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fingerprint {
    /// They are equal.
    Same,
    /// The reference carries none, which deserves a warning.
    Absent,
}

/// SHA-256, in hexadecimal, of the canonical JSON of `{"config": {…}, "tokenizer": tokenizer.json}`.
///
/// `config` holds the keys that change the maths, as they take effect: spelling them out or leaving them to their defaults
/// is the same. `quantization_config` and `index_topk` are not among them, because they differ between a checkpoint and its
/// containers and between the references of one model. Canonical is: no white space, members sorted by key. Without a
/// tokenizer.json its place is null.
pub fn fingerprint(directory: &Path, config: &Config) -> Result<String> {
    let path = directory.join(TOKENIZER_FILE);
    let tokenizer = if path.exists() {
        let bytes = read_small(&path, MAX_TOKENIZER_BYTES)?;
        let syntax = |e: serde_json::Error| {
            Fault::new(Place::file(&path), FaultKind::TokenizerSyntax { message: e.to_string() })
        };
        serde_json::from_slice(&bytes).map_err(syntax)?
    } else {
        Value::Null
    };
    let mut text = String::new();
    canonical(&json!({"config": maths(config), "tokenizer": tokenizer}), &mut text);
    let digest = Sha256::digest(text.as_bytes());
    Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A key of config.json that changes the maths, and what two configs say, as JSON.
pub type Difference = (String, String, String);

/// The keys that change the maths in which two configs differ.
pub fn differences(one: &Config, other: &Config) -> Vec<Difference> {
    let (one, other) = (maths(one), maths(other));
    let keys = one.as_object().into_iter().flatten().filter(|&(key, value)| *value != other[key]);
    keys.map(|(key, value)| (key.clone(), value.to_string(), other[key].to_string())).collect()
}

impl Reference {
    /// Compares the fingerprint with a model's; another one is a fault. `file` and `number` are for the message.
    pub fn check_fingerprint(&self, model: &str, file: &Path, number: usize) -> Result<Fingerprint> {
        match &self.fingerprint {
            None => Ok(Fingerprint::Absent),
            Some(own) if own == model => Ok(Fingerprint::Same),
            Some(own) => {
                let kind = FaultKind::ReferenceFingerprint {
                    reference: number,
                    expected: model.to_owned(),
                    found: own.clone(),
                };
                Err(Fault::new(Place::file(file), kind))
            }
        }
    }
}

/// The keys that change the maths.
fn maths(config: &Config) -> Value {
    let Config {
        hidden_size,
        num_hidden_layers,
        num_nextn_predict_layers,
        intermediate_size,
        moe_intermediate_size,
        n_routed_experts,
        n_shared_experts,
        num_experts_per_tok,
        n_group,
        topk_group,
        norm_topk_prob,
        routed_scaling_factor,
        num_attention_heads,
        q_lora_rank,
        kv_lora_rank,
        qk_nope_head_dim,
        qk_rope_head_dim,
        v_head_dim,
        index_n_heads,
        index_head_dim,
        index_topk: _,
        vocab_size,
        max_position_embeddings: _,
        rms_norm_eps,
        rope_theta,
        tie_word_embeddings,
        eos_token_id: _,
        sparse_layers,
        indexer_types,
        quantization: _,
        silent: _,
    } = config;
    let mlp_layer_types: Vec<&str> =
        sparse_layers.iter().map(|&sparse| if sparse { "sparse" } else { "dense" }).collect();
    let indexer_types: Vec<&str> = indexer_types
        .iter()
        .map(|kind| match kind {
            IndexerType::Full => "full",
            IndexerType::Shared => "shared",
        })
        .collect();
    json!({
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_nextn_predict_layers": num_nextn_predict_layers,
        "intermediate_size": intermediate_size,
        "moe_intermediate_size": moe_intermediate_size,
        "n_routed_experts": n_routed_experts,
        "n_shared_experts": n_shared_experts,
        "num_experts_per_tok": num_experts_per_tok,
        "n_group": n_group,
        "topk_group": topk_group,
        "norm_topk_prob": norm_topk_prob,
        "routed_scaling_factor": routed_scaling_factor,
        "num_attention_heads": num_attention_heads,
        "q_lora_rank": q_lora_rank,
        "kv_lora_rank": kv_lora_rank,
        "qk_nope_head_dim": qk_nope_head_dim,
        "qk_rope_head_dim": qk_rope_head_dim,
        "v_head_dim": v_head_dim,
        "index_n_heads": index_n_heads,
        "index_head_dim": index_head_dim,
        "vocab_size": vocab_size,
        "rms_norm_eps": rms_norm_eps,
        "rope_theta": rope_theta,
        "tie_word_embeddings": tie_word_embeddings,
        "mlp_layer_types": mlp_layer_types,
        "indexer_types": indexer_types,
    })
}

/// JSON without white space, members sorted by key bytewise.
fn canonical(value: &Value, out: &mut String) {
    match value {
        Value::Array(list) => {
            out.push('[');
            for (i, value) in list.iter().enumerate() {
                out.push_str(if i > 0 { "," } else { "" });
                canonical(value, out);
            }
            out.push(']');
        }
        Value::Object(object) => {
            let mut members: Vec<_> = object.iter().collect();
            members.sort_unstable_by_key(|&(key, _)| key);
            out.push('{');
            for (i, (key, value)) in members.into_iter().enumerate() {
                out.push_str(if i > 0 { "," } else { "" });
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push(':');
                canonical(value, out);
            }
            out.push('}');
        }
        plain => out.push_str(&plain.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(config: &Value, tokenizer: Option<&str>) -> String {
        let directory = tempfile::tempdir().unwrap();
        if let Some(text) = tokenizer {
            std::fs::write(directory.path().join(TOKENIZER_FILE), text).unwrap();
        }
        let config = Config::parse(Path::new("c"), config.to_string().as_bytes()).unwrap();
        fingerprint(directory.path(), &config).unwrap()
    }

    #[test]
    fn only_what_changes_the_maths_or_the_tokens_counts() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nano/config.json");
        let config: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let own = of(&config, Some(r#"{"b": 1, "a": [1, 2]}"#));
        assert_eq!(own.len(), 64);
        assert_eq!(of(&config, Some(r#"{"a":[1,2],"b":1}"#)), own);
        assert_ne!(of(&config, Some(r#"{"a":[2,1],"b":1}"#)), own);
        assert_ne!(of(&config, None), own);
        let with = |key: &str, value: Value| {
            let mut config = config.clone();
            config[key] = value;
            of(&config, Some(r#"{"b": 1, "a": [1, 2]}"#))
        };
        assert_eq!(with("index_topk", 4.into()), own);
        assert_eq!(with("quantization_config", Value::Null), own);
        assert_eq!(with("eos_token_id", 1.into()), own);
        assert_eq!(with("mlp_layer_types", json!(["dense", "sparse", "sparse", "sparse"])), own);
        assert_ne!(with("mlp_layer_types", json!(["sparse", "sparse", "sparse", "sparse"])), own);
        assert_ne!(with("rope_parameters", json!({"rope_theta": 10001.0})), own);
        assert_ne!(with("norm_topk_prob", false.into()), own);
    }

    #[test]
    fn another_models_reference_is_refused() {
        let reference = |fingerprint: Option<&str>| Reference {
            prompt_ids: vec![1],
            full_ids: vec![1],
            tf_pred: None,
            margin: None,
            logprob_next: None,
            greedy: true,
            index_topk: None,
            draft_pred: Some(vec![]),
            draft_margin: None,
            fingerprint: fingerprint.map(str::to_owned),
            written_by: None,
        };
        let check = |own| reference(own).check_fingerprint("aa", Path::new("r.json"), 3);
        assert_eq!(check(None).unwrap(), Fingerprint::Absent);
        assert_eq!(check(Some("aa")).unwrap(), Fingerprint::Same);
        let message = check(Some("bb")).unwrap_err().to_string();
        assert_eq!(message, "r.json: reference 3 is of another model: its fingerprint is bb, this model's aa");
    }
}
