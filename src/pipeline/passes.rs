//! Passes that a pipeline does not want, although there is something of them.

use super::Settings;
use crate::container::manifest::Manifest;
use crate::convert::Job;
use crate::error::{Fault, FaultKind, Place, Result};
use crate::roles::Pass;

/// A pass that is left out: its key, and what it converts.
fn unwanted(settings: &Settings) -> impl Iterator<Item = (Pass, &'static str, &'static str)> {
    let keys = [
        (Pass::Mtp, settings.convert.mtp, "convert.mtp", "an MTP head"),
        (Pass::Indexer, settings.convert.indexer, "convert.indexer", "a DSA indexer"),
    ];
    keys.into_iter().filter(|(_, wanted, ..)| !wanted).map(|(pass, _, key, what)| (pass, key, what))
}

/// Passes that are not wanted, and of which the source has something.
pub(super) fn of_source(job: &Job, settings: &Settings) -> Vec<Pass> {
    unwanted(settings).map(|(pass, ..)| pass).filter(|&pass| job.source_has(pass)).collect()
}

/// What is to be said of them when the container is there: it has them of an earlier run, or is made without.
pub(super) fn told(of_source: &[Pass], settings: &Settings) -> Result<Vec<Fault>> {
    let manifest = Manifest::read(&settings.container)?;
    let has = |pass: Pass| manifest.as_ref().is_some_and(|manifest| manifest.passes.contains_key(pass.name()));
    let fault = |(pass, key, what)| {
        if has(pass) {
            Some(Fault::new(Place::file(&settings.container), FaultKind::PassStays { key, what }))
        } else {
            let kind = FaultKind::PassLeftOut { key, what };
            of_source.contains(&pass).then(|| Fault::new(Place::file(&settings.checkpoint), kind))
        }
    };
    Ok(unwanted(settings).filter_map(fault).collect())
}
