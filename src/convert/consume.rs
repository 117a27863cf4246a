//! Source files that go when nothing needs them any more.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::{Job, Options, Plan};
use crate::checkpoint::{Checkpoint, SCALE_SUFFIX, Shard};
use crate::error::{Fault, FaultKind, Place, Result};
use crate::io::{SourceFile, hook, sync_directory_of};
use crate::roles::Pass;

/// Refuses to consume what would not free its space, or could not be removed at the end of the first file.
pub(super) fn check(source: &Checkpoint, plan: &Plan) -> Result<()> {
    let shards: BTreeSet<&String> = plan.mine().flat_map(|file| &file.needs).collect();
    check_files(source, shards)?;
    #[cfg(unix)]
    rustix::fs::access(&source.directory, rustix::fs::Access::WRITE_OK)
        .map_err(|e| Fault::io("remove files of the source", &source.directory, e.into()))?;
    Ok(())
}

/// Refuses to consume these files if one is a link, or could not be done without by a later run.
pub(super) fn check_files<'a>(source: &Checkpoint, files: impl IntoIterator<Item = &'a String>) -> Result<()> {
    for file in files {
        let path = source.directory.join(file);
        if let Ok(target) = std::fs::read_link(&path) {
            return Err(Fault::new(Place::file(path), FaultKind::ConsumedLink { target }));
        }
        if !source.index.names_file(file) {
            return Err(Fault::new(Place::file(path), FaultKind::ConsumedUnindexed));
        }
    }
    Ok(())
}

/// For each source file with tensors of passes that neither this run nor an earlier one converts: how many, and of which.
pub(super) fn unconverted<'a>(
    source: &'a Checkpoint,
    options: &Options,
    finished_passes: &[String],
) -> BTreeMap<&'a str, (usize, Vec<&'static str>)> {
    let mut kept: BTreeMap<&str, (usize, Vec<&'static str>)> = BTreeMap::new();
    let indexed = source.index.entries();
    let stored = source.shards.iter().flat_map(|s| s.header.tensors().iter().map(move |t| (&t.name, s.name.as_str())));
    for (name, file) in indexed.chain(stored.filter(|_| !source.index.is_present())) {
        let weight = name.as_str().strip_suffix(SCALE_SUFFIX).unwrap_or(name.as_str());
        let Some(role) = source.census.role(weight) else { continue };
        if options.passes.contains(&role.pass) || finished_passes.iter().any(|pass| pass == role.pass.name()) {
            continue;
        }
        let (tensors, passes) = kept.entry(file).or_default();
        *tensors += 1;
        if !passes.contains(&role.pass.name()) {
            passes.push(role.pass.name());
        }
    }
    kept
}

/// The warnings for source files that will stay because of them.
pub(super) fn warnings(source: &Checkpoint, plan: &Plan, options: &Options, finished: &[String]) -> Vec<Fault> {
    let needed: HashSet<&str> = plan.mine().flat_map(|file| file.needs.iter().map(String::as_str)).collect();
    unconverted(source, options, finished)
        .into_iter()
        .filter(|(file, _)| needed.contains(file))
        .map(|(file, (tensors, mut passes))| {
            passes.sort_by_key(|name| Pass::ALL.iter().position(|pass| pass.name() == *name));
            let passes = format!("{} pass{}", passes.join(" and "), if passes.len() == 1 { "" } else { "es" });
            Fault::new(Place::file(source.directory.join(file)), FaultKind::NotConsumed { tensors, passes })
        })
        .collect()
}

/// Removes the source files that a finished file needed and nothing else needs: no other file of the container, of this run
/// or of another part, and no pass that is not converted. What is no longer the file that was read stays. Returns what went.
pub(super) fn consume(job: &Job, shards: &[String], finished: &dyn Fn(&str) -> bool) -> Result<Vec<String>> {
    let kept = unconverted(&job.source, &job.options, &job.finished_passes);
    let mut gone = Vec::new();
    for shard in shards {
        let path = job.source.directory.join(shard);
        let needed = job.plan.files.iter().any(|file| file.needs.contains(shard) && !finished(&file.name));
        let opened = job.source.shards.iter().find(|opened| opened.name == *shard);
        if needed || kept.contains_key(shard.as_str()) || !opened.is_some_and(is_unchanged) {
            continue;
        }
        hook::remove_file(&path).map_err(|e| Fault::io("remove the consumed file", &path, e))?;
        sync_directory_of(&path).map_err(|e| Fault::io("write the directory to disk", &job.source.directory, e))?;
        gone.push(shard.clone());
    }
    Ok(gone)
}

/// Whether a file is still the one that was opened.
fn is_unchanged(shard: &Shard) -> bool {
    let path = shard.file.path();
    SourceFile::open(path).is_ok_and(|file| file.bytes() == shard.file.bytes())
        && SourceFile::modified_nanoseconds(path) == shard.modified_nanoseconds
}
