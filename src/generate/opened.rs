//! The device of a run, opened once it is certain that the model has room there.

use std::path::Path;

use super::Options;
use crate::backend::cpu::Cpu;
use crate::backend::cuda::{self, Cuda};
use crate::backend::gpu::Gpu;
use crate::backend::gpu::driver::Driver;
use crate::backend::gpu::many::Many;
use crate::backend::reference::spare_rows;
use crate::backend::vulkan::{self, Vulkan};
use crate::backend::{Api, Device, Several};
use crate::config::{Config, IndexerType};
use crate::error::Result;
use crate::model::memory::{self, Needs};
use crate::model::{CHUNK_ROWS, check_memory, plain_bytes};

/// A device.
pub(super) enum Opened {
    Reference,
    Cpu(Cpu),
    Cuda(Gpu<Cuda>),
    Vulkan(Gpu<Vulkan>),
    ManyCuda(Many<Cuda>),
    ManyVulkan(Many<Vulkan>),
}

impl Opened {
    /// The device that was asked for; refused where the model with a text of so many positions has no room.
    pub(super) fn open(path: &Path, config: &Config, positions: u64, options: &Options) -> Result<Opened> {
        let memory = options.memory;
        let needs = || [Needs::of(path, config, memory::gpu_positions(positions), CHUNK_ROWS as u64)];
        Ok(match options.device {
            Device::Reference => {
                check_memory(path, needed_bytes(config, positions), memory)?;
                Opened::Reference
            }
            Device::Cpu => Opened::Cpu(memory::cpu(path, config, positions, memory)?),
            Device::Cuda(number) => {
                let gpu = cuda::backend(number, None)?;
                memory::fits_gpu(&needs(), gpu.gpu(), memory)?;
                Opened::Cuda(gpu)
            }
            Device::Vulkan(number) => {
                let gpu = vulkan::backend(number, None)?;
                memory::fits_gpu(&needs(), gpu.gpu(), memory)?;
                Opened::Vulkan(gpu)
            }
            Device::Several(several) => match several.api() {
                Api::Cuda => Opened::ManyCuda(many(cuda::gpus(&several, None)?, &several, &needs(), memory)?),
                Api::Vulkan => Opened::ManyVulkan(many(vulkan::gpus(&several, None)?, &several, &needs(), memory)?),
            },
        })
    }
}

fn many<D: Driver>(gpus: Vec<Gpu<D>>, several: &Several, needs: &[Needs], memory: Option<u64>) -> Result<Many<D>> {
    let placement = memory::places(needs, several, &gpus, memory)?;
    Many::new(gpus, placement)
}

/// The memory that a run on the plain backend needs, in bytes, small things apart: the weights, and what is kept of each
/// position.
fn needed_bytes(config: &Config, positions: u64) -> u64 {
    let layers = config.num_hidden_layers + config.num_nextn_predict_layers;
    let indexers = config.indexer_types.iter().filter(|&&kind| kind == IndexerType::Full).count() as u64;
    let values = layers * (config.kv_lora_rank + config.qk_rope_head_dim) + indexers * config.index_head_dim;
    let kept = positions.saturating_add(spare_rows(positions));
    plain_bytes(config).saturating_add(kept.saturating_mul(4 * values))
}
