//! Checkpoints made from a config alone: every tensor that the census asks for, with pseudo-random data or with none.
//!
//! The data of a tensor depend on the seed, its name, element type and shape only, so that the same model can be split
//! over any number of shards. Tensors are written one after the other through a small buffer.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use coliconv::checkpoint::{INDEX_FILE, SCALE_BLOCK, SCALE_SUFFIX, weight_files};
use coliconv::config::{CONFIG_FILE, Config, GENERATION_CONFIG_FILE, MODEL_TYPE};
use coliconv::header::{self, StoredTensor};
use coliconv::roles::{Census, Pass, Role};
use coliconv::tensor::{Dtype, Shape};
use serde_json::{Map, Value, json};

/// How the scales of FP8 weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    F32,
    Bf16,
    /// One byte that is a power of two.
    Ue8m0,
}

impl Scales {
    fn dtype(self) -> Dtype {
        match self {
            Scales::F32 => Dtype::F32,
            Scales::Bf16 => Dtype::BF16,
            Scales::Ue8m0 => Dtype::F8_E8M0,
        }
    }
}

/// How matrices are stored. Tables, routers, `weights_proj` and norms are BF16 and correction biases F32 in every kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// In 128 × 128 blocks.
    Fp8(Scales),
    Bf16,
    F16,
    F32,
}

impl Kind {
    pub const ALL: [Kind; 6] =
        [Kind::Fp8(Scales::F32), Kind::Fp8(Scales::Bf16), Kind::Fp8(Scales::Ue8m0), Kind::Bf16, Kind::F16, Kind::F32];

    fn dtype(self) -> Dtype {
        match self {
            Kind::Fp8(_) => Dtype::F8_E4M3,
            Kind::Bf16 => Dtype::BF16,
            Kind::F16 => Dtype::F16,
            Kind::F32 => Dtype::F32,
        }
    }
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    pub shards: usize,
    /// Weights, without scales.
    pub weights: usize,
    /// Entries of all headers: weights and scales.
    pub entries: usize,
    /// Bytes of all tensors: `total_size` of the index.
    pub tensor_bytes: u64,
    /// Bytes of all shards with their headers, counting holes.
    pub file_bytes: u64,
}

#[derive(Debug, Clone, Copy)]
enum Sharding {
    Count(usize),
    Bytes(u64),
}

/// A checkpoint to be made; see the methods for what it is made of unless told otherwise.
#[derive(Debug, Clone)]
pub struct Synthetic {
    config: Value,
    kind: Kind,
    sharding: Sharding,
    scales_apart: bool,
    optional: bool,
    mtp_indexer: bool,
    without: Vec<Pass>,
    extra: Vec<(String, Dtype, Vec<u64>)>,
    seed: u64,
    holes: bool,
}

impl Synthetic {
    /// One shard of FP8 with F32 scales, everything that the config requires, seed 0.
    pub fn new(config: Value) -> Synthetic {
        Synthetic {
            config,
            kind: Kind::Fp8(Scales::F32),
            sharding: Sharding::Count(1),
            scales_apart: false,
            optional: false,
            mtp_indexer: false,
            without: Vec::new(),
            extra: Vec::new(),
            seed: 0,
            holes: false,
        }
    }

    /// How matrices are stored.
    pub fn kind(self, kind: Kind) -> Synthetic {
        Synthetic { kind, ..self }
    }

    /// That many shards of about the same size; fewer only if there are fewer weights.
    pub fn shards(self, count: usize) -> Synthetic {
        Synthetic { sharding: Sharding::Count(count), ..self }
    }

    /// Shards of at most that many bytes of weights and their scales, or of a single weight.
    pub fn shard_bytes(self, bytes: u64) -> Synthetic {
        Synthetic { sharding: Sharding::Bytes(bytes), ..self }
    }

    /// Scales go to the shard after that of their weight, those of the last one to the first.
    pub fn scales_apart(self) -> Synthetic {
        Synthetic { scales_apart: true, ..self }
    }

    /// Leaves out the tensors of a pass; the config keeps asking for them.
    pub fn without(mut self, pass: Pass) -> Synthetic {
        self.without.push(pass);
        self
    }

    /// Adds what a model may lack: indexers of shared layers, embedding and head of the MTP layer.
    pub fn optional(self) -> Synthetic {
        Synthetic { optional: true, ..self }
    }

    /// Adds an indexer to the MTP layer, which no pass converts; GLM-5.2 is reported to have as many weights as with it.
    pub fn mtp_indexer(self) -> Synthetic {
        Synthetic { mtp_indexer: true, ..self }
    }

