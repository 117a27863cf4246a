//! Containers made from a config alone, to be measured.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use crate::checkpoint::INDEX_FILE;
use crate::config::{CONFIG_FILE, Config, GENERATION_CONFIG_FILE};
use crate::container::layout::{FileLayout, PlannedWeight};
use crate::container::manifest::{
    CHECKSUM, FileRecord, MANIFEST_FILE, MANIFEST_VERSION, Manifest, TensorRecord, json_text,
};
use crate::container::stamps;
use crate::container::writer::{Digests, FileWriter, checksum_text};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::format::Format;
use crate::header::StoredTensor;
use crate::io::{NewFile, write_whole};
use crate::limits;
use crate::progress::Progress;
use crate::recipe::{Recipe, Settings};
use crate::roles::{Census, Class, Pass, Role};
use crate::tensor::{Dtype, TensorName};

/// GLM-5.2's dimensions.
pub(super) const GLM: &str = include_str!("glm-5.2.json");
/// Files of GLM-5.2's containers: hidden layers, MTP head, indexers.
const GLM_FILES: [usize; 3] = [141, 3, 21];

/// Routed experts of a layer of a model that is run.
pub(super) const FEW_EXPERTS: u64 = 32;
/// Bytes of a model from which on it has GLM-5.2's widths.
pub(super) const WIDE_BYTES: u64 = 4 << 30;
/// Bytes of its embedding, output head and dense layer, and of a sparse layer of 32 experts.
const WIDE_FIXED_BYTES: u64 = 2_300_000_000;
const WIDE_LAYER_BYTES: u64 = 870_000_000;

/// A tokenizer that knows no token.
const TOKENIZER: &[u8] =
    br#"{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
"#;

/// What the files hold behind their headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contents {
    /// Nothing: holes.
    Holes,
    /// Random codes, small positive scales.
    Random,
    /// The same, but norms near 1 and routers of both signs: a model whose tokens choose different experts.
    Model,
}

/// A container to be made.
pub(super) struct Synthetic {
    config: Value,
    /// Files of each pass.
    files: [usize; 3],
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Made {
    /// Entries of all headers.
    pub entries: u64,
    /// Size of the weight files.
    pub bytes: u64,
}

/// A file to be written.
struct Planned<'a> {
    name: String,
    weights: Vec<(&'a Role, PlannedWeight)>,
    layout: FileLayout,
}

impl Synthetic {
    /// GLM-5.2, everything there, with so many hidden layers.
    pub fn glm(layers: u64) -> Synthetic {
        let mut config: Value = serde_json::from_str(GLM).expect("a constant");
        config["num_hidden_layers"] = layers.into();
        Synthetic { config, files: GLM_FILES }
    }

    /// About so many bytes, nearly all of them in routed experts, in many files for each of some threads.
    pub fn of_bytes(bytes: u64, threads: usize) -> Synthetic {
        const SPARSE_LAYERS: u64 = 3;
        let (hidden, inner) = if bytes < 64 << 20 { (256, 128) } else { (2048, 1024) };
        let format = Format::Int4Grouped { group_size: 64 };
        let expert = 3 * format.bytes(inner, hidden).expect("small");
        let experts = (bytes / (SPARSE_LAYERS * expert)).clamp(2, 4096);
        let mut config: Value = serde_json::from_str(GLM).expect("a constant");
        let small = json!({
            "hidden_size": hidden, "moe_intermediate_size": inner, "intermediate_size": 2 * inner, "vocab_size": 1024,
            "num_hidden_layers": 1 + SPARSE_LAYERS, "first_k_dense_replace": 1, "n_routed_experts": experts,
            "num_experts_per_tok": 2, "num_attention_heads": 4, "num_nextn_predict_layers": 0, "q_lora_rank": 128,
            "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_head_dim": 128, "v_head_dim": 64, "index_n_heads": 2,
            "eos_token_id": [1], "pad_token_id": 1,
        });
        for (key, value) in small.as_object().expect("an object") {
            config[key] = value.clone();
        }
        Synthetic { config, files: [16 * threads, 0, 1] }
    }

