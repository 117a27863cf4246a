//! `coliconv verify`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgAction, Args, ValueEnum};

use super::progress::{Meter, duration};
use super::running::{Running, device_experts};
use super::{Talk, findings_text, print, print_json, size, text};
use crate::backend::Present;
use crate::backend::gpu::device::Injection;
use crate::error::{Fault, FaultKind, Faults, Place, escaped};
use crate::io::{is_same_file, read_small, write_whole};
use crate::limits;
use crate::part::Part;
use crate::report::{CheckStatus, GpuDevice, Verdict, VerifyReport, VerifyTokens};
use crate::verify::parts::{finish, part_file, verify_part};
use crate::verify::{Level, Options, TokenOptions, verify};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LevelArgument {
    /// Headers, index, census, counts, stamps, config
    Structure,
    /// And checksums, scales, codes
    Payload,
    /// And every weight against --source
    Weights,
    /// And what the model computes, against --reference
    Tokens,
}

/// Arguments of `verify`.
#[derive(Debug, Args)]
#[command(mut_arg("device", |arg| {
    let help = "Where to compute: reference, cpu, cuda[:N[,N…]|:all] or vulkan[:N[,N…]|:all]; several numbers are one model on \
                several GPUs; may be given several times, each is a run of its own [default: cpu]";
    arg.action(ArgAction::Append).help(help)
}))]
pub(crate) struct Arguments {
    /// Directory of a container or checkpoint
    path: PathBuf,
    /// How far to go; each level includes those before it
    #[arg(long, value_enum, default_value = "tokens")]
    level: LevelArgument,
    /// The checkpoint that the container was made from
    #[arg(long, value_name = "CHECKPOINT")]
    source: Option<PathBuf>,
    /// Write the report as JSON to this file too; an earlier report there is replaced
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Verify only a slice, for one 2/8; its report has the slice in its name: verify-2-of-8.json for verify.json
    #[arg(long, value_name = "K/N")]
    part: Option<Part>,
    /// Join the reports of the parts, which are beside --report; nothing is read or computed again
    #[arg(long, conflicts_with = "part")]
    finish: bool,
    /// What another implementation, or an earlier run, made of the same model; may be given several times
    #[arg(long, value_name = "FILE")]
    reference: Vec<PathBuf>,
    /// Write what this model says to this new file, to be a --reference of another run
    #[arg(long, value_name = "FILE")]
    write_reference: Option<PathBuf>,
    #[command(flatten)]
    running: Running,
    /// Compute on the CPU and on every GPU there is; those that cannot be used are named with the reason
    #[arg(long, conflicts_with = "device")]
    all_devices: bool,
    /// Make a fault on purpose on the GPU, to see the verdict change: `launch[:K]` makes the K-th launch of a kernel fail,
    /// `numbers[:K]` its numbers wrong; K counts from the first that is compared with a reference [K: 1]
    #[arg(long, value_name = "KIND")]
    inject_fault: Option<String>,
    #[command(flatten)]
    pub(super) talk: Talk,
}

impl Arguments {
    fn tokens(&self) -> Result<TokenOptions, Fault> {
        let mode = self.running.mode()?;
        let injection = self.injection()?;
        let present = if self.all_devices { Present::find() } else { Present::default() };
        let mut unused = self.running.unused()?;
        unused.extend(present.unused.iter().map(|(device, fault)| (device.clone(), fault.to_string())));
        let devices = if self.all_devices { present.devices } else { self.running.devices()? };
        // Where all are asked for there need not be a GPU.
        if !self.all_devices {
            self.running.check_device_memory(&devices)?;
        }
        Ok(TokenOptions {
            references: self.reference.clone(),
            devices,
            mode,
            unused,
            write_reference: self.write_reference.clone(),
            memory: self.running.memory,
            device_memory: self.running.device_memory,
            injection,
        })
    }

    /// The fault that is to be made, on devices that are all GPUs.
    fn injection(&self) -> Result<Option<Injection>, Fault> {
        let Some(text) = &self.inject_fault else { return Ok(None) };
        let flag = "--inject-fault";
        let devices = self.running.devices()?;
        if devices.is_empty() || !devices.iter().all(|device| device.is_gpu()) {
            return Err(Fault::new(Place::default(), FaultKind::FlagNeeds { flag, needs: "--device cuda or vulkan" }));
        }
        let (kind, launch) = text.split_once(':').unwrap_or((text, INJECTED_LAUNCH));
        match (kind.parse(), launch.parse()) {
            (Ok(kind), Ok(launch @ 1..)) => Ok(Some(Injection { launch, kind })),
            _ => {
                let (expected, found) = ("launch[:K] or numbers[:K], K from 1", text.clone());
                Err(Fault::new(Place::default(), FaultKind::FlagValue { flag, expected, found }))
            }
        }
    }
}

