//! A file written from start to end, past the system's cache where that is possible.
//!
//! Fresh pages of the cache cost more than everything else that is done to a byte of the output, so whole chunks go straight
//! from memory to the disk, from a thread of their own. Only the end of the file, less than a page, takes the usual way.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::NewFile;
use super::direct::{ALIGNMENT, PageBuffer};
use crate::error::Result;
use crate::limits;

/// Memory of a write, and how much of it is filled.
#[derive(Debug)]
struct Chunk {
    memory: PageBuffer,
    filled: usize,
}

impl Chunk {
    fn new(bytes: usize) -> Chunk {
        Chunk { memory: PageBuffer::new(bytes), filled: 0 }
    }

    /// Takes as much as fits, and tells how much that was.
    fn take(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(self.memory.len() - self.filled);
        self.memory.bytes_mut()[self.filled..][..taken].copy_from_slice(&bytes[..taken]);
        self.filled += taken;
        taken
    }

    fn is_full(&self) -> bool {
        self.filled == self.memory.len()
    }

    fn bytes(&self) -> &[u8] {
        &self.memory.bytes()[..self.filled]
    }
}

/// Appends to a file under construction.
#[derive(Debug)]
pub struct Appender {
    chunk: Chunk,
    /// Absent once the writing thread has been joined.
    full: Option<SyncSender<Chunk>>,
    empty: Receiver<Chunk>,
    writer: Option<JoinHandle<Result<NewFile>>>,
}

impl Appender {
    /// Begins with an empty file; `chunk_bytes` are written at once, in whole pages.
    pub fn new(file: NewFile, chunk_bytes: usize) -> Appender {
        let chunk_bytes = chunk_bytes.next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        let (full, to_write) = sync_channel::<Chunk>(limits::WRITE_CHUNKS);
        let (written, empty) = sync_channel(limits::WRITE_CHUNKS + 2);
        for _ in 0..limits::WRITE_CHUNKS {
            let _ = written.send(Chunk::new(chunk_bytes));
        }
        let writer = std::thread::spawn(move || {
            let mut offset = 0;
            file.set_direct(true);
            while let Ok(mut chunk) = to_write.recv() {
                if !chunk.is_full() {
                    file.set_direct(false);
                }
                file.write_at(chunk.bytes(), offset)?;
                offset += chunk.filled as u64;
                chunk.filled = 0;
                // Nobody takes it back at the end.
                let _ = written.send(chunk);
            }
            Ok(file)
        });
        Appender { chunk: Chunk::new(chunk_bytes), full: Some(full), empty, writer: Some(writer) }
    }

    /// Appends bytes. The error of an earlier append may only be known now.
    pub fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let taken = self.chunk.take(bytes);
            bytes = &bytes[taken..];
            if self.chunk.is_full() {
                match self.empty.recv() {
                    Ok(empty) => self.send(empty)?,
                    Err(_) => return self.join().map(drop),
                }
            }
        }
        Ok(())
    }

    /// Writes what is left, and gives the file back; it is not durable yet.
    pub fn finish(mut self) -> Result<NewFile> {
        if self.chunk.filled > 0 {
            self.send(Chunk { memory: PageBuffer::default(), filled: 0 })?;
        }
        self.join()
    }

    fn send(&mut self, next: Chunk) -> Result<()> {
        let full = std::mem::replace(&mut self.chunk, next);
        let sent = self.full.as_ref().is_some_and(|sender| sender.send(full).is_ok());
        if sent { Ok(()) } else { self.join().map(drop) }
    }

    fn join(&mut self) -> Result<NewFile> {
        drop(self.full.take());
        let writer = self.writer.take().expect("an appender is of no use after an error");
        writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Appender {
    /// Waits for the writing thread, so that the file is removed before anybody looks.
    fn drop(&mut self) {
        drop(self.full.take());
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_appended_is_the_file() {
        let dir = tempfile::tempdir().unwrap();
        for length in [0, 1, 4095, 4096, limits::WRITE_CHUNK_BYTES, 3 * limits::WRITE_CHUNK_BYTES + 5] {
            let bytes: Vec<u8> = (0..length as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let path = dir.path().join(length.to_string());
            let file = NewFile::create(&path).unwrap();
            file.allocate(length as u64).unwrap();
            let mut appender = Appender::new(file, limits::WRITE_CHUNK_BYTES);
            for part in bytes.chunks(1_000_003) {
                appender.append(part).unwrap();
            }
            appender.finish().unwrap().commit(false).unwrap();
            assert!(std::fs::read(path).unwrap() == bytes, "{length}");
        }
    }

    #[test]
    fn a_dropped_appender_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut appender = Appender::new(NewFile::create(&dir.path().join("a")).unwrap(), 5000);
        appender.append(&vec![1; 2 * limits::WRITE_CHUNK_BYTES]).unwrap();
        drop(appender);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
