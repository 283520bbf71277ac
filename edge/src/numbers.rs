// SPDX-License-Identifier: Apache-2.0
//! The numbers by which the kernel knows tables and targets. Pure, used by `plan`. Numbers differ between hosts; tables do not.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use steerage_edge_dataplane::numbers::Numbers;
use steerage_edge_dataplane::packet::maps::ListenerKey;
use steerage_edge_dataplane::{Path, State, TargetState};

use crate::host::HostNetwork;

/// A removed target keeps its number and its address for this time: flows of its clients still have the number, and end by themselves.
const RETENTION: Duration = Duration::from_hours(24);
/// The oldest removed targets beyond this number are forgotten: half of those that the kernel's map has room for.
const MAX_REMOVED: usize = 16_384;

#[derive(Clone, Debug)]
pub(crate) struct TargetNumbers {
    numbers: Numbers<IpAddr>,
    /// All targets, and since when those that no group has are so.
    unused_since: BTreeMap<IpAddr, Option<Instant>>,
    /// The number of those.
    removed: usize,
}

impl Default for TargetNumbers {
    fn default() -> Self {
        Self::new([])
    }
}

impl TargetNumbers {
    /// Continues with the numbers that the kernel holds.
    pub(crate) fn adopt(written: &State) -> Self {
        Self::new(written.targets.iter().map(|(number, target)| (target.address, *number)))
    }

    fn new(used: impl IntoIterator<Item = (IpAddr, u32)>) -> Self {
        let used: Vec<_> = used.into_iter().collect();
        let unused_since = used.iter().map(|(address, _)| (*address, None)).collect();
        Self { numbers: Numbers::adopt(u32::MAX, used), unused_since, removed: 0 }
    }

    pub(crate) fn assign(&mut self, address: IpAddr) -> u32 {
        self.unused_since.entry(address).or_insert(None);
        // There are more numbers than addresses that fit into memory.
        self.numbers.assign(&address).unwrap_or(u32::MAX)
    }

    /// The number of a target, if it has one.
    pub(crate) fn get(&self, address: IpAddr) -> Option<u32> {
        self.numbers.get(&address)
    }

    /// All targets, also those that were removed lately.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.unused_since.keys().copied()
    }

    /// A group that serves has this target. Returns its number.
    pub(crate) fn mark_used(&mut self, address: IpAddr) -> u32 {
        if let Some(since) = self.unused_since.get_mut(&address)
            && since.take().is_some()
        {
            self.removed -= 1;
        }
        self.assign(address)
    }

    /// No group has it any more.
    pub(crate) fn mark_unused(&mut self, address: IpAddr, now: Instant) {
        if let Some(since) = self.unused_since.get_mut(&address)
            && since.is_none()
        {
            *since = Some(now);
            self.removed += 1;
        }
    }

    /// Whether [`retain`](Self::retain) forgets some for the sake of others.
    pub(crate) fn has_too_many_removed(&self) -> bool {
        self.removed > MAX_REMOVED
    }

    /// Forgets the targets that have not been among these for too long.
    pub(crate) fn retain(&mut self, used: &BTreeSet<u32>, now: Instant) {
        let mut removed = Vec::new();
        for (address, unused_since) in &mut self.unused_since {
            if self.numbers.get(address).is_some_and(|number| used.contains(&number)) {
                *unused_since = None;
            } else {
                removed.push(*unused_since.get_or_insert(now));
            }
        }
        removed.sort();
        let oldest = removed.len().checked_sub(MAX_REMOVED).and_then(|at| removed.get(at).copied());
        let is_kept = |since: Instant| {
            now.duration_since(since) < RETENTION && oldest.is_none_or(|oldest| since >= oldest)
        };
        let numbers = &mut self.numbers;
        self.unused_since.retain(|address, unused_since| {
            let is_kept = unused_since.is_none_or(is_kept);
            if !is_kept {
                numbers.remove(address);
            }
            is_kept
        });
        self.removed = self.unused_since.values().flatten().count();
    }

    /// All targets, also those that were removed lately, as this host reaches them.
    pub(crate) fn states(&self, host: &HostNetwork) -> BTreeMap<u32, TargetState> {
        let state = |address: &IpAddr| Some((self.numbers.get(address)?, target_state(*address, host)));
        self.unused_since.keys().filter_map(state).collect()
    }

    /// Whether this host is among them.
    pub(crate) fn has_own_host(&self, host: &HostNetwork) -> bool {
        let addresses = host.addresses.iter().map(IpNet::addr);
        addresses.into_iter().any(|address| self.unused_since.contains_key(&address))
    }
}

