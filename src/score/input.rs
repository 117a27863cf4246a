//! What is scored: the rows of task, text and request files, read one at a time.
//!
//! A file is read twice: once to be hashed, checked and counted, once to be scored. Rows are numbered from 1, in files of
//! lines by line. Empty lines of tasks and texts are no rows.

use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::identity::sha256_of;
use super::import::{Mismatch, Question, Row, Template};
use super::parquet;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::SourceFile;
use crate::json::repeated_key;
use crate::limits;

/// What the rows of a file are.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Kind {
    /// Token ids, as the colibri engine takes them.
    Requests,
    /// Questions with choices.
    Task,
    /// Documents.
    Text,
}

/// A file that a user gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// What its rows are.
    pub kind: Kind,
    /// What it is called in reports.
    pub name: String,
    /// The file.
    pub path: PathBuf,
}

/// Which rows of tasks and texts are scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sampling {
    /// So many of each file; none means all.
    pub limit: Option<u64>,
    /// Other seeds choose other rows. With the same seed a smaller sample is part of a larger one.
    pub seed: u64,
}

/// A file that was hashed, checked and counted.
#[derive(Debug, Clone)]
pub struct Input {
    /// What its rows are.
    pub kind: Kind,
    /// What it is called in reports.
    pub name: String,
    /// The file.
    pub path: PathBuf,
    /// SHA-256 of the file, hexadecimal.
    pub sha256: String,
    /// Rows of the file.
    pub file_rows: u64,
    /// Rows that are scored.
    pub rows: u64,
    /// Bytes of the longest text of a row: no tokenizer makes more tokens of it.
    pub longest: u64,
    /// How its rows become questions.
    pub template: Option<Template>,
    /// Numbers of the rows that are scored, ascending; none means all.
    selected: Option<Vec<u64>>,
    parquet: bool,
}

/// What one row holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A row of a task.
    Question(Question),
    /// A line of a text.
    Document(String),
    /// A line of a request file.
    Request(String),
}

impl Content {
    /// Bytes of its longest text.
    fn longest(&self) -> u64 {
        let bytes = match self {
            Content::Question(question) => {
                question.pairs.iter().map(|pair| pair.ctx.len() + pair.continuation.len()).max().unwrap_or(0)
            }
            Content::Document(text) | Content::Request(text) => text.len(),
        };
        bytes as u64
    }
}

/// A row of an input.
#[derive(Debug)]
pub struct Item {
    /// Its number, from 1.
    pub row: u64,
    /// What it holds, or why it cannot be scored.
    pub content: Result<Content, FaultKind>,
}

impl Input {
    /// Hashes, checks and counts a file. One without a single good row is refused.
    pub fn open(given: &Given, sampling: Sampling) -> Result<Input, Faults> {
        let path = &given.path;
        let mut input = Input {
            kind: given.kind,
            name: given.name.clone(),
            path: path.clone(),
            sha256: sha256_of(path)?,
            file_rows: 0,
            rows: 0,
            longest: 0,
            template: None,
            selected: None,
            parquet: begins_with(path, parquet::MAGIC)?,
        };
        let refuse = |kind| Err(Fault::new(Place::file(path), kind).into());
        if input.parquet && given.kind != Kind::Task {
            let flag = if given.kind == Kind::Text { "--text" } else { "--requests" };
            return refuse(FaultKind::InputParquet { flag });
        }
        if begins_with(path, GZIP_MAGIC)? {
            return refuse(FaultKind::InputCompressed);
        }
        if begins_with(path, BYTE_ORDER_MARK)? {
            return refuse(FaultKind::InputByteOrderMark);
        }
        let array = if given.kind == Kind::Task && !input.parquet { array(path)? } else { Array::No };
        if array == Array::Yes {
            return refuse(FaultKind::InputArray);
        }
        if given.kind == Kind::Task {
            input.template = input.find_template()?;
        }
        let mut sample = Sample::new(sampling);
        let (mut good, mut first, mut rows, mut longest) = (false, None, 0, 0);
        for item in input.items()? {
            let Item { row, content } = item?;
            rows += 1;
            sample.offer(row);
            match content {
                Ok(content) => (good, longest) = (true, longest.max(content.longest())),
                Err(kind) => first = first.or(Some(kind)),
            }
        }
        (input.file_rows, input.rows, input.longest) = (rows, rows, longest);
        match first {
            _ if good || given.kind == Kind::Requests && input.rows > 0 => {}
            None => return refuse(FaultKind::NoRows),
            Some(_) if array == Array::UnlessRows => return refuse(FaultKind::InputArray),
            Some(first) => {
                let unanswered = matches!(first, FaultKind::RowUnanswered { .. });
                return refuse(FaultKind::NoGoodRow { rows: input.rows, first: first.to_string(), unanswered });
            }
        }
        if given.kind != Kind::Requests {
            input.selected = sample.rows();
            input.rows = input.selected.as_ref().map_or(input.rows, |rows| rows.len() as u64);
        }
        Ok(input)
    }

