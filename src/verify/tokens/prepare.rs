//! What can be refused before anything long begins: another model's references, a model that does not fit into memory, a
//! file that exists.

use std::path::{Path, PathBuf};

use super::{OWN_TOKENS, TokenOptions, devices};
use crate::backend::gpu::placement::Spread;
use crate::backend::{Device, Mode, check_mode};
use crate::config::Config;
use crate::container::reader::Found;
use crate::error::{Fault, FaultKind, Faults, Place, Result, Severity};
use crate::experts;
use crate::io::available_bytes;
use crate::model::memory::{Allowed, Needs, fits_device, gpu_positions, share};
use crate::model::{CHUNK_ROWS, Loaded, check_memory, plain_bytes};
use crate::reference::{Fingerprint, Reference, ReferenceFile, fingerprint};

/// What of the source is loaded: it drafts nothing.
pub const OF_SOURCE: Loaded = Loaded::WithoutMtp;
/// Positions of a text of the model's own: beginnings are short.
const OWN_POSITIONS: usize = 48 + OWN_TOKENS;

/// Positions that are kept at the same time: a text and its beginnings are never there together with more than one other.
pub fn positions(longest: usize) -> u64 {
    2 * longest.max(OWN_POSITIONS) as u64
}

/// References that were read, with their files.
#[derive(Default)]
pub(in crate::verify) struct Prepared {
    pub(super) files: Vec<(PathBuf, ReferenceFile)>,
    pub(super) warnings: Vec<Found>,
    /// Bytes that the plain backend needs beside what was asked for, and that there are, if those are fewer.
    pub(super) plain_too_large: Option<(u64, u64)>,
    /// How the CPU reads routed experts of the model, and of the source; empty where it is not asked for.
    pub(super) cpu: Vec<experts::Options>,
    /// How models are on each GPU: this one, and the source.
    pub(super) gpu: Vec<(Device, Vec<Spread>)>,
}

impl Prepared {
    /// The references of all files, in order.
    pub(super) fn references(&self) -> impl Iterator<Item = &Reference> {
        self.files.iter().flat_map(|(_, file)| &file.references)
    }
}

/// Reads the references and checks them against the model; the model, and beside it `source`, are held in memory.
pub(in crate::verify) fn prepare(
    directory: &Path,
    source: Option<&Path>,
    options: &TokenOptions,
) -> Result<Prepared, Faults> {
    for device in devices(options) {
        check_mode(device, options.mode)?;
    }
    if let Some(path) = &options.write_reference {
        if options.mode != Mode::Exact {
            let (flag, needs) = ("--write-reference", "--mode exact");
            return Err(Fault::new(Place::default(), FaultKind::FlagNeeds { flag, needs }).into());
        }
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
    fits(&mut prepared, directory, &config, source, options)?;
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

fn positions_of(prepared: &Prepared) -> u64 {
    positions(prepared.references().map(|reference| reference.full_ids.len()).max().unwrap_or(0))
}

/// Refuses what does not fit, and tells what the plain backend needs where it alone does not.
fn fits(
    prepared: &mut Prepared,
    directory: &Path,
    config: &Config,
    source: Option<&Path>,
    options: &TokenOptions,
) -> Result<()> {
    let plain = plain_bytes(config, Loaded::Whole);
    let memory = options.memory.or_else(available_bytes);
    let devices = devices(options);
    let needs = |positions| -> Vec<Needs> {
        let models = std::iter::once((directory, Loaded::Whole)).chain(source.map(|source| (source, OF_SOURCE)));
        let of = |(directory, loaded)| Needs::of(directory, config, loaded, positions, CHUNK_ROWS as u64);
        models.map(of).collect()
    };
    if devices.contains(&Device::Reference) {
        let of_source = source.map_or(0, |_| plain_bytes(config, OF_SOURCE));
        check_memory(directory, plain.saturating_add(of_source), memory)?;
    }
    if devices.contains(&Device::Cpu) {
        prepared.cpu = share(&needs(positions_of(prepared)), options.memory)?;
    }
    for device in devices {
        let on_gpu = || needs(gpu_positions(positions_of(prepared)));
        let allowed = Allowed { memory: options.memory, device: options.device_memory };
        prepared.gpu.push((device, fits_device(device, &on_gpu, allowed)?));
    }
    prepared.plain_too_large = memory.filter(|&available| plain > available).map(|available| (plain, available));
    Ok(())
}
