// SPDX-License-Identifier: Apache-2.0
//! What the kernel's maps have room for, and who gets it when it is not enough. Pure, used by `accept` and the plan.
//!
//! A write does not fail for lack of listeners, ranges, slots or members: then no change of anybody would reach the kernel. More than
//! 32,767 targets do fail it. What is served stays, as long as it does not
//! grow; what is new or has grown gets what is left, the namespace first that has least.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use steerage_edge_dataplane::packet::maps::ListenerKey;
use steerage_edge_dataplane::{Listener, State, Table};

use super::accept::Accepted;
use super::is_same_family;

/// Slots that a VIP needs at least: its smallest table, in whole elements of the map.
const LEAST_SLOTS: u64 = 256;

/// What the maps have room for. Maps in which old and new stand side by side during a write count half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) listeners: u64,
    /// Of all source ranges.
    pub(crate) prefixes: u64,
    /// Of all tables.
    pub(crate) slots: u64,
    /// Targets of all tables.
    pub(crate) members: u64,
}

impl Room {
    pub(super) fn needs(self) -> Needs {
        Needs([self.listeners, self.prefixes, self.slots])
    }
}

/// What tables take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlotsAndMembers {
    pub(super) slots: u64,
    pub(super) members: u64,
}

impl SlotsAndMembers {
    /// Of a table of this size.
    pub(super) fn of(size: u32, members: usize) -> Self {
        Self { slots: Table::room(size).into(), members: count(members) }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self { slots: self.slots + other.slots, members: self.members + other.members }
    }

    /// Without `other`, which is part of it.
    pub(super) fn minus(self, other: Self) -> Self {
        Self {
            slots: self.slots.saturating_sub(other.slots),
            members: self.members.saturating_sub(other.members),
        }
    }

    pub(super) fn fits(self, room: Room) -> bool {
        self.slots <= room.slots && self.members <= room.members
    }
}

/// Listeners, source ranges and slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Needs([u64; 3]);

impl Needs {
    pub(super) fn plus(self, other: Self) -> Self {
        let mut sum = self.0;
        for (sum, other) in sum.iter_mut().zip(other.0) {
            *sum += other;
        }
        Self(sum)
    }

    /// Without `other`, which is part of it.
    pub(super) fn minus(self, other: Self) -> Self {
        let mut rest = self.0;
        for (rest, other) in rest.iter_mut().zip(other.0) {
            *rest = rest.saturating_sub(other);
        }
        Self(rest)
    }

    pub(super) fn fits(self, limit: Self) -> bool {
        self.0.iter().zip(limit.0).all(|(need, limit)| *need <= limit)
    }

    /// Of `room`, in millionths: the largest of the three parts.
    fn share_of(self, room: Self) -> u64 {
        let parts = self.0.iter().zip(room.0).map(|(need, room)| need * 1_000_000 / room.max(1));
        parts.max().unwrap_or(0)
    }
}

/// The source ranges that each listener had in the last plan.
pub(super) type Served = HashMap<ListenerKey, u64>;

/// What each listener has in the maps, for the next plan.
pub(super) fn served(state: &State) -> Served {
    state.listeners.iter().map(|(key, listener)| (*key, ranges(listener))).collect()
}

pub(super) fn ranges(listener: &Listener) -> u64 {
    listener.ranges.as_ref().map_or(0, |ranges| count(ranges.len()))
}

/// What a load balancer had in the last plan.
fn had(accepted: &Accepted<'_>, served: &Served) -> Needs {
    let of_vip = |vip: &IpAddr| {
        let mut needs = Needs::default();
        for ranges in accepted.listeners(*vip).filter_map(|key| served.get(&key)) {
            // All its listeners at a VIP have one set and one table.
            needs = Needs([needs.0[0] + 1, *ranges, LEAST_SLOTS]);
        }
        needs
    };
    accepted.vips.iter().map(of_vip).fold(Needs::default(), Needs::plus)
}

