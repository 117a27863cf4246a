//! NVIDIA GPUs through the driver's own library, which is looked for when a device is asked for.
//!
//! The kernels are those of `kernels/cuda`, compiled before ([`images`]); users need the driver and nothing else. What runs on
//! the device is made by [`crate::backend::gpu`], for which [`Cuda`] is a [`Driver`].

mod api;
mod device;
pub mod images;
#[cfg(test)]
mod on_gpu;
mod peers;
mod recording;
mod stream;
#[cfg(all(test, target_os = "linux"))]
mod tests;
mod upload;

use std::sync::Arc;

pub use device::{Description, list, memory, peers};
pub use recording::Recording;
pub use stream::Buffer;

use self::images::Prefer;
use self::stream::Stream;
use crate::backend::gpu::Gpu;
use crate::backend::gpu::device::Injection;
use crate::backend::gpu::driver::{DeviceMemory, Driver, Elapsed, Launch, Limits, Route};
use crate::backend::gpu::kernels::Kernel;
use crate::backend::gpu::many;
use crate::error::Result;

/// The backend's name in options and reports.
pub const NAME: &str = "cuda";

/// Bytes of one buffer: as Vulkan has it on the same devices, and little enough for 32 bits to number its words.
const BUFFER_BYTES: u64 = 4095 << 20;

/// An NVIDIA GPU.
#[derive(Debug)]
pub struct Cuda(Arc<Stream>);

impl Cuda {
    /// The GPU of that number in the driver's order. Says why there is none: no driver, one that is too old, no device, a
    /// device that is too old.
    pub fn open(ordinal: usize) -> Result<Cuda> {
        Cuda::open_with(ordinal, Prefer::default())
    }

    /// The same, with a choice of the code that runs.
    pub fn open_with(ordinal: usize, prefer: Prefer) -> Result<Cuda> {
        Ok(Cuda(Arc::new(Stream::open(ordinal, prefer)?)))
    }

    /// The device as the driver describes it.
    pub fn description(&self) -> &Description {
        self.0.description()
    }
}

/// A backend on the GPU of that number, with a fault on purpose.
pub fn backend(ordinal: usize, injection: Option<Injection>) -> Result<Gpu<Cuda>> {
    Ok(Gpu::new(Cuda::open(ordinal)?, injection))
}

/// GPUs of these numbers, whose launches are counted together, with a fault on purpose on one of them.
pub fn gpus(numbers: impl Iterator<Item = usize>, injection: Option<Injection>) -> Result<Vec<Gpu<Cuda>>> {
    many::open(numbers, injection, Cuda::open)
}

impl Driver for Cuda {
    type Buffer = Buffer;
    type Recording = Recording;

    fn name(&self) -> &'static str {
        NAME
    }

    fn device(&self) -> String {
        self.0.label().to_owned()
    }

    fn limits(&self) -> Limits {
        let description = self.description();
        let shared_bytes = description.chosen_shared_bytes();
        Limits { buffer_bytes: BUFFER_BYTES, groups: description.groups, shared_bytes }
    }

    fn outputs(&self, rows: u32) -> usize {
        // Eight warps: kernels/cuda/product.cuh, outputs_of_a_warp.
        if rows == 1 { 16 } else { 32 }
    }

    fn memory(&self) -> Result<DeviceMemory> {
        self.0.memory()
    }

    fn allocate(&self, bytes: u64, purpose: &str) -> Result<Buffer> {
        assert!(bytes <= BUFFER_BYTES, "{purpose}: {bytes} bytes");
        self.0.allocate(bytes, purpose)
    }

    fn bytes(&self, buffer: &Buffer) -> u64 {
        buffer.bytes()
    }

    fn write(&self, to: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        self.0.write(to, offset, bytes)
    }

    fn upload(&self, to: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        self.0.upload(to, offset, bytes)
    }

    fn uploads_after_launches(&self) -> Result<()> {
        self.0.uploads_after_launches()
    }

    fn launches_after_uploads(&self) -> Result<()> {
        self.0.launches_after_uploads()
    }

    fn read(&self, from: &Buffer, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.0.read(from, offset, bytes)
    }

    fn has(&self, kernel: Kernel) -> bool {
        self.0.has(kernel)
    }

    fn resident(&self, kernel: Kernel, shared_bytes: u32) -> Result<u32> {
        self.0.resident(kernel, shared_bytes)
    }

    fn meet(&self, other: &Cuda) -> Result<Route> {
        self.0.meet(&other.0)
    }

    fn copy_from(&self, to: &Buffer, other: &Cuda, from: &Buffer, bytes: u64) -> Result<()> {
        self.0.copy_from(to, &other.0, from, bytes)
    }

    fn launch(&self, launch: &Launch<'_, Buffer>) -> Result<()> {
        self.0.launch(launch)
    }

    fn wait(&self) -> Result<()> {
        self.0.wait()
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Recording> {
        self.0.record(work)
    }

    fn replay(&self, recording: &Recording) -> Result<()> {
        self.0.replay(recording)
    }

    fn timed(&self, recording: &Recording, times: u32) -> Result<Elapsed> {
        self.0.timed(recording, times)
    }
}
