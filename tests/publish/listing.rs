//! Listings of a repository: what the Hub and huggingface_hub say, and everything that can be wrong.

use std::fs;
use std::path::PathBuf;

use coliconv::convert::{self, Silent};
use coliconv::publish::{Options, publish};
use coliconv::report::{PublishListing, PublishReport, Storage, Verdict};
use coliconv::roles::Pass;
use serde_json::{Value, json};

use super::support::containers::{assert_valid, container, fixture, run_json};
use super::{Place, errors, lines};

/// The listing that the Hub would give of a published container, as its tree.
fn tree(report: &PublishReport) -> Vec<Value> {
    let mut files = vec![
        json!({"type": "directory", "oid": "d".repeat(40), "size": 0, "path": "folder"}),
        json!({"type": "file", "oid": "a".repeat(40), "size": 1519, "path": ".gitattributes"}),
    ];
    files.extend(report.files.iter().map(|file| match file.storage {
        Storage::Git => json!({"type": "file", "oid": file.git_blob_id, "size": file.bytes, "path": file.name}),
        Storage::Lfs => json!({
            "type": "file", "oid": "b".repeat(40), "size": file.bytes, "path": file.name, "xetHash": "c".repeat(64),
            "lfs": {"oid": file.sha256, "size": file.bytes, "pointerSize": 135},
        }),
    }));
    files
}

struct Published {
    place: Place,
    tree: Vec<Value>,
}

impl Published {
    fn new() -> Published {
        let place = Place::new();
        let report = place.published();
        Published { tree: tree(&report), place }
    }

    fn entry(&mut self, name: &str) -> &mut Value {
        self.tree.iter_mut().find(|entry| entry["path"] == name).unwrap()
    }

    fn check_text(&self, text: &str) -> PublishReport {
        let listing: PathBuf = self.place.path("listing.json");
        fs::write(&listing, text).unwrap();
        self.place.publish(&Options { listing: Some(listing), ..Options::default() })
    }

    fn check(&self) -> (PublishReport, PublishListing) {
        let report = self.check_text(&json!(self.tree).to_string());
        let listing = report.listing.clone().unwrap();
        (report, listing)
    }
}

#[test]
fn every_form_of_a_listing_is_read() {
    let published = Published::new();
    let entries: Vec<&Value> = published.tree.iter().filter(|entry| entry["type"] == "file").collect();
    let of_library = |entry: &&Value, name: &str, blob: &str| {
        let lfs = &entry["lfs"];
        let lfs = if lfs.is_null() {
            Value::Null
        } else {
            json!({"sha256": lfs["oid"], "size": lfs["size"], "pointer_size": 135})
        };
        json!({name: entry["path"], "size": entry["size"], blob: entry["oid"], "lfs": lfs, "last_commit": null})
    };
    let tree = json!(published.tree).to_string();
    let files: Vec<Value> = entries.iter().map(|entry| of_library(entry, "path", "blob_id")).collect();
    let folder = json!({"path": "folder", "tree_id": "d".repeat(40), "last_commit": null});
    let siblings: Vec<Value> = entries.iter().map(|entry| of_library(entry, "rfilename", "blobId")).collect();
    let half = published.tree.len() / 2;
    let pages = json!(published.tree[..half]).to_string() + "\n" + &json!(published.tree[half..]).to_string();
    let forms = [
        tree,
        json!([&[folder][..], &files].concat()).to_string(),
        files.iter().map(|file| file.to_string() + "\n").collect(),
        json!({"id": "example/nano-g64", "siblings": siblings}).to_string(),
        pages,
    ];
    for form in forms {
        let report = published.check_text(&form);
        assert_eq!((report.verdict, lines(&report)), (Verdict::Pass, String::new()), "{form}");
        let listing = report.listing.unwrap();
        assert_eq!((listing.expected, listing.matched), (17, 17), "{form}");
    }
}

