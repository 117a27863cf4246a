//! coliconv: converter, inspector and verifier for colibri containers.

pub mod backend;
pub mod checkpoint;
pub mod config;
pub mod dequantize;
pub mod error;
pub mod format;
pub mod header;
pub mod io;
pub mod json;
pub mod limits;
pub mod model;
pub mod quantize;
pub mod reference;
pub mod roles;
pub mod tensor;
pub mod weights;
