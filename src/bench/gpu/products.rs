//! Products of rows with stored matrices of GLM-5.2's shapes: few rows against reading memory, many against multiplying.

use super::{Amount, Bench, FMA, READ, Work};
use crate::backend::Backend;
use crate::backend::gpu::driver::Driver;
use crate::backend::gpu::{Rows, Weight};
use crate::bench::kernels::{FEW_ROWS, FORMATS, MANY_ROWS, Random, SHAPES, name_of, numbers};
use crate::error::{Result, counted};
use crate::format::Format;
use crate::report::BenchMeasure;
use crate::weights::Matrix;

/// Bytes of weights below which shapes are smaller by [`NARROWER`] in both dimensions.
const NARROW_BYTES: u64 = 32 << 20;
pub(super) const NARROWER: usize = 16;
/// Matrices that are used in turn with many rows, which do not wait for memory.
const MANY_MATRICES: usize = 2;

/// By what the dimensions of GLM-5.2 are divided for weights of so many bytes.
pub(super) fn divisor(bytes: u64) -> usize {
    if bytes < NARROW_BYTES { NARROWER } else { 1 }
}

/// What is measured of a shape: name, and rows of x.
type Wanted = Vec<(String, usize)>;

/// All formats and shapes, one after the other.
pub(super) fn measures<D: Driver>(bench: &mut Bench<'_, D>) -> Result<Vec<BenchMeasure>> {
    let (mut measures, divisor) = (Vec::new(), divisor(bench.bytes));
    for format in FORMATS {
        let mut of_format = Vec::new();
        for (rows, columns) in SHAPES.map(|(rows, columns)| (rows / divisor, columns / divisor)) {
            let name = format!("{} [{rows}, {columns}]", name_of(format));
            let wanted = |numbers: &[usize]| -> Wanted {
                let names = numbers.iter().map(|&n| (format!("{name}, {}", counted(n as u64, "row")), n));
                names.filter(|(name, _)| bench.is_wanted(name)).collect()
            };
            let (few, many) = (wanted(&FEW_ROWS), wanted(&MANY_ROWS));
            let alike = format!("{name}, read a matrix a launch");
            let alike = (!few.is_empty() || bench.is_wanted(&alike)).then_some(alike);
            if alike.is_none() && many.is_empty() {
                continue;
            }
            bench.progress.step(&name);
            let weights = Weights::new(bench, format, rows, columns)?;
            of_format.extend(few_rows(bench, &weights, alike, few)?);
            of_format.extend(many_rows(bench, &weights, many)?);
        }
        measures.extend(bench.with_limits(&name_of(format), &[READ, FMA], of_format)?);
    }
    Ok(measures)
}

/// Matrices that are used in turn.
struct Weights<D: Driver> {
    matrices: Vec<Weight<D>>,
    columns: usize,
    /// Stored bytes of one.
    bytes: u64,
    /// Products and sums of one with a row.
    flops: u64,
}

impl<D: Driver> Weights<D> {
    /// As many as the bench has bytes for, two at least: the same numbers at different places.
    fn new(bench: &Bench<'_, D>, format: Format, rows: usize, columns: usize) -> Result<Weights<D>> {
        let matrix = Random::new(9).matrix(format, rows, columns);
        let bytes = stored_bytes(&matrix);
        let count = bench.bytes.div_ceil(bytes).max(2);
        let matrices = (0..count).map(|_| bench.gpu.upload_linear("weights to measure with", matrix.clone()));
        let flops = 2 * (rows * columns) as u64;
        Ok(Weights { matrices: matrices.collect::<Result<_>>()?, columns, bytes, flops })
    }

    /// Some rows with the first `count` of them.
    fn work(&self, bench: &Bench<'_, D>, name: String, n: usize, amount: Amount, count: usize) -> Result<Work<D>> {
        let x: Rows<D> = bench.gpu.write(&numbers(self.columns, n), self.columns)?;
        let work = Work::new(bench.device(), name, || {
            // What they give is kept to the end, as q_a's and kv_a's are: no product waits for the place of another's.
            let given: Result<Vec<Rows<D>>> =
                self.matrices[..count].iter().map(|weight| bench.gpu.matmul(weight, &x)).collect();
            given.map(|_| amount)
        });
        work.map(|work| work.keeping(x, Vec::new(), Vec::new()))
    }
}

/// Bytes of codes and scales.
pub(super) fn stored_bytes(matrix: &Matrix) -> u64 {
    (matrix.codes.len() + 4 * matrix.scales.len()) as u64
}

/// The limit is reading the weights. Reading as many bytes in as many launches, by the name of `alike`, shows what the launches
/// cost; without it nothing is measured.
fn few_rows<D: Driver>(
    bench: &mut Bench<'_, D>,
    weights: &Weights<D>,
    alike: Option<String>,
    wanted: Wanted,
) -> Result<Vec<BenchMeasure>> {
    let Some(alike) = alike else { return Ok(Vec::new()) };
    let count = weights.matrices.len();
    let (device, memory) = (bench.device(), bench.memory);
    let read = || Ok(Amount::Bytes(memory.read_parts(device, weights.bytes, count)?));
    let mut works = vec![Work::new(device, alike, read)?];
    for (name, n) in wanted {
        works.push(weights.work(bench, name, n, Amount::Bytes(weights.bytes * count as u64), count)?);
    }
    bench.against_reading(&mut works)
}

/// The limit are products and sums in registers.
fn many_rows<D: Driver>(bench: &mut Bench<'_, D>, weights: &Weights<D>, wanted: Wanted) -> Result<Vec<BenchMeasure>> {
    let mut works = Vec::new();
    for (name, n) in wanted {
        let flops = n as u64 * weights.flops;
        let count = MANY_MATRICES.min(weights.matrices.len());
        works.push(weights.work(bench, name, n, Amount::Flops(flops * count as u64), count)?);
    }
    bench.against_multiplying(&mut works)
}
