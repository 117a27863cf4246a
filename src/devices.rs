//! What a model can run on here, and why something cannot be used.

use crate::backend::cuda::{self, Description, images};
use crate::backend::vulkan::{self, Adapter};
use crate::error::{Fault, Severity};
use crate::io;
use crate::isa::Isa;
use crate::report::{DevicesApi, DevicesCpu, DevicesGpu, DevicesReport, Finding};

/// Looks at everything there is. On every GPU that can be used a context is made for a moment, to ask for its free memory.
pub fn devices() -> DevicesReport {
    DevicesReport { cpu: cpu(), apis: vec![cuda_devices(), vulkan_devices()] }
}

fn cpu() -> DevicesCpu {
    DevicesCpu {
        name: io::cpu_name(),
        isa: Isa::detect().name().to_owned(),
        threads: std::thread::available_parallelism().map_or(1, |threads| threads.get() as u64),
        memory_bytes: io::memory_bytes(),
        available_bytes: io::available_bytes(),
    }
}

fn why(fault: &Fault) -> Finding {
    Finding::new(Severity::Note, fault)
}

fn cuda_devices() -> DevicesApi {
    let (devices, unusable) = match cuda::list() {
        Ok(list) => (list.iter().map(cuda_device).collect(), None),
        Err(fault) => (Vec::new(), Some(why(&fault))),
    };
    DevicesApi { api: cuda::NAME.to_owned(), devices, unusable }
}

fn cuda_device(description: &Description) -> DevicesGpu {
    let memory = description.usable().and_then(|()| cuda::memory(description.ordinal));
    DevicesGpu {
        device: format!("{}:{}", cuda::NAME, description.ordinal),
        name: description.name.clone(),
        driver: format!("CUDA {}", description.cuda()),
        capability: description.capability(),
        memory_bytes: description.total,
        free_bytes: memory.as_ref().ok().map(|memory| memory.free),
        kernels: images::code(description.architecture).map(images::Code::name),
        peers: cuda::peers(description.ordinal)
            .unwrap_or_default()
            .into_iter()
            .map(|peer| format!("{}:{peer}", cuda::NAME))
            .collect(),
        unusable: memory.as_ref().err().map(why),
    }
}

fn vulkan_devices() -> DevicesApi {
    let (devices, unusable) = match vulkan::list() {
        Ok(list) => (list.iter().map(vulkan_device).collect(), None),
        Err(fault) => (Vec::new(), Some(why(&fault))),
    };
    DevicesApi { api: vulkan::NAME.to_owned(), devices, unusable }
}

fn vulkan_device(adapter: &Adapter) -> DevicesGpu {
    let memory = adapter.usable().and_then(|()| vulkan::memory(adapter.ordinal));
    let kind: &str = adapter.kind.into();
    DevicesGpu {
        device: format!("{}:{}", vulkan::NAME, adapter.ordinal),
        name: adapter.product.clone(),
        driver: adapter.driver.clone(),
        capability: format!("Vulkan {}, {kind}", adapter.version),
        memory_bytes: adapter.memory_bytes,
        free_bytes: memory.as_ref().ok().map(|memory| memory.free),
        kernels: memory.is_ok().then(|| adapter.kernels()),
        peers: Vec::new(),
        unusable: memory.as_ref().err().map(why),
    }
}
