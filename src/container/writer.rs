//! Writes one weight file: parts in any order and by any thread, then one pass over all of it for the checksums.

use std::hash::Hasher;
use std::path::Path;

use sha2::{Digest, Sha256};
use twox_hash::XxHash3_64;

use super::layout::FileLayout;
use super::manifest::{FileRecord, hex};
use crate::error::{Fault, FaultKind, Place, Result};
use crate::header::StoredTensor;
use crate::io::{NewFile, SourceFile};
use crate::limits;

/// A weight file under construction.
#[derive(Debug)]
pub struct FileWriter<'a> {
    layout: &'a FileLayout,
    name: &'a str,
    path: std::path::PathBuf,
    file: NewFile,
}

/// A weight file whose bytes are final and whose name is not.
#[derive(Debug)]
pub struct SealedFile {
    /// What it will be known by.
    pub record: FileRecord,
    /// Its digests.
    pub digests: Digests,
    file: NewFile,
}

impl SealedFile {
    /// Gives the file its final name, which must be free.
    pub fn commit(self) -> Result<()> {
        self.file.commit(false)
    }
}

/// SHA-256 of a file and the checksum of each of its tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Digests {
    /// SHA-256 of the whole file.
    pub sha256: [u8; 32],
    /// Checksums in the order of the given tensors.
    pub checksums: Vec<u64>,
}

impl<'a> FileWriter<'a> {
    /// Starts the file `name` of a directory and writes its header.
    pub fn create(directory: &Path, name: &'a str, layout: &'a FileLayout) -> Result<FileWriter<'a>> {
        check_head(layout);
        let path = directory.join(name);
        let file = NewFile::create(&path)?;
        file.allocate(layout.bytes)?;
        file.write_at(&layout.head, 0)?;
        Ok(FileWriter { layout, name, path, file })
    }

    /// Writes part of a tensor, given by its index in the layout.
    pub fn write(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let stored = &self.layout.tensors[tensor];
        assert!(offset + bytes.len() as u64 <= stored.bytes, "a write leaves its tensor");
        self.file.write_at(bytes, stored.offset + offset)
    }

    /// Makes the contents durable and computes their digests; the name is still temporary, so that the record can be made
    /// durable before it. `hashed` is called with the bytes of each step.
    pub fn seal(self, hashed: &dyn Fn(u64)) -> Result<SealedFile> {
        self.file.sync()?;
        let read = |buffer: &mut [u8], offset| self.file.read_at(buffer, offset);
        let digests = digest(&read, self.layout.bytes, &self.layout.tensors, hashed)?;
        let record = record(self.name, self.layout.bytes, &digests);
        Ok(SealedFile { record, digests, file: self.file })
    }

    /// The final path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// What others will read the header with agrees with the layout: a mistake here would spoil every byte that follows.
///
/// # Panics
///
/// If it does not.
fn check_head(layout: &FileLayout) {
    let theirs: safetensors::tensor::Metadata =
        serde_json::from_slice(&layout.head[8..]).expect("the safetensors crate reads the header");
    let begin = layout.head.len() as u64;
    for tensor in &layout.tensors {
        let info = theirs.info(tensor.name.as_str()).expect("the safetensors crate finds the tensor");
        let (from, to) = info.data_offsets;
        let span = (from as u64 + begin, to as u64 + begin);
        assert_eq!(span, (tensor.offset, tensor.offset + tensor.bytes), "place of {}", tensor.name);
    }
}

/// The record of a file with these digests.
fn record(name: &str, bytes: u64, digests: &Digests) -> FileRecord {
    FileRecord { name: name.to_owned(), bytes, sha256: hex(&digests.sha256) }
}

