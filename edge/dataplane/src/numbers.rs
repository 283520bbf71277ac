// SPDX-License-Identifier: Apache-2.0
//! Numbers for things that the maps know by number. Pure; `writer` and the plan use it.

use std::collections::{BTreeMap, BTreeSet};

/// The number of each key: the lowest free one, from one.
#[derive(Clone, Debug)]
pub struct Numbers<K> {
    by_key: BTreeMap<K, u32>,
    free: BTreeSet<u32>,
    /// All from here on are free.
    next: u32,
    limit: u32,
}

impl<K: Ord + Clone> Numbers<K> {
    /// Numbers below `limit`.
    pub fn new(limit: u32) -> Self {
        Self { by_key: BTreeMap::new(), free: BTreeSet::new(), next: 1, limit }
    }

    /// The key's number, if it has one.
    pub fn get(&self, key: &K) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    /// Numbers that are in use already.
    pub fn adopt(limit: u32, used: impl IntoIterator<Item = (K, u32)>) -> Self {
        let by_key: BTreeMap<K, u32> = used.into_iter().collect();
        let mut numbers: Vec<_> = by_key.values().copied().collect();
        numbers.sort_unstable();
        let next = numbers.last().map_or(1, |last| last + 1);
        let (mut from, mut free) = (1, Vec::new());
        for number in numbers {
            free.extend(from..number);
            from = number + 1;
        }
        Self { by_key, free: free.into_iter().collect(), next, limit }
    }

    /// The key's number, a new one if it has none, or `None` if all are used.
    pub fn assign(&mut self, key: &K) -> Option<u32> {
        if let Some(number) = self.by_key.get(key) {
            return Some(*number);
        }
        let number = match self.free.pop_first() {
            Some(number) => number,
            None if self.next < self.limit => {
                self.next += 1;
                self.next - 1
            }
            None => return None,
        };
        self.by_key.insert(key.clone(), number);
        Some(number)
    }

    /// Frees the key's number, and returns it.
    pub fn remove(&mut self, key: &K) -> Option<u32> {
        let number = self.by_key.remove(key)?;
        self.free.insert(number);
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_kept_and_used_again() {
        let mut numbers = Numbers::new(4);
        assert_eq!(["a", "b", "a"].map(|key| numbers.assign(&key)), [Some(1), Some(2), Some(1)]);
        assert_eq!(numbers.remove(&"a"), Some(1));
        assert_eq!(["c", "d", "e"].map(|key| numbers.assign(&key)), [Some(1), Some(3), None]);
    }

    #[test]
    fn adopted_numbers_are_not_given_twice() {
        let mut numbers = Numbers::adopt(10, [("d", 4), ("b", 2)]);
        assert_eq!(["a", "c", "e"].map(|key| numbers.assign(&key)), [Some(1), Some(3), Some(5)]);
        assert_eq!(numbers.get(&"d"), Some(4));
    }
}
