//! `cargo bench`: quantizing alone, as `coliconv bench convert` measures it.

use coliconv::bench;

fn main() {
    // `cargo test --all-targets` runs this too, without the flag.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    for measure in bench::quantize(15).measures {
        if let (Some(rate), Some(weights)) = (measure.g_weights_per_second, measure.weights) {
            let median = weights as f64 / measure.seconds / 1e9;
            println!("{:<40} {rate:6.2} G weights/s, median {median:6.2}", measure.name);
        } else if let Some(rate) = measure.gb_per_second {
            println!("{:<40} {rate:6.2} GB/s", measure.name);
        }
    }
}
