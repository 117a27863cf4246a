//! How far a model agrees with a reference.

use serde::{Deserialize, Serialize};

use super::Reference;
use crate::backend::{Backend, Mode, Prediction};
use crate::error::Result;
use crate::model::Model;

/// Below this margin of the reference a different best id is a near-tie: rounding alone may cause it.
pub const NEAR_TIE_MARGIN: f64 = 2e-4;

/// The same in fast mode, where activations are rounded to bf16 before products: a value is then off by up to 2⁻⁹ of itself, and
/// what is left of that in log-probabilities, after all layers, is hundreds of times what f32 leaves.
pub const FAST_NEAR_TIE_MARGIN: f64 = 0.05;

/// The margin of near-ties in a mode.
pub fn near_tie_margin(mode: Mode) -> f64 {
    match mode {
        Mode::Exact => NEAR_TIE_MARGIN,
        Mode::Fast => FAST_NEAR_TIE_MARGIN,
    }
}

/// Positions that agree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Matches {
    /// Equal ids.
    pub matched: usize,
    /// Unequal ids where the reference's own margin is below [`near_tie_margin`].
    pub near_tie: usize,
    /// All positions.
    pub total: usize,
    /// Number, expected and found id of the first real mismatch.
    #[serde(skip)]
    pub first_mismatch: Option<(usize, u32, u32)>,
}

impl Matches {
    /// Whether there is no real mismatch.
    pub fn good(&self) -> bool {
        self.matched + self.near_tie == self.total
    }

    fn count(&mut self, found: u32, expected: u32, margin: Option<f64>, mode: Mode) -> Outcome {
        self.total += 1;
        if found == expected {
            self.matched += 1;
            Outcome::Match
        } else if margin.is_some_and(|margin| margin.abs() < near_tie_margin(mode)) {
            self.near_tie += 1;
            Outcome::NearTie
        } else {
            self.first_mismatch = self.first_mismatch.or(Some((self.total - 1, expected, found)));
            Outcome::Mismatch
        }
    }
}

/// What became of one position.
#[derive(PartialEq)]
enum Outcome {
    Match,
    NearTie,
    Mismatch,
}

/// Drafts of the MTP head.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drafts {
    /// The model's drafts against the reference's.
    #[serde(flatten)]
    pub matches: Matches,
    /// Positions from the last prompt token on whose draft is of a token inside the text.
    pub proposed: usize,
    /// Those where the model's draft is that token.
    pub accepted: usize,
}

/// How far a model agrees with a reference; what the reference does not speak of is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Agreement {
    /// Best ids after each token of the text.
    pub teacher_forced: Option<Matches>,
    /// Tokens of the model's own continuation of the prompt. From the first real mismatch on the texts differ, and nothing
    /// after it counts as matched; after a near-tie the comparison goes on along the reference.
    pub greedy: Option<Matches>,
    /// Largest difference of the log-probabilities of the text's tokens.
    pub max_abs_logprob_diff: Option<f64>,
    /// Drafts.
    pub mtp: Option<Drafts>,
}

impl Agreement {
    /// Whether there is no real mismatch of ids.
    pub fn good(&self) -> bool {
        let matches = [self.teacher_forced, self.greedy, self.mtp.map(|mtp| mtp.matches)];
        matches.iter().flatten().all(Matches::good)
    }

    /// The agreement with two references together.
    pub fn and(&self, other: &Agreement) -> Agreement {
        Agreement {
            teacher_forced: both(self.teacher_forced, other.teacher_forced, Matches::plus),
            greedy: both(self.greedy, other.greedy, Matches::plus),
            max_abs_logprob_diff: both(self.max_abs_logprob_diff, other.max_abs_logprob_diff, larger),
            mtp: both(self.mtp, other.mtp, |a, b| Drafts {
                matches: a.matches.plus(b.matches),
                proposed: a.proposed + b.proposed,
                accepted: a.accepted + b.accepted,
            }),
        }
    }
}

impl Matches {
    fn plus(self, other: Matches) -> Matches {
        Matches {
            matched: self.matched + other.matched,
            near_tie: self.near_tie + other.near_tie,
            total: self.total + other.total,
            first_mismatch: self.first_mismatch.or(other.first_mismatch),
        }
    }
}

fn both<T>(a: Option<T>, b: Option<T>, join: impl Fn(T, T) -> T) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(join(a, b)),
        (one, other) => one.or(other),
    }
}

