//! Vulkan: any GPU with version 1.1, and Mesa's software device.
//!
//! This is the [`Driver`] alone: memory, copies, launches. What is computed is in [`super::gpu`], the kernels are in
//! `kernels/vulkan`. The library is loaded when a device is opened; where there is none, that is a fault like any other.

mod adapter;
mod api;
mod commands;
mod core;
mod faults;
mod hazards;
mod matrices;
mod memory;
mod pipelines;
mod recording;
mod space;
mod spirv;
mod stream;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::gpu::Gpu;
use crate::backend::gpu::device::Injection;
use crate::backend::gpu::driver::{DeviceMemory, Driver, Elapsed, Launch, Limits};
use crate::backend::gpu::kernels::Kernel;
use crate::backend::gpu::many;
use crate::error::{Fault, Result};
pub use adapter::{Adapter, Kind, Missing};
use api::Api;
use core::Core;
use memory::{Memory, Part};
use pipelines::Pipelines;
pub use recording::Recording;
use stream::Stream;

/// The backend's name in options and reports.
pub const NAME: &str = "vulkan";

/// Warps of a group: kernels/vulkan/common.glsl.
const WARPS: usize = 8;

/// Whether [`backend`] asks for the validation layers.
static VALIDATION: AtomicBool = AtomicBool::new(false);

/// Lets the validation layers watch every device that [`backend`] opens from now on.
pub fn validate() {
    VALIDATION.store(true, Ordering::Relaxed);
}

/// A backend on the device of that number, with a fault on purpose.
pub fn backend(ordinal: usize, injection: Option<Injection>) -> Result<Gpu<Vulkan>> {
    Ok(Gpu::new(opened(ordinal)?, injection))
}

fn opened(ordinal: usize) -> Result<Vulkan> {
    let validation = VALIDATION.load(Ordering::Relaxed);
    Vulkan::open(Options { ordinal, validation, ..Options::default() })
}

/// GPUs of these numbers, whose launches are counted together, with a fault on purpose on one of them.
pub fn gpus(numbers: impl Iterator<Item = usize>, injection: Option<Injection>) -> Result<Vec<Gpu<Vulkan>>> {
    many::open(numbers, injection, opened)
}

/// How a device is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Which, in the order of [`list`].
    pub ordinal: usize,
    /// Whether the validation layers watch; whatever they say is a fault.
    pub validation: bool,
    /// Whether buffers are named in the command buffer where the device can, instead of in sets of descriptors.
    pub push_descriptors: bool,
    /// Whether lanes are added up by subgroups, if the device has them: by default where those have 32 lanes.
    pub subgroups: Option<bool>,
    /// Whether products of the fast mode may be had, on cooperative matrices, if the device has them.
    pub matrices: bool,
    /// Bytes of a buffer at most, if the device allows as many.
    pub buffer_bytes: u64,
    /// Bytes of device memory to take at most.
    pub memory_bytes: u64,
    /// How long a submission may take, a fraction of a second by rights, before the device is given up.
    pub patience: Duration,
}

impl Default for Options {
    /// The first device, with all that it has.
    fn default() -> Options {
        Options {
            ordinal: 0,
            validation: false,
            push_descriptors: true,
            subgroups: None,
            matrices: true,
            buffer_bytes: u64::MAX,
            memory_bytes: u64::MAX,
            patience: Duration::from_secs(300),
        }
    }
}

/// Every device that the drivers of this machine show, usable or not.
///
/// # Errors
///
/// When there is no library, or no driver, with the reason.
pub fn list() -> Result<Vec<Adapter>> {
    adapter::all(&Api::load(false)?)
}

/// Memory of the device of that number.
pub fn memory(ordinal: usize) -> Result<DeviceMemory> {
    Vulkan::open(Options { ordinal, ..Options::default() })?.memory()
}

/// The fault of a machine on which a driver is installed and shows no device.
pub fn none() -> Fault {
    faults::api_fault("the drivers show no device".to_owned())
}

/// A device.
pub struct Vulkan(Arc<Shared>);

// In the order in which they are dropped: work on its way first.
struct Shared {
    stream: Mutex<Stream>,
    pipelines: Mutex<Pipelines>,
    memory: Mutex<Memory>,
    core: Arc<Core>,
}

/// Memory of the device.
pub struct Buffer {
    held: Arc<Held>,
    bytes: u64,
}

/// A part of the device's memory that goes when neither its owner nor a recording has it.
struct Held {
    shared: Arc<Shared>,
    part: Part,
}

impl fmt::Debug for Vulkan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Vulkan").field(&self.0.core.adapter.name).finish()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("part", &self.held.part).field("bytes", &self.bytes).finish()
    }
}

