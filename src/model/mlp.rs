//! The MLP of a layer: dense, or routed experts beside a shared one.

use super::load::Loader;
use super::moe_router::MoeRouter;
use crate::backend::Backend;
use crate::error::{Faults, Result};

/// The MLP of a layer.
pub enum Mlp<B: Backend> {
    /// Of the dense layers.
    Dense(GatedMlp<B>),
    /// Of the sparse layers.
    Sparse(Moe<B>),
}

impl<B: Backend> Mlp<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: u64, sparse: bool) -> Result<Mlp<B>, Faults> {
        if sparse {
            Ok(Mlp::Sparse(Moe::load(loader, layer)?))
        } else {
            Ok(Mlp::Dense(GatedMlp::load(loader, &format!("model.layers.{layer}.mlp"))?))
        }
    }

    /// x [n, d] → [n, d]. `next` is the MLP of the layer that follows.
    pub fn forward(&self, backend: &B, x: &B::Rows, next: Option<&Mlp<B>>) -> Result<B::Rows> {
        match self {
            Mlp::Dense(mlp) => {
                likely(backend, x, next)?;
                mlp.forward(backend, x)
            }
            Mlp::Sparse(moe) => moe.forward(backend, x, next),
        }
    }
}

/// Tells which experts the MLP after this one is likely to choose: those that its router chooses by the inputs of this one,
/// because a layer changes the residual stream but little.
fn likely<B: Backend>(backend: &B, x: &B::Rows, next: Option<&Mlp<B>>) -> Result<()> {
    match next {
        Some(Mlp::Sparse(next)) => backend.read_ahead(&next.experts, &|| next.gate.forward(backend, x)),
        _ => Ok(()),
    }
}

/// down(silu(gate x) · up x), with an inner width i.
pub struct GatedMlp<B: Backend> {
    /// [i, d].
    gate_proj: B::Weight,
    /// [i, d].
    up_proj: B::Weight,
    /// [d, i].
    down_proj: B::Weight,
}

impl<B: Backend> GatedMlp<B> {
    fn load(loader: &Loader<'_, B>, prefix: &str) -> Result<GatedMlp<B>> {
        let linear = |part: &str| loader.linear(&format!("{prefix}.{part}.weight"));
        Ok(GatedMlp { gate_proj: linear("gate_proj")?, up_proj: linear("up_proj")?, down_proj: linear("down_proj")? })
    }

    /// x [n, d] → [n, d].
    pub fn forward(&self, backend: &B, x: &B::Rows) -> Result<B::Rows> {
        let gate = backend.matmul(&self.gate_proj, x)?;
        let up = backend.matmul(&self.up_proj, x)?;
        backend.matmul(&self.down_proj, &backend.swiglu(&gate, &up)?)
    }
}

/// A mixture of experts.
pub struct Moe<B: Backend> {
    gate: MoeRouter<B>,
    /// E experts, each a [`GatedMlp`] of inner width `moe_intermediate_size`.
    experts: B::Experts,
    /// Of inner width `n_shared_experts` · `moe_intermediate_size`.
    shared_experts: GatedMlp<B>,
}

impl<B: Backend> Moe<B> {
    fn load(loader: &Loader<'_, B>, layer: u64) -> Result<Moe<B>, Faults> {
        Ok(Moe {
            gate: MoeRouter::load(loader, layer)?,
            shared_experts: GatedMlp::load(loader, &format!("model.layers.{layer}.mlp.shared_experts"))?,
            experts: loader.experts(layer)?,
        })
    }

    /// x [n, d] → [n, d].
    fn forward(&self, backend: &B, x: &B::Rows, next: Option<&Mlp<B>>) -> Result<B::Rows> {
        let choice = self.gate.forward(backend, x)?;
        // what has to be read is read meanwhile
        backend.announce(&self.experts, &choice)?;
        likely(backend, x, next)?;
        let shared = self.shared_experts.forward(backend, x)?;
        // Σ over the chosen experts of weight · expert(x)
        let mut sum = backend.experts(&self.experts, &choice, x)?;
        // + shared(x)
        backend.add(&mut sum, &shared)?;
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{Synthetic, TOKENS, assert_close, blocks, input, pieces};
    use super::*;
    use crate::backend::reference::Reference;
    use crate::weights::Weights;

    #[test]
    fn dense_and_sparse_are_those_of_transformers() {
        let backend = Reference::default();
        let weights = Synthetic::new(json!({}));
        let loader = Loader::new(&weights, &backend);
        let x = input(&backend, "input.mlp", weights.config().hidden_size);
        for (layer, sparse, block) in [(0, false, "mlp"), (1, true, "moe")] {
            let mlp = Mlp::load(&loader, layer, sparse).unwrap();
            let run = |x: &_| backend.read(&mlp.forward(&backend, x, None).unwrap()).unwrap();
            let whole = run(&x);
            assert_close(&whole, &blocks()[block]);
            for seed in 0..4 {
                let rows = pieces(TOKENS, seed).into_iter();
                let in_pieces: Vec<f32> =
                    rows.flat_map(|rows| run(&backend.slice(&x, rows, 0..backend.shape(&x).1).unwrap())).collect();
                assert_eq!(in_pieces, whole);
            }
        }
    }
}
