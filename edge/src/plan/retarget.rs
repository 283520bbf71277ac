// SPDX-License-Identifier: Apache-2.0
//! What follows from the health of a few targets, or from changed lists of nodes with an endpoint, without a plan: only their groups
//! get other tables and statuses. Pure, used by the plan, which makes the [`PlannedGroups`], and by `engine`, which asks them.
//!
//! A plan costs as much as there are load balancers, and targets change their health all the time. It must come to the same result
//! as a plan; where that is not certain it comes to none.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use steerage_edge_api::HealthCheckProtocol;
use steerage_edge_dataplane::Table;

use super::Assignments;
use super::ledger::{Counted, Ledger};
use super::reachable::{ReachableTarget, distinct};
use super::report::GroupReport;
use super::room::{Room, SlotsAndMembers};
use super::select::Frontend;
use super::targets::{TableKey, TargetGroup};
use crate::drains::DrainingTargets;
use crate::endpoint_nodes::{EndpointNodes, ListChange};
use crate::health::{HealthByProbe, Probe, ProbeRequest};

/// The groups of a plan, and who uses them.
#[derive(Debug, Default)]
pub(crate) struct PlannedGroups {
    /// By position.
    pub(super) groups: BTreeMap<usize, PlannedGroup>,
    positions: HashMap<TableKey, usize>,
    /// The positions of groups whose checks ask this.
    asked: HashMap<ProbeRequest, Vec<usize>>,
    /// The positions of groups with an HTTP check of this port, which statements of nodes decide.
    stated: HashMap<u16, Vec<usize>>,
    /// The positions of groups for which a load balancer's list of nodes with an endpoint counts.
    listed: HashMap<String, Vec<usize>>,
    /// Of all tables.
    pub(super) used: SlotsAndMembers,
    /// Which group a VIP uses depends on nothing that changes with health, and each table is as large as it should be.
    pub(super) is_settled: bool,
    pub(super) healthy_vips: u32,
    /// The addresses of each draining node's targets.
    draining: BTreeMap<String, BTreeSet<IpAddr>>,
    /// When the first group changes without any news, or earlier.
    pub(super) next_change: Option<Instant>,
    pub(super) ledger: Ledger,
}

#[derive(Debug)]
pub(super) struct PlannedGroup {
    pub(super) group: TargetGroup,
    /// The number of VIPs that use it.
    pub(super) vips: u32,
    /// The load balancers whose statuses are about it, and the place among the lists of each.
    pub(super) reported: Vec<(String, usize)>,
}

impl PlannedGroup {
    /// A VIP of the load balancer uses the group, and its status is about it at this place.
    pub(super) fn add_user(&mut self, load_balancer: &str, place: usize) {
        self.vips += 1;
        self.reported.push((load_balancer.to_owned(), place));
    }

    /// One of its VIPs does so no longer.
    pub(super) fn remove_user(&mut self, load_balancer: &str) {
        self.vips -= 1;
        self.reported.retain(|(name, _)| name != load_balancer);
    }
}

/// Inputs that decide the use of targets, beside the load balancers and the host's network.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HealthInputs<'a> {
    pub(crate) health: &'a HealthByProbe,
    pub(crate) endpoints: &'a EndpointNodes,
    pub(crate) room: Room,
    pub(crate) now: Instant,
}

/// What groups are to follow.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Changed<'a> {
    /// Probes with another health.
    pub(crate) probes: &'a [Probe],
    /// Ports that a node states now and did not, or no longer.
    pub(crate) ports: &'a [u16],
    /// Lists of nodes with an endpoint.
    pub(crate) lists: &'a [ListChange],
}

/// What has changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Retargeted {
    /// By number.
    pub(crate) tables: Vec<(u32, Arc<Table>)>,
    pub(crate) statuses: Vec<ChangedStatus>,
    /// Probes that are urgent from now on, or no longer.
    pub(crate) urgent: Vec<(Probe, bool)>,
}

/// One of the reports of a load balancer's status.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ChangedStatus {
    pub(crate) load_balancer: String,
    /// The place of the report.
    pub(crate) position: usize,
    pub(crate) targets: Arc<GroupReport>,
}

