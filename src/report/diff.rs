//! `diff --json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Finding, Refusal};
use crate::tensor::Shape;

/// `diff --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "coliconv diff report")]
pub struct DiffReport {
    /// The first model.
    pub a: DiffSide,
    /// The second model.
    pub b: DiffSide,
    /// Which of them the signal of `sqnr_db` is taken from: a checkpoint where there is just one, else the first.
    pub reference: Side,
    /// Whether both have the same tensors, stored in the same bytes.
    pub identical: bool,
    /// The tensors that both have, the worst first: those that cannot be compared, then by rising `sqnr_db`, then those of
    /// equal values, then those of the same bytes; by name among equals.
    pub tensors: Vec<DiffTensor>,
    /// The same by class and formats.
    pub classes: Vec<DiffClass>,
    /// Names of tensors that only the first model has.
    pub only_in_a: Vec<String>,
    /// Names of tensors that only the second model has.
    pub only_in_b: Vec<String>,
    /// Stored bytes of the compared tensors, of both models together.
    pub bytes: u64,
    /// Duration.
    pub seconds: f64,
    /// What is odd about either model.
    pub warnings: Vec<Finding>,
}

/// One of the two models.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiffSide {
    /// Its directory.
    pub path: String,
    /// `checkpoint` or `container`.
    pub kind: String,
}

/// The first model or the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The first.
    A,
    /// The second.
    B,
}

/// A tensor of both models. Measures are over the elements that are finite in both.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DiffTensor {
    /// Its name.
    pub name: String,
    /// Its class; null where the model has no such tensor.
    pub class: Option<String>,
    /// Its logical shape; null where it is unknown.
    pub shape: Option<Shape>,
    /// Whether it is stored the same way in the same bytes, scales included.
    pub same_bytes: bool,
    /// Whether every element has the same value; two NaN count as the same. Null where the values were not compared.
    pub same_values: Option<bool>,
    /// Format in the first model; `bf16` and `f16` for what is stored so.
    pub format_a: String,
    /// Format in the second model.
    pub format_b: String,
    /// Elements that share a scale in the first model, where the format has groups.
    pub group_size_a: Option<u64>,
    /// Elements that share a scale in the second model, where the format has groups.
    pub group_size_b: Option<u64>,
    /// Largest difference of two elements; null where the values were not compared.
    pub max_abs_err: Option<f64>,
    /// Root of the mean squared difference; null where the values were not compared.
    pub rmse: Option<f64>,
    /// Cosine of the angle between both as vectors; null where one of them is zero or the values were not compared.
    pub cosine: Option<f64>,
    /// Signal of the reference to noise in decibels; null where there is no noise or no signal.
    pub sqnr_db: Option<f64>,
    /// Elements that are NaN or infinite in one model and another value in the other.
    pub non_finite: u64,
    /// Where the largest difference is; null where there is none.
    pub worst: Option<DiffElement>,
    /// Why the values could not be compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// An element in both models.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DiffElement {
    /// Its row; 0 for a vector.
    pub row: u64,
    /// Its column.
    pub column: u64,
    /// Its value in the first model.
    pub a: f32,
    /// Its value in the second model.
    pub b: f32,
}

/// The tensors of a class that have the same formats.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DiffClass {
    /// The class; null for tensors that the model does not have.
    pub class: Option<String>,
    /// Format in the first model.
    pub format_a: String,
    /// Format in the second model.
    pub format_b: String,
    /// Elements that share a scale in the first model, where the format has groups.
    pub group_size_a: Option<u64>,
    /// Elements that share a scale in the second model, where the format has groups.
    pub group_size_b: Option<u64>,
    /// Tensors.
    pub tensors: u64,
    /// Those of the same bytes.
    pub same_bytes: u64,
    /// Largest difference of two elements; null where no values were compared.
    pub max_abs_err: Option<f64>,
    /// Root of the mean squared difference over the elements of tensors that differ; null where no values were compared.
    pub rmse: Option<f64>,
    /// Signal to noise of the tensors that differ, in decibels, as if they were one; null where there is no noise or no
    /// signal.
    pub sqnr_db: Option<f64>,
    /// The lowest of its tensors; null where there is none.
    pub worst_sqnr_db: Option<f64>,
}

/// Either document of `diff --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(title = "coliconv diff --json")]
pub enum DiffDocument {
    /// It ran.
    Report(Box<DiffReport>),
    /// It could not run.
    Refusal(Refusal),
}