/// The launch that a fault is made in where none is named.
const INJECTED_LAUNCH: &str = "1";

/// Runs `verify`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Faults> {
    let level = match arguments.level {
        LevelArgument::Structure => Level::Structure,
        LevelArgument::Payload => Level::Payload,
        LevelArgument::Weights => Level::Weights,
        LevelArgument::Tokens => Level::Tokens,
    };
    let divided = [(arguments.part.is_some(), "--part"), (arguments.finish, "--finish")];
    if let Some((_, flag)) = divided.into_iter().find(|(given, _)| *given && arguments.report.is_none()) {
        return Err(Fault::new(Place::default(), FaultKind::FlagNeeds { flag, needs: "--report" }).into());
    }
    let own = |path: &PathBuf| arguments.part.map_or(path.clone(), |part| part_file(path, part));
    let report_path = arguments.report.as_ref().map(own);
    // What could not be written in the end is refused now, not after hours.
    if let Some(path) = &report_path {
        let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        if !parent.is_dir() {
            return Err(Fault::new(Place::file(parent), FaultKind::NotADirectory).into());
        }
        if is_inside(parent, &arguments.path) {
            return Err(Fault::new(Place::file(path), FaultKind::ReportInModel).into());
        }
        check_replaceable(path)?;
    }
    let tokens = arguments.tokens()?;
    let options = Options { level, source: arguments.source.clone(), threads: arguments.running.threads, tokens };
    let (model, meter) = (&arguments.path, Meter::new(arguments.talk.quiet));
    let report = match (arguments.part, &arguments.report) {
        (Some(part), _) => verify_part(model, &options, part, &meter)?,
        (None, Some(whole)) if arguments.finish => finish(model, &options, whole, &meter)?,
        _ => verify(model, &options, &meter)?,
    };
    if let Some(path) = &report_path {
        // What was written meanwhile is not lost either.
        check_replaceable(path)?;
        let mut bytes = serde_json::to_vec_pretty(&report).expect("reports are plain data");
        bytes.push(b'\n');
        write_whole(path, &bytes, true)?;
    }
    let printed = if arguments.talk.json { print_json(&report) } else { print(&report_text(&report)) };
    let good = report.verdict == Verdict::Pass;
    Ok(if printed == ExitCode::SUCCESS && !good { ExitCode::from(1) } else { printed })
}

/// Whether a directory that exists is the model's, or lies in it: whatever stands there is taken for a part of the model.
fn is_inside(directory: &Path, model: &Path) -> bool {
    let own = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    own.ancestors().any(|ancestor| is_same_file(ancestor, model))
}

/// What exists is replaced only if it is a report of this command: a mistyped name must not cost anybody a file.
fn check_replaceable(path: &Path) -> Result<(), Fault> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    let earlier = read_small(path, limits::MAX_MANIFEST_BYTES).ok();
    let earlier = earlier.and_then(|bytes| serde_json::from_slice::<VerifyReport>(&bytes).ok());
    match earlier {
        Some(_) => Ok(()),
        None => Err(Fault::new(Place::file(path), FaultKind::OtherReport)),
    }
}

