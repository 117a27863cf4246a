//! Which parts of a block of memory are free. Knows nothing of any device.

use std::collections::BTreeMap;

/// Everything begins and ends at a multiple of this: the largest alignment that a device may ask of a storage buffer.
pub(super) const ALIGNMENT: u64 = 256;

/// Free parts of a block.
#[derive(Debug)]
pub(super) struct Space {
    /// Bytes by their first: never two that touch.
    parts: BTreeMap<u64, u64>,
    free: u64,
    bytes: u64,
}

impl Space {
    /// All of a block is free.
    pub fn new(bytes: u64) -> Space {
        Space { parts: BTreeMap::from([(0, bytes)]), free: bytes, bytes }
    }

    /// Whether nothing is taken.
    pub fn is_empty(&self) -> bool {
        self.free == self.bytes
    }

    /// Takes bytes, a multiple of [`ALIGNMENT`], from the first part that has as many: where they begin.
    pub fn take(&mut self, bytes: u64) -> Option<u64> {
        debug_assert!(bytes > 0 && bytes.is_multiple_of(ALIGNMENT), "{bytes} bytes");
        if bytes > self.free {
            return None;
        }
        let (&at, &part) = self.parts.iter().find(|&(_, &part)| part >= bytes)?;
        self.parts.remove(&at);
        if part > bytes {
            self.parts.insert(at + bytes, part - bytes);
        }
        self.free -= bytes;
        Some(at)
    }

    /// Gives back what was taken.
    pub fn give(&mut self, at: u64, bytes: u64) {
        let (mut from, mut to) = (at, at + bytes);
        if let Some((&before, &part)) = self.parts.range(..at).next_back() {
            assert!(before + part <= at, "{bytes} bytes at {at} are free already");
            if before + part == at {
                self.parts.remove(&before);
                from = before;
            }
        }
        if let Some((&after, &part)) = self.parts.range(at..).next() {
            assert!(after >= to, "{bytes} bytes at {at} are free already");
            if after == to {
                self.parts.remove(&after);
                to += part;
            }
        }
        self.parts.insert(from, to - from);
        self.free += bytes;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbours_are_joined() {
        let mut space = Space::new(1024);
        let taken: Vec<u64> = (0..4).map(|_| space.take(256).unwrap()).collect();
        assert_eq!(taken, [0, 256, 512, 768]);
        assert_eq!(space.take(256), None);
        space.give(0, 256);
        space.give(512, 256);
        assert_eq!(space.take(512), None, "two parts that do not touch");
        space.give(256, 256);
        assert_eq!(space.take(768), Some(0));
        space.give(768, 256);
        space.give(0, 768);
        assert!(space.is_empty());
        assert_eq!(space.take(1024), Some(0));
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn nothing_is_given_twice() {
        let mut space = Space::new(1024);
        space.take(512);
        space.give(0, 512);
        space.give(256, 256);
    }

    proptest! {
        /// No two parts that are taken overlap, and when all are back the block is whole.
        #[test]
        fn parts_never_overlap(steps in prop::collection::vec((0u64..12, any::<prop::sample::Index>()), 1..200)) {
            let mut space = Space::new(32 * ALIGNMENT);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (size, which) in steps {
                if size == 0 {
                    if !taken.is_empty() {
                        let (at, bytes) = taken.swap_remove(which.index(taken.len()));
                        space.give(at, bytes);
                    }
                } else if let Some(at) = space.take(size * ALIGNMENT) {
                    let bytes = size * ALIGNMENT;
                    prop_assert!(at + bytes <= 32 * ALIGNMENT);
                    prop_assert!(taken.iter().all(|&(other, len)| at + bytes <= other || other + len <= at));
                    taken.push((at, bytes));
                }
            }
            for (at, bytes) in taken {
                space.give(at, bytes);
            }
            prop_assert!(space.is_empty());
            prop_assert_eq!(space.take(32 * ALIGNMENT), Some(0));
        }
    }
}
