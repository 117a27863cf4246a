//! A place where tests stand between the program and the disk.
//!
//! Every change of the file system is announced here before it happens. A hook sees them in order, and one that returns an
//! error makes the change fail as if the system had refused it: a full disk, a broken one, or, if it refuses everything
//! from then on, a process that was killed at that point. Nothing but tests installs one.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};

/// A change of the file system that is about to happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<'a> {
    /// A directory is made.
    CreateDirectory,
    /// A file is made, empty.
    Create,
    /// A file gets its size, or space for it.
    Allocate(u64),
    /// Bytes are written.
    Write {
        /// Where.
        offset: u64,
        /// How many.
        bytes: usize,
    },
    /// What was written to a file is made durable.
    Sync,
    /// A file gets this name.
    Rename(&'a Path),
    /// A file or an empty directory is removed.
    Remove,
    /// Names in a directory are made durable.
    SyncDirectory,
}

/// Sees each change, with the path it happens to, before it happens; an error prevents it.
pub type Hook = dyn Fn(Change<'_>, &Path) -> io::Result<()> + Send + Sync;

static INSTALLED: AtomicBool = AtomicBool::new(false);
static HOOK: RwLock<Option<Arc<Hook>>> = RwLock::new(None);

/// Installs a hook for this process, or removes it.
pub fn install(hook: Option<Arc<Hook>>) {
    let mut installed = HOOK.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    INSTALLED.store(hook.is_some(), Ordering::SeqCst);
    *installed = hook;
}

/// Announces a change.
pub(super) fn announce(change: Change<'_>, path: &Path) -> io::Result<()> {
    if !INSTALLED.load(Ordering::Relaxed) {
        return Ok(());
    }
    let hook = HOOK.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    hook.map_or(Ok(()), |hook| hook(change, path))
}

/// Removes a file.
pub(crate) fn remove_file(path: &Path) -> io::Result<()> {
    announce(Change::Remove, path)?;
    std::fs::remove_file(path)
}

/// Removes an empty directory.
pub(crate) fn remove_directory(path: &Path) -> io::Result<()> {
    announce(Change::Remove, path)?;
    std::fs::remove_dir(path)
}

/// Makes a directory and its ancestors durably; tells which did not exist, innermost first.
pub(crate) fn create_directories(path: &Path) -> io::Result<Vec<PathBuf>> {
    let missing = |p: &&Path| !p.as_os_str().is_empty() && !p.exists();
    let made: Vec<PathBuf> = path.ancestors().take_while(missing).map(Path::to_owned).collect();
    for directory in made.iter().rev() {
        announce(Change::CreateDirectory, directory)?;
    }
    std::fs::create_dir_all(path)?;
    for directory in &made {
        super::sync_directory_of(directory)?;
    }
    if made.is_empty() {
        // Whoever made it may have died before its name was durable. That it may not be read above is no obstacle.
        let _ = super::sync_directory_of(path);
    }
    Ok(made)
}
