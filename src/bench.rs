//! How fast this machine does the work, with the machine's own limits measured in the same run.

mod attending;
mod checkpoint;
mod converting;
mod decoding;
mod gpu;
mod kernels;
mod quantizing;
mod scoring;
mod scratch;
mod synthetic;

use std::path::{Path, PathBuf};
use std::time::Instant;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::backend::{Device, Mode, check_mode};
use crate::checkpoint::weight_files;
use crate::container::manifest::MANIFEST_FILE;
use crate::container::reader::Survey;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::header::Header;
use crate::io::{SourceFile, available_bytes, free_bytes};
use crate::limits;
use crate::progress::Progress;
use crate::report::{BenchMeasure, BenchReport, CheckStatus, VerifyReport};
use crate::threads;
use crate::verify::{Level, Options as VerifyOptions, TokenOptions, verify};
use scratch::Scratch;
use synthetic::{Contents, Synthetic};

pub use scratch::remove_scratch;

/// What a user asks for.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where containers are made, in a directory of their own that is removed afterwards.
    pub directory: PathBuf,
    /// Bytes of the container whose payload is verified or that is decoded or scored with, of the checkpoint that is
    /// converted, or of the weights of a kernel, about; by default what suits the work.
    pub bytes: Option<u64>,
    /// Bytes of a shard of that checkpoint, about.
    pub shard_bytes: u64,
    /// Leave out quantizing alone.
    pub whole_only: bool,
    /// Hidden layers of the container whose headers are read; GLM-5.2 has 78.
    pub layers: u64,
    /// Threads; 0 for one per core.
    pub threads: usize,
    /// Repetitions of each measure.
    pub rounds: usize,
    /// Where kernels are run, and models decoded and scored with: the CPU or a GPU.
    pub device: Device,
    /// How sums are formed on a GPU.
    pub mode: Mode,
    /// Of kernels on a GPU, only measures whose names contain this.
    pub only: Option<String>,
}

/// Bytes of what is measured, and of a model that is decoded with, unless somebody says otherwise.
const USUAL_BYTES: u64 = 1 << 30;
const USUAL_DECODED_BYTES: u64 = 8 << 30;

impl Options {
    /// Bytes of what is measured.
    fn bytes(&self) -> u64 {
        self.bytes.unwrap_or(USUAL_BYTES)
    }

    /// Bytes of a model that is decoded with.
    fn decoded_bytes(&self) -> u64 {
        self.bytes.unwrap_or(USUAL_DECODED_BYTES)
    }
}

/// Measures reading headers, surveying, and verifying payloads.
pub fn inspect(options: &Options, progress: &dyn Progress) -> Result<BenchReport, Faults> {
    check_options(options, &VERIFIED)?;
    let threads = threads::pool(options.threads, &options.directory)?.current_num_threads();
    // As many workers as verifying has.
    let pool = threads::pool(limits::HASH_WORKERS * threads, &options.directory)?;
    let scratch = Scratch::create(&options.directory, progress)?;
    let container = scratch.path.join("payload");
    let synthetic = Synthetic::of_bytes(options.bytes(), threads);
    check_space(&container, synthetic.bytes()?)?;
    progress.step("reading headers");
    let mut measures = headers(&scratch, options)?;
    progress.step("making a container");
    synthetic.write(&container, Contents::Random, true, progress)?;
    progress.step("verifying");
    measures.extend(payload(&container, options, &pool)?);
    Ok(report("inspect", threads, measures))
}

/// Measures quantizing alone, on one core, with every instruction set that this CPU has.
pub fn quantize(rounds: usize) -> BenchReport {
    report("convert", 1, quantizing::measures(rounds))
}

/// Measures quantizing alone, and whole conversions beside plain reads and writes of as many bytes.
pub fn convert(options: &Options, progress: &dyn Progress) -> Result<BenchReport, Faults> {
    check_options(options, &CONVERTED)?;
    let threads = threads::pool(options.threads, &options.directory)?.current_num_threads();
    let mut measures = Vec::new();
    if !options.whole_only {
        progress.step("quantizing");
        measures = quantize(options.rounds).measures;
    }
    let scratch = Scratch::create(&options.directory, progress)?;
    measures.extend(converting::measures(&scratch, options, progress)?);
    Ok(report("convert", threads, measures))
}

