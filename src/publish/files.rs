//! The files of a container against its manifest, and which of them is the card.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::bytes::{Hashed, read_all};
use super::front::Front;
use crate::container::manifest::{
    CARD_FILE, FileRecord, MANIFEST_FILE, Manifest, SOURCE_CARD_FILE, SUMS_FILE, is_model_card,
};
use crate::container::progress;
use crate::error::{Fault, FaultKind, Faults, Place, Result, is_unprintable};
use crate::io::{TEMPORARY_SUFFIX, hook, is_working_name, read_small};
use crate::limits;
use crate::progress::Progress;

/// Files that publishing writes: what they hold is not what the manifest said before.
const OWN: [&str; 4] = [CARD_FILE, SOURCE_CARD_FILE, SUMS_FILE, MANIFEST_FILE];

/// What is in a container's directory.
#[derive(Debug)]
pub struct Contents {
    /// The files of the manifest that could be read, cards left out.
    pub hashed: Vec<Hashed>,
    /// What is wrong with the manifest itself.
    pub manifest_faults: Vec<Fault>,
    /// What is wrong with the files.
    pub faults: Vec<Fault>,
    /// What is odd.
    pub warnings: Vec<Fault>,
}

/// The cards of a container.
///
/// `publish` moves the source's card from README.md to README.source.md, so its name proves nothing: its bytes do.
#[derive(Debug, Default)]
pub struct Found {
    /// The source's card, to be kept.
    pub source: Option<Vec<u8>>,
    /// Name of the file that holds it now, or should.
    pub name: &'static str,
    /// Name of the source's card beside the one that is to be written.
    pub beside: Option<String>,
    /// What it says at its top.
    pub front: Front,
    /// What is odd about it.
    pub warnings: Vec<Fault>,
}

impl Contents {
    /// Lists a directory and hashes every file that the manifest names.
    pub fn read(container: &Path, manifest: &Manifest, progress: &dyn Progress) -> Result<Contents, Faults> {
        let records = || manifest.files.iter().chain(&manifest.small_files);
        let manifest_faults = check_manifest(container, manifest)?;
        let mut faults = foreign(container, manifest)?;
        let mut readable = Vec::new();
        if manifest_faults.is_empty() {
            for record in records().filter(|record| !OWN.contains(&record.name.as_str())) {
                match check_size(container, record)? {
                    None => readable.push(record.name.clone()),
                    Some(fault) => faults.push(fault),
                }
            }
        }
        progress.start(records().map(|record| record.bytes).sum());
        let read = read_all(container, &readable, progress);
        progress.end();
        let (mut hashed, mut warnings, mut unread) = (Vec::new(), Vec::new(), Vec::new());
        for file in read {
            match file {
                Ok(file) => hashed.push(file),
                Err(fault) => unread.push(fault),
            }
        }
        Faults::check(unread)?;
        for file in &hashed {
            let path = || Place::file(container.join(&file.record.name));
            let recorded = records().find(|record| record.name == file.record.name).expect("it was read by its record");
            if recorded.sha256 != file.record.sha256 {
                let (expected, found) = (recorded.sha256.clone(), file.record.sha256.clone());
                faults.push(Fault::new(path(), FaultKind::FileHash { expected, found }));
            }
            warnings.extend(too_large(file.record.bytes).map(|kind| Fault::new(path(), kind)));
        }
        faults.sort_by(|a, b| a.place.cmp(&b.place));
        Ok(Contents { hashed, manifest_faults, faults, warnings })
    }

