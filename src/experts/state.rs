//! Which experts are in memory, which are wanted, and which have to go: the cache without its threads.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use super::Counters;
use super::place::{Place, Size, Slot};
use crate::error::{Fault, Result};

/// Uses are halved whenever there were so many requests for each expert: what was used long ago counts little.
const AGING: u64 = 4;

/// Why an expert is read before it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Early {
    /// It will be asked for in a moment.
    Sure,
    /// It is likely to be asked for.
    Likely,
    /// Either, but it was there already.
    Kept,
}

/// Where an expert is.
#[derive(Debug)]
enum Status {
    Absent,
    Reading,
    Ready(Arc<Slot>),
    /// Reading it failed; whoever waits is told.
    Failed(Fault),
}

/// One expert.
#[derive(Debug)]
struct Entry {
    place: Arc<Place>,
    layer: usize,
    status: Status,
    /// Whoever computes with it now.
    holders: u32,
    /// Open requests, ascending.
    wanted: VecDeque<u64>,
    /// It was read, is being read, or is kept early, and not asked for yet.
    early: Option<Early>,
    /// How often it was read.
    reads: u64,
    /// Requests, those of long ago counted less.
    uses: u32,
    /// The last request.
    last: u64,
}

/// A request that is not answered yet.
#[derive(Debug)]
pub(super) struct Ticket {
    index: usize,
    number: u64,
    /// How often it will have been read when nothing had to be read for this request.
    reads_of_hit: Option<u64>,
    likely: bool,
}

/// What becomes of a request.
pub(super) enum Answer {
    /// The expert, which is held until [`State::release`].
    Held(usize, Arc<Place>, Arc<Slot>),
    /// It cannot be read.
    Failed(Fault),
    /// Not yet.
    Wait,
}

/// An expert that is to be read now, and the memory for it.
pub(super) struct Job {
    pub index: usize,
    pub place: Arc<Place>,
    pub slot: Slot,
}

/// On whose behalf memory is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// Of a request with that number.
    Request(u64),
    /// Of nobody yet.
    Early,
}

/// The cache without its threads.
#[derive(Debug)]
pub(super) struct State {
    entries: Vec<Entry>,
    layers: Vec<Range<usize>>,
    /// Experts to be read for the first of their requests, by its number.
    queue: BTreeMap<u64, usize>,
    /// Experts to be read early, in order.
    early: VecDeque<(usize, Early)>,
    /// Memory that is free to be used again.
    spare: Vec<(Size, Slot)>,
    /// Bytes of all slots: filled, being filled, and spare.
    bytes: u64,
    /// Bytes of experts that are early.
    early_bytes: u64,
    /// Bytes that readers need beside.
    pub reserved: u64,
    requests: u64,
    since_aging: u64,
    /// The layer that was asked for last.
    current: usize,
    pub counters: Counters,
    /// Nobody needs the readers any more.
    pub closing: bool,
    /// A reader panicked.
    pub broken: bool,
}

impl State {
    pub fn new(budget: u64) -> State {
        State {
            entries: Vec::new(),
            layers: Vec::new(),
            queue: BTreeMap::new(),
            early: VecDeque::new(),
            spare: Vec::new(),
            bytes: 0,
            early_bytes: 0,
            reserved: 0,
            requests: 0,
            since_aging: 0,
            current: 0,
            counters: Counters { budget_bytes: budget, direct: true, ..Counters::default() },
            closing: false,
            broken: false,
        }
    }

    /// Adds a layer, and tells its number and its first expert.
    pub fn add_layer(&mut self, places: Vec<Place>) -> (usize, usize) {
        let (layer, first) = (self.layers.len(), self.entries.len());
        self.layers.push(first..first + places.len());
        self.entries.extend(places.into_iter().map(|place| Entry {
            place: Arc::new(place),
            layer,
            status: Status::Absent,
            holders: 0,
            wanted: VecDeque::new(),
            early: None,
            reads: 0,
            uses: 0,
            last: 0,
        }));
        (layer, first)
    }

    /// Forgets the experts of a layer that nobody asks for any more.
    pub fn remove_layer(&mut self, layer: usize) {
        for index in self.layers[layer].clone() {
            if matches!(self.entries[index].status, Status::Ready(_)) && self.entries[index].holders == 0 {
                let (size, slot) = self.evict(index);
                drop(slot);
                self.bytes -= size.bytes();
            }
        }
        for index in self.layers[layer].clone() {
            self.settle(index);
        }
        self.early.retain(|&(index, _)| self.entries[index].layer != layer);
    }

