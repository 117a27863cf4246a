//! The plain backend: loops over rows, every sum in f64, every stored activation in f32. It is the oracle of the others.
//!
//! Weights are decoded to f32 once, when they are uploaded, so it wants 4 bytes a weight: it is for small models. Work is
//! spread over threads by output features or rows, never within a sum, so that the number of threads changes nothing.

mod attention;
mod linear;
mod moe;
pub(in crate::backend) mod pointwise;

use std::ops::Range;

use crate::backend::{
    Backend, Counters, Dsa, ExpertSource, Heads, Mla, Mode, Operation, Places, Prediction, Rope, Routed, Routing, Tally,
};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::format::Format;
use crate::quantize::Decoder;
use crate::roles::Projection;
use crate::weights::Matrix;

pub(in crate::backend) use attention::best_positions;
pub(in crate::backend) use linear::prediction;
pub(in crate::backend) use moe::choose;

/// The plain backend.
#[derive(Debug, Default)]
pub struct Reference {
    tally: Tally,
}

/// A decoded matrix [rows, columns]; a vector has one column.
#[derive(Debug, Clone)]
pub struct Weight {
    rows: usize,
    columns: usize,
    /// How it was stored, for the counters.
    format: Format,
    values: Vec<f32>,
}

impl Weight {
    /// Row `row` [columns].
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.columns..][..self.columns]
    }
}

/// One routed expert.
#[derive(Debug, Clone)]
struct Expert {
    gate: Weight,
    up: Weight,
    down: Weight,
}

/// The routed experts of a layer.
#[derive(Debug, Clone)]
pub struct Experts(Vec<Expert>);

/// Rows that a cache of so many has room for beside them, at most.
pub fn spare_rows(rows: u64) -> u64 {
    (rows / 16).max(16)
}

/// Activations [n, width], row after row; also what a cache holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Rows {
    pub(in crate::backend) width: usize,
    pub(in crate::backend) values: Vec<f32>,
}

impl Rows {
    /// n.
    pub(in crate::backend) fn count(&self) -> usize {
        self.values.len() / self.width
    }

    /// Adds rows. There is never room for more than [`spare_rows`] that are not there: what grows by doubling has up to
    /// twice the size that it needs.
    pub(in crate::backend) fn extend(&mut self, rows: &Rows) {
        let needed = self.values.len() + rows.values.len();
        if needed > self.values.capacity() {
            let spare = match self.values.is_empty() {
                true => 0,
                false => spare_rows((needed / self.width) as u64) as usize * self.width,
            };
            self.values.reserve_exact(rows.values.len() + spare);
        }
        self.values.extend_from_slice(&rows.values);
    }

    /// Row `row` [width].
    pub(in crate::backend) fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..][..self.width]
    }

    /// Row after row.
    pub(in crate::backend) fn iter(&self) -> std::slice::ChunksExact<'_, f32> {
        self.values.chunks_exact(self.width)
    }
}

/// For each row the chosen experts, best first.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice(pub(in crate::backend) Vec<Vec<Routed>>);

/// For each row the chosen positions, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection(pub(in crate::backend) Vec<Vec<usize>>);

/// Decodes a whole matrix; every format without a decoder is refused by its name.
fn decode(name: &str, matrix: &Matrix) -> Result<Weight> {
    let Matrix { rows, columns, format, .. } = *matrix;
    if Decoder::new(format).is_none() {
        return Err(Fault::new(Place::name(name), FaultKind::BackendFormat { backend: "reference", format }));
    }
    let mut values = vec![0.0; rows * columns];
    if columns > 0 {
        values.chunks_exact_mut(columns).enumerate().for_each(|(row, out)| matrix.dequantize_row(row, out));
    }
    Ok(Weight { rows, columns, format, values })
}

impl Backend for Reference {
    type Weight = Weight;
    type Experts = Experts;
    type Rows = Rows;
    type Cache = Rows;
    type Choice = Choice;
    type Selection = Selection;

