//! Two models on the same rows.

use super::input::{Input, Kind};
use super::metrics::{Normalization, answer, own_answer};
use super::record::{Against, Record, Scored};
use super::statistics::{interval, mcnemar, paired_interval, ratio};
use crate::report::{
    ScoreCheck, ScoreCompared, ScoreFlipped, ScoreKlPositions, ScorePaired, ScoreTaskDifference, ScoreTextDifference,
};

/// How far the distributions of all rows are apart.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Divergence {
    /// Tokens before which both distributions were compared.
    pub positions: u64,
    /// Mean KL(baseline ‖ model).
    pub mean: Option<f64>,
    /// Its 95 % interval.
    pub interval: Option<(f64, f64)>,
    /// The largest.
    pub max: Option<f64>,
    /// Share of equal best tokens.
    pub top1_agreement: Option<f64>,
    /// By position.
    pub by_position: Vec<ScoreKlPositions>,
}

fn compared<'r>(records: &[&'r Record]) -> impl Iterator<Item = (&'r Scored, &'r Against)> + Clone {
    let records: Vec<&'r Record> = records.to_vec();
    let pair = |scored: &'r Scored| Some((scored, scored.against.as_ref()?));
    records.into_iter().flat_map(|record| &record.scores).filter_map(pair)
}

/// Divergences over all records.
pub fn divergence(records: &[&Record]) -> Divergence {
    let all = compared(records);
    let positions: u64 = all.clone().map(|(_, against)| against.kl.len() as u64).sum();
    if positions == 0 {
        return Divergence::default();
    }
    // Choices of one question are not independent: rows are the clusters.
    let cluster = |record: &&Record| {
        let kl = record.scores.iter().filter_map(|scored| scored.against.as_ref()).flat_map(|against| &against.kl);
        kl.fold((0.0, 0.0), |(sum, count), kl| (sum + kl, count + 1.0))
    };
    let clusters: Vec<(f64, f64)> = records.iter().map(cluster).filter(|(_, count)| *count > 0.0).collect();
    let (mean, stderr) = ratio(clusters.into_iter());
    let agreed: u64 = all.clone().map(|(_, against)| against.agreed).sum();
    Divergence {
        positions,
        mean: Some(mean),
        interval: stderr.map(|stderr| interval(mean, stderr)).map(|(low, high)| (low.max(0.0), high)),
        max: all.clone().flat_map(|(_, against)| &against.kl).copied().reduce(f64::max),
        top1_agreement: Some(agreed as f64 / positions as f64),
        by_position: by_position(all.map(|(_, against)| &against.kl)),
    }
}

/// Mean divergences of positions 0, 1, 2, 3, 4–5, 6–7, 8–11, …: two bins for each doubling.
fn by_position<'a>(texts: impl Iterator<Item = &'a Vec<f64>>) -> Vec<ScoreKlPositions> {
    let (mut sums, mut bounds) = (Vec::<(u64, f64)>::new(), vec![0u64, 1]);
    for kl in texts {
        for (position, kl) in kl.iter().enumerate() {
            let position = position as u64;
            while bounds[bounds.len() - 1] <= position {
                bounds.push(next_bound(bounds[bounds.len() - 1]));
            }
            let bin = bounds.partition_point(|&bound| bound <= position) - 1;
            sums.resize(sums.len().max(bin + 1), (0, 0.0));
            sums[bin] = (sums[bin].0 + 1, sums[bin].1 + kl);
        }
    }
    let bin = |((count, sum), bounds): ((u64, f64), &[u64])| ScoreKlPositions {
        from: bounds[0],
        to: bounds[1],
        count,
        kl_mean: sum / count as f64,
    };
    sums.into_iter().zip(bounds.windows(2)).map(bin).collect()
}

/// 1, 2, 3, 4, 6, 8, 12, 16, 24, …
fn next_bound(bound: u64) -> u64 {
    let power = 1 << bound.ilog2();
    if bound < 2 { bound + 1 } else { bound + power / 2 }
}

/// A task with both models; `None` if no question was answered by both.
pub fn task(input: &Input, records: &[&Record]) -> Option<ScoreTaskDifference> {
    let both: Vec<&Record> = records.iter().copied().filter(|record| is_compared(record)).collect();
    if input.kind != Kind::Task || both.is_empty() {
        return None;
    }
    let by = [("acc", Normalization::Sum), ("acc_norm", Normalization::Chars)];
    let flipped = by.into_iter().flat_map(|(metric, by)| both.iter().filter_map(move |r| flipped(metric, by, r)));
    Some(ScoreTaskDifference {
        task: input.name.clone(),
        n: both.len() as u64,
        acc: paired(&both, Normalization::Sum),
        acc_norm: paired(&both, Normalization::Chars),
        flipped: flipped.collect(),
    })
}

/// A question whose answer became right or wrong.
fn flipped(metric: &str, by: Normalization, record: &Record) -> Option<ScoreFlipped> {
    let gold = record.gold?;
    let (baseline, model) = (baseline_answer(record, by), own_answer(record, by));
    let [row, gold_choice] = [record.row, gold as u64];
    let (metric, baseline_choice, model_choice) = (metric.to_owned(), baseline as u64, model as u64);
    ((baseline == gold) != (model == gold)).then_some(ScoreFlipped {
        metric,
        row,
        gold: gold_choice,
        baseline: baseline_choice,
        model: model_choice,
    })
}

