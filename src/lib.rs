//! coliconv: converter, inspector and verifier for colibri containers.

pub mod backend;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod container;
pub mod convert;
pub mod dequantize;
pub mod error;
pub mod format;
pub mod header;
pub mod inspect;
pub mod io;
pub mod json;
pub mod limits;
pub mod model;
pub mod payload;
pub mod quantize;
pub mod recipe;
pub mod reference;
pub mod report;
pub mod roles;
pub mod tensor;
pub mod weights;
