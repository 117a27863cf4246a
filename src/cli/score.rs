//! `coliconv score`

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use super::progress::duration;
use super::running::{Running, device_experts};
use super::{Talk, findings_text, print, print_json, size, tell, text};
use crate::error::{Fault, FaultKind, Faults, Place, escaped};
use crate::limits;
use crate::part::Part;
use crate::report::{ScoreBaseline, ScoreReport, ScoreShares, Verdict};
use crate::score::encode::PrefixChoice;
use crate::score::input::{Given, Kind, Sampling};
use crate::score::{Options, Watch, answers, score};

/// Arguments of `score`.
#[derive(Debug, Args)]
#[command(mut_arg("memory", |arg| arg.help("Memory for the models, for one 16G [default: what is available]")))]
pub(crate) struct Arguments {
    /// Directory of a container or checkpoint
    path: PathBuf,
    /// Questions with choices, as JSON lines or Parquet: ctx, choices and gold, or as hellaswag, arc, mmlu, winogrande and
    /// piqa are published; may be given several times
    #[arg(long, value_name = "NAME=FILE")]
    task: Vec<String>,
    /// Text, each line a document; may be given several times
    #[arg(long, value_name = "NAME=FILE")]
    text: Vec<String>,
    /// Token ids, a line each: ctxlen contlen id…; the answers are `logprob contlen greedy`
    #[arg(long, value_name = "FILE")]
    requests: Option<PathBuf>,
    /// What to compare with: the --out directory of a finished run, or a checkpoint or container
    #[arg(long, value_name = "RESULTS|MODEL")]
    baseline: Option<PathBuf>,
    /// The answer is no if an accuracy is lower than the baseline's by more than this, or a perplexity higher by more than
    /// this share; for one 0.02
    #[arg(long, value_name = "X")]
    threshold: Option<String>,
    /// Score only so many rows of each task and text, drawn at random
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// Other seeds draw other rows
    #[arg(long, value_name = "S", default_value_t = 0, hide_default_value = true)]
    seed: u64,
    /// What stands before every text: auto ([gMASK]<sop> for GLM), none, or this text; it is never doubled
    #[arg(long, value_name = "auto|none|TEXT", default_value = "auto")]
    prefix: String,
    /// Let the model generate, too: whether it stops, repeats itself, or breaks characters
    #[arg(long)]
    probes: bool,
    /// Score only a slice of the rows, for one 2/8; several parts can share one --out
    #[arg(long, value_name = "K/N")]
    part: Option<Part>,
    /// Join the parts and write the reports; nothing is computed
    #[arg(long, conflicts_with = "part")]
    finish: bool,
    /// Directory for results.jsonl, score.json, requests.csv and report.html; an interrupted run goes on there
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Rows that cannot be scored are no reason for exit code 1
    #[arg(long)]
    allow_excluded: bool,
    #[command(flatten)]
    running: Running,
    #[command(flatten)]
    pub(super) talk: Talk,
}

impl Arguments {
    fn options(&self) -> Result<Options, Fault> {
        let device = self.running.devices()?.first().copied();
        let mode = self.running.mode()?;
        self.running.check_device_memory(device.as_slice())?;
        if self.limit == Some(0) {
            return wrong("--limit", "a number above 0", "0");
        }
        Ok(Options {
            inputs: self.inputs()?,
            sampling: Sampling { limit: self.limit, seed: self.seed },
            prefix: match self.prefix.as_str() {
                "auto" => PrefixChoice::Auto,
                "none" => PrefixChoice::None,
                text => PrefixChoice::Text(text.to_owned()),
            },
            baseline: self.baseline.clone(),
            threshold: self.threshold.as_deref().map(threshold).transpose()?,
            out: self.out.clone(),
            probes: self.probes,
            part: self.part,
            finish: self.finish,
            device,
            mode,
            unused: self.running.unused()?,
            threads: self.running.threads,
            memory: self.running.memory,
            device_memory: self.running.device_memory,
        })
    }

