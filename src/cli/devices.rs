//! `coliconv devices`

use std::process::ExitCode;

use clap::Args;

use super::{print, print_json, size};
use crate::devices::devices;
use crate::error::escaped;
use crate::report::{DevicesCpu, DevicesGpu, DevicesReport, Finding};

/// Arguments of `devices`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Print one JSON document on stdout
    #[arg(long)]
    json: bool,
}

/// Runs `devices`: that a device is not there is an answer, no error.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let report = devices();
    if arguments.json { print_json(&report) } else { print(&to_text(&report)) }
}

fn to_text(report: &DevicesReport) -> String {
    let mut out = cpu(&report.cpu);
    for api in &report.apis {
        for device in &api.devices {
            out += &gpu(device);
        }
        match &api.unusable {
            Some(reason) => out += &format!("{}: not usable\n{}", api.api, because(reason)),
            None if api.devices.is_empty() => out += &format!("{}: no device\n", api.api),
            None => {}
        }
    }
    out
}

fn cpu(cpu: &DevicesCpu) -> String {
    let name = cpu.name.as_deref().unwrap_or("processor");
    let threads = format!("{} thread{}", cpu.threads, if cpu.threads == 1 { "" } else { "s" });
    let memory = match (cpu.memory_bytes, cpu.available_bytes) {
        (Some(all), Some(available)) => format!(", {} of {} available", size::human(available), size::human(all)),
        _ => String::new(),
    };
    format!("cpu: {}\n  {}, {threads}{memory}\n", escaped(name), cpu.isa)
}

fn gpu(gpu: &DevicesGpu) -> String {
    let free = gpu.free_bytes.map_or(String::new(), |free| format!("{} of ", size::human(free)));
    let memory = format!("{free}{}{}", size::human(gpu.memory_bytes), if free.is_empty() { "" } else { " free" });
    let kernels = gpu.kernels.as_ref().map_or(String::new(), |kernels| format!(", kernels of {kernels}"));
    let mut out = format!("{}: {}\n", gpu.device, escaped(&gpu.name));
    out += &format!("  capability {}, driver of {}, {memory}{kernels}\n", gpu.capability, escaped(&gpu.driver));
    if !gpu.peers.is_empty() {
        out += &format!("  copies directly from {}\n", gpu.peers.join(", "));
    }
    if let Some(reason) = &gpu.unusable {
        out += &format!("  not usable\n{}", because(reason));
    }
    out
}

/// A reason and what to do, each on a line.
fn because(reason: &Finding) -> String {
    let hint = reason.hint.as_ref().map_or(String::new(), |hint| format!("  hint: {hint}\n"));
    format!("  {}\n{hint}", reason.message)
}
