// SPDX-License-Identifier: Apache-2.0
//! What is stated of health-check ports, and in which order it changed, so that a client that knows an earlier state gets the
//! difference only. Plain values: [`super::ports`] writes and reads them under its lock.

use std::collections::BTreeMap;
use std::ops::Bound;

use steerage_model::Family;

/// One value for each family of addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PerFamily<T> {
    v4: T,
    v6: T,
}

impl<T> PerFamily<T> {
    pub(super) fn get(&self, family: Family) -> &T {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    pub(super) fn get_mut(&mut self, family: Family) -> &mut T {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }

    pub(super) fn map<U>(&self, of: impl Fn(&T) -> U) -> PerFamily<U> {
        PerFamily { v4: of(&self.v4), v6: of(&self.v6) }
    }
}

/// The ports of a statement: all, or those that have changed since what the client knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StatedDelta {
    /// The number of the last change that is in `ports`.
    pub(super) change: u64,
    /// Whether `ports` has all ports, and not only changed ones.
    pub(super) complete: bool,
    /// Counts by port; `None`: it is not served any more.
    pub(super) ports: BTreeMap<u16, Option<u32>>,
}

/// What is stated at the addresses of one family.
///
/// Ports that are not served any more stay, so that they can be stated as such: never more than there are ports.
#[derive(Debug, Default)]
pub(super) struct StatedPorts {
    /// The number of the last change; 0 before the first.
    change: u64,
    ports: BTreeMap<u16, StatedPort>,
    /// Each port by its last change: what changed since is found without a look at the others.
    by_change: BTreeMap<u64, u16>,
}

#[derive(Debug, Clone, Copy)]
struct StatedPort {
    count: Option<u32>,
    changed: u64,
}

impl StatedPorts {
    /// The number of the last change.
    pub(super) fn change(&self) -> u64 {
        self.change
    }

    /// States this count of a port; `None`: it is not served. The same count again is no change.
    pub(super) fn set(&mut self, port: u16, count: Option<u32>) {
        let old = self.ports.get(&port).copied();
        if old.and_then(|old| old.count) == count {
            return;
        }
        if let Some(old) = old {
            self.by_change.remove(&old.changed);
        }
        self.change += 1;
        self.by_change.insert(self.change, port);
        self.ports.insert(port, StatedPort { count, changed: self.change });
    }

    /// What changed after this change; everything if there was no such change yet, or for a client that knows none.
    pub(super) fn since(&self, known: Option<u64>) -> StatedDelta {
        let change = self.change;
        let Some(known) = known.filter(|known| *known <= change) else {
            let served = self.ports.iter().filter(|(_, stated)| stated.count.is_some());
            let ports = served.map(|(port, stated)| (*port, stated.count)).collect();
            return StatedDelta { change, complete: true, ports };
        };
        let changed = self.by_change.range((Bound::Excluded(known), Bound::Unbounded)).map(|(_, port)| *port);
        let ports = changed.filter_map(|port| Some((port, self.ports.get(&port)?.count))).collect();
        StatedDelta { change, complete: false, ports }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Ports<'a> = &'a [(u16, Option<u32>)];

    fn delta(change: u64, complete: bool, ports: Ports<'_>) -> StatedDelta {
        StatedDelta { change, complete, ports: ports.iter().copied().collect() }
    }

    #[test]
    fn client_hears_what_changed_since_it_asked() {
        let mut stated = StatedPorts::default();
        assert_eq!(stated.since(None), delta(0, true, &[]));
        assert_eq!(stated.since(Some(0)), delta(0, false, &[]), "it knows that there is nothing");
        stated.set(30001, Some(0));
        stated.set(30002, Some(2));
        stated.set(30001, Some(1));
        let table: [(Option<u64>, bool, Ports<'_>); 6] = [
            (None, true, &[(30001, Some(1)), (30002, Some(2))]),
            (Some(0), false, &[(30001, Some(1)), (30002, Some(2))]),
            (Some(1), false, &[(30001, Some(1)), (30002, Some(2))]),
            (Some(2), false, &[(30001, Some(1))]),
            (Some(3), false, &[]),
            (Some(4), true, &[(30001, Some(1)), (30002, Some(2))]),
        ];
        for (known, complete, ports) in table {
            assert_eq!(stated.since(known), delta(3, complete, ports), "{known:?}");
        }
    }

    #[test]
    fn same_count_is_no_change() {
        let mut stated = StatedPorts::default();
        stated.set(30001, None);
        assert_eq!(stated.change(), 0, "it was not served before");
        stated.set(30001, Some(3));
        stated.set(30001, Some(3));
        assert_eq!(stated.change(), 1);
        stated.set(30001, None);
        stated.set(30001, None);
        assert_eq!(stated.change(), 2);
    }

    #[test]
    fn closed_port_is_stated_to_those_that_knew_it_and_may_open_again() {
        let mut stated = StatedPorts::default();
        stated.set(30001, Some(1));
        stated.set(30002, Some(1));
        stated.set(30001, None);
        assert_eq!(stated.since(None), delta(3, true, &[(30002, Some(1))]));
        assert_eq!(stated.since(Some(2)), delta(3, false, &[(30001, None)]));
        // Who never knew the port is told, too: it does no harm.
        assert_eq!(stated.since(Some(0)), delta(3, false, &[(30001, None), (30002, Some(1))]));
        stated.set(30001, Some(4));
        assert_eq!(stated.since(Some(3)), delta(4, false, &[(30001, Some(4))]));
    }

    #[test]
    fn what_is_kept_is_bounded_by_the_number_of_ports() {
        let mut stated = StatedPorts::default();
        for round in 0..3 {
            for port in 0..=u16::MAX {
                stated.set(port, Some(round));
                stated.set(port, None);
            }
        }
        assert_eq!((stated.ports.len(), stated.by_change.len()), (65_536, 65_536));
        assert_eq!(stated.since(None).ports.len(), 0);
    }
}
