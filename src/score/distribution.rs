//! Next-token distributions: log-probabilities, the part of one that is stored, and how far two are apart.

use serde::{Deserialize, Serialize};

/// Tokens of a distribution that are stored one by one.
pub const TOP_K: usize = 16;

/// The distribution after one token, from its logits `[V]`.
#[derive(Debug)]
pub struct Distribution<'a> {
    logits: &'a [f32],
    /// ln Σ exp(logit), in f64.
    log_sum_exp: f64,
    /// The id with the largest logit; of equals the lowest.
    pub best: u32,
}

/// The most probable tokens of a distribution, and the mass of all others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Top {
    /// Ids, the most probable first; of equals the lowest first.
    pub ids: Vec<u32>,
    /// Their log-probabilities, natural.
    pub logprobs: Vec<f64>,
    /// Logarithm of the mass of all other tokens; null if there are none.
    pub rest: Option<f64>,
}

/// To nine decimals, as it is stored: what is computed from a value is the same before and after.
pub fn rounded(value: f64) -> f64 {
    (value * 1e9).round() / 1e9
}

impl<'a> Distribution<'a> {
    /// The distribution of logits `[V]`; `None` if they are not finite.
    pub fn of(logits: &'a [f32]) -> Option<Distribution<'a>> {
        let (mut best, mut largest) = (0, f32::NEG_INFINITY);
        for (id, &logit) in logits.iter().enumerate() {
            if logit > largest {
                (best, largest) = (id as u32, logit);
            }
        }
        let largest = f64::from(largest);
        let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
        let log_sum_exp = largest + sum.ln();
        log_sum_exp.is_finite().then_some(Distribution { logits, log_sum_exp, best })
    }

    /// Natural logarithm of an id's probability.
    pub fn logprob(&self, id: u32) -> f64 {
        f64::from(self.logits[id as usize]) - self.log_sum_exp
    }

    /// Logarithm of the mass of all ids but these; `None` if there are none.
    fn rest(&self, ids: &[u32]) -> Option<f64> {
        if ids.len() >= self.logits.len() {
            return None;
        }
        // Of the logits themselves: one minus the others' mass would lose its digits.
        let mut others = self.logits.to_vec();
        ids.iter().for_each(|&id| others[id as usize] = f32::NEG_INFINITY);
        let largest = f64::from(others.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        if largest == f64::NEG_INFINITY {
            return None;
        }
        let sum: f64 = others.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
        Some(largest + sum.ln() - self.log_sum_exp)
    }

    /// The `k` most probable tokens.
    pub fn top(&self, k: usize) -> Top {
        let mut order: Vec<u32> = (0..self.logits.len() as u32).collect();
        let first = |a: &u32, b: &u32| {
            let (x, y) = (self.logits[*a as usize] + 0.0, self.logits[*b as usize] + 0.0);
            y.total_cmp(&x).then(a.cmp(b))
        };
        if k < order.len() {
            order.select_nth_unstable_by(k, first);
            order.truncate(k);
        }
        order.sort_unstable_by(first);
        let logprobs = order.iter().map(|&id| rounded(self.logprob(id))).collect();
        Top { rest: self.rest(&order).map(rounded), ids: order, logprobs }
    }

    /// KL(p ‖ self) = Σ p (ln p − ln q) over all tokens.
    pub fn divergence_from(&self, p: &Distribution<'_>) -> f64 {
        let term = |(&p_logit, &q_logit): (&f32, &f32)| {
            let p_log = f64::from(p_logit) - p.log_sum_exp;
            p_log.exp() * (p_log - (f64::from(q_logit) - self.log_sum_exp))
        };
        // Rounding can make the divergence of equals a little less than nothing.
        p.logits.iter().zip(self.logits).map(term).sum::<f64>().max(0.0)
    }

    /// The same where only the top of p is known: all other tokens count as one, so it is at most the true divergence.
    pub fn divergence_from_top(&self, p: &Top) -> f64 {
        let term = |p_log: f64, q_log: f64| p_log.exp() * (p_log - q_log);
        let known: f64 = p.ids.iter().zip(&p.logprobs).map(|(&id, &p_log)| term(p_log, self.logprob(id))).sum();
        let rest = p.rest.zip(self.rest(&p.ids)).map_or(0.0, |(p_log, q_log)| term(p_log, q_log));
        (known + rest).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: [f32; 5] = [1.0, 3.0, -2.0, 3.0, 0.5];
    const Q: [f32; 5] = [0.0, 2.5, 1.0, 3.5, -4.0];

    fn probabilities(logits: &[f32]) -> Vec<f64> {
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        logits.iter().map(|&l| f64::from(l).exp() / sum).collect()
    }

    #[test]
    fn logprobs_are_those_of_softmax() {
        let (d, p) = (Distribution::of(&P).unwrap(), probabilities(&P));
        assert_eq!(d.best, 1);
        for (id, p) in p.iter().enumerate() {
            assert!((d.logprob(id as u32) - p.ln()).abs() < 1e-12);
        }
        let top = d.top(2);
        assert_eq!(top.ids, [1, 3]);
        assert!((top.rest.unwrap() - (p[0] + p[2] + p[4]).ln()).abs() < 1e-8);
        assert_eq!(d.top(5).rest, None);
        assert_eq!(d.top(9).ids, [1, 3, 0, 4, 2]);
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(Distribution::of(&[0.0, bad]).is_none());
        }
        assert!(Distribution::of(&[f32::NEG_INFINITY; 2]).is_none());
    }

    #[test]
    fn divergences_by_hand() {
        let (p, q) = (probabilities(&P), probabilities(&Q));
        let (dp, dq) = (Distribution::of(&P).unwrap(), Distribution::of(&Q).unwrap());
        let exact: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
        assert!((dq.divergence_from(&dp) - exact).abs() < 1e-9);
        assert_eq!(dp.divergence_from(&dp), 0.0);
        // Tokens 1 and 3 apart, the others as one.
        let (rest_p, rest_q) = (p[0] + p[2] + p[4], q[0] + q[2] + q[4]);
        let joined = p[1] * (p[1] / q[1]).ln() + p[3] * (p[3] / q[3]).ln() + rest_p * (rest_p / rest_q).ln();
        assert!((dq.divergence_from_top(&dp.top(2)) - joined).abs() < 1e-7);
        assert!(joined < exact);
        assert!((dq.divergence_from_top(&dp.top(5)) - exact).abs() < 1e-7);
    }
}
