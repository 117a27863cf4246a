//! Two models tensor by tensor: the same bytes, or how far the values are from each other.
//!
//! Tensors and blocks of their rows are compared in parallel. A block has a size that depends on the tensor alone, and
//! blocks are joined in their order, so that no figure depends on the number of threads.

mod summary;
mod sums;

use std::path::Path;
use std::time::Instant;

use globset::{Glob, GlobMatcher};
use rayon::prelude::*;

use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::limits;
use crate::progress::Progress;
use crate::report::{DiffReport, DiffSide, DiffTensor, Side};
use crate::tensor::TensorName;
use crate::threads;
use crate::weights::{Model, ModelKind, Rows, RowsBuffer, Stored};
use sums::Sums;

/// What a user asks for.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Compare only tensors whose whole names match this glob.
    pub tensor: Option<String>,
    /// Threads; 0 for one per core.
    pub threads: usize,
}

/// Compares two models. Damaged ones are refused.
pub fn diff(a: &Path, b: &Path, options: &Options, progress: &dyn Progress) -> Result<DiffReport, Faults> {
    let started = Instant::now();
    let glob = options.tensor.as_deref().map(compile).transpose()?;
    let (model_a, model_b) = (Model::open(a)?, Model::open(b)?);
    let names = Names::of(&model_a, &model_b, glob.as_ref());
    if let Some(glob) = options.tensor.as_ref().filter(|_| names.is_empty()) {
        return Err(Fault::new(Place::default(), FaultKind::NothingMatches { glob: glob.clone() }).into());
    }
    let reference = match (model_a.kind(), model_b.kind()) {
        (ModelKind::Container, ModelKind::Checkpoint) => Side::B,
        _ => Side::A,
    };
    let comparison = Comparison { a: &model_a, b: &model_b, reference, progress };
    let pairs: Vec<Pair<'_>> = names.both.iter().map(|name| comparison.pair(name)).collect();
    let bytes = pairs.iter().map(|pair| pair.a.bytes() + pair.b.bytes()).sum();
    progress.start(bytes);
    let compared: Result<Vec<Compared>> =
        threads::pool(options.threads, a)?.install(|| pairs.par_iter().map(|pair| comparison.compare(pair)).collect());
    progress.end();
    let mut compared = compared?;
    let classes = summary::classes(&compared, reference);
    compared.sort_by(|a, b| summary::worst_first(&a.tensor, &b.tensor));
    let tensors: Vec<DiffTensor> = compared.into_iter().map(|compared| compared.tensor).collect();
    let all_same = tensors.iter().all(|tensor| tensor.same_bytes);
    Ok(DiffReport {
        a: side(a, &model_a),
        b: side(b, &model_b),
        reference,
        identical: all_same && names.only_a.is_empty() && names.only_b.is_empty(),
        tensors,
        classes,
        only_in_a: names.only_a,
        only_in_b: names.only_b,
        bytes,
        seconds: started.elapsed().as_secs_f64(),
        warnings: [model_a.findings(), model_b.findings()].concat(),
    })
}

fn compile(glob: &str) -> Result<GlobMatcher> {
    let compiled = Glob::new(glob).map_err(|e| {
        Fault::new(Place::default(), FaultKind::Glob { glob: glob.to_owned(), message: e.kind().to_string() })
    })?;
    Ok(compiled.compile_matcher())
}

fn side(path: &Path, model: &Model) -> DiffSide {
    DiffSide { path: path.to_string_lossy().into_owned(), kind: model.kind().name().to_owned() }
}

/// Which tensors are where.
struct Names<'a> {
    both: Vec<&'a TensorName>,
    only_a: Vec<String>,
    only_b: Vec<String>,
}

impl<'a> Names<'a> {
    fn of(a: &'a Model, b: &'a Model, glob: Option<&GlobMatcher>) -> Names<'a> {
        let wanted = |name: &&TensorName| glob.is_none_or(|glob| glob.is_match(name.as_str()));
        let (a, b): (Vec<_>, Vec<_>) =
            (a.names().into_iter().filter(wanted).collect(), b.names().into_iter().filter(wanted).collect());
        let missing = |name: &&&TensorName, other: &[&TensorName]| other.binary_search(*name).is_err();
        let only = |names: &[&TensorName], other: &[&TensorName]| -> Vec<String> {
            names.iter().filter(|name| missing(name, other)).map(|name| name.as_str().to_owned()).collect()
        };
        let (only_a, only_b) = (only(&a, &b), only(&b, &a));
        Names { both: a.into_iter().filter(|name| b.binary_search(name).is_ok()).collect(), only_a, only_b }
    }

    fn is_empty(&self) -> bool {
        self.both.is_empty() && self.only_a.is_empty() && self.only_b.is_empty()
    }
}

struct Comparison<'a> {
    a: &'a Model,
    b: &'a Model,
    reference: Side,
    progress: &'a dyn Progress,
}

/// A tensor as both models store it.
struct Pair<'a> {
    name: &'a TensorName,
    a: Stored<'a>,
    b: Stored<'a>,
}

/// A compared tensor, with the sums that a class adds up.
struct Compared {
    tensor: DiffTensor,
    sums: Option<Sums>,
}

/// One thread's reused space.
#[derive(Default)]
struct Buffers {
    a: RowsBuffer,
    b: RowsBuffer,
    row_a: Vec<f32>,
    row_b: Vec<f32>,
}

