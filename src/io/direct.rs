//! Reads of whole ranges past the system's cache where that is possible.
//!
//! What is read once and kept elsewhere needs no second copy in the system's cache, and fresh pages of that cache cost more
//! than everything else. Such reads are of whole pages into memory that begins with one.

use std::fs::File;
use std::io;
use std::ops::Range;

use super::SourceFile;
use crate::error::{Fault, FaultKind, Place, Result};

/// Alignment that direct reads and writes need, in memory and in the file: a page.
pub(super) const ALIGNMENT: usize = 4096;

/// Memory that begins at a multiple of a page, to be used again and again.
#[derive(Debug, Default)]
pub struct PageBuffer {
    memory: Vec<u8>,
    /// Where the aligned part begins.
    from: usize,
    bytes: usize,
}

impl PageBuffer {
    /// So many bytes, all 0.
    pub fn new(bytes: usize) -> PageBuffer {
        let memory = vec![0; bytes + ALIGNMENT];
        let from = memory.as_ptr().align_offset(ALIGNMENT);
        PageBuffer { memory, from, bytes }
    }

    /// Its size.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.from..][..self.bytes]
    }

    /// All of it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.from..][..self.bytes]
    }
}

/// A range of a file that is read at once, with the place that it takes in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Where it begins in the file.
    pub offset: u64,
    /// How long it is.
    pub bytes: usize,
    /// Where the pages that hold it begin in a [`PageBuffer`]: a multiple of a page.
    pub at: usize,
}

impl Span {
    /// Where the range itself is in the buffer.
    pub fn place(&self) -> Range<usize> {
        let begin = self.at + self.lead();
        begin..begin + self.bytes
    }

    /// End of the pages in the buffer.
    pub fn end(&self) -> usize {
        (self.at + self.lead() + self.bytes).next_multiple_of(ALIGNMENT)
    }

    /// Bytes of the first page that stand before the range.
    fn lead(&self) -> usize {
        (self.offset % ALIGNMENT as u64) as usize
    }
}

/// A file that is read in ranges, past the system's cache where the file system can do that.
#[derive(Debug)]
pub struct DirectFile {
    file: SourceFile,
    /// The same file, opened to be read past the cache.
    direct: Option<File>,
    /// When it was changed last, nanoseconds since 1970; 0 where the system tells none.
    modified_nanoseconds: u64,
}

impl DirectFile {
    /// Another way to read an open file; with `direct` past the cache, where that is possible.
    pub fn new(file: &SourceFile, direct: bool) -> Result<DirectFile> {
        let file = file.share();
        let direct = if direct { open_direct(&file) } else { None };
        Ok(DirectFile { modified_nanoseconds: file.modified_now()?, file, direct })
    }

    /// Whether reads go past the cache.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// The file.
    pub fn file(&self) -> &SourceFile {
        &self.file
    }

    /// Reads a range into its place. A file that ends before is [`FaultKind::FileShrank`], one that was changed since it
    /// was opened is [`FaultKind::SourceChanged`].
    pub fn read(&self, span: &Span, buffer: &mut [u8]) -> Result<()> {
        let read = match &self.direct {
            Some(file) => self.read_pages(file, span, buffer)?,
            None => false,
        };
        if !read {
            self.file.read_at(&mut buffer[span.place()], span.offset)?;
        }
        let (expected, found) = (self.file.bytes(), self.file.bytes_now()?);
        if found < expected {
            return Err(Fault::new(Place::file(self.file.path()), FaultKind::FileShrank { expected, found }));
        }
        let (expected, found) = (self.modified_nanoseconds, self.file.modified_now()?);
        if expected != found {
            let kind = FaultKind::SourceChanged { what: "its modification time", expected, found };
            return Err(Fault::new(Place::file(self.file.path()), kind));
        }
        Ok(())
    }

    /// Reads whole pages; tells whether the range is there. Where not, the usual way tells why.
    fn read_pages(&self, file: &File, span: &Span, buffer: &mut [u8]) -> Result<bool> {
        let (needed, from) = (span.place().end - span.at, span.offset - span.lead() as u64);
        let pages = &mut buffer[span.at..span.end()];
        let mut filled = 0;
        while filled < needed {
            match read_some_at(file, &mut pages[filled..], from + filled as u64) {
                // Only the last page of a file may be filled in part.
                Ok(bytes) if bytes > 0 && (bytes % ALIGNMENT == 0 || filled + bytes >= needed) => filled += bytes,
                Ok(_) => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => return Ok(false),
                Err(e) => return Err(Fault::io("read the file", self.file.path(), e)),
            }
        }
        Ok(true)
    }
}

