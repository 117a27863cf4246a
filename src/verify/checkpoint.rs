//! A checkpoint: whether it opens as a source, and whether its values are numbers.

use std::path::Path;

use rayon::prelude::*;

use super::{Level, Levels, Options, Stage, structure};
use crate::checkpoint::{Allowed, Checkpoint};
use crate::config::CONFIG_FILE;
use crate::container::reader::Found;
use crate::dequantize::first_non_finite;
use crate::error::{Fault, FaultKind, Faults, Place, Result, Severity, counted};
use crate::limits;
use crate::part::Part;
use crate::progress::Progress;
use crate::roles::Pass;
use crate::tensor::TensorName;
use crate::weights::{ReadBuffer, SourceRows, Weights, read_scales};

/// The levels of a checkpoint.
pub(super) fn levels(
    path: &Path,
    options: &Options,
    part: Part,
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<Levels, Faults> {
    let warning = |fault| (Severity::Warning, fault);
    let error = |fault| (Severity::Error, fault);
    let (checkpoint, findings): (Option<Checkpoint>, Vec<Found>) =
        match Checkpoint::open(path, &Pass::ALL, Allowed::default()) {
            Ok(mut checkpoint) => {
                let warnings = std::mem::take(&mut checkpoint.warnings).into_iter().map(warning);
                let silent = checkpoint.config.silent_faults(&path.join(CONFIG_FILE)).into_iter().map(error);
                let findings = warnings.chain(silent).collect();
                (Some(checkpoint), findings)
            }
            Err(faults) => (None, faults.into_vec().into_iter().map(error).collect()),
        };
    let mut stages = vec![structure::of_checkpoint(path, checkpoint.as_ref(), findings)];
    if options.level >= Level::Payload {
        stages.push(match &checkpoint {
            Some(checkpoint) => pool.install(|| payload(checkpoint, part, progress)),
            None => {
                let mut stage = Stage::default();
                stage.skip("values", "the checkpoint could not be opened");
                stage
            }
        });
    }
    let model = checkpoint.map(|checkpoint| Box::new(checkpoint) as Box<dyn Weights>);
    Ok(Levels {
        stages,
        source: None,
        model,
        same_weights: false,
        hashed: Vec::new(),
        manifest_sha256: None,
        source_model_sha256: None,
    })
}

/// Looks for values and scales of the part's weights that are not finite.
fn payload(checkpoint: &Checkpoint, part: Part, progress: &dyn Progress) -> Stage {
    let mut names: Vec<&TensorName> = checkpoint.weights(&Pass::ALL).map(|(name, _)| name).collect();
    names.sort_unstable();
    let looked_at = format!("{}, every value and scale is finite", counted(names.len(), "weight"));
    let names: Vec<(usize, &TensorName)> = names.into_iter().enumerate().filter(|(rank, _)| part.has(*rank)).collect();
    let tensor = |name: &TensorName| checkpoint.tensor(name.as_str()).expect("a weight of this checkpoint");
    let bytes = names.iter().map(|(_, name)| tensor(name).stored.bytes).sum();
    progress.start(bytes);
    let findings: Vec<Vec<(u64, Found)>> = names
        .par_iter()
        .map(|(rank, name)| {
            progress.file(name.as_str());
            let found = scan(checkpoint, name).unwrap_or_else(|fault| vec![(Severity::Error, fault)]);
            progress.advance(tensor(name).stored.bytes, 0);
            found.into_iter().map(|found| (*rank as u64, found)).collect()
        })
        .collect();
    progress.end();
    let mut stage = Stage { bytes_read: bytes, ..Stage::default() };
    stage.share("values", findings.into_iter().flatten().collect(), &looked_at);
    stage
}

/// How many elements of a weight are not finite, and the first: row, column, value.
type NonFinite = Option<(u64, u64, u64, f32)>;

fn scan(checkpoint: &Checkpoint, name: &TensorName) -> Result<Vec<Found>> {
    let tensor = checkpoint.tensor(name.as_str()).expect("a weight of this checkpoint");
    let mut found = Vec::new();
    let mut error = |place, kind| found.push((Severity::Error, Fault::new(place, kind)));
    if let Some((shard, stored)) = tensor.scales {
        let scales = read_scales(&tensor)?;
        let columns = stored.shape.matrix().map_or(1, |(_, columns)| columns.max(1)) as usize;
        let count = scales.iter().filter(|scale| !scale.is_finite()).count() as u64;
        if let Some(first) = first_non_finite(&scales) {
            let (row, column, value) = ((first / columns) as u64, (first % columns) as u64, scales[first]);
            let place = Place::tensor(shard.file.path(), stored.name.clone());
            error(place, FaultKind::BadValue { row, column, value, count });
            return Ok(found);
        }
    }
    let rows = SourceRows::new(tensor)?;
    let step = (limits::BLOCK_SOURCE_BYTES / rows.row_bytes().max(1)).max(1);
    let starts: Vec<u64> = (0..rows.rows).step_by(step as usize).collect();
    let blocks: Vec<Result<NonFinite>> = starts
        .into_par_iter()
        .map_init(Default::default, |buffers, first| block(&rows, first, step.min(rows.rows - first), buffers))
        .collect();
    let mut whole: NonFinite = None;
    for block in blocks {
        whole = joined(whole, block?);
    }
    if let Some((count, row, column, value)) = whole {
        error(rows.place(), FaultKind::BadValue { row, column, value, count });
    }
    Ok(found)
}

fn joined(before: NonFinite, next: NonFinite) -> NonFinite {
    match (before, next) {
        (Some((count, row, column, value)), Some((more, ..))) => Some((count + more, row, column, value)),
        (before, next) => before.or(next),
    }
}

fn block(rows: &SourceRows<'_>, first: u64, count: u64, buffers: &mut (ReadBuffer, Vec<f32>)) -> Result<NonFinite> {
    let (stored, values) = buffers;
    values.resize(rows.columns as usize, 0.0);
    rows.read(first, count, stored)?;
    let mut found: NonFinite = None;
    for row in first..first + count {
        rows.row(stored, first, row, values);
        if let Some(column) = first_non_finite(values) {
            let count = values.iter().filter(|value| !value.is_finite()).count() as u64;
            found = joined(found, Some((count, row, column as u64, values[column])));
        }
    }
    Ok(found)
}
