//! The arithmetic of a conversion: some rows of one weight at a time.

use std::collections::BTreeMap;

use byteorder::{ByteOrder, LittleEndian};

use super::Job;
use super::plan::{ClassKey, PlannedFile, Weight};
use crate::checkpoint::SourceTensor;
use crate::container::writer::FileWriter;
use crate::dequantize::{first_non_finite, zero_non_finite};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::SourceFile;
use crate::quantize::Decoder;
use crate::weights::{ReadBuffer, SourceRows};

/// Squared signal and squared error of each class.
pub(super) type Stats = BTreeMap<ClassKey, (f64, f64)>;

/// Some rows of a weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub(super) weight: usize,
    first: u64,
    pub(super) rows: u64,
}

pub(super) fn blocks(sources: &[SourceRows<'_>], block_bytes: u64) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (weight, source) in sources.iter().enumerate() {
        let step = (block_bytes / source.row_bytes().max(1)).max(1);
        let mut first = 0;
        while first < source.rows {
            let rows = step.min(source.rows - first);
            blocks.push(Block { weight, first, rows });
            first += rows;
        }
    }
    blocks
}

/// What came of a block.
#[derive(Debug, Default)]
pub(super) struct BlockResult {
    /// Elements that are not finite: how many, and row, column and value of the first.
    non_finite: Option<(u64, u64, u64, f32)>,
    /// Squared signal and error of each row, with `--stats`.
    rows: Vec<(f64, f64)>,
}

/// One thread's reused space.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    source: ReadBuffer,
    row: Vec<f32>,
    codes: Vec<u8>,
    scales: Vec<f32>,
    scale_bytes: Vec<u8>,
    decoded: Vec<f32>,
}

impl Buffers {
    pub(super) fn convert(
        &mut self,
        weight: &Weight,
        source: &SourceRows<'_>,
        block: &Block,
        target: Option<(&FileWriter<'_>, (usize, Option<usize>))>,
        job: &Job,
    ) -> Result<BlockResult> {
        let mut result = BlockResult::default();
        let columns = source.columns as usize;
        let code_bytes = weight.quantizer.row_code_bytes(columns);
        let row_scales = weight.quantizer.row_scales(columns);
        let rows = block.rows as usize;
        self.row.resize(columns, 0.0);
        self.codes.resize(rows * code_bytes, 0);
        self.scales.resize(rows * row_scales, 0.0);
        source.read(block.first, block.rows, &mut self.source)?;
        for r in 0..rows {
            source.row(&self.source, block.first, block.first + r as u64, &mut self.row);
            if let Some(column) = first_non_finite(&self.row) {
                let value = self.row[column];
                let count = zero_non_finite(&mut self.row) as u64;
                let first = (count, block.first + r as u64, column as u64, value);
                let (before, row, column, value) = result.non_finite.unwrap_or((0, first.1, first.2, first.3));
                result.non_finite = Some((before + count, row, column, value));
            }
            let codes = &mut self.codes[r * code_bytes..][..code_bytes];
            let scales = &mut self.scales[r * row_scales..][..row_scales];
            weight.quantizer.quantize_row(&self.row, codes, scales);
            if job.options.stats {
                self.decoded.resize(columns, 0.0);
                let decoder = Decoder::new(weight.quantizer.format()).expect("what is written can be read");
                decoder.dequantize_row(codes, scales, &mut self.decoded);
                result.rows.push(squares(&self.row, &self.decoded));
            }
        }
        let Some((writer, (codes_place, scales_place))) = target else { return Ok(result) };
        writer.write(codes_place, block.first * code_bytes as u64, &self.codes)?;
        if let Some(place) = scales_place {
            self.scale_bytes.resize(4 * self.scales.len(), 0);
            LittleEndian::write_f32_into(&self.scales, &mut self.scale_bytes);
            writer.write(place, block.first * 4 * row_scales as u64, &self.scale_bytes)?;
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

/// Joins the results of a file's blocks in their order: faults first, then statistics. Returns warnings.
pub(super) fn gather(
    file: &PlannedFile,
    sources: &[SourceRows<'_>],
    blocks: &[Block],
    results: Vec<Result<BlockResult>>,
    allow_non_finite: bool,
    stats: &mut Stats,
) -> Result<Vec<Fault>, Faults> {
    let mut faults = Vec::new();
    let mut non_finite: BTreeMap<usize, (u64, u64, u64, f32)> = BTreeMap::new();
    for (block, result) in blocks.iter().zip(results) {
        // An unreadable file fails for every block: once is enough.
        let result = result?;
        if let Some((count, row, column, value)) = result.non_finite {
            non_finite.entry(block.weight).and_modify(|known| known.0 += count).or_insert((count, row, column, value));
        }
        let total = stats.entry(file.weights[block.weight].key()).or_default();
        for (signal, noise) in result.rows {
            total.0 += signal;
            total.1 += noise;
        }
    }
    let mut warnings = Vec::new();
    for (weight, (count, row, column, value)) in non_finite {
        let place = sources[weight].place();
        if allow_non_finite {
            warnings.push(Fault::new(place, FaultKind::NonFiniteZeroed { count, row, column, value }));
        } else {
            faults.push(Fault::new(place, FaultKind::NonFinite { row, column, value }));
        }
    }
    Faults::check(faults)?;
    Ok(warnings)
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
