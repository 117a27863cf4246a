//! Multi-head latent attention: keys and values of all heads come from one compressed row a position.

use super::dsa_indexer::DsaIndexer;
use super::kv_cache::LayerCache;
use super::load::Loader;
use crate::backend::{Backend, Heads, Kept, Mla, Pair, Places, Rope};
use crate::config::Config;
use crate::error::Result;

/// eps of the norms inside attention: transformers gives `q_a_layernorm` and `kv_a_layernorm` its default and not
/// `rms_norm_eps`.
const INNER_NORM_EPS: f64 = 1e-6;

/// Attention of one layer, H heads.
pub struct AttentionMla<B: Backend> {
    /// `q_a_proj` [q_lora_rank, d] and `kv_a_proj_with_mqa` [kv_lora_rank + rope, d].
    q_a_and_kv_a: Pair<B::Weight>,
    /// [q_lora_rank].
    q_a_layernorm: B::Weight,
    /// [H · (nope + rope), q_lora_rank].
    q_b_proj: B::Weight,
    /// [kv_lora_rank].
    kv_a_layernorm: B::Weight,
    /// [H · (nope + value), kv_lora_rank].
    kv_b_proj: B::Weight,
    /// [d, H · value].
    o_proj: B::Weight,
    /// Only in full layers.
    indexer: Option<DsaIndexer<B>>,
    mla: Mla,
    rope: Rope,
}

impl<B: Backend> AttentionMla<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: u64, indexer: bool) -> Result<AttentionMla<B>> {
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}.weight");
        let (weight, linear) = (|part: &str| loader.weight(&name(part)), |part: &str| loader.linear(&name(part)));
        let rope = rope(loader.config());
        Ok(AttentionMla {
            q_a_and_kv_a: loader.pair([&name("q_a_proj"), &name("kv_a_proj_with_mqa")])?,
            q_a_layernorm: weight("q_a_layernorm")?,
            q_b_proj: linear("q_b_proj")?,
            kv_a_layernorm: weight("kv_a_layernorm")?,
            kv_b_proj: weight("kv_b_proj")?,
            o_proj: linear("o_proj")?,
            indexer: indexer.then(|| DsaIndexer::load(loader, layer, rope.clone())).transpose()?,
            mla: mla(loader.config()),
            rope,
        })
    }

    /// x [n, d] at these places → [n, d].
    pub fn forward(
        &self,
        backend: &B,
        x: &B::Rows,
        cache: &mut LayerCache<B>,
        places: &Places,
        index_topk: usize,
        selection: &mut Option<B::Selection>,
    ) -> Result<B::Rows> {
        let Mla { nope, rope, latent, .. } = self.mla;
        let positions = places.positions();
        // q_a x [n, q_lora_rank] and kv = kv_a x [n, kv_lora_rank + rope]
        let [q_a, kv] = backend.matmul_pair(self.q_a_and_kv_a.as_ref(), x)?;
        // c_q = q_a_layernorm(q_a x) [n, q_lora_rank]
        let c_q = backend.rms_norm(&q_a, &self.q_a_layernorm, INNER_NORM_EPS)?;
        // q = q_b c_q [n, H · (nope + rope)]
        let mut q = backend.matmul(&self.q_b_proj, &c_q)?;
        // the rope part of each head of q is turned by its position; of kv the latent is normalized and the one shared key
        // turned, which is all that is kept of a position
        let heads = Heads { width: nope + rope, rope_at: nope };
        let kept = Kept { norm: &self.kv_a_layernorm, eps: INNER_NORM_EPS, latent, rope: &self.rope, heads };
        backend.keep(&mut cache.kv, &mut q, &kv, &kept, positions)?;
        // positions to look at: a full layer chooses, a shared one looks where the last full one did
        if let (Some(indexer), Some(keys)) = (&self.indexer, &mut cache.index_keys) {
            *selection = indexer.select(backend, x, &c_q, keys, places, index_topk)?;
        }
        // softmax(q · k) v [n, H · value]
        let context = backend.attention(&self.mla, &q, &self.kv_b_proj, &cache.kv, places, selection.as_ref())?;
        backend.matmul(&self.o_proj, &context)
    }
}

/// The dimensions of attention under a config.
fn mla(config: &Config) -> Mla {
    Mla {
        heads: config.num_attention_heads as usize,
        nope: config.qk_nope_head_dim as usize,
        rope: config.qk_rope_head_dim as usize,
        value: config.v_head_dim as usize,
        latent: config.kv_lora_rank as usize,
    }
}

