//! The results file: a line for every row, written as it lands, bound to what it was made from.
//!
//! The first line says what the results belong to ([`Binding`]). A run that ends early leaves whole lines and perhaps the
//! beginning of one, which the next run cuts off. When everything is scored the lines are put in the order of the inputs,
//! so that the finished file is the same however often the work was interrupted.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::input::{Input, Kind};
use super::record::{Lean, Record, RecordOf};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::NewFile;

/// Name of the file.
pub const RESULTS_FILE: &str = "results.jsonl";
/// Version of its structure.
const VERSION: u64 = 1;
/// Longest line that is read, in bytes: distributions of the longest texts included.
const MAX_LINE_BYTES: u64 = 1 << 30;

/// Where Linux shows the files that a program has open.
const OPEN_FILES: &str = "/proc/self/fd";

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
    /// How sums were formed, `exact` or `fast`.
    pub fn mode(&self) -> &str {
        self.backend.split_once(' ').map_or("", |(_, mode)| mode)
    }

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
        let names = |binding: &Binding| match binding.inputs.is_empty() {
            true => "nothing".to_owned(),
            false => binding.inputs.iter().map(|input| input.name.clone()).collect::<Vec<_>>().join(", "),
        };
        if names(self) != names(other) {
            return Some(("what is scored".to_owned(), names(self), names(other)));
        }
        let (one, another) = self.inputs.iter().zip(&other.inputs).find(|(one, another)| one != another)?;
        let sample = |input: &BoundInput| match input.limit {
            None => "all rows".to_owned(),
            Some(limit) => format!("{limit} rows with seed {}", input.seed),
        };
        let says =
            |input: &BoundInput| format!("{} of the {} {}", sample(input), <&str>::from(input.kind), input.sha256);
        Some((format!("the input {} (kind, rows and hash)", one.name), says(one), says(another)))
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

/// Where a line is.
#[derive(Debug, Clone, Copy)]
struct Spot {
    /// Its number, from 1.
    line: u64,
    offset: u64,
    /// Its end included.
    bytes: u64,
}

/// A line that was read.
struct Line<T> {
    record: RecordOf<T>,
    spot: Spot,
}

