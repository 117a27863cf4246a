//! Rows that get no score, and inputs that are none.

use std::fs;
use std::path::Path;

use coliconv::report::{ScoreExcluded, ScoreReport, ScoreRequest};
use coliconv::score::Options;
use coliconv::score::encode::PrefixChoice;
use coliconv::score::input::Kind;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::support::containers::{copy, fixture, run, run_json, set_f32};
use super::{g64, given, of, refusal, scored, written};

const GOOD: &str = r#"{"ctx": "abacus:", "choices": [" a plant", " an instrument"], "gold": 1}"#;

fn excluded(report: &ScoreReport) -> Vec<(u64, &str)> {
    report.excluded.iter().map(|row| (row.row, row.kind.as_str())).collect()
}

/// A copy of nano that takes only so many tokens.
fn short(tokens: u64) -> TempDir {
    let model = copy(&fixture("nano"));
    let path = model.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = tokens.into();
    fs::write(&path, config.to_string()).unwrap();
    model
}

#[test]
fn a_bad_row_gets_no_score() {
    let (directory, model) = (TempDir::new().unwrap(), short(30));
    let long = "the ".repeat(40);
    let rows = [
        GOOD.to_owned(),
        r#"{"ctx": "abacus:", "choices": [" a plant", ""], "gold": 1}"#.to_owned(),
        "{\"ctx\": \"abacus:\"".to_owned(),
        json!({"ctx": "abacus:", "choices": [" a", format!(" {long}")], "gold": 0}).to_string(),
        r#"{"ctx": "abacus:", "choices": [" a plant", " an instrument"], "gold": 2}"#.to_owned(),
        r#"{"ctx": "abacus:", "choices": [" a plant", " an instrument"], "gold": 0, "gold": 1}"#.to_owned(),
        GOOD.to_owned(),
    ];
    let text = format!("abacus: a plant.\n\n{long}\nAnd.\n");
    let requests = "2 1 2040 2042 7\n\n0 1 7\n1 1 9\n1 0 9\n1 1 9 2048\nx\n1 1 9 8\n";
    let inputs = vec![
        given(Kind::Requests, "requests", written(directory.path(), "r", requests)),
        given(Kind::Task, "task", written(directory.path(), "t", &rows.join("\n"))),
        given(Kind::Text, "text", written(directory.path(), "x", &text)),
    ];
    let out = directory.path().join("out");
    let options = Options { out: Some(out.clone()), ..of(inputs) };
    let report = scored(model.path(), &options);
    let expected = [
        (2, "row-malformed"),
        (3, "row-no-context"),
        (4, "row-malformed"),
        (5, "row-empty"),
        (6, "row-token-id"),
        (7, "row-malformed"),
        (2, "row-empty"),
        (3, "row-malformed"),
        (4, "row-too-long"),
        (5, "row-malformed"),
        (6, "row-malformed"),
        (3, "row-too-long"),
    ];
    assert_eq!(excluded(&report), expected);
    let task = &report.tasks[0];
    assert_eq!((task.n, task.excluded), (2, 5));
    assert_eq!((report.texts[0].documents, report.texts[0].excluded), (2, 1));
    for row in &report.excluded {
        let of_row = report.requests.iter().filter(|request| (&request.input, request.row) == (&row.input, row.row));
        let scores: Vec<_> = of_row.map(|request| (request.logprob, request.tokens, request.greedy)).collect();
        assert_eq!(scores, [(None, None, None)]);
        assert!(row.message.contains(&format!("row {}", row.row)) && row.hint.is_some(), "{row:?}");
    }
    // The good rows are what they are alone.
    let alone = vec![given(Kind::Task, "task", written(directory.path(), "a", GOOD))];
    let alone = scored(model.path(), &of(alone));
    assert_eq!(super::logprobs(&alone, "task")[0], super::logprobs(&report, "task")[0]);
    // A line for a line, and no number where there is no score.
    let answers = coliconv::score::answers(&report, "requests");
    let lines: Vec<&str> = answers.lines().collect();
    assert_eq!(lines.len(), 8);
    for (line, text) in lines.iter().enumerate() {
        let is_good = [0, 7].contains(&line);
        assert_eq!(text.split(' ').next().unwrap().parse::<f64>().is_ok(), is_good, "{text}");
        assert_eq!(text.starts_with("error row"), !is_good, "{text}");
    }
    // What was excluded stays so, without being looked at again.
    assert_eq!(excluded(&scored(model.path(), &options)), expected);
    let table = fs::read_to_string(out.join("requests.csv")).unwrap();
    assert_eq!(table.lines().filter(|line| line.contains("row-") || line.contains("row ")).count(), expected.len());
}

