//! Products on tensor cores with weights in bricks: `kernels/cuda/stream.cuh`.
//!
//! A range is an eighth of the bricks side by side. With a row of x or two, whose terms fit in shared memory, one kernel does
//! all; otherwise one leaves the sums of each range, and a second adds them up. Either way the bits are the same.

use super::bricks::{self, Bricks};
use super::device::Manner;
use super::driver::Driver;
use super::kernels::{Kernel, Name, RANGES_ROWS, STREAM_ROWS, THREADS};
use super::moe::Groups;
use super::rows::Rows;
use super::weight::{Slab, Weight};
use super::{Gpu, LAUNCH_TERMS, SCRATCH_BYTES};
use crate::error::Result;

/// Ranges of columns that are added up apart: kernels/cuda/stream.cuh, SLOTS.
const SLOTS: usize = 8;
/// Warps of a group.
const WARPS: usize = 8;
/// Bytes of a column of a row of x: three terms of two.
const COLUMN_BYTES: usize = 6;
/// Bytes of shared memory with which two groups run on a multiprocessor.
const SHARED_BYTES: usize = 100 << 10;

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plan {
    /// Rows of x that a group takes.
    rows: usize,
    /// Ranges whose sums are left; one if none are.
    ranges: usize,
    /// Outputs that a group takes.
    outputs: usize,
    /// Shared memory of a group.
    shared_bytes: usize,
}

impl Plan {
    /// For so many rows of x, with `limit` bytes of shared memory.
    fn of(bricks: &Bricks, rows: usize, limit: usize) -> Plan {
        let limit = limit.min(SHARED_BYTES);
        let whole = bricks.across * bricks::COLUMNS * COLUMN_BYTES;
        let few = rows.clamp(1, STREAM_ROWS as usize);
        if rows <= few && whole * few <= limit {
            return Plan { rows: few, ranges: 1, outputs: 2 * bricks::ROWS, shared_bytes: whole * few };
        }
        let of_range = bricks.across.div_ceil(SLOTS);
        let bytes = |rows: u32| of_range * bricks::COLUMNS * COLUMN_BYTES * rows as usize;
        let [least, most] = RANGES_ROWS;
        let taken = if rows > least as usize && bytes(most) <= limit { most } else { least };
        let tiles = if taken == most { 1 } else { 2 };
        Plan {
            rows: taken as usize,
            ranges: bricks.across.div_ceil(of_range),
            outputs: tiles * bricks::ROWS * WARPS,
            shared_bytes: bytes(taken),
        }
    }

    /// The kernel: one of those that leave nothing, or of those that leave sums.
    fn kernel(&self, [whole, ranges]: [Name; 2], layout: &super::weight::Layout) -> Kernel {
        let coding = Some(layout.coding);
        match self.ranges {
            1 if self.outputs == 2 * bricks::ROWS => Kernel { name: whole, coding, rows: None },
            _ => Kernel { name: ranges, coding, rows: Some(self.rows as u32) },
        }
    }

    /// Whether sums of ranges are left.
    fn leaves_ranges(&self) -> bool {
        self.outputs != 2 * bricks::ROWS
    }

    /// Rows whose sums of ranges are left at a time.
    fn step(&self, outputs: usize) -> usize {
        let bytes = 4 * self.ranges * outputs;
        (SCRATCH_BYTES / bytes.max(1)).max(1).next_multiple_of(self.rows)
    }
}

