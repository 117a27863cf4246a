//! The CPU with vector instructions: weights stay as they are stored, activations and sums are f32.
//!
//! What takes time is in `simd`: products with stored matrices in every format, experts, attention, the scores of an
//! indexer. Every output is formed in one order, whatever the instruction set, the number of rows that come together, and the
//! number of threads. Work on each row by itself (norms, rotation, activation) is that of the reference, in f64.

mod attention;
mod linear;
mod moe;
mod simd;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use crate::backend::reference::{self, pointwise};
use crate::backend::{
    Backend, Counters, Dsa, ExpertSource, Heads, Mla, Mode, Operation, Places, Prediction, Rope, Routed, Routing, Tally,
};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::experts::{self, ExpertCache, ExpertLayer};
use crate::format::Format;
use crate::isa::Isa;
use crate::quantize::Decoder;
use crate::roles::Projection;
use crate::weights::{Located, Matrix, MatrixRef};
use simd::Coding;

pub use reference::{Choice, Rows, Selection};

/// The CPU.
#[derive(Debug)]
pub struct Cpu {
    isa: Isa,
    tally: Tally,
    experts: Arc<ExpertCache>,
}

impl Default for Cpu {
    /// With the fastest instruction set that this CPU has.
    fn default() -> Cpu {
        Cpu::new(Isa::detect())
    }
}

impl Cpu {
    /// With one of the instruction sets that this CPU has. Every expert that is asked for stays in memory.
    pub fn new(isa: Isa) -> Cpu {
        Cpu::with_experts(isa, experts::Options { direct: false, ..experts::Options::within(u64::MAX) })
    }

    /// The same with routed experts that are read on demand.
    pub fn with_experts(isa: Isa, options: experts::Options) -> Cpu {
        Cpu { isa, tally: Tally::default(), experts: Arc::new(ExpertCache::new(options)) }
    }
}

/// What the CPU can do at best, to measure kernels against.
impl Cpu {
    /// Reads bytes on all threads of the pool; the value means nothing.
    pub fn read_bytes(&self, bytes: &[u8]) -> f32 {
        bytes.par_chunks(READ_BYTES).map(|bytes| simd::read(self.isa, bytes)).sum()
    }

    /// About `flops` products and sums in registers, on all threads of the pool: how many there were.
    pub fn multiply_in_registers(&self, flops: u64) -> u64 {
        let threads = rayon::current_num_threads() as u64;
        let steps = flops / threads / simd::FLOPS_PER_STEP;
        let value: f32 = rayon::broadcast(|_| simd::peak(self.isa, steps)).into_iter().sum();
        std::hint::black_box(value);
        steps * threads * simd::FLOPS_PER_STEP
    }
}

/// Bytes that a task reads.
const READ_BYTES: usize = 1 << 18;

/// A matrix [rows, columns] as it is stored; a vector has one column, and its values beside it.
#[derive(Debug, Clone)]
pub struct Weight {
    matrix: Matrix,
    vector: Vec<f32>,
}

impl Weight {
    /// Its bytes: the codes.
    pub fn codes(&self) -> &[u8] {
        &self.matrix.codes
    }

    /// A matrix whose format can be decoded; others are refused by name.
    fn new(name: &str, matrix: Matrix) -> Result<Weight> {
        computes(name, matrix.format)?;
        let mut vector = Vec::new();
        if matrix.columns == 1 {
            vector = vec![0.0; matrix.rows];
            vector.chunks_exact_mut(1).enumerate().for_each(|(row, out)| matrix.dequantize_row(row, out));
        }
        Ok(Weight { matrix, vector })
    }

    fn operand(&self) -> Operand<'_> {
        Operand::new(self.matrix.view())
    }
}

/// Refuses a format that has no decoder.
fn computes(name: &str, format: Format) -> Result<()> {
    match Decoder::new(format) {
        Some(_) => Ok(()),
        None => Err(Fault::new(Place::name(name), FaultKind::BackendFormat { backend: "cpu", format })),
    }
}

/// A matrix to multiply with, wherever its bytes are.
#[derive(Debug, Clone, Copy)]
struct Operand<'a> {
    matrix: MatrixRef<'a>,
    coding: Coding,
    row_bytes: usize,
    row_scales: usize,
}

