//! What reports must show before a container is published.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::checks::Checks;
use super::evidence::{Evidence, Told};
use super::policy::{Policy, ScorePolicy, VerifyPolicy};
use super::shell::quoted_path;
use crate::backend::Mode;
use crate::error::{Fault, FaultKind, Place, counted};
use crate::report::{CheckStatus, ScoreBaseline, ScoreReport, Verdict, VerifyReport, VerifyTokens};
use crate::verify::{Level, OWN_REFERENCE};

/// The command that makes a report of `verify`.
pub fn verify_command(container: &Path) -> String {
    let container = quoted_path(container);
    format!("coliconv verify {container} --source CHECKPOINT --reference REFERENCE.json --report verify.json")
}

/// The command that makes a report of `score`.
pub fn score_command(container: &Path) -> String {
    let container = quoted_path(container);
    format!("coliconv score {container} --task NAME=FILE --text NAME=FILE --baseline CHECKPOINT --out scores")
}

/// The evidence that is missing where weights were not compared.
pub const WEIGHTS_MISSING: &str = "a comparison of the weights with the source";
/// The evidence that is missing where tokens were compared with nothing.
pub const TOKENS_MISSING: &str = "a verification of the tokens, with a reference or the source,";

/// Holds reports that are about the container's bytes against a policy. Adds the checks structure, payload, weights where
/// the policy asks for them, tokens and score.
pub fn examine(container: &Path, has_mtp: bool, evidence: &Evidence, policy: &Policy, checks: &mut Checks) {
    let (good, bad): (Vec<_>, Vec<_>) = evidence
        .verify
        .iter()
        .partition(|told| told.report.verdict == Verdict::Pass && told.report.kind == "container");
    let mut said_no: Vec<Fault> = bad.iter().map(|told| told.fault(FaultKind::ReportSaysNo)).collect();
    let missing = |what| {
        let kind = FaultKind::EvidenceMissing { what, command: verify_command(container) };
        vec![Fault::new(Place::file(container), kind)]
    };
    let levels = [
        (Level::Structure, true, "a verification of the structure"),
        (Level::Payload, true, "a verification of the payload"),
        (Level::Weights, policy.verify.weights, WEIGHTS_MISSING),
    ];
    for (level, _, what) in levels.into_iter().filter(|(_, wanted, _)| *wanted) {
        let of_level: Vec<_> = good.iter().filter(|told| reaches(&told.report, level)).collect();
        let mut faults = std::mem::take(&mut said_no);
        if of_level.is_empty() && faults.is_empty() {
            faults = missing(what);
        }
        checks.check(level.name(), faults, format!("passed in {}", names(&of_level)));
    }
    let (faults, warnings, looked_at) = tokens(&good, &policy.verify);
    let mut faults = faults.unwrap_or_else(|| missing(TOKENS_MISSING));
    if has_mtp && policy.verify.min_mtp_acceptance > 0.0 {
        faults.extend(drafts(container, evidence, policy.verify.min_mtp_acceptance));
    }
    checks.check(Level::Tokens.name(), faults, looked_at);
    checks.warn(&warnings);
    if has_mtp && policy.verify.min_mtp_acceptance == 0.0 {
        checks.warn(&[Fault::new(Place::file(container), FaultKind::DraftsUnasked)]);
    }
    let sources: BTreeSet<&str> =
        evidence.verify.iter().filter_map(|told| told.report.source_model_sha256.as_deref()).collect();
    let (mut faults, looked_at) = scores(container, &evidence.score, &policy.score);
    faults.extend(evidence.score.iter().flat_map(|told| baseline_faults(told, &sources)));
    checks.check("score", faults, looked_at);
}

