//! Quantizing alone: stored rows that stay in the core's own cache to codes and scales, on one core.
//!
//! Seconds are those that the thread had the core: other programs may take it away meanwhile.

use std::hint::black_box;

use sha2::{Digest, Sha256};

use super::measure;
use crate::dequantize::{SourceDtype, fp8};
use crate::format::Format;
use crate::isa::Isa;
use crate::quantize::{Converter, Quantizer};
use crate::report::BenchMeasure;
use crate::threads::core_seconds;

/// Width of the rows: GLM-5.2's hidden size.
const COLUMNS: usize = 6144;
/// Rows of the matrix: with codes and scales it stays in a core's second cache.
const ROWS: usize = 16;
/// What a repetition takes, about.
const SECONDS: f64 = 0.01;
/// Bytes that are hashed at once.
const HASHED_BYTES: usize = 256 << 10;

const QUANTIZERS: [Quantizer; 7] = [
    Quantizer::Int4Grouped { group_size: 64 },
    Quantizer::Int4Grouped { group_size: 32 },
    Quantizer::Int4Row,
    Quantizer::Int3G64,
    Quantizer::Int8Row { bits: 8 },
    Quantizer::Int2Row,
    Quantizer::F32,
];

/// A matrix as it is stored in a source.
struct Matrix {
    dtype: SourceDtype,
    stored: Vec<u8>,
    block_scales: Vec<f32>,
}

impl Matrix {
    /// Values like those of a trained matrix: bell-shaped, the largest of a block about the largest of its type.
    fn new(dtype: SourceDtype) -> Matrix {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            // xorshift64*
            random ^= random >> 12;
            random ^= random << 25;
            random ^= random >> 27;
            random.wrapping_mul(0x2545_f491_4f6c_dd1d)
        };
        let blocks = if dtype == SourceDtype::Fp8E4m3 { COLUMNS.div_ceil(128) } else { 0 };
        let block_scales = (0..blocks).map(|_| 2e-4 + (next() >> 40) as f32 * 2f32.powi(-24) * 3e-4).collect();
        let mut stored = Vec::with_capacity(ROWS * COLUMNS * dtype.bytes());
        for _ in 0..ROWS * COLUMNS {
            let number = next();
            // The sum of eight bytes, about its mean.
            let sum: u32 = number.to_le_bytes().iter().map(|&byte| u32::from(byte)).sum();
            let value = (sum as f32 - 1020.0) * (448.0 / 1020.0) * 1.2;
            match dtype {
                SourceDtype::Fp8E4m3 => stored.push(nearest_e4m3(value)),
                SourceDtype::Bf16 => stored.extend(half::bf16::from_f32(value * 1e-4).to_le_bytes()),
                SourceDtype::F16 => stored.extend(half::f16::from_f32(value * 1e-3).to_le_bytes()),
                SourceDtype::F32 => stored.extend((value * 1e-4).to_le_bytes()),
            }
        }
        Matrix { dtype, stored, block_scales }
    }
}

fn nearest_e4m3(value: f32) -> u8 {
    let off = |code: &u8| (fp8::e4m3(*code) - value.abs()).abs();
    let code = (0..0x7f).min_by(|a, b| off(a).total_cmp(&off(b))).expect("there are some");
    code | u8::from(value < 0.0) << 7
}

/// One thing to be measured, with what it takes.
struct Candidate<'a> {
    name: String,
    baseline: Option<String>,
    matrix: &'a Matrix,
    converter: Converter,
    codes: Vec<u8>,
    scales: Vec<f32>,
    /// Passes over the matrix in one repetition.
    passes: usize,
    seconds: Vec<f64>,
}

