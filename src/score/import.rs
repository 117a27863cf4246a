//! Rows of tasks as they are published, made into questions.
//!
//! | task | keys of a row | context | choices |
//! |---|---|---|---|
//! | plain | `ctx`, `choices`, `gold` | as it is | as they are |
//! | hellaswag | `activity_label`, `ctx_a`, `ctx_b`, `endings`, `label` | label + `": "` + ctx_a + `" "` + ctx_b, capitalized | `" "` + ending |
//! | arc | `question`, `choices`, `answerKey` | `"Question: "` + question + `"\nAnswer:"` | `" "` + text |
//! | mmlu | `question`, `choices`, `answer` | question + `"\nA. "` + choice … + `"\nAnswer:"` | `" A"`, `" B"`, … |
//! | winogrande | `sentence`, `option1`, `option2`, `answer` | sentence up to `_` with either option in its place | the rest |
//! | piqa | `goal`, `sol1`, `sol2`, `label` | `"Question: "` + goal + `"\nAnswer:"` | `" "` + solution |
//!
//! Sources: model description, scoring; for winogrande and piqa the templates of lm-evaluation-harness.

use serde_json::{Map, Value};

use crate::limits;

/// A row: a JSON object, or a row of a Parquet file with its columns as keys.
pub type Row = Map<String, Value>;

/// A continuation and what stands before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// The context.
    pub ctx: String,
    /// The continuation, its leading space included.
    pub continuation: String,
}

/// A question with its possible answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The answers; at least two.
    pub pairs: Vec<Pair>,
    /// Which of them is right.
    pub gold: usize,
}

/// What a row should have been, and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
    /// Whether there is no answer at all.
    pub unanswered: bool,
}

/// How the rows of a task are made into questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Template {
    /// `ctx`, `choices` and `gold`.
    Plain,
    /// HellaSwag.
    Hellaswag,
    /// The AI2 reasoning challenge.
    Arc,
    /// Massive multitask language understanding.
    Mmlu,
    /// WinoGrande: the context differs, the continuation is the same.
    Winogrande,
    /// Physical interaction question answering.
    Piqa,
}

impl Template {
    /// The template for rows with these keys.
    pub fn of(row: &Row) -> Option<Template> {
        let has = |keys: &[&str]| keys.iter().all(|&key| row.contains_key(key));
        [
            (&["ctx_a", "endings"][..], Template::Hellaswag),
            (&["sentence", "option1", "option2"], Template::Winogrande),
            (&["goal", "sol1", "sol2"], Template::Piqa),
            (&["question", "answerKey"], Template::Arc),
            (&["question", "choices", "answer"], Template::Mmlu),
            (&["ctx"], Template::Plain),
            (&["choices", "gold"], Template::Plain),
        ]
        .into_iter()
        .find_map(|(keys, template)| has(keys).then_some(template))
    }

    /// The question of a row.
    pub fn question(self, row: &Row) -> Result<Question, Mismatch> {
        let question = match self {
            Template::Plain => plain(row),
            Template::Hellaswag => hellaswag(row),
            Template::Arc => arc(row),
            Template::Mmlu => mmlu(row),
            Template::Winogrande => winogrande(row),
            Template::Piqa => piqa(row),
        }?;
        let choices = question.pairs.len();
        if !(2..=limits::MAX_CHOICES).contains(&choices) {
            return Err(mismatch(format!("2 to {} choices", limits::MAX_CHOICES), choices));
        }
        if question.gold >= choices {
            return Err(mismatch(format!("an answer below {choices}"), question.gold));
        }
        Ok(question)
    }
}

fn mismatch(expected: impl Into<String>, found: impl ToString) -> Mismatch {
    Mismatch { expected: expected.into(), found: found.to_string(), unanswered: false }
}

/// What is no answer, because it is something else or nothing.
fn no_answer(key: &str, value: Option<&Value>) -> Mismatch {
    let unanswered = match value {
        None | Some(Value::Null) => true,
        Some(Value::String(text)) => text.is_empty(),
        _ => false,
    };
    Mismatch { unanswered, ..mismatch(format!("the number of a choice as `{key}`"), shown(value)) }
}

