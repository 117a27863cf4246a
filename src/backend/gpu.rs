//! The forward pass on a GPU, through any API: weights as they are stored, activations that stay on the device.
//!
//! [`driver::Driver`] is what an API gives; [`kernels`] names what runs on the device. Every API runs the same kernels in the
//! same order: what is here is all of the host's side. Sums are f32, in an order that depends on a row alone, so results do
//! not depend on how rows are batched. Nothing is ever computed elsewhere: what the device cannot do is a fault.

mod attention;
mod bricks;
pub mod device;
pub mod driver;
mod fused;
mod halves;
pub mod kernels;
mod lists;
pub mod many;
mod measured;
mod moe;
pub mod peaks;
pub mod placement;
mod rows;
#[cfg(test)]
pub(in crate::backend) mod splits;
mod stream;
#[cfg(test)]
pub(in crate::backend) mod tests;
pub mod tiers;
mod weight;

use std::ops::Range;
use std::sync::Arc;

use crate::backend::{
    Backend, Counters, Dsa, ExpertSource, Heads, Kept, Mla, Mode, OnDevice, Operation, Pair, Places, Prediction, Rope,
    Routed, Routing, Tally,
};
use crate::error::{Faults, Result};
use crate::experts;
use crate::weights::Matrix;
use device::{Device, Injection, groups_of};
use driver::Driver;
use kernels::{Kernel, Name, THREADS, TILE_ROWS};
use tiers::Tiers;

pub use moe::{Experts, Groups};
pub use rows::{Cache, Choice, Lists, Rows};
pub use weight::Weight;

/// Products and sums of a launch at most: a tenth of a second on a slow GPU. Systems end a launch that takes two seconds.
const LAUNCH_TERMS: usize = 1 << 35;
/// Bytes of what one launch leaves for the next.
const SCRATCH_BYTES: usize = 64 << 20;
/// Rows whose logits are computed together.
const LOGIT_ROWS: usize = 64;

/// Rows of x that a group of threads takes where there are so many.
fn tile(rows: usize) -> u32 {
    let largest = TILE_ROWS[TILE_ROWS.len() - 1];
    TILE_ROWS.into_iter().find(|&tile| tile as usize >= rows).unwrap_or(largest)
}

/// A GPU.
#[derive(Debug)]
pub struct Gpu<D: Driver> {
    device: Arc<Device<D>>,
    tally: Tally,
    made: lists::Made<D>,
    mode: Mode,
    /// Where routed experts are that are not all on the device.
    tiers: Option<Arc<Tiers<D>>>,
}

/// What of a weight is multiplied with what of the rows: all of it, or a part head by head.
struct Terms {
    columns: usize,
    heads: usize,
    /// Rows of the weight of a head, and the first of those that count.
    head_rows: usize,
    head_first: usize,
    outputs: usize,
}

impl<D: Driver> Gpu<D> {
    /// On a device, with a fault on purpose. All weights go there.
    pub fn new(driver: D, injection: Option<Injection>) -> Gpu<D> {
        let device = Device::new(driver, injection);
        Gpu { device, tally: Tally::default(), made: lists::Made::default(), mode: Mode::Exact, tiers: None }
    }

    /// The same with routed experts in tiers, if there are options for them; no model is on it yet.
    pub fn in_tiers(self, options: Option<tiers::Options>) -> Gpu<D> {
        let tiers = options.map(|options| Arc::new(Tiers::new(self.device.clone(), options)));
        Gpu { tiers, ..self }
    }

    /// The same with sums formed in another mode.
    pub fn in_mode(self, mode: Mode) -> Gpu<D> {
        Gpu { mode, ..self }
    }

    /// On a device beside others that compute the same model: launches are counted together.
    pub fn beside(driver: D, others: &Gpu<D>) -> Gpu<D> {
        let device = Device::beside(driver, &others.device);
        Gpu { device, tally: Tally::default(), made: lists::Made::default(), mode: Mode::Exact, tiers: None }
    }

    /// The device.
    pub fn gpu(&self) -> &Device<D> {
        &self.device
    }

    /// Rows whose values are not defined.
    fn rows(&self, rows: usize, width: usize) -> Result<Rows<D>> {
        Ok(Rows { values: self.device.values(rows * width)?, rows, width })
    }

    /// x [n, I] · weightᵀ → [n, O].
    fn matmul_rows(&self, weight: &Weight<D>, x: &Rows<D>) -> Result<Rows<D>> {
        if weight.layout.bricks.is_some() {
            return self.stream(weight, x);
        }
        if let Some(halves) = self.in_halves(&weight.layout) {
            return self.matmul_halves(weight, halves, x);
        }
        let (outputs, columns) = (weight.layout.rows, weight.layout.columns);
        self.product(weight, x, &Terms { columns, heads: 1, head_rows: 0, head_first: 0, outputs })
    }

