//! The report as a page for people: everything in one file, nothing loaded from elsewhere.

use std::fmt::Write;

use super::plot::{Point, escape, intervals, label, line};
use crate::error::counted;
use crate::report::{ScoreBaseline, ScoreProbes, ScoreReport, Verdict};

/// Rows that a list of the page shows.
const MAX_LISTED: usize = 50;

/// A question that the model does badly at, with its texts.
#[derive(Debug, Clone, PartialEq)]
pub struct WorstQuestion {
    /// The task.
    pub task: String,
    /// Number of the row.
    pub row: u64,
    /// What stands before the choices.
    pub ctx: String,
    /// Choices with the model's and the baseline's log-probabilities.
    pub choices: Vec<(String, f64, Option<f64>)>,
    /// The right choice.
    pub gold: usize,
    /// By how many nats the right choice is behind the best other one; with a baseline how many more than there.
    pub behind_by: f64,
}

const STYLE: &str = r#"
:root{--ink:#1b1f24;--soft:#57606a;--line:#d0d7de;--page:#fff;--panel:#f6f8fa;--model:#0b62c4;--baseline:#8a6100;--bad:#b3261e;--good:#1a7f37}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa4af;--line:#363d47;--page:#0f1318;--panel:#181d24;--model:#6cb1ff;--baseline:#e0b04c;--bad:#ff8a80;--good:#56d364}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:62rem;padding:1.5rem;font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page)}
h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin-top:2.2rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:7rem}th{color:var(--soft);font-weight:600}
.said td:last-child,.said th:last-child{text-align:left;white-space:normal;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:0}dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.verdict{display:inline-block;padding:.15rem .7rem;border-radius:1rem;border:2px solid;font-weight:700}.pass{color:var(--good)}.fail{color:var(--bad)}
svg{width:100%;height:auto;background:var(--panel);border-radius:.4rem;margin:.6rem 0}
svg .grid{stroke:var(--line)}svg .nil{stroke:var(--soft)}svg .mark{stroke:var(--bad);stroke-dasharray:4 3}
svg text{font:13px system-ui,sans-serif;fill:var(--soft)}svg .tick{text-anchor:middle}svg .name{text-anchor:end;fill:var(--ink)}
svg .interval{stroke-width:2.5}svg .model{stroke:var(--model);fill:var(--model)}svg .baseline{stroke:var(--baseline);fill:var(--baseline)}
svg .curve{fill:none;stroke:var(--model);stroke-width:2}
.question{background:var(--panel);border-radius:.4rem;padding:.7rem 1rem;margin:.7rem 0}.question p{margin:.2rem 0;white-space:pre-wrap;overflow-wrap:anywhere}
.question td:first-child{white-space:pre-wrap;overflow-wrap:anywhere}.gold{font-weight:700}.note{color:var(--soft)}
.key span{margin-right:1.2rem}.key .model{color:var(--model)}.key .baseline{color:var(--baseline)}
"#;

/// The page.
pub fn page(report: &ScoreReport, worst: &[WorstQuestion]) -> String {
    let title = format!("Scores of {}", escape(&report.path));
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n<style>{STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n"
    );
    head(&mut out, report);
    tasks(&mut out, report);
    texts(&mut out, report);
    if let Some(baseline) = &report.baseline {
        comparison(&mut out, report, baseline);
    }
    questions(&mut out, worst, report.baseline.is_some());
    if let Some(probes) = &report.probes {
        generated(&mut out, probes);
    }
    excluded(&mut out, report);
    out + "</body></html>\n"
}

