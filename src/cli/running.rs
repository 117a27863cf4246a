//! What every command that runs a model is told: where, how, with how many threads, and in how much memory.

use clap::{ArgAction, Args};

use super::progress::duration;
use super::{not_available, size};
use crate::backend::Device;
use crate::error::{Fault, FaultKind, Place, Result};
use crate::report::DeviceExperts;

/// Flags of `generate`, `score` and `verify` alike.
#[derive(Debug, Args)]
pub(super) struct Running {
    /// Where to compute: reference, cpu, cuda[:N] or vulkan[:N] [default: cpu]
    #[arg(long, value_name = "D", action = ArgAction::Set, num_args = 1)]
    device: Vec<String>,
    /// How sums are formed
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
    /// Refuses what is planned but not there.
    pub(super) fn check_available(&self) -> Result<()> {
        if self.mode == "fast" { Err(not_available("--mode fast")) } else { Ok(()) }
    }

    /// The devices that are asked for, in order; none where nobody asks.
    pub(super) fn devices(&self) -> Result<Vec<Device>> {
        self.device.iter().map(|text| Device::parse("--device", text)).collect()
    }

    /// Refuses to bound the memory of a GPU where none is asked for.
    pub(super) fn check_device_memory(&self, devices: &[Device]) -> Result<()> {
        if self.device_memory.is_some() && !devices.iter().any(|device| device.is_gpu()) {
            let (flag, needs) = ("--device-memory", "--device cuda or vulkan");
            return Err(Fault::new(Place::default(), FaultKind::FlagNeeds { flag, needs }));
        }
        Ok(())
    }

    /// Refuses a mode that does not exist.
    pub(super) fn check_mode(&self) -> Result<()> {
        match self.mode.as_str() {
            "exact" => Ok(()),
            other => {
                let (flag, expected) = ("--mode", "exact or fast");
                Err(Fault::new(Place::default(), FaultKind::FlagValue { flag, expected, found: other.to_owned() }))
            }
        }
    }
}

/// What keeping routed experts on a GPU took, in a line; nothing where all of them are there.
pub(super) fn device_experts(experts: Option<DeviceExperts>) -> String {
    let Some(experts) = experts else { return String::new() };
    let DeviceExperts { requests, hits, bytes_uploaded, budget_bytes, wait_seconds, .. } = experts;
    let (uploaded, room, waited) = (size::human(bytes_uploaded), size::human(budget_bytes), duration(wait_seconds));
    format!("experts on the GPU: {hits} of {requests} there, in {room}; {uploaded} uploaded, {waited} of waiting\n")
}