impl<D: Driver> Gpu<D> {
    /// x [n, I] · weightᵀ → [n, O], of a weight in bricks.
    pub(super) fn stream(&self, weight: &Weight<D>, x: &Rows<D>) -> Result<Rows<D>> {
        let layout = &weight.layout;
        let bricks = layout.bricks.expect("a weight in bricks");
        assert_eq!(x.width, layout.columns, "width of a product");
        let out = self.rows(x.rows, layout.rows)?;
        let plan = Plan::of(&bricks, x.rows, self.device.driver().limits().shared_bytes as usize);
        let kernel = plan.kernel([Name::Stream, Name::StreamRanges], layout);
        let most = (LAUNCH_TERMS / (layout.rows * layout.columns).max(1)).max(1).next_multiple_of(plan.rows);
        for part in &weight.parts {
            let outputs = part.rows.len();
            let step = if plan.leaves_ranges() { most.min(plan.step(outputs)) } else { most };
            for first in (0..x.rows).step_by(step) {
                let count = x.rows.min(first + step);
                let partial = match plan.leaves_ranges() {
                    true => Some(self.device.values(plan.ranges * (count - first) * outputs)?),
                    false => None,
                };
                let to = partial.as_ref().map_or(out.buffer(), |partial| partial.buffer());
                let pieces = outputs.div_ceil(plan.outputs) * plan.ranges * (count - first).div_ceil(plan.rows);
                let constants = [
                    layout.columns,
                    layout.row_scales,
                    outputs,
                    first,
                    count,
                    x.width,
                    out.width,
                    part.rows.start,
                    1, // weights do not change while kernels run
                ];
                let buffers = [part.codes(), part.scales(), x.buffer(), to];
                self.launch_pieces(kernel, pieces, &buffers, &constants, plan.shared_bytes)?;
                if let Some(partial) = &partial {
                    let constants = [plan.ranges, count - first, outputs, out.width, part.rows.start, first];
                    self.device.launch_with(
                        Kernel::plain(Name::SumRanges),
                        [outputs.div_ceil(THREADS as usize), count - first, 1],
                        &[partial.buffer(), out.buffer()],
                        &constants.map(|value| value as u32),
                        Manner { shared_bytes: 0, early: true },
                    )?;
                }
            }
        }
        Ok(out)
    }

    /// One projection of the chosen experts that are in this slab: into their slots of out.
    pub(super) fn stream_experts(
        &self,
        slab: &Slab<D>,
        x: &Rows<D>,
        out: &Rows<D>,
        groups: &Groups<D>,
        divisor: usize,
    ) -> Result<()> {
        let layout = &slab.layout;
        let bricks = layout.bricks.expect("experts in bricks");
        let plan = Plan::of(&bricks, groups.rows, self.device.driver().limits().shared_bytes as usize);
        let kernel = plan.kernel([Name::StreamExperts, Name::StreamExpertsRanges], layout);
        let [codes, scales, places] = slab.buffers();
        let partial = match plan.leaves_ranges() {
            true => Some(self.device.values(plan.ranges * out.rows * layout.rows)?),
            false => None,
        };
        let to = partial.as_ref().map_or(out.buffer(), |partial| partial.buffer());
        // An expert has at least one row, and its last rows may be few.
        let turns = groups.most.min(out.rows) + out.rows / plan.rows;
        let constants = [
            layout.columns,
            layout.row_scales,
            layout.rows,
            bricks.of_matrix(layout.rows),
            layout.scales(layout.rows),
            groups.most,
            divisor,
            out.rows,
            0, // which experts were chosen is written by the kernel before
        ];
        let words = groups.words.buffer();
        let buffers = [codes, scales, x.buffer(), to, words, places];
        let pieces = layout.rows.div_ceil(plan.outputs) * plan.ranges * turns;
        self.launch_pieces(kernel, pieces, &buffers, &constants, plan.shared_bytes)?;
        if let Some(partial) = &partial {
            let constants = [plan.ranges, out.rows, layout.rows, groups.most];
            self.device.launch_with(
                Kernel::plain(Name::SumExpertsRanges),
                [layout.rows.div_ceil(THREADS as usize), groups.most, 1],
                &[partial.buffer(), out.buffer(), words, places],
                &constants.map(|value| value as u32),
                Manner { shared_bytes: 0, early: true },
            )?;
        }
        Ok(())
    }

    /// Starts a kernel whose groups share their work: as many as run at the same time, and no more than there are pieces.
    fn launch_pieces(
        &self,
        kernel: Kernel,
        pieces: usize,
        buffers: &[&D::Buffer],
        constants: &[usize],
        shared_bytes: usize,
    ) -> Result<()> {
        let resident = self.device.driver().resident(kernel, shared_bytes as u32)? as usize;
        let constants: Vec<u32> = constants.iter().map(|&value| value as u32).collect();
        let manner = Manner { shared_bytes: shared_bytes as u32, early: true };
        self.device.launch_with(kernel, [pieces.min(resident), 1, 1], buffers, &constants, manner)
    }
}