/// Runs a model along a reference.
pub fn compare<B: Backend>(model: &Model<'_, B>, reference: &Reference) -> Result<Agreement> {
    let mut agreement = Agreement::default();
    let mode = model.backend().mode();
    if let Some(tf_pred) = &reference.tf_pred {
        let predictions = model.teacher_forced(&reference.full_ids, reference.index_topk)?;
        agreement.teacher_forced = Some(matches(&predictions, tf_pred, reference.margin.as_deref(), mode));
        agreement.max_abs_logprob_diff =
            reference.logprob_next.as_ref().map(|expected| max_abs_logprob_diff(&predictions, expected));
        if reference.greedy {
            agreement.greedy = Some(greedy(model, reference)?);
        }
    }
    if let Some(draft_pred) = &reference.draft_pred {
        let predictions = model.drafts(&reference.full_ids, reference.index_topk)?;
        let matches = matches(&predictions, draft_pred, reference.draft_margin.as_deref(), mode);
        let drafts: Vec<u32> = predictions.iter().map(|prediction| prediction.id).collect();
        let (accepted, proposed) = accepted_drafts(reference, &drafts);
        agreement.mtp = Some(Drafts { matches, proposed, accepted });
    }
    Ok(agreement)
}

/// Best ids against expected ones; further predictions do not count.
fn matches(predictions: &[Prediction], expected: &[u32], margins: Option<&[f64]>, mode: Mode) -> Matches {
    let mut matches = Matches::default();
    for (i, (prediction, &expected)) in predictions.iter().zip(expected).enumerate() {
        matches.count(prediction.id, expected, margins.map(|margins| margins[i]), mode);
    }
    matches
}

/// The larger number; NaN if one of them is.
fn larger(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

/// The largest difference of log-probabilities; NaN if one of them is.
fn max_abs_logprob_diff(predictions: &[Prediction], expected: &[f64]) -> f64 {
    let differences = predictions.iter().filter_map(Prediction::logprob).zip(expected).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, larger)
}

/// The model's own continuation of the prompt against the text's.
fn greedy<B: Backend>(model: &Model<'_, B>, reference: &Reference) -> Result<Matches> {
    let mut matches = Matches::default();
    let (prompt, text) = (&reference.prompt_ids, &reference.full_ids);
    let mut cache = model.cache(reference.index_topk)?;
    let mut seen = 0;
    for at in prompt.len()..text.len() {
        let next = model.next(&mut cache, &text[seen..at])?;
        seen = at;
        let margin = reference.margin.as_ref().map(|margins| margins[at - 1]);
        if matches.count(next.id, text[at], margin, model.backend().mode()) == Outcome::Mismatch {
            break;
        }
    }
    matches.total = text.len() - prompt.len();
    Ok(matches)
}

