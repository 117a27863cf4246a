//! Products on tensor cores with weights in bricks: `kernels/cuda/stream.cuh`.
//!
//! A range is an eighth of the bricks side by side. With few rows of x, whose terms fit in shared memory, one kernel does all;
//! with more, or larger ones, one leaves the sums of each range and a second adds them up; with many, groups take as many as they
//! have registers for. On devices with wgmma products with many rows have kernels of their own, which read x as a kernel before has
//! rounded it (`kernels/cuda/wide.cuh`). Whichever it is, the bits are the same.

use std::ops::Range;

use super::bricks;
use super::device::Pooled;
use super::driver::Driver;
use super::kernels::{Coding, Kernel, Name, THREADS};
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
/// Bytes in which what the kernels for wgmma have of x in shared memory is aligned.
const ALIGNED_BYTES: usize = 1024;
/// Launches of kernels for wgmma may have so many times the products of others: the devices are as much faster.
const WIDE_LAUNCHES: usize = 16;

/// The kernels of a mode, of a weight or of experts.
struct Family {
    whole: Name,
    /// The same for few outputs; of experts there are many.
    narrow: Option<Name>,
    ranges: Name,
    tile: Name,
    /// With many rows on wgmma.
    wide: Name,
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
        let wide = match (mode, experts) {
            (Mode::Exact, false) => Name::StreamWide,
            (Mode::Exact, true) => Name::StreamExpertsWide,
            (Mode::Fast, false) => Name::FastWide,
            (Mode::Fast, true) => Name::FastExpertsWide,
        };
        Family { whole, narrow: (!experts).then_some(narrow), ranges, tile, wide, terms }
    }

    /// Bytes of a row of x as bf16 terms, of a matrix of so many bricks side by side.
    fn rounded_bytes(&self, across: usize) -> usize {
        2 * self.terms * across * bricks::COLUMNS
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
    /// Whether x is rounded before.
    rounded: bool,
}