/// The refusal of several GPUs: their speed together is not measured.
fn several() -> Fault {
    Fault::new(Place::default(), FaultKind::NotAvailable { name: "`coliconv bench` on several GPUs" })
}

/// Measures products of rows with matrices of GLM-5.2's shapes, beside reading memory and multiplying in registers.
pub fn kernels(options: &Options, progress: &dyn Progress) -> Result<BenchReport, Faults> {
    check_options(options, &MULTIPLIED)?;
    let pool = threads::pool(options.threads, &options.directory)?;
    let threads = pool.current_num_threads();
    if options.device.is_gpu() {
        let (gpu, measures) = pool.install(|| gpu::measures(None, options, progress))?;
        return Ok(on_gpu(gpu, options, report("kernels", threads, measures)));
    }
    // Whole matrices of the largest shape, of which one is made while the others are there.
    check_memory(options.bytes().saturating_add(kernels::LARGEST_BYTES.saturating_mul(2)))?;
    let measures = pool.install(|| kernels::measures(options.bytes(), options.rounds, progress))?;
    Ok(report("kernels", threads, measures))
}

/// Measures decoding: on the CPU with routed experts on demand, beside reading the disk and reading memory, on a GPU with
/// all of them there, beside reading its memory.
pub fn decode(options: &Options, progress: &dyn Progress) -> Result<BenchReport, Faults> {
    check_options(options, &DECODED)?;
    let pool = threads::pool(options.threads, &options.directory)?;
    let threads = pool.current_num_threads();
    let synthetic = Synthetic::model(options.decoded_bytes());
    let model = Some(synthetic.described()?);
    let report = if options.device.is_gpu() {
        let (gpu, measures) = pool.install(|| gpu::measures(Some(&synthetic), options, progress))?;
        on_gpu(gpu, options, report("decode", threads, measures))
    } else {
        let scratch = Scratch::create(&options.directory, progress)?;
        let container = scratch.path.join("model");
        let measures = pool.install(|| decoding::measures(&container, options, progress))?;
        report("decode", threads, measures)
    };
    Ok(BenchReport { model, ..report })
}

/// Measures scoring requests that have much in common.
pub fn score(options: &Options, progress: &dyn Progress) -> Result<BenchReport, Faults> {
    check_options(options, &SCORED)?;
    let bytes = match options.device.is_gpu() {
        true => options.decoded_bytes(),
        false => options.bytes(),
    };
    let synthetic = Synthetic::model(bytes);
    let threads = threads::pool(options.threads, &options.directory)?.current_num_threads();
    let (gpu, measures) = scoring::measures(&synthetic, options, progress)?;
    let device = options.device.to_string();
    Ok(BenchReport { device, gpu, model: Some(synthetic.described()?), ..report("score", threads, measures) })
}

/// A report of a GPU of that name.
fn on_gpu(gpu: String, options: &Options, report: BenchReport) -> BenchReport {
    BenchReport { device: options.device.to_string(), gpu: Some(gpu), ..report }
}

/// Sizes that a target takes: a smaller one measures nothing, a larger one would be cut.
struct Sizes {
    least: u64,
    most: u64,
    /// For messages.
    expected: &'static str,
}

/// Payloads that are verified: [`Synthetic::of_bytes`] has no more experts than a layer may have.
const VERIFIED: Sizes = Sizes { least: 1 << 20, most: 40 << 30, expected: "1M to 40G, to inspect" };
/// Checkpoints that are converted: the most experts of [`checkpoint::write`].
const CONVERTED: Sizes = Sizes { least: 1 << 20, most: 562 << 30, expected: "1M to 562G, to convert" };
/// Weights of a kernel: memory decides.
const MULTIPLIED: Sizes = Sizes { least: 1 << 20, most: u64::MAX, expected: "at least 1M" };
/// Models that are decoded or scored with: as many layers of [`Synthetic::model`] as GLM-5.2 has; a smaller one has no room
/// for a model.
const DECODED: Sizes = Sizes { least: 24 << 20, most: 63 << 30, expected: "24M to 63G, to decode" };
const SCORED: Sizes = Sizes { expected: "24M to 63G, to score", ..DECODED };

