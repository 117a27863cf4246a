//! Tables of a model card, in Markdown.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::super::evidence::Told;
use super::escaped;
use crate::container::manifest::{Manifest, TensorRecord};
use crate::error::counted;
use crate::report::{ScoreBaseline, ScoreReport, VerifyReport, VerifyTokens};
use crate::roles::Class;

/// A class of weights in one format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassRow {
    /// The class.
    pub class: String,
    /// The format, with its group size.
    pub format: String,
    /// Weights.
    pub tensors: u64,
    /// Their elements.
    pub parameters: u64,
    /// Their bytes, scales included.
    pub bytes: u64,
}

/// Classes and formats of a container, in the order in which the program lists classes.
pub fn class_rows(manifest: &Manifest) -> Vec<ClassRow> {
    let rank = |class: &str| Class::ALL.iter().position(|known| known.name() == class).unwrap_or(usize::MAX);
    let mut rows: BTreeMap<(usize, &str, String), ClassRow> = BTreeMap::new();
    for tensor in manifest.tensors.values() {
        let format = format_text(tensor);
        let row = rows.entry((rank(&tensor.class), &tensor.class, format.clone())).or_insert_with(|| {
            let class = tensor.class.clone();
            ClassRow { class, format, tensors: 0, parameters: 0, bytes: 0 }
        });
        row.tensors += 1;
        row.parameters += tensor.shape.elements().unwrap_or(0);
        row.bytes += tensor.bytes + tensor.scale_bytes;
    }
    rows.into_values().collect()
}

/// `int4-grouped(64)`
fn format_text(tensor: &TensorRecord) -> String {
    tensor.group_size.map_or_else(|| tensor.format.clone(), |size| format!("{}({size})", tensor.format))
}

/// Sums over a container.
#[derive(Debug)]
pub struct Totals {
    /// Elements of all weights.
    pub parameters: u64,
    /// Bytes of all weights, scales included.
    pub weight_bytes: u64,
    /// Size of the weight files.
    pub file_bytes: u64,
    /// The formats, that of most parameters first.
    pub formats: Vec<String>,
}

impl Totals {
    /// Of a manifest.
    pub fn of(manifest: &Manifest) -> Totals {
        let rows = class_rows(manifest);
        let mut formats: BTreeMap<&str, u64> = BTreeMap::new();
        rows.iter().for_each(|row| *formats.entry(&row.format).or_default() += row.parameters);
        let mut formats: Vec<(&str, u64)> = formats.into_iter().collect();
        formats.sort_by_key(|&(_, parameters)| std::cmp::Reverse(parameters));
        Totals {
            parameters: rows.iter().map(|row| row.parameters).sum(),
            weight_bytes: rows.iter().map(|row| row.bytes).sum(),
            file_bytes: manifest.files.iter().map(|file| file.bytes).sum(),
            formats: formats.into_iter().map(|(format, _)| format.to_owned()).collect(),
        }
    }
}

/// A table of Markdown; the columns from `right` on are aligned to the right.
fn table(header: &[&str], right: usize, rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let rule = (0..header.len()).map(|i| if i < right { "---" } else { "---:" }.to_owned());
    let header: Vec<String> = header.iter().map(|&cell| cell.to_owned()).collect();
    let mut out = line(&header) + &line(&rule.collect::<Vec<_>>());
    out.extend(rows.iter().map(|row| line(row)));
    out
}

/// What a class is called in a card.
fn class_text(class: &str) -> String {
    let text = match class {
        "io" => "embedding and output head",
        "x" => "routed experts",
        "sh" => "shared experts",
        "o" => "attention output",
        "kvb" => "kv\\_b\\_proj",
        "attn" => "other attention projections",
        "dmlp" => "MLP of dense layers",
        "f32" => "norms, router, biases",
        "mtp" => "MTP head",
        "indexer" => "DSA indexer",
        other => return escaped(other),
    };
    text.to_owned()
}