fn head(out: &mut String, report: &ScoreReport) {
    if let Some(verdict) = report.verdict {
        let class = if verdict == Verdict::Pass { "pass" } else { "fail" };
        let _ = writeln!(out, "<p><span class=\"verdict {class}\">{}</span></p>", verdict.name());
    }
    let mut facts = vec![
        ("model", format!("{} ({})", report.path, report.kind)),
        ("model hash", report.model_sha256.clone()),
        ("tokenizer hash", report.tokenizer_sha256.clone()),
        ("prefix", if report.prefix.is_empty() { "none".to_owned() } else { report.prefix.clone() }),
        ("computed by", format!("{}, {}", report.backend, report.mode)),
        ("requests", report.requests.len().to_string()),
    ];
    for input in &report.inputs {
        let what = format!("{} {}: {}", input.kind, input.name, input.rows_text());
        facts.push(("scored", format!("{what}; {}, SHA-256 {}", input.file, input.sha256)));
    }
    if let Some(baseline) = &report.baseline {
        facts.push(("baseline", format!("{} ({})", baseline.path, baseline.kind)));
        facts.push(("baseline hash", baseline.model_sha256.clone()));
    }
    let facts: Vec<String> =
        facts.iter().map(|(name, value)| format!("<dt>{name}</dt><dd>{}</dd>", escape(value))).collect();
    let _ = writeln!(out, "<dl>{}</dl>", facts.join(""));
}

/// A table; the cells of `rows` are escaped already.
fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let cells = |tag: &str, cells: &mut dyn Iterator<Item = &str>| -> String {
        cells.map(|cell| format!("<{tag}>{cell}</{tag}>")).collect()
    };
    let rows: Vec<String> =
        rows.iter().map(|row| format!("<tr>{}</tr>", cells("td", &mut row.iter().map(String::as_str)))).collect();
    let header = cells("th", &mut header.iter().copied());
    format!(
        "<div class=\"scroll\"><table><thead><tr>{header}</tr></thead><tbody>{}</tbody></table></div>\n",
        rows.join("\n")
    )
}

fn percent(value: f64) -> String {
    format!("{:.2} %", 100.0 * value)
}

fn tasks(out: &mut String, report: &ScoreReport) {
    if report.tasks.is_empty() {
        return;
    }
    *out += "<h2>Tasks</h2>\n";
    let with = |value: f64, stderr: Option<f64>| match stderr {
        Some(stderr) => format!("{} ± {:.2}", percent(value), 100.0 * stderr),
        None => percent(value),
    };
    let row = |task: &crate::report::ScoreTask| {
        vec![
            escape(&task.task),
            task.n.to_string(),
            with(task.acc, task.stderr),
            with(task.acc_norm, task.stderr_norm),
            percent(task.acc_norm_harness),
            percent(task.acc_bytes),
        ]
    };
    let rows: Vec<Vec<String>> = report.tasks.iter().map(row).collect();
    *out += &table(&["task", "questions", "acc", "acc_norm", "acc_norm_harness", "acc_bytes"], &rows);
    let mut points = Vec::new();
    for task in &report.tasks {
        let difference = report.baseline.iter().flat_map(|b| &b.tasks).find(|other| other.task == task.task);
        for (metric, value, interval) in
            [("acc", task.acc, task.interval), ("acc_norm", task.acc_norm, task.interval_norm)]
        {
            let name = format!("{} {metric}", task.task);
            if let Some(difference) = difference {
                let paired = if metric == "acc" { &difference.acc } else { &difference.acc_norm };
                let interval = Some(super::statistics::wilson(paired.baseline, difference.n));
                points.push(Point { name: name.clone(), class: "baseline", value: paired.baseline, interval });
            }
            points.push(Point { name, class: "model", value, interval: Some(interval) });
        }
    }
    key(out, report.baseline.is_some());
    *out += &intervals("Accuracy with 95 % intervals", &points, &[]);
    *out += "<p class=\"note\">± is the standard error, lines are 95 % intervals (Wilson). acc_norm divides by characters with the leading space, acc_norm_harness without it, acc_bytes by bytes.</p>\n";
}

fn key(out: &mut String, with_baseline: bool) {
    if with_baseline {
        *out += "<p class=\"key\"><span class=\"baseline\">● baseline</span><span class=\"model\">● model</span></p>\n";
    }
}

fn texts(out: &mut String, report: &ScoreReport) {
    if report.texts.is_empty() {
        return;
    }
    *out += "<h2>Texts</h2>\n";
    let row = |text: &crate::report::ScoreText| {
        vec![
            escape(&text.name),
            text.documents.to_string(),
            text.tokens.to_string(),
            format!("{:.4}", text.ppl),
            format!("{:.5}", text.nll_per_token),
            format!("{:.5}", text.bits_per_byte),
        ]
    };
    let rows: Vec<Vec<String>> = report.texts.iter().map(row).collect();
    *out += &table(&["text", "documents", "tokens", "perplexity", "nats per token", "bits per byte"], &rows);
}

