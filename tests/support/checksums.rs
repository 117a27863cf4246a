//! The payload of a container against the checksums of its manifest.

use coliconv::container::manifest::hex;
use coliconv::container::reader::{Found, Survey};
use coliconv::container::writer::{checksum_text, digest};
use coliconv::error::{Fault, FaultKind, Place, Severity};

/// The files and tensors whose bytes are not those of the manifest; nothing without a manifest.
pub fn verify(survey: &Survey) -> Vec<Found> {
    let Some(manifest) = &survey.manifest else { return Vec::new() };
    let mut found = Vec::new();
    for file in &survey.files {
        let read = |buffer: &mut [u8], offset| file.file.read_at(buffer, offset);
        let digests = match digest(&read, file.file.bytes(), file.header.tensors(), &|_| ()) {
            Ok(digests) => digests,
            Err(fault) => {
                found.push((Severity::Error, fault));
                continue;
            }
        };
        let sha256 = hex(&digests.sha256);
        if let Some(record) = manifest.files.iter().find(|record| record.name == file.name && record.sha256 != sha256) {
            let kind = FaultKind::FileHash { expected: record.sha256.clone(), found: sha256 };
            found.push((Severity::Error, Fault::new(Place::file(file.file.path()), kind)));
        }
        for (tensor, checksum) in file.header.tensors().iter().zip(digests.checksums) {
            let name = tensor.name.as_str();
            let weight = name.strip_suffix(".qs").unwrap_or(name);
            let Some(record) = manifest.tensors.get(weight) else { continue };
            let (part, expected) = match weight == name {
                true => ("data", Some(&record.checksum)),
                false => ("scales", record.scale_checksum.as_ref()),
            };
            let expected = expected.map_or("", String::as_str).to_owned();
            let computed = checksum_text(checksum);
            if expected != computed {
                let place = Place::tensor(file.file.path(), tensor.name.clone());
                let kind = FaultKind::TensorChecksum { part, expected, found: computed };
                found.push((Severity::Error, Fault::new(place, kind)));
            }
        }
    }
    found
}
