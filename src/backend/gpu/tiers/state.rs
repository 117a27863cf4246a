//! Which experts are on the device, and which have to go: the cache without the device.

use std::cmp::Reverse;
use std::ops::Range;

use super::Counters;

/// Uses are halved whenever there were so many requests for each expert: what was used long ago counts little.
const AGING: u64 = 4;

/// One expert of any layer.
#[derive(Debug)]
struct Entry {
    class: usize,
    layer: usize,
    /// Where it is on the device.
    slot: Option<usize>,
    /// Requests, those of long ago counted less.
    uses: u32,
    /// The last request.
    last: u64,
}

/// Room for an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    /// Experts of equal layouts use each other's room.
    class: usize,
    /// The shelf, and the place on it.
    pub shelf: usize,
    pub at: usize,
    /// Who is there.
    expert: Option<usize>,
    /// The last batch that it was computed with, or uploaded for.
    batch: u64,
}

/// The cache without the device.
#[derive(Debug, Default)]
pub(super) struct State {
    entries: Vec<Entry>,
    layers: Vec<Range<usize>>,
    slots: Vec<Slot>,
    /// The layer that was asked for last.
    current: usize,
    requests: u64,
    since_aging: u64,
    /// The batch that is computed now.
    batch: u64,
    /// The last batch of which it is certain that uploads come after it.
    past: u64,
    pub counters: Counters,
}

impl State {
    /// Adds a layer, for each of whose experts there is a class, and tells its number.
    pub fn add_layer(&mut self, classes: &[usize]) -> usize {
        let (layer, first) = (self.layers.len(), self.entries.len());
        self.layers.push(first..first + classes.len());
        let entry = |&class| Entry { class, layer, slot: None, uses: 0, last: 0 };
        self.entries.extend(classes.iter().map(entry));
        layer
    }

    /// Forgets the experts of a layer that nobody asks for any more.
    pub fn remove_layer(&mut self, layer: usize) {
        for index in self.layers[layer].clone() {
            if let Some(slot) = self.entries[index].slot.take() {
                self.slots[slot].expert = None;
            }
        }
        self.layers[layer] = 0..0;
    }

    /// Adds room for so many experts of a class on a shelf.
    pub fn add_slots(&mut self, class: usize, shelf: usize, count: usize) {
        self.slots.extend((0..count).map(|at| Slot { class, shelf, at, expert: None, batch: 0 }));
    }

    /// Experts of each of so many classes.
    pub fn members(&self, classes: usize) -> Vec<u64> {
        let mut members = vec![0; classes];
        let present = |layer: &Range<usize>| self.entries[layer.clone()].iter();
        self.layers.iter().flat_map(present).for_each(|entry| members[entry.class] += 1);
        members
    }

    /// Experts of a layer.
    pub fn count(&self, layer: usize) -> usize {
        self.layers[layer].len()
    }

    /// Where an expert of a layer is on the device.
    pub fn slot(&self, layer: usize, expert: usize) -> Option<Slot> {
        self.entries[self.layers[layer].start + expert].slot.map(|slot| self.slots[slot])
    }

    /// Whether every expert of a layer is on the device.
    pub fn has_all(&self, layer: usize) -> bool {
        self.entries[self.layers[layer].clone()].iter().all(|entry| entry.slot.is_some())
    }

    /// Asks for experts of a layer.
    pub fn request(&mut self, layer: usize, experts: impl Iterator<Item = usize>) {
        self.current = layer;
        for expert in experts {
            self.requests += 1;
            self.since_aging += 1;
            if self.since_aging > AGING * self.entries.len() as u64 {
                self.since_aging = 0;
                self.entries.iter_mut().for_each(|entry| entry.uses /= 2);
            }
            let entry = &mut self.entries[self.layers[layer].start + expert];
            entry.uses += 1;
            entry.last = self.requests;
            self.counters.requests += 1;
            self.counters.hits += u64::from(entry.slot.is_some());
        }
    }

    /// Everything that was started before is done.
    pub fn passed(&mut self) {
        self.past = self.batch;
    }

    /// Uploads come after everything that was started before this batch.
    pub fn passed_but_this(&mut self) {
        self.past = self.batch.saturating_sub(1);
    }

    /// Begins the next batch.
    pub fn begin_batch(&mut self) {
        self.batch += 1;
    }

    /// An expert that is on the device takes part in the batch: it stays until the batch is over.
    pub fn hold(&mut self, layer: usize, expert: usize) {
        let entry = &self.entries[self.layers[layer].start + expert];
        self.slots[entry.slot.expect("it is on the device")].batch = self.batch;
    }

