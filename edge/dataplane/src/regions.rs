// SPDX-License-Identifier: Apache-2.0
//! Which elements of the slot array belong to which table. Pure, used by `writer`.
//!
//! Regions have powers of two of elements and begin at multiples of their length, as those of a buddy
//! allocator. So there is always a way to make a free region as long as enough elements are free: of
//! the places that it could have, the one with least in use is emptied by moving what is in it, which
//! is shorter, to free regions outside, which are made in the same way.
//!
//! Packets that are under way may still look at a region that was freed. It rests until no other is
//! left, and then the writer waits for these packets.

use std::collections::{BTreeMap, BTreeSet};

use steerage_edge_packet::maps::SLOTS_PER_ELEMENT;

/// Elements of the array in use, and free ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct Regions {
    /// By the first element.
    used: BTreeMap<u32, Used>,
    /// First elements of the free regions, by the logarithm of their length. Two halves of a longer
    /// region are never both here.
    free: Vec<BTreeSet<u32>>,
    /// First element and end of what was freed since the last wait.
    resting: Vec<(u32, u32)>,
    /// What rested may be given away again, but nobody has waited yet.
    must_wait: bool,
    count: u32,
    /// Elements in use.
    total: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Used {
    length: u32,
    table: u32,
}

/// A region for a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) first: u32,
    /// Before it is written, all packets that are under way must be through.
    pub(crate) must_wait: bool,
}

/// A region that has to be copied, and is free afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    /// To whom it belongs.
    pub(crate) table: u32,
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) length: u32,
    /// Before the copy, all packets that are under way must be through.
    pub(crate) must_wait: bool,
}

/// The number of elements for a number of slots.
pub(crate) fn elements(slots: u32) -> u32 {
    slots.div_ceil(SLOTS_PER_ELEMENT)
}

impl Regions {
    /// `count`: elements of the array.
    pub(crate) fn new(count: u32) -> Self {
        let free = vec![BTreeSet::new(); 32];
        let mut regions = Self { free, count, ..Self::default() };
        regions.add_free(0, count);
        regions
    }

    /// Marks a region that a table has. Returns whether it is a region of the array and nobody else's.
    pub(crate) fn adopt(&mut self, first: u32, length: u32, table: u32) -> bool {
        let is_free = length > 0 && first.checked_add(length).is_some_and(|end| self.carve(first, end));
        if is_free {
            self.use_region(first, length, table);
        }
        is_free
    }

    /// Once all are adopted: what lies between a region's end and its rounded length is of no use to
    /// others. Regions of an earlier version begin anywhere, and remain as they are until they move.
    pub(crate) fn round(&mut self) {
        for (first, used) in self.used.clone() {
            let end = first + used.length;
            let rounded = used.length.next_power_of_two();
            if rounded > used.length && first.is_multiple_of(rounded) && self.carve(end, first + rounded) {
                self.remove(first);
                self.use_region(first, rounded, used.table);
            }
        }
    }

    /// Takes a region of at least `length` elements for a table. The moves must be made first, in this
    /// order, also if there is no region: if less than the length rounded up is free.
    pub(crate) fn take(&mut self, length: u32, table: u32, moves: &mut Vec<Move>) -> Option<Taken> {
        let length = length.checked_next_power_of_two()?;
        if self.count.saturating_sub(self.total) < length {
            return None;
        }
        let Some(first) = self.find(length, &mut Vec::new(), moves) else {
            self.find_free_again();
            return None;
        };
        self.use_region(first, length, table);
        Some(Taken { first, must_wait: std::mem::take(&mut self.must_wait) })
    }

    /// No packet finds the region any more.
    pub(crate) fn free(&mut self, first: u32) {
        if let Some(used) = self.remove(first) {
            self.resting.push((first, first + used.length));
        }
    }

    /// Elements in use.
    pub(crate) fn used(&self) -> u32 {
        self.total
    }

    fn use_region(&mut self, first: u32, length: u32, table: u32) {
        self.used.insert(first, Used { length, table });
        self.total += length;
    }

    fn remove(&mut self, first: u32) -> Option<Used> {
        let used = self.used.remove(&first)?;
        self.total -= used.length;
        Some(used)
    }

