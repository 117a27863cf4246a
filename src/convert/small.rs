//! The small files of a container: config.json, tokenizer and whatever else the checkpoint carries.

use std::fs;
use std::path::{Path, PathBuf};

use crate::checkpoint::INDEX_FILE;
use crate::checkpoint::arrival::{CHECKSUM_LISTS, UNFINISHED_SUFFIXES};
use crate::config::{CONFIG_FILE, NEEDED_SMALL_FILES};
use crate::container::manifest::{CARD_FILE, FileRecord, MANIFEST_FILE, Manifest, SOURCE_CARD_FILE, is_model_card};
use crate::error::{Fault, FaultKind, Place, Result, escaped, is_unprintable};
use crate::io::{SourceFile, TEMPORARY_SUFFIX, read_small};
use crate::json::Object;
use crate::limits;

/// Key of config.json that describes the source's quantization, not the container's.
const QUANTIZATION_KEY: &str = "quantization_config";

/// Endings of files that hold weights.
const WEIGHT_SUFFIXES: [&str; 5] = [".safetensors", ".bin", ".pt", ".pth", ".gguf"];

/// A small file to carry along.
#[derive(Debug, Clone)]
pub struct SmallFile {
    /// Its name.
    pub name: String,
    /// Its size in the container.
    pub bytes: u64,
    /// Whether the container has it already.
    pub present: bool,
    source: PathBuf,
    rewrite: bool,
}

impl SmallFile {
    /// Where it comes from.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// What the container is to hold.
    pub fn contents(&self) -> Result<Vec<u8>> {
        let bytes = read_small(&self.source, limits::MAX_SMALL_FILE_BYTES)?;
        if self.rewrite { without_quantization(&self.source, &bytes) } else { Ok(bytes) }
    }
}

/// The small files of a checkpoint, by name, as they go into a container; what is left behind is told in `warnings`.
pub fn list(source: &Path, container: &Path, bare: bool, warnings: &mut Vec<Fault>) -> Result<Vec<SmallFile>> {
    let failed = |e| Fault::io("list the directory", source, e);
    let mut files = Vec::new();
    for entry in fs::read_dir(source).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let path = source.join(&name);
        let Ok(name) = name.into_string() else {
            warnings.push(Fault::new(Place::file(path), FaultKind::NameNotUtf8));
            continue;
        };
        let is_wrong_there = !bare && CHECKSUM_LISTS.contains(&name.as_str());
        if !is_carried(&name) || is_wrong_there || path.is_dir() {
            continue;
        }
        if is_hostile(&name) {
            warnings.push(Fault::new(Place::file(path), FaultKind::NameNotCarried));
            continue;
        }
        // Snapshots of a download cache are links to files elsewhere: what counts is what they lead to. A file that cannot
        // be read is told now, not at the end of a run.
        let file_bytes = SourceFile::open(&path)?.bytes();
        if file_bytes > limits::MAX_SMALL_FILE_BYTES {
            let kind = FaultKind::NotCarried { limit: limits::MAX_SMALL_FILE_BYTES, found: file_bytes };
            warnings.push(Fault::new(Place::file(path), kind));
            continue;
        }
        let rewrite = name == CONFIG_FILE && !bare;
        let present = container.join(&name).exists();
        let mut file = SmallFile { name, bytes: file_bytes, present, source: path, rewrite };
        if rewrite {
            file.bytes = file.contents()?.len() as u64;
        }
        files.push(file);
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let has = |name: &str| files.iter().any(|file| file.name == name);
    if !bare && has(CARD_FILE) && has(SOURCE_CARD_FILE) {
        let place = Place::file(source.join(SOURCE_CARD_FILE));
        return Err(Fault::new(place, FaultKind::TwoCards { other: CARD_FILE }));
    }
    for (name, consequence) in NEEDED_SMALL_FILES {
        if !files.iter().any(|file| file.name == name) {
            let kind = FaultKind::SmallFileMissing { consequence };
            warnings.push(Fault::new(Place::file(source.join(name)), kind));
        }
    }
    Ok(files)
}

/// In a container that was published the source's card has the name [`SOURCE_CARD_FILE`], for README.md is another card:
/// the record of that one.
pub fn beside_card(small: &mut [SmallFile], manifest: &Manifest, container: &Path) -> Option<FileRecord> {
    let recorded = |name: &str| manifest.small_files.iter().find(|record| record.name == name);
    let card = recorded(CARD_FILE)?;
    let published = || fs::read(container.join(CARD_FILE)).is_ok_and(|text| is_model_card(&text));
    if recorded(SOURCE_CARD_FILE).is_none() && !published() {
        return None;
    }
    if let Some(source) = small.iter_mut().find(|file| file.name == CARD_FILE) {
        source.name = SOURCE_CARD_FILE.to_owned();
        source.present = container.join(SOURCE_CARD_FILE).exists();
    }
    Some(card.clone())
}

/// Whether files of this name are carried along.
fn is_carried(name: &str) -> bool {
    let reserved = name == INDEX_FILE || name == MANIFEST_FILE || name.starts_with('.');
    let mut endings = WEIGHT_SUFFIXES.iter().chain(&UNFINISHED_SUFFIXES).chain(&[TEMPORARY_SUFFIX]);
    !reserved && !endings.any(|ending| name.ends_with(ending))
}

/// Whether a name would trick a terminal, or lead elsewhere on another system: no manifest may have it.
fn is_hostile(name: &str) -> bool {
    name.contains(is_unprintable) || name.contains('\\')
}

/// The names of the small files that are there, whole or not, sorted.
pub fn names(source: &Path) -> Vec<String> {
    let entries = fs::read_dir(source).into_iter().flatten().flatten();
    let files = entries.filter(|entry| !entry.path().is_dir()).filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = files.filter(|name| is_carried(name) && !is_hostile(name)).collect();
    names.sort();
    names
}

/// config.json without its description of the source's quantization, every other byte as it is.
fn without_quantization(path: &Path, bytes: &[u8]) -> Result<Vec<u8>> {
    let syntax = |message: String| Fault::new(Place::file(path), FaultKind::JsonSyntax { message });
    let text = std::str::from_utf8(bytes).map_err(|e| syntax(e.to_string()))?;
    let object = Object::parse(text).map_err(|e| syntax(e.to_string()))?;
    if let Some(key) = object.duplicates().first() {
        return Err(syntax(format!("`{}` appears twice", escaped(key))));
    }
    Ok(object.text_without(text, QUANTIZATION_KEY).into_bytes())
}
