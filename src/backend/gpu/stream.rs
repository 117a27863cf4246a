//! Products on tensor cores with weights in bricks: `kernels/cuda/stream.cuh`.
//!
//! A range is an eighth of the bricks side by side. With few rows of x, whose terms fit in shared memory, one kernel does all;
//! with more, or larger ones, one leaves the sums of each range and a second adds them up; with many, groups take as many as they
//! have registers for. Whichever it is, the bits are the same.

use super::bricks;
use super::driver::Driver;
use super::kernels::{Kernel, Name, THREADS};
use super::moe::Groups;
use super::rows::Rows;
use super::weight::{Layout, Slab, Weight};
use super::{Gpu, LAUNCH_TERMS, SCRATCH_BYTES};
use crate::backend::Mode;
use crate::error::Result;

/// Ranges of columns that are added up apart: kernels/cuda/stream.cuh, SLOTS.
const SLOTS: usize = 8;
/// Warps of a group.
const WARPS: usize = 8;
/// Columns whose part of x is in shared memory at a time, with many rows: kernels/cuda/stream.cuh, STAGED_BRICKS.
const STAGED_COLUMNS: usize = 2 * bricks::COLUMNS;
/// Bytes of shared memory with which two groups run on a multiprocessor.
const SHARED_BYTES: usize = 100 << 10;
/// Bytes of x in shared memory up to which one kernel does all: with more, groups of threads have less to themselves than of ranges.
const WHOLE_BYTES: usize = 76 << 10;
/// Rows of x from which on they are many.
pub(super) const MANY_ROWS: usize = 17;

/// The kernels of a mode, of a weight or of experts.
struct Family {
    whole: Name,
    /// The same for few outputs; of experts there are many.
    narrow: Option<Name>,
    ranges: Name,
    tile: Name,
    /// bf16 terms of a value of x.
    terms: usize,
}

impl Family {
    fn of(mode: Mode, experts: bool) -> Family {
        let (whole, ranges, tile) = match (mode, experts) {
            (Mode::Exact, false) => (Name::Stream, Name::StreamRanges, Name::StreamTile),
            (Mode::Exact, true) => (Name::StreamExperts, Name::StreamExpertsRanges, Name::StreamExpertsTile),
            (Mode::Fast, false) => (Name::Fast, Name::FastRanges, Name::FastTile),
            (Mode::Fast, true) => (Name::FastExperts, Name::FastExpertsRanges, Name::FastExpertsTile),
        };
        let (narrow, terms) = match mode {
            Mode::Exact => (Name::StreamNarrow, 3),
            Mode::Fast => (Name::FastNarrow, 1),
        };
        Family { whole, narrow: (!experts).then_some(narrow), ranges, tile, terms }
    }

