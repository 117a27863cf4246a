//! What manifest and stamps declare, against what is there.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::Survey;
use crate::container::manifest::{FileRecord, MANIFEST_FILE, TensorRecord};
use crate::container::resolve::is_stamp;
use crate::error::{FaultKind, Place};
use crate::format::Format;
use crate::tensor::{Dtype, TensorName};

type Located = HashMap<TensorName, (usize, usize)>;

impl Survey {
    /// Stamps that name no format, or another than f32 for raw values, and stamps that nothing reads. Those of quantized
    /// matrices are compared with the bytes when their format is resolved.
    pub(super) fn check_stamps(&mut self, stamps: &BTreeMap<TensorName, String>, located: &Located) {
        for (name, stamp) in stamps {
            let place = match located.get(name) {
                Some(&(file, _)) => self.place(file, name),
                None => Place::tensor(self.directory.clone(), name.clone()),
            };
            let weight = self.weights.get(name);
            let expert = weight.and_then(|w| w.role.as_ref()).is_some_and(|role| !role.resident());
            let raw = weight.is_some_and(|weight| weight.codes.dtype != Dtype::U8);
            if !is_stamp(stamp) {
                self.error(place, FaultKind::StampUnknown { stamp: stamp.clone() });
            } else if !located.contains_key(name) {
                self.warning(place, FaultKind::StampIdle { why: "the container does not hold" });
            } else if weight.is_none() {
                self.warning(place, FaultKind::StampIdle { why: "holds scales" });
            } else if expert {
                let why = "is a routed expert's: the colibri engine does not read it";
                self.warning(place, FaultKind::StampIdle { why });
            } else if raw && stamp != Format::F32.name() {
                let kind = FaultKind::StampMismatch { stamp: stamp.clone(), by_bytes: Format::F32 };
                self.error(place, kind);
            }
        }
    }

    /// The manifest against files and headers, both ways.
    pub(super) fn check_manifest(&mut self, located: &Located) {
        let Some(manifest) = self.manifest.take() else { return };
        let mut seen = HashSet::new();
        for record in manifest.files.iter().chain(&manifest.small_files) {
            self.check_file(record, !seen.insert(record.name.as_str()));
        }
        let named = |name: &str| manifest.files.iter().any(|record| record.name == name);
        let unknown: Vec<_> = self.files.iter().filter(|f| !named(&f.name)).map(|f| f.file.path().to_owned()).collect();
        for path in unknown {
            self.error(Place::file(path), FaultKind::ManifestFileUnknown);
        }
        for (name, record) in &manifest.tensors {
            let Some(&(file, _)) = located.get(name) else {
                if !self.unreadable.contains(&record.file) {
                    self.error(
                        Place::tensor(self.directory.join(MANIFEST_FILE), name.clone()),
                        FaultKind::ManifestTensorMissing,
                    );
                }
                continue;
            };
            self.check_record(name, file, record);
        }
        let unknown: Vec<(Place, FaultKind)> = self
            .weights
            .iter()
            .filter(|(name, _)| !manifest.tensors.contains_key(*name))
            .map(|(name, weight)| (self.place(weight.file, name), FaultKind::ManifestTensorUnknown))
            .collect();
        for (place, kind) in unknown {
            self.error(place, kind);
        }
        self.manifest = Some(manifest);
    }

    /// A file of the manifest against the directory.
    fn check_file(&mut self, record: &FileRecord, again: bool) {
        // A name from a file is never used as a path unless it is a plain name.
        let name = record.name.as_str();
        if name.contains(['/', '\\', ':', '\0']) || matches!(name, "" | "." | "..") {
            let kind = FaultKind::ManifestPath { found: record.name.clone() };
            return self.error(Place::file(self.directory.join(MANIFEST_FILE)), kind);
        }
        let path = self.directory.join(name);
        if again {
            return self.error(Place::file(path), FaultKind::ManifestFileTwice);
        }
        match std::fs::metadata(&path).ok().filter(|metadata| metadata.is_file()) {
            None => self.error(Place::file(path), FaultKind::ManifestFileMissing),
            Some(metadata) if metadata.len() != record.bytes => {
                let kind = FaultKind::ManifestFileSize { expected: record.bytes, found: metadata.len() };
                self.error(Place::file(path), kind);
            }
            Some(_) => {}
        }
    }

    /// One record of the manifest against its weight.
    fn check_record(&mut self, name: &TensorName, file: usize, record: &TensorRecord) {
        let Some(weight) = self.weights.get(name) else { return };
        let shape = weight.shape().map_or_else(|| record.shape.to_string(), |shape| shape.to_string());
        let scale_bytes = weight.scales.as_ref().map_or(0, |(_, scales)| scales.bytes);
        let declared = Format::parse(&record.format, record.group_size);
        // A format that was refused or does not exist is not compared again.
        let format =
            weight.format.filter(|_| declared.is_some()).map_or(record.format.as_str(), |format| format.name());
        let differing = [
            ("file", record.file.clone(), self.files[file].name.clone()),
            ("shape", record.shape.to_string(), shape),
            ("format", record.format.clone(), format.to_owned()),
            ("bytes", record.bytes.to_string(), weight.codes.bytes.to_string()),
            ("scale bytes", record.scale_bytes.to_string(), scale_bytes.to_string()),
        ];
        if declared.is_none() {
            let size = record.group_size.map_or(String::new(), |size| format!(" with group size {size}"));
            let place = Place::tensor(self.directory.join(MANIFEST_FILE), name.clone());
            self.error(place, FaultKind::ManifestFormat { found: record.format.clone() + &size });
        }
        if record.scale_bytes > 0 && record.scale_checksum.is_none() {
            self.error(self.place(file, name), FaultKind::ManifestIncomplete { what: "checksum of the scales" });
        }
        for (what, expected, found) in differing.into_iter().filter(|(_, expected, found)| expected != found) {
            let place = self.place(file, name);
            self.error(place, FaultKind::ManifestTensorDiffers { what, expected, found });
        }
    }
}
