//! The `coliconv` program: see [`coliconv::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    coliconv::cli::main()
}