impl<'a> Comparison<'a> {
    fn pair(&self, name: &'a TensorName) -> Pair<'a> {
        let stored = |model: &'a Model| model.stored(name).expect("both models have it");
        Pair { name, a: stored(self.a), b: stored(self.b) }
    }

    fn compare(&self, pair: &Pair<'_>) -> Result<Compared> {
        self.progress.file(pair.name.as_str());
        let role = self.a.role(pair.name).or(self.b.role(pair.name));
        let shapes = [self.a.shape(pair.name), self.b.shape(pair.name)];
        let mut tensor = DiffTensor {
            name: pair.name.as_str().to_owned(),
            class: role.map(|role| role.class.name().to_owned()),
            shape: shapes[0].clone(),
            same_bytes: same_bytes(&pair.a, &pair.b)?,
            same_values: None,
            format_a: pair.a.format.to_owned(),
            format_b: pair.b.format.to_owned(),
            group_size_a: pair.a.group_size,
            group_size_b: pair.b.group_size,
            max_abs_err: None,
            rmse: None,
            cosine: None,
            sqnr_db: None,
            non_finite: 0,
            worst: None,
            reason: None,
        };
        let bytes = pair.a.bytes() + pair.b.bytes();
        if tensor.same_bytes {
            // A vector and its own copy: nothing differs, whatever the values are.
            (tensor.same_values, tensor.max_abs_err, tensor.rmse, tensor.cosine) =
                (Some(true), Some(0.0), Some(0.0), Some(1.0));
            self.progress.advance(bytes, 0);
            return Ok(Compared { tensor, sums: None });
        }
        if let [Some(a), Some(b)] = &shapes
            && a != b
        {
            tensor.reason = Some(format!("the shapes are {a} and {b}"));
        } else if role.is_none() {
            tensor.reason = Some("the model has no such tensor, so its values have no meaning".to_owned());
        }
        let rows = match &tensor.reason {
            Some(_) => None,
            None => match (self.a.rows(pair.name), self.b.rows(pair.name)) {
                (Ok(a), Ok(b)) => Some((a, b)),
                (Err(fault), _) | (_, Err(fault)) => {
                    tensor.reason = Some(undecoded(fault)?);
                    None
                }
            },
        };
        let Some((a, b)) = rows else {
            self.progress.advance(bytes, 0);
            return Ok(Compared { tensor, sums: None });
        };
        let sums = self.values(&a, &b, bytes)?;
        sums.describe(&mut tensor, self.reference);
        Ok(Compared { tensor, sums: Some(sums) })
    }

    /// Compares all values of two tensors of the same shape.
    fn values(&self, a: &Rows<'_>, b: &Rows<'_>, bytes: u64) -> Result<Sums> {
        let (rows, columns) = a.dims();
        let step = (limits::DIFF_BLOCK_ELEMENTS / columns.max(1)).max(1);
        let starts: Vec<u64> = (0..rows).step_by(step as usize).collect();
        let share = bytes / (starts.len() as u64).max(1);
        self.progress.advance(bytes - share * starts.len() as u64, 0);
        let blocks: Vec<Result<Sums>> = starts
            .into_par_iter()
            .map_init(Buffers::default, |buffers, first| {
                let sums = buffers.block(a, b, first, step.min(rows - first));
                self.progress.advance(share, 0);
                sums
            })
            .collect();
        let mut whole = Sums::default();
        for block in blocks {
            whole.join(&block?);
        }
        Ok(whole)
    }
}

impl Buffers {
    fn block(&mut self, a: &Rows<'_>, b: &Rows<'_>, first: u64, count: u64) -> Result<Sums> {
        let columns = a.dims().1 as usize;
        self.row_a.resize(columns, 0.0);
        self.row_b.resize(columns, 0.0);
        a.read(first, count, &mut self.a)?;
        b.read(first, count, &mut self.b)?;
        let mut sums = Sums::default();
        for row in first..first + count {
            a.row(&self.a, first, row, &mut self.row_a);
            b.row(&self.b, first, row, &mut self.row_b);
            sums.row(row, &self.row_a, &self.row_b);
        }
        Ok(sums)
    }
}

/// Why a stored weight has no values; a file that cannot be read is still an error.
fn undecoded(fault: Fault) -> Result<String> {
    match *fault.kind {
        FaultKind::FormatUnknown | FaultKind::NotDecoded { .. } | FaultKind::StoredDtype { .. } => {
            Ok(fault.kind.to_string())
        }
        _ => Err(fault),
    }
}

/// Whether two tensors are stored the same way in the same bytes. Stops at the first difference.
fn same_bytes(a: &Stored<'_>, b: &Stored<'_>) -> Result<bool> {
    let alike = a.format == b.format && a.group_size == b.group_size && a.parts.len() == b.parts.len();
    let alike_parts = a.parts.iter().zip(&b.parts).all(|((_, a), (_, b))| (a.dtype, a.bytes) == (b.dtype, b.bytes));
    if !alike || !alike_parts {
        return Ok(false);
    }
    for ((file_a, part_a), (file_b, part_b)) in a.parts.iter().zip(&b.parts) {
        let step = limits::DIFF_READ_BYTES as u64;
        let starts: Vec<u64> = (0..part_a.bytes).step_by(step as usize).collect();
        let differing = starts
            .into_par_iter()
            .map_init(Default::default, |(a, b): &mut (Vec<u8>, Vec<u8>), start| -> Result<bool> {
                let bytes = step.min(part_a.bytes - start) as usize;
                a.resize(bytes, 0);
                b.resize(bytes, 0);
                file_a.read_at(a, part_a.offset + start)?;
                file_b.read_at(b, part_b.offset + start)?;
                Ok(a == b)
            })
            .find_map_any(|same| match same {
                Ok(true) => None,
                Ok(false) => Some(Ok(())),
                Err(fault) => Some(Err(fault)),
            });
        if differing.transpose()?.is_some() {
            return Ok(false);
        }
    }
    Ok(true)
}
