//! THIRD_PARTY.md names every crate that the program is built of, with its licence and the texts that it carries.
//!
//! After a change of Cargo.lock: `COLICONV_WRITE_NOTICES=1 cargo test --test third_party`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Beginnings of the names of files that hold licences and notices.
const TEXTS: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];

/// What cargo knows of the crates for Linux: those for other systems need not be there.
fn metadata() -> Value {
    let arguments =
        ["metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", "x86_64-unknown-linux-gnu"];
    let mut command = Command::new(env!("CARGO"));
    let output = command.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The packages that the program is built of, sorted; those for tests alone, and the program itself, left out.
fn packages(metadata: &Value) -> Vec<&Value> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let nodes = metadata["resolve"]["nodes"].as_array().unwrap();
    let nodes: BTreeMap<String, &Value> = nodes.iter().map(|node| (text(&node["id"]), node)).collect();
    let root = text(&metadata["resolve"]["root"]);
    let (mut found, mut left) = (BTreeSet::new(), vec![root.clone()]);
    while let Some(id) = left.pop() {
        for dependency in nodes[&id]["deps"].as_array().unwrap() {
            let kinds = dependency["dep_kinds"].as_array().unwrap();
            let package = text(&dependency["pkg"]);
            if kinds.iter().any(|kind| kind["kind"].is_null()) && found.insert(package.clone()) {
                left.push(package);
            }
        }
    }
    let all = metadata["packages"].as_array().unwrap();
    let mut packages: Vec<&Value> = all.iter().filter(|package| found.contains(&text(&package["id"]))).collect();
    packages.sort_by_key(|package| (text(&package["name"]), text(&package["version"])));
    packages
}

/// The licence texts of a package's folder, by name.
fn texts(package: &Value) -> Vec<String> {
    let folder = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap();
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy().to_uppercase();
            path.is_file() && TEXTS.iter().any(|text| name.starts_with(text))
        })
        .collect();
    files.sort();
    let read = |path: &std::path::PathBuf| {
        let text = String::from_utf8_lossy(&fs::read(path).unwrap()).replace("\r\n", "\n");
        text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_matches('\n').to_owned()
    };
    files.iter().map(read).filter(|text| !text.is_empty()).collect()
}

#[test]
fn every_crate_is_named_with_its_licence() {
    let metadata = metadata();
    let packages = packages(&metadata);
    assert!(packages.len() > 50);
    let mut out = "# Third-party software\n\nThe program is built of these crates. Their texts follow, each once, with the crates \
                   that carry it.\n\n| crate | licence | source |\n|---|---|---|\n"
        .to_owned();
    let mut carried: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in &packages {
        let field = |key: &str| package[key].as_str().unwrap_or_default();
        let name = format!("{} {}", field("name"), field("version"));
        let license = field("license").replace('/', " OR ").replace("  ", " ");
        assert!(!license.is_empty(), "{name} has no licence");
        writeln!(out, "| {name} | {license} | {} |", field("repository")).unwrap();
        for text in texts(package) {
            let names = carried.entry(text).or_default();
            if !names.contains(&name) {
                names.push(name.clone());
            }
        }
    }
    let mut carried: Vec<(Vec<String>, String)> = carried.into_iter().map(|(text, names)| (names, text)).collect();
    carried.sort();
    for (names, text) in carried {
        let fence = "`".repeat(if text.contains("```") { 5 } else { 3 });
        write!(out, "\n## {}\n\n{fence}text\n{text}\n{fence}\n", names.join(", ")).unwrap();
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("THIRD_PARTY.md");
    if std::env::var_os("COLICONV_WRITE_NOTICES").is_some() {
        fs::write(&path, &out).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == out, "THIRD_PARTY.md is not that of Cargo.lock: run with COLICONV_WRITE_NOTICES=1");
}
