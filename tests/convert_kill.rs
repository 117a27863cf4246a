//! Processes that are killed, interrupted, or in each other's way.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use coliconv::io::is_working_name;
use insta::assert_snapshot;
use serde_json::json;
use support::convert::{G32, Place, contents, small};
use support::disk::Random;
use support::processes::{Running, names, temporary_files, until};
use support::synthetic::{Synthetic, small_config};

const ALL: [&str; 6] = ["--group-size", "32", "--mtp", "--indexer", "--threads", "2"];

/// How long to go on killing; `COLICONV_KILL_SECONDS` says otherwise.
const SECONDS: u64 = 3;

fn seconds() -> Duration {
    let given = std::env::var("COLICONV_KILL_SECONDS").ok();
    Duration::from_secs(given.map_or(SECONDS, |text| text.parse().expect("a number of seconds")))
}

/// A model whose conversion takes long enough to be hit anywhere, in six shards.
fn larger() -> Synthetic {
    let mut config = small_config();
    for (key, value) in json!({"hidden_size": 480, "intermediate_size": 1608, "moe_intermediate_size": 1048,
        "vocab_size": 3010, "q_lora_rank": 1128})
    .as_object()
    .unwrap()
    {
        config[key] = value.clone();
    }
    Synthetic::new(config).shards(6)
}

/// A place with a checkpoint, the container that one run makes of it, and how long that took.
fn reference(synthetic: &Synthetic) -> (Place, BTreeMap<PathBuf, Vec<u8>>, Duration) {
    let mut place = Place::made(synthetic);
    let container = std::mem::replace(&mut place.container, place.root.path().join("reference"));
    let started = Instant::now();
    place.convert(&ALL);
    let took = started.elapsed();
    let reference = contents(&place.container).unwrap();
    place.container = container;
    (place, reference, took)
}

/// No file is half under its final name.
fn check_unharmed(place: &Place, reference: &BTreeMap<PathBuf, Vec<u8>>, when: &str) {
    for (name, bytes) in contents(&place.container).unwrap_or_default() {
        let whole = is_working_name(&name.to_string_lossy()) || reference.get(&name) == Some(&bytes);
        assert!(whole, "{when}: {} is not what it should be", name.display());
    }
}

fn random_time(random: &mut Random, most: Duration) -> Duration {
    most.mul_f64(random.below(1_000_000) as f64 / 1e6)
}

#[test]
fn killed_at_random_until_done() {
    let (place, reference, took) = reference(&larger());
    let (mut random, started) = (Random(std::process::id().into()), Instant::now());
    println!("a run takes {took:?}, seed {}", random.0);
    let (mut rounds, mut kills) = (0, 0);
    while rounds == 0 || started.elapsed() < seconds() {
        rounds += 1;
        loop {
            let running = place.start(&ALL);
            std::thread::sleep(random_time(&mut random, took));
            let ended = running.kill();
            if ended.code == Some(0) {
                break;
            }
            assert_eq!(ended.code, None, "round {rounds}: {}", ended.stderr);
            kills += 1;
            check_unharmed(&place, &reference, &format!("round {rounds}"));
        }
        assert!(contents(&place.container).unwrap() == reference, "round {rounds} made other bytes");
        fs::remove_dir_all(&place.container).unwrap();
    }
    println!("{rounds} rounds, {kills} kills, no difference");
}

#[test]
fn parts_killed_at_random_until_done() {
    let (place, reference, took) = reference(&larger());
    let (mut random, started) = (Random(std::process::id().into()), Instant::now());
    let (mut rounds, mut kills) = (0, 0);
    while rounds == 0 || started.elapsed() < seconds() {
        rounds += 1;
        let of = 2 + random.below(3);
        let start = |number: usize| place.start(&[&ALL[..], &["--part", &format!("{}/{of}", number + 1)]].concat());
        let mut parts: Vec<Option<Running>> = (0..of).map(|number| Some(start(number))).collect();
        while parts.iter().any(Option::is_some) {
            std::thread::sleep(random_time(&mut random, took / 2));
            let victim = random.below(of);
            for (number, part) in parts.iter_mut().enumerate() {
                let Some(mut running) = part.take() else { continue };
                if !running.has_ended() && number != victim {
                    *part = Some(running);
                    continue;
                }
                let ended = running.kill();
                match ended.code {
                    Some(0) => {}
                    None => {
                        kills += 1;
                        *part = Some(start(number));
                    }
                    Some(code) => panic!("round {rounds}, part {number} of {of}: exit {code}: {}", ended.stderr),
                }
            }
        }
        check_unharmed(&place, &reference, &format!("round {rounds}"));
        let found = contents(&place.container).unwrap();
        let names = names(&place.container);
        assert!(found == reference, "round {rounds}, {of} parts: other bytes or names: {names:?}");
        fs::remove_dir_all(&place.container).unwrap();
    }
    println!("{rounds} rounds, {kills} kills, no difference");
}

