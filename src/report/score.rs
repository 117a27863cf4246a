//! `score --json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DeviceExperts, Experts, Finding, GpuRun, Refusal, Verdict};

/// `score --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "coliconv score report")]
pub struct ScoreReport {
    /// What was scored.
    pub path: String,
    /// `checkpoint` or `container`.
    pub kind: String,
    /// SHA-256 over names and hashes of its weight files and config.json.
    pub model_sha256: String,
    /// SHA-256 of its tokenizer.json.
    pub tokenizer_sha256: String,
    /// What stood before every text.
    pub prefix: String,
    /// Backend that computed.
    pub backend: String,
    /// `exact` or `fast`.
    pub mode: String,
    /// Which part of the run, for one `2/8`; its figures are those of the whole only after `--finish`, so it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// What was scored, in the order of the report.
    pub inputs: Vec<ScoreInput>,
    /// `pass` when all thresholds are met and every row was compared; null without a threshold.
    pub verdict: Option<Verdict>,
    /// The tasks, in the order of the command line.
    pub tasks: Vec<ScoreTask>,
    /// The texts, in the order of the command line.
    pub texts: Vec<ScoreText>,
    /// Every continuation: first those of the request file, then those of tasks and texts, each in order.
    pub requests: Vec<ScoreRequest>,
    /// The comparison with the baseline; null without one.
    pub baseline: Option<ScoreBaseline>,
    /// What the model does when it generates; null without `--probes`, and where it gives logits that are not finite, as an
    /// error among `warnings` says.
    pub probes: Option<ScoreProbes>,
    /// Rows that got no score.
    pub excluded: Vec<ScoreExcluded>,
    /// Tokens that went through the layers in this run; what texts share is counted once.
    pub tokens: u64,
    /// Duration of this run.
    pub seconds: f64,
    /// Of that, time of reading and loading the model.
    pub loading_seconds: f64,
    /// Tokens through the layers per second, loading left out; null when nothing was computed.
    pub tokens_per_second: Option<f64>,
    /// What that time went into; null when nothing was computed.
    pub shares: Option<ScoreShares>,
    /// What reading routed experts took, probes included; null where all of them were on a device, or nothing was computed.
    pub experts: Option<Experts>,
    /// What keeping routed experts on a GPU took that has no room for all of them; absent elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_experts: Option<DeviceExperts>,
    /// What ran on the GPU, probes included; absent on other devices, and where nothing was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuRun>,
    /// Largest anonymous memory seen while scoring, in bytes; null where nothing was scored or the system does not tell.
    pub peak_anonymous_bytes: Option<u64>,
    /// What was accepted although it is odd, and why the model did not generate.
    pub warnings: Vec<Finding>,
}

/// Shares of the time in which a model computed, loading left out: with a model as baseline, of both.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreShares {
    /// Routed experts, waiting for the disk left out.
    pub experts: f64,
    /// Attention and the choice of positions.
    pub attention: f64,
    /// All other products with matrices: projections, shared experts, the output head.
    pub products: f64,
    /// Waiting for experts from the disk.
    pub disk: f64,
}

/// A file that was scored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreInput {
    /// Its name.
    pub name: String,
    /// `requests`, `task` or `text`.
    pub kind: String,
    /// The file.
    pub file: String,
    /// SHA-256 of the file.
    pub sha256: String,
    /// Rows of the file.
    pub rows: u64,
    /// Of these, rows that were to be scored, those without a score (`excluded`) counted.
    pub scored_rows: u64,
    /// Most rows to be scored; null for all.
    pub limit: Option<u64>,
    /// Seed of the draw; null without a limit.
    pub seed: Option<u64>,
}

impl ScoreInput {
    /// `15 rows`, or of a sample `4 of 15 rows, seed 1`.
    pub fn rows_text(&self) -> String {
        match self.seed {
            Some(seed) => format!("{} of {} rows, seed {seed}", self.scored_rows, self.rows),
            None => format!("{} rows", self.rows),
        }
    }
}

