//! `coliconv diff`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::progress::{Meter, duration};
use super::{Talk, findings_text, print, print_json, size, tell, text};
use crate::diff::{Options, diff};
use crate::error::{Faults, escaped};
use crate::limits;
use crate::report::{DiffClass, DiffReport, DiffTensor, Side};

/// Arguments of `diff`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Directory of a container or checkpoint
    a: PathBuf,
    /// Directory of another container, or of the checkpoint
    b: PathBuf,
    /// Compare only tensors whose names match; `*` stands for anything
    #[arg(long, value_name = "GLOB")]
    tensor: Option<String>,
    /// Threads; 0 for one per core [default: 0]
    #[arg(long, value_name = "N", value_parser = super::threads, default_value_t = 0, hide_default_value = true)]
    threads: usize,
    #[command(flatten)]
    pub(super) talk: Talk,
}

/// Runs `diff`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Faults> {
    let options = Options { tensor: arguments.tensor.clone(), threads: arguments.threads };
    let report = diff(&arguments.a, &arguments.b, &options, &Meter::new(arguments.talk.quiet))?;
    tell(&findings_text(&report.warnings));
    let printed = if arguments.talk.json { print_json(&report) } else { print(&report_text(&report)) };
    Ok(if printed == ExitCode::SUCCESS && !report.identical { ExitCode::from(1) } else { printed })
}

fn report_text(report: &DiffReport) -> String {
    let mut out = String::new();
    for (letter, side) in [("a", &report.a), ("b", &report.b)] {
        out += &format!("{letter}: {} ({})\n", escaped(&side.path), side.kind);
    }
    let differing: Vec<&DiffTensor> = report.tensors.iter().filter(|tensor| !tensor.same_bytes).collect();
    if !differing.is_empty() {
        let rows = differing.iter().take(limits::MAX_PRINTED_TENSORS).map(|tensor| tensor_row(tensor)).collect();
        out += "\nthe worst first:\n";
        out += &text::table(&["tensor", "SQNR dB", "max error"], &["SQNR dB", "max error"], rows);
        if let Some(more @ 1..) = differing.len().checked_sub(limits::MAX_PRINTED_TENSORS) {
            out += &format!("… and {} more that differ\n", size::grouped(more as u64));
        }
    }
    for tensor in differing.iter().filter(|tensor| tensor.reason.is_some()).take(limits::MAX_PRINTED_TENSORS) {
        let reason = tensor.reason.as_deref().unwrap_or_default();
        out += &format!("{}: not compared: {}\n", escaped(&tensor.name), escaped(reason));
    }
    if !report.classes.is_empty() {
        let right = ["tensors", "same", "SQNR dB", "worst"];
        let header = ["class", "a", "b", "tensors", "same", "SQNR dB", "worst"];
        out += &format!("\n{}", text::table(&header, &right, report.classes.iter().map(class_row).collect()));
    }
    for (letter, names) in [("a", &report.only_in_a), ("b", &report.only_in_b)] {
        out += &only_text(letter, names);
    }
    out + &verdict_text(report, differing.len())
}

/// A measure, or what there is instead of one.
fn tensor_row(tensor: &DiffTensor) -> Vec<String> {
    let ratio = match (tensor.sqnr_db, tensor.same_values) {
        (_, None) => "not compared".to_owned(),
        _ if tensor.non_finite > 0 => format!("{} NaN or infinite", size::grouped(tensor.non_finite)),
        (Some(ratio), _) => format!("{ratio:.2}"),
        (None, Some(true)) => "same values".to_owned(),
        (None, Some(false)) => "no signal".to_owned(),
    };
    let error = tensor.max_abs_err.map_or(String::new(), |error| format!("{error:.2e}"));
    vec![escaped(&tensor.name).to_string(), ratio, error]
}

fn class_row(class: &DiffClass) -> Vec<String> {
    let format = |name: &str, group_size: Option<u64>| match group_size {
        Some(size) if name == "int4-grouped" => format!("{name}({size})"),
        _ => name.to_owned(),
    };
    let decibels = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
    vec![
        class.class.clone().unwrap_or_else(|| "?".to_owned()),
        format(&class.format_a, class.group_size_a),
        format(&class.format_b, class.group_size_b),
        size::grouped(class.tensors),
        size::grouped(class.same_bytes),
        decibels(class.sqnr_db),
        decibels(class.worst_sqnr_db),
    ]
}

fn only_text(letter: &str, names: &[String]) -> String {
    if names.is_empty() {
        return String::new();
    }
    let mut out = format!("\nonly in {letter}: {} tensors\n", size::grouped(names.len() as u64));
    for name in names.iter().take(limits::MAX_PRINTED_TENSORS) {
        out += &format!("  {}\n", escaped(name));
    }
    if let Some(more @ 1..) = names.len().checked_sub(limits::MAX_PRINTED_TENSORS) {
        out += &format!("  … and {} more\n", size::grouped(more as u64));
    }
    out
}

fn verdict_text(report: &DiffReport, differing: usize) -> String {
    let tensors = size::grouped(report.tensors.len() as u64);
    let rate = report.bytes as f64 / report.seconds.max(1e-9) / 1e9;
    let took = format!("{} ({rate:.2} GB/s)", duration(report.seconds));
    if report.identical {
        return format!("\nidentical: {tensors} tensors in {took}\n");
    }
    let reference = match report.reference {
        Side::A => "a",
        Side::B => "b",
    };
    format!(
        "\ndifferent: {} of {tensors} tensors in {took}; SQNR is against {reference}\n",
        size::grouped(differing as u64)
    )
}
