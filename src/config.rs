//! config.json of a `glm_moe_dsa` model: typed, bounded, with what is silently assumed said aloud.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::read_small;
use crate::json::repeated_key;
use crate::limits;

/// Name of the file.
pub const CONFIG_FILE: &str = "config.json";
/// Name of the file that is the authority for stop ids.
pub const GENERATION_CONFIG_FILE: &str = "generation_config.json";

/// Small files that a model needs, and what their absence means.
pub const NEEDED_SMALL_FILES: [(&str, &str); 2] = [
    ("tokenizer.json", "the container cannot be published, and nothing can be tokenized"),
    (GENERATION_CONFIG_FILE, "the container cannot be published, and stop ids come from config.json alone"),
];

/// The only model type that is known.
pub const MODEL_TYPE: &str = "glm_moe_dsa";

/// Whether a layer computes its own choice of positions or reuses the previous one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexerType {
    /// The layer has an indexer.
    Full,
    /// The layer uses the choice of the nearest full layer before it.
    Shared,
}

/// How the checkpoint says that it is quantized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantization {
    /// `quant_method`, for one `fp8`.
    pub quant_method: String,
    /// `weight_block_size`, for one `[128, 128]`.
    pub weight_block_size: Option<Vec<u64>>,
    /// `fmt`, for one `e4m3`.
    pub fmt: Option<String>,
}

/// The part of config.json that fixes shapes and arithmetic. Fields carry Hugging Face's names.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // the names are Hugging Face's
pub struct Config {
    pub hidden_size: u64,
    pub num_hidden_layers: u64,
    pub num_nextn_predict_layers: u64,
    pub intermediate_size: u64,
    pub moe_intermediate_size: u64,
    pub n_routed_experts: u64,
    pub n_shared_experts: u64,
    pub num_experts_per_tok: u64,
    pub n_group: u64,
    pub topk_group: u64,
    pub norm_topk_prob: bool,
    pub routed_scaling_factor: f64,
    pub num_attention_heads: u64,
    pub q_lora_rank: u64,
    pub kv_lora_rank: u64,
    pub qk_nope_head_dim: u64,
    pub qk_rope_head_dim: u64,
    pub v_head_dim: u64,
    pub index_n_heads: u64,
    pub index_head_dim: u64,
    pub index_topk: u64,
    pub vocab_size: u64,
    /// Longest text, where the config says one.
    pub max_position_embeddings: Option<u64>,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    pub tie_word_embeddings: bool,
    /// `eos_token_id` of config.json, as a list.
    pub eos_token_id: Vec<u64>,
    /// For each hidden layer, whether its MLP is a mixture of experts.
    pub sparse_layers: Vec<bool>,
    /// For each hidden layer, whether it has an indexer of its own.
    pub indexer_types: Vec<IndexerType>,
    /// `quantization_config`, if there is one.
    pub quantization: Option<Quantization>,
    /// Keys whose absence silently changes results, with what is then assumed.
    pub silent: Vec<(&'static str, &'static str)>,
}

impl Config {
    /// Reads config.json of a directory.
    pub fn read(directory: &Path) -> Result<Config, Faults> {
        let path = directory.join(CONFIG_FILE);
        if !path.exists() {
            return Err(Fault::new(Place::file(path), FaultKind::ConfigAbsent).into());
        }
        let bytes = read_small(&path, limits::MAX_CONFIG_BYTES)?;
        Config::parse(&path, &bytes)
    }

