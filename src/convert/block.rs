//! The arithmetic of a conversion: some rows of one weight at a time.

use std::collections::BTreeMap;

use byteorder::{ByteOrder, LittleEndian};

use super::Options;
use super::plan::{ClassKey, PlannedFile, Weight};
use crate::checkpoint::SourceTensor;
use crate::dequantize::{first_non_finite, zero_non_finite};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::format::Format;
use crate::io::SourceFile;
use crate::isa::Isa;
use crate::quantize::{Converter, Decoder, NonFinite};
use crate::weights::{ReadBuffer, SourceRows};

/// Squared signal and squared error of each class.
pub(super) type Stats = BTreeMap<ClassKey, (f64, f64)>;

/// What of a weight stands at one place of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    /// The values of a weight that stays f32.
    Values,
    /// The scales of a quantized one.
    Scales,
    /// Its codes.
    Codes,
}

/// Some rows of a weight, as they stand in the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub(super) weight: usize,
    pub(super) what: What,
    pub(super) first: u64,
    pub(super) rows: u64,
}

/// The blocks of a file in the order of its bytes.
pub(super) fn blocks(file: &PlannedFile, sources: &[SourceRows<'_>], block_bytes: u64) -> Vec<Block> {
    let mut parts: Vec<(usize, usize, What)> = Vec::new();
    for (weight, &(codes, scales)) in file.layout.places.iter().enumerate() {
        let raw = file.weights[weight].planned.format == Format::F32;
        parts.push((codes, weight, if raw { What::Values } else { What::Codes }));
        parts.extend(scales.map(|scales| (scales, weight, What::Scales)));
    }
    parts.sort_unstable_by_key(|&(place, ..)| place);
    let mut blocks = Vec::new();
    for (_, weight, what) in parts {
        let source = &sources[weight];
        let step = (block_bytes / source.row_bytes().max(1)).max(1);
        let mut first = 0;
        while first < source.rows {
            let rows = step.min(source.rows - first);
            blocks.push(Block { weight, what, first, rows });
            first += rows;
        }
    }
    blocks
}

/// Elements that are not finite: how many, and row, column and value of the first.
type Found = (u64, u64, u64, f32);

/// What came of a block.
#[derive(Debug, Default)]
pub(super) struct BlockResult {
    /// Elements that are not finite.
    non_finite: Option<Found>,
    /// Squared signal and error of each row, with `--stats`.
    rows: Vec<(f64, f64)>,
}

/// A block as it stands in the file, with what came of it.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) bytes: Vec<u8>,
    pub(super) result: Result<BlockResult>,
}

impl Default for Made {
    fn default() -> Made {
        Made { bytes: Vec::new(), result: Ok(BlockResult::default()) }
    }
}

/// One thread's reused space.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    source: ReadBuffer,
    row: Vec<f32>,
    /// What of a row is not wanted: its codes, or its scales as bytes.
    other: Vec<u8>,
    scales: Vec<f32>,
    decoded: Vec<f32>,
}

