//! Weights on the device, in parts that a buffer can hold: as they are stored, each row's codes padded to whole 16 bytes, or in
//! bricks where the device computes products with them that way.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use super::bricks::{self, Bricks};
use super::device::Device;
use super::driver::Driver;
use super::kernels::{Coding, Kernel, Name};
use crate::backend::ExpertSource;
use crate::checkpoint::SCALE_BLOCK;
use crate::error::{Fault, FaultKind, Place, Result, counted};
use crate::format::Format;
use crate::quantize::Decoder;
use crate::roles::Projection;
use crate::weights::{Matrix, MatrixRef};

/// Bytes to which a row's codes are padded.
const ROW_BYTES: usize = 16;

/// How a matrix lies in memory: what every kernel that reads weights is told of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub rows: usize,
    pub columns: usize,
    pub format: Format,
    pub coding: Coding,
    /// Words of a row's codes, padding included.
    pub stride: usize,
    /// Scales of a row; of fp8, of a row of blocks.
    pub row_scales: usize,
    /// Of int4 in groups; otherwise 0.
    pub group_size: usize,
    /// In bricks; `None` for rows as they are stored.
    pub bricks: Option<Bricks>,
}

impl Layout {
    /// The layout of a matrix; a format that no kernel reads is refused by name. `name` is for messages.
    pub fn new(backend: &'static str, name: &str, rows: usize, columns: usize, format: Format) -> Result<Layout> {
        let (Some(coding), Some(decoder)) = (Coding::of(format), Decoder::new(format)) else {
            return Err(Fault::new(Place::name(name), FaultKind::BackendFormat { backend, format }));
        };
        let group_size = match format {
            Format::Int4Grouped { group_size } => (group_size as usize).min(columns.next_multiple_of(8)),
            _ => 0,
        };
        // Kernels read eight columns at a time.
        let row_bytes = decoder.row_code_bytes(columns.next_multiple_of(8)).next_multiple_of(ROW_BYTES);
        let row_scales = decoder.row_scales(columns);
        let stride = row_bytes / 4;
        Ok(Layout { rows, columns, format, coding, stride, row_scales, group_size, bricks: None })
    }

    /// The same in bricks, if the device has kernels for that.
    pub fn in_bricks(self, device: &impl Driver) -> Layout {
        let kernel = Kernel { name: Name::Stream, coding: Some(self.coding), rows: Some(Name::Stream.tiles()[0]) };
        match Bricks::of(self.coding, self.columns, self.group_size, self.row_scales) {
            Some(bricks) if device.has(kernel) => Layout { bricks: Some(bricks), ..self },
            _ => self,
        }
    }

    /// Bytes of the codes of some rows.
    pub fn code_bytes(&self, rows: usize) -> u64 {
        4 * self.bricks.map_or(rows * self.stride, |bricks| bricks.words(rows)) as u64
    }

    /// Scales of some rows that begin at a block.
    pub fn scales(&self, rows: usize) -> usize {
        if let Some(scales) = self.bricks.and_then(|bricks| bricks.scales(rows)) {
            return scales;
        }
        match self.coding {
            Coding::Fp8E4m3B128 => rows.div_ceil(SCALE_BLOCK as usize) * self.row_scales,
            _ => rows * self.row_scales,
        }
    }

    /// stride, row_scales, group_size: the first constants of every kernel that reads weights.
    pub fn constants(&self) -> [u32; 3] {
        [self.stride, self.row_scales, self.group_size].map(|value| value as u32)
    }

    /// Codes as they lie on the device.
    pub fn codes<'m>(&self, matrix: MatrixRef<'m>, rows: Range<usize>) -> Cow<'m, [u8]> {
        let stored = matrix.codes.len() / self.rows.max(1);
        let codes = &matrix.codes[rows.start * stored..rows.end * stored];
        if let Some(bricks) = self.bricks {
            return Cow::Owned(bricks.codes(codes, stored));
        }
        if stored == 4 * self.stride {
            return Cow::Borrowed(codes);
        }
        let mut padded = vec![0; 4 * self.stride * rows.len()];
        if stored > 0 {
            let pairs = padded.chunks_exact_mut(4 * self.stride).zip(codes.chunks_exact(stored));
            pairs.for_each(|(to, from)| to[..stored].copy_from_slice(from));
        }
        Cow::Owned(padded)
    }

    /// The scales of some rows that begin at a block, as they lie on the device.
    pub fn scales_of<'m>(&self, matrix: MatrixRef<'m>, rows: Range<usize>) -> Cow<'m, [f32]> {
        let stored = Layout { bricks: None, ..*self };
        let scales = &matrix.scales[stored.scales(rows.start)..][..stored.scales(rows.len())];
        match self.bricks.filter(|bricks| bricks.scales(1).is_some()) {
            Some(bricks) => Cow::Owned(bricks.group_scales(scales, self.row_scales)),
            None => Cow::Borrowed(scales),
        }
    }
}