    /// Adds a tensor that no census knows.
    pub fn extra(mut self, name: &str, dtype: Dtype, shape: &[u64]) -> Synthetic {
        self.extra.push((name.to_owned(), dtype, shape.to_vec()));
        self
    }

    /// Other data.
    pub fn seed(self, seed: u64) -> Synthetic {
        Synthetic { seed, ..self }
    }

    /// No data: the files are as long as they should be, but have nothing behind their headers.
    pub fn holes(self) -> Synthetic {
        Synthetic { holes: true, ..self }
    }

    /// The text of config.json: as given, with `quantization_config` for FP8 only.
    pub fn config_text(&self) -> String {
        let mut config = self.config.clone();
        if let Some(object) = config.as_object_mut() {
            let fp8 = json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                             "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK]});
            match self.kind {
                Kind::Fp8(_) => drop(object.entry("quantization_config").or_insert(fp8)),
                _ => drop(object.remove("quantization_config")),
            }
        }
        pretty(&config)
    }

    /// Writes the checkpoint into a directory, which is made if it does not exist and must hold no weights yet.
    pub fn write(&self, directory: &Path) -> Result<Made, Box<dyn Error + Send + Sync>> {
        let text = self.config_text();
        let config = Config::parse(Path::new(CONFIG_FILE), text.as_bytes())?;
        fs::create_dir_all(directory)?;
        if weight_files(directory).is_ok() {
            return Err(format!("{} holds weights already", directory.display()).into());
        }
        let shards = self.shard_plan(self.weight_plan(&config));
        let mut made = Made { shards: shards.len(), weights: 0, entries: 0, tensor_bytes: 0, file_bytes: 0 };
        let mut weight_map = BTreeMap::new();
        for (number, mut tensors) in shards.into_iter().enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", number + 1, made.shards);
            // The order of the usual writer: wide elements first, so that everything is aligned.
            tensors.sort_by(|a, b| (b.dtype.bits(), &a.name).cmp(&(a.dtype.bits(), &b.name)));
            made.file_bytes += self.write_shard(&directory.join(&name), &tensors)?;
            made.entries += tensors.len();
            for tensor in tensors {
                made.weights += usize::from(!tensor.name.ends_with(SCALE_SUFFIX));
                made.tensor_bytes += tensor.bytes();
                weight_map.insert(tensor.name, name.clone());
            }
        }
        let index = json!({"metadata": {"total_size": made.tensor_bytes}, "weight_map": weight_map});
        fs::write(directory.join(INDEX_FILE), pretty(&index))?;
        fs::write(directory.join(CONFIG_FILE), text)?;
        for (name, value) in small_files(&config) {
            fs::write(directory.join(name), pretty(&value))?;
        }
        Ok(made)
    }

    /// Every weight with its scales, in the order of the census.
    fn weight_plan(&self, config: &Config) -> Vec<Item> {
        let census = Census::of(config);
        let mut items: Vec<Item> = census
            .iter()
            .filter(|(name, role)| {
                let tied = name.as_str() == "lm_head.weight";
                !self.without.contains(&role.pass) && (!role.optional || (self.optional && !tied))
            })
            .map(|(name, role)| self.item(name.as_str().to_owned(), role))
            .collect();
        if let Some(layer) = config.mtp_layer().filter(|_| self.mtp_indexer && !self.without.contains(&Pass::Mtp)) {
            // Like that of the first layer, which always has one.
            items.extend(census.iter().filter(|(_, role)| role.pass == Pass::Indexer && role.layer == Some(0)).map(
                |(name, role)| {
                    let name = name.as_str().replacen("model.layers.0.", &format!("model.layers.{layer}."), 1);
                    self.item(name, role)
                },
            ));
        }
        items.extend(self.extra.iter().map(|(name, dtype, shape)| {
            let shape = Shape::from(shape.clone());
            Item { weight: Tensor { name: name.clone(), dtype: *dtype, shape, values: Values::small() }, scales: None }
        }));
        items
    }

    fn item(&self, name: String, role: &Role) -> Item {
        let ends = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
        let plain = ends(&["embed_tokens.weight", "head.weight", "indexer.weights_proj.weight"]);
        let dtype = match (role.matrix && !plain, ends(&["e_score_correction_bias"])) {
            (true, _) => self.kind.dtype(),
            (_, true) => Dtype::F32,
            _ => Dtype::BF16,
        };
        let scales = match (dtype, self.kind, role.shape.matrix()) {
            (Dtype::F8_E4M3, Kind::Fp8(scales), Some((rows, columns))) => Some(Tensor {
                name: format!("{name}{SCALE_SUFFIX}"),
                dtype: scales.dtype(),
                shape: [rows.div_ceil(SCALE_BLOCK), columns.div_ceil(SCALE_BLOCK)].into(),
                values: Values::Scale,
            }),
            _ => None,
        };
        let values =
            if ends(&["norm.weight"]) { Values::Normal { mean: 1.0, deviation: 0.1 } } else { Values::small() };
        Item { weight: Tensor { name, dtype, shape: role.shape.clone(), values }, scales }
    }

    /// Which tensors each shard holds.
    fn shard_plan(&self, items: Vec<Item>) -> Vec<Vec<Tensor>> {
        let mut bytes_left: u64 = items.iter().map(Item::bytes).sum();
        let mut shards: Vec<Vec<Item>> = vec![Vec::new()];
        let (mut bytes_here, mut items_left) = (0, items.len());
        for item in items {
            let bytes = item.bytes();
            let full = match self.sharding {
                Sharding::Bytes(most) => bytes_here + bytes > most,
                Sharding::Count(count) => {
                    let shards_left = (count.max(1) + 1).saturating_sub(shards.len()) as u64;
                    let fair = (bytes_here + bytes_left) / shards_left.max(1);
                    shards_left > 1 && (bytes_here + bytes / 2 > fair || (items_left as u64) < shards_left)
                }
            };
            if full && !shards[shards.len() - 1].is_empty() {
                shards.push(Vec::new());
                bytes_here = 0;
            }
            bytes_here += bytes;
            bytes_left -= bytes;
            items_left -= 1;
            shards.last_mut().expect("there is one").push(item);
        }
        let count = shards.len();
        assert!(!self.scales_apart || count > 1, "scales can be apart from their weights in two shards or more");
        let mut plan: Vec<Vec<Tensor>> = (0..count).map(|_| Vec::new()).collect();
        for (number, items) in shards.into_iter().enumerate() {
            for Item { weight, scales } in items {
                plan[number].push(weight);
                plan[(number + usize::from(self.scales_apart)) % count].extend(scales);
            }
        }
        plan
    }

    /// Writes one shard and returns its size.
    fn write_shard(&self, path: &Path, tensors: &[Tensor]) -> std::io::Result<u64> {
        let mut end = 0;
        let stored: Vec<StoredTensor> = tensors
            .iter()
            .map(|tensor| {
                let (offset, bytes) = (end, tensor.bytes());
                end += bytes;
                let Tensor { name, dtype, shape, .. } = tensor;
                StoredTensor { name: name.as_str().into(), dtype: *dtype, shape: shape.clone(), offset, bytes }
            })
            .collect();
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let header = header::encode(Some(&metadata), &stored);
        let size = header.len() as u64 + end;
        let mut file = File::create_new(path)?;
        file.write_all(&header)?;
        if self.holes {
            file.set_len(size)?;
            return Ok(size);
        }
        let mut file = BufWriter::with_capacity(1 << 20, file);
        for tensor in tensors {
            tensor.write(self.seed, &mut file)?;
        }
        file.flush()?;
        Ok(size)
    }
}

