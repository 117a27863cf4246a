//! The conversion of a checkpoint to a container: planned whole, then run.
//!
//! [`Job::prepare`] checks everything that can be known before the first byte is written: the source, the recipe, the
//! destination, the space. [`Job::run`] does the work. Output depends on source and recipe only.

mod destination;
mod plan;
mod run;
mod small;

use std::path::Path;

use crate::checkpoint::{Allowed, Checkpoint};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io;
use crate::isa::Isa;
use crate::recipe::{Recipe, Settings};
use crate::report::ConvertReport;
use crate::roles::Pass;

pub use destination::Destination;
pub use plan::{Plan, PlannedClass, PlannedFile};

pub use crate::progress::{Progress, Silent};

/// What a user asks for.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Formats.
    pub settings: Settings,
    /// Passes to run; empty means the main pass.
    pub passes: Vec<Pass>,
    /// Only what upstream's converter writes: no stamps, index, manifest.
    pub bare: bool,
    /// Measure the error of each class.
    pub stats: bool,
    /// Refusals turned into warnings.
    pub allowed: Allowed,
    /// Start although the free space is short.
    pub force: bool,
    /// Threads, [`MAX_THREADS`](crate::limits::MAX_THREADS) at most; 0 for one per core.
    pub threads: usize,
    /// Memory for buffers, in bytes.
    pub memory: Option<u64>,
    /// Instruction set to quantize with; none for the fastest. The output is the same.
    pub isa: Option<Isa>,
}

/// A conversion that can start.
#[derive(Debug)]
pub struct Job {
    source: Checkpoint,
    plan: Plan,
    destination: Destination,
    options: Options,
    /// What was accepted although it is odd.
    warnings: Vec<Fault>,
}

impl Job {
    /// Checks source, recipe and destination, and plans every byte. Writes nothing.
    pub fn prepare(source: &Path, container: &Path, mut options: Options) -> Result<Job, Faults> {
        if options.passes.is_empty() {
            options.passes.push(Pass::Main);
        }
        options.passes.sort_unstable();
        options.passes.dedup();
        let recipe = Recipe::new(&options.settings)?;
        Destination::refuse_source(source, container)?;
        let mut source = Checkpoint::open(source, &options.passes, options.allowed)?;
        let mut warnings = std::mem::take(&mut source.warnings);
        let plan = Plan::new(&source, &recipe, &options, &mut warnings)?;
        let mut destination = Destination::examine(container, &source, &plan, &options)?;
        warnings.append(&mut destination.warnings);
        Ok(Job { source, plan, destination, options, warnings })
    }

    /// Refuses what would run out of space; a dry run only reports it.
    pub fn check_space(&mut self) -> Result<()> {
        let (needed, free) = (self.needed_bytes(), self.free_bytes());
        if let Some(free) = free.filter(|&free| free < needed) {
            let fault = Fault::new(Place::file(&self.destination.directory), FaultKind::NoSpace { needed, free });
            if !self.options.force {
                return Err(fault);
            }
            self.warnings.push(fault);
        }
        Ok(())
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What was accepted although it is odd.
    pub fn warnings(&self) -> &[Fault] {
        &self.warnings
    }

    /// Directory of the container.
    pub fn container(&self) -> &Path {
        &self.destination.directory
    }

    /// Bytes that this run still has to write.
    pub fn needed_bytes(&self) -> u64 {
        let weights: u64 =
            self.plan.files.iter().filter(|f| !self.destination.is_finished(&f.name)).map(|f| f.layout.bytes).sum();
        weights + self.destination.small.iter().filter(|f| !f.present).map(|f| f.bytes).sum::<u64>()
    }

    /// Free bytes at the destination, where the system tells.
    pub fn free_bytes(&self) -> Option<u64> {
        io::free_bytes(&self.destination.directory)
    }

    /// Files that an earlier run finished.
    pub fn finished_files(&self) -> usize {
        self.plan.files.iter().filter(|f| self.destination.is_finished(&f.name)).count()
    }

    /// The report of a dry run.
    pub fn dry_report(&self) -> ConvertReport {
        let free = self.free_bytes();
        ConvertReport {
            free_bytes: Some(free.unwrap_or(0)),
            fits: Some(free.is_none_or(|free| free >= self.needed_bytes())),
            ..self.plan.report(&self.destination.directory, &self.warnings)
        }
    }

    /// Converts. Finished files of an earlier run are kept if their hashes say that they are whole.
    pub fn run(self, progress: &dyn Progress) -> Result<ConvertReport, Faults> {
        progress.start(self.plan.source_bytes);
        let report = run::run(self, progress);
        progress.end();
        report
    }
}

/// A path as text in reports.
fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
