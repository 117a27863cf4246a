//! `coliconv inspect`

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use indicatif::ProgressBar;

use super::{Talk, findings_text, print, print_json, size, text};
use crate::error::{Faults, Severity, escaped};
use crate::inspect::{Query, inspect};
use crate::limits;
use crate::report::inspect::{InspectReport, InspectTensor, Kind, Stats};
use crate::roles::{Class, Pass};

/// Steps of a histogram in text.
const BINS: usize = 32;

/// Arguments of `inspect`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A checkpoint, a container, or one .safetensors file
    path: PathBuf,
    /// Only tensors whose whole name matches: `*`, `?`, `[…]`, `{a,b}`
    #[arg(long, value_name = "GLOB")]
    tensor: Option<String>,
    /// Only tensors of a class: io, x, sh, o, kvb, attn, dmlp, f32, mtp, indexer
    #[arg(long, value_name = "CLASS")]
    class: Option<String>,
    /// Statistics of the values; reads the payload
    #[arg(long)]
    stats: bool,
    /// The first N dequantized values of a row
    #[arg(long, value_name = "N")]
    values: Option<u64>,
    /// Which row; alone it means all its values
    #[arg(long, value_name = "R")]
    row: Option<u64>,
    /// Draw the distribution of levels or values
    #[arg(long)]
    histogram: bool,
    /// Comma-separated values instead of text: a line a tensor, or with --values a line a value
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Threads; 0 for one per core [default: 0]
    #[arg(long, value_name = "N", value_parser = super::threads, default_value_t = 0, hide_default_value = true)]
    threads: usize,
    #[command(flatten)]
    pub(super) talk: Talk,
}

/// Runs `inspect`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Faults> {
    let report = look(arguments)?;
    let written = if arguments.talk.json {
        print_json(&report)
    } else if arguments.csv {
        print(&csv(&report))
    } else {
        print(&to_text(&report, arguments))
    };
    let good = report.findings.iter().all(|finding| finding.severity != Severity::Error);
    Ok(if written == ExitCode::SUCCESS && !good { ExitCode::from(1) } else { written })
}

fn look(arguments: &Arguments) -> Result<InspectReport, Faults> {
    let query = Query {
        tensor: arguments.tensor.clone(),
        class: arguments.class.clone(),
        stats: arguments.stats,
        bins: arguments.histogram.then_some(BINS),
        values: arguments.values,
        row: arguments.row,
    };
    let bar = super::progress::bar(arguments.talk.quiet);
    let watch = |name: &str, done: u64, total: u64| show(bar.as_ref(), name, done, total);
    let pool = super::pool(arguments.threads)?;
    let report = pool.install(|| inspect(&arguments.path, &query, &watch));
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    report
}

fn show(bar: Option<&ProgressBar>, name: &str, done: u64, total: u64) {
    if let Some(bar) = bar {
        bar.set_length(total);
        bar.set_position(done);
        bar.set_message(escaped(name).to_string());
    }
}

/// `int4-grouped(64)`
fn format_text(format: Option<&String>, group_size: Option<u64>) -> String {
    match (format, group_size) {
        (None, _) => "?".to_owned(),
        (Some(format), Some(size)) if format == "int4-grouped" => format!("{format}({size})"),
        (Some(format), _) => format.clone(),
    }
}

fn to_text(report: &InspectReport, arguments: &Arguments) -> String {
    let mut out = format!("{}\n", summary(report));
    let series = series(report);
    if !series.is_empty() {
        out += &format!("{series}\n");
    }
    let reads = arguments.stats || arguments.histogram || arguments.values.is_some() || arguments.row.is_some();
    let selected = arguments.tensor.is_some() || arguments.class.is_some();
    if !selected {
        out += &format!("\n{}", totals(report));
    }
    if !report.findings.is_empty() {
        out += &format!("\n{}", findings_text(&report.findings));
    }
    if reads {
        for tensor in &report.tensors {
            out += &format!("\n{}", dump(tensor));
        }
    } else if selected || report.tensors.len() <= limits::MAX_LISTED_TENSORS {
        out += &list(&report.tensors);
    } else {
        out += "\nalike tensors of all layers and experts on one line; --tensor '*' lists each\n";
        for (tensor, count) in collapse(&report.tensors) {
            let times = if count > 1 { format!(" × {}", size::grouped(count)) } else { String::new() };
            out += &format!("  {}{times}\n    {}\n", escaped(&tensor.name), attributes(tensor, count));
        }
    }
    out
}