/// How a model did on a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreTask {
    /// Its name.
    pub task: String,
    /// How rows became questions: `plain`, `hellaswag`, `arc`, `mmlu`, `winogrande` or `piqa`.
    pub template: String,
    /// Questions with a score.
    pub n: u64,
    /// Questions without one.
    pub excluded: u64,
    /// Share of questions whose right choice has the largest log-probability; of equals the first counts.
    pub acc: f64,
    /// The same by log-probability per character, a leading space counted.
    pub acc_norm: f64,
    /// The same by log-probability per character, a leading space not counted: lm-evaluation-harness's acc_norm.
    pub acc_norm_harness: f64,
    /// The same by log-probability per byte, a leading space not counted: lm-evaluation-harness's acc_bytes.
    pub acc_bytes: f64,
    /// The same by log-probability per byte, a leading space counted.
    pub acc_norm_bytes: f64,
    /// Standard error of `acc`; null for a single question.
    pub stderr: Option<f64>,
    /// Standard error of `acc_norm`.
    pub stderr_norm: Option<f64>,
    /// 95 % interval of `acc` (Wilson).
    pub interval: (f64, f64),
    /// 95 % interval of `acc_norm`.
    pub interval_norm: (f64, f64),
    /// Tokens that were scored.
    pub tokens: u64,
}

/// How well a model predicts a text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreText {
    /// Its name.
    pub name: String,
    /// Documents with a score.
    pub documents: u64,
    /// Documents without one.
    pub excluded: u64,
    /// Tokens that were predicted.
    pub tokens: u64,
    /// Bytes of the documents, the prefix not counted.
    pub bytes: u64,
    /// −Σ ln p, in nats.
    pub nll: f64,
    /// nll / tokens.
    pub nll_per_token: f64,
    /// Its standard error, documents drawn at random; null for a single one.
    pub stderr: Option<f64>,
    /// exp(nll / tokens).
    pub ppl: f64,
    /// nll / (bytes · ln 2).
    pub bits_per_byte: f64,
}

/// What a continuation got.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreRequest {
    /// Name of the task, text or request file.
    pub input: String,
    /// Number of the row, from 1.
    pub row: u64,
    /// Number of the choice, from 0; null where there are none.
    pub choice: Option<u64>,
    /// Σ ln p(token | everything before it); null if the row was excluded.
    pub logprob: Option<f64>,
    /// Tokens that were scored.
    pub tokens: Option<u64>,
    /// Whether each of them was the model's best.
    pub greedy: Option<bool>,
}

/// A row that got no score.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreExcluded {
    /// Name of the task, text or request file.
    pub input: String,
    /// The file.
    pub file: String,
    /// Number of the row, from 1.
    pub row: u64,
    /// What kind of reason, in kebab-case.
    pub kind: String,
    /// What was expected and found.
    pub message: String,
    /// What a person can do.
    pub hint: Option<String>,
}

/// A model and its baseline on the same rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreBaseline {
    /// The baseline.
    pub path: String,
    /// `results`, `checkpoint` or `container`.
    pub kind: String,
    /// What the scored model is, `checkpoint` or `container`; absent where results do not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_kind: Option<String>,
    /// Hash of its model.
    pub model_sha256: String,
    /// `exact` or `fast`; absent in reports of earlier versions, which did not tell: `publish` refuses these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// `exact`: whole distributions were compared. `top-16`: the baseline's 16 most probable tokens one by one and all
    /// others as one, which gives at most the true divergence.
    pub kl_method: String,
    /// Tokens before which both distributions were compared.
    pub positions: u64,
    /// Mean KL(baseline ‖ model), in nats; null without positions.
    pub kl_mean: Option<f64>,
    /// Its 95 % interval, rows drawn at random; null for a single one.
    pub kl_interval: Option<(f64, f64)>,
    /// The largest divergence.
    pub kl_max: Option<f64>,
    /// Share of positions where both models' best tokens are equal.
    pub top1_agreement: Option<f64>,
    /// Mean divergence by position in the text.
    pub kl_by_position: Vec<ScoreKlPositions>,
    /// How many rows of each input were compared.
    pub compared: Vec<ScoreCompared>,
    /// The tasks.
    pub tasks: Vec<ScoreTaskDifference>,
    /// The texts, and the request file.
    pub texts: Vec<ScoreTextDifference>,
    /// What `--threshold` allows.
    pub threshold: Option<f64>,
    /// What was held against the threshold.
    pub checks: Vec<ScoreCheck>,
}

/// How much of an input was compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreCompared {
    /// Task, text or request file.
    pub name: String,
    /// Rows that were to be scored.
    pub rows: u64,
    /// Of these, rows that both models gave a score.
    pub compared: u64,
}

impl ScoreCompared {
    /// Whether no row is left out.
    pub fn is_whole(&self) -> bool {
        self.compared == self.rows
    }

    /// `3 of 12 rows were compared, …`
    pub fn text(&self) -> String {
        format!("{} of {} rows were compared, the others have no score of both models", self.compared, self.rows)
    }
}

