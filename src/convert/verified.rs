//! `--verify`: what was converted is verified at once, at the level tokens, on the CPU.

use std::path::PathBuf;

use super::Job;
use crate::backend::Device;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::model::memory::{Needs, share};
use crate::model::{CHUNK_ROWS, stored_bytes};
use crate::progress::Progress;
use crate::report::VerifyReport;
use crate::verify::{self, Level, TokenOptions};

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
        let (config, positions, rows) = (&job.source.config, verify::positions(0), CHUNK_ROWS as u64);
        // What earlier passes have written is there, what has yet to be written is planned.
        let planned = job.plan.files.iter().filter(|file| !job.destination.is_finished(&file.name));
        let tensors = planned.flat_map(|file| &file.layout.tensors);
        let mut needs = vec![Needs::planned(&container, config, positions, rows, tensors)];
        needs.extend(source.as_deref().map(|source| {
            let mut needs = Needs::of(source, config, positions, rows);
            // What has yet to arrive can be anything.
            needs.dense += job.plan.source_bytes.saturating_sub(stored_bytes(source));
            needs
        }));
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
