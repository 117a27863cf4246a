//! Where an expert lies: in its files, and in memory once it is read.

use std::ops::Range;
use std::sync::Arc;

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::dequantize::{ScaleDtype, SourceDtype};
use crate::error::{Fault, FaultKind, Place as At, Result};
use crate::format::Format;
use crate::io::{DirectFile, PageBuffer, SourceFile, Span};
use crate::limits;
use crate::tensor::TensorName;
use crate::weights::{Extent, Located, MatrixRef, widen};

/// The memory of one expert: codes of its three matrices as they are stored, and their scales.
#[derive(Debug)]
pub(super) struct Slot {
    codes: PageBuffer,
    scales: Vec<f32>,
}

/// How much memory an expert takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    code_bytes: usize,
    scales: usize,
}

impl Size {
    /// All of it in bytes.
    pub fn bytes(self) -> u64 {
        (self.code_bytes + PAGE_BYTES + 4 * self.scales) as u64
    }

    /// What a buffer of so many bytes takes.
    pub fn of_buffer(bytes: usize) -> u64 {
        (bytes + PAGE_BYTES) as u64
    }

    /// At most what matrices of so many bytes of codes and scales in memory take: each may begin and end within a page.
    pub fn bound(code_bytes: u64, scale_bytes: u64) -> u64 {
        code_bytes.saturating_add(scale_bytes).saturating_add(13 * PAGE_BYTES as u64)
    }
}

/// What is lost where a range begins or ends within a page.
const PAGE_BYTES: usize = 4096;

impl Slot {
    pub fn new(size: Size) -> Slot {
        Slot { codes: PageBuffer::new(size.code_bytes), scales: Vec::with_capacity(size.scales) }
    }
}

/// Neighbouring tensors that are read at once.
#[derive(Debug)]
struct Read {
    file: Arc<DirectFile>,
    span: Span,
    /// Names and ends of the tensors, for messages.
    tensors: Vec<(TensorName, u64)>,
}

/// A part of a read, with the memory that it fills.
struct Piece<'a> {
    read: &'a Read,
    span: Span,
    buffer: &'a mut [u8],
}

impl Piece<'_> {
    fn read(&mut self) -> Result<()> {
        self.read.file.read(&self.span, self.buffer).map_err(|fault| {
            // The tensor that the file ends within; of other faults the one that the piece begins in.
            let after = match *fault.kind {
                FaultKind::FileShrank { found, .. } if found > self.read.span.offset => found,
                _ => self.span.offset,
            };
            let tensors = &self.read.tensors;
            let number = tensors.iter().position(|(_, end)| *end > after).unwrap_or(0);
            let offset = if number == 0 { self.read.span.offset } else { tensors[number - 1].1 };
            let name = &tensors[number].0;
            Fault { place: At { tensor: Some(name.clone()), offset: Some(offset), ..fault.place }, kind: fault.kind }
        })
    }
}

/// Reads in pieces of whole pages, each with its own part of the buffer.
fn pieces<'a>(reads: &'a [Read], mut buffer: &'a mut [u8]) -> Vec<Piece<'a>> {
    let (mut pieces, mut position) = (Vec::new(), 0);
    for read in reads {
        let Span { offset, bytes, at } = read.span;
        let (_, rest) = std::mem::take(&mut buffer).split_at_mut(at - position);
        let (pages, rest) = rest.split_at_mut(read.span.end() - at);
        (buffer, position) = (rest, read.span.end());
        let first_page = offset - offset % PAGE_BYTES as u64;
        for (number, buffer) in pages.chunks_mut(limits::EXPERT_READ_BYTES).enumerate() {
            let page = first_page + (number * limits::EXPERT_READ_BYTES) as u64;
            let (begin, end) = (offset.max(page), (offset + bytes as u64).min(page + buffer.len() as u64));
            if begin < end {
                let span = Span { offset: begin, bytes: (end - begin) as usize, at: 0 };
                pieces.push(Piece { read, span, buffer });
            }
        }
    }
    pieces
}