/// The formats of each class.
pub(super) fn formats_table(manifest: &Manifest) -> String {
    let rows = class_rows(manifest);
    let bits = |bytes: u64, parameters: u64| format!("{:.2}", 8.0 * bytes as f64 / parameters.max(1) as f64);
    let cells = |class: String, format: String, tensors, parameters, bytes| {
        vec![class, format, grouped(tensors), grouped(parameters), grouped(bytes), bits(bytes, parameters)]
    };
    let mut lines: Vec<Vec<String>> = rows
        .iter()
        .map(|row| cells(class_text(&row.class), escaped(&row.format), row.tensors, row.parameters, row.bytes))
        .collect();
    let sum = |of: fn(&ClassRow) -> u64| rows.iter().map(of).sum::<u64>();
    let all = (sum(|row| row.tensors), sum(|row| row.parameters), sum(|row| row.bytes));
    lines.push(cells("**all**".to_owned(), String::new(), all.0, all.1, all.2));
    table(&["weights", "format", "tensors", "parameters", "bytes with scales", "bits each"], 2, &lines)
}

/// The last part of a path: a card says nothing of its maker's folders.
fn file_name(path: &str) -> String {
    escaped(&Path::new(path).file_name().map_or(path.into(), |name| name.to_string_lossy()))
}

/// Tokens by device and reference file.
pub(super) fn tokens_table(told: &[Told<VerifyReport>]) -> String {
    let mut groups: Vec<(&str, &str, Vec<&VerifyTokens>)> = Vec::new();
    for entry in told.iter().flat_map(|told| &told.report.tokens) {
        let key = (entry.device.as_str(), entry.reference.as_str());
        match groups.iter_mut().find(|(device, reference, _)| (*device, *reference) == key) {
            Some((.., entries)) => entries.push(entry),
            None => groups.push((key.0, key.1, vec![entry])),
        }
    }
    if groups.is_empty() {
        return String::new();
    }
    let row = |(device, reference, entries): &(&str, &str, Vec<&VerifyTokens>)| {
        let forced = || entries.iter().filter_map(|entry| entry.teacher_forced.as_ref());
        let matched: u64 = forced().map(|t| t.matched).sum();
        let ties: u64 = forced().map(|t| t.near_tie).sum();
        let greedy = || entries.iter().filter_map(|entry| entry.greedy.as_ref());
        let apart = entries.iter().filter_map(|entry| entry.max_abs_logprob_diff).reduce(f64::max);
        let of = |matched: u64, total: u64| if total == 0 { "–".to_owned() } else { format!("{matched} of {total}") };
        let (backend, mode) = (escaped(&entries[0].backend), escaped(&entries[0].mode));
        let drafts = entries
            .iter()
            .filter_map(|entry| entry.mtp.as_ref())
            .fold((0, 0), |(m, t), mtp| (m + mtp.matched, t + mtp.total));
        let gpu = entries
            .iter()
            .filter_map(|entry| entry.gpu.as_ref())
            .fold((0, 0), |(d, f), gpu| (d + gpu.dispatches, f + gpu.fallbacks));
        let gpu = if gpu == (0, 0) { String::new() } else { format!(", {} kernels, {} fallbacks", gpu.0, gpu.1) };
        vec![
            format!("{} ({backend} backend, {mode}{gpu})", escaped(device)),
            file_name(reference),
            of(matched, forced().map(|t| t.total).sum()),
            ties.to_string(),
            of(greedy().map(|g| g.matched).sum(), greedy().map(|g| g.total).sum()),
            of(drafts.0, drafts.1),
            match apart {
                None => "–".to_owned(),
                Some(0.0) => "0".to_owned(),
                Some(apart) => format!("{apart:.1e}"),
            },
        ]
    };
    let rows: Vec<Vec<String>> = groups.iter().map(row).collect();
    let header = ["device", "reference", "teacher-forced", "near-ties", "greedy", "drafts", "log-probabilities within"];
    format!("\n{}", table(&header, 2, &rows))
}