    /// A region that is in no list. `emptied`: regions that are being emptied for longer ones.
    fn find(&mut self, length: u32, emptied: &mut Vec<(u32, u32)>, moves: &mut Vec<Move>) -> Option<u32> {
        if let Some(first) = self.pop_free(length) {
            return Some(first);
        }
        if !self.resting.is_empty() {
            self.must_wait = true;
            for (first, end) in std::mem::take(&mut self.resting) {
                self.add_free(first, end);
            }
            if let Some(first) = self.pop_free(length) {
                return Some(first);
            }
        }
        let first = self.least_used(length, emptied)?;
        let end = first + length;
        // What is free of it is kept for it.
        for free in &mut self.free {
            free.retain(|free| !(first..end).contains(free));
        }
        emptied.push((first, end));
        for from in self.overlapping(first, end) {
            let Some(used) = self.used.get(&from).copied() else { continue };
            let length = used.length.checked_next_power_of_two()?;
            let to = self.find(length, emptied, moves)?;
            // One that is not at a multiple of its length may have moved for another.
            if self.used.get(&from) != Some(&used) {
                self.rest(to, to + length, emptied);
                continue;
            }
            let must_wait = std::mem::take(&mut self.must_wait);
            moves.push(Move { table: used.table, from, to, length: used.length, must_wait });
            self.remove(from);
            self.use_region(to, length, used.table);
            self.rest(from, from + used.length, emptied);
        }
        emptied.pop();
        self.must_wait = true;
        Some(first)
    }

    /// The place for a region of this length that has least in use, and nothing that is as long.
    fn least_used(&self, length: u32, emptied: &[(u32, u32)]) -> Option<u32> {
        // Nothing if it is no place.
        let mut places = BTreeMap::<u32, Option<u32>>::new();
        for (first, used) in &self.used {
            let end = first + used.length;
            let ends = [*first, end - 1].map(|element| element - element % length);
            if used.length >= length {
                // All between are in use by this one alone.
                places.extend(ends.map(|place| (place, None)));
                continue;
            }
            for place in BTreeSet::from(ends) {
                let part = end.min(place + length) - place.max(*first);
                let sum = places.entry(place).or_insert(Some(0));
                *sum = sum.map(|sum| sum + part);
            }
        }
        let is_emptied =
            |place: u32| emptied.iter().any(|(first, end)| place < *end && *first < place + length);
        let places = places.into_iter().filter_map(|(place, used)| Some((used?, place)));
        let places = places.filter(|(_, place)| self.count - place >= length && !is_emptied(*place));
        places.min().map(|(_, place)| place)
    }

    /// The used regions that have elements between `first` and `end`, the longest first.
    fn overlapping(&self, first: u32, end: u32) -> Vec<u32> {
        let before =
            self.used.range(..first).next_back().filter(|(before, used)| *before + used.length > first);
        let mut found: Vec<_> = before.into_iter().chain(self.used.range(first..end)).collect();
        found.sort_by_key(|(_, used)| std::cmp::Reverse(used.length));
        found.into_iter().map(|(first, _)| *first).collect()
    }

    /// What is in none of the regions that are being emptied rests.
    fn rest(&mut self, first: u32, end: u32, emptied: &[(u32, u32)]) {
        let Some(((from, to), others)) = emptied.split_first() else {
            self.resting.push((first, end));
            return;
        };
        for (first, end) in [(first, end.min(*from)), (first.max(*to), end)] {
            if first < end {
                self.rest(first, end, others);
            }
        }
    }

    /// The lowest of the shortest free regions that are long enough, cut to this length.
    fn pop_free(&mut self, length: u32) -> Option<u32> {
        let order = length.trailing_zeros() as usize;
        let found = (order..self.free.len()).find(|order| !self.free[*order].is_empty())?;
        let first = self.free[found].pop_first()?;
        for half in order..found {
            self.free[half].insert(first + (1 << half));
        }
        Some(first)
    }

    fn add_free(&mut self, mut first: u32, end: u32) {
        while first < end {
            let mut order = (end - first).ilog2().min(first.trailing_zeros()) as usize;
            let (mut joined, next) = (first, first + (1 << order));
            while self.free.get_mut(order).is_some_and(|free| free.remove(&(joined ^ (1 << order)))) {
                joined &= !(1 << order);
                order += 1;
            }
            if let Some(free) = self.free.get_mut(order) {
                free.insert(joined);
            }
            first = next;
        }
    }

