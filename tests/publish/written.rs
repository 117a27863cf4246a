//! What publishing writes, that it writes the same again, and what an interruption leaves.

use std::fs;
use std::process::Command;

use coliconv::container::manifest::Manifest;
use coliconv::convert::{self, Job, Silent};
use coliconv::publish::Options;
use coliconv::publish::plan::UploadPlan;
use coliconv::report::Storage;
use coliconv::roles::Pass;
use coliconv::verify::Level;

use super::support::containers::{copy, fixture};
use super::{CARD, Place, errors};

#[test]
fn card_manifest_sums_and_plan() {
    let place = Place::new();
    let report = place.published();
    let container = place.container();
    assert_eq!(fs::read_to_string(container.join("README.source.md")).unwrap(), CARD);
    let manifest = Manifest::read(&container).unwrap().unwrap();
    for record in manifest.files.iter().chain(&manifest.small_files) {
        let path = container.join(&record.name);
        assert_eq!(coliconv::score::identity::sha256_of(&path).unwrap(), record.sha256, "{}", record.name);
        assert_eq!(fs::metadata(path).unwrap().len(), record.bytes, "{}", record.name);
    }
    let sums =
        Command::new("sha256sum").args(["--strict", "-c", "SHA256SUMS"]).current_dir(&container).output().unwrap();
    assert!(sums.status.success(), "{}", String::from_utf8_lossy(&sums.stdout));
    let plan: UploadPlan = serde_json::from_value(place.load("nano-g64.upload-plan.json")).unwrap();
    assert_eq!((&plan.files, &plan.steps), (&report.files, &report.steps));
    let mut names: Vec<&str> = plan.files.iter().map(|file| &*file.name).collect();
    assert_eq!(names[names.len() - 2..], ["config.json", "coliconv.manifest.json"]);
    names.sort_unstable();
    let there = place.files();
    assert_eq!(names, there.iter().map(|(name, _)| &**name).collect::<Vec<_>>());
    for file in &plan.files {
        assert_eq!(file.storage == Storage::Lfs, file.name.ends_with(".safetensors"), "{}", file.name);
        assert_eq!(file.git_blob_id.is_some(), file.storage == Storage::Git);
    }
    // What verification says of the container afterwards is what it said before.
    let after = place.verified(Level::Payload);
    assert_eq!(after["verdict"], "pass");
    assert!(after["findings"].as_array().unwrap().is_empty(), "{after:#}");
    assert_eq!(after["model_sha256"], place.load("verify.json")["model_sha256"]);
    assert_eq!(after["model_sha256"], place.load("score.json")["model_sha256"]);
}

#[test]
fn the_same_again_writes_nothing() {
    let place = Place::new();
    place.published();
    let before = place.files();
    assert!(place.published().written.is_empty());
    assert!(place.files() == before);
}

#[test]
fn every_interruption_is_gone_on_from() {
    let whole = Place::new();
    whole.published();
    let finished = whole.files();
    let at_first = Place::new().files();
    let written = ["README.source.md", "README.md", "coliconv.manifest.json", "SHA256SUMS"];
    for done in 0..=written.len() {
        let place = Place::new();
        for name in &written[..done] {
            let (_, bytes) = finished.iter().find(|(found, _)| found == name).unwrap();
            fs::write(place.container().join(name), bytes).unwrap();
        }
        if let Some(next) = written.get(done) {
            fs::write(place.container().join(format!("{next}.coliconv-tmp")), "half").unwrap();
        }
        place.published();
        assert!(place.files() == finished, "interrupted after {:?}", &written[..done]);
    }
    assert!(at_first != finished);
}