/// The binding and the whole lines of a results file, one at a time; `each` gets every record with its place.
fn scan<T: DeserializeOwned>(
    path: &Path,
    each: &mut dyn FnMut(Line<T>) -> Result<()>,
) -> Result<Option<(Binding, u64)>> {
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
            let record = RecordOf::parse(text, seed).map_err(|message| damaged(number, message))?;
            each(Line { record, spot: Spot { line: number, offset, bytes } })?;
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

/// A record in the file.
#[derive(Debug, Clone, Copy)]
struct Written {
    spot: Spot,
    /// Which of the baselines it was compared with.
    tag: Option<u32>,
}

/// Results of a run, in a file: one that stays, or one that goes when the run is over.
pub struct Results {
    path: PathBuf,
    file: Option<File>,
    is_temporary: bool,
    binding: Binding,
    seed: u64,
    numbers: HashMap<String, usize>,
    /// The newest record of each row.
    places: HashMap<Key, Written>,
    /// The baselines that records were compared with.
    tags: Vec<String>,
    /// Lines of the file.
    lines: u64,
    end: u64,
    /// Whether the file holds the rows in order and each once.
    ordered: bool,
    last: Option<Key>,
}

impl Results {
    /// Results that nobody keeps, in a file of the system's place for such: memory does not grow with their number.
    pub fn temporary(binding: Binding) -> Result<Results> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("coliconv-score-{}-{number}.jsonl", std::process::id());
        let path = std::env::temp_dir().join(name);
        // What another program left under this name, or put there, is not written to.
        let created = OpenOptions::new().write(true).create_new(true).open(&path);
        created.map_err(|e| Fault::io("create the file", &path, e))?;
        let mut results = Results::open(&path, binding)?;
        results.is_temporary = true;
        #[cfg(target_os = "linux")]
        if let Some(file) = &results.file {
            use std::os::fd::AsRawFd;
            let open = PathBuf::from(format!("{OPEN_FILES}/{}", file.as_raw_fd()));
            // Without a name it goes with the program, however that ends.
            if open.exists() {
                std::fs::remove_file(&path).map_err(|e| Fault::io("remove the file", &path, e))?;
                results.path = open;
            }
        }
        Ok(results)
    }

    fn new(path: PathBuf, file: Option<File>, binding: Binding) -> Results {
        let numbers = binding.inputs.iter().enumerate().map(|(number, input)| (input.name.clone(), number)).collect();
        let seed = line_seed(&binding);
        Results {
            path,
            file,
            is_temporary: false,
            binding,
            seed,
            numbers,
            places: HashMap::new(),
            tags: Vec::new(),
            lines: 1,
            end: 0,
            ordered: true,
            last: None,
        }
    }

    /// Opens the results of an earlier run to continue them, or begins new ones. Rows of anything else are refused.
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

    /// Reads what is there: the end of the last whole line, or `None` if there is not even a header, or that of another run
    /// and no row.
    fn read(&mut self) -> Result<Option<u64>> {
        let path = self.path.clone();
        let mut lines = Vec::new();
        let found = scan(&path, &mut |line: Line<IgnoredAny>| {
            lines.push((Head::of(&line.record), line.spot));
            Ok(())
        })?;
        let Some((binding, end)) = found else { return Ok(None) };
        if let Some((what, expected, found)) = self.binding.difference(&binding, true) {
            // Without a row they are nobody's: a run ended before it scored anything.
            return match lines.is_empty() {
                true => Ok(None),
                false => Err(Fault::new(Place::file(&path), FaultKind::ResultsOther { what, expected, found })),
            };
        }
        self.lines = 1 + lines.len() as u64;
        for (head, spot) in lines {
            self.keep(head, spot);
        }
        Ok(Some(end))
    }

    fn keep(&mut self, head: Head, spot: Spot) {
        let Some(&input) = self.numbers.get(&head.input) else { return };
        let key = (input, head.row);
        self.ordered &= self.last < Some(key);
        self.last = Some(key);
        let tag = head.baseline.map(|tag| self.number_of(tag));
        self.places.insert(key, Written { spot, tag });
    }

    fn number_of(&mut self, tag: String) -> u32 {
        let known = self.tags.iter().position(|known| *known == tag);
        let number = known.unwrap_or_else(|| {
            self.tags.push(tag);
            self.tags.len() - 1
        });
        number as u32
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

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether a row has a record, and the baseline that it was compared with.
    pub fn get(&self, key: Key) -> Option<Option<&str>> {
        let written = |place: &Written| place.tag.map(|tag| self.tags[tag as usize].as_str());
        self.places.get(&key).map(written)
    }

    /// All records in the order of the inputs, without distributions, read again.
    pub fn records(&self) -> Result<Vec<Record>> {
        let mut keys: Vec<Key> = self.places.keys().copied().collect();
        keys.sort_unstable();
        let reader = crate::io::SourceFile::open(&self.path)?;
        let mut line = Vec::new();
        let mut read = |key: &Key| read_line(&reader, self.places[key].spot, self.seed, &mut line).map(Lean::lean);
        keys.iter().map(&mut read).collect()
    }

    /// Adds the records of some rows: they are in the file when this returns.
    pub fn add(&mut self, records: Vec<Record>) -> Result<()> {
        for record in records {
            let file = self.file.as_mut().expect("results are open until they are finished");
            let line = record.line(self.seed);
            let written = file.write_all(line.as_bytes()).and_then(|()| file.flush());
            written.map_err(|e| Fault::io("write the file", &self.path, e))?;
            self.lines += 1;
            let spot = Spot { line: self.lines, offset: self.end, bytes: line.len() as u64 };
            self.keep(Head::of(&record), spot);
            self.end += line.len() as u64;
        }
        Ok(())
    }

    /// Takes over the records of another results file of the same run.
    pub fn merge(&mut self, path: &Path) -> Result<()> {
        let (mut records, mut rows) = (Vec::new(), 0u64);
        let Some((binding, _)) = scan(path, &mut |line| {
            rows += 1;
            records.push(line.record);
            if records.len() >= 64 { self.add_new(std::mem::take(&mut records)) } else { Ok(()) }
        })?
        else {
            return Ok(());
        };
        // What has no row adds none, whatever it was to be of.
        let other = self.binding.difference(&binding, true).filter(|_| rows > 0);
        if let Some((what, expected, found)) = other {
            return Err(Fault::new(Place::file(path), FaultKind::ResultsOther { what, expected, found }));
        }
        self.add_new(records)
    }

    /// Adds records whose rows have none yet, or one that was not compared with the same baseline.
    fn add_new(&mut self, records: Vec<Record>) -> Result<()> {
        let known = |record: &Record| self.get((*self.numbers.get(&record.input)?, record.row));
        // A record tells more of a row if it was compared with a baseline that the other was not compared with.
        let is_newer =
            |record: &Record, tag: Option<&str>| record.baseline.is_some() && record.baseline.as_deref() != tag;
        let new = records.into_iter().filter(|record| known(record).is_none_or(|tag| is_newer(record, tag)));
        let new = new.collect();
        self.add(new)
    }

    /// Puts the file in order and makes it durable.
    pub fn finish(&mut self) -> Result<()> {
        let Some(file) = self.file.as_ref().filter(|_| !self.is_temporary) else { return Ok(()) };
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
        self.lines = 1;
        for key in keys {
            let Written { spot: Spot { offset, bytes, .. }, tag } = self.places[&key];
            let mut line = vec![0; bytes as usize];
            reader.read_at(&mut line, offset)?;
            new.write_at(&line, end)?;
            self.lines += 1;
            self.places.insert(key, Written { spot: Spot { line: self.lines, offset: end, bytes }, tag });
            end += bytes;
        }
        drop(reader);
        self.file = None;
        new.commit(true)?;
        self.ordered = true;
        Ok(())
    }
}

impl Drop for Results {
    fn drop(&mut self) {
        if self.is_temporary && !self.path.starts_with(OPEN_FILES) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// What of a record is known without looking into the file.
struct Head {
    input: String,
    row: u64,
    baseline: Option<String>,
}

impl Head {
    fn of<T>(record: &RecordOf<T>) -> Head {
        Head { input: record.input.clone(), row: record.row, baseline: record.baseline.clone() }
    }
}

/// The record of a line of a file that was read before.
fn read_line<T: DeserializeOwned>(
    file: &crate::io::SourceFile,
    spot: Spot,
    seed: u64,
    line: &mut Vec<u8>,
) -> Result<RecordOf<T>> {
    line.resize(spot.bytes as usize - 1, 0);
    file.read_at(line, spot.offset)?;
    let damaged =
        |message: String| Fault::new(Place::file(file.path()), FaultKind::ResultsDamaged { line: spot.line, message });
    let text = std::str::from_utf8(line).map_err(|e| damaged(e.to_string()))?;
    RecordOf::parse(text, seed).map_err(damaged)
}

/// Finished results of another model on the same rows.
pub struct Stored {
    file: crate::io::SourceFile,
    /// What they belong to.
    pub binding: Binding,
    seed: u64,
    places: HashMap<(String, u64), Spot>,
}

impl Stored {
    /// Opens results to compare with. They must be of the same rows, and complete for them.
    pub fn open(path: &Path, own: &Binding, inputs: &[Input]) -> Result<Stored, Faults> {
        let mut places = HashMap::new();
        let found = scan(path, &mut |line: Line<IgnoredAny>| {
            places.insert((line.record.input, line.record.row), line.spot);
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
        Ok(Stored { file, seed: line_seed(&binding), binding, places })
    }

    /// The whole record of a row.
    pub fn get(&self, input: &str, row: u64) -> Result<Option<Record>> {
        let Some(&spot) = self.places.get(&(input.to_owned(), row)) else { return Ok(None) };
        read_line(&self.file, spot, self.seed, &mut Vec::new()).map(Some)
    }
}
