// SPDX-License-Identifier: Apache-2.0
//! What follows from the health of a few targets, or from changed lists of nodes with an endpoint, without a plan: only their groups
//! get other tables and statuses. Pure, used by the plan, which makes the [`PlannedGroups`], and by `engine`, which asks them.
//!
//! A plan costs as much as there are load balancers, and targets change their health all the time. It must come to the same result
//! as a plan; where that is not certain it comes to none.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use steerage_edge_dataplane::Table;

use super::Assignments;
use super::reachable::{ReachableTarget, distinct};
use super::report::GroupReport;
use super::room::{Room, SlotsAndMembers};
use super::select::Frontend;
use super::targets::TargetGroup;
use crate::drains::DrainingTargets;
use crate::endpoint_nodes::{EndpointNodes, ListChange};
use crate::health::{HealthByProbe, Probe, ProbeRequest};

/// The groups of a plan, and who uses them.
#[derive(Debug, Default)]
pub(crate) struct PlannedGroups {
    groups: Vec<PlannedGroup>,
    /// The positions of groups whose checks ask this.
    asked: HashMap<ProbeRequest, Vec<usize>>,
    /// The positions of groups for which a load balancer's list of nodes with an endpoint counts.
    listed: HashMap<String, Vec<usize>>,
    /// Of all tables.
    used: SlotsAndMembers,
    /// Which group a VIP uses depends on nothing that changes with health, and each table is as large as it should be.
    is_settled: bool,
    healthy_vips: u32,
    /// The addresses of each draining node's targets.
    draining: BTreeMap<String, BTreeSet<IpAddr>>,
    /// When the first group changes without any news, or earlier.
    next_change: Option<Instant>,
}

#[derive(Debug)]
struct PlannedGroup {
    group: TargetGroup,
    /// The number of VIPs that use it.
    vips: u32,
    /// The load balancers whose statuses are about it, and the place among the lists of each.
    reported: Vec<(String, usize)>,
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
    ) -> Self {
        let (mut asked, mut listed) = (HashMap::<_, Vec<_>>::new(), HashMap::<_, Vec<_>>::new());
        for (position, group) in groups.iter().enumerate() {
            asked.entry(ProbeRequest::from(group.check())).or_default().push(position);
            if let Some(name) = group.key.load_balancer() {
                listed.entry(name.to_owned()).or_default().push(position);
            }
        }
        let unused = |group| PlannedGroup { group, vips: 0, reported: Vec::new() };
        let mut groups: Vec<_> = groups.into_iter().map(unused).collect();
        let mut lists = HashMap::<&str, usize>::new();
        for Frontend { load_balancer, group, reported, .. } in frontends {
            if let Some(used) = groups.get_mut(*group) {
                used.vips += 1;
            }
            let list = lists.entry(&load_balancer.object.name).or_default();
            if let Some(reported) = groups.get_mut(*reported) {
                reported.reported.push((load_balancer.object.name.clone(), *list));
            }
            *list += 1;
        }
        let healthy = groups.iter().filter(|group| group.group.has_healthy());
        let healthy_vips = healthy.map(|group| group.vips).sum();
        let draining = draining(&groups);
        let mut planned =
            Self { groups, asked, listed, used, is_settled, healthy_vips, draining, next_change: None };
        planned.next_change = planned.next();
        planned
    }

    /// The targets of each draining node.
    pub(crate) fn draining(&self) -> BTreeMap<String, DrainingTargets> {
        if self.draining.is_empty() {
            return BTreeMap::new();
        }
        let served = self.groups.iter().filter(|planned| planned.vips > 0);
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

    /// Whether a group changes by now without any news: [`retarget`](Self::retarget) says what follows.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.next_change.is_some_and(|next| next <= now)
    }

    fn next(&self) -> Option<Instant> {
        self.groups.iter().filter_map(|planned| planned.group.next_change).min()
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
        let is_due = self.is_due(inputs.now);
        if is_due {
            let is_due =
                |planned: &PlannedGroup| planned.group.next_change.is_some_and(|at| at <= inputs.now);
            let due = self.groups.iter().enumerate().filter(|(_, planned)| is_due(planned));
            positions.extend(due.map(|(position, _)| position));
        }
        let mut flipped = Vec::new();
        for position in positions {
            let planned = self.groups.get_mut(position)?;
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
                let probe = |address| Probe { address, check: group.check().clone() };
                flipped.extend(group.reachable.addresses().map(probe));
            }
            self.next_change = self.next_change.into_iter().chain(group.next_change).min();
            planned.group = group;
        }
        if is_due {
            self.next_change = self.next();
        }
        result.urgent = flipped.into_iter().map(|probe| self.with_urgency(probe)).collect();
        Some(result)
    }

    /// The positions of groups with this target whose checks ask the same.
    fn asked(&self, probe: &Probe) -> impl Iterator<Item = usize> {
        let positions = self.asked.get(&ProbeRequest::from(&probe.check)).into_iter().flatten().copied();
        let has_target = |position: &usize| {
            let planned = self.groups.get(*position);
            planned.is_some_and(|planned| planned.group.reachable.position(probe.address).is_some())
        };
        positions.filter(has_target)
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
            let group = self.groups.get(position).map(|planned| &planned.group);
            group.is_some_and(|group| group.key.load_balancer() == Some(&list.load_balancer))
        };
        let mut expected = Vec::new();
        for group in self.listed(list).filter_map(|position| self.groups.get(position)) {
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

    /// Whether one of the groups that share the probe has no healthy target.
    fn with_urgency(&self, probe: Probe) -> (Probe, bool) {
        let groups = self.asked(&probe).filter_map(|position| self.groups.get(position));
        let is_urgent = groups
            .map(|planned| &planned.group)
            .any(|group| *group.check() == probe.check && !group.has_healthy());
        (probe, is_urgent)
    }
}

fn drains(target: &ReachableTarget) -> bool {
    target.drain.is_some()
}

fn draining(groups: &[PlannedGroup]) -> BTreeMap<String, BTreeSet<IpAddr>> {
    let mut draining = BTreeMap::<String, BTreeSet<IpAddr>>::new();
    let reachable = distinct(groups.iter().map(|planned| &planned.group.reachable));
    for target in reachable.flat_map(|reachable| &reachable.targets).filter(|target| drains(target)) {
        draining.entry(target.node.clone()).or_default().insert(target.address);
    }
    draining
}
