//! Which devices this machine has.

use super::{Device, cuda, vulkan};
use crate::error::Fault;

/// The devices that can compute, and why others cannot.
#[derive(Debug, Default)]
pub struct Present {
    /// The CPU, then the GPUs of each API in its order.
    pub devices: Vec<Device>,
    /// What is not used, by its name in options, with the reason.
    pub unused: Vec<(String, Fault)>,
}

impl Present {
    /// Asks every API. Software that stands in for a GPU is used where Vulkan shows nothing else.
    pub fn find() -> Present {
        let mut present = Present { devices: vec![Device::Cpu], unused: Vec::new() };
        match cuda::list() {
            Ok(found) => found.iter().for_each(|found| present.add(Device::Cuda(found.ordinal), found.usable())),
            Err(fault) => present.unused.push((cuda::NAME.to_owned(), fault)),
        }
        match vulkan::list() {
            Ok(found) if found.is_empty() => present.unused.push((vulkan::NAME.to_owned(), vulkan::none())),
            Ok(found) => {
                let real = found.iter().any(|found| found.missing.is_none() && found.kind != vulkan::Kind::Software);
                let wanted = |found: &&vulkan::Adapter| !real || found.kind != vulkan::Kind::Software;
                found
                    .iter()
                    .filter(wanted)
                    .for_each(|found| present.add(Device::Vulkan(found.ordinal), found.usable()));
            }
            Err(fault) => present.unused.push((vulkan::NAME.to_owned(), fault)),
        }
        present
    }

    fn add(&mut self, device: Device, usable: Result<(), Fault>) {
        match usable {
            Ok(()) => self.devices.push(device),
            Err(fault) => self.unused.push((device.to_string(), fault)),
        }
    }
}
