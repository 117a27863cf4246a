//! `.coliconv-progress.json`: what a run has finished, kept until the manifest holds it (after a bare run: for good).

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::manifest::{FileRecord, SourceIdentity, json_text, parse_versioned};
use crate::error::{Fault, Result};
use crate::io::{read_small, write_whole};
use crate::json::unique_map;
use crate::limits;
use crate::report::{Finding, Severity};

/// Name of the file.
pub const PROGRESS_FILE: &str = ".coliconv-progress.json";
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

impl Progress {
    /// Reads the progress of a directory, if there is any.
    pub fn read(directory: &Path) -> Result<Option<Progress>> {
        let path = directory.join(PROGRESS_FILE);
        if !path.exists() {
            return Ok(None);
        }
        Progress::parse(&path, &read_small(&path, limits::MAX_MANIFEST_BYTES)?).map(Some)
    }

    /// Parses the text of a progress file; `path` is for messages only.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Progress> {
        parse_versioned(path, bytes, PROGRESS_VERSION)
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

    /// Writes it durably, replacing what was there.
    pub fn write(&self, directory: &Path) -> Result<()> {
        write_whole(&directory.join(PROGRESS_FILE), &json_text(self), true)
    }
}
