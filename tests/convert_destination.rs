//! What a conversion does with a destination: nothing existing is overwritten or mixed, and finished work is kept.

mod support;

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use coliconv::checkpoint::Allowed;
use coliconv::container::manifest::Manifest;
use coliconv::convert::{Job, Options, Silent};
use coliconv::recipe::{Rule, Settings};
use coliconv::roles::Pass;
use insta::assert_snapshot;
use support::convert::{G32, Place, contents, groups_of_32, small, text, weights};
use support::shards::edit_file;

/// A finished container of the small model.
fn finished(arguments: &[&str]) -> Place {
    let place = Place::of(&small());
    place.convert(&[&G32, arguments].concat());
    place
}

fn modified(directory: &Path) -> Vec<(std::path::PathBuf, SystemTime)> {
    let weights = weights(&contents(directory).unwrap());
    weights
        .into_keys()
        .map(|name| (name.clone(), fs::metadata(directory.join(name)).unwrap().modified().unwrap()))
        .collect()
}

#[test]
fn a_source_is_never_the_destination() {
    let mut told = String::new();
    let mut tell = |title: &str, place: &Place| told += &format!("## {title}\n{}\n", place.refused(&G32));
    let mut link = Place::of(&small());
    link.container = link.source.clone();
    tell("the same path", &link);
    link.container = link.source.join(".").join("..").join("checkpoint/");
    tell("the same directory by another path", &link);
    link.container = link.root.path().join("link");
    std::os::unix::fs::symlink(&link.source, &link.container).unwrap();
    tell("a link to it", &link);
    fs::remove_file(&link.container).unwrap();
    fs::create_dir(&link.container).unwrap();
    let shard = "model-00002-of-00003.safetensors";
    fs::hard_link(link.source.join(shard), link.container.join("out-00000.safetensors")).unwrap();
    tell("a directory with a hard link to a shard", &link);
    fs::remove_file(link.container.join("out-00000.safetensors")).unwrap();
    std::os::unix::fs::symlink(link.source.join(shard), link.container.join("x")).unwrap();
    tell("a directory with a link to a shard", &link);
    assert_snapshot!(told);
}

#[test]
fn nothing_foreign_is_touched() {
    let mut told = String::new();
    let mut tell = |title: &str, place: &Place| told += &format!("## {title}\n{}\n", place.refused(&G32));
    let place = Place::of(&small());
    fs::write(&place.container, "mine").unwrap();
    tell("a file", &place);
    fs::remove_file(&place.container).unwrap();
    fs::create_dir(&place.container).unwrap();
    fs::write(place.container.join("notes\u{1b}[31m.txt"), "mine").unwrap();
    fs::create_dir(place.container.join("folder")).unwrap();
    tell("a directory with other things", &place);
    fs::remove_file(place.container.join("notes\u{1b}[31m.txt")).unwrap();
    fs::remove_dir(place.container.join("folder")).unwrap();
    fs::copy(place.source.join("config.json"), place.container.join("config.json")).unwrap();
    tell("a directory with a config.json, though it is the right one", &place);
    let mut inside = finished(&[]);
    fs::write(inside.container.join("out-00007.safetensors"), "mine").unwrap();
    fs::write(inside.container.join("notes.txt"), "mine").unwrap();
    tell("a finished container with other files", &inside);
    fs::remove_file(inside.container.join("out-00007.safetensors")).unwrap();
    inside.convert(&G32);
    assert_eq!(fs::read(inside.container.join("notes.txt")).unwrap(), b"mine");
    edit_file(&inside.container.join("tokenizer.json"), |bytes| bytes.push(b'\n'));
    tell("a finished container with a changed small file", &inside);
    inside.container = inside.root.path().join("no/such/parent/../container");
    inside.convert(&G32);
    let place = Place::of(&small());
    fs::write(place.root.path().join("file"), "mine").unwrap();
    let below = Place { container: place.root.path().join("file/container"), ..place };
    tell("a directory below a file", &below);
    assert_snapshot!(told);
}

#[test]
fn other_parameters_and_sources_are_refused() {
    let mut told = String::new();
    let place = finished(&["--mtp"]);
    let mut tell = |title: &str, place: &Place, arguments: &[&str]| {
        told += &format!("## {title}\n{}\n", place.refused(arguments));
    };
    tell("another group size", &place, &["--group-size", "16"]);
    tell("other bits of two classes", &place, &["--group-size", "32", "--up-bits", "8", "--io-bits", "6"]);
    tell("bare", &place, &["--group-size", "32", "--bare"]);
    let recipe = place.root.path().join("recipe.json");
    let rule = r#"{"rules": [{"tensor": "model.layers.3.eh_proj.weight", "format": "f32"}]}"#;
    fs::write(&recipe, rule).unwrap();
    tell("a rule for the MTP head", &place, &["--only", "mtp", "--recipe", recipe.to_str().unwrap()]);
    let shard = place.source.join("model-00001-of-00003.safetensors");
    edit_file(&shard, |bytes| *bytes.last_mut().unwrap() ^= 1);
    tell("a shard written again", &place, &["--group-size", "32", "--mtp"]);
    let mut other = small();
    other.remove("model.layers.0.self_attn.indexer.wk.weight_scale_inv");
    other.tensor_mut("model.layers.0.self_attn.indexer.wk.weight").dtype = coliconv::tensor::Dtype::BF16;
    other.tensor_mut("model.layers.0.self_attn.indexer.wk.weight").bytes.extend([0; 18 * 96]);
    let other = Place::of(&other);
    tell(
        "another checkpoint",
        &Place { container: place.container.clone(), ..other },
        &["--group-size", "32", "--mtp"],
    );
    let bare = finished(&["--bare"]);
    tell("not bare after bare", &bare, &G32);
    let told = told.replace(place.root.path().to_str().unwrap(), "[ROOT]");
    assert_snapshot!(without_times(&told));
}

