//! What a GPU did: proof that it was used.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::backend::{Backend, Counters, Counts, OnDevice};

/// What ran on a GPU: for a reference along its text, for a whole command since the model was loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GpuRun {
    /// Operations that ran on the device.
    pub dispatches: u64,
    /// Operations that ran on the CPU instead.
    pub fallbacks: u64,
    /// The same for each operation and format of weights.
    pub operations: Vec<GpuOperation>,
    /// Each GPU, in the order in which the layers go over them.
    #[serde(default)]
    pub devices: Vec<GpuDevice>,
}

/// What one of the GPUs did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GpuDevice {
    /// The device's own name.
    pub device: String,
    /// Operations that ran on it.
    pub dispatches: u64,
    /// Bytes that it was given from the other GPUs.
    pub copied_bytes: u64,
    /// Bytes of its memory that the model and its activations take.
    pub memory_bytes: u64,
}

/// How often an operation ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GpuOperation {
    /// The operation.
    pub operation: String,
    /// Format of the weights that take part.
    pub format: Option<String>,
    /// Runs on the device.
    pub dispatches: u64,
    /// Runs on the CPU instead.
    pub fallbacks: u64,
}

impl GpuRun {
    /// All that a backend counted.
    pub fn of<B: Backend>(backend: &B) -> GpuRun {
        GpuRun::counted(&backend.counters())
    }

    /// Some counters.
    pub fn counted(counters: &Counters) -> GpuRun {
        let Counts { dispatches, fallbacks, .. } = counters.total();
        let operation =
            |(&(operation, format), counts): (&(crate::backend::Operation, Option<&str>), &Counts)| GpuOperation {
                operation: operation.name().to_owned(),
                format: format.map(str::to_owned),
                dispatches: counts.dispatches,
                fallbacks: counts.fallbacks,
            };
        let device = |on: &OnDevice| GpuDevice {
            device: on.device.clone(),
            dispatches: on.dispatches,
            copied_bytes: on.copied_bytes,
            memory_bytes: on.allocated_bytes,
        };
        GpuRun {
            dispatches,
            fallbacks,
            operations: counters.0.iter().map(operation).collect(),
            devices: counters.1.iter().map(device).collect(),
        }
    }
}
