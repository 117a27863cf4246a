//! Every file and directory of `fixtures/bad` is reported as its row in a table says, and with a message that a person can
//! act on; everything in `fixtures/odd` is accepted and listed.
//!
//! The files are made by `cargo run --example make_bad_files`. A row is the name and what must be reported of it, one text a
//! finding: severity, kind, file, tensor. Notes are not in the tables but for odd files. A file without a row, or a row
//! without a file, fails. The messages are in `tests/snapshots`: they are to be read when they change.

#[path = "bad_files/checkpoints.rs"]
mod checkpoints;
#[path = "bad_files/containers.rs"]
mod containers;
#[path = "bad_files/declared.rs"]
mod declared;
#[path = "bad_files/headers.rs"]
mod headers;
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use coliconv::checkpoint::{Allowed, Checkpoint};
use coliconv::container::reader::{Found, Survey};
use coliconv::error::{Fault, FaultKind, Faults, Severity, escaped};
use coliconv::header::Header;
use coliconv::io::SourceFile;
use coliconv::payload::{check_head, findings, scan};
use coliconv::roles::Pass;
use coliconv::weights::ContainerRows;
use support::bad;

/// Name of a file or directory, and its findings.
pub type Row = (&'static str, &'static [&'static str]);

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// The names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Every file below a directory with its contents.
fn tree(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for name in names(directory) {
        let path = directory.join(name);
        if path.is_dir() {
            files.extend(tree(&path));
        } else {
            files.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    files
}

// ---- the ways to meet a file -----------------------------------------------------------------------------------------

fn errors(faults: Faults) -> Vec<Found> {
    faults.into_vec().into_iter().map(|fault| (Severity::Error, fault)).collect()
}

/// One file's header.
fn read_header(path: &Path) -> Vec<Found> {
    match SourceFile::open(path).map_err(Faults::from).and_then(|file| Header::read(&file)) {
        Ok(header) => {
            let notes = header.misaligned(path).into_iter().map(|fault| (Severity::Note, fault));
            notes.chain(header.odd_names(path).into_iter().map(|fault| (Severity::Warning, fault))).collect()
        }
        Err(faults) => errors(faults),
    }
}

/// A checkpoint, opened for every pass.
fn open_checkpoint(directory: &Path) -> Vec<Found> {
    match Checkpoint::open(directory, &Pass::ALL, Allowed::default()) {
        Ok(checkpoint) => {
            let severity = |fault: &Fault| match *fault.kind {
                FaultKind::PassAbsent { .. } | FaultKind::Misaligned { .. } => Severity::Note,
                _ => Severity::Warning,
            };
            checkpoint.warnings.into_iter().map(|fault| (severity(&fault), fault)).collect()
        }
        Err(faults) => errors(faults),
    }
}

/// A container: headers and declarations, then every byte of its weights.
fn survey_container(directory: &Path) -> Vec<Found> {
    let mut survey = Survey::read(directory).unwrap_or_else(|fault| panic!("{fault}"));
    let mut found = std::mem::take(&mut survey.findings);
    found.extend(check_head(&survey));
    for (name, weight) in &survey.weights {
        let Some(format) = weight.format else { continue };
        let place = coliconv::error::Place::tensor(survey.files[weight.file].file.path(), name.clone());
        match ContainerRows::new(&survey, weight).and_then(|rows| scan(&rows)) {
            Ok(scan) => found.extend(findings(&scan, format, &place)),
            Err(fault) => found.push((Severity::Error, fault)),
        }
    }
    found.extend(support::checksums::verify(&survey));
    found
}

// ---- comparing with the tables ---------------------------------------------------------------------------------------

/// A finding as it stands in a table: severity, kind, file below `root` (`.` for itself), tensor.
fn cell((severity, fault): &Found, root: &Path) -> String {
    let mut cell = format!("{} {}", severity.name(), fault.kind.name());
    if let Some(file) = &fault.place.file {
        let file = file.strip_prefix(root).unwrap_or(file).to_string_lossy();
        cell += &format!(" {}", if file.is_empty() { ".".into() } else { escaped(&file).to_string() });
    }
    if let Some(tensor) = &fault.place.tensor {
        cell.push(' ');
        cell.extend(tensor.to_string().chars().take(60));
    }
    cell
}

/// The findings without notes, sorted.
fn cells(found: &[Found], root: &Path) -> Vec<String> {
    let mut cells: Vec<String> =
        found.iter().filter(|(severity, _)| *severity != Severity::Note).map(|found| cell(found, root)).collect();
    cells.sort();
    cells
}

/// What is told of a case, for a person to read: the line and the hint of each finding, paths relative.
fn told(name: &str, found: &[Found], root: &Path) -> String {
    let mut text = format!("{name}\n");
    for (severity, fault) in found.iter().filter(|(severity, _)| *severity != Severity::Note) {
        let line = fault.to_string().replace(&format!("{}/", root.display()), "");
        let line = line.replace(&root.display().to_string(), ".");
        text += &format!("  {}: {line}\n", severity.name());
        if let Some(hint) = fault.hint() {
            text += &format!("    hint: {hint}\n");
        }
    }
    text
}

/// Meets every case of a folder in one way and compares with a table. Returns what was told.
fn check(folder: &Path, table: &[Row], meet: impl Fn(&Path) -> Vec<Found>) -> String {
    let rows: BTreeMap<&str, &[&str]> = table.iter().copied().collect();
    assert_eq!(rows.len(), table.len(), "a name has two rows");
    let names = names(folder);
    let without_file: Vec<&&str> = rows.keys().filter(|name| !names.iter().any(|n| n == **name)).collect();
    assert!(without_file.is_empty(), "rows without a file: {without_file:?}");
    let (mut all, mut wrong) = (String::new(), String::new());
    for name in &names {
        let path = folder.join(name);
        let found = meet(&path);
        let cells = cells(&found, &path);
        let mut expected = rows.get(name.as_str()).map_or(Vec::new(), |cells| cells.to_vec());
        expected.sort_unstable();
        if cells != expected || !rows.contains_key(name.as_str()) {
            wrong += &format!("    ({name:?}, &{cells:?}),\n");
        }
        all += &told(name, &found, if path.is_dir() { &path } else { folder });
    }
    assert!(wrong.is_empty(), "in {}, found instead:\n{wrong}", folder.display());
    all
}

// ---- tests -----------------------------------------------------------------------------------------------------------

#[test]
fn the_committed_files_are_those_of_the_generator() {
    let made = tempfile::tempdir().unwrap();
    bad::write_groups(&bad::groups(), &made.path().join("bad"));
    bad::write_cases(&bad::odd(), &made.path().join("odd"));
    for folder in ["bad", "odd"] {
        let relative = |root: &Path| -> BTreeMap<PathBuf, Vec<u8>> {
            let files = tree(&root.join(folder)).into_iter();
            files.map(|(path, bytes)| (path.strip_prefix(root).unwrap().to_owned(), bytes)).collect()
        };
        let (committed, made) = (relative(&fixtures()), relative(made.path()));
        assert_eq!(committed.keys().collect::<Vec<_>>(), made.keys().collect::<Vec<_>>());
        let differing: Vec<_> =
            committed.iter().filter(|(path, bytes)| made[*path] != **bytes).map(|(p, _)| p).collect();
        assert!(differing.is_empty(), "run `cargo run --example make_bad_files`: {differing:?} differ");
    }
    let folders: Vec<&str> = bad::groups().iter().map(|group| group.name).collect();
    let mut committed = names(&fixtures().join("bad"));
    committed.retain(|name| !folders.contains(&name.as_str()));
    assert_eq!(committed, [""; 0], "folders without a group");
}

#[test]
fn headers_are_refused() {
    insta::assert_snapshot!("headers", check(&fixtures().join("bad/header"), headers::BAD, read_header));
}

#[test]
fn odd_files_are_accepted_and_listed() {
    let mut listed = String::new();
    for (name, expected) in headers::ODD {
        let path = fixtures().join("odd").join(name);
        let found = read_header(&path);
        let cells: Vec<String> = found.iter().map(|found| cell(found, &path)).collect();
        assert_eq!(cells, *expected, "{name}");
        let header = Header::read(&SourceFile::open(&path).unwrap()).unwrap();
        listed += &format!("{name}\n");
        for t in header.tensors() {
            listed += &format!("  {} {} {} at {}, {} bytes\n", t.name, t.dtype, t.shape, t.offset, t.bytes);
        }
    }
    let mut rows: Vec<&str> = headers::ODD.iter().map(|row| row.0).collect();
    rows.sort_unstable();
    assert_eq!(rows, names(&fixtures().join("odd")));
    insta::assert_snapshot!("odd", listed);
}

#[test]
fn indexes_are_refused() {
    let told = check(&fixtures().join("bad/index"), checkpoints::INDEX, open_checkpoint);
    insta::assert_snapshot!("index", told);
}

#[test]
fn containers_are_refused() {
    let tables: [(&str, &[Row]); 4] = [
        ("census", containers::CENSUS),
        ("container", containers::BYTES),
        ("stamps", declared::STAMPS),
        ("manifest", declared::MANIFEST),
    ];
    for (group, table) in tables {
        let told = check(&fixtures().join("bad").join(group), table, survey_container);
        insta::assert_snapshot!(group, told);
    }
}
