//! Which devices this machine has.

use super::{Api, Device, Several, cuda, vulkan};
use crate::error::{Fault, Result};
use crate::limits::MAX_GPUS;

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

    /// All GPUs of an API that can be used, for one model: one device, and those left out with the reason.
    ///
    /// # Errors
    ///
    /// When there is none, with the reason.
    pub fn all_of(api: Api) -> Result<(Device, Vec<(String, String)>)> {
        let found: Vec<(usize, Result<()>, bool)> = match api {
            Api::Cuda => cuda::list()?.iter().map(|found| (found.ordinal, found.usable(), false)).collect(),
            Api::Vulkan => {
                let software = |found: &vulkan::Adapter| found.kind == vulkan::Kind::Software;
                vulkan::list()?.iter().map(|found| (found.ordinal, found.usable(), software(found))).collect()
            }
        };
        let real = found.iter().any(|(_, usable, software)| usable.is_ok() && !software);
        let (mut numbers, mut unused, mut first) = (Vec::new(), Vec::new(), None);
        for (number, usable, software) in found {
            let mut leave_out = |reason| unused.push((format!("{api}:{number}"), reason));
            match usable {
                Ok(()) if software && real => leave_out("it is software, and there are GPUs".to_owned()),
                Ok(()) if numbers.len() == MAX_GPUS => leave_out(format!("{MAX_GPUS} GPUs compute one model at most")),
                Ok(()) => numbers.push(number),
                Err(fault) => {
                    leave_out(fault.to_string());
                    first.get_or_insert(fault);
                }
            }
        }
        let device = match (&*numbers, api) {
            ([], _) => return Err(first.unwrap_or_else(vulkan::none)),
            (&[number], Api::Cuda) => Device::Cuda(number),
            (&[number], Api::Vulkan) => Device::Vulkan(number),
            (numbers, _) => Device::Several(Several::new(api, numbers).expect("two or more, and not too many")),
        };
        Ok((device, unused))
    }

    fn add(&mut self, device: Device, usable: Result<(), Fault>) {
        match usable {
            Ok(()) => self.devices.push(device),
            Err(fault) => self.unused.push((device.to_string(), fault)),
        }
    }
}
