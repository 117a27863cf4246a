//! What makes a container of finished weight files: small files, index, manifest.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use super::plan::PlannedFile;
use super::{Job, destination};
use crate::checkpoint::INDEX_FILE;
use crate::container::manifest::{
    CHECKSUM, FileRecord, MANIFEST_FILE, MANIFEST_VERSION, Manifest, TensorRecord, hex, json_text,
};
use crate::container::progress;
use crate::container::writer::{Digests, checksum_text};
use crate::error::{Fault, FaultKind, Faults, Result};
use crate::io::{TEMPORARY_SUFFIX, WORKING_PREFIX, hook, sync_directory_of, write_whole};
use crate::report::Finding;
use crate::tensor::TensorName;

/// Adds the records of a finished file's weights.
pub(super) fn record_tensors(file: &PlannedFile, digests: &Digests, tensors: &mut BTreeMap<TensorName, TensorRecord>) {
    for (weight, &(codes, scales)) in file.weights.iter().zip(&file.layout.places) {
        let record = TensorRecord {
            file: file.name.clone(),
            class: weight.class.name().to_owned(),
            format: weight.planned.format.name().to_owned(),
            group_size: weight.planned.format.group_size(),
            shape: weight.planned.shape.clone(),
            bytes: file.layout.tensors[codes].bytes,
            checksum: checksum_text(digests.checksums[codes]),
            scale_bytes: scales.map_or(0, |scales| file.layout.tensors[scales].bytes),
            scale_checksum: scales.map(|scales| checksum_text(digests.checksums[scales])),
        };
        tensors.insert(weight.planned.name.clone(), record);
    }
}

/// Small files, index, and last of all the manifest; then the progress is folded into it.
/// `beside_others`: whether parts may be running at the same time.
pub(super) fn finish(
    job: &Job,
    tensors: BTreeMap<TensorName, TensorRecord>,
    beside_others: bool,
) -> Result<(), Faults> {
    let directory = &job.destination.directory;
    let mut small_files = Vec::new();
    for file in &job.destination.small {
        let contents = file.contents()?;
        if !file.present {
            write_whole(&directory.join(&file.name), &contents, false)?;
        }
        small_files.push(small_record(&file.name, &contents));
    }
    if job.options.bare {
        // What parts have done becomes the progress of the whole.
        job.destination.write_progress()?;
        progress::remove(directory, false)?;
        return remove_leftovers(directory, beside_others);
    }
    let index = index_text(&tensors);
    write_unless_same(&directory.join(INDEX_FILE), &index)?;
    small_files.push(small_record(INDEX_FILE, &index));
    small_files.extend(job.destination.card.clone());
    small_files.sort_by(|a, b| a.name.cmp(&b.name));
    let manifest = Manifest {
        version: MANIFEST_VERSION,
        tool: destination::tool(),
        model_type: crate::config::MODEL_TYPE.to_owned(),
        checksum: CHECKSUM.to_owned(),
        recipe: job.destination.recipe.clone(),
        passes: job.destination.progress.passes.clone(),
        source: job.destination.progress.source.clone(),
        files: job.destination.progress.files.clone(),
        small_files,
        tensors,
        warnings: warnings(job),
    };
    write_unless_same(&directory.join(MANIFEST_FILE), &manifest.to_bytes())?;
    progress::remove(directory, true)?;
    remove_leftovers(directory, beside_others)
}

/// Writes a file, or leaves it as it is if it says the same already: then only its name may not be durable yet.
fn write_unless_same(path: &Path, bytes: &[u8]) -> Result<()> {
    if path.is_symlink() || !fs::read(path).is_ok_and(|found| found == bytes) {
        return write_whole(path, bytes, true);
    }
    sync_directory_of(path).map_err(|e| Fault::io("write the directory of the file to disk", path, e))
}

/// Temporary files of runs that died, of files that nobody writes any more.
/// Parts that run again beside this one write their progress.
fn remove_leftovers(directory: &Path, beside_others: bool) -> Result<(), Faults> {
    let list = |e| Fault::io("list the directory", directory, e);
    for entry in fs::read_dir(directory).map_err(list)? {
        let path = entry.map_err(list)?.path();
        let of_progress = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(WORKING_PREFIX));
        if !path.to_string_lossy().ends_with(TEMPORARY_SUFFIX) || path.is_dir() || (beside_others && of_progress) {
            continue;
        }
        match hook::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Fault::io("remove a temporary file of an earlier run", &path, e).into());
            }
            _ => {}
        }
    }
    Ok(())
}

/// What was accepted, now and when earlier files were written: each thing once, in an order of its own.
fn warnings(job: &Job) -> Vec<Finding> {
    // What is said about this run alone says nothing about the container.
    let of_run = |fault: &&Fault| matches!(*fault.kind, FaultKind::NoSpace { .. } | FaultKind::NotConsumed { .. });
    let now = job.warnings.iter().filter(|fault| !of_run(fault)).map(Finding::accepted);
    let mut all: Vec<Finding> = now.chain(job.destination.progress.warnings.iter().cloned()).collect();
    all.sort();
    all.dedup();
    all
}

fn small_record(name: &str, contents: &[u8]) -> FileRecord {
    use sha2::{Digest, Sha256};
    FileRecord { name: name.to_owned(), bytes: contents.len() as u64, sha256: hex(&Sha256::digest(contents)) }
}

/// The index of a container: scales are tensors of their own.
fn index_text(tensors: &BTreeMap<TensorName, TensorRecord>) -> Vec<u8> {
    let mut weight_map: BTreeMap<TensorName, &str> = BTreeMap::new();
    for (name, record) in tensors {
        weight_map.insert(name.clone(), &record.file);
        if record.scale_checksum.is_some() {
            weight_map.insert(name.scales(), &record.file);
        }
    }
    let total_size: u64 = tensors.values().map(|record| record.bytes + record.scale_bytes).sum();
    json_text(&serde_json::json!({"metadata": {"total_size": total_size}, "weight_map": weight_map}))
}
