//! What a model does when it generates: does it stop, does it repeat itself, does it break characters, are its drafts any
//! good.

use std::collections::HashSet;

use super::encode::Encoder;
use crate::backend::Backend;
use crate::error::Result;
use crate::model::Model;
use crate::model::ending::{StopReason, period, repetition};
use crate::report::{ScoreDrafts, ScoreProbe, ScoreProbes};

/// Most tokens of a probe.
pub const MAX_TOKENS: usize = 64;

/// Beginnings of texts, in several scripts.
pub const PROMPTS: [&str; 9] = [
    "The",
    "In the beginning",
    "Question: What is the capital of France?\nAnswer:",
    "1, 2, 3, 4, 5,",
    "Однажды в студёную зимнюю пору",
    "从前有一座山,山上有一座庙,",
    "むかしむかし、あるところに",
    "كان يا ما كان في قديم الزمان",
    "एक समय की बात है",
];

/// Generates from every prompt, greedily. `stop_ids` are the ids that end a text; `head_format` is the format of the MTP
/// head's `eh_proj`.
pub fn run<B: Backend>(
    model: &Model<'_, B>,
    encoder: &Encoder<'_>,
    stop_ids: &[u32],
    head_format: Option<&str>,
) -> Result<ScoreProbes> {
    let (mut texts, mut proposed, mut accepted) = (Vec::with_capacity(PROMPTS.len()), 0, 0);
    for prompt in PROMPTS {
        let ids = encoder.tokenizer.encode(&format!("{}{prompt}", encoder.prefix))?;
        let ids: Vec<u32> = ids.into_iter().filter(|&id| u64::from(id) < encoder.vocab_size).collect();
        if ids.is_empty() {
            continue;
        }
        let drafts = usize::from(model.has_mtp());
        let generated = if drafts > 0 {
            let drafted = model.greedy_drafted(&ids, MAX_TOKENS, drafts, None)?;
            (proposed, accepted) = (proposed + drafted.proposed as u64, accepted + drafted.accepted as u64);
            drafted.ids
        } else {
            model.greedy(&ids, MAX_TOKENS, None)?
        };
        texts.push(probe(encoder, prompt, &generated, stop_ids)?);
    }
    let count = |of: &dyn Fn(&ScoreProbe) -> bool| texts.iter().filter(|text| of(text)).count() as u64;
    Ok(ScoreProbes {
        max_tokens: MAX_TOKENS as u64,
        stopped: count(&|text| text.stop_reason == StopReason::StopId.name()),
        repeated: count(&|text| text.stop_reason == StopReason::Repetition.name()),
        with_replacement_characters: count(&|text| text.replacement_characters > 0),
        mtp: model.has_mtp().then(|| ScoreDrafts {
            format: head_format.unwrap_or("unknown").to_owned(),
            proposed,
            accepted,
            acceptance: (proposed > 0).then(|| accepted as f64 / proposed as f64),
        }),
        texts,
    })
}

/// What there is to say of one text: it ends before a stop id, else where it has repeated itself long enough.
fn probe(encoder: &Encoder<'_>, prompt: &str, generated: &[u32], stop_ids: &[u32]) -> Result<ScoreProbe> {
    let stopped = generated.iter().position(|id| stop_ids.contains(id));
    let ids = &generated[..stopped.unwrap_or(generated.len())];
    let stop_reason = match (stopped, repetition(ids)) {
        (Some(_), _) => StopReason::StopId,
        (None, Some(_)) => StopReason::Repetition,
        (None, None) => StopReason::Length,
    };
    // The model may have more ids than the tokenizer has tokens.
    let known: Vec<u32> = ids.iter().copied().filter(|&id| encoder.tokenizer.decode(&[id], false).is_ok()).collect();
    let text = encoder.tokenizer.decode(&known, false)?;
    let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
    Ok(ScoreProbe {
        prompt: prompt.to_owned(),
        tokens: ids.len() as u64,
        stop_reason: stop_reason.name().to_owned(),
        distinct: [1, 2, 3, 4].map(|n| distinct(ids, n)),
        period: repetition(ids).or(period(ids)).map(|period| period as u64),
        replacement_characters: whole.matches(char::REPLACEMENT_CHARACTER).count() as u64,
        text,
    })
}

/// Different runs of n tokens, as a share of all.
fn distinct(ids: &[u32], n: usize) -> Option<f64> {
    let all = ids.len().checked_sub(n - 1).filter(|&count| count > 0)?;
    Some(ids.windows(n).collect::<HashSet<_>>().len() as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_runs_are_a_share_of_all() {
        assert_eq!(distinct(&[1, 2, 1, 2, 1], 1), Some(0.4));
        assert_eq!(distinct(&[1, 2, 1, 2, 1], 2), Some(0.5));
        assert_eq!(distinct(&[1, 2], 3), None);
    }

    #[test]
    fn texts_are_judged_by_their_ends() {
        let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nano");
        let tokenizer = crate::model::tokenizer::Tokenizer::load(&directory).unwrap();
        let encoder = Encoder { tokenizer: &tokenizer, prefix: "", vocab_size: 2048, max_tokens: None };
        let judged = |ids: &[u32]| probe(&encoder, "p", ids, &[2038]).unwrap();
        let plain = tokenizer.encode("And the king said unto him").unwrap();
        let stopped = judged(&[&plain[..], &[2038, 5, 5, 5]].concat());
        assert_eq!((stopped.stop_reason.as_str(), stopped.tokens), ("stop_id", plain.len() as u64));
        assert_eq!(stopped.text, "And the king said unto him");
        assert_eq!(judged(&plain).stop_reason, "length");
        let again: Vec<u32> = plain.iter().copied().cycle().take(60).collect();
        let again = judged(&again);
        assert_eq!((again.stop_reason.as_str(), again.period), ("repetition", Some(plain.len() as u64)));
        assert_eq!(judged(&[&plain[..], &[7, 7, 7]].concat()).stop_reason, "length");
        // Half a character in the middle is broken, at the end it may go on.
        let snow = tokenizer.encode("☃").unwrap();
        assert!(snow.len() > 1);
        assert_eq!(judged(&snow).replacement_characters, 0);
        assert_eq!(judged(&[&plain[..], &snow[..1]].concat()).replacement_characters, 0);
        assert!(judged(&[&snow[..1], &plain[..]].concat()).replacement_characters > 0);
    }
}
