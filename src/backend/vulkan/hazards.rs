//! Which commands have to wait for those before them.
//!
//! Two commands may be done at the same time unless one of them writes bytes that the other reads or writes. A barrier before a
//! command orders all that were before it, in this buffer of commands and in those submitted earlier; so what was touched since
//! the last barrier is all that the next command has to be held against. Bytes are told by where they are, not by whose they
//! were: memory that was given back and taken again is the same memory.

use std::ops::Range;

use ash::vk;

/// Bytes of a buffer of the device.
pub(super) type Bytes = (vk::Buffer, Range<u64>);

/// What a command touches.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Touched {
    pub reads: Vec<Bytes>,
    pub writes: Vec<Bytes>,
}

/// What commands of one buffer touched since its last barrier.
#[derive(Debug, Default)]
pub(super) struct Hazards {
    /// `None` where anything may have been: at the beginning, for what earlier buffers of commands do is not known here.
    since: Option<Touched>,
}

impl Hazards {
    /// Notes a command. Whether a barrier has to stand before it.
    pub fn touch(&mut self, touched: Touched) -> bool {
        match &mut self.since {
            Some(since) if !since.meets(&touched) => {
                since.reads.extend(touched.reads);
                since.writes.extend(touched.writes);
                false
            }
            since => {
                *since = Some(touched);
                true
            }
        }
    }

    /// Anything may have been done: whatever comes next waits.
    pub fn forget(&mut self) {
        self.since = None;
    }
}

impl Touched {
    /// Whether one writes what the other reads or writes.
    fn meets(&self, next: &Touched) -> bool {
        any_common(&self.writes, &next.reads)
            || any_common(&self.writes, &next.writes)
            || any_common(&self.reads, &next.writes)
    }
}

fn any_common(some: &[Bytes], others: &[Bytes]) -> bool {
    let common = |(a, of_a): &Bytes, (b, of_b): &Bytes| a == b && of_a.start < of_b.end && of_b.start < of_a.end;
    some.iter().any(|bytes| others.iter().any(|other| common(bytes, other)))
}

#[cfg(test)]
mod tests {
    use ash::vk::Handle;
    use proptest::prelude::*;

    use super::*;

    fn bytes(buffer: u64, range: Range<u64>) -> Bytes {
        (vk::Buffer::from_raw(buffer), range)
    }

    fn touched(reads: &[(u64, Range<u64>)], writes: &[(u64, Range<u64>)]) -> Touched {
        let all = |of: &[(u64, Range<u64>)]| of.iter().map(|(buffer, range)| bytes(*buffer, range.clone())).collect();
        Touched { reads: all(reads), writes: all(writes) }
    }

    #[test]
    fn what_waits_and_what_does_not() {
        let mut hazards = Hazards::default();
        assert!(hazards.touch(touched(&[(1, 0..256)], &[(1, 512..768)])), "the first: what was before is not known");
        assert!(!hazards.touch(touched(&[(1, 0..256)], &[(1, 768..1024)])), "both read the same and write others");
        assert!(!hazards.touch(touched(&[(2, 512..768)], &[(2, 768..1024)])), "the same places of another buffer");
        assert!(hazards.touch(touched(&[(1, 700..701)], &[])), "it reads what was written");
        assert!(!hazards.touch(touched(&[(1, 768..1024)], &[])), "what was written before the barrier");
        assert!(hazards.touch(touched(&[], &[(1, 1023..1024)])), "it writes what is read");
        assert!(hazards.touch(touched(&[], &[(1, 1000..1200)])), "it writes what is written");
        assert!(!hazards.touch(touched(&[], &[(1, 1200..1300)])), "side by side");
        hazards.forget();
        assert!(hazards.touch(Touched::default()), "anything may have been");
    }

    proptest! {
        /// Of any two commands of which one writes what the other touches, there is a barrier between.
        #[test]
        fn between_any_two_that_meet_is_a_barrier(
            commands in prop::collection::vec((prop::collection::vec((0u64..2, 0u64..12, 1u64..4, any::<bool>()), 0..4), 0u8..12), 1..40)
        ) {
            let mut hazards = Hazards::default();
            let mut done: Vec<(Touched, usize)> = Vec::new();
            let mut barriers = 0;
            for (parts, chance) in commands {
                if chance == 0 {
                    hazards.forget();
                }
                let mut now = Touched::default();
                for (buffer, at, count, is_written) in parts {
                    let part = bytes(buffer, at..at + count);
                    if is_written { now.writes.push(part) } else { now.reads.push(part) }
                }
                barriers += usize::from(hazards.touch(now.clone()));
                for (before, number) in &done {
                    let cells = |of: &[Bytes]| of.iter().flat_map(|(b, r)| r.clone().map(move |at| (*b, at))).collect::<Vec<_>>();
                    let meet = |a: &[Bytes], b: &[Bytes]| cells(a).iter().any(|cell| cells(b).contains(cell));
                    let conflict = meet(&before.writes, &now.reads) || meet(&before.writes, &now.writes) || meet(&before.reads, &now.writes);
                    prop_assert!(!conflict || *number < barriers, "{before:?} and {now:?}");
                }
                done.push((now, barriers));
            }
        }
    }
}
