//! A GPU against what its memory and its arithmetic give at most, measured in the same run.
//!
//! What is measured is recorded once and done often enough for a round to take a while, so that no time of the host is in
//! it. Before every work of a round its limit is taken again, and the share is the median of these pairs. Weights are far
//! beyond the caches: several matrices, used in turn.

mod decoding;
mod experts;
mod products;
mod tiered;

use super::kernels::{Random, median};
use super::synthetic::Synthetic;
use super::{Options, measure};
use crate::backend::gpu::device::{Device, Recorded};
use crate::backend::gpu::driver::{Clock, DeviceMemory, Driver, Elapsed};
use crate::backend::gpu::peaks::{MULTIPLIED_BYTES, PIECE_BYTES, SUM_BYTES};
use crate::backend::gpu::{Choice, Gpu, Groups, Rows};
use crate::backend::{self, Backend, Gpus, Mode, cuda, vulkan};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::progress::Progress;
use crate::report::BenchMeasure;

/// Seconds that a round of one work takes at least.
const ROUND_SECONDS: f64 = 0.01;
/// Most times that a round does it.
const MOST_TIMES: f64 = 2000.0;
/// Without a size, weights take what the device reads in so many seconds: several times any cache.
const SIZE_SECONDS: f64 = 5e-4;
/// Least and most bytes of such weights.
const LEAST_SIZE: u64 = 64 << 20;
const MOST_SIZE: u64 = 2 << 30;
/// Limits, as they are named after what they limit.
const READ: &str = "read";
const FMA: &str = "f32 FMA";
/// Bytes that are written at a time.
const FILLED_BYTES: usize = 8 << 20;

/// What is done each time, in the unit of its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Amount {
    /// Bytes that are read.
    Bytes(u64),
    /// Products and sums.
    Flops(u64),
}

impl Amount {
    fn count(self) -> f64 {
        match self {
            Amount::Bytes(count) | Amount::Flops(count) => count as f64,
        }
    }
}

/// Rows of x, choices of experts and their groups.
type Inputs<D> = (Option<Rows<D>>, Vec<Choice<D>>, Vec<Groups<D>>);

/// Launches that are measured.
struct Work<D: Driver> {
    name: String,
    recorded: Recorded<D>,
    amount: Amount,
    /// Times that a round does them.
    times: u32,
    /// Of one time, in each round.
    seconds: Vec<f64>,
    /// Its rate by that of its limit just before, in each round.
    shares: Vec<f64>,
    clock: Clock,
    /// What the launches read and nobody else may get.
    _inputs: Inputs<D>,
}

impl<D: Driver> Work<D> {
    /// Records launches, which say how much they do, and does them to see how long they take.
    fn new(device: &Device<D>, name: String, launches: impl Fn() -> Result<Amount>) -> Result<Work<D>> {
        let mut amount = Amount::Bytes(0);
        let recorded = device.record(|| {
            amount = launches()?;
            Ok(())
        })?;
        device.timed(&recorded, 1)?;
        let Elapsed { seconds, clock } = device.timed(&recorded, 1)?;
        let times = (ROUND_SECONDS / seconds.max(1e-9)).ceil().clamp(1.0, MOST_TIMES) as u32;
        Ok(Work {
            name,
            recorded,
            amount,
            times,
            seconds: Vec::new(),
            shares: Vec::new(),
            clock,
            _inputs: (None, Vec::new(), Vec::new()),
        })
    }

    /// The same with what its launches read.
    fn keeping(self, x: Rows<D>, choices: Vec<Choice<D>>, groups: Vec<Groups<D>>) -> Work<D> {
        Work { _inputs: (Some(x), choices, groups), ..self }
    }

    /// A round: how much is done in a second.
    fn run(&mut self, device: &Device<D>) -> Result<f64> {
        let seconds = device.timed(&self.recorded, self.times)?.seconds / f64::from(self.times);
        self.seconds.push(seconds);
        Ok(self.amount.count() / seconds.max(1e-12))
    }

