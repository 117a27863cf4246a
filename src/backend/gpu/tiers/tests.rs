//! Experts in tiers against experts that are all on the device, bit for bit: for any API.

use super::*;
use crate::backend::gpu::Gpu;
use crate::backend::gpu::driver::{DeviceMemory, Elapsed, Launch, Limits, forward_to_driver};
use crate::backend::gpu::kernels::Kernel;
use crate::backend::samples::{matrix, numbers};
use crate::backend::{Backend, Routing};
use crate::error::{Fault, FaultKind, Place};
use crate::format::Format;

/// A device of which less is to be had.
#[derive(Debug)]
struct Limited<D> {
    driver: D,
    buffer_bytes: u64,
    /// Bytes of the largest piece of memory that there is.
    largest: u64,
}

impl<D: Driver> Driver for Limited<D> {
    forward_to_driver!();

    fn limits(&self) -> Limits {
        Limits { buffer_bytes: self.buffer_bytes, ..self.driver.limits() }
    }

    fn allocate(&self, bytes: u64, purpose: &str) -> Result<D::Buffer> {
        if bytes > self.largest {
            let (device, purpose) = (self.device(), purpose.to_owned());
            let kind = FaultKind::GpuMemory { device, purpose, wanted: bytes, free: self.largest, total: 1 << 30 };
            return Err(Fault::new(Place::default(), kind));
        }
        self.driver.allocate(bytes, purpose)
    }
}

/// Output features of gate and up, and their inputs.
const SHAPE: (usize, usize) = (200, 96);
/// Experts of a layer.
const EXPERTS: usize = 6;