impl Candidate<'_> {
    fn new(matrix: &Matrix, quantizer: Quantizer, isa: Isa) -> Candidate<'_> {
        let format = match (quantizer, quantizer.format()) {
            (_, Format::Int4Grouped { group_size }) => format!("int4-grouped({group_size})"),
            (_, format) => format.name().to_owned(),
        };
        let source = match matrix.dtype {
            SourceDtype::Fp8E4m3 => "fp8",
            SourceDtype::Bf16 => "bf16",
            SourceDtype::F16 => "f16",
            SourceDtype::F32 => "f32",
        };
        let name = |isa: Isa| format!("{source} to {format}, {isa}");
        Candidate {
            name: name(isa),
            baseline: (isa != Isa::Plain).then(|| name(Isa::Plain)),
            matrix,
            converter: Converter::new(quantizer, matrix.dtype, COLUMNS, isa),
            codes: vec![0; ROWS * quantizer.row_code_bytes(COLUMNS)],
            scales: vec![0.0; ROWS * quantizer.row_scales(COLUMNS)],
            passes: 1,
            seconds: Vec::new(),
        }
    }

    /// Converts the matrix as often as a repetition asks.
    fn run(&mut self) -> f64 {
        let (codes, scales) = (self.codes.len() / ROWS, self.scales.len() / ROWS);
        let started = core_seconds();
        for _ in 0..self.passes {
            for (row, stored) in
                black_box(&self.matrix.stored).chunks_exact(COLUMNS * self.matrix.dtype.bytes()).enumerate()
            {
                let (codes, scales) =
                    (&mut self.codes[row * codes..][..codes], &mut self.scales[row * scales..][..scales]);
                let done = self.converter.convert_row(stored, &self.matrix.block_scales, codes, scales);
                done.expect("all values are finite");
            }
            black_box((&self.codes, &self.scales));
        }
        core_seconds() - started
    }

    /// Chooses the passes so that a repetition takes long enough to be timed.
    fn calibrate(&mut self) {
        self.run();
        let once = self.run().max(1e-9);
        self.passes = (SECONDS / once).ceil().clamp(1.0, 1e6) as usize;
    }
}

/// All formats and instruction sets in turn, `rounds` times, and SHA-256.
pub(super) fn measures(rounds: usize) -> Vec<BenchMeasure> {
    let matrices = [SourceDtype::Fp8E4m3, SourceDtype::Bf16, SourceDtype::F16, SourceDtype::F32].map(Matrix::new);
    let mut candidates = Vec::new();
    for matrix in &matrices {
        for quantizer in QUANTIZERS {
            candidates.extend(Isa::available().into_iter().map(|isa| Candidate::new(matrix, quantizer, isa)));
        }
    }
    candidates.iter_mut().for_each(Candidate::calibrate);
    let hashed = vec![1; HASHED_BYTES];
    let hashes = 32;
    let mut hash_seconds = Vec::new();
    for _ in 0..rounds {
        for candidate in &mut candidates {
            let seconds = candidate.run();
            candidate.seconds.push(seconds);
        }
        let started = core_seconds();
        let mut hash = Sha256::new();
        (0..hashes).for_each(|_| hash.update(black_box(&hashed)));
        black_box(hash.finalize());
        hash_seconds.push(core_seconds() - started);
    }
    let mut measures: Vec<BenchMeasure> = candidates
        .iter()
        .map(|candidate| {
            let weights = (candidate.passes * ROWS * COLUMNS) as u64;
            let measure = measure(&candidate.name, &candidate.seconds, None);
            let rate = weights as f64 / measure.fastest_seconds.max(1e-9) / 1e9;
            BenchMeasure { weights: Some(weights), g_weights_per_second: Some(rate), ..measure }
        })
        .collect();
    let rate = |measures: &[BenchMeasure], name: &str| {
        measures.iter().find(|measure| measure.name == name).and_then(|measure| measure.g_weights_per_second)
    };
    for (number, candidate) in candidates.into_iter().enumerate() {
        let Some(baseline) = candidate.baseline else { continue };
        measures[number].of_baseline =
            rate(&measures, &candidate.name).zip(rate(&measures, &baseline)).map(|(rate, plain)| rate / plain);
        measures[number].baseline = Some(baseline);
    }
    measures.push(measure("SHA-256, one core", &hash_seconds, Some((hashes * HASHED_BYTES) as u64)));
    measures
}
