//! Weights by name, whether they come from a checkpoint or from a container.

mod located;
mod model;

use std::path::PathBuf;

use byteorder::{ByteOrder, LittleEndian};

use crate::checkpoint::{Checkpoint, SCALE_BLOCK, SourceTensor};
use crate::config::Config;
use crate::container::reader::{Container, StoredWeight, Survey};
use crate::dequantize::{ScaleDtype, SourceDtype};
use crate::error::{Fault, FaultKind, Place, Result};
use crate::format::Format;
use crate::header::StoredTensor;
use crate::io::SourceFile;
use crate::quantize::Decoder;
use crate::tensor::{Shape, TensorName};

pub use located::{Extent, Located, widen};
pub use model::{Model, ModelKind, Stored};

/// A matrix or vector in memory, still in its stored format. A vector of n elements is n rows of one column.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub columns: usize,
    /// How the elements are stored.
    pub format: Format,
    /// Codes, row after row.
    pub codes: Vec<u8>,
    /// Scales in the order of the format.
    pub scales: Vec<f32>,
}

/// A matrix whose codes and scales are somebody else's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatrixRef<'a> {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub columns: usize,
    /// How the elements are stored.
    pub format: Format,
    /// Codes, row after row.
    pub codes: &'a [u8],
    /// Scales in the order of the format.
    pub scales: &'a [f32],
}

impl Matrix {
    /// The same without owning it.
    pub fn view(&self) -> MatrixRef<'_> {
        let Matrix { rows, columns, format, codes, scales } = self;
        MatrixRef { rows: *rows, columns: *columns, format: *format, codes, scales }
    }

    /// Decodes one row: `out` `[columns]`.
    ///
    /// # Panics
    ///
    /// If the format has no decoder, which [`Weights::load`] refuses, or `row` is not below `rows`.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let decoder = Decoder::new(self.format).expect("a loaded matrix has a decoder");
        let codes = decoder.row_code_bytes(self.columns);
        let scales = decoder.row_scales(self.columns);
        let scale_row = if self.format == Format::Fp8E4m3B128 { row / SCALE_BLOCK as usize } else { row };
        decoder.dequantize_row(&self.codes[row * codes..][..codes], &self.scales[scale_row * scales..][..scales], out);
    }
}

impl Matrix {
    /// Whether this matrix and another are one when its rows stand above the other's: stored alike, with whole blocks of rows where
    /// they meet.
    pub fn joins(&self, other: &Matrix) -> bool {
        let blocks = self.format != Format::Fp8E4m3B128 || self.rows.is_multiple_of(SCALE_BLOCK as usize);
        blocks && (self.columns, self.format) == (other.columns, other.format)
    }

    /// The rows of this matrix, then those of another.
    ///
    /// # Panics
    ///
    /// Unless they join.
    pub fn above(mut self, other: Matrix) -> Matrix {
        assert!(self.joins(&other), "matrices that do not join");
        self.rows += other.rows;
        self.codes.extend_from_slice(&other.codes);
        self.scales.extend_from_slice(&other.scales);
        self
    }
}

/// Where a model's weights come from.
pub trait Weights: Sync {
    /// The model's config.
    fn config(&self) -> &Config;
    /// The directory, for messages and small files.
    fn directory(&self) -> PathBuf;
    /// Whether there is a weight of that name.
    fn contains(&self, name: &str) -> bool;
    /// Loads a weight in its stored format; one without a decoder is refused by name.
    fn load(&self, name: &str) -> Result<Matrix>;
    /// Where a weight is stored, for whoever reads it later; `None` if it is not in a file.
    fn locate(&self, _name: &str) -> Result<Option<Located<'_>>> {
        Ok(None)
    }
}

/// The rows of a source weight as f32.
#[derive(Debug)]
pub struct SourceRows<'a> {
    tensor: SourceTensor<'a>,
    dtype: SourceDtype,
    /// Rows; 1 for a vector or scalar, so that its elements are one row.
    pub rows: u64,
    /// Elements of a row.
    pub columns: u64,
    scales: Vec<f32>,
}

/// Reused space for stored bytes.
#[derive(Debug, Default)]
pub struct ReadBuffer(Vec<u8>);

impl ReadBuffer {
    /// Reads `bytes` bytes of a file from `offset` on.
    pub fn read(&mut self, file: &SourceFile, offset: u64, bytes: u64) -> Result<()> {
        self.0.resize(bytes as usize, 0);
        file.read_at(&mut self.0, offset)
    }