/// The same file by its path, unless another one has taken its name.
#[cfg(target_os = "linux")]
fn open_direct(file: &SourceFile) -> Option<File> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    let direct = File::options().read(true).custom_flags(flags).open(file.path()).ok()?;
    let identity = |file: &File| file.metadata().ok().map(|metadata| (metadata.dev(), metadata.ino()));
    (identity(&direct)? == identity(file.file().ok()?)?).then_some(direct)
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_file: &SourceFile) -> Option<File> {
    None
}

#[cfg(unix)]
fn read_some_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_some_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buffer, offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans() -> Vec<Span> {
        let ranges = [(0, 1), (0, 10_000), (1, 4095), (4095, 2), (4096, 4096), (5000, 5000), (8191, 1809)];
        ranges.iter().map(|&(offset, bytes)| Span { offset, bytes, at: 4096 }).collect()
    }

    #[test]
    fn ranges_are_what_the_file_holds_by_both_ways() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        let contents: Vec<u8> = (0..10_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        std::fs::write(&path, &contents).unwrap();
        let file = SourceFile::open(&path).unwrap();
        for direct in [false, true] {
            let file = DirectFile::new(&file, direct).unwrap();
            assert!(direct || !file.is_direct());
            for span in spans() {
                let mut buffer = PageBuffer::new(span.end());
                file.read(&span, buffer.bytes_mut()).unwrap();
                let expected = &contents[span.offset as usize..][..span.bytes];
                assert!(&buffer.bytes()[span.place()] == expected, "{span:?}, direct {direct}");
            }
        }
    }

    #[test]
    fn files_that_shrink_or_change_are_errors() {
        let directory = tempfile::tempdir().unwrap();
        for direct in [false, true] {
            let path = directory.path().join(direct.to_string());
            std::fs::write(&path, [1; 10_000]).unwrap();
            let file = DirectFile::new(&SourceFile::open(&path).unwrap(), direct).unwrap();
            let mut buffer = PageBuffer::new(12_288);
            let mut read = |offset, bytes| file.read(&Span { offset, bytes, at: 0 }, buffer.bytes_mut());
            let past = read(5000, 5001).unwrap_err();
            assert!(matches!(*past.kind, FaultKind::FileShrank { expected: 10_001, found: 10_000 }), "{past}");
            std::thread::sleep(std::time::Duration::from_millis(20));
            File::options().write(true).open(&path).unwrap().set_len(6000).unwrap();
            let shrunk = read(5000, 5000).unwrap_err();
            assert!(matches!(*shrunk.kind, FaultKind::FileShrank { expected: 10_000, found: 6000 }), "{shrunk}");
            let shrunk = read(0, 100).unwrap_err();
            assert!(matches!(*shrunk.kind, FaultKind::FileShrank { expected: 10_000, found: 6000 }), "{shrunk}");
            File::options().write(true).open(&path).unwrap().set_len(10_000).unwrap();
            let changed = read(0, 100).unwrap_err();
            assert!(matches!(*changed.kind, FaultKind::SourceChanged { .. }), "{changed}");
        }
    }

    #[test]
    fn a_file_that_is_replaced_is_still_the_one_that_was_opened() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        std::fs::write(&path, [1; 5000]).unwrap();
        let opened = SourceFile::open(&path).unwrap();
        std::fs::write(directory.path().join("b"), [2; 5000]).unwrap();
        std::fs::rename(directory.path().join("b"), &path).unwrap();
        let file = DirectFile::new(&opened, true).unwrap();
        assert!(!file.is_direct());
        let span = Span { offset: 100, bytes: 4900, at: 0 };
        let mut buffer = PageBuffer::new(span.end());
        file.read(&span, buffer.bytes_mut()).unwrap();
        assert!(buffer.bytes()[span.place()].iter().all(|&byte| byte == 1));
    }
}