/// `fixtures/hub` was made by huggingface_hub itself, of the same container before it was published; the manifest, which
/// holds the times of the source, is left out.
#[test]
fn what_the_library_made_of_nano_is_nano() {
    let options = || convert::Options { passes: Pass::ALL.to_vec(), ..Default::default() };
    let nano = container("nano", "whole", options);
    let listing = Some(fixture("hub").join("repo-files.json"));
    let report = publish(nano.path(), &Options { listing, ..Options::default() }, &Silent).unwrap();
    let listing = report.listing.unwrap();
    assert_eq!((listing.matched, listing.missing), (13, vec!["coliconv.manifest.json".to_owned()]));
    assert!(listing.wrong.is_empty() && listing.short.is_empty() && listing.extra.is_empty(), "{:?}", report.findings);
}

#[test]
fn short_wrong_missing_and_extra_files_are_named() {
    let mut published = Published::new();
    let lfs = published.entry("out-00000.safetensors");
    (lfs["size"], lfs["lfs"]["size"]) = (json!(1000), json!(1000));
    published.entry("out-00001.safetensors")["lfs"]["oid"] = json!("0".repeat(64));
    published.entry("config.json")["oid"] = json!("0".repeat(40));
    published.entry("README.md")["size"] = json!(100_000);
    published.entry("chat_template.jinja")["oid"] = Value::Null;
    published.entry("out-mtp-00000.safetensors")["lfs"]["size"] = json!(7);
    published.entry("out-idx-00000.safetensors")["lfs"]["oid"] = Value::Null;
    let twice = {
        let mut entry = published.entry("tokenizer.json").clone();
        entry["oid"] = json!("1".repeat(40));
        entry
    };
    published.tree.push(twice);
    published.tree.retain(|entry| entry["path"] != "coliconv.manifest.json");
    published.tree.push(json!({"type": "file", "oid": "e".repeat(40), "size": 3, "path": "folder/old.bin"}));
    let (report, listing) = published.check();
    assert_eq!(listing.short, ["out-00000.safetensors", "out-mtp-00000.safetensors"]);
    let mut wrong = listing.wrong.clone();
    wrong.sort();
    assert_eq!(
        wrong,
        [
            "README.md",
            "chat_template.jinja",
            "config.json",
            "out-00001.safetensors",
            "out-idx-00000.safetensors",
            "tokenizer.json"
        ]
    );
    assert_eq!(listing.missing, ["coliconv.manifest.json"]);
    assert_eq!(listing.extra, ["folder/old.bin"]);
    assert_eq!(listing.matched, 17 - 9);
    let kinds =
        ["listing-extra", "listing-hash", "listing-missing", "listing-no-hash", "listing-size", "listing-twice"];
    assert_eq!((errors(&report), report.verdict), (kinds.to_vec(), Verdict::Fail));
    assert!(
        lines(&report)
            .contains("out-00000.safetensors: the repository has 1000 bytes of this file, the container 1641264")
    );
}

#[test]
fn each_file_that_is_wrong_in_any_way_is_noticed() {
    let published = Published::new();
    let all: Vec<String> = published.place.files().into_iter().map(|(name, _)| name).collect();
    assert_eq!(all.len(), 17);
    for name in all {
        for way in ["size", "hash", "missing"] {
            let mut tree = published.tree.clone();
            let entry = tree.iter_mut().find(|entry| entry["path"] == *name).unwrap();
            match way {
                "size" => entry["size"] = json!(entry["size"].as_u64().unwrap() - 1),
                "hash" if entry["lfs"].is_null() => entry["oid"] = json!("0".repeat(40)),
                "hash" => entry["lfs"]["oid"] = json!("0".repeat(64)),
                _ => tree.retain(|entry| entry["path"] != *name),
            }
            let listing = published.place.path("listing.json");
            fs::write(&listing, json!(tree).to_string()).unwrap();
            let report = published.place.publish(&Options { listing: Some(listing), ..Options::default() });
            assert_eq!(report.verdict, Verdict::Fail, "{name}: {way}");
            let found = report.listing.unwrap();
            let named = [&found.short, &found.wrong, &found.missing].into_iter().flatten().collect::<Vec<_>>();
            assert_eq!(named, [&name], "{way}");
        }
    }
}

