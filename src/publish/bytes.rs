//! What the files of a container are now: hashed, whatever any report or manifest says.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::container::manifest::{FileRecord, hex};
use crate::error::Result;
use crate::io::SourceFile;
use crate::limits;
use crate::progress::Progress;
use crate::report::{PublishFile, Storage};

/// A file as its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hashed {
    /// Name, size, SHA-256.
    pub record: FileRecord,
    /// Git's id of the file; only for files that the Hub may keep in git.
    pub git_blob_id: Option<String>,
}

impl Hashed {
    /// Of a text that is in memory.
    pub fn of(name: &str, bytes: &[u8]) -> Hashed {
        let mut hashes = Hashes::new(bytes.len() as u64);
        hashes.update(bytes);
        hashes.finish(name, bytes.len() as u64)
    }

    /// Reads a file from its first byte to its last.
    pub fn read(directory: &Path, name: &str, progress: &dyn Progress) -> Result<Hashed> {
        let file = SourceFile::open(&directory.join(name))?;
        file.advise_sequential();
        let mut hashes = Hashes::new(file.bytes());
        let mut buffer = vec![0; limits::VERIFY_READ_BYTES];
        let mut offset = 0;
        while offset < file.bytes() {
            let step = (file.bytes() - offset).min(buffer.len() as u64) as usize;
            file.read_at(&mut buffer[..step], offset)?;
            hashes.update(&buffer[..step]);
            offset += step as u64;
            progress.advance(step as u64, 0);
        }
        Ok(hashes.finish(name, offset))
    }

    /// The file as one of an upload.
    pub fn upload(&self) -> PublishFile {
        let FileRecord { name, bytes, sha256 } = self.record.clone();
        let storage = storage(&name, bytes);
        let git_blob_id = self.git_blob_id.clone().filter(|_| storage == Storage::Git);
        PublishFile { name, bytes, sha256, storage, git_blob_id }
    }
}

/// Names that go to LFS whatever their size: the patterns of the .gitattributes with which the Hub begins a model's
/// repository (1519 bytes, git blob a6344aac8c09253b3b630fb776ae94478aa0275b), but for its one of folders.
const LFS_PATTERNS: [&str; 34] = [
    "*.7z",
    "*.arrow",
    "*.bin",
    "*.bz2",
    "*.ckpt",
    "*.ftz",
    "*.gz",
    "*.h5",
    "*.joblib",
    "*.lfs.*",
    "*.mlmodel",
    "*.model",
    "*.msgpack",
    "*.npy",
    "*.npz",
    "*.onnx",
    "*.ot",
    "*.parquet",
    "*.pb",
    "*.pickle",
    "*.pkl",
    "*.pt",
    "*.pth",
    "*.rar",
    "*.safetensors",
    "*.tar.*",
    "*.tar",
    "*.tflite",
    "*.tgz",
    "*.wasm",
    "*.xz",
    "*.zip",
    "*.zst",
    "*tfevents*",
];

/// Where the Hub keeps a file: by the attributes that every repository begins with, and by its size.
fn storage(name: &str, bytes: u64) -> Storage {
    if LFS_PATTERNS.iter().any(|pattern| matches(pattern, name)) || bytes > limits::MAX_GIT_BYTES {
        Storage::Lfs
    } else {
        Storage::Git
    }
}

/// Whether a name matches a pattern whose only special character is `*`, which begins it and may end it.
fn matches(pattern: &str, name: &str) -> bool {
    let ending = pattern.strip_prefix('*').expect("every pattern begins with an asterisk");
    match ending.strip_suffix('*') {
        Some(within) => name.contains(within),
        None => name.ends_with(ending),
    }
}

/// Reads several files at once, with more workers than threads, so that the disk does not wait for hashing. Results are in
/// the order of the names.
pub fn read_all(directory: &Path, names: &[String], progress: &dyn Progress) -> Vec<Result<Hashed>> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let take = || names.get(next.fetch_add(1, Ordering::Relaxed));
        let read = |name: &String| {
            progress.file(name);
            (name.clone(), Hashed::read(directory, name, progress))
        };
        std::iter::from_fn(take).map(read).collect::<Vec<(String, Result<Hashed>)>>()
    };
    let workers = (limits::HASH_WORKERS * rayon::current_num_threads()).min(names.len());
    let mut read: HashMap<String, Result<Hashed>> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        handles.into_iter().flat_map(|handle| handle.join().expect("a worker does not panic")).collect()
    });
    names.iter().map(|name| read.remove(name).expect("every name is taken once")).collect()
}

/// Both hashes of one pass.
struct Hashes {
    sha256: Sha256,
    git: Option<Sha1>,
}

impl Hashes {
    fn new(bytes: u64) -> Hashes {
        let git = (bytes <= limits::MAX_GIT_BYTES).then(|| Sha1::new_with_prefix(format!("blob {bytes}\0")));
        Hashes { sha256: Sha256::new(), git }
    }

    fn update(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
        if let Some(git) = &mut self.git {
            git.update(bytes);
        }
    }

    fn finish(self, name: &str, bytes: u64) -> Hashed {
        let sha256 = hex(&self.sha256.finalize());
        let record = FileRecord { name: name.to_owned(), bytes, sha256 };
        Hashed { record, git_blob_id: self.git.map(|git| hex(&git.finalize())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn hashes_are_those_of_sha256sum_and_git() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("a"), "hello\n").unwrap();
        let read = Hashed::read(directory.path(), "a", &Silent).unwrap();
        assert_eq!(read.record.sha256, "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03");
        assert_eq!(read.git_blob_id.as_deref(), Some("ce013625030ba8dba906f756967f9e9ca394464a"));
        assert_eq!(read, Hashed::of("a", b"hello\n"));
        let empty = Hashed::of("e", b"");
        assert_eq!(empty.git_blob_id.as_deref(), Some("e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"));
    }

    #[test]
    fn the_patterns_are_those_of_a_new_repository() {
        // Written as the Hub writes them they are its file, whose id everybody can see in a listing.
        let mut lines: Vec<String> = LFS_PATTERNS.iter().map(|pattern| pattern.to_string()).collect();
        let at = 1 + lines.iter().position(|pattern| pattern == "*.safetensors").unwrap();
        lines.insert(at, "saved_model/**/*".to_owned());
        let text: String = lines.iter().map(|line| format!("{line} filter=lfs diff=lfs merge=lfs -text\n")).collect();
        let attributes = Hashed::of(".gitattributes", text.as_bytes());
        assert_eq!(attributes.record.bytes, 1519);
        assert_eq!(attributes.git_blob_id.as_deref(), Some("a6344aac8c09253b3b630fb776ae94478aa0275b"));
    }

    #[test]
    fn large_files_and_weights_go_to_lfs() {
        assert_eq!(storage("a.safetensors", 1), Storage::Lfs);
        for name in ["tokenizer.model", "a.lfs.json", "b.tar.x", "events.out.tfevents.1", ".zip", "imatrix.npy"] {
            assert_eq!(storage(name, 1), Storage::Lfs, "{name}");
        }
        for name in ["model", "a.models", "tar.gzip", "a.PT", "pt", "config.json", "chat_template.jinja"] {
            assert_eq!(storage(name, 1), Storage::Git, "{name}");
        }
        assert_eq!(storage("tokenizer.json", limits::MAX_GIT_BYTES), Storage::Git);
        assert_eq!(storage("tokenizer.json", limits::MAX_GIT_BYTES + 1), Storage::Lfs);
    }
}
