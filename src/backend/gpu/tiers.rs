//! Routed experts in tiers: some on the device, within a budget of bytes, more in memory, the rest on the disk.
//!
//! The room on the device is taken at once, before the first expert is computed: shelves of places for experts of equal
//! layouts, in buffers that the device can hold. Which experts have the places is measured use (`state`). What is not there
//! comes from [`crate::experts`], which has a budget of its own in memory, and is uploaded beside what is computed: a pass
//! goes through the experts that are on the device first, then through those that arrive, as many at once as there is room for.
//!
//! What is computed never depends on where an expert was: each fills the slots of the rows that chose it, and `combine` adds
//! slots in the order of the choice.

mod shelf;
mod state;
#[cfg(test)]
pub(in crate::backend) mod tests;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::device::Device;
use super::driver::Driver;
use super::weight::{ABSENT, Layout, Slab, each_once, words_of};
use crate::backend::ExpertSource;
use crate::error::{Faults, Result};
use crate::experts::{self, ExpertCache, ExpertLayer, Requests};
use crate::roles::Projection;
use crate::weights::{Located, Matrix, MatrixRef};
use shelf::Shelf;
use state::State;

/// Experts that are waited for before they are computed: with fewer, computing would begin sooner and be started more often.
const ARRIVALS: usize = 16;

/// Gate, up and down.
const PROJECTIONS: [Projection; 3] = [Projection::Gate, Projection::Up, Projection::Down];

/// What keeping routed experts on a device took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "DeviceExperts")]
pub struct Counters {
    /// Experts that a pass through a layer wanted.
    pub requests: u64,
    /// Of these, experts that were on the device.
    pub hits: u64,
    /// Experts that were uploaded.
    pub uploads: u64,
    /// Their bytes.
    pub bytes_uploaded: u64,
    /// Experts that had to go for others.
    pub evictions: u64,
    /// Bytes of the device's memory that are theirs.
    pub budget_bytes: u64,
    /// Seconds that the program spent on experts which were not on the device: waiting for memory and disk, and copying.
    pub wait_seconds: f64,
}

impl Counters {
    /// What was counted after others of the same tiers.
    pub fn since(&self, before: &Counters) -> Counters {
        Counters {
            requests: self.requests - before.requests,
            hits: self.hits - before.hits,
            uploads: self.uploads - before.uploads,
            bytes_uploaded: self.bytes_uploaded - before.bytes_uploaded,
            evictions: self.evictions - before.evictions,
            budget_bytes: self.budget_bytes,
            wait_seconds: self.wait_seconds - before.wait_seconds,
        }
    }

    /// Those of two runs together: sums, and the larger of two sizes.
    pub fn and(&self, other: &Counters) -> Counters {
        Counters {
            requests: self.requests + other.requests,
            hits: self.hits + other.hits,
            uploads: self.uploads + other.uploads,
            bytes_uploaded: self.bytes_uploaded + other.bytes_uploaded,
            evictions: self.evictions + other.evictions,
            budget_bytes: self.budget_bytes.max(other.budget_bytes),
            wait_seconds: self.wait_seconds + other.wait_seconds,
        }
    }
}

/// How much of each tier there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Bytes of the device's memory at most.
    pub device_bytes: u64,
    /// Whether fewer will do where the device has not so many after all.
    pub fewer: bool,
    /// What is between the device and the disk.
    pub host: experts::Options,
}

impl Options {
    /// How much each tier has, for people: `routed experts have 96.0 GB of the GPU's memory and 200.0 GB of the machine's`.
    pub fn told(&self) -> String {
        let gigabytes = |bytes: u64| match bytes {
            u64::MAX => "all".to_owned(),
            bytes if bytes < 100_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
            bytes => format!("{:.1} GB", bytes as f64 / 1e9),
        };
        let (device, host) = (gigabytes(self.device_bytes), gigabytes(self.host.budget_bytes));
        format!("routed experts have {device} of the GPU's memory and {host} of the machine's")
    }
}

/// Layouts of gate, up and down projection.
pub(super) type Class = [Layout; 3];

