// SPDX-License-Identifier: Apache-2.0
//! The checks of all groups, by the targets that they are for, kept while groups come and go. Pure, used by the plan.
//!
//! A change of one group changes the checks of its targets alone. Under `health-check` steering all load balancers have the same
//! targets, and then the set of their checks is made again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use steerage_edge_api::HealthCheck;

use super::reachable::ReachableTargets;
use crate::checks::{CheckSet, Checks, MIN_FOR_BITMAP};

/// How many groups have a check, and how many of these have no healthy target.
#[derive(Clone, Copy, Debug, Default)]
struct Uses {
    groups: usize,
    urgent: usize,
}

/// The checks of some targets.
#[derive(Debug)]
struct OfTargets {
    /// Held, so that no others get its place in memory.
    reachable: Arc<ReachableTargets>,
    uses: HashMap<HealthCheck, Uses>,
    /// For all these targets, if the checks are many.
    shared: Option<Arc<CheckSet>>,
}

impl OfTargets {
    fn checks(&self) -> impl Iterator<Item = (HealthCheck, bool)> {
        self.uses.iter().map(|(check, uses)| (check.clone(), uses.urgent > 0))
    }

    fn has_many(&self) -> bool {
        self.uses.len() >= MIN_FOR_BITMAP
    }
}

type Place = *const ReachableTargets;

#[derive(Debug, Default)]
pub(super) struct FollowedChecks {
    of_targets: HashMap<usize, OfTargets>,
    /// Where the targets of an address are among these.
    at: HashMap<IpAddr, BTreeSet<usize>>,
    /// Targets whose checks have changed since [`changed`](Self::changed) was called.
    dirty: BTreeSet<usize>,
    /// Addresses that have lost some of them.
    left: BTreeSet<IpAddr>,
}

fn place(reachable: &Arc<ReachableTargets>) -> usize {
    let place: Place = Arc::as_ptr(reachable);
    place.addr()
}

impl FollowedChecks {
    /// One more group has this check of its targets.
    pub(super) fn add(&mut self, reachable: &Arc<ReachableTargets>, check: &HealthCheck, is_urgent: bool) {
        let place = place(reachable);
        let of_targets = self.of_targets.entry(place).or_insert_with(|| {
            for address in reachable.followed() {
                self.at.entry(address).or_default().insert(place);
            }
            OfTargets { reachable: Arc::clone(reachable), uses: HashMap::new(), shared: None }
        });
        if !of_targets.uses.contains_key(check) {
            of_targets.uses.insert(check.clone(), Uses::default());
        }
        if let Some(uses) = of_targets.uses.get_mut(check) {
            uses.groups += 1;
            uses.urgent += usize::from(is_urgent);
        }
        self.dirty.insert(place);
    }

    /// One group less has it.
    pub(super) fn remove(&mut self, reachable: &Arc<ReachableTargets>, check: &HealthCheck, is_urgent: bool) {
        let place = place(reachable);
        let Some(of_targets) = self.of_targets.get_mut(&place) else { return };
        if let Some(uses) = of_targets.uses.get_mut(check) {
            uses.groups -= 1;
            uses.urgent -= usize::from(is_urgent);
            if uses.groups == 0 {
                of_targets.uses.remove(check);
            }
        }
        if !of_targets.uses.is_empty() {
            self.dirty.insert(place);
            return;
        }
        for address in reachable.followed() {
            if let Some(places) = self.at.get_mut(&address) {
                places.remove(&place);
                if places.is_empty() {
                    self.at.remove(&address);
                }
            }
            self.left.insert(address);
        }
        self.dirty.remove(&place);
        self.of_targets.remove(&place);
    }

    /// A group with this check has a healthy target now, or none. The prober hears of it at once, and asks the groups before it begins
    /// another probe, so no set is made again for it.
    pub(super) fn set_urgent(
        &mut self,
        reachable: &Arc<ReachableTargets>,
        check: &HealthCheck,
        is_urgent: bool,
    ) {
        let Some(of_targets) = self.of_targets.get_mut(&place(reachable)) else { return };
        of_targets.shared = None;
        if let Some(uses) = of_targets.uses.get_mut(check) {
            uses.urgent = if is_urgent { uses.urgent + 1 } else { uses.urgent - 1 };
        }
    }

    /// All checks, as if nobody knew any.
    pub(super) fn all(&mut self) -> Checks {
        (self.dirty, self.left) = (BTreeSet::new(), BTreeSet::new());
        let addresses: Vec<_> = self.at.keys().copied().collect();
        addresses.into_iter().map(|address| (address, self.sets(address))).collect()
    }

    /// The sets of all addresses whose checks have changed; none of an address without a check.
    pub(super) fn changed(&mut self) -> BTreeMap<IpAddr, Vec<Arc<CheckSet>>> {
        let mut addresses = std::mem::take(&mut self.left);
        for place in std::mem::take(&mut self.dirty) {
            if let Some(of_targets) = self.of_targets.get_mut(&place) {
                of_targets.shared = None;
                addresses.extend(of_targets.reachable.followed());
            }
        }
        addresses.into_iter().map(|address| (address, self.sets(address))).collect()
    }

    /// Those of an address: large sets are shared with others, and all small ones are one.
    fn sets(&mut self, address: IpAddr) -> Vec<Arc<CheckSet>> {
        let Some(places) = self.at.get(&address) else { return Vec::new() };
        let mut sets = Vec::new();
        for place in places {
            if let Some(of_targets) =
                self.of_targets.get_mut(place).filter(|of_targets| of_targets.has_many())
            {
                let shared =
                    of_targets.shared.take().unwrap_or_else(|| Arc::new(of_targets.checks().collect()));
                of_targets.shared = Some(Arc::clone(&shared));
                sets.push(shared);
            }
        }
        // Many load balancers with few targets each, and the same check.
        let mut own = HashMap::<&HealthCheck, bool>::new();
        let few = places.iter().filter_map(|place| self.of_targets.get(place));
        for of_targets in few.filter(|of_targets| !of_targets.has_many()) {
            for (check, uses) in &of_targets.uses {
                *own.entry(check).or_default() |= uses.urgent > 0;
            }
        }
        if !own.is_empty() {
            sets.push(Arc::new(
                own.into_iter().map(|(check, is_urgent)| (check.clone(), is_urgent)).collect(),
            ));
        }
        sets
    }
}
