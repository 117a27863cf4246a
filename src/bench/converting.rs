//! Whole conversions, each beside a plain copy of as many bytes: what the same disk does without any work.

use std::path::Path;
use std::time::Instant;

use super::kernels::median;
use super::{Options, Scratch, check_space, checkpoint, measure, read_whole};
use crate::checkpoint::weight_files;
use crate::convert;
use crate::error::{Fault, Faults, Result};
use crate::io::SourceFile;
use crate::limits;
use crate::progress::{Progress, Silent};
use crate::recipe::{GroupSize, Settings};
use crate::report::BenchMeasure;
use crate::threads::process_seconds;

/// What is converted to: a name, and the settings.
fn formats() -> [(&'static str, Settings); 4] {
    let rows = || Settings { group_size: Some(GroupSize::Elements(0)), ..Settings::default() };
    [
        ("int4-grouped(64)", Settings::default()),
        ("int4-row", rows()),
        ("int3-g64", Settings { ebits: Some(3), ..Settings::default() }),
        ("int8-row", Settings { ebits: Some(8), ..rows() }),
    ]
}

/// Seconds on the wall and on cores.
type Seconds = (Vec<f64>, Vec<f64>);

/// A conversion with what it is compared to.
#[derive(Default)]
struct Runs {
    read: Seconds,
    write: Seconds,
    convert: Seconds,
    weights: u64,
    source_bytes: u64,
    output_bytes: u64,
    peak_anonymous_bytes: u64,
}

/// Converts a made-up FP8 checkpoint to each format, `rounds` times, from a cold disk.
pub(super) fn measures(
    scratch: &Scratch,
    options: &Options,
    progress: &dyn Progress,
) -> Result<Vec<BenchMeasure>, Faults> {
    let source = scratch.path.join("checkpoint");
    // The checkpoint, and beside it what is made of it: about as much again, or the plain copy of that.
    check_space(&source, 2 * checkpoint::stored_bytes(options.bytes())?)?;
    progress.step("making a checkpoint");
    let weights = checkpoint::write(&source, options.bytes(), options.shard_bytes)?;
    for (_, settings) in formats() {
        check_space(&source, Round { source: &source, scratch, options, settings: &settings }.planned_bytes()?)?;
    }
    let mut runs: Vec<(&str, Settings, Runs)> =
        formats().into_iter().map(|(name, settings)| (name, settings, Runs { weights, ..Runs::default() })).collect();
    for number in 0..options.rounds {
        for (name, settings, runs) in &mut runs {
            progress.step(&format!("round {} of {}: {name}", number + 1, options.rounds));
            let round = Round { source: &source, scratch, options, settings };
            // Whoever comes second finds memory that the first has just given back, which costs less than other memory.
            if number.is_multiple_of(2) {
                round.copy(runs)?;
                round.convert(runs)?;
            } else {
                round.convert(runs)?;
                round.copy(runs)?;
            }
        }
    }
    Ok(runs.into_iter().flat_map(|(name, _, runs)| runs.measures(name)).collect())
}

/// What one round works on.
struct Round<'a> {
    source: &'a Path,
    scratch: &'a Scratch,
    options: &'a Options,
    settings: &'a Settings,
}

