//! Parts of one conversion: however many, in whatever order, at once or one after the other, they make one container.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use coliconv::checkpoint::Allowed;
use coliconv::convert::Options;
use coliconv::part::Part;
use coliconv::report::ConvertReport;
use coliconv::roles::Pass;
use insta::assert_snapshot;
use support::convert::{G32, Place, contents, groups_of_32, small, text};
use support::crash::{all_passes, parts, tiny};
use support::processes::names;
use support::shards::Shards;

type Files = BTreeMap<PathBuf, Vec<u8>>;

/// A place, and the container that one run makes there.
fn reference(shards: &Shards, options: &Options) -> (Place, Files) {
    let mut place = Place::in_memory();
    shards.store(&place.source);
    let container = std::mem::replace(&mut place.container, place.root.path().join("reference"));
    place.run(options.clone()).unwrap();
    let reference = contents(&place.container).unwrap();
    place.container = container;
    (place, reference)
}

fn check_same(place: &Place, reference: &Files, when: &str) {
    let found = contents(&place.container).unwrap();
    assert_eq!(found.keys().collect::<Vec<_>>(), reference.keys().collect::<Vec<_>>(), "{when}");
    for (name, bytes) in reference {
        let told = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(5000)]).into_owned();
        assert!(found[name] == *bytes, "{when}: {}:\n{}\n{}", name.display(), told(&found[name]), told(bytes));
    }
}

fn run(place: &Place, options: &Options) -> ConvertReport {
    place.run(options.clone()).unwrap_or_else(|faults| panic!("part {:?}: {faults}", options.part))
}

/// What tells whether a file was written again.
fn written(path: &Path) -> (u64, i64, i64) {
    let metadata = fs::metadata(path).unwrap();
    (metadata.ino(), metadata.mtime(), metadata.mtime_nsec())
}

#[test]
fn one_after_the_other_in_any_order() {
    for (scales_apart, bare) in [(false, false), (true, false), (true, true)] {
        let options = Options { bare, ..all_passes() };
        let (place, reference) = reference(&tiny(scales_apart), &options);
        for of in [1, 2, 3, 9] {
            let when = format!("{of} parts, scales apart: {scales_apart}, bare: {bare}");
            let mut commands = parts(&options, of);
            commands.reverse();
            let complete: Vec<_> = commands.iter().map(|part| run(&place, part).complete.unwrap()).collect();
            assert!(complete[of - 1] && (of > 4 || !complete[..of - 1].contains(&true)), "{when}: {complete:?}");
            check_same(&place, &reference, &when);
            fs::remove_dir_all(&place.container).unwrap();
        }
    }
}

#[test]
fn several_at_once() {
    let (place, reference) = reference(&tiny(true), &all_passes());
    for of in [2, 3, 5] {
        for round in 0..6 {
            let commands = parts(&all_passes(), of);
            let complete = std::thread::scope(|scope| {
                let running: Vec<_> = commands.iter().map(|part| scope.spawn(|| run(&place, part).complete)).collect();
                running.into_iter().map(|part| part.join().unwrap()).collect::<Vec<_>>()
            });
            assert!(complete.contains(&Some(true)), "{of} parts");
            check_same(&place, &reference, &format!("{of} parts at once, round {round}"));
            fs::remove_dir_all(&place.container).unwrap();
        }
    }
}

/// Jobs of an array are started again when a machine fails, also those that had ended.
#[test]
fn finished_parts_run_again_beside_others() {
    let (place, reference) = reference(&tiny(false), &all_passes());
    let commands = parts(&all_passes(), 3);
    for round in 0..6 {
        run(&place, &commands[0]);
        std::thread::scope(|scope| {
            for part in &commands {
                scope.spawn(|| (0..3).for_each(|_| drop(run(&place, part))));
            }
        });
        check_same(&place, &reference, &format!("round {round}"));
        fs::remove_dir_all(&place.container).unwrap();
    }
}

#[test]
fn the_manifest_is_written_once() {
    let (place, reference) = reference(&tiny(false), &all_passes());
    let commands = parts(&all_passes(), 2);
    commands.iter().for_each(|part| drop(run(&place, part)));
    let manifest = place.container.join("coliconv.manifest.json");
    let before = written(&manifest);
    for again in [&commands[1], &commands[0], &all_passes(), &Options { finish: true, ..all_passes() }] {
        assert_eq!(run(&place, again).complete, Some(true));
        assert_eq!(written(&manifest), before, "written again by {:?}", again.part);
    }
    check_same(&place, &reference, "after all");
}

