//! Routed experts on demand: read when they are wanted, kept while there is room.
//!
//! A cache has a budget of bytes for everything that it keeps: experts, memory that is free to be used again, and what its
//! readers need. What an expert has in the files is usually two ranges (codes and scales of its three matrices are neighbours
//! in a container). They are read past the system's cache where that is possible, by threads of the cache's own, in pieces at
//! the same time: the first expert is there as soon as the disk allows, and computing begins. Requests are served in the order in which they were made, and before anything that is only likely to be
//! wanted.
//!
//! What is computed never depends on the cache: whoever asks gets the same bytes, sooner or later.

mod place;
mod state;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Fault, FaultKind, Place as At, Result};
use crate::format::Format;
use crate::io::PageBuffer;
use crate::limits;
use crate::weights::{Located, MatrixRef};
use place::{Files, Place, Size, Slot};
use state::{Answer, Early, State, Ticket};

/// What reading routed experts on demand took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Experts")]
pub struct Counters {
    /// Experts that were asked for.
    pub requests: u64,
    /// Of these, experts for which nothing had to be read after they were asked for.
    pub hits: u64,
    /// Experts that were read because they were likely to be asked for next.
    pub read_ahead: u64,
    /// Of the hits, those that were read for that reason.
    pub read_ahead_hits: u64,
    /// Reads of files.
    pub reads: u64,
    /// Their bytes.
    pub bytes_read: u64,
    /// Seconds that computing waited for reading.
    pub wait_seconds: f64,
    /// Experts that had to go for others.
    pub evictions: u64,
    /// Largest number of bytes that were kept, what readers need included.
    pub peak_bytes: u64,
    /// Most that could have been kept.
    pub budget_bytes: u64,
    /// Whether reads went past the system's cache.
    pub direct: bool,
}

impl Counters {
    /// Those of two runs together: sums, and the larger of two sizes.
    pub fn and(&self, other: &Counters) -> Counters {
        Counters {
            requests: self.requests + other.requests,
            hits: self.hits + other.hits,
            read_ahead: self.read_ahead + other.read_ahead,
            read_ahead_hits: self.read_ahead_hits + other.read_ahead_hits,
            reads: self.reads + other.reads,
            bytes_read: self.bytes_read + other.bytes_read,
            wait_seconds: self.wait_seconds + other.wait_seconds,
            evictions: self.evictions + other.evictions,
            peak_bytes: self.peak_bytes.max(other.peak_bytes),
            budget_bytes: self.budget_bytes.max(other.budget_bytes),
            direct: self.direct && other.direct,
        }
    }
}

/// How a cache works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Most bytes that it may keep.
    pub budget_bytes: u64,
    /// Experts that are read at the same time.
    pub readers: usize,
    /// Whether to read past the system's cache, where that is possible.
    pub direct: bool,
}

impl Options {
    /// The fastest way that was measured, within a budget.
    pub fn within(budget_bytes: u64) -> Options {
        Options { budget_bytes, readers: limits::EXPERT_READERS, direct: true }
    }
}

/// At most the memory of an expert of so many bytes of codes and scales.
pub fn slot_bytes(code_bytes: u64, scale_bytes: u64) -> u64 {
    Size::bound(code_bytes, scale_bytes)
}

/// At most what all readers need for experts of which so many bytes are not used as they are stored.
pub fn staging_bytes(staged_bytes: u64) -> u64 {
    Size::bound(staged_bytes, 0).saturating_mul(limits::EXPERT_READERS as u64)
}

/// What threads share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// There may be something to read.
    work: Condvar,
    /// Something was read.
    done: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with the state")
    }
}

/// Experts of all layers within one budget.
#[derive(Debug)]
pub struct ExpertCache {
    shared: Arc<Shared>,
    files: Mutex<Files>,
    readers: Mutex<Vec<JoinHandle<()>>>,
    options: Options,
}