impl Buffers {
    /// Converts a block into `bytes`.
    pub(super) fn convert(
        &mut self,
        weight: &Weight,
        source: &SourceRows<'_>,
        block: &Block,
        options: &Options,
        bytes: &mut Vec<u8>,
    ) -> Result<BlockResult> {
        let mut result = BlockResult::default();
        let columns = source.columns as usize;
        let code_bytes = weight.quantizer.row_code_bytes(columns);
        let row_scales = weight.quantizer.row_scales(columns);
        let wanted = if block.what == What::Scales { 4 * row_scales } else { code_bytes };
        self.row.resize(columns, 0.0);
        self.other.resize(code_bytes, 0);
        self.scales.resize(row_scales, 0.0);
        bytes.resize(block.rows as usize * wanted, 0);
        source.read(block.first, block.rows, &mut self.source)?;
        let isa = options.isa.unwrap_or_else(Isa::detect);
        let mut converter = Converter::new(weight.quantizer, source.dtype(), columns, isa);
        for (row, out) in (block.first..).zip(bytes.chunks_exact_mut(wanted.max(1)).take(block.rows as usize)) {
            // What is measured or counted needs the values of a row: then the plain way.
            let (stored, block_scales) = source.stored_row(&self.source, block.first, row);
            let fast = match block.what {
                _ if options.stats => Err(NonFinite),
                What::Scales => converter.scales_row(stored, block_scales, &mut self.scales),
                What::Values | What::Codes => converter.convert_row(stored, block_scales, out, &mut self.scales),
            };
            if fast.is_ok() {
                if block.what == What::Scales {
                    LittleEndian::write_f32_into(&self.scales, out);
                }
                continue;
            }
            source.row(&self.source, block.first, row, &mut self.row);
            if let Some(column) = first_non_finite(&self.row) {
                let value = self.row[column];
                let count = zero_non_finite(&mut self.row) as u64;
                let (before, row, column, value) = result.non_finite.unwrap_or((0, row, column as u64, value));
                result.non_finite = Some((before + count, row, column, value));
            }
            let codes = if block.what == What::Scales { &mut self.other[..] } else { &mut *out };
            weight.quantizer.quantize_row(&self.row, codes, &mut self.scales);
            if options.stats && block.what != What::Scales {
                self.decoded.resize(columns, 0.0);
                let decoder = Decoder::new(weight.quantizer.format()).expect("what is written can be read");
                decoder.dequantize_row(codes, &self.scales, &mut self.decoded);
                result.rows.push(squares(&self.row, &self.decoded));
            }
            if block.what == What::Scales {
                LittleEndian::write_f32_into(&self.scales, out);
            }
        }
        Ok(result)
    }
}

/// Σ w² and Σ (w − ŵ)² of a row.
fn squares(row: &[f32], decoded: &[f32]) -> (f64, f64) {
    row.iter().zip(decoded).fold((0.0, 0.0), |(signal, noise), (&w, &d)| {
        let (w, error) = (f64::from(w), f64::from(w) - f64::from(d));
        (signal + w * w, noise + error * error)
    })
}

/// Joins the results of blocks in their order.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    non_finite: BTreeMap<usize, Found>,
}

impl Gathered {
    /// Takes the result of a block, or passes its fault on.
    pub(super) fn take(&mut self, file: &PlannedFile, block: &Block, made: &mut Made, stats: &mut Stats) -> Result<()> {
        let result = std::mem::replace(&mut made.result, Ok(BlockResult::default()))?;
        if let Some((count, row, column, value)) = result.non_finite {
            let known = self.non_finite.entry(block.weight);
            known.and_modify(|known| known.0 += count).or_insert((count, row, column, value));
        }
        let total = stats.entry(file.weights[block.weight].key()).or_default();
        for (signal, noise) in result.rows {
            total.0 += signal;
            total.1 += noise;
        }
        Ok(())
    }

    /// Elements that are not finite are faults, or warnings where they are allowed.
    pub(super) fn check(&self, sources: &[SourceRows<'_>], allow_non_finite: bool) -> Result<Vec<Fault>, Faults> {
        let fault = |(&weight, &(count, row, column, value)): (&usize, &Found)| {
            let kind = match allow_non_finite {
                true => FaultKind::NonFiniteZeroed { count, row, column, value },
                false => FaultKind::NonFinite { row, column, value },
            };
            Fault::new(sources[weight].place(), kind)
        };
        let found: Vec<Fault> = self.non_finite.iter().map(fault).collect();
        if allow_non_finite { Ok(found) } else { Faults::check(found).map(|()| Vec::new()) }
    }
}

/// The shards of a weight are still those that were planned with.
pub(super) fn check_unchanged(tensor: &SourceTensor<'_>) -> Result<()> {
    for shard in [Some(tensor.shard), tensor.scales.map(|(shard, _)| shard)].into_iter().flatten() {
        let path = shard.file.path();
        let changed = |what, expected, found| {
            Err(Fault::new(Place::file(path), FaultKind::SourceChanged { what, expected, found }))
        };
        path.metadata().map_err(|e| Fault::io("find the source file again", path, e))?;
        let bytes = shard.file.bytes_now()?;
        if bytes != shard.file.bytes() {
            return changed("size", shard.file.bytes(), bytes);
        }
        let modified = SourceFile::modified_nanoseconds(path);
        if modified != shard.modified_nanoseconds {
            return changed("modification time", shard.modified_nanoseconds, modified);
        }
    }
    Ok(())
}
