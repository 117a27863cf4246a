//! A verification in parts, on several machines, and the report of all of them.
//!
//! Every part looks at the structure as a whole, which is cheap, and at every N-th file of a manifest, weight, reference and
//! text. What a part reports has a rank, so that the joined report is the one of a single run, but for the time that it took
//! and what its cache of experts did. Parts are bound to the model: to its small files as a whole, and to names, sizes, beginnings
//! and ends of its weight files. What a manifest says of these is bound with it; without one, and of a source, the times of their
//! last change are, for nothing else would tell that a file was changed in its middle between two parts.

use std::path::{Path, PathBuf};
use std::time::Instant;
use std::{fs, io};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::tokens::{self, SourceShare};
use super::{Examined, Levels, Options, Stage, as_recorded, check_options, examine, levels};
use crate::backend::Device;
use crate::checkpoint::{INDEX_FILE, weight_files};
use crate::config::{CONFIG_FILE, GENERATION_CONFIG_FILE};
use crate::container::manifest::{MANIFEST_FILE, Manifest, hex};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::{SourceFile, read_small};
use crate::limits;
use crate::model::tokenizer::TOKENIZER_FILE;
use crate::part::Part;
use crate::progress::Progress;
use crate::reference::Agreement;
use crate::report::{
    DeviceExperts, Experts, Verdict, VerifyBinding, VerifyOwnDrafts, VerifyPart, VerifyReport, VerifyTokens,
};
use crate::score::identity::{model_sha256_in, sha256_of};
use crate::threads;
use crate::weights::ModelKind;

/// What a part found, as its report carries it.
#[derive(Serialize, Deserialize)]
struct Share {
    stages: Vec<Stage>,
    has_source: bool,
    tokens: Vec<(u64, VerifyTokens)>,
    total: Agreement,
    source: Option<SourceShare>,
    experts: Option<Experts>,
    device_experts: Option<DeviceExperts>,
    own_drafts: Option<VerifyOwnDrafts>,
    seconds: f64,
}

/// Where the report of a part stands, beside that of the whole: `verify-2-of-8.json` for `verify.json`.
pub fn part_file(report: &Path, part: Part) -> PathBuf {
    let mut name = report.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{}", part.file_text()));
    if let Some(extension) = report.extension() {
        name.push(".");
        name.push(extension);
    }
    report.with_file_name(name)
}

/// Verifies one part of a model. The report says of what, and its verdict is about this part alone.
pub fn verify_part(
    path: &Path,
    options: &Options,
    part: Part,
    progress: &dyn Progress,
) -> Result<VerifyReport, Faults> {
    let started = Instant::now();
    refuse_writing(options)?;
    let kind = ModelKind::of(path)?;
    check_options(path, kind, options)?;
    let binding = binding(path, kind, options)?;
    let examined = examine(path, options, part, progress)?;
    still(path, &binding, &self::binding(path, kind, options)?)?;
    let seconds = started.elapsed().as_secs_f64();
    let share = Share {
        stages: examined.stages.clone(),
        has_source: examined.has_source,
        tokens: examined.computed.tokens.clone(),
        total: examined.computed.total,
        source: examined.computed.source.clone(),
        experts: examined.computed.experts,
        device_experts: examined.computed.device_experts,
        own_drafts: examined.computed.own_drafts,
        seconds,
    };
    let share = serde_json::to_value(&share).expect("shares are plain data");
    let part = VerifyPart { part: part.to_string(), binding, share };
    Ok(examined.report(path, options, Some(part), seconds))
}