fn is_compared(record: &Record) -> bool {
    !record.scores.is_empty() && record.scores.iter().all(|scored| scored.against.is_some())
}

fn baseline_answer(record: &Record, by: Normalization) -> usize {
    let of = |scored: &Scored| by.of(scored.against.as_ref().map_or(f64::NAN, |against| against.logprob), scored);
    answer(record.scores.iter().map(of))
}

fn paired(records: &[&Record], by: Normalization) -> ScorePaired {
    let n = records.len() as u64;
    let (mut baseline, mut model, mut gained, mut lost) = (0, 0, 0, 0);
    for record in records {
        let right = |answer| Some(answer) == record.gold;
        match (right(baseline_answer(record, by)), right(own_answer(record, by))) {
            (true, true) => (baseline, model) = (baseline + 1, model + 1),
            (true, false) => (baseline, lost) = (baseline + 1, lost + 1),
            (false, true) => (model, gained) = (model + 1, gained + 1),
            (false, false) => {}
        }
    }
    let share = |count: u64| count as f64 / n as f64;
    ScorePaired {
        baseline: share(baseline),
        model: share(model),
        difference: (gained as f64 - lost as f64) / n as f64,
        interval: paired_interval(gained, lost, n),
        gained,
        lost,
        mcnemar: mcnemar(gained, lost),
    }
}

/// A text, or a request file, with both models.
pub fn text(input: &Input, records: &[&Record]) -> Option<ScoreTextDifference> {
    let both = compared(records);
    let documents = both.clone().count() as u64;
    if input.kind == Kind::Task || documents == 0 {
        return None;
    }
    let per_token = |of: fn(&Scored, &Against) -> f64| ratio(both.clone().map(|(s, a)| (of(s, a), s.tokens as f64)));
    let (model, _) = per_token(|scored, _| -scored.logprob);
    let (baseline, _) = per_token(|_, against| -against.logprob);
    let (difference, stderr) = per_token(|scored, against| against.logprob - scored.logprob);
    let exp = |(low, high): (f64, f64)| (low.exp(), high.exp());
    Some(ScoreTextDifference {
        name: input.name.clone(),
        documents,
        baseline: baseline.exp(),
        model: model.exp(),
        ratio: difference.exp(),
        interval: stderr.map(|stderr| exp(interval(difference, stderr))),
    })
}

/// How many rows of an input both models gave a score.
pub fn coverage(input: &Input, records: &[&Record]) -> ScoreCompared {
    let compared = records.iter().filter(|record| is_compared(record)).count() as u64;
    ScoreCompared { name: input.name.clone(), rows: input.rows, compared }
}

