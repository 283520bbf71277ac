// SPDX-License-Identifier: Apache-2.0
//! The plan: what the kernel should hold, which targets to probe and what to report, from the index, the host's network and
//! the health of targets. Pure: it changes nothing, and what the next plan needs of this one is part of the result.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;
use steerage_edge_api::{ListenerProtocol, TargetStatus};
use steerage_edge_dataplane::maglev::{self, Member};
use steerage_edge_dataplane::packet::maps::ListenerKey;
use steerage_edge_dataplane::packet::protocol;
use steerage_edge_dataplane::{Listener, State, Table};

use crate::health::{HealthByProbe, Probe};
use crate::host::HostNetwork;
use crate::index::Index;
use crate::link::mac::Mac;
use crate::numbers::{TableNumbers, TargetNumbers};
use crate::vips::{SERVED, WITHHELD};

mod accept;
mod room;
mod select;
mod targets;

use accept::{Accepted, accept_all};
pub(crate) use room::Room;
use room::{Served, fair_share, served};
use select::{Frontend, Selection, TargetsInUse, select};
use targets::{TableKey, TargetGroup};

/// What a plan follows from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanInputs<'a> {
    pub(crate) index: &'a Index,
    pub(crate) host: &'a HostNetwork,
    pub(crate) health: &'a HealthByProbe,
    pub(crate) room: Room,
    pub(crate) now: Instant,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    /// What the kernel's maps should hold. VIPs in conflict are withheld.
    pub(crate) state: State,
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

/// What one plan leaves to the next: numbers, tables, which are filled again only when their targets change, and the targets that
/// each VIP uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Assignments {
    targets: TargetNumbers,
    numbers: TableNumbers,
    tables: HashMap<TableKey, AssignedTable>,
    in_use: TargetsInUse,
    served: Served,
}

#[derive(Clone, Debug)]
struct AssignedTable {
    number: u32,
    size: u32,
    members: Vec<Member>,
    table: Arc<Table>,
}

impl Assignments {
    /// Continues with the numbers that the kernel holds.
    pub(crate) fn adopt(written: &State) -> Self {
        Self {
            targets: TargetNumbers::adopt(written),
            numbers: TableNumbers::adopt(written),
            served: served(written),
            ..Self::default()
        }
    }
}

/// The number of each group's table, by the group's position.
type PlannedTables = BTreeMap<usize, u32>;

