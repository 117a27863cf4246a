//! A listing of a repository, compared with a container: large files by SHA-256, small ones by git's blob id.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::bytes::Hashed;
use crate::container::manifest::FileRecord;
use crate::error::{Fault, FaultKind, Place, Result, escaped};
use crate::io::read_small;
use crate::limits;
use crate::progress::Silent;
use crate::report::PublishListing;

/// A file that every repository has from its beginning.
const ATTRIBUTES: &str = ".gitattributes";

/// A listing that was read.
#[derive(Debug)]
pub struct Listing {
    path: PathBuf,
    entries: Vec<Entry>,
}

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    name: String,
    bytes: u64,
    git_blob_id: Option<String>,
    lfs: Option<Lfs>,
}

/// What LFS keeps of it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Lfs {
    sha256: Option<String>,
    bytes: Option<u64>,
}

/// A file as the Hub's tree and as huggingface_hub's RepoFile or RepoSibling write it.
#[derive(Deserialize)]
struct RawEntry {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(alias = "rfilename")]
    path: Option<String>,
    size: Option<u64>,
    oid: Option<String>,
    #[serde(alias = "blobId")]
    blob_id: Option<String>,
    #[serde(alias = "treeId")]
    tree_id: Option<String>,
    lfs: Option<RawLfs>,
}

#[derive(Deserialize)]
struct RawLfs {
    oid: Option<String>,
    sha256: Option<String>,
    size: Option<u64>,
}

/// What an entry of a listing is.
enum Listed {
    /// A file with its size.
    File(Entry),
    /// A file of which there is only the name.
    Name(String),
    /// A folder.
    Folder,
}

impl Listing {
    /// Reads a listing: one JSON list or several in a row (the pages of a long one), entries alone, a line each, or an
    /// object whose `siblings` are the entries.
    pub fn read(path: &Path) -> Result<Listing> {
        Listing::parse(path, &read_small(path, limits::MAX_LISTING_BYTES)?)
    }

    /// Parses the text of a listing; `path` is for messages only.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Listing> {
        let syntax = |message: String| Fault::new(Place::file(path), FaultKind::ListingSyntax { message });
        let (mut entries, mut names) = (Vec::new(), Vec::new());
        let (mut documents, mut number) = (0, 0);
        for document in serde_json::Deserializer::from_slice(bytes).into_iter::<Value>() {
            documents += 1;
            let values = match document.map_err(|e| syntax(e.to_string()))? {
                Value::Array(values) => values,
                Value::Object(mut object) => match object.remove("siblings") {
                    Some(Value::Array(values)) => values,
                    Some(_) => return Err(syntax("`siblings` is no list".to_owned())),
                    None if object.contains_key("error") => {
                        return Err(syntax(format!("it is a refusal of the Hub's: {}", object["error"])));
                    }
                    None => vec![Value::Object(object)],
                },
                _ => return Err(syntax("expected a list of files".to_owned())),
            };
            for value in values {
                number += 1;
                match entry(value).map_err(|message| syntax(format!("entry {number}: {message}")))? {
                    Listed::File(entry) => entries.push(entry),
                    Listed::Name(name) => names.push(name),
                    Listed::Folder => {}
                }
            }
        }
        if documents == 0 {
            return Err(syntax("it is empty".to_owned()));
        }
        match names.first() {
            // What is only named may be anything: it is neither there nor missing.
            Some(name) if entries.is_empty() => {
                let kind = FaultKind::ListingNames { files: names.len(), name: name.clone() };
                return Err(Fault::new(Place::file(path), kind));
            }
            Some(name) => return Err(syntax(format!("`size` of {} is missing", escaped(name)))),
            None => {}
        }
        Ok(Listing { path: path.to_owned(), entries })
    }

    /// Compares with the files that a container should have. Where git keeps a file, the local one is read for its blob
    /// id, and must be what its record says.
    pub fn compare(&self, container: &Path, files: &[FileRecord]) -> (PublishListing, Vec<Fault>) {
        let mut report = PublishListing {
            file: self.path.to_string_lossy().into_owned(),
            expected: files.len() as u64,
            matched: 0,
            short: Vec::new(),
            wrong: Vec::new(),
            missing: Vec::new(),
            extra: Vec::new(),
        };
        let mut faults = Vec::new();
        let mut by_name: BTreeMap<&str, &Entry> = BTreeMap::new();
        for entry in &self.entries {
            let known = files.iter().any(|file| file.name == entry.name);
            let place = || Place::file(&entry.name);
            if by_name.insert(&entry.name, entry).is_some_and(|other| other != entry) && known {
                report.wrong.push(entry.name.clone());
                faults.push(Fault::new(place(), FaultKind::ListingTwice));
            } else if !known && entry.name != ATTRIBUTES {
                report.extra.push(entry.name.clone());
                faults.push(Fault::new(place(), FaultKind::ListingExtra));
            }
        }
        for file in files {
            let (list, fault) = match by_name.get(file.name.as_str()) {
                None => (&mut report.missing, Fault::new(Place::file(&file.name), FaultKind::ListingMissing)),
                Some(_) if report.wrong.contains(&file.name) => continue,
                Some(entry) => match entry.difference(container, file) {
                    None => {
                        report.matched += 1;
                        continue;
                    }
                    Some(fault) => match *fault.kind {
                        FaultKind::ListingSize { expected, found } if found < expected => (&mut report.short, fault),
                        _ => (&mut report.wrong, fault),
                    },
                },
            };
            list.push(file.name.clone());
            faults.push(fault);
        }
        (report, faults)
    }
}