    /// The template of the first row that has one. Where objects are all of no known task, the first is told.
    fn find_template(&self) -> Result<Option<Template>> {
        let mut unknown = None;
        for row in self.raw_rows()? {
            let (_, Ok(row)) = row? else { continue };
            let object = match row {
                Raw::Row(row) => row,
                Raw::Line(line) => match serde_json::from_str(&line) {
                    Ok(object) => object,
                    Err(_) => continue,
                },
            };
            if let Some(template) = Template::of(&object) {
                return Ok(Some(template));
            }
            unknown.get_or_insert_with(|| object.keys().cloned().collect());
        }
        match unknown {
            Some(keys) => Err(Fault::new(Place::file(&self.path), FaultKind::TaskUnknown { keys })),
            None => Ok(None),
        }
    }

    /// The rows that are scored, in order.
    pub fn items(&self) -> Result<impl Iterator<Item = Result<Item>> + '_> {
        let mut selected = self.selected.as_ref().map(|rows| rows.iter().peekable());
        let chosen = move |row: u64| match &mut selected {
            None => true,
            Some(rows) => rows.next_if(|&&next| next == row).is_some(),
        };
        let mut chosen = chosen;
        let rows = self.raw_rows()?.filter(move |row| row.as_ref().map_or(true, |(row, _)| chosen(*row)));
        Ok(rows.map(|row| row.map(|(row, raw)| Item { row, content: raw.and_then(|raw| self.content(row, raw)) })))
    }

    fn content(&self, row: u64, raw: Raw) -> Result<Content, FaultKind> {
        let malformed = |expected: String, found: String| FaultKind::RowMalformed { row, expected, found };
        let (line, object) = match raw {
            Raw::Row(object) => (String::new(), Some(object)),
            Raw::Line(line) => (line, None),
        };
        match self.kind {
            Kind::Text => Ok(Content::Document(line)),
            Kind::Requests => Ok(Content::Request(line)),
            Kind::Task => {
                let object = match object {
                    Some(object) => object,
                    None => parse(&line).map_err(|found| malformed("a JSON object".into(), found))?,
                };
                let template = self.template.unwrap_or(Template::Plain);
                let question = template.question(&object);
                question.map(Content::Question).map_err(|Mismatch { expected, found, unanswered }| match unanswered {
                    true => FaultKind::RowUnanswered { row, expected, found },
                    false => malformed(expected, found),
                })
            }
        }
    }

    fn raw_rows(&self) -> Result<Box<dyn Iterator<Item = Result<Numbered>>>> {
        if self.parquet {
            let rows = (1..).zip(parquet::rows(&self.path)?);
            return Ok(Box::new(rows.map(|(number, row)| Ok((number, Ok(Raw::Row(row?)))))));
        }
        let keep_empty = self.kind == Kind::Requests;
        let lines = Lines::open(&self.path)?;
        // A line of spaces is a document like others, but no row of a task.
        let task = self.kind == Kind::Task;
        let is_row = move |line: &Result<Numbered>| {
            let is_empty = |line: &str| line.is_empty() || task && line.trim_ascii().is_empty();
            keep_empty || !matches!(line, Ok((_, Ok(Raw::Line(line)))) if is_empty(line))
        };
        Ok(Box::new(lines.filter(is_row)))
    }
}

/// A row as it is stored.
enum Raw {
    Line(String),
    Row(Row),
}

/// A row with its number, or why it is none.
type Numbered = (u64, Result<Raw, FaultKind>);

/// A JSON object without repeated keys, or what was found instead.
fn parse(line: &str) -> Result<Row, String> {
    let object = serde_json::from_str(line).map_err(|e| format!("{line:?} ({e})"))?;
    match repeated_key(line) {
        Some(key) => Err(format!("`{key}` twice")),
        None => Ok(object),
    }
}

fn begins_with(path: &Path, magic: &[u8]) -> Result<bool> {
    let file = SourceFile::open(path)?;
    if file.bytes() < magic.len() as u64 {
        return Ok(false);
    }
    let mut begin = vec![0; magic.len()];
    file.read_at(&mut begin, 0)?;
    Ok(begin == magic)
}

