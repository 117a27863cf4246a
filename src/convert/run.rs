//! The work: file after file, blocks of rows in parallel; then what makes a container of the files.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rayon::prelude::*;

use super::block::{Block, Buffers, Gathered, Made, Stats, What, blocks, check_unchanged};
use super::consume;
use super::earlier::Earlier;
use super::finish::{finish, record_tensors};
use super::follow::Follower;
use super::memory::MemoryPeak;
use super::order::in_order;
use super::plan::{PlannedFile, check_values};
use super::{Destination, Job, Progress};
use crate::container::manifest::{FileRecord, TensorRecord};
use crate::container::writer::{Digests, FileWriter, SealedFile, digest_file};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::{self, DirectoryLock, hook};
use crate::limits;
use crate::report::{ConvertFile, ConvertReport, Finding};
use crate::tensor::TensorName;
use crate::threads;
use crate::weights::SourceRows;

pub(super) fn run(mut job: Job, progress: &dyn Progress) -> Result<ConvertReport, Faults> {
    let started = Instant::now();
    let memory = MemoryPeak::start();
    let directory = job.destination.directory.clone();
    let pool = threads::pool(job.options.threads, &directory)?;
    let made = MadeDirectories::make(&directory)?;
    let lock = DirectoryLock::take(&directory, &job.options.claim()).inspect_err(|_| made.undo())?;
    let work = Work::new(&job, pool, lock);
    let outcome = work.run(&mut job, progress);
    if outcome.is_err() {
        job.destination.forget();
    }
    drop(work);
    let outcome = outcome.inspect_err(|_| made.undo())?;
    let mut report = job.plan.report(&directory, &job.warnings);
    let earlier = job.destination.progress.warnings.iter().filter(|known| !report.warnings.contains(known));
    report.warnings.extend(earlier.cloned().collect::<Vec<_>>());
    report.files = job.destination.own_files().map(file_report).collect();
    report.files.sort_by(|a, b| a.name.cmp(&b.name));
    report.complete = Some(outcome.complete);
    report.consumed = outcome.consumed;
    if job.options.stats {
        for (class, planned) in report.classes.iter_mut().zip(&job.plan.classes) {
            let key = (planned.class, planned.format, planned.bits);
            let (signal, noise) = outcome.stats.get(&key).copied().unwrap_or_default();
            class.sqnr_db = (noise > 0.0 && signal > 0.0).then(|| 10.0 * (signal / noise).log10());
        }
    }
    report.seconds = started.elapsed().as_secs_f64();
    report.peak_anonymous_bytes = memory.stop();
    Ok(report)
}

fn file_report(file: &FileRecord) -> ConvertFile {
    ConvertFile { name: file.name.clone(), bytes: file.bytes, sha256: Some(file.sha256.clone()) }
}

/// The directories that a run has made, innermost first, to be removed if nothing comes of it.
struct MadeDirectories(Vec<PathBuf>);

impl MadeDirectories {
    /// Makes a directory with its ancestors.
    fn make(path: &Path) -> Result<MadeDirectories> {
        hook::create_directories(path).map(MadeDirectories).map_err(|e| Fault::io("create the directory", path, e))
    }

    /// A directory with something in it is not removed.
    fn undo(&self) {
        for directory in &self.0 {
            let _ = hook::remove_directory(directory);
        }
    }
}

/// What the files of this run came to.
#[derive(Default)]
struct Done {
    tensors: BTreeMap<TensorName, TensorRecord>,
    stats: Stats,
    consumed: Vec<String>,
    /// Whether the container is complete.
    complete: bool,
}

struct Work {
    lock: DirectoryLock,
    pool: rayon::ThreadPool,
    block_bytes: u64,
    /// Bytes of one write.
    chunk_bytes: usize,
    /// Memory that is used again: fresh pages cost more than the arithmetic.
    buffers: Mutex<Vec<Buffers>>,
    spare: Mutex<Vec<Made>>,
    /// Files of other parts that were found whole.
    whole: Mutex<HashSet<String>>,
}

impl Work {
    fn new(job: &Job, pool: rayon::ThreadPool, lock: DirectoryLock) -> Work {
        // Of a block there are its source bytes, its codes, and others that wait for their turn.
        let memory = job.options.memory.unwrap_or(u64::MAX);
        let block_bytes = (memory / (8 * pool.current_num_threads() as u64)).min(limits::BLOCK_SOURCE_BYTES);
        let chunk_bytes = (memory / 16).min(limits::WRITE_CHUNK_BYTES as u64) as usize;
        Work {
            lock,
            pool,
            block_bytes,
            chunk_bytes,
            buffers: Mutex::default(),
            spare: Mutex::default(),
            whole: Mutex::default(),
        }
    }

