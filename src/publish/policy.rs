//! The policy: how good a container must be to be published. What is left out has a default that no sound container of a
//! large model misses.
//!
//! The defaults tell wrecks from containers, on few rows, and no more. Of the small model that comes with the program, int4 has
//! 46 to 50 of 64 predictions in common with the source, and diverges from it by 0.19 to 0.25 nats; int3 39, and 0.56; int2
//! experts, which are of no use, 3, and 5.1. Larger models lose less. Ten questions and a hundred tokens are the least of which
//! a figure says anything.

use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::notes;
use crate::error::{Fault, FaultKind, Place, Result, escaped};
use crate::io::read_small;
use crate::json::{Object, repeated_key};
use crate::limits;

/// What must hold before a container is published.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(title = "coliconv publish policy")]
pub struct Policy {
    /// Of verification.
    pub verify: VerifyPolicy,
    /// Of scores.
    pub score: ScorePolicy,
    /// Of the model card.
    pub card: CardPolicy,
}

/// What verification must have shown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct VerifyPolicy {
    /// Whether every weight must have been compared with the source.
    pub weights: bool,
    /// Devices that must have computed: `cpu`, `cuda`, `vulkan`, `reference`.
    pub devices: Vec<String>,
    /// Fewest devices.
    #[schemars(range(min = 1))]
    pub min_devices: u64,
    /// Fewest references of another origin than the program's own plain backend. A comparison with the source's
    /// predictions counts as one.
    #[schemars(range(min = 1))]
    pub min_references: u64,
    /// Fewest predictions that were compared, all references and the source together; another device counts once.
    #[schemars(range(min = 1))]
    pub min_predictions: u64,
    /// Largest share of predictions that are near-ties.
    #[schemars(range(min = 0, max = 1))]
    pub max_near_tie_share: f64,
    /// Largest difference of a log-probability; null leaves it to `verify`.
    #[schemars(range(min = 0))]
    pub max_abs_logprob_diff: Option<f64>,
    /// Smallest share of predictions that are those of the source. Null is half of them where the
    /// source was run, and no demand that it was.
    #[schemars(range(min = 0, max = 1))]
    pub min_source_agreement: Option<f64>,
    /// Smallest share of the MTP head's drafts that are accepted, where any were proposed.
    #[schemars(range(min = 0, max = 1))]
    pub min_mtp_acceptance: f64,
}

impl Default for VerifyPolicy {
    fn default() -> Self {
        VerifyPolicy {
            weights: false,
            devices: Vec::new(),
            min_devices: 1,
            min_references: 1,
            min_predictions: 100,
            max_near_tie_share: 0.05,
            max_abs_logprob_diff: None,
            min_source_agreement: None,
            min_mtp_acceptance: 0.1,
        }
    }
}

/// What scores must have shown, against the source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ScorePolicy {
    /// Fewest tasks.
    pub min_tasks: u64,
    /// Fewest texts.
    pub min_texts: u64,
    /// Fewest questions of every task.
    pub min_questions: u64,
    /// Fewest predicted tokens of every text.
    pub min_tokens: u64,
    /// By how much `acc` and `acc_norm` of a task may be lower than the baseline's.
    #[schemars(range(min = 0, max = 1))]
    pub max_accuracy_drop: f64,
    /// By which share the perplexity of a text may be higher than the baseline's.
    #[schemars(range(min = 0))]
    pub max_perplexity_increase: f64,
    /// Largest mean divergence of the distributions, in nats; null for any.
    #[schemars(range(min = 0))]
    pub max_kl_mean: Option<f64>,
    /// Smallest share of positions where the best token is the baseline's; null for any.
    #[schemars(range(min = 0, max = 1))]
    pub min_top1_agreement: Option<f64>,
    /// Whether the whole 95 % interval must be within a threshold, and not only the figure.
    pub conclusive: bool,
    /// Whether rows may be without a score.
    pub allow_excluded: bool,
}

impl Default for ScorePolicy {
    fn default() -> Self {
        ScorePolicy {
            min_tasks: 0,
            min_texts: 0,
            min_questions: 10,
            min_tokens: 100,
            max_accuracy_drop: 0.05,
            max_perplexity_increase: 0.2,
            max_kl_mean: Some(1.0),
            min_top1_agreement: None,
            conclusive: false,
            allow_excluded: false,
        }
    }
}

/// What the model card must say.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CardPolicy {
    /// Repository of the source on the Hub; null for what the carried card says.
    pub base_model: Option<String>,
    /// Whether a licence must be known.
    pub license: bool,
    /// Words of your own, in Markdown, behind the introduction.
    pub notes: Option<String>,
}

impl Policy {
    /// Reads a policy file.
    pub fn read(path: &Path) -> Result<Policy> {
        Policy::parse(path, &read_small(path, limits::MAX_CONFIG_BYTES)?)
    }

