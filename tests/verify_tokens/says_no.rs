//! What the token level says no to, each for its own reason; and what it does not.

use std::fs;
use std::path::Path;

use coliconv::config::CONFIG_FILE;
use coliconv::convert::{Job, Options, Silent};
use coliconv::report::{CheckStatus, Severity, Verdict, VerifyReport};
use coliconv::roles::Pass;
use coliconv::tensor::Dtype;
use coliconv::verify::TokenOptions;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::support::containers::{container, fixture, set_f32, swap};
use super::support::shards::{Shards, Tensor, edit_file};
use super::{
    DRAFTS, TOKENS, assert_fails, assert_passes, bare, edited, first, kinds, of_severity, options, status, try_verify,
    verified, whole,
};

/// The next id but for the last of the vocabulary.
fn another(id: &mut Value) {
    *id = ((id.as_u64().unwrap() + 1) % 2048).into();
}

/// What the bare container says to an edited reference.
fn against(file: &str, edit: impl FnOnce(&mut Value)) -> VerifyReport {
    let (_directory, reference) = edited(file, edit);
    verified(bare().path(), &[&reference])
}

fn messages(report: &VerifyReport) -> String {
    of_severity(report, Severity::Error).map(|finding| finding.message.clone() + "\n").collect()
}

#[test]
fn one_altered_prediction() {
    let report = against(TOKENS, |r| another(&mut r["tf_pred"][20]));
    assert_fails(&report, &["tokens"], &["tokens-differ"]);
    assert!(messages(&report).contains("53 of 54 teacher-forced predictions are equal"), "{report:#?}");
    let forced = report.tokens[0].teacher_forced.as_ref().unwrap();
    assert_eq!((forced.matched, forced.near_tie, forced.total), (53, 0, 54));

    // The last token of the text is no prediction's context but its own.
    let report = against(TOKENS, |r| {
        another(&mut r["full_ids"][53]);
        r["logprob_next"] = Value::Null;
    });
    assert_fails(&report, &["tokens"], &["tokens-differ"]);
    assert!(messages(&report).contains("47 of 48 greedy tokens are equal"), "{report:#?}");
    assert_eq!(report.tokens[0].greedy.as_ref().map(|m| (m.matched, m.total)), Some((47, 48)));

    let report = against(DRAFTS, |r| another(&mut r["draft_pred"][30]));
    assert_fails(&report, &["tokens"], &["tokens-differ"]);
    assert!(messages(&report).contains("52 of 53 drafts are equal"), "{report:#?}");
    let mtp = report.tokens[0].mtp.as_ref().unwrap();
    assert_eq!((mtp.matched, mtp.total, mtp.proposed, mtp.accepted), (52, 53, 47, 28));
    assert!(report.tokens[0].teacher_forced.is_none() && report.tokens[0].greedy.is_none());
}

#[test]
fn a_text_that_is_not_the_models_own() {
    let foreign = |r: &mut Value| another(&mut r["full_ids"][20]);
    let report = against(TOKENS, foreign);
    assert_fails(&report, &["tokens"], &["tokens-differ", "logprobs-differ"]);
    assert_eq!(report.tokens[0].greedy.as_ref().map(|m| (m.matched, m.total)), Some((14, 48)));
}

#[test]
fn a_log_probability_that_rounding_cannot_explain() {
    let apart =
        |by: f64| against(TOKENS, |r| r["logprob_next"][3] = json!(r["logprob_next"][3].as_f64().unwrap() + by));
    let report = apart(0.01);
    assert_fails(&report, &["tokens"], &["logprobs-differ"]);
    assert!((report.tokens[0].max_abs_logprob_diff.unwrap() - 0.01).abs() < 1e-4);
    assert_fails(&apart(3e-4), &["tokens"], &["logprobs-differ"]);
    assert_passes(&apart(1.5e-4));
}

#[test]
fn near_ties_are_counted_and_change_no_verdict() {
    let with_margin = |margin: f64| {
        against(TOKENS, |r| {
            another(&mut r["tf_pred"][20]);
            r["margin"][20] = json!(margin);
        })
    };
    let report = with_margin(1.9e-4);
    assert_passes(&report);
    let forced = report.tokens[0].teacher_forced.as_ref().unwrap();
    assert_eq!((forced.matched, forced.near_tie, forced.total), (53, 1, 54));
    assert!(report.checks.iter().any(|check| check.detail.contains("53 of 54 (1 near-tie)")), "{report:#?}");
    for margin in [2e-4, 0.5] {
        assert_fails(&with_margin(margin), &["tokens"], &["tokens-differ"]);
    }
    let report = against(DRAFTS, |r| {
        another(&mut r["draft_pred"][30]);
        r["draft_margin"][30] = json!(0.0);
    });
    assert_passes(&report);
    assert_eq!(report.tokens[0].mtp.as_ref().map(|m| (m.matched, m.total)), Some((52, 53)));
    // A greedy near-tie: the text goes on with the second best.
    let report = against(TOKENS, |r| {
        another(&mut r["full_ids"][53]);
        r["logprob_next"] = Value::Null;
        (r["margin"][52], r["margin"][53]) = (json!(1e-5), json!(1e-5));
    });
    assert_passes(&report);
    assert_eq!(report.tokens[0].greedy.as_ref().map(|m| (m.matched, m.total)), Some((47, 48)));
}