    /// What the rounds so far have shown; the next ones begin anew.
    fn measured(&mut self, limit: Option<&str>) -> BenchMeasure {
        let (seconds, shares) = (std::mem::take(&mut self.seconds), std::mem::take(&mut self.shares));
        let bytes = match self.amount {
            Amount::Bytes(bytes) => Some(bytes),
            Amount::Flops(_) => None,
        };
        let measure = measure(&self.name, &seconds, bytes);
        let flops = match self.amount {
            Amount::Bytes(_) => None,
            Amount::Flops(flops) => Some(flops as f64 / measure.fastest_seconds.max(1e-12) / 1e9),
        };
        BenchMeasure {
            gb_per_second: bytes.map(|bytes| bytes as f64 / measure.fastest_seconds.max(1e-12) / 1e9),
            gflop_per_second: flops,
            launches: Some(self.recorded.launches() as f64),
            clock: Some(<&str>::from(self.clock).to_owned()),
            limit: limit.map(str::to_owned),
            of_limit: limit.map(|_| median(&shares)),
            ..measure
        }
    }
}

/// What a work is measured against: a named measure of its own.
struct Limit<D: Driver> {
    name: &'static str,
    work: Work<D>,
}

impl<D: Driver> Limit<D> {
    /// A round of each work, each after one of the limit; so many rounds.
    fn against(&mut self, device: &Device<D>, works: &mut [Work<D>], rounds: usize) -> Result<Vec<BenchMeasure>> {
        for _ in 0..rounds {
            for work in &mut *works {
                let limit = self.work.run(device)?;
                let rate = work.run(device)?;
                work.shares.push(rate / limit);
            }
        }
        Ok(works.iter_mut().map(|work| work.measured(Some(self.name))).collect())
    }

    /// So many rounds of the limit itself, if there were none.
    fn alone(&mut self, device: &Device<D>, rounds: usize) -> Result<()> {
        let rounds = if self.work.seconds.is_empty() { rounds } else { 0 };
        (0..rounds).try_for_each(|_| self.work.run(device).map(drop))
    }

    /// The limit itself, in all rounds so far; `None` if there was none.
    fn measured(&mut self, of: &str) -> Option<BenchMeasure> {
        self.work.name = limit_name(of, self.name);
        (!self.work.seconds.is_empty()).then(|| self.work.measured(None))
    }
}

/// The name of a limit's measure, in the rounds of a format.
fn limit_name(of: &str, limit: &str) -> String {
    format!("{of}, {limit}")
}

/// Memory that is read to see how fast that goes.
struct Memory<D: Driver> {
    buffers: Vec<D::Buffer>,
    sums: D::Buffer,
}

impl<D: Driver> Memory<D> {
    /// So many bytes, about.
    fn new(device: &Device<D>, bytes: u64) -> Result<Memory<D>> {
        let most = device.driver().limits().buffer_bytes / PIECE_BYTES * PIECE_BYTES;
        let mut left = bytes.max(PIECE_BYTES) / PIECE_BYTES * PIECE_BYTES;
        let mut buffers = Vec::new();
        while left > 0 {
            let bytes = left.min(most);
            let buffer = device.allocate(bytes, "memory that is read")?;
            fill::<D>(device, &buffer, bytes)?;
            buffers.push(buffer);
            left -= bytes;
        }
        Ok(Memory { buffers, sums: device.allocate(SUM_BYTES, "sums of what is read")? })
    }

    /// All of it, once.
    fn read(&self, device: &Device<D>) -> Result<u64> {
        let mut all = 0;
        for buffer in &self.buffers {
            let bytes = device.driver().bytes(buffer);
            device.read_pieces(buffer, 0..bytes / PIECE_BYTES, &self.sums)?;
            all += bytes;
        }
        Ok(all)
    }

    /// So many bytes of it `count` times, one after the other: bytes of all.
    fn read_parts(&self, device: &Device<D>, bytes: u64, count: usize) -> Result<u64> {
        let all = device.driver().bytes(&self.buffers[0]) / PIECE_BYTES;
        let pieces = (bytes / PIECE_BYTES).clamp(1, all);
        for part in 0..count as u64 {
            let first = part % (all / pieces) * pieces;
            device.read_pieces(&self.buffers[0], first..first + pieces, &self.sums)?;
        }
        Ok(pieces * PIECE_BYTES * count as u64)
    }