    /// x [n, heads · I] with the weight's rows of each head → [n, heads · outputs].
    fn product(&self, weight: &Weight<D>, x: &Rows<D>, terms: &Terms) -> Result<Rows<D>> {
        assert_eq!(x.width, terms.heads * weight.layout.columns, "width of a product");
        assert!(weight.layout.bricks.is_none(), "nothing is looked up in bricks");
        let out = self.rows(x.rows, terms.heads * terms.outputs)?;
        let rows = tile(x.rows);
        let kernel = Kernel { name: Name::Matmul, coding: Some(weight.layout.coding), rows: Some(rows) };
        let [stride, row_scales, group_size] = weight.layout.constants();
        let row_terms = terms.heads * terms.outputs * terms.columns;
        let step = (LAUNCH_TERMS / row_terms.max(1)).max(1).next_multiple_of(rows as usize);
        for part in &weight.parts {
            // Outputs of one head are those of this part alone.
            let whole = terms.head_rows > 0;
            let (head_first, outputs) =
                if whole { (terms.head_first, terms.outputs) } else { (part.rows.start, part.rows.len()) };
            for first in (0..x.rows).step_by(step) {
                let count = x.rows.min(first + step);
                let of_group = self.device.driver().outputs(rows);
                let groups = [(count - first).div_ceil(rows as usize), outputs.div_ceil(of_group), terms.heads];
                let constants = [
                    terms.columns,
                    part.rows.start,
                    part.rows.len(),
                    terms.head_rows,
                    head_first,
                    outputs,
                    first,
                    count,
                    x.width,
                    if whole { terms.columns } else { 0 },
                    out.width,
                    if whole { terms.outputs } else { 0 },
                    if whole { 0 } else { part.rows.start },
                ];
                let constants: Vec<u32> = [stride, row_scales, group_size]
                    .into_iter()
                    .chain(constants.into_iter().map(|value| value as u32))
                    .collect();
                let buffers = [part.codes(), part.scales(), x.buffer(), out.buffer()];
                self.device.launch(kernel, groups, &buffers, &constants)?;
            }
        }
        Ok(out)
    }

    /// x + y, into x.
    fn sum(&self, x: &Rows<D>, y: &Rows<D>) -> Result<()> {
        assert_eq!((x.width, x.rows), (y.width, y.rows), "shapes of a sum");
        let buffers = [x.buffer(), y.buffer()];
        self.device.launch(Kernel::plain(Name::Add), groups_of(x.count()), &buffers, &[x.count() as u32])
    }

    /// Each row by itself, with one vector or two.
    fn norm(&self, name: Name, x: &Rows<D>, vectors: &[&Weight<D>], eps: f64) -> Result<Rows<D>> {
        let out = self.rows(x.rows, x.width)?;
        let mut buffers = vec![x.buffer()];
        for vector in vectors {
            assert_eq!(x.width, vector.layout.rows, "width of a norm");
            buffers.push(vector.vector());
        }
        buffers.push(out.buffer());
        let constants = [x.width as u32, (eps as f32).to_bits()];
        self.device.launch(Kernel::plain(name), [x.rows, 1, 1], &buffers, &constants)?;
        Ok(out)
    }

    /// What the head says after some rows, whose logits fit in memory.
    fn predictions(&self, head: &Weight<D>, x: &Rows<D>, asked: &[Option<u32>]) -> Result<Vec<Prediction>> {
        let logits = self.matmul_rows(head, x)?;
        let ids: Vec<u32> = asked.iter().map(|asked| asked.unwrap_or(0)).collect();
        let ids = self.device.words(&ids)?;
        let slices = logits.width.div_ceil(SLICE);
        let (partial, out) = (self.rows(x.rows, 4 * slices)?, self.rows(x.rows, PREDICTED)?);
        let constants = [logits.width as u32, slices as u32];
        let buffers = [logits.buffer(), partial.buffer()];
        self.device.launch(Kernel::plain(Name::Predict), [slices, x.rows, 1], &buffers, &constants)?;
        let buffers = [logits.buffer(), partial.buffer(), ids.buffer(), out.buffer()];
        self.device.launch(Kernel::plain(Name::PredictMerge), [x.rows, 1, 1], &buffers, &constants)?;
        let words = self.device.read_words(out.buffer(), out.count())?;
        let of_row = |(words, asked): (&[u32; PREDICTED], &Option<u32>)| {
            let [id, logit, runner_up, sum, asked_logit] = *words;
            let [logit, runner_up, sum, asked_logit] = [logit, runner_up, sum, asked_logit].map(f32::from_bits);
            let log_sum_exp = f64::from(logit) + f64::from(sum).ln();
            Prediction { id, logit, runner_up, log_sum_exp, asked: asked.map(|_| asked_logit) }
        };
        Ok(words.as_chunks().0.iter().zip(asked).map(of_row).collect())
    }
}

