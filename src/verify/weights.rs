//! Level weights: every weight of a container against the checkpoint that it was made from.
//!
//! A quantized weight is the source's value rounded to a multiple of its scale, so it is at most half a step away; what
//! is stored raw or as FP8 is the source's value itself. A tensor with another tensor's scales, or of another checkpoint,
//! fails this in nearly every element.

mod bound;
mod walk;

use std::path::Path;

use rayon::prelude::*;

use super::Stage;
use crate::checkpoint::{Allowed, Checkpoint, SourceTensor};
use crate::config::CONFIG_FILE;
use crate::container::reader::{Found, StoredWeight, Survey};
use crate::error::{Fault, FaultKind, Faults, Place, Result, Severity, counted};
use crate::format::Format;
use crate::limits;
use crate::part::Part;
use crate::progress::Progress;
use crate::reference::differences;
use crate::roles::Pass;
use crate::tensor::TensorName;
use crate::weights::{ContainerRows, ReadBuffer, SourceRows, StoredRows};
use bound::Distance;

/// A source that was opened.
pub(super) enum Opened {
    /// It has the container's tensors in their shapes.
    Comparable(Box<Checkpoint>),
    /// It has not, and the container is damaged, so that it may be the container that is wrong.
    OtherShapes,
}

/// Opens the source. If it has other names or shapes than the container, it is another model and refused, unless the
/// container is not `sound`: then that is the more likely reason.
pub(super) fn open_source(survey: &Survey, source: &Path, sound: bool) -> Result<Opened, Faults> {
    let has = |pass: &Pass| survey.weights.values().any(|w| w.role.as_ref().is_some_and(|role| role.pass == *pass));
    let passes: Vec<Pass> = Pass::ALL.into_iter().filter(has).collect();
    let checkpoint = Checkpoint::open(source, &passes, Allowed::default())?;
    let other = |(name, weight): &(&TensorName, &StoredWeight)| {
        let here = weight.role.as_ref().map(|role| &role.shape);
        let there = checkpoint.tensor(name.as_str()).map(|tensor| &tensor.stored.shape);
        here.is_some() && here != there
    };
    let others: Vec<_> = survey.weights.iter().filter(other).collect();
    let Some((name, weight)) = others.first() else { return Ok(Opened::Comparable(Box::new(checkpoint))) };
    if !sound {
        return Ok(Opened::OtherShapes);
    }
    let kind = FaultKind::OtherModel {
        tensors: others.len(),
        container: weight.shape().expect("of known shape"),
        source_shape: checkpoint.tensor(name.as_str()).map(|tensor| tensor.stored.shape.clone()),
    };
    Err(Fault::new(Place::tensor(source, (*name).clone()), kind).into())
}

/// The check that cannot be made.
pub(super) fn skipped(why: &str) -> Stage {
    let mut stage = Stage::default();
    stage.skip("weights", why);
    stage
}

/// What the level found, and what the source is.
pub(super) struct Compared {
    pub(super) stage: Stage,
    /// The hash of the source, which a whole run makes on the way; none where it could not be read.
    pub(super) source_sha256: Result<Option<String>>,
}

/// Compares every weight of the part with its source.
pub(super) fn against(survey: &Survey, source: &Checkpoint, part: Part, progress: &dyn Progress) -> Compared {
    let of_part = |(rank, _): &(usize, _)| part.has(*rank);
    let weights: Vec<(usize, (&TensorName, &StoredWeight))> =
        survey.weights.iter().enumerate().filter(of_part).collect();
    let source_bytes = |name: &TensorName| source.tensor(name.as_str()).map_or(0, |tensor| tensor.stored.bytes);
    let bytes = weights.iter().map(|(_, (name, weight))| weight.bytes() + source_bytes(name)).sum();
    progress.start(bytes);
    let (found, source_sha256) = if part == Part::WHOLE {
        let walk::Walked { found, model_sha256 } = walk::walk(survey, source, progress);
        (found, model_sha256)
    } else {
        (each(survey, &weights, source, progress), Ok(None))
    };
    progress.end();
    let mut stage = Stage { bytes_read: bytes, ..Stage::default() };
    let looked_at = format!("{}, each within half a step of the source", counted(survey.weights.len(), "tensor"));
    let config = config_differences(survey, source).map(|found| (0, found));
    let found = found.into_iter().map(|(rank, found)| (1 + rank, found));
    stage.share("weights", config.chain(found).collect(), &looked_at);
    Compared { stage, source_sha256 }
}

