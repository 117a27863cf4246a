//! Where a run makes what it measures, and that nothing of it stays.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use crate::error::{Fault, Result};
use crate::io::{Claim, DirectoryLock, LOCK_FILE};
use crate::progress::Progress;

/// What the directory of a run is called, but for the number of its process.
const NAME: &str = "coliconv-bench-";

/// A file that the directory of a run has from its beginning, and what it says: no other program makes it.
const MARK: &str = "coliconv-bench.txt";
const MARKED: &str = "made by coliconv bench, which removes it and all that is beside it\n";

/// The directories of runs that are not over.
static OPEN: Mutex<Vec<Made>> = Mutex::new(Vec::new());

/// What a run has made.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Made {
    path: PathBuf,
    /// The directories above it that were not there, the innermost first.
    above: Vec<PathBuf>,
}

impl Made {
    fn remove(&self) {
        let _ = fs::remove_dir_all(&self.path);
        // What somebody else has put something into stays.
        self.above.iter().for_each(|path| drop(fs::remove_dir(path)));
    }
}

/// Removes what runs have made that are not over, for whoever ends the program now. They may still be writing, so it is
/// tried until nothing is left, for a second at most.
pub fn remove_scratch() {
    let open = OPEN.lock().map(|open| open.clone()).unwrap_or_default();
    for _ in 0..100 {
        open.iter().for_each(Made::remove);
        if open.iter().all(|made| made.path.symlink_metadata().is_err()) {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A directory that is removed when the run is over, with those above it that were made for it.
#[derive(Debug)]
pub(super) struct Scratch {
    pub(super) path: PathBuf,
    made: Made,
    /// Tells other runs that this one is not over.
    _lock: DirectoryLock,
}

impl Scratch {
    /// A directory in `parent`. What runs that were killed have left there is removed first.
    pub(super) fn create(parent: &Path, progress: &dyn Progress) -> Result<Scratch> {
        remove_left(parent, progress);
        let path = parent.join(format!("{NAME}{}", std::process::id()));
        let is_missing = |path: &&Path| *path != Path::new("") && path.symlink_metadata().is_err();
        let above = parent.ancestors().take_while(is_missing).map(Path::to_owned).collect();
        let made = Made { path, above };
        if let Ok(mut open) = OPEN.lock() {
            open.push(made.clone());
        }
        let lock = Scratch::make(parent, &made.path).inspect_err(|_| made.remove())?;
        Ok(Scratch { path: made.path.clone(), made, _lock: lock })
    }

    fn make(parent: &Path, path: &Path) -> Result<DirectoryLock> {
        fs::create_dir_all(parent).map_err(|e| Fault::io("create the directory", parent, e))?;
        fs::create_dir(path).map_err(|e| Fault::io("create the directory", path, e))?;
        let mark = path.join(MARK);
        fs::write(&mark, MARKED).map_err(|e| Fault::io("write", &mark, e))?;
        DirectoryLock::take(path, &Claim::Whole)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.made.remove();
    }
}

/// Removes the directories of runs that have died: they have such a name, the mark, and a lock that nobody holds. Whatever else is
/// called so is somebody else's and stays, as does one that cannot be removed.
fn remove_left(parent: &Path, progress: &dyn Progress) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_ours = name.strip_prefix(NAME).is_some_and(|number| number.parse::<u32>().is_ok());
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let path = entry.path();
        let is_file = |name: &str| path.join(name).symlink_metadata().is_ok_and(|found| found.is_file());
        let is_marked = is_file(MARK) && fs::read(path.join(MARK)).is_ok_and(|text| text == MARKED.as_bytes());
        if !is_ours || !is_directory || !is_marked || !is_file(LOCK_FILE) {
            continue;
        }
        if let Ok(_lock) = DirectoryLock::take(&path, &Claim::Whole) {
            progress.step(&format!("removing {name}, which a run that was killed has left"));
            let _ = fs::remove_dir_all(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn directories_that_were_made_go_and_others_stay() {
        let place = tempfile::tempdir().unwrap();
        let (there, parent) = (place.path().join("there"), place.path().join("there/a/b"));
        fs::create_dir(&there).unwrap();
        let scratch = Scratch::create(&parent, &Silent).unwrap();
        fs::write(scratch.path.join("file"), "x").unwrap();
        drop(scratch);
        assert_eq!(fs::read_dir(&there).unwrap().count(), 0);
        // What somebody else has put there meanwhile stays.
        let scratch = Scratch::create(&parent, &Silent).unwrap();
        fs::write(there.join("a/other"), "x").unwrap();
        drop(scratch);
        assert!(there.join("a/other").exists() && !parent.exists());
        // A file in the way of a directory is no directory that was made.
        let message = Scratch::create(&there.join("a/other/c"), &Silent).unwrap_err().to_string();
        assert!(message.contains("create the directory") && there.join("a/other").exists(), "{message}");
    }

    #[test]
    fn what_a_killed_run_has_left_goes() {
        let place = tempfile::tempdir().unwrap();
        let directory = |name: &str, lock: bool| {
            let path = place.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("payload"), "x").unwrap();
            fs::write(path.join(MARK), MARKED).unwrap();
            if lock {
                fs::write(path.join(LOCK_FILE), "").unwrap();
            }
            path
        };
        let left = directory("coliconv-bench-1", true);
        let running = directory("coliconv-bench-2", true);
        let _lock = DirectoryLock::take(&running, &Claim::Whole).unwrap();
        let others = ["coliconv-bench-x", "other-bench-1"].map(|name| directory(name, true));
        let without = directory("coliconv-bench-3", false);
        // Such a name and a lock that nobody holds are not enough: a killed conversion leaves a lock, too.
        let [unmarked, changed] = ["coliconv-bench-4", "coliconv-bench-5"].map(|name| directory(name, true));
        fs::remove_file(unmarked.join(MARK)).unwrap();
        fs::write(changed.join(MARK), "notes").unwrap();
        drop(Scratch::create(place.path(), &Silent).unwrap());
        assert!(!left.exists());
        assert!(running.join("payload").exists() && without.join("payload").exists());
        assert!(others.iter().all(|path| path.join("payload").exists()));
        assert!(unmarked.join("payload").exists() && changed.join("payload").exists());
    }
}