/// How often the source says the same, and how useful the MTP head is.
pub(super) fn drafts_text(verify: &[Told<VerifyReport>], score: &[Told<ScoreReport>]) -> String {
    let mut out = String::new();
    if let Some(agreement) = verify.iter().find_map(|told| told.report.source_agreement.as_ref()) {
        let share = 100.0 * agreement.matched as f64 / agreement.total.max(1) as f64;
        let (matched, total) = (agreement.matched, agreement.total);
        out += &format!("\nThe source predicts the same token {matched} of {total} times ({share:.1} %).\n");
    }
    // Another device drafts the same along the same reference: it counts once.
    let mut seen = BTreeSet::new();
    let entries = verify.iter().flat_map(|told| &told.report.tokens).filter(|entry| entry.mtp.is_some());
    let drafts: Vec<_> =
        entries.filter(|e| seen.insert((&e.reference, e.number))).filter_map(|entry| entry.mtp.as_ref()).collect();
    let of_probes = score.iter().filter_map(|told| told.report.probes.as_ref()?.mtp.as_ref());
    let counts =
        drafts.iter().map(|mtp| (mtp.accepted, mtp.proposed)).chain(of_probes.map(|mtp| (mtp.accepted, mtp.proposed)));
    let (accepted, proposed) = counts.fold((0, 0), |(a, p), (accepted, proposed)| (a + accepted, p + proposed));
    // Along a text of the model's own: little, and said only where nothing else is known.
    let own = verify.iter().find_map(|told| told.report.own_drafts).map_or((0, 0), |own| (own.accepted, own.proposed));
    let (accepted, proposed) = if proposed > 0 { (accepted, proposed) } else { own };
    if proposed > 0 {
        let share = 100.0 * accepted as f64 / proposed as f64;
        out += &format!("\n{accepted} of {proposed} drafts of the MTP head were accepted ({share:.1} %).\n");
    }
    out
}

/// Scores against the source.
///
/// It is called the source only where `verify` compared the weights with the very model that was scored.
pub(super) fn scores_text(told: &[Told<ScoreReport>], verify: &[Told<VerifyReport>]) -> String {
    let compared = || told.iter().filter_map(|told| Some((&told.report, told.report.baseline.as_ref()?)));
    if compared().next().is_none() {
        return String::new();
    }
    let is_source = |baseline: &ScoreBaseline| {
        verify.iter().any(|told| told.report.source_model_sha256.as_ref() == Some(&baseline.model_sha256))
    };
    let known = compared().all(|(_, baseline)| is_source(baseline));
    let word = if known { "source" } else { "baseline" };
    let named: Vec<String> = compared().map(|(_, baseline)| file_name(&baseline.path)).collect();
    let title = if known { "the source".to_owned() } else { named.join(", ") };
    let mut out = format!("\n## Scores against {title}\n");
    let tasks: Vec<Vec<String>> = compared().flat_map(|(report, baseline)| task_rows(report, baseline)).collect();
    if !tasks.is_empty() {
        let header = ["task", "metric", "n", word, "this model", "difference [95 %]", "gained, lost"];
        out += &format!("\n{}", table(&header, 2, &tasks));
    }
    let texts: Vec<Vec<String>> = compared().flat_map(|(_, baseline)| text_rows(baseline)).collect();
    if !texts.is_empty() {
        let of_baseline = format!("perplexity of the {word}");
        let header = ["text", "documents", &of_baseline, "of this model", "ratio [95 %]"];
        out += &format!("\n{}", table(&header, 1, &texts));
    }
    for (report, baseline) in compared() {
        if let (Some(kl), Some(top)) = (baseline.kl_mean, baseline.top1_agreement) {
            let interval = baseline.kl_interval.map_or(String::new(), |(low, high)| format!(" [{low:.5}, {high:.5}]"));
            // Of the most probable tokens alone it is less than that of whole distributions.
            let least = if baseline.kl_method == "exact" { "" } else { "at least " };
            out += &format!(
                "\nMean KL divergence of the next token's distribution from the {word}'s: {least}{kl:.5}{interval} nats ({}) over {} positions; \
                 the same best token at {:.2} % of them.\n",
                escaped(&baseline.kl_method),
                grouped(baseline.positions),
                100.0 * top
            );
        }
        let rows: Vec<String> =
            report.inputs.iter().map(|input| format!("{} {}", escaped(&input.name), input.rows_text())).collect();
        let prefix = if report.prefix.is_empty() { "nothing".to_owned() } else { escaped(&report.prefix) };
        out += &format!(
            "\nScored on the {} backend ({}), with {prefix} before every text: {}.{}\n",
            escaped(&report.backend),
            escaped(&report.mode),
            rows.join("; "),
            match report.excluded.len() {
                0 => String::new(),
                n => format!(" {} got no score.", counted(n as u64, "row")),
            }
        );
    }
    out
}

