//! What a model says next, out of its logits: the best token, or one drawn at random.
//!
//! A drawn token depends on the logits before it, on the settings, and on its number in the text; on nothing else. So a
//! text is the same however many tokens were looked at together, which lets drafts be verified without changing it.

use super::Model;
use crate::backend::Backend;
use crate::error::{Fault, FaultKind, Place, Result};

/// How tokens are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; positive and finite.
    pub temperature: f64,
    /// The least probability of the tokens that may be drawn, all together: above 0, at most 1.
    pub top_p: f64,
    /// Other seeds draw other tokens.
    pub seed: u64,
}

/// Chooses tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sampler {
    /// The id with the largest logit; of equals the lowest.
    Greedy,
    /// Drawn at random.
    Drawn(Sampling),
}

impl Sampler {
    /// The tokens after each row of [`Model::forward`]: x [n, d] → `[n]`. The first would be token `number` of the text that
    /// is generated, from 0.
    pub fn choose<B: Backend>(&self, model: &Model<'_, B>, x: &B::Rows, number: usize) -> Result<Vec<u32>> {
        let (rows, _) = model.backend().shape(x);
        match self {
            Sampler::Greedy => Ok(model.predict(x, &vec![None; rows])?.iter().map(|best| best.id).collect()),
            Sampler::Drawn(sampling) => {
                let logits = model.backend().read(&model.logits(x)?)?;
                let rows = logits.chunks_exact(logits.len() / rows).enumerate();
                let draw = |(row, logits)| {
                    let drawn = sampling.draw(logits, (number + row) as u64);
                    drawn.ok_or_else(|| {
                        Fault::new(Place::default(), FaultKind::LogitsNotFinite { what: "the model", row })
                    })
                };
                rows.map(draw).collect()
            }
        }
    }
}

impl Sampling {
    /// Token `number` of a text, from its logits `[V]`; `None` if they are not finite.
    ///
    /// The tokens that may be drawn are the most probable ones, of equals the lowest ids first, up to the first with which
    /// they reach `top_p` together. All sums are f64, in this order.
    pub fn draw(&self, logits: &[f32], number: u64) -> Option<u32> {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !largest.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
            return None;
        }
        let mut ids: Vec<u64> = logits.iter().zip(0..).map(|(&logit, id)| key(logit, id)).collect();
        ids.sort_unstable();
        let ids: Vec<u32> = ids.into_iter().map(|key| key as u32).collect();
        // exp((logit − largest) / temperature), added up
        let mut sum = 0.0;
        let sums: Vec<f64> = ids
            .iter()
            .map(|&id| {
                let below = f64::from(logits[id as usize]) - f64::from(largest);
                sum += libm::exp(below / self.temperature);
                sum
            })
            .collect();
        let kept = 1 + sums.partition_point(|&reached| reached < self.top_p * sum);
        let kept = kept.min(sums.len());
        let at = uniform(self.seed, number) * sums[kept - 1];
        let drawn = sums[..kept].partition_point(|&reached| reached <= at);
        Some(ids[drawn.min(kept - 1)])
    }
}

/// A number that is less for a larger logit, and of equal logits for a lower id, which are its lowest bits.
fn key(logit: f32, id: u32) -> u64 {
    // −0 is 0. The bits of positive numbers grow with the numbers, those of negative ones the other way.
    let bits = (logit + 0.0).to_bits();
    let descending = if bits >> 31 == 0 { !bits ^ (1 << 31) } else { bits };
    u64::from(descending) << 32 | u64::from(id)
}

/// Number `number`, from 0, of the random numbers that belong to a seed: 0 ≤ u < 1, a multiple of 2^−53.
///
/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), of which any number can be had
/// without those before it.
fn uniform(seed: u64, number: u64) -> f64 {
    (split_mix(seed, number) >> 11) as f64 / (1u64 << 53) as f64
}

