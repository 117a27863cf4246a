//! The results file: a line for every row, written as it lands, bound to what it was made from.
//!
//! The first line says what the results belong to ([`Binding`]). A run that ends early leaves whole lines and perhaps the
//! beginning of one, which the next run cuts off. When everything is scored the lines are put in the order of the inputs,
//! so that the finished file is the same however often the work was interrupted.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::input::{Input, Kind};
use super::record::Record;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::NewFile;

/// Name of the file.
pub const RESULTS_FILE: &str = "results.jsonl";
/// Version of its structure.
const VERSION: u64 = 1;
/// Longest line that is read, in bytes: distributions of the longest texts included.
const MAX_LINE_BYTES: u64 = 1 << 30;

/// What results belong to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// Hash of the model: [`super::identity::Identity`].
    pub model: String,
    /// SHA-256 of tokenizer.json.
    pub tokenizer: String,
    /// What stands before every text.
    pub prefix: String,
    /// Backend and mode.
    pub backend: String,
    /// The files that are scored.
    pub inputs: Vec<BoundInput>,
}

/// A file that is scored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundInput {
    /// What its rows are.
    pub kind: Kind,
    /// Its name in reports.
    pub name: String,
    /// SHA-256 of the file.
    pub sha256: String,
    /// Rows of a sample; null for all.
    pub limit: Option<u64>,
    /// Seed of the sample.
    pub seed: u64,
}

impl Binding {
    /// The first part in which two differ, and what both say. Results of other models can be compared with, so then the
    /// model and the backend do not count.
    pub fn difference(&self, other: &Binding, same_model: bool) -> Option<(String, String, String)> {
        let plain = [
            (same_model, "the model (hash)", &self.model, &other.model),
            (true, "the tokenizer (hash)", &self.tokenizer, &other.tokenizer),
            (true, "the prefix", &self.prefix, &other.prefix),
            (same_model, "the backend", &self.backend, &other.backend),
        ];
        let found = plain.into_iter().find(|(counts, _, one, another)| *counts && one != another);
        if let Some((_, what, one, another)) = found {
            return Some((what.to_owned(), format!("{one:?}"), format!("{another:?}")));
        }
        let names =
            |binding: &Binding| binding.inputs.iter().map(|input| input.name.clone()).collect::<Vec<_>>().join(", ");
        if names(self) != names(other) {
            return Some(("what is scored".to_owned(), names(self), names(other)));
        }
        let (one, another) = self.inputs.iter().zip(&other.inputs).find(|(one, another)| one != another)?;
        let sample = |input: &BoundInput| match input.limit {
            None => "all rows".to_owned(),
            Some(limit) => format!("{limit} rows with seed {}", input.seed),
        };
        let says = |input: &BoundInput| format!("{} of {}", sample(input), input.sha256);
        Some((format!("the input {} (rows and hash)", one.name), says(one), says(another)))
    }
}

/// The first line.
#[derive(Serialize, Deserialize)]
struct Header {
    coliconv: String,
    version: u64,
    binding: Binding,
}

const TITLE: &str = "score results";

fn header_line(binding: &Binding) -> String {
    let header = Header { coliconv: TITLE.into(), version: VERSION, binding: binding.clone() };
    serde_json::to_string(&header).expect("plain data") + "\n"
}

/// A line that was read.
struct Line {
    record: Record,
    offset: u64,
    bytes: u64,
}

/// The binding and the whole lines of a results file, one at a time; `each` gets every record with its place.
fn scan(path: &Path, each: &mut dyn FnMut(Line) -> Result<()>) -> Result<Option<(Binding, u64)>> {
    let file = File::open(path).map_err(|e| Fault::io("open the file", path, e))?;
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let fault = |kind| Fault::new(Place::file(path), kind);
    let damaged = |line, message: String| fault(FaultKind::ResultsDamaged { line, message });
    let (mut number, mut offset, mut binding) = (0u64, 0u64, None);
    let mut seed = 0;
    loop {
        let mut line = Vec::new();
        let read = reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line);
        let bytes = read.map_err(|e| Fault::io("read the file", path, e))? as u64;
        number += 1;
        if line.pop() != Some(b'\n') {
            // The end, or the beginning of a line that was not finished.
            return match binding {
                None if bytes > 0 && !b"{\"coliconv\":\"score results\"".starts_with(&line[..line.len().min(27)]) => {
                    Err(fault(FaultKind::NotResults))
                }
                binding => Ok(binding.map(|binding| (binding, offset))),
            };
        }
        let text = std::str::from_utf8(&line).map_err(|e| damaged(number, e.to_string()))?;
        if binding.is_none() {
            let header = serde_json::from_str::<Header>(text).ok().filter(|header| header.coliconv == TITLE);
            let header = header.ok_or_else(|| fault(FaultKind::NotResults))?;
            if header.version != VERSION {
                return Err(fault(FaultKind::FileVersion { expected: VERSION, found: header.version }));
            }
            seed = line_seed(&header.binding);
            binding = Some(header.binding);
        } else {
            let record = Record::parse(text, seed).map_err(|message| damaged(number, message))?;
            each(Line { record, offset, bytes })?;
        }
        offset += bytes;
    }
}

