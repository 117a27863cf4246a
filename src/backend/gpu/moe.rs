//! The choice of experts, and the chosen experts.

use super::device::{Pooled, groups_of};
use super::driver::Driver;
use super::kernels::{Kernel, Name, THREADS};
use super::rows::{Choice, Rows};
use super::weight::{ExpertMatrices, Weight};
use super::{Gpu, LAUNCH_TERMS, tile};
use crate::backend::{ExpertSource, Routing};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::format::Format;
use crate::roles::Projection;

/// Most experts of a layer, and groups of them: kernels/cuda/router.cu.
const MOST_EXPERTS: usize = 1024;
const MOST_GROUPS: usize = 256;

/// The routed experts of a layer.
#[derive(Debug)]
pub struct Experts<D: Driver> {
    count: usize,
    pub(super) gate: ExpertMatrices<D>,
    pub(super) up: ExpertMatrices<D>,
    pub(super) down: ExpertMatrices<D>,
}

impl<D: Driver> Experts<D> {
    /// Every format once.
    pub fn formats(&self) -> Vec<Format> {
        let mut formats: Vec<Format> = Vec::new();
        for format in self.gate.formats().chain(self.up.formats()).chain(self.down.formats()) {
            if !formats.contains(&format) {
                formats.push(format);
            }
        }
        formats
    }
}

/// Slots grouped by expert, for one launch after the other.
pub(super) struct Groups<D: Driver> {
    pub words: Pooled<D>,
    /// Experts that it has room for.
    pub most: usize,
    pub rows: usize,
    pub slots: usize,
}

impl<D: Driver> Gpu<D> {
    /// Uploads the routed experts of a layer.
    pub(super) fn experts_of(&self, source: &dyn ExpertSource) -> Result<Experts<D>, Faults> {
        let upload = |projection| ExpertMatrices::upload(&self.device, source, projection);
        Ok(Experts {
            count: source.count(),
            gate: upload(Projection::Gate)?,
            up: upload(Projection::Up)?,
            down: upload(Projection::Down)?,
        })
    }

    /// [`crate::backend::Backend::route`].
    pub(super) fn choose(
        &self,
        routing: &Routing,
        gate: &Weight<D>,
        bias: &Weight<D>,
        x: &Rows<D>,
    ) -> Result<Choice<D>> {
        let (experts, chosen) = (gate.layout.rows, routing.chosen);
        assert_eq!(experts, bias.layout.rows, "experts of a router");
        for (what, found, limit) in
            [("experts of a layer", experts, MOST_EXPERTS), ("groups of experts", routing.groups, MOST_GROUPS)]
        {
            if found > limit {
                return Err(Fault::new(Place::default(), FaultKind::GpuDimension { what, found, limit }));
            }
        }
        let logits = self.matmul_rows(gate, x)?;
        let (ids, weights) = (self.device.values(x.rows * chosen)?, self.device.values(x.rows * chosen)?);
        self.device.launch(
            Kernel::plain(Name::Choose),
            [x.rows, 1, 1],
            &[logits.buffer(), bias.vector(), ids.buffer(), weights.buffer()],
            &[
                experts as u32,
                chosen as u32,
                routing.groups as u32,
                routing.chosen_groups as u32,
                routing.normalized.into(),
                routing.factor.to_bits(),
            ],
        )?;
        Ok(Choice { ids, weights, rows: x.rows, chosen })
    }

    /// [`crate::backend::Backend::experts`].
    pub(super) fn mixture(&self, experts: &Experts<D>, choice: &Choice<D>, x: &Rows<D>) -> Result<Rows<D>> {
        assert_eq!(choice.rows, x.rows, "rows and choices");
        let row_terms = choice.chosen * x.width * experts.gate.rows;
        let step = (LAUNCH_TERMS / row_terms.max(1)).max(1);
        if x.rows <= step {
            return self.mixture_of(experts, &choice.ids, &choice.weights, choice.chosen, x);
        }
        // Some rows at a time, so that no launch takes long.
        let out = self.rows(x.rows, x.width)?;
        for first in (0..x.rows).step_by(step) {
            let rows = step.min(x.rows - first);
            let part = |values: &D::Buffer, width: usize| -> Result<Pooled<D>> {
                let part = self.device.values(rows * width)?;
                self.copy(values, [first, width, 0], &part, [0, width, 0], [rows, width])?;
                Ok(part)
            };
            let (ids, weights) =
                (part(choice.ids.buffer(), choice.chosen)?, part(choice.weights.buffer(), choice.chosen)?);
            let of_part = Rows { values: part(x.buffer(), x.width)?, rows, width: x.width };
            let sums = self.mixture_of(experts, &ids, &weights, choice.chosen, &of_part)?;
            let whole = [rows, x.width];
            self.copy(sums.buffer(), [0, x.width, 0], &out.values, [first, x.width, 0], whole)?;
        }
        Ok(out)
    }

