// SPDX-License-Identifier: Apache-2.0
//! Selection of endpoints, for load balancers and for service proxies.
//!
//! *Membership* decides which nodes a load balancer gets under `api` steering; the *backends* are the endpoints that a node
//! forwards to. The rules are those of kube-proxy (`CategorizeEndpoints`), which the agent replaces.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::{Endpoint, EndpointSlice, Family, Protocol};

/// An endpoint together with the port that one Service port maps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend<'a> {
    /// The port that the pod listens on.
    pub port: u16,
    /// The endpoint.
    pub endpoint: &'a Endpoint,
}

/// The nodes that a load balancer should use, with their number of endpoints: nodes with a ready endpoint or, if no endpoint
/// of the Service is ready, nodes with a serving and terminating one. Endpoints without a node do not count.
pub fn membership<'a>(slices: impl Iterator<Item = &'a EndpointSlice>) -> BTreeMap<&'a str, u32> {
    let (mut ready, mut fallback) = (BTreeSet::new(), BTreeSet::new());
    let mut any_ready = false;
    for endpoint in slices.flat_map(|slice| &slice.endpoints) {
        any_ready |= endpoint.ready;
        // A dual-stack pod is in a slice of each family: a node's count is that of its larger family.
        if let Some(node) = endpoint.node.as_deref() {
            let entry = (node, Family::of(endpoint.addr), endpoint.addr);
            if endpoint.ready {
                ready.insert(entry);
            } else if endpoint.is_serving_terminating() {
                fallback.insert(entry);
            }
        }
    }
    let chosen = if any_ready { ready } else { fallback };
    let mut per_family: BTreeMap<(&str, Family), u32> = BTreeMap::new();
    for (node, family, _) in chosen {
        *per_family.entry((node, family)).or_default() += 1;
    }
    let mut nodes = BTreeMap::new();
    for ((node, _), count) in per_family {
        let most: &mut u32 = nodes.entry(node).or_default();
        *most = count.max(*most);
    }
    nodes
}

/// All endpoints of one Service port in one family, see [`SlicePorts::backends`].
pub fn backends<'a>(
    slices: impl Iterator<Item = &'a EndpointSlice>,
    family: Family,
    port_name: &str,
    protocol: Protocol,
) -> Vec<Backend<'a>> {
    SlicePorts::new(slices, family).backends(port_name, protocol)
}

/// The slices of one Service in one family, with their ports by name: for all ports of a Service, one after the other.
#[derive(Debug)]
pub struct SlicePorts<'a> {
    /// The endpoints of each slice.
    slices: Vec<Vec<&'a Endpoint>>,
    /// Where a port is: the numbers that it has in the slices at these places.
    numbers: HashMap<(&'a str, Protocol), Vec<(usize, u16)>>,
}

impl<'a> SlicePorts<'a> {
    /// Those slices that are of the family.
    pub fn new(slices: impl Iterator<Item = &'a EndpointSlice>, family: Family) -> Self {
        let mut all = Self { slices: Vec::new(), numbers: HashMap::new() };
        for (at, slice) in slices.filter(|slice| slice.family == family).enumerate() {
            for port in slice.ports.iter().filter(|port| port.port != 0) {
                all.numbers.entry((port.name, port.protocol)).or_default().push((at, port.port));
            }
            all.slices.push(slice.endpoints.iter().collect());
        }
        all
    }

    /// The places of the slices that have a Service port, each with the port's number there. Ports with the same places and one number
    /// have the same endpoints.
    pub fn numbers<'s>(&'s self, port_name: &'s str, protocol: Protocol) -> &'s [(usize, u16)] {
        self.numbers.get(&(port_name, protocol)).map_or(&[], Vec::as_slice)
    }

    /// Keeps endpoints of the lowest rank, so that [`SlicePorts::backends`] of these ports look at `most` endpoints together, each counted
    /// once for each port that its slice has. Besides, each port keeps its first endpoint, and the first of its `spare` ones. Returns how
    /// many others of those that `counts` are not looked at.
    pub fn keep<R: Ord>(
        &mut self,
        ports: &[(&str, Protocol)],
        most: usize,
        rank: impl Fn(&Endpoint) -> R,
        spare: impl Fn(&Endpoint) -> bool,
        counts: impl Fn(&Endpoint) -> bool,
    ) -> usize {
        let mut of_slice: Vec<Vec<usize>> = vec![Vec::new(); self.slices.len()];
        for (at, (name, protocol)) in ports.iter().enumerate() {
            for (slice, _) in self.numbers(name, *protocol) {
                if let Some(ports) = of_slice.get_mut(*slice) {
                    ports.push(at);
                }
            }
        }
        let looks = self.slices.iter().zip(&of_slice).map(|(endpoints, ports)| endpoints.len() * ports.len());
        if looks.sum::<usize>() <= most {
            return 0;
        }
        let mut kept = self.first_of_ports(&of_slice, ports.len(), &rank, |_| true);
        kept.extend(self.first_of_ports(&of_slice, ports.len(), &rank, spare));
        let used = kept.iter().filter_map(|(slice, _)| of_slice.get(*slice)).map(Vec::len).sum();
        let mut left = most.saturating_sub(used);
        let mut others = Vec::new();
        for (slice, (endpoints, ports)) in self.slices.iter().zip(&of_slice).enumerate() {
            let cost = ports.len();
            if (1..=left).contains(&cost) {
                let not_kept = endpoints.iter().enumerate().filter(|(at, _)| !kept.contains(&(slice, *at)));
                others.extend(not_kept.map(|(at, endpoint)| (rank(endpoint), slice, at, cost)));
            }
        }
        // No more than these have room, whichever they are.
        let room = left / others.iter().map(|(.., cost)| *cost).min().unwrap_or(1);
        if room < others.len() {
            others.select_nth_unstable(room);
            others.truncate(room);
        }
        others.sort_unstable();
        for (_, slice, at, cost) in others {
            if cost <= left {
                left -= cost;
                kept.insert((slice, at));
            }
        }
        let mut left_out = 0;
        for (slice, (endpoints, ports)) in self.slices.iter_mut().zip(&of_slice).enumerate() {
            let mut at = 0..;
            endpoints.retain(|endpoint| {
                let is_kept = at.next().is_some_and(|at| kept.contains(&(slice, at)));
                left_out += if !is_kept && counts(endpoint) { ports.len() } else { 0 };
                is_kept
            });
        }
        left_out
    }