/// Rows of a weight in buffers of their own.
#[derive(Debug)]
pub struct Part<D: Driver> {
    /// Of the weight.
    pub rows: Range<usize>,
    codes: D::Buffer,
    scales: Option<D::Buffer>,
}

impl<D: Driver> Part<D> {
    /// The codes.
    pub fn codes(&self) -> &D::Buffer {
        &self.codes
    }

    /// The scales; for a format without, a buffer that is not read.
    pub fn scales(&self) -> &D::Buffer {
        self.scales.as_ref().unwrap_or(&self.codes)
    }
}

/// A matrix [rows, columns] on the device. A vector has one column, and its values beside it.
#[derive(Debug)]
pub struct Weight<D: Driver> {
    pub(super) layout: Layout,
    pub(super) parts: Vec<Part<D>>,
    vector: Option<D::Buffer>,
}

impl<D: Driver> Weight<D> {
    /// Uploads a matrix: rows of it, or columns, can be looked up.
    pub fn upload(device: &Device<D>, name: &str, matrix: &Matrix) -> Result<Weight<D>> {
        let layout = Layout::new(device.driver().name(), name, matrix.rows, matrix.columns, matrix.format)?;
        Weight::upload_as(device, name, matrix, layout)
    }

    /// Uploads a matrix of which nothing but products with rows is wanted.
    pub fn upload_linear(device: &Device<D>, name: &str, matrix: &Matrix) -> Result<Weight<D>> {
        Weight::upload_as(device, name, matrix, Weight::linear_layout(device, name, matrix)?)
    }

    /// How two matrices lie as one, the first above the second; `None` unless they join, and both go into bricks that one buffer
    /// holds.
    pub fn joined_layout(device: &Device<D>, name: &str, first: &Matrix, second: &Matrix) -> Result<Option<Layout>> {
        if !first.joins(second) || Weight::linear_layout(device, name, second)?.bricks.is_none() {
            return Ok(None);
        }
        let layout = Weight::linear_layout(device, name, first)?;
        let both = Layout { rows: first.rows + second.rows, ..layout };
        Ok((layout.bricks.is_some() && part_rows(device, &both) >= both.rows).then_some(both))
    }

    fn linear_layout(device: &Device<D>, name: &str, matrix: &Matrix) -> Result<Layout> {
        let layout = Layout::new(device.driver().name(), name, matrix.rows, matrix.columns, matrix.format)?;
        let in_rows = bricks::has_nan(layout.coding, matrix.view());
        Ok(if in_rows { layout } else { layout.in_bricks(device.driver()) })
    }

    /// Uploads a matrix as a layout of its own says.
    pub fn upload_as(device: &Device<D>, name: &str, matrix: &Matrix, layout: Layout) -> Result<Weight<D>> {
        let parts = (0..matrix.rows).step_by(part_rows(device, &layout).min(matrix.rows).max(1));
        let step = part_rows(device, &layout);
        let part = |first: usize| -> Result<Part<D>> {
            let rows = first..matrix.rows.min(first.saturating_add(step));
            let codes = device.allocate(layout.code_bytes(rows.len()), A_WEIGHT).map_err(|fault| of(fault, name))?;
            device.driver().write(&codes, 0, &layout.codes(matrix.view(), rows.clone()))?;
            let scales = floats(device, name, &layout.scales_of(matrix.view(), rows.clone()))?;
            Ok(Part { rows, codes, scales })
        };
        let parts = parts.map(part).collect::<Result<_>>()?;
        let mut vector = None;
        if matrix.columns == 1 {
            let mut values = vec![0.0; matrix.rows];
            values.chunks_exact_mut(1).enumerate().for_each(|(row, out)| matrix.dequantize_row(row, out));
            vector = floats(device, name, &values)?;
        }
        Ok(Weight { layout, parts, vector })
    }

