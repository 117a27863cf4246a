//! `pipeline`: the whole way at once, gone on from at every step, and what is refused before anything is done.

#[path = "pipeline/arriving.rs"]
mod arriving;
#[path = "pipeline/before.rs"]
mod before;
#[path = "pipeline/keys.rs"]
mod keys;
mod support;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use support::containers::{assert_valid, copy, edit_tensor, fixture, run, run_json};
use support::shards::edit_file;
use tempfile::TempDir;

const CARD: &str = "---\nlicense: mit\nbase_model: example/nano\n---\n# Nano\n";

/// A pipeline of nano with a few rows.
struct Place {
    root: TempDir,
}

impl Place {
    fn new() -> Place {
        let root = TempDir::new().unwrap();
        let source = root.path().join("nano");
        fs::rename(copy(&fixture("nano")).keep(), &source).unwrap();
        fs::write(source.join("README.md"), CARD).unwrap();
        for (name, rows) in [("gloss.jsonl", 4), ("heldout.txt", 2)] {
            let text = fs::read_to_string(fixture("nano").join("expected").join(name)).unwrap();
            fs::write(root.path().join(name), text.lines().take(rows).collect::<Vec<_>>().join("\n") + "\n").unwrap();
        }
        let full = fs::read(fixture("nano").join("expected/tokens-g64-mtp-indexer.json")).unwrap();
        let mut full: Value = serde_json::from_slice(&full).unwrap();
        full["references"].as_array_mut().unwrap().truncate(1);
        fs::write(root.path().join("reference.json"), full.to_string()).unwrap();
        let place = Place { root };
        place.store(&Place::settings());
        place
    }

    fn settings() -> Value {
        json!({
            "checkpoint": "nano", "container": "out/nano-g64", "reports": "reports",
            "convert": {"recipe": {"group_size": 64}, "mtp": true, "indexer": true},
            "verify": {"references": ["reference.json"], "source": false},
            "score": {"tasks": {"gloss": "gloss.jsonl"}, "texts": {"heldout": "heldout.txt"}},
            "publish": {
                "repo_id": "example/nano-g64",
                "policy": {"verify": {"min_predictions": 1}, "score": {"max_accuracy_drop": 1, "max_perplexity_increase": 1, "min_questions": 1, "min_tokens": 1}}
            }
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn store(&self, settings: &Value) {
        fs::write(self.path("pipeline.json"), settings.to_string()).unwrap();
    }

    fn run(&self) -> (i32, Value) {
        let (code, document) = run_json(&["pipeline"], &[&self.path("pipeline.json")]);
        assert_valid("pipeline", &document);
        (code, document)
    }

    fn passes(&self) -> Value {
        let (code, document) = self.run();
        assert_eq!((code, &document["verdict"]), (0, &json!("pass")), "{document:#}");
        document
    }

    /// Every file below a directory, but what tells of times.
    fn files(&self, directory: &str) -> Vec<(String, Vec<u8>)> {
        let mut files = Vec::new();
        for entry in fs::read_dir(self.path(directory)).unwrap().map(Result::unwrap) {
            files.push((entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()));
        }
        files.sort();
        files
    }
}

/// How each step ended.
fn statuses(document: &Value) -> Vec<String> {
    let steps = document["steps"].as_array().unwrap();
    steps
        .iter()
        .map(|step| format!("{} {}", step["step"].as_str().unwrap(), step["status"].as_str().unwrap()))
        .collect()
}

const ALL_KEPT: [&str; 5] = ["convert kept", "verify kept", "score-source kept", "score kept", "publish kept"];

#[test]
fn from_a_checkpoint_to_an_upload_plan_and_the_same_again() {
    let place = Place::new();
    let first = place.passes();
    assert_eq!(statuses(&first), ["convert done", "verify done", "score-source done", "score done", "publish done"]);
    let card = fs::read_to_string(place.path("out/nano-g64/README.md")).unwrap();
    assert!(card.contains("license: mit") && card.contains("# nano-g64"), "{card}");
    assert!(place.path("out/nano-g64.upload-plan.json").is_file());
    let before = place.files("out/nano-g64");
    let again = place.passes();
    assert_eq!(statuses(&again), ALL_KEPT);
    assert!(place.files("out/nano-g64") == before);
    assert_eq!(first["verify"], again["verify"]);
    assert_eq!(first["publish"]["files"], again["publish"]["files"]);
    let kept: Value = serde_json::from_slice(&fs::read(place.path("reports/pipeline.json")).unwrap()).unwrap();
    assert_eq!(kept, again);
}

#[test]
fn every_step_is_gone_on_from() {
    let place = Place::new();
    place.passes();
    let finished = place.files("out/nano-g64");
    type Case = (fn(&Place), [&'static str; 5]);
    let cases: [Case; 5] = [
        (
            |place| {
                // As if the conversion had died before the manifest and one of the files.
                fs::remove_dir_all(place.path("out")).unwrap();
            },
            ["convert done", "verify kept", "score-source kept", "score kept", "publish done"],
        ),
        (
            |place| fs::remove_file(place.path("reports/verify.json")).unwrap(),
            ["convert kept", "verify done", "score-source kept", "score kept", "publish kept"],
        ),
        (
            |place| fs::remove_dir_all(place.path("reports/source")).unwrap(),
            ["convert kept", "verify kept", "score-source done", "score kept", "publish kept"],
        ),
        (
            |place| {
                // Half of the results.
                let path = place.path("reports/scores/results.jsonl");
                let text = fs::read_to_string(&path).unwrap();
                fs::write(path, text.lines().take(3).map(|line| line.to_owned() + "\n").collect::<String>()).unwrap();
            },
            ["convert kept", "verify kept", "score-source kept", "score done", "publish kept"],
        ),
        (
            |place| fs::remove_file(place.path("out/nano-g64/SHA256SUMS")).unwrap(),
            ["convert kept", "verify kept", "score-source kept", "score kept", "publish done"],
        ),
    ];
    for (interrupt, expected) in cases {
        interrupt(&place);
        assert_eq!(statuses(&place.passes()), expected);
        assert!(place.files("out/nano-g64") == finished, "{expected:?}");
    }
}

#[test]
fn other_options_are_other_results() {
    let place = Place::new();
    place.passes();
    let mut settings = Place::settings();
    settings["verify"]["devices"] = json!(["cpu", "reference"]);
    place.store(&settings);
    assert_eq!(statuses(&place.passes())[1], "verify done");
    // Another text: what was scored of the earlier one is not mixed with it.
    edit_file(&place.path("heldout.txt"), |text| text.extend(b"One line more.\n"));
    let (code, document) = place.run();
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &json!("results-other")));
    // Other formats are another container.
    settings["convert"]["recipe"]["group_size"] = json!("row");
    place.store(&settings);
    let (code, document) = place.run();
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &json!("other-parameters")));
}

#[test]
fn a_container_that_was_edited_is_refused() {
    let place = Place::new();
    place.passes();
    edit_tensor(&place.path("out/nano-g64"), "model.layers.1.mlp.experts.3.up_proj.weight", |bytes| bytes[7] ^= 1);
    let (code, document) = place.run();
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &json!("output-changed")), "{document:#}");
}

