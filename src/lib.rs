//! coliconv turns an FP8 or BF16 checkpoint of a very large mixture-of-experts model (GLM-5.2) into a colibri container,
//! looks inside such containers, and proves that they compute what they should.
//!
//! The modules are the path of a tensor, from the source to the answer:
//!
//! 1. [`checkpoint`] finds it: config, index and headers of the source, checked against each other.
//! 2. [`dequantize`] makes f32 rows of its bytes.
//! 3. [`roles`] says what it is, [`recipe`] which format it gets.
//! 4. [`quantize`] makes codes and scales of the rows.
//! 5. [`container`] lays them out, writes them, and reads them back.
//! 6. [`backend`] computes with them, [`model`] arranges the computing.
//!
//! [`convert`], [`inspect`] and their like are whole commands without a terminal; [`cli`] is the terminal.
//! Everything that can be wrong is a [`error::FaultKind`].

pub mod backend;
pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod container;
pub mod convert;
pub mod dequantize;
pub mod devices;
pub mod diff;
pub mod error;
pub mod experts;
pub mod format;
pub mod generate;
pub mod header;
pub mod inspect;
pub mod io;
pub mod isa;
pub mod json;
pub mod limits;
pub mod model;
pub mod part;
pub mod payload;
pub mod pipeline;
pub mod progress;
pub mod publish;
pub mod quantize;
pub mod recipe;
pub mod reference;
pub mod report;
pub mod roles;
pub mod score;
pub mod tensor;
pub mod threads;
pub mod verify;
pub mod weights;