/// Serves no VIP of the load balancers for which there is no room. Returns whether there is room for all.
pub(super) fn refuse_what_has_no_room(accepted: &mut [Accepted<'_>], room: Room, served: &Served) -> bool {
    let room = room.needs();
    let needs: Vec<_> = accepted.iter().map(needs).collect();
    if needs.iter().fold(Needs::default(), |sum, need| sum.plus(*need)).fits(room) {
        return true;
    }
    let mut used = Needs::default();
    let mut of_namespaces = BTreeMap::<String, Needs>::new();
    let mut waiting = BTreeMap::<String, Vec<usize>>::new();
    for (position, (one, need)) in accepted.iter().zip(&needs).enumerate() {
        let namespace = one.object.spec.service.namespace.clone();
        if need.fits(had(one, served)) && used.plus(*need).fits(room) {
            used = used.plus(*need);
            let of_namespace = of_namespaces.entry(namespace).or_default();
            *of_namespace = of_namespace.plus(*need);
        } else {
            waiting.entry(namespace).or_default().push(position);
        }
    }
    for positions in waiting.values_mut() {
        // The oldest last, from where they are taken.
        positions.sort_by_key(|position| {
            accepted.get(*position).map(|one| (one.object.created, &one.object.name))
        });
        positions.reverse();
    }
    loop {
        let share =
            |namespace: &String| of_namespaces.get(namespace).copied().unwrap_or_default().share_of(room);
        let least = waiting.iter().filter(|(_, left)| !left.is_empty()).map(|(namespace, _)| namespace);
        let Some(namespace) = least.min_by_key(|namespace| (share(namespace), *namespace)).cloned() else {
            return false;
        };
        let Some(position) = waiting.get_mut(&namespace).and_then(Vec::pop) else { return false };
        let need = needs.get(position).copied().unwrap_or_default();
        if used.plus(need).fits(room) {
            used = used.plus(need);
            let of_namespace = of_namespaces.entry(namespace).or_default();
            *of_namespace = of_namespace.plus(need);
        } else if let Some(one) = accepted.get_mut(position) {
            let vips = one.vips.len();
            one.vips.clear();
            one.problems.push(format!(
                "This host has no room for its {vips} VIPs, {} listeners and {} source ranges. It is not served. Remove load balancers, or some of their ports and ranges; namespace {namespace} has {} listeners here.",
                need.0[0], need.0[1], of_namespaces.get(&namespace).copied().unwrap_or_default().0[0]
            ));
        }
    }
}

fn count(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

pub(super) fn needs(accepted: &Accepted<'_>) -> Needs {
    let of_vip = |vip: &IpAddr| {
        let listeners = count(accepted.listeners(*vip).count());
        let ranges = accepted.source_ranges.iter().filter(|range| is_same_family(range.addr(), *vip));
        Needs([listeners, count(ranges.count()), LEAST_SLOTS])
    };
    accepted.vips.iter().map(of_vip).fold(Needs::default(), Needs::plus)
}

/// The most that each may have so that all together fit into `room`; `None` if all fit as they are.
pub(super) fn fair_share(wanted: impl Iterator<Item = u64>, room: u64) -> Option<u64> {
    let mut wanted: Vec<_> = wanted.collect();
    wanted.sort_unstable();
    let (mut left, mut count) = (room, u64::try_from(wanted.len()).unwrap_or(u64::MAX));
    for one in wanted {
        let share = left / count;
        if one > share {
            return Some(share);
        }
        left -= one;
        count -= 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn share_cuts_only_the_largest() {
        assert_eq!(fair_share([].into_iter(), 0), None);
        assert_eq!(fair_share([5, 1, 4].into_iter(), 10), None);
        assert_eq!(fair_share([100, 1, 4].into_iter(), 10), Some(5));
        assert_eq!(fair_share([100, 1, 100].into_iter(), 10), Some(4));
    }

    proptest! {
        #[test]
        fn what_is_shared_fits_and_leaves_no_room_for_one_more_each(wanted in prop::collection::vec(0..1_000_u64, 1..40), room in 0..5_000_u64) {
            let sum = |share: u64| wanted.iter().map(|one| (*one).min(share)).sum::<u64>();
            match fair_share(wanted.iter().copied(), room) {
                None => prop_assert!(sum(u64::MAX) <= room),
                Some(share) => prop_assert!(sum(share) <= room && sum(share + 1) > room),
            }
        }
    }
}
