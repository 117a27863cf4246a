//! The `coliconv` program.

fn main() {}
