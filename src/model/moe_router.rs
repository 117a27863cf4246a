//! The router of a mixture of experts.

use super::load::Loader;
use crate::backend::{Backend, Routing};
use crate::error::Result;

/// The router of a layer with E experts.
pub struct MoeRouter<B: Backend> {
    /// `mlp.gate` [E, d].
    weight: B::Weight,
    /// `mlp.gate.e_score_correction_bias` [E].
    e_score_correction_bias: B::Weight,
    routing: Routing,
}

impl<B: Backend> MoeRouter<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: u64) -> Result<MoeRouter<B>> {
        let weight = |part: &str| loader.weight(&format!("model.layers.{layer}.mlp.gate.{part}"));
        let config = loader.config();
        Ok(MoeRouter {
            weight: weight("weight")?,
            e_score_correction_bias: weight("e_score_correction_bias")?,
            routing: Routing {
                chosen: config.num_experts_per_tok as usize,
                groups: config.n_group as usize,
                chosen_groups: config.topk_group as usize,
                normalized: config.norm_topk_prob,
                factor: config.routed_scaling_factor as f32,
            },
        })
    }

    /// The experts of each row of x [n, d]: s = sigmoid(gate x), chosen by s + bias, weighted by s.
    pub fn forward(&self, backend: &B, x: &B::Rows) -> Result<B::Choice> {
        backend.route(&self.routing, &self.weight, &self.e_score_correction_bias, x)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::testing::{Synthetic, blocks, input};
    use super::*;
    use crate::backend::Routed;
    use crate::backend::reference::Reference;
    use crate::weights::Weights;

    /// The choice of layer 1's router, each row's by expert.
    fn route(changes: Value) -> Vec<Vec<Routed>> {
        let backend = Reference::default();
        let weights = Synthetic::new(changes);
        let router = MoeRouter::load(&Loader::new(&weights, &backend), 1).unwrap();
        let x = input(&backend, "input.mlp", weights.config().hidden_size);
        let mut rows = backend.read_choice(&router.forward(&backend, &x).unwrap()).unwrap();
        rows.iter_mut().for_each(|row| row.sort_by_key(|&(expert, _)| expert));
        rows
    }

    #[test]
    fn experts_and_weights_are_those_of_transformers() {
        for (block, changes) in [
            ("router", json!({})),
            ("router_unnormalized", json!({"norm_topk_prob": false})),
            ("router_one_group", json!({"n_group": 1, "topk_group": 1})),
        ] {
            let expected: Vec<Vec<Routed>> = serde_json::from_value(blocks()[block].clone()).unwrap();
            let found = route(changes);
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                assert_eq!(found.0, expected.0, "{block}");
                assert!((found.1 - expected.1).abs() < 1e-6, "{block}: {found:?}, expected {expected:?}");
            }
        }
    }

    #[test]
    fn the_blocks_would_show_a_mask_of_zero() {
        // All biased scores of the kept groups below 0 somewhere: there a mask of 0 would have chosen masked experts.
        let grouped = route(json!({}));
        assert_ne!(grouped, route(json!({"n_group": 1, "topk_group": 1})));
        let groups = |row: &[Routed]| {
            let mut groups: Vec<usize> = row.iter().map(|(expert, _)| expert / 2).collect();
            groups.dedup();
            groups.len()
        };
        assert!(grouped.iter().all(|row| groups(row) == 2));
    }
}