    /// All of it, under the lock.
    fn run(&self, job: &mut Job, progress: &dyn Progress) -> Result<Done, Faults> {
        // Another run may have worked here since the destination was examined.
        job.examine(Earlier::read(&job.destination.directory)?)?;
        let mut follower = job.follower.take();
        let tensors = std::mem::take(&mut job.destination.kept_tensors);
        let mut done = Done { tensors, ..Done::default() };
        self.keep(job, progress, &mut done)?;
        job.destination.write_progress()?;
        self.consume_finished(job, &mut done)?;
        self.files(job, &mut follower, progress, &mut done)?;
        if let Some(follower) = &mut follower {
            follower.small_files(&job.source.directory, progress)?;
            job.small_files_arrived()?;
        }
        self.lock.check_held()?;
        if job.options.part.is_none() {
            finish(job, std::mem::take(&mut done.tensors), false)?;
            done.complete = true;
        } else {
            self.complete(job, progress, &mut done)?;
        }
        Ok(done)
    }

    /// The last part to end makes a container of what all have written.
    fn complete(&self, job: &mut Job, progress: &dyn Progress, done: &mut Done) -> Result<(), Faults> {
        let directory = job.destination.directory.clone();
        let turn = DirectoryLock::one_at_a_time(&directory)?;
        let earlier = Earlier::read(&directory)?;
        let finished = earlier.finished(&directory);
        done.complete = job.plan.files.iter().all(|file| finished.contains(file.name.as_str()));
        if done.complete && !earlier.is_complete() {
            let part = job.options.part.take();
            let own: HashSet<String> = job.plan.mine().map(|file| file.name.clone()).collect();
            job.plan.divide(None);
            job.examine(earlier)?;
            let mut all = Done { tensors: std::mem::take(&mut job.destination.kept_tensors), ..Done::default() };
            all.tensors.append(&mut done.tensors);
            self.verify_all(job, &|name| own.contains(name), progress, &mut all)?;
            finish(job, all.tensors, true)?;
            job.options.part = part;
            job.plan.divide(part);
            job.destination.mind(part, own);
        }
        turn.release();
        Ok(())
    }

    /// Files that are finished stay if they are whole.
    fn keep(&self, job: &Job, progress: &dyn Progress, done: &mut Done) -> Result<(), Faults> {
        self.verify_all(job, &|name| !job.destination.is_mine(name), progress, done)?;
        if job.options.stats {
            for file in job.plan.mine().filter(|file| job.destination.is_finished(&file.name)) {
                self.measure(job, file, progress, &mut done.stats)?;
            }
        }
        Ok(())
    }

    /// Reads the finished files but those that are `known`, several at a time.
    fn verify_all(
        &self,
        job: &Job,
        known: &(dyn Fn(&str) -> bool + Sync),
        progress: &dyn Progress,
        done: &mut Done,
    ) -> Result<(), Faults> {
        let finished: Vec<(&PlannedFile, &FileRecord)> = (job.plan.files.iter())
            .filter(|file| !known(&file.name))
            .filter_map(|file| Some((file, job.destination.finished(&file.name)?)))
            .collect();
        let verified: Vec<Result<Digests>> = self
            .pool
            .install(|| finished.par_iter().map(|(file, earlier)| verify(job, file, earlier, progress)).collect());
        let mut faults = Vec::new();
        for ((file, _), digests) in finished.iter().zip(verified) {
            match digests {
                Ok(digests) => record_tensors(file, &digests, &mut done.tensors),
                // Said once is enough.
                Err(fault) if matches!(*fault.kind, FaultKind::Interrupted) => return Err(fault.into()),
                Err(fault) => faults.push(fault),
            }
        }
        Faults::check(faults)
    }

