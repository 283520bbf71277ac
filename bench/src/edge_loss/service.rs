// SPDX-License-Identifier: Apache-2.0
//! The Service that is measured, as the edge's objects say it. Pure: `world` writes the objects, and `events` change the Service.

use serde_json::{Value, json};

use super::servers::OWN_CHECK;
use crate::edge_bed::addresses::{node_address, vip};
use crate::edge_bed::{CHECK, FAMILIES, PORT};

/// Its number among the Services: its VIPs are those of this number.
pub(super) const SERVICE: u32 = 0;
/// The name of the set of all nodes.
const NODE_SET: &str = "all";

/// How its targets are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Steering {
    /// By a list of nodes, whose service proxies are probed: `api`, under either policy.
    List,
    /// All nodes are registered, and the Service's own check decides: `health-check`, policy Local.
    OwnCheck,
    /// All nodes are registered and serve: policy Cluster.
    AllNodes,
}

/// What the Service's object says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Service {
    pub(super) steering: Steering,
    /// The nodes with an endpoint, and their weights.
    pub(super) nodes: Vec<(u8, u32)>,
    /// A node that drains.
    pub(super) draining: Option<u8>,
    pub(super) interval_milliseconds: u32,
    pub(super) generation: u32,
}

impl Service {
    /// With endpoints on so many nodes, by a list.
    pub(super) fn new(nodes: u8) -> Self {
        Self {
            steering: Steering::List,
            nodes: (0..nodes).map(|node| (node, 1)).collect(),
            draining: None,
            interval_milliseconds: 500,
            generation: 1,
        }
    }

    /// The same with endpoints on so many nodes, by a list.
    pub(super) fn begin(&mut self, nodes: u8) {
        *self = Self { generation: self.generation, ..Self::new(nodes) };
    }

    /// The nodes with an endpoint.
    pub(super) fn endpoints(&self) -> Vec<u8> {
        self.nodes.iter().map(|(node, _)| *node).collect()
    }

    /// Adds a node without an endpoint, of `all`, that got one last or never.
    pub(super) fn add(&mut self, all: u8) {
        let after = self.nodes.iter().map(|(node, _)| *node).max().map_or(0, |last| last + 1);
        let free =
            (after..all).chain(0..after).find(|node| self.nodes.iter().all(|(other, _)| other != node));
        self.nodes.extend(free.map(|node| (node, 1)));
    }

    /// Removes the node that has had its endpoint for the longest time.
    pub(super) fn remove(&mut self) {
        if !self.nodes.is_empty() {
            self.nodes.remove(0);
        }
    }

    /// Its object, for the next generation.
    pub(super) fn object(&mut self) -> Value {
        self.generation += 1;
        let (port, path) = match self.steering {
            Steering::OwnCheck => (OWN_CHECK, "/"),
            Steering::List | Steering::AllNodes => (CHECK, "/healthz"),
        };
        let mut spec = json!({
            "service": { "namespace": "default", "name": "measured", "uid": "s-measured" },
            "addresses": FAMILIES.map(|family| vip(family, SERVICE)),
            "listeners": [{ "protocol": "TCP", "port": PORT }, { "protocol": "UDP", "port": PORT }],
            "healthCheck": {
                "protocol": "HTTP", "port": port, "path": path, "intervalMilliseconds": self.interval_milliseconds,
                "timeoutMilliseconds": 1000, "healthyThreshold": 1, "unhealthyThreshold": 2,
            },
        });
        if self.steering == Steering::List {
            let targets = |drains: bool| {
                let drains_now = |node: u8| self.draining == Some(node);
                let nodes = self.nodes.iter().filter(|(node, _)| drains_now(*node) == drains);
                nodes.map(|(node, weight)| target(*node, *weight)).collect::<Vec<_>>()
            };
            let mut draining = targets(true);
            for target in &mut draining {
                target["drainReason"] = json!("cordoned");
            }
            (spec["targets"], spec["draining"]) = (json!(targets(false)), json!(draining));
        } else {
            spec["nodeSet"] = json!(NODE_SET);
        }
        json!({
            "apiVersion": "steerage.dev/v1alpha1", "kind": "EdgeLoadBalancer",
            "metadata": { "name": "measured", "uid": "u-measured", "generation": self.generation },
            "spec": spec,
        })
    }
}

/// The set of so many nodes.
pub(super) fn node_set(nodes: u8) -> Value {
    let targets: Vec<_> = (0..nodes).map(|node| target(node, 1)).collect();
    json!({
        "apiVersion": "steerage.dev/v1alpha1", "kind": "EdgeNodeSet",
        "metadata": { "name": NODE_SET, "uid": "u-all", "generation": 1 },
        "spec": { "targets": targets },
    })
}

fn target(node: u8, weight: u32) -> Value {
    json!({
        "node": format!("node{node}"), "weight": weight,
        "addresses": FAMILIES.map(|family| node_address(family, node)),
    })
}

#[cfg(test)]
mod tests {
    use steerage_edge_api::{EdgeLoadBalancer, EdgeNodeSet};

    use super::*;

    #[test]
    fn objects_are_what_the_edge_reads() {
        let mut service = Service::new(3);
        service.draining = Some(1);
        let read: EdgeLoadBalancer = serde_json::from_value(service.object()).expect("an object");
        assert_eq!((read.spec.targets.len(), read.spec.draining.len()), (2, 1));
        assert_eq!(read.spec.draining[0].drain_reason, "cordoned");
        service.steering = Steering::OwnCheck;
        let next: EdgeLoadBalancer = serde_json::from_value(service.object()).expect("an object");
        assert!(next.metadata.generation > read.metadata.generation);
        assert_eq!((next.spec.node_set.as_deref(), next.spec.targets.len()), (Some(NODE_SET), 0));
        let set: EdgeNodeSet = serde_json::from_value(node_set(12)).expect("an object");
        assert_eq!(set.spec.targets.len(), 12);
    }

    #[test]
    fn endpoints_come_and_go_in_turn() {
        let mut service = Service::new(3);
        service.add(4);
        service.remove();
        assert_eq!(service.endpoints(), [1, 2, 3]);
        service.add(4);
        assert_eq!(service.endpoints(), [1, 2, 3, 0]);
        service.add(4);
        assert_eq!(service.endpoints(), [1, 2, 3, 0], "there is no other node");
    }
}
