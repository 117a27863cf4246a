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
use coliconv::config::CONFIG_FILE;
use coliconv::error::{Fault, FaultKind, Faults, Severity, escaped};
use coliconv::header::Header;
use coliconv::inspect::{Query, inspect};
use coliconv::io::SourceFile;
use coliconv::progress::Silent;
use coliconv::report::Finding;
use coliconv::roles::Pass;
use coliconv::verify::{Level, Options, TokenOptions, verify};
use serde_json::json;
use support::bad::{self, Model};

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

fn errors(faults: Faults) -> Vec<Finding> {
    faults.iter().map(|fault| Finding::new(Severity::Error, fault)).collect()
}

/// One file's header.
fn read_header(path: &Path) -> Vec<Finding> {
    match SourceFile::open(path).map_err(Faults::from).and_then(|file| Header::read(&file)) {
        Ok(header) => {
            let notes = header.misaligned(path).into_iter().map(|fault| Finding::new(Severity::Note, &fault));
            let names = header.odd_names(path).into_iter().map(|fault| Finding::new(Severity::Warning, &fault));
            notes.chain(names).collect()
        }
        Err(faults) => errors(faults),
    }
}

/// A checkpoint, opened for every pass.
fn open_checkpoint(directory: &Path) -> Vec<Finding> {
    match Checkpoint::open(directory, &Pass::ALL, Allowed::default()) {
        Ok(checkpoint) => {
            let severity = |fault: &Fault| match *fault.kind {
                FaultKind::PassAbsent { .. } | FaultKind::Misaligned { .. } => Severity::Note,
                _ => Severity::Warning,
            };
            checkpoint.warnings.iter().map(|fault| Finding::new(severity(fault), fault)).collect()
        }
        Err(faults) => errors(faults),
    }
}

/// A container: headers and what is declared, then every byte of its weights.
fn verify_container(directory: &Path) -> Vec<Finding> {
    let options = Options { level: Level::Payload, source: None, threads: 1, tokens: TokenOptions::default() };
    let report = verify(directory, &options, &Silent).unwrap_or_else(|faults| panic!("{faults}"));
    let failed = report.findings.iter().any(|finding| finding.severity == Severity::Error);
    assert_eq!(report.verdict.name() == "fail", failed, "{}", directory.display());
    report.findings
}

// ---- comparing with the tables ---------------------------------------------------------------------------------------

/// A finding as it stands in a table: severity, kind, file below `root` (`.` for itself), tensor.
fn cell(finding: &Finding, root: &Path) -> String {
    let mut cell = format!("{} {}", finding.severity.name(), finding.kind);
    if let Some(file) = &finding.file {
        let file = Path::new(file).strip_prefix(root).unwrap_or(Path::new(file)).to_string_lossy().into_owned();
        cell += &format!(" {}", if file.is_empty() { ".".to_owned() } else { escaped(&file).to_string() });
    }
    if let Some(tensor) = &finding.tensor {
        cell.push(' ');
        cell.extend(escaped(tensor).to_string().chars().take(60));
    }
    cell
}

/// The findings without notes, sorted.
fn cells(found: &[Finding], root: &Path) -> Vec<String> {
    let without_notes = found.iter().filter(|finding| finding.severity != Severity::Note);
    let mut cells: Vec<String> = without_notes.map(|finding| cell(finding, root)).collect();
    cells.sort();
    cells
}

/// What is told of a case, for a person to read: the line and the hint of each finding, paths relative.
fn told(name: &str, found: &[Finding], root: &Path) -> String {
    let mut text = format!("{name}\n");
    for finding in found.iter().filter(|finding| finding.severity != Severity::Note) {
        let line = finding.line().replace(&format!("{}/", root.display()), "");
        let line = line.replace(&root.display().to_string(), ".");
        text += &format!("  {}: {line}\n", finding.severity.name());
        if let Some(hint) = &finding.hint {
            text += &format!("    hint: {hint}\n");
        }
    }
    text
}

