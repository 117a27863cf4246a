//! What the gate demands: each refusal, by policy and without.

use std::fs;

use coliconv::convert::Silent;
use coliconv::part::Part;
use coliconv::publish::{Options, publish};
use coliconv::verify::parts::{finish, verify_part};
use coliconv::verify::{self, Level, TokenOptions};
use serde_json::{Value, json};

use super::support::containers::{assert_valid, fixture, run, run_json};
use super::{LENIENT, Place, errors, lines};

#[test]
fn without_reports_everything_is_named_with_its_command() {
    let place = Place::new();
    let report = place.refuses(&Options { reports: Vec::new(), ..place.options() }, &["evidence-missing"]);
    let failed: Vec<&str> =
        report.checks.iter().filter(|check| check.status.name() == "fail").map(|check| &*check.name).collect();
    assert_eq!(failed, ["structure", "payload", "tokens", "score"]);
    let hints: Vec<&str> = report.findings.iter().filter_map(|finding| finding.hint.as_deref()).collect();
    for command in ["run `coliconv verify ", "run `coliconv score "] {
        assert!(hints.iter().any(|hint| hint.starts_with(command)), "{hints:?}");
    }
}

#[test]
fn a_verification_in_parts() {
    let place = Place::new();
    let references = vec![place.path("reference.json"), fixture("nano").join("expected/mtp-g64-mtp-indexer.json")];
    let tokens = TokenOptions { references, ..TokenOptions::default() };
    let options = verify::Options { level: Level::Tokens, source: None, threads: 0, tokens };
    let report = place.path("verify.json");
    fs::remove_file(&report).unwrap();
    for number in 1..=2 {
        let part = Part::new(number, 2).unwrap();
        let found = verify_part(&place.container(), &options, part, &Silent).unwrap();
        place.store(&format!("verify-{number}-of-2.json"), &serde_json::to_value(&found).unwrap());
    }
    let only = Options { reports: vec![place.path("verify-1-of-2.json"), place.path("score.json")], ..place.options() };
    let refused = place.refuses(&only, &["evidence-missing", "report-of-part"]);
    assert!(lines(&refused).contains("verify-1-of-2.json: the report is of part 1/2 alone"), "{}", lines(&refused));
    let whole = finish(&place.container(), &options, &report, &Silent).unwrap();
    place.store("verify.json", &serde_json::to_value(&whole).unwrap());
    place.published();
}

#[test]
fn one_report_does_not_stand_for_the_other() {
    let place = Place::new();
    let only = |name: &str| Options { reports: vec![place.path(name)], ..place.options() };
    place.refuses(&only("verify.json"), &["evidence-missing"]);
    place.refuses(&only("score.json"), &["evidence-missing"]);
    place.store("verify.json", &place.verified(Level::Payload));
    let report = place.refuses(&place.options(), &["evidence-missing"]);
    assert!(lines(&report).contains("a verification of the tokens, with a reference or the source, is missing"));
}

#[test]
fn a_container_without_manifest_is_refused() {
    let place = Place::new();
    fs::remove_file(place.container().join("coliconv.manifest.json")).unwrap();
    let report = place.refuses(&place.options(), &["evidence-missing"]);
    assert!(lines(&report).contains("coliconv.manifest.json: the manifest is missing"));
    assert!(report.model_sha256.is_none());
}

#[test]
fn an_unfinished_conversion_is_refused() {
    let place = Place::new();
    fs::write(place.container().join(".coliconv-progress.json"), "{}").unwrap();
    let report = place.publish(&place.options());
    assert!(errors(&report).contains(&"conversion-unfinished"), "{report:#?}");
}

#[test]
fn manifests_that_lead_elsewhere_are_refused() {
    for (name, kind) in [("../verify.json", "manifest-path"), ("config.json", "manifest-file-twice")] {
        let place = Place::new();
        place.edit("nano-g64/coliconv.manifest.json", |manifest| manifest["small_files"][0]["name"] = json!(name));
        let report = place.publish(&place.options());
        assert!(errors(&report).contains(&kind), "{report:#?}");
        assert!(report.plan.is_none());
    }
}