/// What one entry says.
fn entry(value: Value) -> Result<Listed, String> {
    if let Value::String(name) = value {
        return Ok(Listed::Name(name));
    }
    if !value.is_object() {
        return Err(format!("expected an object with path and size, found {value}"));
    }
    let raw: RawEntry = serde_json::from_value(value).map_err(|e| e.to_string())?;
    // A folder of huggingface_hub's has a tree id in the place of a size.
    let is_folder = raw.kind.as_deref().map_or(raw.tree_id.is_some(), |kind| kind != "file");
    if is_folder {
        return Ok(Listed::Folder);
    }
    let name = raw.path.ok_or("`path` is missing")?;
    let lfs = raw.lfs.map(|lfs| Lfs { sha256: lfs.sha256.or(lfs.oid), bytes: lfs.size });
    let bytes = raw.size.or(lfs.as_ref().and_then(|lfs| lfs.bytes));
    let Some(bytes) = bytes else { return Ok(Listed::Name(name)) };
    Ok(Listed::File(Entry { name, bytes, git_blob_id: raw.oid.or(raw.blob_id), lfs }))
}

impl Entry {
    /// What is not as the record says.
    fn difference(&self, container: &Path, file: &FileRecord) -> Option<Fault> {
        let wrong = |kind| Some(Fault::new(Place::file(&file.name), kind));
        let sizes = [Some(self.bytes), self.lfs.as_ref().and_then(|lfs| lfs.bytes)];
        if let Some(found) = sizes.into_iter().flatten().find(|&found| found != file.bytes) {
            return wrong(FaultKind::ListingSize { expected: file.bytes, found });
        }
        let hash = |what, expected: &str, found: &str| match expected.eq_ignore_ascii_case(found) {
            true => None,
            false => wrong(FaultKind::ListingHash { what, expected: expected.to_owned(), found: found.to_owned() }),
        };
        if let Some(lfs) = &self.lfs {
            return match &lfs.sha256 {
                Some(sha256) => {
                    let found = sha256.strip_prefix("sha256:").unwrap_or(sha256);
                    hash("SHA-256", &file.sha256, found)
                }
                None => wrong(FaultKind::ListingNoHash),
            };
        }
        let Some(found) = &self.git_blob_id else { return wrong(FaultKind::ListingNoHash) };
        let local = match Hashed::read(container, &file.name, &Silent) {
            Ok(local) => local,
            Err(fault) => return Some(fault),
        };
        if local.record != *file {
            let kind = FaultKind::FileHash { expected: file.sha256.clone(), found: local.record.sha256 };
            return Some(Fault::new(Place::file(container.join(&file.name)), kind));
        }
        match &local.git_blob_id {
            Some(expected) => hash("git blob id", expected, found),
            // The Hub keeps no such file in git.
            None => wrong(FaultKind::ListingNoHash),
        }
    }
}