/// Joins the reports of all parts, which stand beside `report`, to that of the whole.
///
/// # Errors
///
/// Parts that are missing, that are of another model, level, source, reference or device, or that saw another structure
/// than there is.
pub fn finish(path: &Path, options: &Options, report: &Path, progress: &dyn Progress) -> Result<VerifyReport, Faults> {
    refuse_writing(options)?;
    let kind = ModelKind::of(path)?;
    check_options(path, kind, options)?;
    let binding = binding(path, kind, options)?;
    let mut shares = Vec::new();
    let mut faults = Vec::new();
    for part in parts_beside(report)? {
        match share_of(&part_file(report, part), part, &binding) {
            Ok(share) => shares.push((part_file(report, part), share)),
            Err(fault) => faults.push(fault),
        }
    }
    Faults::check(faults)?;
    // The structure is looked at again: what parts saw must still be there.
    let pool = threads::pool(options.threads, path)?;
    let cheap = Options { level: super::Level::Structure, ..options.clone() };
    let Levels { mut stages, .. } = levels(path, kind, &cheap, Part::WHOLE, &pool, progress)?;
    let differing = shares.iter().filter_map(|(file, share)| other_structure(file, share, &stages[0]));
    Faults::check(differing.collect())?;
    let mut joined = joined(path, shares)?;
    stages.append(&mut joined.stages.split_off(1));
    let seconds = joined.seconds;
    let hashed = as_recorded(Manifest::read(path).ok().flatten().as_ref(), &stages);
    let stated = Manifest::read_stated(path).unwrap_or_default().filter(|_| !hashed.is_empty());
    let manifest_sha256 = stated.map(|(_, sha256)| sha256);
    let source = options.source.as_deref().filter(|_| joined.has_source && !stages.iter().any(Stage::failed));
    let source_model_sha256 = source.map(|source| pool.install(|| model_sha256_in(source))).transpose()?;
    let Joined { has_source, computed, .. } = joined;
    let examined = Examined { kind, stages, hashed, has_source, manifest_sha256, source_model_sha256, computed };
    Ok(examined.report(path, options, None, seconds))
}

/// What one run writes is one run's.
fn refuse_writing(options: &Options) -> Result<()> {
    match options.tokens.write_reference {
        Some(_) => {
            let kind = FaultKind::FlagNeeds { flag: "--write-reference", needs: "a run that is not divided" };
            Err(Fault::new(Place::default(), kind))
        }
        None => Ok(()),
    }
}

/// The parts whose reports stand beside that of the whole, all of one division.
fn parts_beside(report: &Path) -> Result<Vec<Part>> {
    let refuse = |kind| Err(Fault::new(Place::file(report), kind));
    let directory = report.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    let stem = report.file_stem().unwrap_or_default().to_string_lossy();
    let extension = report.extension().map_or(String::new(), |extension| format!(".{}", extension.to_string_lossy()));
    let part_of = |name: &str| {
        let text = name.strip_prefix(&*stem)?.strip_prefix('-')?.strip_suffix(&*extension)?;
        Part::from_file_text(text)
    };
    let entries = fs::read_dir(directory).map_err(|e| Fault::io("list the directory", directory, e))?;
    let entries = entries.collect::<io::Result<Vec<_>>>().map_err(|e| Fault::io("list the directory", directory, e))?;
    let mut parts: Vec<Part> = entries.iter().filter_map(|e| part_of(&e.file_name().to_string_lossy())).collect();
    parts.sort_unstable_by_key(|part| (part.of(), part.number()));
    let (Some(first), Some(last)) = (parts.first(), parts.last()) else {
        let expected = format!("{stem}-K-of-N{extension}");
        return refuse(FaultKind::VerifyPartsAbsent { expected });
    };
    let of = last.of();
    if first.of() != of {
        return refuse(FaultKind::VerifyPartsMixed { one: first.of(), other: of });
    }
    let is_there = |number: &usize| parts.iter().any(|part| part.number() == *number);
    let missing: Vec<String> = (1..=of).filter(|number| !is_there(number)).map(|n| format!("{n}/{of}")).collect();
    match missing.is_empty() {
        true => Ok(parts),
        false => refuse(FaultKind::VerifyPartsMissing { missing }),
    }
}

