//! coliconv: converter, inspector and verifier for colibri containers.

pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod container;
pub mod convert;
pub mod dequantize;
pub mod diff;
pub mod error;
pub mod format;
pub mod header;
pub mod io;
pub mod json;
pub mod limits;
pub mod payload;
pub mod progress;
pub mod quantize;
pub mod recipe;
pub mod report;
pub mod roles;
pub mod tensor;
pub mod threads;
pub mod verify;
pub mod weights;