    /// Which file is the source's card: README.md of a container that was never published, README.source.md later.
    pub fn card(&mut self, container: &Path, manifest: &Manifest) -> Result<Found, Faults> {
        let read = |name: &str| -> Result<Option<Vec<u8>>> {
            let path = container.join(name);
            let there = path.symlink_metadata().is_ok();
            there.then(|| read_small(&path, limits::MAX_SMALL_FILE_BYTES)).transpose()
        };
        let recorded = |name: &str| manifest.small_files.iter().find(|record| record.name == name);
        let is = |bytes: &[u8], record: &FileRecord| Hashed::of(&record.name, bytes).record.sha256 == record.sha256;
        let (card, kept) = (read(CARD_FILE)?, read(SOURCE_CARD_FILE)?);
        let mut found = Found { name: SOURCE_CARD_FILE, ..Found::default() };
        let source_path = container.join(SOURCE_CARD_FILE);
        let own = card.clone().filter(|card| !is_model_card(card));
        match (recorded(SOURCE_CARD_FILE), kept) {
            (Some(record), Some(kept)) => {
                self.expect(&source_path, record, &kept);
                let other = own.filter(|card| *card != kept);
                if other.is_some_and(|card| recorded(CARD_FILE).is_some_and(|record| is(&card, record))) {
                    self.faults.push(Fault::new(Place::file(&source_path), FaultKind::TwoCards { other: CARD_FILE }));
                }
                found.source = Some(kept);
            }
            (Some(_), None) => self.faults.push(Fault::new(Place::file(&source_path), FaultKind::ManifestFileMissing)),
            // A run that was interrupted had kept it already.
            (None, Some(kept))
                if recorded(CARD_FILE).is_some_and(|record| is(&kept, record)) || card.as_ref() == Some(&kept) =>
            {
                found.source = Some(kept);
            }
            (None, stray) => {
                if stray.is_some() {
                    self.faults.push(Fault::new(Place::file(&source_path), FaultKind::NotOfContainer));
                }
                (found.name, found.source) = (CARD_FILE, own);
            }
        }
        // A card that was made here is made again; the source's own is the only word on its licence.
        let lost = recorded(CARD_FILE).filter(|record| card.is_none() && !is_own_card(container, record));
        if lost.is_some() && found.source.is_none() {
            self.faults.push(Fault::new(Place::file(container.join(CARD_FILE)), FaultKind::CardMissing));
        }
        // A card of another spelling stays as it is, as every small file, and says the same.
        let spelled = |record: &&FileRecord| record.name != CARD_FILE && record.name.eq_ignore_ascii_case(CARD_FILE);
        let spelled = manifest.small_files.iter().find(spelled).filter(|_| found.source.is_none());
        let other = spelled.map(|record| read(&record.name)).transpose()?.flatten();
        let (name, text) = match (&found.source, spelled) {
            (None, Some(record)) => (record.name.clone(), other),
            (source, _) => (found.name.to_owned(), source.clone()),
        };
        let kept = if found.source.is_some() { SOURCE_CARD_FILE.to_owned() } else { name.clone() };
        found.beside = text.is_some().then_some(kept);
        if let Some(source) = &text {
            match Front::parse(&container.join(name), &String::from_utf8_lossy(source)) {
                Ok(front) => found.front = front,
                Err(fault) => found.warnings.push(fault),
            }
        }
        Ok(found)
    }

    /// README.md must be what the manifest says, or the source's card, or the very card that is to be written.
    pub fn check_card(&mut self, container: &Path, manifest: &Manifest, found: &Found, text: &[u8]) {
        let path = container.join(CARD_FILE);
        let Ok(card) = fs::read(&path) else { return };
        let hash = Hashed::of(CARD_FILE, &card).record.sha256;
        let expected = manifest.small_files.iter().find(|record| record.name == CARD_FILE);
        if card == text || found.source.as_ref() == Some(&card) && expected.is_none() {
            return;
        }
        match expected {
            Some(record) if record.sha256 == hash => {}
            Some(record) => {
                let kind = FaultKind::CardChanged { expected: record.sha256.clone(), found: hash };
                self.faults.push(Fault::new(Place::file(path), kind));
            }
            None => self.faults.push(Fault::new(Place::file(path), FaultKind::NotOfContainer)),
        }
    }

    fn expect(&mut self, path: &Path, record: &FileRecord, bytes: &[u8]) {
        let found = Hashed::of(&record.name, bytes).record.sha256;
        if found != record.sha256 {
            let kind = FaultKind::FileHash { expected: record.sha256.clone(), found };
            self.faults.push(Fault::new(Place::file(path), kind));
        }
    }
}

/// Whether an earlier publishing wrote the card that the manifest names: then its list of checksums has it, too.
fn is_own_card(container: &Path, record: &FileRecord) -> bool {
    let sums = read_small(&container.join(SUMS_FILE), limits::MAX_MANIFEST_BYTES).unwrap_or_default();
    let line = format!("{}  {}", record.sha256, record.name);
    String::from_utf8_lossy(&sums).lines().any(|found| found == line)
}

/// Whether the Hub takes a file of this size.
fn too_large(found: u64) -> Option<FaultKind> {
    let limit = limits::MAX_HUB_FILE_BYTES;
    (found > limit).then_some(FaultKind::TooLargeForHub { limit, found })
}

