//! Containers of the committed checkpoints, made once a test program, and copies of them to be damaged.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::{Mutex, PoisonError};

use assert_cmd::Command;
use coliconv::checkpoint::weight_files;
use coliconv::convert::{Job, Options, Silent};
use coliconv::header::{Header, StoredTensor};
use coliconv::io::SourceFile;
use serde_json::Value;
use tempfile::TempDir;

use super::shards::edit_file;

/// A committed checkpoint.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// A copy of the container that `options` make of a committed checkpoint. `key` tells one set of options from another.
pub fn container(checkpoint: &str, key: &str, options: impl FnOnce() -> Options) -> TempDir {
    static MADE: Mutex<BTreeMap<String, TempDir>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let original = made.entry(format!("{checkpoint} {key}")).or_insert_with(|| {
        let directory = TempDir::new().unwrap();
        let job = Job::prepare(&fixture(checkpoint), directory.path(), options());
        job.and_then(|job| job.run(&Silent)).unwrap_or_else(|faults| panic!("{faults}"));
        directory
    });
    copy(original.path())
}

/// A copy of the files of a directory.
pub fn copy(directory: &Path) -> TempDir {
    let copy = TempDir::new().unwrap();
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file()) {
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

/// File and place of a tensor of a directory.
pub fn stored(directory: &Path, name: &str) -> (PathBuf, StoredTensor) {
    let found = weight_files(directory).unwrap().into_iter().find_map(|file| {
        let path = directory.join(file);
        let header = Header::read(&SourceFile::open(&path).unwrap()).unwrap();
        let tensor = header.tensors().iter().find(|tensor| tensor.name.as_str() == name)?.clone();
        Some((path, tensor))
    });
    found.unwrap_or_else(|| panic!("no tensor {name}"))
}

/// Changes the bytes of a tensor.
pub fn edit_tensor(directory: &Path, name: &str, edit: impl FnOnce(&mut [u8])) {
    let (path, tensor) = stored(directory, name);
    edit_file(&path, |bytes| edit(&mut bytes[tensor.offset as usize..][..tensor.bytes as usize]));
}

/// Sets element `index` of an F32 tensor.
pub fn set_f32(directory: &Path, name: &str, index: usize, value: f32) {
    edit_tensor(directory, name, |bytes| bytes[4 * index..][..4].copy_from_slice(&value.to_le_bytes()));
}

/// Exchanges the bytes of two tensors of the same size.
pub fn swap(directory: &Path, one: &str, other: &str) {
    let read = |name: &str| {
        let (path, tensor) = stored(directory, name);
        fs::read(path).unwrap()[tensor.offset as usize..][..tensor.bytes as usize].to_vec()
    };
    let (first, second) = (read(one), read(other));
    assert_ne!(first, second);
    edit_tensor(directory, one, |bytes| bytes.copy_from_slice(&second));
    edit_tensor(directory, other, |bytes| bytes.copy_from_slice(&first));
}

/// Runs the program.
pub fn run(arguments: &[&str], paths: &[&Path]) -> Output {
    let mut command = Command::cargo_bin("coliconv").unwrap();
    command.args(arguments).args(paths);
    command.output().unwrap()
}

/// Runs the program with `--json` and gives exit code and document.
pub fn run_json(arguments: &[&str], paths: &[&Path]) -> (i32, Value) {
    let output = run(&[&arguments[..1], &["--json", "--quiet"], &arguments[1..]].concat(), paths);
    let text = String::from_utf8(output.stdout).unwrap();
    let document = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    (output.status.code().unwrap(), document)
}

/// Fails unless the document is as `schemas/<command>.schema.json` says.
pub fn assert_valid(command: &str, document: &Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schemas").join(format!("{command}.schema.json"));
    let schema: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> = validator.iter_errors(document).map(|e| format!("{}: {e}", e.instance_path())).collect();
    assert_eq!(errors, [""; 0], "{command} --json");
}

/// Text with directories replaced by names, and durations and rates by letters.
pub fn redacted(text: &[u8], directories: &[(&Path, &str)]) -> String {
    let mut text = String::from_utf8(text.to_vec()).unwrap();
    for (directory, name) in directories {
        text = text.replace(directory.to_str().unwrap(), name);
    }
    let lines = text.lines().map(|line| match (line.find(" in "), line.find(" GB/s)")) {
        (Some(from), Some(to)) if from < to => format!("{} in TIME (RATE){}", &line[..from], &line[to + 6..]),
        _ => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n") + "\n"
}