    /// Writes the files that are left, each when all that it needs is there.
    fn files(
        &self,
        job: &mut Job,
        follower: &mut Option<Follower>,
        progress: &dyn Progress,
        done: &mut Done,
    ) -> Result<(), Faults> {
        let is_left = |number: &usize| {
            let file = &job.plan.files[*number];
            file.mine && !job.destination.is_finished(&file.name)
        };
        let mut left: Vec<usize> = (0..job.plan.files.len()).filter(is_left).collect();
        while !left.is_empty() {
            let Some(next) = left.iter().position(|&number| is_ready(job, number, follower)) else {
                let follower = follower.as_mut().expect("without one everything is there");
                let waiting = waiting(job, &left, follower);
                self.consume_finished(job, done)?;
                follower.pause(&job.source.directory, waiting, progress)?;
                continue;
            };
            let number = left.remove(next);
            job.open_late(number)?;
            let next = left.iter().copied().find(|&next| is_opened(job, next));
            self.file(job, number, next, progress, done)?;
            self.consume(job, number, done)?;
        }
        self.consume_finished(job, done)
    }

    /// Writes one file, records it, and names it. `next` is the one that will be written then.
    fn file(
        &self,
        job: &mut Job,
        number: usize,
        next: Option<usize>,
        progress: &dyn Progress,
        done: &mut Done,
    ) -> Result<(), Faults> {
        let file = &job.plan.files[number];
        progress.file(&file.name);
        let next = next.map(|next| &job.plan.files[next]);
        let (sealed, warnings) = self.write(job, file, next, progress, &mut done.stats)?;
        record_tensors(file, &sealed.digests, &mut done.tensors);
        self.lock.check_held()?;
        // Recorded first, named then: a file that is cut off from its record could never be told from a foreign one,
        // while a record without its file only means that the file is written again.
        job.destination.added = true;
        job.destination.progress.add(sealed.record.clone(), warnings);
        job.destination.write_progress()?;
        sealed.commit()?;
        Ok(())
    }

    /// Writes one file under its temporary name, and tells what was accepted in it.
    fn write(
        &self,
        job: &Job,
        file: &PlannedFile,
        next: Option<&PlannedFile>,
        progress: &dyn Progress,
        stats: &mut Stats,
    ) -> Result<(SealedFile, Vec<Fault>), Faults> {
        let mut writer = FileWriter::create(&job.destination.directory, &file.name, &file.layout, self.chunk_bytes)?;
        let sources = sources(job, file)?;
        let blocks = blocks(file, &sources, self.block_bytes);
        // Scales stand before the codes, so the source is gone through twice: for the scales, and for the codes.
        let (scales, codes) = blocks.split_at(blocks.iter().take_while(|block| block.what != What::Codes).count());
        let mut gathered = Gathered::default();
        let mut write = |block: &Block, made: &mut Made| {
            gathered.take(file, block, made, stats)?;
            writer.append(&made.bytes)
        };
        self.convert(job, file, &sources, scales, progress, &mut write)?;
        let warnings = gathered.check(&sources, job.options.allowed.non_finite)?;
        let mut gathered = Gathered::default();
        let mut write = |block: &Block, made: &mut Made| {
            gathered.take(file, block, made, stats)?;
            writer.append(&made.bytes)
        };
        // Hashing binds now, and the disk has time for what will be read next.
        read_ahead(job, next, || self.convert(job, file, &sources, codes, progress, &mut write))?;
        sources.iter().try_for_each(|source| check_unchanged(source.tensor()))?;
        Ok((writer.seal()?, warnings))
    }

    /// Measures the error of a file that is there already.
    fn measure(&self, job: &Job, file: &PlannedFile, progress: &dyn Progress, stats: &mut Stats) -> Result<(), Faults> {
        let sources = sources(job, file)?;
        let mut blocks = blocks(file, &sources, self.block_bytes);
        blocks.retain(|block| block.what != What::Scales);
        let mut gathered = Gathered::default();
        let mut add = |block: &Block, made: &mut Made| gathered.take(file, block, made, stats);
        self.convert(job, file, &sources, &blocks, progress, &mut add)
    }

