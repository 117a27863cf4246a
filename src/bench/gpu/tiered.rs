//! Decoding with an eighth of the routed experts on the device and all of them in memory, against plain uploads.

use super::super::decoding::{Decoder, KEPT, since};
use super::super::measure;
use super::decoding::tokens_of;
use super::median;
use crate::backend::Backend;
use crate::backend::gpu::Gpu;
use crate::backend::gpu::driver::Driver;
use crate::backend::gpu::tiers;
use crate::container::reader::Container;
use crate::error::{Faults, Result};
use crate::experts;
use crate::model::memory::{Needs, share};
use crate::model::{Loaded, Model};
use crate::progress::Progress;
use crate::report::BenchMeasure;

/// Bytes that are uploaded to measure the limit, and at a time.
const UPLOADED_BYTES: usize = 512 << 20;
const PIECE_BYTES: usize = 16 << 20;
/// Tokens before the first round at most: until memory has every expert, the disk is measured.
const MOST_WARM: u64 = 200;

/// How experts lie in tiers: an eighth on the device, everything in memory; `None` where memory has no room for that.
pub(super) fn options(needs: &Needs) -> Result<Option<tiers::Options>> {
    let host = share(std::slice::from_ref(needs), None)?[0];
    let device_bytes = (needs.experts / KEPT).max(needs.experts_at_least);
    Ok((!host.direct).then_some(tiers::Options { device_bytes, fewer: false, host }))
}

/// Tokens one after the other on a device that has experts in tiers, each round after one of plain uploads.
pub(super) fn measures<D: Driver>(
    gpu: &Gpu<D>,
    container: &Container,
    rounds: usize,
    progress: &dyn Progress,
) -> Result<Vec<BenchMeasure>, Faults> {
    progress.step("loading the model, with experts in tiers");
    let model = Model::load_parts(container, gpu, Loaded::WithoutMtp)?;
    let plain = Plain::new(gpu)?;
    let mut warm = Decoder::new(&model)?;
    for _ in 0..MOST_WARM {
        let before = memory(gpu).reads;
        warm.run(1)?;
        if memory(gpu).reads == before {
            break;
        }
    }
    let tokens = tokens_of(warm.run(2)?);
    let (mut uploads, mut seconds, mut shares, mut bytes) = (Vec::new(), Vec::new(), Vec::new(), 0);
    let (first, first_in_memory) = (device(gpu), memory(gpu));
    for _ in 0..rounds {
        progress.step("uploading");
        let uploading = plain.run(gpu)?;
        progress.step("decoding with experts in tiers");
        let before = device(gpu).bytes_uploaded;
        let took = Decoder::new(&model)?.run(tokens)?;
        let uploaded = device(gpu).bytes_uploaded - before;
        shares.push(uploaded as f64 / took / (UPLOADED_BYTES as f64 / uploading));
        bytes += uploaded;
        uploads.push(uploading);
        seconds.push(took);
    }
    let name = format!("decode, an eighth of the experts on the device, {tokens} tokens");
    let decoding = measure(&name, &seconds, Some(bytes / rounds as u64));
    let decoding = BenchMeasure {
        tokens_per_second: Some(tokens as f64 / decoding.fastest_seconds.max(1e-9)),
        device_experts: Some(device(gpu).since(&first)),
        experts: Some(since(memory(gpu), first_in_memory)),
        clock: Some("host".to_owned()),
        limit: Some("upload".to_owned()),
        of_limit: Some(median(&shares)),
        ..decoding
    };
    Ok(vec![measure("upload", &uploads, Some(UPLOADED_BYTES as u64)), decoding])
}

fn device<D: Driver>(gpu: &Gpu<D>) -> tiers::Counters {
    gpu.device_expert_counters().unwrap_or_default()
}

fn memory<D: Driver>(gpu: &Gpu<D>) -> experts::Counters {
    gpu.expert_counters().unwrap_or_default()
}

/// Memory that is uploaded to see how fast that goes.
struct Plain<D: Driver> {
    bytes: Vec<u8>,
    to: D::Buffer,
}

impl<D: Driver> Plain<D> {
    fn new(gpu: &Gpu<D>) -> Result<Plain<D>> {
        let to = gpu.gpu().allocate(PIECE_BYTES as u64, "what is uploaded")?;
        // Memory that nobody wrote may not be there at all.
        Ok(Plain { bytes: vec![1; UPLOADED_BYTES], to })
    }

    /// All of it, to one place after the other; seconds.
    fn run(&self, gpu: &Gpu<D>) -> Result<f64> {
        let driver = gpu.gpu().driver();
        driver.wait()?;
        driver.uploads_after_launches()?;
        let started = std::time::Instant::now();
        for piece in self.bytes.chunks(PIECE_BYTES) {
            driver.upload(&self.to, 0, piece)?;
        }
        driver.launches_after_uploads()?;
        driver.wait()?;
        Ok(started.elapsed().as_secs_f64())
    }
}
