//! The small models that bad checkpoints and containers are made of: every width below 16, a few hundred weights.

use std::collections::BTreeMap;
use std::path::Path;

use coliconv::config::{CONFIG_FILE, Config, GENERATION_CONFIG_FILE};
use coliconv::header::Header;
use coliconv::io::SourceFile;
use coliconv::quantize::Quantizer;
use coliconv::roles::{Census, Pass, Role};
use coliconv::tensor::Dtype;
use serde_json::{Value, json};

use crate::support::shards::{Shards, Tensor};

/// Name of the output head, the matrix that most cases spoil: `[5, 8]`.
pub fn lm_head() -> &'static str {
    "lm_head.weight"
}

/// A checkpoint or container in memory.
pub struct Model {
    /// Its files; config.json is `config`.
    pub shards: Shards,
    /// Its config.json.
    pub config: Value,
}

/// One dense layer, no MTP layer: 15 weights without the indexer.
fn config() -> Value {
    json!({
        "model_type": "glm_moe_dsa", "hidden_size": 8, "num_hidden_layers": 1, "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 1, "intermediate_size": 6, "moe_intermediate_size": 4, "n_routed_experts": 2,
        "n_shared_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        "num_attention_heads": 1, "q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2,
        "v_head_dim": 4, "index_n_heads": 1, "index_head_dim": 2, "index_topk": 4, "indexer_types": ["full"],
        "vocab_size": 5, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "eos_token_id": 4
    })
}

/// A value between −1 and 1, in steps of 1/64, never 0.
fn value(name: &str, element: u64) -> f32 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64 ^ element.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for byte in name.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    let step = (hash >> 33) % 126;
    (if step < 63 { step as f32 - 63.0 } else { step as f32 - 62.0 }) / 64.0
}

/// The values of a weight.
fn values(name: &str, role: &Role) -> Vec<f32> {
    let norm = name.ends_with("norm.weight");
    let elements = role.shape.elements().unwrap();
    (0..elements).map(|i| if norm { 1.0 + value(name, i) / 4.0 } else { value(name, i) }).collect()
}

impl Model {
    /// The base model with other values of some keys; `null` removes one.
    fn new(changes: Value) -> Model {
        let mut config = config();
        for (key, value) in changes.as_object().unwrap() {
            match value {
                Value::Null => drop(config.as_object_mut().unwrap().remove(key)),
                value => drop(config.as_object_mut().unwrap().insert(key.clone(), value.clone())),
            }
        }
        Model { shards: Shards::default(), config }
    }

    fn census(&self) -> Vec<(String, Role)> {
        let config = Config::parse(Path::new(CONFIG_FILE), self.config.to_string().as_bytes()).unwrap();
        let census = Census::of(&config);
        census.iter().filter(|(_, r)| !r.optional).map(|(n, r)| (n.as_str().to_owned(), r.clone())).collect()
    }

    /// A container of the base model with other values of some keys: F32 throughout, a file a pass.
    pub fn container(changes: Value) -> Model {
        let mut model = Model::new(changes);
        model.shards.without_index();
        for (name, role) in model.census() {
            if role.pass != Pass::Indexer {
                let tensor = Tensor::f32(role.shape.dims(), &values(&name, &role));
                model.shards.add(&role.pass.file_name(0), &name, tensor);
            }
        }
        model
    }

    /// Adds the indexers of a container.
    pub fn with_indexer(mut self) -> Model {
        for (name, role) in self.census().into_iter().filter(|(_, role)| role.pass == Pass::Indexer) {
            let tensor = Tensor::f32(role.shape.dims(), &values(&name, &role));
            self.shards.add(&role.pass.file_name(0), &name, tensor);
        }
        self
    }

    /// A BF16 checkpoint of the base model: two shards and an index.
    pub fn checkpoint(changes: Value) -> Model {
        let mut model = Model::new(changes);
        for (name, role) in model.census() {
            let values = values(&name, &role);
            let bytes = values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect();
            let tensor = Tensor::new(Dtype::BF16, role.shape.dims(), bytes);
            let shard = if role.layer.is_some() { FIRST } else { LAST };
            model.shards.add(shard, &name, tensor);
        }
        model
    }

