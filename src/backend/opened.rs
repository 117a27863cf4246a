//! GPUs that are open for one model, whatever their API and however many: the one piece that everything that runs a model on
//! GPUs opens them with.

use super::cuda::{self, Cuda};
use super::gpu::driver::{DeviceMemory, Driver};
use super::gpu::kernels::{Coding, Kernel, Name};
use super::gpu::many::Many;
use super::gpu::placement::Spread;
use super::gpu::{Gpu, device::Injection};
use super::vulkan::{self, Vulkan};
use super::{Api, Backend, Device, Mode};
use crate::error::{Fault, FaultKind, Faults, Place, Result};

/// A backend on GPUs.
pub trait OnGpus: Backend {
    /// The fault on purpose, if it has happened: number and kernel of the launch.
    fn injected(&self) -> Option<(u64, String)>;
    /// Launches since the backend was armed.
    fn armed_launches(&self) -> u64;
}

impl<D: Driver> OnGpus for Gpu<D> {
    fn injected(&self) -> Option<(u64, String)> {
        self.gpu().injected()
    }

    fn armed_launches(&self) -> u64 {
        self.gpu().armed_launches()
    }
}

impl<D: Driver> OnGpus for Many<D> {
    fn injected(&self) -> Option<(u64, String)> {
        self.gpus()[0].injected()
    }

    fn armed_launches(&self) -> u64 {
        self.gpus()[0].armed_launches()
    }
}

/// What is done on GPUs.
pub trait Work {
    /// What comes of it.
    type Done;

    /// Does it. `another` opens the same GPUs once more, for another model, without a fault on purpose.
    fn on<B: OnGpus>(self, backend: &B, another: &dyn Fn(&Spread) -> Result<B>) -> Result<Self::Done, Faults>;
}

/// One GPU as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its own name.
    pub device: String,
    /// Its memory; of a GPU that was opened several times a share of what is free.
    pub memory: DeviceMemory,
}

/// GPUs that are open; no model is on them yet.
#[derive(Debug)]
pub struct Gpus {
    device: Device,
    mode: Mode,
    opened: Opened,
}

#[derive(Debug)]
enum Opened {
    Cuda(Vec<Gpu<Cuda>>),
    Vulkan(Vec<Gpu<Vulkan>>),
}

impl Gpus {
    /// Opens what `device` names, with a fault on purpose; a mode that it has no kernels for is refused by name.
    ///
    /// # Panics
    ///
    /// When it is no GPU.
    pub fn open(device: Device, mode: Mode, injection: Option<Injection>) -> Result<Gpus> {
        let opened = match device {
            Device::Reference | Device::Cpu => panic!("{device} is no GPU"),
            Device::Cuda(_) => Opened::Cuda(opened_cuda(device, injection)?),
            Device::Vulkan(_) => Opened::Vulkan(opened_vulkan(device, injection)?),
            Device::Several(several) => match several.api() {
                Api::Cuda => Opened::Cuda(opened_cuda(device, injection)?),
                Api::Vulkan => Opened::Vulkan(opened_vulkan(device, injection)?),
            },
        };
        match &opened {
            Opened::Cuda(gpus) => gpus.iter().try_for_each(|gpu| check(gpu, mode))?,
            Opened::Vulkan(gpus) => gpus.iter().try_for_each(|gpu| check(gpu, mode))?,
        }
        Ok(Gpus { device, mode, opened })
    }

    /// Each of them, in order.
    pub fn found(&self) -> Result<Vec<Found>> {
        let numbers = numbers(self.device);
        let times = |at: usize| numbers.iter().filter(|&&number| number == numbers[at]).count() as u64;
        match &self.opened {
            Opened::Cuda(gpus) => gpus.iter().enumerate().map(|(at, gpu)| found(gpu, times(at))).collect(),
            Opened::Vulkan(gpus) => gpus.iter().enumerate().map(|(at, gpu)| found(gpu, times(at))).collect(),
        }
    }

    /// Does something on a backend of them, for a model that is spread so.
    pub fn run<W: Work>(self, spread: &Spread, work: W) -> Result<W::Done, Faults> {
        let Gpus { device, mode, opened } = self;
        match opened {
            Opened::Cuda(gpus) => on(gpus, mode, spread, &|| opened_cuda(device, None), work),
            Opened::Vulkan(gpus) => on(gpus, mode, spread, &|| opened_vulkan(device, None), work),
        }
    }
}

/// Refuses a mode that a device has no kernels for; a GPU is opened for a moment to ask it.
pub fn check_mode(device: Device, mode: Mode) -> Result<()> {
    match (mode, device) {
        (Mode::Exact, _) => Ok(()),
        (Mode::Fast, Device::Reference | Device::Cpu) => Err(not_available(device.to_string())),
        (Mode::Fast, _) => Gpus::open(device, mode, None).map(drop),
    }
}

fn check<D: Driver>(gpu: &Gpu<D>, mode: Mode) -> Result<()> {
    // Kernels of all codings come together.
    let has = |name: Name| {
        let kernel = Kernel { name, coding: Some(Coding::Int8Row), rows: Some(name.tiles()[0]) };
        gpu.gpu().driver().has(kernel)
    };
    match mode {
        Mode::Fast if !has(Name::Fast) && !has(Name::MatmulHalves) => Err(not_available(gpu.device())),
        _ => Ok(()),
    }
}

fn not_available(device: String) -> Fault {
    Fault::new(Place::default(), FaultKind::ModeNotAvailable { mode: Mode::Fast.into(), device })
}

fn numbers(device: Device) -> Vec<usize> {
    match device {
        Device::Reference | Device::Cpu => Vec::new(),
        Device::Cuda(number) | Device::Vulkan(number) => vec![number],
        Device::Several(several) => several.numbers().collect(),
    }
}

fn opened_cuda(device: Device, injection: Option<Injection>) -> Result<Vec<Gpu<Cuda>>> {
    cuda::gpus(numbers(device).into_iter(), injection)
}

fn opened_vulkan(device: Device, injection: Option<Injection>) -> Result<Vec<Gpu<Vulkan>>> {
    vulkan::gpus(numbers(device).into_iter(), injection)
}

fn found<D: Driver>(gpu: &Gpu<D>, times: u64) -> Result<Found> {
    let DeviceMemory { free, total } = gpu.gpu().driver().memory()?;
    Ok(Found { device: gpu.device(), memory: DeviceMemory { free: free / times, total } })
}

fn on<D: Driver, W: Work>(
    gpus: Vec<Gpu<D>>,
    mode: Mode,
    spread: &Spread,
    open: &dyn Fn() -> Result<Vec<Gpu<D>>>,
    work: W,
) -> Result<W::Done, Faults> {
    let prepared = |gpus: Vec<Gpu<D>>, spread: &Spread| -> Vec<Gpu<D>> {
        assert_eq!(gpus.len(), spread.tiers.len(), "tiers of each GPU");
        gpus.into_iter().zip(&spread.tiers).map(|(gpu, tiers)| gpu.in_tiers(*tiers).in_mode(mode)).collect()
    };
    let one = |gpus: Vec<Gpu<D>>| gpus.into_iter().next().expect("a GPU at least");
    if gpus.len() == 1 {
        return work.on(&one(prepared(gpus, spread)), &|spread| Ok(one(prepared(open()?, spread))));
    }
    let many = |gpus, spread: &Spread| Many::new(prepared(gpus, spread), spread.placement.clone());
    work.on(&many(gpus, spread)?, &|spread| many(open()?, spread))
}
