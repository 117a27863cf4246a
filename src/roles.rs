//! Which tensor is what: the tensors that config.json asks for, with their shapes, passes and classes.
//!
//! [`Census::of`] lists every tensor of the architecture; a name that it does not list belongs to no role. Nothing is
//! guessed from parts of names, so a nested prefix or a newer architecture cannot slip through as something else.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::config::{Config, IndexerType};
use crate::error::{Fault, FaultKind, Place};
use crate::tensor::{Shape, TensorName};

/// Which run over the source converts a tensor; each has its own series of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Embedding, hidden layers, final norm, output head.
    Main,
    /// The MTP layer.
    Mtp,
    /// The DSA indexers of the hidden layers.
    Indexer,
}

impl Pass {
    /// All passes, in the order in which they run.
    pub const ALL: [Pass; 3] = [Pass::Main, Pass::Mtp, Pass::Indexer];

    /// The name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Pass::Main => "main",
            Pass::Mtp => "mtp",
            Pass::Indexer => "indexer",
        }
    }

    /// What the names of its files begin with, before the number.
    pub fn series(self) -> &'static str {
        match self {
            Pass::Main => "out-",
            Pass::Mtp => "out-mtp-",
            Pass::Indexer => "out-idx-",
        }
    }

    /// The name of its file with that number.
    pub fn file_name(self, number: usize) -> String {
        format!("{}{number:05}.safetensors", self.series())
    }

    /// Pass and number of a file of a series, by its name.
    pub fn of_file(name: &str) -> Option<(Pass, usize)> {
        let stem = name.strip_suffix(".safetensors")?;
        // The longest series first: "out-" begins the others.
        [Pass::Mtp, Pass::Indexer, Pass::Main].into_iter().find_map(|pass| {
            let digits = stem.strip_prefix(pass.series())?;
            let numeric = digits.len() >= 5 && digits.bytes().all(|b| b.is_ascii_digit());
            numeric.then(|| digits.parse().ok()).flatten().map(|number| (pass, number))
        })
    }
}

/// Tensors that are converted alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Norms, router and correction bias of the hidden layers: always f32.
    F32,
    /// Embedding and output head.
    Io,
    /// Routed experts.
    X,
    /// Shared experts.
    Sh,
    /// `o_proj`.
    O,
    /// `kv_b_proj`.
    Kvb,
    /// `q_a_proj`, `q_b_proj`, `kv_a_proj_with_mqa`.
    Attn,
    /// MLP of the dense layers.
    Dmlp,
    /// Everything of the MTP layer.
    Mtp,
    /// Everything of the indexers.
    Indexer,
}

impl Class {
    /// All classes, in the order of reports.
    pub const ALL: [Class; 10] = [
        Class::Io,
        Class::X,
        Class::Sh,
        Class::O,
        Class::Kvb,
        Class::Attn,
        Class::Dmlp,
        Class::F32,
        Class::Mtp,
        Class::Indexer,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Class::F32 => "f32",
            Class::Io => "io",
            Class::X => "x",
            Class::Sh => "sh",
            Class::O => "o",
            Class::Kvb => "kvb",
            Class::Attn => "attn",
            Class::Dmlp => "dmlp",
            Class::Mtp => "mtp",
            Class::Indexer => "indexer",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Which of an expert's or MLP's three matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Projection {
    /// `gate_proj`.
    Gate,
    /// `up_proj`.
    Up,
    /// `down_proj`.
    Down,
}

impl Projection {
    /// All three, in no particular order.
    pub const ALL: [Projection; 3] = [Projection::Gate, Projection::Up, Projection::Down];

    /// The name in tensor names.
    pub fn name(self) -> &'static str {
        match self {
            Projection::Gate => "gate_proj",
            Projection::Up => "up_proj",
            Projection::Down => "down_proj",
        }
    }
}

/// What a tensor is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Role {
    /// Which pass converts it.
    pub pass: Pass,
    /// Which class it is converted with.
    pub class: Class,
    /// Its shape by config.json.
    pub shape: Shape,
    /// Whether it is a matrix that may be quantized; the others stay f32.
    pub matrix: bool,
    /// Its layer, if it is of one.
    pub layer: Option<u64>,
    /// Its routed expert, if it is of one.
    pub expert: Option<(u64, Projection)>,
    /// Whether a model may lack it.
    pub optional: bool,
}

impl Role {
    /// Whether the engine keeps it in memory: everything but the routed experts.
    pub fn resident(&self) -> bool {
        self.expert.is_none()
    }
}

/// Every tensor that the architecture has under a config.
#[derive(Debug)]
pub struct Census {
    roles: HashMap<TensorName, Role>,
    order: Vec<TensorName>,
}

