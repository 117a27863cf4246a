//! The command line: the only place that prints.
//!
//! Data go to stdout, everything else to stderr. Exit code 0: done, or the verdict is good; 1: it ran and the answer is no;
//! 2: it could not run.

mod bench;
mod convert;
mod devices;
mod diff;
mod generate;
mod inspect;
mod pipeline;
mod progress;
mod publish;
mod running;
mod score;
mod shell;
mod size;
mod text;
mod verify;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use serde::Serialize;

use crate::backend::vulkan;
use crate::error::{Fault, FaultKind, Faults, Place};
use crate::limits;
use crate::report::{Finding, Refusal, Severity};

/// Version and commit.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("COLICONV_COMMIT"), ")");

/// Converts, inspects and verifies colibri containers of GLM-5.2.
#[derive(Debug, Parser)]
#[command(name = "coliconv", version = VERSION, max_term_width = 100, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Convert an FP8 or BF16 checkpoint to a container
    Convert(Box<convert::Arguments>),
    /// Tell what a checkpoint, a container or one file is, and whether it is whole
    Inspect(inspect::Arguments),
    /// Compare two models, tensor by tensor
    Diff(diff::Arguments),
    /// Prove that a container is whole and made from its source
    Verify(verify::Arguments),
    /// Continue a prompt: text, chat or token ids
    Generate(Box<generate::Arguments>),
    /// Score tasks and texts, and compare with the source
    Score(Box<score::Arguments>),
    /// Check that a container may be published, and prepare its upload; nothing goes to the network
    Publish(publish::Arguments),
    /// Convert, verify, score and publish, as a file says; goes on where an earlier run stopped
    Pipeline(pipeline::Arguments),
    /// Tell what models can run on here, and why a device cannot be used
    Devices(devices::Arguments),
    /// Measure how fast this machine does the work
    Bench(bench::Arguments),
    /// Print what lets a shell complete commands and flags
    Completions(shell::Completions),
    /// Write the manual pages
    Man(shell::Manual),
    #[command(flatten)]
    Later(Later),
}

/// What help says of commands that are planned.
const PLANNED: &str = "Not available in this version";

/// Commands that are planned: refused by name until they are there.
#[derive(Debug, Subcommand)]
enum Later {
    /// Not available in this version
    Repair(Anything),
    /// Not available in this version
    Repack(Anything),
}

/// Any arguments: the command is refused before they are looked at.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
struct Anything {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _arguments: Vec<String>,
}

impl Later {
    fn name(&self) -> &'static str {
        match self {
            Later::Repair(_) => "`coliconv repair`",
            Later::Repack(_) => "`coliconv repack`",
        }
    }
}

/// How a command talks.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Talk {
    /// Print one JSON document on stdout
    #[arg(long)]
    pub json: bool,
    /// No progress
    #[arg(long, short)]
    pub quiet: bool,
}

/// Parses the command line, runs the command, and tells how it ended.
pub fn main() -> ExitCode {
    let cli = match Cli::command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    // For tests and for whoever looks for a fault: see docs/vulkan.md.
    if std::env::var_os("COLICONV_VULKAN_VALIDATION").is_some_and(|value| value == "1") {
        vulkan::validate();
    }
    match cli.command {
        Command::Convert(arguments) => ended(arguments.talk, convert::run(&arguments)),
        Command::Inspect(arguments) => ended(arguments.talk, inspect::run(&arguments)),
        Command::Diff(arguments) => ended(arguments.talk, diff::run(&arguments)),
        Command::Verify(arguments) => ended(arguments.talk, verify::run(&arguments)),
        Command::Generate(arguments) => ended(arguments.talk, generate::run(&arguments)),
        Command::Score(arguments) => ended(arguments.talk, score::run(&arguments)),
        Command::Publish(arguments) => ended(arguments.talk, publish::run(&arguments)),
        Command::Pipeline(arguments) => ended(arguments.talk, pipeline::run(&arguments)),
        Command::Devices(arguments) => devices::run(&arguments),
        Command::Bench(arguments) => ended(arguments.talk, bench::run(&arguments)),
        Command::Completions(arguments) => shell::completions(&arguments, Cli::command()),
        Command::Man(arguments) => {
            shell::manual(&arguments, Cli::command()).unwrap_or_else(|faults| refuse(&faults, false))
        }
        Command::Later(later) => refuse(&not_available(later.name()).into(), false),
    }
}

