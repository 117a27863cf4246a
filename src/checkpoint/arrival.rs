//! Files that may still be arriving: when is one whole?
//!
//! A downloader may write a file from front to back, in random order, into space taken beforehand, or under another name.
//! A file counts as whole when nothing speaks against it: it has its final name and none beside it that says otherwise,
//! its header parses, its size is exactly what the header describes, it has no holes, it has been left alone for a while,
//! and it has the SHA-256 that the download's own records give, where there are any.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};

use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::header::Header;
use crate::io::{SourceFile, read_small};
use crate::limits;

/// Endings of files that stand for, or beside, one that is still being written: those of curl, wget, aria2, browsers, Hugging
/// Face's and other downloaders.
pub const UNFINISHED_SUFFIXES: [&str; 8] =
    [".incomplete", ".part", ".partial", ".aria2", ".crdownload", ".download", ".tmp", ".lock"];
/// Where Hugging Face's downloader keeps what it knows of a file, and its unfinished files.
const HUB_FOLDER: &str = ".cache/huggingface/download";
/// Lists of checksums as `sha256sum` writes them.
pub const CHECKSUM_LISTS: [&str; 2] = ["SHA256SUMS", "sha256sums.txt"];

/// Why a file is not taken yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiting {
    /// It is not there.
    Absent,
    /// This name says that it is being written.
    Marked(String),
    /// It was written to a moment ago.
    Fresh,
    /// Its header does not describe a whole file: the reason.
    Header(String),
    /// It has a hole from this byte on.
    Hole(u64),
    /// It has nothing but zeros from this byte on, for longer than weights have.
    Zeros(u64),
    /// Its SHA-256 is not the one that the download's records give.
    Hash {
        /// The recorded one.
        expected: String,
        /// The file's.
        found: String,
    },
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Waiting::Absent => write!(f, "not there yet"),
            Waiting::Marked(name) => write!(f, "still being written, says {}", crate::error::escaped(name)),
            Waiting::Fresh => write!(f, "written to a moment ago"),
            Waiting::Header(reason) => write!(f, "{reason}"),
            Waiting::Hole(offset) => write!(f, "a hole from byte {offset} on"),
            Waiting::Zeros(offset) => write!(f, "only zeros from byte {offset} on, as if not written yet"),
            Waiting::Hash { expected, found } => {
                let short = |hash: &str| hash.chars().take(12).collect::<String>();
                let (found, expected) = (short(found), short(expected));
                write!(
                    f,
                    "its SHA-256 begins {found}, the download's records say {expected}: remove it to download it again"
                )
            }
        }
    }
}

/// What is known of a file since it was last changed.
#[derive(Debug)]
struct Seen {
    bytes: u64,
    modified: Option<SystemTime>,
    /// What the download's own records say.
    recorded: Option<String>,
    since: Instant,
    /// The verdict on its contents, once it has been left alone.
    verdict: Option<Option<Waiting>>,
}

/// Watches files of a directory.
#[derive(Debug)]
pub struct Arrivals {
    directory: PathBuf,
    settle: Duration,
    seen: HashMap<String, Seen>,
}

impl Arrivals {
    /// Watches a directory; a file must have been left alone for `settle`.
    pub fn new(directory: &Path, settle: Duration) -> Arrivals {
        Arrivals { directory: directory.to_owned(), settle, seen: HashMap::new() }
    }

    /// What speaks against a file; nothing if it is whole.
    pub fn waiting(&mut self, name: &str) -> Option<Waiting> {
        let path = self.directory.join(name);
        let Ok(metadata) = fs::metadata(&path) else {
            self.seen.remove(name);
            return Some(Waiting::Absent);
        };
        if let Some(mark) = mark(&self.directory, name) {
            return Some(Waiting::Marked(mark));
        }
        let (bytes, modified) = (metadata.len(), metadata.modified().ok());
        let recorded = recorded_sha256(&self.directory, name);
        let fresh = || Seen { bytes, modified, recorded: recorded.clone(), since: Instant::now(), verdict: None };
        let seen = self.seen.entry(name.to_owned()).or_insert_with(fresh);
        if (seen.bytes, seen.modified, &seen.recorded) != (bytes, modified, &recorded) {
            *seen = fresh();
        }
        let age = modified.and_then(|time| SystemTime::now().duration_since(time).ok());
        if age.is_none_or(|age| age < self.settle) && seen.since.elapsed() < self.settle {
            return Some(Waiting::Fresh);
        }
        seen.verdict.get_or_insert_with(|| examine(&self.directory, name, recorded).err()).clone()
    }

    /// Whether the download's own records give the file's SHA-256, so that all of it must be read to know that it is whole.
    pub fn has_record(&self, name: &str) -> bool {
        recorded_sha256(&self.directory, name).is_some()
    }