impl Census {
    /// The census of a model.
    pub fn of(config: &Config) -> Census {
        let mut list = List { census: Census { roles: HashMap::new(), order: Vec::new() }, config };
        list.top();
        for layer in 0..config.num_hidden_layers {
            list.layer(layer, Pass::Main, config.sparse_layers[layer as usize]);
            list.indexer(layer, config.indexer_types[layer as usize] == IndexerType::Shared);
        }
        if let Some(layer) = config.mtp_layer() {
            list.layer(layer, Pass::Mtp, true);
            list.mtp(layer);
        }
        list.census
    }

    /// The role of a tensor, if the architecture has it.
    pub fn role(&self, name: &str) -> Option<&Role> {
        self.roles.get(name)
    }

    /// All tensors, layer by layer.
    pub fn iter(&self) -> impl Iterator<Item = (&TensorName, &Role)> {
        self.order.iter().map(|name| (name, &self.roles[name]))
    }

    /// Whether it is an indexer's tensor in the MTP layer, which no pass converts: that layer attends densely.
    pub fn dropped(name: &str, config: &Config) -> bool {
        let Some(layer) = config.mtp_layer() else { return false };
        name.strip_prefix(&format!("model.layers.{layer}.self_attn.indexer.")).is_some_and(|rest| {
            INDEXER.iter().any(|part| rest == *part || rest.strip_suffix("_scale_inv") == Some(part))
        })
    }
}

/// What of a census is not there.
#[derive(Debug, Default)]
pub struct Absent {
    /// Passes of which nothing at all is there.
    pub passes: Vec<Pass>,
    /// What is missing of the others: whole layers and experts in one line each.
    pub faults: Vec<Fault>,
}

impl Census {
    /// What is missing, where `present` tells which names are there.
    pub fn absent(&self, present: &dyn Fn(&TensorName) -> bool) -> Absent {
        let required = || self.iter().filter(|(_, role)| !role.optional);
        let mut absent = Absent::default();
        for pass in Pass::ALL {
            let of_pass = || required().filter(|(_, role)| role.pass == pass);
            if of_pass().next().is_none() || of_pass().any(|(name, _)| present(name)) {
                continue;
            }
            absent.passes.push(pass);
        }
        let missing: Vec<(&TensorName, &Role)> =
            required().filter(|(name, role)| !absent.passes.contains(&role.pass) && !present(name)).collect();
        let count = |key: &dyn Fn(&Role) -> Option<Part>, tensors: &[(&TensorName, &Role)]| {
            let mut counts: BTreeMap<Part, usize> = BTreeMap::new();
            for part in tensors.iter().filter_map(|(_, role)| key(role)) {
                *counts.entry(part).or_default() += 1;
            }
            counts
        };
        let all: Vec<(&TensorName, &Role)> = required().collect();
        let whole = |key: &dyn Fn(&Role) -> Option<Part>| -> BTreeMap<Part, usize> {
            let asked = count(key, &all);
            count(key, &missing).into_iter().filter(|(part, found)| asked[part] == *found).collect()
        };
        let layers = whole(&|role| role.layer.map(|layer| (role.pass, layer, None)));
        let experts = whole(&|role| Some((role.pass, role.layer?, Some(role.expert?.0))));
        absent.report(&missing, &layers, &experts);
        absent
    }
}

/// A layer of a pass, or one expert of it.
type Part = (Pass, u64, Option<u64>);

impl Absent {
    fn report(
        &mut self,
        missing: &[(&TensorName, &Role)],
        layers: &BTreeMap<Part, usize>,
        experts: &BTreeMap<Part, usize>,
    ) {
        let mut said = std::collections::HashSet::new();
        for (name, role) in missing {
            let layer = role.layer.map(|layer| (role.pass, layer, None));
            let expert = role.layer.zip(role.expert).map(|(layer, (expert, _))| (role.pass, layer, Some(expert)));
            let fault = if let Some((part, &tensors)) = layer.and_then(|part| layers.get_key_value(&part)) {
                let kind = match part.0 {
                    Pass::Indexer => FaultKind::IndexerMissing { layer: part.1, tensors },
                    _ => FaultKind::LayerMissing { layer: part.1, tensors },
                };
                said.insert(*part).then(|| Fault::new(Place::default(), kind))
            } else if let Some((part, &tensors)) = expert.and_then(|part| experts.get_key_value(&part)) {
                let kind = FaultKind::ExpertMissing { layer: part.1, expert: part.2.unwrap_or_default(), tensors };
                said.insert(*part).then(|| Fault::new(Place::default(), kind))
            } else if name.as_str() == "lm_head.weight" {
                Some(Fault::new(Place::name((*name).clone()), FaultKind::HeadMissing))
            } else {
                let kind = FaultKind::TensorMissing { shape: role.shape.clone() };
                Some(Fault::new(Place::name((*name).clone()), kind))
            };
            self.faults.extend(fault);
        }
    }
}

