//! What the GPU backend asks of an API: memory, copies, launches, all in the order in which they are asked for.

use std::fmt::Debug;

use super::kernels::Kernel;
use crate::error::Result;

/// A GPU through one API.
///
/// Writes, launches and reads happen as if one after the other, in the order of the calls: a launch sees what every launch
/// before it wrote. Uploads alone have an order of their own. None of them returns before its arguments may be changed or dropped; a buffer that is dropped while a
/// launch still uses it is given back after that launch.
pub trait Driver: Debug + Send + Sync {
    /// Memory of the device.
    type Buffer: Debug + Send + Sync;
    /// Launches that were recorded, to be done as often as is wanted.
    type Recording: Debug + Send + Sync;

    /// The API's name in options and reports: `cuda`, `vulkan`.
    fn name(&self) -> &'static str;
    /// The device's own name, with the version of its driver.
    fn device(&self) -> String;
    /// What the device can do at most.
    fn limits(&self) -> Limits;
    /// Outputs that a group of threads takes in products, in tiles of so many rows of x.
    fn outputs(&self, rows: u32) -> usize;
    /// Memory that is free on the device and that it has, in bytes, as far as the API tells.
    fn memory(&self) -> Result<DeviceMemory>;
    /// Memory of at least `bytes` bytes, at most [`Limits::buffer_bytes`], aligned to 256. What it holds is not defined.
    /// `purpose` is for messages.
    fn allocate(&self, bytes: u64, purpose: &str) -> Result<Self::Buffer>;
    /// Bytes of a buffer: as many as were asked for.
    fn bytes(&self, buffer: &Self::Buffer) -> u64;
    /// Copies bytes to the device; `offset` and their number are multiples of 4.
    fn write(&self, to: &Self::Buffer, offset: u64, bytes: &[u8]) -> Result<()>;
    /// Copies bytes to the device as [`Driver::write`] does, but beside what is computed where the device can: nothing that was
    /// started since the last [`Driver::read`] or [`Driver::uploads_after_launches`] may use the place, and launches see the
    /// bytes after [`Driver::launches_after_uploads`] alone.
    fn upload(&self, to: &Self::Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        self.write(to, offset, bytes)
    }
    /// Uploads from here on come after every launch before.
    fn uploads_after_launches(&self) -> Result<()> {
        Ok(())
    }
    /// Launches from here on come after every upload before.
    fn launches_after_uploads(&self) -> Result<()> {
        Ok(())
    }
    /// Copies bytes back, when everything before has been done; `offset` and their number are multiples of 4.
    fn read(&self, from: &Self::Buffer, offset: u64, bytes: &mut [u8]) -> Result<()>;
    /// Whether the device can run a kernel: some want what not every device has.
    fn has(&self, kernel: Kernel) -> bool;
    /// Groups of a kernel that the device runs at the same time, each with so many bytes of shared memory of its own choice.
    fn resident(&self, kernel: Kernel, shared_bytes: u32) -> Result<u32>;
    /// Makes copies from another device of this API as direct as they can be.
    fn meet(&self, _other: &Self) -> Result<Route> {
        Ok(Route::Host)
    }
    /// Copies the first bytes of a buffer of another device of this API, whose number is a multiple of 4. The copy comes after
    /// all that was asked of either device before, and before all that is asked of either later.
    fn copy_from(&self, to: &Self::Buffer, other: &Self, from: &Self::Buffer, bytes: u64) -> Result<()> {
        let mut on_host = vec![0; bytes as usize];
        other.read(from, 0, &mut on_host)?;
        self.write(to, 0, &on_host)
    }
    /// Starts a kernel.
    fn launch(&self, launch: &Launch<'_, Self::Buffer>) -> Result<()>;
    /// Waits until everything has been done.
    fn wait(&self) -> Result<()>;

    /// Calls `work` and records its launches instead of doing them. Memory may be taken meanwhile, but nothing is copied or
    /// waited for, and nobody else uses the device: that panics. The recording keeps the memory of its launches.
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Self::Recording>;
    /// Does what was recorded once more, after everything that was asked for before.
    fn replay(&self, recording: &Self::Recording) -> Result<()>;
    /// Waits until everything has been done, then does what was recorded so many times, and tells how long that took.
    fn timed(&self, recording: &Self::Recording, times: u32) -> Result<Elapsed>;
}

/// How long the device took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Elapsed {
    /// From the beginning of the first launch to the end of the last.
    pub seconds: f64,
    /// Who measured it.
    pub clock: Clock,
}

