//! From a verified container to an upload that cannot be wrong.
//!
//! [`publish`] is a gate: it hashes every file of the container, holds the hashes against the manifest and against the
//! reports of `verify` and `score` ([`evidence`]), and the reports against a policy ([`policy`], [`gate`]). Only when all of
//! that is good it writes the model card ([`card`]), the manifest with the card's hash, `SHA256SUMS`, and beside the
//! container the upload plan ([`plan`]). A listing of what has arrived is compared in the end ([`listing`]).
//!
//! What is written depends on container, reports and policy alone, so a run that was interrupted is gone on from by the
//! same command: a card that is there already must be the one that would be written.

pub mod bytes;
pub mod card;
pub mod checks;
mod contradictions;
pub mod evidence;
mod files;
pub mod front;
pub mod gate;
pub mod listing;
mod notes;
pub mod plan;
pub mod policy;
pub mod recipe;
pub mod shell;

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::container::manifest::{
    CARD_FILE, MANIFEST_FILE, Manifest, SOURCE_CARD_FILE, SUMS_FILE, json_text, statement_sha256,
};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::{Claim, DirectoryLock, hook, read_small, write_whole};
use crate::limits;
use crate::progress::Progress;
use crate::report::{PublishListing, PublishReport, Verdict};
use crate::score::identity::model_sha256_of;
use crate::threads;

use bytes::Hashed;
use checks::Checks;
use evidence::Evidence;
use files::{Contents, Found};
use listing::Listing;
use plan::UploadPlan;
use policy::Policy;

/// What a user asks for.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Reports of `verify` and `score`.
    pub reports: Vec<PathBuf>,
    /// The repository that the container is to become.
    pub repo_id: Option<String>,
    /// How good it must be; none for the default.
    pub policy: Option<Policy>,
    /// A listing of the repository.
    pub listing: Option<PathBuf>,
    /// Threads; 0 for one per core.
    pub threads: usize,
}

impl Options {
    /// Whether only the listing is to be compared.
    fn only_listing(&self) -> bool {
        self.listing.is_some() && self.reports.is_empty() && self.repo_id.is_none() && self.policy.is_none()
    }
}

/// Prepares a container for its upload, compares it with a listing, or both.
///
/// However it ends, unless it passes no upload plan of an earlier run is left.
pub fn publish(container: &Path, options: &Options, progress: &dyn Progress) -> Result<PublishReport, Faults> {
    let outcome = published(container, options, progress);
    // Of a container that another run has in hand that run decides.
    let in_hand =
        |faults: &Faults| faults.iter().any(|fault| matches!(*fault.kind, FaultKind::Locked | FaultKind::PartLocked));
    if outcome.as_ref().is_err_and(|faults| !options.only_listing() && !in_hand(faults)) {
        withdraw(container)?;
    }
    outcome
}

fn published(container: &Path, options: &Options, progress: &dyn Progress) -> Result<PublishReport, Faults> {
    let started = Instant::now();
    if let Some(id) = &options.repo_id {
        check_repo_id(id)?;
    }
    if !container.is_dir() {
        return Err(Fault::new(Place::file(container), FaultKind::NotADirectory).into());
    }
    let evidence = Evidence::read(&options.reports)?;
    let listing = options.listing.as_deref().map(Listing::read).transpose()?;
    let pool = threads::pool(options.threads, container)?;
    let mut report = PublishReport {
        container: container.to_string_lossy().into_owned(),
        repo_id: options.repo_id.clone(),
        verdict: Verdict::Fail,
        model_sha256: None,
        checks: Vec::new(),
        findings: Vec::new(),
        files: Vec::new(),
        total_bytes: 0,
        written: Vec::new(),
        plan: None,
        steps: Vec::new(),
        listing: None,
        bytes_read: 0,
        seconds: 0.0,
    };
    let mut checks = Checks::default();
    if !options.only_listing() {
        let lock = DirectoryLock::take(container, &Claim::Whole)?;
        let gate = Gate { container, options, evidence };
        pool.install(|| gate.run(&mut checks, &mut report, &lock, progress))?;
    }
    if let Some(listing) = listing {
        report.listing = Some(compare(container, &listing, &mut checks)?);
    }
    report.verdict = if checks.passed() { Verdict::Pass } else { Verdict::Fail };
    (report.checks, report.findings) = (checks.list, checks.findings);
    report.seconds = started.elapsed().as_secs_f64();
    Ok(report)
}