/// Whether a model is within `threshold` of its baseline: no accuracy lower by more, no perplexity higher by more than this
/// share. The figures themselves decide; whether their intervals do, too, is said beside them. Every input with its kind is
/// checked, and where a row was not compared the check is not met: nobody knows how it would have ended.
pub fn checks(
    inputs: &[(Kind, ScoreCompared)],
    tasks: &[ScoreTaskDifference],
    texts: &[ScoreTextDifference],
    threshold: f64,
) -> Vec<ScoreCheck> {
    let check = |of: &ScoreCompared, metric: &str, worse_by: Option<f64>, interval: Option<(f64, f64)>| {
        let within = worse_by.is_some_and(|worse_by| worse_by <= threshold);
        let sure = |(least, most): (f64, f64)| if within { most <= threshold } else { least > threshold };
        ScoreCheck {
            name: of.name.clone(),
            metric: metric.to_owned(),
            worse_by,
            rows: of.rows,
            compared: of.compared,
            met: within && of.is_whole(),
            conclusive: of.is_whole() && interval.is_some_and(sure),
        }
    };
    let of_paired = |of: &ScoreCompared, metric, paired: Option<&ScorePaired>| {
        // 0 of −0
        let worse_by = paired.map(|paired| 0.0 - paired.difference);
        check(of, metric, worse_by, paired.map(|paired| (-paired.interval.1, -paired.interval.0)))
    };
    let of_input = |(kind, of): &(Kind, ScoreCompared)| match kind {
        Kind::Task => {
            let task = tasks.iter().find(|task| task.task == of.name);
            let acc = of_paired(of, "acc", task.map(|task| &task.acc));
            vec![acc, of_paired(of, "acc_norm", task.map(|task| &task.acc_norm))]
        }
        Kind::Text | Kind::Requests => {
            let text = texts.iter().find(|text| text.name == of.name);
            let interval = text.and_then(|text| text.interval).map(|(low, high)| (low - 1.0, high - 1.0));
            vec![check(of, "ppl", text.map(|text| text.ratio - 1.0), interval)]
        }
    };
    inputs.iter().flat_map(of_input).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_fall_into_bins() {
        let mut bounds = vec![1];
        while bounds[bounds.len() - 1] < 100 {
            bounds.push(next_bound(bounds[bounds.len() - 1]));
        }
        assert_eq!(bounds, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]);
        let texts = [vec![1.0, 2.0, 3.0, 4.0, 5.0, 7.0], vec![3.0]];
        let bins = by_position(texts.iter());
        let found: Vec<(u64, u64, u64, f64)> = bins.iter().map(|b| (b.from, b.to, b.count, b.kl_mean)).collect();
        assert_eq!(found, [(0, 1, 2, 2.0), (1, 2, 1, 2.0), (2, 3, 1, 3.0), (3, 4, 1, 4.0), (4, 6, 2, 6.0)]);
        assert!(by_position([].into_iter()).is_empty());
    }

    fn scored(logprob: f64, chars: u64, baseline: f64) -> Scored {
        let against = Against { logprob: baseline, greedy: false, agreed: 1, kl: vec![0.5, 0.0] };
        Scored {
            logprob,
            tokens: 2,
            greedy: false,
            chars,
            bytes: chars,
            space: false,
            top: Vec::new(),
            against: Some(against),
        }
    }

    #[test]
    fn thresholds_are_held_against_the_figures() {
        let paired = |gained, lost, n: u64| ScorePaired {
            baseline: 0.5,
            model: 0.5,
            difference: (gained as f64 - lost as f64) / n as f64,
            interval: paired_interval(gained, lost, n),
            gained,
            lost,
            mcnemar: 1.0,
        };
        let task = |acc: ScorePaired| ScoreTaskDifference {
            task: "t".into(),
            n: 100,
            acc_norm: acc.clone(),
            acc,
            flipped: Vec::new(),
        };
        let input = |kind, name: &str, compared, rows| (kind, ScoreCompared { name: name.into(), rows, compared });
        let of = |acc, threshold| checks(&[input(Kind::Task, "t", 9, 9)], &[task(acc)], &[], threshold)[1].clone();
        let few = of(paired(2, 4, 100), 0.02);
        assert_eq!((few.worse_by, few.met, few.conclusive), (Some(0.02), true, false));
        assert!(!of(paired(2, 5, 100), 0.02).met);
        assert!(of(paired(0, 0, 10_000), 0.001).conclusive);
        let broken = of(paired(0, 60, 100), 0.02);
        assert!(!broken.met && broken.conclusive);
        assert!(of(paired(60, 0, 100), 0.0).met);
        let text = |ratio, interval| ScoreTextDifference {
            name: "x".into(),
            documents: 3,
            baseline: 1.0,
            model: ratio,
            ratio,
            interval,
        };
        let of =
            |ratio, interval| checks(&[input(Kind::Text, "x", 3, 3)], &[], &[text(ratio, interval)], 0.01)[0].clone();
        let better = of(0.9, Some((0.8, 1.0)));
        assert!(better.met && better.conclusive && better.metric == "ppl");
        assert!(!of(1.02, None).met && !of(1.02, None).conclusive);
        // However good: where a row was not compared, or none at all, the answer is no.
        let inputs = [input(Kind::Task, "none", 0, 4), input(Kind::Task, "t", 99, 100), input(Kind::Text, "x", 3, 4)];
        let found = checks(&inputs, &[task(paired(60, 0, 100))], &[text(0.5, Some((0.4, 0.6)))], 0.01);
        let names: Vec<(&str, &str)> = found.iter().map(|check| (&*check.name, &*check.metric)).collect();
        assert_eq!(names, [("none", "acc"), ("none", "acc_norm"), ("t", "acc"), ("t", "acc_norm"), ("x", "ppl")]);
        assert!(found.iter().all(|check| !check.met && !check.conclusive));
        assert_eq!((found[0].worse_by, found[0].compared, found[0].rows), (None, 0, 4));
    }

    #[test]
    fn questions_are_paired() {
        let record = |row, gold, scores: Vec<Scored>| Record {
            input: "t".into(),
            row,
            gold: Some(gold),
            scores,
            excluded: None,
            baseline: None,
        };
        let records = [
            record(1, 0, vec![scored(-1.0, 1, -3.0), scored(-2.0, 1, -2.0)]),
            record(2, 1, vec![scored(-1.0, 1, -3.0), scored(-2.0, 1, -2.0)]),
            record(3, 1, vec![scored(-1.0, 1, -1.0), scored(-1.5, 3, -1.5)]),
        ];
        let records: Vec<&Record> = records.iter().collect();
        let acc = paired(&records, Normalization::Sum);
        assert_eq!((acc.gained, acc.lost, acc.baseline, acc.model), (1, 1, 1.0 / 3.0, 1.0 / 3.0));
        let norm = paired(&records, Normalization::Chars);
        assert_eq!((norm.gained, norm.lost, norm.baseline, norm.model), (1, 1, 2.0 / 3.0, 2.0 / 3.0));
        let apart = divergence(&records);
        assert_eq!(
            (apart.positions, apart.mean, apart.max, apart.top1_agreement),
            (12, Some(0.25), Some(0.5), Some(0.5))
        );
        assert_eq!(divergence(&[]), Divergence::default());
    }
}
