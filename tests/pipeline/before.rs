//! What is certain to fail is refused before anything is converted.

use std::fs;

use serde_json::{Value, json};

use super::support::containers::run;
use super::{Place, statuses};

/// The settings with a change.
fn edited(edit: impl Fn(&mut Value)) -> Value {
    let mut settings = Place::settings();
    edit(&mut settings);
    settings
}

/// Refused with these kinds and words, and nothing is made.
fn refused(place: &Place, settings: &Value, expected: &[(&str, &str)]) {
    place.store(settings);
    let (code, document) = place.run();
    assert_eq!(code, 2, "{document:#}");
    let findings = document["refused"].as_array().unwrap();
    assert_eq!(findings.len(), expected.len(), "{document:#}");
    for (finding, (kind, words)) in findings.iter().zip(expected) {
        let said = format!("{} {}", finding["message"], finding["hint"]);
        assert!(finding["kind"] == *kind && said.contains(words), "{kind} {words}: {finding:#}");
    }
    assert!(!place.path("out").exists() && !place.path("reports").exists(), "{document:#}");
}

#[test]
fn policies_that_these_settings_cannot_meet() {
    let place = Place::new();
    let policy = |part: &'static str, key: &'static str, value: Value| {
        edited(move |s| s["publish"]["policy"][part][key] = value.clone())
    };
    let missed = |words| [("policy-missed", words)];
    refused(&place, &policy("verify", "devices", json!(["cuda"])), &missed("`verify.devices`"));
    refused(&place, &policy("verify", "min_devices", json!(2)), &missed("`verify.devices`"));
    refused(&place, &policy("verify", "min_references", json!(2)), &missed("`verify.references`"));
    refused(&place, &policy("verify", "min_source_agreement", json!(0.5)), &missed("`verify.source`"));
    refused(&place, &policy("verify", "weights", json!(true)), &[("evidence-missing", "`verify.source`")]);
    refused(&place, &policy("score", "min_tasks", json!(2)), &missed("`score.tasks`"));
    refused(&place, &policy("score", "min_texts", json!(2)), &missed("`score.texts`"));
    refused(&place, &policy("score", "min_questions", json!(5)), &missed("questions of gloss"));
    let nothing = edited(|s| s["verify"]["references"] = json!([]));
    refused(&place, &nothing, &[("evidence-missing", "`verify.references`")]);
    // All of them at once.
    let both = edited(|s| {
        s["publish"]["policy"]["verify"] = json!({"weights": true});
        s["publish"]["policy"]["score"]["min_tasks"] = json!(2);
    });
    refused(&place, &both, &[("evidence-missing", "`verify.source`"), ("policy-missed", "`score.tasks`")]);
}

#[test]
fn a_licence_that_nobody_gives() {
    let place = Place::new();
    let settings = edited(|s| s["publish"]["policy"]["card"] = json!({"license": true}));
    fs::write(place.path("nano/README.md"), "# Nano\n").unwrap();
    refused(&place, &settings, &[("license-unknown", "LICENSE")]);
    fs::remove_file(place.path("nano/README.md")).unwrap();
    refused(&place, &settings, &[("license-unknown", "LICENSE")]);
    fs::write(place.path("nano/LICENSE"), "Do what you want.\n").unwrap();
    place.passes();
}

#[test]
fn files_that_hold_nothing() {
    let place = Place::new();
    fs::write(place.path("gloss.jsonl"), "\n\n").unwrap();
    fs::write(place.path("reference.json"), "{}").unwrap();
    place.store(&Place::settings());
    let (code, document) = place.run();
    assert_eq!(code, 2, "{document:#}");
    let files = document["refused"].as_array().unwrap().iter().map(|finding| finding["file"].as_str().unwrap());
    let mut files: Vec<&str> = files.map(|file| file.rsplit('/').next().unwrap()).collect();
    files.dedup();
    assert_eq!(files, ["gloss.jsonl", "reference.json"], "{document:#}");
    assert!(!place.path("out").exists() && !place.path("reports").exists());
}

#[test]
fn devices_and_memory() {
    let place = Place::new();
    // No machine has so many.
    for (device, api) in [("cuda:4000", "cuda"), ("vulkan:4000", "vulkan")] {
        let settings = edited(|s| s["verify"]["devices"] = json!(["cpu", device]));
        place.store(&settings);
        let (code, document) = place.run();
        let finding = &document["refused"][0];
        assert_eq!(code, 2, "{document:#}");
        assert!(finding["kind"].as_str().unwrap().starts_with("gpu-"), "{finding:#}");
        assert!(finding["message"].as_str().unwrap().to_lowercase().contains(api), "{finding:#}");
        assert!(finding["hint"].as_str().unwrap().contains("`verify.devices`"), "{finding:#}");
        assert!(finding["file"].as_str().unwrap().ends_with("pipeline.json"), "{finding:#}");
        assert!(!place.path("out").exists() && !place.path("reports").exists());
    }
    for devices in [json!([]), json!(["cpu"]), json!(["reference"])] {
        let settings = edited(|s| {
            s["memory"] = json!(1 << 16);
            s["verify"]["devices"] = devices.clone();
        });
        place.store(&settings);
        let (code, document) = place.run();
        let finding = &document["refused"][0];
        assert_eq!(code, 2, "{document:#}");
        assert!(["memory-too-small", "model-too-large"].contains(&finding["kind"].as_str().unwrap()), "{finding:#}");
        assert!(finding["hint"].as_str().unwrap().contains("`memory`"), "{finding:#}");
        assert!(!place.path("out").exists());
        let shown = run(&["pipeline"], &[&place.path("pipeline.json")]);
        assert!(!String::from_utf8_lossy(&shown.stderr).contains("--memory"));
    }
}

#[test]
fn what_was_verified_outlives_a_refusal() {
    let place = Place::new();
    place.passes();
    place.store(&edited(|s| s["verify"]["devices"] = json!(["cuda:4000"])));
    let (code, document) = place.run();
    assert_eq!((code, document["refused"].as_array().unwrap().len()), (2, 1), "{document:#}");
    place.store(&Place::settings());
    assert_eq!(statuses(&place.passes())[1], "verify kept");
}
