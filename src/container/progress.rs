//! `.coliconv-progress.json`: what a run has finished, kept until the manifest holds it (after a bare run: for good).
//!
//! Parts of one conversion run at the same time, so each keeps a file of its own: `.coliconv-progress.2-of-8.json`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::manifest::{FileRecord, SourceIdentity, json_text, parse_versioned};
use crate::error::{Fault, FaultKind, Place, Result};
use crate::io::{hook, read_small, sync_directory_of, write_whole};
use crate::json::unique_map;
use crate::limits;
use crate::part::Part;
use crate::report::{Finding, Severity};

/// Name of the file of a whole conversion.
pub const PROGRESS_FILE: &str = ".coliconv-progress.json";
/// What the names of all such files begin with.
const PREFIX: &str = ".coliconv-progress.";
/// What they end with.
const SUFFIX: &str = "json";
/// Version of its structure.
pub const PROGRESS_VERSION: u64 = 1;

/// The progress of a conversion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Version of the structure: 1.
    pub version: u64,
    /// The program that wrote it.
    pub tool: String,
    /// Whether the container has neither stamps nor index nor manifest.
    pub bare: bool,
    /// For each pass that was begun, what decides its bytes.
    #[serde(deserialize_with = "unique_map")]
    pub passes: BTreeMap<String, BTreeMap<String, String>>,
    /// The files of the source that were read.
    pub source: Vec<SourceIdentity>,
    /// The weight files that are finished.
    pub files: Vec<FileRecord>,
    /// What was accepted in their weights although it is odd.
    pub warnings: Vec<Finding>,
}

/// Name of the progress file of a part, or of a whole conversion.
pub fn file_name(part: Option<Part>) -> String {
    part.map_or_else(|| PROGRESS_FILE.to_owned(), |part| format!("{PREFIX}{}.{SUFFIX}", part.file_text()))
}

/// The part whose progress a file name stands for: `Some(None)` for a whole conversion.
fn part_of(name: &str) -> Option<Option<Part>> {
    if name == PROGRESS_FILE {
        return Some(None);
    }
    let middle = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.strip_suffix('.')?;
    Part::from_file_text(middle).map(Some)
}

/// The progress files of a directory: that of a whole conversion first, then those of parts.
pub fn present(directory: &Path) -> Result<Vec<(Option<Part>, String)>> {
    let list = |e| Fault::io("list the directory", directory, e);
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(list)? {
        let name = entry.map_err(list)?.file_name().to_string_lossy().into_owned();
        found.extend(part_of(&name).map(|part| (part, name)));
    }
    found.sort();
    Ok(found)
}

/// Reads all progress of a directory.
pub fn read_all(directory: &Path) -> Result<Vec<(Option<Part>, Progress)>> {
    let mut all = Vec::new();
    for (part, name) in present(directory)? {
        let path = directory.join(name);
        match read_small(&path, limits::MAX_MANIFEST_BYTES) {
            Ok(bytes) => all.push((part, Progress::parse(&path, &bytes)?)),
            // Another part has folded it into the manifest since the directory was listed.
            Err(_) if part.is_some() && path.symlink_metadata().is_err() => {}
            Err(fault) => return Err(fault),
        }
    }
    check_same_division(directory, &all)?;
    Ok(all)
}

/// Parts of different divisions would convert files twice and others never.
fn check_same_division(directory: &Path, all: &[(Option<Part>, Progress)]) -> Result<()> {
    let mut divisions = all.iter().filter_map(|(part, _)| *part);
    let Some(first) = divisions.next() else { return Ok(()) };
    match divisions.find(|part| part.of() != first.of()) {
        Some(other) => Err(other_division(directory, first.of(), other.of())),
        None => Ok(()),
    }
}

/// The fault of a part of another division.
pub fn other_division(directory: &Path, expected: usize, found: usize) -> Fault {
    Fault::new(Place::file(directory), FaultKind::OtherDivision { expected, found })
}

/// Removes the progress of a directory durably: all of it, or that of parts.
pub fn remove(directory: &Path, of_whole: bool) -> Result<()> {
    for (part, name) in present(directory)? {
        if part.is_some() || of_whole {
            let path = directory.join(name);
            hook::remove_file(&path).map_err(|e| Fault::io("remove the file", &path, e))?;
        }
    }
    let path = directory.join(PROGRESS_FILE);
    sync_directory_of(&path).map_err(|e| Fault::io("write the directory to disk", directory, e))
}

impl Progress {
    /// Parses the text of a progress file; `path` is for messages only.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Progress> {
        parse_versioned(path, bytes, PROGRESS_VERSION).map_err(|fault| match *fault.kind {
            FaultKind::JsonSyntax { message } => Fault::new(fault.place, FaultKind::ProgressSyntax { message }),
            _ => fault,
        })
    }

    /// Notes a finished file and what was accepted in it.
    pub fn add(&mut self, record: FileRecord, warnings: Vec<Fault>) {
        self.files.retain(|known| known.name != record.name);
        self.files.push(record);
        self.files.sort_by(|a, b| a.name.cmp(&b.name));
        self.warn(warnings.iter().map(|fault| Finding::new(Severity::Warning, fault)));
    }

    /// Notes what was accepted, each thing once.
    pub fn warn(&mut self, warnings: impl IntoIterator<Item = Finding>) {
        self.warnings.extend(warnings);
        self.warnings.sort();
        self.warnings.dedup();
    }

    /// Writes it durably as that of a part or of a whole conversion, replacing what was there.
    pub fn write(&self, directory: &Path, part: Option<Part>) -> Result<()> {
        write_whole(&directory.join(file_name(part)), &json_text(self), true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_stand_for_parts() {
        for part in [None, Part::new(1, 1), Part::new(10, 12)] {
            assert_eq!(part_of(&file_name(part)), Some(part));
        }
        for name in
            [".coliconv-progress.01-of-2.json", ".coliconv-progress.3-of-2.json", "x.json", ".coliconv-progress."]
        {
            assert_eq!(part_of(name), None, "{name}");
        }
    }
}