/// The checksums of lines belong to the binding: lines of other results are damage.
fn line_seed(binding: &Binding) -> u64 {
    XxHash3_64::oneshot(header_line(binding).as_bytes())
}

/// Where a record is in its input: number of the input and of the row.
pub type Key = (usize, u64);

/// Results of a run, in memory and in a file where there is one.
pub struct Results {
    path: PathBuf,
    file: Option<File>,
    binding: Binding,
    seed: u64,
    numbers: HashMap<String, usize>,
    /// The newest record of each row, without distributions.
    records: HashMap<Key, Record>,
    /// Its place in the file.
    places: HashMap<Key, (u64, u64)>,
    end: u64,
    /// Whether the file holds the rows in order and each once.
    ordered: bool,
    last: Option<Key>,
}

impl Results {
    /// Results that are kept in memory only.
    pub fn in_memory(binding: Binding) -> Results {
        Results::new(PathBuf::new(), None, binding)
    }

    fn new(path: PathBuf, file: Option<File>, binding: Binding) -> Results {
        let numbers = binding.inputs.iter().enumerate().map(|(number, input)| (input.name.clone(), number)).collect();
        let seed = line_seed(&binding);
        let (records, places) = (HashMap::new(), HashMap::new());
        Results { path, file, binding, seed, numbers, records, places, end: 0, ordered: true, last: None }
    }

    /// Opens the results of an earlier run to continue them, or begins new ones. Those of anything else are refused.
    pub fn open(path: &Path, binding: Binding) -> Result<Results> {
        let mut results = Results::new(path.to_owned(), None, binding);
        let header = match path.symlink_metadata() {
            Ok(_) => results.read()?,
            Err(_) => None,
        };
        let io = |action, e| Fault::io(action, path, e);
        let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let mut file = options.map_err(|e| io("open the file", e))?;
        file.set_len(header.unwrap_or(0)).map_err(|e| io("cut off an unfinished line of the file", e))?;
        file.seek(SeekFrom::End(0)).map_err(|e| io("write the file", e))?;
        if header.is_none() {
            file.write_all(header_line(&results.binding).as_bytes()).map_err(|e| io("write the file", e))?;
        }
        results.end = file.stream_position().map_err(|e| io("write the file", e))?;
        results.file = Some(file);
        Ok(results)
    }

    /// Reads what is there: the end of the last whole line, or `None` if there is not even a header.
    fn read(&mut self) -> Result<Option<u64>> {
        let path = self.path.clone();
        let mut lines = Vec::new();
        let found = scan(&path, &mut |line| {
            lines.push((line.record.without_distributions(), line.offset, line.bytes));
            Ok(())
        })?;
        let Some((binding, end)) = found else { return Ok(None) };
        if let Some((what, expected, found)) = self.binding.difference(&binding, true) {
            return Err(Fault::new(Place::file(&path), FaultKind::ResultsOther { what, expected, found }));
        }
        for (record, offset, bytes) in lines {
            self.keep(record, offset, bytes);
        }
        Ok(Some(end))
    }

    fn keep(&mut self, record: Record, offset: u64, bytes: u64) {
        let Some(&input) = self.numbers.get(&record.input) else { return };
        let key = (input, record.row);
        self.ordered &= self.last < Some(key);
        self.last = Some(key);
        self.places.insert(key, (offset, bytes));
        self.records.insert(key, record);
    }

    /// Keeps other runs from writing into the same file.
    pub fn lock(&self) -> Result<()> {
        let place = || Place::file(&self.path);
        match self.file.as_ref().map(File::try_lock) {
            None | Some(Ok(())) => Ok(()),
            Some(Err(TryLockError::WouldBlock)) => Err(Fault::new(place(), FaultKind::Locked)),
            Some(Err(TryLockError::Error(e))) => Err(Fault::io("lock the file", &self.path, e)),
        }
    }

    /// What they belong to.
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    /// The record of a row.
    pub fn get(&self, key: Key) -> Option<&Record> {
        self.records.get(&key)
    }

    /// Records in the order of the inputs, without distributions.
    pub fn in_order(&self) -> Vec<&Record> {
        let mut keys: Vec<&Key> = self.records.keys().collect();
        keys.sort_unstable();
        keys.into_iter().map(|key| &self.records[key]).collect()
    }

    /// Adds the records of some rows: they are in the file when this returns.
    pub fn add(&mut self, records: Vec<Record>) -> Result<()> {
        for record in records {
            let line = if self.file.is_some() { record.line(self.seed) } else { String::new() };
            if let Some(file) = &mut self.file {
                let written = file.write_all(line.as_bytes()).and_then(|()| file.flush());
                written.map_err(|e| Fault::io("write the file", &self.path, e))?;
            }
            self.keep(record.without_distributions(), self.end, line.len() as u64);
            self.end += line.len() as u64;
        }
        Ok(())
    }