    /// The values of an F32 matrix `[rows, columns]`.
    fn matrix(&self, name: &str) -> (Vec<f32>, usize, usize) {
        let tensor = self.shards.tensor(name);
        let [rows, columns] = tensor.shape[..] else { panic!("{name} is no matrix") };
        (tensor.to_f32(), rows as usize, columns as usize)
    }

    /// Stores an F32 matrix as codes and scales.
    pub fn quantize(&mut self, name: &str, quantizer: Quantizer) {
        let (values, _, columns) = self.matrix(name);
        let mut codes = Vec::new();
        let mut scales = Vec::new();
        for row in values.chunks(columns) {
            let mut of_row = (vec![0; quantizer.row_code_bytes(columns)], vec![0.0; quantizer.row_scales(columns)]);
            quantizer.quantize_row(row, &mut of_row.0, &mut of_row.1);
            codes.extend(of_row.0);
            scales.extend(of_row.1);
        }
        self.set_quantized(name, codes, &scales);
    }

    /// Stores a matrix as these codes and scales, whatever they are.
    pub fn set_quantized(&mut self, name: &str, codes: Vec<u8>, scales: &[f32]) {
        let file = self.shards.file_of(name);
        self.shards.remove(name);
        self.shards.add(&file, name, Tensor::new(Dtype::U8, &[codes.len() as u64], codes));
        self.shards.add(&file, &scales_of(name), Tensor::f32(&[scales.len() as u64], scales));
    }

    /// Stores a matrix as the given numbers of bytes of codes and of scales.
    pub fn set_counts(&mut self, name: &str, code_bytes: usize, scales: usize) {
        let codes = (0..code_bytes).map(|i| 0x11 * (1 + i % 15) as u8).collect();
        self.set_quantized(name, codes, &vec![0.5; scales]);
    }

    /// The scales of a quantized matrix.
    pub fn scales(&mut self, name: &str) -> &mut Tensor {
        self.shards.tensor_mut(&scales_of(name))
    }

    /// Gives the stamps of a file: the text itself.
    pub fn stamp_text(&mut self, file: &str, text: &str) {
        let metadata = BTreeMap::from([("colibri.fmt".to_owned(), text.to_owned())]);
        self.shards.files.entry(file.to_owned()).or_default().metadata = Some(metadata);
    }

    /// Stamps one tensor of the file that holds it.
    pub fn stamp(&mut self, name: &str, format: &str) {
        let file = self.shards.file_of(name);
        self.stamp_text(&file, &json!({name: format}).to_string());
    }

    /// The text of config.json.
    pub fn config_text(&self) -> Vec<u8> {
        // Sorted, whatever serde_json does with the order of members.
        let members: BTreeMap<_, _> = self.config.as_object().unwrap().iter().collect();
        serde_json::to_vec(&members).unwrap()
    }

    /// Writes all of it into a directory that does not exist yet.
    pub fn store(mut self, directory: &Path) {
        let config = self.config_text();
        let others = &mut self.shards.others;
        others.entry(CONFIG_FILE.to_owned()).or_insert(config);
        others.entry(GENERATION_CONFIG_FILE.to_owned()).or_insert_with(|| b"{\"eos_token_id\":[4]}\n".to_vec());
        others.entry("tokenizer.json".to_owned()).or_insert_with(|| TOKENIZER.to_vec());
        self.shards.config = Value::Null;
        self.shards.store(directory);
    }
}

/// A tokenizer that knows no token.
pub const TOKENIZER: &[u8] =
    br#"{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
"#;

/// The first shard of [`Model::checkpoint`]: the layers.
pub const FIRST: &str = "model-00001-of-00002.safetensors";
/// The second shard of [`Model::checkpoint`]: embedding, norm and head.
pub const LAST: &str = "model-00002-of-00002.safetensors";

/// The name of a matrix's scales.
pub fn scales_of(name: &str) -> String {
    format!("{name}.qs")
}

/// Where the data of a tensor begin in a file.
pub fn offset_of(file: &Path, name: &str) -> usize {
    let header = Header::read(&SourceFile::open(file).unwrap()).unwrap();
    header.tensors().iter().find(|tensor| tensor.name.as_str() == name).unwrap().offset as usize
}