    /// Parses and checks the text of a config.json; `path` is for messages only.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Config, Faults> {
        let object = parse_object(path, bytes)?;
        let mut keys = Keys { path, object: &object, faults: Vec::new(), silent: Vec::new() };
        // Another family has other keys: naming those as missing would hide the one reason.
        keys.model_type()?;
        let config = keys.config();
        Faults::check(keys.faults)?;
        Ok(config)
    }

    /// The fault for each key of [`Config::silent`].
    pub fn silent_faults(&self, path: &Path) -> Vec<Fault> {
        self.silent
            .iter()
            .map(|&(key, consequence)| Fault::new(Place::file(path), FaultKind::ConfigSilent { key, consequence }))
            .collect()
    }

    /// Index of the MTP layer, which follows the hidden layers; `None` for a model without one.
    pub fn mtp_layer(&self) -> Option<u64> {
        (self.num_nextn_predict_layers > 0).then_some(self.num_hidden_layers)
    }

    /// Width of a head's queries and keys: nope plus rope.
    pub fn qk_head_dim(&self) -> u64 {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// What of the config the colibri engine cannot run.
    pub fn engine_limits(&self, path: &Path) -> Vec<Fault> {
        [
            ("layers", self.num_hidden_layers + self.num_nextn_predict_layers, limits::MAX_LAYERS),
            ("groups of experts (n_group)", self.n_group, 1),
        ]
        .into_iter()
        .filter(|&(_, found, limit)| found > limit)
        .map(|(what, found, limit)| Fault::new(Place::file(path), FaultKind::EngineLimit { what, found, limit }))
        .collect()
    }
}

/// Union of the stop ids of config.json and of generation_config.json, in that order, without repetition.
pub fn stop_ids(directory: &Path, config: &Config) -> Result<Vec<u64>, Faults> {
    let path = directory.join(GENERATION_CONFIG_FILE);
    let mut ids = config.eos_token_id.clone();
    if path.exists() {
        ids.extend(generation_stop_ids(&path, &read_small(&path, limits::MAX_CONFIG_BYTES)?)?);
    }
    let mut seen = std::collections::HashSet::new();
    ids.retain(|&id| seen.insert(id));
    if ids.len() > limits::MAX_STOP_IDS {
        let kind = FaultKind::TooManyStopIds { found: ids.len(), limit: limits::MAX_STOP_IDS };
        return Err(Fault::new(Place::file(path), kind).into());
    }
    if let Some(&id) = ids.iter().find(|&&id| id >= config.vocab_size) {
        let expected = format!("ids below vocab_size {}", config.vocab_size);
        let kind = FaultKind::ConfigValue { key: "eos_token_id", expected, found: id.to_string() };
        let path = if config.eos_token_id.contains(&id) { directory.join(CONFIG_FILE) } else { path };
        return Err(Fault::new(Place::file(path), kind).into());
    }
    Ok(ids)
}

/// The stop ids in the text of a generation_config.json; `path` is for messages only.
pub fn generation_stop_ids(path: &Path, bytes: &[u8]) -> Result<Vec<u64>, Faults> {
    let object = parse_object(path, bytes)?;
    let mut keys = Keys { path, object: &object, faults: Vec::new(), silent: Vec::new() };
    let ids = keys.ids("eos_token_id");
    Faults::check(keys.faults)?;
    Ok(ids)
}

/// A JSON object without repeated keys, however deep.
pub fn parse_object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, Fault> {
    let syntax = |message: String| Fault::new(Place::file(path), FaultKind::JsonSyntax { message });
    let text = std::str::from_utf8(bytes).map_err(|e| syntax(e.to_string()))?;
    let object = serde_json::from_str(text).map_err(|e| syntax(e.to_string()))?;
    match repeated_key(text) {
        None => Ok(object),
        Some(key) => Err(syntax(format!("`{}` appears twice", crate::error::escaped(&key)))),
    }
}

/// Reads keys of an object, collecting what is wrong with them.
struct Keys<'a> {
    path: &'a Path,
    object: &'a Map<String, Value>,
    faults: Vec<Fault>,
    silent: Vec<(&'static str, &'static str)>,
}