/// The exit code of a command that ran, or of one that refused, which is told.
fn ended(talk: Talk, result: Result<ExitCode, Faults>) -> ExitCode {
    result.unwrap_or_else(|faults| refuse(&faults, talk.json))
}

/// Parses a number of threads.
pub(crate) fn threads(text: &str) -> Result<usize, String> {
    let limit = limits::MAX_THREADS;
    text.parse().ok().filter(|&threads| threads <= limit).ok_or_else(|| format!("expected a number up to {limit}"))
}

/// Threads for a command; 0 means one per core.
pub(crate) fn pool(threads: usize) -> Result<rayon::ThreadPool, Faults> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.min(limits::MAX_THREADS)).build();
    pool.map_err(|e| Fault::new(Place::default(), FaultKind::Threads { message: e.to_string() }).into())
}

/// A refusal of something that is planned but not there.
pub(crate) fn not_available(name: &'static str) -> Fault {
    Fault::new(Place::default(), FaultKind::NotAvailable { name })
}

/// Prints what clap has to say, and how upstream's spellings are called here.
fn usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    let argument = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(argument)) if error.kind() == ErrorKind::UnknownArgument => argument.as_str(),
        _ => "",
    };
    let hint = match argument.split(['=', ' ']).next().unwrap_or_default() {
        "--indir" | "--model" | "--repo" => {
            "the checkpoint is the first argument: coliconv convert CHECKPOINT CONTAINER"
        }
        "--outdir" => "the container is the second argument: coliconv convert CHECKPOINT CONTAINER",
        "--workers" | "-j" => "--threads N",
        "--n-layers" => "the number of layers is read from config.json",
        "--min-free-gb" => "the space that is needed is computed and checked; --dry-run prints it",
        "-g" => "--group-size N",
        _ => "",
    };
    if !hint.is_empty() {
        let _ = writeln!(io::stderr(), "hint: {hint}");
    }
    ExitCode::from(if error.use_stderr() { 2 } else { 0 })
}

/// Writes to stdout. A reader that has gone away is no error.
pub(crate) fn print(text: &str) -> ExitCode {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            let _ = writeln!(io::stderr(), "error: cannot write to standard output: {e}");
            ExitCode::from(2)
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Prints a report as JSON.
pub(crate) fn print_json<T: Serialize>(report: &T) -> ExitCode {
    print(&format!("{}\n", serde_json::to_string_pretty(report).expect("reports are plain data")))
}

/// Writes to stderr, where nobody minds when it fails.
pub(crate) fn tell(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Tells why a command could not run; exit code 2.
pub(crate) fn refuse(faults: &Faults, json: bool) -> ExitCode {
    refuse_findings(faults.iter().map(|fault| Finding::new(Severity::Error, fault)).collect(), json)
}

/// The same of faults that are findings already.
pub(crate) fn refuse_findings(findings: Vec<Finding>, json: bool) -> ExitCode {
    tell(&findings_text(&findings));
    if json {
        print_json(&Refusal { refused: findings });
    }
    ExitCode::from(2)
}

/// Findings a line each, the first of them, with each hint once.
pub(crate) fn findings_text(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings.iter().take(limits::MAX_PRINTED_FINDINGS) {
        text += &format!("{}: {}\n", finding.severity.name(), finding.line());
    }
    if let Some(more @ 1..) = findings.len().checked_sub(limits::MAX_PRINTED_FINDINGS) {
        text += &format!("… and {more} more ({} in all)\n", findings.len());
    }
    let mut hints: Vec<&str> = Vec::new();
    for hint in findings.iter().filter_map(|finding| finding.hint.as_deref()) {
        if !hints.contains(&hint) {
            hints.push(hint);
            text += &format!("hint: {hint}\n");
        }
    }
    text
}

/// Tells what was accepted although it is odd.
pub(crate) fn warn(faults: &[Fault]) {
    let findings: Vec<Finding> = faults.iter().map(Finding::accepted).collect();
    tell(&findings_text(&findings));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }
}