pub(crate) fn plan(inputs: &PlanInputs<'_>, previous: &Assignments) -> Plan {
    let accepted = accept_all(inputs, &previous.served);
    let Selection { groups, frontends, in_use, is_waiting } = select(inputs, &accepted, &previous.in_use);
    let (tables, mut assignments) = assign(&groups, &frontends, in_use, previous, inputs);
    let is_healthy = |to: &&Frontend<'_>| groups.get(to.group).is_some_and(TargetGroup::has_healthy);
    let state = state(inputs.host, &groups, &frontends, &tables, &assignments);
    assignments.served = served(&state);
    Plan {
        state,
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

/// A table for each group that a frontend uses.
fn assign(
    groups: &[TargetGroup],
    frontends: &[Frontend<'_>],
    in_use: TargetsInUse,
    previous: &Assignments,
    inputs: &PlanInputs<'_>,
) -> (PlannedTables, Assignments) {
    let mut targets = previous.targets.clone();
    let mut numbers = previous.numbers.clone();
    let mut assigned = HashMap::with_capacity(groups.len());
    let mut planned = BTreeMap::new();
    let used: BTreeSet<usize> = frontends.iter().map(|frontend| frontend.group).collect();
    let mut wanted: Vec<_> = used
        .into_iter()
        .filter_map(|position| {
            let group = groups.get(position)?;
            let (members, size) = group.members(&mut targets);
            Some((position, group, members, size))
        })
        .collect();
    fit(&mut wanted, inputs.room);
    for (position, group, members, size) in wanted {
        let before = previous.tables.get(&group.key);
        let number = before.map_or_else(|| numbers.assign(group.vip), |before| before.number);
        let table = before
            .filter(|before| before.size == size && before.members == members)
            .map_or_else(|| Arc::new(Table::new(size, &members)), |before| Arc::clone(&before.table));
        planned.insert(position, number);
        assigned.insert(group.key.clone(), AssignedTable { number, size, members, table });
    }
    targets.retain(&assigned.values().flat_map(|table| &table.table.members).copied().collect(), inputs.now);
    numbers.retain(assigned.values().map(|table| table.number).collect());
    (planned, Assignments { targets, numbers, tables: assigned, in_use, served: Served::new() })
}

/// Gives the largest tables fewer slots, and the longest lists fewer targets, if the maps have no room for all.
fn fit(wanted: &mut [(usize, &TargetGroup, Vec<Member>, u32)], room: Room) {
    let sizes = wanted.iter().map(|(.., size)| Table::room(*size).into());
    let most_slots = fair_share(sizes, room.slots);
    for (_, group, members, size) in &mut *wanted {
        if let Some(most) = most_slots {
            *size = (*size).min(maglev::largest_size(most));
        }
        group.keep_members(members, usize::try_from(*size).unwrap_or(usize::MAX));
    }
    let counts = wanted.iter().map(|(_, _, members, _)| u64::try_from(members.len()).unwrap_or(u64::MAX));
    if let Some(most) = fair_share(counts, room.members) {
        for (_, group, members, _) in wanted {
            group.keep_members(members, usize::try_from(most).unwrap_or(usize::MAX).max(1));
        }
    }
}

fn state(
    host: &HostNetwork,
    groups: &[TargetGroup],
    frontends: &[Frontend<'_>],
    tables: &PlannedTables,
    assignments: &Assignments,
) -> State {
    let mut state = State {
        tables: assignments
            .tables
            .values()
            .map(|assigned| (assigned.number, Arc::clone(&assigned.table)))
            .collect(),
        targets: assignments.targets.states(host),
        senders: senders(host, groups),
        ..State::default()
    };
    for Frontend { load_balancer, vip, group, .. } in frontends {
        let Some(table) = tables.get(group).copied() else { continue };
        let lease = if host.conflicts.contains_key(vip) { WITHHELD } else { SERVED };
        state.vips.insert(*vip, lease);
        let spec = &load_balancer.object.spec;
        let ranges = (!spec.source_ranges.is_empty()).then(|| {
            let of_family = load_balancer.source_ranges.iter().filter(|net| is_same_family(net.addr(), *vip));
            Arc::new(of_family.copied().collect::<BTreeSet<_>>())
        });
        for listener in &spec.listeners {
            let protocol = match listener.protocol {
                ListenerProtocol::Tcp => protocol::TCP,
                ListenerProtocol::Udp => protocol::UDP,
            };
            let key = ListenerKey::new(*vip, protocol, listener.port);
            let has_affinity = spec.affinity.is_some();
            state.listeners.insert(key, Listener { table, has_affinity, ranges: ranges.clone() });
        }
    }
    state
}

/// The source addresses that frames of nodes and of other edge hosts may have.
fn senders(host: &HostNetwork, groups: &[TargetGroup]) -> BTreeMap<Mac, Arc<BTreeSet<IpNet>>> {
    let mut senders = BTreeMap::<Mac, Vec<IpNet>>::new();
    for (mac, nets) in groups.iter().flat_map(|group| &group.sources) {
        senders.entry(*mac).or_default().extend(nets);
    }
    for peer in &host.peers {
        senders.entry(peer.mac).or_default().extend(peer.addresses.iter().copied().map(IpNet::from));
    }
    senders
        .into_iter()
        .map(|(mac, nets)| (mac, Arc::new(IpNet::aggregate(&nets).into_iter().collect())))
        .collect()
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

fn is_same_family(a: IpAddr, b: IpAddr) -> bool {
    a.is_ipv6() == b.is_ipv6()
}

#[cfg(test)]
mod tests;
