//! Results that are continued, and results of anything else.

use std::fs;
use std::path::Path;

use coliconv::part::Part;
use coliconv::report::ScoreReport;
use coliconv::score::Options;
use coliconv::score::encode::PrefixChoice;
use coliconv::score::input::{Kind, Sampling};
use serde_json::Value;
use tempfile::TempDir;

use super::support::containers::{copy, fixture, run_json, set_f32};
use super::{expected, g64, given, head, of, refusal, scored, timeless, try_score, written};

/// A few rows of everything.
fn few(directory: &Path) -> Options {
    let requests = written(directory, "requests.txt", "2 1 2040 2042 7\n1 2 9 8 7\n");
    of(vec![
        given(Kind::Requests, "requests", requests),
        given(Kind::Task, "gloss", head(directory, "gloss.jsonl", 4)),
        given(Kind::Text, "heldout", head(directory, "heldout.txt", 3)),
    ])
}

fn results(out: &Path) -> Vec<u8> {
    fs::read(out.join("results.jsonl")).unwrap()
}

#[test]
fn a_run_that_ended_anywhere_is_continued() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let out = directory.path().join("out");
    let options = Options { out: Some(out.clone()), ..few(directory.path()) };
    let whole = scored(model.path(), &options);
    let bytes = results(&out);
    assert_eq!(bytes.iter().filter(|byte| **byte == b'\n').count(), 1 + 9);
    // Complete results are not computed again.
    let again = scored(model.path(), &options);
    assert_eq!((again.tokens, timeless(&again)), (0, timeless(&whole)));
    // Nothing of it, half a header, the header, half a line, whole lines, all but the last end of a line.
    let lines: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at] == b'\n').map(|at| at + 1).collect();
    for cut in [0, 40, lines[0], lines[0] + 1, lines[1] + 700, lines[4], lines[8], bytes.len() - 1] {
        fs::write(out.join("results.jsonl"), &bytes[..cut]).unwrap();
        let report = scored(model.path(), &options);
        assert!(report.tokens > 0, "cut at {cut}");
        assert_eq!(timeless(&report), timeless(&whole), "cut at {cut}");
        assert!(results(&out) == bytes, "cut at {cut}");
    }
    // Of the files only the statistics of the run differ.
    let files = || {
        let mut report: Value = serde_json::from_slice(&fs::read(out.join("score.json")).unwrap()).unwrap();
        for key in
            ["tokens", "seconds", "loading_seconds", "tokens_per_second", "shares", "experts", "peak_anonymous_bytes"]
        {
            report.as_object_mut().unwrap().remove(key).unwrap();
        }
        (report, ["requests.csv", "report.html"].map(|name| fs::read(out.join(name)).unwrap()))
    };
    let interrupted = files();
    fs::remove_dir_all(&out).unwrap();
    scored(model.path(), &options);
    assert!(interrupted == files() && results(&out) == bytes);
    // In another order, as after joining parts.
    let order = [0, 5, 2, 9, 1];
    let starts: Vec<usize> = [0].into_iter().chain(lines.iter().copied()).collect();
    let shuffled = order.iter().flat_map(|&line| bytes[starts[line]..lines[line]].to_vec());
    fs::write(out.join("results.jsonl"), shuffled.collect::<Vec<u8>>()).unwrap();
    assert_eq!(timeless(&scored(model.path(), &options)), timeless(&whole));
    assert!(results(&out) == bytes);
    // Without a directory and with another number of threads it is the same.
    let plain = scored(model.path(), &Options { threads: 3, out: None, ..options });
    assert_eq!(timeless(&plain), timeless(&whole));
}

#[test]
fn results_of_anything_else_are_refused() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let out = directory.path().join("out");
    let options = Options { out: Some(out.clone()), ..few(directory.path()) };
    scored(model.path(), &options);
    let bytes = results(&out);
    let other = |model: &Path, options: &Options, what: &str| {
        let faults = try_score(model, options).unwrap_err();
        let message = faults.to_string();
        assert_eq!(faults.iter().map(|fault| fault.kind.name()).collect::<Vec<_>>(), ["results-other"], "{message}");
        assert!(message.contains(what), "{message}");
        assert!(results(&out) == bytes);
    };
    other(&fixture("nano"), &options, "the model (hash)");
    // A container without a manifest in which one number changed.
    let bare = copy(model.path());
    fs::remove_file(bare.path().join("coliconv.manifest.json")).unwrap();
    assert_eq!(timeless(&scored(bare.path(), &options)).tasks.len(), 1);
    set_f32(bare.path(), "model.norm.weight", 3, 0.5);
    other(bare.path(), &options, "the model (hash)");
    // Other arithmetic.
    let config = copy(model.path());
    fs::remove_file(config.path().join("coliconv.manifest.json")).unwrap();
    edit(&config.path().join("config.json"), "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 2e-05");
    other(config.path(), &options, "the model (hash)");
    let tokenizer = copy(model.path());
    fs::remove_file(tokenizer.path().join("coliconv.manifest.json")).unwrap();
    edit(&tokenizer.path().join("tokenizer.json"), "\n", " \n");
    other(tokenizer.path(), &options, "the tokenizer (hash)");
    for prefix in [PrefixChoice::None, PrefixChoice::Text("And ".into())] {
        other(model.path(), &Options { prefix, ..options.clone() }, "the prefix");
    }
    let sampling = Sampling { limit: Some(2), seed: 0 };
    other(model.path(), &Options { sampling, ..options.clone() }, "2 rows with seed 0");
    let mut fewer = options.clone();
    fewer.inputs.pop();
    other(model.path(), &fewer, "what is scored");
    head(directory.path(), "gloss.jsonl", 5);
    other(model.path(), &options, "the input gloss");
}