/// What becomes of staged bytes.
#[derive(Debug)]
enum Decoded {
    /// The next scales.
    Scales(ScaleDtype),
    /// Halves, widened to f32 into this range of the codes.
    Widened(SourceDtype, Range<usize>),
}

/// One matrix in a slot.
#[derive(Debug)]
struct Stored {
    rows: usize,
    columns: usize,
    format: Format,
    codes: Range<usize>,
    scales: Range<usize>,
}

/// An expert in its files.
#[derive(Debug)]
pub(super) struct Place {
    /// Into the slot.
    reads: Vec<Read>,
    /// Into a buffer of the reader.
    staged: Vec<Read>,
    /// Ranges of that buffer, and what becomes of them.
    decoded: Vec<(Range<usize>, Decoded)>,
    matrices: [Stored; 3],
    size: Size,
    staging_bytes: usize,
}

/// The open files of all experts.
#[derive(Debug, Default)]
pub(super) struct Files(Vec<Arc<DirectFile>>);

impl Files {
    /// Position of a file, which is opened if it is new.
    fn position(&mut self, file: &SourceFile, direct: bool) -> Result<usize> {
        match self.0.iter().position(|known| known.file().is_shared(file)) {
            Some(position) => Ok(position),
            None => {
                self.0.push(Arc::new(DirectFile::new(file, direct)?));
                Ok(self.0.len() - 1)
            }
        }
    }

    /// Whether all of them are read past the system's cache.
    pub fn are_direct(&self) -> bool {
        self.0.iter().all(|file| file.is_direct())
    }
}

impl Place {
    /// Gate, up and down projection of an expert.
    pub fn new(matrices: &[Located<'_>; 3], files: &mut Files, direct: bool) -> Result<Place> {
        let plain: Vec<&Extent<'_>> =
            matrices.iter().filter(|matrix| !matrix.is_widened()).map(|matrix| &matrix.codes).collect();
        let mut staged: Vec<&Extent<'_>> =
            matrices.iter().filter_map(|matrix| matrix.scales.as_ref()).map(|(scales, _)| scales).collect();
        staged.extend(matrices.iter().filter(|matrix| matrix.is_widened()).map(|matrix| &matrix.codes));
        let (reads, places, mut code_bytes) = reads(&plain, files, direct)?;
        let (staged, staged_places, staging_bytes) = self::reads(&staged, files, direct)?;
        let (mut places, mut staged_places) = (places.into_iter(), staged_places.into_iter());
        let mut decoded = Vec::new();
        let mut scales = 0;
        let scale_ranges = matrices.each_ref().map(|matrix| {
            let begin = scales;
            if let Some((_, dtype)) = &matrix.scales {
                scales += matrix.scale_count() as usize;
                decoded.push((staged_places.next().expect("a place for each"), Decoded::Scales(*dtype)));
            }
            begin..scales
        });
        let code_ranges = matrices.each_ref().map(|matrix| match matrix.is_widened() {
            false => places.next().expect("a place for each"),
            true => {
                let range = code_bytes..code_bytes + matrix.code_bytes() as usize;
                code_bytes = range.end.next_multiple_of(PAGE_BYTES);
                let staged = staged_places.next().expect("a place for each");
                decoded.push((staged, Decoded::Widened(matrix.raw, range.clone())));
                range
            }
        });
        let mut ranges = code_ranges.into_iter().zip(scale_ranges);
        let matrices = matrices.each_ref().map(|matrix| {
            let (codes, scales) = ranges.next().expect("ranges for each");
            Stored { rows: matrix.rows, columns: matrix.columns, format: matrix.format, codes, scales }
        });
        let size = Size { code_bytes, scales };
        Ok(Place { reads, staged, decoded, matrices, size, staging_bytes })
    }

    /// Memory of the expert.
    pub fn size(&self) -> Size {
        self.size
    }

    /// Memory that reading it takes beside.
    pub fn staging_bytes(&self) -> usize {
        self.staging_bytes
    }

    /// Formats of gate, up and down.
    pub fn formats(&self) -> [Format; 3] {
        self.matrices.each_ref().map(|matrix| matrix.format)
    }

    /// Bytes that are read.
    pub fn stored_bytes(&self) -> u64 {
        self.reads.iter().chain(&self.staged).map(|read| read.span.bytes as u64).sum()
    }

    /// Reads the expert, in pieces at the same time on the threads of `pool`; `staging` grows to what is needed. Tells how
    /// many pieces there were.
    pub fn read(&self, slot: &mut Slot, staging: &mut PageBuffer, pool: &ThreadPool) -> Result<u64> {
        if staging.len() < self.staging_bytes {
            *staging = PageBuffer::new(self.staging_bytes);
        }
        let mut pieces = self::pieces(&self.reads, slot.codes.bytes_mut());
        pieces.extend(self::pieces(&self.staged, staging.bytes_mut()));
        let count = pieces.len() as u64;
        if self.stored_bytes() <= limits::EXPERT_READ_BYTES as u64 {
            pieces.iter_mut().try_for_each(Piece::read)?;
        } else {
            pool.install(|| pieces.par_iter_mut().with_max_len(1).try_for_each(Piece::read))?;
        }
        slot.scales.clear();
        for (range, decoded) in &self.decoded {
            let staged = &staging.bytes()[range.clone()];
            match decoded {
                Decoded::Scales(dtype) => dtype.decode(staged, &mut slot.scales),
                Decoded::Widened(raw, range) => widen(*raw, staged, &mut slot.codes.bytes_mut()[range.clone()]),
            }
        }
        Ok(count)
    }

    /// Gate, up and down projection in a slot that was read.
    pub fn matrices<'s>(&self, slot: &'s Slot) -> [MatrixRef<'s>; 3] {
        self.matrices.each_ref().map(|stored| MatrixRef {
            rows: stored.rows,
            columns: stored.columns,
            format: stored.format,
            codes: &slot.codes.bytes()[stored.codes.clone()],
            scales: &slot.scales[stored.scales.clone()],
        })
    }
}

