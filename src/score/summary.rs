//! The report of a run, from its records.

use std::collections::HashMap;

use super::distribution::TOP_K;
use super::identity::Identity;
use super::input::Input;
use super::record::Record;
use super::{Compared, Job, compare, metrics};
use crate::report::{ScoreBaseline, ScoreExcluded, ScoreInput, ScoreReport, ScoreRequest, Verdict};
use crate::weights::ModelKind;

/// Whole distributions are compared.
pub const EXACT_METHOD: &str = "exact";
/// [`TOP_K`] tokens and the mass of the others are compared.
pub const TOP_METHOD: &str = "top-16";
const _: () = assert!(TOP_K == 16);

/// The report of these results. What only the run knows is left at nothing.
pub fn report(
    job: &Job<'_>,
    records: &[Record],
    identity: &Identity,
    kind: ModelKind,
    baseline: Option<&Compared>,
) -> ScoreReport {
    let records: Vec<&Record> = records.iter().collect();
    let (backend, mode) = super::run::backend(job.options.device(), job.options.mode);
    // Figures of a part would look like those of the whole.
    let whole = job.options.part.is_none();
    let of_input = |input: &Input| metrics::of(&records, input);
    let inputs: &[Input] = if whole { job.inputs } else { &[] };
    let baseline = baseline.filter(|_| whole).map(|baseline| compared(job, baseline, &records));
    let checks = baseline.as_ref().filter(|baseline| baseline.threshold.is_some()).map(|baseline| &baseline.checks);
    let verdict = checks.map(|checks| match checks.iter().all(|check| check.met) && !checks.is_empty() {
        true => Verdict::Pass,
        false => Verdict::Fail,
    });
    let part = job.options.part.map(|part| part.to_string());
    ScoreReport {
        path: job.path.to_string_lossy().into_owned(),
        kind: kind.name().to_owned(),
        model_sha256: identity.model_sha256.clone(),
        tokenizer_sha256: identity.tokenizer_sha256.clone(),
        prefix: job.encoder.prefix.to_owned(),
        backend: backend.to_owned(),
        mode: mode.to_owned(),
        part,
        inputs: job.inputs.iter().map(|input| described(job, input)).collect(),
        verdict,
        tasks: inputs.iter().filter_map(|input| metrics::task(input, &of_input(input))).collect(),
        texts: inputs.iter().filter_map(|input| metrics::text(input, &of_input(input))).collect(),
        requests: records.iter().flat_map(|record| requests(record)).collect(),
        baseline,
        probes: None,
        excluded: records.iter().filter_map(|record| excluded(job, record)).collect(),
        tokens: 0,
        seconds: 0.0,
        loading_seconds: 0.0,
        tokens_per_second: None,
        shares: None,
        experts: None,
        device_experts: None,
        gpu: None,
        peak_anonymous_bytes: None,
        warnings: Vec::new(),
    }
}

fn described(job: &Job<'_>, input: &Input) -> ScoreInput {
    let bound = super::bound(input, job.options.sampling);
    ScoreInput {
        name: bound.name,
        kind: <&'static str>::from(bound.kind).to_owned(),
        file: input.path.to_string_lossy().into_owned(),
        sha256: bound.sha256,
        rows: input.file_rows,
        scored_rows: input.rows,
        limit: bound.limit,
        seed: bound.limit.map(|_| bound.seed),
    }
}

fn compared(job: &Job<'_>, baseline: &Compared, records: &[&Record]) -> ScoreBaseline {
    let apart = compare::divergence(records);
    let of_input = |input: &Input| metrics::of(records, input);
    let tasks: Vec<_> = job.inputs.iter().filter_map(|input| compare::task(input, &of_input(input))).collect();
    let texts: Vec<_> = job.inputs.iter().filter_map(|input| compare::text(input, &of_input(input))).collect();
    let threshold = job.options.threshold;
    let coverage = |input: &Input| (input.kind, compare::coverage(input, &of_input(input)));
    let inputs: Vec<_> = job.inputs.iter().map(coverage).collect();
    let checks = threshold.map(|threshold| compare::checks(&inputs, &tasks, &texts, threshold)).unwrap_or_default();
    ScoreBaseline {
        path: baseline.path.to_string_lossy().into_owned(),
        kind: baseline.kind.to_owned(),
        model_kind: baseline.model_kind.clone(),
        model_sha256: baseline.model_sha256.clone(),
        mode: Some(baseline.mode.clone()),
        kl_method: baseline.tag.split(' ').next().unwrap_or_default().to_owned(),
        positions: apart.positions,
        kl_mean: apart.mean,
        kl_interval: apart.interval,
        kl_max: apart.max,
        top1_agreement: apart.top1_agreement,
        kl_by_position: apart.by_position,
        compared: inputs.into_iter().map(|(_, compared)| compared).collect(),
        tasks,
        texts,
        threshold,
        checks,
    }
}