/// Refuses a size that is too small or too large, and a mode that the device does not have.
fn check_options(options: &Options, &Sizes { least, most, expected }: &Sizes) -> Result<()> {
    match options.bytes {
        Some(bytes) if !(least..=most).contains(&bytes) => {
            let (flag, found) = ("--size", bytes.to_string());
            Err(Fault::new(Place::default(), FaultKind::FlagValue { flag, expected, found }))
        }
        _ => check_mode(options.device, options.mode),
    }
}

/// Refuses to begin what would fill the memory: weights, and what makes them.
fn check_memory(needed: u64) -> Result<()> {
    match available_bytes() {
        Some(available) if available < needed => {
            Err(Fault::new(Place::default(), FaultKind::BenchMemory { needed, available }))
        }
        _ => Ok(()),
    }
}

/// Refuses to begin what would fill the disk.
fn check_space(path: &Path, needed: u64) -> Result<()> {
    match free_bytes(path) {
        Some(free) if free < needed => Err(Fault::new(Place::file(path), FaultKind::NoSpace { needed, free })),
        _ => Ok(()),
    }
}

/// Measures with what they were taken on.
fn report(target: &str, threads: usize, measures: Vec<BenchMeasure>) -> BenchReport {
    BenchReport {
        target: target.to_owned(),
        cpu: crate::io::cpu_name(),
        device: Device::Cpu.to_string(),
        gpu: None,
        model: None,
        kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease").ok().map(|text| text.trim().to_owned()),
        threads: threads as u64,
        measures,
    }
}