    /// Whether an expert of a layer is not in memory.
    pub fn has_absent(&self, layer: usize) -> bool {
        let mut entries = self.layers[layer].clone().map(|index| &self.entries[index]);
        entries.any(|entry| matches!(entry.status, Status::Absent | Status::Failed(_)))
    }

    /// Asks for experts of a layer, which are answered in this order.
    pub fn request(&mut self, layer: usize, experts: &[usize]) -> VecDeque<Ticket> {
        let first = self.layers[layer].start;
        self.current = layer;
        let tickets = experts.iter().map(|expert| self.ask(first + expert)).collect();
        // What was read early for this layer and is not asked for was in vain.
        for index in self.layers[layer].clone() {
            self.settle(index);
        }
        tickets
    }

    fn ask(&mut self, index: usize) -> Ticket {
        self.requests += 1;
        self.counters.requests += 1;
        self.since_aging += 1;
        if self.since_aging > AGING * self.entries.len() as u64 {
            self.since_aging = 0;
            self.entries.iter_mut().for_each(|entry| entry.uses /= 2);
        }
        let early = self.settle(index);
        let number = self.requests;
        let entry = &mut self.entries[index];
        entry.uses += 1;
        entry.last = number;
        let reads_of_hit = match (&entry.status, early) {
            (_, Some(Early::Sure)) => None,
            (Status::Ready(_), _) => Some(entry.reads),
            (Status::Reading, _) => Some(entry.reads + 1),
            _ => None,
        };
        if matches!(entry.status, Status::Absent) && entry.wanted.is_empty() {
            self.queue.insert(number, index);
        }
        entry.wanted.push_back(number);
        Ticket { index, number, reads_of_hit, likely: early == Some(Early::Likely) }
    }

    /// An expert that was read early is one like any other from now on; tells whether it was.
    fn settle(&mut self, index: usize) -> Option<Early> {
        let early = self.entries[index].early.take();
        if early.is_some() {
            self.early_bytes -= self.entries[index].place.size().bytes();
        }
        early
    }

    /// Has experts of a layer read early, after those that are asked for. `Sure` ones replace all others.
    pub fn expect(&mut self, layer: usize, experts: &[usize], early: Early) {
        if early == Early::Sure {
            self.early.clear();
        }
        let first = self.layers[layer].start;
        for index in experts.iter().map(|expert| first + expert) {
            match self.entries[index].status {
                Status::Absent => self.early.push_back((index, early)),
                Status::Ready(_) => self.hasten(index, Early::Kept),
                Status::Reading | Status::Failed(_) => {}
            }
        }
    }

    /// An expert is kept for a request that is still to come.
    fn hasten(&mut self, index: usize, early: Early) {
        let entry = &mut self.entries[index];
        if entry.early.is_none() {
            entry.early = Some(early);
            self.early_bytes += entry.place.size().bytes();
        }
    }

    /// What to read now, if anything can be read now.
    pub fn pick(&mut self) -> Option<Job> {
        if let Some((&number, &index)) = self.queue.first_key_value() {
            // Nobody overtakes the first: it gets what memory becomes free.
            let slot = self.room(self.entries[index].place.size(), Claim::Request(number))?;
            self.queue.remove(&number);
            return Some(self.start(index, slot));
        }
        while let Some((index, early)) = self.early.pop_front() {
            let entry = &self.entries[index];
            if !matches!(entry.status, Status::Absent) || !entry.wanted.is_empty() {
                continue;
            }
            let size = entry.place.size();
            let most = (self.counters.budget_bytes.saturating_sub(self.reserved)) / 2;
            let fits = early == Early::Sure || self.early_bytes + size.bytes() <= most;
            let Some(slot) = fits.then(|| self.room(size, Claim::Early)).flatten() else {
                self.early.clear();
                return None;
            };
            self.hasten(index, early);
            self.counters.read_ahead += u64::from(early == Early::Likely);
            return Some(self.start(index, slot));
        }
        None
    }

    fn start(&mut self, index: usize, slot: Slot) -> Job {
        let entry = &mut self.entries[index];
        entry.status = Status::Reading;
        Job { index, place: entry.place.clone(), slot }
    }

    /// Takes what was read, and in how many reads, or why it could not be.
    pub fn finish(&mut self, job: Job, read: Result<u64>) {
        let Job { index, place, slot } = job;
        self.entries[index].reads += 1;
        match read {
            Ok(reads) => {
                self.counters.reads += reads;
                self.counters.bytes_read += place.stored_bytes();
                self.entries[index].status = Status::Ready(Arc::new(slot));
            }
            Err(fault) => {
                self.settle(index);
                self.spare.push((place.size(), slot));
                let entry = &mut self.entries[index];
                // What was only likely fails again when it is asked for.
                entry.status = if entry.wanted.is_empty() { Status::Absent } else { Status::Failed(fault) };
            }
        }
    }