/// The tiers of a device.
#[derive(Debug)]
pub(super) struct Tiers<D: Driver> {
    device: Arc<Device<D>>,
    options: Options,
    host: Arc<ExpertCache>,
    inner: Mutex<Inner<D>>,
}

#[derive(Debug)]
struct Inner<D: Driver> {
    state: State,
    classes: Vec<Class>,
    /// Classes that have shelves.
    shelved: usize,
    shelves: Vec<Shelf<D>>,
}

/// Where experts come from that are not on the device.
#[derive(Debug)]
enum Host {
    /// Those that are in no file.
    Loaded(Vec<[Matrix; 3]>),
    /// All others.
    OnDemand(ExpertLayer),
}

/// The routed experts of one layer.
#[derive(Debug)]
pub(super) struct Layer<D: Driver> {
    tiers: Arc<Tiers<D>>,
    number: usize,
    host: Host,
    /// Output features of gate and up.
    pub inner_rows: usize,
    /// Every layout once.
    pub layouts: Vec<Layout>,
    /// Names of each expert's matrices.
    names: Vec<[String; 3]>,
}

impl<D: Driver> Tiers<D> {
    /// Nothing is taken yet.
    pub fn new(device: Arc<Device<D>>, options: Options) -> Tiers<D> {
        let inner = Inner { state: State::default(), classes: Vec::new(), shelved: 0, shelves: Vec::new() };
        Tiers { device, options, host: Arc::new(ExpertCache::new(options.host)), inner: Mutex::new(inner) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner<D>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it did so far.
    pub fn counters(&self) -> Counters {
        let counters = self.inner().state.counters;
        match counters.budget_bytes {
            0 => Counters { budget_bytes: self.options.device_bytes, ..counters },
            _ => counters,
        }
    }

    /// What the tier below did so far.
    pub fn host_counters(&self) -> experts::Counters {
        self.host.counters()
    }

    /// Everything that was asked of the device is done.
    pub fn passed(&self) {
        self.inner().state.passed();
    }

    /// Adds a layer; nothing of it is read yet. A format that no kernel reads is refused by name.
    pub fn add_layer(self: &Arc<Self>, source: &dyn ExpertSource) -> Result<Layer<D>, Faults> {
        let driver = self.device.driver();
        let mut classes: Vec<Class> = Vec::with_capacity(source.count());
        for expert in 0..source.count() {
            let layout = |projection| Layout::of_expert(driver, source, expert, projection);
            classes.push([layout(PROJECTIONS[0])?, layout(PROJECTIONS[1])?, layout(PROJECTIONS[2])?]);
        }
        let located: Option<Vec<_>> =
            (0..source.count()).map(|expert| located(source, expert)).collect::<Result<_>>()?;
        let host = match located {
            Some(experts) => Host::OnDemand(self.host.add_layer(&experts)?),
            None => {
                let load = |expert, projection| source.load(expert, projection);
                let expert = |e| Ok([load(e, PROJECTIONS[0])?, load(e, PROJECTIONS[1])?, load(e, PROJECTIONS[2])?]);
                Host::Loaded((0..source.count()).map(expert).collect::<Result<_>>()?)
            }
        };
        let layouts = each_once((0..3).flat_map(|projection| classes.iter().map(move |class| class[projection])));
        let inner_rows = classes.first().map_or(0, |class| class[0].rows);
        let names = |expert| PROJECTIONS.map(|projection| source.name(expert, projection));
        let names = (0..source.count()).map(names).collect();
        let number = self.inner().add_layer(&classes);
        Ok(Layer { tiers: self.clone(), number, host, inner_rows, layouts, names })
    }
}

impl<D: Driver> Inner<D> {
    fn add_layer(&mut self, classes: &[Class]) -> usize {
        let mut numbers = Vec::with_capacity(classes.len());
        for class in classes {
            let known = self.classes.iter().position(|known| known == class);
            numbers.push(known.unwrap_or_else(|| {
                self.classes.push(*class);
                self.classes.len() - 1
            }));
        }
        self.state.add_layer(&numbers)
    }
}

/// Where an expert's matrices are; `None` if one is in no file.
fn located(source: &dyn ExpertSource, expert: usize) -> Result<Option<[Located<'_>; 3]>> {
    let [gate, up, down] = PROJECTIONS.map(|projection| source.locate(expert, projection));
    Ok(gate?.zip(up?).zip(down?).map(|((gate, up), down)| [gate, up, down]))
}

impl<D: Driver> Layer<D> {
    /// Experts of these that are not on the device.
    fn missing(&self, experts: &[usize]) -> Vec<usize> {
        let inner = self.tiers.inner();
        experts.iter().copied().filter(|&expert| inner.state.slot(self.number, expert).is_none()).collect()
    }

    /// Has experts read that will be asked for in a moment, ascending.
    pub fn announce(&self, experts: &[usize]) {
        if let Host::OnDemand(host) = &self.host {
            host.announce(&self.missing(experts));
        }
    }

    /// Whether any expert is neither on the device nor, all of them, in memory.
    pub fn has_absent(&self) -> bool {
        match &self.host {
            Host::OnDemand(host) => !self.tiers.inner().state.has_all(self.number) && host.has_absent(),
            Host::Loaded(_) => false,
        }
    }

    /// Has experts read that are likely to be asked for next.
    pub fn read_ahead(&self, experts: &[usize]) {
        if let Host::OnDemand(host) = &self.host {
            host.read_ahead(&self.missing(experts));
        }
    }

    /// Begins a pass: `wanted` are its experts, ascending, each with how many slots it fills; a batch fills `most_slots`
    /// at most, but for one expert that fills more by itself. The room on the device is taken where it was not.
    pub fn pass(&self, wanted: &[(usize, usize)], most_slots: usize) -> Result<Pass<'_, D>> {
        let tiers = &*self.tiers;
        let mut inner = tiers.inner();
        inner.shelve(&tiers.device, &tiers.options)?;
        inner.state.request(self.number, wanted.iter().map(|&(expert, _)| expert));
        let here = |&(expert, _): &(usize, usize)| inner.state.slot(self.number, expert).is_some();
        let (resident, missing): (VecDeque<_>, VecDeque<_>) = wanted.iter().copied().partition(here);
        let asked: Vec<usize> = missing.iter().map(|&(expert, _)| expert).collect();
        let arriving = match &self.host {
            Host::Loaded(experts) => Arriving::Loaded(experts),
            Host::OnDemand(host) => Arriving::Read(host.request(&asked)),
        };
        Ok(Pass { tiers, inner, layer: self.number, names: &self.names, resident, missing, arriving, most_slots })
    }
}

impl<D: Driver> Drop for Layer<D> {
    fn drop(&mut self) {
        self.tiers.inner().state.remove_layer(self.number);
    }
}

/// Experts on their way to the device.
enum Arriving<'l> {
    Loaded(&'l [[Matrix; 3]]),
    Read(Requests<'l>),
}

/// One way through the chosen experts of a layer, in batches.
pub(super) struct Pass<'l, D: Driver> {
    tiers: &'l Tiers<D>,
    inner: MutexGuard<'l, Inner<D>>,
    layer: usize,
    names: &'l [[String; 3]],
    /// Experts that are on the device, with the slots that they fill, and those that are not.
    resident: VecDeque<(usize, usize)>,
    missing: VecDeque<(usize, usize)>,
    arriving: Arriving<'l>,
    most_slots: usize,
}

/// Experts that are on the device together: the shelves where they stand, whose tables say where.
pub(super) struct Batch(Vec<usize>);

impl<D: Driver> Pass<'_, D> {
    /// The next experts that are on the device; `None` when all were. What is started for the batch must be started before
    /// the next is asked for.
    pub fn next(&mut self) -> Result<Option<Batch>> {
        self.inner.state.begin_batch();
        let mut experts = Vec::new();
        if !self.resident.is_empty() {
            let mut slots = 0;
            while let Some(&(expert, fills)) = self.resident.front().filter(|(_, fills)| self.fits(slots, *fills)) {
                self.resident.pop_front();
                self.inner.state.hold(self.layer, expert);
                slots += fills;
                experts.push(expert);
            }
        } else if !self.missing.is_empty() {
            let started = Instant::now();
            let arrived = self.arrive(&mut experts);
            self.inner.state.counters.wait_seconds += started.elapsed().as_secs_f64();
            arrived?;
        } else {
            return Ok(None);
        }
        self.tables(&experts).map(Some)
    }