impl PlannedGroups {
    pub(super) fn new(
        groups: Vec<TargetGroup>,
        frontends: &[Frontend<'_>],
        used: SlotsAndMembers,
        is_settled: bool,
        ledger: Ledger,
    ) -> Self {
        let mut planned = Self { used, is_settled, ledger, ..Self::default() };
        for group in groups {
            planned.insert(group);
        }
        let mut lists = HashMap::<&str, usize>::new();
        for Frontend { load_balancer, group, reported, .. } in frontends {
            if let Some(used) = planned.groups.get_mut(group) {
                used.vips += 1;
            }
            let list = lists.entry(&load_balancer.object.name).or_default();
            if let Some(reported) = planned.groups.get_mut(reported) {
                reported.reported.push((load_balancer.object.name.clone(), *list));
            }
            *list += 1;
        }
        for PlannedGroup { group, vips, .. } in planned.groups.values() {
            let counted = Counted::new(group, *vips);
            planned.healthy_vips += counted.healthy_vips();
            planned.ledger.count(group, &counted);
        }
        // The plan has numbered them.
        planned.ledger.take_touched();
        planned.collect_draining();
        planned.next_change = planned.next();
        planned
    }

    pub(super) fn position(&self, key: &TableKey) -> Option<usize> {
        self.positions.get(key).copied()
    }

    /// Adds a group that nobody uses yet, after all others. Returns its position.
    pub(super) fn insert(&mut self, group: TargetGroup) -> usize {
        let position = self.groups.last_key_value().map_or(0, |(last, _)| last + 1);
        self.asked.entry(ProbeRequest::from(group.check())).or_default().push(position);
        if group.check().protocol == HealthCheckProtocol::Http {
            self.stated.entry(group.check().port).or_default().push(position);
        }
        if let Some(name) = group.key.load_balancer() {
            self.listed.entry(name.to_owned()).or_default().push(position);
        }
        self.positions.insert(group.key.clone(), position);
        self.groups.insert(position, PlannedGroup { group, vips: 0, reported: Vec::new() });
        position
    }

    pub(super) fn remove(&mut self, position: usize) -> Option<PlannedGroup> {
        let planned = self.groups.remove(&position)?;
        let key = &planned.group.key;
        self.positions.remove(key);
        drop_position(&mut self.asked, &ProbeRequest::from(key.check()), position);
        drop_position(&mut self.stated, &key.check().port, position);
        if let Some(name) = key.load_balancer() {
            drop_position(&mut self.listed, name, position);
        }
        Some(planned)
    }

    pub(super) fn collect_draining(&mut self) {
        self.draining = draining(self.groups.values());
    }

    /// The targets of each draining node.
    pub(crate) fn draining(&self) -> BTreeMap<String, DrainingTargets> {
        if self.draining.is_empty() {
            return BTreeMap::new();
        }
        let served = self.groups.values().filter(|planned| planned.vips > 0);
        let used: BTreeSet<&str> = served
            .flat_map(|planned| planned.group.used())
            .filter(|target| drains(target))
            .map(|target| &*target.node)
            .collect();
        let targets = |(node, addresses): (&String, &BTreeSet<IpAddr>)| {
            let is_used = used.contains(node.as_str());
            (node.clone(), DrainingTargets { addresses: addresses.clone(), is_used })
        };
        self.draining.iter().map(targets).collect()
    }

    /// All addresses for whose routes the plan has asked.
    pub(crate) fn target_addresses(&self, assignments: &Assignments) -> HashSet<IpAddr> {
        let reachable = distinct(self.groups.values().map(|planned| &planned.group.reachable));
        let of_groups = reachable.flat_map(|reachable| {
            reachable.addresses().chain(reachable.refused.iter().map(|refused| refused.address))
        });
        of_groups.chain(assignments.targets.addresses()).collect()
    }

    /// Whether a group changes by now without any news: [`retarget`](Self::retarget) says what follows.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.next_change.is_some_and(|next| next <= now)
    }

    fn next(&self) -> Option<Instant> {
        self.groups.values().filter_map(|planned| planned.group.next_change).min()
    }

    /// The number of VIPs with a healthy target.
    pub(crate) fn healthy_vips(&self) -> u32 {
        self.healthy_vips
    }