    /// Reading all of it, as a limit.
    fn limit(&self, device: &Device<D>) -> Result<Limit<D>> {
        let work = Work::new(device, String::new(), || Ok(Amount::Bytes(self.read(device)?)))?;
        Ok(Limit { name: READ, work })
    }
}

/// Numbers everywhere in a buffer: memory that nobody wrote may not be there at all.
fn fill<D: Driver>(device: &Device<D>, buffer: &D::Buffer, bytes: u64) -> Result<()> {
    let mut random = Random::new(3);
    let numbers: Vec<u8> = (0..FILLED_BYTES / 8).flat_map(|_| random.next().to_le_bytes()).collect();
    for first in (0..bytes).step_by(FILLED_BYTES) {
        let count = (bytes - first).min(FILLED_BYTES as u64) as usize;
        device.driver().write(buffer, first, &numbers[..count])?;
    }
    Ok(())
}

/// Products and sums in registers, as a limit; with the memory that they leave their results in.
fn multiplying<D: Driver>(device: &Device<D>) -> Result<(D::Buffer, Limit<D>)> {
    let out = device.allocate(MULTIPLIED_BYTES, "results of products")?;
    let of = |steps| Work::new(device, String::new(), || Ok(Amount::Flops(device.multiply(steps, &out)?)));
    let mut first = of(1)?;
    first.run(device)?;
    let steps = (ROUND_SECONDS / first.seconds[0].max(1e-9)).clamp(1.0, 1e4) as u32;
    let work = of(steps)?;
    Ok((out, Limit { name: FMA, work }))
}

/// Refuses to begin what the device has no memory for.
fn check_memory<D: Driver>(device: &Device<D>, wanted: u64, purpose: &str) -> Result<()> {
    check_free(&device.driver().device(), device.driver().memory()?, wanted, purpose)
}

fn check_free(device: &str, DeviceMemory { free, total }: DeviceMemory, wanted: u64, purpose: &str) -> Result<()> {
    match wanted > free {
        true => {
            let (device, purpose) = (device.to_owned(), purpose.to_owned());
            Err(Fault::new(Place::default(), FaultKind::GpuMemory { device, purpose, wanted, free, total }))
        }
        false => Ok(()),
    }
}

/// Opens the GPU that is asked for and measures decoding with a model, or without one kernels: the GPU's name, and measures.
pub(super) fn measures(
    model: Option<&Synthetic>,
    options: &Options,
    progress: &dyn Progress,
) -> Result<(String, Vec<BenchMeasure>), Faults> {
    match options.device {
        backend::Device::Cuda(number) => on(cuda::backend(number, None)?, model, options, progress),
        backend::Device::Vulkan(number) => on(vulkan::backend(number, None)?, model, options, progress),
        backend::Device::Several(_) => Err(super::several().into()),
        device @ (backend::Device::Reference | backend::Device::Cpu) => panic!("{device} is no GPU"),
    }
}

fn on<D: Driver>(
    gpu: Gpu<D>,
    model: Option<&Synthetic>,
    options: &Options,
    progress: &dyn Progress,
) -> Result<(String, Vec<BenchMeasure>), Faults> {
    let gpu = gpu.in_mode(options.mode);
    let name = gpu.device();
    let measures = match model {
        Some(model) => decoding::decode(gpu, model, options, progress)?,
        None => kernels(&gpu, options, progress)?,
    };
    Ok((name, measures))
}

/// The name of a GPU that has room for so many bytes; `None` of what is no GPU.
pub(super) fn opened(device: backend::Device, mode: Mode, bytes: u64) -> Result<Option<String>> {
    match device {
        backend::Device::Reference | backend::Device::Cpu => return Ok(None),
        backend::Device::Several(_) => return Err(super::several()),
        backend::Device::Cuda(_) | backend::Device::Vulkan(_) => {}
    }
    let found = Gpus::open(device, mode, None)?.found()?.swap_remove(0);
    check_free(&found.device, found.memory, bytes, "the model to measure with")?;
    Ok(Some(found.device))
}

