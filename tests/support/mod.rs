//! What integration tests share. Each test program uses a part of it.
#![allow(dead_code, unused_imports)]

pub mod bad;
pub mod containers;
pub mod convert;
pub mod crash;
pub mod disk;
#[cfg(target_os = "linux")]
pub mod emulated_cuda;
pub mod fuzz;
pub mod processes;
pub mod shards;
pub mod synthetic;
pub mod writer;