/// What makes a manifest useless: names that lead elsewhere, names twice, a conversion that was begun.
fn check_manifest(container: &Path, manifest: &Manifest) -> Result<Vec<Fault>> {
    let path = container.join(MANIFEST_FILE);
    let fault = |kind| Fault::new(Place::file(&path), kind);
    let (mut faults, mut names) = (Vec::new(), BTreeSet::new());
    for record in manifest.files.iter().chain(&manifest.small_files) {
        let name = record.name.as_str();
        let plain = !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\']);
        if !plain || name.contains(is_unprintable) {
            faults.push(fault(FaultKind::ManifestPath { found: name.to_owned() }));
        } else if !names.insert(name) {
            faults.push(Fault::new(Place::file(container.join(name)), FaultKind::ManifestFileTwice));
        }
    }
    if manifest.files.is_empty() {
        faults.push(Fault::new(Place::file(container), FaultKind::NoWeights));
    }
    if !progress::present(container)?.is_empty() {
        faults.push(Fault::new(Place::file(container), FaultKind::ConversionUnfinished));
    }
    Ok(faults)
}

/// Whether a file is there in its size; what is wrong otherwise.
fn check_size(container: &Path, record: &FileRecord) -> Result<Option<Fault>> {
    let path = container.join(&record.name);
    let fault = |kind| Some(Fault::new(Place::file(&path), kind));
    Ok(match fs::metadata(&path) {
        // What cannot be read is no answer.
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Fault::io("look at the file", &path, e)),
        Err(_) => fault(FaultKind::ManifestFileMissing),
        Ok(metadata) if !metadata.is_file() => fault(FaultKind::NotAFile),
        Ok(metadata) if metadata.len() != record.bytes => {
            fault(FaultKind::ManifestFileSize { expected: record.bytes, found: metadata.len() })
        }
        Ok(_) => None,
    })
}

/// What an upload would take along although nobody vouches for it.
fn foreign(container: &Path, manifest: &Manifest) -> Result<Vec<Fault>> {
    let list = |e| Fault::io("list the directory", container, e);
    let named: BTreeSet<&str> =
        manifest.files.iter().chain(&manifest.small_files).map(|record| record.name.as_str()).collect();
    let mut faults = Vec::new();
    for entry in fs::read_dir(container).map_err(list)? {
        let entry = entry.map_err(list)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let own = OWN.contains(&name.as_str()) || OWN.iter().any(|own| name == format!("{own}{TEMPORARY_SUFFIX}"));
        // Folders that uploaders keep for themselves and never upload.
        let of_hub = name == ".git" || (name == ".cache" && only_hub_cache(&entry.path()));
        let locked = is_working_name(&name) && name.ends_with(".lock");
        if name == SUMS_FILE && !is_own_sums(&entry.path()) {
            faults.push(Fault::new(Place::file(entry.path()), FaultKind::SumsForeign));
        }
        if !(named.contains(name.as_str()) || own || of_hub || locked) {
            faults.push(Fault::new(Place::file(entry.path()), FaultKind::NotOfContainer));
        }
    }
    Ok(faults)
}

/// Whether a list of checksums is one that an earlier publishing wrote, though maybe of other files: by its form, and by
/// naming the card and the manifest. Another list may be about what is not here, and is not overwritten.
fn is_own_sums(path: &Path) -> bool {
    let Ok(bytes) = read_small(path, limits::MAX_MANIFEST_BYTES) else { return false };
    let Ok(text) = String::from_utf8(bytes) else { return false };
    let line = |line: &str| {
        let (hash, name) = line.split_once("  ")?;
        let is_hash = hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        (is_hash && !name.is_empty()).then(|| name.to_owned())
    };
    let Some(names) = text.lines().map(line).collect::<Option<Vec<String>>>() else { return false };
    let has = |name: &str| names.iter().any(|found| found == name);
    names.is_sorted_by(|a, b| a < b) && has(CARD_FILE) && has(MANIFEST_FILE)
}

/// Whether a `.cache` holds nothing but huggingface_hub's own folder.
fn only_hub_cache(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|entries| entries.flatten().all(|entry| entry.file_name() == "huggingface"))
}

/// Removes what a run that died left of the files that publishing writes.
pub fn remove_leftovers(container: &Path) -> Result<()> {
    for own in OWN {
        let path = container.join(format!("{own}{TEMPORARY_SUFFIX}"));
        match hook::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Fault::io("remove a temporary file of an earlier run", &path, e));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_the_hub_does_not_take_are_told() {
        assert!(too_large(limits::MAX_HUB_FILE_BYTES).is_none());
        let text = too_large(limits::MAX_HUB_FILE_BYTES + 1).unwrap().to_string();
        assert!(text.contains("the Hub takes at most"), "{text}");
    }
}
