//! `pipeline --json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ConvertReport, Finding, PublishReport, Refusal, ScoreReport, Verdict, VerifyReport};

/// `pipeline --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "coliconv pipeline report")]
pub struct PipelineReport {
    /// File of the pipeline.
    pub pipeline: String,
    /// The container.
    pub container: String,
    /// Directory of the reports.
    pub reports: String,
    /// `pass` when every step said yes.
    pub verdict: Verdict,
    /// The steps, in order.
    pub steps: Vec<PipelineStep>,
    /// The report of the conversion; null where it did not come to it.
    pub convert: Option<ConvertReport>,
    /// The report of the verification.
    pub verify: Option<VerifyReport>,
    /// The report of the scores, without its requests: score.json has them.
    pub score: Option<ScoreReport>,
    /// The report of the gate and the upload plan.
    pub publish: Option<PublishReport>,
    /// What of the pipeline is odd, beside what the steps themselves report.
    #[serde(default)]
    pub warnings: Vec<Finding>,
    /// Duration.
    pub seconds: f64,
}

/// A step of [`PipelineReport`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PipelineStep {
    /// `convert`, `verify`, `score-source`, `score` or `publish`.
    pub step: String,
    /// How it ended.
    pub status: StepStatus,
    /// What came of it, or why it was left out.
    pub detail: String,
    /// Its report; null where it has none.
    pub report: Option<String>,
    /// Duration.
    pub seconds: f64,
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StepStatus {
    /// It ran and said yes.
    Done,
    /// An earlier run did it, on the same bytes with the same options.
    Kept,
    /// It ran and said no; nothing follows.
    Failed,
    /// It was not come to, or not wanted.
    Skipped,
}

impl StepStatus {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            StepStatus::Done => "done",
            StepStatus::Kept => "kept",
            StepStatus::Failed => "failed",
            StepStatus::Skipped => "skipped",
        }
    }
}

/// Either document of `pipeline --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(title = "coliconv pipeline --json")]
pub enum PipelineDocument {
    /// It ran.
    Report(Box<PipelineReport>),
    /// It could not run.
    Refusal(Refusal),
}