    fn fits(&self, slots: usize, more: usize) -> bool {
        slots == 0 || slots + more <= self.most_slots
    }

    /// The next experts that are missing, as many as there is room for. Launches come after what was uploaded, those of later
    /// passes too where one of the experts cannot be read.
    fn arrive(&mut self, experts: &mut Vec<usize>) -> Result<()> {
        let uploaded = self.upload(experts);
        uploaded.and(self.tiers.device.driver().launches_after_uploads())
    }

    fn upload(&mut self, experts: &mut Vec<usize>) -> Result<()> {
        let driver = self.tiers.device.driver();
        let mut slots = 0;
        while experts.len() < ARRIVALS {
            let Some(&(expert, fills)) = self.missing.front().filter(|(_, fills)| self.fits(slots, *fills)) else {
                break;
            };
            let Some((slot, under_way)) = self.inner.state.room(self.layer, expert) else { break };
            if under_way {
                // Somebody computes with what was there until now.
                driver.uploads_after_launches()?;
                self.inner.state.passed_but_this();
            }
            self.missing.pop_front();
            let place = self.inner.state.place(slot);
            let shelf = &self.inner.shelves[place.shelf];
            let bytes = match &mut self.arriving {
                Arriving::Loaded(experts) => {
                    let matrices = experts[expert].each_ref().map(Matrix::view);
                    put(driver, shelf, place.at, &self.names[expert], matrices)?
                }
                Arriving::Read(requests) => {
                    let read = requests.next().expect("a request for each that is missing")?;
                    put(driver, shelf, place.at, &self.names[expert], read.matrices())?
                }
            };
            self.inner.state.arrived(self.layer, expert, slot);
            self.inner.state.counters.uploads += 1;
            self.inner.state.counters.bytes_uploaded += bytes;
            slots += fills;
            experts.push(expert);
        }
        assert!(!experts.is_empty(), "there is room for one expert of every class");
        Ok(())
    }