impl ExpertCache {
    /// An empty cache.
    pub fn new(options: Options) -> ExpertCache {
        let state = State::new(options.budget_bytes);
        let shared = Shared { state: Mutex::new(state), work: Condvar::new(), done: Condvar::new() };
        ExpertCache {
            shared: Arc::new(shared),
            files: Mutex::new(Files::default()),
            readers: Mutex::new(Vec::new()),
            options,
        }
    }

    /// What it did so far.
    pub fn counters(&self) -> Counters {
        self.shared.lock().counters
    }

    /// Adds the next layer: gate, up and down projection of each expert. Nothing is read yet. A budget that does not
    /// suffice for one of the experts is [`FaultKind::ExpertsMemory`].
    pub fn add_layer(self: &Arc<Self>, experts: &[[Located<'_>; 3]]) -> Result<ExpertLayer> {
        let mut files = self.files.lock().expect("no thread panics with the files");
        let direct = self.options.direct;
        let places: Vec<Place> =
            experts.iter().map(|expert| Place::new(expert, &mut files, direct)).collect::<Result<_>>()?;
        let formats = places.first().map(Place::formats);
        let staging = places.iter().map(Place::staging_bytes).max().unwrap_or(0);
        let largest = places.iter().map(|place| place.size().bytes()).max().unwrap_or(0);
        let mut state = self.shared.lock();
        state.reserved = state.reserved.max(Size::of_buffer(staging) * self.options.readers as u64);
        let (needed, budget) = (largest + state.reserved, self.options.budget_bytes);
        if needed > budget {
            let kind = FaultKind::ExpertsMemory { needed, available: budget };
            let directory = experts[0][0].codes.file.path().parent().unwrap_or_else(|| experts[0][0].codes.file.path());
            return Err(Fault::new(At::file(directory), kind));
        }
        state.counters.direct = files.are_direct();
        let count = places.len();
        let (number, _) = state.add_layer(places);
        drop(state);
        self.start_readers()?;
        Ok(ExpertLayer { cache: self.clone(), number, count, formats })
    }

    fn start_readers(&self) -> Result<()> {
        let mut readers = self.readers.lock().expect("no thread panics with the readers");
        if !readers.is_empty() {
            return Ok(());
        }
        let pool = Arc::new(crate::threads::pool(limits::EXPERT_READ_THREADS, std::path::Path::new("experts"))?);
        while readers.len() < self.options.readers.max(1) {
            let (shared, pool) = (self.shared.clone(), pool.clone());
            let thread = std::thread::Builder::new().name("experts".to_owned());
            let started = thread.spawn(move || read(&shared, &pool));
            let fault = |e: std::io::Error| Fault::new(At::default(), FaultKind::Threads { message: e.to_string() });
            readers.push(started.map_err(fault)?);
        }
        Ok(())
    }
}

impl Drop for ExpertCache {
    /// Waits for what is being read.
    fn drop(&mut self) {
        if let Ok(mut state) = self.shared.state.lock() {
            state.closing = true;
        }
        self.shared.work.notify_all();
        let readers = self.readers.get_mut().map(std::mem::take).unwrap_or_default();
        readers.into_iter().for_each(|reader| drop(reader.join()));
    }
}

/// What a reader does.
fn read(shared: &Shared, pool: &rayon::ThreadPool) {
    let mut staging = PageBuffer::default();
    let mut state = shared.lock();
    loop {
        if state.closing {
            return;
        }
        let Some(mut job) = state.pick() else {
            state = shared.work.wait(state).expect("no thread panics with the state");
            continue;
        };
        drop(state);
        let guard = Alive(shared);
        let read = job.place.read(&mut job.slot, &mut staging, pool);
        std::mem::forget(guard);
        state = shared.lock();
        state.finish(job, read);
        shared.done.notify_all();
        // What one could not read for want of memory, another may now.
        shared.work.notify_all();
    }
}

/// Dropped by a reader that panics, so that nobody waits for it.
struct Alive<'a>(&'a Shared);

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        if let Ok(mut state) = self.0.state.lock() {
            state.broken = true;
        }
        self.0.done.notify_all();
    }
}