/// A value for a message.
fn shown(value: Option<&Value>) -> String {
    value.map_or("nothing".to_owned(), Value::to_string)
}

fn text<'a>(row: &'a Row, key: &str) -> Result<&'a str, Mismatch> {
    match row.get(key) {
        Some(Value::String(text)) => Ok(text),
        other => Err(mismatch(format!("text as `{key}`"), shown(other))),
    }
}

fn texts<'a>(value: Option<&'a Value>, key: &str) -> Result<Vec<&'a str>, Mismatch> {
    let list = value.and_then(Value::as_array).map(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
    list.flatten().ok_or_else(|| mismatch(format!("a list of texts as `{key}`"), shown(value)))
}

/// A whole number, or text that spells one.
fn number(row: &Row, key: &str) -> Result<usize, Mismatch> {
    let value = row.get(key);
    let number = match value {
        Some(Value::Number(number)) => number.as_u64(),
        Some(Value::String(text)) => text.parse().ok(),
        _ => None,
    };
    let number = number.and_then(|number| usize::try_from(number).ok());
    number.ok_or_else(|| no_answer(key, value))
}

fn pairs<S: AsRef<str>>(ctx: &str, choices: impl IntoIterator<Item = S>, delimiter: &str) -> Vec<Pair> {
    let pair = |choice: S| Pair { ctx: ctx.to_owned(), continuation: format!("{delimiter}{}", choice.as_ref()) };
    choices.into_iter().map(pair).collect()
}

fn plain(row: &Row) -> Result<Question, Mismatch> {
    let choices = texts(row.get("choices"), "choices")?;
    let gold = match row.get("gold") {
        Some(Value::Number(number)) => number.as_u64().and_then(|gold| usize::try_from(gold).ok()),
        _ => None,
    };
    let gold = gold.ok_or_else(|| no_answer("gold", row.get("gold")))?;
    Ok(Question { pairs: pairs(text(row, "ctx")?, choices, ""), gold })
}

fn hellaswag(row: &Row) -> Result<Question, Mismatch> {
    let (label, ctx_a) = (text(row, "activity_label")?, text(row, "ctx_a")?);
    let ctx = format!("{label}: {ctx_a} {}", capitalized(text(row, "ctx_b")?));
    // Many rows have an empty ctx_b: the choice brings the space.
    let endings = texts(row.get("endings"), "endings")?;
    Ok(Question { pairs: pairs(ctx.trim_end(), endings, " "), gold: number(row, "label")? })
}

/// The first character in upper case, the others in lower case.
fn capitalized(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
    first + &characters.as_str().to_lowercase()
}

fn arc(row: &Row) -> Result<Question, Mismatch> {
    // Hugging Face has a text and two lists; AI2's own files an object with a list of objects.
    let (question, labels, choices) = match row.get("question") {
        Some(Value::Object(question)) => {
            let list = question.get("choices").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
            let member = |key: &str| -> Result<Vec<&str>, Mismatch> {
                let of = |choice: &'_ Value| choice.get(key).and_then(Value::as_str).map(str::len).is_some();
                if !list.iter().all(of) {
                    return Err(mismatch(format!("choices with `{key}`"), shown(question.get("choices"))));
                }
                Ok(list.iter().filter_map(|choice| choice[key].as_str()).collect())
            };
            (text(question, "stem")?, member("label")?, member("text")?)
        }
        _ => {
            let choices = row.get("choices").and_then(Value::as_object);
            let choices =
                choices.ok_or_else(|| mismatch("`choices` with `text` and `label`", shown(row.get("choices"))))?;
            (text(row, "question")?, texts(choices.get("label"), "label")?, texts(choices.get("text"), "text")?)
        }
    };
    let key = text(row, "answerKey")?;
    if labels.len() != choices.len() {
        return Err(mismatch(format!("{} labels", choices.len()), labels.len()));
    }
    let gold = labels.iter().position(|&label| label == key);
    let gold =
        gold.ok_or_else(|| mismatch(format!("one of {} as `answerKey`", labels.join(", ")), format!("{key:?}")))?;
    Ok(Question { pairs: pairs(&format!("Question: {question}\nAnswer:"), choices, " "), gold })
}