    /// Takes these elements out of the free regions, if all of them are free.
    fn carve(&mut self, first: u32, end: u32) -> bool {
        let (mut at, mut found) = (first, Vec::new());
        while at < end {
            let place = |order: usize| (order, at - at % (1 << order));
            let is_free = |(order, first): &(usize, u32)| self.free[*order].contains(first);
            let Some((order, first)) = (0..self.free.len()).map(place).find(is_free) else { return false };
            found.push((order, first));
            at = first + (1 << order);
        }
        for (order, region) in found {
            self.free[order].remove(&region);
            self.add_free(region, first);
            self.add_free(end, region + (1 << order));
        }
        true
    }

    /// After a search that failed: all that is not in use is free.
    fn find_free_again(&mut self) {
        self.free.iter_mut().for_each(BTreeSet::clear);
        self.resting.clear();
        self.must_wait = true;
        let mut free = 0;
        for (first, used) in self.used.clone() {
            self.add_free(free, first);
            free = first + used.length;
        }
        self.add_free(free, self.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An array whose elements have the number of their table, zero for none.
    struct Array {
        regions: Regions,
        elements: Vec<u32>,
        /// Freed since the last wait.
        is_resting: Vec<bool>,
        places: BTreeMap<u32, (u32, u32)>,
        moved: usize,
    }

    impl Array {
        fn new(count: u32) -> Self {
            Self {
                regions: Regions::new(count),
                elements: vec![0; count as usize],
                is_resting: vec![false; count as usize],
                places: BTreeMap::new(),
                moved: 0,
            }
        }

        fn range(first: u32, length: u32) -> std::ops::Range<usize> {
            first as usize..(first + length) as usize
        }

        fn fill(&mut self, first: u32, length: u32, table: u32, must_wait: bool) {
            if must_wait {
                self.is_resting.fill(false);
            }
            for at in Self::range(first, length) {
                assert!(self.elements[at] == 0 && !self.is_resting[at], "{at} is in use");
                self.elements[at] = table;
            }
            self.places.insert(table, (first, length));
        }

        fn clear(&mut self, first: u32, length: u32, table: u32) {
            for at in Self::range(first, length) {
                assert_eq!(self.elements[at], table);
                (self.elements[at], self.is_resting[at]) = (0, true);
            }
        }

        fn take(&mut self, table: u32, length: u32) -> bool {
            let mut moves = Vec::new();
            let taken = self.regions.take(length, table, &mut moves);
            self.moved += moves.len();
            for one in moves {
                let place = self.places[&one.table];
                assert_eq!(place, (one.from, place.1));
                self.fill(one.to, place.1, one.table, one.must_wait);
                self.clear(one.from, place.1, one.table);
            }
            if let Some(taken) = taken {
                self.fill(taken.first, length, table, taken.must_wait);
            }
            taken.is_some()
        }

        fn free(&mut self, table: u32) {
            let (first, length) = self.places.remove(&table).unwrap();
            self.clear(first, length, table);
            self.regions.free(first);
        }

        /// As after a restart.
        fn adopt(&mut self) {
            self.regions = Regions::new(self.regions.count);
            self.is_resting.fill(false);
            for (table, (first, length)) in &self.places {
                assert!(self.regions.adopt(*first, *length, *table));
            }
            self.regions.round();
        }
    }

    #[test]
    fn freed_regions_are_taken_last() {
        let mut array = Array::new(16);
        assert!(array.take(1, 4) && array.take(2, 4));
        array.free(1);
        assert!(array.take(3, 2));
        assert_eq!(array.places[&3], (8, 2));
        assert!(array.take(4, 3));
        assert_eq!(array.places[&4], (12, 3));
        assert!(array.take(5, 4));
        assert_eq!((array.places[&5], array.moved), ((0, 4), 0));
        assert!(!array.take(6, 4) && array.take(7, 2) && !array.take(8, 1));
        assert_eq!(array.regions.used(), 16);
    }

    /// As those of the edge: 2,000 of the smallest size, which stand in the way of all larger ones.
    #[test]
    fn region_is_made_where_small_ones_are_in_the_way() {
        let mut array = Array::new(655_360);
        for table in 1..=40_960 {
            assert!(array.take(table, 16));
        }
        for table in (1..=40_960).filter(|table| table % 20 != 0) {
            array.free(table);
        }
        for (table, length) in (50_000..).zip([2047, 32_768, 2047, 32_768]) {
            assert!(array.take(table, length));
        }
        println!("{} moved", array.moved);
        assert!(array.moved <= 6000, "{} moved", array.moved);
    }

    #[test]
    fn region_of_another_table_is_not_adopted() {
        let mut regions = Regions::new(100);
        assert!(regions.adopt(3, 20, 1) && regions.adopt(64, 30, 2));
        assert!(!regions.adopt(22, 2, 3) && !regions.adopt(93, 2, 3) && !regions.adopt(99, 2, 3));
        assert!(!regions.adopt(u32::MAX, 2, 3) && !regions.adopt(30, 0, 3) && !regions.adopt(0, u32::MAX, 3));
        assert!(regions.adopt(23, 9, 3));
        regions.round();
        assert_eq!(regions.used(), 20 + 32 + 9);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

        /// Whatever was there before: as long as enough is free there is a region.
        #[test]
        fn region_is_found_while_enough_is_free(
            count in 1..200_u32,
            steps in prop::collection::vec((0..8_u32, 0..3_u32, any::<prop::sample::Index>()), 1..300),
        ) {
            let mut array = Array::new(count);
            for (table, (order, step, index)) in (1..).zip(steps) {
                let tables: Vec<_> = array.places.keys().copied().collect();
                if step == 0 && !tables.is_empty() {
                    array.free(*index.get(&tables));
                    continue;
                }
                let length = 1 << order;
                let is_enough = count - array.regions.used() >= length;
                prop_assert_eq!(array.take(table, length - u32::from(length > 2)), is_enough);
                if step == 1 && index.index(10) == 0 {
                    array.adopt();
                }
            }
            for table in array.places.keys().copied().collect::<Vec<_>>() {
                array.free(table);
            }
            prop_assert_eq!(array.regions.used(), 0);
        }

        /// Old and new tables stand side by side until a write has ended.
        #[test]
        fn state_that_takes_half_of_the_array_is_written(
            writes in prop::collection::vec(prop::collection::btree_map(0..40_u32, 0..8_u32, 0..30), 1..40),
        ) {
            let mut array = Array::new(512);
            let mut held = BTreeMap::<u32, (u32, u32)>::new();
            let mut number = 0;
            for wanted in writes {
                let (mut total, mut next, mut old) = (0, BTreeMap::new(), held.clone());
                for (table, order) in wanted {
                    if total + (1 << order) > 256 {
                        continue;
                    }
                    total += 1 << order;
                    match old.remove(&table) {
                        Some(same) if same.1 == order => drop(next.insert(table, same)),
                        before => {
                            old.extend(before.map(|before| (table, before)));
                            number += 1;
                            prop_assert!(array.take(number, 1 << order));
                            next.insert(table, (number, order));
                        }
                    }
                }
                for (number, _) in old.into_values() {
                    array.free(number);
                }
                held = next;
            }
        }

        /// Those of an earlier version begin anywhere.
        #[test]
        fn regions_at_odd_places_are_moved(
            lengths in prop::collection::vec((1..20_u32, 0..20_u32), 1..20),
            taken in prop::collection::vec(0..7_u32, 1..20),
        ) {
            let mut array = Array::new(300);
            let mut first = 0;
            for (table, (length, gap)) in (1..).zip(lengths) {
                first += gap;
                if first + length <= 300 {
                    array.fill(first, length, table, false);
                }
                first += length;
            }
            array.adopt();
            for (table, order) in (100..).zip(taken) {
                // None is no error here, but what is in use must not be touched.
                array.take(table, 1 << order);
            }
            for table in array.places.keys().copied().collect::<Vec<_>>() {
                array.free(table);
            }
            prop_assert_eq!(array.regions.used(), 0);
        }
    }
}