fn comparison(out: &mut String, report: &ScoreReport, baseline: &ScoreBaseline) {
    *out += "<h2>Against the baseline</h2>\n";
    if baseline.model_sha256 == report.model_sha256 {
        *out += "<p class=\"fail\">The baseline is the same model: nothing can differ.</p>\n";
    }
    for compared in baseline.compared.iter().filter(|compared| !compared.is_whole()) {
        let _ = writeln!(out, "<p class=\"fail\">{}: {}</p>", escape(&compared.name), compared.text());
    }
    let (mut rows, mut points, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for task in &baseline.tasks {
        for (metric, paired) in [("acc", &task.acc), ("acc_norm", &task.acc_norm)] {
            let name = format!("{} {metric}", task.task);
            let (low, high) = paired.interval;
            rows.push(vec![
                escape(&name),
                percent(paired.baseline),
                percent(paired.model),
                format!("{:+.2} [{:+.2}, {:+.2}] points", 100.0 * paired.difference, 100.0 * low, 100.0 * high),
                format!("+{} −{}", paired.gained, paired.lost),
                format!("{:.3}", paired.mcnemar),
            ]);
            points.push(Point { name, class: "model", value: paired.difference, interval: Some(paired.interval) });
        }
    }
    for text in &baseline.texts {
        let interval = text.interval.map_or(String::new(), |(low, high)| format!(" [{low:.4}, {high:.4}]"));
        rows.push(vec![
            escape(&format!("{} perplexity", text.name)),
            format!("{:.4}", text.baseline),
            format!("{:.4}", text.model),
            format!("× {:.4}{interval}", text.ratio),
            String::new(),
            String::new(),
        ]);
        ratios.push(Point { name: text.name.clone(), class: "model", value: text.ratio, interval: text.interval });
    }
    *out += &table(&["figure", "baseline", "model", "difference [95 %]", "flipped", "McNemar p"], &rows);
    let threshold = baseline.threshold;
    if !points.is_empty() {
        let mut marks = vec![(0.0, "")];
        marks.extend(threshold.map(|threshold| (-threshold, "threshold")));
        *out += "<h3>Difference of accuracy, 95 % intervals</h3>\n";
        *out += &intervals("Difference of accuracy with 95 % intervals", &points, &marks);
    }
    if !ratios.is_empty() {
        let mut marks = vec![(1.0, "")];
        marks.extend(threshold.map(|threshold| (1.0 + threshold, "threshold")));
        *out += "<h3>Perplexity over the baseline's, 95 % intervals</h3>\n";
        *out += &intervals("Ratio of perplexities with 95 % intervals", &ratios, &marks);
    }
    divergence(out, baseline);
    flipped(out, baseline);
}

fn divergence(out: &mut String, baseline: &ScoreBaseline) {
    let (Some(mean), Some(agreement), Some(most)) = (baseline.kl_mean, baseline.top1_agreement, baseline.kl_max) else {
        return;
    };
    let interval = baseline.kl_interval.map_or(String::new(), |(low, high)| format!(" [{low:.5}, {high:.5}]"));
    let method = match baseline.kl_method.as_str() {
        "exact" => "whole distributions were compared",
        _ => {
            "the baseline's most probable tokens and the mass of the others were compared: at most the true divergence"
        }
    };
    let _ = writeln!(
        out,
        "<h3>Next-token distributions</h3>\n<p>Mean KL divergence {mean:.5}{interval} nats, largest {most:.3}; the best token is the same before {} of {} tokens ({method}).</p>",
        percent(agreement),
        baseline.positions
    );
    let points: Vec<(f64, f64)> =
        baseline.kl_by_position.iter().map(|bin| ((bin.from + bin.to + 1) as f64 / 2.0, bin.kl_mean)).collect();
    *out += &line("Mean KL divergence by position", &points, "scored token of a text, from 1");
}

fn flipped(out: &mut String, baseline: &ScoreBaseline) {
    let all = baseline.tasks.iter().flat_map(|task| task.flipped.iter().map(move |flipped| (task, flipped)));
    let count = all.clone().count();
    if count == 0 {
        return;
    }
    let row = |(task, flipped): (&crate::report::ScoreTaskDifference, &crate::report::ScoreFlipped)| {
        let to = if flipped.model == flipped.gold { "wrong → right" } else { "right → wrong" };
        let number = |choice: u64| choice.to_string();
        vec![
            format!("{} row {}", escape(&task.task), flipped.row),
            flipped.metric.clone(),
            to.to_owned(),
            number(flipped.gold),
            number(flipped.baseline),
            number(flipped.model),
        ]
    };
    let rows: Vec<Vec<String>> = all.take(MAX_LISTED).map(row).collect();
    let _ = write!(
        out,
        "<h3>Questions that flipped</h3>\n<p class=\"note\">Choices are counted from 0, as in score.json and requests.csv.</p>\n{}",
        table(&["question", "by", "change", "right choice", "baseline's", "model's"], &rows)
    );
    if count > MAX_LISTED {
        let _ = writeln!(out, "<p class=\"note\">and {} more, in score.json</p>", count - MAX_LISTED);
    }
}

fn questions(out: &mut String, worst: &[WorstQuestion], with_baseline: bool) {
    if worst.is_empty() {
        return;
    }
    let than = if with_baseline { "that lost most against the baseline" } else { "answered wrong most surely" };
    let _ = writeln!(
        out,
        "<h2>Worst questions</h2>\n<p class=\"note\">Those {than}; log-probabilities are sums over tokens.</p>"
    );
    for question in worst {
        let mut rows = Vec::new();
        for (choice, (text, model, baseline)) in question.choices.iter().enumerate() {
            let text = escape(text);
            let text = if choice == question.gold { format!("<span class=\"gold\">{text} ✓</span>") } else { text };
            let mut row = vec![text];
            row.extend(with_baseline.then(|| baseline.map_or(String::new(), |value| format!("{value:.3}"))));
            row.push(format!("{model:.3}"));
            rows.push(row);
        }
        let header: &[&str] = if with_baseline { &["choice", "baseline", "model"] } else { &["choice", "model"] };
        let _ = writeln!(
            out,
            "<div class=\"question\"><p class=\"note\">{} row {}, {} nats</p><p>{}</p>{}</div>",
            escape(&question.task),
            question.row,
            label(question.behind_by),
            escape(&question.ctx),
            table(header, &rows)
        );
    }
}

fn generated(out: &mut String, probes: &ScoreProbes) {
    let _ = write!(
        out,
        "<h2>Generation</h2>\n<p>{} of {} texts stopped by themselves, {} ran into a repetition, {} hold broken characters.",
        probes.stopped,
        probes.texts.len(),
        probes.repeated,
        probes.with_replacement_characters
    );
    if let Some(mtp) = &probes.mtp {
        let share = mtp.acceptance.map_or("no drafts".to_owned(), percent);
        let _ = write!(
            out,
            " MTP head ({}): {} of {} drafts accepted, {share}.",
            escape(&mtp.format),
            mtp.accepted,
            mtp.proposed
        );
    }
    *out += "</p>\n";
    for text in &probes.texts {
        let period = text.period.map_or(String::new(), |period| format!(", period {period}"));
        let distinct = text.distinct.map(|share| share.map_or("–".to_owned(), |share| format!("{share:.2}")));
        let _ = writeln!(
            out,
            "<div class=\"question\"><p class=\"note\">{} tokens, {}{period}; distinct 1–4-grams {}; {} replacement characters</p><p><b>{}</b>{}</p></div>",
            text.tokens,
            escape(&text.stop_reason),
            distinct.join(", "),
            text.replacement_characters,
            escape(&text.prompt),
            escape(&text.text)
        );
    }
}

fn excluded(out: &mut String, report: &ScoreReport) {
    if report.excluded.is_empty() {
        return;
    }
    let row = |row: &crate::report::ScoreExcluded| vec![escape(&row.input), escape(&row.message)];
    let rows: Vec<Vec<String>> = report.excluded.iter().take(MAX_LISTED).map(row).collect();
    let _ = write!(
        out,
        "<h2>Not scored: {}</h2>\n{}",
        counted(report.excluded.len() as u64, "row"),
        table(&["input", "why"], &rows).replacen("<table>", "<table class=\"said\">", 1)
    );
}