#[test]
fn results_without_a_row_are_nobodys() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let out = directory.path().join("out");
    let options = Options { out: Some(out.clone()), ..few(directory.path()) };
    scored(model.path(), &options);
    // As if a run with another prefix had ended before its first row.
    let finished = results(&out);
    let header = finished.split_inclusive(|&byte| byte == b'\n').next().unwrap();
    let text = String::from_utf8(header.to_vec()).unwrap();
    let other = text.replace("\"prefix\":\"", "\"prefix\":\"Once ");
    assert_ne!(other, text);
    for name in ["results.jsonl", "results-1-of-2.jsonl"] {
        fs::write(out.join(name), &other).unwrap();
    }
    scored(model.path(), &options);
    assert_eq!(results(&out), finished);
    // Nor are those of a part in the way when parts are joined.
    for number in 1..=3 {
        scored(model.path(), &Options { part: Part::new(number, 3), ..options.clone() });
    }
    scored(model.path(), &Options { finish: true, ..options.clone() });
    assert_eq!(results(&out), finished);
}

fn edit(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{text:.300}");
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn damaged_results_are_refused() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let out = directory.path().join("out");
    let options = Options { out: Some(out.clone()), ..few(directory.path()) };
    scored(model.path(), &options);
    let text = String::from_utf8(results(&out)).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let with = |edit: &dyn Fn(&mut Vec<String>)| {
        let mut lines = lines.iter().map(|line| (*line).to_owned()).collect();
        edit(&mut lines);
        fs::write(out.join("results.jsonl"), lines.join("\n") + "\n").unwrap();
        refusal(model.path(), &options)
    };
    // Another score, half a line in the middle, something else in between.
    assert_eq!(with(&|lines| lines[3] = lines[3].replacen("\"logprob\":-", "\"logprob\":-1", 1)), ["results-damaged"]);
    assert_eq!(with(&|lines| lines[3].truncate(90)), ["results-damaged"]);
    assert_eq!(with(&|lines| lines[3] = String::new()), ["results-damaged"]);
    assert_eq!(with(&|lines| lines.insert(2, "{}".into())), ["results-damaged"]);
    // A line of other results.
    let other = directory.path().join("other");
    scored(&fixture("nano"), &Options { out: Some(other.clone()), ..options.clone() });
    let foreign = String::from_utf8(results(&other)).unwrap();
    let foreign = foreign.lines().nth(4).unwrap();
    assert_eq!(with(&|lines| lines[4] = foreign.to_owned()), ["results-damaged"]);
    assert_eq!(with(&|lines| lines[0] = lines[0].replace("\"version\":1", "\"version\":2")), ["file-version"]);
    assert_eq!(with(&|lines| lines[0] = "notes".into()), ["not-results"]);
    fs::write(out.join("results.jsonl"), "my notes, without an end of line").unwrap();
    assert_eq!(refusal(model.path(), &options), ["not-results"]);
}

#[test]
fn directories_that_are_not_for_results() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let to = |out: &Path| Options { out: Some(out.to_owned()), ..few(directory.path()) };
    assert_eq!(refusal(model.path(), &to(model.path())), ["results-in-model"]);
    let file = written(directory.path(), "file", "x");
    assert_eq!(refusal(model.path(), &to(&file)), ["out-not-directory"]);
    let used = directory.path().join("used");
    fs::create_dir(&used).unwrap();
    written(&used, "score.json", "precious");
    assert_eq!(refusal(model.path(), &to(&used)), ["not-results"]);
    assert_eq!(fs::read_to_string(used.join("score.json")).unwrap(), "precious");
    let locked = directory.path().join("locked");
    fs::create_dir(&locked).unwrap();
    let lock = coliconv::io::DirectoryLock::take(&locked, &coliconv::io::Claim::Whole).unwrap();
    assert_eq!(refusal(model.path(), &to(&locked)), ["locked"]);
    drop(lock);
}

#[test]
fn a_container_that_is_not_what_its_manifest_says_is_not_scored() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    set_f32(model.path(), "model.norm.weight", 3, 0.5);
    assert_eq!(refusal(model.path(), &few(directory.path())), ["file-hash"]);
}

