//! Weights in parts: whatever rows a part begins with, its scales are those of these rows, and every bit is as if all were one.

use std::sync::atomic::{AtomicU64, Ordering};

use super::driver::{DeviceMemory, Driver, Elapsed, Launch, Limits, forward_to_driver};
use super::kernels::Coding;
use super::weight::Layout;
use super::*;
use crate::backend::samples::{Made, matrix, numbers};
use crate::format::Format;

/// A driver whose buffers are small while weights are uploaded.
#[derive(Debug)]
struct Small<D: Driver> {
    driver: D,
    limit: AtomicU64,
}

impl<D: Driver> Driver for Small<D> {
    forward_to_driver!();

    fn limits(&self) -> Limits {
        let limits = self.driver.limits();
        Limits { buffer_bytes: limits.buffer_bytes.min(self.limit.load(Ordering::Relaxed)), ..limits }
    }

    fn allocate(&self, bytes: u64, purpose: &str) -> Result<D::Buffer> {
        self.driver.allocate(bytes, purpose)
    }
}

/// Groups that are whole, and that the last columns leave ragged; scales for groups and for blocks.
const FORMATS: [Format; 5] = [
    Format::Int4Grouped { group_size: 32 },
    Format::Int4Grouped { group_size: 64 },
    Format::Int4Grouped { group_size: 128 },
    Format::Int3G64,
    Format::Fp8E4m3B128,
];

/// Bytes of so many rows of a weight, codes or scales, whichever are more: as many rows are in a part as go into a buffer.
fn bytes_of_rows(layout: &Layout, rows: usize) -> u64 {
    layout.code_bytes(rows).max(4 * layout.scales(rows) as u64)
}

impl<D: Driver> Gpu<Small<D>> {
    /// With buffers of that many bytes for what is uploaded meanwhile.
    fn within<T>(&self, bytes: u64, upload: impl FnOnce(&Self) -> T) -> T {
        self.device.driver().limit.store(bytes, Ordering::Relaxed);
        let uploaded = upload(self);
        self.device.driver().limit.store(u64::MAX, Ordering::Relaxed);
        uploaded
    }
}

/// Products with one row, and with several.
fn products<D: Driver>(gpu: &Gpu<Small<D>>, weight: &Weight<Small<D>>) -> Vec<f32> {
    let columns = weight.layout.columns;
    let product = |n: usize| {
        let x = gpu.write(&numbers(3, n * columns), columns).unwrap();
        gpu.read(&gpu.matmul(weight, &x).unwrap()).unwrap()
    };
    [product(1), product(3), product(20)].concat()
}

/// What of a weight takes part in a product with one row and with several, as a table, and as K and V of heads.
fn of_weight<D: Driver>(gpu: &Gpu<Small<D>>, weight: &Weight<Small<D>>) -> Vec<u32> {
    let (rows, columns) = (weight.layout.rows, weight.layout.columns);
    let read = |rows: Rows<Small<D>>| gpu.read(&rows).unwrap();
    let ids: Vec<u32> = (0..rows as u32).collect();
    let mut all = [products(gpu, weight), read(gpu.embed(weight, &ids).unwrap())].concat();
    // Heads of 9 rows, 5 of K and 4 of V.
    let mla = Mla { heads: rows / 9, nope: 5, rope: 2, value: 4, latent: columns };
    let fresh = |width, seed| gpu.write(&numbers(seed, 6 * width), width).unwrap();
    let mut cache = gpu.cache(columns + 2).unwrap();
    gpu.append(&mut cache, &fresh(columns + 2, 4)).unwrap();
    let q = gpu.slice(&fresh(mla.heads * 7, 5), 4..6, 0..mla.heads * 7).unwrap();
    all.extend(read(gpu.attention(&mla, &q, weight, &cache, &Places::after(4, 2), None).unwrap()));
    all.into_iter().map(f32::to_bits).collect()
}