    /// The request file first, then tasks, then texts.
    fn inputs(&self) -> Result<Vec<Given>, Fault> {
        let requests = self
            .requests
            .iter()
            .map(|path| Ok(Given { kind: Kind::Requests, name: REQUESTS.to_owned(), path: path.clone() }));
        let named = |kind, flag, argument: &String| match argument.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Given { kind, name: name.to_owned(), path: PathBuf::from(path) })
            }
            _ => wrong(flag, "NAME=FILE", argument),
        };
        let tasks = self.task.iter().map(|argument| named(Kind::Task, "--task", argument));
        let texts = self.text.iter().map(|argument| named(Kind::Text, "--text", argument));
        requests.chain(tasks).chain(texts).collect()
    }
}

/// What the request file is called in reports.
const REQUESTS: &str = "requests";

fn wrong<T>(flag: &'static str, expected: &'static str, found: &str) -> Result<T, Fault> {
    let found = found.to_owned();
    Err(Fault::new(Place::default(), FaultKind::FlagValue { flag, expected, found }))
}

fn threshold(text: &str) -> Result<f64, Fault> {
    match text.parse::<f64>() {
        Ok(threshold) if (0.0..=1.0).contains(&threshold) => Ok(threshold),
        _ => wrong("--threshold", "a number from 0 to 1", text),
    }
}

/// Runs `score`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Faults> {
    let report = score(&arguments.path, &arguments.options()?, &Meter::new(arguments.talk.quiet))?;
    tell(&findings_text(&report.warnings));
    tell(&excluded_text(&report));
    let only_requests = arguments.requests.is_some() && arguments.task.is_empty() && arguments.text.is_empty();
    let printed = match (arguments.talk.json, only_requests) {
        (true, _) => print_json(&report),
        (false, true) => {
            tell(&comparison_text(&report));
            print(&answers(&report, REQUESTS))
        }
        (false, false) => print(&report_text(&report, arguments.out.as_deref())),
    };
    let compared = report.baseline.iter().flat_map(|baseline| &baseline.compared).all(|compared| compared.is_whole());
    let whole = report.excluded.is_empty() && compared;
    let generated = report.probes.is_some() || !arguments.probes;
    let good = report.verdict != Some(Verdict::Fail) && generated && (whole || arguments.allow_excluded);
    Ok(if printed == ExitCode::SUCCESS && !good { ExitCode::from(1) } else { printed })
}

/// The first rows without a score, and each hint once.
fn excluded_text(report: &ScoreReport) -> String {
    let mut out = String::new();
    let mut hints: Vec<&str> = Vec::new();
    for row in report.excluded.iter().take(limits::MAX_PRINTED_FINDINGS) {
        out += &format!("not scored: {}: {}\n", escaped(&row.file), row.message);
    }
    if let Some(more @ 1..) = report.excluded.len().checked_sub(limits::MAX_PRINTED_FINDINGS) {
        out += &format!("… and {more} more rows ({} in all)\n", report.excluded.len());
    }
    for hint in report.excluded.iter().filter_map(|row| row.hint.as_deref()) {
        if !hints.contains(&hint) {
            hints.push(hint);
            out += &format!("hint: {hint}\n");
        }
    }
    out
}

