#![no_main]

#[allow(dead_code)]
#[path = "../../tests/support/fuzz.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|input: &[u8]| targets::pipeline(input));