    /// The places of endpoints of which each port has one at least, if it has any that is meant: that of the lowest rank.
    fn first_of_ports<R: Ord>(
        &self,
        of_slice: &[Vec<usize>],
        ports: usize,
        rank: impl Fn(&Endpoint) -> R,
        is_meant: impl Fn(&Endpoint) -> bool,
    ) -> HashSet<(usize, usize)> {
        let first = |(slice, endpoints): (usize, &Vec<&Endpoint>)| {
            let meant = endpoints.iter().enumerate().filter(|(_, endpoint)| is_meant(endpoint));
            meant.map(|(at, endpoint)| (rank(endpoint), slice, at)).min()
        };
        let mut first: Vec<_> = self.slices.iter().enumerate().filter_map(first).collect();
        first.sort_unstable();
        let mut has_one = vec![false; ports];
        let mut found = HashSet::new();
        for (_, slice, at) in first {
            for port in of_slice.get(slice).into_iter().flatten() {
                if has_one.get_mut(*port).is_some_and(|has_one| !std::mem::replace(has_one, true)) {
                    found.insert((slice, at));
                }
            }
        }
        found
    }

    /// All endpoints of one Service port, in any state, ordered by address and port. Where two slices have the same address and port, the
    /// endpoint that is not terminating wins.
    pub fn backends(&self, port_name: &str, protocol: Protocol) -> Vec<Backend<'a>> {
        let of_slice = |(slice, port): &(usize, u16)| {
            let port = *port;
            let endpoints = self.slices.get(*slice).into_iter().flatten();
            endpoints.map(move |endpoint| Backend { port, endpoint })
        };
        let mut found: Vec<_> = self.numbers(port_name, protocol).iter().flat_map(of_slice).collect();
        let place = |backend: &Backend<'_>| (backend.endpoint.addr, backend.port);
        // Stable: of equal ones the first slice's comes first.
        found.sort_by_key(place);
        found.dedup_by(|next, kept| {
            let is_same = place(next) == place(kept);
            if is_same && kept.endpoint.terminating && !next.endpoint.terminating {
                *kept = *next;
            }
            is_same
        });
        found
    }
}

/// The backends for traffic policy Cluster on `node` in `zone`: the ready ones, limited by topology hints where all ready ones
/// have them; if none is ready, the serving and terminating ones.
pub fn cluster_backends<'a>(all: &[Backend<'a>], node: &str, zone: Option<&str>) -> Vec<Backend<'a>> {
    let ready: Vec<_> = all.iter().filter(|b| b.endpoint.ready).copied().collect();
    if ready.is_empty() {
        return all.iter().filter(|b| b.endpoint.is_serving_terminating()).copied().collect();
    }
    let for_node = |b: &Backend<'_>| b.endpoint.hinted_nodes().iter().any(|n| **n == *node);
    if ready.iter().all(|b| !b.endpoint.hinted_nodes().is_empty()) && ready.iter().any(for_node) {
        return ready.into_iter().filter(for_node).collect();
    }
    let for_zone =
        |b: &Backend<'_>| zone.is_some_and(|zone| b.endpoint.hinted_zones().iter().any(|z| **z == *zone));
    if ready.iter().all(|b| !b.endpoint.hinted_zones().is_empty()) && ready.iter().any(for_zone) {
        return ready.into_iter().filter(for_zone).collect();
    }
    ready
}

/// The backends for traffic policy Local on `node`: its ready ones; if it has none, its serving and terminating ones.
pub fn local_backends<'a>(all: &[Backend<'a>], node: &str) -> Vec<Backend<'a>> {
    let on_node = |b: &&Backend<'_>| b.endpoint.is_on(node);
    let ready: Vec<_> = all.iter().filter(on_node).filter(|b| b.endpoint.ready).copied().collect();
    if ready.is_empty() {
        all.iter().filter(on_node).filter(|b| b.endpoint.is_serving_terminating()).copied().collect()
    } else {
        ready
    }
}

/// The number that `/healthz` on the health-check node port reports for `node`: distinct ready addresses of one family, over
/// all ports of the Service.
pub fn local_ready_count<'a>(
    slices: impl Iterator<Item = &'a EndpointSlice>,
    family: Family,
    node: &str,
) -> usize {
    slices
        .filter(|slice| slice.family == family)
        .flat_map(|slice| &slice.endpoints)
        .filter(|endpoint| endpoint.ready && endpoint.is_on(node))
        .map(|endpoint| endpoint.addr)
        .collect::<BTreeSet<_>>()
        .len()
}

#[cfg(test)]
mod tests;
