//! What transformers made of the fixtures, against containers of them and against the checkpoints themselves.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use coliconv::convert::Options;
use coliconv::recipe::{GroupSize, Settings};
use coliconv::report::{CheckStatus, Severity, VerifyReport};
use coliconv::roles::Pass;
use coliconv::verify::TokenOptions;
use serde_json::Value;

use super::support::containers::{container, copy, fixture};
use super::{assert_passes, edited, expected, kinds, status, verified};

/// How far a log-probability may be from transformers' f32 one.
const MAX_LOGPROB_DIFF: f64 = 1e-4;

/// The reference files of a fixture, by the container that they are for.
fn files(checkpoint: &str) -> BTreeMap<String, Vec<PathBuf>> {
    let mut files: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    let mut paths: Vec<PathBuf> = fs::read_dir(expected(checkpoint)).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let of = name.split_once('-').and_then(|(what, rest)| match what {
            "tokens" | "mtp" => Some(rest),
            "dsa" => rest.split_once('-').map(|(_, rest)| rest),
            _ => None,
        });
        if let Some(of) = of {
            files.entry(of.to_owned()).or_default().push(path);
        }
    }
    files
}

/// The options that the flags of a container in bare.json stand for.
fn flagged(checkpoint: &str, name: &str) -> Options {
    let table: Value = serde_json::from_slice(&fs::read(expected(checkpoint).join("bare.json")).unwrap()).unwrap();
    let mut options = Options { passes: vec![Pass::Main], ..Options::default() };
    let Settings { group_size, ebits, xbits, .. } = &mut options.settings;
    let mut flags = table[name]["flags"].as_array().unwrap().iter().map(|flag| flag.as_str().unwrap());
    while let Some(flag) = flags.next() {
        let mut value = || flags.next().unwrap();
        match flag {
            "--group-size" => *group_size = Some(value().parse::<GroupSize>().unwrap()),
            "--ebits" => *ebits = Some(value().parse().unwrap()),
            "--xbits" => *xbits = Some(value().parse().unwrap()),
            "--mtp" => options.passes.push(Pass::Mtp),
            "--indexer" => options.passes.push(Pass::Indexer),
            "--allow-ambiguous" => options.allowed.ambiguous = true,
            "--bare" => options.bare = true,
            other => panic!("{other}"),
        }
    }
    options
}

/// Fails unless every position of every reference matches.
fn assert_agrees(report: &VerifyReport, files: &[PathBuf]) {
    assert_passes(report);
    let mut entries = report.tokens.iter();
    for path in files {
        let file: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        for (number, reference) in file["references"].as_array().unwrap().iter().enumerate() {
            let entry = entries.next().unwrap();
            assert_eq!((Path::new(&entry.reference), entry.number), (path.as_path(), number as u64));
            assert_eq!((&*entry.device, &*entry.backend, &*entry.mode), ("cpu", "cpu", "exact"));
            assert_eq!(entry.gpu, None);
            let length = |key: &str| reference[key].as_array().map(|list| list.len() as u64);
            let forced = entry.teacher_forced.as_ref().map(|m| (m.matched, m.near_tie, m.total));
            assert_eq!(forced, length("tf_pred").map(|total| (total, 0, total)), "{path:?} {number}");
            let own = (reference["greedy"] != false).then(|| length("tf_pred")).flatten();
            let own = own.map(|total| total - length("prompt_ids").unwrap());
            assert_eq!(entry.greedy.as_ref().map(|m| (m.matched, m.total)), own.map(|total| (total, total)));
            assert_eq!(entry.max_abs_logprob_diff.is_some(), length("logprob_next").is_some());
            assert!(entry.max_abs_logprob_diff.is_none_or(|apart| apart <= MAX_LOGPROB_DIFF), "{entry:?}");
            let number_of = |key: &str| reference[key].as_u64();
            let drafts = length("draft_pred")
                .map(|total| (total, total, number_of("positions").unwrap(), number_of("hits_over_greedy").unwrap()));
            assert_eq!(entry.mtp.as_ref().map(|m| (m.matched, m.total, m.proposed, m.accepted)), drafts);
        }
    }
    assert_eq!(entries.next(), None);
}

/// Every reference against the bare container that it is for, and the first of each file against one with a manifest.
fn every_container_agrees(checkpoint: &str, count: usize) {
    let files = files(checkpoint);
    assert_eq!(files.values().flatten().count(), count);
    for (name, files) in files {
        println!("{checkpoint} {name}");
        let all: Vec<&PathBuf> = files.iter().collect();
        if name == "source" {
            assert_agrees(&verified(&fixture(checkpoint), &all), &files);
            continue;
        }
        let bare = container(checkpoint, &name, || flagged(checkpoint, &name));
        let report = verified(bare.path(), &all);
        assert_agrees(&report, &files);
        assert_eq!(status(&report, "checksums"), CheckStatus::Skipped);
        assert!(kinds(&report, Severity::Warning).contains("reference-anonymous"));
        let with_manifest = container(checkpoint, &format!("{name} with a manifest"), || Options {
            bare: false,
            ..flagged(checkpoint, &name)
        });
        let report = verified(with_manifest.path(), &all[..1]);
        assert_agrees(&report, &files[..1]);
        assert_eq!(status(&report, "checksums"), CheckStatus::Pass);
    }
}

#[test]
fn every_reference_of_nano() {
    every_container_agrees("nano", 9);
}

#[test]
fn every_reference_of_tiny() {
    every_container_agrees("tiny", 4);
}

#[test]
fn rows_of_fewer_bits_are_not_the_source() {
    // int8 says nearly what the source says: the two have references of their own.
    let int8 = container("nano", "int8", || flagged("nano", "int8"));
    let (_directory, reference) = edited("tokens-source.json", |_| {});
    let entry = &verified(int8.path(), &[&reference]).tokens[0];
    let forced = entry.teacher_forced.as_ref().unwrap();
    assert!(forced.matched * 100 >= forced.total * 90, "{entry:?}");
    assert!(entry.max_abs_logprob_diff.unwrap() > 10.0 * MAX_LOGPROB_DIFF);
}

#[test]
fn a_source_has_the_parts_that_the_container_has() {
    // Of the MTP layer of tiny some lies beside the main layers, and some in a shard that is not opened for these.
    let settings = Settings { group_size: Some(GroupSize::ROW), ..Settings::default() };
    let main = container("tiny", "row", || Options { settings, ..Options::default() });
    let source = Some(fixture("tiny"));
    let with_source = coliconv::verify::Options { source, ..super::options(TokenOptions::default()) };
    let report = super::try_verify(main.path(), &with_source).unwrap_or_else(|faults| panic!("{faults}"));
    assert_passes(&report);
    assert!(report.source_agreement.is_some());
}

#[test]
fn a_checkpoint_that_moved_is_the_same_model() {
    let moved = copy(&fixture("nano"));
    let (_directory, reference) = edited("tokens-source.json", |_| {});
    assert_passes(&verified(moved.path(), &[&reference]));
}
