//! Files: positioned reads that notice a shrinking file, and writes that leave either the whole file or nothing.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use crate::error::{Fault, FaultKind, Place, Result};

/// Ending of a file that is being written; removed or replaced by the next run.
pub const TEMPORARY_SUFFIX: &str = ".coliconv-tmp";

/// A file opened for reading at any place, by many threads.
#[derive(Debug)]
pub struct SourceFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl SourceFile {
    /// Opens a file and notes its size.
    pub fn open(path: &Path) -> Result<SourceFile> {
        // Opening a pipe would wait for whoever writes to it.
        let metadata = fs::metadata(path).map_err(|e| match path.symlink_metadata() {
            Ok(_) if e.kind() == io::ErrorKind::NotFound => Fault::new(Place::file(path), FaultKind::DanglingLink),
            _ => Fault::io("open the file", path, e),
        })?;
        if !metadata.is_file() {
            return Err(Fault::new(Place::file(path), FaultKind::NotAFile));
        }
        let file = File::open(path).map_err(|e| Fault::io("open the file", path, e))?;
        let metadata = file.metadata().map_err(|e| Fault::io("read the size of the file", path, e))?;
        Ok(SourceFile { path: path.to_owned(), file, bytes: metadata.len() })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size when it was opened, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Size now, in bytes.
    pub fn bytes_now(&self) -> Result<u64> {
        let metadata = self.file.metadata().map_err(|e| Fault::io("read the size of the file", &self.path, e))?;
        Ok(metadata.len())
    }

    /// Modification time of a path in nanoseconds since 1970; 0 where the system tells none.
    pub fn modified_nanoseconds(path: &Path) -> u64 {
        let modified = fs::metadata(path).and_then(|m| m.modified()).ok();
        let since = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        since.map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
    }

    /// Fills `buffer` from `offset` on. A file that ends before is [`FaultKind::FileShrank`].
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        read_exact_at(&self.file, buffer, offset).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => Fault::new(
                Place::file(&self.path),
                FaultKind::FileShrank {
                    expected: offset.saturating_add(buffer.len() as u64),
                    found: self.file.metadata().map_or(0, |m| m.len()),
                },
            ),
            _ => Fault::io("read the file", &self.path, e),
        })
    }

    /// Asks the system to forget what it keeps of the file in memory, so that it is read from the disk again.
    pub fn forget_cached(&self) {
        #[cfg(target_os = "linux")]
        let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, buffer, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                buffer = &mut buffer[n..];
                offset += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(unix)]
fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
fn write_all_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let n = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        if n == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[n..];
        offset += n as u64;
    }
    Ok(())
}

/// Whether two paths lead to the same file or directory. Pipes and devices are never opened and are the same as nothing.
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    let opened = |path: &Path| fs::metadata(path).is_ok_and(|metadata| metadata.is_file() || metadata.is_dir());
    opened(one) && opened(other) && same_file::is_same_file(one, other).unwrap_or(false)
}

