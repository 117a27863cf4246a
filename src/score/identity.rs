//! What a model is, by the hashes of its files.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::checkpoint::weight_files;
use crate::config::CONFIG_FILE;
use crate::container::manifest::{FileRecord, Manifest, hex};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::limits;
use crate::model::tokenizer::TOKENIZER_FILE;

/// A model by its contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// SHA-256 over names and hashes of the weight files and of config.json, hexadecimal.
    pub model_sha256: String,
    /// SHA-256 of tokenizer.json, hexadecimal.
    pub tokenizer_sha256: String,
}

impl Identity {
    /// Hashes the files of a directory. Those that are not what its manifest says are refused.
    pub fn of(directory: &Path) -> Result<Identity, Faults> {
        let model_sha256 = model_sha256_in(directory)?;
        let tokenizer_sha256 = sha256_of(&directory.join(TOKENIZER_FILE))?;
        Ok(Identity { model_sha256, tokenizer_sha256 })
    }
}

/// The hash of the model in a directory. Files that are not what its manifest says are refused.
pub fn model_sha256_in(directory: &Path) -> Result<String, Faults> {
    let mut names = weight_files(directory)?;
    names.push(CONFIG_FILE.to_owned());
    names.sort_unstable();
    let manifest = Manifest::read(directory)?;
    let records = manifest.iter().flat_map(|manifest| manifest.files.iter().chain(&manifest.small_files));
    let recorded: Vec<(&str, &str)> = records.map(|file| (&*file.name, &*file.sha256)).collect();
    let hashes = names.par_iter().map(|name| sha256_of(&directory.join(name))).collect::<Result<Vec<String>>>()?;
    let hashes: Vec<(&String, String)> = names.iter().zip(hashes).collect();
    let changed = |(name, found): &(&String, String)| {
        let expected = recorded.iter().find(|(recorded, _)| recorded == *name)?.1;
        let kind = FaultKind::FileHash { expected: expected.to_owned(), found: found.clone() };
        (expected != found).then(|| Fault::new(Place::file(directory.join(name)), kind))
    };
    Faults::check(hashes.iter().filter_map(changed).collect())?;
    Ok(model_sha256(hashes.iter().map(|(name, hash)| (name.as_str(), hash.as_str()))))
}

/// SHA-256 over the lines `hash  name` of weight files and config.json, which are given in the order of their names.
pub fn model_sha256<'a>(files: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut all = Sha256::new();
    files.for_each(|(name, hash)| all.update(format!("{hash}  {name}\n")));
    hex(&all.finalize())
}

/// The same of records that may hold other files, too, in any order.
pub fn model_sha256_of(records: &[FileRecord]) -> String {
    let of_model = |name: &str| name.ends_with(".safetensors") || name == CONFIG_FILE;
    let files = records.iter().filter(|file| of_model(&file.name)).map(|file| (&*file.name, &*file.sha256));
    let mut files: Vec<(&str, &str)> = files.collect();
    files.sort_unstable();
    model_sha256(files.into_iter())
}

/// SHA-256 of a file, hexadecimal.
pub fn sha256_of(path: &Path) -> Result<String> {
    // Opening a pipe or a directory is refused by name.
    crate::io::SourceFile::open(path)?;
    let mut file = File::open(path).map_err(|e| Fault::io("open the file", path, e))?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; limits::VERIFY_READ_BYTES]);
    loop {
        match file.read(&mut buffer).map_err(|e| Fault::io("read the file", path, e))? {
            0 => return Ok(hex(&hash.finalize())),
            read => hash.update(&buffer[..read]),
        }
    }
}
