// SPDX-License-Identifier: Apache-2.0
//! What is due, by group: the group with the fewest running tasks is next, of several the one whose last turn is longest ago, and
//! within a group the oldest is first. So a tenant with thousands of Services delays another one by a task, not by thousands, and
//! one whose tasks take long does not get all workers. Pure.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

#[derive(Debug, Default)]
pub(super) struct Turns {
    groups: BTreeMap<String, Group>,
    /// The groups by the number of their running tasks, then in order of their turns.
    order: BTreeSet<(usize, u64, String)>,
    /// Number of the last turn.
    last: u64,
    len: usize,
}

#[derive(Debug)]
struct Group {
    running: usize,
    turn: u64,
    due: BTreeSet<(Instant, String)>,
}

impl Turns {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// When the next one to start became due.
    pub(super) fn first_due(&self) -> Option<Instant> {
        let (_, _, group) = self.order.first()?;
        self.groups.get(group)?.due.first().map(|(due, _)| *due)
    }

    /// The key whose turn it is. It stays until it is removed.
    pub(super) fn first(&self) -> Option<&str> {
        let (_, _, group) = self.order.first()?;
        self.groups.get(group)?.due.first().map(|(_, key)| key.as_str())
    }

    /// Adds a key. A group that had none comes after those that wait and have as many running tasks.
    pub(super) fn insert(&mut self, group: &str, running: usize, due: Instant, key: &str) {
        let turn = self.last;
        let entry = self.groups.entry(group.to_owned()).or_insert_with(|| {
            self.order.insert((running, turn, group.to_owned()));
            Group { running, turn, due: BTreeSet::new() }
        });
        self.len += usize::from(entry.due.insert((due, key.to_owned())));
    }

    /// Notes how many tasks of a group run.
    pub(super) fn set_running(&mut self, group: &str, running: usize) {
        let Some(entry) = self.groups.get_mut(group) else { return };
        self.order.remove(&(entry.running, entry.turn, group.to_owned()));
        entry.running = running;
        self.order.insert((running, entry.turn, group.to_owned()));
    }

    /// Removes a key; returns whether it was there.
    pub(super) fn remove(&mut self, group: &str, due: Instant, key: &str) -> bool {
        let Some(entry) = self.groups.get_mut(group) else { return false };
        let is_removed = entry.due.remove(&(due, key.to_owned()));
        self.len -= usize::from(is_removed);
        if entry.due.is_empty() {
            self.order.remove(&(entry.running, entry.turn, group.to_owned()));
            self.groups.remove(group);
        }
        is_removed
    }

    /// Ends the turn of the first group: it comes after all others with as many running tasks.
    pub(super) fn end_turn(&mut self) {
        let Some((running, _, group)) = self.order.pop_first() else { return };
        self.last += 1;
        if let Some(entry) = self.groups.get_mut(&group) {
            entry.turn = self.last;
            self.order.insert((running, self.last, group));
        }
    }
}
