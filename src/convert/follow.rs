//! A source that is still arriving: what is waited for, and for how long.

use std::path::Path;
use std::time::{Duration, Instant};

use super::{Progress, small};
use crate::checkpoint::arrival::{Arrivals, Waiting};
use crate::checkpoint::{INDEX_FILE, Index};
use crate::config::{CONFIG_FILE, Config, NEEDED_SMALL_FILES};
use crate::error::{Fault, FaultKind, Faults, Place, Result};

/// Name of the only weight file of a model without an index.
const SINGLE_FILE: &str = "model.safetensors";

/// How a source that is still arriving is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Follow {
    /// Time between two looks.
    pub poll: Duration,
    /// Time for which a file must have been left alone.
    pub settle: Duration,
    /// Time after which nothing new ends the run; `None` for never.
    pub patience: Option<Duration>,
}

impl Default for Follow {
    fn default() -> Follow {
        Follow { poll: Duration::from_secs(1), settle: Duration::from_secs(2), patience: None }
    }
}

/// Watches a source.
#[derive(Debug)]
pub(super) struct Follower {
    follow: Follow,
    arrivals: Arrivals,
    /// What was waited for at the last look, and since when that has not changed.
    last: (Vec<String>, u64, Instant),
}

impl Follower {
    pub(super) fn new(source: &Path, follow: Follow) -> Follower {
        Follower { follow, arrivals: Arrivals::new(source, follow.settle), last: (Vec::new(), 0, Instant::now()) }
    }

    /// What speaks against taking a file now.
    pub(super) fn waiting(&mut self, name: &str) -> Option<Waiting> {
        self.arrivals.waiting(name)
    }

    /// Whether a file is whole.
    pub(super) fn is_whole(&mut self, name: &str) -> bool {
        self.waiting(name).is_none()
    }

    /// Whether a file is whole as far as it tells itself, and nothing tells more.
    pub(super) fn is_whole_at_once(&mut self, name: &str) -> bool {
        !self.arrivals.has_record(name) && self.is_whole(name)
    }

    /// Tells what is waited for, and sleeps until the next look.
    pub(super) fn pause(&mut self, source: &Path, waiting: Vec<String>, progress: &dyn Progress) -> Result<()> {
        let place = || Place::file(source);
        progress.waiting(&waiting);
        // Whatever is being written grows, whether anything of it is waited for or not.
        let bytes = directory_bytes(source);
        if (&waiting, bytes) != (&self.last.0, self.last.1) {
            self.last = (waiting, bytes, Instant::now());
        } else if let Some(patience) = self.follow.patience.filter(|&patience| self.last.2.elapsed() >= patience) {
            let (minutes, waiting) = (patience.as_secs() / 60, std::mem::take(&mut self.last.0));
            return Err(Fault::new(place(), FaultKind::NothingArrives { minutes, waiting }));
        }
        let until = Instant::now() + self.follow.poll;
        while Instant::now() < until {
            if progress.interrupted() {
                return Err(Fault::new(place(), FaultKind::Interrupted));
            }
            std::thread::sleep(self.follow.poll.min(Duration::from_millis(50)));
        }
        Ok(())
    }

    /// Waits until the small files that a container needs are there, all are whole, and nothing says that others are
    /// being written.
    pub(super) fn small_files(&mut self, source: &Path, progress: &dyn Progress) -> Result<()> {
        loop {
            let mut waiting: Vec<String> = NEEDED_SMALL_FILES
                .into_iter()
                .filter(|(name, _)| !source.join(name).exists())
                .map(|(name, _)| format!("{name} (if the model has none, run again without --follow)"))
                .collect();
            let arriving = small::names(source).into_iter();
            waiting.extend(arriving.filter_map(|name| Some(format!("{name} ({})", self.waiting(&name)?))));
            waiting.extend(self.arrivals.unfinished());
            if waiting.is_empty() {
                return Ok(());
            }
            self.pause(source, waiting, progress)?;
        }
    }
}

/// Bytes of the files of a directory.
fn directory_bytes(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// Waits until config.json and the index are there: what a conversion can be planned from. A model in one file has no index
/// and is waited for whole.
pub fn wait_for_model(source: &Path, follow: Follow, progress: &dyn Progress) -> Result<(), Faults> {
    let mut follower = Follower::new(source, follow);
    loop {
        let waiting = match missing(source, &mut follower) {
            None => return Ok(()),
            Some(waiting) => waiting,
        };
        follower.pause(source, vec![waiting], progress)?;
    }
}

/// What is still needed to plan a conversion; what is there and wrong for good is left to whoever plans.
fn missing(source: &Path, follower: &mut Follower) -> Option<String> {
    if !source.is_dir() {
        return Some("the directory (not there yet)".to_owned());
    }
    match Config::read(source) {
        Err(faults) if faults.iter().any(|fault| is_cut_off(&fault.kind)) => {
            return Some(format!("{CONFIG_FILE} ({})", first(&faults)));
        }
        _ => {}
    }
    if source.join(INDEX_FILE).exists() {
        return match Index::read(source, &[]) {
            Err(faults) if faults.iter().any(|fault| is_cut_off(&fault.kind)) => {
                Some(format!("{INDEX_FILE} ({})", first(&faults)))
            }
            _ => None,
        };
    }
    match follower.waiting(SINGLE_FILE) {
        None => None,
        Some(Waiting::Absent) => Some(format!("{INDEX_FILE} ({}; fetch the small files first)", Waiting::Absent)),
        Some(waiting) => Some(format!("{SINGLE_FILE} ({waiting})")),
    }
}

fn first(faults: &Faults) -> String {
    faults.iter().next().map(|fault| fault.kind.to_string()).unwrap_or_default()
}

/// What a file looks like that is not wholly written.
fn is_cut_off(kind: &FaultKind) -> bool {
    use FaultKind as K;
    matches!(kind, K::ConfigAbsent | K::JsonSyntax { .. } | K::IndexSyntax { .. } | K::FileShrank { .. } | K::Io { .. })
}
