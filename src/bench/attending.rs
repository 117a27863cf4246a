//! Attention with the dimensions of GLM-5.2, against multiplying in registers.

use std::hint::black_box;
use std::time::Instant;

use super::kernels::{PEAK_FLOPS, Random, median, x};
use super::measure;
use crate::backend::cpu::Cpu;
use crate::backend::{Backend, Mla, Places};
use crate::error::{Result, counted};
use crate::format::Format;
use crate::report::BenchMeasure;

/// GLM-5.2's.
const MLA: Mla = Mla { heads: 64, nope: 192, rope: 64, value: 256, latent: 512 };
/// Rows, and the positions that the last of them sees.
const CASES: [(usize, usize); 4] = [(1, 4096), (4, 4096), (64, 2048), (512, 512)];

/// Products and sums of absorbed attention.
fn flops(rows: usize, positions: usize) -> u64 {
    let seen: usize = (positions - rows + 1..=positions).sum();
    let of_rows = rows * (MLA.nope + MLA.value) * MLA.latent;
    let of_pairs = seen * (MLA.latent + MLA.rope + MLA.latent);
    2 * (MLA.heads * (of_rows + of_pairs)) as u64
}

/// Each case with the fastest instruction set; `kv_b` has a byte a weight.
pub(super) fn measures(rounds: usize) -> Result<Vec<BenchMeasure>> {
    let backend = Cpu::default();
    let kv_b = Random::new(5).matrix(Format::Int8Row, MLA.heads * (MLA.nope + MLA.value), MLA.latent);
    let kv_b = backend.upload("synthetic", kv_b)?;
    let mut measures = Vec::new();
    for (rows, positions) in CASES {
        let q = x(MLA.heads * (MLA.nope + MLA.rope), rows);
        let mut cache = backend.cache(MLA.latent + MLA.rope)?;
        backend.append(&mut cache, &x(MLA.latent + MLA.rope, positions))?;
        let places = Places::after(positions - rows, rows);
        let (mut seconds, mut shares) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let started = Instant::now();
            let peak = backend.multiply_in_registers(PEAK_FLOPS) as f64 / started.elapsed().as_secs_f64();
            let started = Instant::now();
            black_box(backend.attention(&MLA, &q, &kv_b, &cache, &places, None)?);
            let took = started.elapsed().as_secs_f64();
            seconds.push(took);
            shares.push(flops(rows, positions) as f64 / took / peak);
        }
        let measure =
            measure(&format!("attention, {}, {positions} positions", counted(rows as u64, "row")), &seconds, None);
        let rate = flops(rows, positions) as f64 / measure.fastest_seconds.max(1e-9) / 1e9;
        measures.push(BenchMeasure {
            gflop_per_second: Some(rate),
            limit: Some("f32 FMA".into()),
            of_limit: Some(median(&shares)),
            ..measure
        });
    }
    Ok(measures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_by_hand() {
        // 64 heads: K and V of one row, then 1 + 2 pairs.
        assert_eq!(flops(2, 2), 2 * 64 * (2 * 448 * 512 + 3 * (576 + 512)));
    }
}