#[test]
fn a_step_that_says_no_is_the_last() {
    let place = Place::new();
    let mut settings = Place::settings();
    let mut reference: Value = serde_json::from_slice(&fs::read(place.path("reference.json")).unwrap()).unwrap();
    let ids = reference["references"][0]["tf_pred"].as_array_mut().unwrap();
    ids.iter_mut().for_each(|id| *id = json!(1));
    fs::write(place.path("wrong.json"), reference.to_string()).unwrap();
    settings["verify"]["references"] = json!(["wrong.json"]);
    place.store(&settings);
    let (code, document) = place.run();
    assert_eq!((code, &document["verdict"]), (1, &json!("fail")));
    assert_eq!(
        statuses(&document),
        ["convert done", "verify failed", "score-source skipped", "score skipped", "publish skipped"]
    );
    assert!(!place.path("out/nano-g64/SHA256SUMS").exists());
    // A policy that is missed closes the gate in the end; corrected, all that was computed is kept.
    let mut strict = Place::settings();
    strict["publish"]["policy"] = json!({
        "score": {"max_perplexity_increase": 0, "max_accuracy_drop": 1, "min_questions": 1, "min_tokens": 1}
    });
    place.store(&strict);
    let (code, document) = place.run();
    assert_eq!((code, statuses(&document)[4].as_str()), (1, "publish failed"));
    assert!(!place.path("out/nano-g64.upload-plan.json").exists());
    place.store(&Place::settings());
    assert_eq!(
        statuses(&place.passes()),
        ["convert kept", "verify kept", "score-source kept", "score kept", "publish done"]
    );
}

#[test]
fn nothing_that_said_yes_outlives_a_run_that_does_not() {
    let place = Place::new();
    place.passes();
    let plan = place.path("out/nano-g64.upload-plan.json");
    let mut strict = Place::settings();
    strict["publish"]["policy"]["score"]["min_tokens"] = json!(100_000);
    place.store(&strict);
    let (code, _) = place.run();
    assert_eq!((code, plan.exists()), (1, false));
    for name in ["pipeline.json", "publish.json"] {
        let report: Value = serde_json::from_slice(&fs::read(place.path("reports").join(name)).unwrap()).unwrap();
        assert_eq!(report["verdict"], "fail", "{name}");
    }
    // Nor one that is refused before anything is done.
    place.store(&Place::settings());
    place.passes();
    strict["publish"]["policy"]["score"]["min_questions"] = json!(1000);
    place.store(&strict);
    assert_eq!((place.run().0, plan.exists(), place.path("reports/pipeline.json").exists()), (2, false, false));
    place.store(&Place::settings());
    place.passes();
    assert!(plan.exists());
    edit_tensor(&place.path("out/nano-g64"), "model.layers.1.mlp.experts.3.up_proj.weight", |bytes| bytes[7] ^= 1);
    let (code, _) = place.run();
    assert_eq!((code, plan.exists()), (2, false));
    assert!(!place.path("reports/pipeline.json").exists() && !place.path("reports/publish.json").exists());
}