#[test]
fn finishing_too_early_says_what_is_missing() {
    let (place, reference) = reference(&tiny(false), &all_passes());
    let finish = [&G32[..], &["--mtp", "--indexer", "--finish"]].concat();
    let mut told = String::new();
    let mut tell = |title: &str| told += &format!("## {title}\n{}\n", place.refused(&finish));
    tell("nothing there");
    let commands = parts(&all_passes(), 3);
    run(&place, &commands[1]);
    tell("one of three parts");
    run(&place, &commands[0]);
    fs::remove_file(place.container.join("out-00000.safetensors")).unwrap();
    tell("two, but a file is gone again");
    run(&place, &commands[0]);
    // The last one dies when all its files are there.
    run(&place, &commands[2]);
    let manifest = place.container.join("coliconv.manifest.json");
    assert!(manifest.exists());
    fs::remove_file(place.container.join("out-00000.safetensors")).unwrap();
    tell("a file of a finished container is gone");
    assert_snapshot!(told);
    run(&place, &commands[0]);
    check_same(&place, &reference, "a part writes it again");
}

#[test]
fn other_parameters_and_divisions_are_refused() {
    let (place, _) = reference(&tiny(false), &all_passes());
    run(&place, &parts(&all_passes(), 3)[0]);
    let mut told = String::new();
    for (title, arguments) in [
        ("other bits in one part", &["--up-bits", "8", "--part", "2/3"][..]),
        ("bare", &["--bare", "--part", "2/3"]),
        ("another division", &["--part", "2/4"]),
        ("a pass less, when the others are begun", &["--part", "2/3", "--only", "main"]),
        ("--finish of a part", &["--part", "2/3", "--finish"]),
    ] {
        let passes: &[&str] = if arguments.contains(&"--only") { &[] } else { &["--mtp", "--indexer"] };
        told += &format!("## {title}\n{}\n", place.refused(&[&G32, passes, arguments].concat()));
    }
    for part in ["0/3", "4/3", "1", "1/0", "one/two", "1/99999"] {
        let output = place.output(&[&G32[..], &["--part", part]].concat());
        assert_eq!(output.status.code(), Some(2), "{part}");
        told += &format!("## --part {part}\n{}\n", text(&output.stderr).lines().next().unwrap());
    }
    assert_snapshot!(told);
}

#[test]
fn a_whole_run_takes_over() {
    for bare in [false, true] {
        let options = Options { bare, ..all_passes() };
        let (place, reference) = reference(&tiny(false), &options);
        run(&place, &parts(&options, 3)[1]);
        run(&place, &options);
        check_same(&place, &reference, "a whole run takes over");
        // And the parts find nothing to do.
        for part in parts(&options, 2) {
            run(&place, &part);
            check_same(&place, &reference, "a part after all");
        }
    }
}

#[test]
fn a_pass_is_added_by_parts() {
    let (place, reference) = reference(&tiny(true), &all_passes());
    let only = |pass| Options { passes: vec![pass], ..groups_of_32() };
    for (first, of) in [(only(Pass::Main), 2), (Options { part: None, ..only(Pass::Mtp) }, 3)] {
        if first.passes == [Pass::Main] {
            parts(&first, of).iter().for_each(|part| drop(run(&place, part)));
        } else {
            run(&place, &first);
        }
        for pass in Pass::ALL.into_iter().filter(|pass| !first.passes.contains(pass)) {
            for part in parts(&only(pass), of) {
                run(&place, &part);
            }
        }
        check_same(&place, &reference, &format!("{} first", first.passes[0].name()));
        fs::remove_dir_all(&place.container).unwrap();
    }
}

#[test]
fn what_parts_accepted_is_in_the_manifest() {
    let mut shards = small();
    shards.tensor_mut("model.layers.0.self_attn.o_proj.weight").set(0, &[0x7f]);
    shards.tensor_mut("lm_head.weight").set(0, &[0xc0, 0x7f]);
    shards.tensor_mut("model.layers.2.mlp.experts.1.up_proj.weight_scale_inv").set(0, &[0, 0, 0xc0, 0x7f]);
    let allowed = Allowed { non_finite: true, ..Allowed::default() };
    let options = Options { allowed, ..all_passes() };
    let (place, reference) = reference(&shards, &options);
    let commands = parts(&options, 3);
    commands.iter().rev().for_each(|part| drop(run(&place, part)));
    check_same(&place, &reference, "parts");
    assert_eq!(Part::new(4, 3), None);
    assert!(names(&place.container).iter().all(|name| !name.starts_with('.')));
}