/// Of the drafts along a reference's text, `drafts[p]` of token p + 2, those from the last prompt token on that are of a
/// token inside the text: how many are right, and how many there are.
pub fn accepted_drafts(reference: &Reference, drafts: &[u32]) -> (usize, usize) {
    let first = reference.prompt_ids.len() - 1;
    let outcomes =
        drafts.iter().zip(reference.full_ids.iter().skip(2)).skip(first).map(|(draft, token)| draft == token);
    (outcomes.clone().filter(|&right| right).count(), outcomes.count())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Recording, record};
    use super::*;
    use crate::backend::reference::Reference as ReferenceBackend;
    use crate::model::testing::Synthetic;

    const PROMPT: [u32; 4] = [3, 1, 4, 1];
    const TOKENS: usize = 8;

    fn with_model(test: impl Fn(&Model<'_, ReferenceBackend>, Reference)) {
        let backend = ReferenceBackend::default();
        let model = Model::load(&Synthetic::new(json!({})), &backend).unwrap();
        let recording = Recording { tokens: TOKENS, drafts: true, ..Recording::default() };
        let reference = record(&model, &PROMPT, &recording).unwrap();
        test(&model, reference);
    }

    fn all(total: usize) -> Matches {
        Matches { matched: total, total, ..Matches::default() }
    }

    #[test]
    fn a_model_agrees_with_itself() {
        with_model(|model, reference| {
            let agreement = compare(model, &reference).unwrap();
            assert_eq!(agreement.teacher_forced, Some(all(PROMPT.len() + TOKENS)));
            assert_eq!(agreement.greedy, Some(all(TOKENS)));
            assert_eq!(agreement.max_abs_logprob_diff, Some(0.0));
            let mtp = agreement.mtp.unwrap();
            assert_eq!((mtp.matches, mtp.proposed), (all(PROMPT.len() + TOKENS - 1), TOKENS - 1));
            assert!(agreement.good());
            let sum = agreement.and(&agreement);
            assert_eq!(sum.teacher_forced, Some(all(2 * (PROMPT.len() + TOKENS))));
            assert_eq!(sum.mtp.unwrap().proposed, 2 * (TOKENS - 1));
        });
    }

    #[test]
    fn one_altered_prediction_is_a_mismatch_or_a_near_tie() {
        with_model(|model, mut reference| {
            let pred = reference.tf_pred.as_mut().unwrap();
            pred[5] = (pred[5] + 1) % 40;
            let agreement = compare(model, &reference).unwrap();
            let total = PROMPT.len() + TOKENS;
            let altered = (5, reference.tf_pred.as_ref().unwrap()[5]);
            let forced = agreement.teacher_forced.unwrap();
            assert_eq!((forced.matched, forced.near_tie, forced.total), (total - 1, 0, total));
            assert_eq!(forced.first_mismatch.map(|(at, expected, _)| (at, expected)), Some(altered));
            assert!(!agreement.good());
            reference.margin.as_mut().unwrap()[5] = NEAR_TIE_MARGIN * 0.99;
            let agreement = compare(model, &reference).unwrap();
            assert_eq!(
                agreement.teacher_forced,
                Some(Matches { matched: total - 1, near_tie: 1, total, first_mismatch: None })
            );
            assert!(agreement.good());
            reference.margin = None;
            assert!(!compare(model, &reference).unwrap().good());
        });
    }

    #[test]
    fn greedy_ends_at_a_mismatch_and_goes_on_after_a_near_tie() {
        with_model(|model, mut reference| {
            // The text takes another way at its second token of its own, and from there its own best again.
            let at = PROMPT.len() + 1;
            let mut text = reference.full_ids[..at].to_vec();
            text.push((reference.full_ids[at] + 1) % 40);
            text.extend(model.greedy(&text, TOKENS - 2, None).unwrap());
            reference.full_ids = text;
            let greedy = |reference: &Reference| compare(model, reference).unwrap().greedy.unwrap();
            let stopped = greedy(&reference);
            assert_eq!((stopped.matched, stopped.near_tie, stopped.total), (1, 0, TOKENS));
            assert_eq!(
                stopped.first_mismatch.map(|(at, expected, _)| (at, expected)),
                Some((1, reference.full_ids[at]))
            );
            reference.margin.as_mut().unwrap()[at - 1] = 0.0;
            assert_eq!(
                greedy(&reference),
                Matches { matched: TOKENS - 1, near_tie: 1, total: TOKENS, first_mismatch: None }
            );
            reference.greedy = false;
            assert_eq!(compare(model, &reference).unwrap().greedy, None);
        });
    }

    #[test]
    fn drafts_count_as_accepted_by_the_text_not_by_the_reference() {
        with_model(|model, mut reference| {
            (reference.tf_pred, reference.margin, reference.logprob_next) = (None, None, None);
            let before = compare(model, &reference).unwrap();
            assert_eq!((before.teacher_forced, before.greedy, before.max_abs_logprob_diff), (None, None, None));
            reference.draft_pred.as_mut().unwrap()[6] += 1;
            let after = compare(model, &reference).unwrap().mtp.unwrap();
            assert_eq!(after.matches.matched + 1, after.matches.total);
            assert_eq!(after.accepted, before.mtp.unwrap().accepted);
            // A draft within the text that is right: position p drafts token p + 2.
            let drafts = model.drafts(&reference.full_ids, None).unwrap();
            let right = (PROMPT.len() - 1..reference.full_ids.len() - 2)
                .filter(|&p| drafts[p].id == reference.full_ids[p + 2])
                .count();
            assert_eq!(after.accepted, right);
        });
    }

    #[test]
    fn not_a_number_stays_visible() {
        assert!(larger(f64::NAN, 1.0).is_nan());
        assert!(larger(1.0, f64::NAN).is_nan());
        assert_eq!(larger(1.0, 2.0), 2.0);
    }
}
