//! `coliconv convert`

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::progress::{Meter, duration, end_on_request};
use super::{Talk, not_available, print, print_json, size, tell, text, threads, verify, warn};
use crate::checkpoint::Allowed;
use crate::convert::{Follow, Job, Options, Verification, wait_for_model};
use crate::error::{Fault, FaultKind, Faults, Place, escaped, listed};
use crate::isa::Isa;
use crate::part::Part;
use crate::recipe::{GroupSize, Settings};
use crate::report::{ConvertReport, Verdict};
use crate::roles::Pass;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PassArgument {
    Main,
    Mtp,
    Indexer,
}

/// Bits of each class; what is left out follows `--ebits`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Formats")]
struct Formats {
    /// Weights that share a scale in int4: 16, 32, 48, 64, 96, 128, 192, 256, or `row` [default: 64]
    #[arg(long, value_name = "N|row")]
    group_size: Option<GroupSize>,
    /// Bits of every class without a flag of its own: 8 to 5 (int8 storage), 4, 3, 2 [default: 4]
    #[arg(long, value_name = "N")]
    ebits: Option<u32>,
    /// Bits of the routed experts [default: ebits]
    #[arg(long, value_name = "N")]
    xbits: Option<u32>,
    /// Bits of embedding and output head [default: 8]
    #[arg(long, value_name = "N")]
    io_bits: Option<u32>,
    /// Bits of the shared experts [default: ebits]
    #[arg(long, value_name = "N")]
    shared_bits: Option<u32>,
    /// Bits of o_proj [default: ebits]
    #[arg(long, value_name = "N")]
    o_bits: Option<u32>,
    /// Bits of kv_b_proj [default: ebits]
    #[arg(long, value_name = "N")]
    kvb_bits: Option<u32>,
    /// Bits of q_a_proj, q_b_proj and kv_a_proj_with_mqa [default: ebits]
    #[arg(long, value_name = "N")]
    attn_bits: Option<u32>,
    /// Bits of the dense layers' MLP [default: ebits]
    #[arg(long, value_name = "N")]
    dmlp_bits: Option<u32>,
    /// Bits of the routed experts' gate_proj [default: xbits]
    #[arg(long, value_name = "N")]
    gate_bits: Option<u32>,
    /// Bits of the routed experts' up_proj [default: xbits]
    #[arg(long, value_name = "N")]
    up_bits: Option<u32>,
    /// Bits of the routed experts' down_proj [default: xbits]
    #[arg(long, value_name = "N")]
    down_bits: Option<u32>,
    /// JSON file with the same settings and with rules for single tensors
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
}

/// Arguments of `convert`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Directory of the FP8 or BF16 checkpoint
    checkpoint: PathBuf,
    /// Directory of the container; must be new, empty, or begun by the same command
    container: PathBuf,
    /// Convert the MTP head too, as int8
    #[arg(long)]
    mtp: bool,
    /// Convert the DSA indexer too, as int8
    #[arg(long)]
    indexer: bool,
    /// Convert only these passes, for one to add the MTP head to a finished container
    #[arg(long, value_name = "PASS")]
    only: Vec<PassArgument>,
    #[command(flatten)]
    formats: Formats,
    /// Print the plan and what is wrong; write nothing
    #[arg(long, help_heading = "Run")]
    dry_run: bool,
    /// Only the bytes of upstream's converter: no stamps, index, manifest; config.json as it is
    #[arg(long, help_heading = "Run")]
    bare: bool,
    /// Measure the quantization error of each class
    #[arg(long, help_heading = "Run")]
    stats: bool,
    /// Then verify the container against the CHECKPOINT, at the level tokens, on the CPU: exit code 1 if the verdict is fail
    #[arg(long, help_heading = "Run")]
    verify: bool,
    /// Threads; 0 for one per core [default: 0]
    #[arg(long, value_name = "N", value_parser = threads, default_value_t = 0, hide_default_value = true, help_heading = "Run")]
    threads: usize,
    /// Memory for buffers, for one 512M
    #[arg(long, value_name = "SIZE", value_parser = size::parse, help_heading = "Run")]
    memory: Option<u64>,
    /// Instruction set to quantize with; the output is the same [default: the fastest]
    #[arg(long, value_name = "ISA", value_parser = isa, hide = true)]
    isa: Option<Isa>,
    /// Write formats that the colibri engine would misread at their shape
    #[arg(long, help_heading = "Refusals")]
    allow_ambiguous: bool,
    /// Count NaN and infinite weights as 0
    #[arg(long, help_heading = "Refusals")]
    allow_non_finite: bool,
    /// Convert although tensors or files are missing
    #[arg(long, help_heading = "Refusals")]
    allow_incomplete: bool,
    /// Start although the free space is short; lifts nothing about existing files
    #[arg(long, help_heading = "Refusals")]
    force: bool,
    /// Convert only part K of N, for one on one machine of several that share the folder; the last one completes it
    #[arg(long, value_name = "K/N", help_heading = "Parts and arriving files")]
    part: Option<Part>,
    /// Complete a container of which all parts are converted
    #[arg(long, help_heading = "Parts and arriving files")]
    finish: bool,
    /// Wait for files that are still being downloaded; each is converted when it is whole
    #[arg(long, help_heading = "Parts and arriving files")]
    follow: bool,
    /// With --follow: end when nothing has arrived for so many minutes [default: never]
    #[arg(long, value_name = "MINUTES", requires = "follow", help_heading = "Parts and arriving files")]
    patience: Option<u64>,
    /// Remove each file of the CHECKPOINT as soon as nothing needs it any more
    #[arg(long, help_heading = "Parts and arriving files")]
    consume: bool,
    /// Not available in this version
    #[arg(long, value_name = "D", hide = true)]
    device: Option<String>,
    /// Not available in this version
    #[arg(long, value_name = "MODE", hide = true)]
    mode: Option<String>,
    #[command(flatten)]
    pub(super) talk: Talk,
}