/// theta^(−2j/rope), rounded to f32 at each step as transformers does: over long contexts the roundings show.
fn rope(config: &Config) -> Rope {
    let width = config.qk_rope_head_dim as f32;
    let frequency = |j: u64| {
        let exponent = (2 * j) as f32 / width;
        1.0 / config.rope_theta.powf(f64::from(exponent)) as f32
    };
    Rope { frequencies: (0..config.qk_rope_head_dim / 2).map(frequency).collect() }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::kv_cache::KvCache;
    use super::super::testing::{Synthetic, TOKENS, assert_close, blocks, input, pieces, whole};
    use super::*;
    use crate::backend::reference::Reference;
    use crate::weights::Weights;

    /// Attention of layer 0 over the input in pieces: its output and the positions it looked at.
    fn attention(topk: usize, pieces: &[std::ops::Range<usize>]) -> (Vec<f32>, Vec<Option<Vec<usize>>>) {
        let backend = Reference::default();
        let weights = Synthetic::new(json!({}));
        let module = AttentionMla::load(&Loader::new(&weights, &backend), 0, true).unwrap();
        let mut cache = KvCache::new(&backend, weights.config(), topk).unwrap();
        let x = input(&backend, "input.attention", weights.config().hidden_size);
        let (mut output, mut chosen) = (Vec::new(), Vec::new());
        for piece in pieces {
            let x = backend.slice(&x, piece.clone(), 0..backend.shape(&x).1).unwrap();
            let mut selection = None;
            let places = Places::after(piece.start, piece.len());
            let layer = &mut cache.layers_mut()[0];
            let out = module.forward(&backend, &x, layer, &places, topk, &mut selection).unwrap();
            output.extend(backend.read(&out).unwrap());
            match selection {
                Some(selection) => chosen.extend(backend.read_selection(&selection).unwrap().into_iter().map(Some)),
                None => chosen.extend(piece.clone().map(|_| None)),
            }
        }
        (output, chosen)
    }

    #[test]
    fn dense_attention_is_that_of_transformers() {
        let (output, chosen) = attention(4096, &whole());
        assert_close(&output, &blocks()["attention_dense"]);
        assert!(chosen.iter().all(Option::is_none));
        for seed in 0..8 {
            assert_eq!(attention(4096, &pieces(TOKENS, seed)).0, output);
        }
    }

    #[test]
    fn sparse_attention_looks_where_transformers_does() {
        let expected: &Value = &blocks()["attention_sparse"];
        let expected_chosen: Vec<Vec<usize>> = serde_json::from_value(expected["chosen"].clone()).unwrap();
        let (output, chosen) = attention(4, &whole());
        assert_close(&output, &expected["output"]);
        assert_eq!(chosen, expected_chosen.iter().cloned().map(Some).collect::<Vec<_>>());
        for seed in 0..8 {
            let (in_pieces, chosen) = attention(4, &pieces(TOKENS, seed));
            assert_eq!(in_pieces, output);
            // A piece that ends within the first four positions looks at all of them without a choice.
            for (position, chosen) in chosen.into_iter().enumerate() {
                assert!(chosen.is_none() && position < 4 || chosen.as_ref() == Some(&expected_chosen[position]));
            }
        }
    }

    #[test]
    fn far_positions_turn_as_in_transformers() {
        let backend = Reference::default();
        let glm = json!({"qk_rope_head_dim": 64, "index_head_dim": 128, "rope_parameters": {"rope_theta": 8e6}});
        let rope = rope(Synthetic::new(glm).config());
        for expected in blocks()["rope"].as_array().unwrap() {
            // (1, 0) turns to (cos, sin).
            let mut x = backend.write(&[1.0, 0.0].repeat(32), 64).unwrap();
            let position = expected["position"].as_u64().unwrap() as usize;
            backend.rope(&mut x, &rope, Heads { width: 64, rope_at: 0 }, &[position]).unwrap();
            let (cos, sin): (Vec<f32>, Vec<f32>) =
                backend.read(&x).unwrap().as_chunks::<2>().0.iter().map(|[x0, x1]| (*x0, *x1)).unzip();
            assert_close(&cos, &expected["cos"]);
            assert_close(&sin, &expected["sin"]);
        }
    }
}