/// Meets every case of a folder in one way and compares with a table. Returns what was told.
fn check(folder: &Path, table: &[Row], meet: impl Fn(&Path) -> Vec<Finding>) -> String {
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
    bad::write_seeds(&made.path().join("seeds"));
    for folder in ["bad", "odd", "seeds"] {
        let relative = |root: &Path| -> BTreeMap<PathBuf, Vec<u8>> {
            let files = tree(&root.join(folder)).into_iter();
            files.map(|(path, bytes)| (path.strip_prefix(root).unwrap().to_owned(), bytes)).collect()
        };
        let at = if folder == "seeds" { fixtures().with_file_name("fuzz") } else { fixtures() };
        let (committed, made) = (relative(&at), relative(made.path()));
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

/// Copies every file of a folder into `place`, one after the other, and looks at `directory` each time.
fn in_the_place_of(
    place: PathBuf,
    directory: &Path,
    look: fn(&Path) -> Vec<Finding>,
) -> impl Fn(&Path) -> Vec<Finding> {
    move |path| {
        fs::copy(path, &place).unwrap();
        let mut found = look(directory);
        // As a table has it: files below the directory.
        for finding in &mut found {
            let below = |file: &String| Some(Path::new(file).strip_prefix(directory).ok()?.to_str()?.to_owned());
            finding.file = finding.file.as_ref().map(|file| below(file).unwrap_or(file.clone()));
        }
        found
    }
}

#[test]
fn configs_are_refused() {
    let folder = fixtures().join("bad/config");
    let made = tempfile::tempdir().unwrap();
    let directory = made.path().join("container");
    Model::container(json!({})).store(&directory);
    let meet = in_the_place_of(directory.join(CONFIG_FILE), &directory, verify_container);
    insta::assert_snapshot!("config", check(&folder, checkpoints::CONFIG, meet));
    let directory = made.path().join("checkpoint");
    Model::checkpoint(json!({})).store(&directory);
    let meet = in_the_place_of(directory.join(CONFIG_FILE), &directory, open_checkpoint);
    let differs = |name: &str| checkpoints::CONFIG_OF_CHECKPOINT.iter().find(|row| row.0 == name);
    let table: Vec<Row> = checkpoints::CONFIG.iter().map(|row| *differs(row.0).unwrap_or(row)).collect();
    check(&folder, &table, meet);
}

/// The errors of `found` in a file, with `.` for the file, sorted.
fn errors_of(found: &[Finding], file: &Path) -> Vec<String> {
    let of_file = |finding: &&Finding| finding.file.as_deref() == file.to_str() && finding.severity == Severity::Error;
    let mut cells: Vec<String> = found.iter().filter(of_file).map(|found| cell(found, file)).collect();
    cells.sort();
    cells
}

#[test]
fn headers_are_refused_in_containers_and_checkpoints() {
    let made = tempfile::tempdir().unwrap();
    let (container, checkpoint) = (made.path().join("container"), made.path().join("checkpoint"));
    Model::container(json!({})).store(&container);
    Model::checkpoint(json!({})).store(&checkpoint);
    let places = [container.join("out-00001.safetensors"), checkpoint.join("extra.safetensors")];
    for (name, expected) in headers::BAD {
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        for place in &places {
            fs::copy(fixtures().join("bad/header").join(name), place).unwrap();
        }
        assert_eq!(errors_of(&verify_container(&container), &places[0]), expected, "{name} in a container");
        assert_eq!(errors_of(&open_checkpoint(&checkpoint), &places[1]), expected, "{name} in a checkpoint");
        for place in places.iter().flat_map(|place| [place, place.parent().unwrap()]) {
            let report = inspect(place, &Query::default(), &|_, _, _| ()).unwrap();
            let errors = report.findings.iter().filter(|finding| finding.severity == Severity::Error);
            let mut kinds: Vec<&str> = errors.map(|finding| finding.kind.as_str()).collect();
            kinds.sort_unstable();
            let of_cell = |cell: &&'static str| cell.split(' ').nth(1).unwrap();
            assert_eq!(
                kinds,
                expected.iter().map(of_cell).collect::<Vec<_>>(),
                "{name} inspected as {}",
                place.display()
            );
        }
    }
}

#[test]
fn large_files_are_refused() {
    let made = tempfile::tempdir().unwrap();
    bad::write_groups(&bad::large(), made.path());
    check(&made.path().join("header"), headers::LARGE, read_header);
    for name in names(&made.path().join("stamps")) {
        let directory = made.path().join("stamps").join(&name);
        let found = verify_container(&directory);
        let errors: Vec<&Finding> = found.iter().filter(|finding| finding.severity == Severity::Error).collect();
        let [only] = errors[..] else { panic!("{name}: {} errors", errors.len()) };
        assert_eq!(cell(only, &directory), "error engine-limit .");
        let message = "the container would break a limit of the colibri engine: 4097 stamps, at most 4096";
        assert_eq!(only.message, message);
    }
}

#[test]
fn what_the_bad_files_are_made_of_is_good() {
    let made = tempfile::tempdir().unwrap();
    let directory = |name: &str| made.path().join(name);
    Model::container(json!({"num_nextn_predict_layers": 1})).with_indexer().store(&directory("container"));
    assert_eq!(cells(&verify_container(&directory("container")), made.path()), [""; 0]);
    bad::write_manifest(&directory("container"));
    assert_eq!(cells(&verify_container(&directory("container")), made.path()), [""; 0]);
    Model::checkpoint(json!({})).store(&directory("checkpoint"));
    assert_eq!(cells(&open_checkpoint(&directory("checkpoint")), made.path()), [""; 0]);
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
        let told = check(&fixtures().join("bad").join(group), table, verify_container);
        insta::assert_snapshot!(group, told);
    }
}
