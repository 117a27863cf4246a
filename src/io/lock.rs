//! Who may write to a directory: locks of the operating system, released when a process dies.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::hook;
use crate::error::{Fault, FaultKind, Place, Result};

/// Name of the file that is locked for the whole directory.
pub const LOCK_FILE: &str = ".coliconv.lock";
/// How long a part tries to share a directory.
const PATIENCE: Duration = Duration::from_millis(200);

/// What of a directory is claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    /// All of it.
    Whole,
    /// One part, by its name: other parts may be claimed at the same time.
    Part(String),
}

/// A directory, or a part of it, held by this process alone until dropped.
///
/// Files in it are locked and not the directory itself, because a lock on a directory is unknown to network file systems.
/// They may outlive a process that died, and mean nothing then.
#[derive(Debug)]
pub struct DirectoryLock {
    /// Present until dropped.
    directory: Option<LockFile>,
    part: Option<LockFile>,
}

impl DirectoryLock {
    /// Takes the lock, or [`FaultKind::Locked`] when another process holds what is claimed.
    pub fn take(directory: &Path, claim: &Claim) -> Result<DirectoryLock> {
        let path = directory.join(LOCK_FILE);
        match claim {
            Claim::Whole => Ok(DirectoryLock { directory: Some(LockFile::take(path, Kind::Exclusive)?), part: None }),
            Claim::Part(name) => {
                let whole = LockFile::take(path, Kind::Shared)?;
                let part = LockFile::take(directory.join(part_file(name)), Kind::Exclusive)?;
                Ok(DirectoryLock { directory: Some(whole), part: Some(part) })
            }
        }
    }

    /// Refuses a directory of which another process holds what is to be claimed. Writes nothing.
    pub fn check(directory: &Path, claim: &Claim) -> Result<()> {
        let check = |name: &str, kind| {
            let path = directory.join(name);
            if path.symlink_metadata().is_ok() { LockFile::take(path, kind).map(drop) } else { Ok(()) }
        };
        match claim {
            Claim::Whole => check(LOCK_FILE, Kind::Exclusive),
            Claim::Part(name) => {
                check(LOCK_FILE, Kind::Shared)?;
                check(&part_file(name), Kind::Exclusive)
            }
        }
    }

    /// Waits until no other part of the directory is at this point.
    pub fn one_at_a_time(directory: &Path) -> Result<OneAtATime> {
        Ok(OneAtATime(LockFile::take(directory.join(part_file("finish")), Kind::Waiting)?))
    }

    /// [`FaultKind::LockRemoved`] if somebody has removed what is held, so that it keeps nobody out.
    pub fn check_held(&self) -> Result<()> {
        for lock in [self.directory.as_ref(), self.part.as_ref()].into_iter().flatten() {
            if !is_at(&lock.file, &lock.path) {
                return Err(Fault::new(Place::file(&lock.path), FaultKind::LockRemoved));
            }
        }
        Ok(())
    }
}

impl Drop for DirectoryLock {
    /// Gives the lock back and leaves no file behind, unless others hold parts: then the last of them removes it.
    fn drop(&mut self) {
        let Some(directory) = self.directory.take() else { return };
        let Some(part) = self.part.take() else { return directory.remove_all() };
        part.remove();
        let path = directory.path.clone();
        drop(directory);
        if path.exists()
            && let Ok(alone) = LockFile::take(path, Kind::Exclusive)
        {
            alone.remove_all();
        }
    }
}

/// Held by one part at a time.
#[derive(Debug)]
pub struct OneAtATime(LockFile);

impl OneAtATime {
    /// Gives it back and removes its file.
    pub fn release(self) {
        self.0.remove();
    }
}

fn part_file(name: &str) -> String {
    format!("{}.{name}.lock", super::WORKING_PREFIX)
}

fn is_part_file(name: &str) -> bool {
    name != LOCK_FILE && name.starts_with(super::WORKING_PREFIX) && name.ends_with(".lock")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Exclusive,
    Shared,
    /// Exclusive, however long that takes.
    Waiting,
}

#[derive(Debug)]
struct LockFile {
    path: PathBuf,
    file: File,
}

impl LockFile {
    fn take(path: PathBuf, kind: Kind) -> Result<LockFile> {
        let started = Instant::now();
        loop {
            // Opening a link could make a file elsewhere; what is no file can be locked, and keeps nobody out.
            if path.symlink_metadata().is_ok_and(|found| !found.is_file()) {
                return Err(Fault::new(Place::file(path), FaultKind::NotAFile));
            }
            let mut options = OpenOptions::new();
            options.create(true).read(true).write(true).truncate(false);
            let file = options.open(&path).map_err(|e| Fault::io("open the lock", &path, e))?;
            let locked = match kind {
                Kind::Exclusive => file.try_lock(),
                Kind::Shared => file.try_lock_shared(),
                Kind::Waiting => file.lock().map_err(TryLockError::Error),
            };
            match locked {
                // Whoever held it before may have removed it meanwhile: then others would lock another file.
                Ok(()) if is_at(&file, &path) => return Ok(LockFile { path, file }),
                Ok(()) => {}
                // A part that ends holds the directory alone for a moment.
                Err(TryLockError::WouldBlock) if kind == Kind::Shared && started.elapsed() < PATIENCE => {
                    std::thread::sleep(PATIENCE / 20);
                }
                Err(TryLockError::WouldBlock) => {
                    let of_part = path.file_name().is_some_and(|name| name != LOCK_FILE);
                    let kind = if of_part { FaultKind::PartLocked } else { FaultKind::Locked };
                    return Err(Fault::new(Place::file(super::parent(&path)), kind));
                }
                Err(TryLockError::Error(e)) => return Err(Fault::io("lock the file", &path, e)),
            }
        }
    }

