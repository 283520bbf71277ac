// SPDX-License-Identifier: Apache-2.0
//! The simulated cluster: its Services, on which nodes their endpoints are, and the edge's objects of it. Pure, and the same in each
//! run: what is random follows from a fixed seed.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::Duration;

use serde_json::{Value, json};

/// The health-check node port of the first Service.
const FIRST_PORT: u16 = 20_000;
/// The most Services: each has a port.
pub(crate) const MOST_SERVICES: u32 = 40_000;
/// The most nodes: their addresses are in one network of 16 bits.
pub(crate) const MOST_NODES: u32 = 60_000;
/// The port that Services listen on.
pub(crate) const LISTENER: u16 = 80;
/// Endpoints of most Services.
const ENDPOINTS: u32 = 3;
/// One Service in so many has [`TAIL_ENDPOINTS`].
const TAIL: u32 = 100;
const TAIL_ENDPOINTS: u32 = 100;
/// The set of all nodes.
pub(crate) const NODE_SET: &str = "all";
const FIRST_VIP: u32 = 0x0a40_0001;
const FIRST_NODE: u32 = 0x0a21_0100;
const FIRST_POD_NETWORK: u32 = 0x0a80_0000;

/// The network of the nodes' addresses.
pub(crate) const NODE_NETWORK: &str = "10.33.0.0/16";

/// An endpoint moves from one node to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub(crate) service: u32,
    pub(crate) from: u32,
    pub(crate) to: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    pub(crate) nodes: u32,
    /// The nodes with an endpoint of each Service: never two on one node.
    endpoints: Vec<BTreeSet<u32>>,
    random: Random,
}

impl Cluster {
    pub(crate) fn new(services: u32, nodes: u32) -> Self {
        let mut cluster = Self { nodes, endpoints: Vec::new(), random: Random(1) };
        for _ in 0..services {
            cluster.add_service();
        }
        cluster
    }

    /// With these endpoints.
    pub(crate) fn of(nodes: u32, endpoints: Vec<BTreeSet<u32>>) -> Self {
        Self { nodes, endpoints, random: Random(1) }
    }

    pub(crate) fn services(&self) -> u32 {
        u32::try_from(self.endpoints.len()).unwrap_or(u32::MAX)
    }

    /// The nodes with an endpoint of a Service.
    pub(crate) fn nodes_of(&self, service: u32) -> impl Iterator<Item = u32> {
        usize::try_from(service).ok().and_then(|at| self.endpoints.get(at)).into_iter().flatten().copied()
    }

    /// The addresses to which the edge has to forward a Service.
    pub(crate) fn addresses_of(&self, service: u32) -> BTreeSet<Ipv4Addr> {
        self.nodes_of(service).map(node_address).collect()
    }

    /// The Services with an endpoint on a node.
    pub(crate) fn services_of(&self, node: u32) -> Vec<u32> {
        (0..)
            .zip(&self.endpoints)
            .filter(|(_, nodes)| nodes.contains(&node))
            .map(|(service, _)| service)
            .collect()
    }

    /// Adds a Service with endpoints, and returns its number.
    pub(crate) fn add_service(&mut self) -> u32 {
        let service = self.services();
        let count = if service % TAIL == TAIL - 1 { TAIL_ENDPOINTS } else { ENDPOINTS }.min(self.nodes);
        let mut nodes = BTreeSet::new();
        while u32::try_from(nodes.len()).is_ok_and(|found| found < count) {
            nodes.insert(self.random.below(self.nodes));
        }
        self.endpoints.push(nodes);
        service
    }

    /// Moves an endpoint of a Service with few to a node that has none of it. `None` if all nodes have one.
    pub(crate) fn move_endpoint(&mut self) -> Option<Move> {
        let services = self.services();
        for _ in 0..1000 {
            let (service, to) = (self.random.below(services), self.random.below(self.nodes));
            let nodes = usize::try_from(service).ok().and_then(|at| self.endpoints.get_mut(at))?;
            if service % TAIL == TAIL - 1 || nodes.contains(&to) {
                continue;
            }
            let from = nodes.pop_first()?;
            nodes.insert(to);
            return Some(Move { service, from, to });
        }
        None
    }

    /// A node with at least one endpoint.
    pub(crate) fn busy_node(&mut self) -> Option<u32> {
        let service = self.random.below(self.services());
        self.nodes_of(service).next()
    }
}

/// splitmix64, whose numbers no version of a library changes.
#[derive(Clone, Debug)]
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let number = (mixed ^ (mixed >> 31)) % u64::from(limit.max(1));
        u32::try_from(number).unwrap_or(0)
    }
}

pub(crate) fn vip(service: u32) -> Ipv4Addr {
    Ipv4Addr::from(FIRST_VIP + service)
}