impl<'a> Operand<'a> {
    /// A matrix whose format was looked at by [`computes`].
    fn new(matrix: MatrixRef<'a>) -> Operand<'a> {
        let decoder = Decoder::new(matrix.format).expect("checked when the matrix was uploaded");
        let (row_bytes, row_scales) = (decoder.row_code_bytes(matrix.columns), decoder.row_scales(matrix.columns));
        Operand { coding: Coding::of(matrix.format, matrix.columns), matrix, row_bytes, row_scales }
    }
}

/// One routed expert.
#[derive(Debug, Clone)]
struct Expert {
    gate: Weight,
    up: Weight,
    down: Weight,
}

impl Expert {
    /// Gate, up and down projection.
    fn operands(&self) -> [Operand<'_>; 3] {
        [&self.gate, &self.up, &self.down].map(Weight::operand)
    }
}

/// The routed experts of a layer.
#[derive(Debug)]
pub struct Experts(Source);

#[derive(Debug)]
enum Source {
    /// Of weights that are in no file.
    Loaded(Vec<Expert>),
    /// Of all others.
    OnDemand(ExpertLayer),
}

impl Experts {
    /// How many there are.
    fn count(&self) -> usize {
        match &self.0 {
            Source::Loaded(experts) => experts.len(),
            Source::OnDemand(layer) => layer.count(),
        }
    }

    /// Formats of gate, up and down projection of the first, each once.
    fn formats(&self) -> Vec<Format> {
        let formats = match &self.0 {
            Source::Loaded(experts) => experts.first().map(|expert| expert.operands().map(|m| m.matrix.format)),
            Source::OnDemand(layer) => layer.formats(),
        };
        let mut formats: Vec<Format> = formats.into_iter().flatten().collect();
        formats.dedup();
        formats
    }
}

/// Where an expert's matrices are, of formats that can be decoded; `None` if one is in no file.
fn located(source: &dyn ExpertSource, expert: usize) -> Result<Option<[Located<'_>; 3]>> {
    let find = |projection| -> Result<Option<Located<'_>>> {
        let located = source.locate(expert, projection)?;
        if let Some(matrix) = &located {
            computes(&source.name(expert, projection), matrix.format)?;
        }
        Ok(located)
    };
    let (gate, up, down) = (find(Projection::Gate)?, find(Projection::Up)?, find(Projection::Down)?);
    Ok(gate.zip(up).zip(down).map(|((gate, up), down)| [gate, up, down]))
}

impl Backend for Cpu {
    type Weight = Weight;
    type Experts = Experts;
    type Rows = Rows;
    type Cache = Rows;
    type Choice = Choice;
    type Selection = Selection;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn device(&self) -> String {
        format!("CPU, {}", self.isa)
    }

    fn mode(&self) -> Mode {
        Mode::Exact
    }

    fn counters(&self) -> Counters {
        self.tally.counters()
    }

    fn upload(&self, name: &str, matrix: Matrix) -> Result<Weight> {
        Weight::new(name, matrix)
    }

    fn upload_experts(&self, source: &dyn ExpertSource) -> Result<Experts, Faults> {
        let on_demand =
            (0..source.count()).map(|expert| located(source, expert)).collect::<Result<Option<Vec<_>>>>()?;
        if let Some(experts) = on_demand {
            return Ok(Experts(Source::OnDemand(self.experts.add_layer(&experts)?)));
        }
        let load = |expert, projection| Weight::new(&source.name(expert, projection), source.load(expert, projection)?);
        let expert = |expert| -> Result<Expert> {
            Ok(Expert {
                gate: load(expert, Projection::Gate)?,
                up: load(expert, Projection::Up)?,
                down: load(expert, Projection::Down)?,
            })
        };
        Ok(Experts(Source::Loaded((0..source.count()).map(expert).collect::<Result<_>>()?)))
    }

    fn write(&self, values: &[f32], width: usize) -> Result<Rows> {
        assert_eq!(values.len() % width, 0, "{} values are no rows of {width}", values.len());
        Ok(Rows { width, values: values.to_vec() })
    }

    fn read(&self, rows: &Rows) -> Result<Vec<f32>> {
        Ok(rows.values.clone())
    }

    fn shape(&self, rows: &Rows) -> (usize, usize) {
        (rows.count(), rows.width)
    }

    fn slice(&self, x: &Rows, rows: Range<usize>, columns: Range<usize>) -> Result<Rows> {
        self.tally.dispatch(Operation::Slice, None);
        Ok(pointwise::slice(x, rows, columns))
    }

    fn take(&self, x: &Rows, rows: &[usize]) -> Result<Rows> {
        self.tally.dispatch(Operation::Take, None);
        Ok(pointwise::take(x, rows))
    }

    fn concat(&self, a: &Rows, b: &Rows) -> Result<Rows> {
        self.tally.dispatch(Operation::Concat, None);
        Ok(pointwise::concat(a, b))
    }

    fn add(&self, x: &mut Rows, y: &Rows) -> Result<()> {
        self.tally.dispatch(Operation::Add, None);
        pointwise::add(x, y);
        Ok(())
    }

    fn embed(&self, table: &Weight, ids: &[u32]) -> Result<Rows> {
        self.tally.dispatch(Operation::Embed, Some(table.matrix.format));
        let width = table.matrix.columns;
        let mut values = vec![0.0; ids.len() * width];
        for (&id, out) in ids.iter().zip(values.chunks_exact_mut(width)) {
            table.matrix.dequantize_row(id as usize, out);
        }
        Ok(Rows { width, values })
    }