impl Keys<'_> {
    fn fault(&mut self, kind: FaultKind) {
        self.faults.push(Fault::new(Place::file(self.path), kind));
    }

    fn wrong(&mut self, key: &'static str, expected: impl Into<String>, found: &Value) {
        self.fault(FaultKind::ConfigValue { key, expected: expected.into(), found: found.to_string() });
    }

    /// The value of a key; `null` counts as absent.
    fn get(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|v| !v.is_null())
    }

    fn model_type(&self) -> Result<()> {
        let kind = match self.get("model_type") {
            Some(Value::String(found)) if found == MODEL_TYPE => return Ok(()),
            Some(Value::String(found)) => FaultKind::ModelType { found: found.clone() },
            Some(other) => FaultKind::ModelType { found: other.to_string() },
            None => FaultKind::ConfigMissing { key: "model_type" },
        };
        Err(Fault::new(Place::file(self.path), kind))
    }

    /// A number in `least..=most`; absent or wrong ones leave a fault and `least`.
    fn number(&mut self, key: &'static str, least: u64, most: u64) -> u64 {
        let Some(value) = self.get(key).cloned() else {
            self.fault(FaultKind::ConfigMissing { key });
            return least;
        };
        match value.as_u64() {
            Some(number) if (least..=most).contains(&number) => number,
            _ => {
                self.wrong(key, format!("a whole number from {least} to {most}"), &value);
                least
            }
        }
    }

    fn optional_number(&mut self, key: &'static str, least: u64, most: u64) -> Option<u64> {
        self.get(key).is_some().then(|| self.number(key, least, most))
    }

    fn number_or(&mut self, key: &'static str, default: u64, least: u64, most: u64) -> u64 {
        if self.get(key).is_none() { default } else { self.number(key, least, most) }
    }

    fn positive_or(&mut self, key: &'static str, default: f64) -> f64 {
        match self.get(key).cloned() {
            None => default,
            Some(value) => match value.as_f64() {
                Some(number) if number > 0.0 && number.is_finite() => number,
                _ => {
                    self.wrong(key, "a positive number", &value);
                    default
                }
            },
        }
    }

    fn flag_or(&mut self, key: &'static str, default: bool) -> bool {
        match self.get(key).cloned() {
            None => default,
            Some(Value::Bool(flag)) => flag,
            Some(value) => {
                self.wrong(key, "true or false", &value);
                default
            }
        }
    }

    /// A key that may only have one value.
    fn only(&mut self, key: &'static str, only: Value) {
        match self.get(key).cloned() {
            Some(value) if value != only => self.wrong(key, only.to_string(), &value),
            _ => {}
        }
    }

    /// One id or a list of ids.
    fn ids(&mut self, key: &'static str) -> Vec<u64> {
        let Some(value) = self.get(key).cloned() else { return Vec::new() };
        let ids: Option<Vec<u64>> = match &value {
            Value::Array(values) => values.iter().map(Value::as_u64).collect(),
            one => one.as_u64().map(|id| vec![id]),
        };
        ids.unwrap_or_else(|| {
            self.wrong(key, "an id or a list of ids", &value);
            Vec::new()
        })
    }

    fn config(&mut self) -> Config {
        let width = limits::MAX_WIDTH;
        let layers = self.number("num_hidden_layers", 1, limits::MAX_LAYERS);
        let experts = self.number("n_routed_experts", 1, limits::MAX_EXPERTS);
        let most_chosen = experts.min(limits::MAX_EXPERTS_PER_TOKEN);
        self.only("hidden_act", "silu".into());
        self.only("scoring_func", "sigmoid".into());
        self.only("attention_bias", false.into());
        self.only("mlp_bias", false.into());
        let config = Config {
            hidden_size: self.number("hidden_size", 1, width),
            num_hidden_layers: layers,
            num_nextn_predict_layers: self.number_or("num_nextn_predict_layers", 0, 0, 1),
            intermediate_size: self.number("intermediate_size", 1, width),
            moe_intermediate_size: self.number("moe_intermediate_size", 1, width),
            n_routed_experts: experts,
            n_shared_experts: self.number("n_shared_experts", 1, 64),
            num_experts_per_tok: self.number("num_experts_per_tok", 1, most_chosen),
            n_group: self.number_or("n_group", 1, 1, experts),
            topk_group: self.number_or("topk_group", 1, 1, experts),
            norm_topk_prob: self.said_flag("norm_topk_prob", "the colibri engine then takes false"),
            routed_scaling_factor: self.said_factor(),
            num_attention_heads: self.number("num_attention_heads", 1, limits::MAX_HEADS),
            q_lora_rank: self.number("q_lora_rank", 1, width),
            kv_lora_rank: self.number("kv_lora_rank", 1, width),
            qk_nope_head_dim: self.number("qk_nope_head_dim", 1, width),
            qk_rope_head_dim: self.number("qk_rope_head_dim", 2, width),
            v_head_dim: self.number("v_head_dim", 1, width),
            index_n_heads: self.number("index_n_heads", 1, limits::MAX_HEADS),
            index_head_dim: self.number("index_head_dim", 1, width),
            index_topk: self.number("index_topk", 1, 1 << 32),
            vocab_size: self.number("vocab_size", 1, limits::MAX_VOCABULARY),
            max_position_embeddings: self.optional_number("max_position_embeddings", 1, 1 << 32),
            rms_norm_eps: self.positive_or("rms_norm_eps", 1e-5),
            rope_theta: self.rope_theta(),
            tie_word_embeddings: self.flag_or("tie_word_embeddings", false),
            eos_token_id: self.ids("eos_token_id"),
            sparse_layers: self.sparse_layers(layers),
            indexer_types: self.indexer_types(layers),
            quantization: self.quantization(),
            silent: std::mem::take(&mut self.silent),
        };
        self.relations(&config);
        config
    }

    /// What must hold between the keys.
    fn relations(&mut self, c: &Config) {
        let mut check = |good: bool, key: &'static str, expected: String, found: u64| {
            if !good {
                self.fault(FaultKind::ConfigValue { key, expected, found: found.to_string() });
            }
        };
        let (rope, groups) = (c.qk_rope_head_dim, c.n_group);
        check(rope.is_multiple_of(2), "qk_rope_head_dim", "an even number".into(), rope);
        let index = c.index_head_dim;
        check(index >= rope, "index_head_dim", format!("at least qk_rope_head_dim {rope}"), index);
        let divides = c.n_routed_experts.is_multiple_of(groups);
        check(divides, "n_group", format!("a divisor of n_routed_experts {}", c.n_routed_experts), groups);
        check(c.topk_group <= groups, "topk_group", format!("at most n_group {groups}"), c.topk_group);
        let chosen_from = c.n_routed_experts / groups * c.topk_group;
        let chosen = c.num_experts_per_tok;
        check(
            !divides || chosen <= chosen_from,
            "num_experts_per_tok",
            format!("at most {chosen_from}, the experts of topk_group groups"),
            chosen,
        );
    }

    fn said_flag(&mut self, key: &'static str, consequence: &'static str) -> bool {
        if self.get(key).is_none() {
            self.silent.push((key, consequence));
        }
        self.flag_or(key, true)
    }

    fn said_factor(&mut self) -> f64 {
        let key = "routed_scaling_factor";
        if self.get(key).is_none() {
            self.silent.push((key, "the colibri engine then takes 1"));
        }
        self.positive_or(key, 1.0)
    }

    fn rope_theta(&mut self) -> f64 {
        const ENGINE_THETA: f64 = 10000.0;
        // The older spellings, which transformers still understands; the engine does not look at them.
        self.rope_type("rope_scaling", ["rope_scaling.rope_type", "rope_scaling.type"]);
        let Some(value) = self.get("rope_parameters").cloned() else {
            self.silent.push(("rope_parameters", "the colibri engine then takes rope_theta 10000"));
            return self.positive_or("rope_theta", ENGINE_THETA);
        };
        self.rope_type("rope_parameters", ["rope_parameters.rope_type", "rope_parameters.type"]);
        match value.get("rope_theta").filter(|theta| !theta.is_null()) {
            None => {
                self.silent.push(("rope_parameters.rope_theta", "the colibri engine then takes 10000"));
                ENGINE_THETA
            }
            Some(theta) => match theta.as_f64() {
                Some(number) if number > 0.0 && number.is_finite() => number,
                _ => {
                    self.wrong("rope_parameters.rope_theta", "a positive number", theta);
                    ENGINE_THETA
                }
            },
        }
    }

    /// Refuses positions that are scaled in any way; `names` are those of the key's members that say so.
    fn rope_type(&mut self, key: &'static str, names: [&'static str; 2]) {
        let Some(value) = self.get(key).cloned() else { return };
        if !value.is_object() {
            return self.wrong(key, "an object", &value);
        }
        for (member, name) in ["rope_type", "type"].into_iter().zip(names) {
            match value.get(member) {
                None | Some(Value::Null) => {}
                Some(Value::String(kind)) if kind == "default" => {}
                Some(other) => self.wrong(name, "\"default\"", other),
            }
        }
    }

    /// One word a layer, if the key is there: `Some(None)` when it is malformed, which leaves a fault.
    fn words<T>(&mut self, key: &'static str, layers: u64, words: &[(&str, T)]) -> Option<Option<Vec<T>>>
    where
        T: Copy,
    {
        let value = self.get(key).cloned()?;
        let word = |v: &Value| words.iter().find(|(word, _)| v.as_str() == Some(word)).map(|&(_, meaning)| meaning);
        let list = value.as_array().and_then(|list| list.iter().map(word).collect::<Option<Vec<T>>>());
        let list = list.filter(|list| list.len() as u64 == layers);
        if list.is_none() {
            let names: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            self.wrong(key, format!("a list of {layers} words of {}", names.join(", ")), &value);
        }
        Some(list)
    }

    /// `mlp_layer_types`, else `first_k_dense_replace`.
    fn sparse_layers(&mut self, layers: u64) -> Vec<bool> {
        let dense = match self.get("first_k_dense_replace") {
            None if self.get("mlp_layer_types").is_some() => 0,
            _ => self.number("first_k_dense_replace", 0, layers),
        };
        match self.words("mlp_layer_types", layers, &[("dense", false), ("sparse", true)]) {
            Some(Some(list)) => list,
            _ => (0..layers).map(|layer| layer >= dense).collect(),
        }
    }

    /// `indexer_types`, else `index_topk_pattern`, else full iff max(i − offset + 1, 0) % `index_topk_freq` = 0.
    fn indexer_types(&mut self, layers: u64) -> Vec<IndexerType> {
        use IndexerType::{Full, Shared};
        let list = match self.words("indexer_types", layers, &[("full", Full), ("shared", Shared)]) {
            Some(list) => list,
            None => self.indexer_pattern(layers),
        };
        let list = list.unwrap_or_else(|| vec![Full; layers as usize]);
        if list.first() == Some(&Shared) {
            let found = Value::from("shared");
            self.wrong("indexer_types", "\"full\" for the first layer, which has none before it to share", &found);
        }
        list
    }

    fn indexer_pattern(&mut self, layers: u64) -> Option<Vec<IndexerType>> {
        use IndexerType::{Full, Shared};
        if let Some(value) = self.get("index_topk_pattern").cloned() {
            let letters: Option<Vec<IndexerType>> = value.as_str().and_then(|text| {
                text.chars()
                    .map(|c| match c {
                        'F' => Some(Full),
                        'S' => Some(Shared),
                        _ => None,
                    })
                    .collect()
            });
            let letters = letters.filter(|list| list.len() as u64 == layers);
            if letters.is_none() {
                self.wrong("index_topk_pattern", format!("{layers} letters F or S"), &value);
            }
            return letters;
        }
        if self.get("index_topk_freq").is_none() {
            self.silent.push(("indexer_types", "every layer is then taken to have an indexer of its own"));
        }
        let freq = self.number_or("index_topk_freq", 1, 1, limits::MAX_LAYERS);
        let offset = self.number_or("index_skip_topk_offset", 2, 0, limits::MAX_LAYERS);
        let is_full = |layer: u64| (layer + 1).saturating_sub(offset).is_multiple_of(freq);
        Some((0..layers).map(|layer| if is_full(layer) { Full } else { Shared }).collect())
    }

    fn quantization(&mut self) -> Option<Quantization> {
        let value = self.get("quantization_config").cloned()?;
        let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let Some(quant_method) = text("quant_method") else {
            self.wrong("quantization_config", "an object with a `quant_method`", &value);
            return None;
        };
        let weight_block_size = match value.get("weight_block_size") {
            None | Some(Value::Null) => None,
            Some(size) => {
                match size.as_array().map(|list| list.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>()) {
                    Some(Some(size)) => Some(size),
                    _ => {
                        self.wrong("weight_block_size", "two numbers", size);
                        None
                    }
                }
            }
        };
        Some(Quantization { quant_method, weight_block_size, fmt: text("fmt") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nano() -> Map<String, Value> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nano/config.json");
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    fn parse(object: Map<String, Value>) -> Result<Config, Faults> {
        Config::parse(Path::new("config.json"), Value::Object(object).to_string().as_bytes())
    }

    fn with(key: &str, value: Value) -> Map<String, Value> {
        let mut object = nano();
        object.insert(key.into(), value);
        object
    }

    fn without(key: &str) -> Map<String, Value> {
        let mut object = nano();
        object.remove(key).unwrap();
        object
    }

    #[test]
    fn nano_is_read() {
        let config = parse(nano()).unwrap();
        assert_eq!(config.mtp_layer(), Some(4));
        assert_eq!(config.sparse_layers, [false, true, true, true]);
        assert_eq!(config.silent, []);
        assert_eq!(config.quantization.unwrap().weight_block_size.unwrap(), [128, 128]);
    }

    #[test]
    fn what_absence_changes_is_told() {
        for (key, said) in [
            ("rope_parameters", "rope_parameters"),
            ("norm_topk_prob", "norm_topk_prob"),
            ("routed_scaling_factor", "routed_scaling_factor"),
            ("indexer_types", "indexer_types"),
        ] {
            let config = parse(without(key)).unwrap();
            assert_eq!(config.silent.iter().map(|s| s.0).collect::<Vec<_>>(), [said]);
        }
        let config = parse(with("rope_parameters", serde_json::json!({"rope_theta": null}))).unwrap();
        assert_eq!(config.silent[0].0, "rope_parameters.rope_theta");
        assert_eq!(parse(with("rope_scaling", Value::Null)).unwrap().silent, []);
    }

    #[test]
    fn wrong_values_are_named_with_what_was_expected() {
        let message = |object| parse(object).unwrap_err().to_string();
        assert_eq!(
            message(with("hidden_size", 0.into())),
            "config.json: `hidden_size` is 0, expected a whole number from 1 to 16777216"
        );
        assert_eq!(message(without("kv_lora_rank")), "config.json: `kv_lora_rank` is missing");
        assert_eq!(
            message(with("model_type", "llama".into())),
            "config.json: the model is of type llama, expected glm_moe_dsa"
        );
        assert_eq!(
            message(with("rope_parameters", serde_json::json!({"rope_type": "yarn", "rope_theta": 1e4}))),
            "config.json: `rope_parameters.rope_type` is \"yarn\", expected \"default\""
        );
        for (key, member) in [("rope_scaling", "rope_type"), ("rope_scaling", "type"), ("rope_parameters", "type")] {
            let scaled = with(key, serde_json::json!({member: "linear", "rope_theta": 1e4}));
            let expected = format!("config.json: `{key}.{member}` is \"linear\", expected \"default\"");
            assert_eq!(message(scaled), expected);
        }
        assert!(message(with("rope_parameters", 3.into())).contains("expected an object"));
        assert!(message(with("indexer_types", serde_json::json!(["full"]))).contains("a list of 4 words"));
        assert!(message(with("qk_rope_head_dim", 15.into())).contains("an even number"));
        assert!(message(with("n_group", 3.into())).contains("a divisor of n_routed_experts 8"));
        let twice = br#"{"model_type": "glm_moe_dsa", "model_type": "x"}"#;
        assert!(Config::parse(Path::new("c"), twice).unwrap_err().to_string().contains("`model_type` appears twice"));
    }

    #[test]
    fn indexers_follow_list_pattern_or_frequency() {
        use IndexerType::{Full as F, Shared as S};
        let mut object = without("indexer_types");
        object.insert("index_topk_freq".into(), 3.into());
        object.insert("num_hidden_layers".into(), 9.into());
        assert_eq!(parse(object.clone()).unwrap().indexer_types, [F, F, S, S, F, S, S, F, S]);
        object.insert("index_topk_pattern".into(), "FSSFSSFSS".into());
        assert_eq!(parse(object).unwrap().indexer_types, [F, S, S, F, S, S, F, S, S]);
    }
}