    /// Shared memory for so many columns of so many rows of x.
    fn bytes(&self, columns: usize, rows: usize) -> usize {
        // An odd number of columns of b: kernels/cuda/stream.cuh, step_of.
        2 * columns * ((self.terms * rows) | 1)
    }
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plan {
    kernel: Kernel,
    /// Rows of x that a group takes.
    rows: usize,
    /// Ranges whose sums are left; 0 if none are.
    ranges: usize,
    /// Pieces of work, of one matrix for those rows.
    pieces: usize,
    /// Shared memory of a group.
    shared_bytes: usize,
}

impl Plan {
    /// For so many rows of x, which is all that there may be for a matrix.
    fn of(family: &Family, layout: &Layout, rows: usize, device: &impl Driver) -> Result<Plan> {
        let bricks = layout.bricks.expect("a matrix in bricks");
        let limit = device.limits().shared_bytes as usize;
        let plan = |name: Name, rows: u32, ranges: usize, outputs: usize, shared_bytes: usize| {
            let kernel = Kernel { name, coding: Some(layout.coding), rows: Some(rows) };
            let pieces = layout.rows.div_ceil(outputs) * ranges.max(1);
            Plan { kernel, rows: rows as usize, ranges, pieces, shared_bytes }
        };
        let most = family.tile.tiles()[0];
        let warp_outputs = 2 * bricks::ROWS;
        // Results of all warps, each of a column of b a row; sums of ranges; x.
        let results = 4 * WARPS * warp_outputs * (family.terms * most as usize + 1);
        let tile_bytes = results
            + 4 * WARPS * warp_outputs * most as usize
            + family.bytes(STAGED_COLUMNS.min(bricks.across * bricks::COLUMNS), most as usize);
        let tile = plan(family.tile, most, 0, WARPS * warp_outputs, tile_bytes);
        if rows >= MANY_ROWS && tile_bytes <= limit && device.has(tile.kernel) {
            return Ok(tile);
        }
        let limit = limit.min(SHARED_BYTES);
        let few = family.whole.tiles()[0];
        let whole_bytes = family.bytes(bricks.across * bricks::COLUMNS, rows.min(few as usize));
        if rows <= few as usize && whole_bytes <= WHOLE_BYTES {
            if let Some(narrow) = family.narrow {
                let plan = plan(narrow, few, 0, bricks::ROWS, whole_bytes);
                if plan.pieces <= device.resident(plan.kernel, whole_bytes as u32)? as usize {
                    return Ok(plan);
                }
            }
            return Ok(plan(family.whole, few, 0, warp_outputs, whole_bytes));
        }
        let of_range = bricks.across.div_ceil(SLOTS);
        let bytes = |taken: u32| family.bytes(of_range * bricks::COLUMNS, rows.min(taken as usize));
        let mut taken = family.ranges.tiles().iter().copied().filter(|&taken| bytes(taken) <= limit);
        // As few as are enough, or as many as there is room for.
        let taken = taken.clone().find(|&taken| taken as usize >= rows).or_else(|| taken.next_back()).unwrap_or(few);
        // Groups of eight rows have half of the outputs, for their registers' sake.
        let outputs = if family.terms == 3 && taken == 8 { WARPS * bricks::ROWS } else { WARPS * warp_outputs };
        Ok(plan(family.ranges, taken, bricks.across.div_ceil(of_range), outputs, bytes(taken)))
    }

    /// Rows whose sums of ranges are left at a time.
    fn step(&self, outputs: usize) -> usize {
        match 4 * self.ranges * outputs {
            0 => usize::MAX,
            bytes => (SCRATCH_BYTES / bytes).max(1).next_multiple_of(self.rows),
        }
    }
}

impl<D: Driver> Gpu<D> {
    /// x [n, I] · weightᵀ → [n, O], of a weight in bricks.
    pub(super) fn stream(&self, weight: &Weight<D>, x: &Rows<D>) -> Result<Rows<D>> {
        let out = self.rows(x.rows, weight.layout.rows)?;
        self.stream_into(weight, x, [&out, &out])?;
        Ok(out)
    }

    /// The same of two weights that are one above the other, in one part: the first has so many of the outputs.
    pub(super) fn stream_pair(&self, weight: &Weight<D>, first: usize, x: &Rows<D>) -> Result<[Rows<D>; 2]> {
        assert_eq!(weight.parts.len(), 1, "parts of a pair");
        let out = [self.rows(x.rows, first)?, self.rows(x.rows, weight.layout.rows - first)?];
        self.stream_into(weight, x, out.each_ref())?;
        Ok(out)
    }

