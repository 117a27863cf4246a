//! What integration tests share. Each test program uses a part of it.
#![allow(dead_code)]

pub mod containers;
pub mod shards;
pub mod synthetic;