    /// What was read last.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl<'a> SourceRows<'a> {
    /// Prepares a weight for reading; its scales are read now.
    pub fn new(tensor: SourceTensor<'a>) -> Result<SourceRows<'a>> {
        let stored = tensor.stored;
        let place = || Place::tensor(tensor.shard.file.path(), stored.name.clone());
        let dtype = SourceDtype::from_dtype(stored.dtype)
            .ok_or_else(|| Fault::new(place(), FaultKind::SourceDtype { dtype: stored.dtype }))?;
        let (rows, columns) = stored.shape.matrix().unwrap_or((1, stored.bytes / dtype.bytes() as u64));
        let scales = if dtype == SourceDtype::Fp8E4m3 { read_scales(&tensor)? } else { Vec::new() };
        Ok(SourceRows { tensor, dtype, rows, columns, scales })
    }

    /// The weight.
    pub fn tensor(&self) -> &SourceTensor<'a> {
        &self.tensor
    }

    /// Bytes of one stored row.
    pub fn row_bytes(&self) -> u64 {
        self.columns * self.dtype.bytes() as u64
    }

    /// Reads `count` rows from row `first` on into `buffer`.
    pub fn read(&self, first: u64, count: u64, buffer: &mut ReadBuffer) -> Result<()> {
        let offset = self.tensor.stored.offset + first * self.row_bytes();
        let read = buffer.read(&self.tensor.shard.file, offset, count * self.row_bytes());
        read.map_err(|fault| named(fault, &self.tensor.stored.name))
    }

    /// Asks the system to forget what it keeps of these rows in memory: they are not read again.
    pub fn forget(&self, first: u64, count: u64) {
        let (offset, bytes) = (self.tensor.stored.offset + first * self.row_bytes(), count * self.row_bytes());
        if bytes > 0 {
            self.tensor.shard.file.forget(offset, bytes);
        }
    }

    /// Element type.
    pub fn dtype(&self) -> SourceDtype {
        self.dtype
    }

    /// Row `row` of what [`SourceRows::read`] read from `first` on, as it is stored, and the scales of its block row.
    pub fn stored_row<'b>(&'b self, buffer: &'b ReadBuffer, first: u64, row: u64) -> (&'b [u8], &'b [f32]) {
        let bytes = self.row_bytes() as usize;
        let stored = &buffer.0[(row - first) as usize * bytes..][..bytes];
        let per_row = self.dtype.row_scales(self.columns as usize);
        let scales = if per_row == 0 { &[] } else { &self.scales[(row / SCALE_BLOCK) as usize * per_row..][..per_row] };
        (stored, scales)
    }

    /// Widens row `row` of what [`SourceRows::read`] read from `first` on: `out` `[columns]`.
    pub fn row(&self, buffer: &ReadBuffer, first: u64, row: u64, out: &mut [f32]) {
        let (stored, scales) = self.stored_row(buffer, first, row);
        self.dtype.dequantize_row(stored, scales, out);
    }

    /// The place of an element.
    pub fn place(&self) -> Place {
        Place::tensor(self.tensor.shard.file.path(), self.tensor.stored.name.clone())
    }
}

/// A fault of reading a file, with the tensor that was being read.
fn named(fault: Fault, tensor: &TensorName) -> Fault {
    Fault { place: Place { tensor: Some(tensor.clone()), ..fault.place }, kind: fault.kind }
}

/// The scale grid of an FP8 weight, row after row.
pub fn read_scales(tensor: &SourceTensor<'_>) -> Result<Vec<f32>> {
    let (shard, stored) = tensor.scales.expect("checked when the checkpoint was opened");
    let dtype = ScaleDtype::from_dtype(stored.dtype).expect("checked when the checkpoint was opened");
    let mut bytes = vec![0; stored.bytes as usize];
    shard.file.read_at(&mut bytes, stored.offset).map_err(|fault| named(fault, &stored.name))?;
    let mut scales = Vec::with_capacity(bytes.len() / dtype.bytes());
    dtype.decode(&bytes, &mut scales);
    Ok(scales)
}

impl Weights for Checkpoint {
    fn config(&self) -> &Config {
        &self.config
    }

    fn directory(&self) -> PathBuf {
        self.directory.clone()
    }

    /// What belongs to a pass that the checkpoint was not opened for is not there, though some of it may lie in open files.
    fn contains(&self, name: &str) -> bool {
        let wanted = self.census.role(name).is_none_or(|role| self.passes.contains(&role.pass));
        wanted && self.tensor(name).is_some()
    }

