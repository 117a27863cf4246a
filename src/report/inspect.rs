//! `inspect --json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Finding, Refusal};

/// What a path is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A directory of source weights.
    Checkpoint,
    /// A directory of converted weights.
    Container,
    /// One .safetensors file.
    File,
}

impl Kind {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Checkpoint => "checkpoint",
            Kind::Container => "container",
            Kind::File => "file",
        }
    }
}

/// `inspect --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "coliconv inspect report")]
pub struct InspectReport {
    /// What the path is.
    pub kind: Kind,
    /// `model_type` of config.json, if that could be read.
    pub model_type: Option<String>,
    /// Hidden layers by config.json.
    pub layers: Option<u64>,
    /// Routed experts of a layer by config.json.
    pub experts: Option<u64>,
    /// The MTP head.
    pub mtp: Mtp,
    /// Whether there is a DSA indexer.
    pub indexer: bool,
    /// The weight files.
    pub files: Vec<InspectFile>,
    /// The weights that were asked for; scales are part of their weight.
    pub tensors: Vec<InspectTensor>,
    /// Totals of all weights, by class and format.
    pub totals: Vec<Total>,
    /// What is wrong or odd.
    pub findings: Vec<Finding>,
}

/// The MTP head of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Mtp {
    /// Whether any of it is there.
    pub present: bool,
    /// Format of its `eh_proj`, where that is there and its format known.
    pub format: Option<String>,
}

/// A weight file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct InspectFile {
    /// File name.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// Tensors in its header; null where that could not be read.
    pub tensors: Option<u64>,
}

/// A weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InspectTensor {
    /// Its name.
    pub name: String,
    /// The file that holds it.
    pub file: String,
    /// Element type of the stored tensor.
    pub dtype: String,
    /// Shape of the stored tensor.
    pub stored_shape: Vec<u64>,
    /// Logical shape: of config.json, or as stored where the elements are not packed.
    pub shape: Option<Vec<u64>>,
    /// Its class; null for a tensor that the model does not have.
    pub class: Option<String>,
    /// Its format; null where it is not known.
    pub format: Option<String>,
    /// Elements that share a scale, where the format has groups.
    pub group_size: Option<u64>,
    /// Every format that the bytes fit, group sizes in parentheses.
    pub candidates: Vec<String>,
    /// Offset of the stored tensor in its file.
    pub offset: u64,
    /// Bytes of the stored tensor.
    pub bytes: u64,
    /// Bytes of its scales; 0 for none.
    pub scale_bytes: u64,
    /// Statistics of its values, with `--stats` or `--histogram`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stats: Option<Stats>,
    /// Dequantized values, with `--values` or `--row`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub values: Option<Values>,
}

/// Statistics of a weight's values; null where there is no finite value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Stats {
    /// Smallest finite value.
    pub min: Option<f32>,
    /// Largest finite value.
    pub max: Option<f32>,
    /// Mean of the finite values.
    pub mean: Option<f64>,
    /// Root of the mean square of the finite values.
    pub rms: Option<f64>,
    /// Rows that are zero throughout.
    pub zero_rows: u64,
    /// Values that are NaN or infinite.
    pub non_finite: u64,
    /// Smallest scale.
    pub scale_min: Option<f32>,
    /// Largest scale.
    pub scale_max: Option<f32>,
    /// How often each level was seen, of formats that have levels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub levels: Option<Vec<LevelCount>>,
    /// Share of elements at the largest or smallest level that a symmetric quantizer writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_share: Option<f64>,
    /// Values in equal steps from `min` to `max`, with `--histogram`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bins: Option<Vec<u64>>,
}

/// How often a level was seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LevelCount {
    /// The level: the code without its offset.
    pub level: i16,
    /// Elements.
    pub count: u64,
}

/// Values of one row; a vector is one row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Values {
    /// The row.
    pub row: u64,
    /// Its first values; null for NaN and infinity.
    pub values: Vec<Option<f32>>,
}

/// Weights of one class and format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Total {
    /// The class; null for tensors that the model does not have.
    pub class: Option<String>,
    /// The format; null where it is not known.
    pub format: Option<String>,
    /// Elements that share a scale, where the format has groups.
    pub group_size: Option<u64>,
    /// Weights.
    pub tensors: u64,
    /// Their bytes, scales included.
    pub bytes: u64,
}

/// Either document of `inspect --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(title = "coliconv inspect --json")]
pub enum InspectDocument {
    /// It ran.
    Report(Box<InspectReport>),
    /// It could not run.
    Refusal(Refusal),
}
