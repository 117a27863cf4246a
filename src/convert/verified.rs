//! `--verify`: what was converted is verified at once, at the level tokens, on the CPU.

use std::path::PathBuf;

use super::Job;
use crate::backend::Device;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::available_bytes;
use crate::model::memory::{Allowed, Needs, fits_device, gpu_positions, share};
use crate::model::{CHUNK_ROWS, Loaded, check_memory, plain_bytes, stored_bytes};
use crate::progress::Progress;
use crate::report::VerifyReport;
use crate::verify::{self, Level, TokenOptions};

/// What the container that a job makes needs, and its source beside it, for texts of so many positions.
fn needs(job: &Job, with_source: bool, positions: u64) -> Vec<Needs> {
    let (config, rows) = (&job.source.config, CHUNK_ROWS as u64);
    // What earlier passes have written is there, what has yet to be written is planned.
    let planned = job.plan.files.iter().filter(|file| !job.destination.is_finished(&file.name));
    let tensors = planned.flat_map(|file| &file.layout.tensors);
    let mut needs = vec![Needs::planned(&job.destination.directory, config, Loaded::Whole, positions, rows, tensors)];
    let source = Some(&job.source.directory).filter(|_| with_source);
    needs.extend(source.map(|source| {
        let mut needs = Needs::of(source, config, verify::OF_SOURCE, positions, rows);
        // What has yet to arrive can be anything.
        needs.dense += job.plan.source_bytes.saturating_sub(stored_bytes(source));
        needs
    }));
    needs
}

/// Refuses a verification on these devices, by default on the CPU, of what a job is about to make, with references of up to
/// `longest` ids, that would not fit into the memory that is `allowed`.
pub fn check_room(job: &Job, with_source: bool, longest: usize, devices: &[Device], allowed: Allowed) -> Result<()> {
    let memory = allowed.memory;
    let positions = verify::positions(longest);
    let on_gpu = || needs(job, with_source, gpu_positions(positions));
    for &device in if devices.is_empty() { &[Device::Cpu] } else { devices } {
        match device {
            Device::Reference => {
                let config = &job.source.config;
                let of_source = if with_source { plain_bytes(config, verify::OF_SOURCE) } else { 0 };
                let bytes = plain_bytes(config, Loaded::Whole).saturating_add(of_source);
                check_memory(&job.destination.directory, bytes, memory.or_else(available_bytes))?;
            }
            Device::Cpu => drop(share(&needs(job, with_source, positions), memory)?),
            Device::Cuda(_) | Device::Vulkan(_) | Device::Several(_) => drop(fits_device(device, &on_gpu, allowed)?),
        }
    }
    Ok(())
}

/// A verification that follows a conversion.
#[derive(Debug, Clone)]
pub struct Verification {
    container: PathBuf,
    /// What the container is compared with, unless it was consumed or is about to be.
    source: Option<PathBuf>,
    threads: usize,
    /// Memory for both, in bytes; by default what is available.
    memory: Option<u64>,
}

impl Verification {
    /// That of a conversion that is about to begin. What would not fit into `memory` bytes, by default those that are
    /// available, is refused now, not after hours.
    pub fn of(job: &Job, memory: Option<u64>) -> Result<Verification> {
        let mut shards = job.plan.files.iter().flat_map(|file| &file.needs);
        let is_gone = job.options.follow.is_none() && shards.any(|shard| job.source.is_deferred(shard));
        let source = (!job.options.consume && !is_gone).then(|| job.source.directory.clone());
        let container = job.destination.directory.clone();
        let needs = needs(job, source.is_some(), verify::positions(0));
        match share(&needs, memory).map_err(|fault| *fault.kind) {
            Err(FaultKind::MemoryTooSmall { fixed, experts, available }) => {
                let needed = fixed.saturating_add(experts);
                Err(Fault::new(Place::file(container), FaultKind::VerifyTooLarge { needed, available }))
            }
            Err(kind) => Err(Fault::new(Place::file(container), kind)),
            Ok(_) => Ok(Verification { container, source, threads: job.options.threads, memory }),
        }
    }

    /// Verifies the container, which is complete.
    pub fn run(&self, progress: &dyn Progress) -> Result<VerifyReport, Faults> {
        let tokens = TokenOptions { devices: vec![Device::Cpu], memory: self.memory, ..TokenOptions::default() };
        let (source, threads) = (self.source.clone(), self.threads);
        verify::verify(&self.container, &verify::Options { level: Level::Tokens, source, threads, tokens }, progress)
    }
}