    fn rms_norm(&self, x: &Rows, weight: &Weight, eps: f64) -> Result<Rows> {
        self.tally.dispatch(Operation::RmsNorm, Some(weight.matrix.format));
        Ok(pointwise::rms_norm(x, &weight.vector, eps))
    }

    fn layer_norm(&self, x: &Rows, weight: &Weight, bias: &Weight, eps: f64) -> Result<Rows> {
        self.tally.dispatch(Operation::LayerNorm, Some(weight.matrix.format));
        Ok(pointwise::layer_norm(x, &weight.vector, &bias.vector, eps))
    }

    fn matmul(&self, weight: &Weight, x: &Rows) -> Result<Rows> {
        Ok(self
            .tally
            .timed(Operation::Matmul, Some(weight.matrix.format), || linear::matmul(self.isa, weight.operand(), x)))
    }

    fn swiglu(&self, gate: &Rows, up: &Rows) -> Result<Rows> {
        self.tally.dispatch(Operation::Swiglu, None);
        Ok(pointwise::swiglu(gate, up))
    }

    fn rope(&self, x: &mut Rows, rope: &Rope, heads: Heads, positions: &[usize]) -> Result<()> {
        self.tally.dispatch(Operation::Rope, None);
        pointwise::rope(x, rope, heads, positions);
        Ok(())
    }

    fn cache(&self, width: usize) -> Result<Rows> {
        Ok(Rows { width, values: Vec::new() })
    }

    fn cache_len(&self, cache: &Rows) -> usize {
        cache.count()
    }

    fn append(&self, cache: &mut Rows, rows: &Rows) -> Result<()> {
        self.tally.dispatch(Operation::Append, None);
        assert_eq!(cache.width, rows.width, "width of a cache and of its new rows");
        cache.extend(rows);
        Ok(())
    }

    fn truncate(&self, cache: &mut Rows, len: usize) {
        cache.values.truncate(len * cache.width);
    }

    fn select(&self, dsa: &Dsa, q: &Rows, weights: &Rows, keys: &Rows, places: &Places) -> Result<Selection> {
        Ok(self.tally.timed(Operation::Select, None, || attention::select(self.isa, dsa, q, weights, keys, places)))
    }

    fn read_selection(&self, selection: &Selection) -> Result<Vec<Vec<usize>>> {
        Ok(selection.0.clone())
    }

    fn attention(
        &self,
        mla: &Mla,
        q: &Rows,
        kv_b: &Weight,
        cache: &Rows,
        places: &Places,
        selection: Option<&Selection>,
    ) -> Result<Rows> {
        Ok(self.tally.timed(Operation::Attention, Some(kv_b.matrix.format), || {
            attention::attention(self.isa, mla, q, kv_b, cache, places, selection)
        }))
    }

    fn route(&self, routing: &Routing, gate: &Weight, bias: &Weight, x: &Rows) -> Result<Choice> {
        Ok(self.tally.timed(Operation::Route, Some(gate.matrix.format), || {
            reference::choose(routing, &bias.vector, &linear::matmul(self.isa, gate.operand(), x))
        }))
    }

    fn read_choice(&self, choice: &Choice) -> Result<Vec<Vec<Routed>>> {
        Ok(choice.0.clone())
    }

    fn announce(&self, experts: &Experts, choice: &Choice) -> Result<()> {
        if let Source::OnDemand(layer) = &experts.0 {
            layer.announce(&moe::chosen(choice));
        }
        Ok(())
    }

    fn read_ahead(&self, experts: &Experts, choose: &dyn Fn() -> Result<Choice>) -> Result<()> {
        match &experts.0 {
            Source::OnDemand(layer) if layer.has_absent() => layer.read_ahead(&moe::chosen(&choose()?)),
            _ => {}
        }
        Ok(())
    }

    fn expert_counters(&self) -> Option<experts::Counters> {
        Some(self.experts.counters())
    }

    fn experts(&self, experts: &Experts, choice: &Choice, x: &Rows) -> Result<Rows> {
        let formats = experts.formats();
        formats.iter().skip(1).for_each(|&format| self.tally.dispatch(Operation::Experts, Some(format)));
        let first = formats.first().copied();
        self.tally.timed(Operation::Experts, first, || moe::experts(self.isa, experts, choice, x))
    }

    fn predict(&self, head: &Weight, x: &Rows, asked: &[Option<u32>]) -> Result<Vec<Prediction>> {
        Ok(self.tally.timed(Operation::Predict, Some(head.matrix.format), || {
            linear::predict(self.isa, head.operand(), x, asked)
        }))
    }
}
