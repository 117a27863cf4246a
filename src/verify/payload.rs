//! Level payload: every stored byte.
//!
//! With a manifest, one sequential pass over each file gives its SHA-256 and the checksum of every tensor, and looks at
//! every scale on the way. Without one, every weight is decoded, and what scales and codes can tell is told.

mod scales;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::Stage;
use crate::container::manifest::{CHECKSUM, FileRecord, Manifest, TensorRecord, hex};
use crate::container::reader::{ContainerFile, Found, StoredWeight, Survey};
use crate::container::writer::{Digests, checksum_text, digest_with};
use crate::error::{Fault, FaultKind, Place, Result, Severity, counted};
use crate::header::StoredTensor;
use crate::io::SourceFile;
use crate::limits;
use crate::part::Part;
use crate::payload;
use crate::progress::Progress;
use crate::tensor::{Dtype, TensorName};
use crate::weights::ContainerRows;
use scales::ScaleScan;

/// The checks of a container's bytes: of the files, or without a manifest the weights, that the part has.
pub(super) fn of_container(survey: &Survey, part: Part, progress: &dyn Progress) -> Stage {
    let mut stage = match &survey.manifest {
        Some(manifest) => by_checksums(survey, manifest, part, progress),
        None => {
            let mut stage = Stage::default();
            stage.skip("checksums", "no manifest: values are looked at instead");
            by_values(survey, &survey.weights.iter().collect::<Vec<_>>(), stage, part, progress)
        }
    };
    if !part.has(0) {
        stage.elsewhere("head");
        return stage;
    }
    match payload::check_head(survey) {
        Some(found) => stage.check("head", vec![found], "eh_proj has both its halves"),
        None if has_head(survey) => stage.check("head", Vec::new(), "eh_proj has both its halves"),
        None => stage.skip("head", "no MTP head"),
    }
    stage
}

fn has_head(survey: &Survey) -> bool {
    let layer = survey.config.as_ref().and_then(|config| config.mtp_layer());
    layer.is_some_and(|layer| survey.weights.contains_key(format!("model.layers.{layer}.eh_proj.weight").as_str()))
}

/// A file to be hashed.
struct Task<'a> {
    /// Its place among the files of the manifest.
    rank: u64,
    record: &'a FileRecord,
    /// Its header, where it has a valid one.
    file: Option<(usize, &'a ContainerFile)>,
    /// Tensors that are scales, by their index in the header, with the names of their weights.
    scales: HashMap<usize, &'a TensorName>,
}

/// Checks files and tensors against the manifest, and looks at scales.
fn by_checksums(survey: &Survey, manifest: &Manifest, part: Part, progress: &dyn Progress) -> Stage {
    let mut tasks = tasks(survey, manifest);
    let files = counted(tasks.len(), "file");
    tasks.retain(|task| part.has(task.rank as usize));
    let bytes = tasks.iter().map(|task| task.record.bytes).sum();
    progress.start(bytes);
    let results = run_all(&tasks, |task| {
        progress.file(&task.record.name);
        task.run(survey, manifest, progress).unwrap_or_else(|fault| (vec![(Severity::Error, fault)], Vec::new()))
    });
    progress.end();
    let (mut checksums, mut scales) = (Vec::new(), Vec::new());
    for (task, (of_checksums, of_scales)) in tasks.iter().zip(results) {
        checksums.extend(of_checksums.into_iter().map(|found| (task.rank, found)));
        scales.extend(of_scales.into_iter().map(|found| (task.rank, found)));
    }
    if manifest.checksum != CHECKSUM {
        let kind = FaultKind::ChecksumUnknown { expected: CHECKSUM, found: manifest.checksum.clone() };
        checksums.push((u64::MAX, (Severity::Error, Fault::new(Place::file(&survey.directory), kind))));
    }
    let mut stage = Stage { bytes_read: bytes, ..Stage::default() };
    let tensors = manifest.tensors.len();
    stage.share("checksums", checksums, &format!("{files} and {tensors} tensors, as the manifest says"));
    stage.share("scales", scales, "all positive and finite");
    // Nobody vouches for a weight that the manifest does not name.
    let unnamed: Vec<_> = survey.weights.iter().filter(|(name, _)| !manifest.tensors.contains_key(*name)).collect();
    if unnamed.is_empty() {
        stage.skip("codes", "the checksums vouch for them");
        return stage;
    }
    by_values(survey, &unnamed, stage, part, progress)
}

