//! A disk that loses what was not made durable when the power goes.
//!
//! What POSIX promises: after `fsync` of a file its contents are safe, after `fsync` of a directory the names in it. Of
//! everything else each thing may be old or new: a name that was given or taken, and contents, which may also be zeros or
//! half there. [`Disk`] hears of every change before it happens and tells what a power cut at that moment may leave.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coliconv::io::hook::Change;

type Bytes = Arc<Vec<u8>>;

/// What a power cut leaves: directories and files with their bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Left {
    pub directories: BTreeSet<PathBuf>,
    pub files: BTreeMap<PathBuf, Bytes>,
}

/// A change of names that is not durable yet.
#[derive(Debug, Clone)]
enum Pending {
    Directory(PathBuf),
    Given(PathBuf, usize),
    Moved(PathBuf, PathBuf, usize),
    Taken(PathBuf),
}

impl Pending {
    /// The directory whose sync makes it durable.
    fn directory(&self) -> &Path {
        let (Pending::Directory(path) | Pending::Given(path, _) | Pending::Moved(_, path, _) | Pending::Taken(path)) =
            self;
        path.parent().unwrap()
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Names {
    directories: BTreeSet<PathBuf>,
    files: BTreeMap<PathBuf, usize>,
}

impl Names {
    fn apply(&mut self, pending: &Pending) {
        match pending {
            Pending::Directory(path) => drop(self.directories.insert(path.clone())),
            Pending::Given(path, inode) => drop(self.files.insert(path.clone(), *inode)),
            Pending::Moved(from, to, inode) => {
                self.files.remove(from);
                self.files.insert(to.clone(), *inode);
            }
            Pending::Taken(path) => {
                self.files.remove(path);
                self.directories.remove(path);
            }
        }
    }
}

#[derive(Debug, Clone)]
struct Contents {
    /// What is safe: nothing before the first sync.
    durable: Bytes,
    /// What a program reads.
    now: Bytes,
    /// Whether `now` must be read from the file again.
    stale: bool,
}

/// Syncs that are left out, to see that it would be noticed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Omit {
    #[default]
    Nothing,
    /// Those of files with this in their names.
    Files(&'static str),
    Directories,
}

/// The disk.
#[derive(Debug)]
pub struct Disk {
    inodes: Vec<Contents>,
    now: Names,
    durable: Names,
    pending: Vec<Pending>,
    omit: Omit,
}

impl Disk {
    /// A disk on which the files of these directories are safe.
    pub fn new(directories: &[&Path], omit: Omit) -> Disk {
        let (mut inodes, mut now) = (Vec::new(), Names::default());
        for directory in directories.iter().filter(|directory| directory.exists()) {
            now.directories.insert(directory.to_path_buf());
            for entry in fs::read_dir(directory).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file()) {
                let bytes = Arc::new(fs::read(entry.path()).unwrap());
                now.files.insert(entry.path(), inodes.len());
                inodes.push(Contents { durable: bytes.clone(), now: bytes, stale: false });
            }
        }
        Disk { inodes, durable: now.clone(), now, pending: Vec::new(), omit }
    }

    /// What a power cut before the next change may leave: the worst of each kind, and `mixed` random ones.
    pub fn left(&mut self, mixed: usize, random: &mut Random) -> Vec<Left> {
        for (path, &inode) in &self.now.files {
            let contents = &mut self.inodes[inode];
            if std::mem::take(&mut contents.stale) {
                contents.now = Arc::new(fs::read(path).unwrap());
            }
        }
        let old = |contents: &Contents| contents.durable.clone();
        let zeros = |contents: &Contents| match contents.durable == contents.now {
            true => contents.now.clone(),
            false => Arc::new(vec![0; contents.now.len()]),
        };
        let mut left = vec![self.with(&self.durable, old), self.with(&self.now, old), self.with(&self.now, zeros)];
        for _ in 0..mixed {
            let mut names = self.durable.clone();
            self.pending.iter().filter(|_| random.below(2) == 0).for_each(|pending| names.apply(pending));
            let pick = |contents: &Contents| match random.below(4) {
                0 => contents.durable.clone(),
                1 => contents.now.clone(),
                2 => zeros(contents),
                _ if contents.durable == contents.now => contents.now.clone(),
                _ => {
                    let half = random.below(contents.now.len() + 1);
                    let mut bytes = contents.now[..half].to_vec();
                    bytes.resize(contents.now.len(), 0);
                    Arc::new(bytes)
                }
            };
            left.push(self.with(&names, pick));
        }
        left
    }

    fn with(&self, names: &Names, mut contents: impl FnMut(&Contents) -> Bytes) -> Left {
        let there = |path: &Path| names.directories.contains(path.parent().unwrap());
        let files = names.files.iter().filter(|(path, _)| there(path));
        let files = files.map(|(path, &inode)| (path.clone(), contents(&self.inodes[inode]))).collect();
        Left { directories: names.directories.clone(), files }
    }

    /// A change is made.
    pub fn change(&mut self, change: Change<'_>, path: &Path) {
        let path = path.to_path_buf();
        match change {
            Change::CreateDirectory => self.name(Pending::Directory(path)),
            Change::Create => {
                self.inodes.push(Contents { durable: Bytes::default(), now: Bytes::default(), stale: true });
                self.name(Pending::Given(path, self.inodes.len() - 1));
            }
            Change::Allocate(_) | Change::Write { .. } => {
                let inode = self.now.files[&path];
                self.inodes[inode].stale = true;
            }
            Change::Sync if matches!(self.omit, Omit::Files(part) if path.to_string_lossy().contains(part)) => {}
            Change::Sync => {
                let contents = &mut self.inodes[self.now.files[&path]];
                contents.now = Arc::new(fs::read(&path).unwrap());
                (contents.durable, contents.stale) = (contents.now.clone(), false);
            }
            Change::Rename(to) => {
                let inode = self.now.files[&path];
                self.name(Pending::Moved(path, to.to_path_buf(), inode));
            }
            Change::Remove if self.now.files.contains_key(&path) || self.now.directories.contains(&path) => {
                self.name(Pending::Taken(path));
            }
            // A lock, or nothing.
            Change::Remove => {}
            Change::SyncDirectory if self.omit == Omit::Directories => {}
            Change::SyncDirectory => {
                let (durable, pending) = (&mut self.durable, std::mem::take(&mut self.pending));
                let (now, later) = pending.into_iter().partition(|pending| pending.directory() == path);
                let now: Vec<Pending> = now;
                now.iter().for_each(|pending| durable.apply(pending));
                self.pending = later;
            }
        }
    }

    fn name(&mut self, pending: Pending) {
        self.now.apply(&pending);
        self.pending.push(pending);
    }
}

/// Pseudo-random numbers (SplitMix).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number below another.
    pub fn below(&mut self, end: usize) -> usize {
        (self.number() % end.max(1) as u64) as usize
    }

    /// Brings things into a random order.
    pub fn shuffle<T>(&mut self, things: &mut [T]) {
        for last in (1..things.len()).rev() {
            things.swap(last, self.below(last + 1));
        }
    }
}