    /// Writes the tables of the shelves where some experts stand: these and no others are computed.
    fn tables(&self, experts: &[usize]) -> Result<Batch> {
        let mut tables: Vec<(usize, Vec<u32>)> = Vec::new();
        for &expert in experts {
            let place = self.inner.state.slot(self.layer, expert).expect("it is on the device");
            let known = tables.iter().position(|(shelf, _)| *shelf == place.shelf);
            let at = known.unwrap_or_else(|| {
                tables.push((place.shelf, vec![ABSENT; self.inner.state.count(self.layer)]));
                tables.len() - 1
            });
            tables[at].1[expert] = place.at as u32;
        }
        for (shelf, table) in &tables {
            let places = &self.inner.shelves[*shelf].places;
            self.tiers.device.driver().write(places, 0, &words_of(table))?;
        }
        Ok(Batch(tables.into_iter().map(|(shelf, _)| shelf).collect()))
    }

    /// Where one projection of a batch's experts stands.
    pub fn slabs(&self, batch: &Batch, projection: Projection) -> Vec<&Slab<D>> {
        batch.0.iter().map(|&shelf| &self.inner.shelves[shelf].slabs[projection as usize]).collect()
    }
}

/// Uploads an expert to its place; tells how many bytes it has there.
fn put<D: Driver>(
    driver: &D,
    shelf: &Shelf<D>,
    at: usize,
    names: &[String; 3],
    matrices: [MatrixRef<'_>; 3],
) -> Result<u64> {
    for ((slab, matrix), name) in shelf.slabs.iter().zip(matrices).zip(names) {
        slab.put(at, name, matrix, |to, offset, bytes| driver.upload(to, offset, bytes))?;
    }
    Ok(shelf.expert_bytes())
}
