//! Products of the fast mode on cooperative matrices, with weights as they are stored: `kernels/vulkan/half_product.glsl`.
//!
//! Both factors are halves: codes are so without rounding, x is rounded by a kernel before. Whatever rows go together, the bits
//! of a row are the same.

use std::ops::Range;

use super::device::Pooled;
use super::driver::Driver;
use super::kernels::{Coding, Kernel, Name};
use super::moe::Groups;
use super::rows::Rows;
use super::weight::{Layout, Slab, Weight};
use super::{Gpu, LAUNCH_TERMS, SCRATCH_BYTES};
use crate::backend::Mode;
use crate::error::Result;

/// Columns of a block, of which the columns of x are made whole.
const BLOCK: usize = 64;
/// Columns that have one scale at least.
const CHUNK: usize = 32;
/// Words before the halves of a row of x, of which the first is what they are to be multiplied with.
const HEAD: usize = 4;

/// What the kernels have to know of a weight's columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Halves {
    /// Chunks with one scale; 0 where a row has one.
    flush: usize,
    /// Columns of a run, in which they stand in an order of their own: kernels/vulkan/half_weights.glsl.
    run: usize,
}

impl Layout {
    /// How products of halves read it; `None` if there are none of its coding, or if a chunk would have two scales.
    pub(super) fn halves(&self) -> Option<Halves> {
        let one_scale = self.row_scales == 1;
        let (flush, run) = match self.coding {
            Coding::F32 => return None,
            Coding::Int8Row => (0, 4),
            Coding::Int4Row => (0, 8),
            Coding::Int4Grouped if one_scale => (0, 8),
            Coding::Int4Grouped if self.group_size.is_multiple_of(CHUNK) => (self.group_size / CHUNK, 8),
            Coding::Int4Grouped => return None,
            Coding::Int3G64 => (2, 16),
            Coding::Int2Row => (0, 16),
            Coding::Fp8E4m3B128 => (4, 4),
        };
        Some(Halves { flush, run })
    }

    /// Words of a row of x.
    fn x_stride(&self) -> usize {
        HEAD + self.columns.div_ceil(BLOCK) * BLOCK / 2
    }
}

impl<D: Driver> Gpu<D> {
    /// How products with a weight go on cooperative matrices; `None` if they do not.
    pub(super) fn in_halves(&self, layout: &Layout) -> Option<Halves> {
        let kernel = kernel(Name::MatmulHalves, layout.coding, 1);
        let wanted = self.mode == Mode::Fast && layout.bricks.is_none();
        layout.halves().filter(|_| wanted && self.device.driver().has(kernel))
    }

    /// x [n, I] · weightᵀ → [n, O].
    pub(super) fn matmul_halves(&self, weight: &Weight<D>, halves: Halves, x: &Rows<D>) -> Result<Rows<D>> {
        let layout = &weight.layout;
        assert_eq!(x.width, layout.columns, "width of a product");
        let out = self.rows(x.rows, layout.rows)?;
        let kernel = kernel(Name::MatmulHalves, layout.coding, x.rows);
        let tile = kernel.rows.unwrap_or(1) as usize;
        let terms = (LAUNCH_TERMS / (layout.rows * layout.columns).max(1)).max(1);
        let step = terms.min(SCRATCH_BYTES / (4 * layout.x_stride())).max(1).next_multiple_of(tile);
        for first in (0..x.rows).step_by(step) {
            let count = x.rows.min(first + step);
            let rounded = self.in_half(layout, halves, x, first..count)?;
            for part in &weight.parts {
                let of_x = [first, count, layout.x_stride(), out.width, part.rows.start];
                let constants = of_weight(layout, halves, part.rows.len()).into_iter().chain(of_x);
                self.device.launch(
                    kernel,
                    [(count - first).div_ceil(tile), part.rows.len().div_ceil(outputs(tile)), 1],
                    &[part.codes(), part.scales(), rounded.buffer(), out.buffer()],
                    &constants.map(|value| value as u32).collect::<Vec<_>>(),
                )?;
            }
        }
        Ok(out)
    }

    /// One projection of the chosen experts that stand in a slab, into their slots: see `of_experts`.
    pub(super) fn experts_halves(
        &self,
        slab: &Slab<D>,
        halves: Halves,
        x: &Rows<D>,
        out: &Rows<D>,
        groups: &Groups<D>,
        divisor: usize,
    ) -> Result<()> {
        let layout = &slab.layout;
        let kernel = kernel(Name::ExpertsHalves, layout.coding, groups.slots.div_ceil(groups.most.max(1)));
        let rounded = self.in_half(layout, halves, x, 0..x.rows)?;
        let [codes, scales, places] = slab.buffers();
        let [words, of_scales] = slab.strides().map(|stride| stride as usize);
        let of_groups = [words, of_scales, groups.most, divisor, layout.x_stride()];
        let constants = of_weight(layout, halves, layout.rows).into_iter().chain(of_groups);
        self.device.launch(
            kernel,
            [layout.rows.div_ceil(outputs(kernel.rows.unwrap_or(1) as usize)), groups.most, 1],
            &[codes, scales, rounded.buffer(), out.buffer(), groups.words.buffer(), places],
            &constants.map(|value| value as u32).collect::<Vec<_>>(),
        )
    }

    /// Some rows of x as halves.
    fn in_half(&self, layout: &Layout, halves: Halves, x: &Rows<D>, rows: Range<usize>) -> Result<Pooled<D>> {
        let stride = layout.x_stride();
        let out = self.device.values(rows.len() * stride)?;
        let constants = [layout.columns, rows.start, stride, halves.run].map(|value| value as u32);
        let buffers = [x.buffer(), out.buffer()];
        self.device.launch(Kernel::plain(Name::RoundHalves), [rows.len(), 1, 1], &buffers, &constants)?;
        Ok(out)
    }
}

/// The kernel for so many rows of x with each weight.
fn kernel(name: Name, coding: Coding, rows: usize) -> Kernel {
    let [few, many] = [name.tiles()[0], name.tiles()[1]];
    Kernel { name, coding: Some(coding), rows: Some(if rows <= few as usize { few } else { many }) }
}

/// Outputs of a group of threads: with few rows of x it has four ranges of columns at the same time.
fn outputs(tile: usize) -> usize {
    if tile <= 16 { 32 } else { 128 }
}

/// The first constants of both kernels.
fn of_weight(layout: &Layout, halves: Halves, outputs: usize) -> [usize; 6] {
    [layout.stride, layout.row_scales, layout.group_size, layout.columns, halves.flush, outputs]
}