impl Arguments {
    /// Flags of this command that are planned but not there.
    fn later(&self) -> Option<&'static str> {
        [(self.device.is_some(), "--device of `convert`"), (self.mode.is_some(), "--mode of `convert`")]
            .into_iter()
            .find_map(|(given, name)| given.then_some(name))
    }

    fn passes(&self) -> Vec<Pass> {
        let only = |argument| self.only.contains(&argument);
        [
            (Pass::Main, self.only.is_empty() || only(PassArgument::Main)),
            (Pass::Mtp, only(PassArgument::Mtp) || (self.mtp && self.only.is_empty())),
            (Pass::Indexer, only(PassArgument::Indexer) || (self.indexer && self.only.is_empty())),
        ]
        .into_iter()
        .filter_map(|(pass, wanted)| wanted.then_some(pass))
        .collect()
    }

    fn follow(&self) -> Option<Follow> {
        let patience = self.patience.map(|minutes| Duration::from_secs(60 * minutes));
        self.follow.then(|| Follow { patience, ..Follow::default() })
    }

    fn options(&self) -> Result<Options, Faults> {
        let f = &self.formats;
        let flags = Settings {
            group_size: f.group_size,
            ebits: f.ebits,
            xbits: f.xbits,
            io_bits: f.io_bits,
            shared_bits: f.shared_bits,
            o_bits: f.o_bits,
            kvb_bits: f.kvb_bits,
            attn_bits: f.attn_bits,
            dmlp_bits: f.dmlp_bits,
            gate_bits: f.gate_bits,
            up_bits: f.up_bits,
            down_bits: f.down_bits,
            rules: Vec::new(),
        };
        let settings = match &f.recipe {
            Some(path) => flags.with_recipe(Settings::read(path)?)?,
            None => flags,
        };
        Ok(Options {
            settings,
            passes: self.passes(),
            bare: self.bare,
            stats: self.stats,
            allowed: Allowed {
                ambiguous: self.allow_ambiguous,
                non_finite: self.allow_non_finite,
                incomplete: self.allow_incomplete,
            },
            force: self.force,
            part: self.part,
            finish: self.finish,
            follow: self.follow(),
            consume: self.consume,
            threads: self.threads,
            memory: self.memory,
            isa: self.isa,
        })
    }
}

/// Parses an instruction set that this CPU has.
fn isa(text: &str) -> Result<Isa, String> {
    let has: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
    match Isa::named(text) {
        Some(isa) => Ok(isa),
        None if Isa::NAMES.contains(&text) => Err(format!("this CPU has no {text}, only: {}", has.join(", "))),
        None => Err(format!("expected one of: {}", Isa::NAMES.join(", "))),
    }
}