    /// About so many bytes of a model to be run: one dense layer, then as many sparse ones as there is room for, each with
    /// [`FEW_EXPERTS`] routed experts. From [`WIDE_BYTES`] on all widths are GLM-5.2's.
    pub fn model(bytes: u64) -> Synthetic {
        let mut config: Value = serde_json::from_str(GLM).expect("a constant");
        let wide = bytes >= WIDE_BYTES;
        let (fixed, layer) = if wide { (WIDE_FIXED_BYTES, WIDE_LAYER_BYTES) } else { (4 << 20, 6 << 20) };
        let layers = (bytes.saturating_sub(fixed) / layer).clamp(2, 75);
        let mut changes = json!({
            "num_hidden_layers": 1 + layers, "first_k_dense_replace": 1, "n_routed_experts": FEW_EXPERTS,
            "num_nextn_predict_layers": 0,
        });
        if !wide {
            let narrow = json!({
                "hidden_size": 512, "moe_intermediate_size": 128, "intermediate_size": 1024, "vocab_size": 1024,
                "num_attention_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
                "qk_head_dim": 128, "v_head_dim": 64, "index_n_heads": 2, "eos_token_id": [1], "pad_token_id": 1,
            });
            changes.as_object_mut().expect("an object").extend(narrow.as_object().expect("an object").clone());
        }
        for (key, value) in changes.as_object().expect("an object") {
            config[key] = value.clone();
        }
        Synthetic { config, files: [8, 0, 1] }
    }

    /// What the model is, for people.
    pub fn described(&self) -> Result<String, Faults> {
        let of = |key: &str| self.config[key].to_string();
        let wide = self.config["hidden_size"] == 6144 && self.config["vocab_size"] == 154_880;
        let widths = if wide { "GLM-5.2's widths" } else { "narrower than GLM-5.2, whose widths come with --size 4G" };
        let (layers, experts, hidden) = (of("num_hidden_layers"), of("n_routed_experts"), of("hidden_size"));
        let megabytes = self.bytes()? / 1_000_000;
        Ok(format!("{layers} layers of {experts} experts, hidden_size {hidden}, {megabytes} MB: {widths}"))
    }

    /// Bytes of the weight files.
    pub fn bytes(&self) -> Result<u64, Faults> {
        let config = Config::parse(Path::new(CONFIG_FILE), &json_text(&self.config))?;
        Ok(self.plan(&Census::of(&config))?.iter().map(|file| file.layout.bytes).sum())
    }

    /// Writes the container into a new directory; with `described` it has an index and a manifest.
    pub fn write(
        &self,
        directory: &Path,
        contents: Contents,
        described: bool,
        progress: &dyn Progress,
    ) -> Result<Made, Faults> {
        let text = json_text(&self.config);
        let config = Config::parse(&directory.join(CONFIG_FILE), &text)?;
        let census = Census::of(&config);
        std::fs::create_dir(directory).map_err(|e| Fault::io("create the directory", directory, e))?;
        let planned = self.plan(&census)?;
        let bytes = planned.iter().map(|file| file.layout.bytes).sum();
        let entries = planned.iter().map(|file| file.layout.tensors.len() as u64).sum();
        let mut described_files = Vec::new();
        progress.start(bytes);
        for file in &planned {
            progress.file(&file.name);
            described_files.push(file.write(directory, contents)?);
            progress.advance(file.layout.bytes, 0);
        }
        progress.end();
        let generation = json_text(&json!({"eos_token_id": self.config["eos_token_id"]}));
        let small = [(CONFIG_FILE, text), (GENERATION_CONFIG_FILE, generation), ("tokenizer.json", TOKENIZER.to_vec())];
        for (name, bytes) in &small {
            write_whole(&directory.join(name), bytes, false)?;
        }
        if described {
            describe(directory, &planned, &described_files)?;
        }
        Ok(Made { entries, bytes })
    }