impl Round<'_> {
    /// The shards, of which nothing is left in the system's memory.
    fn cold_shards(&self) -> Result<Vec<SourceFile>> {
        let names = weight_files(self.source)?;
        let shards: Vec<SourceFile> =
            names.iter().map(|name| SourceFile::open(&self.source.join(name))).collect::<Result<_>>()?;
        shards.iter().for_each(SourceFile::forget_cached);
        Ok(shards)
    }

    fn convert(&self, runs: &mut Runs) -> Result<(), Faults> {
        let target = self.scratch.path.join("container");
        let shards = self.cold_shards()?;
        let (settings, threads) = (self.settings.clone(), self.options.threads);
        let options = convert::Options { settings, threads, ..convert::Options::default() };
        timed(&mut runs.convert, || {
            let report = convert::Job::prepare(self.source, &target, options)?.run(&Silent)?;
            (runs.source_bytes, runs.output_bytes) = (shards.iter().map(SourceFile::bytes).sum(), report.output_bytes);
            runs.peak_anonymous_bytes = runs.peak_anonymous_bytes.max(report.peak_anonymous_bytes.unwrap_or(0));
            Ok::<(), Faults>(())
        })?;
        Ok(std::fs::remove_dir_all(&target).map_err(|e| Fault::io("remove the directory", &target, e))?)
    }

    /// Reads as many bytes as the conversion does, and writes as many as it writes.
    fn copy(&self, runs: &mut Runs) -> Result<(), Faults> {
        let output_bytes = if runs.output_bytes > 0 { runs.output_bytes } else { self.planned_bytes()? };
        let shards = self.cold_shards()?;
        let mut buffer = vec![1; limits::HASH_READ_BYTES];
        timed(&mut runs.read, || shards.iter().try_for_each(|shard| read_whole(shard, &mut buffer)))?;
        let path = self.scratch.path.join("copy");
        timed(&mut runs.write, || plain_write(&path, &buffer, output_bytes))
            .map_err(|e| Fault::io("write the file", &path, e))?;
        Ok(std::fs::remove_file(&path).map_err(|e| Fault::io("remove the file", &path, e))?)
    }

    fn planned_bytes(&self) -> Result<u64, Faults> {
        let options = convert::Options { settings: self.settings.clone(), ..convert::Options::default() };
        Ok(convert::Job::prepare(self.source, &self.scratch.path.join("container"), options)?.plan().output_bytes)
    }
}

fn timed<E>(seconds: &mut Seconds, work: impl FnOnce() -> std::result::Result<(), E>) -> std::result::Result<(), E> {
    let (started, cores) = (Instant::now(), process_seconds());
    work()?;
    seconds.0.push(started.elapsed().as_secs_f64());
    seconds.1.push(process_seconds() - cores);
    Ok(())
}

/// The way of any program that does not know better.
fn plain_write(path: &Path, buffer: &[u8], bytes: u64) -> std::io::Result<()> {
    use std::io::Write;
    let mut file = std::fs::File::create(path)?;
    let mut left = bytes;
    while left > 0 {
        let step = left.min(buffer.len() as u64);
        file.write_all(&buffer[..step as usize])?;
        left -= step;
    }
    file.sync_all()
}

impl Runs {
    fn measures(self, name: &str) -> [BenchMeasure; 2] {
        let sum = |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(a, b)| a + b).collect::<Vec<f64>>();
        let bytes = Some(self.source_bytes + self.output_bytes);
        let (copy_name, name) = (format!("plain read and write, {name}"), format!("convert to {name}"));
        let copy = BenchMeasure {
            cpu_seconds: Some(smallest(&sum(&self.read.1, &self.write.1))),
            ..measure(&copy_name, &sum(&self.read.0, &self.write.0), bytes)
        };
        let cpu_seconds = smallest(&self.convert.1);
        let mut convert = BenchMeasure {
            weights: Some(self.weights),
            cpu_seconds: Some(cpu_seconds),
            g_weights_per_cpu_second: Some(self.weights as f64 / cpu_seconds.max(1e-9) / 1e9),
            peak_anonymous_bytes: Some(self.peak_anonymous_bytes),
            ..measure(&name, &self.convert.0, bytes)
        };
        let copied = self.read.0.iter().zip(&self.write.0).map(|(read, write)| read + write);
        let shares: Vec<f64> = copied.zip(&self.convert.0).map(|(copy, took)| copy / took.max(1e-9)).collect();
        (convert.limit, convert.of_limit) = (Some(copy_name), Some(median(&shares)));
        [copy, convert]
    }
}

fn smallest(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(f64::INFINITY, f64::min)
}