/// The experts of one layer.
#[derive(Debug)]
pub struct ExpertLayer {
    cache: Arc<ExpertCache>,
    number: usize,
    count: usize,
    formats: Option<[Format; 3]>,
}

impl ExpertLayer {
    /// How many experts there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Formats of gate, up and down projection of the first expert.
    pub fn formats(&self) -> Option<[Format; 3]> {
        self.formats
    }

    /// Whether any is not in memory.
    pub fn has_absent(&self) -> bool {
        self.cache.shared.lock().has_absent(self.number)
    }

    /// Asks for experts, which are given in this order.
    pub fn request(&self, experts: &[usize]) -> Requests<'_> {
        let tickets = self.cache.shared.lock().request(self.number, experts);
        self.cache.shared.work.notify_all();
        Requests { cache: &self.cache, tickets }
    }

    /// Has experts read that will be asked for in a moment.
    pub fn announce(&self, experts: &[usize]) {
        self.expect(experts, Early::Sure);
    }

    /// Has experts read that are likely to be asked for next, as long as nothing else is to be read.
    pub fn read_ahead(&self, experts: &[usize]) {
        self.expect(experts, Early::Likely);
    }

    fn expect(&self, experts: &[usize], early: Early) {
        self.cache.shared.lock().expect(self.number, experts, early);
        self.cache.shared.work.notify_all();
    }
}

impl Drop for ExpertLayer {
    fn drop(&mut self) {
        if let Ok(mut state) = self.cache.shared.state.lock() {
            state.remove_layer(self.number);
        }
    }
}

/// Experts that were asked for.
#[derive(Debug)]
pub struct Requests<'c> {
    cache: &'c Arc<ExpertCache>,
    tickets: VecDeque<Ticket>,
}

impl<'c> Iterator for Requests<'c> {
    type Item = Result<Expert<'c>>;

    /// Waits for the next. The one before must have been given back, or a small cache never has room for it.
    fn next(&mut self) -> Option<Result<Expert<'c>>> {
        let ticket = self.tickets.pop_front()?;
        let shared = &self.cache.shared;
        let mut state = shared.lock();
        let mut started = None;
        let answer = loop {
            assert!(!state.broken, "a thread that reads experts panicked");
            match state.take(&ticket) {
                Answer::Wait => {
                    started.get_or_insert_with(Instant::now);
                    state = shared.done.wait(state).expect("no thread panics with the state");
                }
                answer => break answer,
            }
        };
        if let Some(started) = started {
            state.counters.wait_seconds += started.elapsed().as_secs_f64();
        }
        match answer {
            Answer::Held(index, place, slot) => Some(Ok(Expert { cache: self.cache, index, place, slot: Some(slot) })),
            Answer::Failed(fault) => {
                drop(state);
                // Others may want it still.
                shared.work.notify_all();
                Some(Err(fault))
            }
            Answer::Wait => unreachable!("waited until it was answered"),
        }
    }
}

impl Drop for Requests<'_> {
    fn drop(&mut self) {
        if let (false, Ok(mut state)) = (self.tickets.is_empty(), self.cache.shared.state.lock()) {
            self.tickets.iter().for_each(|ticket| state.cancel(ticket));
            drop(state);
            self.cache.shared.work.notify_all();
        }
    }
}

/// An expert in memory, which stays there until this is dropped.
#[derive(Debug)]
pub struct Expert<'c> {
    cache: &'c Arc<ExpertCache>,
    index: usize,
    place: Arc<Place>,
    /// Absent only while it is dropped.
    slot: Option<Arc<Slot>>,
}

impl Expert<'_> {
    /// Gate, up and down projection.
    pub fn matrices(&self) -> [MatrixRef<'_>; 3] {
        self.place.matrices(self.slot.as_ref().expect("held"))
    }
}

impl Drop for Expert<'_> {
    fn drop(&mut self) {
        // Before anybody learns that nobody holds it.
        drop(self.slot.take());
        if let Ok(mut state) = self.cache.shared.state.lock() {
            state.release(self.index);
        }
        self.cache.shared.work.notify_all();
    }
}
