//! The choice of experts, and the chosen experts, whether all of them are on the device or some.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use super::device::{Pooled, groups_of};
use super::driver::Driver;
use super::kernels::{Coding, Kernel, Name, THREADS};
use super::rows::{Choice, Rows};
use super::stream::MANY_ROWS;
use super::tiers::Layer;
use super::weight::{ExpertMatrices, Layout, Slab, Weight, each_once};
use super::{Gpu, LAUNCH_TERMS, tile};
use crate::backend::{ExpertSource, Routing};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::format::Format;
use crate::roles::Projection;

/// Most experts of a layer, and groups of them: kernels/cuda/router.cu.
pub(super) const MOST_EXPERTS: usize = 1024;
const MOST_GROUPS: usize = 256;
/// Experts, and rows of several, of a group of threads: kernels/cuda/router.cu, router_logits.
const EXPERTS_AT_ONCE: usize = 2;
const LOGIT_ROWS: usize = 8;

/// The routed experts of a layer.
#[derive(Debug)]
pub struct Experts<D: Driver> {
    count: usize,
    held: Held<D>,
}

/// Where they are.
#[derive(Debug)]
enum Held<D: Driver> {
    /// All on the device: gate, up and down.
    Whole([ExpertMatrices<D>; 3]),
    /// In tiers.
    Tiered(Layer<D>),
}

impl<D: Driver> Experts<D> {
    /// Every format once.
    pub fn formats(&self) -> Vec<Format> {
        each_once(self.layouts().map(|layout| layout.format))
    }

    /// The layouts that there are.
    fn layouts(&self) -> impl Iterator<Item = Layout> {
        let (whole, tiered) = match &self.held {
            Held::Whole(matrices) => (Some(matrices), None),
            Held::Tiered(layer) => (None, Some(&layer.layouts)),
        };
        let of_slabs = whole.into_iter().flatten().flat_map(|matrices| matrices.slabs.iter().map(|slab| slab.layout));
        of_slabs.chain(tiered.into_iter().flatten().copied())
    }

    /// Gate, up and down.
    ///
    /// # Panics
    ///
    /// If they are in tiers.
    pub(super) fn whole(&self) -> &[ExpertMatrices<D>; 3] {
        match &self.held {
            Held::Whole(matrices) => matrices,
            Held::Tiered(_) => panic!("experts in tiers are nowhere whole"),
        }
    }

    /// Output features of gate and up.
    fn inner_rows(&self) -> usize {
        match &self.held {
            Held::Whole([gate, ..]) => gate.rows,
            Held::Tiered(layer) => layer.inner_rows,
        }
    }
}

/// Slots grouped by expert, for one launch after the other.
#[derive(Debug)]
pub struct Groups<D: Driver> {
    pub(super) words: Arc<Pooled<D>>,
    /// Experts that it has room for.
    pub(super) most: usize,
    pub(super) rows: usize,
    pub(super) slots: usize,
}

impl<D: Driver> Groups<D> {
    /// Rows of x that a group of threads takes at a time. An expert has few of the rows, and products with rows that it does not
    /// have are lost: so it is twice as many as experts have on average. One that has more of them is gone through again.
    fn tile(&self) -> u32 {
        tile(self.rows.min(2 * self.slots.div_ceil(self.most)))
    }
}

/// What was chosen for some rows.
struct Chosen<'c, D: Driver> {
    /// [rows, count] numbers of experts, and their weights.
    ids: &'c Pooled<D>,
    weights: &'c Pooled<D>,
    /// The numbers, where experts are in tiers.
    known: &'c [u32],
    /// Experts of a row.
    count: usize,
    /// The slots by expert, if they are known.
    groups: Option<Arc<Pooled<D>>>,
}

/// Numbers of experts, each once, ascending.
fn distinct(known: &[u32]) -> Vec<usize> {
    counts(known).into_iter().map(|(expert, _)| expert).collect()
}

/// Numbers of experts, each once, ascending, and how often each is there.
fn counts(known: &[u32]) -> Vec<(usize, usize)> {
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    known.iter().for_each(|&expert| *counts.entry(expert as usize).or_default() += 1);
    counts.into_iter().collect()
}

