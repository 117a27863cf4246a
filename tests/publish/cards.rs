//! The source's card: it says the licence, so it is bound as every other file, and none is lost.

use std::fs;

use coliconv::convert::{self, Job};
use coliconv::verify::Level;
use serde_json::json;

use super::support::containers::{copy, fixture};
use super::{CARD, Place, errors, lines};

/// Another card, with another licence.
const OTHER: &str = "---\nlicense: mit\n---\n# Other\n";

impl Place {
    /// Replaces a small file, or removes it, and makes the manifest fit.
    pub(super) fn forge(&self, name: &str, text: Option<&str>) {
        let path = self.container().join(name);
        let record = text.map(|text| {
            fs::write(&path, text).unwrap();
            let sha256 = coliconv::score::identity::sha256_of(&path).unwrap();
            json!({"name": name, "bytes": text.len(), "sha256": sha256})
        });
        if record.is_none() {
            fs::remove_file(&path).unwrap();
        }
        self.edit("nano-g64/coliconv.manifest.json", |manifest| {
            let files = manifest["small_files"].as_array_mut().unwrap();
            files.retain(|file| file["name"] != name);
            files.extend(record);
            files.sort_by_key(|file| file["name"].as_str().unwrap().to_owned());
        });
    }

    /// Replaces the source's card, as if it had been that one from the beginning.
    pub(super) fn with_card(&self, text: &str) {
        self.forge("README.md", Some(text));
        let sha256 = coliconv::score::identity::sha256_of(&self.container().join("README.md")).unwrap();
        self.edit("verify.json", |report| {
            let files = report["files"].as_array_mut().unwrap();
            let card = files.iter_mut().find(|file| file["name"] == "README.md").unwrap();
            (card["bytes"], card["sha256"]) = (json!(text.len()), json!(sha256));
        });
    }

    /// Takes the source's card away, as if there had been none.
    pub(super) fn without_card(&self) {
        self.forge("README.md", None);
        self.edit("verify.json", |report| {
            report["files"].as_array_mut().unwrap().retain(|file| file["name"] != "README.md");
        });
    }
}

#[test]
fn two_cards_are_refused_and_both_stay() {
    let place = Place::new();
    place.forge("README.source.md", Some(OTHER));
    let report = place.publish(&place.options());
    assert!(errors(&report).contains(&"two-cards") && report.written.is_empty(), "{report:#?}");
    let says = "README.source.md: there is a README.md, too, and `publish` wants this name";
    assert!(lines(&report).contains(says), "{}", lines(&report));
    assert_eq!(fs::read_to_string(place.container().join("README.md")).unwrap(), CARD);
    assert_eq!(fs::read_to_string(place.container().join("README.source.md")).unwrap(), OTHER);
}

#[test]
fn a_checkpoint_with_two_cards_is_not_converted() {
    let place = Place::new();
    let source = copy(&fixture("nano"));
    fs::write(source.path().join("README.md"), CARD).unwrap();
    fs::write(source.path().join("README.source.md"), OTHER).unwrap();
    let to = place.path("two");
    let faults = Job::prepare(source.path(), &to, convert::Options::default()).map(|_| ()).unwrap_err();
    assert_eq!(faults.iter().map(|fault| fault.kind.name()).collect::<Vec<_>>(), ["two-cards"]);
    fs::remove_file(source.path().join("README.md")).unwrap();
    assert!(Job::prepare(source.path(), &to, convert::Options::default()).is_ok());
}

#[test]
fn a_card_that_was_changed_after_verification_is_refused() {
    let says = |place: &Place, says: &str| {
        let report = place.refuses(&place.options(), &["evidence-missing", "report-of-other-bytes"]);
        assert!(lines(&report).contains(says), "{says}\n{}", lines(&report));
    };
    let place = Place::new();
    place.forge("README.md", Some(OTHER));
    says(&place, "verify.json: the report is of other bytes: README.md was ");
    let place = Place::new();
    place.forge("README.md", None);
    says(&place, "now it is absent");
    let place = Place::new();
    place.without_card();
    place.forge("README.md", Some(OTHER));
    says(&place, "README.md was absent, now it is ");
    let place = Place::new();
    place.without_card();
    place.forge("README.source.md", Some(OTHER));
    says(&place, "README.source.md was absent, now it is ");
    // Without a change of the manifest it is wrong twice.
    let place = Place::new();
    fs::write(place.container().join("README.md"), OTHER).unwrap();
    place.refuses(&place.options(), &["card-changed", "evidence-missing", "report-of-other-bytes"]);
}

