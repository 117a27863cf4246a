//! `devices --json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Finding;

/// `devices --json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "coliconv devices report")]
pub struct DevicesReport {
    /// The processor.
    pub cpu: DevicesCpu,
    /// Every API for GPUs that this program knows, whether the machine has it or not.
    pub apis: Vec<DevicesApi>,
}

/// The processor and its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DevicesCpu {
    /// Its name, where the system tells.
    pub name: Option<String>,
    /// The fastest instruction set that it has kernels for: plain, avx2, avx512.
    pub isa: String,
    /// Threads that commands start if they are not told otherwise.
    pub threads: u64,
    /// Memory in bytes, where the system tells.
    pub memory_bytes: Option<u64>,
    /// Of it, what can be taken without swapping.
    pub available_bytes: Option<u64>,
}

/// An API for GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DevicesApi {
    /// Its name in `--device`: cuda, vulkan.
    pub api: String,
    /// The devices that it has.
    pub devices: Vec<DevicesGpu>,
    /// Why it cannot be used; null if it can.
    pub unusable: Option<Finding>,
}

/// A GPU through one API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DevicesGpu {
    /// What names it in `--device`: cuda:0.
    pub device: String,
    /// The product's name.
    pub name: String,
    /// The driver, as far as the API tells.
    pub driver: String,
    /// What the device is capable of: of CUDA the compute capability, of Vulkan the version.
    pub capability: String,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Of it, what is free; null where that is not known.
    pub free_bytes: Option<u64>,
    /// The kernels that it runs: of CUDA their architecture, or PTX that the driver compiles; null if there are none.
    pub kernels: Option<String>,
    /// GPUs from which it copies without the host's memory between.
    pub peers: Vec<String>,
    /// Why it cannot be used; null if it can.
    pub unusable: Option<Finding>,
}
