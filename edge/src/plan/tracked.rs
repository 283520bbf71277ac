// SPDX-License-Identifier: Apache-2.0
//! The targets that a group tracks: it has no value for any other. Pure, called for each group by `targets`.
//!
//! Under `health-check` steering each load balancer has all nodes as targets, and few of them have an endpoint of its Service. So a
//! group must cost as much as there are endpoints, and not as there are nodes.

use std::net::IpAddr;

use steerage_edge_api::HealthCheckProtocol;

use super::reachable::ReachableTargets;
use super::targets::TableKey;
use super::usage::Memory;
use crate::health::{HealthByProbe, Probe, TargetHealth};

/// The targets that a group uses if all of them say that they have no endpoint: each answers for the Service as well as any other.
pub(super) const MOST_WITHOUT_ENDPOINT: usize = 16;
/// If more targets are untried, a group tracks so many of them if none is healthy, and otherwise none.
const MOST_UNTRIED: usize = 32;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tracked {
    /// Among the reachable targets, in order.
    pub(super) positions: Vec<usize>,
    /// The number of targets whose first probe has not ended and whose nodes have not stated the port, tracked or not.
    pub(super) untried: usize,
}

/// A group tracks the targets that have a health of their own, and those that had an endpoint lately. If none of them serves, it also
/// tracks some of the others, which are used then: the same on all hosts.
pub(super) fn track(
    reachable: &ReachableTargets,
    key: &TableKey,
    health: &HealthByProbe,
    before: &Memory,
) -> Tracked {
    let check = key.check();
    let mut probe = Probe { address: IpAddr::from([0; 4]), check: check.clone() };
    let (mut known, mut untried) = (Vec::new(), Vec::new());
    let mut add = |address: IpAddr| {
        let Some(position) = reachable.position(address) else { return };
        probe.address = address;
        if health.has_value(&probe) {
            known.push(position);
        } else if health.get(&probe).is_none() {
            untried.push(position);
        }
    };
    match check.protocol {
        HealthCheckProtocol::Http => health.differing(check.port).for_each(&mut add),
        HealthCheckProtocol::Tcp => reachable.addresses().for_each(&mut add),
    }
    sort(&mut known);
    sort(&mut untried);
    let without_statement = match check.protocol {
        HealthCheckProtocol::Http => reachable.without_statement.as_slice(),
        HealthCheckProtocol::Tcp => &[],
    };
    let are_known = known.iter().filter(|position| without_statement.binary_search(position).is_ok()).count();
    let mut of = |position: &usize, is: fn(&TargetHealth) -> bool| {
        reachable.targets.get(*position).is_some_and(|target| {
            probe.address = target.address;
            health.get(&probe).is_some_and(is)
        })
    };
    let number_untried = untried.len() + without_statement.len() - are_known;
    let is_untried = |position: &usize| {
        untried.binary_search(position).is_ok()
            || without_statement.binary_search(position).is_ok() && known.binary_search(position).is_err()
    };
    let mut positions: Vec<usize> = if number_untried <= MOST_UNTRIED {
        untried.iter().chain(without_statement).copied().filter(is_untried).collect()
    } else if known.iter().any(|position| of(position, TargetHealth::is_healthy)) {
        Vec::new()
    } else {
        staying_first(reachable, key).filter(is_untried).take(MOST_UNTRIED).collect()
    };
    positions.append(&mut known);
    positions.extend(before.addresses().filter_map(|address| reachable.position(address)));
    if number_untried == 0 && positions.iter().all(|position| of(position, |health| health.lacks_endpoint)) {
        positions.extend(staying_first(reachable, key).take(MOST_WITHOUT_ENDPOINT));
    }
    sort(&mut positions);
    Tracked { positions, untried: number_untried }
}

/// All targets from the group's place in the ring on, those last whose nodes drain.
fn staying_first<'a>(reachable: &'a ReachableTargets, key: &TableKey) -> impl Iterator<Item = usize> + 'a {
    let ring = |drains| {
        let of_target = move |position: &usize| {
            reachable.targets.get(*position).is_some_and(|target| target.drain.is_some()) == drains
        };
        reachable.ring_from(key.ring_position()).filter(of_target)
    };
    ring(false).chain(ring(true))
}

fn sort(positions: &mut Vec<usize>) {
    positions.sort_unstable();
    positions.dedup();
}