#[test]
fn so_is_one_that_was_changed_after_publishing() {
    let changes: [(&str, Option<&str>); 3] =
        [("README.source.md", Some(OTHER)), ("README.source.md", None), ("README.md", Some(OTHER))];
    for (name, text) in changes {
        for verified_again in [false, true] {
            let place = Place::new();
            place.published();
            if verified_again {
                place.store("verify.json", &place.verified(Level::Tokens));
                assert!(place.published().written.iter().all(|name| !name.starts_with("README.source")));
            }
            place.forge(name, text);
            let found = place.publish(&place.options());
            let expected = if name == "README.md" { "two-cards" } else { "report-of-other-bytes" };
            assert!(errors(&found).contains(&expected), "{name} {verified_again}: {found:#?}");
            assert!(found.written.is_empty() && found.plan.is_none());
        }
    }
}

#[test]
fn without_a_card_publishing_again_needs_no_new_report() {
    let place = Place::new();
    place.without_card();
    place.published();
    assert!(place.published().written.is_empty());
    let report = place.verified(Level::Tokens);
    assert!(report["files"].as_array().unwrap().iter().all(|file| file["name"] != "README.md"));
    place.store("verify.json", &report);
    place.published();
    let other = coliconv::publish::Options { repo_id: Some("example/other".to_owned()), ..place.options() };
    assert_eq!(errors(&place.publish(&other)), [""; 0]);
    assert_eq!(errors(&place.publish(&other)), [""; 0]);
}

#[test]
fn a_card_of_another_spelling_is_the_card() {
    let place = Place::new();
    place.without_card();
    let text = "---\nlicense: mit\nbase_model: example/nano\n---\n# Nano\n";
    place.forge("readme.md", Some(text));
    let sha256 = coliconv::score::identity::sha256_of(&place.container().join("readme.md")).unwrap();
    let path = place.container().join("coliconv.manifest.json");
    let stated = coliconv::container::manifest::statement_sha256(&path, &fs::read(&path).unwrap()).unwrap();
    place.edit("verify.json", |report| {
        report["manifest_sha256"] = json!(stated);
        let record = json!({"name": "readme.md", "bytes": text.len(), "sha256": sha256});
        report["files"].as_array_mut().unwrap().push(record);
    });
    for _ in 0..2 {
        let report = place.published();
        assert!(!lines(&report).contains("no licence is known"), "{}", lines(&report));
    }
    let card = fs::read_to_string(place.container().join("README.md")).unwrap();
    assert!(card.contains("\nlicense: mit\n") && card.contains("own card is [readme.md](readme.md)"), "{card}");
    assert!(!place.container().join("README.source.md").exists());
}

#[test]
fn a_link_to_a_licence_that_is_not_there_is_told() {
    let place = Place::new();
    place.with_card("---\nlicense: other\nlicense_link: LICENSE\n---\n");
    let report = place.published();
    assert!(lines(&report).contains("`license_link` of the source's card names LICENSE"), "{}", lines(&report));
    assert!(!lines(&Place::new().published()).contains("license_link"));
}

#[test]
fn drafts_along_a_text_of_its_own_stand_on_the_card() {
    let place = Place::new();
    place.edit("verify.json", |report| {
        report["tokens"].as_array_mut().unwrap().iter_mut().for_each(|entry| entry["mtp"] = serde_json::Value::Null);
        report["own_drafts"] = json!({"proposed": 10, "accepted": 5});
    });
    place.published();
    let card = fs::read_to_string(place.container().join("README.md")).unwrap();
    assert!(card.contains("5 of 10 drafts of the MTP head were accepted (50.0 %)"), "{card}");
}