fn report_text(report: &ScoreReport, out: Option<&Path>) -> String {
    let mut text = format!("{} ({})\n", escaped(&report.path), report.kind);
    if let Some(part) = &report.part {
        return text
            + &format!("part {part}: {} requests scored; join the parts with --finish\n", report.requests.len());
    }
    for input in &report.inputs {
        text += &format!("{} {}: {}\n", input.kind, escaped(&input.name), input.rows_text());
    }
    if !report.tasks.is_empty() {
        let share = |value: f64, stderr: Option<f64>| match stderr {
            Some(stderr) => format!("{value:.4} ± {stderr:.4}"),
            None => format!("{value:.4}"),
        };
        let row = |task: &crate::report::ScoreTask| {
            vec![
                escaped(&task.task).to_string(),
                size::grouped(task.n),
                share(task.acc, task.stderr),
                share(task.acc_norm, task.stderr_norm),
                format!("{:.4}", task.acc_norm_harness),
                format!("{:.4}", task.acc_bytes),
            ]
        };
        let header = ["task", "n", "acc", "acc_norm", "acc_norm_harness", "acc_bytes"];
        text += &format!("\n{}", text::table(&header, &header[1..], report.tasks.iter().map(row).collect()));
    }
    if !report.texts.is_empty() {
        let row = |found: &crate::report::ScoreText| {
            vec![
                escaped(&found.name).to_string(),
                size::grouped(found.documents),
                size::grouped(found.tokens),
                format!("{:.4}", found.ppl),
                format!("{:.5}", found.nll_per_token),
                format!("{:.5}", found.bits_per_byte),
            ]
        };
        let header = ["text", "documents", "tokens", "ppl", "nll/token", "bits/byte"];
        text += &format!("\n{}", text::table(&header, &header[1..], report.texts.iter().map(row).collect()));
    }
    text += &comparison_text(report);
    text += &probes_text(report);
    let rate = report.tokens_per_second.map_or(String::new(), |rate| format!(", {rate:.0} tokens/s"));
    text += &format!(
        "\n{} requests scored, {} tokens computed in {}{rate}\n",
        size::grouped(report.requests.iter().filter(|request| request.logprob.is_some()).count() as u64),
        size::grouped(report.tokens),
        duration(report.seconds)
    );
    if let Some(shares) = &report.shares {
        let ScoreShares { experts, attention, products, disk } = shares;
        let parts = [("experts", experts), ("attention", attention), ("other products", products), ("disk", disk)];
        let parts = parts.map(|(name, share)| format!("{name} {:.0} %", 100.0 * share));
        text += &format!("time: {}\n", parts.join(", "));
    }
    text += &device_experts(report.device_experts);
    if !report.excluded.is_empty() {
        let rows = if report.excluded.len() == 1 { "row was" } else { "rows were" };
        text += &format!("{} {rows} not scored\n", size::grouped(report.excluded.len() as u64));
    }
    if let Some(out) = out {
        text += &format!("reports: {}\n", escaped(&out.to_string_lossy()));
    }
    text
}

/// What the model generated, if it did.
fn probes_text(report: &ScoreReport) -> String {
    let Some(probes) = &report.probes else { return String::new() };
    let mut out = format!(
        "\nof {} generated texts {} stopped by themselves, {} ran into a repetition, {} hold broken characters\n",
        probes.texts.len(),
        probes.stopped,
        probes.repeated,
        probes.with_replacement_characters
    );
    if let Some(mtp) = &probes.mtp {
        let share = mtp.acceptance.map_or(String::new(), |share| format!(" ({:.1} %)", 100.0 * share));
        out += &format!("MTP head, {}: {} of {} drafts accepted{share}\n", mtp.format, mtp.accepted, mtp.proposed);
    }
    out
}

/// The comparison with the baseline, if there is one.
fn comparison_text(report: &ScoreReport) -> String {
    let Some(baseline) = &report.baseline else { return String::new() };
    let mut text = format!("\nagainst {} ({})\n", escaped(&baseline.path), baseline.kind);
    text += &differences_text(baseline);
    if let (Some(kl), Some(agreement)) = (baseline.kl_mean, baseline.top1_agreement) {
        let interval = baseline.kl_interval.map_or(String::new(), |(low, high)| format!(" [{low:.5}, {high:.5}]"));
        let least = match baseline.kl_method.as_str() {
            "exact" => "",
            _ => " or more (of the 16 most probable tokens and all others as one)",
        };
        text += &format!(
            "KL divergence {kl:.5}{interval} nats{least}, the same best token before {:.2} % of {} tokens\n",
            100.0 * agreement,
            size::grouped(baseline.positions)
        );
    }
    for compared in baseline.compared.iter().filter(|compared| !compared.is_whole()) {
        text += &format!("{}: {}\n", escaped(&compared.name), compared.text());
    }
    for check in &baseline.checks {
        let Some(worse_by) = check.worse_by else {
            text += &format!("{} {}: not compared, not met\n", escaped(&check.name), check.metric);
            continue;
        };
        let threshold = baseline.threshold.unwrap_or_default();
        let relation = if worse_by <= threshold { "within" } else { "not within" };
        let sure = match (check.conclusive, check.compared == check.rows) {
            (_, false) => format!(", but not met: {} of {} rows were compared", check.compared, check.rows),
            (false, true) => ", but its interval reaches across the threshold".to_owned(),
            (true, true) => String::new(),
        };
        text += &format!(
            "{} {}: worse by {worse_by:.4}, {relation} {threshold}{sure}\n",
            escaped(&check.name),
            check.metric
        );
    }
    match report.verdict {
        Some(verdict) => text + &format!("verdict: {}\n", verdict.name()),
        None => text,
    }
}