/// Few reads for some tensors: neighbours in a file are read at once. Tells where each tensor comes to lie, and how many
/// bytes of memory all take.
#[allow(clippy::type_complexity)] // named where it is taken apart
fn reads(extents: &[&Extent<'_>], files: &mut Files, direct: bool) -> Result<(Vec<Read>, Vec<Range<usize>>, usize)> {
    let mut order = Vec::with_capacity(extents.len());
    for (number, extent) in extents.iter().enumerate() {
        order.push((files.position(extent.file, direct)?, extent.offset, number));
    }
    order.sort_unstable();
    let mut reads: Vec<(usize, Read)> = Vec::new();
    let mut of_extent = vec![(0, 0); extents.len()];
    for (file, offset, number) in order {
        let (bytes, name) = (extents[number].bytes as usize, extents[number].name.clone());
        let end = offset + bytes as u64;
        match reads.last_mut() {
            Some((last, read)) if *last == file && read.span.offset + read.span.bytes as u64 == offset => {
                let from = read.span.bytes;
                read.span.bytes += bytes;
                read.tensors.push((name, end));
                of_extent[number] = (reads.len() - 1, from);
            }
            _ => {
                of_extent[number] = (reads.len(), 0);
                let span = Span { offset, bytes, at: 0 };
                reads.push((file, Read { file: files.0[file].clone(), span, tensors: vec![(name, end)] }));
            }
        }
    }
    let mut total = 0;
    for (_, read) in &mut reads {
        read.span.at = total;
        // As much wherever the range begins in its page: experts of equal bytes use each other's memory.
        total += read.span.bytes.next_multiple_of(PAGE_BYTES) + PAGE_BYTES;
    }
    let place = |(number, &(read, from)): (usize, &(usize, usize))| {
        let begin = reads[read].1.span.place().start + from;
        begin..begin + extents[number].bytes as usize
    };
    let places = of_extent.iter().enumerate().map(place).collect();
    Ok((reads.into_iter().map(|(_, read)| read).collect(), places, total))
}