#[test]
fn a_card_is_made_anew_and_never_lost() {
    let place = Place::new();
    place.published();
    let card = place.container().join("README.md");
    let first = fs::read_to_string(&card).unwrap();
    let other = Options { repo_id: Some("example/other".to_owned()), ..place.options() };
    assert_eq!(errors(&place.publish(&other)), [""; 0]);
    let second = fs::read_to_string(&card).unwrap();
    assert!(second != first && second.contains("# other\n"));
    fs::write(&card, second.clone() + "\nMy words.\n").unwrap();
    assert_eq!(errors(&place.publish(&other)), ["card-changed"]);
    fs::remove_file(&card).unwrap();
    assert_eq!(errors(&place.publish(&other)), [""; 0]);
    assert_eq!(fs::read_to_string(&card).unwrap(), second);
    fs::write(place.container().join("README.source.md"), "other").unwrap();
    assert_eq!(errors(&place.publish(&other)), ["evidence-missing", "file-hash", "report-of-other-bytes"]);
}

#[test]
fn without_a_repository_there_are_no_commands() {
    let place = Place::new();
    let report = place.publish(&Options { repo_id: None, ..place.options() });
    assert_eq!(errors(&report), [""; 0]);
    assert!(report.steps.is_empty() && report.plan.is_some());
    assert!(fs::read_to_string(place.container().join("README.md")).unwrap().contains("# nano-g64\n"));
}

#[test]
fn only_a_plan_is_replaced_by_a_plan() {
    let place = Place::new();
    fs::write(place.path("nano-g64.upload-plan.json"), "{}").unwrap();
    let faults = coliconv::publish::publish(&place.container(), &place.options(), &Silent).unwrap_err();
    assert_eq!(faults.iter().map(|fault| fault.kind.name()).collect::<Vec<_>>(), ["other-report"]);
    assert_eq!(fs::read(place.path("nano-g64.upload-plan.json")).unwrap(), b"{}");
    assert!(!place.container().join("SHA256SUMS").exists());
}

#[test]
fn converting_again_leaves_what_was_published() {
    let place = Place::new();
    let source = copy(&fixture("nano"));
    fs::write(source.path().join("README.md"), CARD).unwrap();
    let convert = |source: &std::path::Path, container: &std::path::Path, passes: &[Pass]| {
        let options = convert::Options { passes: passes.to_vec(), ..Default::default() };
        Job::prepare(source, container, options).and_then(|job| job.run(&Silent)).unwrap_or_else(|f| panic!("{f}"));
    };
    let main = place.path("main");
    convert(source.path(), &main, &[Pass::Main]);
    let place = Place { root: place.root };
    // Published as it is, with the files of a container that has only the main pass.
    fs::remove_dir_all(place.container()).unwrap();
    fs::rename(&main, place.container()).unwrap();
    place.store("verify.json", &place.verified_without_head());
    place.store("score.json", &place.scored(Some(source.path())));
    place.published();
    let before = place.files();
    convert(source.path(), &place.container(), &[Pass::Main]);
    assert!(place.files() == before, "the same conversion changes nothing");
    // A pass that is added later keeps both cards, and needs new reports.
    convert(source.path(), &place.container(), &[Pass::Mtp]);
    let manifest = Manifest::read(&place.container()).unwrap().unwrap();
    let names: Vec<&str> = manifest.small_files.iter().map(|file| &*file.name).collect();
    assert!(names.contains(&"README.md") && names.contains(&"README.source.md"), "{names:?}");
    assert_eq!(fs::read_to_string(place.container().join("README.source.md")).unwrap(), CARD);
    assert!(errors(&place.publish(&place.options())).contains(&"report-of-other-bytes"));
}

impl Place {
    /// The report of a container without MTP head and indexer: its own tokens, and those of the source.
    fn verified_without_head(&self) -> serde_json::Value {
        use coliconv::verify::{self, TokenOptions};
        let tokens = TokenOptions::default();
        let options = verify::Options { level: Level::Tokens, source: Some(fixture("nano")), threads: 0, tokens };
        let report = verify::verify(&self.container(), &options, &Silent).unwrap_or_else(|faults| panic!("{faults}"));
        serde_json::to_value(&report).unwrap()
    }
}
