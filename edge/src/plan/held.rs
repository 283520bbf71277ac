// SPDX-License-Identifier: Apache-2.0
//! Of which of its targets a group holds anything. Pure, called for each group by `targets`.
//!
//! Under `health-check` steering each load balancer has all nodes as targets, and few of them have an endpoint of its Service. So a
//! group must cost as much as there are endpoints, and not as there are nodes.

use std::net::IpAddr;

use steerage_edge_api::HealthCheckProtocol;

use super::targets::TableKey;
use super::usage::Memory;
use super::view::View;
use crate::health::{HealthByProbe, Probe, TargetHealth};

/// The targets that a group uses if all of them say that they have no endpoint: each answers for the Service as well as any other.
pub(super) const MOST_WITHOUT_ENDPOINT: usize = 16;
/// Of more targets of which nothing is known a group holds so many if no other is healthy, and otherwise none.
const MOST_UNKNOWN: usize = 32;

/// Positions in a view.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// In order.
    pub(super) positions: Vec<usize>,
    /// The number of targets of which nothing is known, held or not.
    pub(super) unknown: usize,
}

/// A group holds the targets whose health is known, unless they said no more than that they have no endpoint, and never had one lately.
/// Where none of these serves, it also holds some of the others, which may be used then: the same on all hosts.
pub(super) fn hold(view: &View, key: &TableKey, health: &HealthByProbe, before: &Memory) -> Held {
    let check = key.check();
    let mut probe = Probe { address: IpAddr::from([0; 4]), check: check.clone() };
    let (mut known, mut unknown) = (Vec::new(), Vec::new());
    let mut add = |address: IpAddr| {
        let Some(position) = view.position(address) else { return };
        probe.address = address;
        if health.has_value(&probe) {
            known.push(position);
        } else if health.get(&probe).is_none() {
            unknown.push(position);
        }
    };
    match check.protocol {
        HealthCheckProtocol::Http => health.differing(check.port).for_each(&mut add),
        HealthCheckProtocol::Tcp => view.addresses().for_each(&mut add),
    }
    sort(&mut known);
    sort(&mut unknown);
    let mut unstating = 0;
    if check.protocol == HealthCheckProtocol::Http {
        let are_known =
            known.iter().filter(|position| view.unstating.binary_search(position).is_ok()).count();
        unstating = view.unstating.len() - are_known;
    }
    let mut of = |position: &usize, is: fn(&TargetHealth) -> bool| {
        view.targets.get(*position).is_some_and(|target| {
            probe.address = target.address;
            health.get(&probe).is_some_and(is)
        })
    };
    let number_unknown = unknown.len() + unstating;
    let is_unknown = |position: &usize| {
        unknown.binary_search(position).is_ok()
            || unstating > 0
                && view.unstating.binary_search(position).is_ok()
                && known.binary_search(position).is_err()
    };
    let mut positions: Vec<usize> = if number_unknown <= MOST_UNKNOWN {
        let of_unstating = view.unstating.iter().filter(|_| unstating > 0).copied().filter(&is_unknown);
        unknown.iter().copied().chain(of_unstating).collect()
    } else if known.iter().any(|position| of(position, TargetHealth::is_healthy)) {
        Vec::new()
    } else {
        view.ring_from(key.place()).filter(is_unknown).take(MOST_UNKNOWN).collect()
    };
    positions.append(&mut known);
    positions.extend(before.addresses().filter_map(|address| view.position(address)));
    if number_unknown == 0 && positions.iter().all(|position| of(position, |health| health.lacks_endpoint)) {
        positions.extend(view.ring_from(key.place()).take(MOST_WITHOUT_ENDPOINT));
    }
    sort(&mut positions);
    Held { positions, unknown: number_unknown }
}

fn sort(positions: &mut Vec<usize>) {
    positions.sort_unstable();
    positions.dedup();
}