fn task_rows(report: &ScoreReport, baseline: &ScoreBaseline) -> Vec<Vec<String>> {
    let own = |name: &str| report.tasks.iter().find(|task| task.task == name);
    let row = |task: &crate::report::ScoreTaskDifference| {
        [("acc", &task.acc), ("acc_norm", &task.acc_norm)].map(|(metric, paired)| {
            let interval = own(&task.task).map_or(String::new(), |own| {
                let (low, high) = if metric == "acc" { own.interval } else { own.interval_norm };
                format!(" [{low:.4}, {high:.4}]")
            });
            let (low, high) = paired.interval;
            vec![
                escaped(&task.task),
                escaped(metric),
                grouped(task.n),
                format!("{:.4}", paired.baseline),
                format!("{:.4}{interval}", paired.model),
                format!("{:+.4} [{low:+.4}, {high:+.4}]", paired.difference),
                format!("+{} −{}", paired.gained, paired.lost),
            ]
        })
    };
    baseline.tasks.iter().flat_map(row).collect()
}

fn text_rows(baseline: &ScoreBaseline) -> Vec<Vec<String>> {
    let row = |text: &crate::report::ScoreTextDifference| {
        let interval = text.interval.map_or(String::new(), |(low, high)| format!(" [{low:.4}, {high:.4}]"));
        vec![
            escaped(&text.name),
            grouped(text.documents),
            format!("{:.4}", text.baseline),
            format!("{:.4}", text.model),
            format!("{:.4}{interval}", text.ratio),
        ]
    };
    baseline.texts.iter().map(row).collect()
}

/// `12,345,678`
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> = (0..digits.len())
        .filter(|i| *i == 0 || (digits.len() - i).is_multiple_of(3))
        .map(|from| &digits[from..from + (digits.len() - from - 1) % 3 + 1])
        .collect();
    groups.join(",")
}

/// A number with a prefix of the decimal system and a unit.
fn scaled(number: u64, units: [&str; 5]) -> String {
    let mut value = number as f64;
    for unit in &units[..4] {
        if value < 999.95 {
            return if number < 1000 { format!("{number}{unit}") } else { format!("{value:.1}{unit}") };
        }
        value /= 1000.0;
    }
    format!("{value:.1}{}", units[4])
}

/// `743.9 billion`
pub(super) fn human_count(number: u64) -> String {
    scaled(number, ["", " thousand", " million", " billion", " trillion"])
}

/// `419.3 GB`
pub(super) fn human_bytes(bytes: u64) -> String {
    scaled(bytes, [" B", " kB", " MB", " GB", " TB"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_easy_to_read() {
        assert_eq!([0, 999, 1000, 12_345_678].map(grouped), ["0", "999", "1,000", "12,345,678"]);
        assert_eq!([7, 1500, 743_912_000_000].map(human_count), ["7", "1.5 thousand", "743.9 billion"]);
        assert_eq!([999, 999_960, 419_300_000_000].map(human_bytes), ["999 B", "1.0 MB", "419.3 GB"]);
    }

    #[test]
    fn cells_stay_cells() {
        assert_eq!(escaped("a|b_c <i>\n"), "a\\|b\\_c &lt;i>\\\\n");
        assert_eq!(table(&["a", "b"], 1, &[vec!["1".into(), "2".into()]]), "| a | b |\n| --- | ---: |\n| 1 | 2 |\n");
    }
}