/// Bytes of weights that suit the device.
fn suitable_bytes<D: Driver>(device: &Device<D>) -> Result<u64> {
    let free = device.driver().memory()?.free;
    let memory = Memory::<D>::new(device, LEAST_SIZE.min(free / 4))?;
    let mut limit = memory.limit(device)?;
    let rate = limit.work.run(device)?;
    Ok(((rate * SIZE_SECONDS) as u64).clamp(LEAST_SIZE, MOST_SIZE).min(free / 4))
}

/// What is asked for, and the limits that it is measured against.
struct Bench<'a, D: Driver> {
    gpu: &'a Gpu<D>,
    options: &'a Options,
    progress: &'a dyn Progress,
    /// Bytes of weights that are used in turn.
    bytes: u64,
    memory: &'a Memory<D>,
    reading: Limit<D>,
    multiplying: Option<Limit<D>>,
    /// What the latter works on.
    _multiplied: Option<D::Buffer>,
}

impl<D: Driver> Bench<'_, D> {
    /// Whether a measure of that name is asked for.
    fn is_wanted(&self, name: &str) -> bool {
        self.options.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    fn device(&self) -> &Device<D> {
        self.gpu.gpu()
    }

    /// Works that read, against reading.
    fn against_reading(&mut self, works: &mut [Work<D>]) -> Result<Vec<BenchMeasure>> {
        self.reading.against(self.gpu.gpu(), works, self.options.rounds)
    }

    /// Works that multiply, against multiplying.
    fn against_multiplying(&mut self, works: &mut [Work<D>]) -> Result<Vec<BenchMeasure>> {
        if works.is_empty() {
            return Ok(Vec::new());
        }
        let (gpu, rounds) = (self.gpu, self.options.rounds);
        self.multiplying()?.against(gpu.gpu(), works, rounds)
    }

    /// Multiplying, made when it is first wanted.
    fn multiplying(&mut self) -> Result<&mut Limit<D>> {
        if self.multiplying.is_none() {
            let (out, limit) = multiplying(self.gpu.gpu())?;
            (self.multiplying, self._multiplied) = (Some(limit), Some(out));
        }
        Ok(self.multiplying.as_mut().expect("it was just made"))
    }

    /// Measures of a format, after its limits: those that there were rounds of, and those that are asked for by their own names.
    fn with_limits(&mut self, of: &str, limits: &[&str], measures: Vec<BenchMeasure>) -> Result<Vec<BenchMeasure>> {
        let (gpu, rounds) = (self.gpu, self.options.rounds);
        let is_named = |limit| self.options.only.is_some() && self.is_wanted(&limit_name(of, limit));
        for limit in limits.iter().filter(|limit| is_named(limit)).collect::<Vec<_>>() {
            match *limit {
                FMA => self.multiplying()?.alone(gpu.gpu(), rounds)?,
                _ => self.reading.alone(gpu.gpu(), rounds)?,
            }
        }
        let limits = self.reading.measured(of).into_iter();
        Ok(limits.chain(self.multiplying.as_mut().and_then(|limit| limit.measured(of))).chain(measures).collect())
    }
}

/// Products of rows with matrices, and routed experts, every format.
fn kernels<D: Driver>(gpu: &Gpu<D>, options: &Options, progress: &dyn Progress) -> Result<Vec<BenchMeasure>, Faults> {
    let device = gpu.gpu();
    let bytes = options.bytes.map_or_else(|| suitable_bytes(device), Ok)?;
    super::check_memory(super::kernels::LARGEST_BYTES.saturating_mul(2))?;
    check_memory(device, bytes.saturating_mul(2), "weights to measure with, and as many bytes to read")?;
    progress.step("reading memory");
    let memory = Memory::new(device, bytes)?;
    let reading = memory.limit(device)?;
    let mut bench =
        Bench { gpu, options, progress, bytes, memory: &memory, reading, multiplying: None, _multiplied: None };
    let mut measures = products::measures(&mut bench)?;
    measures.extend(experts::measures(&mut bench)?);
    if measures.is_empty() {
        let found = options.only.clone().unwrap_or_default();
        let (flag, expected) =
            ("--only", "a part of a measure's name, for one `int4-row`, `, 8 rows` or `read a matrix a launch`");
        return Err(Fault::new(Place::default(), FaultKind::FlagValue { flag, expected, found }).into());
    }
    Ok(measures)
}
