//! Room on the device: how a budget is divided among layouts, and the buffers that it is taken in.

use std::sync::Arc;

use super::{Class, Inner, Options};
use crate::backend::gpu::device::Device;
use crate::backend::gpu::driver::Driver;
use crate::backend::gpu::moe::MOST_EXPERTS;
use crate::backend::gpu::weight::Slab;
use crate::error::{Fault, FaultKind, Place, Result};

/// Places for some experts of equal layouts.
#[derive(Debug)]
pub(super) struct Shelf<D: Driver> {
    /// Gate, up and down; an expert has the same place in each.
    pub slabs: [Slab<D>; 3],
    /// For each expert of a layer its place here, for all three.
    pub places: Arc<D::Buffer>,
}

impl<D: Driver> Shelf<D> {
    fn new(device: &Device<D>, class: &Class, count: usize) -> Result<Shelf<D>> {
        let purpose = format!("{count} of the routed experts");
        let places = Arc::new(device.allocate(4 * MOST_EXPERTS as u64, "places of experts")?);
        let slab = |projection: usize| Slab::new(device, class[projection], count, places.clone(), &purpose);
        Ok(Shelf { slabs: [slab(0)?, slab(1)?, slab(2)?], places })
    }

    /// Bytes of an expert.
    pub fn expert_bytes(&self) -> u64 {
        self.slabs.iter().flat_map(|slab| slab.layout.bytes()).sum()
    }
}

/// Bytes of an expert of a class on the device.
pub(super) fn class_bytes(class: &Class) -> u64 {
    class.iter().flat_map(|layout| layout.bytes()).sum()
}

/// How many experts of each class have room in a budget: all, or at least one of each and of the rest what each could make
/// use of. `classes` are how many experts there are and the bytes of one. `None` if there is no room for one of each.
pub(super) fn divided(budget: u64, classes: &[(u64, u64)]) -> Option<Vec<u64>> {
    let sum = |of: fn(&(u64, u64)) -> u64| classes.iter().map(of).fold(0, u64::saturating_add);
    let least = sum(|&(count, bytes)| count.min(1) * bytes);
    let more = sum(|&(count, bytes)| count.saturating_sub(1).saturating_mul(bytes));
    let over = budget.checked_sub(least)?;
    let share = |&(count, bytes): &(u64, u64)| {
        let most = count.saturating_sub(1);
        match more <= over {
            true => count,
            false => {
                let bytes_over = u128::from(over) * u128::from(most) * u128::from(bytes) / u128::from(more);
                count.min(1) + ((bytes_over / u128::from(bytes.max(1))) as u64).min(most)
            }
        }
    };
    Some(classes.iter().map(share).collect())
}

impl<D: Driver> Inner<D> {
    /// Takes the room of classes that have none yet, of what of the budget is left. Where the device has not so much, half
    /// of it is tried, and so on, if fewer will do.
    pub fn shelve(&mut self, device: &Device<D>, options: &Options) -> Result<()> {
        let members = self.state.members(self.classes.len());
        let new: Vec<(u64, u64)> =
            (self.shelved..self.classes.len()).map(|at| (members[at], class_bytes(&self.classes[at]))).collect();
        if new.is_empty() {
            return Ok(());
        }
        let mut budget = options.device_bytes.saturating_sub(self.state.counters.budget_bytes);
        loop {
            let Some(counts) = divided(budget, &new) else {
                let needed = new.iter().map(|&(_, bytes)| bytes).fold(0, u64::saturating_add);
                let device = device.driver().device();
                let kind = FaultKind::GpuExpertsMemory { device, needed, available: budget };
                return Err(Fault::new(Place::default(), kind));
            };
            match self.take(device, &counts) {
                Ok(shelves) => {
                    let bytes: u64 = counts.iter().zip(&new).map(|(count, (_, bytes))| count * bytes).sum();
                    self.state.counters.budget_bytes += bytes;
                    for (class, shelf, count) in shelves {
                        self.state.add_slots(class, self.shelves.len(), count);
                        self.shelves.push(shelf);
                    }
                    self.shelved = self.classes.len();
                    return Ok(());
                }
                Err(fault) if options.fewer && matches!(*fault.kind, FaultKind::GpuMemory { .. }) => {
                    let taken: u64 = counts.iter().zip(&new).map(|(count, (_, bytes))| count * bytes).sum();
                    let half = budget.min(taken) / 2;
                    // One of each is the least that there is to try.
                    if divided(half, &new).is_none() {
                        return Err(fault);
                    }
                    budget = half;
                }
                Err(fault) => return Err(fault),
            }
        }
    }

    /// Shelves for so many experts of each class that has none yet.
    fn take(&self, device: &Device<D>, counts: &[u64]) -> Result<Vec<(usize, Shelf<D>, usize)>> {
        let limit = device.driver().limits().buffer_bytes;
        let mut shelves = Vec::new();
        for (class, &count) in (self.shelved..).zip(counts) {
            let layouts = &self.classes[class];
            let step = layouts.iter().map(|layout| layout.in_a_slab(limit)).min().unwrap_or(1);
            let mut left = usize::try_from(count).unwrap_or(usize::MAX);
            while left > 0 {
                let count = left.min(step);
                shelves.push((class, Shelf::new(device, layouts, count)?, count));
                left -= count;
            }
        }
        Ok(shelves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_divided_by_what_each_class_could_use() {
        let classes = [(100, 10), (20, 50)];
        assert_eq!(divided(2000, &classes), Some(vec![100, 20]));
        assert_eq!(divided(u64::MAX, &classes), Some(vec![100, 20]));
        assert_eq!(divided(60, &classes), Some(vec![1, 1]));
        assert_eq!(divided(59, &classes), None);
        assert_eq!(divided(1000, &classes), Some(vec![48, 10]));
        for budget in 60..2000 {
            let counts = divided(budget, &classes).unwrap();
            assert!(counts[0] * 10 + counts[1] * 50 <= budget && counts.iter().all(|&count| count > 0), "{budget}");
        }
        assert_eq!(divided(0, &[]), Some(vec![]));
        assert_eq!(divided(10, &[(0, 7), (3, 5)]), Some(vec![0, 2]));
    }
}