    /// The values of a vector, as f32.
    pub fn vector(&self) -> &D::Buffer {
        self.vector.as_ref().expect("a vector has one column")
    }
}

/// Rows of a part: as many as a buffer of the device holds, of fp8 whole blocks, of bricks whole tiles.
fn part_rows<D: Driver>(device: &Device<D>, layout: &Layout) -> usize {
    let limit = device.driver().limits().buffer_bytes;
    let block = match layout.coding {
        Coding::Fp8E4m3B128 => SCALE_BLOCK as usize,
        _ if layout.bricks.is_some() => bricks::ROWS,
        _ => 1,
    };
    let bytes = layout.code_bytes(block).max(4 * layout.scales(block) as u64).max(1);
    ((limit / bytes) as usize).max(1).saturating_mul(block)
}

/// What memory is for, where the place of a fault names the tensor.
const A_WEIGHT: &str = "a weight";

/// A fault that is about the tensor of that name.
fn of(fault: Fault, name: &str) -> Fault {
    Fault { place: Place::name(name), ..fault }
}

/// A buffer with values of a weight; `None` if there are none.
fn floats<D: Driver>(device: &Device<D>, name: &str, values: &[f32]) -> Result<Option<D::Buffer>> {
    if values.is_empty() {
        return Ok(None);
    }
    let buffer = device.allocate(4 * values.len() as u64, A_WEIGHT).map_err(|fault| of(fault, name))?;
    device.driver().write(&buffer, 0, &bytes_of(values))?;
    Ok(Some(buffer))
}

/// One projection of all routed experts of a layer, in slabs that a buffer can hold.
#[derive(Debug)]
pub struct ExpertMatrices<D: Driver> {
    /// Output features.
    pub rows: usize,
    pub(super) slabs: Vec<Slab<D>>,
}

/// Places for the matrices of some experts, all of one layout.
#[derive(Debug)]
pub struct Slab<D: Driver> {
    pub(super) layout: Layout,
    codes: D::Buffer,
    scales: Option<D::Buffer>,
    /// For each expert of the layer its place here, or [`ABSENT`].
    places: Arc<D::Buffer>,
    /// The same, where it does not change.
    table: Vec<u32>,
}

/// The place of an expert that is in another slab.
pub(super) const ABSENT: u32 = u32::MAX;

impl<D: Driver> Slab<D> {
    /// Codes, scales, places.
    pub fn buffers(&self) -> [&D::Buffer; 3] {
        [&self.codes, self.scales.as_ref().unwrap_or(&self.codes), &self.places]
    }

    /// Whether another slab, in bricks like this one, has matrices of the same layout of the same experts at the same places.
    pub fn stands_as(&self, other: &Slab<D>) -> bool {
        let places = Arc::ptr_eq(&self.places, &other.places) || !self.table.is_empty() && self.table == other.table;
        self.layout == other.layout && self.layout.bricks.is_some() && places
    }

    /// Words and scales from one expert to the next.
    pub fn strides(&self) -> [u32; 2] {
        let rows = self.layout.rows;
        [(self.layout.code_bytes(rows) / 4) as u32, self.layout.scales(rows) as u32]
    }

    /// Room for the matrices of so many experts, which a buffer of the device holds.
    pub fn new(
        device: &Device<D>,
        layout: Layout,
        count: usize,
        places: Arc<D::Buffer>,
        purpose: &str,
    ) -> Result<Slab<D>> {
        let codes = device.allocate(layout.code_bytes(layout.rows) * count as u64, purpose)?;
        let scales = match layout.scales(layout.rows) {
            0 => None,
            scales => Some(device.allocate(4 * (scales * count) as u64, purpose)?),
        };
        Ok(Slab { layout, codes, scales, places, table: Vec::new() })
    }

