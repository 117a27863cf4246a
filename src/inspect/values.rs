//! Statistics and values of the tensors that a report lists.

use super::Query;
use crate::checkpoint::Checkpoint;
use crate::container::reader::Survey;
use crate::error::{Fault, FaultKind, Faults, Result, Severity};
use crate::format::Format;
use crate::payload::{self, Scan, histogram, scan, scan_source};
use crate::report::Finding;
use crate::report::inspect::{InspectReport, InspectTensor, LevelCount, Stats, Values};
use crate::weights::{ContainerRows, Rows, RowsBuffer, SourceRows};

/// Reads the listed weights of a container. A weight that cannot be decoded is a finding.
pub(super) fn of_container(
    survey: &Survey,
    query: &Query,
    report: &mut InspectReport,
    watch: &dyn Fn(&str, u64, u64),
) -> Result<(), Faults> {
    let total: u64 = report.tensors.iter().map(|tensor| tensor.bytes).sum();
    let mut done = 0;
    for tensor in &mut report.tensors {
        watch(&tensor.name, done, total);
        done += tensor.bytes;
        let weight = &survey.weights[tensor.name.as_str()];
        let rows = match ContainerRows::new(survey, weight) {
            Ok(rows) => rows,
            Err(fault) => {
                report.findings.push(Finding::new(Severity::Warning, &fault));
                continue;
            }
        };
        let place = crate::error::Place::tensor(survey.files[weight.file].file.path(), weight.codes.name.clone());
        let scan = (query.stats || query.bins.is_some()).then(|| scan(&rows)).transpose()?;
        let range = rows.decoder().code_range();
        if let (Some(scan), Some(format)) = (&scan, weight.format) {
            let found = payload::findings(scan, format, &place);
            report.findings.extend(found.iter().map(|(severity, fault)| Finding::new(*severity, fault)));
        }
        fill(tensor, &Rows::Container(rows), scan.as_ref(), range, query).map_err(|fault| Fault { place, ..fault })?;
    }
    Ok(())
}

/// Reads the listed weights of a checkpoint.
pub(super) fn of_checkpoint(
    checkpoint: &Checkpoint,
    query: &Query,
    report: &mut InspectReport,
    watch: &dyn Fn(&str, u64, u64),
) -> Result<(), Faults> {
    let total: u64 = report.tensors.iter().map(|tensor| tensor.bytes).sum();
    let mut done = 0;
    for tensor in &mut report.tensors {
        watch(&tensor.name, done, total);
        done += tensor.bytes;
        let Some(source) = checkpoint.tensor(&tensor.name) else { continue };
        let rows = SourceRows::new(source)?;
        let place = rows.place();
        let scan = (query.stats || query.bins.is_some()).then(|| scan_source(&rows)).transpose()?;
        if let Some(scan) = &scan {
            let found = payload::findings(scan, Format::F32, &place);
            report.findings.extend(found.iter().map(|(severity, fault)| Finding::new(*severity, fault)));
        }
        fill(tensor, &Rows::Source(rows), scan.as_ref(), None, query).map_err(|fault| Fault { place, ..fault })?;
    }
    Ok(())
}

fn fill(
    tensor: &mut InspectTensor,
    rows: &Rows<'_>,
    scan: Option<&Scan>,
    range: Option<(i8, i8)>,
    query: &Query,
) -> Result<()> {
    if let Some(scan) = scan {
        let mut stats = stats(scan, range);
        if let (Some(bins), None, (Some(min), Some(max))) = (query.bins, &stats.levels, (stats.min, stats.max)) {
            stats.bins = Some(histogram(rows, min, max, bins)?);
        }
        tensor.stats = Some(stats);
    }
    if query.values.is_some() || query.row.is_some() {
        tensor.values = Some(values(rows, query)?);
    }
    Ok(())
}

fn stats(scan: &Scan, range: Option<(i8, i8)>) -> Stats {
    let finite = scan.elements() - scan.non_finite.map_or(0, |seen| seen.count);
    let some = |value: f64| (finite > 0).then_some(value);
    let levels = scan.levels.as_ref().map(|levels| {
        let counted = |(level, &count): (usize, &u64)| LevelCount { level: level as i16 - 128, count };
        levels.iter().enumerate().map(counted).filter(|level| level.count > 0).collect()
    });
    let has_scales = scan.scale_min <= scan.scale_max;
    Stats {
        min: (finite > 0).then_some(scan.min),
        max: (finite > 0).then_some(scan.max),
        mean: some(scan.sum / finite as f64),
        rms: some((scan.sum_squares / finite as f64).sqrt()),
        zero_rows: scan.zero_rows.map_or(0, |seen| seen.count),
        non_finite: scan.non_finite.map_or(0, |seen| seen.count),
        scale_min: has_scales.then_some(scan.scale_min),
        scale_max: has_scales.then_some(scan.scale_max),
        levels,
        clip_share: range.and_then(|range| scan.clip_share(range)),
        bins: None,
    }
}

/// The first values of a row; all of it where a row but no number is asked for.
fn values(rows: &Rows<'_>, query: &Query) -> Result<Values> {
    let (count, columns) = rows.dims();
    let row = query.row.unwrap_or(0);
    if row >= count {
        return Err(Fault::new(Default::default(), FaultKind::NoSuchRow { row, rows: count }));
    }
    let mut buffer = RowsBuffer::default();
    let mut out = vec![0.0; columns as usize];
    rows.read(row, 1, &mut buffer)?;
    rows.row(&buffer, row, row, &mut out);
    out.truncate(query.values.unwrap_or(columns).min(columns) as usize);
    Ok(Values { row, values: out.into_iter().map(|value| value.is_finite().then_some(value)).collect() })
}
