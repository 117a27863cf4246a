//! `bench --json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DeviceExperts, Experts, Refusal};

/// `bench --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "coliconv bench report")]
pub struct BenchReport {
    /// What was measured.
    pub target: String,
    /// The processor, where the system tells.
    pub cpu: Option<String>,
    /// The operating system's kernel, where the system tells.
    pub kernel: Option<String>,
    /// Where it was computed, as `--device` names it.
    pub device: String,
    /// The GPU's own name, with its driver; null on the CPU.
    pub gpu: Option<String>,
    /// What model is decoded or scored with; null where none is.
    pub model: Option<String>,
    /// Threads that worked.
    pub threads: u64,
    /// The measures, in the order in which they were taken.
    pub measures: Vec<BenchMeasure>,
}

/// One measure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BenchMeasure {
    /// What was done.
    pub name: String,
    /// Median duration; of work on one core (quantizing, its SHA-256) the time on that core.
    pub seconds: f64,
    /// Shortest duration: what other programs on the machine disturbed least. Rates are by this one.
    pub fastest_seconds: f64,
    /// Repetitions.
    pub rounds: u64,
    /// Bytes that went through; null where that is not the point.
    pub bytes: Option<u64>,
    /// 10^9 bytes a second; null without bytes.
    pub gb_per_second: Option<f64>,
    /// Header entries that were read; null where that is not the point.
    pub entries: Option<u64>,
    /// Weights that were converted; null where that is not the point.
    pub weights: Option<u64>,
    /// 10^9 weights a second that one core worked; null without weights.
    pub g_weights_per_second: Option<f64>,
    /// 10^9 products and sums a second; null where that is not the point.
    pub gflop_per_second: Option<f64>,
    /// Seconds of all cores together in the round that took the fewest; null where that is not the point.
    pub cpu_seconds: Option<f64>,
    /// 10^9 weights by these seconds.
    pub g_weights_per_cpu_second: Option<f64>,
    /// Tokens a second in the fastest round, of scoring those that went through the layers; null where that is not the point.
    pub tokens_per_second: Option<f64>,
    /// Tokens a second when what texts share is counted as often as it is written out; null but for scoring.
    pub written_out_tokens_per_second: Option<f64>,
    /// What the weights that a token needs take, in bytes; null where that is not the point.
    pub token_bytes: Option<BenchTokenBytes>,
    /// Kernels that are started for what `seconds` are of, or, of decoding, for a token; null on the CPU.
    pub launches: Option<f64>,
    /// Seconds in which the host waited for the GPU's answers, of all rounds; null where that is not the point.
    pub wait_seconds: Option<f64>,
    /// Whose clock measured: `device` or `host`; null on the CPU.
    pub clock: Option<String>,
    /// What reading routed experts on demand took in all rounds; null where that is not the point.
    pub experts: Option<Experts>,
    /// The same of a GPU that has routed experts in tiers; null where it has all of them.
    #[serde(default)]
    pub device_experts: Option<DeviceExperts>,
    /// Largest anonymous memory seen, in bytes; null where that is not the point.
    pub peak_anonymous_bytes: Option<u64>,
    /// The measure that limits this one.
    pub limit: Option<String>,
    /// Its rate by that of its limit in the same round: the median of all rounds.
    pub of_limit: Option<f64>,
    /// The measure of the plain way to do the same.
    pub baseline: Option<String>,
    /// Its rate by that of its baseline, each in its fastest round.
    pub of_baseline: Option<f64>,
}

/// Bytes of the weights that the forward pass of one token reads, each once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BenchTokenBytes {
    /// Projections of attention, and the indexers.
    pub attention: u64,
    /// MLPs of dense layers.
    pub dense: u64,
    /// Shared experts.
    pub shared: u64,
    /// Routed experts that are chosen.
    pub routed: u64,
    /// The output head.
    pub head: u64,
    /// Norms, routers and biases.
    pub other: u64,
}

impl BenchTokenBytes {
    /// All together.
    pub fn total(&self) -> u64 {
        let BenchTokenBytes { attention, dense, shared, routed, head, other } = self;
        attention + dense + shared + routed + head + other
    }
}

/// Either document of `bench --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(title = "coliconv bench --json")]
pub enum BenchDocument {
    /// It ran.
    Report(BenchReport),
    /// It could not run.
    Refusal(Refusal),
}
