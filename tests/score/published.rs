//! Tasks as they are published.

use std::fs;

use coliconv::score::input::Kind;
use tempfile::TempDir;

use super::support::containers::fixture;
use super::{given, logprobs, of, refusal, scored, written};

const NAMES: [&str; 5] = ["hellaswag", "arc", "mmlu", "winogrande", "piqa"];

#[test]
fn parquet_and_lines_are_the_same_questions() {
    let tasks = fixture("scores").join("tasks");
    let of_ending = |ending: &str| {
        let input = |name: &&str| given(Kind::Task, name, tasks.join(format!("{name}.{ending}")));
        scored(&fixture("nano"), &of(NAMES.iter().map(input).collect()))
    };
    let (lines, parquet) = (of_ending("jsonl"), of_ending("parquet"));
    assert!(lines.excluded.is_empty() && parquet.excluded.is_empty());
    assert_eq!(lines.tasks, parquet.tasks);
    assert_eq!(lines.requests, parquet.requests);
    assert_eq!(lines.tasks.iter().map(|task| task.template.as_str()).collect::<Vec<_>>(), NAMES);
    assert!(lines.tasks.iter().all(|task| task.n == 3));
    let zstd = of(vec![given(Kind::Task, "zstd", tasks.join("zstd.parquet"))]);
    assert_eq!(refusal(&fixture("nano"), &zstd), ["parquet-syntax"]);
}

#[test]
fn templates_are_plain_questions_written_out() {
    let (directory, tasks) = (TempDir::new().unwrap(), fixture("scores").join("tasks"));
    let plain = [
        (
            "hellaswag",
            "Sheep: A shepherd counts his flock. He finds",
            &[" one is missing.", " a telephone.", " seven.", " the sea."][..],
        ),
        ("arc", "Question: What do plants need?\nAnswer:", &[" water and light", " an army"]),
        (
            "mmlu",
            "What is a bough?\nA. a branch of a tree\nB. a bird\nC. a king\nD. a river\nAnswer:",
            &[" A", " B", " C", " D"],
        ),
        ("piqa", "Question: Water sheep\nAnswer:", &[" lead them to a well", " lead them to a wall"]),
    ];
    for (name, ctx, choices) in plain {
        let row = serde_json::json!({"ctx": ctx, "choices": choices, "gold": 0});
        let inputs = vec![
            given(Kind::Task, "published", tasks.join(format!("{name}.jsonl"))),
            given(Kind::Task, "plain", written(directory.path(), "plain", &row.to_string())),
        ];
        let report = scored(&fixture("nano"), &of(inputs));
        assert_eq!(logprobs(&report, "published")[2], logprobs(&report, "plain")[0], "{name}");
    }
    // The same ending after either option: two requests of one choice each would be no question, so as request rows.
    let tokenizer = coliconv::model::tokenizer::Tokenizer::load(&fixture("nano")).unwrap();
    let request = |option: &str| {
        let ctx = tokenizer.encode(&format!("[gMASK]<sop>David fled from Saul because {option}")).unwrap();
        let all = tokenizer.encode(&format!("[gMASK]<sop>David fled from Saul because {option} was angry.")).unwrap();
        assert_eq!(all[..ctx.len()], ctx);
        let ids: Vec<String> = all.iter().map(u32::to_string).collect();
        format!("{} {} {}\n", ctx.len(), all.len() - ctx.len(), ids.join(" "))
    };
    let requests = written(directory.path(), "r", &(request("David") + &request("Saul")));
    let inputs = vec![
        given(Kind::Requests, "requests", requests),
        given(Kind::Task, "winogrande", tasks.join("winogrande.jsonl")),
    ];
    let report = scored(&fixture("nano"), &of(inputs));
    assert_eq!(logprobs(&report, "winogrande")[2], logprobs(&report, "requests").concat());
}

#[test]
fn a_row_of_another_task_in_between_is_excluded() {
    let (directory, tasks) = (TempDir::new().unwrap(), fixture("scores").join("tasks"));
    let read = |name: &str| fs::read_to_string(tasks.join(name)).unwrap();
    let mixed = written(directory.path(), "mixed", &(read("piqa.jsonl") + &read("arc.jsonl")));
    let report = scored(&fixture("nano"), &of(vec![given(Kind::Task, "mixed", mixed)]));
    assert_eq!((report.tasks[0].n, report.tasks[0].excluded), (3, 3));
    assert!(report.excluded.iter().all(|row| row.kind == "row-malformed" && row.row > 3));
}