/// What it is in one line, and in another what it is made of.
fn summary(report: &InspectReport) -> String {
    let bytes: u64 = report.files.iter().map(|file| file.bytes).sum();
    let count = |n: u64, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let mut parts =
        vec![format!("{}: {}", report.kind.name(), report.model_type.as_deref().unwrap_or("unknown model"))];
    parts.extend(report.layers.map(|n| count(n, "layer")));
    parts.extend(report.experts.map(|n| count(n, "expert")));
    parts.push(format!("{} in {}", size::human(bytes), count(report.files.len() as u64, "file")));
    let errors = report.findings.iter().filter(|f| f.severity == Severity::Error).count();
    let warnings = report.findings.iter().filter(|f| f.severity == Severity::Warning).count();
    parts.push(match (errors, warnings) {
        (0, 0) => "nothing wrong".to_owned(),
        (0, n) => count(n as u64, "warning"),
        (n, _) => format!("NOT SOUND: {}", count(n as u64, "error")),
    });
    let mut out = text::wrapped(&parts);
    if report.kind != Kind::File {
        out += &format!("\n{}", text::wrapped(&formats(report)));
    }
    out
}

/// The formats of the parts that people ask for.
fn formats(report: &InspectReport) -> Vec<String> {
    // Where a class has several formats, that of most bytes and how many others.
    let of = |class: Class| {
        let mut totals: Vec<_> = report.totals.iter().filter(|t| t.class.as_deref() == Some(class.name())).collect();
        totals.sort_by_key(|total| std::cmp::Reverse(total.bytes));
        let first = totals.first().map(|total| format_text(total.format.as_ref(), total.group_size))?;
        let only = totals.len() == 1 || matches!(class, Class::Mtp | Class::Indexer);
        Some(if only { first } else { format!("{first} and {} more", totals.len() - 1) })
    };
    let mut parts = match (of(Class::X).or_else(|| of(Class::Dmlp)), of(Class::Attn)) {
        (Some(experts), Some(attention)) if experts == attention => vec![experts],
        (experts, attention) => {
            let named = [("experts", experts), ("attention", attention)];
            named.into_iter().filter_map(|(name, format)| Some(format!("{name} {}", format?))).collect()
        }
    };
    parts.extend(of(Class::Io).map(|format| format!("embedding {format}")));
    parts.push(match (&report.mtp.present, &report.mtp.format) {
        (true, Some(format)) => format!("MTP head {format}"),
        (true, None) => "MTP head incomplete".to_owned(),
        (false, _) => "no MTP head".to_owned(),
    });
    parts.push(of(Class::Indexer).map_or("no indexer".to_owned(), |format| format!("indexer {format}")));
    if let Some(first) = parts.first_mut() {
        first.insert_str(0, "formats: ");
    }
    parts
}

/// Files of each series apart, so that a file of the MTP head does not stand in for a missing one.
fn series(report: &InspectReport) -> String {
    if report.kind != Kind::Container {
        return String::new();
    }
    let mut parts: Vec<String> = Pass::ALL
        .into_iter()
        .filter_map(|pass| {
            let of_pass = |name: &str| Pass::of_file(name).is_some_and(|(p, _)| p == pass);
            let files = report.files.iter().filter(|file| of_pass(&file.name)).count();
            (files > 0).then(|| format!("{files} {}*", pass.series()))
        })
        .collect();
    let others = report.files.iter().filter(|file| Pass::of_file(&file.name).is_none()).count();
    if others > 0 {
        parts.push(format!("{others} others"));
    }
    format!("files: {}", parts.join(", "))
}

fn totals(report: &InspectReport) -> String {
    let rows = report
        .totals
        .iter()
        .map(|total| {
            vec![
                total.class.clone().unwrap_or_else(|| "?".to_owned()),
                format_text(total.format.as_ref(), total.group_size),
                size::grouped(total.tensors),
                size::grouped(total.bytes),
            ]
        })
        .chain([vec![
            "total".to_owned(),
            String::new(),
            size::grouped(report.totals.iter().map(|total| total.tensors).sum()),
            size::grouped(report.totals.iter().map(|total| total.bytes).sum()),
        ]])
        .collect();
    text::table(&["class", "format", "tensors", "bytes"], &["tensors", "bytes"], rows)
}

