//! Evidence that proves nothing: another baseline, references of one's own, figures that cannot be true, drafts that nobody
//! measured.

use std::fs;

use coliconv::convert::{self, Silent};
use coliconv::publish::{Options, publish};
use coliconv::verify::{self, Level, TokenOptions};
use serde_json::{Value, json};

use super::support::containers::{edit_tensor, fixture, run_json};
use super::{Place, errors, lines};

/// A report that was changed, and what is said of it.
type Case = (&'static str, fn(&mut Value), &'static str);

#[test]
fn a_baseline_that_is_not_the_source_is_refused() {
    let cases: [Case; 3] = [
        ("score.json", |r| r["baseline"]["model_kind"] = json!("container"), "baseline-not-source"),
        (
            "score.json",
            |r| {
                r["baseline"].as_object_mut().unwrap().remove("model_kind").unwrap();
            },
            "baseline-not-source",
        ),
        ("verify.json", |r| r["source_model_sha256"] = json!("0".repeat(64)), "baseline-other-source"),
    ];
    for (name, edit, kind) in cases {
        let place = Place::new();
        place.edit(name, edit);
        place.refuses(&place.options(), &[kind]);
    }
}

#[test]
fn the_card_says_source_only_where_it_is_known() {
    let place = Place::new();
    place.published();
    let card = || fs::read_to_string(place.container().join("README.md")).unwrap();
    assert!(!card().contains("Scores against the source") && card().contains("| baseline |"), "{}", card());
    let source = place.load("score.json")["baseline"]["model_sha256"].clone();
    place.edit("verify.json", |report| report["source_model_sha256"] = source);
    place.published();
    assert!(card().contains("## Scores against the source\n") && card().contains("| source |"), "{}", card());
}

#[test]
fn verifying_with_the_source_tells_its_identity() {
    let place = Place::new();
    let options = verify::Options {
        level: Level::Weights,
        source: Some(fixture("nano")),
        threads: 0,
        tokens: TokenOptions::default(),
    };
    let report = verify::verify(&place.container(), &options, &Silent).unwrap_or_else(|faults| panic!("{faults}"));
    let expected = place.load("score.json")["baseline"]["model_sha256"].clone();
    assert_eq!(json!(report.source_model_sha256), expected);
    // Shards that the container has nothing of belong to the source, too.
    let main = place.path("main");
    let job = convert::Job::prepare(&fixture("nano"), &main, convert::Options::default());
    job.and_then(|job| job.run(&Silent)).unwrap_or_else(|faults| panic!("{faults}"));
    let report = verify::verify(&main, &options, &Silent).unwrap_or_else(|faults| panic!("{faults}"));
    assert_eq!(json!(report.source_model_sha256), expected);
    assert_eq!(json!(coliconv::score::identity::model_sha256_in(&fixture("nano")).unwrap()), expected);
    // Of a container that is not the source's it is not said.
    edit_tensor(&main, "model.norm.weight", |bytes| bytes[3] ^= 64);
    let report = verify::verify(&main, &options, &Silent).unwrap_or_else(|faults| panic!("{faults}"));
    assert!(report.source_model_sha256.is_none());
}