    /// FP8 stays FP8 with f32 scales; the other element types are widened to f32.
    fn load(&self, name: &str) -> Result<Matrix> {
        located(self, name)?.load()
    }

    fn locate(&self, name: &str) -> Result<Option<Located<'_>>> {
        located(self, name).map(Some)
    }
}

/// Where a checkpoint has a weight.
fn located<'a>(checkpoint: &'a Checkpoint, name: &str) -> Result<Located<'a>> {
    let tensor = checkpoint.tensor(name).ok_or_else(|| {
        let shape = checkpoint.census.role(name).map_or(Shape::from([]), |role| role.shape.clone());
        Fault::new(Place::tensor(&checkpoint.directory, name), FaultKind::TensorMissing { shape })
    })?;
    let place = || Place::tensor(tensor.shard.file.path(), tensor.stored.name.clone());
    let dtype = tensor.stored.dtype;
    let raw = SourceDtype::from_dtype(dtype).ok_or_else(|| Fault::new(place(), FaultKind::SourceDtype { dtype }))?;
    let of = |file, stored: &StoredTensor| Extent {
        file,
        name: stored.name.clone(),
        offset: stored.offset,
        bytes: stored.bytes,
    };
    let (rows, columns) = tensor.stored.shape.matrix().unwrap_or((tensor.stored.bytes / raw.bytes() as u64, 1));
    let quantized = raw == SourceDtype::Fp8E4m3;
    let scales = tensor.scales.filter(|_| quantized).map(|(shard, stored)| {
        let dtype = ScaleDtype::from_dtype(stored.dtype).expect("checked when the checkpoint was opened");
        (of(&shard.file, stored), dtype)
    });
    Ok(Located {
        rows: rows as usize,
        columns: columns as usize,
        format: if quantized { Format::Fp8E4m3B128 } else { Format::F32 },
        codes: of(&tensor.shard.file, tensor.stored),
        raw,
        scales,
    })
}

/// The rows of a container's weight.
#[derive(Debug)]
pub struct ContainerRows<'a> {
    survey: &'a Survey,
    weight: &'a StoredWeight,
    decoder: Decoder,
    /// Rows; 1 for a vector or scalar, so that its elements are one row.
    pub rows: u64,
    /// Elements of a row.
    pub columns: u64,
    /// Element type of a raw tensor; F32 for quantized ones.
    raw: SourceDtype,
    /// The scale grid of fp8 blocks, which rows share.
    blocks: Vec<f32>,
}

/// Reused space for codes and scales of some rows.
#[derive(Debug, Default)]
pub struct StoredRows {
    /// Codes, row after row.
    pub codes: Vec<u8>,
    /// Scales, row after row; for fp8 blocks the grid is kept elsewhere and this is empty.
    pub scales: Vec<f32>,
    scale_bytes: Vec<u8>,
}

