//! One model on several GPUs of one API: each layer whole on one of them.
//!
//! An operation runs where its weight lies, or its cache, else where its first rows are. What of its operands lies elsewhere
//! is copied there first, by [`Driver::copy_from`]; the kernels, and the order of every sum, are those of one device, so every
//! bit is the same whatever lies where.

use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::Injection;
use super::driver::{Driver, Route};
use super::placement::Placement;
use super::{Experts, Gpu, Weight, device, rows, tiers};
use crate::backend::{
    Backend, Counters, Dsa, ExpertSource, Heads, Kept, Mla, Mode, OnDevice, Pair, Places, Prediction, Rope, Routed,
    Routing,
};
use crate::error::{Faults, Result};
use crate::experts;
use crate::weights::Matrix;

/// Several GPUs.
#[derive(Debug)]
pub struct Many<D: Driver> {
    gpus: Vec<Gpu<D>>,
    placement: Placement,
    /// Bytes that each was given by others.
    copied: Vec<AtomicU64>,
}

/// Opens devices of these numbers, whose launches are counted together, with a fault on purpose on one of them.
pub fn open<D: Driver>(
    numbers: impl Iterator<Item = usize>,
    injection: Option<Injection>,
    open: impl Fn(usize) -> Result<D>,
) -> Result<Vec<Gpu<D>>> {
    let mut gpus: Vec<Gpu<D>> = Vec::new();
    for number in numbers {
        let driver = open(number)?;
        gpus.push(match gpus.first() {
            None => Gpu::new(driver, injection),
            Some(first) => Gpu::beside(driver, first),
        });
    }
    Ok(gpus)
}

/// What lies on one of the devices for good.
#[derive(Debug)]
pub struct On<T> {
    at: usize,
    value: T,
}

/// Rows, or what was chosen by them, with copies on other devices.
#[derive(Debug)]
pub struct Moving<T> {
    at: usize,
    value: Arc<T>,
    copies: Mutex<Vec<(usize, Arc<T>)>>,
}

impl<T> Moving<T> {
    fn new(at: usize, value: T) -> Moving<T> {
        Moving { at, value: Arc::new(value), copies: Mutex::default() }
    }

    fn copies(&self) -> MutexGuard<'_, Vec<(usize, Arc<T>)>> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What can be copied from one device to another.
pub trait Copied<D: Driver>: Sized {
    /// A copy on `to` of what is on `from`, and its bytes.
    fn copied(&self, from: &Gpu<D>, to: &Gpu<D>) -> Result<(Self, u64)>;
}

/// A copy of `count` 4-byte values.
fn values<D: Driver>(
    from: &Gpu<D>,
    to: &Gpu<D>,
    values: &device::Pooled<D>,
    count: usize,
) -> Result<device::Pooled<D>> {
    let copy = to.device.values(count)?;
    let bytes = 4 * count as u64;
    to.device.driver().copy_from(copy.buffer(), from.device.driver(), values.buffer(), bytes)?;
    Ok(copy)
}

impl<D: Driver> Copied<D> for rows::Rows<D> {
    fn copied(&self, from: &Gpu<D>, to: &Gpu<D>) -> Result<(Self, u64)> {
        let copy = values(from, to, &self.values, self.count())?;
        Ok((rows::Rows { values: copy, rows: self.rows, width: self.width }, 4 * self.count() as u64))
    }
}

impl<D: Driver> Copied<D> for rows::Choice<D> {
    fn copied(&self, from: &Gpu<D>, to: &Gpu<D>) -> Result<(Self, u64)> {
        let count = self.rows * self.chosen;
        let (ids, weights) = (values(from, to, &self.ids, count)?, values(from, to, &self.weights, count)?);
        let known = self.known.clone();
        let (rows, chosen) = (self.rows, self.chosen);
        Ok((rows::Choice { ids, weights, rows, chosen, groups: None, known }, 8 * count as u64))
    }
}

impl<D: Driver> Copied<D> for rows::Lists<D> {
    fn copied(&self, from: &Gpu<D>, to: &Gpu<D>) -> Result<(Self, u64)> {
        let words = values(from, to, &self.words, self.count)?;
        let &rows::Lists { rows, longest, count, .. } = self;
        Ok((rows::Lists { words, rows, longest, count }, 4 * count as u64))
    }
}

/// Rows of a cache, on the device where the first were added.
#[derive(Debug)]
pub struct Cache<D: Driver> {
    width: usize,
    kept: Option<On<rows::Cache<D>>>,
}

impl<D: Driver> Cache<D> {
    fn kept(&self) -> &On<rows::Cache<D>> {
        self.kept.as_ref().expect("rows were added before any looks at them")
    }
}

impl<D: Driver> Many<D> {
    /// On devices of which [`Gpu::beside`] counts the launches together, with the place of each layer.
    pub fn new(gpus: Vec<Gpu<D>>, placement: Placement) -> Result<Many<D>> {
        assert!(placement.devices().iter().all(|&device| device < gpus.len()), "a device for each part");
        for (to, from) in (0..gpus.len()).flat_map(|to| (0..gpus.len()).map(move |from| (to, from))) {
            if to != from {
                let _: Route = gpus[to].device.driver().meet(gpus[from].device.driver())?;
            }
        }
        let copied = gpus.iter().map(|_| AtomicU64::new(0)).collect();
        Ok(Many { gpus, placement, copied })
    }