#[test]
fn a_bad_first_row_does_not_refuse_the_others() {
    let directory = TempDir::new().unwrap();
    let path = written(directory.path(), "t", &format!("{{\"note\": 1}}\n{GOOD}\n"));
    let report = scored(&fixture("nano"), &of(vec![given(Kind::Task, "task", path)]));
    assert_eq!((excluded(&report), report.tasks[0].n), (vec![(1, "row-malformed")], 1));
}

#[test]
fn many_rows_without_a_score_are_all_answered() {
    let directory = TempDir::new().unwrap();
    let path = written(directory.path(), "r", "bad\n");
    let mut report = scored(&fixture("nano"), &of(vec![given(Kind::Requests, "requests", path)]));
    let (request, row) = (report.requests.remove(0), report.excluded.remove(0));
    for number in 1..=500_000 {
        report.requests.push(ScoreRequest { row: number, ..request.clone() });
        report.excluded.push(ScoreExcluded { row: number, message: format!("row {number}"), ..row.clone() });
    }
    let answers = coliconv::score::answers(&report, "requests");
    assert!((1..=500_000).map(|number| format!("error row {number}")).eq(answers.lines()));
}

#[test]
fn nothing_before_the_first_token() {
    let directory = TempDir::new().unwrap();
    let row = GOOD.replace("abacus:", "");
    let path = written(directory.path(), "t", &format!("{row}\n{GOOD}\n"));
    let inputs = vec![
        given(Kind::Task, "task", path),
        given(Kind::Text, "text", written(directory.path(), "x", "a\nAnd the king\n")),
    ];
    let none = Options { prefix: PrefixChoice::None, ..of(inputs.clone()) };
    let report = scored(&fixture("nano"), &none);
    assert_eq!(excluded(&report), [(1, "row-no-context"), (1, "row-no-context")]);
    let tokenizer = coliconv::model::tokenizer::Tokenizer::load(&fixture("nano")).unwrap();
    let tokens = tokenizer.encode("And the king").unwrap().len() as u64;
    assert_eq!(report.texts[0].tokens, tokens - 1);
    assert_eq!(excluded(&scored(&fixture("nano"), &of(inputs))), []);
}

