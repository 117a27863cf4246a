//! Files: positioned reads that notice a shrinking file, and writes that leave either the whole file or nothing.

mod append;
mod direct;
pub mod hook;
mod lock;
mod new_file;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use crate::error::{Fault, FaultKind, Place, Result};

pub use append::Appender;
pub use direct::{DirectFile, PageBuffer, Span};
pub use lock::{Claim, DirectoryLock, LOCK_FILE};
pub use new_file::{NewFile, write_whole};

/// Beginning of the names of files that a conversion needs only while it is not finished.
pub const WORKING_PREFIX: &str = ".coliconv";
/// Ending of a file that is being written; removed or replaced by the next run.
pub const TEMPORARY_SUFFIX: &str = ".coliconv-tmp";

/// A file opened for reading at any place, by many threads.
#[derive(Debug)]
pub struct SourceFile {
    path: PathBuf,
    /// Absent once it is closed.
    file: Option<Arc<File>>,
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
        Ok(SourceFile { path: path.to_owned(), file: Some(Arc::new(file)), bytes: metadata.len() })
    }

    /// The same open file once more, for somebody who keeps it longer.
    pub fn share(&self) -> SourceFile {
        SourceFile { path: self.path.clone(), file: self.file.clone(), bytes: self.bytes }
    }

    /// Whether both are the same open file: one was made by [`SourceFile::share`] of the other.
    pub fn is_shared(&self, other: &SourceFile) -> bool {
        matches!((&self.file, &other.file), (Some(one), Some(other)) if Arc::ptr_eq(one, other))
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
        let metadata = self.file().and_then(File::metadata);
        Ok(metadata.map_err(|e| Fault::io("read the size of the file", &self.path, e))?.len())
    }

    /// When the open file was changed last, in nanoseconds since 1970; 0 where the system tells none.
    pub fn modified_now(&self) -> Result<u64> {
        let metadata = self.file().and_then(File::metadata);
        let metadata = metadata.map_err(|e| Fault::io("read the modification time of the file", &self.path, e))?;
        Ok(nanoseconds(&metadata))
    }

    fn file(&self) -> io::Result<&File> {
        self.file.as_deref().ok_or_else(|| io::Error::other("it was closed because nothing needed it any more"))
    }

    /// Closes the file: a removed one keeps its space for as long as it is open. Nothing can be read from it afterwards.
    pub fn close(&mut self) {
        self.file = None;
    }

    /// Modification time of a path in nanoseconds since 1970; 0 where the system tells none.
    pub fn modified_nanoseconds(path: &Path) -> u64 {
        fs::metadata(path).map_or(0, |metadata| nanoseconds(&metadata))
    }

    /// Fills `buffer` from `offset` on. A file that ends before is [`FaultKind::FileShrank`].
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.file().and_then(|file| read_exact_at(file, buffer, offset)).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => Fault::new(
                Place::file(&self.path),
                FaultKind::FileShrank {
                    expected: offset.saturating_add(buffer.len() as u64),
                    found: self.bytes_now().unwrap_or(0),
                },
            ),
            _ => Fault::io("read the file", &self.path, e),
        })
    }

    /// Where the first hole of the file begins: space that was never written. `None` without one, and where the file
    /// system does not tell.
    pub fn first_hole(&self) -> Option<u64> {
        #[cfg(target_os = "linux")]
        if self.bytes > 0 {
            let hole = rustix::fs::seek(self.file().ok()?, rustix::fs::SeekFrom::Hole(0)).ok()?;
            return (hole < self.bytes).then_some(hole);
        }
        None
    }

    /// Tells the system that the file is read from its start to its end.
    pub fn advise_sequential(&self) {
        #[cfg(target_os = "linux")]
        let _ = self.file().map(|file| rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Sequential));
    }

    /// Asks the system to read so many bytes from `offset` on into its memory, without waiting for them.
    pub fn will_need(&self, offset: u64, bytes: u64) {
        #[cfg(target_os = "linux")]
        let _ = self
            .file()
            .map(|file| rustix::fs::fadvise(file, offset, bytes.try_into().ok(), rustix::fs::Advice::WillNeed));
        #[cfg(not(target_os = "linux"))]
        let _ = (offset, bytes);
    }

    /// Asks the system to forget what it keeps of the file in memory, so that it is read from the disk again.
    pub fn forget_cached(&self) {
        self.forget(0, 0);
    }

    /// The same for so many bytes from `offset` on; 0 for all that follow.
    pub fn forget(&self, offset: u64, bytes: u64) {
        #[cfg(target_os = "linux")]
        let _ = self
            .file()
            .map(|file| rustix::fs::fadvise(file, offset, bytes.try_into().ok(), rustix::fs::Advice::DontNeed));
        #[cfg(not(target_os = "linux"))]
        let _ = (offset, bytes);
    }
}

fn nanoseconds(metadata: &fs::Metadata) -> u64 {
    let since = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
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

/// The directory that holds `path`.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Makes the name of `path`, or that it is gone, durable: what its directory says. Done by the file system outside Unix.
pub fn sync_directory_of(path: &Path) -> io::Result<()> {
    let directory = parent(path);
    hook::announce(hook::Change::SyncDirectory, directory)?;
    #[cfg(unix)]
    File::open(directory)?.sync_all()?;
    Ok(())
}

/// Whether two paths, or their nearest existing ancestors, are on the same file system; taken for true where the system does
/// not tell.
pub fn is_same_device(one: &Path, other: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let device = |path: &Path| {
            let mut existing = path.ancestors().map(|p| if p == Path::new("") { Path::new(".") } else { p });
            existing.find_map(|path| path.metadata().ok()).map(|metadata| metadata.dev())
        };
        device(one) == device(other)
    }
    #[cfg(not(unix))]
    {
        let _ = (one, other);
        true
    }
}

/// Whether a name is that of a file that a conversion needs only while it is not finished.
pub fn is_working_name(name: &str) -> bool {
    name.starts_with(WORKING_PREFIX) || name.ends_with(TEMPORARY_SUFFIX)
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

/// Memory that can be taken without swapping, in bytes, where the system tells.
pub fn available_bytes() -> Option<u64> {
    proc_bytes("/proc/meminfo", "MemAvailable:")
}

/// Memory of the machine in bytes, where the system tells.
pub fn memory_bytes() -> Option<u64> {
    proc_bytes("/proc/meminfo", "MemTotal:")
}

/// The processor's name, where the system tells.
pub fn cpu_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
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
    use std::fs::OpenOptions;

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
}
