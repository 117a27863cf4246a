//! What cannot be verified at all: exit code 2, before anything long begins.

use std::path::Path;

use coliconv::verify::TokenOptions;
use serde_json::{Value, json};

use super::support::containers::{fixture, run_json};
use super::{DRAFTS, TOKENS, bare, edited, first, options, stored, try_verify, verified, whole};

/// The kinds of a refusal.
fn refusal(references: &[&Path]) -> Vec<&'static str> {
    let references = references.iter().map(|path| path.to_path_buf()).collect();
    let options = options(TokenOptions { references, ..TokenOptions::default() });
    let faults = try_verify(bare().path(), &options).unwrap_err();
    faults.iter().map(|fault| fault.kind.name()).collect()
}

#[test]
fn references_that_cannot_be_compared() {
    let with = |file, key: &'static str, value: Value| edited(file, |r| r[key] = value);
    let mut beyond = vec![7; 53];
    beyond[9] = 2048;
    for (reference, kind) in [
        (with(TOKENS, "fingerprint", "0".repeat(64).into()), "reference-fingerprint"),
        (with(TOKENS, "fingerprint", 7.into()), "reference-value"),
        (edited(TOKENS, |r| r["full_ids"][30] = 2048.into()), "token-id"),
        (edited(TOKENS, |r| r["tf_pred"][30] = 4_000_000_000u64.into()), "token-id"),
        (with(DRAFTS, "draft_pred", json!(beyond)), "token-id"),
        (edited(TOKENS, |r| r["full_ids"][30] = (-1).into()), "reference-value"),
        (edited(TOKENS, |r| drop(r["tf_pred"].as_array_mut().unwrap().pop())), "reference-value"),
        (edited(TOKENS, another_beginning), "reference-value"),
        (with(TOKENS, "full_ids", Value::Null), "reference-missing"),
        (with(TOKENS, "tf_pred", Value::Null), "reference-missing"),
        (with(TOKENS, "index_topk", 0.into()), "reference-value"),
        (stored(&json!({"references": []})), "reference-count"),
        (stored(&json!({"references": {}})), "json-syntax"),
        (stored(&json!([1])), "json-syntax"),
    ] {
        let (_directory, path) = reference;
        assert_eq!(refusal(&[&path]), [kind], "{path:?}");
        // A good one beside it changes nothing.
        let (_directory, good) = first(TOKENS);
        assert_eq!(refusal(&[&good, &path]), [kind]);
    }
    assert_eq!(refusal(&[Path::new("/nowhere/reference.json")]), ["io"]);
    assert_eq!(refusal(&[&bare().path().join("out-00000.safetensors")]), ["json-syntax"]);
}

fn another_beginning(reference: &mut Value) {
    let first = reference["prompt_ids"][0].as_u64().unwrap();
    reference["prompt_ids"][0] = ((first + 1) % 2048).into();
}

/// Exit code 2, and the kind that is printed.
fn refused(arguments: &[&str], path: &Path) -> String {
    let (code, document) = run_json(&[&["verify"], arguments].concat(), &[path]);
    assert_eq!(code, 2, "{arguments:?}: {document:#}");
    let refused = document["refused"].as_array().unwrap();
    assert_eq!(refused.len(), 1, "{document:#}");
    refused[0]["kind"].as_str().unwrap().to_owned()
}

#[test]
fn flags() {
    let (_directory, reference) = first(TOKENS);
    let reference = reference.to_str().unwrap();
    let (container, nano) = (bare(), fixture("nano"));
    for (arguments, kind) in [
        (&["--device", "cuda:-1"][..], "flag-value"),
        (&["--device", "cuda:x", "--device", "cpu"], "flag-value"),
        (&["--device", "vulkan:"], "flag-value"),
        (&["--device", "tpu"], "flag-value"),
        (&["--mode", "fast"], "mode-not-available"),
        (&["--mode", "approximate"], "flag-value"),
        (&["--level", "payload", "--mode", "fast"], "flag-unused"),
        (&["--level", "payload", "--all-devices"], "flag-unused"),
        (&["--inject-fault", "launch"], "flag-needs"),
        (&["--inject-fault", "launch", "--device", "cpu"], "flag-needs"),
        (&["--inject-fault", "scale", "--device", "vulkan"], "flag-value"),
        (&["--inject-fault", "numbers:0", "--device", "vulkan"], "flag-value"),
        (&["--memory", "1M"], "memory-too-small"),
        (&["--level", "payload", "--reference", reference], "flag-unused"),
        (&["--level", "structure", "--device", "cpu"], "flag-unused"),
        (&["--level", "payload", "--write-reference", "/nowhere/r.json"], "flag-unused"),
        (&["--write-reference", "/nowhere/r.json"], "not-a-directory"),
        (&["--write-reference", reference], "file-exists"),
        (&["--report", "/nowhere/r.json"], "not-a-directory"),
        (&["--report", reference], "other-report"),
    ] {
        assert_eq!(refused(arguments, container.path()), kind, "{arguments:?}");
    }
    assert_eq!(refused(&["--source", nano.to_str().unwrap()], &nano), "flag-unused");
}

#[test]
fn memory_is_that_of_every_model_that_is_held() {
    let nano = fixture("nano");
    let source = ["--source", nano.to_str().unwrap()];
    let container = whole();
    // 6.8 M weights of 4 bytes, twice with the source beside it; or as they are stored, but for routed experts.
    let (reference, cpu) = (&["--memory", "40M", "--device", "reference"][..], &["--memory", "18M"][..]);
    for (memory, kind) in [(reference, "model-too-large"), (cpu, "memory-too-small")] {
        assert_eq!(run_json(&[&["verify"], memory].concat(), &[container.path()]).0, 0);
        assert_eq!(refused(&[memory, &source].concat(), container.path()), kind);
    }
}

#[test]
fn exit_codes_say_how_it_ended() {
    let (_one, good) = first(TOKENS);
    let (_other, bad) = edited(TOKENS, |r| r["tf_pred"][9] = 1.into());
    let container = bare();
    let run = |reference: &Path| run_json(&["verify", "--reference", reference.to_str().unwrap()], &[container.path()]);
    let (code, document) = run(&good);
    assert_eq!((code, document["verdict"].as_str()), (0, Some("pass")));
    assert_eq!(serde_json::to_value(&verified(container.path(), &[&good]).tokens).unwrap(), document["tokens"]);
    let (code, document) = run(&bad);
    assert_eq!((code, document["verdict"].as_str()), (1, Some("fail")));
}
