// SPDX-License-Identifier: Apache-2.0
//! Whose call is next: the group's whose last call is longest ago, and in it whoever asked first. So one that asks all the time delays
//! another one by a call, not by all of its own. Where the calls without an answer are limited, a group may have as many of them as it leaves
//! to others: one alone has half, so there is room for a second one that comes later. Pure.

use std::collections::{BTreeMap, VecDeque};

#[derive(Debug, Default)]
pub(super) struct CallTurns {
    groups: BTreeMap<String, WaitingGroup>,
    /// The caller that is next, and stays so until it is gone.
    next: Option<u64>,
    /// The number of the last caller, and of the last turn.
    last: (u64, u64),
    /// How many calls of all groups may be without an answer, if that is limited.
    max_in_flight: Option<usize>,
    /// The calls of each group without an answer; counted only if they are limited.
    in_flight: BTreeMap<String, usize>,
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
    pub(super) fn with_max_in_flight(calls: usize) -> Self {
        Self { max_in_flight: Some(calls), ..Self::default() }
    }

    pub(super) fn limits_in_flight(&self) -> bool {
        self.max_in_flight.is_some()
    }

    /// Whether the group may have another call without an answer.
    pub(super) fn may_begin(&self, group: &str) -> bool {
        let Some(max) = self.max_in_flight else { return true };
        let own = self.in_flight.get(group).copied().unwrap_or(0);
        own < max.saturating_sub(self.in_flight.values().sum())
    }

    /// A call of the group is sent.
    pub(super) fn begin(&mut self, group: &str) {
        if self.limits_in_flight() {
            *self.in_flight.entry(group.to_owned()).or_default() += 1;
        }
    }

    /// A call of the group has its answer. Returns whether another caller is next now.
    pub(super) fn end(&mut self, group: &str) -> bool {
        if let Some(calls) = self.in_flight.get_mut(group) {
            *calls -= 1;
            if *calls == 0 {
                self.in_flight.remove(group);
            }
        }
        self.next.is_none() && self.choose_next()
    }

    /// Chooses who is next. Returns whether there is one.
    fn choose_next(&mut self) -> bool {
        let may_begin = self.groups.iter().filter(|(group, _)| self.may_begin(group));
        let first = |found: &WaitingGroup| found.callers.front().map(|first| (found.turn, *first));
        self.next = may_begin.filter_map(|(_, found)| first(found)).min().map(|(_, first)| first);
        self.next.is_some()
    }

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
        if self.next.is_none() {
            self.choose_next();
        }
        (id, u32::try_from(before).unwrap_or(u32::MAX))
    }

    pub(super) fn is_next(&self, id: u64) -> bool {
        self.next == Some(id)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.in_flight.is_empty()
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
        is_next && {
            self.next = None;
            self.choose_next()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The groups in the order in which all that wait have their turns.
    fn order(turns: &mut CallTurns, names: &BTreeMap<u64, &'static str>) -> String {
        let mut order = String::new();
        while let Some(next) = turns.next {
            turns.remove(next);
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

    /// The groups whose calls are sent, as long as no answer comes.
    fn sent(turns: &mut CallTurns, groups: &[&str]) -> String {
        let mut names: BTreeMap<u64, &str> = BTreeMap::new();
        let mut sent = String::new();
        for group in groups {
            for _ in 0..20 {
                names.insert(turns.add(group).0, group);
            }
            while let Some(next) = turns.next {
                turns.begin(names[&next]);
                turns.remove(next);
                sent += names[&next];
            }
        }
        sent
    }

    #[test]
    fn group_leaves_as_many_calls_in_flight_to_others_as_it_has() {
        let mut turns = CallTurns::with_max_in_flight(8);
        assert_eq!(sent(&mut turns, &["a", "b", "c", "d", "e"]), "aaaabbcd");
        for group in ["a", "c", "e"] {
            assert!(
                !turns.end(group) || group == "a",
                "the first answer lets the next one go, who has not gone yet"
            );
        }
        // Nobody has two, and `e` waits for the longest time of those who have none.
        assert!(turns.next.is_some_and(|next| turns.groups["e"].callers.contains(&next)));
    }

    #[test]
    fn calls_without_a_limit_are_not_counted() {
        let mut turns = CallTurns::default();
        assert_eq!(sent(&mut turns, &["a"]).len(), 20);
        assert!(!turns.end("a") && turns.is_empty());
    }
}
