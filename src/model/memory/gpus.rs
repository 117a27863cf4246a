//! Which layers of models go on which of several GPUs, by what is free on each.

use super::{Needs, cuda, vulkan};
use crate::backend::gpu::Gpu;
use crate::backend::gpu::driver::{DeviceMemory, Driver};
use crate::backend::gpu::placement::{Part, Placement, Room, place};
use crate::backend::{Api, Backend, Several};
use crate::error::{Fault, FaultKind, Place, Result};

/// Where the layers of models go that are on these GPUs at the same time, all of whose weights go there; refused where they
/// have no room. `memory` is what they may take at most, all GPUs together; by default what is free.
pub fn places<D: Driver>(
    models: &[Needs],
    several: &Several,
    gpus: &[Gpu<D>],
    memory: Option<u64>,
) -> Result<Placement> {
    let parts = parts(models);
    let placed = |fault: Fault| {
        let directory = models.first().map(|needs| needs.directory.clone()).unwrap_or_default();
        Fault { place: Place::file(directory), ..fault }
    };
    let reserved = models.iter().map(|needs| needs.working - kept(needs)).fold(0, u64::saturating_add);
    let wanted = parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
    let wanted = wanted.saturating_add(reserved.saturating_mul(gpus.len() as u64));
    if let Some(allowed) = memory.filter(|&allowed| wanted > allowed) {
        let device = several.to_string();
        let kind = FaultKind::GpuMemoryLimit { device, purpose: "the model".to_owned(), wanted, allowed };
        return Err(placed(Fault::new(Place::default(), kind)));
    }
    let room = |(gpu, number): (&Gpu<D>, usize)| -> Result<Room> {
        let DeviceMemory { free, total } = gpu.gpu().driver().memory()?;
        // A device that is opened more than once has its memory once.
        let times = several.numbers().filter(|&other| other == number).count() as u64;
        Ok(Room { device: gpu.device(), free: free / times, total, reserved })
    };
    let rooms: Vec<Room> = gpus.iter().zip(several.numbers()).map(room).collect::<Result<_>>()?;
    place(&parts, &rooms).map_err(placed)
}

/// The same, with the GPUs opened for a moment to ask them.
pub(super) fn fits(models: &[Needs], several: &Several, memory: Option<u64>) -> Result<Placement> {
    match several.api() {
        Api::Cuda => places(models, several, &cuda::gpus(several, None)?, memory),
        Api::Vulkan => places(models, several, &vulkan::gpus(several, None)?, memory),
    }
}

/// What models keep of positions.
fn kept(needs: &Needs) -> u64 {
    needs.kept.iter().copied().fold(0, u64::saturating_add)
}

/// What lies on one device each: the embeddings of all models, the layers of the same number, the heads.
fn parts(models: &[Needs]) -> Vec<Part> {
    let layers = models.iter().map(|needs| needs.kept.len()).max().unwrap_or(0);
    let sum = |of: &dyn Fn(&Needs) -> u64| models.iter().map(of).fold(0, u64::saturating_add);
    let part = |name: String, bytes| Part { name, bytes, measured: None };
    let layer = |layer: usize| {
        let of = |of: &[u64]| of.get(layer).copied().unwrap_or(0);
        let bytes = sum(&|needs| of(&needs.of_layers).saturating_add(of(&needs.kept)));
        part(format!("layer {layer}"), bytes)
    };
    std::iter::once(part("the embedding".to_owned(), sum(&|needs| needs.embedding)))
        .chain((0..layers).map(layer))
        .chain([part("the output head".to_owned(), sum(&|needs| needs.head))])
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    /// All bytes that one device would be asked for are in the parts, or stand beside them.
    #[test]
    fn parts_are_all_there_is() {
        for fixture in ["fixtures/tiny", "fixtures/nano"] {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(fixture);
            let config = Config::read(&directory).unwrap();
            let needs = Needs::of(&directory, &config, 1000, 512);
            let parts = parts(std::slice::from_ref(&needs));
            let layers = config.num_hidden_layers + config.num_nextn_predict_layers;
            assert_eq!(parts.len() as u64, layers + 2);
            assert!(parts.iter().all(|part| part.bytes > 0), "{parts:?}");
            let all: u64 = parts.iter().map(|part| part.bytes).sum();
            assert_eq!(all + needs.working - kept(&needs), needs.fixed() + needs.experts);
            assert!(kept(&needs) < needs.working);
            // Two models are where one is.
            let twice = super::parts(&[needs.clone(), needs]);
            assert!(twice.iter().zip(&parts).all(|(two, one)| two.bytes == 2 * one.bytes && two.name == one.name));
        }
    }
}