/// Tensors of an indexer, below `self_attn.indexer.`.
const INDEXER: [&str; 5] = ["wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias"];

struct List<'a> {
    census: Census,
    config: &'a Config,
}

impl List<'_> {
    fn push(&mut self, name: String, role: Role) {
        let name = TensorName::from(name);
        self.census.order.push(name.clone());
        self.census.roles.insert(name, role);
    }

    fn top(&mut self) {
        let c = self.config;
        let role = |class, shape: Shape, optional| Role {
            pass: Pass::Main,
            class,
            matrix: class != Class::F32,
            shape,
            layer: None,
            expert: None,
            optional,
        };
        let table = Shape::from([c.vocab_size, c.hidden_size]);
        self.push("model.embed_tokens.weight".into(), role(Class::Io, table.clone(), false));
        self.push("model.norm.weight".into(), role(Class::F32, [c.hidden_size].into(), false));
        self.push("lm_head.weight".into(), role(Class::Io, table, c.tie_word_embeddings));
    }

    /// Adds a tensor of a layer: a matrix of `class`, or with `Class::F32` one that stays f32.
    fn part(&mut self, layer: u64, pass: Pass, part: &str, class: Class, shape: Shape) {
        let role = Role {
            pass,
            class: if pass == Pass::Mtp { Class::Mtp } else { class },
            matrix: class != Class::F32,
            shape,
            layer: Some(layer),
            expert: None,
            optional: false,
        };
        self.push(format!("model.layers.{layer}.{part}"), role);
    }

    fn layer(&mut self, layer: u64, pass: Pass, sparse: bool) {
        let c = self.config;
        let (d, heads) = (c.hidden_size, c.num_attention_heads);
        let mut part = |name: &str, class, shape: Shape| self.part(layer, pass, name, class, shape);
        part("input_layernorm.weight", Class::F32, [d].into());
        part("self_attn.q_a_proj.weight", Class::Attn, [c.q_lora_rank, d].into());
        part("self_attn.q_a_layernorm.weight", Class::F32, [c.q_lora_rank].into());
        part("self_attn.q_b_proj.weight", Class::Attn, [heads * c.qk_head_dim(), c.q_lora_rank].into());
        part("self_attn.kv_a_proj_with_mqa.weight", Class::Attn, [c.kv_lora_rank + c.qk_rope_head_dim, d].into());
        part("self_attn.kv_a_layernorm.weight", Class::F32, [c.kv_lora_rank].into());
        let kv_b = [heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank];
        part("self_attn.kv_b_proj.weight", Class::Kvb, kv_b.into());
        part("self_attn.o_proj.weight", Class::O, [d, heads * c.v_head_dim].into());
        part("post_attention_layernorm.weight", Class::F32, [d].into());
        if sparse {
            part("mlp.gate.weight", Class::F32, [c.n_routed_experts, d].into());
            part("mlp.gate.e_score_correction_bias", Class::F32, [c.n_routed_experts].into());
            self.mlp(layer, pass, "mlp.shared_experts", Class::Sh, c.moe_intermediate_size * c.n_shared_experts);
            self.experts(layer, pass);
        } else {
            self.mlp(layer, pass, "mlp", Class::Dmlp, c.intermediate_size);
        }
    }

    fn projection_shape(&self, projection: Projection, inner: u64) -> Shape {
        match projection {
            Projection::Gate | Projection::Up => [inner, self.config.hidden_size].into(),
            Projection::Down => [self.config.hidden_size, inner].into(),
        }
    }

    fn mlp(&mut self, layer: u64, pass: Pass, prefix: &str, class: Class, inner: u64) {
        for projection in Projection::ALL {
            let shape = self.projection_shape(projection, inner);
            self.part(layer, pass, &format!("{prefix}.{}.weight", projection.name()), class, shape);
        }
    }

    fn experts(&mut self, layer: u64, pass: Pass) {
        for expert in 0..self.config.n_routed_experts {
            for projection in Projection::ALL {
                let role = Role {
                    pass,
                    class: if pass == Pass::Mtp { Class::Mtp } else { Class::X },
                    matrix: true,
                    shape: self.projection_shape(projection, self.config.moe_intermediate_size),
                    layer: Some(layer),
                    expert: Some((expert, projection)),
                    optional: false,
                };
                self.push(format!("model.layers.{layer}.mlp.experts.{expert}.{}.weight", projection.name()), role);
            }
        }
    }

    /// The parts that only the MTP layer has. Some checkpoints repeat embedding and output head there.
    fn mtp(&mut self, layer: u64) {
        let d = self.config.hidden_size;
        self.part(layer, Pass::Mtp, "eh_proj.weight", Class::Mtp, [d, 2 * d].into());
        for norm in ["enorm.weight", "hnorm.weight", "shared_head.norm.weight"] {
            self.part(layer, Pass::Mtp, norm, Class::F32, [d].into());
        }
        for table in ["embed_tokens.weight", "shared_head.head.weight"] {
            self.part(layer, Pass::Mtp, table, Class::Mtp, [self.config.vocab_size, d].into());
            let name = self.census.order.last().expect("just pushed");
            self.census.roles.get_mut(name).expect("just pushed").optional = true;
        }
    }

    /// A shared layer has no use for an indexer, but a checkpoint may carry one.
    fn indexer(&mut self, layer: u64, optional: bool) {
        let c = self.config;
        let (heads, dim) = (c.index_n_heads, c.index_head_dim);
        let shapes: [Shape; 5] = [
            [heads * dim, c.q_lora_rank].into(),
            [dim, c.hidden_size].into(),
            [heads, c.hidden_size].into(),
            [dim].into(),
            [dim].into(),
        ];
        for (part, shape) in INDEXER.into_iter().zip(shapes) {
            let role = Role {
                pass: Pass::Indexer,
                class: Class::Indexer,
                matrix: shape.dims().len() == 2,
                shape,
                layer: Some(layer),
                expert: None,
                optional,
            };
            self.push(format!("model.layers.{layer}.self_attn.indexer.{part}"), role);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;

    fn config(text: &str) -> Config {
        Config::parse(std::path::Path::new("config.json"), text.as_bytes()).unwrap()
    }

    /// GLM-5.2's dimensions.
    const GLM: &str = r#"{"model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78,
        "num_nextn_predict_layers": 1, "first_k_dense_replace": 3, "intermediate_size": 12288,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "num_attention_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
        "vocab_size": 154880, "norm_topk_prob": true, "routed_scaling_factor": 2.5, "index_topk_freq": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8000000.0}}"#;

    #[test]
    fn glm_sizes_are_those_of_published_containers() {
        let census = Census::of(&config(GLM));
        let bytes = |pass: Pass, format: Format| -> u64 {
            let of = |role: &Role| match (role.shape.matrix(), role.matrix, role.class) {
                (Some((o, i)), true, Class::Io | Class::Mtp) => Format::Int8Row.bytes(o, i).unwrap(),
                (Some((o, i)), true, _) => format.bytes(o, i).unwrap(),
                _ => 4 * role.shape.elements().unwrap(),
            };
            census.iter().filter(|(_, role)| role.pass == pass && !role.optional).map(|(_, role)| of(role)).sum()
        };
        let gigabytes = |bytes: u64| (bytes as f64 / 1e8).round() / 10.0;
        assert_eq!(gigabytes(bytes(Pass::Main, Format::Int4Row)), 373.8);
        assert_eq!(gigabytes(bytes(Pass::Main, Format::Int4Grouped { group_size: 64 })), 419.3);
        assert_eq!(gigabytes(bytes(Pass::Main, Format::Int4Row) + bytes(Pass::Mtp, Format::Int8Row)), 383.7);
    }

    #[test]
    fn every_class_has_its_names() {
        let census = Census::of(&config(GLM));
        let class = |name: &str| census.role(name).map(|role| role.class);
        assert_eq!(class("lm_head.weight"), Some(Class::Io));
        assert_eq!(class("model.layers.77.mlp.experts.255.up_proj.weight"), Some(Class::X));
        assert_eq!(class("model.layers.78.mlp.experts.255.up_proj.weight"), Some(Class::Mtp));
        assert_eq!(class("model.layers.2.mlp.up_proj.weight"), Some(Class::Dmlp));
        assert_eq!(class("model.layers.3.mlp.up_proj.weight"), None);
        assert_eq!(class("model.layers.3.mlp.gate.weight"), Some(Class::F32));
        assert_eq!(class("model.layers.3.self_attn.o_proj.weight"), Some(Class::O));
        assert_eq!(class("model.layers.1.self_attn.indexer.wk.weight"), Some(Class::Indexer));
        assert_eq!(class("model.layers.79.input_layernorm.weight"), None);
        assert_eq!(class("model.language_model.embed_tokens.weight"), None);
        assert!(Census::dropped("model.layers.78.self_attn.indexer.wk.weight_scale_inv", &config(GLM)));
        assert!(!Census::dropped("model.layers.77.self_attn.indexer.wk.weight", &config(GLM)));
    }

    #[test]
    fn file_names_and_passes_correspond() {
        for pass in Pass::ALL {
            assert_eq!(Pass::of_file(&pass.file_name(7)), Some((pass, 7)));
        }
        assert_eq!(Pass::of_file("out-mtp-1.safetensors"), None);
        assert_eq!(Pass::of_file("model-00001-of-00002.safetensors"), None);
    }
}
