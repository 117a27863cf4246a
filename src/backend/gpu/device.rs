//! A device with what every backend on it needs: a pool of buffers, counted launches, faults on purpose.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::driver::{Driver, Elapsed, Launch};
use super::kernels::{Kernel, THREADS};
use crate::error::{Fault, FaultKind, Place, Result};

/// A fault that is made on purpose, to see that it is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Injection {
    /// Number of the launch, from 1: counted from where the device is armed.
    pub launch: u64,
    /// What is wrong with it.
    pub kind: InjectionKind,
}

/// What is wrong with a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum InjectionKind {
    /// It fails.
    Launch,
    /// It gives wrong numbers; a launch that gives no numbers leaves it to the next.
    Numbers,
}

/// Buffers that nobody uses, by their bytes.
type Pool<D> = BTreeMap<u64, Vec<<D as Driver>::Buffer>>;

/// A device through one API.
#[derive(Debug)]
pub struct Device<D: Driver> {
    driver: D,
    pool: Mutex<Pool<D>>,
    launches: Arc<Launches>,
    /// Bytes that were taken, less what the pool gave back.
    allocated: AtomicU64,
    /// Nanoseconds of waiting for what was read back.
    waited: AtomicU64,
    /// Whether launches are recorded: what the pool gives then is theirs.
    recording: AtomicBool,
}

/// Launches of a device, or of several that compute one model, and the fault on purpose among them.
#[derive(Debug)]
struct Launches {
    count: AtomicU64,
    injection: Option<Injection>,
    /// Launches before those that the fault on purpose is counted among; none are while this is the largest number.
    armed: AtomicU64,
    /// The launch that was wrong on purpose, and its kernel.
    injected: Mutex<Option<(u64, String)>>,
}

/// A buffer of the pool, to which it goes back.
#[derive(Debug)]
pub struct Pooled<D: Driver> {
    device: Arc<Device<D>>,
    bytes: u64,
    /// `None` only while it is dropped.
    buffer: Option<D::Buffer>,
}

impl<D: Driver> Pooled<D> {
    /// The buffer itself.
    pub fn buffer(&self) -> &D::Buffer {
        self.buffer.as_ref().expect("a buffer until it is dropped")
    }
}

impl<D: Driver> Drop for Pooled<D> {
    fn drop(&mut self) {
        // What was started before goes before what the next owner starts: work is done in order.
        if let Some(buffer) = self.buffer.take() {
            self.device.pool().entry(self.bytes).or_default().push(buffer);
        }
    }
}

/// Launches that can be done again and again, with the buffers that they leave their results in.
#[derive(Debug)]
pub struct Recorded<D: Driver> {
    // Dropped first: it uses the buffers.
    recording: D::Recording,
    launches: u64,
    _own: Pool<D>,
}

impl<D: Driver> Recorded<D> {
    /// Launches that are done each time.
    pub fn launches(&self) -> u64 {
        self.launches
    }
}

/// Bytes that the kernels of a launch read and write at most of wrong numbers.
const WRONG_BYTES: usize = 1 << 16;

impl<D: Driver> Device<D> {
    /// A device, with a fault on purpose.
    pub fn new(driver: D, injection: Option<Injection>) -> Arc<Device<D>> {
        let launches = Launches {
            count: AtomicU64::new(0),
            injection,
            armed: AtomicU64::new(u64::MAX),
            injected: Mutex::default(),
        };
        Device::counted(driver, Arc::new(launches))
    }

    /// A device beside others, whose launches are counted together.
    pub fn beside(driver: D, others: &Device<D>) -> Arc<Device<D>> {
        Device::counted(driver, others.launches.clone())
    }

    fn counted(driver: D, launches: Arc<Launches>) -> Arc<Device<D>> {
        Arc::new(Device {
            driver,
            pool: Mutex::default(),
            launches,
            allocated: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            recording: AtomicBool::new(false),
        })
    }

