// SPDX-License-Identifier: Apache-2.0
//! The objects in the API server, as JSON. Pure.

use std::net::Ipv4Addr;

use serde_json::{Value, json};

/// The cluster's name at both programs.
pub(super) const CLUSTER: &str = "bench";
pub(super) const REGION: &str = "us-east-1";

/// Keeps a node from all load balancers.
pub(super) const EXCLUDE: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

/// Name of a Service and of its EndpointSlice.
pub(super) fn service_name(number: u32) -> String {
    format!("web-{number}")
}

/// Both programs read it the same way: a network load balancer, reachable inside the VPC only.
pub(super) fn service(number: u32) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": service_name(number),
            "annotations": {
                "service.beta.kubernetes.io/aws-load-balancer-type": "nlb",
                "service.beta.kubernetes.io/aws-load-balancer-internal": "true",
            },
        },
        "spec": {
            "type": "LoadBalancer", "externalTrafficPolicy": "Local", "selector": {"app": service_name(number)},
            "ports": [{"port": 80, "targetPort": 8080}],
        },
    })
}

/// One endpoint, on this node.
pub(super) fn slice(number: u32, node: &str) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": service_name(number), "labels": {"kubernetes.io/service-name": service_name(number)},
        },
        "addressType": "IPv4", "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
        "endpoints": endpoints(number, node),
    })
}

pub(super) fn endpoints(number: u32, node: &str) -> Value {
    let address = Ipv4Addr::from(0x0a80_0000 + number);
    json!([{"addresses": [address], "nodeName": node, "conditions": {"ready": true, "serving": true}}])
}

/// A node that is an instance.
pub(super) fn node(name: &str, instance: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
        "spec": {"providerID": format!("aws:///us-east-1a/{instance}")},
    })
}

pub(super) fn node_status(address: Ipv4Addr) -> Value {
    json!({"status": {
        "addresses": [{"type": "InternalIP", "address": address}],
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
    }})
}