    /// The files: each pass split into so many of about the same size.
    fn plan<'a>(&self, census: &'a Census) -> Result<Vec<Planned<'a>>, Faults> {
        let recipe = Recipe::new(&Settings::default())?;
        let mut files = Vec::new();
        for (pass, count) in Pass::ALL.into_iter().zip(self.files) {
            let mut weights = Vec::new();
            for (name, role) in census.iter().filter(|(_, role)| role.pass == pass && !role.optional) {
                let (quantizer, _) = recipe.quantizer(name, role).map_err(|kind| Fault::new(Place::default(), kind))?;
                let format = match role.shape.matrix() {
                    Some((_, columns)) => quantizer.format().canonical(columns),
                    None => Format::F32,
                };
                weights.push((role, PlannedWeight { name: name.clone(), shape: role.shape.clone(), format }));
            }
            for (number, weights) in split(weights, count).into_iter().enumerate() {
                let stored: Vec<PlannedWeight> = weights.iter().map(|(_, weight)| weight.clone()).collect();
                let stamped = weights.iter().filter(|(role, weight)| role.resident() && weight.format != Format::F32);
                let stamps = stamped.map(|(_, weight)| (weight.name.clone(), weight.format.name())).collect();
                let layout = FileLayout::new(&stored, stamps::metadata(&stamps).as_ref()).ok_or_else(|| {
                    let kind = FaultKind::EngineLimit { what: "bytes", found: u64::MAX, limit: u64::MAX };
                    Fault::new(Place::default(), kind)
                })?;
                files.push(Planned { name: pass.file_name(number), weights, layout });
            }
        }
        Ok(files)
    }
}

/// Splits weights, in their order, into `count` lists of about as many bytes.
fn split<T>(weights: Vec<(T, PlannedWeight)>, count: usize) -> Vec<Vec<(T, PlannedWeight)>> {
    let bytes = |weight: &PlannedWeight| match weight.shape.matrix() {
        Some((rows, columns)) => weight.format.bytes(rows, columns).unwrap_or(0),
        None => 4 * weight.shape.elements().unwrap_or(0),
    };
    let total: u64 = weights.iter().map(|(_, weight)| bytes(weight)).sum();
    let mut lists: Vec<Vec<(T, PlannedWeight)>> = (0..count).map(|_| Vec::new()).collect();
    let mut before = 0;
    for weight in weights {
        let list = (u128::from(before) * count as u128 / u128::from(total.max(1))) as usize;
        before += bytes(&weight.1);
        lists[list.min(count - 1)].push(weight);
    }
    lists.retain(|list| !list.is_empty());
    lists
}

impl Planned<'_> {
    fn write(&self, directory: &Path, contents: Contents) -> Result<(FileRecord, Digests)> {
        if contents == Contents::Holes {
            let file = NewFile::create(&directory.join(&self.name))?;
            file.set_sparse_bytes(self.layout.bytes)?;
            file.write_at(&self.layout.head, 0)?;
            file.commit(false)?;
            let record = FileRecord { name: self.name.clone(), bytes: self.layout.bytes, sha256: "0".repeat(64) };
            return Ok((record, Digests { sha256: [0; 32], checksums: vec![0; self.layout.tensors.len()] }));
        }
        let mut writer = FileWriter::create(directory, &self.name, &self.layout, limits::WRITE_CHUNK_BYTES)?;
        let mut random = self.layout.bytes;
        let mut buffer = Vec::new();
        for tensor in &self.layout.tensors {
            let mut position = 0;
            while position < tensor.bytes {
                let step = (tensor.bytes - position).min(1 << 20);
                fill(&mut buffer, step as usize, numbers(contents, tensor), &mut random);
                writer.append(&buffer)?;
                position += step;
            }
        }
        let sealed = writer.seal()?;
        let finished = (sealed.record.clone(), sealed.digests.clone());
        sealed.commit()?;
        Ok(finished)
    }
}

