// SPDX-License-Identifier: Apache-2.0
//! Which elements of the slot array belong to which table. Pure, used by `writer`.

use std::collections::BTreeMap;

use steerage_edge_packet::maps::SLOTS_PER_ELEMENT;

/// Elements of the array in use, by the first one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Regions {
    used: BTreeMap<u32, u32>,
    count: u32,
    /// Where the search for a free region begins: regions that were freed lately are taken last.
    next: u32,
}

/// The number of elements for a number of slots.
pub(crate) fn elements(slots: u32) -> u32 {
    slots.div_ceil(SLOTS_PER_ELEMENT)
}

impl Regions {
    /// `count`: elements of the array.
    pub(crate) fn new(count: u32) -> Self {
        Self { used: BTreeMap::new(), count, next: 0 }
    }

    /// Marks a region that a table has.
    pub(crate) fn adopt(&mut self, first: u32, length: u32) {
        self.used.insert(first, length);
    }

    /// Takes `length` free elements.
    pub(crate) fn take(&mut self, length: u32) -> Option<u32> {
        let first = self.find(self.next, length).or_else(|| self.find(0, length))?;
        self.used.insert(first, length);
        self.next = first + length;
        Some(first)
    }

    pub(crate) fn free(&mut self, first: u32) {
        self.used.remove(&first);
    }

    /// Elements in use.
    pub(crate) fn used(&self) -> u32 {
        self.used.values().sum()
    }

    fn find(&self, from: u32, length: u32) -> Option<u32> {
        // The region before may reach beyond.
        let before = self.used.range(..from).next_back().map(|(first, length)| first + length);
        let mut free = before.unwrap_or(0).max(from);
        for (first, used) in self.used.range(from..) {
            if first - free >= length {
                return Some(free);
            }
            free = first + used;
        }
        (self.count.checked_sub(free)? >= length).then_some(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn freed_regions_are_taken_last() {
        let mut regions = Regions::new(10);
        assert_eq!(regions.take(4), Some(0));
        assert_eq!(regions.take(4), Some(4));
        regions.free(0);
        assert_eq!(regions.take(2), Some(8));
        assert_eq!(regions.take(3), Some(0));
        assert_eq!(regions.take(2), None);
        assert_eq!(regions.take(1), Some(3));
        assert_eq!((regions.take(1), regions.used()), (None, 10));
    }

    proptest! {
        #[test]
        fn regions_never_overlap(steps in prop::collection::vec((1..20_u32, any::<bool>(), any::<prop::sample::Index>()), 1..200)) {
            let mut regions = Regions::new(300);
            let mut held = Vec::<(u32, u32)>::new();
            for (length, frees, index) in steps {
                if frees && !held.is_empty() {
                    let (first, _) = held.swap_remove(index.index(held.len()));
                    regions.free(first);
                } else if let Some(first) = regions.take(length) {
                    prop_assert!(first + length <= 300);
                    for (other, other_length) in &held {
                        prop_assert!(first + length <= *other || other + other_length <= first);
                    }
                    held.push((first, length));
                }
            }
        }
    }
}