/// What the Hub accepts as the name of a repository, with the organization or user before it.
pub fn check_repo_id(id: &str) -> Result<()> {
    let part = |part: &str| {
        let plain = part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        let ends = part.starts_with(['-', '.']) || part.ends_with(['-', '.']);
        !part.is_empty() && part.len() <= 96 && plain && !ends && !part.contains("--") && !part.contains("..")
    };
    let good = id.split_once('/').is_some_and(|(org, name)| part(org) && part(name) && !name.ends_with(".git"));
    if good {
        return Ok(());
    }
    let expected = "ORG/NAME of letters, digits, `-`, `_` and `.`, as the Hub takes it";
    let kind = FaultKind::FlagValue { flag: "--repo-id", expected, found: id.to_owned() };
    Err(Fault::new(Place::default(), kind))
}

/// Compares a listing with what the manifest, and the files that it does not name, say.
fn compare(container: &Path, listing: &Listing, checks: &mut Checks) -> Result<PublishListing> {
    let path = container.join(MANIFEST_FILE);
    let manifest = Manifest::read(container)?.ok_or_else(|| {
        let (what, command) = ("the manifest", CONVERT_COMMAND.to_owned());
        Fault::new(Place::file(&path), FaultKind::EvidenceMissing { what, command })
    })?;
    let mut files: Vec<_> = manifest.files.into_iter().chain(manifest.small_files).collect();
    for name in [MANIFEST_FILE, SUMS_FILE].into_iter().filter(|name| container.join(name).exists()) {
        files.push(Hashed::of(name, &read_small(&container.join(name), limits::MAX_MANIFEST_BYTES)?).record);
    }
    let (report, faults) = listing.compare(container, &files);
    checks.check("listing", faults, format!("all {} files are there, byte for byte", report.matched));
    Ok(report)
}

/// The command that makes a container with a manifest.
const CONVERT_COMMAND: &str = "coliconv convert CHECKPOINT CONTAINER";

/// The gate and what stands behind it.
struct Gate<'a> {
    container: &'a Path,
    options: &'a Options,
    evidence: Evidence,
}

