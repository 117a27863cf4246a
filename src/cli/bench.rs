//! `coliconv bench`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};

use super::progress::Meter;
use super::running::device_experts;
use super::{Talk, not_available, print, print_json, size, tell, text};
use crate::backend::{Device, Mode};
use crate::bench::{self, Options};
use crate::error::{Fault, FaultKind, Faults, Place};
use crate::report::{BenchMeasure, BenchReport, BenchTokenBytes, Experts};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Target {
    /// Quantizing, every format with every instruction set
    Convert,
    /// Reading headers, verifying payloads
    Inspect,
    /// Products with stored matrices, every format
    Kernels,
    /// Tokens a second: on the CPU with routed experts from the disk, and from memory, on a GPU with all of them there, and with an
    /// eighth
    Decode,
    /// Tokens a second of scoring requests
    Score,
}

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// What to measure
    #[arg(value_enum)]
    target: Option<Target>,
    /// Where to make the containers that are measured, in a directory coliconv-bench-N that is removed afterwards; what a run that was
    /// killed has left there, the next one removes [default: the system's place for such files]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Size of the container whose payload is verified or that is decoded or scored with, or of the checkpoint that is
    /// converted, or of the weights of a kernel; what is decoded or scored with has GLM-5.2's widths from 4G on, and narrower
    /// ones below, kernels on a GPU have them from 32M on; at most 63G of these, 40G of the container that is verified, 562G of
    /// the checkpoint [default: 1G, of `decode` and of `score` on a GPU 8G, of `kernels` on a
    /// GPU what it reads in half a millisecond, 64M to 2G]
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
    /// Of `kernels`, `decode` and `score`, where to compute: cpu, cuda[:N] or vulkan[:N] [default: cpu]
    #[arg(long, value_name = "D")]
    device: Option<String>,
    /// Of `kernels`, `decode` and `score` on a GPU, how sums are formed: exact, or fast, with rounded activations
    #[arg(long, value_name = "MODE", default_value = "exact", value_parser = ["exact", "fast"])]
    mode: String,
    /// Of `kernels` on a GPU, only measures whose names contain this, for one "int4-row [2048, 6144]", with what they are measured
    /// against
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    #[command(flatten)]
    pub(super) talk: Talk,
}

impl Arguments {
    /// What is planned but not there.
    fn later(&self) -> Option<&'static str> {
        match (self.target, self.device.as_deref()) {
            (None, _) => Some("`coliconv bench` without a target"),
            (Some(Target::Inspect | Target::Convert), Some(_)) => Some("--device"),
            (Some(Target::Kernels | Target::Decode | Target::Score), Some("reference")) => {
                Some("`coliconv bench` on the reference backend")
            }
            _ => None,
        }
    }

    /// Where to compute.
    fn device(&self) -> Result<Device, Fault> {
        let device = self.device.as_deref().map_or(Ok(Device::Cpu), |text| Device::parse("--device", text))?;
        if self.only.is_some() && !(self.target == Some(Target::Kernels) && device.is_gpu()) {
            let (flag, needs) = ("--only", "`bench kernels` on a GPU");
            return Err(Fault::new(Place::default(), FaultKind::FlagNeeds { flag, needs }));
        }
        Ok(device)
    }
}

/// Runs `bench`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Faults> {
    if let Some(name) = arguments.later() {
        return Err(not_available(name).into());
    }
    let options = Options {
        directory: arguments.dir.clone().unwrap_or_else(std::env::temp_dir),
        bytes: arguments.size,
        shard_bytes: arguments.shard_size,
        whole_only: arguments.whole_only,
        layers: arguments.layers,
        threads: arguments.threads,
        rounds: usize::from(arguments.rounds),
        device: arguments.device()?,
        mode: if arguments.mode == "fast" { Mode::Fast } else { Mode::Exact },
        only: arguments.only.clone(),
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
        Some(Target::Score) => bench::score(&options, &meter)?,
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
    if let Some(gpu) = &report.gpu {
        out += &format!("on {gpu}\n\n");
    }
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

/// `2.1 GB of weights a token: attention 0.9, routed experts 1.2 GB`
fn of_token(of_token: &BenchTokenBytes) -> String {
    let BenchTokenBytes { attention, dense, shared, routed, head, other } = *of_token;
    let parts = [
        ("attention", attention),
        ("dense layers", dense),
        ("shared experts", shared),
        ("routed experts", routed),
        ("output head", head),
        ("other", other),
    ];
    let parts = parts.map(|(name, bytes)| format!("{name} {}", size::human(bytes)));
    format!("{} of weights a token ({})", size::human(of_token.total()), parts.join(", "))
}

/// What has no column: other rates, memory, and where experts came from.
fn more(measure: &BenchMeasure) -> Option<String> {
    let through = if measure.written_out_tokens_per_second.is_some() { " through the layers" } else { "" };
    let tokens = measure.tokens_per_second.map(|rate| format!("{rate:.2} tokens/s{through}"));
    let written = measure.written_out_tokens_per_second.map(|rate| format!("{rate:.2} written-out tokens/s"));
    let of_token = measure.token_bytes.as_ref().map(of_token);
    let launches = measure.launches.filter(|_| measure.tokens_per_second.is_some());
    let launches = launches.map(|launches| format!("{launches:.0} kernels a token"));
    let waited = measure.wait_seconds.map(|seconds| format!("{seconds:.2} s of waiting for the GPU"));
    let weights = measure.g_weights_per_cpu_second.map(|rate| format!("{rate:.2} G weights/CPU-s"));
    let peak = measure.peak_anonymous_bytes.map(|bytes| format!("at most {} of memory", size::human(bytes)));
    let in_memory = measure.experts.as_ref().map(on_demand);
    let on_gpu = measure.device_experts.map(|experts| device_experts(Some(experts)).trim_end().to_owned());
    let parts = [tokens, written, of_token, launches, waited, weights, peak, in_memory, on_gpu];
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
    // Kernels of a GPU take millionths of a second.
    let digits = if measure.clock.is_some() { 6 } else { 4 };
    let [median, fastest] = [measure.seconds, measure.fastest_seconds].map(|seconds| format!("{seconds:.digits$}"));
    vec![measure.name.clone(), median, fastest, rate, limit]
}