/// Mean divergence of some positions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreKlPositions {
    /// Scored tokens before the first position.
    pub from: u64,
    /// Scored tokens before the position after the last.
    pub to: u64,
    /// Positions of all texts together.
    pub count: u64,
    /// Mean KL(baseline ‖ model), in nats.
    pub kl_mean: f64,
}

/// A task with two models.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreTaskDifference {
    /// Its name.
    pub task: String,
    /// Questions that both models answered.
    pub n: u64,
    /// By the largest log-probability.
    pub acc: ScorePaired,
    /// By log-probability per character.
    pub acc_norm: ScorePaired,
    /// Questions whose answer became right or wrong: first by `acc`, then by `acc_norm`.
    pub flipped: Vec<ScoreFlipped>,
}

/// A paired difference of two accuracies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScorePaired {
    /// Of the baseline.
    pub baseline: f64,
    /// Of the model.
    pub model: f64,
    /// Model minus baseline.
    pub difference: f64,
    /// Its 95 % interval (Bonett and Price).
    pub interval: (f64, f64),
    /// Questions that only the model answers right.
    pub gained: u64,
    /// Questions that only the baseline answers right.
    pub lost: u64,
    /// McNemar's exact test: how probable so uneven changes are if neither model is better.
    pub mcnemar: f64,
}

/// A question whose answer changed from right to wrong or back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreFlipped {
    /// By which answer: `acc` or `acc_norm`.
    pub metric: String,
    /// Number of the row, from 1.
    pub row: u64,
    /// The right choice, from 0.
    pub gold: u64,
    /// The baseline's.
    pub baseline: u64,
    /// The model's.
    pub model: u64,
}

/// A text with two models.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreTextDifference {
    /// Its name.
    pub name: String,
    /// Documents, or requests.
    pub documents: u64,
    /// Perplexity of the baseline.
    pub baseline: f64,
    /// Perplexity of the model.
    pub model: f64,
    /// Model over baseline.
    pub ratio: f64,
    /// Its 95 % interval, documents drawn at random; null for a single one.
    pub interval: Option<(f64, f64)>,
}

/// Something that was held against the threshold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreCheck {
    /// Task, text or request file.
    pub name: String,
    /// `acc`, `acc_norm` or `ppl`.
    pub metric: String,
    /// How much worse than the baseline: a difference of accuracies, or a ratio of perplexities minus 1; null if no row
    /// was compared.
    pub worse_by: Option<f64>,
    /// Rows that were to be scored.
    pub rows: u64,
    /// Of these, rows that both models gave a score.
    pub compared: u64,
    /// Whether every row was compared, and `worse_by` is within the threshold.
    pub met: bool,
    /// Whether every row was compared, and the whole 95 % interval is on the same side of the threshold.
    pub conclusive: bool,
}

/// What a model does when it generates by itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreProbes {
    /// Most tokens of each text.
    pub max_tokens: u64,
    /// Texts that ended with a stop id.
    pub stopped: u64,
    /// Texts that ended in a repetition.
    pub repeated: u64,
    /// Texts with U+FFFD in them.
    pub with_replacement_characters: u64,
    /// Drafts of the MTP head; null without one.
    pub mtp: Option<ScoreDrafts>,
    /// Each text.
    pub texts: Vec<ScoreProbe>,
}

/// Drafts of the MTP head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreDrafts {
    /// Format of `eh_proj`.
    pub format: String,
    /// Drafts that were verified.
    pub proposed: u64,
    /// Of these, right.
    pub accepted: u64,
    /// accepted / proposed; null without drafts.
    pub acceptance: Option<f64>,
}

/// One generated text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreProbe {
    /// What was given.
    pub prompt: String,
    /// What followed.
    pub text: String,
    /// Tokens that followed.
    pub tokens: u64,
    /// `stop_id`, `length` or `repetition`.
    pub stop_reason: String,
    /// Different runs of 1, 2, 3 and 4 tokens, as shares of all such runs; null for a text that is too short.
    pub distinct: [Option<f64>; 4],
    /// Tokens after which the end repeats itself at least three times; null if it does not.
    pub period: Option<u64>,
    /// U+FFFD in the text, one at its very end not counted: a character may go on there.
    pub replacement_characters: u64,
}

/// Either document of `score --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(title = "coliconv score --json")]
pub enum ScoreDocument {
    /// It ran.
    Report(Box<ScoreReport>),
    /// It could not run.
    Refusal(Refusal),
}