/// Containers of the size of GLM-5.2 without data: nothing but their headers can take time.
fn headers(scratch: &Scratch, options: &Options) -> Result<Vec<BenchMeasure>, Faults> {
    let (bare, whole) = (scratch.path.join("glm-bare"), scratch.path.join("glm"));
    let synthetic = Synthetic::glm(options.layers);
    let made = synthetic.write(&bare, Contents::Holes, false, &crate::progress::Silent)?;
    synthetic.write(&whole, Contents::Holes, true, &crate::progress::Silent)?;
    let mut seconds = [const { Vec::new() }; 3];
    for _ in 0..options.rounds {
        let started = Instant::now();
        for name in weight_files(&bare)? {
            Header::read(&SourceFile::open(&bare.join(name))?)?;
        }
        seconds[0].push(started.elapsed().as_secs_f64());
        for (seconds, directory) in seconds[1..].iter_mut().zip([&bare, &whole]) {
            let started = Instant::now();
            Survey::read(directory)?;
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    let names = ["read headers", "survey", "survey, with manifest"];
    let measures = names
        .into_iter()
        .zip(seconds)
        .map(|(name, seconds)| BenchMeasure { entries: Some(made.entries), ..measure(name, &seconds, None) });
    Ok(measures.collect())
}

fn measure(name: &str, seconds: &[f64], bytes: Option<u64>) -> BenchMeasure {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |place: usize| sorted.get(place).copied().unwrap_or(0.0);
    let (median, fastest) = (at(sorted.len() / 2), at(0));
    BenchMeasure {
        name: name.to_owned(),
        seconds: median,
        fastest_seconds: fastest,
        rounds: seconds.len() as u64,
        bytes,
        gb_per_second: bytes.map(|bytes| bytes as f64 / fastest.max(1e-9) / 1e9),
        entries: None,
        weights: None,
        g_weights_per_second: None,
        gflop_per_second: None,
        cpu_seconds: None,
        g_weights_per_cpu_second: None,
        tokens_per_second: None,
        written_out_tokens_per_second: None,
        token_bytes: None,
        launches: None,
        wait_seconds: None,
        clock: None,
        experts: None,
        device_experts: None,
        peak_anonymous_bytes: None,
        limit: None,
        of_limit: None,
        baseline: None,
        of_baseline: None,
    }
}

/// Verifying a payload, between plain reads of the same files and hashing in memory.
fn payload(container: &Path, options: &Options, pool: &rayon::ThreadPool) -> Result<Vec<BenchMeasure>, Faults> {
    let files: Vec<SourceFile> =
        weight_files(container)?.iter().map(|name| SourceFile::open(&container.join(name))).collect::<Result<_>>()?;
    let bytes: u64 = files.iter().map(SourceFile::bytes).sum();
    let forget = || files.iter().for_each(SourceFile::forget_cached);
    let mut seconds = [const { Vec::new() }; 5];
    for _ in 0..options.rounds {
        forget();
        seconds[0].push(timed(|| pool.install(|| read_all(&files)))?);
        forget();
        seconds[1].push(timed(|| check(container, options.threads))?);
        seconds[2].push(timed(|| pool.install(|| read_all(&files)))?);
        seconds[3].push(timed(|| check(container, options.threads))?);
        seconds[4].push(timed(|| -> Result<(), Faults> {
            pool.install(|| hash_memory(bytes));
            Ok(())
        })?);
    }
    let names = ["read, cold", "verify, cold", "read, warm", "verify, warm", "SHA-256"];
    let mut measures: Vec<BenchMeasure> =
        names.into_iter().zip(&seconds).map(|(name, seconds)| measure(name, seconds, Some(bytes))).collect();
    let rate = |measure: &BenchMeasure| measure.gb_per_second.unwrap_or(0.0);
    for (verified, read) in [(1, 0), (3, 2)] {
        let limit = if rate(&measures[read]) < rate(&measures[4]) { read } else { 4 };
        let shares = seconds[limit].iter().zip(&seconds[verified]).map(|(limit, took)| limit / took.max(1e-9));
        let of_limit = kernels::median(&shares.collect::<Vec<f64>>());
        (measures[verified].limit, measures[verified].of_limit) = (Some(measures[limit].name.clone()), Some(of_limit));
    }
    let manifest = container.join(MANIFEST_FILE);
    std::fs::remove_file(&manifest).map_err(|e| Fault::io("remove the file", &manifest, e))?;
    let without = timed(|| check(container, options.threads))?;
    measures.push(measure("verify, no manifest", &[without], Some(bytes)));
    Ok(measures)
}

fn timed<E>(work: impl FnOnce() -> Result<(), E>) -> Result<f64, E> {
    let started = Instant::now();
    work()?;
    Ok(started.elapsed().as_secs_f64())
}

/// Reads files from start to end, several at a time.
fn read_all(files: &[SourceFile]) -> Result<(), Faults> {
    let read = |file: &SourceFile| read_whole(file, &mut vec![0; limits::HASH_READ_BYTES]);
    files.par_iter().with_max_len(1).try_for_each(read)?;
    Ok(())
}

/// Reads a file from start to end, a buffer at a time.
fn read_whole(file: &SourceFile, buffer: &mut [u8]) -> Result<()> {
    let mut position = 0;
    while position < file.bytes() {
        let step = (file.bytes() - position).min(buffer.len() as u64) as usize;
        file.read_at(&mut buffer[..step], position)?;
        position += step as u64;
    }
    Ok(())
}

/// Hashes so many bytes from memory that stays in the cores' caches.
fn hash_memory(bytes: u64) {
    let threads = rayon::current_num_threads();
    (0..threads).into_par_iter().with_max_len(1).for_each(|_| {
        let buffer = vec![1; limits::VERIFY_READ_BYTES];
        let mut hash = Sha256::new();
        for _ in 0..(bytes / threads as u64).div_ceil(buffer.len() as u64) {
            hash.update(&buffer);
        }
        std::hint::black_box(hash.finalize());
    });
}

/// Verifies a container that must be found good.
fn check(container: &Path, threads: usize) -> Result<(), Faults> {
    let options = VerifyOptions { level: Level::Payload, source: None, threads, tokens: TokenOptions::default() };
    let report: VerifyReport = verify(container, &options, &crate::progress::Silent)?;
    let failed = report.checks.iter().find(|check| check.status == CheckStatus::Fail);
    assert!(failed.is_none(), "the container was just written: {failed:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest sizes that are taken are made, about, and not smaller ones in their place.
    #[test]
    fn no_size_is_cut() {
        let grows = |sizes: &Sizes, made: &dyn Fn(u64) -> Result<u64, Faults>| {
            let made = |bytes: u64| made(bytes).unwrap_or_else(|faults| panic!("{faults}"));
            // A layer or an expert of each layer more: 4 GiB are enough for either.
            let smaller = sizes.most - (4 << 30);
            let (most, less) = (made(sizes.most), made(smaller));
            assert!(most > less && less > smaller / 10 * 9, "{less} {most}, {}", sizes.expected);
        };
        grows(&DECODED, &|bytes| Synthetic::model(bytes).bytes());
        grows(&VERIFIED, &|bytes| Synthetic::of_bytes(bytes, 2).bytes());
        grows(&CONVERTED, &checkpoint::stored_bytes);
    }
}