/// Reads the report of a part, which must be of the same verification.
fn share_of(file: &Path, part: Part, binding: &[VerifyBinding]) -> Result<Share> {
    let no_report =
        |e: serde_json::Error| Fault::new(Place::file(file), FaultKind::NotAReport { message: e.to_string() });
    let bytes = read_small(file, limits::MAX_REPORT_BYTES)?;
    let report: VerifyReport = serde_json::from_slice(&bytes).map_err(no_report)?;
    let found = report.part.as_ref().map_or("the whole", |part| &part.part);
    if found != part.to_string() {
        return Err(differs(file, "part", &part.to_string(), found));
    }
    let Some(VerifyPart { binding: theirs, share, .. }) = report.part.clone() else { unreachable!("it has a name") };
    // Both are made by `binding`; another version may have bound something else.
    for VerifyBinding { what, value } in binding {
        let found = theirs.iter().find(|there| there.what == *what).map_or("absent", |there| &*there.value);
        if found != value {
            return Err(differs(file, what, value, found));
        }
    }
    let share: Share = serde_json::from_value(share).map_err(no_report)?;
    // What a part says for people and what is joined are made of the same findings.
    let verdict = if share.stages.iter().any(Stage::failed) { Verdict::Fail } else { Verdict::Pass };
    if verdict != report.verdict {
        let expected = format!("{}, as what it found", verdict.name());
        let (what, found) = ("`verdict`".to_owned(), report.verdict.name().to_owned());
        return Err(Fault::new(Place::file(file), FaultKind::ReportContradicts { what, expected, found }));
    }
    let checks = share.stages.iter().flat_map(|stage| stage.clone().into_report(true).0);
    if let Some((expected, found)) = checks.zip(&report.checks).find(|(expected, found)| expected != *found) {
        let what = format!("the check {}", expected.name);
        let (expected, found) = (expected.status.name().to_owned(), found.status.name().to_owned());
        return Err(Fault::new(Place::file(file), FaultKind::ReportContradicts { what, expected, found }));
    }
    Ok(share)
}

fn differs(file: &Path, what: &str, expected: &str, found: &str) -> Fault {
    let (what, expected, found) = (what.to_owned(), expected.to_owned(), found.to_owned());
    Fault::new(Place::file(file), FaultKind::VerifyPartDiffers { what, expected, found })
}

/// A check of the structure that ended otherwise in a part.
fn other_structure(file: &Path, share: &Share, structure: &Stage) -> Option<Fault> {
    let (expected, _) = structure.clone().into_report(false);
    let (found, _) = share.stages.first().cloned().unwrap_or_default().into_report(false);
    let text = |check: Option<&crate::report::VerifyCheck>| {
        check.map_or("absent".to_owned(), |check| format!("{} ({})", check.status.name(), check.detail))
    };
    (0..expected.len().max(found.len())).find_map(|at| {
        let (here, there) = (expected.get(at), found.get(at));
        let name = here.or(there).map_or("", |check| &check.name);
        (here != there).then(|| differs(file, &format!("check {name}"), &text(here), &text(there)))
    })
}

/// What all parts found.
struct Joined {
    stages: Vec<Stage>,
    has_source: bool,
    computed: tokens::Outcome,
    seconds: f64,
}

fn joined(path: &Path, shares: Vec<(PathBuf, Share)>) -> Result<Joined> {
    same_checks(&shares)?;
    let mut joined =
        Joined { stages: Vec::new(), has_source: false, computed: tokens::Outcome::default(), seconds: 0.0 };
    let mut source: Option<SourceShare> = None;
    for (_, share) in shares {
        joined.stages.resize_with(share.stages.len().max(joined.stages.len()), Stage::default);
        for (stage, theirs) in joined.stages.iter_mut().zip(share.stages) {
            stage.join(theirs);
        }
        joined.has_source |= share.has_source;
        joined.seconds += share.seconds;
        let computed = &mut joined.computed;
        computed.tokens.extend(share.tokens);
        computed.total = computed.total.and(&share.total);
        computed.own_drafts = computed.own_drafts.or(share.own_drafts);
        computed.experts = match (computed.experts, share.experts) {
            (Some(a), Some(b)) => Some(a.and(&b)),
            (a, b) => a.or(b),
        };
        computed.device_experts = match (computed.device_experts, share.device_experts) {
            (Some(a), Some(b)) => Some(a.and(&b)),
            (a, b) => a.or(b),
        };
        source = match (source, share.source) {
            (Some(mut all), Some(theirs)) => {
                all.texts.extend(theirs.texts);
                Some(all)
            }
            (all, theirs) => all.or(theirs),
        };
    }
    joined.computed.tokens.sort_by_key(|(rank, _)| *rank);
    let summary = tokens::summary(&joined.computed.total);
    if let Some(tokens) = joined.stages.last_mut() {
        tokens.conclude("tokens", &summary);
        // Whether the source says the same is said of all texts together, unless it could not be asked.
        if let Some(source) = source.filter(|_| tokens.is_shared("source")) {
            tokens.checks.retain(|check| check.name != "source");
            joined.computed.agreement = source.conclude(path, tokens);
        }
    }
    Ok(joined)
}