/// Reads a whole small file, refusing one of more than `limit` bytes before allocating for it.
pub fn read_small(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = SourceFile::open(path)?;
    if file.bytes() > limit {
        return Err(Fault::new(Place::file(path), FaultKind::FileTooLarge { limit, found: file.bytes() }));
    }
    let mut bytes = vec![0; file.bytes() as usize];
    file.read_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// A file under construction. It gets its final name only by [`NewFile::commit`]; dropped before, it is removed.
#[derive(Debug)]
pub struct NewFile {
    path: PathBuf,
    temporary: PathBuf,
    file: Option<File>,
}

impl NewFile {
    /// Starts the file that is to become `path`, under a temporary name beside it. A temporary file left by a dead run is
    /// replaced. The mode is the umask's.
    pub fn create(path: &Path) -> Result<NewFile> {
        let temporary = temporary_path(path);
        match fs::remove_file(&temporary) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Fault::io("remove a temporary file of an earlier run", &temporary, e));
            }
            _ => {}
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&temporary)
            .map_err(|e| Fault::io("create the file", &temporary, e))?;
        Ok(NewFile { path: path.to_owned(), temporary, file: Some(file) })
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("present until commit or drop")
    }

    /// Sets the size, so that parts can be written in any order.
    pub fn set_len(&self, bytes: u64) -> Result<()> {
        self.file().set_len(bytes).map_err(|e| Fault::io("set the size of the file", &self.temporary, e))
    }

    /// Writes `bytes` at `offset`.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        write_all_at(self.file(), bytes, offset).map_err(|e| Fault::io("write the file", &self.temporary, e))
    }

    /// Reads back what was written.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        read_exact_at(self.file(), buffer, offset).map_err(|e| Fault::io("read back the file", &self.temporary, e))
    }

    /// Makes the contents durable; the name is still temporary.
    pub fn sync(&self) -> Result<()> {
        self.file().sync_all().map_err(|e| Fault::io("write the file to disk", &self.temporary, e))
    }

    /// Makes the file durable under its final name, which must be free unless `replace` is set.
    pub fn commit(mut self, replace: bool) -> Result<()> {
        self.sync()?;
        drop(self.file.take());
        if !replace && self.path.symlink_metadata().is_ok() {
            let _ = fs::remove_file(&self.temporary);
            return Err(Fault::new(Place::file(&self.path), FaultKind::OutputExists));
        }
        fs::rename(&self.temporary, &self.path).map_err(|e| {
            let _ = fs::remove_file(&self.temporary);
            Fault::io("give the file its final name", &self.path, e)
        })?;
        sync_directory(parent(&self.path))
    }
}

