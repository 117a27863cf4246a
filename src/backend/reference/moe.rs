//! The choice of experts, and the chosen experts.

use super::linear::{matmul, widened};
use super::{Choice, Expert, Experts, Rows, Weight, pointwise};
use crate::backend::{Routed, Routing};

/// Chooses experts for each row: see [`crate::backend::Backend::route`].
pub fn route(routing: &Routing, gate: &Weight, bias: &Weight, x: &Rows) -> Choice {
    assert_eq!(gate.rows, bias.rows, "experts of a router");
    choose(routing, &bias.values, &matmul(gate, x))
}

/// The same from the router's logits [n, experts].
pub fn choose(routing: &Routing, bias: &[f32], logits: &Rows) -> Choice {
    let of_row = |logits: &[f32]| {
        // s = sigmoid(router x) [experts]
        let scores: Vec<f32> = logits.iter().map(|&z| (1.0 / (1.0 + (-f64::from(z)).exp())) as f32).collect();
        // s + bias decides, s weighs
        let mut biased: Vec<f32> = scores.iter().zip(bias).map(|(s, bias)| s + bias).collect();
        mask_groups(routing, &mut biased);
        let mut routed = weighted(routing, &scores, &best(&biased, routing.chosen));
        // Nothing can be chosen by what is no number: it is to be seen in the logits.
        if logits.iter().chain(bias).any(|value| !value.is_finite()) {
            routed.iter_mut().for_each(|(_, weight)| *weight = f32::NAN);
        }
        routed
    };
    Choice(logits.iter().map(of_row).collect())
}

/// Sets every expert outside the `chosen_groups` best groups to −∞: biased [experts].
fn mask_groups(routing: &Routing, biased: &mut [f32]) {
    if routing.groups == 1 {
        return;
    }
    let size = biased.len() / routing.groups;
    // a group counts by the sum of its two best
    let of_group = |group: &[f32]| best(group, 2.min(size)).iter().map(|&expert| group[expert]).sum();
    let groups: Vec<f32> = biased.chunks_exact(size).map(of_group).collect();
    let kept = best(&groups, routing.chosen_groups);
    for (group, biased) in biased.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&group) {
            biased.fill(f32::NEG_INFINITY);
        }
    }
}

/// Indices of the `count` largest values, best first; of equals the lowest index.
fn best(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    // + 0.0 makes 0 of −0, which would count as less
    order.sort_by(|&a, &b| (values[b] + 0.0).total_cmp(&(values[a] + 0.0)).then(a.cmp(&b)));
    order.truncate(count);
    order
}

/// The chosen experts with their weights: s, divided by (Σ s + 1e-20) if normalized, times the factor.
fn weighted(routing: &Routing, scores: &[f32], chosen: &[usize]) -> Vec<Routed> {
    let sum: f64 = chosen.iter().map(|&expert| f64::from(scores[expert])).sum();
    let divisor = if routing.normalized { sum + 1e-20 } else { 1.0 };
    let weight = |expert: usize| (f64::from(scores[expert]) / divisor * f64::from(routing.factor)) as f32;
    chosen.iter().map(|&expert| (expert, weight(expert))).collect()
}

/// Σ over the chosen experts of weight · down(swiglu(gate x, up x)), expert by expert in the order of their indices.
pub fn experts(experts: &Experts, choice: &Choice, x: &Rows) -> Rows {
    assert_eq!(choice.0.len(), x.count(), "rows and choices");
    let mut sums = vec![0.0f64; x.values.len()];
    for (index, expert) in experts.0.iter().enumerate() {
        // the rows that chose this expert, with its weight
        let weight_of = |chosen: &Vec<Routed>| chosen.iter().find(|(expert, _)| *expert == index).map(|&(_, w)| w);
        let rows: Vec<(usize, f32)> =
            choice.0.iter().enumerate().filter_map(|(row, chosen)| Some((row, weight_of(chosen)?))).collect();
        if rows.is_empty() {
            continue;
        }
        let gathered = Rows { width: x.width, values: rows.iter().flat_map(|&(row, _)| x.row(row)).copied().collect() };
        let out = mlp(expert, &gathered);
        for (&(row, weight), out) in rows.iter().zip(out.iter()) {
            for (sum, out) in sums[row * x.width..][..x.width].iter_mut().zip(widened(out)) {
                *sum += f64::from(weight) * out;
            }
        }
    }
    Rows { width: x.width, values: sums.into_iter().map(|sum| sum as f32).collect() }
}

/// down(swiglu(gate x, up x)).
fn mlp(expert: &Expert, x: &Rows) -> Rows {
    matmul(&expert.down, &pointwise::swiglu(&matmul(&expert.gate, x), &matmul(&expert.up, x)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;

    /// Chooses for one row whose sigmoids are all one half, so that only the biases decide.
    fn choose(routing: Routing, bias: &[f32]) -> Vec<Routed> {
        let weight = |columns, values: Vec<f32>| Weight { rows: bias.len(), columns, format: Format::F32, values };
        let gate = weight(1, vec![0.0; bias.len()]);
        route(&routing, &gate, &weight(1, bias.to_vec()), &Rows { width: 1, values: vec![1.0] }).0.remove(0)
    }

    const PLAIN: Routing = Routing { chosen: 2, groups: 1, chosen_groups: 1, normalized: true, factor: 3.0 };

    #[test]
    fn what_is_no_number_chooses_nothing() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let chosen = choose(PLAIN, &[0.0, 1.0, wrong, 0.0]);
            assert!(chosen.len() == 2 && chosen.iter().all(|(_, weight)| weight.is_nan()), "{wrong} {chosen:?}");
        }
    }

    #[test]
    fn of_equals_the_lowest_index_is_chosen() {
        assert_eq!(choose(PLAIN, &[0.0; 4]), [(0, 1.5), (1, 1.5)]);
        assert_eq!(choose(PLAIN, &[0.0, 1.0, 0.0, 0.0]), [(1, 1.5), (0, 1.5)]);
        let unnormalized = Routing { normalized: false, ..PLAIN };
        assert_eq!(choose(unnormalized, &[0.0; 4]), [(0, 1.5), (1, 1.5)]);
        assert_eq!(choose(Routing { factor: 1.0, ..unnormalized }, &[0.0; 4]), [(0, 0.5), (1, 0.5)]);
    }

    #[test]
    fn other_groups_are_out_even_when_the_kept_scores_are_negative() {
        let grouped = Routing { groups: 2, ..PLAIN };
        // Group 0 has the best expert, group 1 the better pair; all biased scores are negative.
        let bias = [-1.0, -9.0, -3.0, -3.5];
        assert_eq!(choose(grouped, &bias).iter().map(|c| c.0).collect::<Vec<_>>(), [2, 3]);
        let both = Routing { chosen_groups: 2, ..grouped };
        assert_eq!(choose(both, &bias).iter().map(|c| c.0).collect::<Vec<_>>(), [0, 2]);
        // A group of one counts by its only expert.
        let single = Routing { groups: 4, chosen_groups: 2, ..PLAIN };
        assert_eq!(choose(single, &[0.1, 0.3, 0.2, 0.0]).iter().map(|c| c.0).collect::<Vec<_>>(), [1, 2]);
    }
}