#[test]
fn what_cannot_be_meant_is_refused_before_anything_is_done() {
    let place = Place::new();
    let edited = |edit: fn(&mut Value)| {
        let mut settings = Place::settings();
        edit(&mut settings);
        settings.to_string()
    };
    let cases = [
        (edited(|s| s["score"] = json!({})), "nothing-to-score"),
        (edited(|s| s["scores"] = json!({})), "pipeline-syntax"),
        (edited(|s| s["score"]["tasks"] = json!(["gloss.jsonl"])), "pipeline-syntax"),
        (edited(|s| s["convert"] = json!([])), "pipeline-syntax"),
        (edited(|s| s["convert"]["recipe"]["bits"] = json!(4)), "pipeline-syntax"),
        (edited(|s| s["score"]["texts"]["heldout"] = json!("none.txt")), "input-absent"),
        (edited(|s| s["verify"]["references"] = json!(["none.json"])), "input-absent"),
        (edited(|s| s["verify"]["devices"] = json!(["gpu"])), "flag-value"),
        (edited(|s| s["score"]["limit"] = json!(0)), "flag-value"),
        (edited(|s| s["container"] = json!("nano")), "same-directory"),
        (edited(|s| s["container"] = json!("./out/../nano")), "same-directory"),
        (edited(|s| s["container"] = json!("nano/out/g64")), "nested-directory"),
        (edited(|s| s["container"] = json!("link/g64")), "nested-directory"),
        (edited(|s| s["container"] = json!("link")), "same-directory"),
        (edited(|s| s["container"] = json!(".")), "nested-directory"),
        (edited(|s| s["reports"] = json!("out")), "nested-directory"),
        (edited(|s| s["memory"] = json!(0)), "flag-value"),
        (edited(|s| s["publish"]["policy"] = json!({"card": {"notes": "```"}})), "policy-syntax"),
        (edited(|s| s["convert"]["mtp"] = json!("no")), "pipeline-syntax"),
        (edited(|s| s["score"]["baseline"] = json!("none")), "input-absent"),
        (edited(|s| s["checkpoint"] = json!("none")), "not-a-directory"),
        (edited(|s| s["reports"] = json!("out/nano-g64/reports")), "results-in-model"),
        (edited(|s| s["reports"] = json!("out/../out/nano-g64")), "results-in-model"),
        (edited(|s| s["reports"] = json!("nano")), "results-in-model"),
        (edited(|s| s["reports"] = json!("./out/../nano/reports")), "results-in-model"),
        (edited(|s| s["convert"]["consume"] = json!(true)), "flags-exclude"),
        (
            edited(|s| {
                s["convert"]["consume"] = json!(true);
                s["verify"]["source"] = json!(true);
                s["score"]["baseline"] = json!("nano");
            }),
            "flags-exclude",
        ),
        (edited(|s| s["publish"]["policy"] = json!({"score": {"max_accuracy_drop": 2}})), "policy-syntax"),
        (edited(|s| s["publish"]["repo_id"] = json!("nano")), "flag-value"),
        ("{\"checkpoint\": \"nano\", \"checkpoint\": \"nano\"}".to_owned(), "pipeline-syntax"),
        ("[]".to_owned(), "pipeline-syntax"),
        (String::new(), "pipeline-syntax"),
    ];
    #[cfg(unix)]
    std::os::unix::fs::symlink(place.path("nano"), place.path("link")).unwrap();
    for (text, kind) in cases {
        fs::write(place.path("pipeline.json"), &text).unwrap();
        let (code, document) = place.run();
        assert_eq!((code, &document["refused"][0]["kind"]), (2, &json!(kind)), "{text}");
        assert!(!place.path("out").exists() && !place.path("reports").exists(), "{text}");
    }
    let none = run(&["pipeline", "--quiet"], &[Path::new("none.json")]);
    assert_eq!(none.status.code(), Some(2));
}

#[test]
fn killed_at_any_moment_it_goes_on() {
    use std::process::{Command, Stdio};
    use std::time::Duration;
    let whole = Place::new();
    whole.passes();
    let place = Place::new();
    // The times of the source's files are part of a manifest.
    for entry in fs::read_dir(whole.path("nano")).unwrap().map(Result::unwrap) {
        let modified = entry.metadata().unwrap().modified().unwrap();
        let file = fs::OpenOptions::new().write(true).open(place.path("nano").join(entry.file_name())).unwrap();
        file.set_modified(modified).unwrap();
    }
    let program = assert_cmd::cargo::cargo_bin("coliconv");
    for milliseconds in [40, 120, 300, 700, 1500] {
        let mut child = Command::new(&program)
            .arg("pipeline")
            .arg(place.path("pipeline.json"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        let _ = child.kill();
        child.wait().unwrap();
    }
    place.passes();
    assert!(place.files("out/nano-g64") == whole.files("out/nano-g64"));
}
