//! What a backend ran, counted: proof that a device was used.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::format::Format;

/// Operations that are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
#[allow(missing_docs)] // they are those of the trait Backend
pub enum Operation {
    Slice,
    Take,
    Concat,
    Add,
    Embed,
    RmsNorm,
    LayerNorm,
    Matmul,
    Swiglu,
    Rope,
    Append,
    Select,
    Attention,
    Route,
    Experts,
    Predict,
}

impl Operation {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// How often something ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Runs on the device itself.
    pub dispatches: u64,
    /// Runs elsewhere, because the device could not.
    pub fallbacks: u64,
    /// Time of the runs that were timed.
    pub busy: Duration,
}

impl Counts {
    /// Both together.
    pub fn and(self, other: Counts) -> Counts {
        Counts {
            dispatches: self.dispatches + other.dispatches,
            fallbacks: self.fallbacks + other.fallbacks,
            busy: self.busy + other.busy,
        }
    }
}

/// Counts by operation and, where a weight takes part, by its format's name; and of each GPU what it did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters(pub BTreeMap<(Operation, Option<&'static str>), Counts>, pub Vec<OnDevice>);

/// What one GPU of those that compute a model did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnDevice {
    /// The device's own name.
    pub device: String,
    /// Operations that ran on it.
    pub dispatches: u64,
    /// Bytes that it was given from other GPUs.
    pub copied_bytes: u64,
    /// Bytes of its memory that are taken for weights and activations.
    pub allocated_bytes: u64,
}

impl Counters {
    /// All counts together.
    pub fn total(&self) -> Counts {
        self.0.values().fold(Counts::default(), |sum, &counts| sum.and(counts))
    }

    /// What was counted since these counts were taken; memory is that of now.
    pub fn since(&self, earlier: &Counters) -> Counters {
        let grown = |(key, counts): (&(Operation, Option<&'static str>), &Counts)| {
            let before = earlier.0.get(key).copied().unwrap_or_default();
            let counts = Counts {
                dispatches: counts.dispatches - before.dispatches,
                fallbacks: counts.fallbacks - before.fallbacks,
                busy: counts.busy - before.busy,
            };
            (counts.dispatches + counts.fallbacks > 0).then_some((*key, counts))
        };
        let on_device = |(at, now): (usize, &OnDevice)| {
            let before = earlier.1.get(at);
            OnDevice {
                dispatches: now.dispatches - before.map_or(0, |before| before.dispatches),
                copied_bytes: now.copied_bytes - before.map_or(0, |before| before.copied_bytes),
                ..now.clone()
            }
        };
        Counters(self.0.iter().filter_map(grown).collect(), self.1.iter().enumerate().map(on_device).collect())
    }

    /// Time of one operation, whatever the format.
    pub fn busy(&self, operation: Operation) -> Duration {
        self.0.iter().filter(|((of, _), _)| *of == operation).map(|(_, counts)| counts.busy).sum()
    }
}

/// Counters that many threads may advance.
#[derive(Debug, Default)]
pub struct Tally(Mutex<Counters>);

impl Tally {
    /// Counts a run on the device.
    pub fn dispatch(&self, operation: Operation, format: Option<Format>) {
        self.count(operation, format, |counts| counts.dispatches += 1);
    }

    /// Counts a run on the device, and its time.
    pub fn timed<T>(&self, operation: Operation, format: Option<Format>, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let out = work();
        let took = started.elapsed();
        self.count(operation, format, |counts| {
            counts.dispatches += 1;
            counts.busy += took;
        });
        out
    }

    /// Counts a run elsewhere.
    pub fn fallback(&self, operation: Operation, format: Option<Format>) {
        self.count(operation, format, |counts| counts.fallbacks += 1);
    }

    /// The counts so far.
    pub fn counters(&self) -> Counters {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    fn count(&self, operation: Operation, format: Option<Format>, advance: impl Fn(&mut Counts)) {
        let mut counters = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        advance(counters.0.entry((operation, format.map(Format::name))).or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_kept_apart_and_added() {
        let tally = Tally::default();
        tally.dispatch(Operation::Matmul, Some(Format::Int4Grouped { group_size: 64 }));
        tally.dispatch(Operation::Matmul, Some(Format::Int4Grouped { group_size: 32 }));
        tally.fallback(Operation::RmsNorm, None);
        let counters = tally.counters();
        assert_eq!(counters.0[&(Operation::Matmul, Some("int4-grouped"))].dispatches, 2);
        assert_eq!(counters.0[&(Operation::RmsNorm, None)], Counts { fallbacks: 1, ..Counts::default() });
        assert_eq!(counters.total(), Counts { dispatches: 2, fallbacks: 1, ..Counts::default() });
        assert_eq!(tally.timed(Operation::Rope, None, || std::thread::sleep(Duration::from_millis(2))), ());
        assert!(tally.counters().busy(Operation::Rope) >= Duration::from_millis(2));
        assert_eq!(Operation::RmsNorm.name(), "rms-norm");
    }
}
