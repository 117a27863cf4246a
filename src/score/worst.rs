//! The questions that a person should look at first.

use std::collections::BTreeSet;

use super::html::WorstQuestion;
use super::input::{Content, Input, Kind};
use super::record::Record;
use crate::error::Result;

/// How many are shown.
const SHOWN: usize = 12;

/// By how many nats the right choice is behind the best other one.
fn behind(record: &Record, logprob: impl Fn(usize) -> Option<f64>) -> Option<f64> {
    let gold = record.gold?;
    let others = (0..record.scores.len()).filter(|&choice| choice != gold);
    let mut best = f64::NEG_INFINITY;
    for choice in others {
        best = best.max(logprob(choice)?);
    }
    Some(best - logprob(gold)?)
}

/// How bad a question is: what it lost against the baseline, or without one how surely its answer is wrong.
fn badness(record: &Record, with_baseline: bool) -> Option<f64> {
    let own = behind(record, |choice| Some(record.scores[choice].logprob))?;
    match behind(record, |choice| Some(record.scores[choice].against.as_ref()?.logprob)) {
        Some(theirs) if with_baseline => Some(own - theirs),
        _ => Some(own),
    }
}

/// The worst questions of all tasks, the worst first, with their texts. Without a baseline what an earlier one said does
/// not count.
pub fn questions(inputs: &[Input], records: &[Record], with_baseline: bool) -> Result<Vec<WorstQuestion>> {
    let scored = |record: &&Record| record.excluded.is_none() && record.gold.is_some();
    let rated = records.iter().filter(scored).filter_map(|record| Some((badness(record, with_baseline)?, record)));
    let mut rated: Vec<(f64, &Record)> = rated.filter(|(badness, _)| *badness > 0.0).collect();
    rated.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.input.cmp(&b.1.input)).then(a.1.row.cmp(&b.1.row)));
    rated.truncate(SHOWN);
    let wanted: BTreeSet<(&str, u64)> = rated.iter().map(|(_, record)| (record.input.as_str(), record.row)).collect();
    let mut found = Vec::new();
    for input in
        inputs.iter().filter(|input| input.kind == Kind::Task && wanted.iter().any(|(name, _)| *name == input.name))
    {
        for item in input.items()? {
            let item = item?;
            let (true, Ok(Content::Question(question))) =
                (wanted.contains(&(input.name.as_str(), item.row)), item.content)
            else {
                continue;
            };
            let Some((badness, record)) = rated.iter().find(|(_, r)| (&r.input, r.row) == (&input.name, item.row))
            else {
                continue;
            };
            // Where contexts differ, the choice is what differs.
            let same = question.pairs.iter().all(|pair| pair.ctx == question.pairs[0].ctx);
            let choice = |(pair, scored): (&super::import::Pair, &super::record::Scored)| {
                let text = if same { pair.continuation.clone() } else { format!("{}{}", pair.ctx, pair.continuation) };
                (text, scored.logprob, scored.against.as_ref().filter(|_| with_baseline).map(|against| against.logprob))
            };
            found.push(WorstQuestion {
                task: input.name.clone(),
                row: item.row,
                ctx: if same { question.pairs[0].ctx.clone() } else { String::new() },
                choices: question.pairs.iter().zip(&record.scores).map(choice).collect(),
                gold: question.gold,
                behind_by: *badness,
            });
        }
    }
    found.sort_by(|a, b| b.behind_by.total_cmp(&a.behind_by));
    Ok(found)
}