#[test]
fn the_same_command_again_verifies_and_changes_nothing() {
    for arguments in [&["--mtp", "--indexer"][..], &["--bare"]] {
        let place = finished(arguments);
        let before = (contents(&place.container), modified(&place.container));
        let again = place.json(&[&G32, arguments].concat());
        assert!((contents(&place.container), modified(&place.container)) == before, "{arguments:?}");
        assert_eq!(again["files"].as_array().unwrap().len(), weights(before.0.as_ref().unwrap()).len());
        let output = place.output(&[&G32, arguments].concat());
        assert!(text(&output.stdout).contains("of them finished by an earlier run\n"));
        assert!(text(&output.stdout).contains("disk needed: 0 (0 B)"));
    }
}

#[test]
fn damaged_output_is_told_and_written_anew_once_it_is_gone() {
    let place = finished(&["--mtp"]);
    let arguments = ["--group-size", "32", "--mtp"];
    let (whole, path) = (contents(&place.container), place.container.join("out-00001.safetensors"));
    let mut told = String::new();
    for (title, damage) in [
        ("a flipped bit", (|bytes| *bytes.last_mut().unwrap() ^= 1) as fn(&mut Vec<u8>)),
        ("a byte less", |bytes| bytes.truncate(bytes.len() - 1)),
        ("zeros in the last 4 KiB", |bytes| bytes.iter_mut().rev().take(4096).for_each(|byte| *byte = 0)),
    ] {
        edit_file(&path, damage);
        told += &format!("## {title}\n{}\n", place.refused(&arguments));
        assert!(
            !place.container.join(".coliconv-progress.json").exists(),
            "the container is no less finished than before"
        );
        fs::remove_file(&path).unwrap();
        let plan = text(&place.output(&[&arguments[..], &["--dry-run"]].concat()).stdout);
        assert!(!plan.contains("disk needed: 0 "), "{plan}");
        place.convert(&arguments);
        assert!(contents(&place.container) == whole, "{title}");
    }
    // A file of a pass that is not run again.
    edit_file(&place.container.join("out-mtp-00000.safetensors"), |bytes| bytes.truncate(bytes.len() - 1));
    told += &format!("## a byte less in another pass\n{}\n", place.refused(&G32));
    edit_file(&place.container.join("coliconv.manifest.json"), |bytes| bytes.truncate(1000));
    told += &format!("## half a manifest\n{}\n", place.refused(&G32));
    let told = without_hashes(&told);
    assert_snapshot!(told);
}

/// Times are those of the run: numbers of nine digits and more.
fn without_times(text: &str) -> String {
    let parts = text.split_inclusive(|c: char| !c.is_ascii_digit()).map(|part| {
        let digits = part.trim_end_matches(|c: char| !c.is_ascii_digit());
        if digits.len() >= 9 { part.replace(digits, "[TIME]") } else { part.to_owned() }
    });
    parts.collect()
}

