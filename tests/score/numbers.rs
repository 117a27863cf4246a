//! What transformers made of nano and its containers.

use std::fs;
use std::path::{Path, PathBuf};

use coliconv::convert::Options as ConvertOptions;
use coliconv::recipe::GroupSize;
use coliconv::report::ScoreReport;
use coliconv::roles::Pass;
use coliconv::score::Options;
use coliconv::score::encode::PrefixChoice;
use coliconv::score::input::Kind;
use serde_json::Value;

use super::support::containers::{container, fixture};
use super::{expected, given, logprobs, numbers_of, of, scored, with_prefix};

/// How far a log-probability may be from transformers' f32 one.
const MAX_LOGPROB_DIFF: f64 = 1e-3;

fn read(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() <= MAX_LOGPROB_DIFF, "{what} {i}: {found}, expected {expected}");
    }
}

/// Tasks and texts of `scores.json`, all of them.
fn all() -> Options {
    of(vec![
        given(Kind::Task, "gloss", expected("gloss.jsonl")),
        given(Kind::Task, "verse", expected("verse.jsonl")),
        given(Kind::Text, "heldout", expected("heldout.txt")),
        given(Kind::Text, "seen", expected("seen.txt")),
    ])
}

fn assert_scores(model: &Path, name: &str) {
    let values = &read(expected("scores.json"))[name];
    let report = scored(model, &all());
    assert!(report.excluded.is_empty());
    for task in &report.tasks {
        let expected = &values["tasks"][&task.task];
        let is =
            |found: f64, key: &str| assert_eq!(found, expected[key].as_f64().unwrap(), "{name} {} {key}", task.task);
        assert_eq!(task.n, expected["n"]);
        is(task.acc, "acc");
        is(task.acc_norm, "acc_norm_chars");
        is(task.acc_norm_bytes, "acc_norm_bytes");
        let rows: Vec<Vec<f64>> = expected["logprobs"].as_array().unwrap().iter().map(numbers_of).collect();
        let found = logprobs(&report, &task.task);
        assert_eq!(found.len(), rows.len());
        for (row, (found, expected)) in found.iter().zip(&rows).enumerate() {
            assert_close(found, expected, &format!("{name} {} row {row}", task.task));
        }
    }
    assert_eq!((report.tasks.len(), report.texts.len()), (2, 2));
    for text in &report.texts {
        let expected = &values["texts"][&text.name];
        assert_eq!(
            (text.tokens, text.bytes),
            (expected["tokens"].as_u64().unwrap(), expected["bytes"].as_u64().unwrap())
        );
        let number = |key: &str| expected[key].as_f64().unwrap();
        assert!((text.ppl / number("ppl") - 1.0).abs() < 1e-4, "{name} {}: {}", text.name, text.ppl);
        assert!((text.nll_per_token - number("nll_per_token")).abs() < 1e-5);
        assert!((text.bits_per_byte - number("nll") / number("bytes") / std::f64::consts::LN_2).abs() < 1e-5);
        let lines: Vec<f64> = logprobs(&report, &text.name).concat().iter().map(|logprob| -logprob).collect();
        assert_close(&lines, &numbers_of(&expected["per_line_nll"]), &format!("{name} {}", text.name));
    }
}

#[test]
fn the_source() {
    assert_scores(&fixture("nano"), "source");
}

/// A container without MTP head and indexer.
fn assert_container(name: &str, options: impl FnOnce(&mut ConvertOptions)) {
    let mut settings = ConvertOptions { passes: vec![Pass::Main], ..ConvertOptions::default() };
    options(&mut settings);
    assert_scores(container("nano", name, || settings).path(), name);
}

#[test]
fn int4_in_groups_of_64_with_mtp_and_indexer() {
    assert_container("g64-mtp-indexer", |options| options.passes = Pass::ALL.to_vec());
}

#[test]
fn int4_with_a_scale_per_row() {
    assert_container("row", |options| options.settings.group_size = Some(GroupSize::ROW));
}

#[test]
fn int3_experts() {
    assert_container("x3", |options| options.settings.xbits = Some(3));
}

#[test]
fn int8() {
    assert_container("int8", |options| options.settings.ebits = Some(8));
}

#[test]
fn int2_experts() {
    assert_container("x2-row", |options| {
        options.settings.group_size = Some(GroupSize::ROW);
        options.settings.xbits = Some(2);
    });
}

/// A file of rows that tell characters from bytes, and tokens that reach across the boundary.
fn scores(name: &str) -> PathBuf {
    fixture("scores").join(name)
}

/// `[gMASK]<sop>`, none, and a text.
const PREFIXES: [&str; 3] = ["[gMASK]<sop>", "", "The king said: "];