fn mmlu(row: &Row) -> Result<Question, Mismatch> {
    let choices = texts(row.get("choices"), "choices")?;
    let letters: Vec<String> = ('A'..='Z').take(choices.len()).map(String::from).collect();
    if letters.len() < choices.len() {
        return Err(mismatch("2 to 26 choices", choices.len()));
    }
    let gold = match row.get("answer") {
        Some(Value::String(text)) => match letters.iter().position(|letter| letter == text) {
            Some(gold) => gold,
            None => number(row, "answer")?,
        },
        _ => number(row, "answer")?,
    };
    let mut ctx = text(row, "question")?.to_owned();
    for (letter, choice) in letters.iter().zip(&choices) {
        ctx += &format!("\n{letter}. {choice}");
    }
    ctx += "\nAnswer:";
    Ok(Question { pairs: pairs(&ctx, letters, " "), gold })
}

fn winogrande(row: &Row) -> Result<Question, Mismatch> {
    let sentence = text(row, "sentence")?;
    let gap = || mismatch("one `_` in `sentence`", format!("{sentence:?}"));
    let (before, after) = sentence.split_once('_').ok_or_else(gap)?;
    if after.contains('_') {
        return Err(gap());
    }
    let pair = |option: &str| Pair { ctx: format!("{before}{option}"), continuation: format!(" {}", after.trim()) };
    let gold = number(row, "answer")?;
    // Options are numbered from 1.
    let gold = gold.checked_sub(1).ok_or_else(|| mismatch("1 or 2 as `answer`", gold))?;
    Ok(Question { pairs: vec![pair(text(row, "option1")?), pair(text(row, "option2")?)], gold })
}