/// A weight with its scales.
struct Item {
    weight: Tensor,
    scales: Option<Tensor>,
}

impl Item {
    fn bytes(&self) -> u64 {
        self.weight.bytes() + self.scales.as_ref().map_or(0, Tensor::bytes)
    }
}

/// A tensor to be written.
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Shape,
    values: Values,
}

/// What the elements of a tensor are.
#[derive(Clone, Copy)]
enum Values {
    /// About normally distributed, at most 3.5 deviations from the mean. FP8 takes all its finite codes instead.
    Normal { mean: f32, deviation: f32 },
    /// Positive, from 2^−10 to 2^−3, every power of two as often.
    Scale,
}

impl Values {
    fn small() -> Values {
        Values::Normal { mean: 0.0, deviation: 0.05 }
    }

    fn next(self, random: &mut Random) -> f32 {
        let bits = random.next();
        match self {
            Values::Normal { mean, deviation } => {
                // Four 16-bit numbers: their sum has the mean 131070 and the deviation 65536 / √3.
                let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xffff).sum();
                mean + deviation * ((sum as f32 - 131_070.0) / 37_837.0)
            }
            Values::Scale => {
                let exponent = 117 + (bits >> 32) % 7;
                f32::from_bits((exponent as u32) << 23 | (bits as u32 >> 9))
            }
        }
    }
}

impl Tensor {
    fn bytes(&self) -> u64 {
        self.shape.bytes(self.dtype).expect("a model of that size can be stored")
    }