/// `verify.json, tokens.json`
fn names<R>(told: &[&&Told<R>]) -> String {
    let name = |told: &&&Told<R>| told.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    told.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// Share of predictions that must be the source's where the policy names none: a container of four bits has most of them,
/// one that is wrecked next to none.
const LEAST_AGREEMENT: f64 = 0.5;

/// Whether a report went through a level.
fn reaches(report: &VerifyReport, level: Level) -> bool {
    let passed = |name: &str| report.checks.iter().any(|check| check.name == name && check.status == CheckStatus::Pass);
    match level {
        Level::Structure => passed("census") && passed("manifest"),
        Level::Payload => passed("checksums"),
        Level::Weights => passed("weights"),
        Level::Tokens => passed("tokens"),
    }
}

/// What the tokens of all reports show: what is wrong (`None` when there is nothing to look at), what is odd, and a summary.
fn tokens(good: &[&Told<VerifyReport>], policy: &VerifyPolicy) -> (Option<Vec<Fault>>, Vec<Fault>, String) {
    let compared = |entry: &VerifyTokens| {
        entry.teacher_forced.as_ref().is_some_and(|t| t.total > 0) || entry.greedy.as_ref().is_some_and(|g| g.total > 0)
    };
    let (mut faults, mut warnings) = (Vec::new(), Vec::new());
    let (mut devices, mut references) = (BTreeSet::new(), BTreeMap::new());
    let mut of_source = 0;
    for told in good.iter().filter(|told| reaches(&told.report, Level::Tokens)) {
        let report = &told.report;
        for entry in report.tokens.iter().filter(|entry| compared(entry)) {
            if is_used(entry) {
                devices.insert(entry.device.clone());
            } else {
                let (device, backend) = (entry.device.clone(), entry.backend.clone());
                warnings.push(told.fault(FaultKind::DeviceNotUsed { device, backend }));
            }
            if entry.written_by.is_some() && entry.written_by == report.model_sha256 {
                warnings.push(told.fault(FaultKind::ReferenceOfItself));
            } else if entry.reference != OWN_REFERENCE {
                // What is greedy is part of what is teacher-forced.
                let forced = entry.teacher_forced.as_ref().map_or(0, |forced| forced.total);
                let greedy = entry.greedy.as_ref().map_or(0, |greedy| greedy.total);
                let most: &mut u64 = references.entry((entry.reference.clone(), entry.number)).or_default();
                *most = forced.max(greedy).max(*most);
            }
        }
        of_source = report.source_agreement.as_ref().map_or(0, |agreement| agreement.total).max(of_source);
        faults.extend(token_figures(report, policy).into_iter().map(|kind| told.fault(kind)));
    }
    let source = of_source > 0;
    let found = references.len() as u64 + u64::from(source);
    let predictions = references.values().fold(of_source, |sum, total| sum.saturating_add(*total));
    if found == 0 {
        return (None, warnings, String::new());
    }
    let place = || good.first().map_or(Place::default(), |told| Place::file(&told.path));
    let mut at_least = |what: &str, found: u64, least: u64| {
        if found < least {
            faults.push(Fault::new(place(), missed(what, &format!("at least {least}"), &found.to_string())));
        }
    };
    at_least("the number of devices that computed", devices.len() as u64, policy.min_devices);
    at_least("the number of references", found, policy.min_references);
    at_least("the number of predictions", predictions, policy.min_predictions);
    let has = |wanted: &str| devices.iter().any(|device| device.split(':').next() == Some(wanted));
    for wanted in policy.devices.iter().filter(|wanted| !has(wanted)) {
        faults.push(Fault::new(place(), missed("the devices that computed", wanted, &listed(&devices))));
    }
    warnings.dedup_by(|a, b| a.to_string() == b.to_string());
    let with_source = if source { " and the source" } else { "" };
    let looked_at = format!("{}{with_source}, on {}", counted(references.len(), "reference"), listed(&devices));
    (Some(faults), warnings, looked_at)
}

/// Whether an entry was computed where it says: a GPU without a kernel that ran has not.
fn is_used(entry: &VerifyTokens) -> bool {
    let device = entry.device.split(':').next().unwrap_or_default();
    let ran = entry.gpu.as_ref().is_none_or(|gpu| gpu.dispatches > 0);
    let is_gpu = matches!(device, "cuda" | "vulkan");
    entry.backend == device && ran && (!is_gpu || entry.gpu.is_some())
}

fn listed(names: &BTreeSet<String>) -> String {
    if names.is_empty() { "none".to_owned() } else { names.iter().cloned().collect::<Vec<_>>().join(", ") }
}

fn missed(what: &str, expected: &str, found: &str) -> FaultKind {
    FaultKind::PolicyMissed { what: what.to_owned(), expected: expected.to_owned(), found: found.to_owned() }
}

/// What was done in another mode than the exact one: rounded sums show that a device computes, not that the container's weights give
/// these numbers.
fn rounded(what: &str, mode: &str) -> Option<FaultKind> {
    let exact = <&str>::from(Mode::Exact);
    (mode != exact).then(|| missed(&format!("the mode in which {what}"), exact, mode))
}

/// The figures of a report that miss the policy.
fn token_figures(report: &VerifyReport, policy: &VerifyPolicy) -> Vec<FaultKind> {
    let mut kinds = Vec::new();
    kinds.extend(report.tokens.iter().find_map(|entry| rounded("tokens were verified", &entry.mode)));
    let forced = || report.tokens.iter().filter_map(|entry| entry.teacher_forced.as_ref());
    let (ties, total) = forced().fold((0, 0), |(ties, total), t| (ties + t.near_tie, total + t.total));
    if ties as f64 > policy.max_near_tie_share * total as f64 {
        let expected = format!("at most {} of all", policy.max_near_tie_share);
        kinds.push(missed("the number of near-ties", &expected, &format!("{ties} of {total}")));
    }
    if let Some(most) = policy.max_abs_logprob_diff {
        let apart = report.tokens.iter().filter_map(|entry| entry.max_abs_logprob_diff).fold(0.0, f64::max);
        if apart > most {
            let what = "the largest difference of a log-probability";
            kinds.push(missed(what, &format!("at most {most}"), &apart.to_string()));
        }
    }
    match (&report.source_agreement, policy.min_source_agreement) {
        (Some(agreement), least) => {
            let least = least.unwrap_or(LEAST_AGREEMENT);
            if (agreement.matched as f64) < least * agreement.total as f64 {
                let found = format!("{} of {}", agreement.matched, agreement.total);
                kinds.push(missed("the agreement with the source", &format!("at least {least} of all"), &found));
            }
        }
        (None, Some(_)) => {
            kinds.push(missed("the agreement with the source", "a verification with --source", "not known"));
        }
        (None, None) => {}
    }
    kinds
}

/// What is wrong with the MTP head's drafts: each report that measured some must reach the share, and one must have.
fn drafts(container: &Path, evidence: &Evidence, least: f64) -> Vec<Fault> {
    let of_verify = |report: &VerifyReport| {
        let entries = report.tokens.iter().filter_map(|entry| entry.mtp.as_ref());
        let (accepted, proposed) = entries.fold((0, 0), |(a, p), mtp| (a + mtp.accepted, p + mtp.proposed));
        // `verify` lets the model draft along a text of its own, too: that is little, but more than nothing.
        let own = report.own_drafts.map_or((0, 0), |own| (own.accepted, own.proposed));
        if proposed > 0 { (accepted, proposed) } else { own }
    };
    let of_score = |report: &ScoreReport| {
        let mtp = report.probes.as_ref().and_then(|probes| probes.mtp.as_ref());
        mtp.map_or((0, 0), |mtp| (mtp.accepted, mtp.proposed))
    };
    let verified = evidence.verify.iter().map(|told| (&told.path, of_verify(&told.report)));
    let scored = evidence.score.iter().map(|told| (&told.path, of_score(&told.report)));
    let measured: Vec<_> = verified.chain(scored).filter(|(_, (_, proposed))| *proposed > 0).collect();
    if measured.is_empty() {
        let command = format!("{} --probes", score_command(container));
        let kind = FaultKind::EvidenceMissing { what: "a measurement of the MTP head's drafts", command };
        return vec![Fault::new(Place::file(container), kind)];
    }
    let few = measured.into_iter().filter(|(_, (accepted, proposed))| (*accepted as f64) < least * *proposed as f64);
    few.map(|(path, (accepted, proposed))| {
        let (expected, found) = (format!("at least {least} of all"), format!("{accepted} of {proposed}"));
        Fault::new(Place::file(path), missed("the number of accepted drafts of the MTP head", &expected, &found))
    })
    .collect()
}

/// What is wrong with the scores, and a summary.
fn scores(container: &Path, told: &[Told<ScoreReport>], policy: &ScorePolicy) -> (Vec<Fault>, String) {
    let (mut faults, mut tasks, mut texts) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    for told in told {
        faults.extend(score_figures(&told.report, policy).into_iter().map(|kind| told.fault(kind)));
        let Some(baseline) = &told.report.baseline else { continue };
        tasks.extend(baseline.tasks.iter().map(|task| task.task.clone()));
        texts.extend(baseline.texts.iter().map(|text| text.name.clone()));
    }
    if tasks.is_empty() && texts.is_empty() {
        let what = if told.is_empty() { "a score report" } else { "a score that is compared with the source's" };
        let kind = FaultKind::EvidenceMissing { what, command: score_command(container) };
        faults.push(Fault::new(Place::file(container), kind));
        return (faults, String::new());
    }
    let counts = [("tasks", tasks.len(), policy.min_tasks), ("texts", texts.len(), policy.min_texts)];
    for (what, found, least) in counts {
        if (found as u64) < least {
            let kind = missed(&format!("the number of {what}"), &format!("at least {least}"), &found.to_string());
            faults.push(Fault::new(told.first().map_or(Place::default(), |told| Place::file(&told.path)), kind));
        }
    }
    (faults, format!("{} and {}, against a checkpoint", counted(tasks.len(), "task"), counted(texts.len(), "text")))
}

/// A baseline that is not the source, as far as the reports know it.
fn baseline_faults(told: &Told<ScoreReport>, sources: &BTreeSet<&str>) -> Option<Fault> {
    let baseline = told.report.baseline.as_ref()?;
    let kind = baseline.model_kind.as_deref().unwrap_or("a model of which nothing is known");
    if kind != "checkpoint" {
        return Some(told.fault(FaultKind::BaselineNotSource { found: kind.to_owned() }));
    }
    let other = sources.iter().find(|source| **source != baseline.model_sha256)?;
    let (expected, found) = ((*other).to_owned(), baseline.model_sha256.clone());
    Some(told.fault(FaultKind::BaselineOtherSource { expected, found }))
}

/// What of a score report misses the policy.
fn score_figures(report: &ScoreReport, policy: &ScorePolicy) -> Vec<FaultKind> {
    if let Some(part) = &report.part {
        return vec![FaultKind::ReportOfPart { part: part.clone(), command: "score" }];
    }
    let mut kinds = Vec::new();
    kinds.extend(rounded("the container was scored", &report.mode));
    // Reports of versions that did not tell may be of either.
    let of_baseline = report.baseline.as_ref().map(|baseline| baseline.mode.as_deref().unwrap_or("not known"));
    kinds.extend(of_baseline.and_then(|mode| rounded("the baseline was scored", mode)));
    if report.verdict == Some(Verdict::Fail) {
        kinds.push(FaultKind::ReportSaysNo);
    }
    if !report.excluded.is_empty() && !policy.allow_excluded {
        kinds.push(missed("the number of rows without a score", "0", &report.excluded.len().to_string()));
    }
    for task in report.tasks.iter().filter(|task| task.n < policy.min_questions) {
        let expected = format!("at least {}", policy.min_questions);
        kinds.push(missed(&format!("the number of questions of {}", task.task), &expected, &task.n.to_string()));
    }
    for text in report.texts.iter().filter(|text| text.tokens < policy.min_tokens) {
        let expected = format!("at least {}", policy.min_tokens);
        kinds.push(missed(&format!("the number of tokens of {}", text.name), &expected, &text.tokens.to_string()));
    }
    if let Some(baseline) = &report.baseline {
        if baseline.model_sha256 == report.model_sha256 {
            kinds.push(FaultKind::BaselineSameModel { hash: baseline.model_sha256.clone() });
        }
        kinds.extend(compared_figures(baseline, policy));
    }
    kinds
}

/// What of a comparison misses the policy. A figure that is no number misses it, too.
fn compared_figures(baseline: &ScoreBaseline, policy: &ScorePolicy) -> Vec<FaultKind> {
    let mut kinds = Vec::new();
    for compared in baseline.compared.iter().filter(|compared| !compared.is_whole() && !policy.allow_excluded) {
        let found = format!("{} of {}", compared.compared, compared.rows);
        kinds.push(missed(&format!("the number of compared rows of {}", compared.name), "all", &found));
    }
    for task in &baseline.tasks {
        for (metric, paired) in [("acc", &task.acc), ("acc_norm", &task.acc_norm)] {
            let least = if policy.conclusive { paired.interval.0 } else { paired.difference };
            if least < -policy.max_accuracy_drop || least.is_nan() {
                let (low, high) = paired.interval;
                let found = format!("{:+.4} [{low:+.4}, {high:+.4}]", paired.difference);
                let what = format!("the difference of {} {metric} to the source", task.task);
                kinds.push(missed(&what, &bound("at least", -policy.max_accuracy_drop, policy), &found));
            }
        }
    }
    for text in &baseline.texts {
        let most = if policy.conclusive { text.interval.map_or(f64::NAN, |(_, high)| high) } else { text.ratio };
        if most > 1.0 + policy.max_perplexity_increase || most.is_nan() {
            let interval = text.interval.map_or(String::new(), |(low, high)| format!(" [{low:.4}, {high:.4}]"));
            let what = format!("the perplexity of {} over the source's", text.name);
            let expected = bound("at most", 1.0 + policy.max_perplexity_increase, policy);
            kinds.push(missed(&what, &expected, &format!("{:.4}{interval}", text.ratio)));
        }
    }
    let limits = [
        ("the mean KL divergence", "at most", policy.max_kl_mean, baseline.kl_mean, 1.0),
        ("the share of equal best tokens", "at least", policy.min_top1_agreement, baseline.top1_agreement, -1.0),
    ];
    for (what, word, limit, found, sign) in limits {
        let Some(limit) = limit else { continue };
        let met = found.is_some_and(|found| sign * found <= sign * limit);
        if !met {
            let found = found.map_or("not known".to_owned(), |found| format!("{found:.5}"));
            kinds.push(missed(what, &format!("{word} {limit}"), &found));
        }
    }
    kinds
}

fn bound(word: &str, limit: f64, policy: &ScorePolicy) -> String {
    format!("{word} {limit:.4}{}", if policy.conclusive { " of the whole interval" } else { "" })
}
