//! Products of rows with stored matrices: few rows against reading memory, many against multiplying in registers.
//!
//! The weights of a format are far beyond the caches. Before every kernel its limit is measured, and the share is the
//! median of these pairs: a shared machine's rates change within seconds.

use std::hint::black_box;
use std::time::Instant;

use super::measure;
use crate::backend::Backend;
use crate::backend::cpu::{Cpu, Rows, Weight};
use crate::error::{Result, counted};
use crate::format::Format;
use crate::isa::Isa;
use crate::progress::Progress;
use crate::quantize::Decoder;
use crate::report::BenchMeasure;
use crate::weights::Matrix;

/// Shapes [O, I] of GLM-5.2: an expert's gate or up and its down projection, q_b, o_proj.
pub(super) const SHAPES: [(usize, usize); 4] = [(2048, 6144), (6144, 2048), (16384, 2048), (6144, 16384)];
/// The shape of products with many rows.
const MANY: (usize, usize) = (2048, 6144);
/// Bytes of the largest of these as f32.
pub(super) const LARGEST_BYTES: u64 = 4 * 6144 * 16384;
/// Rows of x that are few, and many.
pub(super) const FEW_ROWS: [usize; 4] = [1, 2, 4, 8];
pub(super) const MANY_ROWS: [usize; 2] = [64, 512];
/// Operations of the measure of the limit.
pub(super) const PEAK_FLOPS: u64 = 2_000_000_000;

pub(super) const FORMATS: [Format; 9] = [
    Format::F32,
    Format::Int8Row,
    Format::Fp8E4m3B128,
    Format::Int4Row,
    Format::Int4Grouped { group_size: 32 },
    Format::Int4Grouped { group_size: 64 },
    Format::Int4Grouped { group_size: 128 },
    Format::Int3G64,
    Format::Int2Row,
];

/// Numbers that differ.
pub(super) struct Random(u64);

impl Random {
    /// Others for another seed, which is not 0.
    pub(super) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub(super) fn next(&mut self) -> u64 {
        // xorshift64
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(super) fn matrix(&mut self, format: Format, rows: usize, columns: usize) -> Matrix {
        let decoder = Decoder::new(format).expect("a format with a decoder");
        let (bytes, mut per_row) = (rows * decoder.row_code_bytes(columns), decoder.row_scales(columns) * rows);
        if format == Format::Fp8E4m3B128 {
            per_row = per_row.div_ceil(128);
        }
        // Ordinary numbers alone: no e4m3 below 2^−6 either, which are rare in models.
        let (mask, set) = match format {
            Format::F32 => (0x807f_ffff_807f_ffff, 0x3f00_0000_3f00_0000),
            Format::Fp8E4m3B128 => (0xbfbf_bfbf_bfbf_bfbf, 0x0808_0808_0808_0808),
            _ => (u64::MAX, 0),
        };
        let words = bytes.div_ceil(8);
        let mut codes = Vec::with_capacity(8 * words);
        (0..words).for_each(|_| codes.extend((self.next() & mask | set).to_le_bytes()));
        codes.truncate(bytes);
        let scales = (0..per_row).map(|_| 1e-3 + (self.next() >> 40) as f32 * 1e-10).collect();
        Matrix { rows, columns, format, codes, scales }
    }
}

/// Numbers from −1 to 1 of so many rows.
pub(super) fn numbers(width: usize, n: usize) -> Vec<f32> {
    let mut random = Random(88_172_645_463_325_252);
    (0..n * width).map(|_| (random.next() >> 40) as f32 / 8_388_608.0 - 1.0).collect()
}

pub(super) fn x(width: usize, n: usize) -> Rows {
    Cpu::default().write(&numbers(width, n), width).expect("rows of that width")
}

/// One kernel that is measured.
struct Candidate {
    name: String,
    backend: Cpu,
    n: usize,
    seconds: Vec<f64>,
    /// Its rate by that of its limit just before.
    shares: Vec<f64>,
}

/// The middle one; 0 of none.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// All formats, one after the other: the weights take about `bytes`.
pub(super) fn measures(bytes: u64, rounds: usize, progress: &dyn Progress) -> Result<Vec<BenchMeasure>> {
    let mut measures = Vec::new();
    for format in FORMATS {
        progress.step(&name_of(format));
        measures.extend(few_rows(format, bytes, rounds)?);
        measures.extend(many_rows(format, rounds)?);
    }
    progress.step("attention");
    measures.extend(super::attending::measures(rounds)?);
    Ok(measures)
}

/// A format's name, with its group size.
pub(super) fn name_of(format: Format) -> String {
    match format {
        Format::Int4Grouped { group_size } => format!("int4-grouped({group_size})"),
        format => format.name().to_owned(),
    }
}

/// Few rows of x with every instruction set: the limit is reading the weights.
fn few_rows(format: Format, bytes: u64, rounds: usize) -> Result<Vec<BenchMeasure>> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (name, reader) = (name_of(format), Cpu::default());
    let (mut weights, mut total): (Vec<Weight>, u64) = (Vec::new(), 0);
    for &(rows, columns) in SHAPES.iter().cycle() {
        let matrix = random.matrix(format, rows, columns);
        total += (matrix.codes.len() + 4 * matrix.scales.len()) as u64;
        weights.push(reader.upload("synthetic", matrix)?);
        if total >= bytes {
            break;
        }
    }
    let mut candidates = Vec::new();
    for isa in Isa::available().into_iter().rev().filter(|&isa| isa != Isa::Plain || Isa::detect() == Isa::Plain) {
        for n in FEW_ROWS {
            let name = format!("{name}, {}, {isa}", counted(n as u64, "row"));
            candidates.push(Candidate { name, backend: Cpu::new(isa), n, seconds: Vec::new(), shares: Vec::new() });
        }
    }
    let read_bytes = weights.iter().map(|weight| weight.codes().len() as u64).sum();
    let mut read = Vec::new();
    for _ in 0..rounds {
        for candidate in &mut candidates {
            let inputs: Vec<Rows> = SHAPES.iter().map(|&(_, columns)| x(columns, candidate.n)).collect();
            let started = Instant::now();
            black_box(weights.iter().map(|weight| reader.read_bytes(weight.codes())).sum::<f32>());
            let limit = started.elapsed().as_secs_f64();
            let started = Instant::now();
            for (weight, x) in weights.iter().zip(inputs.iter().cycle()) {
                black_box(candidate.backend.matmul(weight, x)?);
            }
            let seconds = started.elapsed().as_secs_f64();
            read.push(limit);
            candidate.seconds.push(seconds);
            candidate.shares.push(total as f64 / seconds * limit / read_bytes as f64);
        }
    }
    let limit = measure(&format!("{name}, read"), &read, Some(read_bytes));
    let mut measures = vec![limit];
    measures.extend(candidates.iter().map(|candidate| {
        let measure = measure(&candidate.name, &candidate.seconds, Some(total));
        BenchMeasure { limit: Some("read".into()), of_limit: Some(median(&candidate.shares)), ..measure }
    }));
    Ok(measures)
}