/// Runs `convert`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Faults> {
    if let Some(name) = arguments.later() {
        return Err(not_available(name).into());
    }
    let options = arguments.options()?;
    options.check()?;
    if arguments.verify && arguments.dry_run {
        let (one, other, why) = ("--verify", "--dry-run", "a dry run makes nothing that could be verified");
        return Err(Fault::new(Place::default(), FaultKind::FlagsExclude { one, other, why }).into());
    }
    let Talk { json, quiet } = arguments.talk;
    let meter = Meter::new(quiet);
    end_on_request();
    if let Some(follow) = options.follow.filter(|_| !arguments.dry_run) {
        wait_for_model(&arguments.checkpoint, follow, &meter)?;
    }
    let mut job = Job::prepare(&arguments.checkpoint, &arguments.container, options)?;
    if arguments.dry_run {
        warn(job.warnings());
        let report = job.dry_report();
        let code =
            if json { print_json(&report) } else { print(&plan_text(&arguments.checkpoint, arguments.part, &job)) };
        return Ok(code);
    }
    job.check_space()?;
    let verification = arguments.verify.then(|| Verification::of(&job, arguments.memory)).transpose()?;
    let told = job.warnings().len();
    warn(job.warnings());
    let plan = plan_text(&arguments.checkpoint, arguments.part, &job);
    if !json {
        print(&plan);
    } else if !quiet {
        tell(&plan);
    }
    let mut report = job.run(&meter)?;
    tell(&super::findings_text(&report.warnings[told..]));
    let printed = if json { ExitCode::SUCCESS } else { print(&done_text(&report)) };
    // Without the other parts the container is nothing yet; the part that ends last verifies it.
    let verification = verification.filter(|_| report.complete == Some(true));
    report.verify = verification.map(|verification| verification.run(&meter)).transpose()?.map(Box::new);
    let printed = match (&report.verify, json) {
        (_, true) => print_json(&report),
        (Some(verified), false) => print(&format!("\n{}", verify::report_text(verified))),
        (None, false) if arguments.verify => print("not verified yet: the part that ends last does it\n"),
        (None, false) => printed,
    };
    let good = report.verify.is_none_or(|verified| verified.verdict == Verdict::Pass);
    Ok(if printed == ExitCode::SUCCESS && !good { ExitCode::from(1) } else { printed })
}

/// The plan as a table with totals, and what it needs of the disk.
pub(super) fn plan_text(checkpoint: &Path, part: Option<Part>, job: &Job) -> String {
    let plan = job.plan();
    let mut rows: Vec<Vec<String>> = plan
        .classes
        .iter()
        .map(|c| {
            let class = c.class.name().to_owned();
            let numbers = [c.tensors, c.source_bytes, c.output_bytes].map(size::grouped);
            [class, c.format_text()].into_iter().chain(numbers).collect()
        })
        .collect();
    let tensors: u64 = plan.classes.iter().map(|c| c.tensors).sum();
    let output: u64 = plan.classes.iter().map(|c| c.output_bytes).sum();
    let numbers = [tensors, plan.source_bytes, output].map(size::grouped);
    rows.push(["total".to_owned(), String::new()].into_iter().chain(numbers).collect());
    let header = ["class", "format", "tensors", "source bytes", "output bytes"];
    let mut out = format!(
        "{} → {}\n\n{}\n",
        escaped(&checkpoint.to_string_lossy()),
        escaped(&job.container().to_string_lossy()),
        text::table(&header, &header[2..], rows)
    );
    let finished = match job.finished_files() {
        0 => String::new(),
        n => format!(", {n} of them finished by an earlier run"),
    };
    let (files, bytes) = (plan.mine().count(), plan.output_bytes);
    if let Some(part) = part {
        out += &format!("part {part}: {files} of the {} files\n", plan.files.len());
    }
    out += &format!("{files} files with headers: {} bytes ({}){finished}\n", size::grouped(bytes), size::human(bytes));
    let needed = job.needed_bytes();
    let free = match job.free_bytes() {
        None => "unknown".to_owned(),
        Some(free) if free < needed => format!("{}: NOT ENOUGH", size::human(free)),
        Some(free) => size::human(free),
    };
    out + &format!("disk needed: {} ({}), free: {free}\n", size::grouped(needed), size::human(needed))
}

fn done_text(report: &ConvertReport) -> String {
    let mut out = String::from("\n");
    if report.classes.iter().any(|class| class.sqnr_db.is_some()) {
        let rows = report
            .classes
            .iter()
            .map(|c| {
                let format = c.group_size.map_or(c.format.clone(), |g| format!("{}({g})", c.format));
                let sqnr = c.sqnr_db.map_or("exact".to_owned(), |db| format!("{db:.2}"));
                vec![c.class.clone(), format, sqnr]
            })
            .collect();
        out += &text::table(&["class", "format", "SQNR dB"], &["SQNR dB"], rows);
        out.push('\n');
    }
    let rate = report.source_bytes as f64 / report.seconds.max(1e-9) / 1e9;
    out += &format!(
        "done: {} weights, {} files in {}, {} ({rate:.2} GB/s of source)\n",
        size::grouped(report.tensors),
        report.files.len(),
        escaped(&report.container),
        duration(report.seconds),
    );
    if !report.consumed.is_empty() {
        let (files, names) = (report.consumed.len(), listed(&report.consumed));
        out += &format!("removed {files} file{} of the source: {names}\n", if files == 1 { "" } else { "s" });
    }
    if report.complete == Some(false) {
        out += "other parts are not finished yet: the last one completes the container\n";
    }
    out
}