impl<'a> ContainerRows<'a> {
    /// Prepares a weight whose format is known; one without a decoder is refused by name.
    pub fn new(survey: &'a Survey, weight: &'a StoredWeight) -> Result<ContainerRows<'a>> {
        let mut container = ContainerRows::without_blocks(survey, weight)?;
        if container.decoder.format() == Format::Fp8E4m3B128 {
            let mut grid = StoredRows::default();
            container.read_scales(0, weight.scales.as_ref().map_or(0, |(_, scales)| scales.bytes), &mut grid)?;
            container.blocks = grid.scales;
        }
        Ok(container)
    }

    /// The same, without reading anything.
    fn without_blocks(survey: &'a Survey, weight: &'a StoredWeight) -> Result<ContainerRows<'a>> {
        let place = || Place::tensor(survey.files[weight.file].file.path(), weight.codes.name.clone());
        let found = weight.codes.dtype;
        let (Some(format), Some(shape)) = (weight.format, weight.shape()) else {
            return Err(Fault::new(place(), FaultKind::FormatUnknown));
        };
        let decoder = Decoder::new(format).ok_or_else(|| Fault::new(place(), FaultKind::NotDecoded { format }))?;
        // Rows are found by the shape that config.json gives: a tensor of another shape ends elsewhere.
        if format == Format::F32 && weight.codes.shape != shape {
            let found = weight.codes.shape.clone();
            return Err(Fault::new(place(), FaultKind::ShapeMismatch { expected: shape, found }));
        }
        let raw = match format {
            Format::F32 => SourceDtype::from_dtype(found)
                .ok_or_else(|| Fault::new(place(), FaultKind::StoredDtype { expected: "F32", found }))?,
            _ => SourceDtype::F32,
        };
        let (rows, columns) = match shape.matrix() {
            Some(matrix) => matrix,
            None => (1, shape.elements().unwrap_or(0)),
        };
        Ok(ContainerRows { survey, weight, decoder, rows, columns, raw, blocks: Vec::new() })
    }

    /// Where the whole weight is.
    fn located(&self) -> Located<'a> {
        let (survey, weight) = (self.survey, self.weight);
        let of = |file: usize, stored: &StoredTensor, bytes| Extent {
            file: &survey.files[file].file,
            name: stored.name.clone(),
            offset: stored.offset,
            bytes,
        };
        let is_matrix = weight.shape().is_some_and(|shape| shape.matrix().is_some());
        let (rows, columns) = if is_matrix { (self.rows, self.columns) } else { (self.columns, 1) };
        let scales = match self.decoder.format() {
            Format::Fp8E4m3B128 => weight.scales.as_ref().map(|(file, scales)| (file, scales, scales.bytes)),
            _ => weight.scales.as_ref().map(|(file, scales)| (file, scales, 4 * self.row_scales() * self.rows)),
        };
        Located {
            rows: rows as usize,
            columns: columns as usize,
            format: self.decoder.format(),
            codes: of(weight.file, &weight.codes, self.rows * self.row_bytes()),
            raw: self.raw,
            scales: scales
                .filter(|&(.., bytes)| bytes > 0)
                .map(|(&file, scales, bytes)| (of(file, scales, bytes), ScaleDtype::F32)),
        }
    }

    /// The decoder of its rows.
    pub fn decoder(&self) -> Decoder {
        self.decoder
    }

    /// Bytes of one stored row of codes or raw values.
    pub fn row_bytes(&self) -> u64 {
        match self.decoder.format() {
            Format::F32 => self.columns * self.raw.bytes() as u64,
            _ => self.decoder.row_code_bytes(self.columns as usize) as u64,
        }
    }

    /// Scales that each row has of its own.
    pub fn row_scales(&self) -> u64 {
        match self.decoder.format() {
            Format::Fp8E4m3B128 => 0,
            _ => self.decoder.row_scales(self.columns as usize) as u64,
        }
    }

    /// Reads `count` rows from row `first` on.
    pub fn read(&self, first: u64, count: u64, buffer: &mut StoredRows) -> Result<()> {
        let file = &self.survey.files[self.weight.file].file;
        buffer.codes.resize((count * self.row_bytes()) as usize, 0);
        let offset = self.weight.codes.offset + first * self.row_bytes();
        file.read_at(&mut buffer.codes, offset).map_err(|fault| named(fault, &self.weight.codes.name))?;
        buffer.scales.clear();
        let per_row = 4 * self.row_scales();
        if per_row > 0 { self.read_scales(first * per_row, count * per_row, buffer) } else { Ok(()) }
    }

    fn read_scales(&self, from: u64, bytes: u64, buffer: &mut StoredRows) -> Result<()> {
        let (file, scales) = self.weight.scales.as_ref().expect("a quantized weight has scales");
        buffer.scale_bytes.resize(bytes as usize, 0);
        let file = &self.survey.files[*file].file;
        file.read_at(&mut buffer.scale_bytes, scales.offset + from).map_err(|fault| named(fault, &scales.name))?;
        buffer.scales.resize(bytes as usize / 4, 0.0);
        LittleEndian::read_f32_into(&buffer.scale_bytes, &mut buffer.scales);
        Ok(())
    }

    /// The codes of row `row` of what was read from `first` on.
    pub fn codes<'b>(&self, buffer: &'b StoredRows, first: u64, row: u64) -> &'b [u8] {
        let bytes = self.row_bytes() as usize;
        &buffer.codes[(row - first) as usize * bytes..][..bytes]
    }

    /// The scales of row `row`: its own, or those of its block row.
    pub fn scales<'b>(&'b self, buffer: &'b StoredRows, first: u64, row: u64) -> &'b [f32] {
        if self.decoder.format() == Format::Fp8E4m3B128 {
            let per_row = self.decoder.row_scales(self.columns as usize);
            return &self.blocks[(row / SCALE_BLOCK) as usize * per_row..][..per_row];
        }
        let per_row = self.row_scales() as usize;
        &buffer.scales[(row - first) as usize * per_row..][..per_row]
    }

    /// Decodes row `row` of what was read from `first` on: `out` `[columns]`.
    pub fn row(&self, buffer: &StoredRows, first: u64, row: u64, out: &mut [f32]) {
        let codes = self.codes(buffer, first, row);
        if self.decoder.format() == Format::F32 {
            self.raw.dequantize_row(codes, &[], out);
        } else {
            self.decoder.dequantize_row(codes, self.scales(buffer, first, row), out);
        }
    }
}