    /// Answers a request, if it can be answered now.
    pub fn take(&mut self, ticket: &Ticket) -> Answer {
        let entry = &mut self.entries[ticket.index];
        match &entry.status {
            Status::Ready(slot) => {
                let slot = slot.clone();
                entry.holders += 1;
                entry.wanted.retain(|&number| number != ticket.number);
                if ticket.reads_of_hit == Some(entry.reads) {
                    self.counters.hits += 1;
                    self.counters.read_ahead_hits += u64::from(ticket.likely);
                }
                Answer::Held(ticket.index, entry.place.clone(), slot)
            }
            Status::Failed(_) => {
                let Status::Failed(fault) = std::mem::replace(&mut entry.status, Status::Absent) else {
                    unreachable!("just seen")
                };
                self.cancel(ticket);
                Answer::Failed(fault)
            }
            Status::Absent | Status::Reading => Answer::Wait,
        }
    }

    /// Takes a request back.
    pub fn cancel(&mut self, ticket: &Ticket) {
        let entry = &mut self.entries[ticket.index];
        entry.wanted.retain(|&number| number != ticket.number);
        self.queue.remove(&ticket.number);
        // Others that want it read it for themselves.
        if let (Status::Absent, Some(&next)) = (&entry.status, entry.wanted.front()) {
            self.queue.insert(next, ticket.index);
        }
        if entry.wanted.is_empty() && matches!(entry.status, Status::Failed(_)) {
            entry.status = Status::Absent;
        }
    }

    /// Gives back an expert that was held.
    pub fn release(&mut self, index: usize) {
        self.entries[index].holders -= 1;
    }

    /// Memory of a size: spare, new within the budget, or somebody else's.
    fn room(&mut self, size: Size, claim: Claim) -> Option<Slot> {
        loop {
            if let Some(at) = self.spare.iter().position(|(spare, _)| *spare == size) {
                return Some(self.spare.swap_remove(at).1);
            }
            let needed = self.bytes.saturating_add(size.bytes()).saturating_add(self.reserved);
            if needed <= self.counters.budget_bytes {
                self.bytes += size.bytes();
                self.counters.peak_bytes = self.counters.peak_bytes.max(needed);
                return Some(Slot::new(size));
            }
            if let Some((size, slot)) = self.spare.pop() {
                drop(slot);
                self.bytes -= size.bytes();
                continue;
            }
            let victim = self.victim(claim)?;
            self.counters.evictions += 1;
            let evicted = self.evict(victim);
            self.spare.push(evicted);
        }
    }

    /// Who has to go: nobody whom somebody computes with. First what was used least often; of equals what comes last in
    /// the order of the layers, which is gone through again and again; of these what was used longest ago. Then, for a
    /// request, what was read early in vain so far, and what only later requests want, the last first.
    fn victim(&self, claim: Claim) -> Option<usize> {
        let layers = self.layers.len();
        let rank = |entry: &Entry| match (entry.wanted.front(), entry.early, claim) {
            (None, None, _) => {
                let distance = (entry.layer + 2 * layers - self.current - 1) % layers;
                Some((0, u64::from(entry.uses), Reverse(distance), entry.last))
            }
            (_, _, Claim::Early) => None,
            (None, Some(_), _) => Some((1, 0, Reverse(0), entry.last)),
            (Some(&first), _, Claim::Request(number)) if first > number => Some((2, u64::MAX - first, Reverse(0), 0)),
            (Some(_), ..) => None,
        };
        let held = |entry: &Entry| entry.holders > 0 || !matches!(entry.status, Status::Ready(_));
        let candidates = self.entries.iter().enumerate().filter(|(_, entry)| !held(entry));
        candidates.filter_map(|(index, entry)| Some((rank(entry)?, index))).min().map(|(_, index)| index)
    }

    /// Takes the memory of an expert that is there and that nobody holds.
    fn evict(&mut self, index: usize) -> (Size, Slot) {
        self.settle(index);
        let entry = &mut self.entries[index];
        let Status::Ready(slot) = std::mem::replace(&mut entry.status, Status::Absent) else {
            unreachable!("only what is there goes")
        };
        if let Some(&first) = entry.wanted.front() {
            self.queue.insert(first, index);
        }
        (entry.place.size(), Arc::into_inner(slot).expect("nobody holds it"))
    }
}
