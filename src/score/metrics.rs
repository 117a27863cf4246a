//! Figures of one model, from its records.

use super::input::{Input, Kind};
use super::record::{Record, Scored};
use super::statistics::{proportion_stderr, ratio, wilson};
use crate::report::{ScoreTask, ScoreText};

/// How log-probabilities of choices are made comparable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Normalization {
    /// The sum as it is.
    Sum,
    /// Per character, a leading space counted.
    Chars,
    /// Per character, a leading space not counted.
    BareChars,
    /// Per byte, a leading space counted.
    Bytes,
    /// Per byte, a leading space not counted.
    BareBytes,
}

impl Normalization {
    /// Sum over length. A choice of no length (a lone space) counts as one of length 1.
    pub fn of(self, logprob: f64, scored: &Scored) -> f64 {
        let length = match self {
            Normalization::Sum => 1,
            Normalization::Chars => scored.chars,
            Normalization::BareChars => scored.bare_chars(),
            Normalization::Bytes => scored.bytes,
            Normalization::BareBytes => scored.bare_bytes(),
        };
        logprob / length.max(1) as f64
    }
}

/// The choice with the largest value; of equals the first.
pub fn answer(values: impl Iterator<Item = f64>) -> usize {
    let (mut best, mut largest) = (0, f64::NEG_INFINITY);
    for (choice, value) in values.enumerate() {
        if value > largest {
            (best, largest) = (choice, value);
        }
    }
    best
}

/// The model's answer.
pub fn own_answer(record: &Record, by: Normalization) -> usize {
    answer(record.scores.iter().map(|scored| by.of(scored.logprob, scored)))
}

/// Records of one input.
pub fn of<'r>(records: &[&'r Record], input: &Input) -> Vec<&'r Record> {
    records.iter().filter(|record| record.input == input.name).copied().collect()
}

/// A task, from its records; `None` without a scored one.
pub fn task(input: &Input, records: &[&Record]) -> Option<ScoreTask> {
    let scored: Vec<&&Record> = records.iter().filter(|record| record.excluded.is_none()).collect();
    let n = scored.len() as u64;
    if n == 0 || input.kind != Kind::Task {
        return None;
    }
    let share = |by| {
        let right = scored.iter().filter(|record| record.gold == Some(own_answer(record, by))).count();
        right as f64 / n as f64
    };
    let (acc, acc_norm) = (share(Normalization::Sum), share(Normalization::Chars));
    Some(ScoreTask {
        task: input.name.clone(),
        template: input.template.map_or("plain", <&str>::from).to_owned(),
        n,
        excluded: records.len() as u64 - n,
        acc,
        acc_norm,
        acc_norm_harness: share(Normalization::BareChars),
        acc_bytes: share(Normalization::BareBytes),
        acc_norm_bytes: share(Normalization::Bytes),
        stderr: proportion_stderr(acc, n),
        stderr_norm: proportion_stderr(acc_norm, n),
        interval: wilson(acc, n),
        interval_norm: wilson(acc_norm, n),
        tokens: scored.iter().flat_map(|record| &record.scores).map(|scored| scored.tokens).sum(),
    })
}

/// A text, from its records; `None` without a scored one.
pub fn text(input: &Input, records: &[&Record]) -> Option<ScoreText> {
    let documents: Vec<&Scored> = records.iter().flat_map(|record| &record.scores).collect();
    if documents.is_empty() || input.kind != Kind::Text {
        return None;
    }
    let (tokens, bytes) = documents.iter().fold((0, 0), |(t, b), scored| (t + scored.tokens, b + scored.bytes));
    let nll: f64 = documents.iter().map(|scored| -scored.logprob).sum();
    let (nll_per_token, stderr) = ratio(documents.iter().map(|scored| (-scored.logprob, scored.tokens as f64)));
    Some(ScoreText {
        name: input.name.clone(),
        documents: documents.len() as u64,
        excluded: (records.len() - documents.len()) as u64,
        tokens,
        bytes,
        nll,
        nll_per_token,
        stderr,
        ppl: nll_per_token.exp(),
        bits_per_byte: nll / (bytes as f64 * std::f64::consts::LN_2),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_equals_the_first_answers_and_numbers_beat_no_number() {
        assert_eq!(answer([-2.0, -1.0, -1.0].into_iter()), 1);
        assert_eq!(answer([f64::NAN, -5.0].into_iter()), 1);
    }

    #[test]
    fn lengths_are_characters_or_bytes_with_or_without_the_space() {
        let scored = Scored {
            logprob: -12.0,
            tokens: 3,
            greedy: false,
            chars: 4,
            bytes: 6,
            space: true,
            top: Vec::new(),
            against: None,
        };
        let by = |by: Normalization| by.of(scored.logprob, &scored);
        assert_eq!(by(Normalization::Sum), -12.0);
        assert_eq!(by(Normalization::Chars), -3.0);
        assert_eq!(by(Normalization::BareChars), -4.0);
        assert_eq!(by(Normalization::Bytes), -2.0);
        assert_eq!(by(Normalization::BareBytes), -2.4);
        let space = Scored { chars: 1, bytes: 1, ..scored };
        assert_eq!(Normalization::BareChars.of(-3.0, &space), -3.0);
    }
}
