//! `verify --json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DeviceExperts, Experts, Finding, GpuRun, Refusal};

/// `verify --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "coliconv verify report")]
pub struct VerifyReport {
    /// What was verified.
    pub path: String,
    /// `checkpoint` or `container`.
    pub kind: String,
    /// How far: `structure`, `payload`, `weights` or `tokens`; each includes those before it.
    pub level: String,
    /// The checkpoint that the weights were compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Hash of its model, as `score` has it; where the weights are those of the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_model_sha256: Option<String>,
    /// SHA-256 over names and hashes of weight files and config.json, as `score` has it; from the level payload on, where
    /// every file is as the manifest says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_sha256: Option<String>,
    /// The files that were hashed, all as the manifest says, by name; the verdict is about these bytes. A model card that
    /// `publish` made is left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<VerifyFile>,
    /// SHA-256 of what the manifest says, but for the records of the cards: the verdict is about this, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest_sha256: Option<String>,
    /// `pass` when no check failed.
    pub verdict: Verdict,
    /// What was checked, in order.
    pub checks: Vec<VerifyCheck>,
    /// One entry for each reference and device, in order.
    pub tokens: Vec<VerifyTokens>,
    /// How often the source says the same; null where it was not run.
    pub source_agreement: Option<VerifyAgreement>,
    /// Drafts along a text of the model's own; absent without an MTP head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_drafts: Option<VerifyOwnDrafts>,
    /// What reading the model's routed experts on demand took, all references together; absent where all of them were
    /// on a device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
    /// What keeping routed experts on a GPU took that has no room for all of them; absent elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_experts: Option<DeviceExperts>,
    /// Everything that was found; errors are why a check failed.
    pub findings: Vec<Finding>,
    /// Bytes read at the levels above `structure`.
    pub bytes_read: u64,
    /// Duration; where parts were joined, that of all of them together.
    pub seconds: f64,
    /// Which part of a verification this is; absent where it is whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<VerifyPart>,
}

/// A part of a verification.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyPart {
    /// `2/8`
    pub part: String,
    /// What all parts of one verification have in common: level, model, source, references, devices.
    pub binding: Vec<VerifyBinding>,
    /// What `verify --finish` joins; its form may be another in every version.
    pub share: serde_json::Value,
}

/// Something that parts have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyBinding {
    /// What.
    pub what: String,
    /// A name, or hashes.
    pub value: String,
}

/// A file of [`VerifyReport`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyFile {
    /// File name.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256, hexadecimal.
    pub sha256: String,
}

/// The answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Good.
    Pass,
    /// Not good.
    Fail,
}

impl Verdict {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Fail => "fail",
        }
    }
}

/// One thing that was checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyCheck {
    /// What.
    pub name: String,
    /// How it ended.
    pub status: CheckStatus,
    /// What was looked at, or how much is wrong, or why it was left out.
    pub detail: String,
}

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    /// Nothing is wrong; there may be warnings.
    Pass,
    /// At least one error.
    Fail,
    /// There was nothing to check, or it could not be checked.
    Skipped,
}

impl CheckStatus {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            CheckStatus::Pass => "pass",
            CheckStatus::Fail => "fail",
            CheckStatus::Skipped => "skipped",
        }
    }
}

/// The tokens of one reference on one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyTokens {
    /// File of the reference.
    pub reference: String,
    /// Which of the file's references, from 0.
    pub number: u64,
    /// Hash of the model that wrote the reference, as the reference says; absent where it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_by: Option<String>,
    /// Device that was asked for.
    pub device: String,
    /// Backend that computed; `reference` is the plain one, which stands in for devices without kernels of their own.
    pub backend: String,
    /// `exact` or `fast`.
    pub mode: String,
    /// Predictions with the reference's own text before them; null where the reference has none.
    pub teacher_forced: Option<VerifyTeacherForced>,
    /// Predictions with the model's own text before them; null where the reference is not the model's own text.
    pub greedy: Option<VerifyGreedy>,
    /// Largest difference of a log-probability; null where the reference has none.
    pub max_abs_logprob_diff: Option<f64>,
    /// Drafts of the MTP head; null without one.
    pub mtp: Option<VerifyDrafts>,
    /// What a GPU did; null for a CPU.
    pub gpu: Option<GpuRun>,
}

/// Predictions of a model and of its source along the same texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyAgreement {
    /// Equal best tokens.
    pub matched: u64,
    /// All.
    pub total: u64,
    /// Mean difference of the log-probabilities of the texts' tokens.
    pub mean_abs_logprob_diff: Option<f64>,
}

/// Teacher-forced predictions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyTeacherForced {
    /// Equal to the reference.
    pub matched: u64,
    /// Another token of nearly the same logit.
    pub near_tie: u64,
    /// All.
    pub total: u64,
}

/// Greedy predictions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyGreedy {
    /// Equal to the reference.
    pub matched: u64,
    /// All.
    pub total: u64,
}

/// Drafts of the MTP head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyDrafts {
    /// Equal to the reference's drafts.
    pub matched: u64,
    /// Drafts of the reference.
    pub total: u64,
    /// Drafts made while generating.
    pub proposed: u64,
    /// Of these, accepted.
    pub accepted: u64,
}

/// Drafts of the MTP head along a text of the model's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyOwnDrafts {
    /// Drafts.
    pub proposed: u64,
    /// Of these, the token that the model itself said.
    pub accepted: u64,
}

/// Either document of `verify --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(title = "coliconv verify --json")]
pub enum VerifyDocument {
    /// It ran.
    Report(Box<VerifyReport>),
    /// It could not run.
    Refusal(Refusal),
}
