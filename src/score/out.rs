//! The directory of results and reports.

use std::fs;
use std::path::{Path, PathBuf};

use super::results::{Binding, RESULTS_FILE, Results};
use super::{Job, Options};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::{Claim, DirectoryLock, is_same_file, write_whole};
use crate::part::Part;
use crate::report::ScoreReport;

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

/// Whether a directory holds results.
pub fn has_results(directory: &Path) -> bool {
    directory.join(RESULTS_FILE).is_file()
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
        if is_same_file(directory, model) {
            return refuse(directory.to_owned(), FaultKind::ResultsInModel);
        }
        if directory.symlink_metadata().is_ok() && !directory.is_dir() {
            return refuse(directory.to_owned(), FaultKind::OutNotDirectory);
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
        for part in parts {
            results.merge(&self.directory.join(part_file(part)))?;
        }
        Ok(())
    }

    /// Writes the reports, in place of those of an earlier run.
    pub fn write(&self, report: &ScoreReport, job: &Job<'_>, results: &Results) -> Result<()> {
        let with_baseline = report.baseline.is_some();
        let mut json = serde_json::to_vec_pretty(report).expect("reports are plain data");
        json.push(b'\n');
        write_whole(&self.directory.join(REPORT_FILE), &json, true)?;
        write_whole(&self.directory.join(TABLE_FILE), &super::summary::table(results, with_baseline), true)?;
        let worst = super::worst::questions(job.inputs, &results.in_order(), with_baseline)?;
        write_whole(&self.directory.join(PAGE_FILE), super::html::page(report, &worst).as_bytes(), true)
    }
}
