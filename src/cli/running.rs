//! What every command that runs a model is told: where, how, with how many threads, and in how much memory.

use clap::{ArgAction, Args};

use super::progress::duration;
use super::size;
use crate::backend::{Api, Device, Mode, Present};
use crate::error::{Fault, FaultKind, Place, Result};
use crate::report::DeviceExperts;

/// Flags of `generate`, `score` and `verify` alike.
#[derive(Debug, Args)]
pub(super) struct Running {
    /// Where to compute: reference, cpu, cuda[:N[,N…]|:all] or vulkan[:N[,N…]|:all]; several numbers are one model on several
    /// GPUs [default: cpu]
    #[arg(long, value_name = "D", action = ArgAction::Set, num_args = 1)]
    device: Vec<String>,
    /// How sums are formed: exact, or fast, on GPUs alone, with rounded activations
    #[arg(long, value_name = "MODE", default_value = "exact")]
    mode: String,
    /// Threads; 0 for one per core [default: 0]
    #[arg(long, value_name = "N", value_parser = super::threads, default_value_t = 0, hide_default_value = true)]
    pub(super) threads: usize,
    /// Memory for the model, for one 16G [default: what is available]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(super) memory: Option<u64>,
    /// Memory of the GPU for the model, for one 80G; routed experts for which it has no room come from memory and disk
    /// [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(super) device_memory: Option<u64>,
}

impl Running {
    /// The devices that are asked for, in order; none where nobody asks.
    pub(super) fn devices(&self) -> Result<Vec<Device>> {
        self.device.iter().map(|text| device(text).map(|(device, _)| device)).collect()
    }

    /// The devices that `all` leaves out, with the reason.
    pub(super) fn unused(&self) -> Result<Vec<(String, String)>> {
        let unused: Vec<_> = self.device.iter().map(|text| Ok(device(text)?.1)).collect::<Result<_>>()?;
        Ok(unused.concat())
    }

    /// Refuses to bound the memory of a GPU where none is asked for.
    pub(super) fn check_device_memory(&self, devices: &[Device]) -> Result<()> {
        if self.device_memory.is_some() && !devices.iter().any(|device| device.is_gpu()) {
            let (flag, needs) = ("--device-memory", "--device cuda or vulkan");
            return Err(Fault::new(Place::default(), FaultKind::FlagNeeds { flag, needs }));
        }
        Ok(())
    }

    /// The mode; one that does not exist is refused.
    pub(super) fn mode(&self) -> Result<Mode> {
        self.mode.parse().map_err(|_| {
            let (flag, expected) = ("--mode", "exact or fast");
            Fault::new(Place::default(), FaultKind::FlagValue { flag, expected, found: self.mode.clone() })
        })
    }
}

/// What keeping routed experts on a GPU took, in a line; nothing where all of them are there.
pub(super) fn device_experts(experts: Option<DeviceExperts>) -> String {
    let Some(experts) = experts else { return String::new() };
    let DeviceExperts { requests, hits, bytes_uploaded, budget_bytes, wait_seconds, .. } = experts;
    let (uploaded, room, waited) = (size::human(bytes_uploaded), size::human(budget_bytes), duration(wait_seconds));
    format!("experts on the GPU: {hits} of {requests} there, in {room}; {uploaded} uploaded, {waited} of waiting\n")
}

/// A device, and what is left out of it.
fn device(text: &str) -> Result<(Device, Vec<(String, String)>)> {
    match text.split_once(':').map(|(api, number)| (api.parse::<Api>(), number)) {
        Some((Ok(api), "all")) => Present::all_of(api),
        _ => Ok((Device::parse("--device", text)?, Vec::new())),
    }
}
