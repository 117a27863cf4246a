//! Decoding with a whole model on a GPU, against reading its memory; then with experts in tiers.

use super::super::decoding::{Decoder, token_bytes};
use super::super::synthetic::{Contents, Synthetic};
use super::super::{Options, Scratch, check_space, measure};
use super::{Memory, check_memory, median, tiered};
use crate::backend::gpu::Gpu;
use crate::backend::gpu::driver::Driver;
use crate::container::reader::Container;
use crate::error::Faults;
use crate::model::memory::{Allowed, Needs, fits_gpu, gpu_positions};
use crate::model::{Loaded, Model};
use crate::progress::Progress;
use crate::report::BenchMeasure;

/// Seconds that a round takes, about.
const ROUND_SECONDS: f64 = 0.5;
/// Least and most tokens of a round.
const LEAST_TOKENS: u64 = 4;
const MOST_TOKENS: u64 = 64;
/// Bytes that are read to measure the limit.
const READ_BYTES: u64 = 1 << 30;

/// Makes a container and decodes with it, one random token after the other: the GPU's name, and measures.
pub(super) fn decode<D: Driver>(
    gpu: Gpu<D>,
    synthetic: &Synthetic,
    options: &Options,
    progress: &dyn Progress,
) -> Result<Vec<BenchMeasure>, Faults> {
    check_memory(gpu.gpu(), synthetic.bytes()?, "the model to decode with")?;
    let scratch = Scratch::create(&options.directory, progress)?;
    let path = scratch.path.join("model");
    check_space(&path, synthetic.bytes()?)?;
    progress.step("making a container");
    synthetic.write(&path, Contents::Model, true, progress)?;
    let container = Container::open(&path)?;
    let needs = Needs::of(&path, container.config(), Loaded::WithoutMtp, gpu_positions(MOST_TOKENS), 1);
    // All experts are on the device: what is little for that is told when there is none left.
    fits_gpu(std::slice::from_ref(&needs), gpu.gpu(), Allowed::default())?;
    let mut measures = on_device(&gpu, &container, options.rounds, progress)?;
    match tiered::options(&needs)? {
        Some(tiers) => {
            let gpu = gpu.in_tiers(Some(tiers));
            measures.extend(tiered::measures(&gpu, &container, options.rounds, progress)?);
        }
        None => progress.step("decode with experts in tiers is left out: they do not fit in memory"),
    }
    Ok(measures)
}

/// Tokens of a round, by the seconds that two of them take.
pub(super) fn tokens_of(two: f64) -> u64 {
    (ROUND_SECONDS / two * 2.0).clamp(LEAST_TOKENS as f64, MOST_TOKENS as f64) as u64
}

/// Decoding with all experts on the device.
fn on_device<D: Driver>(
    gpu: &Gpu<D>,
    container: &Container,
    rounds: usize,
    progress: &dyn Progress,
) -> Result<Vec<BenchMeasure>, Faults> {
    let device = gpu.gpu();
    progress.step("loading the model");
    let model = Model::load_parts(container, gpu, Loaded::WithoutMtp)?;
    let memory = Memory::new(device, READ_BYTES.min(device.driver().memory()?.free / 4))?;
    let mut limit = memory.limit(device)?;
    let of_token = token_bytes(container)?;
    let mut decoder = Decoder::new(&model)?;
    // Kernels are made ready, and memory is taken, with the first.
    decoder.run(2)?;
    let tokens = tokens_of(decoder.run(2)?);
    let (mut seconds, mut shares) = (Vec::new(), Vec::new());
    let (launches, waited) = (device.launches(), device.waited());
    let mut reading = 0;
    for _ in 0..rounds {
        progress.step("decoding");
        let before = device.launches();
        let rate = limit.work.run(device)?;
        reading += device.launches() - before;
        // Every round begins a text: no indexer has anything to choose.
        let took = Decoder::new(&model)?.run(tokens)?;
        shares.push((of_token.total() * tokens) as f64 / took / rate);
        seconds.push(took);
    }
    let done = (tokens * rounds as u64) as f64;
    let name = format!("decode, all experts on the device, {tokens} tokens");
    let decoding = measure(&name, &seconds, Some(of_token.total() * tokens));
    let decoding = BenchMeasure {
        tokens_per_second: Some(tokens as f64 / decoding.fastest_seconds.max(1e-9)),
        token_bytes: Some(of_token),
        launches: Some((device.launches() - launches - reading) as f64 / done.max(1.0)),
        wait_seconds: Some((device.waited() - waited).as_secs_f64()),
        clock: Some("host".to_owned()),
        limit: Some(limit.name.to_owned()),
        of_limit: Some(median(&shares)),
        ..decoding
    };
    limit.work.name = limit.name.to_owned();
    Ok(vec![limit.work.measured(None), decoding])
}