impl Vulkan {
    /// Opens a device.
    ///
    /// # Errors
    ///
    /// When there is no library, no driver, no such device, when it lacks something or cannot be opened.
    pub fn open(options: Options) -> Result<Vulkan> {
        let api = Api::load(options.validation)?;
        let adapter = adapter::find(&api, options.ordinal)?;
        let core = Arc::new(Core::open(api, adapter, &options)?);
        let shared = Shared {
            stream: Mutex::new(Stream::new(Arc::clone(&core), options.patience)?),
            pipelines: Mutex::new(Pipelines::new(Arc::clone(&core))?),
            memory: Mutex::new(Memory::new(Arc::clone(&core), options.memory_bytes)),
            core,
        };
        Ok(Vulkan(Arc::new(shared)))
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Driver for Vulkan {
    type Buffer = Buffer;
    type Recording = Recording;

    fn name(&self) -> &'static str {
        NAME
    }

    fn device(&self) -> String {
        self.0.core.adapter.name.clone()
    }

    fn limits(&self) -> Limits {
        Limits { buffer_bytes: self.0.core.buffer_bytes, ..self.0.core.adapter.limits }
    }

    fn outputs(&self, rows: u32) -> usize {
        pipelines::outputs(rows) as usize * WARPS
    }

    fn memory(&self) -> Result<DeviceMemory> {
        Ok(locked(&self.0.memory).state())
    }

    fn allocate(&self, bytes: u64, purpose: &str) -> Result<Buffer> {
        let most = self.0.core.buffer_bytes;
        assert!(bytes <= most, "{bytes} bytes for {purpose}, at most {most} are in one buffer");
        let buffer = |part| Buffer { held: Arc::new(Held { shared: Arc::clone(&self.0), part }), bytes };
        if let Some(part) = locked(&self.0.memory).take(bytes, purpose)? {
            return Ok(buffer(part));
        }
        // What is kept, or waits for the device, may be enough.
        locked(&self.0.memory).retire(0);
        locked(&self.0.stream).wait()?;
        let mut memory = locked(&self.0.memory);
        memory.collect();
        match memory.take(bytes, purpose)? {
            Some(part) => Ok(buffer(part)),
            None => Err(memory.exhausted(bytes, purpose)),
        }
    }

    fn bytes(&self, buffer: &Buffer) -> u64 {
        buffer.bytes
    }

    fn write(&self, to: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        to.holds(offset, bytes.len());
        locked(&self.0.stream).write(to.held.part, offset, bytes)
    }

    fn read(&self, from: &Buffer, offset: u64, bytes: &mut [u8]) -> Result<()> {
        from.holds(offset, bytes.len());
        locked(&self.0.stream).read(from.held.part, offset, bytes)
    }

    fn launch(&self, launch: &Launch<'_, Buffer>) -> Result<()> {
        let Launch { kernel, groups, buffers, constants, .. } = *launch;
        assert_eq!(buffers.len(), kernel.name.buffers(), "buffers of {}", kernel.function());
        assert!(constants.len() <= 32, "{} constants of {}", constants.len(), kernel.function());
        let most = self.limits().groups;
        let fits = groups.iter().zip(most).all(|(&groups, most)| (1..=most).contains(&groups));
        assert!(fits, "{groups:?} groups of {}, at most {most:?}", kernel.function());
        let ready = locked(&self.0.pipelines).get(kernel)?;
        let held: Vec<&Arc<Held>> = buffers.iter().map(|buffer| &buffer.held).collect();
        locked(&self.0.stream).launch(kernel, ready, groups, &held, constants)
    }

    fn has(&self, kernel: Kernel) -> bool {
        !kernel.name.is_for_bricks() && (self.0.core.matrices.is_some() || !kernel.name.is_for_halves())
    }

    fn resident(&self, kernel: Kernel, _: u32) -> Result<u32> {
        unreachable!("{} shares its work among any number of groups: no kernel of Vulkan does", kernel.function())
    }

    fn wait(&self) -> Result<()> {
        locked(&self.0.stream).wait()
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Recording> {
        locked(&self.0.stream).start_recording()?;
        let worked = work();
        let recorded = locked(&self.0.stream).end_recording();
        worked.and(recorded).map(|recorded| Recording { recorded, shared: Arc::clone(&self.0) })
    }

    fn replay(&self, recording: &Recording) -> Result<()> {
        assert!(Arc::ptr_eq(&self.0, &recording.shared), "a recording of another device");
        locked(&self.0.stream).replay(&recording.recorded)
    }

    fn timed(&self, recording: &Recording, times: u32) -> Result<Elapsed> {
        assert!(Arc::ptr_eq(&self.0, &recording.shared), "a recording of another device");
        locked(&self.0.stream).timed(&recording.recorded, times)
    }
}

impl Buffer {
    fn holds(&self, offset: u64, bytes: usize) {
        let end = offset.checked_add(bytes as u64);
        assert!(
            offset.is_multiple_of(4) && bytes.is_multiple_of(4) && end.is_some_and(|end| end <= self.held.part.bytes),
            "{bytes} bytes at {offset} of a buffer of {}",
            self.held.part.bytes
        );
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        locked(&self.shared.memory).give(self.part);
    }
}