    /// Writes the data.
    fn write(&self, seed: u64, out: &mut impl Write) -> std::io::Result<()> {
        let mut random = Random::of(seed, &self.name);
        let mut next = || self.values.next(&mut random);
        let elements = self.shape.elements().expect("a model of that size can be stored");
        match self.dtype {
            Dtype::F32 => (0..elements).try_for_each(|_| out.write_all(&next().to_le_bytes())),
            Dtype::BF16 => (0..elements).try_for_each(|_| out.write_all(&half::bf16::from_f32(next()).to_le_bytes())),
            Dtype::F16 => (0..elements).try_for_each(|_| out.write_all(&half::f16::from_f32(next()).to_le_bytes())),
            // The scale's exponent alone.
            Dtype::F8_E8M0 => (0..elements).try_for_each(|_| out.write_all(&[(next().to_bits() >> 23) as u8])),
            _ => write_codes(&mut random, self.bytes(), out),
        }
    }
}

/// Random bytes, of which none is a NaN of FP8.
fn write_codes(random: &mut Random, mut bytes: u64, out: &mut impl Write) -> std::io::Result<()> {
    let mut buffer = [0; 4096];
    while bytes > 0 {
        for eight in buffer.chunks_exact_mut(8) {
            eight.copy_from_slice(&random.next().to_le_bytes());
        }
        for code in &mut buffer {
            *code ^= u8::from(*code & 0x7f == 0x7f);
        }
        let part = bytes.min(buffer.len() as u64);
        out.write_all(&buffer[..part as usize])?;
        bytes -= part;
    }
    Ok(())
}

/// Pseudo-random numbers: a counter in steps of the golden ratio, mixed (Steele, Lea and Flood 2014, "SplitMix").
struct Random(u64);

impl Random {
    /// The numbers that belong to a name.
    fn of(seed: u64, name: &str) -> Random {
        let mut random = Random(seed);
        for byte in name.bytes() {
            random.0 = random.next() ^ u64::from(byte);
        }
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

fn pretty(value: &Value) -> String {
    let mut text = serde_json::to_string_pretty(value).expect("a value can be written");
    text.push('\n');
    text
}

/// The files beside config and weights.
fn small_files(config: &Config) -> Vec<(&'static str, Value)> {
    let generation = json!({"do_sample": true, "temperature": 1.0, "top_p": 0.95, "eos_token_id": config.eos_token_id});
    let mut of_tokenizer = json!({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096,
                                  "clean_up_tokenization_spaces": false});
    if !config.eos_token_id.is_empty() {
        of_tokenizer["eos_token"] = stop_token(0).into();
    }
    vec![
        (GENERATION_CONFIG_FILE, generation),
        ("tokenizer.json", tokenizer(config)),
        ("tokenizer_config.json", of_tokenizer),
    ]
}

fn stop_token(number: usize) -> String {
    if number == 0 { "<|endoftext|>".to_owned() } else { format!("<|stop{number}|>") }
}

/// A byte-level tokenizer without merges: a token a byte, as far as the vocabulary reaches, and the stop tokens.
fn tokenizer(config: &Config) -> Value {
    let stop_ids = &config.eos_token_id;
    let added: Vec<Value> = stop_ids
        .iter()
        .enumerate()
        .map(|(number, id)| {
            json!({"id": id, "content": stop_token(number), "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    // Bytes that print as they are keep their character, the others get those from U+0100 on.
    let printable = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..256).filter(|byte| !printable(byte)).count() as u32;
    let alphabet = (0..256).filter(printable).chain(0x100..0x100 + others).filter_map(char::from_u32);
    let ids = (0..config.vocab_size).filter(|id| !stop_ids.contains(id));
    let vocab: Map<String, Value> = alphabet.zip(ids).map(|(c, id)| (c.to_string(), id.into())).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
           "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
           "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                     "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                     "vocab": vocab, "merges": []}})
}

/// A model of a megabyte with odd widths: a dense and two sparse layers, four experts, an MTP layer, and an indexer in
/// the first two layers.
pub fn small_config() -> Value {
    json!({
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": MODEL_TYPE, "dtype": "bfloat16",
        "hidden_size": 96, "num_hidden_layers": 3, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1,
        "intermediate_size": 201, "moe_intermediate_size": 131, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_attention_heads": 3, "num_key_value_heads": 3,
        "q_lora_rank": 141, "kv_lora_rank": 37, "qk_nope_head_dim": 35, "qk_rope_head_dim": 10, "qk_head_dim": 45,
        "v_head_dim": 47, "index_n_heads": 3, "index_head_dim": 18, "index_topk": 64,
        "indexer_types": ["full", "full", "shared"], "vocab_size": 301, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": false, "attention_bias": false, "hidden_act": "silu", "eos_token_id": [297, 299],
        "pad_token_id": 297,
    })
}