/// A report that was changed, and what closes the gate then.
type Case = (&'static str, fn(&mut Value), &'static str, &'static str);

#[test]
fn reports_that_show_too_little_are_refused() {
    let cases: [Case; 12] = [
        ("verify.json", |r| r["verdict"] = json!("fail"), "report-says-no", "verify.json: the verdict of this report"),
        ("verify.json", |r| r["kind"] = json!("checkpoint"), "report-says-no", "verify.json"),
        (
            "verify.json",
            |r| r["tokens"][0]["teacher_forced"]["near_tie"] = json!(30),
            "policy-missed",
            "the number of near-ties is 30 of ",
        ),
        (
            "verify.json",
            |r| r["tokens"].as_array_mut().unwrap().iter_mut().for_each(|t| t["backend"] = json!("reference")),
            "policy-missed",
            "the number of devices that computed is 0, the policy asks for at least 1",
        ),
        (
            "verify.json",
            |r| {
                for entry in r["tokens"].as_array_mut().unwrap() {
                    (entry["device"], entry["backend"]) = (json!("cuda:0"), json!("cuda"));
                    entry["gpu"] = json!({"dispatches": 0, "fallbacks": 9, "operations": []});
                }
            },
            "policy-missed",
            "the number of devices that computed is 0",
        ),
        (
            "verify.json",
            |r| {
                r["tokens"].as_array_mut().unwrap().iter_mut().for_each(|t| t["reference"] = json!("reference backend"))
            },
            "evidence-missing",
            "a verification of the tokens, with a reference or the source, is missing",
        ),
        (
            "verify.json",
            |r| {
                r["tokens"].as_array_mut().unwrap().iter_mut().for_each(|t| {
                    if !t["mtp"].is_null() {
                        t["mtp"]["accepted"] = json!(0);
                    }
                })
            },
            "policy-missed",
            "the number of accepted drafts of the MTP head is 0 of ",
        ),
        ("score.json", |r| r["verdict"] = json!("fail"), "report-says-no", "score.json: the verdict of this report"),
        ("score.json", |r| r["part"] = json!("2/8"), "report-of-part", "the report is of part 2/8 alone"),
        (
            "score.json",
            |r| r["baseline"]["texts"][0]["ratio"] = json!(1.6),
            "policy-missed",
            "the perplexity of heldout over the source's is 1.6000",
        ),
        (
            "score.json",
            |r| r["baseline"]["tasks"][0]["acc_norm"]["difference"] = json!(-0.6),
            "policy-missed",
            "the difference of gloss acc_norm to the source is -0.6000",
        ),
        (
            "score.json",
            |r| r["baseline"]["compared"][0]["compared"] = json!(1),
            "policy-missed",
            "the number of compared rows of gloss is 1 of 6, the policy asks for all",
        ),
    ];
    for (name, edit, kind, says) in cases {
        let place = Place::new();
        place.edit(name, edit);
        let report = place.publish(&place.options());
        assert!(errors(&report).contains(&kind), "{says}: {report:#?}");
        assert!(lines(&report).contains(says), "{says}\n{}", lines(&report));
        assert!(report.plan.is_none() && report.written.is_empty(), "{says}");
    }
}

/// What was verified with rounded sums says little of the weights.
#[test]
fn tokens_in_fast_mode_are_no_evidence() {
    let place = Place::new();
    place.edit("verify.json", |report| {
        report["tokens"][0]["mode"] = json!("fast");
        report["tokens"][0]["max_abs_logprob_diff"] = json!(0.01);
    });
    let report = place.refuses(&place.options(), &["policy-missed"]);
    assert!(lines(&report).contains("the mode in which tokens were verified"), "{}", lines(&report));
}

/// Nor do scores with them, or against such scores of the source.
#[test]
fn scores_in_fast_mode_are_no_evidence() {
    type Case = (fn(&mut Value), &'static str);
    let cases: [Case; 4] = [
        (|report| report["mode"] = json!("fast"), "the mode in which the container was scored is fast"),
        (
            |report| report["baseline"]["mode"] = json!("fast"),
            "the mode in which the baseline was scored is fast, the policy asks for exact",
        ),
        (
            |report| drop(report["baseline"].as_object_mut().unwrap().remove("mode").unwrap()),
            "the mode in which the baseline was scored is not known, the policy asks for exact",
        ),
        (|report| report["baseline"]["mode"] = Value::Null, "the mode in which the baseline was scored is not known"),
    ];
    for (edit, says) in cases {
        let place = Place::new();
        place.edit("score.json", edit);
        let report = place.refuses(&place.options(), &["policy-missed"]);
        assert!(lines(&report).contains(says), "{}", lines(&report));
        let hints = report.findings.iter().filter_map(|finding| finding.hint.as_deref());
        assert!(hints.into_iter().any(|hint| hint.contains("without --mode fast")), "{}", lines(&report));
    }
}

#[test]
fn more_of_the_score_is_looked_at() {
    let place = Place::new();
    place.edit("score.json", |report| report["baseline"] = Value::Null);
    let report = place.refuses(&place.options(), &["evidence-missing"]);
    assert!(lines(&report).contains("a score that is compared with the source's is missing"));
    let place = Place::new();
    place.edit("score.json", |report| {
        report["baseline"]["model_sha256"] = report["model_sha256"].clone();
        let row = json!({"input": "gloss", "file": "f", "row": 3, "kind": "row-empty", "message": "m", "hint": null});
        report["excluded"] = json!([row]);
    });
    place.refuses(&place.options(), &["baseline-same-model", "policy-missed"]);
}

#[test]
fn policies_ask_for_more() {
    let place = Place::new();
    let cases = [
        (r#"{"verify": {"weights": true}}"#, "a comparison of the weights with the source is missing"),
        (
            r#"{"verify": {"devices": ["cpu", "vulkan"]}}"#,
            "the devices that computed is cpu, the policy asks for vulkan",
        ),
        (
            r#"{"verify": {"min_devices": 2}}"#,
            "the number of devices that computed is 1, the policy asks for at least 2",
        ),
        (r#"{"verify": {"min_references": 9}}"#, "the number of references is "),
        (r#"{"verify": {"max_abs_logprob_diff": 1e-9}}"#, "the largest difference of a log-probability is "),
        (r#"{"verify": {"min_source_agreement": 0.5}}"#, "the agreement with the source is not known"),
        (r#"{"verify": {"min_mtp_acceptance": 1}}"#, "the number of accepted drafts of the MTP head is "),
        (r#"{"score": {"min_tasks": 2}}"#, "the number of tasks is 1, the policy asks for at least 2"),
        (r#"{"score": {"min_texts": 2}}"#, "the number of texts is 1, the policy asks for at least 2"),
        (r#"{"score": {"min_questions": 100}}"#, "the number of questions of gloss is 6"),
        (r#"{"score": {"conclusive": true}}"#, "of the whole interval"),
        (r#"{"score": {"max_kl_mean": 0.001}}"#, "the mean KL divergence is "),
        (r#"{"score": {"min_top1_agreement": 0.99}}"#, "the share of equal best tokens is "),
        (r#"{"score": {"max_perplexity_increase": 0}}"#, "the policy asks for at most 1.0000"),
    ];
    for (policy, says) in cases {
        let report = place.publish(&place.with_policy(policy));
        assert!(lines(&report).contains(says), "{policy}: {}", lines(&report));
        assert!(report.plan.is_none(), "{policy}");
    }
    place.without_card();
    let report = place.refuses(
        &place.with_policy(
            r#"{"card": {"license": true}, "score": {"max_accuracy_drop": 1, "max_perplexity_increase": 1, "min_questions": 1, "min_tokens": 1}}"#,
        ),
        &["license-unknown"],
    );
    assert!(report.findings.iter().any(|finding| finding.kind == "base-model-unknown"));
}

#[test]
fn what_cannot_be_read_is_exit_code_two() {
    let place = Place::new();
    let container = place.container();
    fs::write(place.path("list.json"), "[1]").unwrap();
    fs::write(place.path("broken.json"), "{").unwrap();
    fs::write(place.path("policy.json"), r#"{"scores": {}}"#).unwrap();
    let path = |name: &str| place.path(name).to_str().unwrap().to_owned();
    let cases: [(&[&str], &str); 9] = [
        (&["--report", &path("list.json")], "not-a-report"),
        (&["--report", &path("broken.json")], "json-syntax"),
        (&["--report", &path("none.json")], "io"),
        (&["--report", &path("nano-g64/config.json")], "not-a-report"),
        (&["--policy", &path("policy.json")], "policy-syntax"),
        (&["--repo-id", "nano"], "flag-value"),
        (&["--repo-id", "a/b/c"], "flag-value"),
        (&["--repo-id", "a/b--c"], "flag-value"),
        (&["--check-listing", &path("broken.json")], "listing-syntax"),
    ];
    for (arguments, kind) in cases {
        let (code, document) = run_json(&[&["publish"], arguments].concat(), &[&container]);
        assert_valid("publish", &document);
        assert_eq!((code, &document["refused"][0]["kind"]), (2, &json!(kind)), "{arguments:?}");
    }
    let (code, document) = run_json(&["publish"], &[&place.path("none")]);
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &json!("not-a-directory")));
    let none = path("none.json");
    for arguments in [["publish", "--check-listing", &none], ["publish", "--policy", &none]] {
        let (code, document) = run_json(&arguments, &[&container]);
        assert_eq!((code, &document["refused"][0]["kind"]), (2, &json!("io")), "{arguments:?}");
    }
    fs::remove_file(container.join("coliconv.manifest.json")).unwrap();
    fs::write(place.path("empty.json"), "[]").unwrap();
    let (code, document) = run_json(&["publish", "--check-listing", &path("empty.json")], &[&container]);
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &json!("evidence-missing")));
}

/// A file that cannot be read is no answer, neither yes nor no. Root may read everything, so the files here are links that
/// lead in a circle.
#[cfg(unix)]
#[test]
fn a_file_that_cannot_be_read_is_exit_code_two() {
    for name in ["tokenizer.json", "README.md", "out-00001.safetensors", "coliconv.manifest.json"] {
        let place = Place::new();
        let path = place.container().join(name);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(name, &path).unwrap();
        let reports = [place.path("verify.json"), place.path("score.json")];
        let [verify, score] = reports.each_ref().map(|path| path.to_str().unwrap());
        let (code, document) = run_json(&["publish", "--report", verify, "--report", score], &[&place.container()]);
        assert_valid("publish", &document);
        assert_eq!((code, &document["refused"][0]["kind"]), (2, &json!("io")), "{name}: {document:#}");
        assert!(document["refused"][0]["file"].as_str().unwrap().ends_with(name), "{document:#}");
        assert!(!place.path("nano-g64.upload-plan.json").exists());
    }
}

#[test]
fn what_is_odd_is_said_although_the_gate_is_open() {
    let place = Place::new();
    let policy = r#"{"verify": {"min_mtp_acceptance": 0}, "score": {"max_accuracy_drop": 1, "max_perplexity_increase": 1, "min_questions": 1, "min_tokens": 1}}"#;
    let report = place.publish(&place.with_policy(policy));
    assert_eq!(errors(&report), [""; 0]);
    assert!(lines(&report).contains("whether the MTP head is of any use is not looked at"), "{}", lines(&report));
    // A second device was asked for, and another one computed.
    let place = Place::new();
    place.edit("verify.json", |report| {
        let mut other = report["tokens"][0].clone();
        other["device"] = json!("vulkan:0");
        report["tokens"].as_array_mut().unwrap().push(other);
    });
    let report = place.publish(&place.options());
    assert_eq!(errors(&report), [""; 0]);
    assert!(lines(&report).contains("vulkan:0 was asked for, but the cpu backend computed in its place"));
}

#[test]
fn a_card_whose_yaml_does_not_parse_is_kept_and_told() {
    for (card, says) in
        [("---\nlicense: mit\n# Nano\n", "no other line closes it"), ("---\n- a\n---\n", "keys with values")]
    {
        let place = Place::new();
        place.with_card(card);
        let report = place.publish(&place.options());
        assert_eq!(errors(&report), [""; 0], "{report:#?}");
        assert!(lines(&report).contains(says) && lines(&report).contains("no licence is known"), "{}", lines(&report));
        assert_eq!(fs::read_to_string(place.container().join("README.source.md")).unwrap(), card);
    }
}

#[test]
fn checks_of_the_manifest_that_were_left() {
    let place = Place::new();
    place.edit("nano-g64/coliconv.manifest.json", |manifest| manifest["files"] = json!([]));
    assert!(errors(&place.publish(&place.options())).contains(&"no-weights"));
    let place = Place::new();
    fs::remove_file(place.container().join("tokenizer.json")).unwrap();
    fs::create_dir(place.container().join("tokenizer.json")).unwrap();
    assert!(errors(&place.publish(&place.options())).contains(&"not-a-file"));
    let place = Place::new();
    fs::write(place.container().join("coliconv.manifest.json"), "{").unwrap();
    let (code, document) = run_json(&["publish"], &[&place.container()]);
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &json!("json-syntax")), "{document:#}");
}

#[test]
fn the_command_line_says_yes_and_no() {
    let place = Place::new();
    let container = place.container();
    let reports = [place.path("verify.json"), place.path("score.json"), place.path("policy.json")];
    fs::write(&reports[2], LENIENT).unwrap();
    let [verify, score, policy] = reports.each_ref().map(|path| path.to_str().unwrap());
    let all = ["publish", "--report", verify, "--report", score, "--policy", policy, "--repo-id", "example/nano-g64"];
    let (code, document) = run_json(&all[..5], &[&container]);
    assert_valid("publish", &document);
    assert_eq!((code, &document["verdict"]), (1, &json!("fail")));
    let redact = |bytes: &[u8]| String::from_utf8_lossy(bytes).replace(place.root.path().to_str().unwrap(), "PLACE");
    let closed = run(&["publish", "--report", verify], &[&container]);
    assert_eq!(closed.status.code(), Some(1));
    insta::assert_snapshot!("closed", redact(&closed.stdout));
    let open = run(&all, &[&container]);
    assert_eq!(open.status.code(), Some(0), "{}", redact(&open.stdout));
    // How long the card is depends on what the kernels measured.
    let sized = |line: &str| match line.split_once(" files, ") {
        Some((files, rest)) if rest.contains(" bytes (") => {
            format!("{files} files, BYTES{}", &rest[rest.find(')').unwrap() + 1..])
        }
        _ => line.to_owned(),
    };
    let text: Vec<String> = redact(&open.stdout).lines().map(sized).collect();
    insta::assert_snapshot!("open", text.join("\n"));
    let (code, document) = run_json(&all, &[&container]);
    assert_valid("publish", &document);
    assert_eq!((code, &document["verdict"], &document["written"]), (0, &json!("pass"), &json!([])));
}

#[test]
fn a_locked_container_is_left_alone() {
    use coliconv::io::{Claim, DirectoryLock};
    let place = Place::new();
    let _lock = DirectoryLock::take(&place.container(), &Claim::Whole).unwrap();
    let faults = publish(&place.container(), &place.options(), &Silent).unwrap_err();
    assert_eq!(faults.iter().map(|fault| fault.kind.name()).collect::<Vec<_>>(), ["locked"]);
}