fn piqa(row: &Row) -> Result<Question, Mismatch> {
    let ctx = format!("Question: {}\nAnswer:", text(row, "goal")?);
    let gold = number(row, "label")?;
    Ok(Question { pairs: pairs(&ctx, [text(row, "sol1")?, text(row, "sol2")?], " "), gold })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(value: Value) -> Row {
        value.as_object().unwrap().clone()
    }

    /// Template, contexts, continuations and right answer.
    fn read(value: Value) -> (&'static str, Vec<(String, String)>, usize) {
        let row = row(value);
        let template = Template::of(&row).unwrap();
        let question = template.question(&row).unwrap();
        let pairs = question.pairs.into_iter().map(|pair| (pair.ctx, pair.continuation)).collect();
        (template.into(), pairs, question.gold)
    }

    fn same(ctx: &str, choices: &[&str]) -> Vec<(String, String)> {
        choices.iter().map(|choice| (ctx.to_owned(), (*choice).to_owned())).collect()
    }

    #[test]
    fn rows_as_published() {
        let plain = json!({"ctx": "a:", "choices": [" b", " c"], "gold": 1, "more": null});
        assert_eq!(read(plain), ("plain", same("a:", &[" b", " c"]), 1));
        let hellaswag = json!({"ind": 4, "activity_label": "Removing ice", "ctx_a": "Then, the man.", "ctx_b": "he AND I",
            "ctx": "x", "endings": ["one", "two", "three", "four"], "label": "3", "split": "val"});
        let choices = [" one", " two", " three", " four"];
        assert_eq!(read(hellaswag), ("hellaswag", same("Removing ice: Then, the man. He and i", &choices), 3));
        let empty =
            json!({"activity_label": "Roofs", "ctx_a": "Go up.", "ctx_b": "", "endings": ["a", "b"], "label": 0});
        assert_eq!(read(empty), ("hellaswag", same("Roofs: Go up.", &[" a", " b"]), 0));
        let arc = json!({"id": "x", "question": "Why?", "choices": {"text": ["p", "q", "r"], "label": ["1", "2", "3"]},
            "answerKey": "2"});
        assert_eq!(read(arc), ("arc", same("Question: Why?\nAnswer:", &[" p", " q", " r"]), 1));
        let arc = json!({"id": "x", "question": {"stem": "Why?", "choices":
            [{"text": "p", "label": "A"}, {"text": "q", "label": "B"}]}, "answerKey": "A"});
        assert_eq!(read(arc), ("arc", same("Question: Why?\nAnswer:", &[" p", " q"]), 0));
        let mmlu =
            |answer: Value| json!({"question": "1 + 1?", "subject": "x", "choices": ["1", "2"], "answer": answer});
        let expected = ("mmlu", same("1 + 1?\nA. 1\nB. 2\nAnswer:", &[" A", " B"]), 1);
        assert_eq!(read(mmlu(1.into())), expected);
        assert_eq!(read(mmlu("B".into())), expected);
        assert_eq!(read(mmlu("1".into())), expected);
        let winogrande = json!({"sentence": "The cup fits the box as _ is small.", "option1": "it", "option2": "she", "answer": "1"});
        let pair = |option: &str| (format!("The cup fits the box as {option}"), " is small.".to_owned());
        assert_eq!(read(winogrande), ("winogrande", vec![pair("it"), pair("she")], 0));
        let piqa = json!({"goal": "Open it", "sol1": "pull", "sol2": "push", "label": 1});
        assert_eq!(read(piqa), ("piqa", same("Question: Open it\nAnswer:", &[" pull", " push"]), 1));
        assert_eq!(Template::of(&row(json!({"text": "a"}))), None);
    }

    #[test]
    fn what_is_wrong_with_a_row_is_said() {
        let wrong = |value: Value| {
            let row = row(value);
            let mismatch = Template::of(&row).unwrap().question(&row).unwrap_err();
            format!("{} / {}", mismatch.expected, mismatch.found)
        };
        for (value, expected) in [
            (json!({"ctx": 1, "choices": ["a", "b"], "gold": 0}), "text as `ctx` / 1"),
            (json!({"ctx": "x", "choices": "ab", "gold": 0}), "a list of texts as `choices` / \"ab\""),
            (json!({"ctx": "x", "choices": ["a", 2], "gold": 0}), "a list of texts as `choices` / [\"a\",2]"),
            (json!({"ctx": "x", "choices": ["a"], "gold": 0}), "2 to 256 choices / 1"),
            (json!({"ctx": "x", "choices": ["a", "b"], "gold": 2}), "an answer below 2 / 2"),
            (json!({"ctx": "x", "choices": ["a", "b"], "gold": -1}), "the number of a choice as `gold` / -1"),
            (json!({"ctx": "x", "choices": ["a", "b"], "gold": 0.5}), "the number of a choice as `gold` / 0.5"),
            (json!({"ctx": "x", "choices": ["a", "b"], "gold": "1"}), "the number of a choice as `gold` / \"1\""),
            (json!({"ctx": "x", "choices": ["a", "b"]}), "the number of a choice as `gold` / nothing"),
            (json!({"choices": ["a", "b"], "gold": 0}), "text as `ctx` / nothing"),
            (
                json!({"question": "x", "choices": {"text": ["a", "b"], "label": ["A"]}, "answerKey": "A"}),
                "2 labels / 1",
            ),
            (
                json!({"question": "x", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "C"}),
                "one of A, B as `answerKey` / \"C\"",
            ),
            (
                json!({"question": "x", "choices": ["a", "b"], "answer": "E"}),
                "the number of a choice as `answer` / \"E\"",
            ),
            (json!({"question": "x", "choices": ["a", "b"], "answer": 2}), "an answer below 2 / 2"),
            (
                json!({"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}),
                "one `_` in `sentence` / \"no gap\"",
            ),
            (
                json!({"sentence": "a _", "option1": "a", "option2": "b", "answer": ""}),
                "the number of a choice as `answer` / \"\"",
            ),
            (json!({"sentence": "a _", "option1": "a", "option2": "b", "answer": 0}), "1 or 2 as `answer` / 0"),
            (json!({"goal": "x", "sol1": "a", "sol2": "b"}), "the number of a choice as `label` / nothing"),
        ] {
            assert_eq!(wrong(value), expected);
        }
    }
}
