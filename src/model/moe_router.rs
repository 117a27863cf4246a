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