/// A target, as this host reaches it.
pub(crate) fn target_state(address: IpAddr, host: &HostNetwork) -> TargetState {
    // A node that nothing leads to gets nothing either way; it may have left the link with its last connections.
    TargetState { address, path: host.reach(address).unwrap_or(Path::Neighbour) }
}

/// The numbers of tables.
#[derive(Clone, Debug, Default)]
pub(crate) struct TableNumbers {
    /// The numbers that the kernel held when this process started, by listener: load balancers may share a VIP.
    adopted: Arc<BTreeMap<ListenerKey, u32>>,
    /// All numbers that the kernel held then. They are never given to another listener.
    reserved: Arc<HashSet<u32>>,
    used: HashSet<u32>,
    last: u32,
}

impl TableNumbers {
    /// Continues with the numbers that the kernel holds.
    pub(crate) fn adopt(written: &State) -> Self {
        let adopted = written.listeners.iter().map(|(key, listener)| (*key, listener.table)).collect();
        let reserved: HashSet<_> = written.tables.keys().copied().collect();
        let last = reserved.iter().copied().max().unwrap_or(0);
        Self { adopted: Arc::new(adopted), reserved: Arc::new(reserved), used: HashSet::new(), last }
    }

    /// The number of a new table that serves `listener`.
    pub(crate) fn assign(&mut self, listener: &ListenerKey) -> u32 {
        // Two listeners may have shared a table that they no longer share: the second gets a new number.
        let adopted = self.adopted.get(listener).copied().filter(|number| !self.used.contains(number));
        let number = adopted.unwrap_or_else(|| {
            // Once all numbers have been given out, they begin again, while old tables may still have theirs.
            loop {
                self.last = self.last.wrapping_add(1);
                if self.is_free(self.last) {
                    break self.last;
                }
            }
        });
        self.used.insert(number);
        number
    }

    /// Zero is no number.
    fn is_free(&self, number: u32) -> bool {
        number != 0 && !self.used.contains(&number) && !self.reserved.contains(&number)
    }

    /// Frees a number.
    pub(crate) fn release(&mut self, number: u32) {
        self.used.remove(&number);
    }

    /// Frees all numbers but these.
    pub(crate) fn retain(&mut self, used: HashSet<u32>) {
        self.used = used;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use steerage_edge_dataplane::Listener;

    #[test]
    fn new_number_skips_numbers_in_use() {
        let at = |number: u8| ListenerKey::new([10, 0, 0, number].into(), 6, 80);
        let mut written = State::default();
        for (key, table) in [(at(1), u32::MAX), (at(2), 2)] {
            written.tables.insert(table, Arc::default());
            let listener = Listener { table, has_affinity: false, ranges: None };
            written.listeners.insert(key, listener);
        }
        let mut numbers = TableNumbers::adopt(&written);
        // The largest number is in use: the next ones are zero, which is none, and 2, which belongs to another listener.
        let new = [numbers.assign(&at(3)), numbers.assign(&at(4))];
        assert_eq!(new, [1, 3]);
        assert_eq!((numbers.assign(&at(1)), numbers.assign(&at(2))), (u32::MAX, 2));
        numbers.retain([1, 3].into());
        numbers.last = 0;
        assert_eq!(numbers.assign(&at(5)), 4, "1 and 3 are in use, 2 was");
    }

    #[test]
    fn number_of_a_removed_target_is_given_to_another_one_after_a_day() {
        let address = |number: u8| IpAddr::from([10, 0, 0, number]);
        let (mut numbers, begun) = (TargetNumbers::default(), Instant::now());
        assert_eq!([numbers.assign(address(1)), numbers.assign(address(2))], [1, 2]);
        numbers.retain(&[2].into(), begun);
        assert_eq!(numbers.assign(address(3)), 3);
        numbers.retain(&[2, 3].into(), begun + RETENTION);
        assert_eq!(numbers.assign(address(4)), 1);
    }
}