/// Compares weights one by one, wherever they are; each finding with the rank of its weight.
fn each(
    survey: &Survey,
    weights: &[(usize, (&TensorName, &StoredWeight))],
    source: &Checkpoint,
    progress: &dyn Progress,
) -> Vec<(u64, Found)> {
    let found = weights.par_iter().map(|(rank, (name, weight))| {
        progress.file(name.as_str());
        let place = Place::tensor(survey.files[weight.file].file.path(), (*name).clone());
        let found = compare(survey, weight, source, &place);
        let source_bytes = source.tensor(name.as_str()).map_or(0, |tensor| tensor.stored.bytes);
        progress.advance(weight.bytes() + source_bytes, 0);
        let found = found.unwrap_or_else(|fault| vec![(Severity::Error, fault)]);
        found.into_iter().map(|found| (*rank as u64, found)).collect::<Vec<_>>()
    });
    found.collect::<Vec<_>>().into_iter().flatten().collect()
}

/// The same weights under another config.json are another model.
fn config_differences(survey: &Survey, source: &Checkpoint) -> impl Iterator<Item = Found> {
    let path = survey.directory.join(CONFIG_FILE);
    let differing = survey.config.as_ref().map(|config| differences(config, &source.config));
    differing.into_iter().flatten().map(move |(key, found, expected)| {
        (Severity::Error, Fault::new(Place::file(&path), FaultKind::ConfigNotTheSource { key, expected, found }))
    })
}

/// One thread's reused space.
#[derive(Default)]
struct Buffers {
    stored: StoredRows,
    expected: Vec<f32>,
    found: Vec<f32>,
}

/// Both sides of a weight, ready to be read.
fn sides<'a>(
    survey: &'a Survey,
    weight: &'a StoredWeight,
    tensor: SourceTensor<'a>,
    place: &Place,
) -> Result<(ContainerRows<'a>, SourceRows<'a>)> {
    let rows = ContainerRows::new(survey, weight)?;
    let source = SourceRows::new(tensor)?;
    if (rows.rows, rows.columns) != (source.rows, source.columns) {
        // A raw tensor of another shape than config.json asks for; level structure has told which.
        return Err(Fault::new(place.clone(), FaultKind::NotInSource));
    }
    Ok((rows, source))
}

/// How far `count` rows from row `first` on are from what was `read` of the source.
fn near(
    rows: &ContainerRows<'_>,
    source: &SourceRows<'_>,
    read: &ReadBuffer,
    first: u64,
    count: u64,
    buffers: &mut Buffers,
) -> Result<Distance> {
    let format = rows.decoder().format();
    rows.read(first, count, &mut buffers.stored)?;
    buffers.expected.resize(rows.columns as usize, 0.0);
    buffers.found.resize(rows.columns as usize, 0.0);
    let mut distance = Distance::default();
    for row in first..first + count {
        source.row(read, first, row, &mut buffers.expected);
        rows.row(&buffers.stored, first, row, &mut buffers.found);
        let scales = rows.scales(&buffers.stored, first, row);
        distance.row(row, format, scales, &mut buffers.expected, &buffers.found);
    }
    Ok(distance)
}

fn compare(survey: &Survey, weight: &StoredWeight, source: &Checkpoint, place: &Place) -> Result<Vec<Found>> {
    let name = place.tensor.as_ref().expect("the place of a tensor");
    let tensor = source.tensor(name.as_str()).ok_or_else(|| Fault::new(place.clone(), FaultKind::NotInSource))?;
    let (rows, source) = sides(survey, weight, tensor, place)?;
    let step = (limits::BLOCK_SOURCE_BYTES / source.row_bytes().max(1)).max(1);
    let starts: Vec<u64> = (0..rows.rows).step_by(step as usize).collect();
    let blocks: Vec<Result<Distance>> = starts
        .into_par_iter()
        .map_init(<(ReadBuffer, Buffers)>::default, |(read, buffers), first| {
            let count = step.min(rows.rows - first);
            source.read(first, count, read)?;
            near(&rows, &source, read, first, count, buffers)
        })
        .collect();
    let mut whole = Distance::default();
    for block in blocks {
        whole.join(&block?);
    }
    Ok(findings(&whole, &rows, survey, place))
}

fn findings(distance: &Distance, rows: &ContainerRows<'_>, survey: &Survey, place: &Place) -> Vec<Found> {
    let mut found = Vec::new();
    let mut push = |severity, kind| found.push((severity, Fault::new(place.clone(), kind)));
    if let Some(kind) = distance.fault() {
        push(Severity::Error, kind);
    }
    if let Some((count, row, column, value)) = distance.non_finite {
        push(Severity::Warning, FaultKind::NonFiniteZeroed { count, row, column, value });
    }
    if let Some((begin, end)) = distance.lost_half(rows.rows, rows.columns) {
        let head = survey.config.as_ref().and_then(|config| config.mtp_layer());
        let head = head.map(|layer| format!("model.layers.{layer}.eh_proj.weight"));
        let is_head = head.as_deref() == place.tensor.as_ref().map(|name| name.as_str());
        let format: Format = rows.decoder().format();
        if is_head {
            push(Severity::Error, FaultKind::HeadHalfZero { format, begin, end });
        } else {
            push(Severity::Warning, FaultKind::ZeroColumns { begin, end });
        }
    }
    found
}