/// Parts that went to their end made the same checks.
fn same_checks(shares: &[(PathBuf, Share)]) -> Result<()> {
    let names = |share: &Share| -> Vec<String> {
        let names = share.stages.iter().map(|stage| stage.checks.iter().map(|check| &*check.name).collect::<Vec<_>>());
        names.map(|names| names.join(", ")).collect()
    };
    let good = |share: &Share| !share.stages.iter().any(Stage::failed);
    let mut whole = shares.iter().filter(|(_, share)| good(share));
    let Some((_, first)) = whole.next() else { return Ok(()) };
    match whole.find(|(_, share)| names(share) != names(first)) {
        Some((file, share)) => Err(differs(file, "list of checks", &names(first).join("; "), &names(share).join("; "))),
        None => Ok(()),
    }
}

/// What all parts of a verification have in common.
fn binding(path: &Path, kind: ModelKind, options: &Options) -> Result<Vec<VerifyBinding>, Faults> {
    let hashes = options.tokens.references.iter().map(|path| sha256_of(path)).collect::<Result<Vec<String>>>()?;
    let devices = tokens::devices(&options.tokens);
    let devices: Vec<String> = devices.iter().map(Device::to_string).collect();
    let or_none = |text: String| if text.is_empty() { "none".to_owned() } else { text };
    let source = options.source.as_deref().map(identity).transpose()?;
    let source_times = options.source.as_deref().map(times).transpose()?;
    let values = [
        ("program", env!("CARGO_PKG_VERSION").to_owned()),
        ("level", options.level.name().to_owned()),
        ("kind", kind.name().to_owned()),
        ("model", identity(path)?),
        ("time of change", times(path)?),
        ("source", or_none(source.unwrap_or_default())),
        ("source's time of change", or_none(source_times.unwrap_or_default())),
        ("reference", or_none(hashes.join(" "))),
        ("device", devices.join(" ")),
        ("mode", <&str>::from(options.tokens.mode).to_owned()),
    ];
    Ok(values.into_iter().map(|(what, value)| VerifyBinding { what: what.to_owned(), value }).collect())
}

/// Refuses a model that was changed while a part looked at it.
fn still(path: &Path, before: &[VerifyBinding], after: &[VerifyBinding]) -> Result<()> {
    match before.iter().zip(after).find(|(before, after)| before != after) {
        None => Ok(()),
        Some((before, after)) => {
            let (expected, found) = (before.value.clone(), after.value.clone());
            let kind = FaultKind::ChangedMeanwhile { what: before.what.clone(), expected, found };
            Err(Fault::new(Place::file(path), kind))
        }
    }
}

/// SHA-256 of names and times of the weight files, hexadecimal; `manifest` where there is one, which is bound itself.
fn times(directory: &Path) -> Result<String> {
    if directory.join(MANIFEST_FILE).exists() {
        return Ok("manifest".to_owned());
    }
    let mut all = Sha256::new();
    for name in weight_files(directory)? {
        all.update(format!("{}  {name}\n", SourceFile::modified_nanoseconds(&directory.join(&name))));
    }
    Ok(hex(&all.finalize()))
}

/// SHA-256 of what tells a model from others without reading all of it, hexadecimal.
fn identity(directory: &Path) -> Result<String> {
    let mut all = Sha256::new();
    for name in [CONFIG_FILE, GENERATION_CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, TOKENIZER_FILE] {
        let path = directory.join(name);
        // What cannot be read is a finding of the levels.
        let hash = sha256_of(&path).unwrap_or_else(|_| "absent".to_owned());
        all.update(format!("{hash}  {name}\n"));
    }
    for name in weight_files(directory)? {
        let hash = ends(&directory.join(&name)).unwrap_or_else(|_| "absent".to_owned());
        all.update(format!("{hash}  {name}\n"));
    }
    Ok(hex(&all.finalize()))
}

/// Size of a file, and SHA-256 of its first and last bytes.
fn ends(path: &Path) -> Result<String> {
    let file = SourceFile::open(path)?;
    let count = file.bytes().min(limits::BOUND_END_BYTES);
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; count as usize]);
    for offset in [0, file.bytes() - count] {
        file.read_at(&mut buffer, offset)?;
        hash.update(&buffer);
    }
    Ok(format!("{} {}", file.bytes(), hex(&hash.finalize())))
}