    /// The devices.
    pub fn gpus(&self) -> &[Gpu<D>] {
        &self.gpus
    }

    /// What lies where.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Rows of a cache, on this device if there are none yet.
    fn kept_at<'c>(&self, cache: &'c mut Cache<D>, at: usize) -> Result<&'c mut On<rows::Cache<D>>> {
        Ok(match &mut cache.kept {
            Some(kept) => kept,
            none => none.insert(On { at, value: self.gpus[at].cache(cache.width)? }),
        })
    }

    /// Something on a device: itself, or a copy that is made once.
    fn on<T: Copied<D>>(&self, moving: &Moving<T>, at: usize) -> Result<Arc<T>> {
        if moving.at == at {
            return Ok(moving.value.clone());
        }
        let mut copies = moving.copies();
        if let Some((_, copy)) = copies.iter().find(|(on, _)| *on == at) {
            return Ok(copy.clone());
        }
        let (copy, bytes) = moving.value.copied(&self.gpus[moving.at], &self.gpus[at])?;
        self.copied[at].fetch_add(bytes, Ordering::Relaxed);
        let copy = Arc::new(copy);
        copies.push((at, copy.clone()));
        Ok(copy)
    }

    /// Rows on a device, to be changed there. Copies of what they were are forgotten.
    fn change<'r, T: Copied<D>>(&self, moving: &'r mut Moving<T>, at: usize) -> Result<&'r mut T> {
        if moving.at != at {
            moving.value = self.on(moving, at)?;
            moving.at = at;
        }
        moving.copies().clear();
        Ok(Arc::get_mut(&mut moving.value).expect("nobody else has it: copies are lent for one operation"))
    }
}

impl<T> Deref for On<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<D: Driver> Backend for Many<D> {
    type Weight = On<Weight<D>>;
    type Experts = On<Experts<D>>;
    type Rows = Moving<rows::Rows<D>>;
    type Cache = Cache<D>;
    type Choice = Moving<rows::Choice<D>>;
    type Selection = Moving<rows::Lists<D>>;