fn shape_text(shape: &[u64]) -> String {
    let dims: Vec<String> = shape.iter().map(u64::to_string).collect();
    format!("[{}]", dims.join(", "))
}

/// Name and then what is known of it, below the name of its file: names alone can fill 80 columns.
fn list(tensors: &[InspectTensor]) -> String {
    let mut by_file: Vec<&InspectTensor> = tensors.iter().collect();
    by_file.sort_by(|a, b| (&a.file, &a.name).cmp(&(&b.file, &b.name)));
    let mut out = String::new();
    for tensors in by_file.chunk_by(|a, b| a.file == b.file) {
        out += &format!("\n{}\n", escaped(&tensors[0].file));
        for tensor in tensors {
            out += &format!("  {}\n    {}\n", escaped(&tensor.name), attributes(tensor, 1));
        }
    }
    out
}

/// Class, format, logical shape, element type (with the stored shape where it is another), bytes of all `count`.
fn attributes(tensor: &InspectTensor, count: u64) -> String {
    let stored = match &tensor.shape {
        Some(shape) if *shape == tensor.stored_shape => tensor.dtype.clone(),
        _ => format!("{}{}", tensor.dtype, shape_text(&tensor.stored_shape)),
    };
    format!(
        "{:<8} {:<17} {:<15} {stored:<14} {:>15}",
        tensor.class.as_deref().unwrap_or("?"),
        format_text(tensor.format.as_ref(), tensor.group_size),
        tensor.shape.as_deref().map_or("?".to_owned(), shape_text),
        size::grouped((tensor.bytes + tensor.scale_bytes) * count),
    )
}

/// Tensors that differ only in the numbers of layer, expert and file, as one each.
fn collapse(tensors: &[InspectTensor]) -> Vec<(&InspectTensor, u64)> {
    let pattern = |name: &str| -> String {
        name.split('.')
            .map(|part| if part.bytes().all(|b| b.is_ascii_digit()) { "#" } else { part })
            .collect::<Vec<_>>()
            .join(".")
    };
    let mut groups: BTreeMap<_, (usize, u64)> = BTreeMap::new();
    for (i, t) in tensors.iter().enumerate() {
        let key = (pattern(&t.name), &t.class, &t.format, t.group_size, &t.shape, t.bytes, t.scale_bytes);
        groups.entry(key).or_insert((i, 0)).1 += 1;
    }
    let mut groups: Vec<(usize, u64)> = groups.into_values().collect();
    groups.sort_unstable();
    groups.into_iter().map(|(first, count)| (&tensors[first], count)).collect()
}

/// Everything about one tensor that was read.
fn dump(tensor: &InspectTensor) -> String {
    let shape = tensor.shape.as_deref().map_or("?".to_owned(), shape_text);
    let format = format_text(tensor.format.as_ref(), tensor.group_size);
    let mut out = format!("{}\n  {shape}  {format}  {}\n", escaped(&tensor.name), escaped(&tensor.file));
    if let Some(stats) = &tensor.stats {
        out += &stats_text(stats);
    }
    if let Some(values) = &tensor.values {
        out += &format!("  row {}:\n", values.row);
        for line in values.values.chunks(6) {
            let line: Vec<String> =
                line.iter().map(|value| value.map_or("NaN".to_owned(), |value| format!("{value:>+11.4e}"))).collect();
            out += &format!("  {}\n", line.join(" "));
        }
    }
    out
}