    fn mixture_of(
        &self,
        experts: &Experts<D>,
        ids: &Pooled<D>,
        weights: &Pooled<D>,
        chosen: usize,
        x: &Rows<D>,
    ) -> Result<Rows<D>> {
        let groups = self.grouped(experts, ids, x.rows, chosen)?;
        let gate = self.of_experts(&experts.gate, x, &groups, chosen)?;
        let up = self.of_experts(&experts.up, x, &groups, chosen)?;
        let gated = self.gated(&gate, &up)?;
        let down = self.of_experts(&experts.down, &gated, &groups, 1)?;
        let out = self.rows(x.rows, x.width)?;
        self.device.launch(
            Kernel::plain(Name::Combine),
            [x.width.div_ceil(THREADS as usize), x.rows, 1],
            &[down.buffer(), weights.buffer(), out.buffer()],
            &[chosen as u32, x.width as u32],
        )?;
        Ok(out)
    }

    /// The slots of so many rows, by expert.
    pub(super) fn grouped(
        &self,
        experts: &Experts<D>,
        ids: &Pooled<D>,
        rows: usize,
        chosen: usize,
    ) -> Result<Groups<D>> {
        let slots = rows * chosen;
        let most = slots.min(experts.count);
        let groups = Groups { words: self.device.values(2 + 2 * most + slots)?, most, rows, slots };
        self.device.launch(
            Kernel::plain(Name::GroupRows),
            [1, 1, 1],
            &[ids.buffer(), groups.words.buffer()],
            &[slots as u32, experts.count as u32, most as u32],
        )?;
        Ok(groups)
    }

    /// One projection of the chosen experts: [slots, O]; slot s reads row s / divisor of x.
    pub(super) fn of_experts(
        &self,
        matrices: &ExpertMatrices<D>,
        x: &Rows<D>,
        groups: &Groups<D>,
        divisor: usize,
    ) -> Result<Rows<D>> {
        let out = self.rows(groups.slots, matrices.rows)?;
        for slab in &matrices.slabs {
            let layout = slab.layout;
            if layout.bricks.is_some() {
                self.stream_experts(slab, x, &out, groups, divisor)?;
                continue;
            }
            let [codes, scales, places] = slab.buffers();
            let [stride, row_scales, group_size] = layout.constants();
            let [expert_words, expert_scales] = slab.strides();
            let rows = tile(groups.rows);
            let kernel = Kernel { name: Name::Experts, coding: Some(layout.coding), rows: Some(rows) };
            self.device.launch(
                kernel,
                [layout.rows.div_ceil(self.device.driver().outputs(rows)), groups.most, 1],
                &[codes, scales, x.buffer(), out.buffer(), groups.words.buffer(), places],
                &[
                    stride,
                    row_scales,
                    group_size,
                    layout.columns as u32,
                    layout.rows as u32,
                    expert_words,
                    expert_scales,
                    groups.most as u32,
                    divisor as u32,
                ],
            )?;
        }
        Ok(out)
    }

    /// silu(gate) · up.
    pub(super) fn gated(&self, gate: &Rows<D>, up: &Rows<D>) -> Result<Rows<D>> {
        assert_eq!((gate.width, gate.rows), (up.width, up.rows), "shapes of gate and up");
        let out = self.rows(gate.rows, gate.width)?;
        let buffers = [gate.buffer(), up.buffer(), out.buffer()];
        self.device.launch(Kernel::plain(Name::Swiglu), groups_of(out.count()), &buffers, &[out.count() as u32])?;
        Ok(out)
    }
}
