//! Passes: what is opened for them, and what adding one to a finished container leaves alone.

mod support;

use std::fs;

use coliconv::checkpoint::{Allowed, Checkpoint};
use coliconv::roles::Pass;
use support::convert::{G32, Place};
use support::synthetic::{Synthetic, small_config};

#[test]
fn a_pass_needs_no_other_shards_even_if_scales_lie_apart() {
    let place = Place::made(&Synthetic::new(small_config()).shards(6).scales_apart());
    let whole = Checkpoint::open(&place.source, &Pass::ALL, Allowed::default()).unwrap();
    assert_eq!(whole.shards.len(), 6);
    for pass in [Pass::Mtp, Pass::Indexer] {
        let checkpoint = Checkpoint::open(&place.source, &[pass], Allowed::default()).unwrap();
        let opened: Vec<&str> = checkpoint.shards.iter().map(|shard| shard.name.as_str()).collect();
        assert!((1..6).contains(&opened.len()), "{pass:?}: {opened:?}");
    }
}

#[test]
fn unrelated_shards_may_be_garbage_or_gone() {
    let place = Place::made(&Synthetic::new(small_config()).shards(6));
    let whole =
        Place { container: place.root.path().join("whole"), ..Place::made(&Synthetic::new(small_config()).shards(6)) };
    whole.convert(&["--group-size", "32", "--mtp"]);
    let checkpoint = Checkpoint::open(&place.source, &[Pass::Mtp], Allowed::default()).unwrap();
    let related: Vec<String> = checkpoint.shards.iter().map(|shard| shard.name.clone()).collect();
    let unrelated: Vec<String> =
        (1..=6).map(|n| format!("model-{n:05}-of-00006.safetensors")).filter(|name| !related.contains(name)).collect();
    assert!(unrelated.len() >= 2, "{related:?}");
    fs::write(place.source.join(&unrelated[0]), "garbage").unwrap();
    fs::remove_file(place.source.join(&unrelated[1])).unwrap();
    let output = place.output(&["--only", "mtp"]);
    let said = place.redacted(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains(&format!("{}: the index names this file, which is missing", unrelated[1])), "{said}");
    let head = "out-mtp-00000.safetensors";
    assert!(fs::read(place.container.join(head)).unwrap() == fs::read(whole.container.join(head)).unwrap());
    // The same shards are needed for the main pass.
    fs::remove_dir_all(&place.container).unwrap();
    assert!(place.refused(&G32).contains("too few for a safetensors header"));
}
