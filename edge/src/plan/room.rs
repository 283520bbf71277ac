// SPDX-License-Identifier: Apache-2.0
//! What the kernel's maps have room for, and who gets it when it is not enough. Pure, used by `accept` and the plan.
//!
//! A namespace that wants more than its fair share loses what is above it, and no other one notices. So that a write never fails for
//! lack of room: then no change of anybody would reach the kernel.

use std::collections::BTreeMap;

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

/// What a load balancer needs, in the order of [`WHAT`].
type Needs = [u64; 3];
const WHAT: [&str; 3] = ["listeners", "source ranges", "VIPs"];

/// Serves no VIP of the load balancers that are above the fair share of their namespace.
pub(super) fn refuse_what_is_too_much(accepted: &mut [Accepted<'_>], room: Room) {
    for (what, room) in [room.listeners, room.prefixes, room.slots].into_iter().enumerate() {
        let need = |accepted: &Accepted<'_>| needs(accepted).get(what).copied().unwrap_or(0);
        let mut namespaces = BTreeMap::<String, u64>::new();
        for one in accepted.iter() {
            *namespaces.entry(namespace(one)).or_default() += need(one);
        }
        let Some(share) = fair_share(namespaces.values().copied(), room) else { continue };
        let mut used = BTreeMap::<String, u64>::new();
        for one in accepted.iter_mut() {
            let used = used.entry(namespace(one)).or_default();
            let need = need(one);
            if *used + need <= share {
                *used += need;
                continue;
            }
            let kind = WHAT.get(what).copied().unwrap_or_default();
            one.vips.clear();
            one.problems.push(format!(
                "This host has no room for more {kind} of the namespace {}. The load balancer is not served. Remove load balancers of the namespace, or their {kind}.",
                namespace(one)
            ));
        }
    }
}

fn namespace(accepted: &Accepted<'_>) -> String {
    accepted.object.spec.service.namespace.clone()
}

fn needs(accepted: &Accepted<'_>) -> Needs {
    let count = |length: usize| u64::try_from(length).unwrap_or(u64::MAX);
    let vips = count(accepted.vips.len());
    let is_used = |range: &&ipnet::IpNet| accepted.vips.iter().any(|vip| is_same_family(range.addr(), *vip));
    [
        vips * count(accepted.object.spec.listeners.len()),
        count(accepted.source_ranges.iter().filter(is_used).count()),
        vips * LEAST_SLOTS,
    ]
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
