//! The MLP of a layer: dense, or routed experts beside a shared one.

use super::load::Loader;
use super::moe_router::MoeRouter;
use crate::backend::{Backend, Pair};
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

    /// What it makes of x [n, d] is added to `stream` [n, d]. `next` is the MLP of the layer that follows.
    pub fn add_to(&self, backend: &B, stream: &mut B::Rows, x: &B::Rows, next: Option<&Mlp<B>>) -> Result<()> {
        match self {
            Mlp::Dense(mlp) => {
                likely(backend, x, next)?;
                backend.add(stream, &mlp.forward(backend, x)?)
            }
            Mlp::Sparse(moe) => moe.add_to(backend, stream, x, next),
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
    /// `gate_proj` and `up_proj`, each [i, d].
    gate_and_up: Pair<B::Weight>,
    /// [d, i].
    down_proj: B::Weight,
}

impl<B: Backend> GatedMlp<B> {
    fn load(loader: &Loader<'_, B>, prefix: &str) -> Result<GatedMlp<B>> {
        let name = |part: &str| format!("{prefix}.{part}.weight");
        let gate_and_up = loader.pair([&name("gate_proj"), &name("up_proj")])?;
        Ok(GatedMlp { gate_and_up, down_proj: loader.linear(&name("down_proj"))? })
    }

    /// x [n, d] → [n, d].
    pub fn forward(&self, backend: &B, x: &B::Rows) -> Result<B::Rows> {
        let [gate, up] = backend.matmul_pair(self.gate_and_up.as_ref(), x)?;
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

    fn add_to(&self, backend: &B, stream: &mut B::Rows, x: &B::Rows, next: Option<&Mlp<B>>) -> Result<()> {
        let choice = self.gate.forward(backend, x)?;
        // what has to be read is read meanwhile
        backend.announce(&self.experts, &choice)?;
        likely(backend, x, next)?;
        let shared = self.shared_experts.forward(backend, x)?;
        // Σ over the chosen experts of weight · expert(x), + shared(x)
        backend.add_experts(stream, &self.experts, &choice, x, &shared)
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
            let run = |x: &<Reference as Backend>::Rows| {
                let (n, d) = backend.shape(x);
                let mut stream = backend.write(&vec![0.0; n * d], d).unwrap();
                mlp.add_to(&backend, &mut stream, x, None).unwrap();
                backend.read(&stream).unwrap()
            };
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
