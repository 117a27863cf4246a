//! The conversion of a checkpoint to a container: planned whole, then run.
//!
//! [`Job::prepare`] checks everything that can be known before the first byte is written: the source, the recipe, the
//! destination, the space. [`Job::run`] does the work. Output depends on source and recipe only.

mod block;
mod consume;
mod destination;
mod earlier;
mod finish;
mod follow;
mod memory;
mod order;
mod plan;
mod run;
mod small;
mod verified;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;

use crate::checkpoint::{Allowed, Checkpoint};
use crate::container::manifest::MANIFEST_FILE;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::{self, Claim, DirectoryLock};
use crate::isa::Isa;
use crate::part::Part;
use crate::recipe::{Recipe, Settings};
use crate::report::{ConvertReport, Finding};
use crate::roles::Pass;

pub use destination::Destination;
use earlier::Earlier;
use follow::Follower;
pub use follow::{Follow, wait_for_model};
pub use plan::{Plan, PlannedClass, PlannedFile};
pub use verified::{Verification, check_room};

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
    /// Convert only this part of the files.
    pub part: Option<Part>,
    /// Convert nothing: make a container of what all parts have written.
    pub finish: bool,
    /// Wait for files of the source that are still arriving.
    pub follow: Option<Follow>,
    /// Remove files of the source that nothing needs any more.
    pub consume: bool,
    /// Threads, [`MAX_THREADS`](crate::limits::MAX_THREADS) at most; 0 for one per core.
    pub threads: usize,
    /// Memory for buffers, in bytes.
    pub memory: Option<u64>,
    /// Instruction set to quantize with; none for the fastest. The output is the same.
    pub isa: Option<Isa>,
}

impl Options {
    /// What of the directory this run needs for itself.
    fn claim(&self) -> Claim {
        self.part.map_or(Claim::Whole, |part| Claim::Part(part.file_text()))
    }

    /// Refuses flags that contradict each other.
    pub fn check(&self) -> Result<()> {
        let exclude = |one, other, why| Err(Fault::new(Place::default(), FaultKind::FlagsExclude { one, other, why }));
        if self.finish && self.part.is_some() {
            return exclude("--finish", "--part", "one makes a container of all parts, the other converts one");
        }
        if self.finish && self.follow.is_some() {
            return exclude("--finish", "--follow", "when all parts have ended, nothing is waited for");
        }
        if self.follow.is_some() && self.allowed.incomplete {
            return exclude("--follow", "--allow-incomplete", "what is missing is waited for");
        }
        if self.stats && self.follow.is_some() {
            return exclude("--stats", "--follow", "the source of a finished file may be gone");
        }
        if self.consume && self.allowed.incomplete {
            return exclude("--consume", "--allow-incomplete", "what comes later would have nothing to be added to");
        }
        if self.stats && self.consume {
            return exclude("--stats", "--consume", "the source of a finished file may be gone");
        }
        Ok(())
    }
}

