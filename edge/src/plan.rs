// SPDX-License-Identifier: Apache-2.0
//! The plan: what the kernel should hold, which targets to probe and what to report, from the index, the host's network and
//! the health of targets. Pure: it changes nothing, and what the next plan needs of this one is part of the result.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;
use steerage_edge_api::{ListenerProtocol, TargetStatus};

use crate::forward::{ForwardingState, LOCAL_TARGET, SlotTable, slot_table_id};
use crate::health::{HealthByProbe, Probe};
use crate::host::HostNetwork;
use crate::ids::{TableNumbers, TargetIds};
use crate::index::Index;
use crate::slot_table::{self, WeightedTarget};

mod accept;
mod targets;

use accept::{Accepted, accept_all};
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
    /// By name of the load balancer.
    pub(crate) statuses: BTreeMap<String, LoadBalancerStatus>,
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

/// What one plan leaves to the next: ids, and slot tables, which are filled again only when their targets change.
#[derive(Clone, Debug, Default)]
pub(crate) struct Assignments {
    targets: TargetIds,
    numbers: TableNumbers,
    tables: HashMap<SlotTableKey, AssignedTable>,
    /// The slot table of each VIP, by UID of its load balancer.
    in_use: HashMap<(String, IpAddr), SlotTableKey>,
}

#[derive(Clone, Debug, Default)]
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

/// A VIP that is served, and the position of its target group.
struct Frontend<'a> {
    load_balancer: &'a Accepted<'a>,
    vip: IpAddr,
    group: usize,
}

/// A frontend with its targets, and with its slot table.
struct Served<'a> {
    frontend: &'a Frontend<'a>,
    group: &'a TargetGroup,
    table: u32,
    slots: Arc<SlotTable>,
}

pub(crate) fn plan(inputs: &PlanInputs<'_>, previous: &Assignments) -> Plan {
    let accepted = accept_all(inputs);
    let (groups, frontends) = group_targets(inputs, &accepted);
    let (served, assignments) = assign(&groups, &frontends, previous, inputs.now);
    let conflicts = &inputs.host.conflicts;
    Plan {
        forwarding: forwarding(inputs.host, &groups, &served, &assignments),
        vips: frontends.iter().map(|to| to.vip).filter(|vip| !conflicts.contains_key(vip)).collect(),
        monitored_vips: frontends.iter().map(|to| to.vip).collect(),
        probes: groups.iter().flat_map(|group| &group.probes).cloned().collect(),
        statuses: statuses(&accepted, &groups, &frontends),
        assignments,
    }
}

/// Load balancers with the same targets and check share a group, which is planned once.
fn group_targets<'a>(
    inputs: &PlanInputs<'_>,
    accepted: &'a [Accepted<'a>],
) -> (Vec<TargetGroup>, Vec<Frontend<'a>>) {
    let (mut groups, mut frontends) = (Vec::new(), Vec::new());
    let mut positions = HashMap::new();
    for load_balancer in accepted {
        for vip in load_balancer.vips.iter().copied() {
            let key = SlotTableKey::new(load_balancer.object, vip);
            let group = *positions.entry(key).or_insert_with_key(|key| {
                groups.push(TargetGroup::new(inputs, load_balancer, key.clone(), vip));
                groups.len() - 1
            });
            frontends.push(Frontend { load_balancer, vip, group });
        }
    }
    (groups, frontends)
}

/// Gives each frontend a slot table.
fn assign<'a>(
    groups: &'a [TargetGroup],
    frontends: &'a [Frontend<'a>],
    previous: &Assignments,
    now: Instant,
) -> (Vec<Served<'a>>, Assignments) {
    let mut targets = previous.targets.clone();
    let mut numbers = previous.numbers.clone();
    let mut tables = HashMap::with_capacity(groups.len());
    for group in groups {
        let before = previous.tables.get(&group.key);
        let class = slot_table::class(group.candidates.len());
        let members = group.members(&mut targets);
        let table = match before {
            Some(before) if !group.exists => before.clone(),
            Some(before) if before.class == class && before.members == members => before.clone(),
            before => AssignedTable {
                number: before.map_or_else(|| numbers.assign(group.vip), |before| before.number),
                class,
                slots: Arc::new(fill(class, &members)),
                members,
            },
        };
        tables.insert(group.key.clone(), table);
    }
    let (mut served, mut in_use) = (Vec::with_capacity(frontends.len()), HashMap::new());
    for frontend in frontends {
        let Some(group) = groups.get(frontend.group) else { continue };
        let owner = (frontend.load_balancer.object.uid.clone(), frontend.vip);
        let last = previous.in_use.get(&owner).filter(|_| !group.is_health_known());
        let before = last.and_then(|last| previous.tables.get_key_value(last));
        let (key, table) = match before {
            // A VIP that moves to other targets, as by a change of steering, keeps its last slot table until the health of the new
            // ones is known: fail open would send packets to nodes that drop them.
            Some((key, before)) => (key, tables.entry(key.clone()).or_insert_with(|| before.clone())),
            None => (&group.key, tables.entry(group.key.clone()).or_default()),
        };
        let id = slot_table_id(table.number, table.class, key.affinity);
        served.push(Served { frontend, group, table: id, slots: Arc::clone(&table.slots) });
        in_use.insert(owner, key.clone());
    }
    targets.retain(&served.iter().flat_map(|served| &served.slots.usable).copied().collect(), now);
    numbers.retain(tables.values().map(|table| table.number).collect());
    (served, Assignments { targets, numbers, tables, in_use })
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
    served: &[Served<'_>],
    assignments: &Assignments,
) -> ForwardingState {
    let mut state = ForwardingState {
        slot_tables: served.iter().map(|served| (served.table, Arc::clone(&served.slots))).collect(),
        targets: assignments.targets.addresses(),
        peers: host.peers.iter().map(|peer| peer.mac).collect(),
        ..ForwardingState::default()
    };
    for Served { frontend: Frontend { load_balancer, vip, .. }, group, table, slots } in served {
        state.vips.insert(*vip);
        for listener in &load_balancer.object.spec.listeners {
            let protocol = match listener.protocol {
                ListenerProtocol::Tcp => 6,
                ListenerProtocol::Udp => {
                    state.fragments.insert(*vip, *table);
                    17
                }
            };
            state.listeners.insert((*vip, protocol, listener.port), *table);
        }
        if !load_balancer.object.spec.source_ranges.is_empty() {
            let of_family = load_balancer.source_ranges.iter().filter(|net| is_same_family(net.addr(), *vip));
            state.ranges.insert(*vip, disjoint(of_family.copied()));
        }
        if group.has_local_target() || slots.usable.contains(&LOCAL_TARGET) {
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
        problem: accepted.problems.join("; "),
        targets: Vec::new(),
    };
    let mut statuses: BTreeMap<_, _> =
        accepted.iter().map(|accepted| (accepted.object.name.clone(), status(accepted))).collect();
    for Frontend { load_balancer, group, .. } in frontends {
        let status = statuses.get_mut(&load_balancer.object.name);
        if let (Some(status), Some(group)) = (status, groups.get(*group)) {
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
