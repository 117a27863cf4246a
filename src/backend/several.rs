//! Several GPUs of one API, by their numbers.

use std::fmt;

use super::Device;
use crate::error::{Fault, FaultKind, Place, Result};
use crate::limits::MAX_GPUS;

/// An API of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::EnumString, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Api {
    /// NVIDIA's.
    Cuda,
    /// Any GPU's.
    Vulkan,
}

/// At least two GPUs of one API, in the order in which the layers go over them. A number that stands there twice is one
/// device that is opened twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Several {
    api: Api,
    count: usize,
    numbers: [u16; MAX_GPUS],
}

impl Several {
    /// `None` unless there are two to [`MAX_GPUS`] numbers below 65,536.
    pub fn new(api: Api, numbers: &[usize]) -> Option<Several> {
        let mut several = Several { api, count: numbers.len(), numbers: [0; MAX_GPUS] };
        if numbers.len() < 2 || numbers.len() > MAX_GPUS {
            return None;
        }
        for (to, &number) in several.numbers.iter_mut().zip(numbers) {
            *to = u16::try_from(number).ok()?;
        }
        Some(several)
    }

    /// Reads `cuda:0,1`, which stands at `flag`.
    pub(super) fn parse(flag: &'static str, text: &str) -> Result<Several> {
        let refused = |expected| {
            let found = text.to_owned();
            Err(Fault::new(Place::default(), FaultKind::FlagValue { flag, expected, found }))
        };
        let (api, numbers) = text.split_once(':').unwrap_or((text, ""));
        let Ok(api) = api.parse::<Api>() else { return refused(Device::EXPECTED) };
        if numbers.contains(':') || numbers.contains("cpu") || numbers.contains("reference") {
            return refused("GPUs of one API for one model, as in cuda:0,1");
        }
        let parsed: Option<Vec<usize>> = numbers.split(',').map(|number| number.parse().ok()).collect();
        match parsed.and_then(|numbers| Several::new(api, &numbers)) {
            Some(several) => Ok(several),
            None => refused("numbers of two to 16 GPUs, as in cuda:0,1"),
        }
    }

    /// The API.
    pub fn api(&self) -> Api {
        self.api
    }

    /// Numbers of the devices, in order.
    pub fn numbers(&self) -> impl Iterator<Item = usize> {
        self.numbers.into_iter().take(self.count).map(usize::from)
    }
}

impl fmt::Display for Several {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.numbers().map(|number| number.to_string()).collect();
        write!(f, "{}:{}", self.api, numbers.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_numbers_are_read() {
        for text in ["cuda:0,1", "vulkan:0,0", "cuda:3,1,2,0"] {
            let device = Device::parse("--device", text).unwrap();
            assert!(matches!(device, Device::Several(_)) && device.is_gpu());
            assert_eq!(device.to_string(), text);
        }
        let most = format!("cuda:{}", ["0"; MAX_GPUS].join(","));
        assert!(Device::parse("--device", &most).is_ok());
        let said = |text: &str| Device::parse("--device", text).unwrap_err().to_string();
        for text in ["cuda:0,", "cuda:,0", "cuda:0,-1", "cuda:0,70000", "cuda:0, 1", &format!("{most},0")] {
            assert!(said(text).contains("numbers of two to 16 GPUs"), "{}", said(text));
        }
        for text in ["cuda:0,vulkan:0", "cuda:0,cpu"] {
            assert!(said(text).contains("GPUs of one API for one model"), "{}", said(text));
        }
        for text in ["cpu:0,1", "cpu,cuda", "cuda,cuda:1", "metal:0,1"] {
            assert!(Device::parse("--device", text).is_err(), "{text}");
        }
    }
}