    /// Parses the text of a policy; `path` is for messages only.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Policy> {
        let fault = |message: String| Fault::new(Place::file(path), FaultKind::PolicySyntax { message });
        let text = std::str::from_utf8(bytes).map_err(|e| fault(e.to_string()))?;
        // Left to itself serde would also take lists, with members by their position, and the last of two values.
        let object = Object::parse(text).map_err(|e| fault(e.to_string()))?;
        for (key, value) in &object.0 {
            Object::parse(value.get()).map_err(|e| fault(format!("`{}`: {e}", escaped(key))))?;
        }
        if let Some(key) = repeated_key(text) {
            return Err(fault(format!("`{}` appears twice", escaped(&key))));
        }
        let policy: Policy = serde_json::from_str(text).map_err(|e| fault(e.to_string()))?;
        match policy.out_of_range() {
            Some((key, expected)) => Err(fault(format!("`{key}`: expected {expected}"))),
            None => Ok(policy),
        }
    }

    /// The first key whose value means nothing, and what was expected.
    fn out_of_range(&self) -> Option<(&'static str, &'static str)> {
        const SHARE: &str = "a number from 0 to 1";
        let (verify, score) = (&self.verify, &self.score);
        let share = |value: f64| (0.0..=1.0).contains(&value);
        let some = |value: Option<f64>, good: fn(f64) -> bool| value.is_none_or(good);
        let known = |device: &String| ["cpu", "cuda", "vulkan", "reference"].contains(&device.as_str());
        let base = self.card.base_model.as_deref().is_none_or(|id| super::check_repo_id(id).is_ok());
        let notes = self.card.notes.as_deref().is_none_or(|text| !notes::is_open(text));
        let keys = [
            (base, "card.base_model", "ORG/NAME"),
            (notes, "card.notes", "Markdown whose code fences and comments are all closed: the card goes on behind it"),
            (verify.devices.iter().all(known), "verify.devices", "cpu, cuda, vulkan or reference"),
            (verify.min_devices >= 1, "verify.min_devices", "a number above 0"),
            (verify.min_references >= 1, "verify.min_references", "a number above 0"),
            (verify.min_predictions >= 1, "verify.min_predictions", "a number above 0"),
            (share(verify.max_near_tie_share), "verify.max_near_tie_share", SHARE),
            (some(verify.max_abs_logprob_diff, |d| d >= 0.0), "verify.max_abs_logprob_diff", "a number from 0 on"),
            (some(verify.min_source_agreement, share), "verify.min_source_agreement", SHARE),
            (share(verify.min_mtp_acceptance), "verify.min_mtp_acceptance", SHARE),
            (share(score.max_accuracy_drop), "score.max_accuracy_drop", SHARE),
            (score.max_perplexity_increase >= 0.0, "score.max_perplexity_increase", "a number from 0 on"),
            (some(score.max_kl_mean, |d| d >= 0.0), "score.max_kl_mean", "a number from 0 on"),
            (some(score.min_top1_agreement, share), "score.min_top1_agreement", SHARE),
        ];
        keys.into_iter().find_map(|(good, key, expected)| (!good).then_some((key, expected)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Policy> {
        Policy::parse(Path::new("policy.json"), text.as_bytes())
    }

    #[test]
    fn what_is_left_out_has_its_default() {
        assert_eq!(parse("{}").unwrap(), Policy::default());
        let policy = parse(r#"{"score": {"max_accuracy_drop": 0.01}, "verify": {"weights": true}}"#).unwrap();
        assert!(policy.verify.weights && policy.verify.min_devices == 1);
        assert_eq!((policy.score.max_accuracy_drop, policy.score.max_perplexity_increase), (0.01, 0.2));
    }

    #[test]
    fn what_means_nothing_is_refused_by_its_key() {
        let cases = [
            ("[]", "expected an object"),
            (r#"{"score": []}"#, "`score`: "),
            (r#"{"score": {"max_acuracy_drop": 0.1}}"#, "max_acuracy_drop"),
            (r#"{"score": {"max_accuracy_drop": 2}}"#, "`score.max_accuracy_drop`: expected a number from 0 to 1"),
            (r#"{"score": {"max_accuracy_drop": 0.5, "max_accuracy_drop": 0.1}}"#, "max_accuracy_drop` appears twice"),
            (r#"{"score": {"max_kl_mean": -1}}"#, "`score.max_kl_mean`"),
            (r#"{"verify": {"min_devices": 0}}"#, "`verify.min_devices`: expected a number above 0"),
            (r#"{"verify": {"devices": ["gpu"]}}"#, "`verify.devices`: expected cpu, cuda, vulkan or reference"),
            (r#"{"card": {"notes": "```\ncode"}}"#, "`card.notes`: expected Markdown whose code fences"),
            (r#"{"card": {"base_model": "GLM"}}"#, "`card.base_model`: expected ORG/NAME"),
            (r#"{"verify": {"min_references": 0}}"#, "`verify.min_references`"),
            (r#"{"verify": {"min_predictions": 0}}"#, "`verify.min_predictions`"),
        ];
        for (text, says) in cases {
            let fault = parse(text).unwrap_err();
            assert!(matches!(*fault.kind, FaultKind::PolicySyntax { .. }), "{text}");
            assert!(fault.to_string().contains(says), "{text}: {fault}");
        }
    }
}