/// Splits weights and grouped experts at every boundary that parts can have.
pub(in crate::backend) fn every_split<D: Driver>(driver: D) {
    let gpu = Gpu::new(Small { driver, limit: AtomicU64::new(u64::MAX) }, None);
    for format in FORMATS {
        let blocks = Coding::of(format) == Some(Coding::Fp8E4m3B128);
        // Rows of nine heads; of fp8 as many as three blocks hold and a few.
        let (rows, step) = if blocks { (387, 128) } else { (27, 1) };
        for columns in [64, 70, 200] {
            let matrix = matrix(format, rows, columns, columns as u64);
            let layout = Layout::new("test", "w", rows, columns, format).unwrap();
            let whole = of_weight(&gpu, &gpu.upload("w", matrix.clone()).unwrap());
            for part in (step..rows).step_by(step) {
                let bytes = bytes_of_rows(&layout, part);
                let weight = gpu.within(bytes, |gpu| gpu.upload("w", matrix.clone()).unwrap());
                assert_eq!(weight.parts.len(), rows.div_ceil(part), "{format} {columns} {part}");
                assert!(weight.parts.iter().all(|found| found.rows.start % part == 0));
                assert!(of_weight(&gpu, &weight) == whole, "{format}, {columns} columns, parts of {part} rows");
            }
            in_bricks(&gpu, &matrix, layout.in_bricks(gpu.device.driver()));
        }
        let layouts =
            [(70, 40), (40, 70)].map(|(rows, columns)| Layout::new("test", "e", rows, columns, format).unwrap());
        let layouts = layouts.map(|layout| layout.in_bricks(gpu.device.driver()));
        let largest = layouts.map(|layout| layout.code_bytes(layout.rows).max(4 * layout.scales(layout.rows) as u64));
        let largest = largest.into_iter().max().unwrap();
        let whole = of_experts(&gpu, &gpu.upload_experts(&Made::six(format)).unwrap());
        for together in 1..6 {
            let experts = gpu.within(together * largest, |gpu| gpu.upload_experts(&Made::six(format)).unwrap());
            assert!(of_experts(&gpu, &experts) == whole, "{format}, {together} experts together");
        }
    }
}

/// Splits a weight of which only products are wanted, if it is in bricks on the device: then between tiles.
fn in_bricks<D: Driver>(gpu: &Gpu<Small<D>>, matrix: &crate::weights::Matrix, layout: Layout) {
    if layout.bricks.is_none() {
        return;
    }
    let bits =
        |weight: &Weight<Small<D>>| -> Vec<u32> { products(gpu, weight).into_iter().map(f32::to_bits).collect() };
    let whole = gpu.upload_linear("w", matrix.clone()).unwrap();
    assert!(whole.layout.bricks.is_some() && whole.parts.len() == 1);
    let whole = bits(&whole);
    let step = if layout.coding == Coding::Fp8E4m3B128 { 128 } else { 16 };
    for part in (step..layout.rows).step_by(step) {
        let weight = gpu.within(bytes_of_rows(&layout, part), |gpu| gpu.upload_linear("w", matrix.clone()).unwrap());
        assert_eq!(weight.parts.len(), layout.rows.div_ceil(part), "{} {part}", layout.format);
        assert!(bits(&weight) == whole, "{}, bricks, parts of {part} rows", layout.format);
    }
}

/// Rows through the experts that they choose, one by one and together.
fn of_experts<D: Driver>(gpu: &Gpu<Small<D>>, experts: &Experts<Small<D>>) -> Vec<u32> {
    let gate = gpu.upload("gate", matrix(Format::F32, 6, 40, 50)).unwrap();
    let bias = gpu.upload("bias", matrix(Format::F32, 6, 1, 51)).unwrap();
    let routing = Routing { chosen: 2, groups: 1, chosen_groups: 1, normalized: true, factor: 2.5 };
    let through = |rows: Range<usize>| {
        let x = gpu.write(&numbers(52, 12 * 40)[40 * rows.start..40 * rows.end], 40).unwrap();
        let choice = gpu.route(&routing, &gate, &bias, &x).unwrap();
        gpu.read(&gpu.experts(experts, &choice, &x).unwrap()).unwrap()
    };
    let together = through(0..12);
    let alone: Vec<f32> = (0..12).flat_map(|row| through(row..row + 1)).collect();
    assert_eq!(together, alone);
    together.into_iter().map(f32::to_bits).collect()
}
