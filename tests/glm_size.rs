//! A checkpoint as large as GLM-5.2, all holes: nothing about opening it may depend on the size of its data.

mod support;

use std::fs;
use std::path::Path;

use coliconv::checkpoint::{Allowed, Checkpoint};
use coliconv::config::IndexerType;
use coliconv::convert::{Job, Options, Verification};
use coliconv::roles::{Class, Pass};
use support::convert::Place;
use support::synthetic::{Made, Synthetic};

/// The checkpoint: 141 files of holes.
fn glm(directory: &Path) -> Made {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/glm-5.2/config.json");
    let config = serde_json::from_slice(&fs::read(config).unwrap()).unwrap();
    Synthetic::new(config).shards(141).mtp_indexer().holes().write(directory).unwrap()
}

#[test]
fn a_dry_run_predicts_the_known_sizes() {
    let place = Place::new();
    glm(&place.source);
    let gigabytes = |arguments: &[&str]| {
        let report = place.json(&[arguments, &["--dry-run"]].concat());
        let classes = report["classes"].as_array().unwrap();
        let payload: u64 = classes.iter().map(|class| class["output_bytes"].as_u64().unwrap()).sum();
        let files: u64 = report["files"].as_array().unwrap().iter().map(|file| file["bytes"].as_u64().unwrap()).sum();
        assert_eq!(report["output_bytes"], files);
        // Headers are small beside what they describe.
        assert!((payload..payload + 30_000_000).contains(&files));
        let experts = classes.iter().find(|class| class["class"] == "x").unwrap();
        assert_eq!(experts["tensors"], 57_600);
        (payload as f64 / 1e7).round() / 100.0
    };
    assert_eq!(gigabytes(&[]), 419.28);
    assert_eq!(gigabytes(&["--group-size", "64", "--mtp"]), 429.24);
    // Experts of 3 bits, the rest in groups of 64.
    assert_eq!(gigabytes(&["--xbits", "3"]), 328.69);
    assert!(!place.container.exists());
}

#[test]
fn a_verification_that_would_not_fit_is_refused_before_the_conversion() {
    let place = Place::new();
    glm(&place.source);
    let options = Options { passes: Pass::ALL.to_vec(), ..Options::default() };
    let job = Job::prepare(&place.source, &place.container, options.clone()).unwrap();
    let needed = |job: &Job| {
        let message = Verification::of(job, Some(1 << 30)).unwrap_err().kind.to_string();
        let number = message.split(' ').find_map(|word| word.parse::<u64>().ok());
        number.unwrap_or_else(|| panic!("{message}"))
    };
    // Of container and source, side by side, all but routed experts, which are read on demand.
    let both = needed(&job);
    assert!((30_000_000_000..60_000_000_000).contains(&both), "{both}");
    assert!(Verification::of(&job, Some(both)).is_ok() && Verification::of(&job, Some(both - 1)).is_err());
    // Without its source, once that is consumed.
    let job = Job::prepare(&place.source, &place.container, Options { consume: true, ..options }).unwrap();
    let alone = needed(&job);
    assert!(alone < both / 2, "{alone} of {both}");
}

#[test]
fn a_checkpoint_of_756_gigabytes_opens() {
    let directory = tempfile::tempdir().unwrap();
    let made = glm(directory.path());
    assert_eq!(made.shards, 141);
    assert_eq!((made.weights, made.entries), (59_585, 118_630));
    assert_eq!(made.tensor_bytes, 755_541_661_376);

    let checkpoint =
        Checkpoint::open(directory.path(), &Pass::ALL, Allowed::default()).unwrap_or_else(|faults| panic!("{faults}"));
    assert!(checkpoint.warnings.is_empty(), "{:?}", checkpoint.warnings);
    assert_eq!(checkpoint.shards.len(), 141);
    assert_eq!(checkpoint.shards.iter().map(|shard| shard.header.tensors().len()).sum::<usize>(), made.entries);
    let sizes: Vec<u64> = checkpoint.shards.iter().map(|shard| shard.file.bytes()).collect();
    assert_eq!(sizes.iter().sum::<u64>(), made.file_bytes);
    assert!((755_000_000_000..757_000_000_000).contains(&made.file_bytes), "{}", made.file_bytes);
    assert!(sizes.iter().all(|size| (5_000_000_000..6_000_000_000).contains(size)), "{sizes:?}");

    // The figures by which the model is known.
    let full = checkpoint.config.indexer_types.iter().filter(|kind| **kind == IndexerType::Full).count();
    assert_eq!(full, 21);
    let indexer_weights = checkpoint.weights(&[Pass::Indexer]).count();
    assert_eq!(indexer_weights, full * 5);
    let matrices = checkpoint.weights(&[Pass::Main, Pass::Mtp]).filter(|(_, role)| role.shape.matrix().is_some());
    assert_eq!(matrices.count(), 59_079);
    let experts = checkpoint.weights(&[Pass::Main]).filter(|(_, role)| role.class == Class::X);
    assert_eq!(experts.count(), 75 * 256 * 3);
}