fn differences_text(baseline: &ScoreBaseline) -> String {
    let mut rows = Vec::new();
    for task in &baseline.tasks {
        for (metric, paired) in [("acc", &task.acc), ("acc_norm", &task.acc_norm)] {
            let (low, high) = paired.interval;
            rows.push(vec![
                format!("{} {metric}", escaped(&task.task)),
                format!("{:.4}", paired.baseline),
                format!("{:.4}", paired.model),
                format!("{:+.4} [{low:+.4}, {high:+.4}]", paired.difference),
                format!("+{} −{}, p = {:.3}", paired.gained, paired.lost, paired.mcnemar),
            ]);
        }
    }
    for found in &baseline.texts {
        let interval = found.interval.map_or(String::new(), |(low, high)| format!(" [{low:.4}, {high:.4}]"));
        rows.push(vec![
            format!("{} ppl", escaped(&found.name)),
            format!("{:.4}", found.baseline),
            format!("{:.4}", found.model),
            format!("× {:.4}{interval}", found.ratio),
            String::new(),
        ]);
    }
    let header = ["figure", "baseline", "model", "difference [95 %]", "flipped"];
    text::table(&header, &["baseline", "model"], rows)
}

/// Time between two plain lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// Shows rows done and tokens per second on stderr.
pub(super) struct Meter {
    bar: Option<ProgressBar>,
    lines: bool,
    rows: AtomicU64,
    total: AtomicU64,
    state: Mutex<(Instant, Instant)>,
}

impl Meter {
    pub(super) fn new(quiet: bool) -> Meter {
        use std::io::IsTerminal;
        let terminal = std::io::stderr().is_terminal();
        let bar = (!quiet && terminal).then(|| {
            let style = "{bar:30} {percent}%  {pos}/{len} rows  {eta} left  {msg}";
            ProgressBar::no_length().with_style(ProgressStyle::with_template(style).expect("a constant template"))
        });
        let now = Instant::now();
        let (rows, total) = (AtomicU64::new(0), AtomicU64::new(0));
        Meter { bar, lines: !quiet && !terminal, rows, total, state: Mutex::new((now, now)) }
    }
}

impl Watch for Meter {
    fn phase(&self, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(what.to_owned());
        }
    }

    fn plan(&self, what: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| tell(&format!("{what}\n"))),
            None if self.lines => tell(&format!("{what}\n")),
            None => {}
        }
    }

    fn start(&self, rows: u64) {
        self.total.store(rows, Ordering::Relaxed);
        // A pipeline scores twice.
        self.rows.store(0, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.set_length(rows);
            bar.reset();
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        if let Ok(mut state) = self.state.lock() {
            *state = (Instant::now(), Instant::now());
        }
    }

    fn row(&self, tokens: u64) {
        let done = self.rows.fetch_add(1, Ordering::Relaxed) + 1;
        let Ok(mut state) = self.state.lock() else { return };
        let seconds = state.0.elapsed().as_secs_f64().max(1e-9);
        let rate = tokens as f64 / seconds;
        if let Some(bar) = &self.bar {
            bar.inc(1);
            bar.set_message(format!("{rate:.0} tokens/s"));
        }
        if self.lines && state.1.elapsed() >= INTERVAL {
            state.1 = Instant::now();
            let total = self.total.load(Ordering::Relaxed);
            let left = duration((total - done) as f64 * seconds / done as f64);
            tell(&format!("scored {done} of {total} rows, {rate:.0} tokens/s, {left} left\n"));
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