    /// Takes over the records of another results file of the same run.
    pub fn merge(&mut self, path: &Path) -> Result<()> {
        let mut records = Vec::new();
        let Some((binding, _)) = scan(path, &mut |line| {
            records.push(line.record);
            if records.len() >= 64 { self.add_new(std::mem::take(&mut records)) } else { Ok(()) }
        })?
        else {
            return Ok(());
        };
        if let Some((what, expected, found)) = self.binding.difference(&binding, true) {
            return Err(Fault::new(Place::file(path), FaultKind::ResultsOther { what, expected, found }));
        }
        self.add_new(records)
    }

    /// Adds records whose rows have none yet, or one that was not compared with the same baseline.
    fn add_new(&mut self, records: Vec<Record>) -> Result<()> {
        let numbers = &self.numbers;
        let key = |record: &Record| Some((*numbers.get(&record.input)?, record.row));
        let known = |record: &Record| key(record).and_then(|key| self.records.get(&key));
        let new = records.into_iter().filter(|record| known(record).is_none_or(|old| is_newer(record, old)));
        let new = new.collect();
        self.add(new)
    }

    /// Puts the file in order and makes it durable.
    pub fn finish(&mut self) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        file.sync_all().map_err(|e| Fault::io("write the file to disk", &self.path, e))?;
        if self.ordered {
            return Ok(());
        }
        let reader = crate::io::SourceFile::open(&self.path)?;
        let new = NewFile::create(&self.path)?;
        let header = header_line(&self.binding);
        new.write_at(header.as_bytes(), 0)?;
        let mut end = header.len() as u64;
        let mut keys: Vec<Key> = self.places.keys().copied().collect();
        keys.sort_unstable();
        for key in keys {
            let (offset, bytes) = self.places[&key];
            let mut line = vec![0; bytes as usize];
            reader.read_at(&mut line, offset)?;
            new.write_at(&line, end)?;
            self.places.insert(key, (end, bytes));
            end += bytes;
        }
        drop(reader);
        self.file = None;
        new.commit(true)?;
        self.ordered = true;
        Ok(())
    }
}

/// Whether a record tells more of a row: it was compared with a baseline that the other was not compared with.
fn is_newer(record: &Record, other: &Record) -> bool {
    record.baseline.is_some() && record.baseline != other.baseline
}

/// Finished results of another model on the same rows.
pub struct Stored {
    path: PathBuf,
    file: crate::io::SourceFile,
    /// What they belong to.
    pub binding: Binding,
    seed: u64,
    places: HashMap<(String, u64), (u64, u64)>,
}

impl Stored {
    /// Opens results to compare with. They must be of the same rows, and complete for them.
    pub fn open(path: &Path, own: &Binding, inputs: &[Input]) -> Result<Stored, Faults> {
        let mut places = HashMap::new();
        let found = scan(path, &mut |line| {
            places.insert((line.record.input, line.record.row), (line.offset, line.bytes));
            Ok(())
        })?;
        let fault = |kind| Fault::new(Place::file(path), kind);
        let (binding, _) = found.ok_or_else(|| fault(FaultKind::NotResults))?;
        if binding.tokenizer != own.tokenizer {
            let (expected, found) = (own.tokenizer.clone(), binding.tokenizer);
            return Err(fault(FaultKind::BaselineTokenizer { expected, found }).into());
        }
        if let Some((what, expected, found)) = own.difference(&binding, false) {
            return Err(fault(FaultKind::BaselineOther { what, expected, found }).into());
        }
        let (mut total, mut missing) = (0, 0);
        for input in inputs {
            for item in input.items()? {
                total += 1;
                missing += u64::from(!places.contains_key(&(input.name.clone(), item?.row)));
            }
        }
        if missing > 0 {
            return Err(fault(FaultKind::ResultsIncomplete { missing, total }).into());
        }
        let file = crate::io::SourceFile::open(path)?;
        Ok(Stored { path: path.to_owned(), file, seed: line_seed(&binding), binding, places })
    }

    /// The whole record of a row.
    pub fn get(&self, input: &str, row: u64) -> Result<Option<Record>> {
        let Some(&(offset, bytes)) = self.places.get(&(input.to_owned(), row)) else { return Ok(None) };
        let mut line = vec![0; bytes as usize - 1];
        self.file.read_at(&mut line, offset)?;
        let damaged =
            |message: String| Fault::new(Place::file(&self.path), FaultKind::ResultsDamaged { line: row, message });
        let text = std::str::from_utf8(&line).map_err(|e| damaged(e.to_string()))?;
        Record::parse(text, self.seed).map(Some).map_err(damaged)
    }
}
