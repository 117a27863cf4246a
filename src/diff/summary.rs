//! The order of the worst, and totals per class.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::Compared;
use super::sums::Sums;
use crate::report::{DiffClass, DiffTensor, Side};
use crate::roles::Class;

/// How bad a difference is, before its ratio is looked at: less is worse.
fn rank(tensor: &DiffTensor) -> u8 {
    match tensor {
        _ if tensor.same_bytes => 4,
        _ if tensor.reason.is_some() => 0,
        _ if tensor.non_finite > 0 => 1,
        _ if tensor.same_values == Some(true) => 3,
        _ => 2,
    }
}

/// The order of the report: the worst first.
pub(super) fn worst_first(a: &DiffTensor, b: &DiffTensor) -> Ordering {
    // Noise without a signal is worse than any ratio.
    let ratio = |tensor: &DiffTensor| tensor.sqnr_db.unwrap_or(f64::NEG_INFINITY);
    rank(a).cmp(&rank(b)).then(ratio(a).total_cmp(&ratio(b))).then_with(|| a.name.cmp(&b.name))
}

/// What a line of the summary is about: class in the order of reports, formats and group sizes.
type Key<'a> = (usize, &'a str, Option<u64>, &'a str, Option<u64>);

fn key(tensor: &DiffTensor) -> Key<'_> {
    let class = tensor.class.as_deref().and_then(|name| Class::ALL.iter().position(|class| class.name() == name));
    (class.unwrap_or(usize::MAX), &tensor.format_a, tensor.group_size_a, &tensor.format_b, tensor.group_size_b)
}

/// Totals per class and formats. `compared` is in the order of names.
pub(super) fn classes(compared: &[Compared], reference: Side) -> Vec<DiffClass> {
    let mut groups: BTreeMap<Key<'_>, Vec<&Compared>> = BTreeMap::new();
    for compared in compared {
        groups.entry(key(&compared.tensor)).or_default().push(compared);
    }
    groups.into_values().map(|group| class(&group, reference)).collect()
}

fn class(group: &[&Compared], reference: Side) -> DiffClass {
    let first = &group[0].tensor;
    let mut sums = Sums::default();
    for compared in group.iter().filter_map(|compared| compared.sums.as_ref()) {
        sums.join(compared);
    }
    let same_bytes = group.iter().filter(|compared| compared.tensor.same_bytes).count();
    let measured = same_bytes > 0 || group.iter().any(|compared| compared.sums.is_some());
    DiffClass {
        class: first.class.clone(),
        format_a: first.format_a.clone(),
        format_b: first.format_b.clone(),
        group_size_a: first.group_size_a,
        group_size_b: first.group_size_b,
        tensors: group.len() as u64,
        same_bytes: same_bytes as u64,
        max_abs_err: measured.then_some(sums.max_abs_err),
        rmse: measured.then(|| sums.rmse().unwrap_or(0.0)),
        sqnr_db: sums.sqnr_db(reference),
        worst_sqnr_db: group.iter().filter_map(|compared| compared.tensor.sqnr_db).min_by(f64::total_cmp),
    }
}