fn stats_text(stats: &Stats) -> String {
    let number = |value: Option<f64>| value.map_or("–".to_owned(), |value| format!("{value:.6e}"));
    let mut out = format!(
        "  min {}  max {}  mean {}  rms {}\n  zero rows {}  not finite {}",
        number(stats.min.map(f64::from)),
        number(stats.max.map(f64::from)),
        number(stats.mean),
        number(stats.rms),
        stats.zero_rows,
        stats.non_finite,
    );
    if stats.scale_min.is_some() {
        let (min, max) = (stats.scale_min.map(f64::from), stats.scale_max.map(f64::from));
        out += &format!("  scales {} to {}", number(min), number(max));
    }
    out += &stats.clip_share.map_or(String::new(), |share| format!("\n  at the clip {:.2} %", 100.0 * share));
    out.push('\n');
    if let Some(levels) = &stats.levels {
        let bars: Vec<(String, u64)> = join_levels(levels.iter().map(|level| (level.level, level.count)));
        out += &bars_text(&bars);
    } else if let (Some(bins), Some(min), Some(max)) = (&stats.bins, stats.min, stats.max) {
        let width = (f64::from(max) - f64::from(min)) / bins.len() as f64;
        let label = |i: usize| format!("{:>+12.4e}", f64::from(min) + width * i as f64);
        let bars: Vec<(String, u64)> = bins.iter().enumerate().map(|(i, &count)| (label(i), count)).collect();
        out += &bars_text(&bars);
    }
    out
}

/// Levels one a line, or eight a line where there are more than 32.
fn join_levels(levels: impl Iterator<Item = (i16, u64)>) -> Vec<(String, u64)> {
    let levels: Vec<(i16, u64)> = levels.collect();
    if levels.len() <= BINS {
        return levels.into_iter().map(|(level, count)| (format!("{level:>5}"), count)).collect();
    }
    let mut joined: BTreeMap<i16, u64> = BTreeMap::new();
    for (level, count) in levels {
        *joined.entry(level.div_euclid(8) * 8).or_default() += count;
    }
    joined.into_iter().map(|(level, count)| (format!("{level:>5} to {:>4}", level + 7), count)).collect()
}

fn bars_text(bars: &[(String, u64)]) -> String {
    const WIDTH: f64 = 40.0;
    let most = bars.iter().map(|(_, count)| *count).max().unwrap_or(1).max(1) as f64;
    let total = bars.iter().map(|(_, count)| *count).sum::<u64>().max(1) as f64;
    bars.iter()
        .map(|(label, count)| {
            let bar = "█".repeat((*count as f64 / most * WIDTH).round() as usize);
            format!("  {label}  {:>6.2} %  {bar}", 100.0 * *count as f64 / total).trim_end().to_owned() + "\n"
        })
        .collect()
}

/// A line a tensor, or with values a line a value.
fn csv(report: &InspectReport) -> String {
    let quoted = |text: &str| format!("\"{}\"", escaped(text).to_string().replace('"', "\"\""));
    if report.tensors.iter().any(|tensor| tensor.values.is_some()) {
        let mut out = String::from("name,row,column,value\n");
        for tensor in &report.tensors {
            let Some(values) = &tensor.values else { continue };
            for (column, value) in values.values.iter().enumerate() {
                let value = value.map_or("NaN".to_owned(), |value| value.to_string());
                out += &format!("{},{},{column},{value}\n", quoted(&tensor.name), values.row);
            }
        }
        return out;
    }
    let mut out =
        String::from("name,file,dtype,stored_shape,shape,class,format,group_size,candidates,offset,bytes,scale_bytes");
    out += ",min,max,mean,rms,zero_rows,non_finite,scale_min,scale_max,clip_share\n";
    fn plain<T: ToString>(value: Option<T>) -> String {
        value.map_or(String::new(), |value| value.to_string())
    }
    for t in &report.tensors {
        let dims = |shape: &[u64]| shape.iter().map(u64::to_string).collect::<Vec<_>>().join("x");
        let s = t.stats.as_ref();
        let fields = [
            quoted(&t.name),
            quoted(&t.file),
            t.dtype.clone(),
            dims(&t.stored_shape),
            t.shape.as_deref().map_or(String::new(), dims),
            plain(t.class.as_ref()),
            plain(t.format.as_ref()),
            plain(t.group_size),
            t.candidates.join(" "),
            t.offset.to_string(),
            t.bytes.to_string(),
            t.scale_bytes.to_string(),
            plain(s.and_then(|s| s.min)),
            plain(s.and_then(|s| s.max)),
            plain(s.and_then(|s| s.mean)),
            plain(s.and_then(|s| s.rms)),
            plain(s.map(|s| s.zero_rows)),
            plain(s.map(|s| s.non_finite)),
            plain(s.and_then(|s| s.scale_min)),
            plain(s.and_then(|s| s.scale_max)),
            plain(s.and_then(|s| s.clip_share)),
        ];
        out += &(fields.join(",") + "\n");
    }
    out
}