/// Works on all tasks, the largest first, with more workers than threads, so that the disk does not wait for hashing.
/// Results are in the order of the tasks.
fn run_all<R: Send>(tasks: &[Task<'_>], work: impl Fn(&Task<'_>) -> R + Sync) -> Vec<R> {
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    order.sort_by_key(|&task| Reverse(tasks[task].record.bytes));
    let next = AtomicUsize::new(0);
    let worker = || {
        let take = || order.get(next.fetch_add(1, Ordering::Relaxed)).copied();
        std::iter::from_fn(take).map(|task| (task, work(&tasks[task]))).collect::<Vec<(usize, R)>>()
    };
    let workers = (limits::HASH_WORKERS * rayon::current_num_threads()).min(tasks.len());
    let mut results: Vec<(usize, R)> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        handles.into_iter().flat_map(|handle| handle.join().expect("a worker does not panic")).collect()
    });
    results.sort_by_key(|(task, _)| *task);
    results.into_iter().map(|(_, result)| result).collect()
}

/// The files of a manifest that are there in their full size; what is not, level structure has told.
fn tasks<'a>(survey: &'a Survey, manifest: &'a Manifest) -> Vec<Task<'a>> {
    let mut by_name: HashMap<&str, (usize, &ContainerFile)> = HashMap::new();
    let mut index_of: Vec<HashMap<&TensorName, usize>> = Vec::new();
    for (number, file) in survey.files.iter().enumerate() {
        by_name.insert(&file.name, (number, file));
        index_of.push(file.header.tensors().iter().enumerate().map(|(index, tensor)| (&tensor.name, index)).collect());
    }
    let mut scales: Vec<HashMap<usize, &TensorName>> = vec![HashMap::new(); survey.files.len()];
    for (name, weight) in &survey.weights {
        if let Some((file, stored)) = weight.scales.as_ref().filter(|(_, stored)| stored.dtype == Dtype::F32) {
            scales[*file].insert(index_of[*file][&stored.name], name);
        }
    }
    let whole = |record: &FileRecord| {
        let plain = !record.name.contains(['/', '\\', '\0']);
        let metadata = std::fs::metadata(survey.directory.join(&record.name));
        plain && metadata.is_ok_and(|metadata| metadata.is_file() && metadata.len() == record.bytes)
    };
    let records = manifest.files.iter().chain(&manifest.small_files).enumerate().filter(|(_, record)| whole(record));
    records
        .map(|(rank, record)| {
            let file = by_name.get(record.name.as_str()).copied();
            let scales = file.map_or_else(HashMap::new, |(number, _)| std::mem::take(&mut scales[number]));
            Task { rank: rank as u64, record, file, scales }
        })
        .collect()
}

impl Task<'_> {
    /// What is wrong with checksums, and with scales.
    fn run(&self, survey: &Survey, manifest: &Manifest, progress: &dyn Progress) -> Result<(Vec<Found>, Vec<Found>)> {
        let opened;
        let (source, tensors): (&SourceFile, &[StoredTensor]) = match self.file {
            Some((_, file)) => (&file.file, file.header.tensors()),
            None => {
                opened = SourceFile::open(&survey.directory.join(&self.record.name))?;
                (&opened, &[])
            }
        };
        let mut scans: BTreeMap<usize, ScaleScan> = BTreeMap::new();
        let mut visit = |tensor: usize, bytes: &[u8]| {
            if self.scales.contains_key(&tensor) {
                scans.entry(tensor).or_default().feed(bytes);
            }
        };
        let read = |buffer: &mut [u8], offset| source.read_at(buffer, offset);
        let hashed = |bytes| progress.advance(bytes, 0);
        let (bytes, step) = (source.bytes(), limits::VERIFY_READ_BYTES);
        let digests = digest_with(&read, bytes, tensors, step, &mut visit, &hashed)?;
        let mut checksums = self.tensors(survey, manifest, &digests);
        let (expected, found) = (self.record.sha256.clone(), hex(&digests.sha256));
        if expected != found {
            let kind = FaultKind::FileHash { expected, found };
            checksums.push((Severity::Error, Fault::new(Place::file(source.path()), kind)));
        }
        let bad = |(tensor, scan): (usize, ScaleScan)| {
            let weight = self.scales[&tensor];
            let kind = scan.fault(survey.weights[weight].format, survey.weights[weight].shape())?;
            let offset = tensors[tensor].offset + 4 * scan.first_bad_index();
            Some((Severity::Error, Fault::new(Place::tensor(source.path(), weight.clone()).at(offset), kind)))
        };
        Ok((checksums, scans.into_iter().filter_map(bad).collect()))
    }

    /// Tensors of this file whose checksums are not those of the manifest.
    fn tensors(&self, survey: &Survey, manifest: &Manifest, digests: &Digests) -> Vec<Found> {
        let Some((number, file)) = self.file.filter(|_| manifest.checksum == CHECKSUM) else { return Vec::new() };
        let mut found = Vec::new();
        for (index, tensor) in file.header.tensors().iter().enumerate() {
            let (name, is_scales) = match self.scales.get(&index) {
                Some(weight) => (*weight, true),
                None => (&tensor.name, false),
            };
            let stored_here = survey.weights.get(name).is_some_and(|weight| is_scales || weight.file == number);
            let Some(record) = manifest.tensors.get(name).filter(|_| stored_here) else { continue };
            let (part, expected) = expected(record, is_scales);
            let checksum = checksum_text(digests.checksums[index]);
            if expected != checksum {
                let kind = FaultKind::TensorChecksum { part, expected: expected.to_owned(), found: checksum };
                let place = Place::tensor(file.file.path(), name.clone()).at(tensor.offset);
                found.push((Severity::Error, Fault::new(place, kind)));
            }
        }
        found
    }
}