    /// Brings a matrix of that name to a place, by a way of copying bytes to an offset of a buffer.
    pub fn put(
        &self,
        at: usize,
        name: &str,
        matrix: MatrixRef<'_>,
        copy: impl Fn(&D::Buffer, u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let (layout, at) = (&self.layout, at as u64);
        if layout.bricks.is_some() && bricks::has_nan(layout.coding, matrix) {
            return Err(Fault::new(Place::name(name), FaultKind::GpuNanCode));
        }
        copy(&self.codes, at * layout.code_bytes(layout.rows), &layout.codes(matrix, 0..layout.rows))?;
        match &self.scales {
            Some(scales) => {
                let of_matrix = layout.scales_of(matrix, 0..layout.rows);
                copy(scales, at * 4 * layout.scales(layout.rows) as u64, &bytes_of(&of_matrix))
            }
            None => Ok(()),
        }
    }

    /// Uploads the matrices of some of a layer's experts.
    fn upload(
        device: &Device<D>,
        source: &dyn ExpertSource,
        projection: Projection,
        layout: Layout,
        experts: &[usize],
    ) -> Result<Slab<D>> {
        let purpose = format!("a matrix of each of {}", counted(experts.len() as u64, "expert"));
        let allocated = device.allocate(4 * source.count() as u64, "places of experts").and_then(|places| {
            let places = Arc::new(places);
            Slab::new(device, layout, experts.len(), places, &purpose)
        });
        let slab = allocated.map_err(|fault| of(fault, &source.name(experts[0], projection)))?;
        let mut table = vec![ABSENT; source.count()];
        for (at, &expert) in experts.iter().enumerate() {
            let matrix = source.load(expert, projection)?;
            let name = source.name(expert, projection);
            slab.put(at, &name, matrix.view(), |to, offset, bytes| device.driver().write(to, offset, bytes))?;
            table[expert] = at as u32;
        }
        device.driver().write(&slab.places, 0, &words_of(&table))?;
        Ok(Slab { table, ..slab })
    }
}

impl Layout {
    /// The layout of one of an expert's matrices; a format that no kernel reads is refused by name.
    pub fn of_expert(
        driver: &impl Driver,
        source: &dyn ExpertSource,
        expert: usize,
        projection: Projection,
    ) -> Result<Layout> {
        let (rows, columns, format) = match source.locate(expert, projection)? {
            Some(located) => (located.rows, located.columns, located.format),
            None => {
                let matrix = source.load(expert, projection)?;
                (matrix.rows, matrix.columns, matrix.format)
            }
        };
        let layout = Layout::new(driver.name(), &source.name(expert, projection), rows, columns, format)?;
        Ok(layout.in_bricks(driver))
    }

    /// Bytes of a matrix on the device: codes, and scales.
    pub fn bytes(&self) -> [u64; 2] {
        [self.code_bytes(self.rows), 4 * self.scales(self.rows) as u64]
    }

    /// How many matrices a slab can hold: codes and scales are a buffer each.
    pub fn in_a_slab(&self, buffer_bytes: u64) -> usize {
        let [codes, scales] = self.bytes();
        (buffer_bytes / codes.max(scales).max(4)).max(1) as usize
    }
}

impl<D: Driver> ExpertMatrices<D> {
    /// Uploads one projection of all experts of a layer; a format that no kernel reads is refused by name.
    pub fn upload(device: &Device<D>, source: &dyn ExpertSource, projection: Projection) -> Result<ExpertMatrices<D>> {
        let mut of_layout: Vec<(Layout, Vec<usize>)> = Vec::new();
        for expert in 0..source.count() {
            let layout = Layout::of_expert(device.driver(), source, expert, projection)?;
            match of_layout.iter_mut().find(|(of, _)| *of == layout) {
                Some((_, experts)) => experts.push(expert),
                None => of_layout.push((layout, vec![expert])),
            }
        }
        let mut slabs = Vec::new();
        for (layout, experts) in &of_layout {
            for experts in experts.chunks(layout.in_a_slab(device.driver().limits().buffer_bytes)) {
                slabs.push(Slab::upload(device, source, projection, *layout, experts)?);
            }
        }
        Ok(ExpertMatrices { rows: of_layout.first().map_or(0, |(layout, _)| layout.rows), slabs })
    }
}

/// Each of some things once, in the order in which they come first.
pub(super) fn each_once<T: PartialEq>(things: impl Iterator<Item = T>) -> Vec<T> {
    let mut once = Vec::new();
    for thing in things {
        if !once.contains(&thing) {
            once.push(thing);
        }
    }
    once
}

/// Values as they lie in memory.
fn bytes_of(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; 4 * values.len()];
    bytes.as_chunks_mut().0.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
    bytes
}

/// Words as they lie in memory.
pub(super) fn words_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
