// SPDX-License-Identifier: Apache-2.0
//! What a plan has counted: who claims which address, what all need of the maps, and which targets, senders and checks follow from its
//! groups. Pure. The plan makes it, and `amend` keeps it while load balancers change.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_edge_dataplane::packet::maps::ListenerKey;

use super::accept::Accepted;
use super::followed::FollowedChecks;
use super::reachable::{ReachableByTargets, ReachableTargets};
use super::room::{Needs, Room, needs};
use super::select::Frontend;
use super::sender_nets::SenderNets;
use super::targets::TargetGroup;
use crate::index::Index;

/// More load balancers at once cost as much as a plan.
const MOST_AT_ONCE: usize = 64;
/// Numbers of removed targets expire by plans alone.
const MAX_AGE: Duration = Duration::from_hours(1);

/// A load balancer, as a plan has left it.
#[derive(Debug)]
pub(super) struct Entry {
    /// All addresses that it names.
    pub(super) claims: Vec<IpAddr>,
    needs: Needs,
    /// The listeners that it serves.
    pub(super) listeners: Vec<ListenerKey>,
    /// The positions of the groups that its VIPs use.
    pub(super) groups: Vec<usize>,
}

/// Who uses some targets. The groups hold them, so that no others get their place in memory.
#[derive(Debug, Default)]
struct Uses {
    groups: usize,
    /// Groups that a VIP uses.
    served: usize,
}

/// One group, as far as it counts.
#[derive(Clone, Debug)]
pub(super) struct Counted {
    pub(super) reachable: Arc<ReachableTargets>,
    pub(super) is_healthy: bool,
    /// The number of VIPs that use it.
    pub(super) vips: u32,
}

impl Counted {
    pub(super) fn new(group: &TargetGroup, vips: u32) -> Self {
        Self { reachable: Arc::clone(&group.reachable), is_healthy: group.has_healthy(), vips }
    }

    /// The number of its VIPs if it has a healthy target.
    pub(super) fn healthy_vips(&self) -> u32 {
        if self.is_healthy { self.vips } else { 0 }
    }
}

#[derive(Debug, Default)]
pub(super) struct Ledger {
    load_balancers: HashMap<String, Entry>,
    /// Who names an address.
    claims: HashMap<IpAddr, BTreeSet<String>>,
    needs: Needs,
    /// The maps have room for all, and so does what is planned later.
    has_room: bool,
    made_at: Option<Instant>,
    pub(super) reachables: ReachableByTargets,
    uses: HashMap<usize, Uses>,
    /// How many targets of groups that serve have an address.
    numbered: HashMap<IpAddr, usize>,
    /// Addresses that have begun or ended to be numbered, perhaps both.
    touched: BTreeSet<IpAddr>,
    /// The number of distinct targets with this host among them.
    with_own_host: usize,
    pub(super) checks: FollowedChecks,
    pub(super) senders: SenderNets,
}

