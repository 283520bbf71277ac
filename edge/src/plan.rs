// SPDX-License-Identifier: Apache-2.0
//! The plan: what the kernel should hold, which targets to probe and what to report, from the index, the host's network and
//! the health of targets. Pure: it changes nothing, and what the next plan needs of this one is part of the result.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;
use steerage_edge_api::{ListenerProtocol, TargetStatus};

use crate::forward::{ForwardingState, SlotTable, slot_table_id};
use crate::health::{HealthByProbe, Probe};
use crate::host::HostNetwork;
use crate::ids::{TableNumbers, TargetIds};
use crate::index::Index;
use crate::slot_table::{self, WeightedTarget};

mod accept;
mod select;
mod targets;

use accept::{Accepted, accept_all};
use select::{Frontend, Selection, TargetsInUse, select};
use targets::{SlotTableKey, TargetGroup};

/// What a plan follows from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanInputs<'a> {
    pub(crate) index: &'a Index,
    pub(crate) host: &'a HostNetwork,
    pub(crate) health: &'a HealthByProbe,
    pub(crate) now: Instant,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    pub(crate) forwarding: ForwardingState,
    /// The VIPs that the active host should have on its interface.
    pub(crate) vips: BTreeSet<IpAddr>,
    /// All VIPs, also those in conflict: the detection checks each.
    pub(crate) monitored_vips: BTreeSet<IpAddr>,
    pub(crate) probes: HashSet<Probe>,
    /// Those of groups without a healthy target.
    pub(crate) urgent_probes: HashSet<Probe>,
    /// By name of the load balancer.
    pub(crate) statuses: BTreeMap<String, LoadBalancerStatus>,
    /// The number of VIPs with a healthy target.
    pub(crate) healthy_vips: u32,
    /// Whether a VIP waits for probes: it gets its new targets by a later plan, also if nothing changes.
    pub(crate) is_waiting: bool,
    /// For the next plan.
    pub(crate) assignments: Assignments,
}

/// What is reported of one load balancer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadBalancerStatus {
    pub(crate) uid: String,
    pub(crate) generation: i64,
    /// What keeps the load balancer from being in force; empty if nothing does.
    pub(crate) problem: String,
    /// A list for each VIP. Load balancers with the same targets and check share lists.
    pub(crate) targets: Vec<Arc<Vec<TargetStatus>>>,
}

/// What one plan leaves to the next: ids, slot tables, which are filled again only when their targets change, and the targets that
/// each VIP uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Assignments {
    targets: TargetIds,
    numbers: TableNumbers,
    tables: HashMap<SlotTableKey, AssignedTable>,
    in_use: TargetsInUse,
}

#[derive(Clone, Debug)]
struct AssignedTable {
    number: u32,
    class: usize,
    members: Vec<WeightedTarget>,
    slots: Arc<SlotTable>,
}

impl Assignments {
    /// Continues with the ids that the kernel holds.
    pub(crate) fn adopt(written: &ForwardingState) -> Self {
        Self { targets: TargetIds::adopt(written), numbers: TableNumbers::adopt(written), ..Self::default() }
    }
}

/// The slot table of a target group.
struct PlannedTable {
    id: u32,
    slots: Arc<SlotTable>,
}

pub(crate) fn plan(inputs: &PlanInputs<'_>, previous: &Assignments) -> Plan {
    let accepted = accept_all(inputs);
    let Selection { groups, frontends, in_use, is_waiting } = select(inputs, &accepted, &previous.in_use);
    let (tables, assignments) = assign(&groups, &frontends, in_use, previous, inputs.now);
    let conflicts = &inputs.host.conflicts;
    let is_healthy = |to: &&Frontend<'_>| groups.get(to.group).is_some_and(TargetGroup::has_healthy);
    Plan {
        forwarding: forwarding(inputs.host, &groups, &frontends, &tables, &assignments),
        vips: frontends.iter().map(|to| to.vip).filter(|vip| !conflicts.contains_key(vip)).collect(),
        monitored_vips: frontends.iter().map(|to| to.vip).collect(),
        probes: groups.iter().flat_map(|group| &group.probes).cloned().collect(),
        urgent_probes: groups
            .iter()
            .filter(|group| !group.has_healthy())
            .flat_map(|group| &group.probes)
            .cloned()
            .collect(),
        statuses: statuses(&accepted, &groups, &frontends),
        healthy_vips: u32::try_from(frontends.iter().filter(is_healthy).count()).unwrap_or(u32::MAX),
        is_waiting,
        assignments,
    }
}

