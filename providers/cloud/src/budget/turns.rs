// SPDX-License-Identifier: Apache-2.0
//! Whose call is next: the group's whose last call is longest ago, and in it whoever asked first. So one that asks all the time delays
//! another one by a call, not by all of its own. Pure.

use std::collections::{BTreeMap, VecDeque};

#[derive(Debug, Default)]
pub(super) struct CallTurns {
    groups: BTreeMap<String, WaitingGroup>,
    /// The caller that is next, and stays so until it is gone.
    next: Option<u64>,
    /// The number of the last caller, and of the last turn.
    last: (u64, u64),
}

/// A group of which some wait.
#[derive(Debug)]
struct WaitingGroup {
    /// The number of its last turn, or of the last one before it came.
    turn: u64,
    /// The numbers of its callers, in the order in which they asked.
    callers: VecDeque<u64>,
}

impl CallTurns {
    /// Adds a caller. Returns its number, and about how many are before it.
    pub(super) fn add(&mut self, group: &str) -> (u64, u32) {
        self.last.0 += 1;
        let (id, turn) = self.last;
        let own = self.groups.get(group).map_or(0, |found| found.callers.len());
        let others = self.groups.iter().filter(|(name, _)| *name != group);
        // Each of the others has as many turns as this one, until it is this one's.
        let before = own + others.map(|(_, other)| other.callers.len().min(own + 1)).sum::<usize>();
        let waiting = WaitingGroup { turn, callers: VecDeque::new() };
        self.groups.entry(group.to_owned()).or_insert(waiting).callers.push_back(id);
        self.next.get_or_insert(id);
        (id, u32::try_from(before).unwrap_or(u32::MAX))
    }

    pub(super) fn is_next(&self, id: u64) -> bool {
        self.next == Some(id)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Removes a caller. Returns whether another one is next now.
    pub(super) fn remove(&mut self, id: u64) -> bool {
        let is_next = self.is_next(id);
        let group = self.groups.iter().find(|(_, found)| found.callers.contains(&id));
        if let Some(group) = group.map(|(name, _)| name.clone())
            && let Some(found) = self.groups.get_mut(&group)
        {
            found.callers.retain(|other| *other != id);
            if is_next {
                self.last.1 += 1;
                found.turn = self.last.1;
            }
            if found.callers.is_empty() {
                self.groups.remove(&group);
            }
        }
        if is_next {
            let first = |found: &WaitingGroup| found.callers.front().map(|first| (found.turn, *first));
            self.next = self.groups.values().filter_map(first).min().map(|(_, first)| first);
        }
        is_next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The groups in the order in which all that wait have their turns.
    fn order(turns: &mut CallTurns, names: &BTreeMap<u64, &'static str>) -> String {
        let mut order = String::new();
        while let Some(next) = turns.next {
            assert!(turns.remove(next));
            order += names[&next];
        }
        order
    }

    #[test]
    fn groups_alternate_and_whoever_is_next_stays_next() {
        let mut turns = CallTurns::default();
        let mut add = |all: &[&'static str]| {
            let added = all.iter().map(|group| (turns.add(group), *group));
            added.map(|((id, before), group)| (id, before, group)).collect::<Vec<_>>()
        };
        let added = add(&["a", "a", "a", "a", "b", "c", "b"]);
        let before: Vec<u32> = added.iter().map(|(_, before, _)| *before).collect();
        assert_eq!(before, [0, 1, 2, 3, 1, 2, 4]);
        let names: BTreeMap<u64, _> = added.iter().map(|(id, _, group)| (*id, *group)).collect();
        assert!(!turns.remove(2), "it goes away before its turn");
        assert_eq!(order(&mut turns, &names), "abcaba");
        assert!(turns.is_empty());
    }

    #[test]
    fn group_that_comes_and_goes_passes_none_that_waits() {
        let mut turns = CallTurns::default();
        let (first, _) = turns.add("a");
        let (waiting, _) = turns.add("b");
        assert!(turns.remove(first));
        turns.add("a");
        turns.add("c");
        assert!(turns.is_next(waiting));
    }
}
