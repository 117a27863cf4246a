//! What a pipeline says is said in the keys of its file, not in flags of the commands.

use std::fs;

use serde_json::{Value, json};

use super::Place;
use super::support::containers::run;

/// Everything that the program printed, and what it refused or found.
fn said(place: &Place) -> (String, Value) {
    let output = run(&["pipeline", "--json"], &[&place.path("pipeline.json")]);
    let document = serde_json::from_slice(&output.stdout).unwrap();
    let shown = run(&["pipeline"], &[&place.path("pipeline.json")]);
    (String::from_utf8_lossy(&[output.stderr, shown.stdout, shown.stderr].concat()).into_owned(), document)
}

/// Flags outside of whole commands in backquotes.
fn flags(text: &str) -> Vec<&str> {
    let prose = text.split('`').enumerate().filter(|(at, part)| at % 2 == 0 || !part.starts_with("coliconv "));
    prose.flat_map(|(_, part)| part.split_whitespace()).filter(|word| word.starts_with("--")).collect()
}

#[test]
fn refusals_name_keys() {
    type Case = (fn(&Place, &mut Value), &'static str);
    let cases: [Case; 7] = [
        (|_, s| s["score"] = json!({}), "hint: give `score.tasks` or `score.texts`"),
        (|_, s| s["publish"]["repo_id"] = json!("nano"), "`publish.repo_id` is nano, expected ORG/NAME"),
        (|_, s| s["reports"] = json!("nano/reports"), "hint: give a directory of its own as `reports`"),
        (|_, s| s["convert"]["recipe"] = json!({"xbits": 9}), "`convert.recipe.xbits` 9"),
        (
            |place, _| {
                fs::create_dir_all(place.path("out/nano-g64")).unwrap();
                fs::write(place.path("out/nano-g64/out-00000.safetensors"), "mine").unwrap();
            },
            "hint: give another, empty directory as `container`",
        ),
        (|_, s| s["memory"] = json!(1000), "`memory` raises the limit"),
        (|_, s| s["convert"]["follow"] = json!("yes"), "pipeline.json: the pipeline does not parse"),
    ];
    for (edit, says) in cases {
        let place = Place::new();
        let mut settings = Place::settings();
        edit(&place, &mut settings);
        place.store(&settings);
        let (text, document) = said(&place);
        assert!(document["refused"].is_array(), "{document:#}");
        assert!(text.contains(says), "{says}\n{text}");
        assert_eq!(flags(&text), [""; 0], "{text}");
    }
}

#[test]
fn policies_name_keys() {
    type Case = (fn(&mut Value), &'static str);
    let cases: [Case; 5] = [
        (|s| s["verify"]["references"] = json!([]), "hint: give `verify.references`, or set `verify.source` to true"),
        (|s| s["publish"]["policy"]["verify"] = json!({"weights": true}), "hint: set `verify.source` to true"),
        (|s| s["publish"]["policy"]["verify"] = json!({"min_devices": 2}), "hint: name more in `verify.devices`"),
        (|s| s["publish"]["policy"]["verify"] = json!({"min_references": 9}), "hint: give more `verify.references`"),
        (|s| s["publish"]["policy"]["score"]["min_questions"] = json!(99), "or a larger `score.limit`"),
    ];
    let place = Place::new();
    for (edit, says) in cases {
        let mut settings = Place::settings();
        edit(&mut settings);
        place.store(&settings);
        let (text, document) = said(&place);
        assert!(document["refused"].is_array(), "{document:#}");
        assert!(text.contains(says), "{says}\n{text}");
        assert_eq!(flags(&text), [""; 0], "{text}");
    }
}

#[test]
fn a_closed_gate_names_keys() {
    let place = Place::new();
    let mut settings = Place::settings();
    settings["publish"]["policy"]["score"]["max_kl_mean"] = json!(0.0);
    place.store(&settings);
    let (text, document) = said(&place);
    assert_eq!(document["verdict"], "fail", "{document:#}");
    let says = "hint: convert with more bits into another `container`, or ask for less in `publish.policy`";
    assert!(text.contains(says), "{says}\n{text}");
    assert_eq!(flags(&text), [""; 0], "{text}");
    let report: Value = serde_json::from_slice(&fs::read(place.path("reports/publish.json")).unwrap()).unwrap();
    let hints: Vec<&str> = report["findings"].as_array().unwrap().iter().filter_map(|f| f["hint"].as_str()).collect();
    assert!(hints.iter().all(|hint| flags(hint).is_empty()), "{hints:?}");
}

#[test]
fn passes_that_are_not_wanted_are_told() {
    let place = Place::new();
    let mut settings = Place::settings();
    settings["convert"] = json!({"recipe": {"group_size": 64}});
    // Without the head the references of a whole container do not fit.
    settings["verify"] = json!({"source": true});
    place.store(&settings);
    let document = place.passes();
    let warnings = |document: &Value| -> Vec<String> {
        let list = document["warnings"].as_array().unwrap().iter();
        list.map(|warning| warning["message"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(
        warnings(&document),
        [
            "`convert.mtp` is false, and the source has an MTP head: the container is made without",
            "`convert.indexer` is false, and the source has a DSA indexer: the container is made without"
        ]
    );
    assert!(document["publish"]["model_sha256"].is_string());
    // What an earlier run converted stays, and that is told.
    let place = Place::new();
    assert_eq!(warnings(&place.passes()), [""; 0]);
    let mut settings = Place::settings();
    settings["convert"]["mtp"] = json!(false);
    place.store(&settings);
    let document = place.passes();
    let says = "`convert.mtp` is false, but the container has an MTP head of an earlier run: it stays, and is verified and published";
    assert_eq!(warnings(&document), [says]);
}
