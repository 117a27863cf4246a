//! Where a weight lies in its files, for whoever reads it later or again.

use crate::dequantize::{ScaleDtype, SourceDtype};
use crate::error::{Fault, Place, Result};
use crate::format::Format;
use crate::io::SourceFile;
use crate::tensor::TensorName;

use super::{Matrix, named};

/// Stored bytes that are widened at once.
const WIDENED_BYTES: usize = 1 << 20;

/// Bytes of a tensor in a file.
#[derive(Debug, Clone)]
pub struct Extent<'a> {
    /// The file.
    pub file: &'a SourceFile,
    /// The tensor, for messages.
    pub name: TensorName,
    /// Where they begin.
    pub offset: u64,
    /// How many they are.
    pub bytes: u64,
}

impl Extent<'_> {
    /// A fault with the tensor and its place in the file.
    pub(super) fn named(&self, fault: Fault) -> Fault {
        let Fault { place, kind } = named(fault, &self.name);
        Fault { place: Place { offset: Some(self.offset), ..place }, kind }
    }
}

/// A weight in its files, and what becomes of its bytes in memory.
#[derive(Debug, Clone)]
pub struct Located<'a> {
    /// Output features; elements of a vector.
    pub rows: usize,
    /// Input features; 1 for a vector.
    pub columns: usize,
    /// The format in memory.
    pub format: Format,
    /// Codes, or raw numbers.
    pub codes: Extent<'a>,
    /// The type of raw numbers; halves are widened to f32.
    pub raw: SourceDtype,
    /// Scales, and their type.
    pub scales: Option<(Extent<'a>, ScaleDtype)>,
}

impl Located<'_> {
    /// Whether the codes in memory are others than those in the file: widened halves.
    pub fn is_widened(&self) -> bool {
        self.format == Format::F32 && self.raw != SourceDtype::F32
    }

    /// Bytes of the codes in memory.
    pub fn code_bytes(&self) -> u64 {
        if self.is_widened() { self.codes.bytes / self.raw.bytes() as u64 * 4 } else { self.codes.bytes }
    }

    /// How many scales there are.
    pub fn scale_count(&self) -> u64 {
        self.scales.as_ref().map_or(0, |(scales, dtype)| scales.bytes / dtype.bytes() as u64)
    }

    /// Reads the weight.
    pub fn load(&self) -> Result<Matrix> {
        let mut codes = vec![0; self.code_bytes() as usize];
        let read = |bytes: &mut [u8], extent: &Extent<'_>, from: u64| {
            extent.file.read_at(bytes, extent.offset + from).map_err(|fault| extent.named(fault))
        };
        if self.is_widened() {
            let mut stored = vec![0; WIDENED_BYTES.min(self.codes.bytes as usize)];
            let step = WIDENED_BYTES / self.raw.bytes() * 4;
            for (number, out) in codes.chunks_mut(step).enumerate() {
                let stored = &mut stored[..out.len() / 4 * self.raw.bytes()];
                read(stored, &self.codes, (number * WIDENED_BYTES) as u64)?;
                widen(self.raw, stored, out);
            }
        } else {
            read(&mut codes, &self.codes, 0)?;
        }
        let mut scales = Vec::new();
        if let Some((extent, dtype)) = &self.scales {
            let mut stored = vec![0; extent.bytes as usize];
            read(&mut stored, extent, 0)?;
            dtype.decode(&stored, &mut scales);
        }
        Ok(Matrix { rows: self.rows, columns: self.columns, format: self.format, codes, scales })
    }
}

/// Halves `stored` [2 · n] as f32, little-endian: `out` [4 · n].
pub fn widen(raw: SourceDtype, stored: &[u8], out: &mut [u8]) {
    let mut values = [0.0; 1024];
    for (stored, out) in stored.chunks(raw.bytes() * values.len()).zip(out.chunks_mut(4 * values.len())) {
        let values = &mut values[..out.len() / 4];
        raw.dequantize_row(stored, &[], values);
        for (out, value) in out.chunks_exact_mut(4).zip(values) {
            out.copy_from_slice(&value.to_le_bytes());
        }
    }
}
