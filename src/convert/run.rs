//! The work: shard after shard, blocks of rows in parallel, then the small files, the index and the manifest.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use byteorder::{ByteOrder, LittleEndian};
use rayon::prelude::*;

use super::plan::{ClassKey, PlannedFile, Weight};
use super::{Destination, Job, Progress, destination};
use crate::checkpoint::{INDEX_FILE, SourceTensor};
use crate::container::manifest::{
    CHECKSUM, FileRecord, MANIFEST_FILE, MANIFEST_VERSION, Manifest, TensorRecord, hex, json_text,
};
use crate::container::progress::PROGRESS_FILE;
use crate::container::writer::{Digests, FileWriter, SealedFile, checksum_text, digest_file};
use crate::dequantize::{first_non_finite, zero_non_finite};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::{self, DirectoryLock, SourceFile, write_whole};
use crate::isa::Isa;
use crate::limits;
use crate::quantize::{Converter, Decoder};
use crate::report::{ConvertFile, ConvertReport, Finding};
use crate::tensor::TensorName;
use crate::threads;
use crate::weights::{ReadBuffer, SourceRows};

/// Squared signal and squared error of each class.
type Stats = BTreeMap<ClassKey, (f64, f64)>;

pub(super) fn run(mut job: Job, progress: &dyn Progress) -> Result<ConvertReport, Faults> {
    let started = Instant::now();
    let memory = MemoryPeak::start();
    let directory = job.destination.directory.clone();
    let work = Work::new(&job)?;
    let made = Made::directory(&directory)?;
    let lock = DirectoryLock::take(&directory)?;
    // Another run may have worked here since the destination was examined.
    job.destination = Destination::examine(&directory, &job.source, &job.plan, &job.options)?;
    let outcome = work.files(&mut job, progress).and_then(|done| finish(&mut job, done));
    let outcome = outcome.inspect_err(|_| made.undo(&job.destination))?;
    drop(lock);
    let mut report = job.plan.report(&directory, &job.warnings);
    let earlier = job.destination.progress.warnings.iter().filter(|known| !report.warnings.contains(known));
    report.warnings.extend(earlier.cloned().collect::<Vec<_>>());
    report.files = job.destination.progress.files.iter().map(file_report).collect();
    report.files.sort_by(|a, b| a.name.cmp(&b.name));
    if job.options.stats {
        for (class, planned) in report.classes.iter_mut().zip(&job.plan.classes) {
            let (signal, noise) =
                outcome.get(&(planned.class, planned.format, planned.bits)).copied().unwrap_or_default();
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

/// What a run has made before its first file, to be undone if that never comes.
struct Made {
    /// The directories that did not exist, innermost first.
    directories: Vec<PathBuf>,
}

impl Made {
    /// Makes a directory with its ancestors.
    fn directory(path: &Path) -> Result<Made> {
        let missing = |p: &&Path| !p.as_os_str().is_empty() && !p.exists();
        let directories = path.ancestors().take_while(missing).map(Path::to_owned).collect();
        fs::create_dir_all(path).map_err(|e| Fault::io("create the directory", path, e))?;
        Ok(Made { directories })
    }

    /// After a failure of a run that added nothing, the directory is left as it was found.
    fn undo(&self, destination: &Destination) {
        if destination.added {
            return;
        }
        if !destination.begun {
            let _ = fs::remove_file(destination.directory.join(PROGRESS_FILE));
        }
        // A directory with something in it is not removed.
        for directory in &self.directories {
            let _ = fs::remove_dir(directory);
        }
    }
}

/// What the files of this run came to.
struct Done {
    tensors: BTreeMap<TensorName, TensorRecord>,
    stats: Stats,
}

struct Work {
    pool: rayon::ThreadPool,
    block_bytes: u64,
}

impl Work {
    fn new(job: &Job) -> Result<Work> {
        let pool = threads::pool(job.options.threads, &job.destination.directory)?;
        // A block needs its source bytes, its codes and scales, and one row as f32.
        let share = job.options.memory.unwrap_or(u64::MAX) / (4 * pool.current_num_threads() as u64);
        Ok(Work { pool, block_bytes: share.min(limits::BLOCK_SOURCE_BYTES) })
    }

    fn files(&self, job: &mut Job, progress: &dyn Progress) -> Result<Done, Faults> {
        let mut done = Done { tensors: std::mem::take(&mut job.destination.kept_tensors), stats: Stats::new() };
        job.destination.progress.write(&job.destination.directory)?;
        for number in 0..job.plan.files.len() {
            let file = &job.plan.files[number];
            progress.file(&file.name);
            let earlier = job.destination.finished(&file.name);
            match earlier {
                Some(earlier) => {
                    let digests = self.verify(job, file, earlier, progress, &mut done.stats)?;
                    record_tensors(file, &digests, &mut done.tensors);
                }
                None => {
                    let (sealed, warnings) = self.write(job, file, progress, &mut done.stats)?;
                    record_tensors(file, &sealed.digests, &mut done.tensors);
                    // Recorded first, named then: a file that is cut off from its record could never be told from a
                    // foreign one, while a record without its file only means that the file is written again.
                    job.destination.added = true;
                    job.destination.progress.add(sealed.record.clone(), warnings);
                    job.destination.progress.write(&job.destination.directory)?;
                    sealed.commit()?;
                }
            }
        }
        Ok(done)
    }

    /// A file of an earlier run is whole if its hash says so.
    fn verify(
        &self,
        job: &Job,
        file: &PlannedFile,
        earlier: &FileRecord,
        progress: &dyn Progress,
        stats: &mut Stats,
    ) -> Result<Digests, Faults> {
        let path = job.destination.directory.join(&file.name);
        let (record, digests) = digest_file(&path, &file.name, &file.layout, &|_| ())?;
        if record != *earlier {
            let kind = FaultKind::OutputChanged { expected: earlier.sha256.clone(), found: record.sha256 };
            return Err(Fault::new(Place::file(path), kind).into());
        }
        if job.options.stats {
            self.convert(job, file, None, progress, stats)?;
        } else {
            progress.advance(file.weights.iter().map(|w| w.source_bytes).sum(), file.layout.bytes);
        }
        Ok(digests)
    }

    /// Writes one file under its temporary name, and tells what was accepted in it.
    fn write(
        &self,
        job: &Job,
        file: &PlannedFile,
        progress: &dyn Progress,
        stats: &mut Stats,
    ) -> Result<(SealedFile, Vec<Fault>), Faults> {
        let writer = FileWriter::create(&job.destination.directory, &file.name, &file.layout)?;
        let warnings = self.convert(job, file, Some(&writer), progress, stats)?;
        Ok((writer.seal(&|_| ())?, warnings))
    }

    /// Converts the weights of one file; without a writer only to measure them.
    fn convert(
        &self,
        job: &Job,
        file: &PlannedFile,
        writer: Option<&FileWriter<'_>>,
        progress: &dyn Progress,
        stats: &mut Stats,
    ) -> Result<Vec<Fault>, Faults> {
        let mut sources = Vec::new();
        for weight in &file.weights {
            let tensor = job.source.tensor(weight.planned.name.as_str()).expect("planned from the source");
            sources.push(SourceRows::new(tensor)?);
        }
        let blocks = blocks(&sources, self.block_bytes);
        let convert = |buffers: &mut Buffers, block: &Block| {
            let weight = &file.weights[block.weight];
            let source = &sources[block.weight];
            let target = writer.map(|writer| (writer, file.layout.places[block.weight]));
            let result = buffers.convert(weight, source, block, target, job);
            let read = block.rows * source.row_bytes();
            progress.advance(read, weight.planned.format.bytes(block.rows, source.columns).unwrap_or(0));
            result
        };
        // All blocks are done even after a failure, so that what is reported does not depend on the order of threads.
        let results: Vec<Result<BlockResult>> =
            self.pool.install(|| blocks.par_iter().map_init(Buffers::default, convert).collect());
        let allow_non_finite = job.options.allowed.non_finite || writer.is_none();
        let warnings = gather(file, &sources, &blocks, results, allow_non_finite, stats)?;
        sources.iter().try_for_each(|source| check_unchanged(source.tensor()))?;
        Ok(warnings)
    }
}

/// Some rows of a weight.
#[derive(Debug, Clone, Copy)]
struct Block {
    weight: usize,
    first: u64,
    rows: u64,
}

fn blocks(sources: &[SourceRows<'_>], block_bytes: u64) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (weight, source) in sources.iter().enumerate() {
        let step = (block_bytes / source.row_bytes().max(1)).max(1);
        let mut first = 0;
        while first < source.rows {
            let rows = step.min(source.rows - first);
            blocks.push(Block { weight, first, rows });
            first += rows;
        }
    }
    blocks
}

/// What came of a block.
#[derive(Debug, Default)]
struct BlockResult {
    /// Elements that are not finite: how many, and row, column and value of the first.
    non_finite: Option<(u64, u64, u64, f32)>,
    /// Squared signal and error of each row, with `--stats`.
    rows: Vec<(f64, f64)>,
}

/// One thread's reused space.
#[derive(Debug, Default)]
struct Buffers {
    source: ReadBuffer,
    row: Vec<f32>,
    codes: Vec<u8>,
    scales: Vec<f32>,
    scale_bytes: Vec<u8>,
    decoded: Vec<f32>,
}

impl Buffers {
    fn convert(
        &mut self,
        weight: &Weight,
        source: &SourceRows<'_>,
        block: &Block,
        target: Option<(&FileWriter<'_>, (usize, Option<usize>))>,
        job: &Job,
    ) -> Result<BlockResult> {
        let mut result = BlockResult::default();
        let columns = source.columns as usize;
        let code_bytes = weight.quantizer.row_code_bytes(columns);
        let row_scales = weight.quantizer.row_scales(columns);
        let rows = block.rows as usize;
        self.row.resize(columns, 0.0);
        self.codes.resize(rows * code_bytes, 0);
        self.scales.resize(rows * row_scales, 0.0);
        source.read(block.first, block.rows, &mut self.source)?;
        let isa = job.options.isa.unwrap_or_else(Isa::detect);
        let mut converter = Converter::new(weight.quantizer, source.dtype(), columns, isa);
        for r in 0..rows {
            let codes = &mut self.codes[r * code_bytes..][..code_bytes];
            let scales = &mut self.scales[r * row_scales..][..row_scales];
            // What is measured or counted needs the values of a row: then the plain way.
            let (stored, block_scales) = source.stored_row(&self.source, block.first, block.first + r as u64);
            if !job.options.stats && converter.convert_row(stored, block_scales, codes, scales).is_ok() {
                continue;
            }
            source.row(&self.source, block.first, block.first + r as u64, &mut self.row);
            if let Some(column) = first_non_finite(&self.row) {
                let value = self.row[column];
                let count = zero_non_finite(&mut self.row) as u64;
                let first = (count, block.first + r as u64, column as u64, value);
                let (before, row, column, value) = result.non_finite.unwrap_or((0, first.1, first.2, first.3));
                result.non_finite = Some((before + count, row, column, value));
            }
            weight.quantizer.quantize_row(&self.row, codes, scales);
            if job.options.stats {
                self.decoded.resize(columns, 0.0);
                let decoder = Decoder::new(weight.quantizer.format()).expect("what is written can be read");
                decoder.dequantize_row(codes, scales, &mut self.decoded);
                result.rows.push(squares(&self.row, &self.decoded));
            }
        }
        let Some((writer, (codes_place, scales_place))) = target else { return Ok(result) };
        writer.write(codes_place, block.first * code_bytes as u64, &self.codes)?;
        if let Some(place) = scales_place {
            self.scale_bytes.resize(4 * self.scales.len(), 0);
            LittleEndian::write_f32_into(&self.scales, &mut self.scale_bytes);
            writer.write(place, block.first * 4 * row_scales as u64, &self.scale_bytes)?;
        }
        Ok(result)
    }
}

/// Σ w² and Σ (w − ŵ)² of a row.
fn squares(row: &[f32], decoded: &[f32]) -> (f64, f64) {
    row.iter().zip(decoded).fold((0.0, 0.0), |(signal, noise), (&w, &d)| {
        let (w, error) = (f64::from(w), f64::from(w) - f64::from(d));
        (signal + w * w, noise + error * error)
    })
}

/// Joins the results of a file's blocks in their order: faults first, then statistics. Returns warnings.
fn gather(
    file: &PlannedFile,
    sources: &[SourceRows<'_>],
    blocks: &[Block],
    results: Vec<Result<BlockResult>>,
    allow_non_finite: bool,
    stats: &mut Stats,
) -> Result<Vec<Fault>, Faults> {
    let mut faults = Vec::new();
    let mut non_finite: BTreeMap<usize, (u64, u64, u64, f32)> = BTreeMap::new();
    for (block, result) in blocks.iter().zip(results) {
        // An unreadable file fails for every block: once is enough.
        let result = result?;
        if let Some((count, row, column, value)) = result.non_finite {
            non_finite.entry(block.weight).and_modify(|known| known.0 += count).or_insert((count, row, column, value));
        }
        let total = stats.entry(file.weights[block.weight].key()).or_default();
        for (signal, noise) in result.rows {
            total.0 += signal;
            total.1 += noise;
        }
    }
    let mut warnings = Vec::new();
    for (weight, (count, row, column, value)) in non_finite {
        let place = sources[weight].place();
        if allow_non_finite {
            warnings.push(Fault::new(place, FaultKind::NonFiniteZeroed { count, row, column, value }));
        } else {
            faults.push(Fault::new(place, FaultKind::NonFinite { row, column, value }));
        }
    }
    Faults::check(faults)?;
    Ok(warnings)
}

/// The shards of a weight are still those that were planned with.
fn check_unchanged(tensor: &SourceTensor<'_>) -> Result<()> {
    for shard in [Some(tensor.shard), tensor.scales.map(|(shard, _)| shard)].into_iter().flatten() {
        let changed = |what, expected, found| {
            Err(Fault::new(Place::file(shard.file.path()), FaultKind::SourceChanged { what, expected, found }))
        };
        let bytes = shard.file.bytes_now()?;
        if bytes != shard.file.bytes() {
            return changed("size", shard.file.bytes(), bytes);
        }
        let modified = SourceFile::modified_nanoseconds(shard.file.path());
        if modified != shard.modified_nanoseconds {
            return changed("modification time", shard.modified_nanoseconds, modified);
        }
    }
    Ok(())
}

/// Adds the records of a finished file's weights.
fn record_tensors(file: &PlannedFile, digests: &Digests, tensors: &mut BTreeMap<TensorName, TensorRecord>) {
    for (weight, &(codes, scales)) in file.weights.iter().zip(&file.layout.places) {
        let record = TensorRecord {
            file: file.name.clone(),
            class: weight.class.name().to_owned(),
            format: weight.planned.format.name().to_owned(),
            group_size: weight.planned.format.group_size(),
            shape: weight.planned.shape.clone(),
            bytes: file.layout.tensors[codes].bytes,
            checksum: checksum_text(digests.checksums[codes]),
            scale_bytes: scales.map_or(0, |scales| file.layout.tensors[scales].bytes),
            scale_checksum: scales.map(|scales| checksum_text(digests.checksums[scales])),
        };
        tensors.insert(weight.planned.name.clone(), record);
    }
}

/// Small files, index, and last of all the manifest; then the progress is folded into it.
fn finish(job: &mut Job, done: Done) -> Result<Stats, Faults> {
    let directory = &job.destination.directory;
    let mut small_files = Vec::new();
    for file in &job.destination.small {
        let contents = file.contents()?;
        if !file.present {
            write_whole(&directory.join(&file.name), &contents, false)?;
        }
        small_files.push(small_record(&file.name, &contents));
    }
    if job.options.bare {
        return Ok(done.stats);
    }
    let index = index_text(&done.tensors);
    write_whole(&directory.join(INDEX_FILE), &index, true)?;
    small_files.push(small_record(INDEX_FILE, &index));
    small_files.sort_by(|a, b| a.name.cmp(&b.name));
    let manifest = Manifest {
        version: MANIFEST_VERSION,
        tool: destination::tool(),
        model_type: crate::config::MODEL_TYPE.to_owned(),
        checksum: CHECKSUM.to_owned(),
        recipe: job.destination.recipe.clone(),
        passes: job.destination.progress.passes.clone(),
        source: job.destination.progress.source.clone(),
        files: job.destination.progress.files.clone(),
        small_files,
        tensors: done.tensors,
        warnings: warnings(job),
    };
    write_whole(&directory.join(MANIFEST_FILE), &manifest.to_bytes(), true)?;
    let progress = directory.join(PROGRESS_FILE);
    fs::remove_file(&progress).map_err(|e| Fault::io("remove the file", &progress, e))?;
    io::sync_directory(directory)?;
    Ok(done.stats)
}

/// What was accepted, now and when earlier files were written: each thing once, in an order of its own.
fn warnings(job: &Job) -> Vec<Finding> {
    let now = job.warnings.iter().map(Finding::accepted);
    let mut all: Vec<Finding> = now.chain(job.destination.progress.warnings.iter().cloned()).collect();
    all.sort();
    all.dedup();
    all
}

fn small_record(name: &str, contents: &[u8]) -> FileRecord {
    use sha2::{Digest, Sha256};
    FileRecord { name: name.to_owned(), bytes: contents.len() as u64, sha256: hex(&Sha256::digest(contents)) }
}

/// The index of a container: scales are tensors of their own.
fn index_text(tensors: &BTreeMap<TensorName, TensorRecord>) -> Vec<u8> {
    let mut weight_map: BTreeMap<TensorName, &str> = BTreeMap::new();
    for (name, record) in tensors {
        weight_map.insert(name.clone(), &record.file);
        if record.scale_checksum.is_some() {
            weight_map.insert(name.scales(), &record.file);
        }
    }
    let total_size: u64 = tensors.values().map(|record| record.bytes + record.scale_bytes).sum();
    json_text(&serde_json::json!({"metadata": {"total_size": total_size}, "weight_map": weight_map}))
}

/// Watches the anonymous memory of this process.
struct MemoryPeak {
    stop: std::sync::Arc<(Mutex<bool>, std::sync::Condvar)>,
    thread: Option<std::thread::JoinHandle<Option<u64>>>,
}

impl MemoryPeak {
    const INTERVAL: Duration = Duration::from_millis(20);

    fn start() -> MemoryPeak {
        let stop = std::sync::Arc::new((Mutex::new(false), std::sync::Condvar::new()));
        let watched = std::sync::Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut peak = io::anonymous_bytes();
            let mut stopped = watched.0.lock().expect("no panic while held");
            while !*stopped {
                stopped = watched.1.wait_timeout(stopped, MemoryPeak::INTERVAL).expect("no panic while held").0;
                peak = peak.max(io::anonymous_bytes());
            }
            peak
        });
        MemoryPeak { stop, thread: Some(thread) }
    }

    /// The largest value seen.
    fn stop(mut self) -> Option<u64> {
        *self.stop.0.lock().expect("no panic while held") = true;
        self.stop.1.notify_all();
        self.thread.take().and_then(|thread| thread.join().ok()).flatten()
    }
}

impl Drop for MemoryPeak {
    fn drop(&mut self) {
        if let Ok(mut stopped) = self.stop.0.lock() {
            *stopped = true;
        }
        self.stop.1.notify_all();
    }
}
