// SPDX-License-Identifier: Apache-2.0
//! The objects of the controller's benchmark, as JSON. Pure functions of numbers.

use std::net::Ipv4Addr;

use serde_json::{Value, json};

/// Name of a Service and of its EndpointSlice.
pub(super) fn service_name(number: u32) -> String {
    format!("s{number}")
}

/// Name of a node.
pub(super) fn node_name(number: u32) -> String {
    format!("node-{number}")
}

/// Every other Service has api steering: its targets are its own.
pub(super) fn is_by_api(number: u32) -> bool {
    number.is_multiple_of(2)
}

pub(super) fn service(number: u32) -> Value {
    let steering = if is_by_api(number) { "api" } else { "health-check" };
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": service_name(number), "annotations": {"steerage.dev/steering": steering}},
        "spec": {
            "type": "LoadBalancer", "loadBalancerClass": "steerage.dev/edge",
            "externalTrafficPolicy": "Local", "allocateLoadBalancerNodePorts": false,
            "ports": [{"port": 80, "targetPort": 8080}],
        },
    })
}

/// The same Service for a controller that serves those without a class.
pub(super) fn unclassed(mut service: Value) -> Value {
    if let Some(spec) = service["spec"].as_object_mut() {
        spec.remove("loadBalancerClass");
    }
    service
}

/// The nodes of a Service's endpoints after a number of moves: each move takes the next nodes.
pub(super) fn endpoint_nodes(service: u32, moves: u32, endpoints: u32, nodes: u32) -> Vec<String> {
    let first = u64::from(service) * 7 + u64::from(moves) * u64::from(endpoints);
    let nodes = u64::from(nodes);
    let mut names: Vec<String> = (first..first + u64::from(endpoints))
        .map(|number| node_name(u32::try_from(number % nodes).unwrap_or_default()))
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Endpoints on these nodes.
pub(super) fn endpoints(service: u32, nodes: &[String]) -> Value {
    let endpoint = |(index, node): (usize, &String)| {
        let address = Ipv4Addr::from(0x0a80_0000 + service * 64 + u32::try_from(index).unwrap_or_default());
        json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true, "serving": true}})
    };
    nodes.iter().enumerate().map(endpoint).collect()
}

pub(super) fn slice(service: u32, nodes: &[String]) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": service_name(service), "labels": {"kubernetes.io/service-name": service_name(service)}},
        "addressType": "IPv4", "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
        "endpoints": endpoints(service, nodes),
    })
}

pub(super) fn node(number: u32) -> Value {
    let cidr = format!("{}/26", Ipv4Addr::from(0x0ac0_0000 + number * 64));
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": node_name(number)},
        "spec": {"podCIDR": cidr, "podCIDRs": [cidr]},
    })
}

pub(super) fn node_status(number: u32) -> Value {
    let address = Ipv4Addr::from(0x0a40_0000 + number);
    json!({"status": {"addresses": [{"type": "InternalIP", "address": address}]}})
}

/// A node with its status.
pub(super) fn whole_node(number: u32) -> Value {
    let mut node = node(number);
    node["metadata"]["uid"] = json!(format!("uid-{}", node_name(number)));
    node["status"] = node_status(number)["status"].take();
    node
}

/// UID of a Service that no API server has created.
pub(super) fn service_uid(number: u32) -> String {
    format!("uid-{}", service_name(number))
}

/// A Service with what an API server allocates.
pub(super) fn allocated_service(number: u32) -> Value {
    let mut service = service(number);
    service["metadata"]["namespace"] = json!("default");
    service["metadata"]["uid"] = json!(service_uid(number));
    let address = Ipv4Addr::from(0x0a60_0000 + number + 1);
    service["spec"]["clusterIP"] = json!(address);
    service["spec"]["clusterIPs"] = json!([address]);
    service["spec"]["ipFamilies"] = json!(["IPv4"]);
    service["spec"]["healthCheckNodePort"] = json!(11_000 + number);
    service["status"] = json!({"loadBalancer": {}});
    service
}

/// A slice with its namespace.
pub(super) fn named_slice(service: u32, nodes: &[String]) -> Value {
    let mut slice = slice(service, nodes);
    slice["metadata"]["namespace"] = json!("default");
    slice
}

/// One pool for all Services.
pub(super) fn pool() -> Value {
    json!({
        "apiVersion": "steerage.dev/v1alpha1", "kind": "AddressPool",
        "metadata": {"name": "bench"}, "spec": {"addresses": ["10.16.0.0/15"]},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_takes_other_nodes() {
        let before = endpoint_nodes(3, 0, 10, 200);
        let after = endpoint_nodes(3, 1, 10, 200);
        assert_eq!((before.len(), after.len()), (10, 10));
        assert!(before.iter().all(|node| !after.contains(node)));
        assert_eq!(endpoint_nodes(0, 0, 10, 4).len(), 4, "more endpoints than nodes");
    }
}
