//! coliconv: converter, inspector and verifier for colibri containers.

pub mod dequantize;
pub mod error;
pub mod format;
pub mod limits;
pub mod quantize;
pub mod tensor;