/// Many rows of x with the fastest instruction set: the limit are products and sums in registers.
fn many_rows(format: Format, rounds: usize) -> Result<Vec<BenchMeasure>> {
    let (name, backend) = (name_of(format), Cpu::default());
    let weight = backend.upload("synthetic", Random(1).matrix(format, MANY.0, MANY.1))?;
    let inputs = MANY_ROWS.map(|n| x(MANY.1, n));
    let (mut peak, mut peak_flops) = (Vec::new(), 0);
    let mut seconds = [const { Vec::new() }; MANY_ROWS.len()];
    let mut shares = seconds.clone();
    for _ in 0..rounds {
        for (number, x) in inputs.iter().enumerate() {
            let started = Instant::now();
            peak_flops = backend.multiply_in_registers(PEAK_FLOPS);
            peak.push(started.elapsed().as_secs_f64());
            let started = Instant::now();
            black_box(backend.matmul(&weight, x)?);
            let took = started.elapsed().as_secs_f64();
            seconds[number].push(took);
            let limit = peak_flops as f64 / peak[peak.len() - 1];
            shares[number].push(flops(MANY_ROWS[number]) as f64 / took / limit);
        }
    }
    let with = |name: String, seconds: &[f64], flops: u64| {
        let measure = measure(&name, seconds, None);
        BenchMeasure { gflop_per_second: Some(flops as f64 / measure.fastest_seconds.max(1e-9) / 1e9), ..measure }
    };
    let limit = with(format!("{name}, f32 FMA"), &peak, peak_flops);
    let mut measures = vec![limit];
    for ((n, seconds), shares) in MANY_ROWS.into_iter().zip(&seconds).zip(&shares) {
        let measure = with(format!("{name}, {}", counted(n as u64, "row")), seconds, flops(n));
        measures.push(BenchMeasure { limit: Some("f32 FMA".into()), of_limit: Some(median(shares)), ..measure });
    }
    Ok(measures)
}

/// Products and sums with so many rows.
fn flops(n: usize) -> u64 {
    2 * (n * MANY.0 * MANY.1) as u64
}
