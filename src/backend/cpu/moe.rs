//! The chosen experts.

use super::linear::{Packed, matmul, packed_matmul};
use super::{Choice, Experts, Operand, Rows, Source};
use crate::backend::Routed;
use crate::backend::reference::pointwise;
use crate::error::Result;
use crate::isa::Isa;

/// The experts that any row chose, ascending.
pub fn chosen(choice: &Choice) -> Vec<usize> {
    let mut chosen: Vec<usize> = choice.0.iter().flatten().map(|&(expert, _)| expert).collect();
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

/// Σ over the chosen experts of weight · down(swiglu(gate x, up x)), expert by expert in the order of their indices: the
/// weights of each are read once for all rows that chose it, and the order of a row's sum is its own. Where experts come
/// from the disk, the next are read meanwhile.
pub fn experts(isa: Isa, experts: &Experts, choice: &Choice, x: &Rows) -> Result<Rows> {
    assert_eq!(choice.0.len(), x.count(), "rows and choices");
    let mut rows_of: Vec<Vec<(usize, f32)>> = vec![Vec::new(); experts.count()];
    for (row, chosen) in choice.0.iter().enumerate() {
        chosen.iter().for_each(|&(expert, weight): &Routed| rows_of[expert].push((row, weight)));
    }
    let mut sums = vec![0.0f64; x.values.len()];
    let mut add = |expert: usize, matrices: [Operand<'_>; 3]| {
        let rows = &rows_of[expert];
        let gathered = Rows { width: x.width, values: rows.iter().flat_map(|&(row, _)| x.row(row)).copied().collect() };
        let out = mlp(isa, matrices, &gathered);
        for (&(row, weight), out) in rows.iter().zip(out.iter()) {
            for (sum, &out) in sums[row * x.width..][..x.width].iter_mut().zip(out) {
                *sum += f64::from(weight) * f64::from(out);
            }
        }
    };
    let chosen = chosen(choice);
    match &experts.0 {
        Source::Loaded(experts) => chosen.iter().for_each(|&expert| add(expert, experts[expert].operands())),
        Source::OnDemand(layer) => {
            for (&expert, wanted) in chosen.iter().zip(layer.request(&chosen)) {
                add(expert, wanted?.matrices().map(Operand::new));
            }
        }
    }
    Ok(Rows { width: x.width, values: sums.into_iter().map(|sum| sum as f32).collect() })
}

/// down(swiglu(gate x, up x)).
fn mlp(isa: Isa, [gate, up, down]: [Operand<'_>; 3], x: &Rows) -> Rows {
    let packed = Packed::new(x, gate.coding);
    let gated = packed_matmul(isa, gate, &packed);
    let up = match up.coding == gate.coding {
        true => packed_matmul(isa, up, &packed),
        false => matmul(isa, up, x),
    };
    matmul(isa, down, &pointwise::swiglu(&gated, &up))
}