#[test]
fn parts_are_joined_to_the_same_results() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let (out, parts) = (directory.path().join("out"), directory.path().join("parts"));
    let options = Options { out: Some(out.clone()), ..few(directory.path()) };
    let whole = scored(model.path(), &options);
    let to_parts = Options { out: Some(parts.clone()), ..options.clone() };
    let part = |number| Options { part: Part::new(number, 4), ..to_parts.clone() };
    let finish = Options { finish: true, ..to_parts.clone() };
    for number in [3, 1, 4] {
        let report = scored(model.path(), &part(number));
        assert_eq!(report.part, Some(format!("{number}/4")));
        assert!(report.tasks.is_empty() && report.texts.is_empty() && report.verdict.is_none());
    }
    // One is missing: nothing is reported of the rest.
    assert_eq!(refusal(model.path(), &finish), ["score-parts-missing"]);
    assert!(!parts.join("score.json").exists());
    let nowhere = Options { out: Some(directory.path().join("nowhere")), ..finish.clone() };
    assert_eq!(refusal(model.path(), &nowhere), ["nothing-to-join"]);
    assert!(!directory.path().join("nowhere").exists());
    scored(model.path(), &part(2));
    let finished = scored(model.path(), &finish);
    assert_eq!((finished.tokens, timeless(&finished)), (0, timeless(&whole)));
    assert!(results(&parts) == results(&out));
    assert_eq!(fs::read(parts.join("requests.csv")).unwrap(), fs::read(out.join("requests.csv")).unwrap());
    let stray = Options { prefix: PrefixChoice::None, ..finish };
    assert_eq!(refusal(model.path(), &stray), ["results-other"]);
}

#[test]
fn samples_are_what_limit_and_seed_say() {
    let directory = TempDir::new().unwrap();
    let inputs = vec![
        given(Kind::Task, "gloss", expected("gloss.jsonl")),
        given(Kind::Requests, "requests", written(directory.path(), "r", "1 1 5 6\n1 1 6 5\n1 1 7 8\n")),
    ];
    let rows = |limit, seed| -> (Vec<u64>, ScoreReport) {
        let sampling = Sampling { limit: Some(limit), seed };
        let report = scored(&fixture("nano"), &Options { sampling, ..of(inputs.clone()) });
        let mut rows: Vec<u64> = report.requests.iter().filter(|r| r.input == "gloss").map(|r| r.row).collect();
        rows.dedup();
        (rows, report)
    };
    let ((two, report), (three, _), (others, _)) = (rows(2, 1), rows(3, 1), rows(3, 2));
    assert_eq!((two.len(), three.len(), report.tasks[0].n), (2, 3, 2));
    assert!(two.iter().all(|row| three.contains(row)) && others != three);
    let found = report.inputs.iter().map(|i| (i.kind.as_str(), i.scored_rows, i.limit, i.seed, i.rows_text()));
    let all = fs::read_to_string(expected("gloss.jsonl")).unwrap().lines().count();
    let sampled = ("task", 2, Some(2), Some(1), format!("2 of {all} rows, seed 1"));
    assert_eq!(found.collect::<Vec<_>>(), [sampled, ("requests", 3, None, None, "3 rows".into())]);
    assert_eq!(report.inputs[0].file, expected("gloss.jsonl").to_string_lossy());
    // Requests are answered line by line, all of them.
    assert_eq!(report.requests.iter().filter(|request| request.input == "requests").count(), 3);
}

#[test]
fn reports_are_beside_the_results() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let out = directory.path().join("out");
    let gloss = format!("gloss={}", head(directory.path(), "gloss.jsonl", 3).display());
    let arguments = ["score", "--task", &gloss, "--out", out.to_str().unwrap()];
    let (code, document) = run_json(&arguments, &[model.path()]);
    assert_eq!(code, 0, "{document:#}");
    super::support::containers::assert_valid("score", &document);
    let stored: Value = serde_json::from_slice(&fs::read(out.join("score.json")).unwrap()).unwrap();
    assert_eq!(stored, document);
    let table = fs::read_to_string(out.join("requests.csv")).unwrap();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 1 + 12);
    assert!(lines[0].starts_with("input,row,choice,gold,logprob,tokens,greedy"));
    let logprob: f64 = lines[6].split(',').nth(4).unwrap().parse().unwrap();
    assert_eq!(document["requests"][5]["logprob"], logprob);
}

#[cfg(target_os = "linux")]
#[test]
fn memory_does_not_grow_with_the_number_of_requests() {
    let directory = TempDir::new().unwrap();
    let peak = |count: usize| {
        let lines: String = (0..count).map(|i| format!("2 1 2040 2042 {}\n", i % 2000)).collect();
        let path = written(directory.path(), &format!("r{count}"), &lines);
        let out = directory.path().join(format!("out{count}"));
        let arguments =
            ["score", "--threads", "1", "--requests", path.to_str().unwrap(), "--out", out.to_str().unwrap()];
        let (code, document) = run_json(&arguments, &[&fixture("nano")]);
        assert_eq!((code, document["requests"].as_array().unwrap().len()), (0, count));
        document["peak_anonymous_bytes"].as_u64().unwrap()
    };
    let (few, many) = (peak(1000), peak(9000));
    // What is kept of a request is where its line is: the results themselves are hundreds of bytes each.
    let growth = many.saturating_sub(few) / 8000;
    assert!(growth < 256, "{few} {many}: {growth} bytes a request");
}