    fn name(&self) -> &'static str {
        self.gpus[0].name()
    }

    /// The names of all; of a device that is opened several times once, with the number.
    fn device(&self) -> String {
        let mut names: Vec<(String, usize)> = Vec::new();
        for name in self.gpus.iter().map(Gpu::device) {
            match names.iter_mut().find(|(known, _)| *known == name) {
                Some((_, times)) => *times += 1,
                None => names.push((name, 1)),
            }
        }
        let told = names.into_iter().map(|(name, times)| if times == 1 { name } else { format!("{times} × {name}") });
        told.collect::<Vec<_>>().join(" + ")
    }

    fn mode(&self) -> Mode {
        self.gpus[0].mode()
    }

    fn counters(&self) -> Counters {
        let mut all = Counters::default();
        for (gpu, copied) in self.gpus.iter().zip(&self.copied) {
            let Counters(operations, devices) = gpu.counters();
            for (key, counts) in operations {
                let sum = all.0.entry(key).or_default();
                *sum = sum.and(counts);
            }
            let copied_bytes = copied.load(Ordering::Relaxed);
            all.1.extend(devices.into_iter().map(|device| OnDevice { copied_bytes, ..device }));
        }
        all
    }

    fn arm(&self) {
        self.gpus[0].arm();
    }

    fn upload(&self, name: &str, matrix: Matrix) -> Result<Self::Weight> {
        let at = self.placement.of_weight(name);
        Ok(On { at, value: self.gpus[at].upload(name, matrix)? })
    }

    fn upload_linear(&self, name: &str, matrix: Matrix) -> Result<Self::Weight> {
        let at = self.placement.of_weight(name);
        Ok(On { at, value: self.gpus[at].upload_linear(name, matrix)? })
    }

    fn upload_pair(&self, names: [&str; 2], matrices: [Matrix; 2]) -> Result<Pair<Self::Weight>> {
        let at = self.placement.of_weight(names[0]);
        Ok(self.gpus[at].upload_pair(names, matrices)?.map(|value| On { at, value }))
    }

    fn upload_experts(&self, source: &dyn ExpertSource) -> Result<Self::Experts, Faults> {
        let at = self.placement.of_layer(source.layer());
        Ok(On { at, value: self.gpus[at].upload_experts(source)? })
    }

    fn write(&self, values: &[f32], width: usize) -> Result<Self::Rows> {
        let at = self.placement.first();
        Ok(Moving::new(at, self.gpus[at].write(values, width)?))
    }

    fn read(&self, rows: &Self::Rows) -> Result<Vec<f32>> {
        self.gpus[rows.at].read(&rows.value)
    }

    fn shape(&self, rows: &Self::Rows) -> (usize, usize) {
        self.gpus[rows.at].shape(&rows.value)
    }

    fn slice(&self, x: &Self::Rows, rows: Range<usize>, columns: Range<usize>) -> Result<Self::Rows> {
        Ok(Moving::new(x.at, self.gpus[x.at].slice(&x.value, rows, columns)?))
    }

    fn take(&self, x: &Self::Rows, rows: &[usize]) -> Result<Self::Rows> {
        Ok(Moving::new(x.at, self.gpus[x.at].take(&x.value, rows)?))
    }

    fn concat(&self, a: &Self::Rows, b: &Self::Rows) -> Result<Self::Rows> {
        Ok(Moving::new(a.at, self.gpus[a.at].concat(&a.value, &*self.on(b, a.at)?)?))
    }

    /// Where y is: the sum of a layer's output and of what went into it stays with the layer.
    fn add(&self, x: &mut Self::Rows, y: &Self::Rows) -> Result<()> {
        self.gpus[y.at].add(self.change(x, y.at)?, &y.value)
    }

    fn embed(&self, table: &Self::Weight, ids: &[u32]) -> Result<Self::Rows> {
        Ok(Moving::new(table.at, self.gpus[table.at].embed(table, ids)?))
    }

    fn rms_norm(&self, x: &Self::Rows, weight: &Self::Weight, eps: f64) -> Result<Self::Rows> {
        let at = weight.at;
        Ok(Moving::new(at, self.gpus[at].rms_norm(&*self.on(x, at)?, weight, eps)?))
    }

    fn layer_norm(&self, x: &Self::Rows, weight: &Self::Weight, bias: &Self::Weight, eps: f64) -> Result<Self::Rows> {
        let at = weight.at;
        assert_eq!(at, bias.at, "weight and bias of a norm are of one layer");
        Ok(Moving::new(at, self.gpus[at].layer_norm(&*self.on(x, at)?, weight, bias, eps)?))
    }

    fn matmul(&self, weight: &Self::Weight, x: &Self::Rows) -> Result<Self::Rows> {
        let at = weight.at;
        Ok(Moving::new(at, self.gpus[at].matmul(weight, &*self.on(x, at)?)?))
    }

    fn matmul_pair(&self, pair: Pair<&Self::Weight>, x: &Self::Rows) -> Result<[Self::Rows; 2]> {
        let (Pair::Apart(&On { at, .. }, _) | Pair::Joined(&On { at, .. }, _)) = pair;
        let out = self.gpus[at].matmul_pair(pair.map(|weight| &weight.value), &*self.on(x, at)?)?;
        Ok(out.map(|rows| Moving::new(at, rows)))
    }

    fn add_norm(&self, x: &mut Self::Rows, y: &Self::Rows, weight: &Self::Weight, eps: f64) -> Result<Self::Rows> {
        let at = weight.at;
        let y = self.on(y, at)?;
        Ok(Moving::new(at, self.gpus[at].add_norm(self.change(x, at)?, &y, weight, eps)?))
    }

    fn swiglu(&self, gate: &Self::Rows, up: &Self::Rows) -> Result<Self::Rows> {
        let at = gate.at;
        Ok(Moving::new(at, self.gpus[at].swiglu(&gate.value, &*self.on(up, at)?)?))
    }

    fn rope(&self, x: &mut Self::Rows, rope: &Rope, heads: Heads, positions: &[usize]) -> Result<()> {
        let at = x.at;
        self.gpus[at].rope(self.change(x, at)?, rope, heads, positions)
    }

    fn cache(&self, width: usize) -> Result<Cache<D>> {
        Ok(Cache { width, kept: None })
    }

    fn cache_len(&self, cache: &Cache<D>) -> usize {
        cache.kept.as_ref().map_or(0, |kept| self.gpus[kept.at].cache_len(kept))
    }

    fn append(&self, cache: &mut Cache<D>, rows: &Self::Rows) -> Result<()> {
        let kept = self.kept_at(cache, rows.at)?;
        self.gpus[kept.at].append(&mut kept.value, &*self.on(rows, kept.at)?)
    }

    fn keep(
        &self,
        cache: &mut Cache<D>,
        q: &mut Self::Rows,
        kv: &Self::Rows,
        kept: &Kept<'_, Self::Weight>,
        positions: &[usize],
    ) -> Result<()> {
        let &Kept { norm: &On { at, value: ref norm }, eps, latent, rope, heads } = kept;
        let cache = self.kept_at(cache, at)?;
        assert_eq!(at, cache.at, "a layer's cache is with its weights");
        let kv = self.on(kv, at)?;
        let kept = Kept { norm, eps, latent, rope, heads };
        self.gpus[at].keep(&mut cache.value, self.change(q, at)?, &kv, &kept, positions)
    }

    fn truncate(&self, cache: &mut Cache<D>, len: usize) {
        if let Some(kept) = &mut cache.kept {
            self.gpus[kept.at].truncate(&mut kept.value, len);
        }
    }

    fn select(
        &self,
        dsa: &Dsa,
        q: &Self::Rows,
        weights: &Self::Rows,
        keys: &Cache<D>,
        places: &Places,
    ) -> Result<Self::Selection> {
        let keys = keys.kept();
        let (q, weights) = (self.on(q, keys.at)?, self.on(weights, keys.at)?);
        Ok(Moving::new(keys.at, self.gpus[keys.at].select(dsa, &q, &weights, keys, places)?))
    }

    fn read_selection(&self, selection: &Self::Selection) -> Result<Vec<Vec<usize>>> {
        self.gpus[selection.at].read_selection(&selection.value)
    }

    fn attention(
        &self,
        mla: &Mla,
        q: &Self::Rows,
        kv_b: &Self::Weight,
        cache: &Cache<D>,
        places: &Places,
        selection: Option<&Self::Selection>,
    ) -> Result<Self::Rows> {
        let cache = cache.kept();
        let at = cache.at;
        assert_eq!(at, kv_b.at, "a layer's cache is with its weights");
        let selection = selection.map(|selection| self.on(selection, at)).transpose()?;
        let q = self.on(q, at)?;
        Ok(Moving::new(at, self.gpus[at].attention(mla, &q, kv_b, cache, places, selection.as_deref())?))
    }

    fn route(
        &self,
        routing: &Routing,
        gate: &Self::Weight,
        bias: &Self::Weight,
        x: &Self::Rows,
    ) -> Result<Self::Choice> {
        let at = gate.at;
        assert_eq!(at, bias.at, "weight and bias of a router are of one layer");
        Ok(Moving::new(at, self.gpus[at].route(routing, gate, bias, &*self.on(x, at)?)?))
    }

    fn read_choice(&self, choice: &Self::Choice) -> Result<Vec<Vec<Routed>>> {
        self.gpus[choice.at].read_choice(&choice.value)
    }

    fn announce(&self, experts: &Self::Experts, choice: &Self::Choice) -> Result<()> {
        self.gpus[experts.at].announce(experts, &*self.on(choice, experts.at)?)
    }

    fn read_ahead(&self, experts: &Self::Experts, choose: &dyn Fn() -> Result<Self::Choice>) -> Result<()> {
        let at = experts.at;
        self.gpus[at].read_ahead(experts, &|| {
            let mut choice = choose()?;
            self.change(&mut choice, at)?;
            Ok(Arc::into_inner(choice.value).expect("nobody else has what was chosen just now"))
        })
    }

    /// The sums of all; each has memory of its own.
    fn expert_counters(&self) -> Option<experts::Counters> {
        let counters: Vec<_> = self.gpus.iter().filter_map(Gpu::expert_counters).collect();
        let (peak, budget) = counters.iter().fold((0u64, 0u64), |(peak, budget), counters| {
            (peak.saturating_add(counters.peak_bytes), budget.saturating_add(counters.budget_bytes))
        });
        let sum = counters.into_iter().reduce(|all, counters| all.and(&counters))?;
        Some(experts::Counters { peak_bytes: peak, budget_bytes: budget, ..sum })
    }

    /// The sums of all; each has memory of its own.
    fn device_expert_counters(&self) -> Option<tiers::Counters> {
        let counters: Vec<_> = self.gpus.iter().filter_map(Gpu::device_expert_counters).collect();
        let budget_bytes = counters.iter().map(|counters| counters.budget_bytes).fold(0, u64::saturating_add);
        let sum = counters.into_iter().reduce(|all, counters| all.and(&counters))?;
        Some(tiers::Counters { budget_bytes, ..sum })
    }

    fn experts(&self, experts: &Self::Experts, choice: &Self::Choice, x: &Self::Rows) -> Result<Self::Rows> {
        let at = experts.at;
        let (choice, x) = (self.on(choice, at)?, self.on(x, at)?);
        Ok(Moving::new(at, self.gpus[at].experts(experts, &choice, &x)?))
    }

    fn add_experts(
        &self,
        stream: &mut Self::Rows,
        experts: &Self::Experts,
        choice: &Self::Choice,
        x: &Self::Rows,
        shared: &Self::Rows,
    ) -> Result<()> {
        let at = experts.at;
        let (choice, x, shared) = (self.on(choice, at)?, self.on(x, at)?, self.on(shared, at)?);
        self.gpus[at].add_experts(self.change(stream, at)?, experts, &choice, &x, &shared)
    }

    fn predict(&self, head: &Self::Weight, x: &Self::Rows, asked: &[Option<u32>]) -> Result<Vec<Prediction>> {
        self.gpus[head.at].predict(head, &*self.on(x, head.at)?, asked)
    }
}
