// SPDX-License-Identifier: Apache-2.0
//! The cluster's objects: a pool, nodes, and a Service of policy Local with its EndpointSlice for each cell.

use serde_json::{Value, json};
use std::net::Ipv4Addr;

use super::cell::Cell;
use crate::controller::memory::MemoryServer;
use crate::edge_nodes::cluster::{node_address, port, vip};

/// The network of the VIPs.
pub(super) const VIPS: &str = "10.64.0.0/16";
/// The port that Services listen on.
pub(super) const LISTENER: u16 = 80;
const NAMESPACE: &str = "default";
const FIRST_CLUSTER_IP: u32 = 0x0a60_0001;

/// Puts everything, with the endpoint of each Service on its first node.
pub(super) fn put_all(server: &MemoryServer, cells: &[Cell]) {
    server.put("addresspools", "bench", pool());
    for cell in cells {
        for number in cell.nodes() {
            server.put("nodes", &node_name(number), node(*cell, number));
        }
        put_endpoints(server, *cell, &cell.nodes()[..1]);
        server.put("services", &service_name(*cell), service(*cell));
    }
}

/// Puts the EndpointSlice of a Service with an endpoint on each of these nodes.
pub(super) fn put_endpoints(server: &MemoryServer, cell: Cell, nodes: &[u32]) {
    server.put("endpointslices", &service_name(cell), slice(cell, nodes));
}

fn service_name(cell: Cell) -> String {
    format!("s{}", cell.service)
}

fn node_name(number: u32) -> String {
    format!("node-{number:03}")
}

fn pool() -> Value {
    json!({
        "apiVersion": "steerage.dev/v1alpha1", "kind": "AddressPool",
        "metadata": { "name": "bench" }, "spec": { "addresses": [VIPS] },
    })
}

/// Labelled for its Service, which has no other targets: probes of all nodes for all Services would be most of what is measured.
fn node(cell: Cell, number: u32) -> Value {
    let name = node_name(number);
    let cidr = format!("{}/26", Ipv4Addr::from(0x0ac0_0000 + number * 64));
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {
            "name": name, "uid": format!("uid-{name}"), "labels": { "bench": service_name(cell) },
        },
        "spec": { "podCIDR": cidr, "podCIDRs": [cidr] },
        "status": { "addresses": [{ "type": "InternalIP", "address": node_address(number) }] },
    })
}

fn service(cell: Cell) -> Value {
    let name = service_name(cell);
    let cluster_ip = Ipv4Addr::from(FIRST_CLUSTER_IP + cell.service);
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": name, "namespace": NAMESPACE, "uid": format!("uid-{name}"),
            "annotations": {
                "steerage.dev/steering": cell.signal.steering(),
                "steerage.dev/target-node-labels": format!("bench={name}"),
                "steerage.dev/addresses": vip(cell.service).to_string(),
                "steerage.dev/health-check-interval": format!("{}ms", cell.interval.as_millis()),
                "steerage.dev/health-check-healthy-threshold": "1",
                "steerage.dev/health-check-unhealthy-threshold": cell.threshold.to_string(),
            },
        },
        "spec": {
            "type": "LoadBalancer", "loadBalancerClass": "steerage.dev/edge",
            "externalTrafficPolicy": "Local", "allocateLoadBalancerNodePorts": false,
            "ports": [{ "port": LISTENER, "targetPort": 8080, "protocol": "UDP" }],
            "clusterIP": cluster_ip, "clusterIPs": [cluster_ip], "ipFamilies": ["IPv4"],
            "healthCheckNodePort": port(cell.service),
        },
        "status": { "loadBalancer": {} },
    })
}

fn slice(cell: Cell, nodes: &[u32]) -> Value {
    let name = service_name(cell);
    let endpoint = |number: &u32| {
        json!({
            "addresses": [Ipv4Addr::from(0x0ac0_0001 + number * 64)], "nodeName": node_name(*number),
            "conditions": { "ready": true, "serving": true },
        })
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": name, "namespace": NAMESPACE, "labels": { "kubernetes.io/service-name": name },
        },
        "addressType": "IPv4", "ports": [{ "name": "", "port": 8080, "protocol": "UDP" }],
        "endpoints": nodes.iter().map(endpoint).collect::<Value>(),
    })
}
