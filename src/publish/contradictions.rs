//! What no report of this program says: figures that cannot be true together. Such a report was edited, or is damaged.

use std::collections::BTreeSet;

use super::evidence::{Evidence, Told};
use crate::container::manifest::FileRecord;
use crate::error::{Fault, FaultKind};
use crate::report::{CheckStatus, ScoreBaseline, ScoreReport, Severity, Verdict, VerifyReport, VerifyTokens};
use crate::score::identity::model_sha256_of;

/// Largest distance of a figure from those that it was made of, relative where it is a ratio: both were computed in f64.
const TOLERANCE: f64 = 1e-6;

/// What contradicts itself in the reports.
pub fn of(evidence: &Evidence) -> Vec<Fault> {
    let verify = evidence.verify.iter().flat_map(|told| placed(told, of_verify(&told.report)));
    let score = evidence.score.iter().flat_map(|told| placed(told, of_score(&told.report)));
    verify.chain(score).collect()
}

fn placed<R>(told: &Told<R>, kinds: Vec<FaultKind>) -> Vec<Fault> {
    kinds.into_iter().map(|kind| told.fault(kind)).collect()
}

fn contradicts(what: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> FaultKind {
    FaultKind::ReportContradicts { what: what.into(), expected: expected.into(), found: found.into() }
}

fn of_verify(report: &VerifyReport) -> Vec<FaultKind> {
    let mut kinds = Vec::new();
    if report.kind != "container" {
        kinds.push(contradicts("`kind`", "container", &report.kind));
    }
    let records = report.files.iter().map(|file| {
        let (name, bytes, sha256) = (file.name.clone(), file.bytes, file.sha256.clone());
        FileRecord { name, bytes, sha256 }
    });
    let hash = model_sha256_of(&records.collect::<Vec<_>>());
    if report.model_sha256.as_ref() != Some(&hash) {
        let found = report.model_sha256.as_deref().unwrap_or("absent");
        kinds.push(contradicts("`model_sha256`", format!("{hash}, that of its files"), found));
    }
    if report.level != "tokens" && !(report.tokens.is_empty() && report.source_agreement.is_none()) {
        kinds.push(contradicts("`level`", "tokens, of which there are results", &report.level));
    }
    let passes = report.verdict == Verdict::Pass;
    for check in report.checks.iter().filter(|check| passes && check.status == CheckStatus::Fail) {
        kinds.push(contradicts(format!("the check {}", check.name), "pass, as the verdict", "fail"));
    }
    for found in report.findings.iter().filter(|found| passes && found.severity == Severity::Error) {
        kinds.push(contradicts("a finding", "no error, as the verdict is pass", &found.kind));
    }
    kinds.extend(report.tokens.iter().flat_map(|entry| of_entry(entry, passes)));
    if let Some(agreement) = report.source_agreement.as_ref().filter(|a| a.total == 0 || a.matched > a.total) {
        let found = format!("{} of {}", agreement.matched, agreement.total);
        kinds.push(contradicts("`source_agreement`", "a part of at least one", found));
    }
    kinds
}

/// Of one reference on one device.
fn of_entry(entry: &VerifyTokens, passes: bool) -> Vec<FaultKind> {
    let mut kinds = Vec::new();
    let at = |what: &str| format!("{what} of {} {}", entry.reference, entry.number);
    if let Some(forced) = &entry.teacher_forced {
        let sum = forced.matched.saturating_add(forced.near_tie);
        if forced.total == 0 || sum > forced.total || passes && sum < forced.total {
            let found = format!("{sum} of {}", forced.total);
            kinds.push(contradicts(at("`teacher_forced`"), "all of at least one, as the verdict is pass", found));
        }
    }
    let greedy = entry.greedy.as_ref().map(|greedy| ("`greedy`", greedy.matched, greedy.total));
    let drafts =
        entry.mtp.as_ref().map(|mtp| [("`mtp`", mtp.matched, mtp.total), ("`mtp`", mtp.accepted, mtp.proposed)]);
    for (what, part, whole) in
        greedy.into_iter().chain(drafts.into_iter().flatten()).filter(|(_, part, whole)| part > whole)
    {
        kinds.push(contradicts(at(what), format!("at most {whole}"), part.to_string()));
    }
    kinds
}

fn of_score(report: &ScoreReport) -> Vec<FaultKind> {
    let mut kinds = Vec::new();
    if report.kind != "container" {
        kinds.push(contradicts("`kind`", "container", &report.kind));
    }
    for input in &report.inputs {
        let expected = input.limit.map_or(input.rows, |limit| limit.min(input.rows));
        if input.scored_rows != expected {
            let what = format!("`scored_rows` of {}", input.name);
            kinds.push(contradicts(what, expected.to_string(), input.scored_rows.to_string()));
        }
    }
    kinds.extend(report.baseline.iter().flat_map(|baseline| of_baseline(report, baseline)));
    kinds
}

fn of_baseline(report: &ScoreReport, baseline: &ScoreBaseline) -> Vec<FaultKind> {
    let mut kinds = Vec::new();
    let names = |found: Vec<&str>| found.into_iter().map(str::to_owned).collect::<BTreeSet<String>>();
    let of_kind = |kind: &str| report.inputs.iter().filter(|i| i.kind == kind).map(|i| i.name.as_str()).collect();
    let inputs = names(report.inputs.iter().map(|input| input.name.as_str()).collect());
    let compared = names(baseline.compared.iter().map(|compared| compared.name.as_str()).collect());
    let (tasks, scored) = (names(of_kind("task")), names(report.tasks.iter().map(|t| t.task.as_str()).collect()));
    let both = names(baseline.tasks.iter().map(|task| task.task.as_str()).collect());
    let texts = names(baseline.texts.iter().map(|text| text.name.as_str()).collect());
    let listed = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(", ");
    let sets = [
        ("`compared`", &compared, &inputs, compared == inputs),
        ("the tasks of `baseline`", &both, &tasks, both.is_subset(&tasks)),
        ("the tasks of `baseline`", &both, &scored, both.is_subset(&scored)),
        ("the texts of `baseline`", &texts, &inputs, texts.is_subset(&inputs)),
    ];
    kinds.extend(
        sets.iter()
            .filter(|set| !set.3)
            .map(|(what, found, expected, _)| contradicts(*what, listed(expected), listed(found))),
    );
    for task in &baseline.tasks {
        for (metric, paired) in [("acc", &task.acc), ("acc_norm", &task.acc_norm)] {
            let difference = paired.model - paired.baseline;
            let apart = (paired.difference - difference).abs();
            if apart.is_nan() || apart > TOLERANCE {
                let what = format!("the difference of {} {metric}", task.task);
                kinds.push(contradicts(what, difference.to_string(), paired.difference.to_string()));
            }
        }
    }
    for text in &baseline.texts {
        let ratio = text.model / text.baseline;
        let apart = (text.ratio / ratio - 1.0).abs();
        if apart.is_nan() || apart > TOLERANCE {
            let what = format!("the ratio of {}", text.name);
            kinds.push(contradicts(what, ratio.to_string(), text.ratio.to_string()));
        }
    }
    kinds
}