/// How a file begins that gzip made.
const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
/// U+FEFF in UTF-8.
const BYTE_ORDER_MARK: &[u8] = &[0xef, 0xbb, 0xbf];
/// Bytes at both ends of a file that are looked at to tell an array.
const ENDS_BYTES: u64 = 1 << 16;

/// Whether a file is one JSON array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Array {
    No,
    /// Its first line is a whole value: it may be a bad row among others.
    UnlessRows,
    Yes,
}

/// Whether a file begins and ends like one JSON array.
fn array(path: &Path) -> Result<Array> {
    let file = SourceFile::open(path)?;
    let bytes = file.bytes().min(ENDS_BYTES);
    let (mut begin, mut end) = (vec![0; bytes as usize], vec![0; bytes as usize]);
    file.read_at(&mut begin, 0)?;
    file.read_at(&mut end, file.bytes() - bytes)?;
    let begin = begin.trim_ascii_start();
    if begin.first() != Some(&b'[') || end.trim_ascii_end().last() != Some(&b']') {
        return Ok(Array::No);
    }
    let line = begin.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let is_value = serde_json::from_slice::<serde::de::IgnoredAny>(line).is_ok();
    Ok(if is_value { Array::UnlessRows } else { Array::Yes })
}

/// The lines of a file, without their ends.
struct Lines {
    reader: BufReader<File>,
    path: PathBuf,
    row: u64,
}

impl Lines {
    fn open(path: &Path) -> Result<Lines> {
        let file = File::open(path).map_err(|e| Fault::io("open the file", path, e))?;
        Ok(Lines { reader: BufReader::new(file), path: path.to_owned(), row: 0 })
    }
}

impl Iterator for Lines {
    type Item = Result<Numbered>;

    fn next(&mut self) -> Option<Result<Numbered>> {
        let mut line = Vec::new();
        let read = self.reader.by_ref().take(limits::MAX_ROW_BYTES + 1).read_until(b'\n', &mut line);
        self.row += 1;
        match read {
            Err(e) => return Some(Err(Fault::io("read the file", &self.path, e))),
            Ok(0) => return None,
            Ok(read) if read as u64 > limits::MAX_ROW_BYTES => {
                let expected = format!("at most {} bytes", limits::MAX_ROW_BYTES);
                let kind = FaultKind::RowMalformed { row: self.row, expected, found: "a longer row".into() };
                return Some(Err(Fault::new(Place::file(&self.path), kind)));
            }
            Ok(_) => {}
        }
        for end in [b'\n', b'\r'] {
            line.pop_if(|last| *last == end);
        }
        let row = self.row;
        let found = |e: std::string::FromUtf8Error| FaultKind::RowMalformed {
            row,
            expected: "UTF-8".into(),
            found: format!(
                "byte {:#04x} at {}",
                e.as_bytes()[e.utf8_error().valid_up_to()],
                e.utf8_error().valid_up_to()
            ),
        };
        Some(Ok((row, String::from_utf8(line).map(Raw::Line).map_err(found))))
    }
}

/// The rows with the smallest hashes: a sample that depends on numbers and seed alone.
struct Sample {
    sampling: Sampling,
    heap: BinaryHeap<(u64, u64)>,
}

impl Sample {
    fn new(sampling: Sampling) -> Sample {
        Sample { sampling, heap: BinaryHeap::new() }
    }

    fn offer(&mut self, row: u64) {
        let Some(limit) = self.sampling.limit else { return };
        self.heap.push((XxHash3_64::oneshot_with_seed(self.sampling.seed, &row.to_le_bytes()), row));
        if self.heap.len() as u64 > limit {
            self.heap.pop();
        }
    }