/// Hashes depend on every byte of the made-up data: what matters is that they are told.
fn without_hashes(text: &str) -> String {
    let is_hash = |word: &str| word.len() == 64 && word.bytes().all(|b| b.is_ascii_hexdigit());
    let word = |word: &str| if is_hash(word.trim_end_matches(',')) { "[SHA-256]".to_owned() } else { word.to_owned() };
    text.split(' ').map(|w| w.split('\n').map(word).collect::<Vec<_>>().join("\n")).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_pass_added_later_makes_the_container_of_one_run() {
    for (first, later) in [(&[][..], ["mtp", "indexer"]), (&["--only", "mtp"][..], ["main", "indexer"])] {
        let mut place = finished(first);
        for pass in later {
            let before = (weights(&contents(&place.container).unwrap()), modified(&place.container));
            // What is said about other passes does not matter to this one.
            let bits: &[&str] = if pass == "main" { &G32 } else { &["--ebits", "8"] };
            place.convert(&[&["--only", pass], bits].concat());
            let after = contents(&place.container).unwrap();
            for (name, bytes) in &before.0 {
                assert!(after[name] == *bytes, "{pass} changed {}", name.display());
            }
            assert!(before.1.iter().all(|old| modified(&place.container).contains(old)), "{pass} touched a file");
        }
        let several = contents(&place.container).unwrap();
        place.container = place.root.path().join("one run");
        place.convert(&["--group-size", "32", "--mtp", "--indexer"]);
        let one = contents(&place.container).unwrap();
        assert_eq!(several.keys().collect::<Vec<_>>(), one.keys().collect::<Vec<_>>());
        for (name, bytes) in &one {
            let told = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            assert!(several[name] == *bytes, "{}:\n{}\n{}", name.display(), told(&several[name]), told(bytes));
        }
    }
}

#[test]
fn settings_and_warnings_of_earlier_passes_stay_in_the_manifest() {
    let mut shards = small();
    shards.tensor_mut("model.layers.0.self_attn.o_proj.weight").set(0, &[0x7f]);
    shards.tensor_mut("model.layers.3.eh_proj.weight").set(0, &[0xff]);
    let place = Place::of(&shards);
    let rule = |tensor: &str| Rule { tensor: tensor.into(), format: "f32".into(), group_size: None };
    let with = |rules: &[&str], passes: &[Pass]| {
        let mut options = groups_of_32();
        options.settings.rules = rules.iter().map(|tensor| rule(tensor)).collect();
        options.allowed = Allowed { non_finite: true, ..Allowed::default() };
        Options { passes: passes.to_vec(), ..options }
    };
    place.run(with(&["lm_head.weight"], &[Pass::Main])).unwrap();
    let settings = Settings { ebits: Some(8), ..with(&["*.eh_proj.weight"], &[]).settings };
    let report = place.run(Options { settings, ..with(&[], &[Pass::Mtp]) }).unwrap();
    let tensors = |warnings: &[coliconv::report::Finding]| -> Vec<String> {
        warnings.iter().filter_map(|warning| warning.tensor.clone()).collect()
    };
    let mut told = tensors(&report.warnings);
    told.sort();
    let both = ["model.layers.0.self_attn.o_proj.weight", "model.layers.3.eh_proj.weight"];
    assert_eq!(told, both);
    let manifest = Manifest::read(&place.container).unwrap().unwrap();
    assert_eq!(tensors(&manifest.warnings), both);
    assert_eq!(manifest.recipe, with(&["lm_head.weight", "*.eh_proj.weight"], &[]).settings);
    // Running again says it again, though nothing is converted.
    let report = place.run(with(&["lm_head.weight"], &[Pass::Main])).unwrap();
    assert_eq!(tensors(&report.warnings), both);
    assert_eq!(Manifest::read(&place.container).unwrap().unwrap(), manifest);
}

#[test]
fn statistics_of_finished_files_are_measured_again() {
    let place = Place::of(&small());
    let stats = || Options { stats: true, ..groups_of_32() };
    let first = place.run(stats()).unwrap();
    let again = place.run(stats()).unwrap();
    assert_eq!(first.classes, again.classes);
    assert!(first.classes.iter().any(|class| class.sqnr_db.is_some()));
}

#[test]
fn what_another_run_did_since_the_plan_is_seen() {
    let place = Place::of(&small());
    let prepare = |options| Job::prepare(&place.source, &place.container, options).unwrap();
    let other_settings = Settings { ebits: Some(8), ..groups_of_32().settings };
    let (first, same) = (prepare(groups_of_32()), prepare(groups_of_32()));
    let other = prepare(Options { settings: other_settings, ..Options::default() });
    first.run(&Silent).unwrap();
    let before = (contents(&place.container), modified(&place.container));
    let fault = other.run(&Silent).unwrap_err();
    assert!(fault.iter().all(|fault| fault.kind.name() == "other-parameters"), "{fault}");
    same.run(&Silent).unwrap();
    assert!((contents(&place.container), modified(&place.container)) == before);
}

#[test]
fn a_failed_run_leaves_no_directory() {
    let mut shards = small();
    shards.tensor_mut("model.norm.weight").set(3, &[0xc0, 0x7f]);
    shards.retain(|name| !name.contains("layers.3."));
    let all: Vec<(String, _)> = shards.files.values().flat_map(|shard| shard.tensors.clone()).collect();
    shards.files.clear();
    all.into_iter().for_each(|(name, tensor)| shards.add("model.safetensors", &name, tensor));
    shards.without_index();
    let place = Place::of(&shards);
    let deep = Place { container: place.root.path().join("a/b/c"), ..place };
    let said = deep.refused(&G32);
    assert!(said.contains("tensor model.norm.weight: row 0, column 3 is NaN"), "{said}");
    assert!(!deep.root.path().join("a").exists());
    fs::create_dir_all(&deep.container).unwrap();
    deep.refused(&G32);
    assert!(deep.container.exists());
    let threads = deep.refused(&["--group-size", "32", "--threads", "100000000"]);
    assert!(threads.contains("expected a number up to 1024"), "{threads}");
}

#[test]
fn a_directory_is_locked_while_it_is_written() {
    let place = Place::of(&small());
    fs::create_dir(&place.container).unwrap();
    let held = coliconv::io::DirectoryLock::take(&place.container, &coliconv::io::Claim::Whole).unwrap();
    let said = place.refused(&G32);
    assert!(said.contains("another coliconv is working on this directory"), "{said}");
    drop(held);
    place.convert(&G32);
}