    /// Converts blocks on all threads, and takes them in order.
    fn convert(
        &self,
        job: &Job,
        file: &PlannedFile,
        sources: &[SourceRows<'_>],
        blocks: &[Block],
        progress: &dyn Progress,
        take: &mut dyn FnMut(&Block, &mut Made) -> Result<()>,
    ) -> Result<(), Faults> {
        let make = |buffers: &mut Buffers, number: usize, made: &mut Made| {
            let block = &blocks[number];
            let (weight, source) = (&file.weights[block.weight], &sources[block.weight]);
            made.result = check_interrupted(job, progress)
                .and_then(|()| buffers.convert(weight, source, block, &job.options, &mut made.bytes));
            if block.what != What::Scales {
                source.forget(block.first, block.rows);
            }
            // A quantized weight is read twice, and counts once.
            let read = block.rows * source.row_bytes();
            let counted = match block.what {
                What::Values => read,
                What::Scales => read / 2,
                What::Codes => read - read / 2,
            };
            progress.advance(counted, made.bytes.len() as u64);
        };
        let ahead = limits::BLOCKS_AHEAD * self.pool.current_num_threads();
        let mut spare = self.spare.lock().expect("no panic while held");
        let mut take = |number: usize, made: &mut Made| take(&blocks[number], made);
        Ok(in_order(&self.pool, blocks.len(), ahead, &mut spare, &self.buffers, &make, &mut take)?)
    }

    /// Removes what only finished files needed: of earlier runs, or what has arrived once more.
    fn consume_finished(&self, job: &mut Job, done: &mut Done) -> Result<(), Faults> {
        for number in 0..job.plan.files.len() {
            let file = &job.plan.files[number];
            if file.mine && job.destination.is_finished(&file.name) {
                self.consume(job, number, done)?;
            }
        }
        Ok(())
    }

    /// Removes what a finished file was the last to need.
    fn consume(&self, job: &mut Job, number: usize, done: &mut Done) -> Result<(), Faults> {
        if !job.options.consume {
            return Ok(());
        }
        let shards: Vec<String> = job.plan.files[number].needs.iter().cloned().collect();
        let elsewhere = self.finished_elsewhere(job, &shards)?;
        let finished = |name: &str| {
            if job.destination.is_mine(name) { job.destination.is_finished(name) } else { elsewhere.contains(name) }
        };
        let gone = consume::consumable(job, &shards, &finished);
        consume::remove(job, &gone)?;
        done.consumed.extend(gone);
        Ok(())
    }

    /// The files of other parts that need one of these shards and are finished and whole: what a damaged one was made from
    /// must not go. Each is read once.
    fn finished_elsewhere(&self, job: &Job, shards: &[String]) -> Result<HashSet<String>, Faults> {
        let mut whole = self.whole.lock().expect("no panic while held");
        let needs = |file: &&PlannedFile| !file.mine && file.needs.iter().any(|shard| shards.contains(shard));
        let others: Vec<&PlannedFile> = job.plan.files.iter().filter(needs).collect();
        if others.iter().all(|file| whole.contains(&file.name)) {
            return Ok(whole.clone());
        }
        // What other parts have finished stands in their own progress.
        let earlier = Earlier::read(&job.destination.directory)?;
        for file in others.into_iter().filter(|file| !whole.contains(&file.name)).collect::<Vec<_>>() {
            let path = job.destination.directory.join(&file.name);
            let record = earlier.files().find(|record| record.name == file.name && path.exists());
            let is_whole = |record: &&FileRecord| {
                digest_file(&path, &file.name, &file.layout, &|_| ()).is_ok_and(|(found, _)| found == **record)
            };
            if record.filter(is_whole).is_some() {
                whole.insert(file.name.clone());
            }
        }
        Ok(whole.clone())
    }
}

/// The weights of a file, ready to be read.
fn sources<'a>(job: &'a Job, file: &PlannedFile) -> Result<Vec<SourceRows<'a>>> {
    let tensor = |name: &TensorName| job.source.tensor(name.as_str()).expect("opened before it is converted");
    let sources: Vec<SourceRows<'_>> =
        file.weights.iter().map(|weight| SourceRows::new(tensor(&weight.planned.name))).collect::<Result<_>>()?;
    sources.iter().for_each(|source| source.tensor().shard.file.advise_sequential());
    Ok(sources)
}

/// A file of an earlier run is whole if its hash says so.
fn verify(job: &Job, file: &PlannedFile, earlier: &FileRecord, progress: &dyn Progress) -> Result<Digests> {
    check_interrupted(job, progress)?;
    progress.file(&file.name);
    let path = job.destination.directory.join(&file.name);
    let (record, digests) = digest_file(&path, &file.name, &file.layout, &|_| ())?;
    if record != *earlier {
        let kind = FaultKind::OutputChanged { expected: earlier.sha256.clone(), found: record.sha256 };
        return Err(Fault::new(Place::file(path), kind));
    }
    progress.advance(file.weights.iter().map(|w| w.source_bytes).sum(), file.layout.bytes);
    Ok(digests)
}