fn swap_experts(directory: &Path) {
    for projection in ["gate_proj", "up_proj", "down_proj"] {
        let scales = |expert| format!("model.layers.2.mlp.experts.{expert}.{projection}.weight.qs");
        swap(directory, &scales(0), &scales(1));
    }
}

#[test]
fn two_experts_with_each_others_scales() {
    let (_directory, reference) = first(TOKENS);
    let directory = bare();
    swap_experts(directory.path());
    let report = verified(directory.path(), &[&reference]);
    assert_fails(&report, &["tokens"], &["tokens-differ", "logprobs-differ"]);
    let directory = whole();
    swap_experts(directory.path());
    let report = verified(directory.path(), &[&reference]);
    let reasons = ["tensor-checksum", "file-hash", "tokens-differ", "logprobs-differ"];
    assert_fails(&report, &["checksums", "tokens"], &reasons);
}

fn wrong_theta(directory: &Path) {
    edit_file(&directory.join(CONFIG_FILE), |bytes| {
        let text = String::from_utf8(bytes.clone()).unwrap();
        assert_eq!(text.matches("10000.0").count(), 1);
        *bytes = text.replace("10000.0", "90000.0").into_bytes();
    });
}

#[test]
fn a_wrong_theta() {
    let (_directory, reference) = first(TOKENS);
    let directory = bare();
    wrong_theta(directory.path());
    let report = verified(directory.path(), &[&reference]);
    assert_fails(&report, &["tokens"], &["tokens-differ", "logprobs-differ"]);
    // With the source it needs no reference.
    let with_source = coliconv::verify::Options { source: Some(fixture("nano")), ..options(TokenOptions::default()) };
    let report = try_verify(directory.path(), &with_source).unwrap_or_else(|faults| panic!("{faults}"));
    assert_fails(&report, &["weights"], &["config-not-the-source"]);
    assert!(messages(&report).contains("`rope_theta` is 90000.0, the source has 10000.0"), "{report:#?}");
    let agreement = report.source_agreement.unwrap();
    assert!(agreement.matched < agreement.total);

    let directory = whole();
    wrong_theta(directory.path());
    let report = verified(directory.path(), &[&reference]);
    assert_fails(&report, &["checksums", "tokens"], &["file-hash", "tokens-differ", "logprobs-differ"]);
    let of_file = of_severity(&report, Severity::Error).find(|finding| finding.kind == "file-hash").unwrap();
    assert!(of_file.file.as_ref().unwrap().ends_with(CONFIG_FILE));
}

/// Puts the head of a checkpoint with nano's shapes and other values into a container.
fn another_head(container: &Path, bare: bool) {
    let mut shards = Shards::load(&fixture("nano"));
    let names: Vec<String> = shards.names().map(|(name, _)| name.to_owned()).collect();
    for name in names.iter().filter(|name| name.contains("layers.4.")) {
        let tensor = shards.tensor_mut(name);
        if tensor.dtype == Dtype::F8_E4M3 {
            tensor.bytes.reverse();
        }
    }
    let (checkpoint, directory) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    shards.store(checkpoint.path());
    let only_head = Options { passes: vec![Pass::Mtp], bare, ..Options::default() };
    let job = Job::prepare(checkpoint.path(), directory.path(), only_head).unwrap_or_else(|faults| panic!("{faults}"));
    job.run(&Silent).unwrap_or_else(|faults| panic!("{faults}"));
    let file = Pass::Mtp.file_name(0);
    fs::copy(directory.path().join(&file), container.join(&file)).unwrap();
}

#[test]
fn a_head_of_another_checkpoint() {
    let ((_one, drafts), (_other, tokens)) = (first(DRAFTS), first(TOKENS));
    let directory = bare();
    another_head(directory.path(), true);
    let report = verified(directory.path(), &[&tokens, &drafts]);
    assert_fails(&report, &["tokens"], &["tokens-differ"]);
    assert!(messages(&report).contains(" drafts are equal"), "{report:#?}");
    // The tokens themselves are not the head's business, but even without drafts to compare its use is looked at.
    let report = verified(directory.path(), &[&tokens]);
    assert_passes(&report);
    assert!(kinds(&report, Severity::Warning).contains("no-draft-accepted"), "{report:#?}");
    assert!(!kinds(&verified(bare().path(), &[]), Severity::Warning).contains("no-draft-accepted"));

    let directory = whole();
    another_head(directory.path(), false);
    let report = verified(directory.path(), &[]);
    assert_fails(&report, &["checksums"], &["file-hash", "tensor-checksum"]);
}

