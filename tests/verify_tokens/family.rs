//! Other models of the family: each says what it said before, and a container that keeps its values says the same.

use std::path::{Path, PathBuf};

use coliconv::convert::{Job, Options, Silent};
use coliconv::recipe::{Rule, Settings};
use coliconv::report::{CheckStatus, Severity, VerifyReport};
use coliconv::roles::Pass;
use coliconv::verify::TokenOptions;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::support::shards::Shards;
use super::support::synthetic::{Kind, Scales, Synthetic, small_config};
use super::{assert_passes, kinds, options, status, try_verify, verified};

/// The small model, attending sparsely, with other keys.
fn model(changes: Value) -> Synthetic {
    let mut config = small_config();
    config["index_topk"] = 6.into();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    Synthetic::new(config)
}

/// What verify says of a model along references of its own, which stay in the directory `file`.
fn with_itself(checkpoint: &Path, file: &PathBuf) -> VerifyReport {
    let write = TokenOptions { write_reference: Some(file.to_owned()), ..TokenOptions::default() };
    assert_passes(&try_verify(checkpoint, &options(write)).unwrap_or_else(|faults| panic!("{faults}")));
    let report = verified(checkpoint, &[file]);
    assert_passes(&report);
    report
}

/// A container that holds the checkpoint's values themselves.
fn kept(checkpoint: &Path, passes: &[Pass]) -> TempDir {
    let directory = TempDir::new().unwrap();
    let rule = Rule { tensor: "*".into(), format: "f32".into(), group_size: None };
    let settings = Settings { rules: vec![rule], ..Settings::default() };
    let options = Options { settings, passes: passes.to_vec(), ..Options::default() };
    let job = Job::prepare(checkpoint, directory.path(), options).unwrap_or_else(|faults| panic!("{faults}"));
    job.run(&Silent).unwrap_or_else(|faults| panic!("{faults}"));
    directory
}

/// Fails unless model and container say exactly what they said before.
fn assert_same(synthetic: &Synthetic, passes: &[Pass]) {
    let (checkpoint, files) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    synthetic.write(checkpoint.path()).unwrap();
    let file = files.path().join("own.json");
    let own = with_itself(checkpoint.path(), &file);
    assert!(own.tokens.iter().all(|entry| entry.max_abs_logprob_diff == Some(0.0)));
    assert_eq!(own.tokens.iter().all(|entry| entry.mtp.is_some()), passes.contains(&Pass::Mtp));
    let container = kept(checkpoint.path(), passes);
    let tokens = TokenOptions { references: vec![file], ..TokenOptions::default() };
    let source = Some(checkpoint.path().to_owned());
    let with_source = coliconv::verify::Options { source, ..options(tokens) };
    let report = try_verify(container.path(), &with_source).unwrap_or_else(|faults| panic!("{faults}"));
    assert_passes(&report);
    assert_eq!(report.tokens, own.tokens);
    let agreement = report.source_agreement.unwrap();
    assert_eq!((agreement.matched, agreement.mean_abs_logprob_diff), (agreement.total, Some(0.0)));
}

#[test]
fn element_types() {
    for kind in Kind::ALL {
        println!("{kind:?}");
        assert_same(&model(json!({})).kind(kind).shards(2), &Pass::ALL);
    }
}

#[test]
fn shared_experts_groups_and_factors() {
    assert_same(&model(json!({"n_shared_experts": 2})), &Pass::ALL);
    let routing = json!({"norm_topk_prob": false, "routed_scaling_factor": 1.5, "num_experts_per_tok": 4});
    assert_same(&model(routing), &Pass::ALL);
    assert_same(&model(json!({"n_routed_experts": 1, "num_experts_per_tok": 1})), &Pass::ALL);
}

#[test]
fn groups_of_experts_run_though_no_engine_takes_them() {
    let synthetic = model(json!({"n_routed_experts": 6, "n_group": 3, "topk_group": 2}));
    let (checkpoint, files) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    synthetic.write(checkpoint.path()).unwrap();
    with_itself(checkpoint.path(), &files.path().join("own.json"));
    let refused = Job::prepare(checkpoint.path(), &files.path().join("container"), Options::default()).unwrap_err();
    assert_eq!(refused.iter().next().unwrap().kind.name(), "engine-limit");
}

#[test]
fn dense_and_sparse_layers() {
    assert_same(&model(json!({"first_k_dense_replace": 3})), &Pass::ALL);
    assert_same(&model(json!({"first_k_dense_replace": 0})), &Pass::ALL);
    assert_same(&model(json!({"mlp_layer_types": ["sparse", "dense", "sparse"]})), &Pass::ALL);
}

#[test]
fn indexers() {
    let without = |more: Value| {
        let mut changes = json!({"indexer_types": null});
        changes.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        model(changes)
    };
    assert_same(&model(json!({"indexer_types": ["full", "shared", "shared"]})), &Pass::ALL);
    assert_same(&without(json!({"index_topk_pattern": "FSF"})), &Pass::ALL);
    assert_same(&without(json!({"index_topk_freq": 2})), &Pass::ALL);
    assert_same(&model(json!({})).optional(), &Pass::ALL);
    assert_same(&model(json!({})).mtp_indexer(), &Pass::ALL);
    assert_same(&model(json!({})).without(Pass::Indexer), &[Pass::Main, Pass::Mtp]);
}

#[test]
fn the_head_and_its_tables() {
    assert_same(&model(json!({})).without(Pass::Mtp), &[Pass::Main, Pass::Indexer]);
    assert_same(&model(json!({"num_nextn_predict_layers": 0})), &[Pass::Main, Pass::Indexer]);
    // With tables of its own the head drafts something else, and the container keeps them.
    let of = |synthetic: &Synthetic| {
        let (checkpoint, files) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        synthetic.write(checkpoint.path()).unwrap();
        let file = files.path().join("own.json");
        with_itself(checkpoint.path(), &file);
        coliconv::reference::ReferenceFile::read(&file).unwrap().references
    };
    let (shared, own) = (of(&model(json!({}))), of(&model(json!({})).optional()));
    assert_eq!(shared[0].full_ids, own[0].full_ids);
    assert_ne!(shared[0].draft_pred, own[0].draft_pred);
}

#[test]
fn tied_embeddings() {
    let tied = model(json!({"tie_word_embeddings": true}));
    assert_same(&tied, &Pass::ALL);
    let checkpoint = TempDir::new().unwrap();
    tied.write(checkpoint.path()).unwrap();
    let container = kept(checkpoint.path(), &Pass::ALL);
    assert!(!Shards::load(container.path()).names().any(|(name, _)| name == "lm_head.weight"));
}

#[test]
fn a_source_with_the_same_weights_must_say_the_same() {
    let (checkpoint, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    model(json!({})).kind(Kind::Fp8(Scales::Bf16)).write(checkpoint.path()).unwrap();
    let container = kept(checkpoint.path(), &Pass::ALL);
    // The same container beside another source of the same shapes.
    model(json!({})).seed(1).write(other.path()).unwrap();
    let source = Some(other.path().to_owned());
    let with_source = coliconv::verify::Options { source, ..options(TokenOptions::default()) };
    let report = try_verify(container.path(), &with_source).unwrap_or_else(|faults| panic!("{faults}"));
    assert_eq!((status(&report, "weights"), status(&report, "source")), (CheckStatus::Fail, CheckStatus::Fail));
    assert_eq!(kinds(&report, Severity::Error), ["not-the-source", "source-tokens-differ"].into());
}
