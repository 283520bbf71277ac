// SPDX-License-Identifier: Apache-2.0
//! The plan: what the kernel should hold, which targets to probe and what to report, from the index, the host's network and
//! the health of targets. Pure: it changes nothing, and what the next plan needs of this one is part of the result.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use steerage_edge_dataplane::packet::maps::ListenerKey;
use steerage_edge_dataplane::{Listener, State};

use crate::checks::Checks;
use crate::endpoint_nodes::EndpointNodes;
use crate::health::HealthByProbe;
use crate::host::HostNetwork;
use crate::index::Index;

mod accept;
mod amend;
mod assignments;
mod followed;
mod ledger;
mod reachable;
mod report;
mod retarget;
mod room;
mod select;
mod sender_nets;
mod targets;
mod tracked;
mod usage;

use accept::{Accepted, accept_all};
pub(crate) use amend::Amended;
pub(crate) use assignments::Assignments;
use assignments::{Assigned, assign};
use ledger::Ledger;
use reachable::ReachableByTargets;
pub(crate) use report::{GroupReport, SharedGroup};
#[cfg(test)]
pub(crate) use report::{TrackedTarget, UntrackedCounts};
pub(crate) use retarget::{Changed, ChangedStatus, HealthInputs, PlannedGroups, Retargeted};
pub(crate) use room::Room;
use room::served;
use select::{Frontend, Selection, select};
use targets::TargetGroup;

/// What a plan follows from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanInputs<'a> {
    pub(crate) index: &'a Index,
    pub(crate) host: &'a HostNetwork,
    pub(crate) health: &'a HealthByProbe,
    /// As the index has them.
    pub(crate) endpoints: &'a EndpointNodes,
    pub(crate) room: Room,
    pub(crate) now: Instant,
}

impl<'a> PlanInputs<'a> {
    fn health_inputs(&self) -> HealthInputs<'a> {
        let Self { health, endpoints, room, now, .. } = *self;
        HealthInputs { health, endpoints, room, now }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// What the kernel's maps should hold. VIPs in conflict are withheld.
    pub(crate) state: State,
    /// What to follow the health of. Checks of groups without a healthy target are urgent.
    pub(crate) checks: Checks,
    /// The first probe of every target has ended.
    pub(crate) is_tried: bool,
    /// By name of the load balancer.
    pub(crate) statuses: BTreeMap<String, LoadBalancerStatus>,
    /// Whether a VIP waits for probes: it gets its new targets by a later plan, also if nothing changes.
    pub(crate) is_waiting: bool,
    /// What follows from the next changes of health.
    pub(crate) groups: PlannedGroups,
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
    /// The VIPs, also those that are not served.
    pub(crate) vips: Vec<IpAddr>,
    /// The VIPs that are served, in the order of `targets`.
    pub(crate) served: Vec<IpAddr>,
    /// A report for each of these. Load balancers with the same targets and check share reports.
    pub(crate) targets: Vec<Arc<GroupReport>>,
    /// The UID of its node set, if it uses one that exists.
    pub(crate) node_set_uid: Option<Arc<str>>,
}

pub(crate) fn plan(inputs: &PlanInputs<'_>, previous: &Assignments) -> Plan {
    let (accepted, has_room) = accept_all(inputs, &previous.served);
    let mut reachables = ReachableByTargets::default();
    let Selection { groups, frontends, in_use, is_waiting } =
        select(inputs, &accepted, previous, &mut reachables);
    let Assigned { tables, mut assignments, used, is_cut } =
        assign(&groups, &frontends, in_use, previous, inputs);
    let (vips, listeners) = serve(inputs.host, &frontends, |group| tables.get(&group).copied());
    let statuses = statuses(inputs.index, &accepted, &groups, &frontends);
    let is_tried = groups.iter().all(TargetGroup::is_tried);
    let ledger = Ledger::new(&accepted, &frontends, reachables, has_room, inputs.now);
    let mut groups = PlannedGroups::new(groups, &frontends, used, !is_waiting && !is_cut, ledger);
    let is_node = assignments.is_node(inputs.host, &groups.ledger);
    let state = State {
        vips,
        listeners,
        tables: assignments.tables(),
        targets: assignments.targets.states(inputs.host),
        senders: groups.ledger.senders.all(inputs.host, is_node),
    };
    assignments.served = served(&state);
    let checks = groups.ledger.checks.all();
    Plan { state, checks, is_tried, statuses, is_waiting, groups, assignments }
}

/// The VIPs with their leases, and the listeners. `table` is the number of the table of the group at a position.
fn serve(
    host: &HostNetwork,
    frontends: &[Frontend<'_>],
    table: impl Fn(usize) -> Option<u32>,
) -> (BTreeMap<IpAddr, u32>, BTreeMap<ListenerKey, Listener>) {
    let (mut vips, mut listeners) = (BTreeMap::new(), BTreeMap::new());
    for Frontend { load_balancer, vip, group, .. } in frontends {
        let Some(table) = table(*group) else { continue };
        vips.insert(*vip, host.lease(*vip));
        let spec = &load_balancer.object.spec;
        let ranges = (!spec.source_ranges.is_empty()).then(|| {
            let of_family = load_balancer.source_ranges.iter().filter(|net| is_same_family(net.addr(), *vip));
            Arc::new(of_family.copied().collect::<BTreeSet<_>>())
        });
        for key in load_balancer.listeners(*vip) {
            let has_affinity = spec.affinity.is_some();
            listeners.insert(key, Listener { table, has_affinity, ranges: ranges.clone() });
        }
    }
    (vips, listeners)
}

fn statuses(
    index: &Index,
    accepted: &[Accepted<'_>],
    groups: &[TargetGroup],
    frontends: &[Frontend<'_>],
) -> BTreeMap<String, LoadBalancerStatus> {
    let status = |accepted: &Accepted<'_>| {
        let spec = &accepted.object.spec;
        let node_set = spec.node_set.as_deref().and_then(|name| index.node_set(name));
        LoadBalancerStatus {
            uid: accepted.object.uid.clone(),
            generation: accepted.object.generation,
            problem: accepted.problems.join(" "),
            vips: spec.addresses.clone(),
            served: Vec::new(),
            targets: Vec::new(),
            node_set_uid: node_set.map(|set| Arc::clone(&set.uid)),
        }
    };
    let mut statuses: BTreeMap<_, _> =
        accepted.iter().map(|accepted| (accepted.object.name.clone(), status(accepted))).collect();
    for Frontend { load_balancer, vip, reported, .. } in frontends {
        let status = statuses.get_mut(&load_balancer.object.name);
        if let (Some(status), Some(group)) = (status, groups.get(*reported)) {
            status.served.push(*vip);
            status.targets.push(Arc::clone(&group.report));
        }
    }
    statuses
}

fn is_same_family(a: IpAddr, b: IpAddr) -> bool {
    a.is_ipv6() == b.is_ipv6()
}

#[cfg(test)]
mod tests;