    /// A name in the directory that says that some file is still being written.
    pub fn unfinished(&self) -> Option<String> {
        let unfinished = |directory: &Path| {
            let names = fs::read_dir(directory).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
            let mut names: Vec<String> = names.filter(|name| is_unfinished(name)).collect();
            names.sort();
            let name = names.into_iter().next()?;
            Some(format!("{} (remove it if nobody writes it)", directory.join(name).display()))
        };
        unfinished(&self.directory).or_else(|| unfinished(&self.directory.join(HUB_FOLDER)))
    }
}

/// Whether a name is that of a file that is still being written. Locks of Hugging Face's downloader stay behind.
fn is_unfinished(name: &str) -> bool {
    UNFINISHED_SUFFIXES.iter().any(|suffix| *suffix != ".lock" && name.ends_with(suffix))
}

/// A name beside a file that says that it is still being written.
fn mark(directory: &Path, name: &str) -> Option<String> {
    let beside =
        UNFINISHED_SUFFIXES.iter().filter(|suffix| **suffix != ".lock").map(|suffix| format!("{name}{suffix}"));
    beside.into_iter().find(|mark| directory.join(mark).symlink_metadata().is_ok())
}

/// Whether the contents are whole.
fn examine(directory: &Path, name: &str, recorded: Option<String>) -> Result<(), Waiting> {
    let path = directory.join(name);
    let reason = |faults: Faults| Waiting::Header(faults.iter().map(|f| f.kind.to_string()).next().unwrap_or_default());
    let file = SourceFile::open(&path).map_err(|fault| reason(fault.into()))?;
    if name.ends_with(".safetensors") {
        Header::read(&file).map_err(reason)?;
    } else if name.ends_with(".json") {
        check_json(&path).map_err(|fault| reason(fault.into()))?;
    }
    if let Some(expected) = recorded {
        let found = sha256(&file).map_err(|fault| reason(fault.into()))?;
        // A file that is what it should be has no unwritten hole.
        return if found == expected { Ok(()) } else { Err(Waiting::Hash { expected, found }) };
    }
    if let Some(offset) = file.first_hole() {
        return Err(Waiting::Hole(offset));
    }
    match first_zeros(&file).map_err(|fault| reason(fault.into()))? {
        Some(offset) => Err(Waiting::Zeros(offset)),
        None => Ok(()),
    }
}

/// Where a long run of zeros begins: space that was filled before it was written has no hole.
fn first_zeros(file: &SourceFile) -> Result<Option<u64>> {
    let mut buffer = vec![0; limits::ZEROS_BYTES];
    let mut offset = 0;
    while offset + buffer.len() as u64 <= file.bytes() {
        file.read_at(&mut buffer, offset)?;
        if buffer.iter().all(|&byte| byte == 0) {
            return Ok(Some(offset));
        }
        offset += buffer.len() as u64;
    }
    Ok(None)
}

/// A JSON file that parses is not cut off.
fn check_json(path: &Path) -> Result<()> {
    let bytes = read_small(path, limits::MAX_SMALL_FILE_BYTES)?;
    let parsed = serde_json::from_slice::<serde::de::IgnoredAny>(&bytes);
    parsed.map(drop).map_err(|e| Fault::new(Place::file(path), FaultKind::JsonSyntax { message: e.to_string() }))
}

fn sha256(file: &SourceFile) -> Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; limits::HASH_READ_BYTES.min(file.bytes() as usize)];
    let mut offset = 0;
    while offset < file.bytes() {
        let step = buffer.len().min((file.bytes() - offset) as usize);
        file.read_at(&mut buffer[..step], offset)?;
        hash.update(&buffer[..step]);
        offset += step as u64;
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The SHA-256 that the download's own records give a file.
fn recorded_sha256(directory: &Path, name: &str) -> Option<String> {
    hub_sha256(directory, name).or_else(|| listed_sha256(directory, name))
}

/// Hugging Face's downloader notes revision, etag (the SHA-256 of a large file) and the time at which it was done. A record
/// that is older than the file is of another one.
fn hub_sha256(directory: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(directory.join(HUB_FOLDER).join(format!("{name}.metadata"))).ok()?;
    let mut lines = text.lines().skip(1);
    let (etag, time) = (lines.next()?.trim().trim_matches('"'), lines.next()?.trim().parse::<f64>().ok()?);
    let modified = SourceFile::modified_nanoseconds(&directory.join(name)) as f64 / 1e9;
    (modified - 1.0 <= time).then(|| as_sha256(etag)).flatten()
}

fn listed_sha256(directory: &Path, name: &str) -> Option<String> {
    let text = CHECKSUM_LISTS.iter().find_map(|list| fs::read_to_string(directory.join(list)).ok())?;
    text.lines().find_map(|line| {
        let (hash, file) = line.split_once(' ')?;
        (file.trim_start().trim_start_matches('*').trim_start_matches("./") == name).then(|| as_sha256(hash)).flatten()
    })
}

fn as_sha256(text: &str) -> Option<String> {
    (text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit())).then(|| text.to_ascii_lowercase())
}