    /// What the time and these changes lead to; `None` if only a plan can say.
    pub(crate) fn retarget(
        &mut self,
        inputs: HealthInputs<'_>,
        assignments: &mut Assignments,
        changed: Changed<'_>,
    ) -> Option<Retargeted> {
        if !self.is_settled {
            return None;
        }
        let mut result = Retargeted::default();
        let mut positions: BTreeSet<usize> =
            changed.probes.iter().flat_map(|probe| self.asked(probe)).collect();
        positions.extend(changed.lists.iter().flat_map(|list| self.listed(list)));
        positions.extend(changed.ports.iter().filter_map(|port| self.stated.get(port)).flatten());
        let is_due = self.is_due(inputs.now);
        if is_due {
            let is_due =
                |planned: &PlannedGroup| planned.group.next_change.is_some_and(|at| at <= inputs.now);
            let due = self.groups.iter().filter(|(_, planned)| is_due(planned));
            positions.extend(due.map(|(position, _)| *position));
        }
        let mut flipped = Vec::new();
        for position in positions {
            let planned = self.groups.get_mut(&position)?;
            let group = planned.group.refreshed(inputs);
            assignments.remember(&group);
            if planned.vips > 0 {
                result.tables.extend(assignments.retarget(&group, &mut self.used));
                if !self.used.fits(inputs.room) {
                    self.is_settled = false;
                    return None;
                }
            }
            if group.report != planned.group.report {
                let changed = |(name, position): &(String, usize)| ChangedStatus {
                    load_balancer: name.clone(),
                    position: *position,
                    targets: Arc::clone(&group.report),
                };
                result.statuses.extend(planned.reported.iter().map(changed));
            }
            let is_healthy = group.has_healthy();
            if planned.group.has_healthy() != is_healthy {
                if is_healthy {
                    self.healthy_vips += planned.vips;
                } else {
                    self.healthy_vips -= planned.vips;
                }
                self.ledger.checks.set_urgent(&group.reachable, group.check(), !is_healthy);
                let probe = |address| Probe { address, check: group.check().clone() };
                flipped.extend(group.reachable.followed().map(probe));
            }
            self.next_change = self.next_change.into_iter().chain(group.next_change).min();
            planned.group = group;
        }
        if is_due {
            self.next_change = self.next();
        }
        let with_urgency = |probe| {
            let is_urgent = self.urgency(&probe).unwrap_or_default();
            (probe, is_urgent)
        };
        result.urgent = flipped.into_iter().map(with_urgency).collect();
        Some(result)
    }

    /// The positions of groups with this target whose checks ask the same.
    fn asked(&self, probe: &Probe) -> impl Iterator<Item = usize> {
        self.asking(probe)
            .filter(|(_, group)| group.reachable.position(probe.address).is_some())
            .map(|(at, _)| at)
    }

    /// The groups whose checks ask the same, with their positions.
    fn asking(&self, probe: &Probe) -> impl Iterator<Item = (usize, &TargetGroup)> {
        let positions = self.asked.get(&ProbeRequest::from(&probe.check)).into_iter().flatten().copied();
        positions.filter_map(|position| Some((position, &self.groups.get(&position)?.group)))
    }

    fn listed(&self, list: &ListChange) -> impl Iterator<Item = usize> {
        self.listed.get(&list.load_balancer).into_iter().flatten().copied()
    }

    /// Probes of targets that are expected to pass since a time, as their nodes have joined a list, and of those that have left, which
    /// are not. Only probes of the load balancer with the list: it must not decide how soon a target of another one is healthy.
    pub(crate) fn expected(&self, list: &ListChange) -> Vec<(Probe, Option<Instant>)> {
        let joined = list.joined.iter().map(|node| (node, Some(list.at)));
        let changed: Vec<_> = joined.chain(list.left.iter().map(|node| (node, None))).collect();
        let is_own = |position: usize| {
            let group = self.groups.get(&position).map(|planned| &planned.group);
            group.is_some_and(|group| group.key.load_balancer() == Some(&list.load_balancer))
        };
        let mut expected = Vec::new();
        for group in self.listed(list).filter_map(|position| self.groups.get(&position)) {
            for (node, since) in &changed {
                for address in group.group.reachable.addresses_of(node) {
                    let probe = Probe { address, check: group.group.check().clone() };
                    if self.asked(&probe).all(is_own) {
                        expected.push((probe, *since));
                    }
                }
            }
        }
        expected
    }

    /// Whether one of the groups that share the probe has no healthy target; `None` if none shares it.
    pub(crate) fn urgency(&self, probe: &Probe) -> Option<bool> {
        let groups = self.asking(probe).map(|(_, group)| group);
        let groups =
            groups.filter(|group| *group.check() == probe.check && group.reachable.follows(probe.address));
        groups.map(|group| !group.has_healthy()).reduce(|one, other| one || other)
    }
}

fn drop_position<K: Eq + Hash + Borrow<Q>, Q: Eq + Hash + ?Sized>(
    positions: &mut HashMap<K, Vec<usize>>,
    key: &Q,
    position: usize,
) {
    if let Some(of_key) = positions.get_mut(key) {
        of_key.retain(|other| *other != position);
        if of_key.is_empty() {
            positions.remove(key);
        }
    }
}

pub(super) fn drains(target: &ReachableTarget) -> bool {
    target.drain.is_some()
}

fn draining<'a>(groups: impl Iterator<Item = &'a PlannedGroup>) -> BTreeMap<String, BTreeSet<IpAddr>> {
    let mut draining = BTreeMap::<String, BTreeSet<IpAddr>>::new();
    let reachable = distinct(groups.map(|planned| &planned.group.reachable));
    for target in reachable.flat_map(|reachable| &reachable.targets).filter(|target| drains(target)) {
        draining.entry(target.node.clone()).or_default().insert(target.address);
    }
    draining
}