    /// Bytes of memory that were taken for weights and activations, less what was given back because there was too little.
    pub fn allocated(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// The API.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// Launches so far.
    pub fn launches(&self) -> u64 {
        self.launches.count.load(Ordering::Relaxed)
    }

    /// Time of waiting for what was read back, so far.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }

    /// Lets launches count from here on for the fault on purpose: what is computed from here on is looked at.
    pub fn arm(&self) {
        self.launches.armed.store(self.launches(), Ordering::Relaxed);
    }

    /// Launches so far, since it was armed.
    pub fn armed_launches(&self) -> u64 {
        self.launches().saturating_sub(self.launches.armed.load(Ordering::Relaxed))
    }

    /// The fault on purpose, if it has happened: number and kernel of the launch.
    pub fn injected(&self) -> Option<(u64, String)> {
        self.launches.injected.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    fn made(&self, launch: u64, kernel: Kernel) {
        let mut injected = self.launches.injected.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *injected = Some((launch, kernel.function()));
    }

    fn pool(&self) -> MutexGuard<'_, Pool<D>> {
        self.pool.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A buffer for activations; what it holds is not defined.
    pub fn scratch(self: &Arc<Self>, bytes: u64) -> Result<Pooled<D>> {
        let bytes = size_class(bytes);
        let pooled = self.pool().get_mut(&bytes).and_then(Vec::pop);
        let buffer = match pooled {
            Some(buffer) => buffer,
            None => self.allocate(bytes, "activations")?,
        };
        Ok(Pooled { device: self.clone(), bytes, buffer: Some(buffer) })
    }

    /// The same for so many 4-byte values.
    pub fn values(self: &Arc<Self>, count: usize) -> Result<Pooled<D>> {
        self.scratch(4 * count as u64)
    }

    /// A buffer with words in it.
    pub fn words(self: &Arc<Self>, words: &[u32]) -> Result<Pooled<D>> {
        let pooled = self.values(words.len())?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.driver.write(pooled.buffer(), 0, &bytes)?;
        Ok(pooled)
    }

    /// A buffer with values in it.
    pub fn floats(self: &Arc<Self>, values: &[f32]) -> Result<Pooled<D>> {
        let words: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
        self.words(&words)
    }

    /// The first `count` words of a buffer.
    pub fn read_words(&self, buffer: &D::Buffer, count: usize) -> Result<Vec<u32>> {
        let mut bytes = vec![0; 4 * count];
        let started = Instant::now();
        self.driver.read(buffer, 0, &mut bytes)?;
        self.waited.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect())
    }

    /// Memory of its own. Where the device has none left, that of the pool is given back first.
    pub fn allocate(&self, bytes: u64, purpose: &str) -> Result<D::Buffer> {
        let limit = self.driver.limits().buffer_bytes;
        if bytes > limit {
            let fault = FaultKind::GpuBuffer { bytes, limit, purpose: purpose.into() };
            return Err(Fault::new(Place::default(), fault));
        }
        let mut taken = self.driver.allocate(bytes.max(4), purpose);
        if taken.is_err() && !self.pool().is_empty() && !self.recording.load(Ordering::Relaxed) {
            self.driver.wait()?;
            let pooled = std::mem::take(&mut *self.pool());
            let given_back = pooled.iter().map(|(bytes, buffers)| bytes * buffers.len() as u64).sum();
            self.allocated.fetch_sub(given_back, Ordering::Relaxed);
            drop(pooled);
            taken = self.driver.allocate(bytes.max(4), purpose);
        }
        self.allocated.fetch_add(taken.as_ref().map_or(0, |buffer| self.driver.bytes(buffer)), Ordering::Relaxed);
        taken
    }

    /// Starts a kernel; no groups are no work.
    pub fn launch(&self, kernel: Kernel, groups: [usize; 3], buffers: &[&D::Buffer], constants: &[u32]) -> Result<()> {
        self.launch_with(kernel, groups, buffers, constants, 0)
    }

    /// The same, with so many bytes of shared memory that the kernel asks for.
    pub fn launch_with(
        &self,
        kernel: Kernel,
        groups: [usize; 3],
        buffers: &[&D::Buffer],
        constants: &[u32],
        shared_bytes: u32,
    ) -> Result<()> {
        assert_eq!(buffers.len(), kernel.name.buffers(), "buffers of {}", kernel.function());
        if groups.contains(&0) {
            return Ok(());
        }
        let limits = self.driver.limits().groups;
        let groups = groups.map(|groups| u32::try_from(groups).unwrap_or(u32::MAX));
        for (&found, limit) in groups.iter().zip(limits) {
            if found > limit {
                let fault = FaultKind::GpuGroups { kernel: kernel.function(), found, limit };
                return Err(Fault::new(Place::default(), fault));
            }
        }
        let all = self.launches.count.fetch_add(1, Ordering::Relaxed) + 1;
        let number = all.saturating_sub(self.launches.armed.load(Ordering::Relaxed));
        let due = self.launches.injection.filter(|injection| number >= injection.launch && self.injected().is_none());
        if due.is_some_and(|injection| injection.kind == InjectionKind::Launch) {
            self.made(number, kernel);
            let fault = FaultKind::GpuInjected { kernel: kernel.function(), launch: number };
            return Err(Fault::new(Place::default(), fault));
        }
        self.driver.launch(&Launch { kernel, groups, buffers, constants, shared_bytes })?;
        match kernel.name.output() {
            Some(output) if due.is_some() => {
                self.made(number, kernel);
                self.spoil(buffers[output])
            }
            _ => Ok(()),
        }
    }

    /// Calls `work` and records its launches, with buffers of the pool that nobody else gets: [`Driver::record`]. What `work`
    /// leaves of them goes with the recording; what it gives away, and rows that were there before, have to be kept as long as
    /// it is replayed, or others get them. With a fault on purpose launches
    /// are looked at one by one, and none is recorded: that panics.
    pub fn record(&self, mut work: impl FnMut() -> Result<()>) -> Result<Recorded<D>> {
        assert!(self.launches.injection.is_none(), "launches with a fault on purpose are not recorded");
        let others = std::mem::take(&mut *self.pool());
        self.recording.store(true, Ordering::Relaxed);
        let before = self.launches();
        let recording = self.driver.record(&mut work);
        let launches = self.launches() - before;
        self.launches.count.fetch_sub(launches, Ordering::Relaxed);
        self.recording.store(false, Ordering::Relaxed);
        let own = std::mem::replace(&mut *self.pool(), others);
        Ok(Recorded { recording: recording?, launches, _own: own })
    }

    /// Does what was recorded once more.
    pub fn replay(&self, recorded: &Recorded<D>) -> Result<()> {
        self.launches.count.fetch_add(recorded.launches, Ordering::Relaxed);
        self.driver.replay(&recorded.recording)
    }

    /// Does what was recorded so many times: how long the device took for all of them.
    pub fn timed(&self, recorded: &Recorded<D>, times: u32) -> Result<Elapsed> {
        self.launches.count.fetch_add(recorded.launches * u64::from(times), Ordering::Relaxed);
        self.driver.timed(&recorded.recording, times)
    }

    /// Makes the numbers of a buffer wrong.
    fn spoil(&self, buffer: &D::Buffer) -> Result<()> {
        let bytes = WRONG_BYTES.min(self.driver.bytes(buffer) as usize) / 4 * 4;
        let mut values = vec![0; bytes];
        self.driver.read(buffer, 0, &mut values)?;
        for value in values.as_chunks_mut().0 {
            *value = (0.25 - 1.5 * f32::from_le_bytes(*value)).to_le_bytes();
        }
        self.driver.write(buffer, 0, &values)
    }
}

/// Groups of a kernel whose threads take one value each of `count`, and go on if there are more.
pub fn groups_of(count: usize) -> [usize; 3] {
    [count.div_ceil(THREADS as usize).min(MOST_GROUPS), 1, 1]
}

/// Groups that every device takes in any dimension.
const MOST_GROUPS: usize = 65_535;

/// The bytes that the pool gives for so many: a power of two or a quarter, a half or three quarters more.
fn size_class(bytes: u64) -> u64 {
    let bytes = bytes.max(256);
    let step = bytes.next_power_of_two() / 8;
    bytes.next_multiple_of(step.max(64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_a_quarter_at_most() {
        for bytes in (1..5000).chain([1 << 20, (1 << 20) + 1, 3 << 28]) {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(4), "{bytes} {class}");
            assert!(bytes < 256 || class <= bytes + bytes / 4, "{bytes} {class}");
            assert_eq!(size_class(class), class);
        }
    }
}