impl<D: Driver> Gpu<D> {
    /// Uploads the routed experts of a layer, or prepares to.
    pub(super) fn experts_of(&self, source: &dyn ExpertSource) -> Result<Experts<D>, Faults> {
        let upload = |projection| ExpertMatrices::upload(&self.device, source, projection);
        let held = match &self.tiers {
            Some(tiers) => Held::Tiered(tiers.add_layer(source)?),
            None => Held::Whole([upload(Projection::Gate)?, upload(Projection::Up)?, upload(Projection::Down)?]),
        };
        Ok(Experts { count: source.count(), held })
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
        let logits = self.router_logits(gate, x)?;
        let (ids, weights) = (self.device.values(x.rows * chosen)?, self.device.values(x.rows * chosen)?);
        // Of one row the slots by expert are the choice in another order.
        let groups = Arc::new(self.device.values(2 + 3 * chosen)?);
        self.device.launch(
            Kernel::plain(Name::Choose),
            [x.rows, 1, 1],
            &[logits.buffer(), bias.vector(), ids.buffer(), weights.buffer(), groups.buffer()],
            &[
                experts as u32,
                chosen as u32,
                routing.groups as u32,
                routing.chosen_groups as u32,
                routing.normalized.into(),
                routing.factor.to_bits(),
            ],
        )?;
        let groups = (x.rows == 1).then_some(groups);
        Ok(Choice { ids, weights, rows: x.rows, chosen, groups, known: OnceLock::new() })
    }

    /// x [n, I] · gateᵀ → [n, experts].
    fn router_logits(&self, gate: &Weight<D>, x: &Rows<D>) -> Result<Rows<D>> {
        let Layout { rows: experts, columns, stride, coding, .. } = gate.layout;
        if coding != Coding::F32 || gate.parts.len() != 1 {
            return self.matmul_rows(gate, x);
        }
        assert_eq!(x.width, columns, "width of a product");
        let logits = self.rows(x.rows, experts)?;
        let rows = if x.rows == 1 { 1 } else { LOGIT_ROWS };
        self.device.launch(
            Kernel { name: Name::RouterLogits, coding: None, rows: Some(rows as u32) },
            [experts.div_ceil(EXPERTS_AT_ONCE), x.rows.div_ceil(rows), 1],
            &[gate.parts[0].codes(), x.buffer(), logits.buffer()],
            &[experts as u32, columns as u32, stride as u32, x.rows as u32],
        )?;
        Ok(logits)
    }