    /// Room for an expert that is not on the device: free, or that of another one, who goes, but of nobody who takes part in
    /// the batch. Tells its number, and whether work may be on its way that uses it.
    pub fn room(&mut self, layer: usize, expert: usize) -> Option<(usize, bool)> {
        let index = self.layers[layer].start + expert;
        let class = self.entries[index].class;
        let layers = self.layers.len();
        let rank = |slot: &Slot| match slot.expert {
            None => (false, 0, Reverse(0), 0),
            Some(other) => {
                let entry = &self.entries[other];
                // First what was used least often; of equals what comes last in the order of the layers, which is gone
                // through again and again; of these what was used longest ago.
                let distance = (entry.layer + 2 * layers - self.current - 1) % layers;
                (true, u64::from(entry.uses), Reverse(distance), entry.last)
            }
        };
        let slots = self.slots.iter().enumerate().filter(|(_, slot)| slot.class == class && slot.batch < self.batch);
        let (_, number) = slots.map(|(number, slot)| (rank(slot), number)).min()?;
        if let Some(gone) = self.slots[number].expert.take() {
            self.entries[gone].slot = None;
            self.counters.evictions += 1;
        }
        let under_way = self.slots[number].batch > self.past;
        self.slots[number].batch = self.batch;
        Some((number, under_way))
    }

    /// Where a slot is.
    pub fn place(&self, slot: usize) -> Slot {
        self.slots[slot]
    }

    /// Whether anybody is on the device.
    #[cfg(test)]
    pub fn slots_are_used(&self) -> bool {
        self.slots.iter().any(|slot| slot.expert.is_some())
    }

    /// An expert is on the device.
    pub fn arrived(&mut self, layer: usize, expert: usize, slot: usize) {
        let index = self.layers[layer].start + expert;
        self.entries[index].slot = Some(slot);
        self.slots[slot].expert = Some(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two layers of three experts, in room for two of each of two classes.
    fn state() -> State {
        let mut state = State::default();
        assert_eq!([state.add_layer(&[0, 0, 1]), state.add_layer(&[0, 0, 1])], [0, 1]);
        state.add_slots(0, 0, 2);
        state.add_slots(1, 1, 1);
        assert_eq!(state.members(2), [4, 2]);
        state
    }

    /// Brings experts in one batch; tells for each that came whether work may have used its room.
    fn bring(state: &mut State, layer: usize, experts: &[usize]) -> Vec<Option<bool>> {
        state.request(layer, experts.iter().copied());
        state.begin_batch();
        let missing: Vec<usize> = experts.iter().copied().filter(|&e| state.slot(layer, e).is_none()).collect();
        for &expert in experts.iter().filter(|expert| !missing.contains(expert)) {
            state.hold(layer, expert);
        }
        let bring = |&expert: &usize| {
            let (slot, under_way) = state.room(layer, expert)?;
            state.arrived(layer, expert, slot);
            Some(under_way)
        };
        missing.iter().map(bring).collect()
    }

    #[test]
    fn classes_have_room_of_their_own_and_a_batch_keeps_what_it_has() {
        let mut state = state();
        assert_eq!(bring(&mut state, 0, &[0, 1, 2]), [Some(false); 3]);
        assert!(state.has_all(0) && !state.has_all(1));
        assert_eq!((state.slot(0, 1).unwrap().shelf, state.slot(0, 1).unwrap().at), (0, 1));
        assert_eq!((state.slot(0, 2).unwrap().shelf, state.slot(0, 2).unwrap().at), (1, 0));
        // Nobody waited for the batch before: what it used must not be written to yet.
        assert_eq!(bring(&mut state, 1, &[2]), [Some(true)]);
        state.passed();
        assert_eq!(bring(&mut state, 1, &[0]), [Some(false)]);
        assert_eq!((state.slot(0, 2), state.counters.evictions), (None, 2));
        // There is no room for a third beside two of the same batch.
        state.begin_batch();
        let room = |state: &mut State, expert| state.room(0, expert).is_some();
        state.hold(1, 0);
        assert!(room(&mut state, 0) && !room(&mut state, 1));
        assert_eq!((state.counters.requests, state.counters.hits), (5, 0));
    }

    #[test]
    fn what_is_used_least_goes_first_and_layers_take_turns() {
        let mut state = state();
        for _ in 0..3 {
            bring(&mut state, 0, &[0]);
        }
        bring(&mut state, 0, &[1]);
        assert_eq!(state.counters.hits, 2);
        // Expert 1 was used once.
        bring(&mut state, 1, &[1]);
        assert!(state.slot(0, 0).is_some() && state.slot(0, 1).is_none() && state.slot(1, 1).is_some());
        // What takes part in a batch stays, however little it was used.
        assert_eq!(bring(&mut state, 1, &[0, 1]).len(), 1);
        assert!(state.slot(0, 0).is_none() && state.slot(1, 0).is_some());
        state.remove_layer(1);
        assert_eq!(state.members(2), [2, 1]);
        assert_eq!(bring(&mut state, 0, &[0, 1]).len(), 2);
    }

    #[test]
    fn uses_of_long_ago_count_less() {
        let mut state = state();
        for _ in 0..40 {
            bring(&mut state, 0, &[0]);
        }
        for _ in 0..40 {
            bring(&mut state, 1, &[0, 1]);
        }
        assert!(state.slot(1, 0).is_some() && state.slot(1, 1).is_some() && state.slot(0, 0).is_none());
    }
}