impl Gate<'_> {
    /// Runs all checks, and writes when they are good.
    fn run(
        self,
        checks: &mut Checks,
        report: &mut PublishReport,
        lock: &DirectoryLock,
        progress: &dyn Progress,
    ) -> Result<(), Faults> {
        let policy = self.options.policy.clone().unwrap_or_default();
        let path = self.container.join(MANIFEST_FILE);
        let Some((manifest, manifest_sha256)) = Manifest::read_stated(self.container)? else {
            let (what, command) = ("the manifest", CONVERT_COMMAND.to_owned());
            checks.check(
                "manifest",
                vec![Fault::new(Place::file(path), FaultKind::EvidenceMissing { what, command })],
                "",
            );
            checks.skip("files", "no manifest");
            gate::examine(self.container, false, &Evidence::default(), &policy, checks);
            return Ok(withdraw(self.container)?);
        };
        let mut contents = Contents::read(self.container, &manifest, progress)?;
        // What is written in the end must say the same, so that the reports are about it, too.
        if statement_sha256(&path, &manifest.to_bytes())? != manifest_sha256 {
            contents.manifest_faults.push(Fault::new(Place::file(&path), FaultKind::ManifestForeignKeys));
        }
        checks.check(
            "manifest",
            std::mem::take(&mut contents.manifest_faults),
            format!(
                "{} files and {} tensors",
                manifest.files.len() + manifest.small_files.len(),
                manifest.tensors.len()
            ),
        );
        report.bytes_read = contents.hashed.iter().map(|file| file.record.bytes).sum();
        let records: Vec<_> = contents.hashed.iter().map(|file| file.record.clone()).collect();
        report.model_sha256 = Some(model_sha256_of(&records));
        let card = contents.card(self.container, &manifest)?;
        let source_card = card.source.as_ref().map(|bytes| Hashed::of(card.name, bytes).record.sha256);
        let (evidence, foreign) = self.evidence.clone().about(
            self.container,
            &records,
            (card.name, source_card.as_deref()),
            &manifest_sha256,
            &gate::verify_command(self.container),
        );
        let subject = card::Subject {
            container: self.container,
            repo_id: self.options.repo_id.as_deref(),
            manifest: &manifest,
            evidence: &evidence,
            front: &card.front,
            source_card: card.beside.as_deref(),
            policy: &policy.card,
        };
        let text = subject.text().into_bytes();
        contents.check_card(self.container, &manifest, &card, &text);
        let count = format!("{} files, every byte as the manifest says", contents.hashed.len());
        checks.check("files", std::mem::take(&mut contents.faults), count);
        let mut foreign = foreign;
        foreign.extend(contradictions::of(&evidence));
        checks.check("reports", foreign, "about these very bytes, and consistent");
        let has_mtp = manifest.passes.contains_key("mtp");
        gate::examine(self.container, has_mtp, &evidence, &policy, checks);
        let (errors, warnings) = subject.check();
        checks.check("card", errors, "what it needs is known");
        checks.warn(&warnings);
        checks.warn(&contents.warnings);
        checks.warn(&card.warnings);
        if !checks.passed() {
            return Ok(withdraw(self.container)?);
        }
        lock.check_held()?;
        self.write(contents, manifest, card, text, report)
    }

    /// Writes card, manifest, checksums and plan, in this order; what holds the same bytes already stays.
    fn write(
        &self,
        contents: Contents,
        mut manifest: Manifest,
        card: Found,
        text: Vec<u8>,
        report: &mut PublishReport,
    ) -> Result<(), Faults> {
        let path = plan::plan_path(self.container);
        check_replaceable(&path)?;
        let mut hashed = contents.hashed;
        let mut put = |name: &str, bytes: &[u8], hashed: &mut Vec<Hashed>| -> Result<()> {
            if write_if_other(&self.container.join(name), bytes)? {
                report.written.push(name.to_owned());
            }
            hashed.retain(|file| file.record.name != name);
            hashed.push(Hashed::of(name, bytes));
            Ok(())
        };
        let own = [(SOURCE_CARD_FILE, card.source), (CARD_FILE, Some(text))];
        for (name, bytes) in own.into_iter().filter_map(|(name, bytes)| Some((name, bytes?))) {
            put(name, &bytes, &mut hashed)?;
            manifest.small_files.retain(|file| file.name != name);
            manifest.small_files.push(Hashed::of(name, &bytes).record);
        }
        manifest.small_files.sort_by(|a, b| a.name.cmp(&b.name));
        put(MANIFEST_FILE, &manifest.to_bytes(), &mut hashed)?;
        let records: Vec<_> = hashed.iter().map(|file| file.record.clone()).collect();
        put(SUMS_FILE, plan::sums_text(&records).as_bytes(), &mut hashed)?;
        files::remove_leftovers(self.container)?;
        let uploads = hashed.iter().map(Hashed::upload).collect();
        let plan = UploadPlan::new(self.container, self.options.repo_id.as_deref(), model_sha256_of(&records), uploads);
        if write_if_other(&path, &json_text(&plan))? {
            report.written.push(path.to_string_lossy().into_owned());
        }
        report.plan = Some(path.to_string_lossy().into_owned());
        (report.files, report.total_bytes, report.steps) = (plan.files, plan.total_bytes, plan.steps);
        Ok(())
    }
}

/// Writes a file durably unless it holds these bytes; whether it was written.
fn write_if_other(path: &Path, bytes: &[u8]) -> Result<bool> {
    if !path.is_symlink() && std::fs::read(path).is_ok_and(|found| found == bytes) {
        return Ok(false);
    }
    write_whole(path, bytes, true)?;
    Ok(true)
}

/// Removes the upload plan of an earlier run, if there is one: the container is not to be uploaded any more.
pub fn withdraw(container: &Path) -> Result<()> {
    let path = plan::plan_path(container);
    if path.symlink_metadata().is_err() || check_replaceable(&path).is_err() {
        return Ok(());
    }
    hook::remove_file(&path).map_err(|e| Fault::io("remove the upload plan of an earlier run", &path, e))
}

/// Only an earlier plan is replaced.
fn check_replaceable(path: &Path) -> Result<()> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    let earlier = read_small(path, limits::MAX_MANIFEST_BYTES).ok();
    match earlier.and_then(|bytes| serde_json::from_slice::<UploadPlan>(&bytes).ok()) {
        Some(_) => Ok(()),
        None => Err(Fault::new(Place::file(path), FaultKind::OtherReport)),
    }
}