/// A slot table for each group that a frontend uses, by position.
fn assign(
    groups: &[TargetGroup],
    frontends: &[Frontend<'_>],
    in_use: TargetsInUse,
    previous: &Assignments,
    now: Instant,
) -> (BTreeMap<usize, PlannedTable>, Assignments) {
    let mut targets = previous.targets.clone();
    let mut numbers = previous.numbers.clone();
    let mut assigned = HashMap::with_capacity(groups.len());
    let mut planned = BTreeMap::new();
    let used: BTreeSet<usize> = frontends.iter().map(|frontend| frontend.group).collect();
    for position in used {
        let Some(group) = groups.get(position) else { continue };
        let class = slot_table::class(group.candidates.len());
        let members = group.members(&mut targets);
        let before = previous.tables.get(&group.key);
        let number = before.map_or_else(|| numbers.assign(group.vip), |before| before.number);
        let slots = before
            .filter(|before| before.class == class && before.members == members)
            .map_or_else(|| Arc::new(fill(class, &members)), |before| Arc::clone(&before.slots));
        let id = slot_table_id(number, class, group.key.affinity);
        planned.insert(position, PlannedTable { id, slots: Arc::clone(&slots) });
        assigned.insert(group.key.clone(), AssignedTable { number, class, members, slots });
    }
    targets.retain(&planned.values().flat_map(|table| &table.slots.usable).copied().collect(), now);
    numbers.retain(assigned.values().map(|table| table.number).collect());
    (planned, Assignments { targets, numbers, tables: assigned, in_use })
}

fn fill(class: usize, members: &[WeightedTarget]) -> SlotTable {
    let size = slot_table::SIZES.get(class).copied().unwrap_or(0);
    SlotTable {
        slots: slot_table::fill(size, members),
        usable: members.iter().map(|member| member.id).collect(),
    }
}

fn forwarding(
    host: &HostNetwork,
    groups: &[TargetGroup],
    frontends: &[Frontend<'_>],
    tables: &BTreeMap<usize, PlannedTable>,
    assignments: &Assignments,
) -> ForwardingState {
    let mut state = ForwardingState {
        slot_tables: tables.values().map(|table| (table.id, Arc::clone(&table.slots))).collect(),
        targets: assignments.targets.addresses(),
        peers: host.peers.iter().map(|peer| peer.mac).collect(),
        ..ForwardingState::default()
    };
    for Frontend { load_balancer, vip, group, .. } in frontends {
        let (Some(group), Some(table)) = (groups.get(*group), tables.get(group)) else { continue };
        state.vips.insert(*vip);
        for listener in &load_balancer.object.spec.listeners {
            let protocol = match listener.protocol {
                ListenerProtocol::Tcp => 6,
                ListenerProtocol::Udp => {
                    state.fragments.insert(*vip, table.id);
                    17
                }
            };
            state.listeners.insert((*vip, protocol, listener.port), table.id);
        }
        if !load_balancer.object.spec.source_ranges.is_empty() {
            let of_family = load_balancer.source_ranges.iter().filter(|net| is_same_family(net.addr(), *vip));
            state.ranges.insert(*vip, of_family.copied().collect());
        }
        if group.has_local_target() {
            state.local.insert(*vip);
        }
    }
    for (mac, nets) in groups.iter().flat_map(|group| &group.sources) {
        state.nodes.insert(*mac);
        state.sources.entry(*mac).or_default().extend(nets);
    }
    for peer in &host.peers {
        state.sources.entry(peer.mac).or_default().extend(peer.addresses.iter().copied().map(IpNet::from));
    }
    for nets in state.sources.values_mut() {
        *nets = disjoint(nets.iter().copied());
    }
    state
}

fn statuses(
    accepted: &[Accepted<'_>],
    groups: &[TargetGroup],
    frontends: &[Frontend<'_>],
) -> BTreeMap<String, LoadBalancerStatus> {
    let status = |accepted: &Accepted<'_>| LoadBalancerStatus {
        uid: accepted.object.uid.clone(),
        generation: accepted.object.generation,
        problem: accepted.problems.join(" "),
        targets: Vec::new(),
    };
    let mut statuses: BTreeMap<_, _> =
        accepted.iter().map(|accepted| (accepted.object.name.clone(), status(accepted))).collect();
    for Frontend { load_balancer, reported, .. } in frontends {
        let status = statuses.get_mut(&load_balancer.object.name);
        if let (Some(status), Some(group)) = (status, groups.get(*reported)) {
            status.targets.push(Arc::clone(&group.statuses));
        }
    }
    statuses
}

/// The kernel's interval sets refuse ranges that overlap.
fn disjoint(nets: impl Iterator<Item = IpNet>) -> BTreeSet<IpNet> {
    IpNet::aggregate(&nets.collect()).into_iter().collect()
}

fn is_same_family(a: IpAddr, b: IpAddr) -> bool {
    a.is_ipv6() == b.is_ipv6()
}

#[cfg(test)]
mod tests;
