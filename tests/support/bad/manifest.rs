//! The manifest of a container that is already there.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use coliconv::container::manifest::{
    CHECKSUM, FileRecord, MANIFEST_FILE, MANIFEST_VERSION, Manifest, TensorRecord, hex,
};
use coliconv::container::reader::Survey;
use coliconv::container::writer::{checksum_text, digest};
use coliconv::format::Format;
use coliconv::recipe::Settings;
use coliconv::tensor::TensorName;
use sha2::{Digest, Sha256};

/// Writes the manifest of a container as its bytes are, with the formats that they are taken for.
pub fn write_manifest(directory: &Path) {
    let manifest = of_directory(directory);
    fs::write(directory.join(MANIFEST_FILE), manifest.to_bytes()).unwrap();
}

fn of_directory(directory: &Path) -> Manifest {
    let survey = Survey::read(directory).unwrap();
    let mut checksums: BTreeMap<TensorName, (u64, String)> = BTreeMap::new();
    let mut files = Vec::new();
    for file in &survey.files {
        let read = |buffer: &mut [u8], offset| file.file.read_at(buffer, offset);
        let digests = digest(&read, file.file.bytes(), file.header.tensors(), &|_| ()).unwrap();
        files.push(FileRecord { name: file.name.clone(), bytes: file.file.bytes(), sha256: hex(&digests.sha256) });
        for (tensor, checksum) in file.header.tensors().iter().zip(digests.checksums) {
            checksums.insert(tensor.name.clone(), (tensor.bytes, checksum_text(checksum)));
        }
    }
    let record = |(name, weight): (&TensorName, &coliconv::container::reader::StoredWeight)| {
        let (bytes, checksum) = checksums[name].clone();
        let scales = checksums.get(&name.scales()).cloned();
        let format = weight.format.unwrap_or(Format::F32);
        let record = TensorRecord {
            file: survey.files[weight.file].name.clone(),
            class: weight.role.as_ref().map_or("f32", |role| role.class.name()).to_owned(),
            format: format.name().to_owned(),
            group_size: format.group_size(),
            shape: weight.shape().unwrap_or_else(|| weight.codes.shape.clone()),
            bytes,
            checksum,
            scale_bytes: scales.as_ref().map_or(0, |(bytes, _)| *bytes),
            scale_checksum: scales.map(|(_, checksum)| checksum),
        };
        (name.clone(), record)
    };
    Manifest {
        version: MANIFEST_VERSION,
        tool: "coliconv 0.1.0".to_owned(),
        model_type: "glm_moe_dsa".to_owned(),
        checksum: CHECKSUM.to_owned(),
        recipe: Settings::default(),
        passes: BTreeMap::new(),
        source: Vec::new(),
        files,
        small_files: small_files(directory),
        tensors: survey.weights.iter().map(record).collect(),
        warnings: Vec::new(),
    }
}

fn small_files(directory: &Path) -> Vec<FileRecord> {
    let mut records: Vec<FileRecord> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.ends_with(".safetensors") && name != MANIFEST_FILE)
        .map(|name| {
            let contents = fs::read(directory.join(&name)).unwrap();
            FileRecord { name, bytes: contents.len() as u64, sha256: hex(&Sha256::digest(contents)) }
        })
        .collect();
    records.sort_by(|a, b| a.name.cmp(&b.name));
    records
}
