//! A conversion that dies or fails at any change of the file system is completed by the next one to the same bytes.

mod support;

use std::io::ErrorKind;

use coliconv::convert::Options;
use support::crash::{Case, End, all_passes, parts, tiny};
use support::disk::{Omit, Random};

const ENDS: [End; 4] = [End::Death, End::Torn, End::Failure(ErrorKind::StorageFull), End::Failure(ErrorKind::Other)];

fn bare() -> Options {
    Options { bare: true, ..all_passes() }
}

fn consuming() -> Options {
    Options { consume: true, ..all_passes() }
}

#[test]
fn a_whole_run_ends_anywhere() {
    Case::new(&tiny(false), vec![all_passes()]).sweep("whole", &ENDS, 3);
}

#[test]
fn a_bare_run_ends_anywhere() {
    Case::new(&tiny(false), vec![bare()]).sweep("bare", &ENDS, 10);
}

#[test]
fn a_run_that_consumes_ends_anywhere() {
    Case::new(&tiny(true), vec![consuming()]).sweep("consume", &ENDS, 10);
}

#[test]
fn parts_end_anywhere() {
    Case::new(&tiny(false), parts(&all_passes(), 3)).sweep("parts", &ENDS, 20);
}

#[test]
fn bare_parts_end_anywhere() {
    Case::new(&tiny(false), parts(&bare(), 2)).sweep("bare parts", &ENDS[..1], 20);
}

#[test]
fn parts_that_consume_end_anywhere() {
    Case::new(&tiny(true), parts(&consuming(), 2)).sweep("parts that consume", &ENDS[..1], 20);
}

#[test]
fn two_threads_end_anywhere() {
    let two = Options { threads: 2, ..all_passes() };
    Case::new(&tiny(false), vec![two]).sweep("two threads", &ENDS[1..3], 20);
}

#[test]
fn a_run_dies_twice() {
    let mut random = Random(11);
    for commands in [vec![all_passes()], vec![consuming()], parts(&consuming(), 2), parts(&bare(), 3)] {
        Case::new(&tiny(true), commands).die_twice(25, &mut random);
    }
}

/// The last part dies when its files are there and before it has made a container of all: `--finish` does that.
#[test]
fn the_last_part_dies_before_it_completes() {
    let case = Case::new(&tiny(false), parts(&all_passes(), 2));
    let kinds = case.changes();
    let last_write = kinds.iter().rposition(|&is_write| is_write).unwrap();
    case.run_until(last_write - 2, End::Death).unwrap_err();
    assert!(!case.place.container.join("coliconv.manifest.json").exists());
    let report = case.place.run(Options { finish: true, ..all_passes() }).unwrap();
    assert_eq!(report.complete, Some(true));
    case.check_finished("after --finish");
}

fn power_cut(title: &str, case: &Case, killed_at: Option<usize>) {
    println!("{title}");
    let wrong = case.cut_power(Omit::Nothing, killed_at, 1, 7);
    assert!(wrong.is_empty(), "{title}: {} went wrong, one: {}", wrong.len(), wrong[0]);
}

#[test]
fn the_power_fails_at_any_change() {
    power_cut("whole", &Case::new(&tiny(false), vec![all_passes()]), None);
    power_cut("bare", &Case::new(&tiny(false), vec![bare()]), None);
}

#[test]
fn the_power_fails_at_any_change_of_parts() {
    power_cut("parts", &Case::new(&tiny(false), parts(&all_passes(), 2)), None);
}

#[test]
fn the_power_fails_at_any_change_while_the_source_is_consumed() {
    power_cut("consume", &Case::new(&tiny(true), vec![consuming()]), None);
    power_cut("parts that consume", &Case::new(&tiny(true), parts(&consuming(), 2)), None);
}

/// What was not durable when a run was killed need not be durable when the next one goes on from it.
#[test]
fn the_power_fails_after_a_kill() {
    let mut random = Random(5);
    for commands in [vec![consuming()], parts(&consuming(), 2)] {
        let case = Case::new(&tiny(true), commands);
        let changes = case.changes().len();
        // The first one dies when the directory is made and its name is not yet durable.
        for killed_at in [1, 2 + random.below(changes - 2)] {
            power_cut(&format!("killed at change {killed_at}"), &case, Some(killed_at));
        }
    }
}

/// The test sees it when a sync is missing.
#[test]
fn a_missing_sync_would_be_noticed() {
    let case = Case::new(&tiny(true), vec![consuming()]);
    for omit in [Omit::Files("out-"), Omit::Files(".json"), Omit::Directories] {
        let wrong = case.cut_power(omit, None, 1, 7);
        println!("without {omit:?}: {} wrong, one: {:?}", wrong.len(), wrong.first());
        assert!(!wrong.is_empty(), "without {omit:?} nothing goes wrong");
    }
}
