//! `coliconv bench`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};

use super::progress::Meter;
use super::{Talk, not_available, print, print_json, size, tell, text};
use crate::bench::{self, Options};
use crate::error::Faults;
use crate::report::{BenchMeasure, BenchReport, Experts};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Target {
    /// Quantizing, every format with every instruction set
    Convert,
    /// Reading headers, verifying payloads
    Inspect,
    /// Products with stored matrices on the CPU, every format
    Kernels,
    /// Tokens a second on the CPU with routed experts from the disk, and from memory
    Decode,
    /// Not available in this version
    Score,
}

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// What to measure
    #[arg(value_enum)]
    target: Option<Target>,
    /// Where to make the containers that are measured; removed afterwards [default: the system's place for such files]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Size of the container whose payload is verified or that is decoded with, or of the checkpoint that is converted, or of
    /// the weights of a kernel; what is decoded with has GLM-5.2's widths from 4G on, and narrower ones below [default: 1G, of
    /// `decode` 8G]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,
    /// Size of the shards of that checkpoint
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "5G")]
    shard_size: u64,
    /// Of `convert`, only whole conversions
    #[arg(long)]
    whole_only: bool,
    /// Hidden layers of the container of holes whose headers are read; the dimensions are those of GLM-5.2
    #[arg(long, value_name = "N", default_value_t = 78, value_parser = clap::value_parser!(u64).range(4..=126))]
    layers: u64,
    /// Repetitions of each measure; rates are of the fastest
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Threads; 0 for one per core [default: 0]
    #[arg(long, value_name = "N", value_parser = super::threads, default_value_t = 0, hide_default_value = true)]
    threads: usize,
    /// Of `kernels` and `decode`, where to compute: cpu
    #[arg(long, value_name = "D")]
    device: Option<String>,
    #[command(flatten)]
    pub(super) talk: Talk,
}

impl Arguments {
    fn later(&self) -> Option<&'static str> {
        match (self.target, &self.device) {
            (None, _) => Some("`coliconv bench` without a target"),
            (Some(Target::Kernels | Target::Decode), Some(device)) if device != "cpu" => {
                Some("another device than cpu")
            }
            (Some(Target::Kernels | Target::Decode), _) => None,
            (Some(Target::Score), _) => Some("`coliconv bench score`"),
            (Some(Target::Inspect | Target::Convert), Some(_)) => Some("--device"),
            (Some(Target::Inspect | Target::Convert), None) => None,
        }
    }
}

/// Runs `bench`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Faults> {
    if let Some(name) = arguments.later() {
        return Err(not_available(name).into());
    }
    let options = Options {
        directory: arguments.dir.clone().unwrap_or_else(std::env::temp_dir),
        bytes: arguments.size.unwrap_or(if arguments.target == Some(Target::Decode) { 8 << 30 } else { 1 << 30 }),
        shard_bytes: arguments.shard_size,
        whole_only: arguments.whole_only,
        layers: arguments.layers,
        threads: arguments.threads,
        rounds: usize::from(arguments.rounds),
    };
    let meter = Meter::new(arguments.talk.quiet);
    // Nothing is lost by the end of it, but gigabytes would stay.
    let _ = ctrlc::set_handler(|| {
        bench::remove_scratch();
        tell("interrupted; what was made to be measured is removed\n");
        std::process::exit(2);
    });
    let report = match arguments.target {
        Some(Target::Convert) => bench::convert(&options, &meter)?,
        Some(Target::Kernels) => bench::kernels(&options, &meter)?,
        Some(Target::Decode) => bench::decode(&options, &meter)?,
        _ => bench::inspect(&options, &meter)?,
    };
    Ok(if arguments.talk.json { print_json(&report) } else { print(&report_text(&report)) })
}

fn report_text(report: &BenchReport) -> String {
    let unknown = || "unknown".to_owned();
    let mut out = format!(
        "{}, kernel {}, {} threads\n\n",
        report.cpu.clone().unwrap_or_else(unknown),
        report.kernel.clone().unwrap_or_else(unknown),
        report.threads
    );
    if let Some(model) = &report.model {
        out += &format!("{model}\n\n");
    }
    let header = ["measure", "median s", "fastest s", "rate", "of its limit"];
    out += &text::table(&header, &["median s", "fastest s", "rate"], report.measures.iter().map(row).collect());
    out += "rates are of the fastest round, shares of a limit the median of all rounds, each beside the limit in the same round\n";
    report.measures.iter().filter_map(|measure| Some((measure, more(measure)?))).for_each(|(measure, more)| {
        out += &format!("{}: {more}\n", measure.name);
    });
    out
}

/// `12 % of 384 experts in memory, 51 % of 100 read ahead of use, 3.2 s of waiting`
fn on_demand(experts: &Experts) -> String {
    let share = |of: u64, all: u64| format!("{:.0} % of {all}", 100.0 * of as f64 / all.max(1) as f64);
    let mut text = format!("{} experts in memory", share(experts.hits, experts.requests));
    if experts.read_ahead > 0 {
        text += &format!(", {} read ahead of use", share(experts.read_ahead_hits, experts.read_ahead));
    }
    text + &format!(", {:.1} s of waiting", experts.wait_seconds)
}

/// What has no column: other rates, memory, and where experts came from.
fn more(measure: &BenchMeasure) -> Option<String> {
    let tokens = measure.tokens_per_second.map(|rate| format!("{rate:.2} tokens/s"));
    let weights = measure.g_weights_per_cpu_second.map(|rate| format!("{rate:.2} G weights/CPU-s"));
    let peak = measure.peak_anonymous_bytes.map(|bytes| format!("at most {} of memory", size::human(bytes)));
    let parts = [tokens, weights, peak, measure.experts.as_ref().map(on_demand)];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

fn row(measure: &BenchMeasure) -> Vec<String> {
    let flops = measure.gflop_per_second.map(|rate| format!("{rate:.0} GFLOP/s"));
    let rate = flops.unwrap_or_else(|| match (measure.gb_per_second, measure.entries, measure.g_weights_per_second) {
        (Some(rate), _, _) => format!("{rate:.2} GB/s"),
        (_, Some(entries), _) => format!("{:.0} entries/s", entries as f64 / measure.fastest_seconds.max(1e-9)),
        (_, _, Some(rate)) => format!("{rate:.2} G weights/s"),
        (None, None, None) => String::new(),
    });
    let limit = match (&measure.limit, measure.of_limit, measure.of_baseline) {
        (Some(limit), Some(share), _) => format!("{:.0} % of {limit}", 100.0 * share),
        (_, _, Some(times)) => format!("{times:.1} × plain"),
        _ => String::new(),
    };
    let (median, fastest) = (format!("{:.4}", measure.seconds), format!("{:.4}", measure.fastest_seconds));
    vec![measure.name.clone(), median, fastest, rate, limit]
}