/// The rows of a weight, wherever it comes from.
#[derive(Debug)]
pub enum Rows<'a> {
    /// Of a checkpoint.
    Source(SourceRows<'a>),
    /// Of a container.
    Container(ContainerRows<'a>),
}

/// Reused space for [`Rows`].
#[derive(Debug, Default)]
pub struct RowsBuffer {
    source: ReadBuffer,
    container: StoredRows,
}

impl Rows<'_> {
    /// Rows and columns; a vector is one row.
    pub fn dims(&self) -> (u64, u64) {
        match self {
            Rows::Source(rows) => (rows.rows, rows.columns),
            Rows::Container(rows) => (rows.rows, rows.columns),
        }
    }

    /// Bytes of one stored row, without scales.
    pub fn row_bytes(&self) -> u64 {
        match self {
            Rows::Source(rows) => rows.row_bytes(),
            Rows::Container(rows) => rows.row_bytes(),
        }
    }

    /// Reads `count` rows from row `first` on.
    pub fn read(&self, first: u64, count: u64, buffer: &mut RowsBuffer) -> Result<()> {
        match self {
            Rows::Source(rows) => rows.read(first, count, &mut buffer.source),
            Rows::Container(rows) => rows.read(first, count, &mut buffer.container),
        }
    }

    /// Decodes row `row` of what was read from `first` on: `out` `[columns]`.
    pub fn row(&self, buffer: &RowsBuffer, first: u64, row: u64, out: &mut [f32]) {
        match self {
            Rows::Source(rows) => rows.row(&buffer.source, first, row, out),
            Rows::Container(rows) => rows.row(&buffer.container, first, row, out),
        }
    }
}

impl Weights for Container {
    fn config(&self) -> &Config {
        Container::config(self)
    }

    fn directory(&self) -> PathBuf {
        self.survey().directory.clone()
    }

    fn contains(&self, name: &str) -> bool {
        self.survey().weights.contains_key(name)
    }

    /// Quantized weights stay as stored; raw BF16 and F16 are widened to f32.
    fn load(&self, name: &str) -> Result<Matrix> {
        contained(self, name)?.load()
    }

    fn locate(&self, name: &str) -> Result<Option<Located<'_>>> {
        contained(self, name).map(Some)
    }
}

/// Where a container has a weight.
fn contained<'a>(container: &'a Container, name: &str) -> Result<Located<'a>> {
    let survey = container.survey();
    let weight = survey.weights.get(name).ok_or_else(|| {
        let role = survey.census.as_ref().and_then(|census| census.role(name));
        let shape = role.map_or(Shape::from([]), |role| role.shape.clone());
        Fault::new(Place::tensor(&survey.directory, name), FaultKind::TensorMissing { shape })
    })?;
    Ok(ContainerRows::without_blocks(survey, weight)?.located())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Allowed;
    use crate::roles::Pass;
    use std::path::Path;

    #[test]
    fn rows_of_a_checkpoint_are_the_same_by_both_ways() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny");
        let checkpoint = Checkpoint::open(&directory, &Pass::ALL, Allowed::default()).unwrap();
        for name in ["model.layers.4.self_attn.q_b_proj.weight", "lm_head.weight", "model.norm.weight"] {
            let matrix = checkpoint.load(name).unwrap();
            let source = SourceRows::new(checkpoint.tensor(name).unwrap()).unwrap();
            let mut buffer = ReadBuffer::default();
            source.read(0, source.rows, &mut buffer).unwrap();
            let mut whole = vec![0.0; (source.rows * source.columns) as usize];
            for (row, out) in whole.chunks_mut(source.columns as usize).enumerate() {
                source.row(&buffer, 0, row as u64, out);
            }
            let mut out = vec![0.0; matrix.columns];
            for row in 0..matrix.rows {
                matrix.dequantize_row(row, &mut out);
                assert_eq!(out, whole[row * matrix.columns..][..matrix.columns], "{name} row {row}");
            }
        }
    }
}
