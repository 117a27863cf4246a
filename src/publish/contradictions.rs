//! What no report of this program says: figures that cannot be true together. Such a report was edited, or is damaged.

use std::collections::BTreeSet;

use super::evidence::{Evidence, Told};
use crate::container::manifest::FileRecord;
use crate::error::{Fault, FaultKind, counted};
use crate::report::{
    CheckStatus, ScoreBaseline, ScoreReport, ScoreTask, Severity, Verdict, VerifyCheck, VerifyGreedy, VerifyReport,
    VerifyTokens,
};
use crate::score::identity::model_sha256_of;
use crate::score::statistics::proportion_stderr;
use crate::verify::logprob_tolerance;

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
    let mut names = BTreeSet::new();
    for check in report.checks.iter().filter(|check| !names.insert(&check.name)) {
        kinds.push(contradicts(format!("the number of checks {}", check.name), "1", "more"));
    }
    let of_source = |check: &&VerifyCheck| ["weights", "source"].contains(&&*check.name);
    let of_source = report.checks.iter().filter(of_source).find(|check| check.status == CheckStatus::Pass);
    if let Some(check) = of_source.filter(|_| report.source.is_none()) {
        let expected = format!("a checkpoint, as the check {} passed", check.name);
        kinds.push(contradicts("`source`", expected, "absent"));
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
    if let Some(own) = report.own_drafts.filter(|own| own.accepted > own.proposed) {
        kinds.push(contradicts("`own_drafts`", format!("at most {}", own.proposed), own.accepted.to_string()));
    }
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
    // Greedy predictions follow the same text: without near-ties there they have none.
    let ties = entry.teacher_forced.as_ref().map_or(0, |forced| forced.near_tie);
    let few = |greedy: &&VerifyGreedy| passes && greedy.matched.saturating_add(ties) < greedy.total;
    if let Some(greedy) = entry.greedy.as_ref().filter(few) {
        let expected = format!("{}, as the verdict is pass, but for {}", greedy.total, counted(ties, "near-tie"));
        kinds.push(contradicts(at("`greedy`"), expected, greedy.matched.to_string()));
    }
    let tolerance = logprob_tolerance(entry.mode.parse().unwrap_or_default());
    let apart = entry.max_abs_logprob_diff.filter(|apart| !(0.0..=tolerance).contains(apart));
    if let Some(apart) = apart.filter(|apart| passes || *apart < 0.0) {
        let expected = format!("at most {tolerance}, as the verdict is pass");
        kinds.push(contradicts(at("`max_abs_logprob_diff`"), expected, apart.to_string()));
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
    kinds.extend(report.tasks.iter().flat_map(of_task));
    let tasks = report.tasks.iter().map(|task| (&task.task, task.n));
    for (name, scored) in tasks.chain(report.texts.iter().map(|text| (&text.name, text.documents))) {
        let rows = report.requests.iter().filter(|request| request.input == *name && request.logprob.is_some());
        let rows = rows.map(|request| request.row).collect::<BTreeSet<_>>().len() as u64;
        if rows < scored {
            kinds.push(contradicts(
                format!("the number of rows of {name} in `requests`"),
                scored.to_string(),
                rows.to_string(),
            ));
        }
    }
    kinds.extend(report.baseline.iter().flat_map(|baseline| of_baseline(report, baseline)));
    kinds
}

/// Shares of a task that are none of its questions, or whose errors are those of other shares.
fn of_task(task: &ScoreTask) -> Vec<FaultKind> {
    let mut kinds = Vec::new();
    let at = |what: &str| format!("{what} of {}", task.task);
    let shares = [
        ("`acc`", task.acc),
        ("`acc_norm`", task.acc_norm),
        ("`acc_norm_harness`", task.acc_norm_harness),
        ("`acc_bytes`", task.acc_bytes),
        ("`acc_norm_bytes`", task.acc_norm_bytes),
    ];
    for (what, share) in shares {
        let right = share * task.n as f64;
        if !(0.0..=1.0).contains(&share) || (right - right.round()).abs() > TOLERANCE {
            kinds.push(contradicts(at(what), format!("a share of {}", counted(task.n, "question")), share.to_string()));
        }
    }
    let text = |error: Option<f64>| error.map_or("null".to_owned(), |error| error.to_string());
    let errors = [("`stderr`", task.acc, task.stderr), ("`stderr_norm`", task.acc_norm, task.stderr_norm)];
    for (what, share, found) in errors.into_iter().filter(|(_, share, _)| (0.0..=1.0).contains(share)) {
        let expected = proportion_stderr(share, task.n);
        let near = expected.zip(found).is_some_and(|(expected, found)| (expected - found).abs() <= TOLERANCE);
        if !near && (expected, found) != (None, None) {
            kinds.push(contradicts(at(what), text(expected), text(found)));
        }
    }
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
    let requests = names(of_kind("requests"));
    let predicted = &names(report.texts.iter().map(|text| text.name.as_str()).collect()) | &requests;
    let listed = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(", ");
    let sets = [
        ("`compared`", &compared, &inputs, compared == inputs),
        ("the tasks of `baseline`", &both, &tasks, both.is_subset(&tasks)),
        ("the tasks of `baseline`", &both, &scored, both.is_subset(&scored)),
        ("the texts of `baseline`", &texts, &inputs, texts.is_subset(&inputs)),
        ("the texts of `baseline`", &texts, &predicted, texts.is_subset(&predicted)),
    ];
    kinds.extend(
        sets.iter()
            .filter(|set| !set.3)
            .map(|(what, found, expected, _)| contradicts(*what, listed(expected), listed(found))),
    );
    let top = baseline.top1_agreement;
    let known = baseline.kl_mean.is_some() || baseline.kl_max.is_some() || top.is_some();
    if baseline.positions == 0 && known {
        kinds.push(contradicts("`positions` of `baseline`", "at least 1, as there are figures of them", "0"));
    }
    if let Some(top) = top.filter(|top| !(0.0..=1.0).contains(top)) {
        kinds.push(contradicts("`top1_agreement` of `baseline`", "a number from 0 to 1", top.to_string()));
    }
    if let Some(kl) = baseline.kl_mean.filter(|kl| *kl < -TOLERANCE) {
        kinds.push(contradicts("`kl_mean` of `baseline`", "a number from 0 on", kl.to_string()));
    }
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