impl Ledger {
    /// Without groups, which [`count`](Self::count) adds.
    pub(super) fn new(
        accepted: &[Accepted<'_>],
        frontends: &[Frontend<'_>],
        reachables: ReachableByTargets,
        has_room: bool,
        now: Instant,
    ) -> Self {
        let mut ledger = Self { reachables, has_room, made_at: Some(now), ..Self::default() };
        for accepted in accepted {
            ledger.enter(accepted);
        }
        for Frontend { load_balancer, group, .. } in frontends {
            ledger.use_group(&load_balancer.object.name, *group);
        }
        ledger
    }

    /// Whether it still says what a plan would.
    pub(super) fn is_valid(&self, now: Instant) -> bool {
        self.has_room && self.made_at.is_some_and(|made_at| now < made_at + MAX_AGE)
    }

    /// Enters a load balancer that is not there.
    pub(super) fn enter(&mut self, accepted: &Accepted<'_>) {
        let name = &accepted.object.name;
        for address in &accepted.object.spec.addresses {
            self.claims.entry(*address).or_default().insert(name.clone());
        }
        let needs = needs(accepted);
        self.needs = self.needs.plus(needs);
        let listeners = accepted.vips.iter().flat_map(|vip| accepted.listeners(*vip)).collect();
        let claims = accepted.object.spec.addresses.clone();
        self.load_balancers.insert(name.clone(), Entry { claims, needs, listeners, groups: Vec::new() });
    }

    /// One of its VIPs uses this group.
    pub(super) fn use_group(&mut self, load_balancer: &str, position: usize) {
        if let Some(entry) = self.load_balancers.get_mut(load_balancer) {
            entry.groups.push(position);
        }
    }

    /// Takes a load balancer out, if it is there.
    pub(super) fn take(&mut self, name: &str) -> Option<Entry> {
        let entry = self.load_balancers.remove(name)?;
        for address in &entry.claims {
            if let Some(names) = self.claims.get_mut(address) {
                names.remove(name);
                if names.is_empty() {
                    self.claims.remove(address);
                }
            }
        }
        self.needs = self.needs.minus(entry.needs);
        Some(entry)
    }

    /// These load balancers, and all that name an address of theirs, directly or not: what is said of one of them depends on the
    /// others, and on nobody else. `None` if they are too many.
    pub(super) fn affected(&self, index: &Index, changed: &BTreeSet<String>) -> Option<BTreeSet<String>> {
        let (mut names, mut next) = (BTreeSet::new(), changed.iter().cloned().collect::<Vec<_>>());
        while let Some(name) = next.pop() {
            if names.contains(&name) {
                continue;
            }
            let planned = self.load_balancers.get(&name).map(|entry| entry.claims.as_slice());
            let named = index.load_balancer(&name).map(|object| object.spec.addresses.as_slice());
            let addresses = planned.into_iter().chain(named).flatten();
            next.extend(addresses.filter_map(|address| self.claims.get(address)).flatten().cloned());
            names.insert(name);
            if names.len() > MOST_AT_ONCE {
                return None;
            }
        }
        Some(names)
    }

    /// Whether the maps have room for all once these load balancers are as they were accepted now.
    pub(super) fn fits(&self, names: &BTreeSet<String>, accepted: &[Accepted<'_>], room: Room) -> bool {
        let before = names.iter().filter_map(|name| self.load_balancers.get(name));
        let without = before.fold(self.needs, |rest, entry| rest.minus(entry.needs));
        accepted.iter().map(needs).fold(without, Needs::plus).fits(room.needs())
    }

    /// A group that is there from now on.
    pub(super) fn count(&mut self, group: &TargetGroup, counted: &Counted) {
        let Counted { reachable, is_healthy, vips } = counted;
        self.checks.add(reachable, group.check(), !is_healthy);
        let place = Arc::as_ptr(reachable).addr();
        let uses = self.uses.entry(place).or_default();
        uses.groups += 1;
        if uses.groups == 1 {
            self.senders.add(reachable);
            self.with_own_host += usize::from(reachable.has_own_host);
        }
        if *vips > 0 {
            uses.served += 1;
            if uses.served == 1 {
                for address in reachable.addresses() {
                    *self.numbered.entry(address).or_default() += 1;
                    self.touched.insert(address);
                }
            }
        }
    }

    /// A group that is there no longer.
    pub(super) fn discount(&mut self, group: &TargetGroup, counted: &Counted) {
        let Counted { reachable, is_healthy, vips } = counted;
        self.checks.remove(reachable, group.check(), !is_healthy);
        let place = Arc::as_ptr(reachable).addr();
        let Some(uses) = self.uses.get_mut(&place) else { return };
        if *vips > 0 {
            uses.served -= 1;
            if uses.served == 0 {
                for address in reachable.addresses() {
                    if let Some(number) = self.numbered.get_mut(&address) {
                        *number -= 1;
                        if *number == 0 {
                            self.numbered.remove(&address);
                        }
                    }
                    self.touched.insert(address);
                }
            }
        }
        uses.groups -= 1;
        if uses.groups == 0 {
            self.senders.remove(reachable);
            self.with_own_host -= usize::from(reachable.has_own_host);
            self.reachables.forget(&group.targets, group.key.is_v6());
            self.uses.remove(&place);
        }
    }

    /// Addresses that may have begun or ended to be those of targets that serve, and whether they are.
    pub(super) fn take_touched(&mut self) -> Vec<(IpAddr, bool)> {
        let touched = std::mem::take(&mut self.touched);
        touched.into_iter().map(|address| (address, self.numbered.contains_key(&address))).collect()
    }

    /// Whether this host is a target of a group.
    pub(super) fn has_own_host(&self) -> bool {
        self.with_own_host > 0
    }
}
