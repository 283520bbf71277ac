// SPDX-License-Identifier: Apache-2.0
//! Sets of source ranges, which listeners share. Pure, used by `writer`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ipnet::IpNet;

use crate::numbers::Numbers;

/// Source ranges.
pub(crate) type Ranges = Arc<BTreeSet<IpNet>>;

/// The number of each set, and how many listeners have it.
#[derive(Debug)]
pub(crate) struct RangeSets {
    numbers: Numbers<Ranges>,
    users: BTreeMap<u32, u32>,
}

impl RangeSets {
    pub(crate) fn new(limit: u32) -> Self {
        Self { numbers: Numbers::new(limit), users: BTreeMap::new() }
    }

    /// The set and its number of each listener that has one.
    pub(crate) fn adopt(limit: u32, listeners: &[(Ranges, u32)]) -> Self {
        let mut users = BTreeMap::new();
        for (_, number) in listeners {
            *users.entry(*number).or_default() += 1;
        }
        Self { numbers: Numbers::adopt(limit, listeners.iter().cloned()), users }
    }

    pub(crate) fn get(&self, set: &Ranges) -> Option<u32> {
        self.numbers.get(set)
    }

    /// Adds a listener. Returns the set's number, and whether the set is new; `None` if there are too
    /// many sets.
    pub(crate) fn add(&mut self, set: &Ranges) -> Option<(u32, bool)> {
        let number = self.numbers.assign(set)?;
        let users = self.users.entry(number).or_default();
        *users += 1;
        Some((number, *users == 1))
    }

    /// Removes a listener. Returns the set's number if it was the last one.
    pub(crate) fn remove(&mut self, set: &Ranges) -> Option<u32> {
        let number = self.numbers.get(set)?;
        let users = self.users.get_mut(&number)?;
        *users -= 1;
        if *users > 0 {
            return None;
        }
        self.users.remove(&number);
        self.numbers.remove(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_lives_while_a_listener_has_it() {
        let set = |text: &str| Arc::new(BTreeSet::from([text.parse().unwrap()]));
        let (a, b) = (set("10.0.0.0/8"), set("192.0.2.0/24"));
        let mut sets = RangeSets::new(10);
        assert_eq!(sets.add(&a), Some((1, true)));
        assert_eq!(sets.add(&set("10.0.0.0/8")), Some((1, false)));
        assert_eq!(sets.add(&b), Some((2, true)));
        assert_eq!((sets.remove(&a), sets.remove(&a), sets.remove(&a)), (None, Some(1), None));
        assert_eq!(sets.add(&b), Some((2, false)));
    }
}
