//! What every command that runs a model is told: where, how, with how many threads, and in how much memory.

use clap::{ArgAction, Args};

use super::{not_available, size};
use crate::backend::{Api, Device, Present};
use crate::error::{Fault, FaultKind, Place, Result};

/// Flags of `generate`, `score` and `verify` alike.
#[derive(Debug, Args)]
pub(super) struct Running {
    /// Where to compute: reference, cpu, cuda[:N[,N…]|:all] or vulkan[:N[,N…]|:all]; several numbers are one model on several
    /// GPUs [default: cpu]
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
}

impl Running {
    /// Refuses what is planned but not there.
    pub(super) fn check_available(&self) -> Result<()> {
        if self.mode == "fast" { Err(not_available("--mode fast")) } else { Ok(()) }
    }

    /// The devices that are asked for, in order; none where nobody asks.
    pub(super) fn devices(&self) -> Result<Vec<Device>> {
        self.device.iter().map(|text| device(text).map(|(device, _)| device)).collect()
    }

    /// The devices that `all` leaves out, with the reason.
    pub(super) fn unused(&self) -> Result<Vec<(String, String)>> {
        let unused: Vec<_> = self.device.iter().map(|text| Ok(device(text)?.1)).collect::<Result<_>>()?;
        Ok(unused.concat())
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

/// A device, and what is left out of it.
fn device(text: &str) -> Result<(Device, Vec<(String, String)>)> {
    match text.split_once(':').map(|(api, number)| (api.parse::<Api>(), number)) {
        Some((Ok(api), "all")) => Present::all_of(api),
        _ => Ok((Device::parse("--device", text)?, Vec::new())),
    }
}
