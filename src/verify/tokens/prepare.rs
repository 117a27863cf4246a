//! What can be refused before anything long begins: another model's references, a model that does not fit into memory, a
//! file that exists.

use std::path::{Path, PathBuf};

use super::TokenOptions;
use crate::config::Config;
use crate::container::reader::Found;
use crate::error::{Fault, FaultKind, Faults, Place, Result, Severity};
use crate::model::check_memory;
use crate::reference::{Fingerprint, Reference, ReferenceFile, fingerprint};

/// References that were read, with their files.
#[derive(Default)]
pub(in crate::verify) struct Prepared {
    pub(super) files: Vec<(PathBuf, ReferenceFile)>,
    pub(super) warnings: Vec<Found>,
}

impl Prepared {
    /// The references of all files, in order.
    pub(super) fn references(&self) -> impl Iterator<Item = &Reference> {
        self.files.iter().flat_map(|(_, file)| &file.references)
    }
}

/// Reads the references and checks them against the model; `models` of its size are held in memory.
pub(in crate::verify) fn prepare(directory: &Path, models: u64, options: &TokenOptions) -> Result<Prepared, Faults> {
    if let Some(path) = &options.write_reference {
        new_file(path)?;
    }
    let mut prepared = Prepared::default();
    for path in &options.references {
        prepared.files.push((path.clone(), ReferenceFile::read(path)?));
    }
    // A config that cannot be read is a finding of the structure, which ends before the tokens.
    let Ok(config) = Config::read(directory) else { return Ok(prepared) };
    let own = match prepared.files.is_empty() {
        true => String::new(),
        false => fingerprint(directory, &config)?,
    };
    for (path, file) in &prepared.files {
        let mut anonymous = None;
        for (number, reference) in file.references.iter().enumerate() {
            if reference.check_fingerprint(&own, path, number)? == Fingerprint::Absent {
                anonymous = anonymous.or(Some(number));
            }
            check_ids(reference, config.vocab_size, path)?;
        }
        let fault = |reference| Fault::new(Place::file(path), FaultKind::ReferenceAnonymous { reference });
        prepared.warnings.extend(anonymous.map(|number| (Severity::Warning, fault(number))));
    }
    check_memory(directory, &config, models, options.memory)?;
    Ok(prepared)
}

/// The file must be one that can be made: it is written after everything else, which may take long.
fn new_file(path: &Path) -> Result<()> {
    if path.symlink_metadata().is_ok() {
        return Err(Fault::new(Place::file(path), FaultKind::FileExists));
    }
    match path.parent() {
        Some(parent) if parent != Path::new("") && !parent.is_dir() => {
            Err(Fault::new(Place::file(parent), FaultKind::NotADirectory))
        }
        _ => Ok(()),
    }
}

/// Neither a text nor a prediction has an id that the model does not have.
fn check_ids(reference: &Reference, vocab_size: u64, path: &Path) -> Result<()> {
    let lists = [Some(&reference.full_ids), reference.tf_pred.as_ref(), reference.draft_pred.as_ref()];
    match lists.into_iter().flatten().flatten().find(|&&id| u64::from(id) >= vocab_size) {
        Some(&id) => Err(Fault::new(Place::file(path), FaultKind::TokenId { id: id.into(), vocab_size })),
        None => Ok(()),
    }
}