#[test]
fn a_local_file_that_was_edited_cannot_vouch_for_a_remote_one() {
    let published = Published::new();
    let path = published.place.container().join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen('\n', " ", 1)).unwrap();
    let (report, listing) = published.check();
    assert_eq!((errors(&report), listing.wrong), (vec!["file-hash"], vec!["config.json".to_owned()]));
}

#[test]
fn listings_that_are_none_are_refused() {
    let published = Published::new();
    let container = published.place.container();
    for text in [
        "",
        "3",
        "[1]",
        "{\"error\": \"Repository not found\"}",
        "<html>",
        "[{\"path\": \"a\", \"size\": 1}, {\"path\": \"b\", \"type\": \"file\"}]",
        "[{}]",
        "{\"siblings\": 3}",
    ] {
        let path = published.place.path("listing.json");
        fs::write(&path, text).unwrap();
        let (code, document) = run_json(&["publish", "--check-listing", path.to_str().unwrap()], &[&container]);
        assert_valid("publish", &document);
        assert_eq!((code, &document["refused"][0]["kind"]), (2, &json!("listing-syntax")), "{text}");
    }
    // An empty repository is one that lacks everything.
    let report = published.check_text("[]");
    assert_eq!(report.listing.unwrap().missing.len(), 17);
}

#[test]
fn a_listing_of_names_alone_is_no_answer() {
    let published = Published::new();
    let names: Vec<&Value> = published.tree.iter().filter(|e| e["type"] == "file").map(|e| &e["path"]).collect();
    let each = |entry: &dyn Fn(&Value) -> Value| names.iter().map(|name| entry(name)).collect::<Vec<Value>>();
    let unknown = |name: &Value| json!({"rfilename": name, "size": null, "blob_id": null, "lfs": null});
    let forms = [
        json!({"id": "example/nano-g64", "siblings": each(&|name| json!({"rfilename": name}))}),
        json!(each(&unknown)),
        json!(each(&|name| json!({"type": "file", "path": name}))),
        json!(names),
    ];
    let container = published.place.container();
    for form in forms {
        let path = published.place.path("listing.json");
        fs::write(&path, form.to_string()).unwrap();
        let (code, document) = run_json(&["publish", "--check-listing", path.to_str().unwrap()], &[&container]);
        assert_valid("publish", &document);
        let refused = &document["refused"][0];
        assert_eq!((code, &refused["kind"]), (2, &json!("listing-names")), "{form}");
        let message =
            "the listing has neither sizes nor hashes, of all 18 files only the name; the first is .gitattributes";
        assert_eq!(refused["message"], message);
        assert!(refused["hint"].as_str().unwrap().contains("/tree/main?recursive=true"), "{refused}");
    }
    let sizes = |entry: &Value| json!({"path": entry["path"], "size": entry["size"]});
    let sized: Vec<Value> = published.tree.iter().filter(|e| e["type"] == "file").map(sizes).collect();
    let report = published.check_text(&json!(sized).to_string());
    assert_eq!(errors(&report), ["listing-no-hash"]);
    let listing = report.listing.unwrap();
    assert_eq!((listing.matched, listing.wrong.len(), listing.missing.len()), (0, 17, 0));
}

#[test]
fn gate_and_listing_go_together() {
    let published = Published::new();
    let listing = published.place.path("listing.json");
    fs::write(&listing, json!(published.tree).to_string()).unwrap();
    let both = Options { listing: Some(listing.clone()), ..published.place.options() };
    let report = published.place.publish(&both);
    assert_eq!((report.verdict, report.checks.last().unwrap().name.as_str()), (Verdict::Pass, "listing"));
    let closed = Options { listing: Some(listing), repo_id: Some("a/b".into()), ..Options::default() };
    let report = published.place.publish(&closed);
    assert_eq!(report.verdict, Verdict::Fail);
    assert_eq!(report.listing.unwrap().matched, 17);
}