/// Does some work, and has the system read the source of the next file meanwhile, as far as there is memory for it.
fn read_ahead<T>(job: &Job, next: Option<&PlannedFile>, work: impl FnOnce() -> T) -> T {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let weights = next.iter().flat_map(|file| &file.weights);
            let mut left = io::available_bytes().unwrap_or(0) / 2;
            for tensor in weights.filter_map(|weight| job.source.tensor(weight.planned.name.as_str())) {
                let (offset, bytes) = (tensor.stored.offset, tensor.stored.bytes);
                for from in (offset..offset + bytes).step_by(limits::READ_AHEAD_BYTES as usize) {
                    if ended.load(Ordering::Relaxed) || left < limits::READ_AHEAD_BYTES {
                        return;
                    }
                    tensor.shard.file.will_need(from, limits::READ_AHEAD_BYTES.min(offset + bytes - from));
                    left -= limits::READ_AHEAD_BYTES;
                }
            }
        });
        let result = work();
        ended.store(true, Ordering::Relaxed);
        result
    })
}

/// Whether everything that a file needs is opened.
fn is_opened(job: &Job, number: usize) -> bool {
    !job.plan.files[number].needs.iter().any(|shard| job.source.is_deferred(shard))
}

fn check_interrupted(job: &Job, progress: &dyn Progress) -> Result<()> {
    if progress.interrupted() {
        return Err(Fault::new(Place::file(&job.destination.directory), FaultKind::Interrupted));
    }
    Ok(())
}

/// Whether everything that a file needs is opened, or has arrived.
fn is_ready(job: &Job, number: usize, follower: &mut Option<Follower>) -> bool {
    let mut late = job.plan.files[number].needs.iter().filter(|shard| job.source.is_deferred(shard));
    late.all(|shard| follower.as_mut().is_some_and(|follower| follower.is_whole(shard)))
}

/// The source files that the files still to be written wait for, and why.
fn waiting(job: &Job, left: &[usize], follower: &mut Follower) -> Vec<String> {
    let needs = left.iter().flat_map(|&number| &job.plan.files[number].needs);
    let late: BTreeSet<&String> = needs.filter(|shard| job.source.is_deferred(shard)).collect();
    late.into_iter().filter_map(|shard| Some(format!("{shard} ({})", follower.waiting(shard)?))).collect()
}

impl Job {
    /// Opens what a file needs and has arrived since the conversion was planned, with all the checks of a plan.
    fn open_late(&mut self, number: usize) -> Result<(), Faults> {
        let needs = &self.plan.files[number].needs;
        let late: Vec<String> = needs.iter().filter(|shard| self.source.is_deferred(shard)).cloned().collect();
        if late.is_empty() {
            return Ok(());
        }
        let from = self.source.shards.len();
        if self.options.consume {
            consume::check_files(&self.source, &late)?;
        }
        self.source.open_deferred(&late, &self.options.passes)?;
        let mut warnings = std::mem::take(&mut self.source.warnings);
        check_values(&self.source, &self.options.passes, self.options.allowed, from, &mut warnings)?;
        let new = &self.source.shards[from..];
        Faults::check(new.iter().filter_map(|s| self.destination.changed(s, &self.plan, &self.options)).collect())?;
        self.destination.note_sources(new.iter());
        // A later run cannot find them again once the file is consumed.
        self.destination.progress.warn(warnings.iter().map(Finding::accepted));
        self.warnings.extend(warnings);
        self.plan.know(number, &self.source);
        Ok(())
    }

    /// What is known of the small files when none is still on its way.
    fn small_files_arrived(&mut self) -> Result<(), Faults> {
        let mut warnings = self.destination.list_small(&self.source, &self.plan, self.options.bare)?;
        let ids = crate::config::stop_ids(&self.source.directory, &self.source.config)?;
        if ids.is_empty() {
            let path = self.source.directory.join(crate::config::CONFIG_FILE);
            warnings.push(Fault::new(Place::file(path), FaultKind::NoStopIds));
        }
        let known: Vec<String> = self.warnings.iter().map(Fault::to_string).collect();
        self.warnings.extend(warnings.into_iter().filter(|fault| !known.contains(&fault.to_string())));
        Ok(())
    }
}

impl Destination {
    /// After a failure of a run that added nothing, the directory is left as it was found.
    fn forget(&self) {
        if !self.added && !self.begun {
            let _ = hook::remove_file(&self.directory.join(self.progress_file()));
        }
    }
}
