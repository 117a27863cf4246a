//! Source files that go when nothing needs them any more.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::{Job, Options, Plan};
use crate::checkpoint::{Checkpoint, SCALE_SUFFIX, Shard};
use crate::container::manifest::hex;
use crate::error::{Fault, FaultKind, Place, Result};
use crate::header::Header;
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

/// Those of some source files that nothing needs any more: no file of the container, of this run or of another part, and no
/// pass that is not converted. What is neither the file that was read nor the same one again is left alone.
pub(super) fn consumable(job: &Job, shards: &[String], finished: &dyn Fn(&str) -> bool) -> Vec<String> {
    let needed = |shard: &String| job.plan.files.iter().any(|file| file.needs.contains(shard) && !finished(&file.name));
    let there = shards.iter().filter(|shard| job.source.directory.join(shard).exists());
    there.filter(|shard| !job.kept.contains(*shard) && !needed(shard) && is_known(job, shard)).cloned().collect()
}

/// Removes source files. They are closed first: an open file keeps its space.
pub(super) fn remove(job: &mut Job, shards: &[String]) -> Result<()> {
    for shard in shards {
        job.source.close(shard);
        let path = job.source.directory.join(shard);
        hook::remove_file(&path).map_err(|e| Fault::io("remove the consumed file", &path, e))?;
        sync_directory_of(&path).map_err(|e| Fault::io("write the directory to disk", &job.source.directory, e))?;
    }
    Ok(())
}

/// Whether a file is still the one that was opened, or, downloaded once more, has its size and header.
fn is_known(job: &Job, shard: &str) -> bool {
    let path = job.source.directory.join(shard);
    let Ok(file) = SourceFile::open(&path) else { return false };
    let opened = job.source.shards.iter().find(|opened| opened.name == shard);
    let unchanged = |opened: &Shard| {
        file.bytes() == opened.file.bytes() && SourceFile::modified_nanoseconds(&path) == opened.modified_nanoseconds
    };
    let known = job.destination.progress.source.iter().find(|identity| identity.name == shard);
    opened.is_some_and(unchanged)
        || known.is_some_and(|known| {
            file.bytes() == known.bytes
                && Header::read(&file).is_ok_and(|header| hex(&header.sha256()) == known.header_sha256)
        })
}
