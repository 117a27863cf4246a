//! Products of rows with stored matrices, spread over threads, and the output head.

use rayon::prelude::*;

use super::simd::{self, CHUNK, Coding, Job, LANES, Line};
use super::{Operand, Rows};
use crate::backend::Prediction;
use crate::backend::reference::prediction;
use crate::isa::Isa;

/// Weight rows of one task: few enough that threads end together, and a multiple of what a kernel takes at once.
const TASK_ROWS: usize = 64;
/// Rows whose logits the output head keeps at once.
const HEAD_ROWS: usize = 64;
/// Rows that are put in order at once after a product.
const TURNED_ROWS: usize = 16;

/// Rows of x in the order of a coding, filled up with zeros.
#[derive(Debug)]
pub struct Packed {
    coding: Coding,
    n: usize,
    lines: usize,
    /// From one row to the next: with a line more than a row has, so that rows do not compete for the same places of a cache.
    stride: usize,
    values: Vec<Line>,
}

impl Packed {
    /// x [n, I].
    pub fn new(x: &Rows, coding: Coding) -> Packed {
        let (n, lines) = (x.count(), x.width.div_ceil(CHUNK) * (CHUNK / LANES));
        let order = simd::order(coding);
        let natural = order.iter().enumerate().all(|(p, &column)| p == usize::from(column));
        let stride = lines + 1;
        let mut values = vec![Line::default(); n * stride];
        for (row, lines) in x.iter().zip(values.chunks_exact_mut(stride)) {
            let whole = if natural { row.len() } else { row.len() / CHUNK * CHUNK };
            let (whole, rest) = row.split_at(whole);
            if natural {
                for (line, values) in lines.iter_mut().zip(whole.chunks(LANES)) {
                    line.0[..values.len()].copy_from_slice(values);
                }
                continue;
            }
            let (chunks, _) = lines.as_chunks_mut::<{ CHUNK / LANES }>();
            let mut last = [0.0; CHUNK];
            last[..rest.len()].copy_from_slice(rest);
            let whole = whole.as_chunks::<CHUNK>().0.iter();
            for (values, chunk) in whole.chain(std::iter::once(&last)).zip(chunks) {
                for (p, &column) in order.iter().enumerate() {
                    chunk[p / LANES].0[p % LANES] = values[usize::from(column)];
                }
            }
        }
        Packed { coding, n, lines, stride, values }
    }
}

impl Packed {
    /// The product with a matrix.
    pub fn job<'a>(&'a self, weight: Operand<'a>) -> Job<'a> {
        assert_eq!(self.coding, weight.coding, "the order of a product's inputs");
        Job {
            matrix: weight.matrix,
            coding: weight.coding,
            x: &self.values,
            n: self.n,
            stride: self.stride,
            lines: self.lines,
            row_bytes: weight.row_bytes,
            row_scales: weight.row_scales,
        }
    }
}

/// x [n, I] · weightᵀ [I, O] → [n, O].
pub fn matmul(isa: Isa, weight: Operand<'_>, x: &Rows) -> Rows {
    assert_eq!(x.width, weight.matrix.columns, "inputs of a product");
    packed_matmul(isa, weight, &Packed::new(x, weight.coding))
}

/// The same for rows that are in the order of the weight's coding.
pub fn packed_matmul(isa: Isa, weight: Operand<'_>, x: &Packed) -> Rows {
    let (n, features) = (x.n, weight.matrix.rows);
    if n == 0 || features == 0 {
        return Rows { width: features, values: Vec::new() };
    }
    let job = x.job(weight);
    // Feature by feature first [O, n]: a task reads each row of the matrix once for all rows of x.
    let mut by_feature = vec![0.0f32; features * n];
    by_feature
        .par_chunks_mut(TASK_ROWS * n)
        .enumerate()
        .for_each(|(task, out)| simd::multiply(isa, &job, task * TASK_ROWS, out));
    if n == 1 {
        return Rows { width: features, values: by_feature };
    }
    let mut values = vec![0.0; n * features];
    values.par_chunks_mut(TURNED_ROWS * features).enumerate().for_each(|(number, out)| {
        let first = number * TURNED_ROWS;
        let rows = out.len() / features;
        for (feature, of_rows) in by_feature.chunks_exact(n).enumerate() {
            for (row, &value) in of_rows[first..first + rows].iter().enumerate() {
                out[row * features + feature] = value;
            }
        }
    });
    Rows { width: features, values }
}

/// What the output head says after each row of x [n, I]; `asked [n]`.
pub fn predict(isa: Isa, head: Operand<'_>, x: &Rows, asked: &[Option<u32>]) -> Vec<Prediction> {
    assert_eq!(x.count(), asked.len(), "rows and asked ids");
    let mut predictions = Vec::with_capacity(asked.len());
    for (x, asked) in x.values.chunks(HEAD_ROWS * x.width).zip(asked.chunks(HEAD_ROWS)) {
        let logits = matmul(isa, head, &Rows { width: head.matrix.columns, values: x.to_vec() });
        let each = logits.values.par_chunks_exact(logits.width).zip(asked);
        predictions.par_extend(each.map(|(logits, &asked)| prediction(logits, asked)));
    }
    predictions
}
