//! The reports that are to vouch for a container, and whether they are about its bytes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::container::manifest::{CARD_FILE, FileRecord, MANIFEST_FILE, SOURCE_CARD_FILE};
use crate::error::{Fault, FaultKind, Faults, Place, Result, escaped};
use crate::io::read_small;
use crate::json::repeated_key;
use crate::limits;
use crate::model::tokenizer::TOKENIZER_FILE;
use crate::report::{ScoreReport, VerifyReport};
use crate::score::identity::model_sha256_of;

/// A report and the file that it was read from.
#[derive(Debug, Clone)]
pub struct Told<R> {
    /// The file.
    pub path: PathBuf,
    /// The report.
    pub report: R,
}

impl<R> Told<R> {
    /// A fault of this report.
    pub fn fault(&self, kind: FaultKind) -> Fault {
        Fault::new(Place::file(&self.path), kind)
    }
}

/// Reports of `verify` and `score`, in the order in which they were given.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    /// Reports of `verify`.
    pub verify: Vec<Told<VerifyReport>>,
    /// Reports of `score`.
    pub score: Vec<Told<ScoreReport>>,
}

impl Evidence {
    /// Reads report files; every one that is none is a fault.
    pub fn read(paths: &[PathBuf]) -> Result<Evidence, Faults> {
        let (mut evidence, mut faults) = (Evidence::default(), Vec::new());
        for path in paths {
            faults.extend(evidence.add(path).err());
        }
        Faults::check(faults)?;
        Ok(evidence)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        if path.is_dir() {
            let names = ["score.json", "verify.json"];
            let file = names.map(|name| path.join(name)).into_iter().find(|file| file.is_file());
            let file = file.map(|file| file.to_string_lossy().into_owned());
            return Err(Fault::new(Place::file(path), FaultKind::ReportDirectory { file }));
        }
        let bytes = read_small(path, limits::MAX_REPORT_BYTES)?;
        let path = path.to_owned();
        let value: serde_json::Value = serde_json::from_slice(&bytes)
            .map_err(|e| Fault::new(Place::file(&path), FaultKind::JsonSyntax { message: e.to_string() }))?;
        // Of two values only the last would count.
        if let Some(key) = std::str::from_utf8(&bytes).ok().and_then(repeated_key) {
            let message = format!("`{}` appears twice", escaped(&key));
            return Err(Fault::new(Place::file(&path), FaultKind::JsonSyntax { message }));
        }
        let no_report =
            |e: serde_json::Error| Fault::new(Place::file(&path), FaultKind::NotAReport { message: e.to_string() });
        // Only a report of `verify` has a level.
        if value.get("level").is_some() {
            let report: VerifyReport = serde_json::from_value(value).map_err(no_report)?;
            // The same report given twice is one.
            if !self.verify.iter().any(|told| told.report == report) {
                self.verify.push(Told { path, report });
            }
        } else {
            let report: ScoreReport = serde_json::from_value(value).map_err(no_report)?;
            if !self.score.iter().any(|told| told.report == report) {
                self.score.push(Told { path, report });
            }
        }
        Ok(())
    }

    /// Separates the reports that are about these files from what is wrong with the others.
    /// `source_card` is the source's card as it is now, with the name that it has now; `manifest_sha256` is the hash of what
    /// the manifest says now.
    pub fn about(
        self,
        container: &Path,
        files: &[FileRecord],
        source_card: (&str, Option<&str>),
        manifest_sha256: &str,
        verify_command: &str,
    ) -> (Evidence, Vec<Fault>) {
        let (mut good, mut faults) = (Evidence::default(), Vec::new());
        for told in self.verify {
            match other_files(&told, files, source_card, manifest_sha256, verify_command) {
                found if found.is_empty() => good.verify.push(told),
                found => faults.extend(found),
            }
        }
        let model = model_sha256_of(files);
        let tokenizer = files.iter().find(|file| file.name == TOKENIZER_FILE).map_or("absent", |file| &file.sha256);
        for told in self.score {
            let hashes = [
                (container.to_string_lossy(), &*told.report.model_sha256, &*model),
                (TOKENIZER_FILE.into(), &*told.report.tokenizer_sha256, tokenizer),
            ];
            let differing = hashes.iter().find(|(_, found, expected)| found != expected);
            match differing.map(|(what, found, expected)| other_bytes(what, expected, found)) {
                Some(kind) => faults.push(told.fault(kind)),
                None => good.score.push(told),
            }
        }
        (good, faults)
    }
}

fn other_bytes(what: &str, expected: &str, found: &str) -> FaultKind {
    FaultKind::ReportOfOtherBytes { what: what.to_owned(), expected: expected.to_owned(), found: found.to_owned() }
}

/// Files that are not those that a report of `verify` is about, and a manifest that says something else. The source's card,
/// which says the licence, is one of the files, whichever of its two names it has; a card that `publish` made is none.
fn other_files(
    told: &Told<VerifyReport>,
    files: &[FileRecord],
    source_card: (&str, Option<&str>),
    manifest_sha256: &str,
    command: &str,
) -> Vec<Fault> {
    if let Some(part) = &told.report.part {
        return vec![told.fault(FaultKind::ReportOfPart { part: part.part.clone(), command: "verify" })];
    }
    let stated = told.report.manifest_sha256.as_deref().filter(|_| !told.report.files.is_empty());
    let Some(stated) = stated else {
        return vec![told.fault(FaultKind::ReportUnbound { command: command.to_owned() })];
    };
    let counts = |name: &str| name != CARD_FILE && name != SOURCE_CARD_FILE;
    let then = told.report.files.iter().map(|file| (file.name.as_str(), file.sha256.as_str()));
    let then: BTreeMap<&str, &str> = then.filter(|(name, _)| counts(name)).collect();
    let now = files.iter().map(|file| (file.name.as_str(), file.sha256.as_str()));
    let now: BTreeMap<&str, &str> = now.filter(|(name, _)| counts(name)).collect();
    let mut names: Vec<&str> = then.keys().chain(now.keys()).copied().collect();
    names.sort_unstable();
    names.dedup();
    let hash = |map: &BTreeMap<&str, &str>, name: &str| map.get(name).copied().unwrap_or("absent").to_owned();
    let pairs = names.into_iter().map(|name| (name, hash(&now, name), hash(&then, name)));
    let file_of = |name: &str| told.report.files.iter().find(|file| file.name == name).map(|file| &*file.sha256);
    let card_then = file_of(SOURCE_CARD_FILE).or_else(|| file_of(CARD_FILE)).unwrap_or("absent");
    let card = (source_card.0, source_card.1.unwrap_or("absent").to_owned(), card_then.to_owned());
    let manifest = (MANIFEST_FILE, manifest_sha256.to_owned(), stated.to_owned());
    pairs
        .chain([card, manifest])
        .filter(|(_, now, then)| now != then)
        .map(|(name, now, then)| told.fault(other_bytes(name, &now, &then)))
        .collect()
}