fn requests(record: &Record) -> Vec<ScoreRequest> {
    let request = |choice, scored: Option<&super::record::Scored>| ScoreRequest {
        input: record.input.clone(),
        row: record.row,
        choice,
        logprob: scored.map(|scored| scored.logprob),
        tokens: scored.map(|scored| scored.tokens),
        greedy: scored.map(|scored| scored.greedy),
    };
    if record.excluded.is_some() {
        return vec![request(None, None)];
    }
    let is_question = record.gold.is_some();
    let scores = record.scores.iter().enumerate();
    scores.map(|(choice, scored)| request(is_question.then_some(choice as u64), Some(scored))).collect()
}

fn excluded(job: &Job<'_>, record: &Record) -> Option<ScoreExcluded> {
    let exclusion = record.excluded.as_ref()?;
    let input = job.inputs.iter().find(|input| input.name == record.input)?;
    Some(ScoreExcluded {
        input: record.input.clone(),
        file: input.path.to_string_lossy().into_owned(),
        row: record.row,
        kind: exclusion.kind.clone(),
        message: exclusion.message.clone(),
        hint: exclusion.hint.clone(),
    })
}

/// Every continuation as a row of CSV. Without a baseline what an earlier one said is left out.
pub fn table(records: &[Record], with_baseline: bool) -> Vec<u8> {
    let mut table = csv::Writer::from_writer(Vec::new());
    let header = [
        "input",
        "row",
        "choice",
        "gold",
        "logprob",
        "tokens",
        "greedy",
        "chars",
        "bytes",
        "baseline_logprob",
        "kl_mean",
        "excluded",
    ];
    let _ = table.write_record(header);
    for record in records {
        let gold = record.gold.map_or(String::new(), |gold| gold.to_string());
        if let Some(exclusion) = &record.excluded {
            let row = record.row.to_string();
            let _ =
                table.write_record([&record.input, &row, "", &gold, "", "", "", "", "", "", "", &exclusion.message]);
        }
        for (choice, scored) in record.scores.iter().enumerate() {
            let against = scored.against.as_ref().filter(|_| with_baseline);
            let mean = against.map(|against| against.kl.iter().sum::<f64>() / against.kl.len() as f64);
            // Ids alone have no text.
            let of_text = |count: u64| if scored.bytes == 0 { String::new() } else { count.to_string() };
            let optional = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
            let _ = table.write_record([
                &record.input,
                &record.row.to_string(),
                &if record.gold.is_some() { choice.to_string() } else { String::new() },
                &gold,
                &scored.logprob.to_string(),
                &scored.tokens.to_string(),
                &scored.greedy.to_string(),
                &of_text(scored.chars),
                &of_text(scored.bytes),
                &optional(against.map(|against| against.logprob)),
                &optional(mean),
                "",
            ]);
        }
    }
    table.into_inner().unwrap_or_default()
}

/// The answers to the request file of that name, a line each: `logprob contlen greedy01`, or why there is none.
pub fn answers(report: &ScoreReport, name: &str) -> String {
    let excluded = report.excluded.iter().filter(|excluded| excluded.input == name);
    let messages: HashMap<u64, &str> = excluded.map(|excluded| (excluded.row, excluded.message.as_str())).collect();
    let mut out = String::new();
    for request in report.requests.iter().filter(|request| request.input == name) {
        match (request.logprob, request.tokens, request.greedy) {
            (Some(logprob), Some(tokens), Some(greedy)) => {
                out += &format!("{logprob:.6} {tokens} {}\n", u8::from(greedy));
            }
            _ => {
                out += &format!("error {}\n", messages.get(&request.row).copied().unwrap_or_default());
            }
        }
    }
    out
}