#[test]
fn references_that_the_container_wrote_do_not_count() {
    let place = Place::new();
    let verified = |tokens| {
        let options = verify::Options { level: Level::Tokens, source: None, threads: 0, tokens };
        let report = verify::verify(&place.container(), &options, &Silent).unwrap_or_else(|faults| panic!("{faults}"));
        serde_json::to_value(&report).unwrap()
    };
    let own = place.path("own.json");
    verified(TokenOptions { write_reference: Some(own.clone()), ..TokenOptions::default() });
    let report = verified(TokenOptions { references: vec![own], ..TokenOptions::default() });
    assert_eq!(report["tokens"][0]["written_by"], report["model_sha256"]);
    place.store("verify.json", &report);
    let report = place.refuses(&place.options(), &["evidence-missing"]);
    assert!(lines(&report).contains("the reference was written by this very container"), "{}", lines(&report));
    // Written by another model it is a reference as any other.
    place.edit("verify.json", |report| {
        report["tokens"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .for_each(|entry| entry["written_by"] = json!("0".repeat(64)));
    });
    place.published();
}

#[test]
fn drafts_must_have_been_measured() {
    let place = Place::new();
    let unmeasured = |report: &mut Value| {
        report["tokens"].as_array_mut().unwrap().iter_mut().for_each(|entry| entry["mtp"] = Value::Null);
        report["own_drafts"] = Value::Null;
    };
    place.edit("verify.json", unmeasured);
    let report = place.refuses(&place.options(), &["evidence-missing"]);
    let finding = report.findings.iter().find(|finding| finding.kind == "evidence-missing").unwrap();
    assert!(finding.message.contains("a measurement of the MTP head's drafts"), "{finding:?}");
    assert!(finding.hint.as_deref().unwrap().ends_with(" --probes`"), "{finding:?}");
    place.edit("verify.json", |report| report["own_drafts"] = json!({"proposed": 10, "accepted": 0}));
    place.refuses(&place.options(), &["policy-missed"]);
    place.edit("verify.json", |report| report["own_drafts"] = json!({"proposed": 10, "accepted": 5}));
    place.published();
}

#[test]
fn reports_that_contradict_themselves_are_refused() {
    let cases: [Case; 31] = [
        ("verify.json", |r| r["tokens"][0]["teacher_forced"]["matched"] = json!(1), "`teacher_forced` of "),
        (
            "verify.json",
            |r| r["tokens"][0]["teacher_forced"] = json!({"matched": 0, "near_tie": 0, "total": 0}),
            "is 0 of 0",
        ),
        ("verify.json", |r| r["level"] = json!("structure"), "`level` is structure"),
        ("verify.json", |r| r["checks"][0]["status"] = json!("fail"), "is fail, expected pass, as the verdict"),
        (
            "verify.json",
            |r| {
                let finding = json!({"severity": "error", "kind": "tokens-differ", "file": null, "tensor": null,
                    "offset": null, "message": "m", "hint": null});
                r["findings"].as_array_mut().unwrap().push(finding);
            },
            "a finding is tokens-differ",
        ),
        ("verify.json", |r| r["model_sha256"] = Value::Null, "`model_sha256` is absent"),
        ("verify.json", |r| r["kind"] = json!("checkpoint"), "`kind` is checkpoint, expected container"),
        (
            "verify.json",
            |r| r["source_agreement"] = json!({"matched": 9, "total": 3, "mean_abs_logprob_diff": null}),
            "is 9 of 3",
        ),
        ("score.json", |r| r["kind"] = json!("checkpoint"), "score.json: the report contradicts itself: `kind`"),
        (
            "score.json",
            |r| r["baseline"]["tasks"][0]["acc"]["difference"] = json!(0.9),
            "the difference of gloss acc is 0.9",
        ),
        ("score.json", |r| r["baseline"]["texts"][0]["ratio"] = json!(0.5), "the ratio of heldout is 0.5"),
        ("score.json", |r| r["inputs"][0]["scored_rows"] = json!(1), "`scored_rows` of gloss is 1, expected 6"),
        ("score.json", |r| r["baseline"]["compared"][0]["name"] = json!("other"), "`compared` is heldout, other"),
        ("score.json", |r| r["tasks"] = json!([]), "the tasks of `baseline` is gloss"),
        (
            "verify.json",
            |r| r["own_drafts"] = json!({"proposed": 2, "accepted": 3}),
            "`own_drafts` is 3, expected at most 2",
        ),
        ("verify.json", |r| r["tokens"][0]["greedy"]["matched"] = json!(1), "`greedy` of "),
        ("verify.json", |r| r["tokens"][0]["max_abs_logprob_diff"] = json!(3e-4), "is 0.0003, expected at most 0.0002"),
        ("verify.json", |r| r["tokens"][0]["max_abs_logprob_diff"] = json!(-1), "`max_abs_logprob_diff` of "),
        (
            "verify.json",
            |r| {
                let check = r["checks"][0].clone();
                r["checks"].as_array_mut().unwrap().push(check);
            },
            "is more, expected 1",
        ),
        (
            "verify.json",
            |r| {
                let check = json!({"name": "weights", "status": "pass", "detail": "all"});
                r["checks"].as_array_mut().unwrap().push(check);
            },
            "`source` is absent, expected a checkpoint",
        ),
        ("score.json", |r| r["texts"] = json!([]), "the texts of `baseline` is heldout"),
        ("score.json", |r| r["requests"] = json!([]), "the number of rows of gloss in `requests` is 0, expected 6"),
        ("score.json", |r| r["tasks"][0]["acc"] = json!(1.5), "`acc` of gloss is 1.5"),
        ("score.json", |r| r["tasks"][0]["acc_bytes"] = json!(-0.5), "`acc_bytes` of gloss is -0.5"),
        ("score.json", |r| r["tasks"][0]["acc_norm"] = json!(0.4), "`acc_norm` of gloss is 0.4, expected a share of 6"),
        ("score.json", |r| r["tasks"][0]["stderr"] = json!(0.9), "`stderr` of gloss is 0.9"),
        ("score.json", |r| r["tasks"][0]["stderr_norm"] = Value::Null, "`stderr_norm` of gloss is null"),
        ("score.json", |r| r["tasks"][0]["n"] = json!(12), "`stderr` of gloss is "),
        ("score.json", |r| r["baseline"]["positions"] = json!(0), "`positions` of `baseline` is 0"),
        ("score.json", |r| r["baseline"]["top1_agreement"] = json!(1.5), "`top1_agreement` of `baseline` is 1.5"),
        ("score.json", |r| r["baseline"]["kl_mean"] = json!(-0.5), "`kl_mean` of `baseline` is -0.5"),
    ];
    for (name, edit, says) in cases {
        let place = Place::new();
        place.edit(name, edit);
        let report = place.publish(&place.options());
        assert!(errors(&report).contains(&"report-contradicts"), "{says}: {report:#?}");
        assert!(lines(&report).contains(says), "{says}\n{}", lines(&report));
        assert!(report.plan.is_none() && report.written.is_empty(), "{says}");
    }
}

#[test]
fn the_default_policy_keeps_wrecked_containers_back() {
    let place = Place::new();
    let options = Options { policy: None, ..place.options() };
    let report = place.publish(&options);
    assert!(lines(&report).contains("the number of questions of gloss is 6, the policy asks for at least 10"));
    let place = Place::new();
    place.edit("verify.json", |r| {
        r["source_agreement"] = json!({"matched": 1, "total": 30, "mean_abs_logprob_diff": 9.0});
    });
    place.edit("score.json", |r| r["baseline"]["kl_mean"] = json!(7.5));
    let report = place.refuses(&place.options(), &["policy-missed"]);
    for says in ["the agreement with the source is 1 of 30", "the mean KL divergence is 7.50000"] {
        assert!(lines(&report).contains(says), "{}", lines(&report));
    }
}

#[test]
fn a_card_of_the_source_may_not_be_lost() {
    let place = Place::new();
    fs::remove_file(place.container().join("README.md")).unwrap();
    let report = place.refuses(&place.options(), &["card-missing", "evidence-missing", "report-of-other-bytes"]);
    assert!(
        report
            .findings
            .iter()
            .any(|finding| finding.hint.as_deref().is_some_and(|hint| hint.contains("of the source")))
    );
}

#[test]
fn a_refusal_takes_the_plan_of_an_earlier_run_away() {
    let place = Place::new();
    place.published();
    let plan = place.path("nano-g64.upload-plan.json");
    assert!(plan.exists());
    place.edit("verify.json", |report| report["verdict"] = json!("fail"));
    place.refuses(&place.options(), &["evidence-missing", "report-says-no"]);
    // So does what is no answer.
    let ends: [(&str, &[u8]); 4] = [
        ("none.json", b""),
        ("verify.json", b"{\"level\": "),
        ("verify.json", b"{\"level\": \"tokens\", \"level\": \"payload\"}"),
        ("nano-g64/coliconv.manifest.json", b"{"),
    ];
    for (name, bytes) in ends {
        let place = Place::new();
        place.published();
        let mut options = place.options();
        if bytes.is_empty() {
            options.reports.push(place.path(name));
        } else {
            fs::write(place.path(name), bytes).unwrap();
        }
        let faults = publish(&place.container(), &options, &Silent).unwrap_err();
        assert!(!place.path("nano-g64.upload-plan.json").exists(), "{name}: {faults}");
    }
    let place = Place::new();
    place.published();
    fs::write(place.path("policy.json"), "{").unwrap();
    let policy = place.path("policy.json");
    let (code, _) = run_json(&["publish", "--policy", policy.to_str().unwrap()], &[&place.container()]);
    assert_eq!((code, place.path("nano-g64.upload-plan.json").exists()), (2, false));
    // What is not a plan stays.
    let plan = place.path("nano-g64.upload-plan.json");
    place.edit("verify.json", |report| report["verdict"] = json!("fail"));
    fs::write(&plan, "mine").unwrap();
    place.publish(&place.options());
    assert_eq!(fs::read(&plan).unwrap(), b"mine");
}

#[test]
fn the_same_report_twice_and_another_device_count_once() {
    let place = Place::new();
    place.published();
    let card = || fs::read_to_string(place.container().join("README.md")).unwrap();
    let before = card();
    fs::copy(place.path("score.json"), place.path("again.json")).unwrap();
    let options = place.options();
    let reports = [options.reports.clone(), vec![place.path("again.json"), place.path("verify.json")]].concat();
    assert_eq!(errors(&place.publish(&Options { reports, ..options })), [""; 0]);
    assert_eq!(card(), before);
    let drafts = |text: &str| text.lines().find(|line| line.contains("drafts of the MTP head")).unwrap().to_owned();
    place.edit("verify.json", |report| {
        let tokens = report["tokens"].as_array_mut().unwrap();
        let mut other = tokens.clone();
        other
            .iter_mut()
            .for_each(|entry| (entry["device"], entry["backend"]) = (json!("reference"), json!("reference")));
        tokens.extend(other);
    });
    place.published();
    assert_eq!(drafts(&card()), drafts(&before));
}

#[test]
fn a_policy_that_is_missed_tells_what_to_do() {
    let place = Place::new();
    let policy =
        r#"{"verify": {"devices": ["cpu", "vulkan"]}, "score": {"min_questions": 99, "max_accuracy_drop": 1}}"#;
    let report = place.publish(&place.with_policy(policy));
    let hints: Vec<&str> = report.findings.iter().filter_map(|finding| finding.hint.as_deref()).collect();
    assert!(hints.iter().any(|hint| hint.contains("--device vulkan")), "{hints:?}");
    assert!(hints.iter().any(|hint| hint.starts_with("score more")), "{hints:?}");
}

#[test]
fn hints_are_about_what_was_missed() {
    let hints = |place: &Place, policy: &str| -> Vec<String> {
        let report = place.publish(&place.with_policy(policy));
        report.findings.into_iter().filter(|f| f.kind == "policy-missed").filter_map(|finding| finding.hint).collect()
    };
    let place = Place::new();
    place.edit("verify.json", |report| {
        report["tokens"][0]["max_abs_logprob_diff"] = json!(1e-4);
        report["tokens"][0]["teacher_forced"]["near_tie"] = json!(1);
        let matched = &mut report["tokens"][0]["teacher_forced"]["matched"];
        *matched = json!(matched.as_u64().unwrap() - 1);
    });
    place.edit("score.json", |report| {
        let row = json!({"input": "gloss", "file": "f", "row": 3, "kind": "row-empty", "message": "m", "hint": null});
        report["excluded"] = json!([row]);
    });
    let policy = r#"{"verify": {"min_predictions": 9999, "max_near_tie_share": 0, "max_abs_logprob_diff": 1e-9},
        "score": {"max_accuracy_drop": 1, "max_perplexity_increase": 1, "min_questions": 1, "min_tokens": 1}}"#;
    let found = hints(&place, policy);
    assert_eq!(found.len(), 4, "{found:?}");
    assert_eq!(found.iter().filter(|hint| hint.starts_with("more bits change nothing")).count(), 2, "{found:?}");
    for says in ["longer --reference", "`score.allow_excluded`"] {
        assert!(found.iter().any(|hint| hint.contains(says)), "{says}: {found:?}");
    }
}

#[test]
fn a_directory_and_a_repeated_key_are_no_report() {
    let place = Place::new();
    let kinds = |path: std::path::PathBuf| {
        let faults =
            publish(&place.container(), &Options { reports: vec![path], ..place.options() }, &Silent).unwrap_err();
        let fault = faults.iter().next().unwrap();
        (fault.kind.name().to_owned(), fault.kind.hint().unwrap_or_default(), fault.to_string())
    };
    let (kind, hint, _) = kinds(place.root.path().to_owned());
    assert_eq!(kind, "report-directory");
    assert!(hint.starts_with("give the file in it: ") && hint.ends_with("/score.json"), "{hint}");
    let text = fs::read_to_string(place.path("score.json")).unwrap();
    fs::write(place.path("score.json"), text.replacen('{', "{\"kind\": \"container\",", 1)).unwrap();
    let (kind, _, text) = kinds(place.path("score.json"));
    assert!(kind == "json-syntax" && text.contains("`kind` appears twice"), "{text}");
}
