//! What is kept of every row, one line of JSON each.

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::distribution::Top;

/// The result of one row.
pub type Record = RecordOf<Top>;
/// What a continuation got.
pub type Scored = ScoredOf<Top>;
/// A record whose distributions are passed over.
pub type Lean = RecordOf<IgnoredAny>;

/// The result of one row, with distributions of that type.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(bound(deserialize = "T: Deserialize<'de>"))]
pub struct RecordOf<T> {
    /// Name of the input.
    pub input: String,
    /// Number of the row.
    pub row: u64,
    /// Of a question the right choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gold: Option<usize>,
    /// What the row's continuations got: one for each choice of a question, else one. None if the row was excluded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scores: Vec<ScoredOf<T>>,
    /// Why the row has no scores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excluded: Option<Exclusion>,
    /// The baseline that the row was compared with, by the hash of its model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline: Option<String>,
}

/// What a continuation got, with distributions of that type.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(bound(deserialize = "T: Deserialize<'de>"))]
pub struct ScoredOf<T> {
    /// Σ ln p(token | everything before it).
    pub logprob: f64,
    /// Tokens that were scored.
    pub tokens: u64,
    /// Whether each of them was the model's best.
    pub greedy: bool,
    /// Characters of the continuation, a leading space included; 0 where there is only ids.
    pub chars: u64,
    /// The same in bytes of UTF-8.
    pub bytes: u64,
    /// Whether it begins with a space.
    pub space: bool,
    /// The distribution before each token; empty in memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<T>,
    /// What the baseline gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<Against>,
}

/// A continuation in the eyes of the baseline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Against {
    /// The baseline's Σ ln p.
    pub logprob: f64,
    /// Whether each token was the baseline's best.
    pub greedy: bool,
    /// Tokens before which both models' best are equal.
    pub agreed: u64,
    /// KL(baseline ‖ model) before each token, in nats.
    pub kl: Vec<f64>,
}

/// Why a row has no score.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exclusion {
    /// The kind of fault.
    pub kind: String,
    /// One sentence, the number of the row included.
    pub message: String,
    /// What a person can do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl Scored {
    /// Characters without a leading space.
    pub fn bare_chars(&self) -> u64 {
        self.chars - u64::from(self.space)
    }

    /// Bytes without a leading space.
    pub fn bare_bytes(&self) -> u64 {
        self.bytes - u64::from(self.space)
    }
}

const CHECK: &str = r#"{"check":""#;
const DIGITS: usize = 16;

impl Record {
    /// The line of the record, with a checksum that belongs to one results file.
    pub fn line(&self, seed: u64) -> String {
        let json = serde_json::to_string(self).expect("plain data");
        format!("{CHECK}{:0DIGITS$x}\",{}\n", XxHash3_64::oneshot_with_seed(seed, json.as_bytes()), &json[1..])
    }
}

impl<T> RecordOf<T> {
    /// Reads a line, without its end; the error says what is wrong.
    pub fn parse(line: &str, seed: u64) -> Result<RecordOf<T>, String>
    where
        T: DeserializeOwned,
    {
        let (check, rest) = line
            .strip_prefix(CHECK)
            .and_then(|rest| rest.split_at_checked(DIGITS))
            .and_then(|(check, rest)| Some((check, rest.strip_prefix("\",")?)))
            .ok_or("it does not begin with a checksum")?;
        let json = format!("{{{rest}");
        let found = format!("{:0DIGITS$x}", XxHash3_64::oneshot_with_seed(seed, json.as_bytes()));
        if check != found {
            return Err(format!("the checksum is {found}, the line says {check}"));
        }
        serde_json::from_str(&json).map_err(|e| e.to_string())
    }

    /// The record without the distributions.
    pub fn lean(self) -> Record {
        let scored = |scored: ScoredOf<T>| {
            let ScoredOf { logprob, tokens, greedy, chars, bytes, space, top: _, against } = scored;
            ScoredOf { logprob, tokens, greedy, chars, bytes, space, top: Vec::new(), against }
        };
        let RecordOf { input, row, gold, scores, excluded, baseline } = self;
        RecordOf { input, row, gold, scores: scores.into_iter().map(scored).collect(), excluded, baseline }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_written_and_no_other() {
        let scored = Scored {
            logprob: -0.1 - 0.2,
            tokens: 2,
            greedy: true,
            chars: 3,
            bytes: 4,
            space: true,
            top: vec![Top { ids: vec![3, 1], logprobs: vec![-0.5, -1.25], rest: None }],
            against: Some(Against { logprob: -1.0 / 3.0, greedy: false, agreed: 1, kl: vec![0.125, 1e-9] }),
        };
        let record = Record {
            input: "gl\"oss\n".into(),
            row: 7,
            gold: Some(1),
            scores: vec![scored],
            excluded: None,
            baseline: Some("aa".into()),
        };
        let line = record.line(5);
        let text = line.strip_suffix('\n').unwrap();
        assert!(!text.contains('\n') && serde_json::from_str::<serde_json::Value>(text).is_ok());
        assert_eq!(Record::parse(text, 5).unwrap(), record);
        assert!(Record::parse(text, 6).unwrap_err().starts_with("the checksum is"));
        assert!(Record::parse(&text.replacen("\"row\":7", "\"row\":8", 1), 5).is_err());
        for cut in 0..text.len() {
            assert!(Record::parse(&text[..cut], 5).is_err(), "{cut}");
        }
        assert!(record.lean().scores[0].top.is_empty());
    }
}
