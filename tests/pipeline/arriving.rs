//! `convert.follow` and `convert.consume`: a source that arrives while it is converted, and goes when it is.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::{ALL_KEPT, Place, statuses};

fn weights(place: &Place, directory: &str) -> Vec<(String, Vec<u8>)> {
    let mut files = place.files(directory);
    files.retain(|(name, _)| name.ends_with(".safetensors"));
    files
}

#[test]
fn a_shard_that_arrives_late_is_waited_for() {
    let whole = Place::new();
    whole.passes();
    let place = Place::new();
    let shard = place.path("nano/model-00002-of-00003.safetensors");
    fs::rename(&shard, place.path("late")).unwrap();
    let (code, document) = place.run();
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &json!("shard-missing")), "without `follow` it is missing");
    let mut settings = Place::settings();
    settings["convert"]["follow"] = json!(true);
    place.store(&settings);
    let mut child = Command::new(assert_cmd::cargo::cargo_bin("coliconv"))
        .args(["pipeline", "--json"])
        .arg(place.path("pipeline.json"))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(child.try_wait().unwrap().is_none(), "it waits");
    fs::rename(place.path("late"), &shard).unwrap();
    let output = child.wait_with_output().unwrap();
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &document["verdict"]), (Some(0), &json!("pass")), "{document:#}");
    assert!(weights(&place, "out/nano-g64") == weights(&whole, "out/nano-g64"));
}

#[test]
fn a_source_that_is_consumed_leaves_a_published_container() {
    let place = Place::new();
    place.passes();
    let expected = weights(&place, "out/nano-g64");
    // The source was scored before; then it may go.
    let mut settings = Place::settings();
    settings["container"] = json!("out/again");
    settings["reports"] = json!("reports-again");
    settings["convert"]["consume"] = json!(true);
    settings["score"]["baseline"] = json!("reports/source");
    place.store(&settings);
    let document = place.passes();
    assert_eq!(
        statuses(&document),
        ["convert done", "verify done", "score-source skipped", "score done", "publish done"]
    );
    assert_eq!(document["convert"]["consumed"].as_array().unwrap().len(), 3);
    assert!(place.files("nano").iter().all(|(name, _)| !name.ends_with(".safetensors")), "the shards are gone");
    assert!(weights(&place, "out/again") == expected);
    // Again, without a source: everything is there.
    let document = place.passes();
    let mut kept = ALL_KEPT.map(str::to_owned);
    kept[2] = "score-source skipped".to_owned();
    assert_eq!(statuses(&document), kept);
}