/// What each device says of each reference, where a GPU computed beside another device.
fn tokens_text(report: &VerifyReport) -> String {
    let gpu = report.tokens.iter().any(|entry| entry.gpu.is_some());
    if !gpu || report.tokens.iter().all(|entry| entry.device == report.tokens[0].device) {
        return String::new();
    }
    let of = |matched: u64, total: u64| format!("{matched}/{total}");
    let row = |entry: &VerifyTokens| {
        let forced = entry.teacher_forced.as_ref().map_or("-".to_owned(), |forced| match forced.near_tie {
            0 => of(forced.matched, forced.total),
            ties => format!("{} + {ties}", of(forced.matched, forced.total)),
        });
        let drafts = entry.mtp.as_ref().filter(|mtp| mtp.total > 0);
        vec![
            format!("{} {}", escaped(&entry.reference), entry.number),
            entry.device.clone(),
            forced,
            entry.greedy.as_ref().map_or("-".to_owned(), |greedy| of(greedy.matched, greedy.total)),
            drafts.map_or("-".to_owned(), |mtp| of(mtp.matched, mtp.total)),
            entry.max_abs_logprob_diff.map_or("-".to_owned(), |most| format!("{most:.6}")),
            entry.gpu.as_ref().map_or("-".to_owned(), |gpu| format!("{} + {}", gpu.dispatches, gpu.fallbacks)),
        ]
    };
    let header = ["reference", "device", "forced + near ties", "greedy", "drafts", "log-probability", "on GPU + CPU"];
    format!("\n{}", text::table(&header, &header[2..], report.tokens.iter().map(row).collect()))
}

/// What each of several GPUs did that computed one model, all references together.
fn gpus_text(report: &VerifyReport) -> String {
    let mut rows: Vec<(String, GpuDevice)> = Vec::new();
    for entry in &report.tokens {
        let gpus = entry.gpu.iter().map(|gpu| &gpu.devices).filter(|gpus| gpus.len() > 1);
        for (at, gpu) in gpus.flatten().enumerate() {
            match rows.iter_mut().filter(|(device, _)| *device == entry.device).nth(at) {
                Some((_, sum)) => {
                    sum.dispatches += gpu.dispatches;
                    sum.copied_bytes += gpu.copied_bytes;
                    sum.memory_bytes = sum.memory_bytes.max(gpu.memory_bytes);
                }
                None => rows.push((entry.device.clone(), gpu.clone())),
            }
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let row = |(device, gpu): (String, GpuDevice)| {
        let name = escaped(&gpu.device).to_string();
        vec![device, name, gpu.dispatches.to_string(), size::human(gpu.copied_bytes), size::human(gpu.memory_bytes)]
    };
    let header = ["device", "GPU", "operations", "from other GPUs", "memory"];
    format!("\n{}", text::table(&header, &header[2..], rows.into_iter().map(row).collect()))
}

/// A report as text.
pub(super) fn report_text(report: &VerifyReport) -> String {
    let mut out = format!("{} ({}), level {}\n", escaped(&report.path), report.kind, report.level);
    if let Some(source) = &report.source {
        out += &format!("source: {}\n", escaped(source));
    }
    let rows = report
        .checks
        .iter()
        .map(|check| vec![check.name.clone(), check.status.name().to_owned(), escaped(&check.detail).to_string()])
        .collect();
    out += &format!("\n{}", text::table(&["check", "status", "detail"], &[], rows));
    out += &tokens_text(report);
    out += &gpus_text(report);
    if !report.findings.is_empty() {
        out += &format!("\n{}", findings_text(&report.findings));
    }
    match device_experts(report.device_experts) {
        line if line.is_empty() => {}
        line => out += &format!("\n{line}"),
    }
    if let Some(experts) = report.experts.filter(|experts| experts.evictions > 0) {
        let (hits, requests, waited) = (experts.hits, experts.requests, duration(experts.wait_seconds));
        let read = size::human(experts.bytes_read);
        out += &format!("\nexperts: {hits} of {requests} in memory, {read} read on demand, {waited} of waiting\n");
    }
    let failed = report.checks.iter().filter(|check| check.status == CheckStatus::Fail).count();
    let read = match (report.bytes_read, size::human(report.bytes_read), duration(report.seconds)) {
        (0, ..) => String::new(),
        // Most of that time is computing.
        (_, read, took) if report.level == Level::Tokens.name() => format!(", {read} read, {took}"),
        (bytes, read, took) => {
            format!(", {read} read in {took} ({:.2} GB/s)", bytes as f64 / report.seconds.max(1e-9) / 1e9)
        }
    };
    let verdict = report.verdict.name();
    let of = report.part.as_ref().map_or(String::new(), |part| format!(" of part {} alone", escaped(&part.part)));
    out += &match failed {
        0 => format!("\nverdict{of}: {verdict}{read}\n"),
        n => format!("\nverdict{of}: {verdict}, {n} of {} checks failed{read}\n", report.checks.len()),
    };
    if report.part.is_some() {
        out += "join the parts with --finish\n";
    }
    out
}