    /// The first outputs of all parts into the first of these, which may have all; those that follow into the second.
    fn stream_into(&self, weight: &Weight<D>, x: &Rows<D>, [out, second]: [&Rows<D>; 2]) -> Result<()> {
        let layout = &weight.layout;
        assert_eq!(x.width, layout.columns, "width of a product");
        let family = Family::of(self.mode, false);
        let most = (LAUNCH_TERMS / (layout.rows * layout.columns).max(1)).max(1);
        for part in &weight.parts {
            let outputs = part.rows.len();
            let plan = Plan::of(&family, &Layout { rows: outputs, ..*layout }, x.rows, self.device.driver())?;
            let step = most.next_multiple_of(plan.rows).min(plan.step(outputs));
            for first in (0..x.rows).step_by(step) {
                let count = x.rows.min(first + step);
                let partial = match plan.ranges {
                    0 => None,
                    ranges => Some(self.device.values(ranges * (count - first) * outputs)?),
                };
                let to = partial.as_ref().map_or(out.buffer(), |partial| partial.buffer());
                let pieces = plan.pieces * (count - first).div_ceil(plan.rows);
                let constants = [
                    layout.columns,
                    layout.row_scales,
                    outputs,
                    first,
                    count,
                    x.width,
                    out.width,
                    part.rows.start,
                    out.width.min(outputs),
                    1, // weights do not change while kernels run
                ];
                let buffers = [part.codes(), part.scales(), x.buffer(), to, second.buffer()];
                self.launch_pieces(&plan, pieces, &buffers, &constants)?;
                if let Some(partial) = &partial {
                    let split = out.width.min(outputs);
                    let constants = [plan.ranges, count - first, outputs, out.width, part.rows.start, first, split];
                    self.device.launch(
                        Kernel::plain(Name::SumRanges),
                        [outputs.div_ceil(THREADS as usize), count - first, 1],
                        &[partial.buffer(), out.buffer(), second.buffer()],
                        &constants.map(|value| value as u32),
                    )?;
                }
            }
        }
        Ok(())
    }

    /// Projections, one or two that stand alike, of the chosen experts that are in these slabs: each into its slots. `ahead`: see
    /// `of_experts`.
    pub(super) fn stream_experts(
        &self,
        sides: &[(&Slab<D>, &Rows<D>)],
        x: &Rows<D>,
        groups: &Groups<D>,
        divisor: usize,
        ahead: bool,
    ) -> Result<()> {
        let [(slab, out), (second, second_out)] = [sides[0], sides[sides.len() - 1]];
        let layout = &slab.layout;
        let bricks = layout.bricks.expect("experts in bricks");
        let plan = Plan::of(&Family::of(self.mode, true), layout, groups.rows, self.device.driver())?;
        let [codes, scales, places] = slab.buffers();
        let [second_codes, second_scales, _] = second.buffers();
        let partial = match plan.ranges {
            0 => None,
            ranges => Some(self.device.values(sides.len() * ranges * out.rows * layout.rows)?),
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
            sides.len(),
            // What says which experts were chosen may be written by the kernel before.
            ahead.into(),
        ];
        let (words, second_to) = (groups.words.buffer(), second_out.buffer());
        let buffers = [codes, scales, x.buffer(), to, words, places, second_codes, second_scales, second_to];
        let pieces = plan.pieces * turns * sides.len();
        self.launch_pieces(&plan, pieces, &buffers, &constants)?;
        if let Some(partial) = &partial {
            let constants = [plan.ranges, out.rows, layout.rows, groups.most];
            self.device.launch(
                Kernel::plain(Name::SumExpertsRanges),
                [layout.rows.div_ceil(THREADS as usize), groups.most, sides.len()],
                &[partial.buffer(), out.buffer(), second_to, words, places],
                &constants.map(|value| value as u32),
            )?;
        }
        Ok(())
    }

    /// Rows of which one launch of this layout's experts, of which each row chose so many, leaves no more sums of ranges than there
    /// is room for.
    pub(super) fn scratch_rows(&self, layout: &Layout, chosen: usize) -> Result<usize> {
        let family = Family::of(self.mode, true);
        let many = Plan::of(&family, layout, MANY_ROWS, self.device.driver())?;
        Ok(match many.ranges {
            0 => usize::MAX,
            // Of two projections at the same time.
            ranges => (SCRATCH_BYTES / (2 * 4 * ranges * chosen * layout.rows).max(1)).max(1),
        })
    }

    /// Starts a kernel whose groups share their work: as many as run at the same time, and no more than there are pieces.
    fn launch_pieces(&self, plan: &Plan, pieces: usize, buffers: &[&D::Buffer], constants: &[usize]) -> Result<()> {
        let shared_bytes = plan.shared_bytes as u32;
        let resident = self.device.driver().resident(plan.kernel, shared_bytes)? as usize;
        let constants: Vec<u32> = constants.iter().map(|&value| value as u32).collect();
        self.device.launch_with(plan.kernel, [pieces.min(resident), 1, 1], buffers, &constants, shared_bytes)
    }
}