    /// The numbers of the chosen experts, row after row: copied back once.
    fn known<'c>(&self, choice: &'c Choice<D>) -> Result<&'c [u32]> {
        if let Some(known) = choice.known.get() {
            return Ok(known);
        }
        let known = self.device.read_words(choice.ids.buffer(), choice.rows * choice.chosen)?;
        if let Some(tiers) = &self.tiers {
            tiers.passed();
        }
        Ok(choice.known.get_or_init(|| known))
    }

    /// [`crate::backend::Backend::announce`].
    pub(super) fn expect(&self, experts: &Experts<D>, choice: &Choice<D>) -> Result<()> {
        if let Held::Tiered(layer) = &experts.held {
            layer.announce(&distinct(self.known(choice)?));
        }
        Ok(())
    }

    /// [`crate::backend::Backend::read_ahead`].
    pub(super) fn foresee(&self, experts: &Experts<D>, choose: &dyn Fn() -> Result<Choice<D>>) -> Result<()> {
        match &experts.held {
            Held::Tiered(layer) if layer.has_absent() => {
                layer.read_ahead(&distinct(self.known(&choose()?)?));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// [`crate::backend::Backend::experts`].
    pub(super) fn mixture(&self, experts: &Experts<D>, choice: &Choice<D>, x: &Rows<D>) -> Result<Rows<D>> {
        let step = self.rows_together(experts, choice, x)?;
        if x.rows <= step {
            let chosen = self.chosen_at_once(experts, choice)?;
            return self.combined(&self.downs(experts, &chosen, x)?, &chosen, x);
        }
        let known = self.known_in_tiers(experts, choice)?;
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
            let known = known.get(first * choice.chosen..(first + rows) * choice.chosen).unwrap_or_default();
            let chosen = Chosen { ids: &ids, weights: &weights, known, count: choice.chosen, groups: None };
            let sums = self.combined(&self.downs(experts, &chosen, &of_part)?, &chosen, &of_part)?;
            let whole = [rows, x.width];
            self.copy(sums.buffer(), [0, x.width, 0], &out.values, [first, x.width, 0], whole)?;
        }
        Ok(out)
    }

    /// [`crate::backend::Backend::add_experts`].
    pub(super) fn add_mixture(
        &self,
        stream: &Rows<D>,
        experts: &Experts<D>,
        choice: &Choice<D>,
        x: &Rows<D>,
        shared: &Rows<D>,
    ) -> Result<()> {
        for rows in [stream, shared] {
            assert_eq!((rows.width, rows.rows), (x.width, x.rows), "shapes of a sum");
        }
        if x.rows > self.rows_together(experts, choice, x)? {
            let sum = self.mixture(experts, choice, x)?;
            self.sum(&sum, shared)?;
            return self.sum(stream, &sum);
        }
        let chosen = self.chosen_at_once(experts, choice)?;
        let down = self.downs(experts, &chosen, x)?;
        let buffers = [down.buffer(), chosen.weights.buffer(), shared.buffer(), stream.buffer()];
        self.combine(Name::CombineOnto, &buffers, &chosen, x)
    }

    /// Rows that go through the experts together at most, so that no launch takes long or leaves too much for the next.
    fn rows_together(&self, experts: &Experts<D>, choice: &Choice<D>, x: &Rows<D>) -> Result<usize> {
        assert_eq!(choice.rows, x.rows, "rows and choices");
        let slot_terms = x.width * experts.inner_rows();
        // In tiers a batch has few experts: all of its slots are those of one at least.
        let row_terms = match &experts.held {
            Held::Whole(_) => choice.chosen * slot_terms,
            Held::Tiered(_) => slot_terms,
        };
        let mut room = x.rows;
        if x.rows >= MANY_ROWS {
            for layout in each_once(experts.layouts().filter(|layout| layout.bricks.is_some())) {
                room = room.min(self.scratch_rows(&layout, choice.chosen)?);
            }
        }
        Ok((LAUNCH_TERMS / row_terms.max(1)).min(room).max(1))
    }

    /// The numbers of the chosen experts where these are in tiers.
    fn known_in_tiers<'c>(&self, experts: &Experts<D>, choice: &'c Choice<D>) -> Result<&'c [u32]> {
        match &experts.held {
            Held::Whole(_) => Ok(&[]),
            Held::Tiered(_) => self.known(choice),
        }
    }

    /// All of a choice.
    fn chosen_at_once<'c>(&self, experts: &Experts<D>, choice: &'c Choice<D>) -> Result<Chosen<'c, D>> {
        let (ids, weights, groups) = (&choice.ids, &choice.weights, choice.groups.clone());
        Ok(Chosen { ids, weights, known: self.known_in_tiers(experts, choice)?, count: choice.chosen, groups })
    }

    /// What the chosen experts make of their rows: [slots, width].
    fn downs(&self, experts: &Experts<D>, chosen: &Chosen<'_, D>, x: &Rows<D>) -> Result<Rows<D>> {
        let groups = match &chosen.groups {
            Some(words) => Groups { words: words.clone(), most: chosen.count, rows: 1, slots: chosen.count },
            None => self.grouped(experts, chosen.ids, x.rows, chosen.count)?,
        };
        let slots = groups.slots;
        let [gate, up] = [self.rows(slots, experts.inner_rows())?, self.rows(slots, experts.inner_rows())?];
        let down = self.rows(slots, x.width)?;
        let of_slot = 1;
        match &experts.held {
            Held::Whole(matrices) => {
                let [gates, ups, downs] = matrices.each_ref().map(|matrices| matrices.slabs.iter());
                let ahead = self.gates_and_ups(gates, ups, x, [&gate, &up], &groups)?;
                self.of_experts(downs, &self.gated(&gate, &up)?, &down, &groups, of_slot, ahead)?;
            }
            Held::Tiered(layer) => {
                let most_slots = LAUNCH_TERMS / (x.width * experts.inner_rows()).max(1);
                let mut pass = layer.pass(&counts(chosen.known), most_slots)?;
                while let Some(batch) = pass.next()? {
                    let [gates, ups] = [Projection::Gate, Projection::Up].map(|of| pass.slabs(&batch, of).into_iter());
                    let ahead = self.gates_and_ups(gates, ups, x, [&gate, &up], &groups)?;
                    // Of slots that are not filled yet nothing is read after this.
                    let gated = self.gated(&gate, &up)?;
                    self.of_experts(pass.slabs(&batch, Projection::Down), &gated, &down, &groups, of_slot, ahead)?;
                }
            }
        }
        Ok(down)
    }

    /// Σ over each row's slots, weighted.
    fn combined(&self, down: &Rows<D>, chosen: &Chosen<'_, D>, x: &Rows<D>) -> Result<Rows<D>> {
        let out = self.rows(x.rows, x.width)?;
        self.combine(Name::Combine, &[down.buffer(), chosen.weights.buffer(), out.buffer()], chosen, x)?;
        Ok(out)
    }

    fn combine(&self, name: Name, buffers: &[&D::Buffer], chosen: &Chosen<'_, D>, x: &Rows<D>) -> Result<()> {
        let groups = [x.width.div_ceil(THREADS as usize), x.rows, 1];
        self.device.launch(Kernel::plain(name), groups, buffers, &[chosen.count as u32, x.width as u32])
    }

    /// Gate and up of the chosen experts that stand in these slabs, into their slots of each: together where they stand alike.
    /// Whether what comes next may read the groups ahead, because a product here has waited for them: those in bricks let the next
    /// kernel begin after they have waited, others before.
    fn gates_and_ups<'s>(
        &self,
        gates: impl ExactSizeIterator<Item = &'s Slab<D>> + Clone,
        ups: impl ExactSizeIterator<Item = &'s Slab<D>> + Clone,
        x: &Rows<D>,
        [gate, up]: [&Rows<D>; 2],
        groups: &Groups<D>,
    ) -> Result<bool>
    where
        D: 's,
    {
        let in_bricks = |slab: &Slab<D>| slab.layout.bricks.is_some();
        let (of_gates, of_ups) = (gates.clone().any(in_bricks), ups.clone().any(in_bricks));
        let divisor = groups.slots / groups.rows.max(1);
        let alike = gates.len() == ups.len() && gates.clone().zip(ups.clone()).all(|(gate, up)| gate.stands_as(up));
        if !alike {
            self.of_experts(gates, x, gate, groups, divisor, false)?;
            self.of_experts(ups, x, up, groups, divisor, of_gates)?;
            return Ok(of_gates || of_ups);
        }
        for (at, (of_gate, of_up)) in gates.zip(ups).enumerate() {
            self.stream_experts(&[(of_gate, gate), (of_up, up)], x, groups, divisor, at > 0)?;
        }
        Ok(of_gates || of_ups)
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
        let words = Arc::new(self.device.values(2 + 2 * most + slots)?);
        let groups = Groups { words, most, rows, slots };
        self.device.launch(
            Kernel::plain(Name::GroupRows),
            [1, 1, 1],
            &[ids.buffer(), groups.words.buffer()],
            &[slots as u32, experts.count as u32, most as u32],
        )?;
        Ok(groups)
    }

    /// One projection of the chosen experts that stand in these slabs, into their slots of out [slots, O]; slot s reads row
    /// s / divisor of x. `ahead` says that the groups were there before the launch before let this one begin.
    pub(super) fn of_experts<'s>(
        &self,
        slabs: impl IntoIterator<Item = &'s Slab<D>>,
        x: &Rows<D>,
        out: &Rows<D>,
        groups: &Groups<D>,
        divisor: usize,
        ahead: bool,
    ) -> Result<()>
    where
        D: 's,
    {
        for slab in slabs {
            let layout = slab.layout;
            if layout.bricks.is_some() {
                self.stream_experts(&[(slab, out)], x, groups, divisor, ahead)?;
                continue;
            }
            if let Some(halves) = self.in_halves(&layout) {
                self.experts_halves(slab, halves, x, out, groups, divisor)?;
                continue;
            }
            let [codes, scales, places] = slab.buffers();
            let [stride, row_scales, group_size] = layout.constants();
            let [expert_words, expert_scales] = slab.strides();
            let rows = groups.tile();
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
        Ok(())
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