impl Plan {
    /// For so many rows of x, which is all that there may be for a matrix, of which `likely` is what one has on average.
    fn of(family: &Family, layout: &Layout, rows: usize, likely: usize, device: &impl Driver) -> Result<Plan> {
        if rows >= MANY_ROWS
            && let Some(plan) = Plan::wide(family, layout, rows, likely, device)?
        {
            return Ok(plan);
        }
        let bricks = layout.bricks.expect("a matrix in bricks");
        let limit = device.limits().shared_bytes as usize;
        let plan = |name: Name, rows: u32, ranges: usize, outputs: usize, shared_bytes: usize| {
            let kernel = Kernel { name, coding: Some(layout.coding), rows: Some(rows) };
            let pieces = layout.rows.div_ceil(outputs) * ranges.max(1);
            Plan { kernel, rows: rows as usize, ranges, pieces, shared_bytes, rounded: false }
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

    /// With wgmma, if the device has it: kernels/cuda/wide.cuh.
    fn wide(
        family: &Family,
        layout: &Layout,
        rows: usize,
        likely: usize,
        device: &impl Driver,
    ) -> Result<Option<Plan>> {
        let across = layout.bricks.expect("a matrix in bricks").across;
        let pieces = layout.rows.div_ceil(WARPS * bricks::ROWS);
        let of = |rows: u32| {
            let kernel = Kernel { name: family.wide, coding: Some(layout.coding), rows: Some(rows) };
            // Two bricks of x, sums of ranges, what aligns x.
            let of_row = 2 * 2 * bricks::COLUMNS * family.terms + 4 * WARPS * bricks::ROWS;
            let shared_bytes = rows as usize * of_row + ALIGNED_BYTES;
            Plan { kernel, rows: rows as usize, ranges: 0, pieces, shared_bytes, rounded: true }
        };
        let tiles = family.wide.tiles();
        let most = tiles[tiles.len() - 1];
        let mut plan = of(tiles.iter().copied().find(|&taken| taken as usize >= likely).unwrap_or(most));
        if !device.has(plan.kernel) || plan.shared_bytes > device.limits().shared_bytes as usize {
            return Ok(None);
        }
        // Experts are many.
        if family.narrow.is_none() {
            return Ok(Some(plan));
        }
        let resident = device.resident(plan.kernel, plan.shared_bytes as u32)? as usize;
        let groups = |plan: &Plan| pieces * rows.div_ceil(plan.rows);
        // Where the device would not be full smaller groups are better, if decoding costs little.
        let cheap = matches!(layout.coding, Coding::Int4Row | Coding::Int4Grouped | Coding::Int2Row);
        if cheap && groups(&plan) < resident {
            plan = of(tiles[0]);
        }
        // Where less than half of it would be busy ranges are computed apart; ranges of a brick gain less.
        let busy = if across > SLOTS { resident / 2 } else { resident * 2 / 5 };
        if groups(&plan) <= busy {
            plan.ranges = across.div_ceil(across.div_ceil(SLOTS));
            plan.pieces *= plan.ranges;
        }
        Ok(Some(plan))
    }

    /// Rows that a launch takes at a time, of a matrix with so many outputs.
    fn step(&self, family: &Family, layout: &Layout, outputs: usize) -> usize {
        let across = layout.bricks.expect("a matrix in bricks").across;
        let terms = LAUNCH_TERMS * if self.rounded { WIDE_LAUNCHES } else { 1 };
        let step = (terms / (layout.rows * layout.columns).max(1)).max(1).next_multiple_of(self.rows);
        // Bytes that are left for the next launch: sums of ranges, x rounded.
        let sums = 4 * self.ranges * outputs;
        let rounded = if self.rounded { family.rounded_bytes(across) } else { 0 };
        match sums.max(rounded) {
            0 => step,
            bytes => step.min((SCRATCH_BYTES / bytes).max(1).next_multiple_of(self.rows)),
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
        for part in &weight.parts {
            let outputs = part.rows.len();
            let of_part = Layout { rows: outputs, ..*layout };
            let plan = Plan::of(&family, &of_part, x.rows, x.rows, self.device.driver())?;
            let step = plan.step(&family, layout, outputs);
            for first in (0..x.rows).step_by(step) {
                let count = x.rows.min(first + step);
                let partial = match plan.ranges {
                    0 => None,
                    ranges => Some(self.device.values(ranges * (count - first) * outputs)?),
                };
                let to = partial.as_ref().map_or(out.buffer(), |partial| partial.buffer());
                let pieces = plan.pieces * (count - first).div_ceil(plan.rows);
                let of_matrix = [layout.columns, layout.row_scales, outputs, first, count];
                let split = out.width.min(outputs);
                if plan.rounded {
                    let rounded = self.rounded(&family, layout, x, first..count)?;
                    let buffers = [part.codes(), part.scales(), rounded.buffer(), to, second.buffer()];
                    let of_out = [out.width, part.rows.start, split, plan.ranges];
                    self.launch_all(&plan, pieces, &buffers, &[&of_matrix[..], &of_out].concat())?;
                } else {
                    let buffers = [part.codes(), part.scales(), x.buffer(), to, second.buffer()];
                    // Weights do not change while kernels run.
                    let of_rows = [x.width, out.width, part.rows.start, split, 1];
                    self.launch_pieces(&plan, pieces, &buffers, &[&of_matrix[..], &of_rows].concat())?;
                }
                if let Some(partial) = &partial {
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
        let likely = out.rows.div_ceil(groups.most.max(1));
        let family = Family::of(self.mode, true);
        let plan = Plan::of(&family, layout, groups.rows, likely, self.device.driver())?;
        let [codes, scales, places] = slab.buffers();
        let [second_codes, second_scales, _] = second.buffers();
        let partial = match plan.ranges {
            0 => None,
            ranges => Some(self.device.values(sides.len() * ranges * out.rows * layout.rows)?),
        };
        let to = partial.as_ref().map_or(out.buffer(), |partial| partial.buffer());
        // An expert has at least one row, and its last rows may be few.
        let turns = groups.most.min(out.rows) + out.rows / plan.rows;
        let of_matrices = [
            layout.columns,
            layout.row_scales,
            layout.rows,
            bricks.of_matrix(layout.rows),
            layout.scales(layout.rows),
            groups.most,
            divisor,
        ];
        let (words, second_to) = (groups.words.buffer(), second_out.buffer());
        if plan.rounded {
            let rounded = self.rounded(&family, layout, x, 0..x.rows)?;
            for (slab, out) in sides {
                let [codes, scales, places] = slab.buffers();
                let buffers = [codes, scales, rounded.buffer(), out.buffer(), words, places];
                self.launch_all(&plan, plan.pieces * turns, &buffers, &of_matrices)?;
            }
            return Ok(());
        }
        let buffers = [codes, scales, x.buffer(), to, words, places, second_codes, second_scales, second_to];
        let pieces = plan.pieces * turns * sides.len();
        // What says which experts were chosen may be written by the kernel before.
        let constants = [&of_matrices[..], &[out.rows, sides.len(), ahead.into()]].concat();
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
        let many = Plan::of(&family, layout, MANY_ROWS, MANY_ROWS, self.device.driver())?;
        Ok(match many.ranges {
            0 => usize::MAX,
            // Of two projections at the same time.
            ranges => (SCRATCH_BYTES / (2 * 4 * ranges * chosen * layout.rows).max(1)).max(1),
        })
    }

    /// These rows of x as bf16 terms, as products with a matrix so laid out read them.
    fn rounded(&self, family: &Family, layout: &Layout, x: &Rows<D>, rows: Range<usize>) -> Result<Pooled<D>> {
        let across = layout.bricks.expect("a matrix in bricks").across;
        let rounded = self.device.scratch((family.rounded_bytes(across) * rows.len()) as u64)?;
        let apart = if matches!(layout.coding, Coding::Int3G64 | Coding::Int2Row) { 8 } else { 4 };
        let constants = [layout.columns, rows.start, rows.len(), x.width, apart, family.terms];
        // Eight columns a thread.
        let groups = (rows.len() * across * bricks::COLUMNS / 8).div_ceil(THREADS as usize);
        self.device.launch(
            Kernel::plain(Name::RoundRows),
            [groups, 1, 1],
            &[x.buffer(), rounded.buffer()],
            &constants.map(|value| value as u32),
        )?;
        Ok(rounded)
    }

    /// Starts a kernel with a group for each piece of work.
    fn launch_all(&self, plan: &Plan, pieces: usize, buffers: &[&D::Buffer], constants: &[usize]) -> Result<()> {
        let constants: Vec<u32> = constants.iter().map(|&value| value as u32).collect();
        self.device.launch_with(plan.kernel, [pieces, 1, 1], buffers, &constants, plan.shared_bytes as u32)
    }

    /// Starts a kernel whose groups share their work: as many as run at the same time, and no more than there are pieces.
    fn launch_pieces(&self, plan: &Plan, pieces: usize, buffers: &[&D::Buffer], constants: &[usize]) -> Result<()> {
        let shared_bytes = plan.shared_bytes as u32;
        let resident = self.device.driver().resident(plan.kernel, shared_bytes)? as usize;
        let constants: Vec<u32> = constants.iter().map(|&value| value as u32).collect();
        self.device.launch_with(plan.kernel, [pieces.min(resident), 1, 1], buffers, &constants, shared_bytes)
    }
}
