//! The directory of results and reports.

use std::fs;
use std::path::{Path, PathBuf};

use super::record::Record;
use super::results::{Binding, RESULTS_FILE, Results};
use super::{Job, Options};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::{Claim, DirectoryLock, is_same_file, read_small, write_whole};
use crate::limits;
use crate::part::Part;
use crate::report::{ScoreProbes, ScoreReport};

/// Name of the report for programs.
pub const REPORT_FILE: &str = "score.json";
/// Name of the table of all requests.
pub const TABLE_FILE: &str = "requests.csv";

/// Name of the page for people.
pub const PAGE_FILE: &str = "report.html";

/// The directory, locked.
pub struct Out {
    directory: PathBuf,
    part: Option<Part>,
    _lock: DirectoryLock,
}

/// Whether a directory is another one, or lies in it; it may not exist yet.
fn is_inside(directory: &Path, other: &Path) -> bool {
    let absolute = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    absolute.ancestors().any(|ancestor| is_same_file(ancestor, other))
}

/// Whether a directory holds results.
pub fn has_results(directory: &Path) -> bool {
    directory.join(RESULTS_FILE).is_file()
}

/// What was scored into a directory, `checkpoint` or `container`, as its report says; none where that is of another model.
pub fn scored_kind(directory: &Path, model_sha256: &str) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Scored {
        kind: String,
        model_sha256: String,
    }
    let bytes = read_small(&directory.join(REPORT_FILE), limits::MAX_REPORT_BYTES).ok()?;
    let scored: Scored = serde_json::from_slice(&bytes).ok()?;
    (scored.model_sha256 == model_sha256).then_some(scored.kind)
}

/// Whether what a model generated is in a directory's report, whichever model that was.
pub fn has_probes(directory: &Path) -> bool {
    earlier_report(directory).is_some_and(|report| report.probes.is_some())
}

/// The report of an earlier run; `None` where there is none.
fn earlier_report(directory: &Path) -> Option<ScoreReport> {
    let bytes = read_small(&directory.join(REPORT_FILE), limits::MAX_REPORT_BYTES).ok()?;
    serde_json::from_slice(&bytes).ok()
}

fn part_file(part: Part) -> String {
    format!("results-{}.jsonl", part.file_text())
}

/// Number and count in the name of a part's file.
fn part_of(name: &str) -> Option<Part> {
    Part::from_file_text(name.strip_prefix("results-")?.strip_suffix(".jsonl")?)
}

impl Out {
    /// Makes the directory where there is none, and locks it. One that holds anything of these names that is not of score
    /// results is refused.
    pub fn prepare(directory: &Path, model: &Path, options: &Options) -> Result<Out> {
        let refuse = |path: PathBuf, kind| Err(Fault::new(Place::file(path), kind));
        if is_inside(directory, model) {
            return refuse(directory.to_owned(), FaultKind::ResultsInModel);
        }
        if directory.symlink_metadata().is_ok() && !directory.is_dir() {
            return refuse(directory.to_owned(), FaultKind::OutNotDirectory);
        }
        if options.finish && !directory.is_dir() {
            return refuse(directory.to_owned(), FaultKind::NothingToJoin);
        }
        fs::create_dir_all(directory).map_err(|e| Fault::io("create the directory", directory, e))?;
        // Parts of one run work side by side.
        let claim = options.part.map_or(Claim::Whole, |part| Claim::Part(part.file_text()));
        let lock = DirectoryLock::take(directory, &claim)?;
        // Whether a results file is one of these is seen when it is read.
        if directory.join(RESULTS_FILE).symlink_metadata().is_err() {
            let reports = [REPORT_FILE, TABLE_FILE, PAGE_FILE].map(|name| directory.join(name));
            if let Some(report) = reports.into_iter().find(|path| path.symlink_metadata().is_ok()) {
                return refuse(report, FaultKind::NotResults);
            }
        }
        Ok(Out { directory: directory.to_owned(), part: options.part, _lock: lock })
    }

    /// The results of earlier runs, to be continued.
    pub fn results(&self, binding: Binding) -> Result<Results> {
        let name = self.part.map_or(RESULTS_FILE.to_owned(), part_file);
        let results = Results::open(&self.directory.join(name), binding)?;
        if self.part.is_some() {
            results.lock()?;
        }
        Ok(results)
    }

    /// Takes over the results of all parts.
    pub fn merge(&self, results: &mut Results) -> Result<(), Faults> {
        let entries = fs::read_dir(&self.directory).map_err(|e| Fault::io("list the directory", &self.directory, e))?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut parts: Vec<Part> = names.filter_map(|name| part_of(&name)).collect();
        parts.sort_unstable_by_key(|part| (part.of(), part.number()));
        self.refuse_missing(&parts, results)?;
        for part in parts {
            results.merge(&self.directory.join(part_file(part)))?;
        }
        Ok(())
    }

    /// Refuses parts of which some are not there, unless everything was joined before.
    fn refuse_missing(&self, parts: &[Part], results: &Results) -> Result<()> {
        let Some(of) = parts.iter().map(|part| part.of()).max() else {
            let kind = FaultKind::NothingToJoin;
            return if results.is_empty() { Err(Fault::new(Place::file(&self.directory), kind)) } else { Ok(()) };
        };
        // Parts of several divisions may make up the whole together; whether they do is seen when they are joined.
        let alike = parts.iter().all(|part| part.of() == of);
        let is_there = |number: &usize| parts.iter().any(|part| part.number() == *number);
        let missing: Vec<String> = (1..=of).filter(|number| !is_there(number)).map(|n| format!("{n}/{of}")).collect();
        match alike && results.is_empty() && !missing.is_empty() {
            true => Err(Fault::new(Place::file(&self.directory), FaultKind::ScorePartsMissing { missing })),
            false => Ok(()),
        }
    }

    /// What the same model generated in an earlier run.
    pub fn earlier_probes(&self, binding: &Binding) -> Option<ScoreProbes> {
        let report = earlier_report(&self.directory)?;
        let backend = format!("{} {}", report.backend, report.mode);
        let theirs = [&report.model_sha256, &report.tokenizer_sha256, &report.prefix, &backend];
        let same = theirs == [&binding.model, &binding.tokenizer, &binding.prefix, &binding.backend];
        report.probes.filter(|_| same)
    }

    /// Writes the reports, in place of those of an earlier run.
    pub fn write(&self, report: &ScoreReport, job: &Job<'_>, records: &[Record]) -> Result<()> {
        let with_baseline = report.baseline.is_some();
        let mut json = serde_json::to_vec_pretty(report).expect("reports are plain data");
        json.push(b'\n');
        write_whole(&self.directory.join(REPORT_FILE), &json, true)?;
        write_whole(&self.directory.join(TABLE_FILE), &super::summary::table(records, with_baseline), true)?;
        let worst = super::worst::questions(job.inputs, records, with_baseline)?;
        write_whole(&self.directory.join(PAGE_FILE), super::html::page(report, &worst).as_bytes(), true)
    }
}