fn split_mix(seed: u64, number: u64) -> u64 {
    let state = seed.wrapping_add(number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sampling(temperature: f64, top_p: f64, seed: u64) -> Sampling {
        Sampling { temperature, top_p, seed }
    }

    /// Probabilities of all ids, zero for those that may not be drawn: the definition, step by step.
    fn plain(logits: &[f32], temperature: f64, top_p: f64) -> Vec<f64> {
        let largest = logits.iter().map(|&l| f64::from(l)).fold(f64::MIN, f64::max);
        let weights: Vec<f64> = logits.iter().map(|&l| ((f64::from(l) - largest) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut left: Vec<usize> = (0..logits.len()).collect();
        let (mut kept, mut mass) = (vec![0.0; logits.len()], 0.0);
        while mass < top_p - 1e-12 && !left.is_empty() {
            let mut best = 0;
            for at in 1..left.len() {
                if logits[left[at]] > logits[left[best]] {
                    best = at;
                }
            }
            let id = left.remove(best);
            kept[id] = weights[id] / total;
            mass += kept[id];
        }
        kept.iter().map(|p| p / mass).collect()
    }

    #[test]
    fn random_numbers_are_those_of_the_published_generator() {
        let first: Vec<u64> = (0..5).map(|number| split_mix(1_234_567, number)).collect();
        let published = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(first, published);
        let mean = (0..10_000).map(|number| uniform(7, number)).sum::<f64>() / 1e4;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        assert!((0..10_000).all(|number| (0.0..1.0).contains(&uniform(8, number))));
    }

    #[test]
    fn frequencies_are_the_probabilities() {
        let logits = [1.0, 3.0, -2.0, 3.0, 0.5, 2.5, 2.5, -30.0];
        for (temperature, top_p) in [(1.0, 1.0), (0.5, 0.9), (2.0, 0.7), (1.0, 0.3), (10.0, 1.0)] {
            let expected = plain(&logits, temperature, top_p);
            let draws = 40_000u64;
            let mut counts = [0u64; 8];
            for number in 0..draws {
                counts[sampling(temperature, top_p, 3).draw(&logits, number).unwrap() as usize] += 1;
            }
            for (id, (&count, p)) in counts.iter().zip(&expected).enumerate() {
                let (found, n) = (count as f64, draws as f64);
                // Five standard deviations; what may not be drawn never is.
                let apart = 5.0 * (n * p * (1.0 - p)).sqrt();
                assert!((found - n * p).abs() <= apart, "{temperature} {top_p} {id}: {found}, expected {}", n * p);
            }
        }
    }

    #[test]
    fn the_smallest_set_that_reaches_top_p_is_kept() {
        // Four equal probabilities: a quarter is reached by the first alone, a little more by two.
        let logits = [0.0; 4];
        let drawn = |top_p| {
            let mut ids: Vec<u32> = (0..200).map(|n| sampling(1.0, top_p, 0).draw(&logits, n).unwrap()).collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        assert_eq!(drawn(0.01), [0]);
        assert_eq!(drawn(0.25), [0]);
        assert_eq!(drawn(0.26), [0, 1]);
        assert_eq!(drawn(0.75), [0, 1, 2]);
        assert_eq!(drawn(1.0), [0, 1, 2, 3]);
    }

    #[test]
    fn keys_are_in_order() {
        let mut keys = Vec::new();
        let logits =
            [f32::MAX, 2.5, 1.0, f32::MIN_POSITIVE, 1e-45, 0.0, -1e-45, -1.0, -2.5, f32::MIN, f32::NEG_INFINITY];
        for logit in logits {
            keys.extend([key(logit, 0), key(logit, 7), key(logit, u32::MAX)]);
        }
        assert!(keys.is_sorted() && keys.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!(key(-0.0, 3), key(0.0, 3));
    }

    #[test]
    fn extremes_are_no_accidents() {
        let draw = |logits: &[f32], temperature, top_p| sampling(temperature, top_p, 5).draw(logits, 9);
        assert_eq!(draw(&[f32::NAN, 1.0], 1.0, 1.0), None);
        assert_eq!(draw(&[f32::INFINITY, 1.0], 1.0, 1.0), None);
        assert_eq!(draw(&[f32::NEG_INFINITY; 2], 1.0, 1.0), None);
        assert_eq!(draw(&[], 1.0, 1.0), None);
        assert_eq!(draw(&[f32::NEG_INFINITY, -7.0], 1.0, 1.0), Some(1));
        assert_eq!(draw(&[1.0, 2.0, 2.0], f64::MIN_POSITIVE, 0.5), Some(1));
        assert_eq!(draw(&[f32::MIN, f32::MAX], 1.0, f64::MIN_POSITIVE), Some(1));
        assert!(draw(&[f32::MIN, f32::MAX], f64::MAX, 1.0).is_some());
        assert_eq!(draw(&[0.25], 1.0, 1.0), Some(0));
    }

    proptest! {
        #[test]
        fn a_draw_is_where_the_random_number_falls(
            logits in proptest::collection::vec(-6i8..6, 1..24), temperature in 0.2f64..4.0, top_p in 0.01f64..1.0,
            seed in any::<u64>(), number in any::<u64>(),
        ) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let drawn = sampling(temperature, top_p, seed).draw(&logits, number).unwrap() as usize;
            let expected = plain(&logits, temperature, top_p);
            prop_assert!(expected[drawn] > 0.0);
            let before = |id: usize| {
                let earlier = |&other: &usize| (logits[other], id) > (logits[id], other) && other != id;
                (0..logits.len()).filter(earlier).map(|other| expected[other]).sum::<f64>()
            };
            let (from, at) = (before(drawn), uniform(seed, number));
            prop_assert!(from - 1e-9 <= at && at <= from + expected[drawn] + 1e-9, "{at} in {from} + {}", expected[drawn]);
        }
    }
}