/// Values that a row of kernels/cuda/predict.cu gives, and logits of a slice of a row.
const PREDICTED: usize = 5;
const SLICE: usize = 4096;

impl<D: Driver> Backend for Gpu<D> {
    type Weight = Weight<D>;
    type Experts = Experts<D>;
    type Rows = Rows<D>;
    type Cache = Cache<D>;
    type Choice = Choice<D>;
    type Selection = Lists<D>;

    fn name(&self) -> &'static str {
        self.device.driver().name()
    }

    fn device(&self) -> String {
        self.device.driver().device()
    }

    fn mode(&self) -> Mode {
        self.mode
    }

    fn counters(&self) -> Counters {
        let counters = self.tally.counters();
        let on_device = OnDevice {
            device: self.device(),
            dispatches: counters.total().dispatches,
            copied_bytes: 0,
            allocated_bytes: self.device.allocated(),
        };
        Counters(counters.0, vec![on_device])
    }

    fn arm(&self) {
        self.device.arm();
    }

    fn upload(&self, name: &str, matrix: Matrix) -> Result<Weight<D>> {
        Weight::upload(&self.device, name, &matrix)
    }

    fn upload_linear(&self, name: &str, matrix: Matrix) -> Result<Weight<D>> {
        Weight::upload_linear(&self.device, name, &matrix)
    }

    fn upload_pair(&self, names: [&str; 2], matrices: [Matrix; 2]) -> Result<Pair<Weight<D>>> {
        self.pair(names, matrices)
    }

    fn upload_experts(&self, source: &dyn ExpertSource) -> Result<Experts<D>, Faults> {
        self.experts_of(source)
    }

    fn write(&self, values: &[f32], width: usize) -> Result<Rows<D>> {
        assert_eq!(values.len() % width, 0, "{} values are no rows of {width}", values.len());
        Ok(Rows { values: self.device.floats(values)?, rows: values.len() / width, width })
    }

    fn read(&self, rows: &Rows<D>) -> Result<Vec<f32>> {
        let words = self.device.read_words(rows.buffer(), rows.count())?;
        Ok(words.into_iter().map(f32::from_bits).collect())
    }

    fn shape(&self, rows: &Rows<D>) -> (usize, usize) {
        (rows.rows, rows.width)
    }

    fn slice(&self, x: &Rows<D>, rows: Range<usize>, columns: Range<usize>) -> Result<Rows<D>> {
        self.tally.dispatch(Operation::Slice, None);
        let out = self.rows(rows.len(), columns.len())?;
        let (from, to) = ([rows.start, x.width, columns.start], [0, out.width, 0]);
        self.copy(x.buffer(), from, &out.values, to, [out.rows, out.width])?;
        Ok(out)
    }

    fn take(&self, x: &Rows<D>, rows: &[usize]) -> Result<Rows<D>> {
        self.tally.dispatch(Operation::Take, None);
        let out = self.rows(rows.len(), x.width)?;
        let numbers: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        let numbers = self.device.words(&numbers)?;
        let buffers = [x.buffer(), numbers.buffer(), out.buffer()];
        let constants = [out.rows as u32, out.width as u32];
        self.device.launch(Kernel::plain(Name::TakeRows), groups_of(out.count()), &buffers, &constants)?;
        Ok(out)
    }

    fn concat(&self, a: &Rows<D>, b: &Rows<D>) -> Result<Rows<D>> {
        self.tally.dispatch(Operation::Concat, None);
        assert_eq!(a.rows, b.rows, "rows side by side");
        let out = self.rows(a.rows, a.width + b.width)?;
        for (x, at) in [(a, 0), (b, a.width)] {
            self.copy(x.buffer(), [0, x.width, 0], &out.values, [0, out.width, at], [x.rows, x.width])?;
        }
        Ok(out)
    }

    fn add(&self, x: &mut Rows<D>, y: &Rows<D>) -> Result<()> {
        self.tally.dispatch(Operation::Add, None);
        self.sum(x, y)
    }

    fn embed(&self, table: &Weight<D>, ids: &[u32]) -> Result<Rows<D>> {
        self.tally.dispatch(Operation::Embed, Some(table.layout.format));
        let out = self.rows(ids.len(), table.layout.columns)?;
        let numbers = self.device.words(ids)?;
        let kernel = Kernel { name: Name::Embed, coding: Some(table.layout.coding), rows: None };
        let [stride, row_scales, group_size] = table.layout.constants();
        for part in &table.parts {
            self.device.launch(
                kernel,
                [out.width.div_ceil(THREADS as usize), ids.len(), 1],
                &[part.codes(), part.scales(), numbers.buffer(), out.buffer()],
                &[stride, row_scales, group_size, out.width as u32, part.rows.start as u32, part.rows.len() as u32],
            )?;
        }
        Ok(out)
    }

    fn rms_norm(&self, x: &Rows<D>, weight: &Weight<D>, eps: f64) -> Result<Rows<D>> {
        self.tally.dispatch(Operation::RmsNorm, Some(weight.layout.format));
        self.norm(Name::RmsNorm, x, &[weight], eps)
    }

    fn layer_norm(&self, x: &Rows<D>, weight: &Weight<D>, bias: &Weight<D>, eps: f64) -> Result<Rows<D>> {
        self.tally.dispatch(Operation::LayerNorm, Some(weight.layout.format));
        self.norm(Name::LayerNorm, x, &[weight, bias], eps)
    }

    fn matmul(&self, weight: &Weight<D>, x: &Rows<D>) -> Result<Rows<D>> {
        self.tally.dispatch(Operation::Matmul, Some(weight.layout.format));
        self.matmul_rows(weight, x)
    }

    fn matmul_pair(&self, pair: Pair<&Weight<D>>, x: &Rows<D>) -> Result<[Rows<D>; 2]> {
        let formats = match pair {
            Pair::Apart(first, second) => [first, second].map(|weight| weight.layout.format),
            Pair::Joined(weight, _) => [weight.layout.format; 2],
        };
        formats.into_iter().for_each(|format| self.tally.dispatch(Operation::Matmul, Some(format)));
        self.products(pair, x)
    }

    fn add_norm(&self, x: &mut Rows<D>, y: &Rows<D>, weight: &Weight<D>, eps: f64) -> Result<Rows<D>> {
        self.tally.dispatch(Operation::Add, None);
        self.tally.dispatch(Operation::RmsNorm, Some(weight.layout.format));
        self.sum_and_norm(x, y, weight, eps)
    }

    fn swiglu(&self, gate: &Rows<D>, up: &Rows<D>) -> Result<Rows<D>> {
        self.tally.dispatch(Operation::Swiglu, None);
        self.gated(gate, up)
    }

    fn rope(&self, x: &mut Rows<D>, rope: &Rope, heads: Heads, positions: &[usize]) -> Result<()> {
        self.tally.dispatch(Operation::Rope, None);
        assert_eq!(x.width % heads.width, 0, "a row is a whole number of heads");
        assert_eq!(x.rows, positions.len(), "rows and positions");
        let turns = self.made.turns(&self.device, rope, positions)?;
        let (pairs, count) = (rope.frequencies.len(), x.width / heads.width);
        self.device.launch(
            Kernel::plain(Name::Rope),
            [(count * pairs).div_ceil(THREADS as usize), x.rows, 1],
            &[x.buffer(), turns.buffer()],
            &[x.width as u32, heads.width as u32, heads.rope_at as u32, pairs as u32, count as u32],
        )
    }

    fn cache(&self, width: usize) -> Result<Cache<D>> {
        Ok(Cache { values: self.device.values(0)?, rows: 0, width, room: 0 })
    }

    fn cache_len(&self, cache: &Cache<D>) -> usize {
        cache.rows
    }

    fn append(&self, cache: &mut Cache<D>, rows: &Rows<D>) -> Result<()> {
        self.tally.dispatch(Operation::Append, None);
        self.append_rows(cache, rows)
    }

    fn truncate(&self, cache: &mut Cache<D>, len: usize) {
        cache.rows = cache.rows.min(len);
    }

    fn keep(
        &self,
        cache: &mut Cache<D>,
        q: &mut Rows<D>,
        kv: &Rows<D>,
        kept: &Kept<'_, Weight<D>>,
        positions: &[usize],
    ) -> Result<()> {
        self.tally.dispatch(Operation::Rope, None);
        self.tally.dispatch(Operation::RmsNorm, Some(kept.norm.layout.format));
        self.tally.dispatch(Operation::Append, None);
        self.keep_rows(cache, q, kv, kept, positions)
    }

    fn select(&self, dsa: &Dsa, q: &Rows<D>, weights: &Rows<D>, keys: &Cache<D>, places: &Places) -> Result<Lists<D>> {
        self.tally.dispatch(Operation::Select, None);
        dsa.check(q.width, weights.width, keys.width);
        places.check(keys.rows, q.rows);
        let seen = self.made.seen(&self.device, places)?;
        self.best_positions(dsa, q, weights, keys, &seen)
    }

    fn read_selection(&self, selection: &Lists<D>) -> Result<Vec<Vec<usize>>> {
        let words = self.device.read_words(selection.words.buffer(), selection.count)?;
        let list = |row: usize| {
            let (begin, count) = (words[2 * row] as usize, words[2 * row + 1] as usize);
            words[begin..][..count].iter().map(|&word| word as usize).collect()
        };
        Ok((0..selection.rows).map(list).collect())
    }

    fn attention(
        &self,
        mla: &Mla,
        q: &Rows<D>,
        kv_b: &Weight<D>,
        cache: &Cache<D>,
        places: &Places,
        selection: Option<&Lists<D>>,
    ) -> Result<Rows<D>> {
        self.tally.dispatch(Operation::Attention, Some(kv_b.layout.format));
        mla.check(q.width, cache.width, (kv_b.layout.rows, kv_b.layout.columns));
        places.check(cache.rows, q.rows);
        match selection {
            Some(selection) => {
                assert_eq!(selection.rows, q.rows, "rows and selections");
                self.attend(mla, q, kv_b, cache, selection)
            }
            None => self.attend(mla, q, kv_b, cache, &*self.made.seen(&self.device, places)?),
        }
    }

    fn route(&self, routing: &Routing, gate: &Weight<D>, bias: &Weight<D>, x: &Rows<D>) -> Result<Choice<D>> {
        self.tally.dispatch(Operation::Route, Some(gate.layout.format));
        self.choose(routing, gate, bias, x)
    }

    fn read_choice(&self, choice: &Choice<D>) -> Result<Vec<Vec<Routed>>> {
        let count = choice.rows * choice.chosen;
        let ids = self.device.read_words(choice.ids.buffer(), count)?;
        let weights = self.device.read_words(choice.weights.buffer(), count)?;
        let routed: Vec<Routed> =
            ids.iter().zip(weights).map(|(&id, weight)| (id as usize, f32::from_bits(weight))).collect();
        Ok(routed.chunks(choice.chosen).map(<[Routed]>::to_vec).collect())
    }

    fn announce(&self, experts: &Experts<D>, choice: &Choice<D>) -> Result<()> {
        self.expect(experts, choice)
    }

    fn read_ahead(&self, experts: &Experts<D>, choose: &dyn Fn() -> Result<Choice<D>>) -> Result<()> {
        self.foresee(experts, choose)
    }

    fn expert_counters(&self) -> Option<experts::Counters> {
        self.tiers.as_ref().map(|tiers| tiers.host_counters())
    }

    fn device_expert_counters(&self) -> Option<tiers::Counters> {
        self.tiers.as_ref().map(|tiers| tiers.counters())
    }

    fn experts(&self, experts: &Experts<D>, choice: &Choice<D>, x: &Rows<D>) -> Result<Rows<D>> {
        experts.formats().into_iter().for_each(|format| self.tally.dispatch(Operation::Experts, Some(format)));
        self.mixture(experts, choice, x)
    }

    fn add_experts(
        &self,
        stream: &mut Rows<D>,
        experts: &Experts<D>,
        choice: &Choice<D>,
        x: &Rows<D>,
        shared: &Rows<D>,
    ) -> Result<()> {
        experts.formats().into_iter().for_each(|format| self.tally.dispatch(Operation::Experts, Some(format)));
        self.tally.dispatch(Operation::Add, None);
        self.add_mixture(stream, experts, choice, x, shared)
    }

    fn predict(&self, head: &Weight<D>, x: &Rows<D>, asked: &[Option<u32>]) -> Result<Vec<Prediction>> {
        self.tally.dispatch(Operation::Predict, Some(head.layout.format));
        if x.rows <= LOGIT_ROWS {
            return self.predictions(head, x, asked);
        }
        let mut predictions = Vec::with_capacity(x.rows);
        for first in (0..x.rows).step_by(LOGIT_ROWS) {
            let rows = LOGIT_ROWS.min(x.rows - first);
            let part = self.rows(rows, x.width)?;
            self.copy(x.buffer(), [first, x.width, 0], &part.values, [0, x.width, 0], [rows, x.width])?;
            predictions.extend(self.predictions(head, &part, &asked[first..][..rows])?);
        }
        Ok(predictions)
    }
}