#[test]
fn interrupted_between_two_blocks() {
    let (place, reference, _) = reference(&larger());
    let mut told = Vec::new();
    for _ in 0..20 {
        let mut running = place.start(&ALL);
        until("a temporary file", || !temporary_files(&place.container).is_empty() || running.has_ended());
        running.interrupt();
        let ended = running.end();
        assert_eq!(temporary_files(&place.container), Vec::<String>::new());
        check_unharmed(&place, &reference, "after Ctrl-C");
        if ended.code == Some(0) {
            break;
        }
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        let error = ended.stderr.find("error: ").unwrap_or_default();
        told.push(place.redacted(&ended.stderr.as_bytes()[error..]));
    }
    place.convert(&ALL);
    assert!(contents(&place.container).unwrap() == reference);
    assert_snapshot!(told.first().expect("it was interrupted once"));
}

/// A process that holds its lock for as long as it runs: it waits for a shard that never arrives.
fn waiting(place: &Place, arguments: &[&str]) -> Running {
    let before = names(&place.container).len();
    let mut running = place.start(&[&G32[..], &["--follow"], arguments].concat());
    until("the lock and a finished file", || {
        assert!(!running.has_ended());
        let names = names(&place.container);
        names.iter().any(|name| name.ends_with(".lock")) && names.len() > before + 2
    });
    std::thread::sleep(Duration::from_millis(100));
    running
}

/// The small model without its last shard, which is kept beside it.
fn without_last() -> (Place, PathBuf, PathBuf) {
    let place = Place::of(&small());
    let last = place.source.join("model-00003-of-00003.safetensors");
    let aside = place.root.path().join("aside");
    fs::rename(&last, &aside).unwrap();
    (place, last, aside)
}

#[test]
fn locks_are_those_of_living_processes() {
    let mut told = String::new();
    let (place, last, aside) = without_last();
    let held = waiting(&place, &[]);
    fs::copy(&aside, &last).unwrap();
    let mut tell = |title: &str, place: &Place, arguments: &[&str]| {
        // One that is let in would wait for ever.
        let output = place.command(&[&G32, arguments].concat()).timeout(Duration::from_secs(30)).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{title}");
        told += &format!("## {title}\n{}\n", place.redacted(&output.stderr));
    };
    fs::remove_file(&last).unwrap();
    tell("a whole run beside another", &place, &["--follow"]);
    tell("a part beside a whole run", &place, &["--follow", "--part", "1/2"]);
    tell("--finish beside a whole run", &place, &["--allow-incomplete", "--finish"]);
    held.kill();
    fs::rename(&aside, &last).unwrap();
    place.convert(&G32);
    let whole = contents(&place.container).unwrap();
    assert!(whole.keys().all(|name| !is_working_name(&name.to_string_lossy())), "{:?}", names(&place.container));

    let (place, last, aside) = without_last();
    let one = waiting(&place, &["--part", "1/2"]);
    tell("the same part twice", &place, &["--follow", "--part", "1/2"]);
    tell("a whole run beside a part", &place, &["--follow"]);
    tell("parts of another division", &place, &["--follow", "--part", "2/3"]);
    fs::copy(&aside, &last).unwrap();
    place.convert(&[&G32[..], &["--part", "2/2"]].concat());
    one.kill();
    place.convert(&G32);
    assert_eq!(
        contents(&place.container).unwrap().keys().collect::<Vec<_>>(),
        whole.keys().collect::<Vec<_>>(),
        "a whole run takes over"
    );
    assert_snapshot!(told);
}

/// Who removes a lock that is held lets two runs in: the first one sees it and stops.
#[test]
fn a_removed_lock_stops_its_run() {
    let (place, last, aside) = without_last();
    let held = waiting(&place, &[]);
    fs::remove_file(place.container.join(".coliconv.lock")).unwrap();
    fs::rename(&aside, &last).unwrap();
    let ended = held.end();
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    place.convert(&G32);
    assert_snapshot!(place.redacted(&ended.stderr.as_bytes()[ended.stderr.find("error: ").unwrap()..]));
}