#[test]
fn drafts_of_a_model_without_a_head() {
    let main = container("nano", "main", Options::default);
    let ((_one, drafts), (_other, tokens)) = (first(DRAFTS), first(TOKENS));
    let report = verified(main.path(), &[&drafts, &tokens]);
    assert_fails(&report, &["tokens"], &["no-mtp-head"]);
    assert_eq!(report.tokens.len(), 2, "a reference that cannot be compared has its entry");
    assert_eq!((&report.tokens[0].mtp, &report.tokens[0].teacher_forced), (&None, &None));
    assert_eq!(report.tokens[1].greedy.as_ref().map(|m| (m.matched, m.total)), Some((48, 48)));
    // What is sparse in the reference cannot be so here.
    let (_sparse, sparse) = first("dsa-topk4-g64-mtp-indexer.json");
    let report = verified(main.path(), &[&sparse]);
    assert_fails(&report, &["tokens"], &["tokens-differ", "logprobs-differ"]);
    assert!(kinds(&report, Severity::Warning).contains("no-indexer"));
}

#[test]
fn damaged_containers_are_not_run() {
    const O_PROJ: &str = "model.layers.1.self_attn.o_proj.weight";
    type Damage = fn(&mut Shards);
    let damages: [(&str, &str, Damage); 9] = [
        ("counts", "no-format", |s| {
            let codes = s.tensor_mut(O_PROJ);
            codes.bytes.truncate(codes.bytes.len() / 2);
            codes.shape = vec![codes.bytes.len() as u64];
        }),
        ("counts", "stored-dtype", |s| {
            let scales = s.tensor_mut(&format!("{O_PROJ}.qs"));
            *scales = Tensor::zeros(Dtype::F16, &scales.shape);
        }),
        ("census", "shape-mismatch", |s| {
            *s.tensor_mut("model.norm.weight") = Tensor::zeros(Dtype::F32, &[255]);
        }),
        ("census", "layer-missing", |s| s.retain(|name| !name.contains("layers.2."))),
        ("census", "expert-missing", |s| s.retain(|name| !name.contains("layers.4.mlp.experts.7."))),
        ("files", "numbering-gap", |s| drop(s.files.remove("out-00001.safetensors"))),
        ("config", "config-silent", |s| s.set_config("rope_parameters", Value::Null)),
        ("config", "config-silent", |s| s.set_config("norm_topk_prob", Value::Null)),
        ("config", "config-silent", |s| s.set_config("indexer_types", Value::Null)),
    ];
    let (_directory, reference) = first(TOKENS);
    let shards = Shards::load(bare().path());
    for (check, reason, damage) in damages {
        let directory = TempDir::new().unwrap();
        let mut shards = shards.clone();
        damage(&mut shards);
        shards.store(directory.path());
        let report = verified(directory.path(), &[&reference]);
        assert_eq!((report.verdict, status(&report, check)), (Verdict::Fail, CheckStatus::Fail), "{report:#?}");
        assert!(kinds(&report, Severity::Error).contains(reason), "{reason}: {report:#?}");
        assert_eq!((status(&report, "tokens"), report.tokens.len()), (CheckStatus::Skipped, 0));
    }
}

#[test]
fn numbers_that_are_none() {
    let directory = bare();
    set_f32(directory.path(), "model.layers.1.self_attn.o_proj.weight.qs", 3, f32::NAN);
    let (_directory, reference) = first(TOKENS);
    let report = verified(directory.path(), &[&reference]);
    assert_eq!(status(&report, "scales"), CheckStatus::Fail);
    assert_eq!((status(&report, "forward"), status(&report, "tokens")), (CheckStatus::Fail, CheckStatus::Fail));
    assert!(kinds(&report, Severity::Error).is_superset(&["bad-scale", "logits-not-finite"].into()));
    assert_eq!(report.tokens.len(), 1);
    // Nothing is written of such a model.
    let target = TempDir::new().unwrap();
    let path = target.path().join("own.json");
    let write = options(TokenOptions { write_reference: Some(path.clone()), ..TokenOptions::default() });
    let report = try_verify(directory.path(), &write).unwrap_or_else(|faults| panic!("{faults}"));
    assert_eq!((report.verdict, status(&report, "written")), (Verdict::Fail, CheckStatus::Skipped));
    assert!(!path.exists());
}

#[test]
fn keys_of_a_checkpoint_that_would_silently_change_results() {
    let directory = TempDir::new().unwrap();
    let mut shards = Shards::load(&fixture("nano"));
    shards.set_config("routed_scaling_factor", Value::Null);
    shards.store(directory.path());
    let (_directory, reference) = first("tokens-source.json");
    let report = verified(directory.path(), &[&reference]);
    assert_fails(&report, &["config", "tokens"], &["config-silent", "tokens-differ", "logprobs-differ"]);
}