/// Mask and bits that make numbers of random bits: any bytes; for F32 numbers from 2^−8 to 2^−7; of a model that is run,
/// norms from 1 to 2, and routers from 2^−7 to 2^−6 of either sign.
fn numbers(contents: Contents, tensor: &StoredTensor) -> (u32, u32) {
    let name = tensor.name.as_str();
    match (tensor.dtype, contents) {
        (Dtype::F32, Contents::Model) if name.ends_with("norm.weight") => (0x007f_ffff, 127 << 23),
        (Dtype::F32, Contents::Model) if name.ends_with("mlp.gate.weight") => (0x807f_ffff, 120 << 23),
        (Dtype::F32, _) => (0x007f_ffff, 119 << 23),
        _ => (u32::MAX, 0),
    }
}

/// Random bits with the mask and bits of [`numbers`].
fn fill(buffer: &mut Vec<u8>, bytes: usize, (mask, set): (u32, u32), state: &mut u64) {
    let twice = |bits: u32| u64::from(bits) << 32 | u64::from(bits);
    let (mask, set) = (twice(mask), twice(set));
    buffer.clear();
    while buffer.len() < bytes {
        // SplitMix64 (Steele, Lea and Flood 2014).
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = *state;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        buffer.extend_from_slice(&(bits & mask | set).to_le_bytes());
    }
    buffer.truncate(bytes);
}

/// Index and manifest.
fn describe(directory: &Path, planned: &[Planned<'_>], written: &[(FileRecord, Digests)]) -> Result<()> {
    let mut weight_map: BTreeMap<&TensorName, &str> = BTreeMap::new();
    let mut tensors = BTreeMap::new();
    for (file, (_, digests)) in planned.iter().zip(written) {
        weight_map.extend(file.layout.tensors.iter().map(|tensor| (&tensor.name, file.name.as_str())));
        for ((role, weight), &(codes, scales)) in file.weights.iter().zip(&file.layout.places) {
            let record = TensorRecord {
                file: file.name.clone(),
                class: Class::name(role.class).to_owned(),
                format: weight.format.name().to_owned(),
                group_size: weight.format.group_size(),
                shape: weight.shape.clone(),
                bytes: file.layout.tensors[codes].bytes,
                checksum: checksum_text(digests.checksums[codes]),
                scale_bytes: scales.map_or(0, |scales| file.layout.tensors[scales].bytes),
                scale_checksum: scales.map(|scales| checksum_text(digests.checksums[scales])),
            };
            tensors.insert(weight.name.clone(), record);
        }
    }
    let total: u64 = planned.iter().flat_map(|file| &file.layout.tensors).map(|tensor| tensor.bytes).sum();
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    write_whole(&directory.join(INDEX_FILE), &json_text(&index), false)?;
    let manifest = Manifest {
        version: MANIFEST_VERSION,
        tool: "coliconv bench".to_owned(),
        model_type: crate::config::MODEL_TYPE.to_owned(),
        checksum: CHECKSUM.to_owned(),
        recipe: Settings::default(),
        passes: BTreeMap::new(),
        source: Vec::new(),
        files: written.iter().map(|(record, _)| record.clone()).collect(),
        small_files: Vec::new(),
        tensors,
        warnings: Vec::new(),
    };
    write_whole(&directory.join(MANIFEST_FILE), &manifest.to_bytes(), false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_as_many_as_those_of_the_real_containers() {
        let glm = Synthetic::glm(78);
        let config = Config::parse(Path::new(CONFIG_FILE), &json_text(&glm.config)).unwrap();
        let census = Census::of(&config);
        let planned = glm.plan(&census).unwrap_or_else(|faults| panic!("{faults}"));
        assert_eq!(planned.len(), 165);
        assert_eq!(planned.iter().map(|file| file.layout.tensors.len()).sum::<usize>(), 118_646);
        let of_main = planned.iter().filter(|file| Pass::of_file(&file.name).is_some_and(|(p, _)| p == Pass::Main));
        let gigabytes = of_main.map(|file| file.layout.bytes).sum::<u64>() as f64 / 1e9;
        assert!((419.0..420.0).contains(&gigabytes), "{gigabytes}");
    }

    #[test]
    fn the_dimensions_are_those_of_the_fixture() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/glm-5.2/config.json");
        let mut fixture: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        fixture.as_object_mut().unwrap().remove("quantization_config");
        assert_eq!(fixture, Synthetic::glm(78).config);
    }
}
