//! Files under construction.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use super::hook::{self, Change, announce};
use super::{TEMPORARY_SUFFIX, sync_directory_of, write_all_at};
use crate::error::{Fault, FaultKind, Place, Result};

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
        match hook::remove_file(&temporary) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Fault::io("remove a temporary file of an earlier run", &temporary, e));
            }
            _ => {}
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        let file = announce(Change::Create, &temporary)
            .and_then(|()| options.open(&temporary))
            .map_err(|e| Fault::io("create the file", &temporary, e))?;
        Ok(NewFile { path: path.to_owned(), temporary, file: Some(file) })
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("present until commit or drop")
    }

    /// Takes the space for so many bytes, so that parts can be written in any order and a full disk is noticed first.
    pub fn allocate(&self, bytes: u64) -> Result<()> {
        announce(Change::Allocate(bytes), &self.temporary)
            .and_then(|()| allocate(self.file(), bytes))
            .map_err(|e| Fault::io("take the space for the file", &self.temporary, e))
    }

    /// Sets the size without taking the space: what is not written stays a hole.
    pub fn set_sparse_bytes(&self, bytes: u64) -> Result<()> {
        announce(Change::Allocate(bytes), &self.temporary)
            .and_then(|()| self.file().set_len(bytes))
            .map_err(|e| Fault::io("set the size of the file", &self.temporary, e))
    }

    /// Writes `bytes` at `offset`.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        announce(Change::Write { offset, bytes: bytes.len() }, &self.temporary)
            .and_then(|()| match write_all_at(self.file(), bytes, offset) {
                // What the file system says to direct writes that it does not know.
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                    self.set_direct(false);
                    write_all_at(self.file(), bytes, offset)
                }
                written => written,
            })
            .map_err(|e| Fault::io("write the file", &self.temporary, e))
    }

    /// Whether writes are to go past the system's cache. They must be of whole pages then. File systems that cannot do
    /// that are written to in the usual way.
    pub(super) fn set_direct(&self, direct: bool) {
        #[cfg(target_os = "linux")]
        if let Ok(flags) = rustix::fs::fcntl_getfl(self.file()) {
            let flag = rustix::fs::OFlags::DIRECT;
            let _ = rustix::fs::fcntl_setfl(self.file(), if direct { flags | flag } else { flags - flag });
        }
    }

    /// Makes the contents durable; the name is still temporary.
    pub fn sync(&self) -> Result<()> {
        announce(Change::Sync, &self.temporary)
            .and_then(|()| self.file().sync_all())
            .map_err(|e| Fault::io("write the file to disk", &self.temporary, e))
    }

    /// Makes the file durable under its final name, which must be free unless `replace` is set.
    pub fn commit(mut self, replace: bool) -> Result<()> {
        self.sync()?;
        drop(self.file.take());
        if !replace && self.path.symlink_metadata().is_ok() {
            let _ = hook::remove_file(&self.temporary);
            return Err(Fault::new(Place::file(&self.path), FaultKind::OutputExists));
        }
        let renamed = announce(Change::Rename(&self.path), &self.temporary)
            .and_then(|()| fs::rename(&self.temporary, &self.path));
        renamed.map_err(|e| {
            let _ = hook::remove_file(&self.temporary);
            Fault::io("give the file its final name", &self.path, e)
        })?;
        let synced = sync_directory_of(&self.path);
        synced.map_err(|e| Fault::io("write the directory of the file to disk", &self.path, e))
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
            let _ = hook::remove_file(&self.temporary);
        }
    }
}

/// Space for so many bytes, of which none is a hole where the file system can do that.
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    if bytes > 0 {
        use rustix::io::Errno;
        match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            allocated => return allocated.map_err(io::Error::from),
        }
    }
    file.set_len(bytes)
}

/// Writes a whole small file durably under its final name: all of it or nothing.
pub fn write_whole(path: &Path, bytes: &[u8], replace: bool) -> Result<()> {
    let file = NewFile::create(path)?;
    file.write_at(bytes, 0)?;
    file.commit(replace)
}