/// Who measures how long something takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Clock {
    /// The device, between two marks of its own.
    Device,
    /// The host, from handing over to the end of waiting: the device has no clock.
    Host,
}

/// How bytes come from another device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Route {
    /// Through memory of the host, by this program.
    Host,
    /// Through memory of the host, by the driver.
    Driver,
    /// From one device to the other.
    Peer,
    /// It is the same device.
    SameDevice,
}

/// What a device can do at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one buffer that a kernel can see.
    pub buffer_bytes: u64,
    /// Groups of a launch in each dimension.
    pub groups: [u32; 3],
    /// Bytes of shared memory of a group whose size is chosen by the launch; 0 where the API has none.
    pub shared_bytes: u32,
}

/// Memory of a device in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Not in use.
    pub free: u64,
    /// All of it.
    pub total: u64,
}

/// One launch of a kernel.
#[derive(Debug)]
pub struct Launch<'a, B> {
    /// Which.
    pub kernel: Kernel,
    /// Groups of threads in x, y and z; none is 0.
    pub groups: [u32; 3],
    /// The kernel's buffers, in its order.
    pub buffers: &'a [&'a B],
    /// The kernel's constants, in its order: u32 values, and f32 values by their bits. At most 32.
    pub constants: &'a [u32],
    /// Bytes of shared memory that the kernel asks for, beside what it always has.
    pub shared_bytes: u32,
}

/// The methods of a driver for tests that has another as `driver`, and differs from it in limits and in what it allocates alone.
#[cfg(test)]
macro_rules! forward_to_driver {
    () => {
        type Buffer = D::Buffer;
        type Recording = D::Recording;

        fn name(&self) -> &'static str {
            self.driver.name()
        }

        fn device(&self) -> String {
            self.driver.device()
        }

        fn memory(&self) -> Result<DeviceMemory> {
            self.driver.memory()
        }

        fn bytes(&self, buffer: &D::Buffer) -> u64 {
            self.driver.bytes(buffer)
        }

        fn write(&self, to: &D::Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
            self.driver.write(to, offset, bytes)
        }

        fn upload(&self, to: &D::Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
            self.driver.upload(to, offset, bytes)
        }

        fn uploads_after_launches(&self) -> Result<()> {
            self.driver.uploads_after_launches()
        }

        fn launches_after_uploads(&self) -> Result<()> {
            self.driver.launches_after_uploads()
        }

        fn read(&self, from: &D::Buffer, offset: u64, bytes: &mut [u8]) -> Result<()> {
            self.driver.read(from, offset, bytes)
        }

        fn outputs(&self, rows: u32) -> usize {
            self.driver.outputs(rows)
        }

        fn has(&self, kernel: Kernel) -> bool {
            self.driver.has(kernel)
        }

        fn resident(&self, kernel: Kernel, shared_bytes: u32) -> Result<u32> {
            self.driver.resident(kernel, shared_bytes)
        }

        fn launch(&self, launch: &Launch<'_, D::Buffer>) -> Result<()> {
            self.driver.launch(launch)
        }

        fn wait(&self) -> Result<()> {
            self.driver.wait()
        }

        fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<D::Recording> {
            self.driver.record(work)
        }

        fn replay(&self, recording: &D::Recording) -> Result<()> {
            self.driver.replay(recording)
        }

        fn timed(&self, recording: &D::Recording, times: u32) -> Result<Elapsed> {
            self.driver.timed(recording, times)
        }
    };
}
#[cfg(test)]
pub(in crate::backend::gpu) use forward_to_driver;