/// The temporary name beside `path`: as much of its name as leaves room for the ending.
fn temporary_path(path: &Path) -> PathBuf {
    const MAX_NAME_BYTES: usize = 255;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    if name.len() + TEMPORARY_SUFFIX.len() > MAX_NAME_BYTES {
        let text = name.to_string_lossy().into_owned();
        let end = text.floor_char_boundary(MAX_NAME_BYTES - TEMPORARY_SUFFIX.len());
        name = text[..end].into();
    }
    name.push(TEMPORARY_SUFFIX);
    path.with_file_name(name)
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Writes a whole small file durably under its final name: all of it or nothing.
pub fn write_whole(path: &Path, bytes: &[u8], replace: bool) -> Result<()> {
    let file = NewFile::create(path)?;
    file.file().write_all(bytes).map_err(|e| Fault::io("write the file", &file.temporary, e))?;
    file.commit(replace)
}

/// The directory that holds `path`.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Makes renames in a directory durable.
#[cfg(unix)]
pub fn sync_directory(path: &Path) -> Result<()> {
    File::open(path).and_then(|d| d.sync_all()).map_err(|e| Fault::io("write the directory to disk", path, e))
}

/// Makes renames in a directory durable: done by the file system here.
#[cfg(not(unix))]
pub fn sync_directory(_path: &Path) -> Result<()> {
    Ok(())
}

/// Bytes that an ordinary user can still write on the file system of `path`, or of its nearest existing ancestor.
pub fn free_bytes(path: &Path) -> Option<u64> {
    let existing =
        path.ancestors().map(|p| if p == Path::new("") { Path::new(".") } else { p }).find(|p| p.exists())?;
    free_bytes_of(existing)
}

#[cfg(unix)]
fn free_bytes_of(path: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(path).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

#[cfg(not(unix))]
fn free_bytes_of(_path: &Path) -> Option<u64> {
    None
}

/// A directory held by this process until dropped; the operating system releases it when the process dies.
#[derive(Debug)]
pub struct DirectoryLock {
    _file: File,
}

impl DirectoryLock {
    /// Takes the lock, or [`FaultKind::Locked`] when another process holds it.
    pub fn take(directory: &Path) -> Result<DirectoryLock> {
        DirectoryLock::take_with(directory, File::try_lock)
    }

    /// Takes the lock together with others who take it so, or [`FaultKind::Locked`] when a process holds it alone.
    pub fn take_shared(directory: &Path) -> Result<DirectoryLock> {
        DirectoryLock::take_with(directory, File::try_lock_shared)
    }

    fn take_with(
        directory: &Path,
        lock: fn(&File) -> std::result::Result<(), fs::TryLockError>,
    ) -> Result<DirectoryLock> {
        #[cfg(unix)]
        let opened = File::open(directory);
        #[cfg(not(unix))]
        let opened = OpenOptions::new().create(true).write(true).truncate(false).open(directory.join(".coliconv.lock"));
        let file = opened.map_err(|e| Fault::io("open the directory", directory, e))?;
        match lock(&file) {
            Ok(()) => Ok(DirectoryLock { _file: file }),
            Err(fs::TryLockError::WouldBlock) => Err(Fault::new(Place::file(directory), FaultKind::Locked)),
            Err(fs::TryLockError::Error(e)) => Err(Fault::io("lock the directory", directory, e)),
        }
    }
}

/// Memory that can be taken without swapping, in bytes, where the system tells.
pub fn available_bytes() -> Option<u64> {
    proc_bytes("/proc/meminfo", "MemAvailable:")
}

/// A line of a file of the Linux kernel that counts kB.
fn proc_bytes(path: &str, key: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Anonymous resident memory of this process now, in bytes, where the system tells.
pub fn anonymous_bytes() -> Option<u64> {
    proc_bytes("/proc/self/status", "RssAnon:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_file_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let file = NewFile::create(&path).unwrap();
        file.write_at(b"abc", 0).unwrap();
        drop(file);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn commit_does_not_overwrite() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        write_whole(&path, b"one", false).unwrap();
        let fault = write_whole(&path, b"two", false).unwrap_err();
        assert!(matches!(*fault.kind, FaultKind::OutputExists));
        assert_eq!(fs::read(&path).unwrap(), b"one");
        write_whole(&path, b"two", true).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn names_may_be_as_long_as_the_file_system_allows() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["x".repeat(255), "é".repeat(127), "é".repeat(120)] {
            write_whole(&dir.path().join(&name), b"one", false).unwrap();
            assert_eq!(fs::read(dir.path().join(&name)).unwrap(), b"one");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_shrinking_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, [0; 100]).unwrap();
        let file = SourceFile::open(&path).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(50).unwrap();
        let fault = file.read_at(&mut [0; 20], 40).unwrap_err();
        assert!(matches!(*fault.kind, FaultKind::FileShrank { expected: 60, found: 50 }), "{fault}");
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_pipes_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("a"), b"a").unwrap();
        fs::write(path("b"), b"a").unwrap();
        fs::hard_link(path("a"), path("hard")).unwrap();
        std::os::unix::fs::symlink("a", path("soft")).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, path("pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(is_same_file(&path("a"), &path("hard")) && is_same_file(&path("soft"), &path("hard")));
        assert!(!is_same_file(&path("a"), &path("b")) && !is_same_file(&path("a"), &path("none")));
        assert!(!is_same_file(&path("pipe"), &path("pipe")));
        for name in ["pipe", "."] {
            assert!(matches!(*SourceFile::open(&path(name)).unwrap_err().kind, FaultKind::NotAFile), "{name}");
        }
    }

    #[test]
    fn a_directory_is_locked_once() {
        let dir = tempfile::tempdir().unwrap();
        let held = DirectoryLock::take(dir.path()).unwrap();
        assert!(matches!(*DirectoryLock::take(dir.path()).unwrap_err().kind, FaultKind::Locked));
        assert!(DirectoryLock::take_shared(dir.path()).is_err());
        drop(held);
        let shared = [DirectoryLock::take_shared(dir.path()).unwrap(), DirectoryLock::take_shared(dir.path()).unwrap()];
        assert!(DirectoryLock::take(dir.path()).is_err());
        drop(shared);
        DirectoryLock::take(dir.path()).unwrap();
    }
}
