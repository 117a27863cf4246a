//! The model card.

use std::fs;

use coliconv::container::manifest::statement_sha256;
use coliconv::publish::front::Front;
use serde_json::json;

use super::{Place, errors};

fn card(place: &Place) -> String {
    fs::read_to_string(place.container().join("README.md")).unwrap()
}

#[test]
fn the_card_of_nano() {
    let place = Place::new();
    place.edit("score.json", |report| report["baseline"]["path"] = json!("/models/nano"));
    place.published();
    // Which kernels computed, and how they round, is no matter of the card.
    let kernels = |line: &str| match line.rsplit_once(" | ") {
        Some((rest, last)) if last.contains("e-") => format!("{rest} | APART |"),
        _ => line.replace("on the reference backend", "on the BACKEND").replace("on the cpu backend", "on the BACKEND"),
    };
    let text: Vec<String> = card(&place).lines().map(kernels).collect();
    insta::assert_snapshot!("card", text.join("\n"));
}

#[test]
fn what_the_source_says_of_itself_is_carried() {
    let place = Place::new();
    place.published();
    let front = Front::parse("README.md".as_ref(), &card(&place)).unwrap();
    assert_eq!(front.license.as_deref(), Some("other"));
    assert_eq!(front.license_name.as_deref(), Some("nano-licence"));
    assert_eq!(front.license_link.as_deref(), Some("https://example.org/licence"));
    assert_eq!((front.base_model, front.language), (vec!["example/nano".to_owned()], vec!["en".to_owned()]));
    let policy = r#"{"card": {"base_model": "example/other", "notes": "Words of mine."}, "score": {"max_accuracy_drop": 1, "max_perplexity_increase": 1, "min_questions": 1, "min_tokens": 1}}"#;
    assert_eq!(errors(&place.publish(&place.with_policy(policy))), [""; 0]);
    let text = card(&place);
    assert!(text.contains("base_model:\n- example/other\n") && text.contains("\nWords of mine.\n"), "{text}");
}

#[test]
fn names_in_a_card_are_no_markup() {
    let place = Place::new();
    place.edit("score.json", |report| {
        let name = "a|b <script>alert(1)</script> `x` [y](z)\n# Title";
        report["baseline"]["tasks"][0]["task"] = json!(name);
        report["baseline"]["compared"][0]["name"] = json!(name);
        report["tasks"][0]["task"] = json!(name);
        report["inputs"][0]["name"] = json!(name);
        let requests = report["requests"].as_array_mut().unwrap().iter_mut();
        requests.filter(|request| request["input"] == "gloss").for_each(|request| request["input"] = json!(name));
    });
    place.edit("verify.json", |report| report["tokens"][0]["reference"] = json!("/home/somebody/re|f.json"));
    place.published();
    let text = card(&place);
    assert!(!text.contains("<script>") && !text.contains("\n# Title") && !text.contains("somebody"), "{text}");
    assert!(text.contains("a\\|b &lt;script>") && text.contains("| re\\|f.json |"), "{text}");
}

#[test]
fn a_recipe_with_rules_is_shown() {
    let place = Place::new();
    place.edit("nano-g64/coliconv.manifest.json", |manifest| {
        manifest["recipe"] = json!({"group_size": "row", "xbits": 3, "rules": [{"tensor": "*.o_proj.weight", "format": "int8-row"}]});
    });
    let path = place.container().join("coliconv.manifest.json");
    let stated = statement_sha256(&path, &fs::read(&path).unwrap()).unwrap();
    place.edit("verify.json", |report| report["manifest_sha256"] = json!(stated));
    place.published();
    let text = card(&place);
    let command =
        "coliconv convert CHECKPOINT CONTAINER --group-size row --xbits 3 --recipe recipe.json --mtp --indexer\n";
    assert!(text.contains(command), "{text}");
    assert!(text.contains("\"tensor\": \"*.o_proj.weight\""), "{text}");
}

#[test]
fn a_divergence_of_the_most_probable_tokens_is_a_least_one() {
    let place = Place::new();
    place.published();
    let divergence = |text: &str| text.lines().find(|line| line.starts_with("Mean KL divergence")).unwrap().to_owned();
    assert!(!divergence(&card(&place)).contains("at least"), "{}", divergence(&card(&place)));
    place.edit("score.json", |report| report["baseline"]["kl_method"] = json!("top-16"));
    place.published();
    assert!(divergence(&card(&place)).contains("'s: at least 0."), "{}", divergence(&card(&place)));
}

#[test]
fn tags_are_unique_and_one_is_one() {
    let place = Place::new();
    place.edit("nano-g64/coliconv.manifest.json", |manifest| {
        // Formats of two group sizes have the same name, and do not stand side by side.
        let tensors = manifest["tensors"].as_object_mut().unwrap();
        let grouped = tensors.values_mut().filter(|tensor| tensor["group_size"] == 64);
        grouped.step_by(2).for_each(|tensor| tensor["group_size"] = json!(32));
        manifest["source"].as_array_mut().unwrap().truncate(1);
    });
    let path = place.container().join("coliconv.manifest.json");
    let stated = statement_sha256(&path, &fs::read(&path).unwrap()).unwrap();
    place.edit("verify.json", |report| {
        report["manifest_sha256"] = json!(stated);
        let tokens = report["tokens"].as_array_mut().unwrap();
        tokens.iter_mut().for_each(|entry| entry["max_abs_logprob_diff"] = json!(0.0));
    });
    place.edit("score.json", |report| {
        let row = json!({"input": "gloss", "file": "f", "row": 3, "kind": "row-empty", "message": "m", "hint": null});
        report["excluded"] = json!([row]);
    });
    let policy = r#"{"score": {"max_accuracy_drop": 1, "max_perplexity_increase": 1, "min_questions": 1, "min_tokens": 1, "allow_excluded": true}}"#;
    assert_eq!(errors(&place.publish(&place.with_policy(policy))), [""; 0]);
    let text = card(&place);
    let tags: Vec<&str> = text.split("\ntags:\n").nth(1).unwrap().lines().take_while(|l| l.starts_with("- ")).collect();
    let mut unique = tags.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(tags.len(), unique.len(), "{tags:?}");
    assert!(text.contains("from 1 file of ") && text.contains(" 1 row got no score."), "{text}");
    assert!(!text.contains("0.0e0") && !text.contains(" 1 files") && text.contains("| 0 |"), "{text}");
}
