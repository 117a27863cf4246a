//! The colibri container: a directory of .safetensors files, small files, an index and a manifest.

pub mod layout;
pub mod manifest;
pub mod progress;
pub mod reader;
pub mod resolve;
pub mod stamps;
pub mod writer;
