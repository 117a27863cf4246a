//! `--verify`: what was converted is verified at once, at the level tokens, on the CPU.

use std::path::PathBuf;

use super::Job;
use crate::backend::Device;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::available_bytes;
use crate::model::stored_bytes;
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
}

impl Verification {
    /// That of a conversion that is about to begin. What would not fit into `memory` bytes, by default those that are
    /// available, is refused now, not after hours.
    pub fn of(job: &Job, memory: Option<u64>) -> Result<Verification> {
        let mut shards = job.plan.files.iter().flat_map(|file| &file.needs);
        let is_gone = job.options.follow.is_none() && shards.any(|shard| job.source.is_deferred(shard));
        let source = (!job.options.consume && !is_gone).then(|| job.source.directory.clone());
        let container = job.destination.directory.clone();
        // What has yet to arrive or to be written counts as planned; what earlier passes have written is there.
        let written = job.plan.files.iter().filter(|file| !job.destination.is_finished(&file.name));
        let container_bytes = written.map(|file| file.layout.bytes).sum::<u64>() + stored_bytes(&container);
        let source_bytes = source.as_deref().map_or(0, |source| stored_bytes(source).max(job.plan.source_bytes));
        let needed = container_bytes.saturating_add(source_bytes);
        match memory.or_else(available_bytes) {
            Some(available) if needed > available => {
                Err(Fault::new(Place::file(container), FaultKind::VerifyTooLarge { needed, available }))
            }
            _ => Ok(Verification { container, source, threads: job.options.threads }),
        }
    }

    /// Verifies the container, which is complete.
    pub fn run(&self, progress: &dyn Progress) -> Result<VerifyReport, Faults> {
        let tokens = TokenOptions { devices: vec![Device::Cpu], ..TokenOptions::default() };
        let (source, threads) = (self.source.clone(), self.threads);
        verify::verify(&self.container, &verify::Options { level: Level::Tokens, source, threads, tokens }, progress)
    }
}
