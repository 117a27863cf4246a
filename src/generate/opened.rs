//! The device of a run, opened once it is certain that the model has room there.

use std::path::Path;

use super::{Options, Watch};
use crate::backend::cpu::Cpu;
use crate::backend::gpu::placement::Spread;
use crate::backend::reference::spare_rows;
use crate::backend::{Device, Gpus, check_mode};
use crate::config::{Config, IndexerType};
use crate::error::Result;
use crate::model::memory::{self, Allowed, Needs};
use crate::model::{CHUNK_ROWS, Loaded, check_memory, plain_bytes};

/// A device.
pub(super) enum Opened {
    Reference,
    Cpu(Cpu),
    /// GPUs, and how the model lies on them.
    Gpus(Gpus, Spread),
}

impl Opened {
    /// The device that was asked for; refused where the model with a text of so many positions has no room.
    pub(super) fn open(
        path: &Path,
        config: &Config,
        positions: u64,
        options: &Options,
        watch: &dyn Watch,
    ) -> Result<Opened> {
        let (device, mode, memory, loaded) = (options.device, options.mode, options.memory, options.loaded());
        Ok(match device {
            Device::Reference => {
                check_mode(device, mode)?;
                check_memory(path, needed_bytes(config, loaded, positions), memory)?;
                Opened::Reference
            }
            Device::Cpu => {
                check_mode(device, mode)?;
                Opened::Cpu(memory::cpu(path, config, loaded, positions, memory)?)
            }
            Device::Cuda(_) | Device::Vulkan(_) | Device::Several(_) => {
                let gpus = Gpus::open(device, mode, None)?;
                let positions = memory::gpu_positions(positions);
                let needs = [Needs::of(path, config, loaded, positions, CHUNK_ROWS as u64)];
                let spread =
                    memory::spread(&needs, &gpus, Allowed { memory, device: options.device_memory })?.swap_remove(0);
                spread.told().iter().for_each(|told| watch.plan(told));
                Opened::Gpus(gpus, spread)
            }
        })
    }
}

/// The memory that a run on the plain backend needs, in bytes, small things apart: the weights, and what is kept of each
/// position.
fn needed_bytes(config: &Config, loaded: Loaded, positions: u64) -> u64 {
    let drafting = config.mtp_layer().filter(|_| loaded == Loaded::Whole);
    let layers = config.num_hidden_layers + u64::from(drafting.is_some());
    let indexers = config.indexer_types.iter().filter(|&&kind| kind == IndexerType::Full).count() as u64;
    let values = layers * (config.kv_lora_rank + config.qk_rope_head_dim) + indexers * config.index_head_dim;
    let kept = positions.saturating_add(spare_rows(positions));
    plain_bytes(config, loaded).saturating_add(kept.saturating_mul(4 * values))
}
