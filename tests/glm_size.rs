//! A checkpoint as large as GLM-5.2, all holes: nothing about opening it may depend on the size of its data.

mod support;

use std::fs;
use std::path::Path;

use coliconv::checkpoint::{Allowed, Checkpoint};
use coliconv::config::IndexerType;
use coliconv::roles::{Class, Pass};
use support::synthetic::Synthetic;

#[test]
fn a_checkpoint_of_756_gigabytes_opens() {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/glm-5.2/config.json");
    let config = serde_json::from_slice(&fs::read(config).unwrap()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let made = Synthetic::new(config).shards(141).mtp_indexer().holes().write(directory.path()).unwrap();
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
