//! `generate --json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DeviceExperts, Experts, Finding, GpuRun, Refusal};

/// `generate --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "coliconv generate report")]
pub struct GenerateReport {
    /// The model.
    pub path: String,
    /// `checkpoint` or `container`.
    pub kind: String,
    /// Device that was asked for.
    pub device: String,
    /// Backend that computed.
    pub backend: String,
    /// The device's own name.
    pub backend_device: String,
    /// `exact` or `fast`.
    pub mode: String,
    /// The prompt as it was encoded, with its prefix or as the chat template rendered it; null with `--prompt-ids`.
    pub prompt: Option<String>,
    /// The ids of the prompt.
    pub prompt_ids: Vec<u32>,
    /// The ids that the model said; a stop id that ended the text is the last of them.
    pub ids: Vec<u32>,
    /// Their text without that stop id; other special tokens are spelled out.
    pub text: String,
    /// Bytes of a character that the last tokens began and did not finish: they are in no text.
    pub unfinished_bytes: u64,
    /// Why the text ended.
    pub stop_reason: GenerateStop,
    /// Most tokens that the text was to have.
    pub max_tokens: u64,
    /// What logits were divided by; 0 for the best token each time.
    pub temperature: f64,
    /// The least probability of the tokens that could be drawn, all together; null at temperature 0.
    pub top_p: Option<f64>,
    /// Seed of the draws; null at temperature 0.
    pub seed: Option<u64>,
    /// Drafts of the MTP head.
    pub draft: GenerateDraft,
    /// Tokens per second after the first one; null where there is no second.
    pub tokens_per_second: Option<f64>,
    /// Tokens of the prompt per second, up to the first token of the text.
    pub prompt_tokens_per_second: f64,
    /// Duration of all.
    pub seconds: f64,
    /// Of that, time of reading and loading the model.
    pub loading_seconds: f64,
    /// Time from there to the first token of the text.
    pub prompt_seconds: f64,
    /// Time of the tokens after the first.
    pub decoding_seconds: f64,
    /// Largest anonymous memory seen after loading and after each step, in bytes; null where the system does not tell.
    pub peak_anonymous_bytes: Option<u64>,
    /// What reading routed experts on demand took; absent where all of them are on the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
    /// What keeping routed experts on a GPU took that has no room for all of them; absent elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_experts: Option<DeviceExperts>,
    /// What ran on the GPU; absent on other devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuRun>,
    /// What was accepted although it is odd.
    pub warnings: Vec<Finding>,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GenerateStop {
    /// The model said one of its stop ids, those of config.json and generation_config.json.
    StopId,
    /// It had `max_tokens` tokens.
    Length,
    /// It ended with the same at least three times, in at least 24 tokens.
    Repetition,
}

/// Drafts of the MTP head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GenerateDraft {
    /// Most drafts before each verification; 0 for none.
    pub most: u64,
    /// Drafts that were verified.
    pub proposed: u64,
    /// Of these, drafts that were right.
    pub accepted: u64,
    /// accepted / proposed; null without drafts.
    pub acceptance: Option<f64>,
}

/// Either document of `generate --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(title = "coliconv generate --json")]
pub enum GenerateDocument {
    /// It ran.
    Report(Box<GenerateReport>),
    /// It could not run.
    Refusal(Refusal),
}