#[test]
fn logits_that_are_no_numbers_give_no_score() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    fs::remove_file(model.path().join("coliconv.manifest.json")).unwrap();
    // Only texts with this token in them are damaged.
    let ids = coliconv::model::tokenizer::Tokenizer::load(model.path()).unwrap().encode("Moses").unwrap();
    let row = ids[0] as usize;
    let inputs = vec![given(Kind::Text, "text", written(directory.path(), "x", "And he said.\nMoses said.\n"))];
    assert_eq!(excluded(&scored(model.path(), &of(inputs.clone()))), []);
    super::support::containers::edit_tensor(model.path(), "model.embed_tokens.weight.qs", |scales| {
        let per_row = scales.len() / 2048;
        scales[row * per_row..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let report = scored(model.path(), &of(inputs.clone()));
    assert_eq!(excluded(&report), [(2, "row-not-finite")]);
    assert_eq!(report.texts[0].documents, 1);
    // And if all are, the report has no figure at all.
    set_f32(model.path(), "model.norm.weight", 0, f32::NAN);
    let report = scored(model.path(), &of(inputs));
    assert_eq!((report.texts.len(), report.excluded.len()), (0, 2));
}

#[test]
fn inputs_that_cannot_be_scored() {
    let directory = TempDir::new().unwrap();
    let file = |name: &str, text: &str| written(directory.path(), name, text);
    let task = |path: &Path| of(vec![given(Kind::Task, "t", path)]);
    let nano = fixture("nano");
    for (path, kind) in [
        (file("empty", ""), "no-rows"),
        (file("blank", "\n\n"), "no-rows"),
        (file("unlabelled", "{\"goal\": \"a\", \"sol1\": \"b\", \"sol2\": \"c\"}\n"), "no-good-row"),
        (file("other", "{\"prompt\": 1}\n"), "task-unknown"),
        (file("bad", "{\"ctx\": 1}\n[]\n"), "no-good-row"),
        (file("array", &format!("[{GOOD},\n{GOOD}]\n")), "input-array"),
        (file("mark", &format!("\u{feff}{GOOD}\n")), "input-byte-order-mark"),
        (file("binary", "PAR1 but nothing else"), "parquet-syntax"),
        (directory.path().join("absent"), "io"),
        (directory.path().to_owned(), "not-a-file"),
    ] {
        assert_eq!(refusal(&nano, &task(&path)), [kind], "{path:?}");
    }
    let good = file("good", GOOD);
    let twice = of(vec![given(Kind::Task, "t", &good), given(Kind::Text, "t", &good)]);
    assert_eq!(refusal(&nano, &twice), ["input-name-twice"]);
    // Everything that is wrong is told at once.
    let all = of(vec![
        given(Kind::Task, "a", directory.path().join("x")),
        given(Kind::Text, "b", directory.path().join("y")),
    ]);
    assert_eq!(refusal(&nano, &all), ["io", "io"]);
}

#[test]
fn a_tokenizer_without_the_prefix() {
    let (directory, model) = (TempDir::new().unwrap(), copy(&fixture("nano")));
    let path = model.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer["added_tokens"].as_array_mut().unwrap().retain(|token| token["content"] != "[gMASK]");
    fs::write(&path, tokenizer.to_string()).unwrap();
    let inputs = of(vec![given(Kind::Task, "t", written(directory.path(), "t", GOOD))]);
    assert_eq!(refusal(model.path(), &inputs), ["prefix-unknown"]);
    let none = Options { prefix: PrefixChoice::None, ..inputs };
    assert_eq!(scored(model.path(), &none).tasks[0].n, 1);
}

/// Exit code and first kind of a refusal.
fn refused(arguments: &[&str]) -> (i32, String) {
    let (code, document) = run_json(&[&["score"], arguments].concat(), &[&fixture("nano")]);
    (code, document["refused"][0]["kind"].as_str().unwrap_or_default().to_owned())
}

#[test]
fn flags() {
    let directory = TempDir::new().unwrap();
    let task = format!("t={}", written(directory.path(), "t", GOOD).display());
    let out = directory.path().join("out");
    let parquet = written(directory.path(), "p", "PAR1").display().to_string();
    for (arguments, kind) in [
        (&[][..], "nothing-to-score"),
        (&["--task", "file.jsonl"], "flag-value"),
        (&["--task", "=file.jsonl"], "flag-value"),
        (&["--task", &task, "--threshold", "0.01"], "flag-needs"),
        (&["--task", &task, "--threshold", "2", "--baseline", "x"], "flag-value"),
        (&["--task", &task, "--threshold", "NaN", "--baseline", "x"], "flag-value"),
        (&["--task", &task, "--part", "1/2"], "flag-needs"),
        (&["--task", &task, "--finish"], "flag-needs"),
        (&["--task", &task, "--limit", "0"], "flag-value"),
        (&["--text", &format!("t={parquet}")], "input-parquet"),
        (&["--requests", &parquet], "input-parquet"),
        (&["--task", &task, "--device", "cuda:one"], "flag-value"),
        (&["--task", &task, "--device", "vulkan:"], "flag-value"),
        (&["--task", &task, "--device", "tpu"], "flag-value"),
        (&["--task", &task, "--mode", "fast"], "mode-not-available"),
        (&["--task", &task, "--mode", "quick"], "flag-value"),
        (&["--task", &task, "--memory", "1M"], "memory-too-small"),
        (&["--task", &task, "--baseline", "/nowhere"], "not-found"),
    ] {
        assert_eq!(refused(arguments), (2, kind.to_owned()), "{arguments:?}");
    }
    assert!(!out.exists(), "a refusal leaves nothing");
}

#[test]
fn exit_codes_and_streams() {
    let directory = TempDir::new().unwrap();
    let requests = written(directory.path(), "r", "2 1 2040 2042 7\nbad\n");
    let requests = requests.to_str().unwrap();
    let nano = fixture("nano");
    let output = run(&["score", "--quiet", "--requests", requests], &[&nano]);
    let (stdout, stderr) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stdout.lines().count(), 2);
    assert!(stdout.lines().nth(1).unwrap().starts_with("error row 2: expected `ctxlen contlen id…`, found \"bad\""));
    assert!(stderr.contains("not scored: ") && stderr.contains("row 2: ") && stderr.contains("hint: "), "{stderr}");
    let allowed = run(&["score", "--quiet", "--allow-excluded", "--requests", requests], &[&nano]);
    assert_eq!((allowed.status.code(), allowed.stdout), (Some(0), stdout.into_bytes()));
}