/// A conversion that can start.
#[derive(Debug)]
pub struct Job {
    source: Checkpoint,
    /// Watches the source, where it is still arriving.
    follower: Option<Follower>,
    plan: Plan,
    destination: Destination,
    options: Options,
    /// Passes that an earlier run finished.
    finished_passes: Vec<String>,
    /// Source files that are not consumed, because of passes that nobody converts.
    kept: HashSet<String>,
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
        options.check()?;
        let recipe = Recipe::new(&options.settings)?;
        Destination::refuse_source(source, container)?;
        DirectoryLock::check(container, &options.claim())?;
        let earlier = Earlier::read(container)?;
        let follower = options.follow.map(|follow| Follower::new(source, follow));
        let (mut source, follower) = open(source, &options, &earlier, follower)?;
        let mut warnings = std::mem::take(&mut source.warnings);
        let plan = Plan::new(&source, &recipe, &options, &mut warnings)?;
        let finished_passes: Vec<String> = earlier.manifest.iter().flat_map(|m| m.passes.keys().cloned()).collect();
        let parts = earlier.parts();
        let destination = Destination::examine(container, &source, &plan, &options, earlier)?;
        let kept = consume::unconverted(&source, &options, &finished_passes);
        let kept = kept.into_keys().map(str::to_owned).collect();
        let mut job = Job { source, follower, plan, destination, options, finished_passes, kept, warnings };
        job.warnings.append(&mut job.destination.warnings);
        if job.options.finish {
            job.check_parts(parts)?;
        }
        if job.options.follow.is_none() {
            job.check_sources()?;
        }
        if job.options.consume {
            consume::check(&job.source, &job.plan)?;
            job.warnings.extend(consume::warnings(&job.source, &job.plan, &job.options, &job.finished_passes));
        }
        Ok(job)
    }

    /// Examines the destination anew, for what has happened there since.
    fn examine(&mut self, earlier: Earlier) -> Result<(), Faults> {
        self.destination =
            Destination::examine(&self.destination.directory, &self.source, &self.plan, &self.options, earlier)?;
        if self.options.consume {
            // A later run cannot find them again once the file is consumed.
            let of_source = |fault: &&Fault| {
                let file =
                    fault.place.file.as_deref().filter(|file| file.extension().is_some_and(|e| e == "safetensors"));
                file.is_some_and(|file| file.starts_with(&self.source.directory))
                    && !matches!(*fault.kind, FaultKind::NotConsumed { .. })
            };
            let found: Vec<_> = self.warnings.iter().filter(of_source).map(Finding::accepted).collect();
            self.destination.progress.warn(found);
        }
        Ok(())
    }

    /// Every part must have written its files before a container is made of them.
    fn check_parts(&self, parts: Option<(usize, BTreeMap<usize, usize>)>) -> Result<()> {
        let missing: Vec<&PlannedFile> =
            self.plan.files.iter().filter(|file| !self.destination.is_finished(&file.name)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let names = match parts {
            None => vec!["no part has begun".to_owned()],
            Some((of, begun)) => self.missing_parts(of, &begun, &missing),
        };
        let kind = FaultKind::PartsMissing { files: missing.len(), missing: names };
        Err(Fault::new(Place::file(&self.destination.directory), kind))
    }

    /// Which parts have not written their files.
    fn missing_parts(&self, of: usize, begun: &BTreeMap<usize, usize>, missing: &[&PlannedFile]) -> Vec<String> {
        let shards: BTreeSet<&String> = self.plan.files.iter().map(|file| &file.shard).collect();
        let ranks: BTreeMap<&String, usize> =
            shards.into_iter().enumerate().map(|(rank, shard)| (shard, rank)).collect();
        let mut by_part: BTreeMap<usize, usize> = BTreeMap::new();
        for file in missing {
            *by_part.entry(ranks[&file.shard] % of + 1).or_default() += 1;
        }
        let text = |(number, files): (usize, usize)| match begun.get(&number) {
            None => format!("part {number}/{of} (not begun)"),
            Some(_) => format!("part {number}/{of} ({files} left)"),
        };
        by_part.into_iter().map(text).collect()
    }

    /// A source file that was there once may be gone, but not while something is to be made from it.
    fn check_sources(&self) -> Result<(), Faults> {
        let left = self.plan.mine().filter(|file| self.options.stats || !self.destination.is_finished(&file.name));
        let gone: BTreeSet<&String> =
            left.flat_map(|file| &file.needs).filter(|shard| self.source.is_deferred(shard)).collect();
        let fault = |shard: &String| {
            let tensors = self.source.index.entries().filter(|(_, file)| file == shard).count();
            Fault::new(Place::file(self.source.directory.join(shard)), FaultKind::ShardMissing { tensors })
        };
        Faults::check(gone.into_iter().map(fault).collect())
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

    /// Directory of the source.
    pub fn source(&self) -> &Path {
        &self.source.directory
    }

    /// Whether the source has weights of a pass, wanted or not, as far as its index and the opened files tell.
    pub fn source_has(&self, pass: Pass) -> bool {
        let Checkpoint { census, index, shards, .. } = &self.source;
        let stored = shards.iter().flat_map(|shard| shard.header.tensors()).map(|tensor| &tensor.name);
        let mut names = index.entries().map(|(name, _)| name).chain(stored);
        names.any(|name| census.role(name.as_str()).is_some_and(|role| role.pass == pass))
    }

    /// Directory of the container.
    pub fn container(&self) -> &Path {
        &self.destination.directory
    }

    /// Bytes that this run still needs of the disk: what it writes, less what it removes before.
    pub fn needed_bytes(&self) -> u64 {
        let small = self.destination.small.iter().filter(|f| !f.present).map(|f| f.bytes).sum::<u64>();
        let small = small + self.bookkeeping_bytes();
        let (mut taken, mut most) = (0_i128, 0_i128);
        // Space that the source gives back is no use to a container on another disk.
        let consume = self.options.consume && io::is_same_device(&self.source.directory, &self.destination.directory);
        let mut here: BTreeSet<&String> = BTreeSet::new();
        let left: Vec<&PlannedFile> = self.plan.mine().filter(|f| !self.destination.is_finished(&f.name)).collect();
        for (number, file) in left.iter().enumerate() {
            taken += i128::from(file.layout.bytes);
            if !consume {
                continue;
            }
            // A file that has yet to arrive takes its space first.
            let arriving = file.needs.iter().filter(|shard| self.source.is_deferred(shard) && here.insert(shard));
            taken += arriving.map(|shard| self.shard_bytes(shard)).sum::<i128>();
            most = most.max(taken);
            let later = |shard: &&String| left[number + 1..].iter().any(|file| file.needs.contains(*shard));
            let goes = file.needs.iter().filter(|shard| !later(shard) && !self.kept.contains(*shard));
            taken -= goes.map(|shard| self.shard_bytes(shard)).sum::<i128>();
        }
        small + u64::try_from(most.max(taken)).unwrap_or(0)
    }

    /// About what index, manifest and progress will take, where the container is not complete.
    fn bookkeeping_bytes(&self) -> u64 {
        let complete = self.plan.files.iter().all(|file| self.destination.is_finished(&file.name));
        if complete && (self.options.bare || self.destination.directory.join(MANIFEST_FILE).exists()) {
            return 0;
        }
        let files = 2 * 400 * self.plan.files.len() as u64;
        let names = self.plan.files.iter().flat_map(|file| &file.weights).map(|weight| weight.planned.name.as_str());
        // In the manifest once, in the index with its scales.
        let weights: u64 = names.map(|name| 3 * name.len() as u64 + 620).sum();
        if self.options.bare { files } else { files + weights }
    }

    /// Size of a source file, or of the weights that it should hold.
    fn shard_bytes(&self, name: &str) -> i128 {
        match self.source.shards.iter().find(|shard| shard.name == name) {
            Some(shard) => i128::from(shard.file.bytes()),
            None => {
                let files = self.plan.files.iter().filter(|file| file.shard == name);
                files.flat_map(|file| &file.weights).map(|weight| i128::from(weight.source_bytes)).sum()
            }
        }
    }

    /// Free bytes at the destination, where the system tells.
    pub fn free_bytes(&self) -> Option<u64> {
        io::free_bytes(&self.destination.directory)
    }

    /// Files that an earlier run finished.
    pub fn finished_files(&self) -> usize {
        self.plan.mine().filter(|f| self.destination.is_finished(&f.name)).count()
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

/// Opens the source. Files that have yet to arrive are left for later, and so are those that were there once and are gone.
fn open(
    directory: &Path,
    options: &Options,
    earlier: &Earlier,
    follower: Option<Follower>,
) -> Result<(Checkpoint, Option<Follower>), Faults> {
    let known = earlier.sources();
    let follower = RefCell::new(follower);
    let deferred = |name: &str| match &mut *follower.borrow_mut() {
        Some(follower) => !follower.is_whole_at_once(name),
        None => known.contains(name) && !directory.join(name).exists(),
    };
    let source = Checkpoint::open_but(directory, &options.passes, options.allowed, &deferred)?;
    Ok((source, follower.into_inner()))
}

/// A path as text in reports.
fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