fn assert_tasks(report: &ScoreReport, values: &Value, prefix: &str) {
    for task in &report.tasks {
        let expected = &values[&task.task];
        let what = format!("{prefix:?} {}", task.task);
        let is = |found: f64, key: &str| assert_eq!(found, expected[key].as_f64().unwrap(), "{what} {key}");
        is(task.acc, "acc");
        is(task.acc_norm, "acc_norm");
        is(task.acc_norm_harness, "acc_norm_harness");
        is(task.acc_bytes, "acc_bytes");
        is(task.acc_norm_bytes, "acc_norm_bytes");
        for (row, found) in logprobs(report, &task.task).iter().enumerate() {
            assert_close(found, &numbers_of(&expected["logprobs"][row]), &format!("{what} row {row}"));
        }
        let of = |key: &str| expected[key].as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap().clone());
        let requests = || report.requests.iter().filter(|request| request.input == task.task);
        assert!(of("tokens").eq(requests().map(|request| request.tokens.unwrap())), "{what}");
        assert!(of("greedy").eq(requests().map(|request| request.greedy.unwrap())), "{what}");
    }
}

#[test]
fn characters_bytes_boundaries_and_prefixes() {
    let values = read(scores("scores.json"));
    let directory = tempfile::tempdir().unwrap();
    // Without a prefix an empty context gives its first token no probability.
    let boundary = fs::read_to_string(scores("boundary.jsonl")).unwrap();
    let with_context: Vec<&str> = boundary.lines().filter(|line| !line.contains("\"ctx\": \"\"")).collect();
    let with_context = super::written(directory.path(), "boundary.jsonl", &with_context.join("\n"));
    for prefix in PREFIXES {
        let boundary = if prefix.is_empty() { with_context.clone() } else { scores("boundary.jsonl") };
        let inputs = vec![
            given(Kind::Task, "accents", scores("accents.jsonl")),
            given(Kind::Task, "boundary", boundary),
            given(Kind::Text, "prefix", scores("prefix.txt")),
        ];
        let report = scored(&fixture("nano"), &Options { prefix: with_prefix(prefix), ..of(inputs) });
        assert_eq!(report.prefix, prefix);
        assert_tasks(&report, &values["tasks"][prefix], prefix);
        let expected = &values["texts"][prefix];
        let found: Vec<f64> =
            report.requests.iter().filter(|r| r.input == "prefix").filter_map(|r| r.logprob).collect();
        let found: Vec<f64> = found.iter().map(|logprob| -logprob).collect();
        assert_close(&found, &numbers_of(&expected["nll"]), &format!("{prefix:?} text"));
        let tokens: u64 = expected["tokens"].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!(report.texts[0].tokens, tokens);
    }
    // The kinds of lengths give different answers, or this would show nothing.
    let accents = &values["tasks"]["[gMASK]<sop>"]["accents"];
    assert!(accents["acc_norm"] != accents["acc_bytes"] || accents["acc_norm"] != accents["acc_norm_bytes"]);
}

#[test]
fn a_prefix_is_that_of_the_model_and_never_doubled() {
    let directory = tempfile::tempdir().unwrap();
    let rows = |name: &str, before: &str| {
        let row = |ctx: &str| serde_json::json!({"ctx": format!("{before}{ctx}"), "choices": [" of", " the house"], "gold": 0});
        let text = format!("{}\n{}\n", row("And the king"), row("abacus:"));
        given(Kind::Task, name, super::written(directory.path(), name, &text))
    };
    let text = |name: &str, before: &str| {
        let path = super::written(directory.path(), name, &format!("{before}And the king said.\n"));
        given(Kind::Text, name, path)
    };
    let prefix = "[gMASK]<sop>";
    let inputs = vec![rows("without", ""), rows("with", prefix), text("text", ""), text("text with", prefix)];
    let auto = scored(&fixture("nano"), &of(inputs.clone()));
    assert_eq!(auto.prefix, prefix);
    assert_eq!(logprobs(&auto, "without"), logprobs(&auto, "with"));
    assert_eq!(logprobs(&auto, "text"), logprobs(&auto, "text with"));
    assert_eq!((auto.texts[0].bytes, auto.texts[0].tokens), (auto.texts[1].bytes, auto.texts[1].tokens));
    let none = scored(&fixture("nano"), &Options { prefix: PrefixChoice::None, ..of(inputs) });
    // Who spells the prefix has it, who does not has none.
    assert_eq!(logprobs(&none, "with"), logprobs(&auto, "with"));
    assert_ne!(logprobs(&none, "without"), logprobs(&auto, "without"));
}

#[test]
fn request_files() {
    let values = read(scores("scores.json"));
    let inputs = vec![given(Kind::Requests, "requests", scores("requests.txt"))];
    let report = scored(&fixture("nano"), &of(inputs));
    let answers = coliconv::score::answers(&report, "requests");
    let lines: Vec<&str> = answers.lines().collect();
    let expected = values["requests"].as_array().unwrap();
    assert_eq!(lines.len(), expected.len());
    for (line, expected) in lines.iter().zip(expected) {
        let words: Vec<&str> = line.split(' ').collect();
        let [logprob, tokens, greedy] = words[..] else { panic!("{line}") };
        assert!((logprob.parse::<f64>().unwrap() - expected[0].as_f64().unwrap()).abs() <= MAX_LOGPROB_DIFF, "{line}");
        assert_eq!(tokens, expected[1].to_string());
        assert_eq!(greedy, if expected[2] == true { "1" } else { "0" });
    }
    assert!(lines.iter().any(|line| line.ends_with(" 1")) && lines.iter().any(|line| line.ends_with(" 0")));
}