    fn rows(self) -> Option<Vec<u64>> {
        self.sampling.limit?;
        let mut rows: Vec<u64> = self.heap.into_iter().map(|(_, row)| row).collect();
        rows.sort_unstable();
        Some(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(kind: Kind, bytes: &[u8]) -> (tempfile::TempDir, Given) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        std::fs::write(&path, bytes).unwrap();
        (directory, Given { kind, name: "n".into(), path })
    }

    fn rows(kind: Kind, bytes: &[u8], sampling: Sampling) -> Vec<(u64, String)> {
        let (_directory, given) = given(kind, bytes);
        let input = Input::open(&given, sampling).unwrap();
        let shown = |item: Result<Item>| {
            let item = item.unwrap();
            let text = match item.content {
                Ok(Content::Question(question)) => question.pairs[0].ctx.clone(),
                Ok(Content::Document(line) | Content::Request(line)) => line,
                Err(kind) => format!("! {kind}"),
            };
            (item.row, text)
        };
        input.items().unwrap().map(shown).collect()
    }

    #[test]
    fn lines_are_rows_with_their_numbers() {
        let found = rows(Kind::Text, b"a\r\n\n b \nc", Sampling::default());
        assert_eq!(found, [(1, "a".into()), (3, " b ".into()), (4, "c".into())]);
        let found = rows(Kind::Requests, b"1 1 2 3\n\nx\n", Sampling::default());
        assert_eq!(found, [(1, "1 1 2 3".into()), (2, String::new()), (3, "x".into())]);
        let found = rows(Kind::Text, b"a\n\xff\n", Sampling::default());
        assert_eq!(found[1], (2, "! row 2: expected UTF-8, found byte 0xff at 0".into()));
        let task = br#"[1]
{"ctx": "a", "choices": ["b", "c"], "gold": 0}
{"ctx": "a", "ctx": "b", "choices": ["b", "c"], "gold": 0}
{"ctx": "a", "choices": ["b", "c"]"#;
        let found = rows(Kind::Task, task, Sampling::default());
        assert_eq!(found[1], (2, "a".into()));
        assert!(found[0].1.starts_with("! row 1: expected a JSON object, found \"[1]\""), "{found:?}");
        assert_eq!(found[2].1, "! row 3: expected a JSON object, found `ctx` twice");
        assert!(found[3].1.starts_with("! row 4: expected a JSON object, found"), "{found:?}");
    }

    #[test]
    fn the_first_row_that_is_known_says_what_a_task_is() {
        let task = br#"{"note": "of what follows"}
{"goal": "x", "sol1": "a", "sol2": "b", "label": 1}
{"goal": "y", "sol1": "a", "sol2": "b", "label": 0}"#;
        let found = rows(Kind::Task, task, Sampling::default());
        assert_eq!(found[0], (1, "! row 1: expected text as `goal`, found nothing".into()));
        assert_eq!(found[1], (2, "Question: x\nAnswer:".into()));
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn samples_are_nested_and_depend_on_the_seed() {
        let text: String = (0..100).map(|i| format!("line {i}\n")).collect();
        let sample = |limit, seed| rows(Kind::Text, text.as_bytes(), Sampling { limit: Some(limit), seed });
        let (small, large) = (sample(10, 7), sample(40, 7));
        assert_eq!((small.len(), large.len(), sample(1000, 7).len()), (10, 40, 100));
        assert!(small.iter().all(|row| large.contains(row)));
        assert!(small.is_sorted_by_key(|(row, _)| *row));
        assert_ne!(sample(10, 8), small);
    }

    #[test]
    fn files_without_a_good_row_are_refused() {
        let refusal = |kind, bytes: &[u8]| {
            let (_directory, given) = given(kind, bytes);
            let faults = Input::open(&given, Sampling::default()).unwrap_err();
            faults.iter().next().unwrap().kind.to_string()
        };
        assert_eq!(refusal(Kind::Text, b"\n\n"), "the file has no rows");
        assert_eq!(refusal(Kind::Requests, b""), "the file has no rows");
        assert_eq!(refusal(Kind::Task, b"{\"text\": 1}\n"), "the rows are of no known task: they have the keys text");
        let none = refusal(Kind::Task, b"{\"ctx\": \"\"}\n{}\n");
        assert!(none.starts_with("none of the 2 rows can be scored; the first: row 1: expected"), "{none}");
        let array = "the file is one JSON array, not a row a line";
        let row = r#"{"ctx": "a", "choices": ["b", "c"], "gold": 0}"#;
        assert_eq!(refusal(Kind::Task, format!("[{row}, {row}]").as_bytes()), array);
        assert_eq!(refusal(Kind::Task, format!("[\n{row},\n{row}\n]\n").as_bytes()), array);
        for kind in [Kind::Task, Kind::Text, Kind::Requests] {
            assert_eq!(refusal(kind, b"\x1f\x8b\x08\0"), "the file is compressed with gzip");
            assert_eq!(refusal(kind, b"\xef\xbb\xbfa\n"), "the file begins with a byte order mark");
        }
        assert!(refusal(Kind::Task, b"PAR1 and nothing").starts_with("the Parquet file does not read: "));
    }
}