    /// Removes it, the lock of the whole directory, with those that parts left there when they died: nobody holds one now.
    fn remove_all(self) {
        for entry in fs::read_dir(super::parent(&self.path)).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if is_part_file(&name) {
                let _ = hook::remove_file(&entry.path());
            }
        }
        self.remove();
    }

    fn remove(self) {
        // One that stays means nothing.
        let _ = hook::remove_file(&self.path);
    }
}

impl Drop for LockFile {
    /// A process that is just being started has a copy of each open file for a moment: closing ours alone would not end the lock.
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

/// Whether an open file still has this path.
fn is_at(file: &File, path: &Path) -> bool {
    let there = || -> io::Result<bool> {
        let opened = same_file::Handle::from_file(file.try_clone()?)?;
        Ok(fs::symlink_metadata(path)?.is_file() && same_file::Handle::from_path(path)? == opened)
    };
    there().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locked<T: std::fmt::Debug>(result: Result<T>) -> bool {
        matches!(*result.unwrap_err().kind, FaultKind::Locked | FaultKind::PartLocked)
    }

    #[test]
    fn a_directory_is_locked_once() {
        let dir = tempfile::tempdir().unwrap();
        let take = |claim: Claim| DirectoryLock::take(dir.path(), &claim);
        let held = take(Claim::Whole).unwrap();
        assert!(locked(take(Claim::Whole)) && locked(take(Claim::Part("1".into()))));
        assert!(locked(DirectoryLock::check(dir.path(), &Claim::Whole)));
        drop(held);
        DirectoryLock::check(dir.path(), &Claim::Whole).unwrap();
        drop(take(Claim::Whole).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn parts_share_a_directory_and_hold_themselves() {
        let dir = tempfile::tempdir().unwrap();
        let take = |claim: Claim| DirectoryLock::take(dir.path(), &claim);
        let (one, two) = (take(Claim::Part("1-of-2".into())).unwrap(), take(Claim::Part("2-of-2".into())).unwrap());
        assert!(locked(take(Claim::Part("1-of-2".into()))) && locked(take(Claim::Whole)));
        drop(one);
        assert!(locked(take(Claim::Whole)));
        drop(two);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        take(Claim::Whole).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_file_is_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(LOCK_FILE);
        let refused = || {
            let results =
                [Claim::Whole, Claim::Part("1-of-2".into())].map(|claim| DirectoryLock::take(dir.path(), &claim));
            results.into_iter().all(|result| matches!(*result.unwrap_err().kind, FaultKind::NotAFile))
        };
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
        assert!(refused());
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(refused());
        fs::remove_dir(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert!(refused());
    }

    /// As when a process is started that has copies of open files until it runs its own program.
    #[test]
    fn a_lock_that_is_given_back_is_free_though_its_file_is_open_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let take = |claim: Claim| DirectoryLock::take(dir.path(), &claim).unwrap();
        let copies = |held: &DirectoryLock| {
            let files = [held.directory.as_ref(), held.part.as_ref()].into_iter().flatten();
            files.map(|lock| lock.file.try_clone().unwrap()).collect::<Vec<_>>()
        };
        for claim in [Claim::Part("1-of-2".into()), Claim::Whole] {
            let held = take(claim.clone());
            let open = copies(&held);
            drop(held);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{claim:?}");
            drop(take(claim));
            drop(open);
        }
        let (one, two) = (take(Claim::Part("1-of-2".into())), take(Claim::Part("2-of-2".into())));
        let open = [copies(&one), copies(&two)];
        drop((one, two));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        drop(take(Claim::Whole));
        drop(open);
    }

    /// A lock file that was removed while somebody waited for it locks nothing: the next one is taken.
    #[test]
    fn a_removed_lock_is_not_taken_for_held() {
        let dir = tempfile::tempdir().unwrap();
        let held = DirectoryLock::one_at_a_time(dir.path()).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| DirectoryLock::one_at_a_time(dir.path()).unwrap());
            std::thread::sleep(std::time::Duration::from_millis(50));
            held.release();
            let now = waiting.join().unwrap();
            assert!(is_at(&now.0.file, &now.0.path));
        });
    }
}