/// A layer whose experts have these formats in turn.
struct Made(u64, &'static [Format]);

impl ExpertSource for Made {
    fn layer(&self) -> u64 {
        self.0
    }

    fn count(&self) -> usize {
        EXPERTS
    }

    fn name(&self, expert: usize, projection: Projection) -> String {
        format!("layer {} expert {expert} {}", self.0, projection.name())
    }

    fn load(&self, expert: usize, projection: Projection) -> Result<Matrix> {
        let format = self.1[expert % self.1.len()];
        let seed = 100 * self.0 + 3 * expert as u64 + projection as u64;
        let (rows, columns) = if projection == Projection::Down { (SHAPE.1, SHAPE.0) } else { SHAPE };
        Ok(matrix(format, rows, columns, seed))
    }
}

/// What two layers give for some rows, of several batches one after the other, bit for bit.
fn said<D: Driver>(gpu: &Gpu<D>, formats: &'static [Format], announced: bool) -> Vec<u32> {
    let layers = [1, 2].map(|layer| gpu.upload_experts(&Made(layer, formats)).unwrap());
    let gate = gpu.upload("gate", matrix(Format::F32, EXPERTS, SHAPE.1, 50)).unwrap();
    let bias = gpu.upload("bias", matrix(Format::F32, EXPERTS, 1, 51)).unwrap();
    let routing = Routing { chosen: 2, groups: 1, chosen_groups: 1, normalized: true, factor: 2.5 };
    let mut bits = Vec::new();
    for (seed, rows) in [(1, 1), (2, 4), (3, 1), (4, 3), (5, 2)] {
        let mut x = gpu.write(&numbers(seed, rows * SHAPE.1), SHAPE.1).unwrap();
        for (layer, next) in layers.iter().zip(layers.iter().cycle().skip(1)) {
            let choice = gpu.route(&routing, &gate, &bias, &x).unwrap();
            if announced {
                gpu.announce(layer, &choice).unwrap();
                gpu.read_ahead(next, &|| gpu.route(&routing, &gate, &bias, &x)).unwrap();
            }
            x = gpu.experts(layer, &choice, &x).unwrap();
        }
        bits.extend(gpu.read(&x).unwrap().into_iter().map(f32::to_bits));
    }
    assert!(bits.iter().all(|&bits| f32::from_bits(bits).is_finite()));
    bits
}

fn layouts(driver: &impl Driver, format: Format) -> Class {
    let (rows, columns) = SHAPE;
    let layout = |rows, columns| Layout::new("test", "w", rows, columns, format).unwrap().in_bricks(driver);
    [layout(rows, columns), layout(rows, columns), layout(columns, rows)]
}

fn options(device_bytes: u64) -> Options {
    Options { device_bytes, fewer: false, host: experts::Options::within(1 << 30) }
}

/// The same bits with room for one expert, a few, and all of them, on shelves of one, two and three.
pub(in crate::backend) fn same_bits<D: Driver>(open: impl Fn() -> D) {
    const GROUPED: Format = Format::Int4Grouped { group_size: 32 };
    const FORMATS: [&[Format]; 6] = [
        &[GROUPED],
        &[Format::Int3G64],
        &[Format::Fp8E4m3B128],
        &[Format::Int4Row],
        &[Format::F32],
        &[GROUPED, Format::Int8Row],
    ];
    for formats in FORMATS {
        let gpu = Gpu::new(open(), None);
        let whole = said(&gpu, formats, true);
        assert_eq!((gpu.device_expert_counters(), gpu.expert_counters()), (None, None));
        let layouts = |format| layouts(gpu.gpu().driver(), format);
        let bytes: u64 = formats.iter().map(|&format| shelf::class_bytes(&layouts(format))).sum();
        let largest = formats.iter().flat_map(|&format| layouts(format)).flat_map(|layout| layout.bytes());
        let largest = largest.max().unwrap();
        for (room, on_a_shelf) in [(1, 1), (2, 1), (3, 2), (5, 2), (5, 3), (2 * EXPERTS as u64, 3)] {
            let driver = Limited { driver: open(), buffer_bytes: on_a_shelf * largest, largest: u64::MAX };
            let gpu = Gpu::new(driver, None).in_tiers(Some(options(room * bytes)));
            let what = format!("{formats:?}, room for {room}, {on_a_shelf} on a shelf");
            assert!(said(&gpu, formats, on_a_shelf > 1) == whole, "{what}");
            let counters = gpu.device_expert_counters().unwrap();
            let all = room * formats.len() as u64 >= 2 * EXPERTS as u64;
            assert!(
                if all { counters.evictions == 0 } else { room > 2 || counters.evictions > 0 },
                "{what}: {counters:?}"
            );
            assert!(counters.budget_bytes <= room * bytes && counters.budget_bytes > 0, "{what}: {counters:?}");
            assert_eq!(counters.uploads, counters.requests - counters.hits, "{what}: {counters:?}");
            assert!(counters.bytes_uploaded >= counters.uploads * bytes / formats.len() as u64 / 8, "{what}");
            assert!(!all || counters.uploads <= 2 * EXPERTS as u64, "{what}: {counters:?}");
        }
        // Scales of all of a layer, too, at the boundaries of slabs.
        for on_a_slab in 1..4 {
            let driver = Limited { driver: open(), buffer_bytes: on_a_slab * largest, largest: u64::MAX };
            assert!(said(&Gpu::new(driver, None), formats, false) == whole, "{formats:?}, {on_a_slab} on a slab");
        }
    }
}

/// Batches of no more slots than a launch may have; experts that are there come first.
pub(in crate::backend) fn batches<D: Driver>(open: impl Fn() -> D) {
    const FORMAT: &[Format] = &[Format::Int4Row];
    let bytes = shelf::class_bytes(&layouts(&open(), FORMAT[0]));
    let tiers = Arc::new(Tiers::new(Device::new(open(), None), options(4 * bytes)));
    let layer = tiers.add_layer(&Made(1, FORMAT)).unwrap();
    let sizes = |wanted: &[(usize, usize)], most_slots: usize| {
        let mut pass = layer.pass(wanted, most_slots).unwrap();
        let (mut uploads, mut sizes) = (pass.inner.state.counters.uploads, Vec::new());
        while let Some(batch) = pass.next().unwrap() {
            assert_eq!(pass.slabs(&batch, Projection::Up).len(), 1);
            let now = pass.inner.state.counters.uploads;
            sizes.push((pass.missing.len() + pass.resident.len(), now - uploads));
            uploads = now;
        }
        sizes
    };
    // What is left after each batch, and what came with it.
    assert_eq!(sizes(&[(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)], 100), [(1, 4), (0, 1)]);
    assert_eq!(sizes(&[(4, 1)], 100), [(0, 0)]);
    assert_eq!(sizes(&[(0, 3), (4, 2), (5, 9)], 4), [(2, 0), (1, 1), (0, 1)]);
    assert_eq!(sizes(&[], 4), []);
    let counters = tiers.counters();
    assert_eq!((counters.requests, counters.hits, counters.budget_bytes), (9, 2, 4 * bytes));
    drop(layer);
    assert!(!tiers.inner().state.slots_are_used());
}

/// Too little memory: told with sizes, or made do with.
pub(in crate::backend) fn too_little<D: Driver>(open: impl Fn() -> D) {
    const FORMAT: &[Format] = &[Format::Int8Row];
    let class = layouts(&open(), FORMAT[0]);
    let bytes = shelf::class_bytes(&class);
    let begin = |driver, options| {
        let tiers = Arc::new(Tiers::new(Device::new(driver, None), options));
        let layer = tiers.add_layer(&Made(1, FORMAT)).unwrap();
        let begun = layer.pass(&[(0, 1)], 1).map(drop).map_err(|fault| fault.to_string());
        (begun, tiers.counters().budget_bytes)
    };
    let device = open().device();
    let limited = |largest| Limited { driver: open(), buffer_bytes: 1 << 20, largest };
    let (refused, _) = begin(limited(u64::MAX), options(bytes - 1));
    let expected = format!(
        "{device}: routed experts need at least {bytes} bytes of the GPU's memory, for one at a time; {} are left for them",
        bytes - 1
    );
    assert_eq!(refused.unwrap_err(), expected);
    // The device has no piece of memory for more than two.
    let codes = class[0].bytes()[0];
    let largest = class.iter().map(|layout| layout.bytes()[0]).max().unwrap();
    let (refused, _) = begin(limited(2 * largest), options(5 * bytes));
    let expected = format!(
        "{device}: no memory for 5 of the routed experts: {} bytes are wanted, {} of 1073741824 are free",
        5 * codes,
        2 * largest
    );
    assert_eq!(refused.unwrap_err(), expected);
    let fewer = Options { fewer: true, ..options(5 * bytes) };
    assert_eq!(begin(limited(2 * largest), fewer), (Ok(()), 2 * bytes));
    assert_eq!(begin(limited(largest), fewer), (Ok(()), bytes));
    let (refused, _) = begin(limited(codes - 4), fewer);
    let expected = format!("{device}: no memory for 1 of the routed experts: {codes} bytes are wanted");
    assert!(refused.as_ref().is_err_and(|message| message.starts_with(&expected)), "{refused:?}");
}
