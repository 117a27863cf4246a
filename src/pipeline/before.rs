//! What is certain before anything is done: devices that are not there, files that hold nothing, and policies that these
//! settings cannot meet, however good the container becomes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::Settings;
use super::state::State;
use crate::backend::{Device, Gpus, Mode};
use crate::container::manifest::{CARD_FILE, MANIFEST_FILE};
use crate::convert::{Job, check_room};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::read_small;
use crate::limits;
use crate::model::memory::Allowed;
use crate::publish::card::is_license;
use crate::publish::front::Front;
use crate::publish::gate::{TOKENS_MISSING, WEIGHTS_MISSING, verify_command};
use crate::reference::ReferenceFile;
use crate::score::input::{Input, Kind, Sampling};

/// Refuses what would be refused only after the conversion; `path` is the pipeline's file.
pub(super) fn check(settings: &Settings, path: &Path) -> Result<(), Faults> {
    let (mut faults, mut inputs, mut references) = (Vec::new(), Vec::new(), Some(0));
    let sampling = Sampling { limit: settings.score.limit, seed: settings.score.seed };
    for given in settings.inputs() {
        match Input::open(&given, sampling) {
            Ok(input) => inputs.push(input),
            Err(found) => faults.extend(found.into_vec()),
        }
    }
    for path in &settings.verify.references {
        match ReferenceFile::read(path) {
            Ok(file) => references = references.map(|count| count + file.references.len() as u64),
            Err(found) => {
                references = None;
                faults.extend(found.into_vec());
            }
        }
    }
    let kinds = references.map_or_else(Vec::new, |count| of_verification(settings, count));
    let kinds = kinds.into_iter().chain(of_scores(settings, &inputs));
    faults.extend(kinds.map(|kind| Fault::new(Place::file(path), kind)));
    faults.extend(without_license(settings));
    if !is_verified(settings) {
        let opened = settings.devices()?.into_iter().filter_map(|device| open(device).err());
        // Where the device is asked for.
        faults.extend(opened.map(|fault| Fault { place: Place::file(path), ..fault }));
    }
    Faults::check(faults)
}

/// Refuses a verification of what is about to be converted that has no room on its devices.
pub(super) fn check_memory(settings: &Settings, job: &Job) -> Result<(), Faults> {
    if is_verified(settings) {
        return Ok(());
    }
    let mut longest = 0;
    for path in &settings.verify.references {
        let file = ReferenceFile::read(path)?;
        longest = file.references.iter().map(|reference| reference.full_ids.len()).fold(longest, usize::max);
    }
    let allowed = Allowed { memory: settings.memory, device: settings.device_memory };
    Ok(check_room(job, settings.verify.source, longest, &settings.devices()?, allowed)?)
}

/// Whether an earlier run verified the container that is there.
fn is_verified(settings: &Settings) -> bool {
    settings.container.join(MANIFEST_FILE).is_file()
        && State::of_verify(settings).is_ok_and(|state| state.is_kept(&settings.reports))
}

/// Whether a device can compute.
fn open(device: Device) -> Result<()> {
    match device {
        Device::Reference | Device::Cpu => Ok(()),
        _ => Gpus::open(device, Mode::Exact, None).map(drop),
    }
}

fn missed(what: &str, expected: String, found: String) -> FaultKind {
    FaultKind::PolicyMissed { what: what.to_owned(), expected, found }
}

fn too_few(what: &str, found: u64, least: u64) -> Option<FaultKind> {
    (found < least).then(|| missed(what, format!("at least {least}"), found.to_string()))
}

/// What no verification with these settings and so many references shows.
fn of_verification(settings: &Settings, references: u64) -> Vec<FaultKind> {
    let (policy, source) = (&settings.publish.policy.verify, settings.verify.source);
    let mut kinds = Vec::new();
    let missing = |what| FaultKind::EvidenceMissing { what, command: verify_command(&settings.container) };
    if policy.weights && !source {
        kinds.push(missing(WEIGHTS_MISSING));
    }
    match references + u64::from(source) {
        0 => kinds.push(missing(TOKENS_MISSING)),
        found => kinds.extend(too_few("the number of references", found, policy.min_references)),
    }
    if policy.min_source_agreement.is_some() && !source {
        let expected = "a verification with --source".to_owned();
        kinds.push(missed("the agreement with the source", expected, "not known".to_owned()));
    }
    let named = || settings.verify.devices.iter().map(|name| name.strip_suffix(":0").unwrap_or(name));
    let devices: BTreeSet<&str> = if settings.verify.devices.is_empty() { ["cpu"].into() } else { named().collect() };
    kinds.extend(too_few("the number of devices that computed", devices.len() as u64, policy.min_devices));
    let has = |wanted: &str| devices.iter().any(|device| device.split(':').next() == Some(wanted));
    let listed = || devices.iter().copied().collect::<Vec<_>>().join(", ");
    let absent = policy.devices.iter().filter(|wanted| !has(wanted));
    kinds.extend(absent.map(|wanted| missed("the devices that computed", wanted.clone(), listed())));
    kinds
}

/// What no scores of these inputs show.
fn of_scores(settings: &Settings, inputs: &[Input]) -> Vec<FaultKind> {
    let (policy, score) = (&settings.publish.policy.score, &settings.score);
    let counts = [
        ("the number of tasks", score.tasks.len(), policy.min_tasks),
        ("the number of texts", score.texts.len(), policy.min_texts),
    ];
    let of_counts = counts.into_iter().filter_map(|(what, found, least)| too_few(what, found as u64, least));
    let tasks = inputs.iter().filter(|input| input.kind == Kind::Task);
    let of_tasks = tasks.filter_map(|input| {
        too_few(&format!("the number of questions of {}", input.name), input.rows, policy.min_questions)
    });
    of_counts.chain(of_tasks).collect()
}

/// A licence that the policy asks for, and that a whole checkpoint without a container does not give.
fn without_license(settings: &Settings) -> Option<Fault> {
    let arriving = settings.convert.follow || settings.container.join(MANIFEST_FILE).exists();
    if !settings.publish.policy.card.license || arriving {
        return None;
    }
    let entries = fs::read_dir(&settings.checkpoint).ok()?;
    if entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).any(|name| is_license(&name)) {
        return None;
    }
    let path = settings.checkpoint.join(CARD_FILE);
    let card = match path.is_file() {
        true => read_small(&path, limits::MAX_SMALL_FILE_BYTES).ok()?,
        false => Vec::new(),
    };
    // What of a card cannot be read is no licence either.
    let front = Front::parse(&path, &String::from_utf8_lossy(&card)).unwrap_or_default();
    front.license.is_none().then(|| Fault::new(Place::file(&path), FaultKind::LicenseUnknown))
}