/// Digests of a finished file that should have this layout; another size is [`FaultKind::OutputChanged`].
pub fn digest_file(
    path: &Path,
    name: &str,
    layout: &FileLayout,
    hashed: &dyn Fn(u64),
) -> Result<(FileRecord, Digests)> {
    let file = SourceFile::open(path)?;
    if file.bytes() != layout.bytes {
        let kind = FaultKind::OutputChanged {
            expected: format!("{} bytes", layout.bytes),
            found: format!("{} bytes", file.bytes()),
        };
        return Err(Fault::new(Place::file(path), kind));
    }
    let read = |buffer: &mut [u8], offset| file.read_at(buffer, offset);
    let digests = digest(&read, layout.bytes, &layout.tensors, hashed)?;
    Ok((record(name, layout.bytes, &digests), digests))
}

/// One sequential pass over `bytes` bytes: SHA-256 of all of them, XXH3 of each tensor (in order, not overlapping).
pub fn digest(
    read: &dyn Fn(&mut [u8], u64) -> Result<()>,
    bytes: u64,
    tensors: &[StoredTensor],
    hashed: &dyn Fn(u64),
) -> Result<Digests> {
    digest_with(read, bytes, tensors, limits::HASH_READ_BYTES, &mut |_, _| (), hashed)
}

/// The same in steps of so many bytes; `visit` sees the bytes of each tensor, given by its index, in order and in parts.
pub fn digest_with(
    read: &dyn Fn(&mut [u8], u64) -> Result<()>,
    bytes: u64,
    tensors: &[StoredTensor],
    step_bytes: usize,
    visit: &mut dyn FnMut(usize, &[u8]),
    hashed: &dyn Fn(u64),
) -> Result<Digests> {
    let mut sha256 = Sha256::new();
    let mut checksums = Vec::with_capacity(tensors.len());
    let mut current = XxHash3_64::new();
    let mut buffer = vec![0; step_bytes.min(bytes as usize)];
    let mut position = 0;
    while position < bytes {
        let step = (bytes - position).min(buffer.len() as u64) as usize;
        let part = &mut buffer[..step];
        read(part, position)?;
        sha256.update(&*part);
        let end = position + step as u64;
        // The tensors that end in this step, then the one that goes on.
        while let Some(tensor) = tensors.get(checksums.len()) {
            let from = tensor.offset.max(position).min(end);
            let to = (tensor.offset + tensor.bytes).clamp(from, end);
            let of_tensor = &part[(from - position) as usize..(to - position) as usize];
            current.write(of_tensor);
            visit(checksums.len(), of_tensor);
            if tensor.offset + tensor.bytes > end {
                break;
            }
            checksums.push(std::mem::take(&mut current).finish());
        }
        position = end;
        hashed(step as u64);
    }
    checksums.resize(tensors.len(), XxHash3_64::new().finish());
    Ok(Digests { sha256: sha256.finalize().into(), checksums })
}

/// A checksum as it stands in the manifest.
pub fn checksum_text(checksum: u64) -> String {
    format!("{checksum:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Dtype;

    #[test]
    fn checksums_are_those_of_the_single_tensors() {
        let bytes: Vec<u8> = (0..10_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let spans = [(100, 50), (150, 0), (150, 4 << 20), ((4 << 20) + 150, 5_000_000)];
        let tensors: Vec<StoredTensor> = spans
            .iter()
            .map(|&(offset, bytes)| StoredTensor {
                name: format!("{offset}").into(),
                dtype: Dtype::U8,
                shape: [bytes].into(),
                offset,
                bytes,
            })
            .collect();
        let read = |buffer: &mut [u8], offset: u64| {
            buffer.copy_from_slice(&bytes[offset as usize..][..buffer.len()]);
            Ok(())
        };
        let digests = digest(&read, bytes.len() as u64, &tensors, &|_| ()).unwrap();
        assert_eq!(digests.sha256, <[u8; 32]>::from(Sha256::digest(&bytes)));
        for (&(offset, length), &checksum) in spans.iter().zip(&digests.checksums) {
            let whole = XxHash3_64::oneshot(&bytes[offset as usize..][..length as usize]);
            assert_eq!(checksum, whole, "tensor at {offset}");
        }
    }
}