/// The Service of a VIP.
pub(crate) fn service_at(vip: Ipv4Addr) -> Option<u32> {
    u32::from(vip).checked_sub(FIRST_VIP)
}

pub(crate) fn node_address(node: u32) -> Ipv4Addr {
    Ipv4Addr::from(FIRST_NODE + node)
}

/// The node of an address.
pub(crate) fn node_at(address: Ipv4Addr) -> Option<u32> {
    u32::from(address).checked_sub(FIRST_NODE)
}

/// The Ethernet address of a node: each has its own, although one interface receives for all.
pub(crate) fn mac(node: u32) -> String {
    let [_, _, high, low] = node.to_be_bytes();
    format!("02:4e:00:00:{high:02x}:{low:02x}")
}

/// The health-check node port of a Service.
pub(crate) fn port(service: u32) -> u16 {
    FIRST_PORT + u16::try_from(service).unwrap_or(0)
}

pub(crate) fn object_name(service: u32) -> String {
    format!("lb-{service}")
}

/// The EdgeLoadBalancer of a Service of policy Local, with the controller's defaults but for the interval.
pub(crate) fn load_balancer(service: u32, interval: Duration) -> Value {
    let milliseconds = u64::try_from(interval.as_millis()).unwrap_or(u64::MAX);
    json!({
        "apiVersion": "steerage.dev/v1alpha1", "kind": "EdgeLoadBalancer",
        "metadata": { "name": object_name(service), "uid": format!("u-{service}"), "generation": 1 },
        "spec": {
            "service": { "namespace": "default", "name": format!("s-{service}"), "uid": format!("s-{service}") },
            "addresses": [vip(service)],
            "listeners": [{ "protocol": "TCP", "port": LISTENER }],
            "healthCheck": {
                "protocol": "HTTP", "port": port(service), "path": "/healthz",
                "intervalMilliseconds": milliseconds, "timeoutMilliseconds": (milliseconds * 4 / 5).min(5000),
                "healthyThreshold": 2, "unhealthyThreshold": 2,
            },
            "nodeSet": NODE_SET,
        },
    })
}

/// The EdgeNodeSet of all nodes.
pub(crate) fn node_set(nodes: u32) -> Value {
    let target = |node: u32| {
        json!({
            "node": format!("node-{node:05}"), "weight": 1, "addresses": [node_address(node)],
            "podCidrs": [format!("{}/24", Ipv4Addr::from(FIRST_POD_NETWORK + node * 256))],
        })
    };
    json!({
        "apiVersion": "steerage.dev/v1alpha1", "kind": "EdgeNodeSet",
        "metadata": { "name": NODE_SET, "uid": "u-set", "generation": 1 },
        "spec": { "targets": (0..nodes).map(target).collect::<Vec<_>>() },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_have_few_endpoints_and_one_in_a_hundred_many() {
        let cluster = Cluster::new(200, 500);
        let counts: Vec<_> = (0..200).map(|service| cluster.nodes_of(service).count()).collect();
        assert_eq!(counts.iter().filter(|count| **count == 100).count(), 2);
        assert_eq!(counts.iter().filter(|count| **count == 3).count(), 198);
        assert_eq!(Cluster::new(1, 2).nodes_of(0).count(), 2, "no more than nodes");
    }

    #[test]
    fn run_after_run_is_the_same_and_nodes_differ() {
        let nodes =
            |cluster: &Cluster| (0..100).map(|service| cluster.addresses_of(service)).collect::<Vec<_>>();
        let (first, second) = (nodes(&Cluster::new(100, 1000)), nodes(&Cluster::new(100, 1000)));
        assert_eq!(first, second);
        let different: BTreeSet<_> = first.iter().take(99).flatten().collect();
        assert!(different.len() > 200, "{}", different.len());
    }

    #[test]
    fn endpoint_moves_to_a_node_without_one() {
        let mut cluster = Cluster::new(100, 10);
        for _ in 0..100 {
            let before = cluster.clone();
            let Move { service, from, to } = cluster.move_endpoint().unwrap();
            let mut expected: BTreeSet<_> = before.nodes_of(service).collect();
            assert!(expected.remove(&from) && expected.insert(to), "{service} {from} {to}");
            assert_eq!(cluster.nodes_of(service).collect::<BTreeSet<_>>(), expected);
            assert!(
                cluster.services_of(to).contains(&service) && !cluster.services_of(from).contains(&service)
            );
        }
        assert!(Cluster::new(3, 3).move_endpoint().is_none());
    }

    #[test]
    fn addresses_are_found_again() {
        for node in [0, 255, 256, MOST_NODES - 1] {
            assert_eq!(node_at(node_address(node)), Some(node));
        }
        assert_eq!(mac(258), "02:4e:00:00:01:02");
        assert_eq!(port(MOST_SERVICES - 1), 59_999);
        assert_eq!(node_address(MOST_NODES - 1).octets()[..2], [10, 33]);
    }
}
