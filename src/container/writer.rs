//! Writes one weight file from its first byte to its last, with its checksums.

use std::hash::Hasher;
use std::path::Path;

use sha2::{Digest, Sha256};
use twox_hash::XxHash3_64;

use super::layout::FileLayout;
use super::manifest::{FileRecord, hex};
use crate::error::{Fault, FaultKind, Place, Result};
use crate::header::StoredTensor;
use crate::io::{Appender, NewFile, SourceFile};
use crate::limits;

/// A weight file under construction, written and hashed from its first byte to its last.
pub struct FileWriter<'a> {
    layout: &'a FileLayout,
    name: &'a str,
    file: Appender,
    digester: Digester<'a>,
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
    /// Starts the file `name` of a directory, takes its space, and writes its header; `chunk_bytes` are written at once.
    pub fn create(
        directory: &Path,
        name: &'a str,
        layout: &'a FileLayout,
        chunk_bytes: usize,
    ) -> Result<FileWriter<'a>> {
        check_head(layout);
        let file = NewFile::create(&directory.join(name))?;
        file.allocate(layout.bytes)?;
        let (file, digester) = (Appender::new(file, chunk_bytes), Digester::new(&layout.tensors));
        let mut writer = FileWriter { layout, name, file, digester };
        writer.append(&layout.head)?;
        Ok(writer)
    }

    /// Appends the next bytes of the tensors' data.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.digester.update(bytes, &mut |_, _| ());
        self.file.append(bytes)
    }

    /// Makes the contents durable; the name is still temporary, so that the record can be made durable before it.
    ///
    /// # Panics
    ///
    /// If more or fewer bytes were appended than the layout has.
    pub fn seal(self) -> Result<SealedFile> {
        assert_eq!(self.digester.position, self.layout.bytes, "bytes of {}", self.name);
        let file = self.file.finish()?;
        file.sync()?;
        let digests = self.digester.finish();
        Ok(SealedFile { record: record(self.name, self.layout.bytes, &digests), digests, file })
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
    let mut digester = Digester::new(tensors);
    let mut buffer = vec![0; step_bytes.min(bytes as usize)];
    while digester.position < bytes {
        let step = (bytes - digester.position).min(buffer.len() as u64) as usize;
        read(&mut buffer[..step], digester.position)?;
        digester.update(&buffer[..step], visit);
        hashed(step as u64);
    }
    Ok(digester.finish())
}

/// SHA-256 of a file and XXH3 of each of its tensors, as its bytes come by.
struct Digester<'a> {
    tensors: &'a [StoredTensor],
    sha256: Sha256,
    checksums: Vec<u64>,
    current: XxHash3_64,
    position: u64,
}

impl<'a> Digester<'a> {
    fn new(tensors: &'a [StoredTensor]) -> Digester<'a> {
        let checksums = Vec::with_capacity(tensors.len());
        Digester { tensors, sha256: Sha256::new(), checksums, current: XxHash3_64::new(), position: 0 }
    }

    fn update(&mut self, bytes: &[u8], visit: &mut dyn FnMut(usize, &[u8])) {
        self.sha256.update(bytes);
        let (position, end) = (self.position, self.position + bytes.len() as u64);
        // The tensors that end in this step, then the one that goes on.
        while let Some(tensor) = self.tensors.get(self.checksums.len()) {
            let from = tensor.offset.max(position).min(end);
            let to = (tensor.offset + tensor.bytes).clamp(from, end);
            let of_tensor = &bytes[(from - position) as usize..(to - position) as usize];
            self.current.write(of_tensor);
            visit(self.checksums.len(), of_tensor);
            if tensor.offset + tensor.bytes > end {
                break;
            }
            self.checksums.push(std::mem::take(&mut self.current).finish());
        }
        self.position = end;
    }

    fn finish(mut self) -> Digests {
        self.checksums.resize(self.tensors.len(), XxHash3_64::new().finish());
        Digests { sha256: self.sha256.finalize().into(), checksums: self.checksums }
    }
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