    fn name(&self) -> &'static str {
        "reference"
    }

    fn device(&self) -> String {
        "plain loops with f64 sums".into()
    }

    fn mode(&self) -> Mode {
        Mode::Exact
    }

    fn counters(&self) -> Counters {
        self.tally.counters()
    }

    fn upload(&self, name: &str, matrix: Matrix) -> Result<Weight> {
        decode(name, &matrix)
    }

    fn upload_experts(&self, source: &dyn ExpertSource) -> Result<Experts, Faults> {
        let load = |expert, projection| decode(&source.name(expert, projection), &source.load(expert, projection)?);
        let expert = |expert| -> Result<Expert> {
            Ok(Expert {
                gate: load(expert, Projection::Gate)?,
                up: load(expert, Projection::Up)?,
                down: load(expert, Projection::Down)?,
            })
        };
        Ok(Experts((0..source.count()).map(expert).collect::<Result<_>>()?))
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
        self.tally.dispatch(Operation::Embed, Some(table.format));
        let values = ids.iter().flat_map(|&id| table.row(id as usize)).copied().collect();
        Ok(Rows { width: table.columns, values })
    }

    fn rms_norm(&self, x: &Rows, weight: &Weight, eps: f64) -> Result<Rows> {
        self.tally.dispatch(Operation::RmsNorm, Some(weight.format));
        Ok(pointwise::rms_norm(x, &weight.values, eps))
    }

    fn layer_norm(&self, x: &Rows, weight: &Weight, bias: &Weight, eps: f64) -> Result<Rows> {
        self.tally.dispatch(Operation::LayerNorm, Some(weight.format));
        Ok(pointwise::layer_norm(x, &weight.values, &bias.values, eps))
    }

    fn matmul(&self, weight: &Weight, x: &Rows) -> Result<Rows> {
        Ok(self.tally.timed(Operation::Matmul, Some(weight.format), || linear::matmul(weight, x)))
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
        Ok(self.tally.timed(Operation::Select, None, || attention::select(dsa, q, weights, keys, places)))
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
        Ok(self.tally.timed(Operation::Attention, Some(kv_b.format), || {
            attention::attention(mla, q, kv_b, cache, places, selection)
        }))
    }

    fn route(&self, routing: &Routing, gate: &Weight, bias: &Weight, x: &Rows) -> Result<Choice> {
        Ok(self.tally.timed(Operation::Route, Some(gate.format), || moe::route(routing, gate, bias, x)))
    }

    fn read_choice(&self, choice: &Choice) -> Result<Vec<Vec<Routed>>> {
        Ok(choice.0.clone())
    }

    fn experts(&self, experts: &Experts, choice: &Choice, x: &Rows) -> Result<Rows> {
        let mut formats: Vec<Format> = Vec::new();
        if let Some(Expert { gate, up, down }) = experts.0.first() {
            formats.extend([gate.format, up.format, down.format]);
            formats.dedup();
        }
        formats.iter().skip(1).for_each(|&format| self.tally.dispatch(Operation::Experts, Some(format)));
        let first = formats.first().copied();
        Ok(self.tally.timed(Operation::Experts, first, || moe::experts(experts, choice, x)))
    }

    fn predict(&self, head: &Weight, x: &Rows, asked: &[Option<u32>]) -> Result<Vec<Prediction>> {
        Ok(self.tally.timed(Operation::Predict, Some(head.format), || linear::predict(head, x, asked)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::Quantizer;

    #[test]
    fn every_format_is_computed_as_levels_times_scales() {
        let backend = Reference::default();
        let (rows, columns, n) = (5, 131, 3);
        let numbers = |step: usize, count: usize| -> Vec<f32> {
            (0..count).map(|i| (i * step % 997) as f32 / 498.0 - 1.0).collect()
        };
        let (weights, x) = (numbers(7919, rows * columns), numbers(104_729, n * columns));
        for (quantizer, group) in [
            (Quantizer::Int8Row { bits: 8 }, columns),
            (Quantizer::Int8Row { bits: 5 }, columns),
            (Quantizer::Int4Row, columns),
            (Quantizer::Int4Grouped { group_size: 64 }, 64),
            (Quantizer::Int4Grouped { group_size: 7 }, 7),
            (Quantizer::Int3G64, 64),
            (Quantizer::Int2Row, columns),
        ] {
            let (code_bytes, row_scales) = (quantizer.row_code_bytes(columns), quantizer.row_scales(columns));
            let (mut codes, mut scales) = (vec![0; rows * code_bytes], vec![0.0; rows * row_scales]);
            let mut levels = vec![0i8; rows * columns];
            for row in 0..rows {
                let codes = &mut codes[row * code_bytes..][..code_bytes];
                let scales = &mut scales[row * row_scales..][..row_scales];
                quantizer.quantize_row(&weights[row * columns..][..columns], codes, scales);
                let levels = &mut levels[row * columns..][..columns];
                assert!(Decoder::new(quantizer.format()).unwrap().codes_row(codes, levels));
            }
            let matrix = Matrix { rows, columns, format: quantizer.format(), codes, scales: scales.clone() };
            let weight = backend.upload("w", matrix).unwrap();
            let out = backend.read(&backend.matmul(&weight, &backend.write(&x, columns).unwrap()).unwrap()).unwrap();
            for (at, &found) in out.iter().enumerate() {
                let (token, row) = (at / rows, at % rows);
                let term = |i: usize| {
                    let scale = scales[row * row_scales + i / group];
                    f64::from(levels[row * columns + i]) * f64::from(scale) * f64::from(x[token * columns + i])
                };
                let (sum, terms) =
                    (0..columns).map(term).fold((0.0, 0.0), |(sum, terms), t| (sum + t, terms + t.abs()));
                // A level times its scale is rounded to f32 once, the sum once more.
                assert!((f64::from(found) - sum).abs() <= terms * 2f64.powi(-23), "{quantizer:?} {at}: {found} {sum}");
            }
        }
        let counted = backend.counters().0[&(Operation::Matmul, Some("int8-row"))];
        assert_eq!(counted.dispatches, 2);
    }

    #[test]
    fn fp8_blocks_and_f32_are_computed() {
        let backend = Reference::default();
        // 0x38 is 1, 0xb8 is −1; the second column of blocks and the second row of blocks have other scales.
        let (rows, columns) = (129, 129);
        let mut codes = vec![0; rows * columns];
        (codes[0], codes[128], codes[128 * columns], codes[128 * columns + 128]) = (0x38, 0xb8, 0x38, 0x38);
        let matrix = Matrix { rows, columns, format: Format::Fp8E4m3B128, codes, scales: vec![2.0, 3.0, 5.0, 7.0] };
        let fp8 = backend.upload("w", matrix).unwrap();
        let out = backend.matmul(&fp8, &backend.write(&vec![1.0; columns], columns).unwrap()).unwrap();
        assert_eq!((out.values[0], out.values[1], out.values[128]), (2.0 - 3.0, 0.0, 5.0 + 7.0));
        let codes = [0.5f32, -2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let matrix = Matrix { rows: 1, columns: 2, format: Format::F32, codes, scales: vec![] };
        let f32 = backend.upload("w", matrix).unwrap();
        let out = backend.matmul(&f32, &backend.write(&[4.0, 3.0], 2).unwrap()).unwrap();
        assert_eq!(out.values, [-4.0]);
    }

    #[test]
    fn a_format_without_a_decoder_is_refused_by_name() {
        for format in [Format::E8Iq3Lattice, Format::Mxfp4, Format::Int4Grouped { group_size: 0 }] {
            let matrix = Matrix { rows: 1, columns: 4, format, codes: vec![0; 98], scales: vec![1.0] };
            let message = Reference::default().upload("w", matrix).unwrap_err().to_string();
            assert_eq!(message, format!("tensor w: the reference backend does not compute {format}"));
        }
    }
}