/// What part of a weight a tensor is, and its checksum by the manifest.
fn expected(record: &TensorRecord, is_scales: bool) -> (&'static str, &str) {
    match (is_scales, record.scale_bytes) {
        (true, _) => ("scales", record.scale_checksum.as_deref().unwrap_or_default()),
        (false, 0) => ("values", &record.checksum),
        (false, _) => ("codes", &record.checksum),
    }
}

/// Decodes the weights that the part has, and adds the checks of what their scales and codes tell.
fn by_values(
    survey: &Survey,
    weights: &[(&TensorName, &StoredWeight)],
    mut stage: Stage,
    part: Part,
    progress: &dyn Progress,
) -> Stage {
    let of_part: Vec<_> = weights.iter().enumerate().filter(|(rank, _)| part.has(*rank)).collect();
    let bytes: u64 = of_part.iter().map(|(_, (_, weight))| weight.bytes()).sum();
    progress.start(bytes);
    let found: Vec<Vec<(u64, Found)>> = of_part
        .par_iter()
        .map(|(rank, (name, weight))| {
            progress.file(name.as_str());
            let found = scanned(survey, name, weight);
            progress.advance(weight.bytes(), 0);
            found.into_iter().map(|found| (*rank as u64, found)).collect()
        })
        .collect();
    progress.end();
    stage.bytes_read += bytes;
    let (mut scales, mut values, mut codes) = (Vec::new(), Vec::new(), Vec::new());
    for (rank, (severity, fault)) in found.into_iter().flatten() {
        let check = match *fault.kind {
            FaultKind::BadScale { .. } => &mut scales,
            FaultKind::Padding { .. } | FaultKind::UnusualCode { .. } => &mut codes,
            FaultKind::ZeroRows { .. } | FaultKind::ZeroColumns { .. } => &mut codes,
            _ => &mut values,
        };
        check.push((rank, (severity, fault)));
    }
    stage.share("scales", scales, "all positive and finite");
    stage.share("codes", codes, "padding, levels and zeros are as quantizers write them");
    stage.share("values", values, &format!("{}, all finite", counted(weights.len(), "weight")));
    stage
}

/// What a scan says about a weight.
fn scanned(survey: &Survey, name: &TensorName, weight: &StoredWeight) -> Vec<Found> {
    // Without a format there are no values to look at; why there is none, level structure has told.
    let Some(format) = weight.format.filter(|_| weight.shape().is_some()) else { return Vec::new() };
    let place = Place::tensor(survey.files[weight.file].file.path(), name.clone());
    match ContainerRows::new(survey, weight).and_then(|rows| payload::scan(&rows)) {
        Ok(scan) => payload::findings(&scan, format, &place),
        Err(fault) if matches!(*fault.kind, FaultKind::NotDecoded { .. }) => vec![(Severity::Warning, fault)],
        Err(fault) => vec![(Severity::Error, fault)],
    }
}
